"""Brackets for scalar equations: where a sign changes, found by geometric expansion and kept as it shrinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import above, at_least, check_options, optional
from implicitkit.foundation.options import between as within
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

Ends = tuple[Any, Any]
"""``(low, high)``, numbers or tensors with one number for each sample."""


class Bracket(NamedTuple):
    """Two points of each sample with residuals of opposite sign, all ``(batch, 1)``; ``b`` is the newer one."""

    a: Tensor
    fa: Tensor
    b: Tensor
    fb: Tensor


def check_ends(ends: Any) -> None:
    """Raise ValueError unless ``bracket=`` is a pair of numbers or tensors, low below high."""
    if ends is None:
        return
    if not isinstance(ends, (tuple, list)) or len(ends) != 2:
        raise ValueError(f"bracket must be a pair (low, high), got {ends!r}")
    for name, end in zip(("low", "high"), ends, strict=True):
        if isinstance(end, bool) or not isinstance(end, (int, float, Tensor)):
            raise ValueError(f"bracket: {name} must be a number or a tensor, got {end!r}")
    if any(compat.is_wrapped(end) for end in ends if isinstance(end, Tensor)):
        raise CapabilityError(
            "bracket: its ends belong to a transform of torch.func, and a solver runs below all of them; give them to the "
            "solve, ik.root(..., bracket=(low, high), solver='bisection')"
        )
    low, high = ends
    if not (_all(low - low == 0) and _all(high - high == 0)):
        raise ValueError(f"bracket: both ends must be finite numbers, got {ends!r}")
    if not _all(low < high):
        raise ValueError(f"bracket: low must be below high in every sample, got {ends!r}")


def _all(holds: Any) -> bool:
    return recording.holds(holds.all()) if isinstance(holds, Tensor) else bool(holds)


def ends_of(ends: Ends, z: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends for every sample of ``z`` ``(batch, 1)``.

    Raises:
        ValueError: neither one number for all samples nor one for each.
    """
    found = []
    for name, end in zip(("low", "high"), ends, strict=True):
        t = torch.as_tensor(end, device=z.device).detach().to(z)
        if t.numel() not in (1, len(z)):
            raise ValueError(
                f"bracket: {name} has {t.numel()} numbers for {len(z)} samples (those of vmap included); give one number, "
                "or one for each sample"
            )
        found.append(t.reshape(-1, 1).expand(len(z), 1))
    return found[0], found[1]


def between(f: Evaluations, low: Tensor, high: Tensor) -> tuple[Bracket, Tensor]:
    """The brackets that were given, and in which samples the sign does not change between their ends, ``(batch,)``."""
    f_low, f_high = f.residual(low), f.residual(high)
    missing = ~(torch.sign(f_low) != torch.sign(f_high)) | ~torch.isfinite(f_low) | ~torch.isfinite(f_high)
    without = missing.squeeze(1).nonzero().flatten().tolist()
    if without:
        i = without[0]
        where = f" of sample(s) {', '.join(map(str, without[:6]))}" if len(missing) > 1 else ""
        where += f", {float(low[i]):.6g} and {float(high[i]):.6g}"
        finite = bool(torch.isfinite(f_low[i] + f_high[i]))
        what = "does not change its sign between" if finite else "is not finite at one of"
        f.remark = f"bracket: the residual {what} the ends{where}"
    return Bracket(low, f_low, high, f_high), missing.squeeze(1)


