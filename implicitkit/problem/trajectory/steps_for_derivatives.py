r"""Steps by which derivatives are followed, too: those of a trajectory together with a variation of it.

Steps are as long as the trajectory allows.  Its derivatives move along what it does not: with a component at zero, from a
state at rest or near to it, a step may be longer than the method is stable for them, or accurate.  All of them are sums of
solutions of the variational equation (Hairer, Norsett & Wanner 1993, *Solving Ordinary Differential Equations I*, section
I.14),

    d' = (df/dy)(t, y) d,

of which one that begins in no special direction has a share of each.  Where the steps may be too long for it, steps of few
unknowns are asked as matrices whether they are (:mod:`~implicitkit.problem.trajectory.steps_as_matrices`), and implicit
ones of many along two variations (:mod:`~implicitkit.problem.trajectory.steps_along_variations`).  If so, those of a stiff
equation are halved, and otherwise the trajectory is followed once more as ``(y, d)``.

Steps that the user has given are kept (:mod:`~implicitkit.problem.trajectory.given_steps`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.trajectory.accuracy_remarks import APART, tell_lost
from implicitkit.problem.trajectory.collocation import radau
from implicitkit.problem.trajectory.explicit_steps import Between, Followed
from implicitkit.problem.trajectory.integrators import auto, beside
from implicitkit.problem.trajectory.steps_along_variations import FINEST, allowed, along, units_of
from implicitkit.problem.trajectory.steps_as_matrices import Propagation, explicit_rule

_LONGEST = 32  # steps, of which it is asked whether derivatives are followed in them
_ORDER, _CONSTANT = 6, 3600.0  # |R(z) - e^z| = |z|^6 / 3600, for Radau's three points half of that
_KINKED = 1e-3  # of derivatives, is what a kink on the way may make of them
_EXPLICIT = 30.0  # times the implicit steps, is |df/dy| of the time: these are taken

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
    between: Callable[[Followed], Between],
    t: Tensor,
    y0: Tensor,
    found: Followed,
    accuracy: float,
    jacobian: JacobianMatrix | None,
    sharp: bool,
) -> Followed:
    """What has been found or, where derivatives need other steps, the trajectory by these.

    Args:
        integrate: an integrator (:mod:`~implicitkit.problem.trajectory.integrators`). slope: of a time and ``(batch, n)``.
            mapped: of times ``(P,)`` and states ``(P, batch, n)``. between: the states between the edges of what was found.
            jacobian: of ``mapped``; ``None``: nobody asks for derivatives. sharp: there may be kinks, that these meet.
    """
    edges, states = found.edges, found.states
    if not bool(compat.batches_in_front(torch.isfinite(states[-1]).all(-1))[0].any()):  # all samples are lost
        return found
    units, fine, stiff, known = units_of(states), max(accuracy, FINEST), found.stiff, between(found)
    turns = turns_of(mapped, edges, states, units)
    rules, asked = (explicit_rule(edges), radau(found.stages, edges.dtype, edges.device)), torch.isin(edges[1:], t)
    steps, wide = (mapped, known, edges), compat.batches_in_front(states)[1]
    if not stiff and not float((turns**_ORDER).sum(0).max()) / _CONSTANT > allowed(accuracy):
        across = Propagation(*steps, rules[0], asked, units, max(fine, _KINKED / 10), _KINKED)
        if sharp and found.explicit and not wide and across.fits(len(edges)):
            return found.on(across.halved[0], slope, known)
        return found
    explicit, implicit = (Propagation(*steps, rule, asked, units, fine, allowed(accuracy)) for rule in rules)
    if (explicit if found.explicit else implicit).fits(len(edges)) and not wide:
        many = float(turns.sum(0).max()) / _EXPLICIT if integrate is auto else 0.0
        stiff = stiff or (many > len(edges) and many > len(implicit.halved[0]))
        if found.explicit and not stiff and explicit.halved[1]:
            return found.on(explicit.halved[0], slope, known)
        if implicit.halved[1]:
            return found._replace(explicit=False, stiff=stiff).on(implicit.halved[0], slope, known)
    elif not stiff:
        try:
            return _anew(integrate, Variation(slope, units), t, y0, found, fine)
        except ConvergenceError:  # of too many explicit steps: implicit ones
            pass
    if jacobian is None:
        return found._replace(explicit=False, stiff=stiff)
    verdict = along(mapped, known, found, found.stages, t, accuracy, jacobian)
    if verdict.edges is None and bool((verdict.off > APART).any()):
        tell_lost(verdict.off)
    finer = edges if verdict.edges is None else verdict.edges
    return found._replace(explicit=False, stiff=stiff).on(finer, slope, known)


def _anew(
    integrate: Callable[..., Followed], along: Variation, t: Tensor, y0: Tensor, found: Followed, accuracy: float
) -> Followed:
    """The trajectory by the steps of itself and a variation, of samples that have not ended."""
    lost, count = ~torch.isfinite(found.states[-1]).all(1), len(y0)
    start = along.begin(torch.where(lost.unsqueeze(1), torch.nan, y0))
    both = integrate(along.slope, t, start, accuracy)
    between = both.interpolant
    alone = None if between is None else lambda step, x: between(step, x)[:, :count]
    states = both.states[:, :count]
    if bool(compat.batches_in_front(lost)[0].any()):
        states = beside(lost, found, both.edges, states, along.slope_of)
    return both._replace(states=states, interpolant=alone, growth=found.growth)


def turns_of(f: Slope, edges: Tensor, states: Tensor, units: Tensor) -> Tensor:
    """``h |df/dy|`` in the longest steps, ``(P, *batch, 1)``: by three products, as differences.

    Args:
        f: of times ``(P,)`` and states ``(P, batch, n)``. edges: ``(N + 1,)``. states: there, ``(N + 1, batch, n)``.
    """
    h, where = edges.diff().abs().topk(min(_LONGEST, len(edges) - 1))
    t, y = edges[where], states[where]
    small = torch.finfo(y.dtype).eps ** 0.5
    slope, way, rates = f(t, y), seeded.normal(y.shape[2], seed=0).to(y).expand_as(y), []
    for _ in range(3):
        way = way / _size(way)
        way = (f(t, y + small * units * way) - slope) / (small * units)
        rates.append(_size(way))
    turns = h[:, None, None] * (rates[1] * rates[2]).sqrt()  # of two in a row, whatever the units of the state
    plain, batches = compat.batches_in_front(turns.nan_to_num(0, 0, 0))
    return plain.movedim(batches, 0)


def _size(v: Tensor) -> Tensor:
    return v.square().mean(-1, keepdim=True).sqrt()
