"""The simplex, its points with few entries, and its projection in the Kullback-Leibler divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.options import at_least, check_options, each, positive
from implicitkit.sets.base import Projection, against
from implicitkit.sets.groups import ByRow


@dataclass(frozen=True)
class Simplex(ByRow, Projection):
    r"""``{x >= 0, sum x = radius}``: ``x = max(v - tau, 0)`` with ``tau`` from a sort (Held, Wolfe & Crowder 1974;
    Duchi et al. 2008).  With ``S`` the support, ``tau = (sum_S v - radius) / |S|`` and ``dx/dv = I_S - 1_S 1_S' / |S|``.

    Args:
        radius: positive number, or tensor of the batch's shape.
    """

    radius: Any = 1.0

    def __post_init__(self) -> None:
        check_options(self, radius=each(positive()))

    def project(self, v: Tensor) -> Tensor:
        return onto_simplex(v, against(self.radius, v))


@dataclass(frozen=True)
class SparseSimplex(Projection):
    """``{x >= 0, sum x = radius, at most k entries nonzero}``: the ``k`` largest entries projected onto the simplex, the
    others zero (Kyrillidis, Becker, Cevher & Koch 2013, theorem 1).  Not convex; the first entries win a tie.

        ik.project.sparse_simplex(2)(torch.tensor([0.9, 0.3, 0.5]))  # [0.7, 0.0, 0.3]

    Args:
        max_nonzero: ``k``, at least 1. radius: positive number, or tensor of the batch's shape.

    Raises:
        ValueError: ``max_nonzero`` below 1, ``radius`` not positive.
    """

    max_nonzero: int
    radius: Any = 1.0

    def __post_init__(self) -> None:
        check_options(self, radius=each(positive()), max_nonzero=at_least(1))

    def project(self, v: Tensor) -> Tensor:
        return self._of_the_first(v, v.detach())

    def _of_the_first(self, v: Tensor, rank: Tensor) -> Tensor:
        order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : self.max_nonzero]
        few = onto_simplex(v.gather(-1, order), against(self.radius, v))
        return torch.zeros_like(v).scatter(-1, order, few)

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)`` of the face that ``z`` lies in, whatever the length of ``slope``, of a tensor, or of each
        leaf of a pytree: entries that are not zero come before others."""
        return trees.tree_map(self._natural, z, slope)

    def _natural(self, z: Tensor, slope: Tensor) -> Tensor:
        v = z - slope
        rank = v.detach()
        ahead = 1 + 2 * rank.abs().amax(-1, keepdim=True)
        return z - self._of_the_first(v, torch.where(z.detach() > 0, rank + ahead, rank))


def onto_simplex(v: Tensor, radius: Tensor) -> Tensor:
    """``max(v - tau, 0)`` with ``tau`` such that the sum is ``radius`` (broadcasts against ``v``)."""
    v = v - v.detach().amax(-1, keepdim=True)  # the projection does not see a shift: large entries lose no digits
    with torch.no_grad():
        plain, size = v.detach(), radius.detach()
        ordered = plain.sort(dim=-1, descending=True).values
        count = torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
        excess = ordered.cumsum(-1) - size
        inside = ordered * count > excess
        k = inside.to(v.dtype).sum(-1, keepdim=True).clamp_min(1)
        edge = ordered.gather(-1, (k - 1).long())
        support = (plain >= edge).to(v.dtype)
    tau = ((v * support).sum(-1, keepdim=True) - radius) / support.sum(-1, keepdim=True)
    return (v - tau).clamp_min(0)


class EntropicProjection(Projection):
    r"""A projection in the Kullback-Leibler divergence, of ``exp(v)``; the point is given by its logarithm:

        argmin_{x in C}  \sum x (\log x - v) - x

    It smooths the maximum of ``<v, x>`` over ``C``.  It is no Euclidean projection, and so no ``project=`` of ``ik.argmin``.
    """

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
        check_options(self, radius=each(positive()))

    def project(self, v: Tensor) -> Tensor:
        return against(self.radius, v) * torch.softmax(v, -1)
