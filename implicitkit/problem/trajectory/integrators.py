r"""Integrators: where a trajectory's equations are solved from, and on which steps.

An integrator is a function ``(f, t, y0, accuracy) -> (edges, states)``: it follows ``dy/dt = f(t, y)``, ``y`` a matrix
``(batch, n)``, through the increasing or decreasing times ``t``, and returns the times at which its steps begin and end,
``(N + 1,)``, all of ``t`` among them, with the states there, ``(N + 1, batch, n)``; NaN for a sample that it could not
follow so far.  Nothing in it is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.trajectory.explicit_steps import Followed, Look, March
from implicitkit.registry.operations import operation

Slope = Callable[[Tensor, Tensor], Tensor]


Integrator = Callable[..., Followed]

_STIFF = ("Radau", "BDF")
_STAGES = {"DOP853": 5}  # of an implicit step of no lower order: by three the time of an event was off by 0.17
SCIPY = ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA")


def get_integrator(integrator: Any) -> Integrator:
    """The integrator of a name, or the function itself, as ``(f, t, y0, accuracy, look) -> Followed``; ``look``, where it is
    given, says of the path so far whether it is long enough: ours may end there.

    Raises:
        ValueError: an unknown name. TypeError: neither a name nor a function.
    """
    if callable(integrator) and not isinstance(integrator, type):
        return lambda f, t, y0, accuracy, look=None: Followed(*integrator(f, t, y0, accuracy))
    if isinstance(integrator, str) and integrator in _OURS:
        return _OURS[integrator]
    if isinstance(integrator, str) and integrator.removeprefix("scipy.") in SCIPY:
        method = integrator.removeprefix("scipy.")
        return lambda f, t, y0, accuracy, look=None: _by_scipy(f, t, y0, accuracy, method)
    names = ", ".join(map(repr, (*_OURS, *(f"scipy.{name}" for name in SCIPY))))
    if not isinstance(integrator, str):
        raise TypeError(f"integrator must be one of {names}, or a function; got {type(integrator).__name__}")
    raise ValueError(f"integrator must be one of {names}, or a function; got {integrator!r}")


def _led_by_others(integrator: Integrator) -> Integrator:
    """A sample whose solution ends makes the steps shrink to nothing before that: where others go on, the steps are those
    that they take without it, unless they lose one more that way: what all of them have found together is as good."""

    @functools.wraps(integrator)
    def follow(f: Slope, t: Tensor, y0: Tensor, accuracy: float, look: Look | None = None) -> Followed:
        found = integrator(f, t, y0, accuracy, look)
        lost = ~torch.isfinite(found.states[-1]).all(1)
        shown = compat.batches_in_front(lost)[0]
        if look is not None or not bool(shown.any()) or bool(shown.all()):
            return found
        try:
            led = integrator(f, t, torch.where(lost.unsqueeze(1), torch.nan, y0), accuracy)
        except ConvergenceError:
            return found
        if not torch.equal(compat.batches_in_front(~torch.isfinite(led.states[-1]).all(1))[0], shown):
            return found
        return led._replace(states=beside(lost, found, led.edges, led.states, f))

    return follow


def beside(lost: Tensor, found: Followed, edges: Tensor, states: Tensor, f: Slope) -> Tensor:
    """The states at edges that others have taken, and of samples that are ``lost`` those that had been ``found``."""

    def between(step: Tensor, x: Tensor) -> Tensor:
        begin, x = found.states[step], x[:, None, None]
        return torch.where(x == 0, begin, torch.lerp(begin, found.states[step + 1], x))

    known = found._replace(explicit=False).on(edges, f, between)
    return torch.where(lost.unsqueeze(1), known.states, states)


def dormand_prince(f: Slope, t: Tensor, y0: Tensor, accuracy: float) -> tuple[Tensor, Tensor]:
    """An integrator (see above): explicit steps of order five (:mod:`implicitkit.problem.trajectory.explicit_steps`).

    Raises:
        ConvergenceError: more than 20,000 steps.
    """
    return _explicit(f, t, y0, accuracy)[:2]


@_led_by_others
def _explicit(f: Slope, t: Tensor, y0: Tensor, accuracy: float, look: Look | None = None) -> Followed:
    march = March(f, t, y0, accuracy, look)
    march.run()
    return march.followed


@_led_by_others
def auto(f: Slope, t: Tensor, y0: Tensor, accuracy: float, look: Look | None = None) -> Followed:
    """An integrator (see above): :func:`dormand_prince` as long as accuracy rules its steps, and where stability does
    SciPy's ``Radau``: from the beginning, or from where a sample has ended or ``f`` jumps.

    Raises:
        ConvergenceError: more than 20,000 steps.
    """
    march = March(f, t, y0, accuracy, look)
    march.run(until_stiff=True)
    if not march.stiff or bool(march.now == t[-1]):
        return march.followed
    edges, states = march.path
    rest = torch.cat((march.now.reshape(1), t[(t - march.now) * (t[-1] - march.now) > 0]))
    lost = march.lost.unsqueeze(1)
    # stability has ruled for longer than it shows: of its steps the equations would have too many
    anew = not (march.cornered or bool(compat.batches_in_front(lost)[0].any()))
    begin, y = (t, y0) if anew else (rest, march.y)
    try:
        found = _by_scipy(lambda now, y: torch.where(lost, 0, f(now, y)), begin, y, accuracy, "Radau", march.units)
    except ConvergenceError:  # of all samples: so far they came
        anew, found = False, Followed(rest, march.y.new_full((len(rest), *march.y.shape), torch.nan))
    if anew:
        return found
    there = torch.where(lost, torch.nan, found.states)
    return Followed(torch.cat((edges, found.edges[1:])), torch.cat((states, there[1:])), stiff=found.stiff)


def _by_scipy(f: Slope, t: Tensor, y0: Tensor, accuracy: float, method: str, units: Tensor | None = None) -> Followed:
    """By SciPy's ``solve_ivp``, with Jacobians from PyTorch for methods that use one."""
    stiff, made, (inwards, outwards) = method in _STIFF, JacobianMatrix(f), _mapping(y0)
    edges, states, states_at = operation("integrate")(
        lambda now, y: outwards(f(now, inwards(y))),
        t,
        outwards(y0),
        accuracy,
        method,
        None if units is None else outwards(units),
        (lambda now, y: made.at(lambda v: f(now, v), inwards(y))) if stiff else None,
    )

    def between(step: Tensor, x: Tensor) -> Tensor:
        return inwards(states_at(edges[step] + x * (edges[step + 1] - edges[step])))

    return Followed(
        edges, inwards(states), None if states_at is None else between, stiff, stages=_STAGES.get(method, 3)
    )


def _mapping(y: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """From plain tensors ``(..., batch, n)`` of all samples, those that ``torch.vmap`` maps over among them, to tensors like
    ``y (batch, n)``, and back."""
    over = compat.mapped_over()
    if not over:
        return (lambda plain: plain), (lambda mapped: mapped)
    levels, sizes = zip(*over, strict=True)
    zero = compat.with_batches(torch.zeros((*sizes, 1, 1), dtype=y.dtype, device=y.device), levels)

    def inwards(plain: Tensor) -> Tensor:
        samples = plain.unflatten(-2, (*sizes, y.shape[0]))
        return compat.with_batches(samples.movedim(tuple(range(-2 - len(sizes), -2)), tuple(range(len(sizes)))), levels)

    def outwards(mapped: Tensor) -> Tensor:
        return compat.batches_in_front(zero + mapped)[0].flatten(0, -2)

    return inwards, outwards


_OURS: dict[str, Integrator] = {"auto": auto, "dormand_prince": _explicit}
