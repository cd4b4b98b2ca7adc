r"""Steps by which derivatives are followed, too: those of a trajectory together with a variation of it.

Steps are as long as the trajectory allows.  Its derivatives move along what it does not: with a component at zero, from a
state at rest or near to it, a step may be longer than the method is stable for them, or accurate.  All of them are sums of
solutions of the variational equation (Hairer, Norsett & Wanner 1993, *Solving Ordinary Differential Equations I*, section
I.14),

    d' = (df/dy)(t, y) d,

of which one that begins in no special direction has a share of each.  Where the steps may be too long for it, the trajectory
is followed once more as ``(y, d)``.  A stiff one is not: what is at zero beside it is followed by its implicit steps,
however long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.problem.explicit import NODES, ROWS, Followed, cubic

_LONGEST = 32  # steps, of which it is asked whether derivatives are followed in them
_ORDER, _CONSTANT = 6, 3600.0  # |R(z) - e^z| = |z|^6 / 3600, for Radau's three points half of that
_LESS = 300.0  # times the accuracy, that derivatives may lose without a step of their own, ...
_LEAST = 1e-2  # ... and no more than this
_PARTS, _NUMBERS = 4, 1 << 20  # of a step, to compare with; that ``f`` gives at once for that
_FINEST = 1e-11  # relative, of both: differences are rounded

Slope = Callable[[Tensor, Tensor], Tensor]


class Variation(NamedTuple):
    """A trajectory and a variation of it as one, ``(2 batch, n)``.

    Attributes:
        slope_of: the slope of the state alone, of a time and ``(batch, n)``. units: of its numbers, ``(batch, n)``.
    """

    slope_of: Slope
    units: Tensor

    def begin(self, y0: Tensor) -> Tensor:
        """``(y, d)``, the latter in no special direction."""
        return torch.cat((y0, self.units * seeded.normal(y0.shape[1], seed=0).to(y0)))

    def slope(self, t: Tensor, both: Tensor) -> Tensor:
        """The slopes of both; of the variation a central difference, which takes a third of a product, where it is exact
        to ten digits."""
        y, d = both.chunk(2)
        alone = functools.partial(self.slope_of, t)
        if y.dtype != torch.float64:
            return torch.cat((alone(y), autodiff.jvp(alone, (y,), (d,))))
        size = torch.finfo(y.dtype).eps ** (1 / 3) / _size(d / self.units)
        step = size * d
        return torch.cat((alone(y), (alone(y + step) - alone(y - step)) / (2 * size)))


def with_variation(
    integrate: Callable[..., Followed],
    slope: Slope,
    mapped: Slope,
    t: Tensor,
    y0: Tensor,
    found: Followed,
    accuracy: float,
) -> Followed:
    """What has been found or, where derivatives need other steps, the trajectory by these.

    Args:
        integrate: an integrator (:mod:`~implicitkit.problem.integration`). slope: of a time and ``(batch, n)``. mapped: of
            times ``(P,)`` and states ``(P, batch, n)``.
    """
    if not bool(compat.batches_in_front(torch.isfinite(found.states[-1]).all(-1))[0].any()):  # all samples are lost
        return found
    units, count = units_of_variation(mapped, found.edges, found.states, accuracy), len(y0)
    if units is None:
        return found
    along = Variation(slope, units)
    try:
        both = integrate(along.slope, t, along.begin(y0), max(accuracy, _FINEST))
    except ConvergenceError:  # of too many explicit steps: implicit ones on those that there are
        return found._replace(explicit=False)
    between = both.interpolant
    alone = None if between is None else lambda step, x: between(step, x)[:, :count]
    return both._replace(states=both.states[:, :count], interpolant=alone, growth=found.growth)


def units_of_variation(f: Slope, edges: Tensor, states: Tensor, accuracy: float) -> Tensor | None:
    """The units of a variation with which a trajectory has to be followed once more, ``(batch, n)``; ``None`` where its
    steps do for derivatives.

    ``|df/dy|`` is found by three products, as differences, in the longest steps.

    Args:
        f: of times ``(P,)`` and states ``(P, batch, n)``. edges: ``(N + 1,)``. states: there, ``(N + 1, batch, n)``.
        accuracy: of the states, relative.
    """
    h, where = edges.diff().abs().topk(min(_LONGEST, len(edges) - 1))
    t, y = edges[where], states[where]
    peaks = states.nan_to_num(0, 0, 0).abs().amax(0)
    whole, eps = _size(peaks), torch.finfo(y.dtype).eps
    units = torch.maximum(peaks, eps ** (1 / 6) * torch.where(whole > 0, whole, 1))  # else rounding is all that differs
    small = eps**0.5
    slope, way, rates = f(t, y), seeded.normal(y.shape[2], seed=0).to(y).expand_as(y), []
    for _ in range(3):
        way = way / _size(way)
        way = (f(t, y + small * units * way) - slope) / (small * units)
        rates.append(_size(way))
    turns = h[:, None, None] * (rates[1] * rates[2]).sqrt()  # of two in a row, whatever the units of the state
    lost = (turns**_ORDER).nan_to_num(0, 0, 0).sum(0) / _CONSTANT
    worst = float(compat.batches_in_front(lost)[0].max())
    if not worst > allowed(accuracy) or _is_followed(f, edges, states, units, accuracy):
        return None
    return units


def _is_followed(f: Slope, edges: Tensor, states: Tensor, units: Tensor, accuracy: float) -> bool:
    """Is a random variation by these steps, as matrices, that by quarters of them, relative to its size at every edge?

    Asked of few unknowns: what decays may be followed badly where little of it is left."""
    N, (batch, n) = len(edges) - 1, states.shape[1:]
    if 10 * _PARTS * N * batch * n * n > _NUMBERS or compat.batches_in_front(states)[1]:
        return False
    between, h = cubic(edges, states, f(edges, states)), edges.diff()

    def steps(parts: int) -> Tensor:
        """The matrices of all steps by so many in each, ``(N, batch, n, n)``, in units of the state."""
        at = (torch.arange(parts, device=h.device).to(h)[:, None] + h.new_tensor(NODES)) / parts
        x, step = at.flatten().repeat(N), torch.arange(N, device=h.device).repeat_interleave(at.numel())
        t, y, small = edges[step] + x * h[step], between(step, x), torch.finfo(h.dtype).eps ** (1 / 3)
        moves = small * torch.diag_embed(units).movedim(1, 0).unsqueeze(1)  # (n, 1, batch, n)
        apart = [f(t.repeat(n), (y + way * moves).flatten(0, 1)).unflatten(0, (n, -1)) for way in (1, -1)]
        J = ((apart[0] - apart[1]) / (2 * small * units)).permute(1, 2, 3, 0)
        J = J.unflatten(0, (N, parts, -1)) * (h / parts)[:, None, None, None, None, None]
        whole = one = torch.eye(n, dtype=J.dtype, device=J.device).expand(N, batch, n, n)
        for part in range(parts):
            slopes: list[Tensor] = []
            for i, row in enumerate(((), *ROWS)):
                now = one + sum((a * k for a, k in zip(row, slopes, strict=True)), torch.zeros_like(one))
                if i < len(ROWS):
                    slopes.append(J[:, part, i] @ now)
            whole = now @ whole
        return whole

    way = seeded.normal(n, seed=1).to(h).expand(batch, n).unsqueeze(-1)
    d = torch.cat((way, way), -1)
    for coarse, fine in zip(steps(1), steps(_PARTS), strict=True):
        d = torch.cat((coarse @ d[..., :1], fine @ d[..., 1:]), -1)
        size = d[..., 1].norm(dim=-1)
        if not bool(((d[..., 0] - d[..., 1]).norm(dim=-1) <= allowed(accuracy) * size).all()):
            return False
    return True


def allowed(accuracy: float) -> float:
    """What derivatives may lose, relative to their size, by the steps of a trajectory that is so accurate."""
    return min(_LESS * accuracy, _LEAST)


def _size(v: Tensor) -> Tensor:
    return v.square().mean(-1, keepdim=True).sqrt()
