r"""Integrators: where a trajectory's equations are solved from, and on which steps.

An integrator is a function ``(f, t, y0, accuracy) -> (edges, states)``: it follows ``dy/dt = f(t, y)``, ``y`` a matrix
``(batch, n)``, through the increasing or decreasing times ``t``, and returns the times at which its steps begin and end,
``(N + 1,)``, all of ``t`` among them, with the states there, ``(N + 1, batch, n)``; NaN for a sample that it could not
follow so far.  Nothing in it is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.explicit import March
from implicitkit.registry.operations import operation

__all__ = ["auto", "dormand_prince", "get_integrator", "hermite"]

Slope = Callable[[Tensor, Tensor], Tensor]
Integrator = Callable[[Slope, Tensor, Tensor, float], tuple[Tensor, Tensor]]

_STIFF = ("Radau", "BDF")
SCIPY = ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA")


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


def auto(f: Slope, t: Tensor, y0: Tensor, accuracy: float) -> tuple[Tensor, Tensor]:
    """An integrator (see above): :func:`dormand_prince` as long as accuracy rules its steps, and SciPy's ``Radau`` from
    where stability does.  Under ``torch.vmap``, where SciPy cannot look at values, the former alone.

    Raises:
        ConvergenceError: more than 20,000 steps.
    """
    march = March(f, t, y0, accuracy)
    march.run(until_stiff=not compat.batches_in_front(march.slope)[1])
    if not march.stiff or bool(march.now == t[-1]) or compat.batches_in_front(march.slope)[1]:
        return march.path
    edges, states = march.path
    lost = march.lost.unsqueeze(1)
    rest = torch.cat((march.now.reshape(1), t[(t - march.now) * (t[-1] - march.now) > 0]))
    try:
        later, there = _by_scipy(
            lambda now, y: torch.where(lost, 0, f(now, y)), rest, march.y, accuracy, "Radau", march.units
        )
    except ConvergenceError:  # of all samples: so far they came
        later, there = rest, march.y.new_full((len(rest), *march.y.shape), torch.nan)
    there = torch.where(lost, torch.nan, there)
    return torch.cat((edges, later[1:])), torch.cat((states, there[1:]))


def _by_scipy(
    f: Slope, t: Tensor, y0: Tensor, accuracy: float, method: str, units: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """By SciPy's ``solve_ivp``, with Jacobians from PyTorch for methods that use one."""
    jacobian = JacobianMatrix(f).at if method in _STIFF else None
    found: tuple[Tensor, Tensor] = operation("integrate")(f, t, y0, accuracy, method, units, jacobian)
    return found


_OURS: dict[str, Integrator] = {"auto": auto, "dormand_prince": dormand_prince}


def hermite(edges: Tensor, states: Tensor, slopes: Tensor, where: Tensor) -> Tensor:
    """Cubic interpolation of values and slopes ``(N + 1, ...)`` at the fractions ``where (s,)`` of every step."""
    h = edges.diff().reshape(-1, 1, *[1] * (states.ndim - 1))
    x = where.reshape(1, -1, *[1] * (states.ndim - 1))
    a, b, da, db = (v.unsqueeze(1) for v in (states[:-1], states[1:], slopes[:-1], slopes[1:]))
    return (1 + 2 * x) * (1 - x) ** 2 * a + x**2 * (3 - 2 * x) * b + h * (x * (1 - x) ** 2 * da - x**2 * (1 - x) * db)
