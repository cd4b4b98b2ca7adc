r"""Right-hand sides that jump or have a kink, and what derivatives lack there.

Where ``f`` jumps on a surface ``s(t, y, \theta) = 0`` that the trajectory crosses, its derivatives jump, too: the time of
crossing moves (Hiskens & Pai 2000, IEEE Trans. Circuits Syst. I 47(2), 204-220),

    y_\theta^+ = y_\theta^- - (f^+ - f^-) dT/d\theta,

and no derivative of ``f`` has any of it.  Where ``s`` depends on the time alone ``dT/d\theta`` is zero.  (Kinks:
:mod:`~implicitkit.problem.trajectory.kinks`.)

Only a function that compares, chooses, clamps, rounds or takes roots jumps, which is seen while it is called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import compat, seeded
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.problem.trajectory.steps_along_variations import units_of

Slope = Callable[[Tensor, Tensor], Tensor]

_PARTS, _BISECTED = 4, 24  # of a step; times, each of these
_JUMP = 1e-3  # of the largest slope
_NEAR = 1e-6  # of the whole time
_STEEP = 1e3  # times what jumps, is a difference across the jump, beside its step


def warn_of_switches(
    f: Slope, asked: Tensor, edges: Tensor, states: Tensor, moved: Callable[[Tensor, Tensor], Tensor] | None
) -> None:
    """Warn where ``f`` jumps on the way, at a time that the state or a parameter decides.

    Args:
        f: of times ``(P,)`` and states ``(P, batch, n)``. asked: times, at which jumps are where they should be. edges: of
            the steps, ``(N + 1,)``. states: there, ``(N + 1, batch, n)``. moved: central differences of ``f`` along the
            parameters.
    """
    if not bool(compat.batches_in_front(torch.isfinite(states))[0].any()):
        return
    x = torch.arange(_PARTS, device=edges.device, dtype=edges.dtype)[:, None] / _PARTS
    times = torch.cat(((edges[:-1] + x * edges.diff()).T.flatten(), edges[-1:]))
    x = x[..., None, None]
    path = torch.cat(((states[:-1] + x * states.diff(dim=0)).transpose(0, 1).flatten(0, 1), states[-1:]))
    slopes = f(times, path).nan_to_num(0, 0, 0)
    size = slopes.abs().amax(0).clamp_min(torch.finfo(slopes.dtype).tiny)
    change = lambda low, high: _worst((high - low).abs() / size)  # noqa: E731
    (t, y, low), (after, z, high) = ([v[i : len(times) - 1 + i] for v in (times, path, slopes)] for i in (0, 1))
    for _ in range(_BISECTED):
        which = change(low, high) > _JUMP
        t, y, low, after, z, high = (v[which] for v in (t, y, low, after, z, high))
        if not len(t):
            return
        middle, between = (t + after) / 2, (y + z) / 2
        there = f(middle, between).nan_to_num(0, 0, 0)
        later = change(there, high) > change(low, there)
        wide = later[:, None, None]
        t, after = torch.where(later, middle, t), torch.where(later, after, middle)
        y, z = torch.where(wide, between, y), torch.where(wide, z, between)
        low, high = torch.where(wide, there, low), torch.where(wide, high, there)
    jump = change(low, high)
    apart = (t[:, None] - asked).abs().amin(1) > _NEAR * (edges[-1] - edges[0]).abs()
    jumps = (jump > _JUMP) & apart
    if not bool(jumps.any()):
        return
    step = torch.finfo(states.dtype).eps ** (1 / 3)
    way = step * units_of(states) * seeded.normal(states.shape[2], seed=3).to(states)
    by_state = (f(t, y + way) - f(t, y - way)).abs() / (2 * step)
    decides = by_state if moved is None else torch.maximum(by_state, moved(t, y).abs())
    jumps = jumps & (_worst(decides.nan_to_num(0, 0, 0) / size) > _STEEP * jump)
    if bool(jumps.any()):
        at = ", ".join(f"{float(time):.6g}" for time in t[jumps][:4]) + (", ..." if int(jumps.sum()) > 4 else "")
        warn(
            f"InitialValue: rhs jumps at t = {at}, and when it does the state or a parameter decides: derivatives lack how "
            "that time moves, and may be off by all of their size. End the trajectory there (event=) and begin another from "
            "its end, or replace the jump by something steep (torch.sigmoid)",
            ConvergenceWarning,
        )


def _worst(v: Tensor) -> Tensor:
    """The largest numbers at points ``(P, batch, n)``, of all samples, those that ``torch.vmap`` maps over among them."""
    return compat.batches_in_front(v.amax((1, 2)))[0].reshape(-1, len(v)).amax(0)
