"""Trajectories by SciPy's ``solve_ivp``, as an integrator of :class:`~implicitkit.InitialValue`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.integrate
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.errors import ConvergenceError
from implicitkit.foundation.numbers import numbers

Slope = Callable[[Tensor, Tensor], Tensor]
Jacobian = Callable[[Tensor, Tensor], Any]


def integrate(
    f: Slope,
    t: Tensor,
    y0: Tensor,
    accuracy: float,
    method: str,
    units: Tensor | None = None,
    jacobian: Jacobian | None = None,
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]:
    """The edges of the steps that ``solve_ivp`` took, and of the times asked for, with the states there; and those at times
    in between, where all samples have been followed.

    All samples are one system.  If it fails, the samples for which it fails alone are left out: their states are NaN.

    Args:
        units: ``(batch, n)``, a thousandth of which times ``accuracy`` is the absolute tolerance; ``None``: the largest
            entry of each sample, at least one.
        jacobian: ``(t, y) -> matrix``, the Jacobian of ``f``, all samples, for methods that use one; ``None``: differences.

    Raises:
        ConvergenceError: ``solve_ivp`` failed for all samples; the message is its own.
    """
    own = y0.abs().amax(1, keepdim=True).clamp_min(1).expand_as(y0) if units is None else units

    def follow(good: Tensor) -> Any:
        """The answer of ``solve_ivp`` if only these samples move."""

        def slope(now: Tensor, y: Tensor) -> Tensor:
            return torch.where(good.unsqueeze(1), f(now, y), 0)

        return _solve(slope, t, torch.where(good.unsqueeze(1), y0, 0), accuracy, method, own, jacobian, good)

    good = torch.isfinite(y0).all(1)
    own = torch.where(good.unsqueeze(1) & (own > 0), own, 1)
    answer, alone = follow(good), {}
    if not answer.success and len(y0) > 1:
        each = torch.eye(len(y0), dtype=torch.bool, device=y0.device)
        found = {i: follow(each[i]) for i in good.nonzero().flatten().tolist()}
        alone = {i: one for i, one in found.items() if not one.success}
        good = good & torch.tensor([i not in alone for i in range(len(y0))], device=y0.device)
        answer = follow(good)
    if not answer.success or not bool(good.any()):
        raise ConvergenceError(
            f"SciPy's solve_ivp with method {method!r} failed at t = {answer.t[-1]:.6g}: {answer.message}"
        )
    asked = numbers(t)
    taken = [time for time in answer.t if np.abs(asked - time).min() > 1e-9 * abs(asked[-1] - asked[0])]
    edges = np.sort(np.concatenate((asked, taken)))[:: 1 if asked[-1] > asked[0] else -1].copy()

    def states_of(answer: Any, edges: np.ndarray) -> Tensor:
        return torch.as_tensor(answer.sol(edges).T, dtype=y0.dtype, device=y0.device).reshape(len(edges), *y0.shape)

    states = torch.where(good.unsqueeze(1), states_of(answer, edges), torch.nan)
    for i, one in alone.items():  # as far as they came
        reached = int((np.abs(edges - edges[0]) <= abs(one.t[-1] - edges[0])).sum())
        if len(one.t) > 1:
            states[:reached, i] = states_of(one, edges[:reached])[:, i]
    states[0] = y0
    between = (lambda at: states_of(answer, numbers(at))) if bool(good.all()) else None
    return torch.as_tensor(edges, dtype=t.dtype, device=t.device), states, between


def _solve(
    f: Slope,
    t: Tensor,
    y0: Tensor,
    accuracy: float,
    method: str,
    units: Tensor,
    jacobian: Jacobian | None,
    good: Tensor,
) -> Any:
    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=y0.dtype, device=y0.device)

    def slope(now: float, y: np.ndarray) -> np.ndarray:
        return numbers(f(tensor(now), tensor(y).reshape(y0.shape))).reshape(-1)

    def matrix(now: float, y: np.ndarray) -> Any:
        assert jacobian is not None
        J = jacobian(tensor(now), tensor(y).reshape(y0.shape))
        entries = J.data if sp.issparse(J) else J  # of a sample that is not finite none reaches the others
        np.nan_to_num(entries, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return J if bool(good.all()) else sp.diags(np.repeat(numbers(good), y0.shape[1])) @ J

    options = {} if jacobian is None else {"jac": matrix}
    try:
        with np.errstate(all="ignore"):  # what ends in infinity is said
            return scipy.integrate.solve_ivp(
                slope,
                (float(t[0]), float(t[-1])),
                numbers(y0).reshape(-1),
                method=method,
                dense_output=True,
                rtol=accuracy,
                atol=1e-3 * accuracy * numbers(units).reshape(-1),
                **options,
            )
    except RuntimeError as error:
        if "singular" not in str(error):
            raise
        return SimpleNamespace(success=False, message=str(error), t=[float(t[0])])
