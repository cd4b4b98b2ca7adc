"""Searches by values alone: the simplex of Nelder and Mead, and the golden section for one unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, flag, optional, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.bracketing import Ends, check_ends, ends_of
from implicitkit.solver.steps.line_search import EXPECTED, rounding, unresolved

_PART = 0.5 * (3 - math.sqrt(5))  # of the longer piece; the rest is 1 / 1.618 of it


@register_solver("nelder_mead", solves="minimise")
@dataclass(frozen=True)
class NelderMead(Method):
    r"""Reflect the worst corner of a simplex at the centre of the others; expand, contract or shrink by what is found there.

    Lagarias, Reeds, Wright & Wright (1998), with the coefficients of Gao & Han (2012) for many unknowns: reflection 1,
    expansion ``1 + 2/n``, contraction ``3/4 - 1/(2n)``, shrinking ``1 - 1/n``.  Every sample has a simplex of its own.

        ik.argmin(objective, z0, solver="nelder_mead", rtol=1e-5)

    Steps compare values of the objective only, so that noise and kinks do no harm.  Values resolve a minimum to about the
    square root of rounding.  A simplex of that size is replaced by a larger one about its best corner, ``restarts`` times
    (Kelley 1999), and then by one whose corners are compared by ``|df/dz|``, by which convergence is judged here as
    everywhere; when that one is no larger than rounding, the sample is given up (at a kink, for instance, where the gradient
    does not vanish; the point is the minimum all the same).

    One or two evaluations a step, ``n`` more where a simplex shrinks.

    Args:
        size: of the first simplex, relative to each unknown (0.005 times that where it is zero).
        adaptive: coefficients that depend on ``n``; else those for two unknowns. restarts: per sample.

    Raises:
        ValueError: ``size`` not positive, ``restarts`` negative.
    """

    size: float = 0.05
    adaptive: bool = True
    restarts: int = 1
    default_max_steps: ClassVar[int] = 5000
    keeps_best: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, size=positive(), restarts=at_least(0), adaptive=flag())

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        points = self._simplex(z, torch.where(z == 0, 0.005 * self.size, self.size * z))
        left = torch.full(z.shape[:1], self.restarts, dtype=torch.int64, device=z.device)  # -1: compare gradients
        return {"points": points, "merits": _merits(f, points, left), "left": left}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        points, merits, left = self._renewed(f, state["points"], state["merits"], state["left"])
        n = points.shape[2]
        merits, order = merits.sort(dim=1, stable=True)
        points = points.gather(1, order.unsqueeze(2).expand_as(points))
        best, second, worst = merits[:, 0], merits[:, -2], merits[:, -1]
        centre, last = points[:, :-1].mean(1), points[:, -1]
        many = max(n, 2) if self.adaptive else 2
        expansion, contraction, shrinking = 1 + 2 / many, 0.75 - 0.5 / many, 1 - 1 / many
        away = centre - last
        reflected = centre + away
        at_reflected = _merit(f, reflected, left)
        expand, keep = at_reflected < best, (at_reflected >= best) & (at_reflected < second)
        factor = torch.where(expand, expansion, torch.where(at_reflected < worst, contraction, -contraction))
        other = torch.where(keep.unsqueeze(1), reflected, centre + factor.to(z.dtype).unsqueeze(1) * away)
        at_other = at_reflected if bool((keep | ~f.active).all()) else _merit(f, other, left)
        outside = at_reflected < worst
        contracted = torch.where(outside, at_other <= at_reflected, at_other < worst) & ~keep & ~expand
        better = contracted | (expand & (at_other < at_reflected))
        shrink = f.active & ~expand & ~keep & ~contracted
        corner = torch.where(better.unsqueeze(1), other, reflected)
        at_corner = torch.where(better, at_other, at_reflected)
        corner, at_corner = torch.where(shrink.unsqueeze(1), last, corner), torch.where(shrink, worst, at_corner)
        points = torch.cat([points[:, :-1], corner.unsqueeze(1)], 1)
        merits = torch.cat([merits[:, :-1], at_corner.unsqueeze(1)], 1)
        if bool(shrink.any()):
            first = points[:, :1]
            points = torch.where(shrink[:, None, None], first + shrinking * (points - first), points)
            merits = torch.where(shrink.unsqueeze(1), _merits(f, points, left), merits)
        return _best(points, merits), {"points": points, "merits": merits, "left": left}

    def _renewed(self, f: Evaluations, points: Tensor, merits: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A new simplex for samples whose old one is no larger than rounding; the last one was the last."""
        eps = torch.finfo(merits.dtype).eps
        lowest, tiny = merits.amin(1), torch.finfo(merits.dtype).tiny
        flat = merits.amax(1) - lowest <= eps * lowest.abs()
        spread = (points - points[:, :1]).abs().amax((1, 2))
        done = f.active & (flat | (spread <= 4 * eps * points.abs().amax((1, 2)).clamp_min(tiny)))
        f.stuck = done & (left < 0)
        again = done & (left >= 0)
        if not bool(again.any()):
            return points, merits, left
        best = _best(points, merits)
        step = torch.maximum((10 * spread).unsqueeze(1), 10 * eps**0.5 * best.abs()).clamp_min(eps)
        left = torch.where(again, left - 1, left)
        points = torch.where(again[:, None, None], self._simplex(best, step), points)
        return points, torch.where(again.unsqueeze(1), _merits(f, points, left), merits), left

    @staticmethod
    def _simplex(z: Tensor, step: Tensor) -> Tensor:
        """``z`` and ``z + step_i e_i``, ``(batch, n + 1, n)``."""
        return torch.cat([z.unsqueeze(1), z.unsqueeze(1) + torch.diag_embed(step)], 1)


def _best(points: Tensor, merits: Tensor) -> Tensor:
    """The corner of least merit, ``(batch, n)``."""
    return points.gather(1, merits.argmin(1)[:, None, None].expand(-1, 1, points.shape[2])).squeeze(1)


def _merits(f: Evaluations, points: Tensor, left: Tensor) -> Tensor:
    """The merit of every corner, ``(batch, n + 1)``."""
    return torch.stack([_merit(f, points[:, i].contiguous(), left) for i in range(points.shape[1])], 1)


def _merit(f: Evaluations, z: Tensor, left: Tensor) -> Tensor:
    """The objective, or the length of its gradient where ``left`` is negative; infinite where it is not a number."""
    merit = f.value(z)
    if bool((left < 0).any()):
        merit = torch.where(left < 0, torch.linalg.vector_norm(f(z), dim=1), merit)
    return merit.nan_to_num(torch.inf, torch.inf, -torch.inf)


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
