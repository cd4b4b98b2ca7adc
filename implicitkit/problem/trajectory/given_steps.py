r"""Steps and points of steps that the user has given, and whether derivatives by these are those of the equation.

They are kept: a derivative is that of the discrete trajectory which has been asked for, and it is said where that is another
than the equation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.trajectory.accuracy_remarks import APART, tell_unfollowed
from implicitkit.problem.trajectory.collocation import Mesh, radau, times
from implicitkit.problem.trajectory.explicit_steps import Between, Followed
from implicitkit.problem.trajectory.steps_along_variations import along, units_of
from implicitkit.problem.trajectory.steps_for_derivatives import turns_of

Slope = Callable[[Tensor, Tensor], Tensor]


def doubt_given(
    f: Slope, mesh: Mesh, points: Tensor, y0: Tensor, t: Tensor, accuracy: float, jacobian: JacobianMatrix
) -> None:
    r"""Warn where derivatives by these steps are not those of the equation.

    They are not followed where they cannot be off by much, with ``z = h |df/dy|`` of each step: the stability function of
    Radau's ``s`` points is the Pade approximation ``(s - 1, s)``, ``R(z) - e^z = (s - 1)! s! / ((2s - 1)! (2s)!) z^{2s} +
    O(z^{2s+1})`` (Hairer & Wanner 1996, *Solving Ordinary Differential Equations II*, theorem IV.3.11).

    Args:
        f: of times ``(P,)`` and states ``(P, batch, n)``. points: the solution, ``(N, s, batch, n)``. y0: ``(batch, n)``.
            jacobian: of ``f``.
    """
    (N, s), states = points.shape[:2], torch.cat((y0.unsqueeze(0), points[:, -1]))
    edges = torch.cat((times(mesh, t, t.new_zeros(1))[1][:, 0], t[-1:]))
    turns = turns_of(f, edges, states, units_of(states))
    constant = math.factorial(s - 1) * math.factorial(s) / math.factorial(2 * s - 1) / math.factorial(2 * s)
    if max(1.0, N / len(turns)) * float((turns ** (2 * s)).sum(0).max()) * constant > APART:
        ends = torch.cat((t[:1], edges[1 + mesh.last]))
        found = Followed(edges, states)
        off = along(f, _polynomials(states, points), found, s, ends, accuracy, jacobian).off
        if bool((off > APART).any()):
            tell_unfollowed(off)


def _polynomials(states: Tensor, points: Tensor) -> Between:
    """Between the edges of steps: through the state at the begin of each and those at its points, by Lagrange's formula."""
    nodes = torch.cat((points.new_zeros(1), radau(points.shape[1], points.dtype, points.device)[1]))
    values = torch.cat((states[:-1].unsqueeze(1), points), 1)  # (N, s + 1, batch, n)

    def between(step: Tensor, x: Tensor) -> Tensor:
        one = torch.eye(len(nodes), dtype=torch.bool, device=nodes.device)
        ratios = (x[:, None, None] - nodes) / torch.where(one, 1, nodes[:, None] - nodes)  # (P, i, j)
        weights = torch.where(one, 1, ratios).prod(-1)
        return torch.einsum("pi,pibn->pbn", weights, values[step])

    return between
