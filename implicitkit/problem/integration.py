r"""Integrators: where a trajectory's equations are solved from, and on which steps.

An integrator is a function ``(f, t, y0, accuracy) -> (edges, states)``: it follows ``dy/dt = f(t, y)``, ``y`` a matrix
``(batch, n)``, through the increasing or decreasing times ``t``, and returns the times at which its steps begin and end,
``(N + 1,)``, all of ``t`` among them, with the states there, ``(N + 1, batch, n)``; NaN for a sample that it could not
follow so far.  Nothing in it is differentiated.

Its steps know nothing of an event, which may change its sign twice within one: :func:`first_crossing` looks at many points
of the cubic through states and slopes, then narrows down; all of that without control flow, so that it works under
``torch.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.explicit import March
from implicitkit.registry.operations import operation

Slope = Callable[[Tensor, Tensor], Tensor]


class Followed(NamedTuple):
    """What an integrator has found, beside ``(edges, states)`` what ours say more: ``stiff``: it took an implicit method for
    the steps; ``states_at``: the states at times ``(P,)`` in between, ``(P, batch, n)``, ``None`` where it says nothing."""

    edges: Tensor
    states: Tensor
    stiff: bool = False
    states_at: Callable[[Tensor], Tensor] | None = None


Integrator = Callable[[Slope, Tensor, Tensor, float], Any]  # tuples (edges, states), with what follows in Followed

_STIFF = ("Radau", "BDF")
SCIPY = ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA")
_POINTS, _EACH = 256, 8  # looked at in all, and in every step, at least: two changes between two of them are not seen
_PARTS, _ROUNDS = 16, 4  # into which the interval of a change is divided, time and again
_JUMP = 0.5  # of the event's change over that interval, left after the last division, where it has no zero there


def get_integrator(integrator: Any) -> Integrator:
    """The integrator of a name, or the function itself.

    Raises:
        ValueError: an unknown name. TypeError: neither a name nor a function.
    """
    if callable(integrator) and not isinstance(integrator, type):
        return integrator
    if isinstance(integrator, str) and integrator in _OURS:
        return _OURS[integrator]
    if isinstance(integrator, str) and integrator.removeprefix("scipy.") in SCIPY:
        method = integrator.removeprefix("scipy.")
        return lambda f, t, y0, accuracy: _by_scipy(f, t, y0, accuracy, method)
    names = ", ".join(map(repr, (*_OURS, *(f"scipy.{name}" for name in SCIPY))))
    if not isinstance(integrator, str):
        raise TypeError(f"integrator must be one of {names}, or a function; got {type(integrator).__name__}")
    raise ValueError(f"integrator must be one of {names}, or a function; got {integrator!r}")


def dormand_prince(f: Slope, t: Tensor, y0: Tensor, accuracy: float) -> tuple[Tensor, Tensor]:
    """An integrator (see above): explicit steps of order five (:mod:`implicitkit.problem.explicit`).

    Raises:
        ConvergenceError: more than 20,000 steps.
    """
    march = March(f, t, y0, accuracy)
    march.run()
    return march.path


def auto(f: Slope, t: Tensor, y0: Tensor, accuracy: float) -> Followed:
    """An integrator (see above): :func:`dormand_prince` as long as accuracy rules its steps, and where stability does
    SciPy's ``Radau``: from the beginning, or from where a sample has ended or ``f`` jumps.  Under ``torch.vmap``, where
    SciPy cannot look at values, the former alone.

    Raises:
        ConvergenceError: more than 20,000 steps.
    """
    march = March(f, t, y0, accuracy)
    march.run(until_stiff=not compat.batches_in_front(march.slope)[1])
    if not march.stiff or bool(march.now == t[-1]) or compat.batches_in_front(march.slope)[1]:
        return Followed(*march.path)
    edges, states = march.path
    rest = torch.cat((march.now.reshape(1), t[(t - march.now) * (t[-1] - march.now) > 0]))
    lost = march.lost.unsqueeze(1)
    # stability has ruled for longer than it shows: of its steps the equations would have too many
    anew = not (march.cornered or bool(lost.any()))
    begin, y = (t, y0) if anew else (rest, march.y)
    try:
        found = _by_scipy(lambda now, y: torch.where(lost, 0, f(now, y)), begin, y, accuracy, "Radau", march.units)
    except ConvergenceError:  # of all samples: so far they came
        anew, found = False, Followed(rest, march.y.new_full((len(rest), *march.y.shape), torch.nan))
    if anew:
        return found
    there = torch.where(lost, torch.nan, found.states)
    return Followed(torch.cat((edges, found.edges[1:])), torch.cat((states, there[1:])), found.stiff)


def _by_scipy(f: Slope, t: Tensor, y0: Tensor, accuracy: float, method: str, units: Tensor | None = None) -> Followed:
    """By SciPy's ``solve_ivp``, with Jacobians from PyTorch for methods that use one."""
    stiff = method in _STIFF
    jacobian = JacobianMatrix(f).at if stiff else None
    edges, states, between = operation("integrate")(f, t, y0, accuracy, method, units, jacobian)
    return Followed(edges, states, stiff, between)


