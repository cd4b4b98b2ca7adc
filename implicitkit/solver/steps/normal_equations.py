r"""The normal equations of a linear least-squares problem, ``(R'R + \mu D^2) p = -R'r``, for systems of many unknowns.

Where ``R`` has a sparsity pattern they are formed and factored sparse; else dense by Cholesky, while ``R`` fits: one matrix
for all ``\mu`` of a step, and no singular value decomposition.  Beyond (and from 768 unknowns on while few are enough),
from products with ``R`` and ``R'`` alone, by LSMR on ``min |R p + r|^2 + \mu |D p|^2`` (Fong & Saunders 2011), to a tenth.
With ``\mu > 0`` the matrix is definite whatever ``R`` is.

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), section 5.3.2; Nocedal & Wright (2006), section 10.2;
Wright & Holt (1985), J. Austral. Math. Soc. B 26 (inexact Levenberg-Marquardt steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.dense import cholesky_batched, lstsq_batched, mv
from implicitkit.linear.factors.direct import Verdict
from implicitkit.linear.iterative.lsmr import LSMR
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.convex_model import within
from implicitkit.solver.steps.factored import Jacobian, chord_steps

_SWEEPS = 5  # of the power method: one digit of the largest eigenvalue is enough
_DENSE = 2048  # unknowns a sample up to which a matrix without a sparsity pattern is formed
_FRUGAL = 768  # ... and from which on products are tried before, on a processor
_SHARE = 1 / 12  # of the unknowns: so many steps of LSMR, at most
_NUMBERS = 1 << 26  # numbers in the matrices of all samples, at most
_PROBES = 8  # for the norms of columns from products
_FORCING = 0.1  # of the gradient of the model that LSMR leaves
_PRODUCTS = 1000  # of LSMR, at most
_UNDAMPED, _CONTRACTION = 3, 0.2  # solves that take damping out of a step, and what each must leave, at most
_ROUNDING = 8.0  # units of it
_Product = Callable[[Tensor], Tensor]


class NormalEquations(Protocol):
    """``R'R`` at one point.

    ``columns``: the norms of the columns of ``R``, ``(batch, n)``.  ``factors``: those of the last :meth:`solve`, of
    ``R'R + mu D^2`` in the units of the unknowns, with ``solve(b)``, ``size(x)``, ``T`` and ``factor``; ``None`` where a
    sample has none.  ``direct``: are they solved by factors?
    """

    columns: Tensor
    factors: Any
    direct: ClassVar[bool]

    def restrict(self, free: Tensor) -> None:
        """Only these unknowns are solved for from now on, ``(batch, n)`` bool: of the others ``p = 0``, where ``g`` is."""

    def scale(self, D: Tensor) -> None:
        """The unknowns are measured in units of ``1 / D`` from now on, ``(batch, n)``."""

    def largest(self) -> Tensor:
        """The largest eigenvalue of ``D^-1 R'R D^-1``, about; ``(batch,)``."""

    def solve(self, mu: Tensor, g: Tensor, which: Tensor | None = None) -> Tensor:
        """``p`` with ``(R'R + mu D^2) p = -g``; not finite where that is not definite.  Of samples that are not asked for,
        ``which`` ``(batch,)`` bool, ``p = 0``, and factors that have been made stand."""

    def within(self, g: Tensor, lower: Tensor, upper: Tensor, which: Tensor) -> Tensor | None:
        """The minimisers of ``g'p + |R p|^2 / 2`` in ``lower <= p <= upper``, of all unknowns, for samples ``which``; zero
        where ``R'R`` is not definite; ``None`` where it is not formed."""

    def without_squares(self, r: Tensor, which: Tensor) -> Tensor | None:
        """The minimisers of ``|R p + r|``, ``(batch, n)``, of the samples ``which``, zero for the others, found from ``R``
        itself; ``None`` where there is no such way."""

    def times(self, p: Tensor) -> Tensor:
        """``R p``, ``(batch, m)``."""


def column_scales(f: Evaluations, before: Tensor, columns: Tensor) -> Tensor:
    """The scales of the unknowns in a trust region, ``(batch, n)``: the largest norm so far of each column of ``R`` (Moré
    1978, section 5), or one where the problem has units of its own (``x_scale=``)."""
    if not isinstance(f.problem.x_scale, str):
        return torch.ones_like(before)
    return torch.maximum(before, columns.nan_to_num(0, 0, 0))


