"""Steady states by integration in time: SciPy's ``solve_ivp`` with its stiff methods."""

from __future__ import annotations

import numpy as np
import scipy.integrate
import torch
from torch import Tensor

from implicitkit.interop.session import Session
from implicitkit.solver.base import Found
from implicitkit.solver.black_box import BlackBoxFunction
from implicitkit.solver.catalogue import register_solver

METHODS = ("BDF", "Radau", "LSODA")
_ROUNDED = 100.0  # units of rounding of F: steps that are to be more accurate shrink to nothing


@register_solver("integrate", solves="root", batch="loop")
def integrate(
    f: BlackBoxFunction,
    z0: Tensor,
    *,
    rtol: float,
    atol: float,
    max_steps: int,
    method: str = "BDF",
    accuracy: float = 1e-6,
    duration: float | None = None,
) -> Found:
    r"""Integrate ``dz/dt = s F(z)`` from ``z0`` until the norm of ``F`` meets the tolerance.

    The state found is the one that a simulation would reach from this start; it costs more steps than Newton's method.  The
    Jacobian comes from PyTorch.  An event on ``|F|`` watches every accepted step, and each is one step of the solver.
    The sign ``s`` is ``+1`` for steady states and fixed points (``F = f(z) - z``), ``-1`` for gradients that are to vanish
    (the gradient flow); for plain equations that for which ``s F' J F <= 0`` at the start.

    Args:
        f: residual ``(n,) -> (n,)``. z0: shape ``(n,)``. rtol, atol: ``|F(z)|_2 <= atol + rtol |F(z0)|_2`` is aimed at.
        max_steps: time steps. method: ``"BDF"``, ``"Radau"`` or ``"LSODA"``.
        accuracy: relative tolerance of the integration (absolute: a thousandth of it, times ``max(|z0|, 1)``), in single
            precision 1e-5 at least.
        duration: time at most; ``None``: ``1e12`` times the time in which ``z0`` would move by ``max(|z0|, 1)``.

    Raises:
        ValueError: an option out of range.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}; got {method!r}")
    if not 0 < accuracy < 1:
        raise ValueError(f"accuracy must lie between 0 and 1, got {accuracy}")
    if duration is not None and not duration > 0:
        raise ValueError(f"duration must be positive, got {duration}")
    session = Session(f, z0, rtol=rtol, atol=atol, max_steps=max_steps)
    if session.settled:
        return session.run(lambda x: "")
    sign = session.flow_sign()
    accuracy = max(accuracy, _ROUNDED * torch.finfo(z0.dtype).eps)
    length = max(float(np.linalg.norm(session.start)), 1.0)
    end = duration or 1e12 * length / max(session.start_norm, 1e-300)
    accepted = [0.0]

    def at_rest(t: float, z: np.ndarray) -> float:
        norm = float(np.linalg.norm(session.f(z)))
        if t > accepted[0]:
            accepted[0] = t
            session.count()
        return norm - session.target

    at_rest.terminal = True  # type: ignore[attr-defined]

    def attempt(x: np.ndarray) -> str:
        accepted[0] = 0.0
        answer = scipy.integrate.solve_ivp(
            lambda t, z: sign * session.f(z), (0.0, end), x, method=method, jac=lambda t, z: sign * session.jacobian(z),
            rtol=accuracy, atol=1e-3 * accuracy * length, events=at_rest,
        )  # fmt: skip
        return str(answer.message)

    return session.run(attempt)
