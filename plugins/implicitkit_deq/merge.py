"""One equilibrium instead of many layers: feed-forward networks tied, stacked equilibria merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import implicitkit as ik
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.cells.stacked import Stacked, Wrapped
from implicitkit_deq.cells.tied import Tied
from implicitkit_deq.frozen import BATCH_NORMS
from implicitkit_deq.layer import DEQ
from implicitkit_deq.start import Last

__all__ = ["merge", "tie_weights"]


def tie_weights(network: nn.Sequential, **options: Any) -> DEQ:
    r"""A feed-forward network as a DEQ that computes the same, value and derivatives (theorem 3; see :class:`Tied`).

    Solved block by block, which is the network's own forward pass (each layer once, and once more to see that it holds);
    with ``solver="picard"`` all layers at once, as many times as there are layers.  A network with BatchNorm, whose training
    couples the samples, is one joint system (``batch_dims=0``) unless the options say otherwise.

    Args:
        network: its modules are shared, not copied. options: as in :class:`DEQ`.

    Returns:
        A :class:`DEQ` with ``layer(x) == network(x)`` and ``layer.cell`` of class :class:`Tied`.
    """
    coupled = isinstance(network, nn.Module) and any(isinstance(m, BATCH_NORMS) for m in network.modules())
    return DEQ(Tied(network), **{"solver": ik.Blocks(inner="picard"), "batch_dims": 0 if coupled else 1, **options})


def merge(first: DEQ, second: DEQ) -> DEQ:
    r"""``first >> second``: one DEQ on the joint map, whose output is that of ``second(first(x))`` (theorem 2).

    The cells are shared, not copied; those of merged layers are joined side by side, so that ``a >> b >> c`` has three
    blocks.  Each block keeps the solvers that its layer trains and is evaluated with (``ik.Blocks``: one block after
    another); another ``solver``, as in ``merged.using(solver="anderson")``, takes all of it as one system.  Tolerances and
    all other settings are those of ``first``.  Solves start from zeros, or, where ``init="last"`` in both layers, from the
    last equilibrium; other starts (``init``) and ``pretraining`` stay behind.

    Raises:
        TypeError: not two layers. ValueError: they differ in ``batch_dims`` or ``dtype``.
    """
    for layer in (first, second):
        if not isinstance(layer, DEQ):
            raise TypeError(f"first >> second merges two DEQ layers, got {type(layer).__name__}")
    for name in ("batch_dims", "dtype"):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(f"the layers differ in {name}: {getattr(first, name)} and {getattr(second, name)}")
    merged = DEQ(
        Stacked(*_stages(first), *_stages(second)),
        init="last" if all(isinstance(layer.init, Last) for layer in (first, second)) else "zeros",
        in_dims=first.in_dims,
        batch_dims=first.batch_dims,
        causal=first.causal and second.causal,
        dtype=first.dtype,
    )
    for name in ("train_settings", "eval_settings"):
        solvers = [solver for layer in (first, second) for solver in _solvers(layer, getattr(layer, name).solver)]
        inner = {f"layer{i}": solver for i, solver in enumerate(solvers, 1)}
        setattr(merged, name, getattr(first, name).changed({"solver": ik.Blocks(inner=inner)}))
    return merged.train(first.training)


def _stages(layer: DEQ) -> list[Cell]:
    """The cells that a layer is made of."""
    cell = layer.cell
    if isinstance(cell, Stacked):
        return [stage for stage, *_ in cell.maps().values()]
    if isinstance(cell, Cell):
        return [cell if layer.state is None else _Shaped(cell, layer.state)]
    return [Wrapped(cell, layer.state, 0 if isinstance(cell, nn.Module) else None)]


def _solvers(layer: DEQ, solver: Any) -> list[Any]:
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