def normal_equations(
    f: Evaluations, z: Tensor, free: Tensor | None = None, weights: Tensor | None = None
) -> NormalEquations:
    """The normal equations of the residuals of ``f`` at ``z``, sparse where they have a pattern.

    ``free``: the unknowns that are solved for, ``(batch, n)`` bool; for the others ``p = 0``.  ``weights``: the rows of
    ``R`` are so many times as long, ``(batch, m)``, and ``r`` so many times as short.  Factors of a point before are
    let go: they may take as much memory as all the rest; but for samples at rest, which keep theirs.
    """
    before = f.system.factored if f.kind.of_residuals else None
    if f.kind.of_residuals:
        f.system.factored = None
    found = f.residuals_sparse(z)
    if found is not None:
        from implicitkit.linear.factors.sparse_normal import NormalFactors, SparseNormal

        kept = isinstance(before, NormalFactors) and before.units.shape == z.shape and not bool(f.active.all())
        ready, entries = found
        if weights is not None:
            entries = ready.with_rows(entries, array(weights))
        normal: NormalEquations = SparseNormal(ready, entries, z, before if kept else None, ~f.active)
    else:
        r = f.residuals(z) if weights is None else f.residuals(z) / weights
        fits = z.shape[1] <= _DENSE and r.numel() * z.shape[1] <= _NUMBERS
        if fits and f.frugal and z.shape[1] >= _FRUGAL and z.device.type == "cpu":
            normal = _Frugal(f, z, r, weights)
        elif fits:
            normal = _Dense(weighted(f.residuals_jacobian(z), weights))
        else:
            normal = _Products(*_weighted_products(f, z, weights), r, z)
    if free is not None and not bool(free.all()):
        normal.restrict(free)
    return normal


