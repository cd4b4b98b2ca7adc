"""Some samples of a solve, to be looked at alone, and what is known of all while only some are in work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.base import account
from implicitkit.solver.evaluating.fit_graphs import lend
from implicitkit.solver.evaluations import Evaluations


def subset(f: Evaluations, which: Tensor, whole: bool = False) -> tuple[Tensor, Any, Any]:
    """The samples of all rows in which one is asked for (``whole``: of all rows), and the system and tensors of those."""
    per_row = f.system.samples_per_row
    rows = which.view(-1, per_row).any(1)
    samples = rows.repeat_interleave(per_row).nonzero().squeeze(1)
    if whole or not f.system.can_select or len(samples) == len(which):
        return torch.arange(len(which), device=which.device), f.system, f.theta
    system, theta = f.system.select(rows.nonzero().squeeze(1), f.theta)
    return samples, system, theta


def ask(f: Evaluations, question: Callable[..., Tensor], z: Tensor, which: Tensor, *more: Any) -> Tensor:
    """The answer to a question about the residual at the samples ``which``, asked beside ``f``, which remembers its
    point, and of their rows alone where the system allows it; ``(batch, ...)``."""
    F = f.residual(z)
    samples, system, theta = subset(f, which)
    probe = f.beside("root", system, theta)
    if len(samples) == len(which):
        lend(f, probe, z)
        return question(probe, z, which, *more)
    z, F, chosen, *rest = (t.index_select(0, samples) if isinstance(t, Tensor) else t for t in (z, F, which, *more))
    probe.know(z, F)
    answer = question(probe, z, chosen, *rest)
    return answer.new_zeros(len(which), *answer.shape[1:]).index_copy(0, samples, answer)


def each(f: Evaluations, which: Tensor, most: int) -> Iterator[tuple[Tensor, int, Evaluations]]:
    """The first samples among ``which``, so many at ``most``: each as a mask, its number, and counted evaluations of it
    alone; none where the system does not allow that."""
    for number in which.nonzero().squeeze(1)[:most].tolist():
        mask = torch.zeros_like(which).index_fill(0, torch.tensor([number], device=which.device), True)
        samples, system, theta = subset(f, mask)
        if len(samples) == 1:
            part = Evaluations(system, theta, f.solves)
            yield mask, number, part
            account(f, part)


class WholeBatch:
    """Results of all samples while only some are in work.

    Attributes:
        values: by name, each ``(batch, ...)``. index: which samples are in work; ``None``: all of them.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.values: dict[str, Tensor] = {}
        self.index: Tensor | None = None

    def store(self, **values: Tensor) -> None:
        for name, value in values.items():
            if self.index is None:
                self.values[name] = value.clone()
            else:
                if name not in self.values:
                    self.values[name] = value.new_zeros(self.batch, *value.shape[1:])
                self.values[name].index_copy_(0, self.index, value)

    def store_some(self, samples: Tensor, kept: dict[str, Tensor]) -> None:
        """What is kept of some of those that are in work; of the others it is not known yet."""
        where = samples if self.index is None else self.index.index_select(0, samples)
        for name, value in kept.items():
            if f"kept {name}" not in self.values:
                self.values[f"kept {name}"] = value.new_zeros(self.batch, *value.shape[1:])
            self.values[f"kept {name}"].index_copy_(0, where, value)

    def narrow(self, samples: Tensor) -> None:
        self.index = samples if self.index is None else self.index.index_select(0, samples)

    def merge(self, value: Tensor, name: str) -> Tensor:
        assert self.index is not None
        return self.values[name].index_copy(0, self.index, value)
