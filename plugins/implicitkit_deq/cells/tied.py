"""A feed-forward network as one weight-tied, input-injected cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit_deq.cells.base import Cell

__all__ = ["Tied"]


class Tied(Cell):
    r"""``z~ <- \sigma(W_z z~ + W_x x + b~)`` whose equilibrium is what a network of ``L`` layers computes.

    For ``z[k+1] = \sigma[k](W[k] z[k] + b[k])``, ``k = 0..L-1``, ``z[0] = x`` (Bai, Kolter & Koltun 2019, theorem 3):
    ``z~ = [z[1]; ..; z[L]]``, ``W_z`` has ``W[1..L-1]`` below its diagonal, ``W_x = [W[0]; 0; ..]``, and ``b~``, ``\sigma``
    are stacked.  ``W_z`` is nilpotent: from any start, block ``k`` is exact after ``k`` applications, all of it after ``L``,
    and the implicit gradient is backpropagation.  The price is width: the sum of the layers'.

    The state is a tuple of blocks, and the matrices are never formed (``W_z``, ``W_x``, ``b`` form them on request); the
    network's modules are used as they are and stay its own.

    Args:
        network: ``nn.Linear`` layers, each followed by any number of modules that keep the shape (activations, dropout).

    Raises:
        TypeError: the network starts with something else, or is no ``nn.Sequential``.
    """

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        if not isinstance(network, nn.Sequential):
            raise TypeError(f"tie_weights takes an nn.Sequential, got {type(network).__name__}")
        layers: list[nn.Sequential] = []
        for module in _flat(network):
            if isinstance(module, nn.Linear):
                layers.append(nn.Sequential(module))
            elif not layers:
                raise TypeError(
                    f"the network starts with {type(module).__name__}: layers are nn.Linear, each followed by modules that "
                    "keep its shape"
                )
            else:
                layers[-1].append(module)
        if not layers:
            raise TypeError("the network is empty")
        for below, above in itertools.pairwise(layers):
            if _linear(below).out_features != _linear(above).in_features:
                raise ValueError(
                    f"a layer of {_linear(above).in_features} inputs follows one of {_linear(below).out_features} outputs"
                )
        self.layers = nn.ModuleList(layers)

    def _stages(self) -> Sequence[Any]:
        return list(self.layers)

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """``z[1]``, which depends on the input only."""
        return (self._stages()[0](x),)

    def update(self, z: tuple[Tensor, ...], injected: Tensor) -> tuple[Tensor, ...]:
        """``(z[1], layer_1(z[1]), .., layer_{L-1}(z[L-1]))``."""
        return (injected, *(layer(block) for layer, block in zip(self._stages()[1:], z, strict=False)))

    def output(self, z: tuple[Tensor, ...]) -> Tensor:
        """``z[L]``."""
        return z[-1]

    def state_shape(self, x: Tensor) -> tuple[tuple[int, ...], ...]:
        """The layers' widths."""
        return tuple((*x.shape[1:-1], width) for width in self.widths)

    # ---- the theorem's matrices
    @property
    def widths(self) -> list[int]:
        """Of ``z[1], .., z[L]``."""
        return [_linear(layer).out_features for layer in self._stages()]

    @property
    def W_z(self) -> Tensor:
        """``(n, n)``, ``n`` the sum of the widths: the weights of all layers but the first, below the diagonal."""
        widths, first = self.widths, _linear(self._stages()[0]).weight
        matrix = first.new_zeros(sum(widths), sum(widths))
        row, column = widths[0], 0
        for layer, below in zip(self._stages()[1:], widths, strict=False):
            weight = _linear(layer).weight
            matrix[row : row + len(weight), column : column + below] = weight
            row, column = row + len(weight), column + below
        return matrix

    @property
    def W_x(self) -> Tensor:
        """``(n, inputs)``: the first layer's weight upon zeros."""
        first = _linear(self._stages()[0]).weight
        return torch.cat([first, first.new_zeros(sum(self.widths[1:]), first.shape[1])])

    @property
    def b(self) -> Tensor:
        """``(n,)``: the biases, zero where a layer has none."""
        linears = [_linear(layer) for layer in self._stages()]
        return torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in linears])


def _linear(layer: Any) -> nn.Linear:
    return layer[0]


def _flat(network: nn.Sequential) -> list[nn.Module]:
    return [m for child in network for m in (_flat(child) if isinstance(child, nn.Sequential) else [child])]
