r"""Is the infimum of a program attained, or only ever come nearer to, further and further out?

    minimise exp(-x),      1 / x,      the logistic loss of data that a plane separates

have none, and any solver stops somewhere, where a direction ``d`` is left whose slope has died out.  It is what ``J``, the
Jacobian of the optimality conditions, leaves of ``x``,

    d = delta (J + delta I)^{-1} (x, 0),

and the conditions hold at ``w + d`` as they do at ``w``.  Of linear and quadratic programs the infimum is attained wherever
it is finite (Frank & Wolfe 1956, "An algorithm for quadratic programming", appendix i), so only curved cones are asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.storage import Entries

_FAR = 10.0  # times what the data say, ``1 + |b|``, that ``A x`` must be: who doubles zero stays where he is
_SHARE = 0.1  # of ``x``, that ``d`` must be
_NEAR = 1e-9  # delta
_HELD = 1e-5  # relative to the data: a residual further out that is as good as none
NOT_ATTAINED = (
    "the solution is where the solver stopped: far beyond the conditions of optimality hold as well. The infimum may "
    "not be attained (exp(-x), 1 / x, a logistic loss of separable data), or every point of a ray is a solution; bound the "
    "variables, or add a term that grows (a penalty)"
)


def runs_away(problem: ConeProgram, w: Tensor, data: Sequence[Tensor]) -> Tensor:
    """Which solutions ``w`` ``(batch, n + m)`` are as good further out, ``(batch,)``."""
    if problem.dual.cones.polyhedral or problem.dual.smoothing or not w.shape[1]:
        return torch.zeros(len(w), dtype=torch.bool, device=w.device)
    x = w[:, : problem.n]
    P, q, A, b = data
    reach = torch.linalg.vector_norm(problem.A_held.times(A, x), torch.inf, dim=1)
    far = reach >= _FAR * (1 + torch.linalg.vector_norm(b, torch.inf, dim=1))
    if not bool(far.any()):
        return far
    J = problem.jacobian(w, P, A, b, _NEAR)[0]
    ray = torch.cat([x, torch.zeros_like(w[:, problem.n :])], 1)
    if isinstance(problem.A_held, Entries):
        d = _NEAR * J.sparse().solve(ray)
    else:
        near = _NEAR * torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
        d = _NEAR * torch.linalg.solve_ex(J.dense() + near, ray)[0]
    left = torch.linalg.vector_norm(problem.residual(w + d, *data[:4]), dim=1)
    scale = 1 + torch.linalg.vector_norm(torch.cat([q, b], 1), dim=1)
    along = torch.linalg.vector_norm(d[:, : problem.n], dim=1) >= _SHARE * torch.linalg.vector_norm(x, dim=1)
    return far & along & (left <= _HELD * scale)
