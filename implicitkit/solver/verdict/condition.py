r"""The condition: is a Newton correction determined, and what may be said where the Jacobian is singular?

``V = r + g P V`` with ``g = 0.9999`` loses four digits: in float32 the correction is known to one or two, and says little.
But ``F`` goes through zero there, which it never does on the way to infinity: that is seen a few hundredths of the way to
both sides, where ``F`` is more than rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import factor_batched, lstsq_batched
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import in_working_precision
from implicitkit.solver.verdict.rounding_level import NOISE, rounding

_WAY = 0.05  # of the unknowns, to both sides
_MOST = 4  # directions that rounding may leave open
_CLEAR = 4.0  # times rounding: F there, to both sides
_ON = (2.0, 4.0, 16.0)  # so many times as far, by what its null vector says, an objective falls that falls for ever
_STRAIGHT = 0.5  # of what J says: how far the change of F over that way may be from it, at most
_CORRECTIONS = 8  # evaluations to come back to a curve of zeros


def crosses_zero(f: Evaluations, z: Tensor, M: Tensor, unit: Tensor, rows: Tensor, sound: float) -> Tensor:
    r"""Where ``F`` crosses zero along each direction in which rounding may move the Newton correction by more than the share
    ``sound`` of ``z``, ``(batch,)``.

    With ``M = diag(rows)^{-1} J diag(unit) = U S V'`` these are the ``v_k`` with ``s_k sound < 10 eps``, four at most.
    Along each ``c(t) = u_k' F(z + t unit v_k) / rows`` is asked at ``t = +-0.05 / max |v_k|``: of opposite signs, each
    beyond ``4 eps |u_k|' |M| |z / unit|``, and ``c(t) - c(-t)`` is half to one and a half times ``2 t s_k``.  By the
    intermediate value theorem there is a zero of ``c`` in between, and two evaluations show it.

    Args:
        f: the problem's. z: ``(batch, n)``. M: ``(batch, n, n)``. unit: of the unknowns. rows: of the
            equations, ``(batch, n)``.
    """
    eps, point = f.eps, in_working_precision(z)
    finite = torch.isfinite(M).flatten(1).all(1)
    U, S, Vt = torch.linalg.svd(torch.where(finite[:, None, None], M, 0))
    terms = (M.abs() @ (point / unit).abs().unsqueeze(2)).squeeze(2)
    n = z.shape[1]
    vague = S * sound < 10 * eps
    found = finite & (vague.sum(1) <= _MOST)
    for k in range(1, min(_MOST, n) + 1):
        asked = found & vague[:, n - k]
        if not bool(asked.any()):
            break
        u, v = U[:, :, n - k], Vt[:, n - k]
        t = _WAY / v.abs().amax(1, keepdim=True)
        there, back = (
            (u * in_working_precision(f.residual((point + s * t * unit * v).to(z.dtype))) / rows).sum(1)
            for s in (1, -1)
        )
        said, noise = 2 * t.squeeze(1) * S[:, n - k], _CLEAR * eps * (u.abs() * terms).sum(1)
        clear = (there * back < 0) & (torch.minimum(there.abs(), back.abs()) > noise)  # false for NaN
        straight = ((there - back) - said).abs() <= _STRAIGHT * said
        found = found & (~asked | (clear & straight))
    return found


def is_lower(f: Evaluations, z: Tensor, there: Tensor, which: Tensor) -> Tensor:
    """For which samples ``which`` is the objective lower ``there`` than at ``z`` by more than rounding, ``(batch,)``?

    In float32 that of ``(z_0 - z_1)^2 + 1e-8 (z_0 + z_1 - 2)^2`` is so at zero, seen from (3e6, 3e6), though all the way
    ``F`` is less than what a unit in the last place of ``z`` changes in it.
    """
    if not bool(which.any()):
        return torch.zeros_like(which)
    probe = f.beside("minimise")
    value, other = probe.value(z), probe.value(there)
    return which & (other < value - NOISE * f.eps * value.abs())  # false for NaN


def falls_along_a_valley(f: Evaluations, z: Tensor, H: Tensor, which: Tensor) -> Tensor:
    """Where the objective falls on along the curve ``z_i c^{v_i}``, ``(batch,)``, ``v`` being the null vector of
    ``z_i H_ij z_j`` (its diagonal scaled to one), with a largest entry of one: that of ``(z_0 z_1 - 1)^2 + z_0^2`` does
    along ``z_0 z_1 = 1``, on which its gradient is rounding, while the straight line turns off.

    It is lower at ``c = 2``, 4 and 16, each time than before by more than rounding; two evaluations, and up to six.
    """
    if not bool(which.any()):
        return which
    point, eps = in_working_precision(z), torch.finfo(H.dtype).eps
    M = point.unsqueeze(2) * torch.nan_to_num(H, posinf=0.0, neginf=0.0) * point.unsqueeze(1)
    size = M.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    unit = torch.where(size > 0, 1 / size, 0)
    M = unit.unsqueeze(2) * M * unit.unsqueeze(1) + torch.diag_embed((size == 0).to(M))
    values, vectors = torch.linalg.eigh(torch.nan_to_num(M, posinf=0.0, neginf=0.0))
    which = which & (values[:, 0] <= eps**0.5)
    if not bool(which.any()):
        return which
    probe, v = f.beside("minimise"), unit * vectors[:, :, 0]
    v = (v / v.abs().amax(1, keepdim=True)).to(z.dtype)
    level, found = probe.value(z), torch.zeros_like(which)
    for side in (1.0, -1.0):
        falls, last = which & ~found, level
        for c in _ON:
            if not bool(falls.any()):
                break
            value = probe.value(z * c ** (side * v))
            falls, last = falls & (last - value > NOISE * f.eps**0.5 * last.abs()), value  # false for NaN
        found = found | falls
    return found


def moved_by_rounding(M: Tensor, unit: Tensor, point: Tensor) -> Tensor:
    """How far rounding of ``J`` and ``F`` moves the correction ``unit M^{-1} b``, ``(batch, n)``:
    ``10 eps unit |M^-1| |M| |z / unit|`` (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, equation
    7.12).  It asks nothing of units, and little of the condition: a chain of 64 has 1e4, and loses three digits.
    """
    inverse = factor_batched(M, columns_too=False).solve(torch.diag_embed(torch.ones_like(unit)))
    moved = (inverse.abs() @ (M.abs() @ (point / unit).abs().unsqueeze(2))).squeeze(2)
    return NOISE * torch.finfo(M.dtype).eps * unit * moved


def without_unknowns(M: Tensor, b: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """``M d = b`` with ``d_i = 0`` of the unknowns ``off``, in rows of their own if it is not square."""
    fixed, kept = torch.diag_embed(off.to(M)), torch.where(off.unsqueeze(1), 0, M)
    if M.shape[1] == M.shape[2]:
        return torch.where(off.unsqueeze(2), fixed, kept), torch.where(off, 0, b)
    return torch.cat([kept, fixed], 1), torch.cat([b, torch.zeros_like(off, dtype=b.dtype)], 1)


def in_units(matrix: Tensor, point: Tensor, unit: Tensor, square: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A ``matrix`` scaled to equal rows, and the units of unknowns and equations; of a fit, to equal columns."""
    if square:
        rows = (matrix * unit.unsqueeze(1)).abs().amax(2)
    else:
        rows = (matrix * point.unsqueeze(1)).abs().amax((1, 2)).unsqueeze(1)
    rows = torch.where(rows > 0, rows, 1)
    if not square:
        columns = torch.linalg.vector_norm(matrix, dim=1)
        unit = torch.where(columns > 0, rows / columns, unit)
    return matrix * unit.unsqueeze(1) / rows.unsqueeze(2), unit, rows