def undamped(normal: NormalEquations, p: Tensor, g: Tensor, which: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    r"""``p`` of the samples ``which``, solutions of ``(R'R + \mu D^2) p = -g`` with a little ``\mu``, without that:

        p <- p - (R'R + \mu D^2)^{-1} (g + R'R p)

    while ``|g + R'R p|`` is more than ``enough`` ``(batch,)``, and falls to a fifth: of a linear fit it is the minimum, with
    no evaluation in between.  And where it does not fall to that, or to rounding: in some direction ``\mu`` is more than
    ``R'R``, or this is all rounding; there ``p`` is as it was.
    """
    factors = normal.factors
    if factors is None or not bool(which.any()):
        return p, torch.zeros_like(which)
    left, first, going = g + factors.moved(p), p, which
    norm = torch.linalg.vector_norm(left, dim=1)
    for _ in range(_UNDAMPED):
        going = going & (norm > enough)
        if not bool(going.any()):
            break
        trial = p - factors.solve(torch.where(going.unsqueeze(1), left, 0))
        left = g + factors.moved(trial)
        after = torch.linalg.vector_norm(left, dim=1)
        going = going & (after <= _CONTRACTION * norm)
        p, norm = torch.where(going.unsqueeze(1), trial, p), torch.where(going, after, norm)
    hidden = which & (norm > enough)
    if bool(hidden.any()):
        rounding = torch.finfo(g.dtype).eps * torch.linalg.vector_norm(factors.size(p) + g.abs(), dim=1)
        hidden = hidden & (norm > _ROUNDING * rounding)
        p = torch.where(hidden.unsqueeze(1), first, p)
    return p, hidden


def factors_of_fit(f: Evaluations, z: Tensor, g: Tensor) -> Any:
    """The factors of ``R'R`` at ``z``; ``None`` where it is singular, or not finite."""
    normal = normal_equations(f, z)
    normal.scale(torch.where(normal.columns > 0, normal.columns, 1))
    normal.solve(torch.zeros_like(z[:, 0]), g)
    return normal.factors


def weighted(R: Tensor, weights: Tensor | None) -> Tensor:
    """``R`` ``(batch, m, n)`` with its rows so many times as long."""
    return R if weights is None else R * weights.unsqueeze(2)


def _weighted_products(f: Evaluations, z: Tensor, weights: Tensor | None) -> tuple[_Product, _Product]:
    """Products with the Jacobian of the residuals, its rows so many times as long, and with its transposed."""
    mv, rmv = f.residuals_products(z)
    if weights is None:
        return mv, rmv
    return lambda v: weights * mv(v), lambda w: rmv(weights * w)


def with_old_factors(f: Evaluations, normal: NormalEquations, z: Tensor, start: Tensor) -> Tensor:
    """Go on from ``z``, where a step from ``start`` has led, with the last factors (:func:`chord_steps`); leave them for
    the derivative.

    ``R'R`` is near the Hessian where residuals, or their curvature, are small.  Of other problems than fits nothing is left.
    """
    factors = normal.factors
    if factors is None:
        return z
    z = chord_steps(f, factors, z, f.norm.to(z.dtype), start)
    if f.kind.of_residuals:
        f.system.factored = factors
    return z


def normal_equations_of(J: Jacobian, r: Tensor) -> NormalEquations:
    """The normal equations of equations ``r`` with the Jacobian ``J``."""
    if J.dense is not None:
        return _Dense(J.dense)
    if J.sparse is not None:
        from implicitkit.linear.factors.sparse_normal import SparseNormal

        ready, entries = J.sparse.found
        return SparseNormal(ready, entries, r)
    return _Products(J.A.mv, J.A.rmv, r, r)


def largest_eigenvalue(N: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The largest eigenvalue of a positive matrix, about, from its products by a few steps of the power method;
    ``(batch,)``."""
    v, size = torch.ones_like(like), like.new_zeros(len(like))
    for _ in range(_SWEEPS):
        v = N(v)
        size = torch.linalg.vector_norm(v, dim=1)
        v = v / torch.where(size > 0, size, 1).unsqueeze(1)
    return size


class _Dense:
    """By Cholesky."""

    direct: ClassVar[bool] = True

    def __init__(self, R: Tensor) -> None:
        self.R, self.D = R, R.new_ones(len(R), R.shape[2])
        self.columns = torch.linalg.vector_norm(R, dim=1)
        self.N = self.whole = R.mT @ R
        self.factors: _DenseFactors | None = None
        self.made: tuple[Tensor, Tensor, Tensor] | None = None  # factors, where they are, and mu
        self.restricted = False

    def restrict(self, free: Tensor) -> None:
        self.N, self.restricted = self.N * (free.unsqueeze(1) & free.unsqueeze(2)), True

    def scale(self, D: Tensor) -> None:
        self.D = D
        self.N = self.N / (D.unsqueeze(1) * D.unsqueeze(2))

    def within(self, g: Tensor, lower: Tensor, upper: Tensor, which: Tensor) -> Tensor | None:
        p, definite = within(self.whole, g, lower, upper, which)
        return torch.where(definite.unsqueeze(1), p, 0).nan_to_num(0, 0, 0)

    def largest(self) -> Tensor:
        return largest_eigenvalue(lambda v: mv(self.N, v), self.D)

    def solve(self, mu: Tensor, g: Tensor, which: Tensor | None = None) -> Tensor:
        shifted = self.N + torch.diag_embed(mu.to(self.N).unsqueeze(1).expand_as(self.D))
        if shifted.dtype in (torch.float16, torch.bfloat16):  # no LAPACK in half precision
            shifted = shifted.float()
        if which is None or self.made is None:
            L, ok = cholesky_batched(shifted)
        else:
            rows = which.nonzero().squeeze(1)
            of_rows = *cholesky_batched(shifted.index_select(0, rows)), mu.index_select(0, rows)
            L, ok, mu = (old.index_copy(0, rows, new) for old, new in zip(self.made, of_rows, strict=True))
        self.made = L, ok, mu
        self.factors = None if self.restricted or not bool(ok.all()) else _DenseFactors(L, self.N, self.D, mu)
        p = torch.cholesky_solve((-g / self.D).unsqueeze(2).to(L), L).squeeze(2).to(g) / self.D
        p = torch.where(ok.unsqueeze(1), p, torch.nan)
        return p if which is None else torch.where(which.unsqueeze(1), p, 0)

    def without_squares(self, r: Tensor, which: Tensor) -> Tensor | None:
        R = torch.where(which[:, None, None], self.R / self.D.unsqueeze(1), 0)
        b = torch.where(which.unsqueeze(1), -r, 0)
        if self.restricted or R.dtype not in (torch.float32, torch.float64) or not bool(torch.isfinite(R).all()):
            return None
        return lstsq_batched(R, b)[0].to(r) / self.D

    def times(self, p: Tensor) -> Tensor:
        return mv(self.R, p)


class _DenseFactors:
    """``R'R + mu D^2`` by Cholesky; as :class:`~implicitkit.linear.factors.sparse_normal.NormalFactors`."""

    rough = positive = True
    gone = False
    looked: tuple[Tensor, float, Tensor] | None = None

    def __init__(self, L: Tensor, scaled: Tensor, D: Tensor, mu: Tensor) -> None:
        self.L, self.scaled, self.units, self.D, self.damping = L, scaled, D, D.unsqueeze(2), mu
        self.factor, self.unlike = Verdict(torch.ones(len(L), dtype=torch.bool, device=L.device)), math.inf

    def let_go(self) -> None:
        """Give their memory back: nobody is going to use them."""
        self.L = self.scaled = self.L[:0].clone()
        self.gone = True

    @property
    def T(self) -> _DenseFactors:
        """The transposed: the same."""
        return self

    def solve(self, b: Tensor) -> Tensor:
        """``(R'R + mu D^2) x = b``, ``(batch, n)`` or ``(batch, n, k)``."""
        columns = b.unsqueeze(2) if b.ndim == 2 else b
        x = torch.cholesky_solve((columns / self.D).to(self.L), self.L).to(b) / self.D
        return x.squeeze(2) if b.ndim == 2 else x

    def moved(self, x: Tensor) -> Tensor:
        """``R'R x``, ``(batch, n)``: what the gradient changes by along ``x`` where the residuals are linear."""
        return (self.units * mv(self.scaled, (self.units * x).to(self.scaled))).to(x)

    def size(self, x: Tensor) -> Tensor:
        """``|R'R| |x|``, shaped as ``x``."""
        columns = (x.unsqueeze(2) if x.ndim == 2 else x).abs().to(self.scaled)
        out = (self.D * torch.bmm(self.scaled.abs(), self.D * columns)).to(x)
        return out.squeeze(2) if x.ndim == 2 else out


class _Products:
    """By LSMR; norms of columns are estimated: ``E (R'w)_j^2 = |R_j|^2`` for random signs ``w``."""

    direct: ClassVar[bool] = False
    most = _PRODUCTS
    reached = True

    def __init__(
        self, mv: Callable[[Tensor], Tensor], rmv: Callable[[Tensor], Tensor], r: Tensor, like: Tensor
    ) -> None:
        self.times, self.rmv, self.r = mv, rmv, r
        self.factors: Any = None
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros_like(like)
        for _ in range(_PROBES):
            signs = torch.randint(0, 2, (1, r.shape[1]), generator=generator, device="cpu").to(r) * 2 - 1
            total = total + rmv(signs.expand_as(r)).square()
        self.columns = (total / _PROBES).sqrt()
        self.D, self.free = torch.ones_like(like), torch.ones_like(like)

    def restrict(self, free: Tensor) -> None:
        self.free = free.to(self.D)

    def within(self, g: Tensor, lower: Tensor, upper: Tensor, which: Tensor) -> Tensor | None:
        return None

    def without_squares(self, r: Tensor, which: Tensor) -> Tensor | None:
        return None

    def scale(self, D: Tensor) -> None:
        self.D = D

    def largest(self) -> Tensor:
        return largest_eigenvalue(lambda v: self.rmv(self.times(self.free * v / self.D)) * self.free / self.D, self.D)

    def solve(self, mu: Tensor, g: Tensor, which: Tensor | None = None) -> Tensor:
        root, D, m, free = mu.sqrt().unsqueeze(1), self.D, self.r.shape[1], self.free
        batch, n = D.shape

        def mv(y: Tensor) -> Tensor:
            return torch.cat([self.times(free * y / D), root * y], 1)

        def rmv(w: Tensor) -> Tensor:
            return free * self.rmv(w[:, :m].contiguous()) / D + root * w[:, m:]

        def no_matrix() -> Tensor:
            raise NotImplementedError("only products are known")

        r = self.r if which is None else torch.where(which.unsqueeze(1), self.r, 0)
        rhs = torch.cat([-r, torch.zeros_like(D)], 1)
        norm = torch.linalg.vector_norm(self.r, dim=1).clamp_min(torch.finfo(D.dtype).tiny)
        relative = torch.linalg.vector_norm(g / D, dim=1) / (norm * n**0.5)
        relative = relative[torch.isfinite(relative) & (relative > 0)]
        rtol = _FORCING * float(relative.min()) if len(relative) else _FORCING
        operator = Operator(mv, rmv, no_matrix, batch=batch, size=n, like=D)
        found = LSMR(restarts=1).solve(operator, rhs, rtol=min(rtol, _FORCING), atol=0.0, max_steps=self.most)
        self.reached = bool(found.converged.all())
        return found.x / D


class _Frugal(_Products):
    """By products for as long as few will do; once they have not, by Cholesky, at this point and all others."""

    def __init__(self, f: Evaluations, z: Tensor, r: Tensor, weights: Tensor | None) -> None:
        super().__init__(*_weighted_products(f, z, weights), r, z)
        self.weights = weights
        self.most = int(_SHARE * z.shape[1])
        self.f, self.z = f, z
        self.dense: _Dense | None = None

    def solve(self, mu: Tensor, g: Tensor, which: Tensor | None = None) -> Tensor:
        if self.dense is None:
            p = super().solve(mu, g, which)
            if self.reached:
                return p
            self.f.frugal = False
            self.dense = _Dense(weighted(self.f.residuals_jacobian(self.z), self.weights))
            if not bool(self.free.all()):
                self.dense.restrict(self.free.bool())
            self.dense.scale(self.D)
        p = self.dense.solve(mu, g, which)
        self.factors = self.dense.factors
        return p
