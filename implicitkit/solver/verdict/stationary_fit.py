r"""Has a fit come to rest, by its residual vector and the derivative of that?"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import cholesky_batched, lstsq_batched
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import in_working_precision
from implicitkit.solver.verdict.newton_correction import DENSE, is_small

_COSINE, _GOOD_FIT = 0.1, 1e-4  # of residuals of a fit with a column of J, or of what cancels there
_HALF, LONG = 0.5, 1e-3  # of the residuals, what a step leaves that a fit is worth; and of z, what is a long one
_NUMBERS = 1 << 25  # in the Jacobians of a fit


def as_fit(f: Evaluations, z: Tensor) -> tuple[Tensor, Tensor] | None:
    """``dr/dz`` ``(batch, m, n)`` and ``r`` ``(batch, m)`` of a fit with few unknowns: a correction by these (Gauss and
    Newton's) has the root of the condition of one by the gradient and its derivative."""
    if not f.kind.of_residuals or z.shape[1] > DENSE:
        return None
    vector, _ = f.residuals_graph(z)
    if vector.numel() * z.shape[1] > _NUMBERS:
        return None
    return in_working_precision(f.residuals_jacobian(z)), in_working_precision(vector.detach())


def well_fitted(J: Tensor, r: Tensor, z: Tensor, F: Tensor, which: Tensor) -> Tensor:
    """Where Gauss and Newton's correction is small beside ``z`` and ``J`` is far from singular, ``(batch,)``: nothing more
    need be asked then.  Of all samples, as far as those ``which`` depend on it."""
    columns = torch.linalg.vector_norm(J, dim=1)
    usable = torch.isfinite(J).flatten(1).all(1) & torch.isfinite(r).all(1) & (columns > 0).all(1) & (F != 0).any(1)
    matrix = torch.where(usable[:, None, None], J / columns.unsqueeze(1), 0)  # of the others singular
    b = torch.where(usable[:, None], -r, 0)
    d, regular = _by_normal_equations(matrix, b)
    if not bool((regular | ~which).all()):
        d, regular, _ = lstsq_batched(matrix, b)
        values = torch.linalg.svdvals(matrix)
        regular = regular & (values[:, -1] > torch.finfo(J.dtype).eps ** 0.5 * values[:, 0])
    return regular & is_small(d / columns, z, torch.finfo(z.dtype).eps) & explains(J, r, in_working_precision(z))[1]


def halves(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Where, of the samples ``which``, a long step of Gauss and Newton is to leave half of the residuals or less,
    ``min |J d + r| <= |r| / 2`` with ``|d_j| > |z_j| / 1000``, ``(batch,)``, though ``J'r`` be small,
    as where columns are all but parallel; nowhere where ``J`` is too large to ask."""
    found = as_fit(f, z)
    if found is None:
        return torch.zeros_like(which)
    J, r = found
    columns = torch.linalg.vector_norm(J, dim=1, keepdim=True)
    A = J / torch.where(columns > 0, columns, 1)
    usable = torch.isfinite(A).flatten(1).all(1) & torch.isfinite(r).all(1)
    A, b = torch.where(usable[:, None, None], A, 0), torch.where(usable[:, None], r, 0)
    d, _, _ = lstsq_batched(A, -b)
    left = torch.linalg.vector_norm(b + (A @ d.unsqueeze(2)).squeeze(2), dim=1)
    long = (d.abs() > LONG * columns.squeeze(1) * z.abs()).any(1)
    return which & usable & long & (left <= _HALF * torch.linalg.vector_norm(b, dim=1))


def _by_normal_equations(A: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``argmin |A d - b|``, ``(batch, n)``, and where it is that to half the digits, ``(batch,)``: the condition of ``A`` is
    less than ``|A|_F |L^-1|_F``, of ``A'A = L L'``.  A tenth of the time that singular values take."""
    L, ok = cholesky_batched(A.mT @ A)
    inverse = torch.linalg.solve_triangular(L, torch.eye(L.shape[1], dtype=L.dtype, device=L.device), upper=False)
    condition = torch.linalg.vector_norm(A, dim=(1, 2)) * torch.linalg.vector_norm(inverse, dim=(1, 2))
    d = torch.cholesky_solve(A.mT @ b.unsqueeze(2), L).squeeze(2)
    return d, ok & (condition < torch.finfo(A.dtype).eps ** -0.25)


def explains(matrix: Tensor, r: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Where the residuals of a fit are all but orthogonal to the columns of ``J``, and where they are, or are little of
    what cancels in them, ``|J_k z_k|``; ``(batch,)`` each.  In no units: ``z_k`` may be 1e-18 beside another of 100.

    Args:
        matrix: ``J``, whose columns may have units, ``(batch, m, n)``. r: ``(batch, m)``. point: ``z`` in them.
    """
    norm, columns = torch.linalg.vector_norm(r, dim=1), torch.linalg.vector_norm(matrix, dim=1)
    along = (matrix.mT @ r.unsqueeze(2)).squeeze(2).abs()
    orthogonal = (along <= _COSINE * columns * norm.unsqueeze(1)).all(1)
    return orthogonal, orthogonal | (norm <= _GOOD_FIT * (columns * point.abs()).amax(1))
