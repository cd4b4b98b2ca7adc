r"""A cell whose equilibrium exists and is unique for every value of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell


class Monotone(Cell):
    r"""The monotone operator equilibrium network ``z = \phi(W z + U x + b)`` with ``I - W`` strongly monotone:

        W = (1 - m) I - P^T P + Q - Q^T,    I - (W + W^T) / 2 = m I + P^T P >= m I,

    so that ``z`` is unique whatever ``P``, ``Q``, ``U``, ``b`` are (theorem 1), though ``|W|_2`` may exceed one and the
    plain iteration may diverge.  The cell's map is one step of forward-backward splitting,

        f(z; x) = \phi(z - \alpha ((I - W) z - U x - b)),    \alpha = 1 / L,   L = |I - W|_2,

    which has the same fixed point (``\phi``, ReLU, is the proximal operator of the indicator of ``z >= 0``, at any
    ``\alpha``).  It contracts where ``W`` is symmetric; where it is far from that, as the accelerated methods ask for no
    contraction, it is still the better map: ``\alpha = m / L^2``, which contracts by ``sqrt(1 - m^2 / L^2)`` whatever ``W``
    is, takes 2 to 10 times the evaluations, and leaves samples unsolved.  ``W`` and ``\alpha`` are computed once a solve.

    Shapes: ``x (batch, in_features)``, ``z (batch, features)``.

    Args:
        in_features, features: of ``x`` and ``z``. margin: ``m > 0``.

    Raises:
        ValueError: ``margin`` or a size that is not positive.

    Source: Winston & Kolter (2020), "Monotone operator equilibrium networks", theorem 1 and section 3.1.
    """

    injected_dims = (0, None, None)

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        margin: float = 0.5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options.check_arguments(
            "Monotone",
            in_features=(options.at_least(1), in_features),
            features=(options.at_least(1), features),
            margin=(options.positive(), margin),
        )
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.features, self.margin = features, margin
        self.injection = nn.Linear(in_features, features, **made)
        self.P = nn.Parameter(torch.randn(features, features, **made) / features**0.5)
        self.Q = nn.Parameter(torch.randn(features, features, **made) / features**0.5)

    def operator(self) -> Tensor:
        """``I - W = m I + P^T P - Q + Q^T``."""
        eye = torch.eye(self.features, dtype=self.P.dtype, device=self.P.device)
        return self.margin * eye + self.P.mT @ self.P - self.Q + self.Q.mT

    def inject(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``U x + b``, ``I - W`` and ``\\alpha`` (a number that the solution does not depend on)."""
        operator = self.operator()
        size = torch.linalg.matrix_norm(operator.detach(), 2)
        return self.injection(x), operator, size.reciprocal()

    def update(self, z: Tensor, injected: Tensor, operator: Tensor, step: Tensor) -> Tensor:
        """One step of forward-backward splitting."""
        return torch.relu(z - step * (z @ operator.mT - injected))

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """``(features,)``, with whatever stands between batch and features of ``x``."""
        return (*x.shape[1:-1], self.features)

    def recurrent_weights(self) -> list[Tensor]:
        """None: the bound is in the parametrisation, and scaling would be undone by it."""
        return []
