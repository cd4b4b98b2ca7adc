r"""Automorphisms ``T`` of a product of cones, one for each sample: what other units of its parts are to a cone.

A factor for each linear row, and on each cone one factor times

- second order: a boost along the axis of row ``i``, ``(s_0 + s_i, s_0 - s_i) -> (2^k (s_0 + s_i), 2^{-k} (s_0 - s_i))``;
- semidefinite: ``S_ij -> d_i d_j S_ij``;
- exponential: ``(x, y, z) -> (x + c y, y, e^c z)``, as ``y exp(x / y) <= z`` has it, ``c`` a multiple of ``ln 2``;
- power: ``(x, y, z) -> (d x, e y, d^a e^{1-a} z)``.

All factors but the last are powers of two, so that nothing is rounded.  Source: Nesterov & Todd (1997), "Self-scaled
barriers and interior-point methods for convex programming", whose scalings these are, along axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit_cvxpy.cones.product import DualCone, Group
from implicitkit_cvxpy.cones.semidefinite import svec, unsvec

_EVEN = 2  # of |k|: what is that near to even is left
_LIMIT = 100.0  # of |k| and |c| / ln 2


class Automorphism(NamedTuple):
    """``T = diag(rows) B E``: the boosts of second-order cones (``boost``, ``axis``: ``k`` and ``i``, ``(batch, number)``)
    and the shifts of exponential ones (``shift``: ``c / ln 2``); ``rows`` ``(batch, m)``."""

    dual: DualCone
    rows: Tensor
    boost: Tensor
    axis: Tensor
    shift: Tensor

    @classmethod
    def identity(cls, dual: DualCone, b: Tensor) -> Automorphism:
        """The identity, for programs with the offsets ``b``, ``(batch, m)``."""
        heads = dual.heads.to(b.device)
        none = torch.zeros_like(b[:, :1])
        boost, shift = (none.expand(-1, number) for number in (len(heads), dual.cones.exp))
        return cls(dual, torch.ones_like(b), boost, heads + 1 + boost, shift)

    @classmethod
    def near(cls, dual: DualCone, A: Tensor, b: Tensor, x: Tensor, y: Tensor, least: Tensor) -> Automorphism:
        """The automorphism after which what is added up at ``x`` and ``y`` is of one size in all parts of a cone; less than
        ``least``, ``(batch, 1)``, is nothing."""
        turn = cls.identity(dual, b)
        if dual.cones.soc:
            turn = turn._replace(axis=_axes(dual, b - (A @ x.unsqueeze(2)).squeeze(2), y))
            (A_0, A_i), (b_0, b_i) = turn._pairs(A), turn._pairs(b)
            k = _ratio(terms(A_0 - A_i, b_0 - b_i, x), terms(A_0 + A_i, b_0 + b_i, x)) / 2
            turn = turn._replace(boost=torch.where(k.abs() > _EVEN, k.round(), 0))
        if dual.cones.exp:
            first = dual.first_exponential
            size = terms(A, b, x)[:, first : first + 3 * dual.cones.exp].unflatten(1, (dual.cones.exp, 3))
            turn = turn._replace(shift=_ratio(size[..., 1], size[..., 2]).round())
        size = torch.maximum(terms(turn.times(A), turn.times(b), x), least)
        parts = [torch.ones_like(b[:, : dual.cones.linear])]
        parts += [_factors(group, dual.part(size, group)).flatten(1) for group in dual.groups]
        return turn._replace(rows=torch.cat(parts, 1))

    def times(self, t: Tensor) -> Tensor:
        """``T t`` for ``(batch, m)`` or ``(batch, m, n)``."""
        shift, rows = (s if t.ndim == 2 else s.unsqueeze(2) for s in (self.shift, self.rows))
        c = math.log(2) * shift
        return rows * self._boosted(self._shifted(t, lambda x, y, z: (x + c * y, y, shift.exp2() * z)), 1)

    def transposed(self, y: Tensor) -> Tensor:
        """``T'y``, ``(batch, m)``."""
        c = math.log(2) * self.shift
        y = self._boosted(self.rows * y, 1)
        return self._shifted(y, lambda x, y, z: (x, c * x + y, self.shift.exp2() * z))

    def contragredient(self, y: Tensor) -> Tensor:
        """``T'^{-1} y``, ``(batch, m)``."""
        c = math.log(2) * self.shift
        y = self._shifted(y, lambda x, y, z: (x, y - c * x, z / self.shift.exp2()))
        return self._boosted(y, -1) / self.rows

    def _shifted(self, t: Tensor, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Tensor:
        number, start = self.dual.cones.exp, self.dual.first_exponential
        if not number:
            return t
        before, cones, after = t.tensor_split((start, start + 3 * number), 1)
        cones = torch.stack(change(*cones.unflatten(1, (number, 3)).unbind(2)), 2)
        return torch.cat([before, cones.flatten(1, 2), after], 1)

    def _boosted(self, t: Tensor, sign: int) -> Tensor:
        if not self.dual.cones.soc:
            return t
        head, side = self._pairs(t)
        factor = (sign * self.boost).exp2()
        ahead, behind = (v if t.ndim == 2 else v.unsqueeze(2) for v in (factor / 2, 0.5 / factor))
        ahead, behind = ahead * (head + side), behind * (head - side)
        at_head, at_side = self._places(t)
        moved = (factor != 1).reshape(*factor.shape, *[1] * (t.ndim - 2))
        t = t.scatter(1, at_head, torch.where(moved, ahead + behind, head))
        return t.scatter(1, at_side, torch.where(moved, ahead - behind, side))

    def _pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``0`` and ``i`` of each second-order cone."""
        at_head, at_side = self._places(t)
        return t.gather(1, at_head), t.gather(1, at_side)

    def _places(self, t: Tensor) -> tuple[Tensor, Tensor]:
        axis = self.axis.long()
        heads = self.dual.heads.to(axis.device).expand_as(axis)
        return (
            (heads, axis)
            if t.ndim == 2
            else (
                heads.unsqueeze(2).expand(-1, -1, t.shape[2]),
                axis.unsqueeze(2).expand(-1, -1, t.shape[2]),
            )
        )


def terms(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """What is added up in each row of ``b - A x``, without signs."""
    return b.abs() + (A.abs() @ x.abs().unsqueeze(2)).squeeze(2)


def power_of_two(t: Tensor) -> Tensor:
    """The power of two that is nearest to each number, in logarithms: a factor that rounds nothing."""
    return t.log2().round().exp2()


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """``log2(a / b)``, zero where one of them is zero."""
    return torch.where((a > 0) & (b > 0), (a / b).log2(), 0).clamp(-_LIMIT, _LIMIT)


def _axes(dual: DualCone, s: Tensor, y: Tensor) -> Tensor:
    """The row of each second-order cone along which slack and multiplier point most."""
    found = []
    for group in dual.groups:
        if group.kind == "soc":
            lengths = [
                part / part.amax(2, keepdim=True).clamp_min(1e-300)
                for part in (dual.part(v.abs(), group) for v in (s, y))
            ]
            side = (lengths[0] + lengths[1])[..., 1:].argmax(2)
            found.append(group.start + 1 + group.size * torch.arange(group.number, device=s.device) + side)
    return torch.cat(found, 1).to(s)


def _factors(group: Group, size: Tensor) -> Tensor:
    """The factors of the rows of cones ``(batch, number, size)`` in which numbers of that ``size`` are added up."""
    if group.kind in ("soc", "exp"):
        return torch.ones_like(size)
    if group.kind == "psd":
        diagonal = torch.diagonal(unsvec(size), dim1=-2, dim2=-1)
        d = power_of_two(_inverse(diagonal).sqrt())
        return svec(d.unsqueeze(-1) * d.unsqueeze(-2)) / svec(torch.ones_like(d.unsqueeze(-1) * d.unsqueeze(-2)))
    d, e = power_of_two(_inverse(size[..., :2])).unbind(-1)
    a = torch.tensor(group.alpha, dtype=size.dtype, device=size.device)
    return torch.stack([d, e, d**a * e ** (1 - a)], -1)


def _inverse(size: Tensor) -> Tensor:
    return torch.where(size > 0, 1 / size, 1)
