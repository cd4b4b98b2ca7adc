"""The policy of a ``DEQ`` in training, where the seeds of a run share its calls: each seed as it would be alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import Forgive

SAMPLES = 64  # of each seed, in the order of the seeds
DEAR = 300  # evaluations above which Forgive calls a call dear


@dataclass(frozen=True)
class BySeed(Forgive):
    """Each seed has a share of its own: where one has more unsolved samples, its call asks the whole relay, or raises."""

    def exceeded(self, failed: Tensor) -> bool:
        """Did too many of any seed's samples fail?"""
        return any(super(BySeed, self).exceeded(one) for one in failed.view(-1, SAMPLES))


@dataclass(frozen=True)
class RelayBySeed(ik.Relay):
    """What ``Forgive(every=)`` does in a layer's calls, for each seed by itself.

    ``pauses``: calls of each seed still to come without the dear members; ``vain``: the seeds in which these left samples;
    ``asked``: those that asked them in this call; ``calls``: of the cells, counted by seed; ``every``: as in ``Forgive``.
    """

    calls: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    pauses: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    vain: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    asked: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    every: int = Forgive().every

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        self.asked.fill_(False)
        before = self.calls.clone()
        total = super().run(f, z0, options)
        failed = (total.status != int(ik.Status.CONVERGED)).view(-1, SAMPLES)
        dear = failed.any(1) | (self.calls - before > DEAR)
        rested = (self.pauses > 0) & ~self.asked
        self.vain.copy_(torch.where(rested, self.vain, failed.any(1)))
        self.pauses.copy_(torch.where(rested, self.pauses - 1, torch.where(dear, self.every - 1, 0)))
        return total

    def _go_on(self, stages: Any, f: Any, z0: Tensor, options: Any, total: Any, *more: Any) -> Any:
        cheap = len(self.brief().stages) - 1
        total = super()._go_on(stages[:cheap], f, z0, options, total, *more)
        status = total.status
        left = (status != int(ik.Status.CONVERGED)).view(-1, SAMPLES)
        spared = (self.pauses > 0) & torch.tensor([Forgive().spares(*one) for one in zip(left, self.vain, strict=True)])
        self.asked.copy_(left.any(1) & ~spared)
        held = (left & spared.unsqueeze(1)).flatten()
        total.status = torch.where(held, int(ik.Status.STOPPED), status)  # which the stages do not look at
        total = super()._go_on(stages[cheap:], f, z0, options, total, *more)
        total.status = torch.where(held, status, total.status)
        return total