def is_solved_by(matrix: Tensor, low: Tensor, b: Tensor, point: Tensor, units: Tensor | None) -> Tensor:
    """Where a correction of ``low`` rank solves ``matrix d = b`` but for a half, and for rounding of itself and of what
    ``b`` is made of, ``(batch,)``: of a matrix whose rank is cut at the root of eps it is wrong by more.

    ``units``: of a number that a map hands on as it is, ``(batch, n)``: no correction changes its equation."""
    eps = torch.finfo(matrix.dtype).eps
    left = ((matrix @ low.unsqueeze(2)).squeeze(2) - b).abs()
    rounded = eps * (low.abs().amax(1, keepdim=True) + (matrix * point.unsqueeze(1)).abs().sum(2))
    rounded = rounded + 4 * eps**0.5 * torch.maximum(low.abs(), b.abs()).amax(1, keepdim=True)
    return (left <= 0.5 * b.abs() + (rounded if units is None else rounded + units)).all(1)


def zeros_go_on(
    f: Evaluations, z: Tensor, matrix: tuple[Tensor, ...], ahead: Tensor, scale: Tensor, which: Tensor, straight: Tensor
) -> Tensor:
    """Where zeros go on along a line, which is ``straight`` or a curve, ``(batch,)``: from a step ``ahead``, on a tangent
    towards the origin, corrections of lower rank come back to where next to nothing is left of ``F``.

    On the way to infinity ``F`` is larger there, and its changes beside ``z``, ``scale``, are no larger than itself.
    Curves are looked for of steady states, whose flow may conserve amounts, and in double precision: with fewer digits
    nothing tells a curve from a nearly singular matrix.

    Args: ``matrix, unit, rows`` of :func:`by_factors`, in whose units is ``ahead`` ``(batch, n)``.
    """
    bent, eps = which & ~straight, f.eps
    flow = f.kind.equation and f.kind.flow > 0
    if z.dtype != torch.float64 or not flow or not bool(bent.any()):
        return which & straight
    bent = bent & (NOISE * rounding(f, z, bent) <= eps**0.75 * scale).all(1)
    M, unit, rows = matrix
    back = torch.zeros_like(bent)
    for _ in range(_CORRECTIONS if bool(bent.any()) else 0):
        there = f.residual(z + unit * ahead)
        back = (there.abs() <= eps**0.75 * scale).all(1)
        if bool((back | ~bent).all()):
            break
        ahead = ahead + lstsq_batched(M, -there.nan_to_num() / rows, rcond=eps**0.5)[0]
    return which & (straight | (bent & back))
