r"""IGNN: states on the nodes of a graph, each in equilibrium with its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.normalise import WeightBound


class Graph(Cell):
    r"""``f(Z; X) = \phi(A Z W^T + A X U^T + b)`` on a graph of ``N`` nodes with normalised adjacency ``A``.

    With ``|W|_\infty <= bound < 1``, ``\lambda_{max}(|A|) = 1`` and an activation of slope at most one, the equilibrium
    exists, is unique and is found by Picard's iteration: the paper's condition ``\lambda_{pf}(|W|) \lambda_{pf}(A) < 1``.
    The bound holds throughout training.

    Shapes: ``X (N, in_features)``, ``Z (N, features)``; or, for a batch of states on one graph, with a batch in front.
    Nodes depend on each other: for a single graph, ``DEQ(cell, batch_dims=0)``.

    Args:
        adjacency: ``(N, N)``, dense or sparse (:func:`normalised_adjacency`). in_features, features: of ``X`` and ``Z``.
        bound: of ``|W|_\infty``, in (0, 1). activation: elementwise, slope at most one.

    Raises:
        ValueError: ``bound`` outside (0, 1), or an adjacency that is not square.

    Source: Gu et al. (2020), "Implicit graph neural networks", theorem 4.1 and equation (2).
    """

    def __init__(
        self,
        adjacency: Tensor,
        in_features: int,
        features: int,
        *,
        bound: float = 0.9,
        activation: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        options.check_arguments(
            "Graph",
            adjacency=(options.tensor(), adjacency),
            in_features=(options.at_least(1), in_features),
            features=(options.at_least(1), features),
            bound=(options.between(0, 1), bound),
            activation=(options.function("activation(x)"), activation),
        )
        if adjacency.ndim != 2 or adjacency.shape[0] != adjacency.shape[1]:
            raise ValueError(f"an adjacency is square, got shape {tuple(adjacency.shape)}")
        made: dict[str, Any] = {"dtype": adjacency.dtype, "device": adjacency.device}
        self.features, self.activation = features, activation
        self.adjacency: Tensor
        self.register_buffer("adjacency", adjacency)
        self.injection = nn.Linear(in_features, features, **made)
        self.recurrent = nn.Linear(features, features, bias=False, **made)
        nn.utils.parametrize.register_parametrization(self.recurrent, "weight", WeightBound(bound, "row_sum"))

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """``A X U^T + b``."""
        if x.shape[-2] != len(self.adjacency):
            raise ValueError(f"the graph has {len(self.adjacency)} nodes, but x has shape {tuple(x.shape)}")
        return (self._spread(nn.functional.linear(x, self.injection.weight)) + self.injection.bias,)

    def update(self, z: Tensor, injected: Tensor) -> Tensor:
        """``\\phi(A Z W^T + injected)``."""
        return self.activation(self._spread(self.recurrent(z)) + injected)

    def _spread(self, z: Tensor) -> Tensor:
        """``A Z``; a sparse matrix takes all features of a batch side by side."""
        if not self.adjacency.is_sparse and self.adjacency.layout == torch.strided:
            return self.adjacency @ z
        if z.ndim == 2:
            return torch.sparse.mm(self.adjacency, z)
        side_by_side = z.movedim(-2, 0)
        out = torch.sparse.mm(self.adjacency, side_by_side.flatten(1))
        return out.reshape(side_by_side.shape).movedim(0, -2)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """``(N, features)`` after the batch, if there is one."""
        return (len(self.adjacency), self.features) if x.ndim == 3 else (self.features,)

    def recurrent_weights(self) -> list[Tensor]:
        """``W``."""
        return [self.recurrent.weight]


def normalised_adjacency(edges: Tensor, nodes: int, *, loops: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    r"""``D^{-1/2} (A + I) D^{-1/2}``, sparse, of an undirected graph: its spectral radius is one.

    ``D_ii = sum_j (A + I)_ij``, ``D`` and ``A`` are ``(N, N)``; dimensionless.  Source: Kipf & Welling (2017),
    "Semi-supervised classification with graph convolutional networks".

    Args:
        edges: ``(2, m)`` integers, each edge once or in both directions. nodes: ``N``. loops: add ``I``.

    Raises:
        ValueError: an edge that leads to no node.
    """
    options.check_arguments(
        "normalised_adjacency",
        edges=(options.tensor(), edges),
        nodes=(options.at_least(1), nodes),
        loops=(options.flag(), loops),
        dtype=(options.optional(options.torch_dtype()), dtype),
    )
    if edges.ndim != 2 or len(edges) != 2 or (edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes):
        raise ValueError(f"edges are (2, m) integers in 0..{nodes - 1}, got shape {tuple(edges.shape)}")
    both = torch.cat([edges, edges.flip(0)], 1)
    if loops:
        own = torch.arange(nodes, device=edges.device)
        both = torch.cat([both, torch.stack([own, own])], 1)
    both = torch.unique(both, dim=1)
    degree = torch.zeros(nodes, dtype=dtype, device=edges.device)
    degree.index_add_(0, both[0], torch.ones_like(both[0], dtype=degree.dtype))
    root = degree.clamp_min(1).rsqrt()
    return torch.sparse_coo_tensor(
        both, root[both[0]] * root[both[1]], (nodes, nodes), device=both.device, check_invariants=False
    ).coalesce()
