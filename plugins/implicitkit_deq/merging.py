"""One equilibrium instead of many layers: what two layers have in common, joined in one (theorem 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import implicitkit as ik
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.cells.stacked import Stacked, Wrapped
from implicitkit_deq.starting.warm_start import Last


class Composable:
    """A layer that can be a node of ``ik.compose``, which solves all nodes together: what counts there is the cell; solver,
    tolerances and start are those of the joint solve."""

    cell: Any

    def as_fixed_point(self) -> ik.FixedPoint:
        """``cell(z, *inputs) = z``.

        Raises:
            TypeError: the layer returns something else than the equilibrium, which other nodes could not read.
        """
        if isinstance(self.cell, Cell) and type(self.cell).output is not Cell.output:
            raise TypeError(
                f"{type(self.cell).__name__} returns output(z), not its equilibrium z: as a node of ik.compose give its "
                "cell, and let the maps that read it apply output"
            )
        return ik.FixedPoint(self.cell)


def merged(first: Any, second: Any, make: type) -> Any:
    """``first >> second`` of two layers of the class ``make`` (:func:`implicitkit_deq.merge` says what comes out)."""
    for layer in (first, second):
        if not isinstance(layer, make):
            raise TypeError(f"first >> second merges two DEQ layers, got {type(layer).__name__}")
    for name in ("batch_dims", "dtype"):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(f"the layers differ in {name}: {getattr(first, name)} and {getattr(second, name)}")
    layers = (first, second)
    anew = None if all(layer._again.wanted for layer in layers) else "zeros"
    joined = make(
        Stacked(*_stages(first), *_stages(second)),
        init="last" if all(isinstance(layer.init, Last) for layer in layers) else anew,
        in_dims=first.in_dims,
        batch_dims=first.batch_dims,
        causal=first.causal and second.causal,
        dtype=first.dtype,
    )
    for name in ("train_settings", "eval_settings"):
        solvers = [solver for layer in (first, second) for solver in _solvers(layer, getattr(layer, name).solver)]
        inner = {f"layer{i}": solver for i, solver in enumerate(solvers, 1)}
        setattr(joined, name, getattr(first, name).changed({"solver": ik.Blocks(inner=inner)}))
    return joined.train(first.training)


def _stages(layer: Any) -> list[Cell]:
    """The cells that a layer is made of."""
    cell = layer.cell
    if isinstance(cell, Stacked):
        return [stage for stage, *_ in cell.maps().values()]
    if isinstance(cell, Cell):
        return [cell if layer.state is None else _Shaped(cell, layer.state)]
    return [Wrapped(cell, layer.state, 0 if isinstance(cell, nn.Module) else None)]


def _solvers(layer: Any, solver: Any) -> list[Any]:
    """The solver of each of its cells."""
    inner = solver.inner if isinstance(solver, ik.Blocks) else solver
    names = layer.cell.maps() if isinstance(layer.cell, Stacked) else ("",)
    return [inner.get(name, "anderson") if isinstance(inner, Mapping) else inner for name in names]


class _Shaped(Cell):
    """A cell with the state's shape that a layer was given for it."""

    def __init__(self, cell: Cell, state: Any) -> None:
        super().__init__()
        self.cell, self.state = cell, state
        self.injected_dims, self.causal = cell.injected_dims, cell.causal

    def inject(self, *inputs: Any) -> tuple[Any, ...]:
        return self.cell.inject(*inputs)

    def update(self, z: Any, *injected: Any) -> Any:
        return self.cell.update(z, *injected)

    def output(self, z: Any) -> Any:
        return self.cell.output(z)

    def state_shape(self, *inputs: Any) -> Any:
        return self.state(*inputs) if callable(self.state) else self.state

    def recurrent_weights(self) -> Any:
        return self.cell.recurrent_weights()
