"""What a solve shows: its iterates on the way, and the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import implicitkit as ik
from implicitkit_deq.starting.warm_start import alike


class Visit:
    """A callback that keeps the iterates after some steps, and passes every step on."""

    def __init__(self, at: tuple[int, ...], kept: list[Any], then: Callable[[int, Any, Tensor], Any] | None) -> None:
        self.at, self.kept, self.then = at, kept, then

    def __call__(self, step: int, z: Any, residual_norm: Tensor) -> Any:
        if step in self.at:
            self.kept.append(z)
        return None if self.then is None else self.then(step, z, residual_norm)


def check_steps(at: Any) -> tuple[int, ...]:
    """The step numbers at which a solve is to show its iterates."""
    if isinstance(at, Sequence) and not isinstance(at, str):
        whole = all(isinstance(k, int) and k >= 1 for k in at)
        if whole and list(at) == sorted(set(at)):
            return tuple(at)
    raise ValueError(f"at must be increasing step numbers from 1 on, as in at=(2, 4, 8), got {at!r}")


def refuse_mapped(kept: list[Any], state: Any) -> None:
    """Raise where iterates that were kept are not those of one call: those of all samples that ``torch.vmap`` maps."""
    if kept and not alike(kept[0], state):
        raise ik.CapabilityError(
            "states() does not work under torch.vmap: a solve shows its iterates for all mapped samples at once. Pass "
            "the samples as one batch instead (they are solved independently), or use forward()"
        )


def given_away(output: Any) -> Any:
    """An output that the caller may change in place, as ``nn.ReLU(inplace=True)`` does after any module: the equilibrium
    itself is what the backward, ``layer.solution`` and the next start read."""
    return ik.extend.trees.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, output)
