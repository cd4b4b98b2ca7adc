"""What a function is shown in place of its tensors, to see what else it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from implicitkit.foundation import compat

_MARK = "_implicitkit_stand_in"


def is_marked(t: Tensor) -> bool:
    """Is this a stand-in that shows where something computed from it was kept?"""
    return getattr(t, _MARK, False)


def plainly(t: Tensor, levels: bool) -> Tensor:
    """``t`` as it is below every level, tracked and batched at none."""
    return compat.plain_sample(t) if levels else t.detach()


def stand_ins(theta: Sequence[Tensor], levels: bool, marked: Callable[[Tensor], bool] | None = None) -> list[Tensor]:
    """What the function is shown in place of ``theta``: tensors tracked and batched at no level; of those that are to be
    ``marked``, leaves that show where something computed from them was kept."""
    if not levels:
        plain = [t.detach() for t in theta]
        for t, stand_in in zip(theta, plain, strict=True):
            if marked and t.requires_grad:
                setattr(stand_in.requires_grad_(), _MARK, True)
        return plain
    plain = []
    for t in theta:
        stand_in = compat.plain_sample(t)
        if marked is not None and marked(t) and (stand_in.is_floating_point() or stand_in.is_complex()):
            stand_in = compat.marked(stand_in)
            setattr(stand_in, _MARK, True)
        plain.append(stand_in)
    return plain
