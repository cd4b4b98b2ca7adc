r"""What factors cost, in products with the matrix: what a Krylov method is weighed against.

A Krylov method that reduces a residual by ``\rho`` in each product needs ``log(r / tol) / log(1 / \rho)`` of them; factors
need the products that show the entries of the matrix, and the factorisation.  Neither is known exactly beforehand, but it
need not be: who buys what he rents as soon as the rent has come to its price pays twice the least at most (the ski-rental
problem: Karlin, Manasse, Rudolph & Sleator 1988, Algorithmica 3), and far less where the first few products already show
that they would be too many.

Everything is counted in numbers that a product touches, one for each unknown of each sample and :data:`CALL` for the call.
The figures are this library's own, measured (``benchmarks/bench_regret.py``) with functions of a few operations, which is
when products are cheapest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["CALL", "Price", "price_of", "price_of_dense"]

CALL = 6000.0  # numbers whose product takes as long as the call itself
_WEIGHT = 0.015  # of a number of the state, for one of the parameters
_BAND = 3.0  # numbers of a product for one entry in a band, ...
_ENTRY = 10.0  # ... for one entry of a sparse matrix, ...
_FILL = 0.008  # ... and for ``fill^2 / n``, about the operations that its factors take
_GRID = 150.0  # root of the size of a grid whose factors cost twice that
_SEPARATOR = 0.016  # for the cube of a separator
_UNSURE = 4.0  # times what factors cost at least, where they may fill
_SIDE = 0.4  # of a product beside hundreds of others, ...
_SIDE_WEIGHT = 0.001  # ... by which parameters are used again
_DENSE = 0.02  # for each of ``n^3``, ...
_BLOCKED = 100.0  # ... half of that for so many unknowns, and in proportion less for more
_SMALL = 150.0  # for one dense matrix beside these
_EACH = 2000.0  # and for a sparse one


class Price(NamedTuple):
    """``products`` side by side show the entries of the matrix; to find and to factor it costs as much as ``factors``
    products one after another."""

    products: int
    factors: float


def price_of(
    batch: int, size: int, products: int, entries: int, band: int | None, fill: int = 0, reach: int = 0
) -> Price:
    """Of ``batch`` sparse matrices of one pattern.

    Args:
        products: that show them. entries: of one. band: its width, ``None`` where there is none.
        fill: entries of its factors, if they have been made before; 0: that is not known.
        reach: how far from the diagonal it has entries when it is renumbered for that.

    How much factors fill is known afterwards.  Before, they cost what those of a grid in the plane do at least, and a dense
    matrix of ``reach`` rows at most.  Between the two the geometric mean is the best guess of one who knows no more (its
    worst ratio to the truth is the least), here no more than four times the former.
    """
    numbers = batch * size
    found = CALL + products * numbers
    if band is not None:
        factored = CALL + _BAND * numbers * band
    elif fill:
        factored = batch * (_EACH + _ENTRY * entries + _FILL * fill * fill / size)
    else:
        least = _ENTRY * entries * (1 + math.sqrt(size) / _GRID)
        unsure = math.sqrt(max(1.0, _SEPARATOR * reach**3 / max(1.0, least)))
        factored = batch * (_EACH + least * min(unsure, _UNSURE))
    return Price(products, (found + factored) / (CALL + numbers))


def price_of_dense(batch: int, size: int, weight: int = 0) -> Price:
    """Of ``batch`` dense matrices; ``weight``: numbers that one product touches beside the state, a sample."""
    numbers, touched = batch * size, batch * weight
    found = 2 * CALL + size * (_SIDE * numbers + _SIDE_WEIGHT * touched)
    factored = batch * (_SMALL + _DENSE * size**3 / (1 + size / _BLOCKED))
    return Price(size, (found + factored) / (CALL + numbers + _WEIGHT * touched))
