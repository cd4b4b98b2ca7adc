r"""Derivatives of what a gauge leaves alone.

Where solutions come in families (potentials and ratings up to a constant, positions up to a motion) ``A = dF/dz`` is
singular at each of them.  In reverse mode

    A^T u = v

has a solution if and only if ``v`` is orthogonal to the null space of ``A``: what is asked for does not change along the
family.  Then for every way ``z(\theta)`` through the solutions ``A dz = -F_\theta d\theta``, and so

    v^T dz = u^T A dz = -u^T F_\theta d\theta

whichever solution ``u`` is taken; it is that of least norm.  Where a change of ``\theta`` leaves no solutions at all (one
more unit of current into a network, and none out of it) there is no derivative along it, and what comes out there means
nothing: that is said.

A double root, or one of any order, is singular, too, and no family: ``z(\theta)`` has no derivative there, and none of this
holds.  So a step is taken along the null space, and from there, with ``A`` as it is, the way back to a solution,

    y_0 = z + h n,   y_{k+1} = y_k - A^+ F(y_k),   A n = 0,   h = eps^{1/8} |z|,

which keeps what was moved along ``n``.  Where ``F`` does not vanish on this way there is no family, and the system is
refused (roots of the order seven, in single precision five, are told from one no more).

In forward mode nothing shows what will be asked of ``dz``, and the system is refused.

Source: Golub & Pereyra (1973), SIAM J. Numer. Anal. 10(2), for the pseudoinverse; Golub & Van Loan (2013), section 5.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.linear_map import Map
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense import SINGULAR, lstsq_batched

_LARGEST = 1024  # unknowns of which singular values are taken
_NUMBERS = 1 << 25  # in all matrices, at most
_BACK = 8  # corrections on the way back to a solution
_ROUNDED = 1e3  # units of rounding
_SAID = (
    "the Jacobian of the equations is singular at the solution: solutions are not isolated there (a gauge, such as "
    "potentials or ratings up to a constant). The result does not change along them, and its derivative holds for every "
    'change of the parameters under which solutions remain. If that is intended, rule=ik.Implicit(linear_solver="lsmr") '
    "says so, and covers forward mode and second derivatives; otherwise add the equation that fixes the gauge"
)


def without_gauge(
    A: Operator, b: Tensor, found: LinearSolution, rtol: float, residual: Map, z: Tensor
) -> LinearSolution:
    """``found``, and where it failed at a singular block the ``x`` of least norm, if ``|A x - b| <= rtol |b|``.

    Args:
        A: the transposed Jacobian of every sample. b: right-hand sides, the blocks running fastest, ``(k batch, n)``.
        rtol: singular values below this share of the largest are zero; of the residual, too.
        residual: ``F``. z: the solution ``(samples, n)``; the blocks of ``A`` are those of its samples, again and again.
    """
    open_ = ~found.converged & torch.isfinite(b).all(1)
    few = A.size <= _LARGEST and A.batch * A.size**2 <= _NUMBERS
    if found.reason != SINGULAR or not few or not bool(open_.any()):
        return found
    matrix, columns = A.dense(), b.view(-1, A.batch, A.size).permute(1, 2, 0)
    x, ok, _ = lstsq_batched(matrix, columns, rcond=rtol)
    left = torch.linalg.vector_norm(matrix @ x - columns, dim=1).T.reshape(-1)
    taken = open_ & ok.repeat(len(b) // A.batch) & (left <= rtol * torch.linalg.vector_norm(b, dim=1))
    if bool(taken.any()):
        taken = taken & _in_families(matrix[: len(z)], residual, z, rtol).repeat(len(b) // len(z))
    if not bool(taken.any()):
        return found
    x = torch.where(taken.unsqueeze(1), x.permute(2, 0, 1).reshape(b.shape), found.x)
    norm = torch.where(taken, left, found.residual_norm)
    return found._replace(x=x, residual_norm=norm, converged=found.converged | taken, doubt=found.doubt or _SAID)


def _in_families(matrix: Tensor, residual: Map, z: Tensor, rtol: float) -> Tensor:
    """Which samples have another solution beside ``z`` along their null space, ``(samples,)``; ``matrix``: ``A^T``."""
    eps, matrix = torch.finfo(z.dtype).eps, torch.nan_to_num(matrix)
    left, values, right = torch.linalg.svd(matrix)
    null = values <= rtol * values[:, :1]
    along = (left @ (null * seeded.normal(z.shape[1], seed=0x47).to(z)).unsqueeze(2)).squeeze(2)
    along = torch.nan_to_num(along / torch.linalg.vector_norm(along, dim=1, keepdim=True)).to(z)
    size = z.abs().amax(1, keepdim=True)
    h = eps**0.125 * torch.where(size > 0, size, 1)
    inverse = torch.where(null, 0, 1 / torch.where(null, 1, values))
    y = z + h * along
    with torch.no_grad():
        for _ in range(_BACK):
            back = left @ (inverse.unsqueeze(2) * (right @ residual(y).to(matrix).unsqueeze(2)))
            y = y - back.squeeze(2).to(z)
        there = torch.linalg.vector_norm(residual(y), dim=1)
    # false for NaN: the way led out of the domain
    return there <= _ROUNDED * eps * values[:, 0] * (size + h).squeeze(1)
