r"""Linear systems of optimality conditions: direct where they are regular, of least norm where they are not.

A constraint that is weakly active, active constraints with dependent gradients, a singular Hessian on the tangent space:
each makes the KKT matrix singular and the derivative of the solution a set.  ``"lstsq"`` takes its element of least norm,
``A^+ b`` (by the singular value decomposition; of large systems, which may only look singular to products, by sparse
factors of those of least norm, else LU, else LSMR), ``"raise"`` none.

Source: Agrawal, Amos, Barratt, Boyd, Diamond & Kolter (2019), "Differentiable convex optimization layers", section 3
(least-squares derivatives).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.in_parts import sizes
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options, one_of
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.conditions.saddle import StructuredOperator
from implicitkit.linear.factors.dense import factor_batched, lstsq_batched
from implicitkit.linear.factors.sparse import solve_with
from implicitkit.linear.iterative.cycles import norms, tolerance
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.linear.iterative.lsmr import LSMR

_UNITS = 1e-6  # of the largest row or column: smaller ones may have units of their own
_RCOND = 1e-11  # pivots relative to the largest
_NOISE = 1e-4  # of a right-hand side that rounding may leave of a singular system
_LEFT = 1e-3  # of a right-hand side that the least-squares solution leaves: more is no rounding
_ROUNDING = 1e-9  # of what is added up in equations, which rounding leaves of some that have a solution
_SWEEPS = 5  # over rows and columns
_WHOLE, _NUMBERS = 4096, 1 << 25  # unknowns of a matrix that is formed where products have failed, and numbers in all
_NOT_DETERMINED = (
    "the conditions of optimality do not determine the derivative that is asked for: the solution is not unique there (a "
    "whole edge of a linear program), or moves to one side only. What comes out is of least norm in the sense of least "
    'squares, and may mean nothing; degenerate="smooth" has the derivative of a relaxed program, "raise" an error'
)
SINGULAR = (
    "the optimality conditions are degenerate there, so that the solution is not differentiable (weakly active or "
    'redundant constraints, or a solution that is not unique): degenerate="lstsq" takes the derivative of least norm, '
    'degenerate="smooth" that of a relaxed program'
)


@register_linear_solver("kkt")
@dataclass(frozen=True)
class KKT(LinearSolver):
    """The optimality conditions of a constrained minimum, by the cheapest direct solver that fits them.

    LU of small systems; of larger ones first the factors of a matrix nearby, if there are any: refinement with them; then
    structured (a quadratic program's own Cholesky) where the operator offers it, else sparse LU where the matrix has a
    sparsity pattern, else LU up to ``dense_size`` unknowns a sample, else GMRES; samples that these cannot solve by the
    policy ``degenerate``.

    Args:
        degenerate: ``"lstsq"`` (the solution of least norm, in the least-squares sense) or ``"raise"`` (not converged).
        dense_size: unknowns a sample up to which the matrix is formed. small: up to which LU comes first.

    Raises:
        ValueError: an unknown policy, or a size below 1.
    """

    degenerate: str = "lstsq"
    dense_size: int = 768
    small: int = 64
    matrix_free: ClassVar[bool] = False
    has_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, degenerate=one_of("lstsq", "raise"), dense_size=at_least(1), small=at_least(1))

    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        singular = False
        if A.known is not None and A.size > min(self.small, self.dense_size):
            singular = not bool(A.known.factor.ok.any()) and self.degenerate != "raise"
            near = None if singular else solve_with(A.known, A, b.unsqueeze(0), rtol=rtol, atol=atol)
            if near is not None and bool(near.converged.all()):
                return near
        target = tolerance(b, rtol, atol)
        if A.size <= min(self.small, self.dense_size):
            M = A.dense()
            x = _plain_lu(M, b) if b.dtype in (torch.float32, torch.float64) and A.size else _lu(M, b)
            norm = norms(torch.baddbmm(b.unsqueeze(2), M, x.unsqueeze(2), alpha=-1).squeeze(2))
            met = norm <= target
            if bool(met.all()):
                return self._on_both_sides(A, b, x, norm, met)
        elif isinstance(A, StructuredOperator):
            x, norm = A.solve(b)
            met = norm <= target
            if bool(met.all()):
                return self._on_both_sides(A, b, x, norm, met)
        elif singular and A.size > self.dense_size:  # as any factors of these matrices would find once more
            x = torch.full_like(b, torch.nan)
        elif A.sparse() is not None:
            blocks = A.sparse()
            if self.degenerate != "raise" and hasattr(blocks, "by_diagonal"):
                blocks = blocks.by_diagonal()
            x = solve_with(blocks, A, b.unsqueeze(0), rtol=rtol, atol=atol).x
        elif A.size <= self.dense_size:
            x = _lu(A.dense(), b)
        else:
            x = GMRES().solve(A, b, rtol=rtol, atol=atol, max_steps=max_steps).x
        zero = norms(b) == 0
        x = torch.where(zero.unsqueeze(1), 0, x)
        finite = x.isfinite().all(1)
        norm = norms(b - A.mv(torch.nan_to_num(x))) if bool(finite.any()) else torch.full_like(target, torch.inf)
        norm = torch.where(finite, norm, torch.inf)
        converged = (norm <= target) | zero
        steps = torch.ones_like(norm, dtype=torch.int64)
        reason = ""
        if not bool(converged.all()):
            if self.degenerate == "raise":
                reason = SINGULAR
            else:
                x, norm, converged, reason = self._least_norm(A, b, x, converged, rtol, atol)
        lost = converged & (norm > _LEFT * norms(b))
        doubt = _NOT_DETERMINED if reason == "" and bool(lost.any()) else ""
        return LinearSolution(x, torch.where(norm.isfinite(), norm, torch.nan), steps, converged, reason, doubt)

    def _on_both_sides(self, A: Operator, b: Tensor, x: Tensor, norm: Tensor, met: Tensor) -> LinearSolution:
        """A solution at a point that may be at a kink: does the other side have a derivative too?  (Of a strictly convex
        program it has; of a linear one on an edge that is optimal as a whole it has not.)"""
        steps, doubt, reason = torch.ones_like(norm, dtype=torch.int64), "", ""
        if isinstance(A, StructuredOperator) and A.other is not None:
            other, enough = A.other(), _LEFT * norms(b)
            lost = ~(other.solve(b)[1] <= enough)
            if bool(lost.any()) and A.size <= self.dense_size:  # a singular matrix may have a solution all the same
                lost = ~(norms(b - other.mv(lstsq_batched(other.dense(), b, rcond=1e-10)[0])) <= enough)
            if bool(lost.any()):
                doubt = _NOT_DETERMINED
                if self.degenerate == "raise":
                    met, doubt, reason = met & ~lost, "", SINGULAR
        return LinearSolution(x, norm, steps, met, reason, doubt)

    def _least_norm(
        self, A: Operator, b: Tensor, x: Tensor, converged: Tensor, rtol: float, atol: float
    ) -> tuple[Tensor, Tensor, Tensor, str]:
        """``A^+ b`` for the samples that are left."""
        bad = ~converged
        if A.size <= self.dense_size:
            found, ok, reason = _in_like_units(A.dense()[bad], b[bad])
            x = x.index_put((bad,), found)
            converged = converged.index_put((bad,), ok)
        else:
            asked = torch.where(bad.unsqueeze(1), b, 0)
            rest = _by_factors(A, asked, rtol, atol)
            if rest is None and A.sparse() is not None:
                direct = solve_with(A.sparse(), A, asked.unsqueeze(0), rtol=rtol, atol=atol)
                rest = direct if bool(direct.converged.all()) else None
            if rest is None:
                rest = _by_whole_matrix(A, asked, rtol, atol)
            if rest is None:
                rest = LSMR().solve(A, asked, rtol=rtol, atol=atol, max_steps=None)
            x = torch.where(bad.unsqueeze(1), rest.x, x)
            converged, reason = converged | rest.converged, rest.reason
            if bool(bad.all()):
                return x, rest.residual_norm, converged, reason
        return x, norms(b - A.mv(x)), converged, reason


def _by_factors(A: Operator, b: Tensor, rtol: float, atol: float) -> LinearSolution | None:
    """``A^+ b`` by sparse factors; ``None`` where these do not get there: there is no pattern, or no solution."""
    blocks = A.sparse()
    if blocks is None:
        return None
    from implicitkit.linear.conditions.least_norm import by_shifts, least_norm

    for way in (least_norm, by_shifts):
        x = way(blocks, b)
        if x is None:
            return None
        norm = norms(b - A.mv(torch.nan_to_num(x)))
        least = 64 * torch.finfo(b.dtype).eps * norms(blocks.size(x) + b.abs())  # what rounding leaves of any solution
        least = least.clamp_max(_NOISE * norms(b))  # but not of one that is made of rounding
        met = (norm <= torch.maximum(tolerance(b, rtol, atol), least)) & x.isfinite().all(1)
        if bool(met.all()):
            return LinearSolution(x, norm, torch.ones_like(norm, dtype=torch.int64), met)
    return None


def _by_whole_matrix(A: Operator, b: Tensor, rtol: float, atol: float) -> LinearSolution | None:
    """``A^{-1} b`` by LU in units in which rows and columns are of size one (:func:`_ruiz`), which GMRES and LSMR do not
    see; ``None`` where that does not get there: ``A`` is too large, or singular."""
    if A.size > _WHOLE or len(b) * A.size**2 > _NUMBERS:
        return None
    M = A.dense()
    rows, columns = _ruiz(M)
    x = _lu(M / rows / columns, b / rows.squeeze(2)) / columns.squeeze(1)
    norm = norms(b - A.mv(torch.nan_to_num(x)))
    met = (norm <= tolerance(b, rtol, atol)) & x.isfinite().all(1)
    return LinearSolution(x, norm, torch.ones_like(norm, dtype=torch.int64), met) if bool(met.all()) else None


def _ruiz(M: Tensor) -> tuple[Tensor, Tensor]:
    """Units of rows and columns, alike where ``M`` is symmetric, in which the largest entry of each is one, nearly (Ruiz
    2001, "A scaling algorithm to equilibrate both rows and columns norms in matrices")."""
    size, (rows, columns) = M.abs(), _unchanged(M)
    for _ in range(_SWEEPS):
        rest = size / rows / columns
        across, down = (torch.where(t > 0, t, 1).sqrt() for t in (rest.amax(2, True), rest.amax(1, True)))
        rows, columns = rows * across, columns * down
    return rows, columns


def _in_like_units(M: Tensor, b: Tensor) -> tuple[Tensor, Tensor, str]:
    """``M^+ b``.  Where rows and columns differ by :data:`_UNITS` and more, the rank is judged with both made of like size
    (:func:`sizes`), and least is the norm in these units; ``(batch, n)``, who has it, and why others have not.

    Where that leaves something of ``b``, other units may leave less: those of the matrix as it is (a row of rounding
    errors is no equation in units of its own), and those in which all entries are near one (``[[1, d'], [d, 0]]``).
    """
    rows, columns = sizes(M)
    uneven = [(s.flatten(1).amin(1) < _UNITS * s.flatten(1).amax(1)).view(-1, 1, 1) for s in (rows, columns)]
    rows, columns = (torch.where(uneven[0] | uneven[1], s, 1) for s in (rows, columns))
    x, ok, reason = _in_units(M, b, rows, columns)
    left = _left(M, x, b)
    for units in (_unchanged, _geometric):
        lost = ok & (left > _ROUNDING)
        if not bool(lost.any()):
            break
        other = _in_units(M[lost], b[lost], *units(M[lost]))[0]
        new = _left(M[lost], other, b[lost])
        better = (new < _LEFT * left[lost]).unsqueeze(1)
        x = x.index_put((lost,), torch.where(better, other, x[lost]))
        left = left.index_put((lost,), torch.where(better.squeeze(1), new, left[lost]))
    return x, ok, reason


def _in_units(M: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, str]:
    """``M^+ b`` in these units, ``(batch, n, 1)`` of the rows and ``(batch, 1, n)`` of the columns."""
    scaled, rhs = M / rows / columns, b / rows.squeeze(2)
    x = _lu(scaled, rhs)
    regular = x.isfinite().all(1)
    ok, reason = regular, ""
    if not bool(regular.all()):
        least, ok, reason = lstsq_batched(scaled, rhs, rcond=1e-10)
        x = torch.where(regular.unsqueeze(1), x, least)
    return x / columns.squeeze(1), regular | ok, reason


def _unchanged(M: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(M[:, :, :1]), torch.ones_like(M[:, :1])


def _geometric(M: Tensor) -> tuple[Tensor, Tensor]:
    """Units of rows and columns in which the largest entry of each times the least is one, nearly."""
    size = M.abs()
    size = torch.where(size > torch.finfo(M.dtype).eps * torch.minimum(size.amax(2, True), size.amax(1, True)), size, 0)
    rows, columns = _unchanged(M)
    for _ in range(_SWEEPS):
        for dim in (2, 1):
            rest = size / rows / columns
            least = torch.where(rest > 0, rest, torch.inf).amin(dim, True)
            middle = torch.where(least.isfinite(), (least * rest.amax(dim, True)).sqrt(), 1)
            rows, columns = (rows * middle, columns) if dim == 2 else (rows, columns * middle)
    return rows, columns


def _left(M: Tensor, x: Tensor, b: Tensor) -> Tensor:
    """What is left of equations beside what is added up in them, or :data:`_UNITS` of the largest, ``(batch,)``."""
    size = b.abs() + (M.abs() @ x.abs().unsqueeze(2)).squeeze(2)
    size = torch.maximum(size, _UNITS * size.amax(1, keepdim=True))
    rest = (b - (M @ x.unsqueeze(2)).squeeze(2)).abs()
    return torch.where(rest > 0, rest / size, 0).amax(1)


def _lu(M: Tensor, b: Tensor) -> Tensor:
    """``M^{-1} b`` where ``M`` is regular, NaN elsewhere."""
    factor = factor_batched(M)
    low, high = factor.lu.diagonal(dim1=1, dim2=2).abs().aminmax(dim=1)
    return torch.where((low > _RCOND * high).unsqueeze(1), factor.solve(b), torch.nan)


def _plain_lu(M: Tensor, b: Tensor) -> Tensor:
    """``M^{-1} b`` of small blocks, NaN where ``M`` seems singular: unlike :func:`_lu` it does not look twice, since the
    caller has other ways for these."""
    lu, pivots, _ = torch.linalg.lu_factor_ex(M)
    low, high = lu.diagonal(dim1=1, dim2=2).abs().aminmax(dim=1)
    x = torch.linalg.lu_solve(lu, pivots, b.unsqueeze(2)).squeeze(2)
    return torch.where((low > _RCOND * high).unsqueeze(1), x, torch.nan)
