"""May rows be left out of a cell's evaluations once their samples have converged?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.random import fork_rng

import implicitkit as ik
from implicitkit_deq.cells.stacked import Composed
from implicitkit_deq.held import hoist
from implicitkit_deq.held.frozen import statistics_held

_OURS = "implicitkit_deq."


class Rows:
    """What a layer knows of its cell, in each of its modes: does it draw random numbers, and is every argument that counts
    as one of the batch one row a sample?

    A cell need not say which of its arguments the samples share (:attr:`Cell.injected_dims`), and one may have as many rows
    as the batch by chance: a mask of positions, the matrix of a graph.  So a cell with several arguments is evaluated once
    without its first sample, at a state like no other.  Where the others' values change, or it fails, no row is dropped,
    which costs time and nothing else; nor where nobody may look, inside transforms, before it has been asked outside.
    """

    def __init__(self) -> None:
        self._may_drop: dict[bool, bool] = {}  # by mode, training or not
        self._elsewhere: set[bool] = set()  # modes

    def never(self, training: bool, elsewhere: bool) -> None:
        """Drop no row in this mode from now on: the cell draws random numbers; ``elsewhere``: Python's or NumPy's."""
        self._may_drop[training] = False
        if elsewhere:
            self._elsewhere.add(training)

    def draws(self, training: bool, dims: Any) -> dict[str, bool]:
        """May the cell draw random numbers, where arguments have these batch dimensions, and Python's or NumPy's too?"""
        return {"may_draw": dims is None, "elsewhere": training in self._elsewhere}

    def dims(
        self,
        cell: Any,
        training: bool,
        function: Callable[..., Any],
        z: Any,
        injected: tuple[Any, ...],
        dims: Any,
        places: Sequence[hoist.Place],
        weights: Sequence[Tensor],
    ) -> Any:
        """The batch dimensions ``dims`` of ``injected``; ``None`` if no row of ``function(z, *injected)`` may be dropped."""
        if dims is None or not self._may_drop.get(training, True):
            return None
        tensors = [t for t in ik.extend.trees.tree_flatten(injected)[0] if isinstance(t, Tensor)]
        known = training in self._may_drop or len(tensors) < 2 or _is_ours(cell)
        if known or len(ik.extend.trees.tree_flatten(z)[0][0]) < 2:
            return dims
        if ik.extend.transforms_active():
            return None
        with ik.extend.modules_held(), hoist.held(places, weights), statistics_held(cell):
            self._may_drop[training] = _by_rows(function, z, injected, dims)
        return dims if self._may_drop[training] else None


def _is_ours(cell: Any) -> bool:
    stages = [stage for stage, *_ in cell.maps().values()] if isinstance(cell, Composed) else [cell]
    return all(type(stage).__module__.startswith(_OURS) for stage in stages)


def _by_rows(function: Callable[..., Any], z: Any, injected: tuple[Any, ...], dims: Sequence[int | None]) -> bool:
    """Does a map give samples the same values without the first one?"""
    z = ik.extend.trees.tree_map(lambda t: t + ripples(t), z)
    device = ik.extend.trees.tree_flatten(z)[0][0].device
    try:
        with torch.no_grad(), fork_rng([device] if device.type == "cuda" else []):
            whole = function(z, *injected)
            part = function(
                ik.extend.trees.tree_map(lambda t: t[1:], z),
                *(_without_first(x, dim) for x, dim in zip(injected, dims, strict=True)),
            )
    except (RuntimeError, ValueError, IndexError):  # what does not fit; a mistake of another kind shows in the solve
        return False
    leaves = zip(ik.extend.trees.tree_flatten(whole)[0], ik.extend.trees.tree_flatten(part)[0], strict=False)
    return all(map(_same, *zip(*((a[1:], b) for a, b in leaves), strict=True)))


def ripples(t: Tensor) -> Tensor:
    """Numbers that are all different, of size one."""
    return torch.arange(1.0, t.numel() + 1, device=t.device).sin().view(t.shape).to(t.dtype)


def _without_first(x: Any, dim: int | None) -> Any:
    if dim is None:
        return x
    return ik.extend.trees.tree_map(lambda t: t.narrow(dim, 1, t.shape[dim] - 1) if isinstance(t, Tensor) else t, x)


def _same(a: Tensor, b: Tensor) -> bool:
    """Are two values equal to rounding?  Sums over other batches are taken in another order."""
    if a.shape != b.shape:
        return False
    near = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=near, atol=near, equal_nan=True)
