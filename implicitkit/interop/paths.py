"""Trajectories by SciPy's ``solve_ivp``, as an integrator of :class:`~implicitkit.InitialValue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.integrate
import torch
from torch import Tensor

from implicitkit.foundation.errors import ConvergenceError

__all__ = ["integrate"]

_IMPLICIT = ("Radau", "BDF")
_SPARSE = 32  # unknowns from which a pattern is looked for


def integrate(
    f: Callable[[Tensor, Tensor], Tensor],
    t: Tensor,
    y0: Tensor,
    accuracy: float,
    method: str,
    pattern: Callable[[], Any] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """The edges of the steps that ``solve_ivp`` took, and of the times asked for, with the states there.

    All samples are one system.  Jacobians that the stiff methods need are differences, of 32 unknowns and more as many as
    their ``pattern()`` has colours (Curtis, Powell & Reid 1974), with sparse factors.

    Raises:
        ConvergenceError: ``solve_ivp`` failed; the message is its own.
    """

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=y0.dtype, device=y0.device)

    def slope(now: float, y: np.ndarray) -> np.ndarray:
        out: np.ndarray = f(tensor(now), tensor(y).reshape(y0.shape)).double().cpu().numpy().reshape(-1)
        return out

    asked = t.double().cpu().numpy()
    start = y0.double().cpu().numpy().reshape(-1)
    options = {"jac_sparsity": pattern()} if method in _IMPLICIT and start.size >= _SPARSE else {}
    answer = scipy.integrate.solve_ivp(
        slope, (asked[0], asked[-1]), start, method=method, rtol=accuracy, atol=1e-3 * accuracy, dense_output=True,
        **options,
    )  # fmt: skip
    if not answer.success:
        raise ConvergenceError(f"InitialValue: SciPy's solve_ivp with method {method!r} failed: {answer.message}")
    taken = [time for time in answer.t if np.abs(asked - time).min() > 1e-9 * abs(asked[-1] - asked[0])]
    edges = np.sort(np.concatenate((asked, taken)))[:: 1 if asked[-1] > asked[0] else -1].copy()
    states = answer.sol(edges).T.reshape(len(edges), *y0.shape)
    states[0] = start.reshape(y0.shape)
    return tensor(edges), tensor(states)
