"""Proximal maps, batched and differentiable to every order off their kinks: ``ik.prox.l1(0.1)(v, step)``.

    prox(v, t) = argmin_x  t phi(x) + |x - v|^2 / 2

Each name is a configured map: call it on a tensor (or a pytree: leaf by leaf), or give it to ``ik.argmin(..., prox=)``,
which then minimises ``objective + phi``.  Weights may be tensors that broadcast against the point and are differentiated
like it; ``step`` is a number or a tensor of the batch's shape.

Source: Parikh & Boyd (2014), "Proximal algorithms", chapter 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.autocast import uncast_call
from implicitkit.foundation.clamping import held
from implicitkit.foundation.options import Configured, check_options, each, not_negative, or_tensor, positive
from implicitkit.sets.base import check_point, length
from implicitkit.sets.groups import ByRow
from implicitkit.sets.spectral import positive_part
from implicitkit.sets.total_variation import denoise

__all__ = [
    "Prox",
    "elastic_net",
    "group_lasso",
    "l1",
    "l2",
    "nonnegative",
    "nonnegative_ridge",
    "nuclear",
    "ridge",
    "total_variation",
]


_STEP = or_tensor(positive())


class Prox(Configured):
    """A term ``phi`` with its proximal map ``prox(v, t) = argmin_x t phi(x) + |x - v|^2 / 2``; a subclass defines
    :meth:`apply` on one tensor.  ``separable``: a sum over single numbers.

    Shapes: ``x`` has the shape of ``v``; ``t`` and weights are numbers or broadcast against the batch.  Units: ``x`` and
    ``v`` have the same, ``t phi`` has their square.

    Source: Parikh & Boyd (2014), "Proximal algorithms", chapter 6, for terms that name no other.
    """

    separable: ClassVar[bool] = False
    dims: ClassVar[int] = 1
    of_a_term: ClassVar[bool] = True

    def __call__(self, v: Any, step: Any = 1.0) -> Any:
        """``prox(v, step)`` of a tensor, or of each leaf of a pytree.

        Raises:
            TypeError: a leaf is not a real floating-point tensor, or ``step`` no number. ValueError: a leaf is a number
                where the term is one of vectors or matrices, or empty; ``step`` is not positive.
        """
        _STEP.check("step", step, f"{type(self).__name__}: ")

        def leaf(x: Any) -> Tensor:
            check_point(x, self, f"{type(self).__name__} takes")
            t = torch.as_tensor(step, dtype=x.dtype, device=x.device)
            t = t.reshape(t.shape + (1,) * (x.ndim - t.ndim)) if t.ndim else t
            found: Tensor = uncast_call(self.apply, self, x, t)
            return found

        return trees.tree_map(leaf, v)

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        """``prox`` of one tensor, ``t`` of its rank (or a scalar)."""
        raise NotImplementedError(f"{type(self).__name__} has no apply method")


@dataclass(frozen=True)
class _Weighted(Prox):
    """A term with one weight, not negative."""

    weight: Any = 1.0

    def __post_init__(self) -> None:
        check_options(self, weight=each(not_negative()))


class _Separate(Prox):
    """A term of single numbers; a subclass defines :meth:`gap` besides, its natural map without cancellation."""

    separable: ClassVar[bool] = True

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - prox(z - slope, 1)`` of a tensor, or of each leaf of a pytree."""
        return trees.tree_map(self.gap, z, slope)

    def gap(self, z: Tensor, g: Tensor) -> Tensor:
        """``z - prox(z - g, 1)`` of one tensor."""
        raise NotImplementedError


def _soft(v: Tensor, threshold: Tensor) -> Tensor:
    return v.sign() * (v.abs() - threshold).clamp_min(0)


@dataclass(frozen=True)
class l1(_Weighted, _Separate):
    """``weight |x|_1``: soft thresholding, ``sign(v) max(|v| - t weight, 0)``."""

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        return _soft(v, t * self.weight)

    def gap(self, z: Tensor, g: Tensor) -> Tensor:
        return held(z, g - self.weight, g + self.weight)


@dataclass(frozen=True)
class ridge(_Weighted, _Separate):
    """``weight |x|^2 / 2``: ``v / (1 + t weight)``."""

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        return v / (1 + t * self.weight)

    def gap(self, z: Tensor, g: Tensor) -> Tensor:
        return (self.weight * z + g) / (1 + self.weight)


@dataclass(frozen=True)
class elastic_net(_Separate):
    """``l1 |x|_1 + l2 |x|^2 / 2``: soft thresholding, then ``/ (1 + t l2)``."""

    l1: Any = 1.0
    l2: Any = 1.0

    def __post_init__(self) -> None:
        check_options(self, l1=each(not_negative()), l2=each(not_negative()))

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        return _soft(v, t * self.l1) / (1 + t * self.l2)

    def gap(self, z: Tensor, g: Tensor) -> Tensor:
        return (self.l2 * z + held(z, g - self.l1, g + self.l1)) / (1 + self.l2)


@dataclass(frozen=True)
class nonnegative(_Weighted, _Separate):
    """``weight sum x`` on ``x >= 0`` (with weight 0 the indicator): ``max(v - t weight, 0)``."""

    weight: Any = 0.0

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        return (v - t * self.weight).clamp_min(0)

    def gap(self, z: Tensor, g: Tensor) -> Tensor:
        return held(g + self.weight, None, z)


