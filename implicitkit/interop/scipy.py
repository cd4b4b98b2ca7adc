"""SciPy's Newton-Krylov solver through NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from implicitkit.registry import register_solver
from implicitkit.solvers.base import Found

__all__ = ["newton_krylov"]


class _Enough(Exception):
    """The target is met, or the budget of evaluations is spent."""


@register_solver("scipy.newton_krylov", solves="root", batch="loop")
def newton_krylov(
    f: Callable[[Tensor], Tensor], z0: Tensor, *, rtol: float, atol: float, max_steps: int, line_search: str = "wolfe"
) -> Found:
    """Newton's method with Krylov solves of finite-difference products: ``scipy.optimize.newton_krylov``.

    (Knoll & Keyes 2004.)  SciPy computes on float64 copies; the point of least ``|F|_2`` ever evaluated is returned,
    whatever SciPy's flags or exceptions say.  Inner solver GMRES: LGMRES, SciPy's default, carries vectors from step
    to step that finite-difference noise spoils in small systems.

    Args:
        f: residual ``(n,) -> (n,)``. z0: shape ``(n,)``. rtol, atol: ``|F(z)|_2 <= atol + rtol |F(z0)|_2`` is aimed at.
        max_steps: Newton steps. line_search: ``"wolfe"``, ``"armijo"`` or ``"none"``.

    Returns:
        The best point found.
    """
    best_z = z0.detach().cpu().double().numpy().copy()
    best = np.inf
    target = -1.0
    evaluations = 0
    budget = 100 * max_steps

    def residual(x: np.ndarray) -> np.ndarray:
        nonlocal best, best_z, evaluations
        evaluations += 1
        point = torch.from_numpy(np.array(x, dtype=np.float64)).to(dtype=z0.dtype, device=z0.device)
        values = f(point).detach().cpu().double().numpy().reshape(-1)
        norm = float(np.linalg.norm(values))
        if norm < best:
            best, best_z = norm, np.array(x, dtype=np.float64)
            if norm <= target:
                raise _Enough
        if evaluations > budget:
            raise _Enough
        return values

    start = float(np.linalg.norm(residual(best_z)))
    target = atol + rtol * start
    steps = 0

    def count(x: np.ndarray, values: np.ndarray) -> None:
        nonlocal steps
        steps += 1

    message = ""
    if best > target:
        try:
            scipy.optimize.newton_krylov(
                residual, best_z.copy(), method="gmres", maxiter=max_steps, f_tol=0.5 * target / max(1.0, z0.numel()) ** 0.5,
                line_search=None if line_search == "none" else line_search, callback=count,
            )  # fmt: skip
        except _Enough:
            steps += 1
        except (
            scipy.optimize.NoConvergence,
            ValueError,
            OverflowError,
            ZeroDivisionError,
            FloatingPointError,
        ) as error:
            message = f"SciPy's newton_krylov stopped: {type(error).__name__}: {str(error)[:120]}"
    found = torch.from_numpy(best_z).to(dtype=z0.dtype, device=z0.device)
    return Found(found, steps=min(steps, max_steps), evaluations=evaluations, message=message if best > target else "")
