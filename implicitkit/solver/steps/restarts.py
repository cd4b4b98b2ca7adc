"""Restarts for methods that gather a memory and may lose their way, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

_EVERY, _LOOKS = 50, 4  # steps between two looks at the best residual, and looks in a row without progress ...
_FALLEN = 0.99  # ... which is to come down to this

GuardState = dict[str, int | Tensor | None]
"""``step``: steps since the last check of progress; ``back``: samples that stand at their best point again; ``floor``: what
residuals are measured against where it is above the best one; ``returned``: best residual at which a sample last went back;
``checked``: best residual at the last check of progress.  All ``(batch,)``, ``None`` until needed.  The empty dictionary is
the state before the first step.
"""


def watch(f: Evaluations, state: GuardState, safeguard: float, patience: int) -> tuple[Tensor | None, GuardState]:
    """Which samples forget their memory before this step (``None``: none), and the new state.

    A sample does badly when its residual exceeds ``safeguard`` times the smallest since its last restart, or when its
    best residual has not improved over ``patience`` steps.  It then goes back to its best point (:func:`return_to_best`),
    and from there, with an empty memory, takes the plain step.  Where that step contracts, it gives a new best point: the
    best residual falls at least once in ``2 patience + 2`` steps by the factor of the plain iteration.  Where it does
    not, going back to the same point again would be a loop: the sample goes on from where it is (:func:`stranded`).

    In the spirit of the safeguarded steps of Zhang, O'Donoghue & Boyd (2020), SIAM J. Optim. 30(4), algorithm 3.
    """
    norm, best = f.norm, f.best_norm
    step = int(state.get("step") or 0) + 1
    due = step >= patience
    step = 0 if due else step
    if norm is best and not due and state.get("floor") is None and state.get("back") is None:
        return None, state | {"step": step}  # every sample at work has improved
    floor, returned, checked, back = (_mask(state, name) for name in ("floor", "returned", "checked", "back"))
    bad = norm > safeguard * (best if floor is None else torch.maximum(best, floor))
    if due:
        if checked is not None:
            bad.logical_or_(best >= checked)
        checked = best
    if floor is not None:
        floor = torch.minimum(floor, norm)
    forget = None
    if back is not None or maybe_any(bad):
        forget = bad if back is None else bad | back
        fresh = best < norm if returned is None else (best < norm) & (best < returned)
        back = bad & fresh
        floor = torch.where(back, 0, torch.where(bad, norm, torch.zeros_like(norm) if floor is None else floor))
        returned = torch.where(back, best, torch.inf if returned is None else returned)
        back = back if maybe_any(back) else None
    return forget, {"step": step, "floor": floor, "returned": returned, "checked": checked, "back": back}


def return_to_best(f: Evaluations, z: Tensor, state: GuardState) -> Tensor:
    """The next point: ``z``, but the best one for samples that go back to it."""
    back = _mask(state, "back")
    return z if back is None else torch.where(back.unsqueeze(1), f.best, z)


def stranded(forget: Tensor, before: GuardState, after: GuardState) -> Tensor:
    """Which samples of ``forget`` go on from where they are, since going back to their best point was in vain.

    ``before``, ``after``: the states that :func:`watch` was given and returned.
    """
    masks = [mask for mask in (_mask(before, "back"), _mask(after, "back")) if mask is not None]
    return forget if not masks else forget & ~torch.stack(masks).any(0)


def in_vain(f: Evaluations, state: GuardState) -> tuple[Tensor | None, GuardState]:
    """Which samples 200 steps have brought nothing (``None``: none is known to), and the new state: where ``F`` jumps, no
    restart helps."""
    step = int(state.get("step") or 0) + 1
    if step % _EVERY:
        return None, state | {"step": step}
    best, last, idle = f.best_norm, _mask(state, "best"), _mask(state, "idle")
    if last is None or idle is None:
        return None, {"step": step, "best": best, "idle": torch.zeros_like(best)}
    idle = torch.where(best <= _FALLEN * last, 0, idle + 1)
    return f.active & (idle >= _LOOKS), {"step": step, "best": best, "idle": idle}


def maybe_any(mask: Tensor) -> bool:
    """Is any entry nonzero?  On the CPU the answer; elsewhere yes, since asking would cost a synchronisation."""
    return mask.device.type != "cpu" or int(torch.count_nonzero(mask)) > 0


def _mask(state: GuardState, name: str) -> Tensor | None:
    value = state.get(name)
    return value if isinstance(value, Tensor) else None
