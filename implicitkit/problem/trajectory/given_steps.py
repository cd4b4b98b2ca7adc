r"""Steps and points of steps that the user has given, and whether derivatives by these are those of the equation.

They are kept: a derivative is that of the discrete trajectory which has been asked for, and it is said where that is another
than the equation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat, seeded
from implicitkit.foundation.numbers import numbers
from implicitkit.foundation.trees import tree_flatten
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.trajectory.accuracy_remarks import APART, tell_unfollowed
from implicitkit.problem.trajectory.collocation import Mesh, radau, times
from implicitkit.problem.trajectory.explicit_steps import Between, Followed
from implicitkit.problem.trajectory.steps_along_variations import along, units_of
from implicitkit.problem.trajectory.steps_for_derivatives import turns_of

Slope = Callable[[Tensor, Tensor], Tensor]
_REMEMBERED = 1000  # verdicts
_known: dict[Hashable, tuple[int, np.ndarray]] = {}  # how often it was asked for, and what samples were off by


def doubt_given(
    rhs: Any,
    args: Any,
    f: Slope,
    mesh: Mesh,
    points: Tensor,
    y0: Tensor,
    t: Tensor,
    accuracy: float,
    jacobian: JacobianMatrix,
) -> None:
    r"""Warn where derivatives by these steps are not those of the equation.

    They are not followed where they cannot be off by much, with ``z = h |df/dy|`` of each step: the stability function of
    Radau's ``s`` points is the Pade approximation ``(s - 1, s)``, ``R(z) - e^z = (s - 1)! s! / ((2s - 1)! (2s)!) z^{2s} +
    O(z^{2s+1})`` (Hairer & Wanner 1996, *Solving Ordinary Differential Equations II*, theorem IV.3.11).

    What following them has shown of a function is remembered while its steps and shapes are what they were, ``z`` and the
    sizes of its arguments too, to half an octave, and ``J = df/dy`` bends as it did (:func:`_bends`); and they are followed
    again at every use whose number is a power of two, since what a function captures changes unseen.

    Args:
        rhs, args: the user's function and its arguments. f: it, of times ``(P,)`` and states ``(P, batch, n)``.
        points: the solution, ``(N, s, batch, n)``. y0: ``(batch, n)``. jacobian: of ``f``.
    """
    (N, s), states = points.shape[:2], torch.cat((y0.unsqueeze(0), points[:, -1]))
    edges = torch.cat((times(mesh, t, t.new_zeros(1))[1][:, 0], t[-1:]))
    turns = turns_of(f, edges, states, units_of(states))
    constant = math.factorial(s - 1) * math.factorial(s) / math.factorial(2 * s - 1) / math.factorial(2 * s)
    worst = float((turns ** (2 * s)).sum(0).max())
    if not max(1.0, N / len(turns)) * worst * constant > APART:
        return
    one = getattr(rhs, "__code__", type(rhs)), id(getattr(rhs, "__self__", None if hasattr(rhs, "__code__") else rhs))
    sizes = (
        *(_octaves(leaf) for leaf in tree_flatten((args, t))[0]),
        round(math.log2(worst) / s) if worst < math.inf else 0,
    )
    key = (*one, N, s, tuple(compat.physical(y0).shape), y0.dtype, accuracy, sizes, _bends(f, edges, states))
    uses, off = _known.get(key, (0, None))
    if off is None or uses & (uses - 1) == 0:  # at the first use, the second, the fourth, ...
        ends, known = torch.cat((t[:1], edges[1 + mesh.last])), _polynomials(states, points)
        if len(_known) >= _REMEMBERED:
            _known.clear()
        off = along(f, known, Followed(edges, states), s, ends, accuracy, jacobian).off
    _known[key] = uses + 1, off
    if bool((off > APART).any()):
        tell_unfollowed(off)


def _octaves(leaf: Any) -> Any:
    """The size of an argument, to half an octave."""
    if not isinstance(leaf, Tensor) or not leaf.dtype.is_floating_point:
        return type(leaf)
    size = float(compat.physical(leaf.detach()).abs().max()) if leaf.numel() else 0.0
    return round(2 * math.log2(size)) if 0 < size < math.inf else size


def _bends(f: Slope, edges: Tensor, states: Tensor) -> tuple[int, ...]:
    """How far ``J w`` and ``J J w`` turn from ``w``, in quarters, in the middle of the trajectory, on average:
    where they turn back and return, ``J`` damps; where they do neither, it turns."""
    middle = len(edges) // 2
    t, y = edges[middle : middle + 1], states[middle : middle + 1]
    w = seeded.normal(y.shape[2], seed=0).to(y).expand_as(y)
    small, units, ways = torch.finfo(y.dtype).eps ** 0.5, units_of(y), [w]
    for _ in range(2):
        way = ways[-1] / torch.linalg.vector_norm(ways[-1], dim=-1, keepdim=True)
        ways.append((f(t, y + small * units * way) - f(t, y)) / (small * units))
    cosines = [torch.nn.functional.cosine_similarity(w, way, dim=-1) for way in ways[1:]]
    plain = numbers(compat.batches_in_front(torch.stack(cosines, -1))[0].nan_to_num(0, 0, 0))
    return tuple(np.round(4 * plain.reshape(-1, 2).mean(0)).astype(int).tolist())


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
