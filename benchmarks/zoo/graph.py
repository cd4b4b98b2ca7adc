r"""IGNN on chains: the class of a chain is told at its first node only, and must travel to the last.

    f(Z; X) = relu(A Z W^T + A X \Omega_1^T + X \Omega_2^T + b),   each row of W in the l1 ball of radius kappa / rho(A)

Source: Gu et al. (2020), "Implicit graph neural networks", section 6 (chains) and equation (6); deq-zoo/ignn.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import implicitkit as ik
from benchmarks.zoo.base import Model
from implicitkit_deq.cells import normalised_adjacency

__all__ = ["Chains"]

CHAINS, LENGTH, FEATURES, WIDTH, KAPPA = 20, 10, 100, 16, 0.9  # CHAINS of either class


class Chains(Model):
    """Shapes: ``X (1, N, 100)``, ``Z (1, N, 16)``, one graph being one sample; ``A (N, N)``, ``rho(A) = 1``."""

    zoo: ClassVar[dict[str, Any]] = {"f_solver": "fixed_point_iter", "grad": 5, "tau": 0.5}
    injected_dims = (0, None)  # the weight belongs to all samples
    rate, steps = 1e-2, 150

    def __init__(self) -> None:
        super().__init__()
        nodes = 2 * CHAINS * LENGTH
        here = torch.arange(nodes).view(-1, LENGTH)
        edges = torch.stack([here[:, :-1].flatten(), here[:, 1:].flatten()])
        self.adjacency: Tensor
        self.register_buffer("adjacency", normalised_adjacency(edges, nodes))
        self.raw = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.spread, self.own = (nn.Linear(FEATURES, WIDTH, bias=bias) for bias in (False, True))
        self.head = nn.Linear(WIDTH, 2, bias=False)
        nn.init.uniform_(self.raw, -(WIDTH**-0.5), WIDTH**-0.5)

    def inject(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What does not depend on ``Z``, and the projected weight."""
        return self._along(self.spread(x)) + self.own(x), ik.project.l1_ball(KAPPA)(self.raw)

    def update(self, z: Tensor, injected: Tensor, W: Tensor) -> Tensor:
        """One step along the edges."""
        return torch.relu(self._along(z @ W.mT) + injected)

    def _along(self, z: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, z[0]).unsqueeze(0)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """``(N, 16)``."""
        return (x.shape[1], WIDTH)

    def batch(self, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The one graph; a tenth of the chains have all their labels told in a step."""
        x = torch.zeros(2, CHAINS, LENGTH, FEATURES)
        x[0, :, 0, 0] = x[1, :, 0, 1] = 1.0
        return (x.view(1, -1, FEATURES),), torch.arange(2).repeat_interleave(CHAINS * LENGTH)

    def loss(self, z: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of the class of every node."""
        return nn.functional.cross_entropy(self.head(nn.functional.normalize(z[0], dim=-1)), target)