_OURS: dict[str, Integrator] = {"auto": auto, "dormand_prince": dormand_prince}


def hermite(edges: Tensor, states: Tensor, slopes: Tensor, where: Tensor) -> Tensor:
    """Cubic interpolation of values and slopes ``(N + 1, ...)`` at the fractions ``where (s,)`` of every step."""
    h = edges.diff().reshape(-1, 1, *[1] * (states.ndim - 1))
    x = where.reshape(1, -1, *[1] * (states.ndim - 1))
    a, b, da, db = (v.unsqueeze(1) for v in (states[:-1], states[1:], slopes[:-1], slopes[1:]))
    return (1 + 2 * x) * (1 - x) ** 2 * a + x**2 * (3 - 2 * x) * b + h * (x * (1 - x) ** 2 * da - x**2 * (1 - x) * db)


class Crossing(NamedTuple):
    """``time`` ``()``; whether there is a change of sign, and whether the event passes through zero there (it may jump, or
    have a pole); and its values at both ends of the trajectory."""

    time: Tensor
    found: Tensor
    passes: Tensor
    begin: Tensor
    end: Tensor


def first_crossing(
    event: Callable[[Tensor, Tensor], Tensor], edges: Tensor, states: Tensor, slopes: Tensor
) -> Crossing:
    """The first change of sign of ``event(t, y)``.

    Args:
        event: of a time ``()`` and a packed state ``(1, n)``. edges: of the steps, ``(N + 1,)``. states, slopes: there,
            ``(N + 1, 1, n)``.

    Raises:
        ValueError: the event does not return one number. TypeError: it returns one that has no sign, a truth value.
    """
    each = max(_EACH, -(-_POINTS // (len(edges) - 1)))
    at = torch.linspace(0, 1, each + 1, dtype=edges.dtype, device=edges.device)[:-1]
    times = torch.cat(((edges[:-1, None] + edges.diff()[:, None] * at).flatten(), edges[-1:]))
    g = torch.func.vmap(event)(times, torch.cat((hermite(edges, states, slopes, at).flatten(0, 1), states[-1:])))
    if g.shape != times.shape:
        raise ValueError(f"event must return one number, got shape {tuple(g.shape[1:])}")
    if not g.is_floating_point():
        raise TypeError(
            f"event must return a real number, whose sign changes at the event, got {g.dtype}: y - 0.5, not y < 0.5"
        )
    changes = _changes(g)
    first, a, b = _first(g, changes)
    step = torch.cat((first, first + each)) // each
    e = edges.gather(0, step)
    s, d = (v.gather(0, step.view(2, 1, 1).expand(2, *v.shape[1:])) for v in (states, slopes))
    low, width, whole = (first % each).to(e.dtype) / each, 1 / each, (b - a).abs()
    for _ in range(_ROUNDS):
        x = low + width * torch.linspace(0, 1, _PARTS + 1, dtype=e.dtype, device=e.device)
        parts = torch.func.vmap(event)(e[0] + (e[1] - e[0]) * x, hermite(e, s, d, x).squeeze(0))
        first, a, b = _first(parts, _changes(parts))
        width = width / _PARTS
        low = low + width * first.to(low.dtype)
    x = low + width * torch.where(a == b, 0.5, a / (a - b))
    time = (e[0] + (e[1] - e[0]) * x).squeeze(0)
    return Crossing(time, changes.any(), ((b - a).abs() <= _JUMP * whole).squeeze(0), g[0], g[-1])


def _changes(g: Tensor) -> Tensor:
    return (g[:-1].sign() * g[1:].sign() < 0) | ((g[1:] == 0) & (g[:-1] != 0))


def _first(g: Tensor, changes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the first change begins, ``(1,)``, and the values at both its ends."""
    first = changes.to(g.dtype).argmax().unsqueeze(0)
    return first, g.gather(0, first), g.gather(0, first + 1)
