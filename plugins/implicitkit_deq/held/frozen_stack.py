"""Composed cells held fixed during a solve, each map a node of a composition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq.cells.stacked import Composed
from implicitkit_deq.held import hoist
from implicitkit_deq.held.frozen import Frozen


class FrozenStack:
    """What :class:`Frozen` is to a cell, to a :class:`Composed` one: a frozen map for every stage.

    Args:
        cell: the stages. places, device, how: as in :class:`Frozen`.
    """

    def __init__(self, cell: Composed, places: Sequence[hoist.Place], device: torch.device, **how: bool) -> None:
        self.stages: dict[str, tuple[Frozen, str | None]] = {}
        previous = None
        for name, (stage, function, below) in cell.maps().items():
            previous = Frozen(
                function,
                stage,
                places,
                lambda out: None,  # the composition checks its nodes
                device,
                previous=previous,
                **how,
            )
            self.stages[name] = (previous, below)

    def problem(self, injected: tuple[Any, ...]) -> ik.Problem:
        """The composition; its arguments are ``(weights, *injected)``."""
        inputs = [f"injected{i}" for i in range(len(injected))]
        nodes = {
            name: (stage, "weights", *(inputs if below is None else [below]))
            for name, (stage, below) in self.stages.items()
        }
        return ik.compose(nodes, output=list(nodes)[-1])

    def __call__(self, z: dict[str, Any], weights: Sequence[Tensor], *injected: Any) -> dict[str, Any]:
        """One evaluation of all stages."""
        return {
            name: stage(z[name], weights, *(injected if below is None else (z[below],)))
            for name, (stage, below) in self.stages.items()
        }

    def finish(self, z: dict[str, Any], weights: Sequence[Tensor], injected: tuple[Any, ...]) -> None:
        """After the solve: :meth:`Frozen.finish` of every stage."""
        for name, (stage, below) in self.stages.items():
            stage.finish(z[name], weights, injected if below is None else (z[below],))
