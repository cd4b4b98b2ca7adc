"""The default linear solver: direct where that is affordable or the matrix is sparse, Krylov otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator, preconditioned, repeated
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.dense import SINGULAR
from implicitkit.linear.factors.direct import MANY, DirectSolver
from implicitkit.linear.factors.lu import LU
from implicitkit.linear.factors.sparse import is_near, solve_with
from implicitkit.linear.iterative.cg import CG
from implicitkit.linear.iterative.contraction import Contraction
from implicitkit.linear.iterative.cycles import tolerance
from implicitkit.linear.iterative.frugal import Frugal
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.linear.iterative.symmetry import Unsaid
from implicitkit.linear.price import price_of_dense_like

_FEW = 64  # unknowns up to which a dense matrix is the first choice whatever it costs
_FEWEST, _SAMPLES = 12, 1000  # unknowns, of so many samples: dense factors cost less than twenty products of any
_WORK = 3e7  # batch * n * (n + numbers in one evaluation): above it a Krylov method is tried before a dense matrix
_SMALL = 32  # ... and of a fixed-point map, whose systems take few products
_NUMBERS = 1 << 27  # numbers in all dense matrices, at most
_LONG = 5000  # products of a fixed-point map's, at most, before factors that would cost more
_FIRST = 120  # products of a Krylov method before a direct one, where there is one to turn to
_STALE = 12  # products with the factors of a matrix nearby before they are given up
_COLOURS = 24  # products side by side that cost no more than refinement by the factors of a matrix roughly like this
_NEAR = 0.3  # of a right-hand side that refinement with them may leave, at most, before they are
_WORTH = 20.0  # products that factors must cost for a Krylov method to be tried before them
_DENSE_TRIAL = 2.0  # times the price of dense factors, which is their least: in a batch they cost twice as much
_SERIES = 2.0  # terms of a series of products in the time of one step of GMRES
_ALONE = 64  # right-hand sides for which a matrix is factored whatever a Krylov method might do for each
_EACH = 10  # products that one right-hand side takes of a Krylov method, or of refinement, at least
_FLOPS = 1.5e4  # n^2 over this: right-hand sides whose Krylov spaces cost as much as one dense factorisation


@register_linear_solver("auto")
@dataclass(frozen=True)
class Auto(DirectSolver):
    """Chooses by cost and structure how ``A x = b`` is solved.

    0. The inverse, where the problem knows it (a trajectory, step by step).
    1. Factors of the very matrix, or of one nearby (the solver's last Jacobian), if there are any: refinement, or GMRES
       with them as preconditioner.  (Those of ``R'R``, of a fit, unless its sparse Hessian takes 24 products or fewer.)
    2. A preconditioner, if the user gave one, with ``gmres``.  What it cannot do is left to the others:
    3. ``gmres`` where factors would cost twenty products or more, for as long as they do, dense ones twice as long
       (:mod:`implicitkit.linear.iterative.frugal`); not of fixed-point maps, nor where the problem knows that factors are
       wanted (an implicit method's steps).  Where all samples have one matrix, as one product shows, they cost those of one.
    4. ``lu`` where forming the dense blocks is cheap: few unknowns, or a cheap function; or where 3 has found it so.
    5. ``sparse_lu`` where the matrix has a sparsity pattern.  (4 for many unknowns, and 5, of a fixed-point map only after 6
       has failed: there ``I - J`` is seldom ill-conditioned, and few products do.)
    6. ``cg`` for symmetric matrices and ``gmres``; ``cg`` goes on for that where its vectors show that a matrix is symmetric
       and definite (:mod:`implicitkit.linear.iterative.symmetry`); of fewer products where a direct method can take over.
    7. What these could not do: ``sparse_lu``, then ``lu`` while the blocks fit into memory (1 GB).

    Source: the order is this library's, measured (``benchmarks/bench_large.py``).

    Args:
        dense_size: the largest ``n`` for which a dense matrix is formed.
    """

    preconditions: ClassVar[bool] = True
    dense_size: int = 8192

    def __post_init__(self) -> None:
        check_options(self, dense_size=at_least(0))

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        limits: dict[str, Any] = {"rtol": rtol, "atol": atol}
        state = _Progress(b)
        if getattr(A.near, "exact", False) and state.add(_inverted(A, b, **limits)).done:
            return state.answer()
        if A.exact is not None and state.add(LU(A.size).solve_many(A, b, max_steps=None, **limits)).done:
            return state.answer()
        cheap = self._is_cheap(A, len(b))
        asked = A.preconditioner is not None
        few = cheap and A.size <= _FEWEST and A.batch <= _SAMPLES  # then no graph need be looked at
        untried = few or A.fixed_point or asked or A.known is not None or A.wants_factors
        worth = 0.0 if untried else self._worth(A) / len(b)
        cheap = cheap or (0 < worth < _WORTH and A.price() is None)
        if A.known is None and not asked and cheap and A.size <= _FEW and worth < _WORTH:
            return state.add(_FEW_LU.solve_many(A, state.open_part(), max_steps=None, **limits)).answer()
        alone = len(b) >= _ALONE and len(b) * _ALONE >= A.size
        spared = getattr(A.known, "rough", False) and self._has_few_colours(A)
        if spared:  # before there are others
            A.known.let_go()
        anew = len(b) > MANY and not asked and (cheap or A.sparse() is not None) and not is_near(A, A.known)
        if A.known is not None and not anew and not spared:
            state.add(_nearby(A, b, **limits))
        if not state.done and asked:
            state.add(GMRES().solve_many(A, state.open_part(), max_steps=max_steps or _FIRST, **limits))
        if worth >= _WORTH and not alone:
            trial = Frugal(worth, times=1.0 if A.price() is not None else _DENSE_TRIAL)
            state.add(trial.solve_many(A, state.open_part(), max_steps=max_steps, **limits))
        if not state.done and (not A.fixed_point or alone) and A.sparse() is not None:
            state.add(solve_with(A.sparse(), A, state.open_part(), **limits))
            if A.told_singular and state.singular:
                return state.answer()
        dear = worth >= _WORTH and self._is_affordable(A)  # and no Krylov method costs less
        if not state.done and (cheap or dear):
            state.add(LU(self.dense_size).solve_many(A, state.open_part(), max_steps=None, **limits))
            if state.done or (cheap and not A.fixed_point):
                return state.answer()
        affordable = not (cheap or dear) and self._is_affordable(A)
        fewer = _FIRST if affordable or A.fixed_point else None
        if A.fixed_point and not (state.done or affordable or alone):  # as long as they cost less than factors
            price = A.price()
            fewer = _FIRST if price is None else max(_FIRST, min(int(price.factors), _LONG))
        if not state.done:
            state.add(self._krylov(A, state.open_part(), max_steps=max_steps or fewer, **limits))
        if not state.done and A.fixed_point and not alone and A.sparse() is not None:
            state.add(solve_with(A.sparse(), A, state.open_part(), **limits))
            if A.told_singular and state.singular:
                return state.answer()
        if not state.done and affordable:
            state.add(LU(self.dense_size).solve_many(A, state.open_part(), max_steps=None, **limits))
        elif not state.done and fewer is not None and max_steps is None:
            state.add(self._krylov(A, state.open_part(), max_steps=None, **limits))
        return state.answer()

    def _worth(self, A: Operator) -> float:
        """How many products factors cost; 0 where there are none to be had."""
        price = A.price()
        if price is None and not self._is_affordable(A):
            return 0.0
        found = self._dense_price(A) if price is None else price.factors
        if found < _WORTH or not A.alike():
            return found
        return self._dense_price(A, A.batch) if price is None else A.price(A.batch).factors

    @staticmethod
    def _dense_price(A: Operator, alike: int = 1) -> float:
        """How many steps of the Krylov method for it dense factors cost, where so many samples have one matrix."""
        return price_of_dense_like(A, alike, conjugate=A.symmetric).factors

    @staticmethod
    def _has_few_colours(A: Operator) -> bool:
        """Does the sparse matrix take fewer products, side by side, than refinement with factors of another?"""
        price = A.price()
        return price is not None and price.products <= _COLOURS

    def _is_affordable(self, A: Operator) -> bool:
        """May dense blocks be formed?"""
        return A.size <= self.dense_size and A.batch * A.size**2 <= _NUMBERS

    def _is_cheap(self, A: Operator, count: int) -> bool:
        """Do dense blocks cost little, or less than a Krylov method for ``count`` right-hand sides?"""
        work = A.batch * A.size * (A.size + A.weight)
        few = A.size <= (_SMALL if A.fixed_point else _FEW)
        if few and work <= 8 * _WORK:
            return True
        if work <= _WORK and (not A.fixed_point or _SERIES * self._dense_price(A) < _WORTH):
            return True
        return self._is_affordable(A) and count * _EACH >= A.size and count * _FLOPS >= A.size**2

    def _krylov(self, A: Operator, b: Tensor, **limits: Any) -> LinearSolution:
        if not A.symmetric:
            plain = A.fixed_point and A.preconditioner is None
            said = Unsaid() if A.preconditioner is None and A.near is None else GMRES()
            return (Contraction() if plain else said).solve_many(A, b, **limits)
        progress = _Progress(b).add(CG().solve_many(A, b, **limits))
        return (
            progress if progress.done else progress.add(GMRES().solve_many(A, progress.open_part(), **limits))
        ).answer()


_FEW_LU = LU()  # made once: its options are checked, which takes as long as factors of a few unknowns


def _inverted(A: Operator, b: Tensor, *, rtol: float, atol: float) -> LinearSolution:
    """By the inverse that the problem knows, judged by a product."""
    k = len(b)
    x = A.near.solve(b[0]) if k == 1 else A.near.solve(b.permute(1, 2, 0)).permute(2, 0, 1).flatten(0, 1)
    many, b = A if k == 1 else repeated(A, k), b.flatten(0, 1)
    left = torch.linalg.vector_norm(b - many.mv(x), dim=1)
    done = left <= tolerance(b, rtol, atol)
    return LinearSolution(x, left, torch.ones_like(left, dtype=torch.int64), done, "the inverse is not accurate")


def _nearby(A: Operator, b: Tensor, *, rtol: float, atol: float) -> LinearSolution:
    """With factors of a matrix nearby: refinement, and where that is slow GMRES preconditioned by them, for what is left."""
    k, known = len(b), A.known
    found = solve_with(known, A, b, rtol=rtol, atol=atol)
    size = torch.linalg.vector_norm(b.flatten(0, 1), dim=1)
    near = ~found.converged & (found.residual_norm <= _NEAR * size)
    if not bool(near.any()):
        return found
    many = A if k == 1 else repeated(A, k)

    def inverse(v: Tensor) -> Tensor:
        x = known.solve(v.unflatten(0, (k, -1)).permute(1, 2, 0))
        return torch.nan_to_num(x.permute(2, 0, 1).flatten(0, 1))

    x = torch.where(near.unsqueeze(1), found.x, 0)
    rest = torch.where(near.unsqueeze(1), b.flatten(0, 1) - many.mv(x), 0)
    left = torch.where(near, rtol * size / found.residual_norm, rtol)
    answer = GMRES(restart=_STALE).solve(preconditioned(many, inverse), rest, rtol=left, atol=atol, max_steps=_STALE)
    answer = answer._replace(x=x + inverse(answer.x), converged=answer.converged & near)  # the others asked for nothing
    answer = answer._replace(residual_norm=torch.where(near, answer.residual_norm, torch.inf))
    return _Progress(b).add(found).add(answer).answer()


class _Progress:
    """What several methods in turn have solved of ``(k, batch, n)`` right-hand sides."""

    def __init__(self, b: Tensor) -> None:
        self.b, self.shape = b.flatten(0, 1), b.shape
        self.total: LinearSolution | None = None
        self.done = False  # is everything solved?

    def open_part(self) -> Tensor:
        """The right-hand sides, zero where they are solved."""
        if self.total is None:
            return self.b.unflatten(0, self.shape[:2])
        return torch.where(self.total.converged.unsqueeze(1), 0, self.b).unflatten(0, self.shape[:2])

    def add(self, found: LinearSolution) -> _Progress:
        """Take over what ``found`` has solved, or come nearer to."""
        old = self.total
        if old is None:
            self.total, self.done = found, bool(found.converged.all())
            return self
        kept = old.converged | (~found.converged & ~(found.residual_norm < old.residual_norm))
        self.total = LinearSolution(
            torch.where(kept.unsqueeze(1), old.x, found.x),
            torch.where(kept, old.residual_norm, found.residual_norm),
            old.steps + torch.where(old.converged, 0, found.steps),
            old.converged | found.converged,
            found.reason,
        )
        self.done = bool(self.total.converged.all())
        return self

    @property
    def singular(self) -> bool:
        """Were the last factors those of a singular matrix?"""
        return not self.done and self.total is not None and self.total.reason == SINGULAR

    def answer(self) -> LinearSolution:
        """The whole."""
        assert self.total is not None
        return self.total
