"""The default linear solver: direct where that is affordable or the matrix is sparse, Krylov otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.lazily import lazily
from implicitkit.foundation.operators import Operator, preconditioned, repeated
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.dense import SINGULAR
from implicitkit.linear.factors.direct import MANY, DirectSolver
from implicitkit.linear.factors.lu import LU
from implicitkit.linear.factors.sparse import DIGITS, SWEEPS, is_near, solve_with
from implicitkit.linear.iterative.cg import CG
from implicitkit.linear.iterative.contraction import Contraction
from implicitkit.linear.iterative.cycles import tolerance
from implicitkit.linear.iterative.frugal import Frugal
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.linear.iterative.symmetry import Unsaid
from implicitkit.linear.price import Price, price_of, price_of_dense_like

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
       with them as preconditioner.  (Those of ``R'R``, of a fit, unless its sparse Hessian takes 24 products or fewer,
       and more have to be refined by than its own factors cost.)
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
        return _InTurn(A, b, self.dense_size, max_steps, {"rtol": rtol, "atol": atol}).answer()


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


class _InTurn:
    """One system, and the methods whose turn it is, one after another, at what those before have left.

    A turn is true where none need follow: all is solved, or no other could do more.

    Attributes:
        asked: has the user given a preconditioner? alone: are right-hand sides so many that the matrix is factored whatever
            a Krylov method might do for each? affordable: may dense blocks be formed? little: do they cost little, or less
            than a Krylov method for so many right-hand sides? progress: what is solved so far.
    """

    def __init__(self, A: Operator, b: Tensor, dense_size: int, max_steps: int | None, limits: dict[str, Any]) -> None:
        self.A, self.b, self.dense_size, self.max_steps, self.limits = A, b, dense_size, max_steps, limits
        self.progress = _Progress(b)
        self.asked = A.preconditioner is not None
        self.alone = len(b) >= _ALONE and len(b) * _ALONE >= A.size
        self.affordable = A.size <= dense_size and A.batch * A.size**2 <= _NUMBERS
        self.little = self._costs_little()

    def answer(self) -> LinearSolution:
        """What they have found."""
        turns = (self._inverse, self._dense_of_few, self._known, self._preconditioned, self._trial, self._sparse)
        for turn in (*turns, self._dense, self._krylov, self._last):
            if turn():
                break
        return self.progress.answer()

    def _by(self, method: LinearSolver, max_steps: int | None = None) -> bool:
        """Is all solved, after a method has had its turn?"""
        found = method.solve_many(self.A, self.progress.open_part(), max_steps=max_steps, **self.limits)
        return self.progress.add(found).done

    # ------------------------------------------------------------------------------------------------ what is known of it
    def _costs_little(self) -> bool:
        A, count = self.A, len(self.b)
        work = A.batch * A.size * (A.size + A.weight)
        if A.size <= (_SMALL if A.fixed_point else _FEW) and work <= 8 * _WORK:
            return True
        if work <= _WORK and (not A.fixed_point or _SERIES * _dense_price(A) < _WORTH):
            return True
        return self.affordable and count * _EACH >= A.size and count * _FLOPS >= A.size**2

    @lazily
    def worth(self) -> float:
        """How many products factors cost, for each right-hand side; 0 where no Krylov method need be tried before them."""
        A = self.A
        few = A.size <= _FEWEST and A.batch <= _SAMPLES and self.little  # then no graph need be looked at
        if few or A.fixed_point or self.asked or A.known is not None or A.wants_factors:
            return 0.0
        price = A.price()
        if price is None and not self.affordable:
            return 0.0
        found = _dense_price(A) if price is None else price.factors
        if found >= _WORTH and A.alike():
            found = _dense_price(A, A.batch) if price is None else A.price(A.batch).factors
        return found / len(self.b)

    @lazily
    def cheap(self) -> bool:
        """Are dense factors the first choice?"""
        return self.little or (0 < self.worth < _WORTH and self.A.price() is None)

    @lazily
    def dear(self) -> bool:
        """Are dense factors the choice although they cost many products, since no Krylov method costs less?"""
        return self.worth >= _WORTH and self.affordable

    @lazily
    def patience(self) -> int | None:
        """Products of a Krylov method before another is tried; ``None``: there is no other.  Of a fixed-point map's, as long
        as they cost less than factors."""
        if not (self.cheap or self.dear) and self.affordable:
            return _FIRST
        if not self.A.fixed_point:
            return None
        price = None if self.alone else self.A.price()
        return _FIRST if price is None else max(_FIRST, min(int(price.factors), _LONG))

    # ---------------------------------------------------------------------------------------------------------- the turns
    def _inverse(self) -> bool:
        """The inverse, or the matrix, where the problem knows it."""
        A = self.A
        if getattr(A.near, "exact", False) and self.progress.add(_inverted(A, self.b, **self.limits)).done:
            return True
        return A.exact is not None and self._by(LU(A.size))

    def _dense_of_few(self) -> bool:
        few = self.A.known is None and not self.asked and self.A.size <= _FEW
        if few and self.cheap and self.worth < _WORTH:
            self._by(_FEW_LU)
            return True
        return False

    def _known(self) -> bool:
        """Factors of the matrix or of one nearby, unless others take no longer."""
        A = self.A
        if A.known is None:
            return False
        if getattr(A.known, "rough", False) and not self._refines(price_of(A.batch, A.size, 1, A.size, band=1)):
            price = A.price()  # which takes a pattern; the least it can be does not
            if price is not None and price.products <= _COLOURS and not self._refines(price):
                A.known.let_go()  # before there are others
                return False
        many = len(self.b) > MANY and not self.asked
        if many and (self.cheap or A.sparse() is not None) and not is_near(A, A.known):
            return False
        return self.progress.add(_nearby(A, self.b, **self.limits)).done

    def _refines(self, price: Price) -> bool:
        """Do factors that are ``unlike`` the matrix by so much take few products to refine, fewer than its own cost?"""
        unlike = max(self.A.known.unlike, torch.finfo(self.b.dtype).tiny)
        few, digits = len(self.b) <= MANY, max(self.limits["rtol"] * DIGITS, torch.finfo(self.b.dtype).eps)
        return few and math.log(unlike) * min(SWEEPS, price.factors / len(self.b)) < math.log(digits)

    def _preconditioned(self) -> bool:
        return self.asked and self._by(GMRES(), self.max_steps or _FIRST)

    def _trial(self) -> bool:
        """A Krylov method, as long as it costs less than factors."""
        if self.worth < _WORTH or self.alone:
            return False
        return self._by(Frugal(self.worth, times=1.0 if self.A.price() is not None else _DENSE_TRIAL), self.max_steps)

    def _sparse(self) -> bool:
        return (not self.A.fixed_point or self.alone) and self._by_sparse_factors()

    def _by_sparse_factors(self) -> bool:
        blocks = self.A.sparse()
        if blocks is None:
            return False
        found = solve_with(blocks, self.A, self.progress.open_part(), **self.limits)
        done = self.progress.add(found).done
        self.A.singular = self.A.singular or self.progress.singular
        return done or (self.A.told_singular and self.progress.singular)

    def _dense(self) -> bool:
        if not (self.cheap or self.dear):
            return False
        return self._by(LU(self.dense_size)) or (self.cheap and not self.A.fixed_point)

    def _krylov(self) -> bool:
        """The Krylov method for it."""
        return self._by_krylov(self.max_steps or self.patience)

    def _by_krylov(self, max_steps: int | None) -> bool:
        A = self.A
        if A.symmetric:
            return self._by(CG(), max_steps) or self._by(GMRES(), max_steps)
        if A.fixed_point and not self.asked:
            return self._by(Contraction(), max_steps)
        return self._by(GMRES() if self.asked or A.near is not None else Unsaid(), max_steps)

    def _last(self) -> bool:
        """What is left for factors, or for more products, where these were rationed."""
        if self.A.fixed_point and not self.alone and self._by_sparse_factors():
            return True
        if not (self.cheap or self.dear) and self.affordable:
            return self._by(LU(self.dense_size))
        return self.patience is not None and self.max_steps is None and self._by_krylov(None)


def _dense_price(A: Operator, alike: int = 1) -> float:
    """How many steps of the Krylov method for it dense factors cost, where so many samples have one matrix."""
    return price_of_dense_like(A, alike, conjugate=A.symmetric).factors


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
