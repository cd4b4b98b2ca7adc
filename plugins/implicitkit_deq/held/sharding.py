"""A cell under ``fully_shard``: its weights are gathered once a call of the layer, not at every evaluation.

``fully_shard(module)`` gathers a module's weights in a hook before its forward, drops them in one after it, and does the
same around its backward.  A solve evaluates the cell as often as this process's samples need: gathering in each evaluation
would be slow, and wait for ever for processes that have finished.  So the whole solve takes the place of the cell's forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn


class _Solve:
    """What stands in for the forward of a sharded cell while a layer solves."""

    def __init__(self, solve: Callable[..., Any], forward: Callable[..., Any]) -> None:
        self.solve, self.forward = solve, forward

    def __call__(self, *inputs: Any) -> Any:
        return self.solve(inputs)


def is_gathered(cell: Any) -> bool:
    """Are the weights of a sharded cell here, because its layer is solving?"""
    return isinstance(getattr(cell, "__dict__", {}).get("forward"), _Solve)


def bare(cell: Any) -> Callable[..., Any]:
    """The cell as it is to be evaluated: without the hooks that gather, where that is done."""
    forward: Callable[..., Any] = cell.forward.forward if is_gathered(cell) else cell
    return forward


def gathered(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method ``(layer, inputs, ...)`` that runs as the forward of the layer's cell, if that is sharded."""

    @functools.wraps(call)
    def wrapped(layer: Any, inputs: tuple[Any, ...], *rest: Any) -> Any:
        cell = layer.cell
        if not _is_sharded(cell) or is_gathered(cell):
            return call(layer, inputs, *rest)
        own = cell.__dict__.get("forward")
        cell.forward = _Solve(lambda given: call(layer, given, *rest), cell.forward)
        try:
            return cell(*inputs)
        finally:
            del cell.forward
            if own is not None:
                cell.forward = own

    return wrapped


def _is_sharded(cell: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(cell, nn.Module) and isinstance(cell, fsdp.FSDPModule)
