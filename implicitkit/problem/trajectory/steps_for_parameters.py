r"""Steps by which derivatives in parameters are followed, too, of which the trajectory sees nothing.

Along a direction ``v`` in ``\theta``, the arguments and what ``f`` captures, they solve (Hairer, Norsett & Wanner 1993,
*Solving Ordinary Differential Equations I*, section I.14)

    e' = (df/dy)(t, y) e + g(t),    g(t) = (df/d\theta)(t, y(t)) v,    e(t_0) = 0.

What ``\theta`` forces the state by at an amplitude of zero (``p sin(20 t)`` at ``p = 0``, a control that begins at zero, a
last layer of zeros) is in ``g`` and not in the trajectory, and no step knows of it.  Each is asked whether its quadrature
integrates ``g`` for one random ``v``, and where it does not it is halved until it does.  Squares (``p^2 sin(20 t)^2`` at
``p = 0``) are not in ``g`` either, and second derivatives are made of them: beside it ``v' (d^2f/d\theta^2) v`` is asked
for in the same way, along what is zero in ``\theta``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, seeded
from implicitkit.foundation.autocast import HALF, cast_as_now, precision, under
from implicitkit.foundation.errors import CapturedTensorError
from implicitkit.foundation.trees import Layout
from implicitkit.problem.trajectory.collocation import radau, slope_of
from implicitkit.problem.trajectory.explicit_steps import NODES, ROWS, STEPS, Between, Followed, Slope
from implicitkit.problem.trajectory.steps_along_variations import allowed
from implicitkit.system import explicit

_PANELS = 3  # of a step, whose quadratures are compared with that of the step
_NUMBERS = 1 << 18  # that ``f`` gives at once, in the longest steps
_MORE = 64  # times as much in all
_HALVED = 30  # times, a step, at most
_FINEST = 1e-9  # relative: differences are rounded
_NOISE = 100.0  # times the accuracy, that may be rounding: smaller slopes count as so large

Forcing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forcing_of(rhs: Callable[..., Any], layout: Layout, t: Tensor, y0: Tensor, args: tuple[Any, ...]) -> Forcing | None:
    """``g`` at times ``(P,)`` and states ``(P, batch, n)``, by central differences, and ``|f|`` there; where something in
    ``\\theta`` is zero, beside it the second derivative along that, ``(P, batch, 2 n)``.  ``None`` where nothing of
    ``\\theta`` is differentiated, or is seen to be, and for numbers of half precision.

    Args:
        rhs: the user's function. t: the times. y0: packed, ``(batch, n)``. args: of ``rhs``, after ``t`` and ``y``.
    """
    if not (torch.is_grad_enabled() or compat.transforms_active() or compat.has_forward_level()):
        return None
    try:
        called = under(cast_as_now(layout.device.type), lambda y, t, *args: rhs(t, y, *args))
        lifted = explicit(called, layout.unpack(y0), t[0], *args)
    except CapturedTensorError:  # is raised where the equations are solved
        return None
    theta = lifted.theta[1:]
    ways = [_way(leaf, i) for i, leaf in enumerate(theta)]
    moving = [leaf.real.dtype for leaf, way in zip(theta, ways, strict=True) if way is not None]
    least = precision(layout.dtype, cast_as_now(layout.device.type))
    if not moving or least in HALF or any(torch.finfo(d).eps > torch.finfo(layout.dtype).eps for d in moving):
        return None  # differences would be rounded

    at_zero = [None if v is None else torch.where(x == 0, v, 0) for x, v in zip(theta, ways, strict=True)]
    twice = any(v is not None and bool(compat.batches_in_front(v != 0)[0].any()) for v in at_zero)

    def moved(t: Tensor, y: Any, by: Tensor, beside: Tensor) -> Any:
        each = zip(theta, ways, at_zero, strict=True)
        return lifted(
            y, (t, *(x if v is None or w is None else (x + by * v + beside * w).to(x.dtype) for x, v, w in each))
        )

    slope, eps = slope_of(moved, layout), torch.finfo(layout.dtype).eps
    once, even = eps ** (1 / 3), eps ** (1 / 6)  # what they are rounded by is ``eps^{2/3}`` of both

    def forcing(t: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sides = t.new_tensor([[once, 0], [-once, 0], [0, even], [0, -even], [0, 0]][: 5 if twice else 2])
        by, beside = sides.repeat_interleave(len(t), 0).unbind(1)
        one = lambda t, y, *by: slope(t, y, *by, rows=len(y) if layout.batch_dims else None)  # noqa: E731
        values = torch.func.vmap(one)(t.repeat(len(sides)), y.repeat(len(sides), 1, 1), by, beside).chunk(len(sides))
        g, size = (values[0] - values[1]) / (2 * once), values[0].abs()
        if not twice:
            return g, size
        return torch.cat((g, (values[2] + values[3] - 2 * values[4]) / even**2), -1), size.repeat(1, 1, 2)

    return forcing


def _way(leaf: Tensor, seed: int) -> Tensor | None:
    """A random direction of an argument that is differentiated, in units of its own; of zeros in those of one."""
    if not (leaf.is_floating_point() or leaf.is_complex()) or not compat.tracked(leaf, batched=False):
        return None
    size = leaf.detach().abs().square().mean().sqrt()
    return torch.where(size > 0, size, 1) * seeded.normal(*leaf.shape, seed=seed).to(leaf.device, leaf.real.dtype)


def resolved(found: Followed, f: Slope, g: Forcing, between: Between, stages: int | None, accuracy: float) -> Followed:
    """What has been found or, where derivatives in parameters need other steps, the trajectory by these.

    Args:
        f: of a time and a state ``(batch, n)``. between: the states between the edges. stages: of the implicit steps whose
            equations are to hold; ``None``: explicit ones.
    """
    edges, accuracy = found.edges, max(accuracy, _FINEST)
    if stages is None:
        rule = edges.new_tensor(ROWS[-1]), edges.new_tensor(NODES)
    else:
        A, c = radau(stages, edges.dtype, edges.device)
        rule = A[-1], c
    count = compat.physical(found.states).numel() // len(edges)
    finer = halved(g, between, edges, rule, accuracy, count)
    return found if finer is None else found.on(finer, f, between)


def halved(
    g: Forcing, between: Between, edges: Tensor, rule: tuple[Tensor, Tensor], accuracy: float, count: int
) -> Tensor | None:
    """The edges of steps that integrate ``g`` as accurately; ``None`` where those that there are do.

    A step loses ``|h sum_i b_i g(t + c_i h) - \\int g|``, the integral by the same quadrature in a third of it at a time,
    beside the largest value that ``\\int g`` has from the beginning to any later step.

    Args:
        between: the states in steps ``(P,)`` at fractions ``(P,)`` of them. rule: ``b`` and ``c``, each ``(s,)``.
        count: of numbers that ``g`` gives at a point.
    """
    N, (b, c) = len(edges) - 1, rule
    many = max(1, _NUMBERS // (2 * (_PANELS + 1) * len(c) * count))
    which = edges.diff().abs().topk(min(N, many))[1].sort()[0]
    panel = torch.arange(_PANELS, device=edges.device, dtype=edges.dtype)[:, None]
    inside = torch.cat((c, ((panel + c) / _PANELS).flatten()))  # fractions of a step
    weights = b.new_zeros(2, len(inside))
    weights[0, : len(c)], weights[1, len(c) :] = b, b.repeat(_PANELS) / _PANELS

    def integrated(which: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, ...]:
        """Parts of steps; over each the integral, and what its quadrature is off by, and the largest slope."""
        x = (begin[:, None] + (end - begin)[:, None] * inside).flatten()
        step, h = which.repeat_interleave(len(inside)), edges[which + 1] - edges[which]
        values, sizes = g(edges[step] + x * (edges[step + 1] - edges[step]), between(step, x))
        values, sizes = (v.nan_to_num(0, 0, 0).unflatten(0, (-1, len(inside))) for v in (values, sizes))
        by_rule, finer = ((end - begin) * h)[:, None, None] * torch.einsum("qj,kjbn->qkbn", weights, values)
        return which, begin, end, finer, (by_rule - finer).abs(), sizes.amax(1)

    parts = integrated(which, torch.zeros_like(edges[which]), torch.ones_like(edges[which]))
    blind = torch.finfo(edges.dtype).eps ** (2 / 3) / (_NOISE * accuracy) * (edges[-1] - edges[0]).abs()
    added: list[Tensor] = []
    for _ in range(_HALVED):
        which, begin, end, whole, off, sizes = parts
        size = whole[(which + begin).argsort()].cumsum(0).abs().amax(0)
        size = torch.maximum(size, blind * sizes.amax(0))
        lost = compat.batches_in_front(off / torch.where(size > 0, size, torch.inf))[0].amax((-2, -1))
        lost = lost.reshape(-1, lost.shape[-1]).amax(0)
        if not added and not float(lost.sum()) > allowed(accuracy):
            return None
        coarse = lost > accuracy
        if not bool(coarse.any()):
            break
        if len(lost) > min(STEPS, _MORE * many):  # it is rounding, or something that nothing integrates
            return None
        first, last, number = begin[coarse], end[coarse], which[coarse]
        middle = (first + last) / 2
        added.append(edges[number] + middle * (edges[number + 1] - edges[number]))
        halves = integrated(number.repeat(2), torch.cat((first, middle)), torch.cat((middle, last)))
        parts = tuple(torch.cat((old[~coarse], new)) for old, new in zip(parts, halves, strict=True))
    every = torch.unique(torch.cat((edges, *added)))
    return every.flip(0) if bool(edges[-1] < edges[0]) else every
