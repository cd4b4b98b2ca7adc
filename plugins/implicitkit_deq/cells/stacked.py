"""Several cells one upon another as a single cell: stacking equilibria adds nothing that one equilibrium cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.starting.start import check_dims, check_state, zeros


class Wrapped(Cell):
    """Any callable ``(z, *inputs) -> z`` with its state's shape, as a :class:`Cell`.

    Args:
        function: a function or module. state: the shape of one sample's state, a pytree of shapes, or a function of the
            inputs that returns one. injected_dims: as in :class:`Cell`.
    """

    def __init__(self, function: Callable[..., Any], state: Any, injected_dims: Any = None) -> None:
        super().__init__()
        options.check_arguments("Wrapped", function=(options.function("function(z, *inputs)"), function))
        check_state(state)
        check_dims("Wrapped: injected_dims", injected_dims)
        self.function, self.state, self.injected_dims = function, state, injected_dims

    def update(self, z: Any, *injected: Any) -> Any:
        """``function(z, *injected)``."""
        return self.function(z, *injected)

    def state_shape(self, *inputs: Any) -> Any:
        """The shape that was given, or what the function that was given says."""
        return self.state(*inputs) if callable(self.state) else self.state


class Composed(Cell):
    """A cell made of maps that read one another in a row; a :class:`DEQ` solves it as a composition (:func:`ik.compose`).

    ``w_1 = f_1(w_1; x)``, ``w_2 = f_2(w_2; w_1)``, and so on.

    The state is a dict by the names of the maps.  ``solver=ik.Blocks(...)`` uses the structure forward, the default linear
    solver backward.

    Source: Bai, Kolter & Koltun (2019), theorem 2.
    """

    def maps(self) -> dict[str, tuple[Any, Callable[..., Any], str | None]]:
        """By name: each module, its map ``(own state, what it reads)``, and the name that it reads (the first: none)."""
        raise NotImplementedError(f"{type(self).__name__} must define maps()")

    def update(self, z: dict[str, Any], *injected: Any) -> dict[str, Any]:
        """All maps at once; the first reads what is injected."""
        return {
            name: function(z[name], *(injected if below is None else (z[below],)))
            for name, (_, function, below) in self.maps().items()
        }


class Stacked(Composed):
    r"""``\Gamma([w_1, w_2, ...]; x) = [f_1(w_1; x), f_2(w_2; w_1), ...]`` (Bai, Kolter & Koltun 2019, theorem 2).

    Its fixed points are those of the cells one after another: ``w_1`` of the first at ``x``, ``w_2`` of the second at
    (the output of) ``w_1``, and so on.  Where a cell has several, joint and sequential solves may find different ones.
    The Jacobian is block lower triangular; its spectral radius is the largest of the cells'.

    The state is a dict, ``"layer1"``, ``"layer2"``, ...; the output is that of the last (the theorem's ``[:, -d:]``).

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
        self.stages = nn.ModuleDict({f"layer{i}": stage for i, stage in enumerate(stages, 1)})
        self.injected_dims = stages[0].injected_dims
        self.causal = all(stage.causal for stage in stages)

    def maps(self) -> dict[str, tuple[Any, Callable[..., Any], str | None]]:
        """The cells; each reads the output of the one before."""
        found: dict[str, tuple[Any, Callable[..., Any], str | None]] = {}
        below: str | None = None
        for name, cell in self._cells().items():
            function = cell.update if below is None else _Reading(cell, self._cells()[below])
            found[name] = (cell, function, below)
            below = name
        return found

    def _cells(self) -> dict[str, Any]:
        return dict(self.stages.items())

    def inject(self, *inputs: Any) -> tuple[Any, ...]:
        """What the first cell gets; what the others get is part of the state."""
        return self._cells()["layer1"].inject(*inputs)

    def output(self, z: dict[str, Any]) -> Any:
        """The output of the last cell."""
        name, cell = list(self._cells().items())[-1]
        return cell.output(z[name])

    def state_shape(self, *inputs: Any) -> dict[str, Any]:
        """A dict of the cells' shapes."""
        tensors = [t for t in ik.extend.trees.tree_flatten(inputs)[0] if isinstance(t, Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point() or t.is_complex()), torch.get_default_dtype())
        shapes = {}
        for name, cell in self._cells().items():
            shapes[name] = cell.state_shape(*inputs)
            outline = zeros(shapes[name], len(tensors[0]), dtype, tensors[0].device)
            inputs = (cell.output(outline),)
        return shapes

    def recurrent_weights(self) -> list[Tensor]:
        """The recurrent weights of all cells."""
        return [weight for cell in self._cells().values() for weight in cell.recurrent_weights()]


class _Reading:
    """A cell's map on its own state and that of the stage below, of which it reads the output."""

    def __init__(self, cell: Any, below: Any) -> None:
        self.cell, self.below = cell, below

    def __call__(self, z: Any, state_below: Any) -> Any:
        return self.cell(z, self.below.output(state_below))
