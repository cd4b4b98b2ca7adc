"""Golden section search for one unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, optional, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.bracketing import Ends, check_ends, ends_of
from implicitkit.solver.steps.line_search import EXPECTED, rounding, unresolved

__all__ = ["GoldenSection"]

_PART = 0.5 * (3 - math.sqrt(5))  # of the longer piece; the rest is 1 / 1.618 of it


@register_solver("golden_section", solves="minimise", max_size=1)
@dataclass(frozen=True)
class GoldenSection(Method):
    r"""Three points with the lowest in the middle; the longer piece is cut at ``0.382`` of it, and the lowest three stay
    (Kiefer 1953).  One unknown a sample, any number of samples.

    One evaluation a step, and the bracket shrinks by 0.618 whatever the objective does.  Values resolve a minimum only to
    the square root of rounding: where two cannot be told apart, the slopes at both points decide, so that a smooth minimum
    is found to full precision.  Without a bracket one is looked for downhill of ``z0``, each trial ``1.618`` times as far; a
    sample where the objective falls for ever is given up, and so is one whose bracket can be cut no further.

        ik.argmin(objective, z0, solver=ik.GoldenSection(bracket=(0.0, 3.0)), batch_dims=1)

    Args:
        bracket: ``(low, high)``, numbers or tensors of the batch's shape; on it the objective must have one minimum.
        width: of the first trial where no bracket is given; ``None``: ``max(|z0|, 1) / 8``. expansions: trials at most.

    Raises:
        ValueError: an option out of range, low not below high. CapabilityError (from the solve): more than one unknown.
    """

    bracket: Ends | None = None
    width: float | None = None
    expansions: int = 100
    default_max_steps: ClassVar[int] = 500
    keeps_best: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ends(self.bracket)
        check_options(self, width=optional(positive()), expansions=at_least(1))

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        if self.bracket is None:
            return {"a": None, "b": None, "m": None, "value": None, "slope": None}
        a, b = ends_of(self.bracket, z)
        m = a + _PART * (b - a)
        return {"a": a, "b": b, "m": m, "value": f.value(m).unsqueeze(1), "slope": f(m)}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        missing = None
        if state["a"] is None:
            state, missing = self._search(f, z)
        elif state.get("asked"):
            state = self._cut(f, z, state)
        a, b, m = state["a"], state["b"], state["m"]
        right = b - m > m - a
        x = m + _PART * torch.where(right, b - m, a - m)
        stop = ((x == m) | (x == a) | (x == b)).squeeze(1)
        f.stuck = stop if missing is None else stop | missing
        return x, state | {"asked": True}

    @staticmethod
    def _cut(f: Evaluations, x: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The bracket once the value at ``x`` is known."""
        a, b, m, value, slope = (state[name] for name in ("a", "b", "m", "value", "slope"))
        new, new_slope = f.value(x).unsqueeze(1), f(x)
        lower = _rise(f, m, value, slope, x, new, new_slope) <= 0  # not where it is NaN: the end of the domain
        left = x < m
        return {
            "a": torch.where(lower, torch.where(left, a, m), torch.where(left, x, a)),
            "b": torch.where(lower, torch.where(left, m, b), torch.where(left, b, x)),
            "m": torch.where(lower, x, m),
            "value": torch.where(lower, new, value),
            "slope": torch.where(lower, new_slope, slope),
        }

    def _search(self, f: Evaluations, z: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Brackets downhill of ``z``, and which samples have none.

        Steps grow while the objective falls; where already the first one ends higher, they shrink until one does not.
        """
        slope, value = f(z), f.value(z).unsqueeze(1)
        step = torch.full_like(z, self.width) if self.width is not None else z.abs().clamp_min(1).div(8)
        step = torch.where(slope > 0, -step, step)
        a = b = m = z
        missing = torch.isfinite(value)
        ended = torch.zeros_like(missing)  # is there an end that lies higher?
        for _ in range(self.expansions):
            if not bool((missing.squeeze(1) & f.active).any()):
                break
            x = m + step
            new, new_slope = f.value(x).unsqueeze(1), f(x)
            lower = missing & (_rise(f, m, value, slope, x, new, new_slope) < 0)
            higher = missing & ~lower
            b = torch.where(higher, x, b)
            found = (lower & ended) | (higher & (m != a))
            a = torch.where(lower, m, a)
            m, value = torch.where(lower, x, m), torch.where(lower, new, value)
            slope = torch.where(lower, new_slope, slope)
            ended, missing = ended | higher, missing & ~found
            step = torch.where(higher, _PART * step, step / (1 - _PART))
        points = {"a": torch.minimum(a, b), "b": torch.maximum(a, b), "m": m, "value": value, "slope": slope}
        return points, missing.squeeze(1)


def _rise(f: Evaluations, m: Tensor, value: Tensor, slope: Tensor, x: Tensor, new: Tensor, new_slope: Tensor) -> Tensor:
    """``f(x) - f(m)``; from the slopes at both, by the trapezoidal rule, where the difference is lost in rounding."""
    noise, doubt = rounding(value)
    rise, by_slopes = new - value, 0.5 * (slope + new_slope) * (x - m)
    lost = (rise.abs() <= noise) | ((rise.abs() <= doubt) & (new_slope.abs() <= slope.abs()))
    lost = lost & (by_slopes.abs() <= doubt)
    most = torch.maximum(slope.abs(), new_slope.abs()) * (x - m).abs()  # of the change where the slope is monotone
    odd = (rise.abs() <= 0.1 * by_slopes.abs()) | (rise.abs() > most)
    open_ = f.active.unsqueeze(1) & ~lost & odd & torch.isfinite(rise)
    if bool(open_.any()):
        noise = unresolved(f, m, value.squeeze(1), slope, x - m).unsqueeze(1)
        lost = lost | (open_ & (rise.abs() <= noise) & (by_slopes.abs() <= EXPECTED * noise))
    return torch.where(lost, by_slopes, rise)
