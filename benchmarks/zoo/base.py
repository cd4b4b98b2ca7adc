"""What a model of the zoo is, and how each library solves it: the few lines in which the programs differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ, Cell, ForgivenWarning, jacobian_penalty

__all__ = ["Model", "Solve", "drop_in", "layer_of", "torchdeq_way", "train"]

Solve = Callable[..., Any]  # (*inputs) -> the equilibrium, differentiable


class Model(Cell):
    """A cell with data and a loss.  ``update`` is what both libraries iterate, ``inject`` is computed once a call.

    Class attributes:
        zoo: what the script of deq-zoo passes to ``get_deq`` for this model. rate, steps: of the training before the
            comparison. training: what the layer is told in it.
    """

    zoo: ClassVar[Mapping[str, Any]]
    rate: ClassVar[float] = 3e-3
    steps: ClassVar[int] = 40
    penalty: ClassVar[float] = 0.0
    training_options: ClassVar[Mapping[str, Any]] = {"rtol": 1e-3}

    def batch(self, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Data as they are, and the target of the loss."""
        raise NotImplementedError

    def encode(self, *data: Tensor) -> tuple[Tensor, ...]:
        """From data to the inputs of the cell."""
        return data

    def loss(self, z: Any, target: Tensor) -> Tensor:
        """A number."""
        raise NotImplementedError

    def start(self, *inputs: Tensor) -> Any:
        """The state that a solve starts from: zero."""
        shapes, x = self.state_shape(*inputs), inputs[0]
        if isinstance(shapes[0], tuple):
            return tuple(x.new_zeros(len(x), *shape) for shape in shapes)
        return x.new_zeros(len(x), *shapes)

    def example(self, seed: int = 1000) -> tuple[tuple[Tensor, ...], Tensor]:
        """Inputs of the cell, of which the first is a leaf, and a target, of data that were not trained on."""
        data, target = self.batch(seed)
        with torch.no_grad():
            first, *others = self.encode(*data)
        return (first.clone().requires_grad_(), *others), target


# ------------------------------------------------------------------------------------------- the lines that differ, theirs
def torchdeq_way(model: Model, **options: Any) -> Solve:
    """``get_deq`` once, and a closure made anew at every call, as the files of deq-zoo have it."""
    from torchdeq import get_deq

    deq = get_deq(**options)

    def solve(*inputs: Tensor) -> Any:
        injected, z_init = model.inject(*inputs), model.start(*inputs)
        if isinstance(z_init, tuple):
            z_out, _ = deq(lambda *z: model.update(z, *injected), z_init)
        else:
            z_out, _ = deq(lambda z: model.update(z, *injected), z_init)
        return z_out[-1]

    return solve


# --------------------------------------------------------------------------------------------- the lines that differ, ours
def drop_in(model: Model, **options: Any) -> Solve:
    """The same closure, in :func:`ik.fixed_point`."""

    def solve(*inputs: Tensor) -> Any:
        injected, z_init = model.inject(*inputs), model.start(*inputs)
        return ik.fixed_point(lambda z: model.update(z, *injected), z_init, batch_dims=1, **options).value

    return solve


def layer_of(model: Model, **options: Any) -> Solve:
    """The model as a layer."""
    return DEQ(model, **options)


def train(model: Model, steps: int | None = None) -> list[float]:
    """Train as a layer, from the model's present weights, with the Jacobian's penalty where the model asks for it; the
    losses."""
    layer = DEQ(model, **model.training_options)
    optimiser = torch.optim.Adam(model.parameters(), model.rate)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)
        for step in range(model.steps if steps is None else steps):
            data, target = model.batch(step)
            inputs = model.encode(*data)
            z = layer(*inputs)
            loss = model.loss(z, target)
            losses.append(float(loss.detach()))
            if model.penalty:
                point = ik.extend.trees.tree_map(Tensor.detach, z)
                loss = loss + model.penalty * jacobian_penalty(model, point, inputs)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    return losses
