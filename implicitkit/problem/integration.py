r"""Integrators: where a trajectory's equations are solved from, and on which steps.

An integrator is a function ``(f, t, y0, accuracy) -> (edges, states)``: it follows ``dy/dt = f(t, y)``, ``y`` a matrix
``(batch, n)``, through the increasing or decreasing times ``t``, and returns the times at which its steps begin and end,
``(N + 1,)``, all of ``t`` among them, with the states there, ``(N + 1, batch, n)``.  Nothing in it is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.errors import ConvergenceError
from implicitkit.linear.sparse_form import pattern_of_samples
from implicitkit.registry.operations import operation

__all__ = ["dormand_prince", "explicit_or_stiff", "follow", "get_integrator", "hermite"]

Slope = Callable[[Tensor, Tensor], Tensor]
Integrator = Callable[[Slope, Tensor, Tensor, float], tuple[Tensor, Tensor]]

SCIPY = ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA")
_STEPS = 20_000
_LIMIT = (
    2.5  # |h lambda|, near 3.3 where explicit steps of this order become unstable (Hairer & Wanner 1996, section IV.2)
)
_LOOKS, _EVERY = 50, 5  # steps before the first look at that, and from one to the next
_PATIENCE = 12  # looks that say so, less those that do not

# Dormand & Prince 1980, J. Comput. Appl. Math. 6, 19-26, table 2: RK5(4)7M.
_A = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_C = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def get_integrator(integrator: Any) -> Integrator:
    """The integrator of a name, or the function itself.

    Raises:
        ValueError: an unknown name. TypeError: neither a name nor a function.
    """
    if callable(integrator) and not isinstance(integrator, type):
        return integrator
    if integrator == "auto":
        return explicit_or_stiff
    if integrator == "dormand_prince":
        return dormand_prince
    if isinstance(integrator, str) and integrator.removeprefix("scipy.") in SCIPY:
        method = integrator.removeprefix("scipy.")
        return lambda f, t, y0, accuracy: _by_scipy(f, t, y0, accuracy, method)
    names = ", ".join(map(repr, ("auto", "dormand_prince", *(f"scipy.{name}" for name in SCIPY))))
    if not isinstance(integrator, str):
        raise TypeError(f"integrator must be one of {names}, or a function; got {type(integrator).__name__}")
    raise ValueError(f"integrator must be one of {names}, or a function; got {integrator!r}")


def stages(f: Slope, t: Tensor, y: Tensor, first: Tensor, h: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One step of Dormand & Prince: the state after it, and the seven slopes, of which the last is that at its end."""
    slopes, new = [first], y
    for row, c in zip(_A, _C, strict=True):
        new = y + h * sum(a * k for a, k in zip(row, slopes, strict=True) if a)
        slopes.append(f(t + c * h, new))
    return new, slopes


def follow(f: Slope, edges: Tensor, y0: Tensor) -> Tensor:
    """The states at given edges ``(N + 1,)`` by steps of Dormand & Prince, ``(N + 1, batch, n)``: no control flow."""
    states, slope = [y0], f(edges[0], y0)
    for t, h in zip(edges[:-1].unbind(), edges.diff().unbind(), strict=True):
        new, slopes = stages(f, t, states[-1], slope, h)
        states.append(new)
        slope = slopes[-1]
    return torch.stack(states)


class _Stiff(Exception):
    """Explicit steps are as short as stability has them, not accuracy."""


def explicit_or_stiff(f: Slope, t: Tensor, y0: Tensor, accuracy: float) -> tuple[Tensor, Tensor]:
    """:func:`dormand_prince`, and where the equation turns out to be stiff, or it finds no trajectory, SciPy's Radau."""
    try:
        return dormand_prince(f, t, y0, accuracy, stiff=_Stiff)
    except (_Stiff, ConvergenceError) as error:
        try:
            return _by_scipy(f, t, y0, accuracy, "Radau")
        except ConvergenceError:
            if isinstance(error, ConvergenceError):
                raise error from None
            raise


def _by_scipy(f: Slope, t: Tensor, y0: Tensor, accuracy: float, method: str) -> tuple[Tensor, Tensor]:
    pattern = lambda: pattern_of_samples(lambda y: f(t[0], y), y0)  # noqa: E731
    found: tuple[Tensor, Tensor] = operation("integrate")(f, t, y0, accuracy, method, pattern)
    return found


