r"""Factors of a quadratic program's system with a known active set, as those of its optimality conditions.

With the conditions ``i`` that are free (unknowns inside their bounds, rows that are active), ``P`` the diagonal matrix of
ones there, and ``K = [[H, C'], [C, 0]]``, the conditions in natural-map form have the Jacobian

    N = S (P K + I - P),      S = -1 for one-sided rows that are active, 1 elsewhere

since what is not free is known (an unknown at its bound, a multiplier that is zero), and ``min(y, -g)`` of an active row is
``-g``.  One solve with ``K`` restricted to what is free gives ``N^{-1} b`` and ``N^{-T} b``.

:class:`ActiveFactors` are those of sparse ``K``, sample by sample, :class:`DenseActiveFactors` of dense ones, all at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation.in_parts import absolute_product
from implicitkit.foundation.numbers import array
from implicitkit.foundation.unversioned_writes import version
from implicitkit.linear.factors.dense import SINGULAR, Factor, factor_batched, mm
from implicitkit.linear.factors.direct import Verdict


class Matrix(Protocol):
    """``K``: a sparse matrix, or what multiplies like one."""

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        """``K x``."""

    def __abs__(self) -> Matrix:
        """``|K|``, entry by entry or an upper bound of that."""


class Saddle(Protocol):
    """Factors of ``K`` in what is free: a :class:`~implicitkit.linear.conditions.sparse_saddle.SparseSaddle`, or by one."""

    @property
    def regular(self) -> bool:
        """Is it far from singular?"""

    def once(self, b: np.ndarray) -> np.ndarray:
        """``x`` with ``K x = b``, linear in ``b``; how far it is refined is not known."""


@dataclass(frozen=True)
class ActiveSystem:
    """One sample: ``K`` whole, its factors in what is free, which are, ``(n + m,)`` bool, and ``S``."""

    K: Matrix
    saddle: Saddle
    free: np.ndarray
    sign: np.ndarray

    def solve(self, b: np.ndarray, transposed: bool) -> np.ndarray:
        """``N^{-1} b`` or ``N^{-T} b``, as ``saddle`` solves."""
        if transposed:
            x = np.where(self.free, self.saddle.once(np.where(self.free, b, 0.0)), 0.0)
            return self.sign * np.where(self.free, x, b - self.K @ x)
        b = self.sign * b
        known = np.where(self.free, 0.0, b)
        return np.where(self.free, self.saddle.once(np.where(self.free, b - self.K @ known, 0.0)), known)

    def product(self, x: np.ndarray, transposed: bool) -> np.ndarray:
        """``N x``, or ``N' x``."""
        if transposed:
            x = self.sign * x
            return self.K @ np.where(self.free, x, 0.0) + np.where(self.free, 0.0, x)
        return self.sign * np.where(self.free, self.K @ x, x)

    @property
    def regular(self) -> bool:
        """Is what is free of ``K`` far from singular?"""
        return self.saddle.regular

    def size(self, x: np.ndarray, transposed: bool) -> np.ndarray:
        """``|N| |x|``, or ``|N'| |x|``."""
        x, K = np.abs(x), self.moduli
        if transposed:
            return K @ np.where(self.free, x, 0.0) + np.where(self.free, 0.0, x)
        return np.where(self.free, K @ x, x)

    @functools.cached_property
    def moduli(self) -> Matrix:
        """``|K|``."""
        return abs(self.K)


class _Begun:
    """What is known of the point where ``K`` is from.

    Attributes:
        began: that point, ``(batch, n + m)``, and ``(dL/dz, h, g)`` there.
    """

    began: tuple[Tensor, Tensor] | None = None
    where: tuple[Tensor, Tensor]

    def before(self, point: Tensor, step: Tensor, F: Tensor) -> Tensor | None:
        """``F`` at the ``point`` where ``K`` is from, of the conditions that are active where a ``step`` has led and where
        ``F`` is as given; the others, at that point perhaps of another form, change by the step as they are now.  ``None``:
        it is another point."""
        if self.began is None or self.began[0] is not point:
            return None
        free, sign = self.where
        return torch.where(free, sign * self.began[1], F - step)


