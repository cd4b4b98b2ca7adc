"""Several cells one upon another as a single cell: stacking equilibria adds nothing that one equilibrium cannot do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.start import zeros

__all__ = ["Stacked", "Wrapped"]


class Wrapped(Cell):
    """Any callable ``(z, *inputs) -> z`` with its state's shape, as a :class:`Cell`.

    Args:
        function: a function or module. state: the shape of one sample's state, a pytree of shapes, or a function of the
            inputs that returns one. injected_dims: as in :class:`Cell`.
    """

    def __init__(self, function: Callable[..., Any], state: Any, injected_dims: Any = None) -> None:
        super().__init__()
        self.function, self.state, self.injected_dims = function, state, injected_dims

    def update(self, z: Any, *injected: Any) -> Any:
        """``function(z, *injected)``."""
        return self.function(z, *injected)

    def state_shape(self, *inputs: Any) -> Any:
        """As given."""
        return self.state(*inputs) if callable(self.state) else self.state


class Stacked(Cell):
    r"""``\Gamma([w_1, w_2, ...]; x) = [f_1(w_1; x), f_2(w_2; w_1), ...]`` (Bai, Kolter & Koltun 2019, theorem 2).

    Its fixed points are those of the cells one after another: ``w_1`` of the first at ``x``, ``w_2`` of the second at
    (the output of) ``w_1``, and so on.  Where a cell has several, joint and sequential solves may find different ones.
    The Jacobian is block lower triangular; its spectral radius is the largest of the cells'.

    The state is a tuple, one entry a cell; the output is that of the last (the theorem's ``[:, -d:]``).

    Args:
        stages: cells, at least two; each reads the output of the one before.

    Raises:
        TypeError: a stage is no :class:`Cell` (see :class:`Wrapped`). ValueError: fewer than two.
    """

    def __init__(self, *stages: Cell) -> None:
        super().__init__()
        for stage in stages:
            if not isinstance(stage, Cell):
                raise TypeError(
                    f"a stage must be a Cell, got {type(stage).__name__}: wrap it, Wrapped(function, state)"
                )
        if len(stages) < 2:
            raise ValueError(f"stacking takes two cells or more, got {len(stages)}")
        self.stages = nn.ModuleList(stages)
        self.injected_dims = stages[0].injected_dims
        self.causal = all(stage.causal for stage in stages)

    def _cells(self) -> Sequence[Any]:
        return list(self.stages)

    def inject(self, *inputs: Any) -> tuple[Any, ...]:
        """That of the first cell; what the others get is part of the state."""
        return self._cells()[0].inject(*inputs)

    def update(self, z: tuple[Any, ...], *injected: Any) -> tuple[Any, ...]:
        """``\\Gamma``."""
        first, *others = self._cells()
        outputs = (cell.output(w) for cell, w in zip(self._cells(), z, strict=False))
        return (
            first.update(z[0], *injected),
            *(cell(w, below) for cell, w, below in zip(others, z[1:], outputs, strict=False)),
        )

    def output(self, z: tuple[Any, ...]) -> Any:
        """That of the last cell."""
        return self._cells()[-1].output(z[-1])

    def state_shape(self, *inputs: Any) -> tuple[Any, ...]:
        """A tuple of the cells' shapes."""
        batch = next(len(t) for t in ik.trees.tree_flatten(inputs)[0] if isinstance(t, Tensor))
        shapes = []
        for cell in self._cells():
            shapes.append(cell.state_shape(*inputs))
            outline = zeros(shapes[-1], batch, torch.get_default_dtype(), torch.device("meta"))
            inputs = (cell.output(outline),)
        return tuple(shapes)

    def recurrent_weights(self) -> list[Tensor]:
        """Those of all cells."""
        return [weight for cell in self._cells() for weight in cell.recurrent_weights()]