@dataclass(frozen=True)
class nonnegative_ridge(_Weighted, _Separate):
    """``weight |x|^2 / 2`` on ``x >= 0``: ``max(v, 0) / (1 + t weight)``.

    ik.prox.nonnegative_ridge(1.0)(torch.tensor([2.0, -1.0]))  # [1.0, 0.0]
    """

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        return v.clamp_min(0) / (1 + t * self.weight)

    def gap(self, z: Tensor, g: Tensor) -> Tensor:
        return (self.weight * z + held(g, None, z)) / (1 + self.weight)


@dataclass(frozen=True)
class l2(ByRow, _Weighted):
    """``weight |x|_2`` (not squared) over the last dimension: ``max(1 - t weight / |v|, 0) v``.

    Args:
        weight: number, or tensor that broadcasts against the point with its last dimension 1.

    Raises:
        ValueError: a weight for each number: that is no norm.
    """

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        _check_events(self, 1)
        return _shorten(v, t * self.weight)


@dataclass(frozen=True)
class group_lasso(Prox):
    """``sum_g weight_g |x_g|_2`` over groups of the last dimension: block soft thresholding.

    Args:
        groups: sizes of consecutive groups, which must add up to the length of the last dimension; or one size for all.
        weight: number, or tensor whose last dimension is 1 or the number of groups, the others broadcasting against the
            point.

    Raises:
        ValueError: sizes below 1, or that do not add up; neither one weight nor one for each group.
    """

    groups: Any = 1
    weight: Any = 1.0

    def __post_init__(self) -> None:
        sizes = tuple(self.groups) if isinstance(self.groups, (tuple, list)) else (self.groups,)
        if not sizes or any(not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in sizes):
            raise ValueError(f"group_lasso: groups must be sizes >= 1, got {self.groups!r}")
        check_options(self, weight=each(not_negative()))

    def sizes(self, n: int) -> list[int]:
        """The sizes of the groups in a vector of ``n`` numbers."""
        return [self.groups] * (n // self.groups) if isinstance(self.groups, int) else list(self.groups)

    def blocks(self, shape: tuple[int, ...]) -> list[int]:
        """The groups of every row."""
        return self.sizes(shape[-1]) * math.prod(shape[:-1])

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        n = v.shape[-1]
        sizes = self.sizes(n)
        if sum(sizes) != n:
            raise ValueError(f"group_lasso: groups {self.groups!r} do not add up to the last dimension, {n}")
        weights = [self.weight] * len(sizes)
        if isinstance(self.weight, Tensor) and self.weight.ndim and self.weight.shape[-1] != 1:
            if self.weight.shape[-1] != len(sizes):
                raise ValueError(
                    f"group_lasso: weight has shape {tuple(self.weight.shape)}; its last dimension must be 1 or the number "
                    f"of groups, {len(sizes)}"
                )
            weights = list(self.weight.split(1, -1))
        return torch.cat([_shorten(x, t * w) for x, w in zip(v.split(sizes, -1), weights, strict=True)], -1)


@dataclass(frozen=True)
class total_variation(_Weighted):
    r"""``weight \sum_i |x_{i+1} - x_i|`` over the last dimension (the fused lasso, Tibshirani et al. 2005): the exact
    minimiser, piecewise constant; its derivative averages over each piece.

        ik.prox.total_variation(1.0)(torch.tensor([1.0, 2.0, 9.0, 8.0]))  # [2.0, 2.0, 8.0, 8.0]

    All samples at once (:mod:`implicitkit.sets.total_variation`), memory ``O(n)``.

    Args:
        weight: number, or tensor that broadcasts against the point with its last dimension 1.

    Raises:
        ValueError: a negative weight, or one for each number.
    """

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        _check_events(self, 1)
        return denoise(v, (t * self.weight).expand(*v.shape[:-1], 1))


def _check_events(term: Any, dims: int) -> None:
    """Raise unless the weight is one number for the last ``dims`` dimensions."""
    if isinstance(term.weight, Tensor) and term.weight.ndim and any(s != 1 for s in term.weight.shape[-dims:]):
        last = "dimension" if dims == 1 else "two dimensions"
        raise ValueError(
            f"{type(term).__name__}: weight has shape {tuple(term.weight.shape)}; one number weighs the whole norm: its "
            f"last {last} must be 1"
        )


def _shorten(v: Tensor, threshold: Tensor) -> Tensor:
    norm = length(v)
    short = norm <= threshold
    return torch.where(short, torch.zeros_like(v), v * (1 - threshold / torch.where(short, 1, norm)))


@dataclass(frozen=True)
class nuclear(_Weighted):
    r"""``weight * sum of singular values`` on the last two dimensions: thresholding (Cai, Candes & Shen 2010).

    Computed on the symmetric ``Y = [[0, X], [X', 0]]``, whose eigenvalues are ``+- s_i`` and zero: the upper right block of
    ``(Y - t)_+ - (-Y - t)_+``, which is smooth whatever singular values coincide.
    """

    dims: ClassVar[int] = 2

    def apply(self, v: Tensor, t: Tensor) -> Tensor:
        _check_events(self, 2)
        n, m = v.shape[-2:]
        top = torch.cat([v.new_zeros(*v.shape[:-2], n, n), v], -1)
        bottom = torch.cat([v.mT, v.new_zeros(*v.shape[:-2], m, m)], -1)
        Y = torch.cat([top, bottom], -2)
        shift = t * self.weight * torch.eye(n + m, dtype=v.dtype, device=v.device)
        return (positive_part(Y - shift) - positive_part(-Y - shift))[..., :n, n:]
