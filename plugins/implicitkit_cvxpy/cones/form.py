"""Which product of cones, in which order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cones:
    """The cone ``K`` of ``s = b - A x``, a product in this order: zero, nonnegative orthant, second-order cones (sizes),
    positive semidefinite cones (orders, upper triangle by columns, off-diagonals times ``sqrt 2``), exponential cones
    (number, ``y exp(x / y) <= z``) and power cones (exponents, ``x^a y^(1-a) >= |z|``)."""

    zero: int = 0
    nonneg: int = 0
    soc: tuple[int, ...] = ()
    psd: tuple[int, ...] = ()
    exp: int = 0
    power: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Rows in all."""
        return (
            self.linear + sum(self.soc) + sum(k * (k + 1) // 2 for k in self.psd) + 3 * self.exp + 3 * len(self.power)
        )

    @property
    def linear(self) -> int:
        """Rows of equalities and inequalities."""
        return self.zero + self.nonneg

    @property
    def polyhedral(self) -> bool:
        """Nothing but equalities and inequalities?"""
        return self.size == self.linear
