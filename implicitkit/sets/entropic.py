r"""Projections in the Kullback-Leibler divergence, of ``exp(v)``:

    argmin_{x in C}  \sum x (\log x - v) - x

They smooth the maximum of ``<v, x>`` over ``C``.  They are no Euclidean projections, and so no ``project=`` of
``ik.argmin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import check_options, or_tensor, positive
from implicitkit.sets.base import Projection, against

__all__ = ["EntropicProjection", "KLSimplex"]


class EntropicProjection(Projection):
    """A projection in the Kullback-Leibler divergence; the point is given by its logarithm."""

    euclidean: ClassVar[bool] = False


@dataclass(frozen=True)
class KLSimplex(EntropicProjection):
    """``{x >= 0, sum x = radius}``: ``radius softmax(v)`` over the last dimension (Beck & Teboulle 2003, section 5).

        ik.project.kl_simplex()(torch.tensor([1.0, 2.0, 3.0]).log())  # [1/6, 2/6, 3/6]

    Args:
        radius: positive number, or tensor of the batch's shape.
    """

    radius: Any = 1.0

    def __post_init__(self) -> None:
        check_options(self, radius=or_tensor(positive()))

    def project(self, v: Tensor) -> Tensor:
        return against(self.radius, v) * torch.softmax(v, -1)
