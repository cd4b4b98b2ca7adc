"""A first phase of training in which a layer is a shallow unrolled network, and how a layer counts its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.extend import options


@dataclass(frozen=True)
class Pretraining(ik.extend.Configured):
    """Training by a shallow unrolled network first: ``steps`` applications of the cell, ordinary backpropagation.

        z_L,  z_{k+1} = cell(z_k, x),  L = steps, or drawn for each call from {steps, ..., deepest}

    The warm-up of Bai, Kolter & Koltun 2019 (appendix) and of MDEQ (2020): near its initialisation a cell need not have an
    equilibrium worth finding, and a few tied layers train faster.  What is trained at one depth holds for that depth: the
    iteration need not come to rest, and the loss at the equilibrium, if there is one, may be any.  At a depth that changes
    from call to call the output cannot depend on it, so that the iterates come to rest (``deepest``).  May be replaced at
    any time (``layer.pretraining``), by ``None`` to be implicit from the next call on.

    Args:
        calls: training calls of the layer that are unrolled; afterwards it is implicit.
        steps: applications of the cell in each, or the fewest.
        deepest: applications at most, all numbers from ``steps`` on equally often.  The number depends on that of the call
            only: the same in every process, and in a training that is gone on with.  ``None``: always ``steps``.

    Raises:
        ValueError: a number less than 1, or ``deepest`` less than ``steps``.

    Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", appendix.  Varied depth: this library's, measured on the
    copy-memory task (docs/trainings.md); in the spirit of Anil et al. (2022), "Path independent equilibrium models can
    better exploit test-time computation".
    """

    calls: int
    steps: int
    deepest: int | None = None

    def __post_init__(self) -> None:
        count = options.at_least(1)
        options.check_options(self, calls=count, steps=count, deepest=options.optional(count))
        if self.deepest is not None and self.deepest < self.steps:
            raise ValueError(f"deepest ({self.deepest}) must be at least steps ({self.steps})")

    def depth(self, call: int) -> int:
        """Applications of the cell in the training call of this number, from 0 on."""
        if self.deepest is None:
            return self.steps
        own = torch.Generator().manual_seed(call)  # nobody else's numbers
        drawn = torch.randint(self.steps, self.deepest + 1, (), generator=own, device="cpu")
        return int(drawn)


class Pretrained(nn.Module):
    """A layer whose first training calls may be unrolled, while it has a :class:`Pretraining`.

    Its buffer ``calls`` counts them, from the first of them on (of one that is made with a pretraining, at once), or from
    the first ``state_dict`` that has it: that of a layer in its first phase is one for a layer without, and the other way
    round, which leaves the count as it is.
    """

    pretraining: Pretraining | None
    calls: Tensor

    def _count(self) -> None:
        if "calls" not in self._buffers:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def _unrolling(self) -> bool:
        if self.pretraining is None or not self.training:
            return False
        self._count()
        return int(self.calls) < self.pretraining.calls

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *found: Any) -> None:
        own, missing = f"{prefix}calls", found[0]
        if own in state_dict:
            self._count()
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *found)
        if own in missing:
            missing.remove(own)
