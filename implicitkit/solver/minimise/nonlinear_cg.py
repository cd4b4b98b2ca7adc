"""Nonlinear conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, between, check_options, one_of
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.line_search import wolfe

_FORMULAS = ("hager_zhang", "polak_ribiere", "hestenes_stiefel", "fletcher_reeves", "dai_yuan")


@register_solver("nonlinear_cg", solves="minimise")
@dataclass(frozen=True)
class NonlinearCG(Method):
    r"""``z <- z + t d``, ``d <- -g + \beta d``.  With ``y`` the change of the gradient ``g`` and ``g_-`` the one before,

        hager_zhang:  \beta = max((y - 2 d |y|^2 / d'y)'g / d'y,  -1 / (|d| min(0.01, |g_-|)))
        polak_ribiere:     max(y'g / |g_-|^2, 0)
        hestenes_stiefel:  max(y'g / d'y, 0)
        fletcher_reeves:   |g|^2 / |g_-|^2
        dai_yuan:          |g|^2 / d'y

    (Hager & Zhang 2005, eq. 1.3 to 1.6; Polak & Ribière 1969, with the restart of Gilbert & Nocedal 1992; Hestenes & Stiefel
    1952; Fletcher & Reeves 1964; Dai & Yuan 1999; survey: Hager & Zhang 2006.)  On a quadratic all are linear conjugate
    gradients.  The line search asks for strong Wolfe conditions, approximate ones near the minimum
    (:func:`~implicitkit.solver.steps.line_search.wolfe`).  Where ``d`` does not descend, and where a search fails, a sample
    starts again along ``-g``; if that fails too, it is given up.

        ik.argmin(objective, z0, solver=ik.NonlinearCG("polak_ribiere"))

    Memory: two arrays ``(batch, n)``, the least of all methods that are faster than gradient descent.

    Args:
        formula: a name from the list above. trials: evaluations of one line search at most.
        curvature: how flat the line must be at the end of a step, between 1e-4 and 1.

    Raises:
        ValueError: an option out of range.
    """

    formula: str = "hager_zhang"
    trials: int = 30
    curvature: float = 0.1
    default_max_steps: ClassVar[int] = 5000

    def __post_init__(self) -> None:
        check_options(self, formula=one_of(*_FORMULAS), trials=at_least(1), curvature=between(1e-4, 1))

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        # of the step before: direction, gradient, slope and length; a length of zero says that there is none
        zero = z.new_zeros(z.shape[0])
        return {"d": torch.zeros_like(z), "g": torch.zeros_like(z), "slope": zero, "t": zero}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g = f(z)
        d = state["d"] * self._beta(g, state).unsqueeze(1) - g
        slope = (d * g).sum(1)
        fresh = ~((slope < 0) & torch.isfinite(slope)) | (state["t"] == 0)
        square = g.square().sum(1)
        d, slope = torch.where(fresh.unsqueeze(1), -g, d), torch.where(fresh, -square, slope)
        first = (1 / square.sqrt()).clamp(max=1.0).nan_to_num(1.0)  # the first step is no longer than 1
        guess = state["t"] * (state["slope"] / slope).clamp(0.1, 10)  # Nocedal & Wright (2006), section 3.5
        t = torch.where(state["t"] > 0, guess, first)
        search = wolfe(f, z, d, slope, t, self.trials, self.curvature, strong=True)
        failed = f.active & ~search.found
        f.stuck = failed & fresh
        return search.z, {"d": d, "g": g, "slope": slope, "t": search.t}

    def _beta(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """``(batch,)``; zero where there is no step before."""
        d, before = state["d"], state["g"]
        y, square = g - before, before.square().sum(1)
        dy = (d * y).sum(1)
        if self.formula == "polak_ribiere":
            beta = ((y * g).sum(1) / square).clamp_min(0)
        elif self.formula == "hestenes_stiefel":
            beta = ((y * g).sum(1) / dy).clamp_min(0)
        elif self.formula in ("fletcher_reeves", "dai_yuan"):
            beta = g.square().sum(1) / (square if self.formula == "fletcher_reeves" else dy)
        else:
            beta = ((y - d * (2 * y.square().sum(1) / dy).unsqueeze(1)) * g).sum(1) / dy
            beta = beta.maximum(-1 / (torch.linalg.vector_norm(d, dim=1) * square.sqrt().clamp(max=0.01)))
        return torch.where((state["t"] > 0) & torch.isfinite(beta), beta, 0)
