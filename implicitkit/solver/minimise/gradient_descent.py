"""Gradient descent with a step length of its own for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, finite, flag, one_of, optional, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.line_search import EXPECTED, backtrack, decrease, rounding, unresolved
from implicitkit.solver.steps.region import at_work_only


@register_solver("gradient_descent", solves="minimise")
@dataclass(frozen=True)
class GradientDescent(Method):
    r"""``z <- z - t g``, ``g = df/dz``.

    With a number for ``step_size``, ``t`` is that number.  ``"armijo"``: twice the last length, halved while ``f(z - t g)
    > f(z) - t |g|^2 / 2`` (Armijo 1966, with the share that holds for every length up to the inverse of the largest
    curvature; a smaller one lets steps through that hardly lower anything): the objective falls in every step.
    ``"polyak"``: ``t = (f - optimum) / |g|^2`` (Polyak 1969), for objectives whose least value is known, such as sums of
    squares that vanish; a sample whose objective is not above it is given up.  By default ``t`` starts from the
    Barzilai-Borwein length ``s's / s'y`` (1988, eq. 5; ``s``, ``y`` the last changes of ``z`` and ``g``) and is halved,
    per sample, while the objective is not below ``max(last values) - 1e-4 t |g|^2`` (nonmonotone Armijo, Raydan 1997),
    or, where values no longer resolve the decrease, while the gradient does not shrink.

    With ``nesterov``, gradients are taken at extrapolated points: ``x_k = z - t g(z)``, ``z <- x_k + b_k (x_k - x_{k-1})``,
    ``b_k = (a_k - 1) / a_{k+1}``, ``a_{k+1} = (1 + sqrt(1 + 4 a_k^2)) / 2`` (Nesterov 1983), ``a`` beginning again at 1 when
    ``g'(x_k - x_{k-1}) > 0`` (O'Donoghue & Candès 2015, gradient scheme).  ``t`` is then halved while
    ``f(x_k) > f(z) - t |g|^2 / 2`` and grows by a tenth a step.

    Args:
        step_size: fixed step length, ``"armijo"``, ``"polyak"``, or ``None`` as above. nesterov: accelerate (with a number
            or ``None``). memory: values that the nonmonotone test looks back on. optimum: least value, for ``"polyak"``.

    Raises:
        ValueError: ``step_size`` neither positive nor one of those words, or a word with ``nesterov``; ``memory`` below 1.
    """

    step_size: float | str | None = None
    nesterov: bool = False
    memory: int = 10
    optimum: float = 0.0
    default_max_steps: ClassVar[int] = 20000

    def __post_init__(self) -> None:
        if isinstance(self.step_size, str):
            check_options(self, step_size=one_of("armijo", "polyak"))
            if self.nesterov:
                raise ValueError(f"nesterov=True takes a number for step_size, or None; got {self.step_size!r}")
        else:
            check_options(self, step_size=optional(positive()))
        check_options(self, memory=at_least(1), optimum=finite(), nesterov=flag())

    @property
    def differentiable(self) -> bool:
        """With a fixed step the plain iteration can be unrolled."""
        return isinstance(self.step_size, (int, float)) and not self.nesterov

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        if self.differentiable:
            return {}
        norm = torch.linalg.vector_norm(f(z), dim=1)
        start = torch.where(norm > 0, (1 / norm).clamp(max=1.0), 1.0)
        if self.step_size == "polyak":
            return {"t": torch.full_like(norm, torch.inf)}
        if self.nesterov:
            t = torch.full_like(start, self.step_size) if isinstance(self.step_size, (int, float)) else start
            return {"t": t, "x": z, "a": torch.ones_like(start)}
        if self.step_size == "armijo":
            return {"t": start}
        return {"t": start, "values": f.value(z).unsqueeze(1).expand(-1, self.memory).clone(), "step": 0}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g = f(z)
        z_next, state = self._step(f, z, g, state)
        rests = (z_next == z).all(1) & (g == 0).all(1)  # of equations the least |F| need be none of zero
        f.stuck = rests if f.stuck is None else f.stuck | rests
        return z_next, state

    def _step(self, f: Evaluations, z: Tensor, g: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if self.nesterov:
            return self._accelerated(f, z, state)
        if isinstance(self.step_size, (int, float)):
            return z.add(g, alpha=-self.step_size), state
        if self.step_size == "polyak":
            return self._polyak(f, z, state)
        if self.step_size == "armijo":
            return self._armijo(f, z, state)
        t, values, k = state["t"], state["values"], state["step"]
        t, trial = _nonmonotone(f, z, g, values.amax(1), t)
        value = f.value(trial)
        values = values.clone()
        values[:, k % self.memory] = value
        s, y = trial - z, f(trial) - g
        curvature = (s * y).sum(1)
        length = s.square().sum(1) / curvature
        info = torch.finfo(t.dtype)
        t = torch.where((curvature > 0) & torch.isfinite(length), length, 2 * t)
        t = t.clamp(max(1e-12, info.tiny), min(1e12, info.max))
        return trial, {"t": t, "values": values, "step": k + 1}

    def _polyak(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Where rounding hides how far the objective is above its least value, the shortest step so far."""
        g, value = f(z), f.value(z)
        above, noise = value - self.optimum, rounding(value.abs() + abs(self.optimum))[0]
        t = torch.where(above > 10 * noise, above / g.square().sum(1), state["t"])
        f.stuck = f.active & ~(torch.isfinite(t) & (above >= -noise))
        shortest = torch.minimum(state["t"], t.nan_to_num(torch.inf))
        return torch.addcmul(z, t.nan_to_num(0, 0, 0).unsqueeze(1), g, value=-1), {"t": shortest}

    def _armijo(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        longest = 2 * state["t"]
        search = backtrack(f, z, -longest.unsqueeze(1) * f(z), 60, share=0.5)
        f.stuck = f.active & ~search.found
        return search.z, {"t": torch.where(search.found, longest * search.t, state["t"])}

    def _accelerated(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g, t, a = f(z), state["t"], state["a"]
        x = torch.addcmul(z, t.unsqueeze(1), g, value=-1)
        if self.step_size is None:
            value, half = f.value(z), 0.5 * g.square().sum(1)
            for _ in range(60):
                enough = (decrease(f, z, value, g, x) >= t * half * (1 - 1e-6)) | ~f.active
                if bool(enough.all()):
                    break
                t = torch.where(enough, t, 0.5 * t)
                x = torch.addcmul(z, t.unsqueeze(1), g, value=-1)
        moved = x - state["x"]
        a = torch.where((g * moved).sum(1) > 0, 1, a)
        new = 0.5 * (1 + (1 + 4 * a.square()).sqrt())
        z_next = torch.addcmul(x, ((a - 1) / new).unsqueeze(1), moved)
        return z_next, {"t": t if self.step_size is not None else 1.1 * t, "x": x, "a": new}


def _nonmonotone(f: Evaluations, z: Tensor, g: Tensor, reference: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """``t``, halved until ``f(z - t g) <= reference - 1e-4 t |g|^2``, or, where values cannot tell, until the gradient is no
    larger; and the point."""
    here, square, d = f.value(z), g.square().sum(1), at_work_only(f, -g)
    _, doubt = rounding(reference)
    for _ in range(60):
        trial = torch.addcmul(z, t.unsqueeze(1), d)
        value, promised = f.value(trial), t * square
        enough = (value <= reference - 1e-4 * promised) | ~f.active
        if not bool(enough.all()):
            flatter = f(trial).square().sum(1) <= square
            enough = enough | ((value <= reference + doubt) & (promised <= doubt) & flatter)
            if bool((flatter & ~enough & torch.isfinite(value)).any()):
                noise = unresolved(f, z, here, g, trial - z)
                enough = enough | ((value <= reference + noise) & (promised <= EXPECTED * noise) & flatter)
        if bool(enough.all()):
            break
        t = torch.where(enough, t, 0.5 * t)
    return t, trial