def dormand_prince(
    f: Slope, t: Tensor, y0: Tensor, accuracy: float, stiff: type[Exception] | None = None
) -> tuple[Tensor, Tensor]:
    """An integrator (see above): explicit steps of order five whose estimated error, the largest of all samples, is below
    ``accuracy (|y| + 10^-3)``, root mean squares.

    Raises:
        stiff: (where it is given) steps are limited by stability, ``h |f(y_7) - f(y_6)| / |y_7 - y_6| > 2.5`` of the last
            two stages, at twelve looks more than not, every five steps (Hairer & Wanner 1996, section IV.2).
        ConvergenceError: more than 20,000 steps, or a slope that is not finite: the equation is stiff, or ends.
    """
    y, now, slope = y0, t[0], f(t[0], y0)
    edges, states = [now], [y0]
    mean = lambda v: v.square().mean(1).sqrt()  # noqa: E731
    unstable = 0
    h = (t[1] - t[0]) * min(
        1.0, float(0.01 * (mean(y0).max() + 1e-3) / mean((t[1] - t[0]) * slope).max().clamp_min(1e-12))
    )
    for goal in t[1:]:
        while float((goal - now).abs()) > 0:
            if len(edges) > _STEPS:
                raise _stiff(f"it took {_STEPS} steps to reach t = {float(now):.3g}")
            last = float(h.abs()) >= 0.999 * float((goal - now).abs())
            step = goal - now if last else h
            new, slopes = stages(f, now, y, slope, step)
            error = step * sum(e * k for e, k in zip(_ERROR, slopes, strict=True))
            allowed = accuracy * (torch.maximum(mean(y), mean(new)) + 1e-3)
            ratio = float((mean(error) / allowed).max())
            if not ratio <= 1:
                factor = 0.1 if ratio != ratio or ratio == float("inf") else max(0.2, 0.9 * ratio**-0.2)
                h = step * factor
                if abs(float(h)) <= 4 * torch.finfo(h.dtype).eps * max(abs(float(now)), abs(float(goal))):
                    raise _stiff(f"its steps shrank to nothing at t = {float(now):.3g}")
                continue
            if stiff is not None and len(edges) >= _LOOKS and len(edges) % _EVERY == 0:
                unstable = max(0, unstable + (1 if _is_limited(y, new, slopes, step) else -1))
                if unstable >= _PATIENCE:
                    raise stiff
            now, y, slope = goal if last else now + step, new, slopes[-1]
            edges.append(now)
            states.append(y)
            grown = step * min(5.0, 0.9 * max(ratio, 1e-8) ** -0.2)
            h = torch.where(grown.abs() > h.abs(), grown, h) if last else grown
    return torch.stack(edges), torch.stack(states)


def _is_limited(y: Tensor, new: Tensor, slopes: list[Tensor], h: Tensor) -> bool:
    """Is the step as long as stability allows, in some sample?"""
    sixth = y + h * sum(a * k for a, k in zip(_A[4], slopes, strict=False))
    apart = torch.linalg.vector_norm(new - sixth, dim=1)
    change = torch.linalg.vector_norm(slopes[-1] - slopes[-2], dim=1)
    return bool((h.abs() * change > _LIMIT * apart).any())


def _stiff(what: str) -> ConvergenceError:
    return ConvergenceError(
        f"InitialValue: the integrator 'dormand_prince' found no trajectory: {what}. The equation is stiff there, or its "
        "solution ends; integrator='scipy.Radau' meets stiff equations"
    )


def hermite(edges: Tensor, states: Tensor, slopes: Tensor, where: Tensor) -> Tensor:
    """Cubic interpolation of values and slopes ``(N + 1, ...)`` at the fractions ``where (s,)`` of every step."""
    h = edges.diff().reshape(-1, 1, *[1] * (states.ndim - 1))
    x = where.reshape(1, -1, *[1] * (states.ndim - 1))
    a, b, da, db = (v.unsqueeze(1) for v in (states[:-1], states[1:], slopes[:-1], slopes[1:]))
    return (1 + 2 * x) * (1 - x) ** 2 * a + x**2 * (3 - 2 * x) * b + h * (x * (1 - x) ** 2 * da - x**2 * (1 - x) * db)
