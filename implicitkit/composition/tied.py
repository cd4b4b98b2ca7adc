r"""A feed-forward network as one equilibrium (Bai, Kolter & Koltun 2019, theorem 3).

An ``L``-layer network ``z^{[i]} = \sigma_i(W_i z^{[i-1]} + b_i)``, ``z^{[0]} = x``, is the fixed point of one map on the
stack ``z = (z_1, ..., z_L)``, with the same weights at every step and the input injected at every step,

    z <- \sigma(W_z z + W_x x + b),

``W_z`` with ``W_2, ..., W_L`` on its block sub-diagonal, ``W_x`` with ``W_1`` as its first block, ``b`` the stacked
biases, ``\sigma`` acting block by block.  ``W_z`` is nilpotent: from any start the map arrives in exactly ``L`` steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from implicitkit.composition.gamma import Gamma
from implicitkit.composition.joint import Joint
from implicitkit.composition.wiring import Wiring
from implicitkit.foundation.options import check_arguments, flag


class Stacked(NamedTuple):
    """The matrices of a tied network: ``W_z (n, n)``, ``W_x (n, m)``, ``b (n,)``, and where each layer's rows lie."""

    W_z: Tensor
    W_x: Tensor
    b: Tensor
    rows: dict[str, slice]


class Layer(nn.Module):
    """One layer as a map on its own state, which it does not use: ``(z_i, z_{i-1}) -> layer(z_{i-1})``."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, z: Tensor, below: Tensor) -> Tensor:
        """``\\sigma_i(W_i z_{i-1} + b_i)``."""
        out: Tensor = self.parts(below)
        return out


@dataclass(frozen=True, repr=False)
class Tied(Joint):
    """A network as a weight-tied, input-injected fixed point; a composition in which every node is explicit.

        tied = ik.tie(network)
        ik.solve(tied, tied.start(x), (x,), solver="picard", batch_dims=1).value[tied.output_node]    # = network(x)

    ``solver=ik.Blocks()`` evaluates one layer after another; a plain solver all of them at once, ``tied.depth`` times.
    """

    @property
    def depth(self) -> int:
        """``L``, the number of steps from any start to the fixed point."""
        return len(self.graph)

    def start(self, x: Tensor) -> dict[str, Tensor]:
        """Zeros of the shapes of the layers' outputs for this input (found in ``eval`` mode: no statistics, no masks)."""
        state, below = {}, x.detach()
        layers: dict[str, Any] = self.map.functions
        training = [m for m in nn.ModuleList(layers.values()).modules() if m.training]
        try:
            for m in training:
                m.training = False
            with torch.no_grad():
                for name, layer in layers.items():
                    below = layer(None, below)
                    state[name] = torch.zeros_like(below)
        finally:
            for m in training:
                m.training = True
        return state

    def matrices(self) -> Stacked:
        """``W_z``, ``W_x`` and ``b``, materialised: ``n^2`` numbers, ``n`` the sum of the layers' widths.

        Raises:
            TypeError: a layer does not begin with its only ``nn.Linear``.
        """
        linear: dict[str, nn.Linear] = {}
        for name, layer in self.map.functions.items():
            parts = list(layer.parts) if isinstance(layer, Layer) else []
            if not parts or not isinstance(parts[0], nn.Linear) or any(isinstance(p, nn.Linear) for p in parts[1:]):
                raise TypeError(
                    f"layer {name!r} is not a linear map followed by an activation: the stacked matrices exist for "
                    "networks of nn.Linear and elementwise activations only"
                )
            linear[name] = parts[0]
        rows, end = {}, 0
        for name, part in linear.items():
            rows[name] = slice(end, end := end + part.out_features)
        first = next(iter(linear.values()))
        W_z, W_x = first.weight.new_zeros(end, end), first.weight.new_zeros(end, first.in_features)
        b = first.weight.new_zeros(end)
        below: slice | None = None
        for name, part in linear.items():
            (W_x[rows[name]] if below is None else W_z[rows[name], below]).copy_(part.weight)
            if part.bias is not None:
                b[rows[name]] = part.bias
            below = rows[name]
        return Stacked(W_z, W_x, b, rows)


def tie(layers: nn.Sequential | Iterable[nn.Module], *, share: bool = True) -> Tied:
    """The weight-tied, input-injected equivalent of a feed-forward network.

    For layers ``z_{i+1} = f_i(z_i)`` the equilibrium of ``z_i = f_{i-1}(z_{i-1})``, ``z_0 = x``, is the network's own
    forward pass.  Source: Bai, Kolter & Koltun (2019), theorem 3.

    Args:
        layers: an ``nn.Sequential`` or modules in order (a sequence inside counts as its members).  Parameter-free
            modules (activations, dropout in ``eval``, flattening) belong to the layer before them; one before any layer
            with parameters is a layer of its own.
        share: the map uses the network's own parameters; else copies of them.

    Returns:
        A :class:`Tied` with nodes ``"layer1"``, ``"layer2"``, ..., input ``"x"``.

    Raises:
        ValueError: no layers. TypeError: something that is no module.
    """
    check_arguments("tie", share=(flag(), share))
    if not isinstance(layers, Iterable):
        raise TypeError(f"tie takes an nn.Sequential or modules in order, got {type(layers).__name__}")
    parts = [part for layer in layers for part in _flat(layer)]
    for part in parts:
        if not isinstance(part, nn.Module):
            raise TypeError(f"tie takes nn.Modules in order, got {type(part).__name__} ({part!r})")
    if not parts:
        raise ValueError("tie needs at least one layer")
    if not share:
        parts = copy.deepcopy(parts)
    groups: list[list[nn.Module]] = []
    for part in parts:
        if not groups or any(True for _ in part.parameters()):
            groups.append([])
        groups[-1].append(part)
    functions: dict[str, Any] = {f"layer{i}": Layer(group) for i, group in enumerate(groups, 1)}
    names = list(functions)
    reads = {name: ("x",) if i == 0 else (names[i - 1],) for i, name in enumerate(names)}
    return Tied(Gamma(functions, Wiring(reads, names[-1])))


def _flat(layer: Any) -> list[Any]:
    return [p for part in layer for p in _flat(part)] if isinstance(layer, nn.Sequential) else [layer]