class ActiveFactors(_Begun):
    """``N`` of every sample, or its transposed."""

    def __init__(self, systems: list[ActiveSystem], transposed: bool = False) -> None:
        self.systems, self.transposed = systems, transposed
        self._sized: tuple[Tensor, int, Tensor] | None = None  # a point, its version, and the size there

    @functools.cached_property
    def factor(self) -> Verdict:
        """Which samples have factors of their own matrix."""
        return Verdict(torch.tensor([system.regular for system in self.systems], device="cpu"), SINGULAR)

    @property
    def T(self) -> ActiveFactors:
        """The transposed matrices, by the same factors."""
        return ActiveFactors(self.systems, not self.transposed)

    def solve(self, b: Tensor) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``."""
        return self._each(ActiveSystem.solve, b)

    def moved(self, x: Tensor) -> Tensor:
        """``A x``, shaped as ``x``, one by one: of many the operator's own products take less time."""
        return self._each(ActiveSystem.product, x)

    @functools.cached_property
    def where(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Which conditions are free, and ``S``, ``(batch, n + m)``."""
        return torch.from_numpy(np.stack([s.free for s in self.systems])), torch.from_numpy(
            np.stack([s.sign for s in self.systems])
        )

    def size(self, x: Tensor) -> Tensor:
        """``|A| |x|``, shaped as ``x``; of the last ``x`` it is remembered, by identity."""
        if self._sized is None or self._sized[0] is not x or self._sized[1] != version(x):
            self._sized = x, version(x), self._each(ActiveSystem.size, x)
        return self._sized[2]

    def _each(self, what: Callable[[ActiveSystem, np.ndarray, bool], np.ndarray], x: Tensor) -> Tensor:
        """``what`` of every sample's system and every column of ``x``, shaped as ``x``."""
        given = array(x)
        columns = given.reshape(*given.shape[:2], -1)
        out = np.empty(columns.shape)
        for i, system in enumerate(self.systems):
            for k in range(columns.shape[2]):
                out[i, :, k] = what(system, columns[i, :, k], self.transposed)
        return torch.from_numpy(out.reshape(given.shape)).to(x)


class _FreePart:
    """``K`` in what is free, ``(batch, k, k)``, of samples that have fewer filled up by ones, and its factors, made once."""

    def __init__(self, K: Tensor, free: Tensor) -> None:
        self.K, self.free = K, free

    @functools.cached_property
    def where(self) -> tuple[Tensor, Tensor]:
        """The places of what is free, ``(batch, k)``, and which of them are filled up."""
        count = self.free.sum(1, keepdim=True)
        most = int(count.max()) if len(count) else 0
        places = self.free.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        return places, torch.arange(most, device=places.device) >= count

    @functools.cached_property
    def factor(self) -> Factor:
        """Factors of every sample."""
        places, more = self.where
        k = places.shape[1]
        rows = self.K.gather(1, places.unsqueeze(2).expand(-1, -1, self.K.shape[2]))
        part = rows.gather(2, places.unsqueeze(1).expand(-1, k, -1))
        part = part.masked_fill(more.unsqueeze(1) | more.unsqueeze(2), 0)
        return factor_batched(part + torch.diag_embed(more.to(part)))

    def solve(self, b: Tensor) -> Tensor:
        """``K x = b`` in what is free, zero elsewhere, ``(batch, n, k)``."""
        places = self.where[0].unsqueeze(2).expand(-1, -1, b.shape[2])
        return torch.zeros_like(b).scatter(1, places, self.factor.solve(b.gather(1, places)))


class DenseActiveFactors(_Begun):
    """``N`` of every sample, or its transposed, of dense ``K``.

    Args:
        K: ``(batch, n, n)``. free: which are, ``(batch, n)``. sign: the diagonal of ``S``, ``(batch, n)``.
    """

    def __init__(self, K: Tensor, free: Tensor, sign: Tensor) -> None:
        self.K, self.free, self.sign, self.where = K, free.unsqueeze(2), sign.unsqueeze(2), (free, sign)
        self.part, self.transposed = _FreePart(K, free), False

    @property
    def factor(self) -> Factor:
        """Which samples have factors of their own matrix."""
        return self.part.factor

    @property
    def T(self) -> DenseActiveFactors:
        """The transposed matrices; they share the factors."""
        other = DenseActiveFactors.__new__(DenseActiveFactors)
        vars(other).update(vars(self), transposed=not self.transposed)
        return other

    def solve(self, b: Tensor) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``."""
        return self._of_columns(self._solve, b)

    def product(self, x: Tensor) -> Tensor:
        """``A x``, shaped as ``x``."""
        return self._of_columns(lambda x: self._times(mm, x, self.sign), x)

    def size(self, x: Tensor) -> Tensor:
        """``|A| |x|``, shaped as ``x``."""
        return self._of_columns(lambda x: self._times(absolute_product, x.abs(), torch.ones_like(self.sign)), x)

    def _solve(self, b: Tensor) -> Tensor:
        if self.transposed:
            x = self.part.solve(torch.where(self.free, b, 0))
            return self.sign * torch.where(self.free, x, b - mm(self.K, x))
        b = self.sign * b
        known = torch.where(self.free, 0, b)
        return torch.where(self.free, self.part.solve(torch.where(self.free, b - mm(self.K, known), 0)), known)

    def _times(self, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, sign: Tensor) -> Tensor:
        if self.transposed:
            x = sign * x
            return product(self.K, torch.where(self.free, x, 0)) + torch.where(self.free, 0, x)
        return sign * torch.where(self.free, product(self.K, x), x)

    def _of_columns(self, what: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        columns = x.to(self.K).reshape(*x.shape[:2], -1)
        return what(columns).reshape(x.shape).to(x)