def expand(f: Evaluations, z: Tensor, width: float | None, growth: float, expansions: int) -> tuple[Bracket, Tensor]:
    """Brackets around ``z``, and which samples have none, ``(batch,)``.

    The first trial is ``z +- width`` (``None``: ``max(|z|, 1) / 8``); each further one is ``growth`` times as wide.  A
    bracket spans two neighbouring points of the search, so that it is as narrow as the search allows.  On the side where the
    residual is not finite (outside the domain) the distance to the last finite point is halved from there on.

    One evaluation a side, and at most ``2 expansions`` in all.
    """
    F = f.residual(z)
    step = torch.full_like(z, width) if width is not None else z.abs().clamp_min(1).div(8)
    bracket, side_of = Bracket(z, F, z, F), torch.sign(F)
    missing = (F.abs() < math.inf) & (F != 0)
    ends = {side: (z, F, step, torch.full_like(z, growth)) for side in (1.0, -1.0)}
    for _ in range(expansions):
        if not bool((missing.squeeze(1) & f.active).any()):
            break
        for side, (inner, f_inner, step, factor) in ends.items():
            outer = torch.add(inner, step, alpha=side)
            f_outer = f.residual(outer)
            finite = f_outer.abs() < math.inf
            found = missing & finite & (f_outer * side_of <= 0)
            if bool(found.any()):
                bracket = Bracket(
                    torch.where(found, inner, bracket.a),
                    torch.where(found, f_inner, bracket.fa),
                    torch.where(found, outer, bracket.b),
                    torch.where(found, f_outer, bracket.fb),
                )
                missing = missing & ~found
            if bool(finite.all()):
                ends[side] = (outer, f_outer, step * factor, factor)
                continue
            factor = torch.where(finite, factor, 0.5)
            step = torch.where(finite, step * factor, 0.5 * step)
            ends[side] = (torch.where(finite, outer, inner), torch.where(finite, f_outer, f_inner), step, factor)
    return bracket, missing.squeeze(1)


def first_bracket(
    f: Evaluations, z: Tensor, given: tuple[Tensor, Tensor] | None, width: float | None, growth: float, expansions: int
) -> tuple[Bracket, Tensor]:
    """The brackets that were ``given``, or those of :func:`expand`; and which samples have none, ``(batch,)``: ``f.remark``
    says so."""
    bracket, missing = expand(f, z, width, growth, expansions) if given is None else between(f, *given)
    without = (missing & f.active).nonzero()
    if given is None and len(without):
        where = float(z[int(without[0])])
        f.remark = f"no change of sign was found around {where:.6g}: pass bracket=(low, high)"
    return bracket, missing


def into_domain(f: Evaluations, z: Tensor, towards: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """``z``, halved towards a point where the residual is finite until it is so there; the residual; where it still is not,
    ``None`` where it is finite everywhere.

    One evaluation, and at most 50 more where the domain ends in between.
    """
    F = f.residual(z)
    if math.isfinite(float(F.sum())):
        return z, F, None
    end, bad = towards(), ~torch.isfinite(F)
    for _ in range(50):
        if not bool((bad.squeeze(1) & f.active).any()):
            break
        z = torch.where(bad, z + 0.5 * (end - z), z)
        F = f.residual(z)
        bad = ~torch.isfinite(F)
    return z, F, bad


@dataclass(frozen=True)
class Bracketing(Method):
    """A method that keeps the root of one unknown between two points; a subclass defines ``step``, which begins with
    :meth:`opened`.

    Args:
        width: half of the first interval; ``None``: ``max(|z0|, 1) / 8``.
        growth: of the interval from trial to trial, greater than 1. expansions: trials, at most.
        bracket: ``(low, high)``, numbers or tensors of the batch's shape, in place of the search; a sample in which ``F``
            has the same sign at both ends is given up.

    Raises:
        ValueError: an option out of range, ``low`` not below ``high``.
        CapabilityError (from the solve): more than one unknown a sample.
    """

    width: float | None = None
    growth: float = 2.0
    expansions: int = 60
    bracket: Ends | None = None
    default_max_steps: ClassVar[int] = 1200
    encloses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ends(self.bracket)
        check_options(self, width=optional(within(0, math.inf)), growth=above(1), expansions=at_least(1))

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        low, high = (None, None) if self.bracket is None else ends_of(self.bracket, z)
        return {"a": low, "fa": None, "b": high, "fb": None}

    def opened(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Bracket, Tensor | None]:
        """The bracket of the state, in the first step looked for; and which samples have none, where it was."""
        if state["fa"] is not None:
            return Bracket(*(state[name] for name in Bracket._fields)), None
        given = None if self.bracket is None else (state["a"], state["b"])
        return first_bracket(f, z, given, self.width, self.growth, self.expansions)

    @staticmethod
    def give_up(f: Evaluations, bracket: Bracket, point: Tensor, bad: Tensor | None, missing: Tensor | None) -> None:
        """Samples whose interval has no ``point`` inside, or none where the residual is finite, or that had no interval."""
        stop = (point == bracket.a) | (point == bracket.b)
        stop = (stop if bad is None else stop | bad).squeeze(1)
        stop = stop if missing is None else stop | missing
        f.stuck = stop if bool(stop.any()) else None
