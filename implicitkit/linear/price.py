r"""What factors cost, in products with the matrix: what a Krylov method is weighed against.

A Krylov method that reduces a residual by ``\rho`` in each product needs ``log(r / tol) / log(1 / \rho)`` of them; factors
need the products that show the entries of the matrix, and the factorisation.  Neither is known exactly beforehand, but it
need not be: who buys what he rents as soon as the rent has come to its price pays twice the least at most (the ski-rental
problem: Karlin, Manasse, Rudolph & Sleator 1988, Algorithmica 3), and far less where the first few products already show
that they would be too many.

Everything is counted in numbers that a product touches, one for each unknown of each sample and :data:`CALL` for the call.
Sparse factors cost so many products, dense ones so many steps of GMRES, which are dearer.
The figures are this library's own, measured (``benchmarks/bench_regret.py``) with functions of a few operations, which is
when products are cheapest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from implicitkit.foundation.operators import Operator

CALL = 6000.0  # numbers whose product takes as long as the call itself
_WEIGHT = 0.015  # of a number of the state, for one of the parameters
_BAND = 3.0  # numbers of a product for one entry in a band, ...
_ENTRY = 10.0  # ... for one entry of a sparse matrix, ...
_FILL = 0.008  # ... and for ``fill^2 / n``, about the operations that its factors take
_FULL = 7e-4  # for each of ``n^3``, where factors are so full that dense ones cost less
_CHAIN = 1.25  # times that, where they fill next to nothing but a band
_GRID = 150.0  # root of the size of a grid whose factors cost twice that
_SEPARATOR = 0.12  # for the cube of a separator in space, and those below it, ...
_DENSE_SEPARATOR = 0.016  # ... and of one alone
_LAYERED = 10.0  # for the square of the unknowns: the cube of how far a grid in space reaches, at most (periodic: 8)
_UNSURE = 4.0  # times what factors cost at least, where they may fill
_SIDE = 1.0  # for a number of a product beside hundreds of others, ...
_SIDE_FIT = 0.4  # ... of residuals, that of the state, ...
_CROWDED = (
    0.15  # for each number that products side by side go through more, where a cache holds those of one, not of all
)
_SIDE_WEIGHT, _SIDE_WEIGHT_FIT = 3e-4, 1e-3  # ... by which parameters are used again
_WRITTEN = 0.9  # for an entry of a matrix that stands in the graph, and nine nodes of that: it is written down there
_PLAIN = 9.0  # nodes of the graph of a function of a few operations
_DENSE = 0.014  # for each of ``n^3``, ...
_BLOCKED = 100.0  # ... half of that for so many unknowns, and in proportion less for more
_SMALL = 150.0  # for one dense matrix beside these
_KRYLOV = 10_000.0  # of GMRES beside the product: the calls of one step, and so many times the numbers of the state
_BASIS = 1.0
_EACH = 2000.0  # and for a sparse one
_CONJUGATE = 5500.0  # of conjugate gradients beside the product, and _VECTORS times the numbers of the state
_STEP, _VECTORS = 3200.0, 0.3  # of conjugate gradients on normal equations: one, and for each number of the state
_NODE, _TOUCHED, _PLACED = 300.0, 0.025, 0.4  # for each node of a graph, number in it, and one at a place of an index
_FORMED, _ENTRY_FIT = 20_000.0, 6.0  # to form sparse normal equations, and for an entry of them
# what one product costs by its graph: for a node, for a number that goes through one, four times that where no cache holds
# all, and for a number's product with a parameter
_AT_NODE, _THROUGH, _SPILT, _TIMES, _PARAMETER = 2080.0, 0.111, 1.67e6, 3.84, 0.013
_VALUE, _VALUE_SMALL = 0.15, 300.0  # for each of ``n^3`` in eigenvalues and vectors, and for one matrix
_GRAM = 0.014  # for each of ``m n^2`` in dense normal equations and their factors
_SINGULAR, _SINGULAR_SMALL = 0.1, 500.0  # for each of ``m n^2`` in singular values, and for one matrix


class Price(NamedTuple):
    """``products`` side by side show the entries of the matrix; to find and to factor it costs as much as ``factors``
    products one after another."""

    products: int
    factors: float


def price_of(
    batch: int,
    size: int,
    products: int,
    entries: int,
    band: int | None,
    fill: int = 0,
    reach: int = 0,
    alike: float = 1.0,
    wide: float = 0.0,
) -> Price:
    """The price of the factors of ``batch`` sparse matrices of one pattern.

    Args:
        products: that show them. entries: of one. band: its width, ``None`` where there is none. fill: entries of its
        factors, as they were made before, or likely (:mod:`~implicitkit.linear.factors.fill`); 0: unknown. reach: how
        far from the diagonal it has entries when it is renumbered for that. alike: samples a matrix: those that have
        the same are factored once. wide: what a product touches beyond the state (:func:`touched_beside`).

    How much factors fill is known afterwards, and of graphs without layers likely before. Else they cost what those of a
    grid in the plane do at least, and by nested dissection as much as the cube of a separator (George 1973, SIAM J. Numer.
    Anal. 10, theorem 4), which ``reach`` bounds. On grids in space, of ``n^{2/3}`` unknowns in a layer, that is what they
    cost. A graph without layers reaches further, and what it costs lies between the former and that of a dense matrix of
    ``reach`` rows: there the geometric mean is the best guess of one who knows no more (its worst ratio to the truth is the
    least), here no more than four times the former.
    """
    numbers, matrices = batch * size, max(1.0, batch / alike)
    found = CALL + products * (numbers + wide)
    if band is not None:
        factored = CALL + _BAND * matrices * size * band
    elif fill:
        sparse = _ENTRY * entries + _FILL * fill * fill / size
        factored = matrices * (_EACH + min(sparse, _FULL * size**3))
    else:
        least = _ENTRY * entries * (1 + math.sqrt(size) / _GRID)
        if reach**3 <= _LAYERED * size**2:
            filled = max(least, _SEPARATOR * min(reach**3, size**2))
        else:
            filled = least * min(math.sqrt(max(1.0, _DENSE_SEPARATOR * reach**3 / max(1.0, least))), _UNSURE)
        if reach:  # within the band that it is renumbered for, which is all there is of a chain
            filled = min(filled, _CHAIN * _ENTRY * entries + _FILL * (2 * reach) ** 2 * size)
        factored = matrices * (_EACH + filled)
    return Price(products, (found + factored) / (CALL + numbers + wide))


def has_layers(reach: int, size: int) -> bool:
    """Is a graph, renumbered for a band, one in which nothing reaches further than in a grid in space?"""
    return reach > 0 and reach**3 <= _LAYERED * size**2


def touched_beside(batch: int, size: int, graph: tuple[int, int, int] | None) -> float:
    """What a product touches where its ``graph`` (:func:`~implicitkit.foundation.graph_size.size_of_graph`) goes through
    more numbers than the state has at each node, as a sum over the edges of a graph does: these, and their share of what is
    added up at places of an index."""
    nodes, numbers, placed = graph or (0, 0, 0)
    wide = max(0, numbers - nodes * batch * size)
    return (_TOUCHED * numbers + _PLACED * placed) * wide / numbers if wide else 0.0


def price_of_dense(
    batch: int,
    size: int,
    weight: int = 0,
    alike: int = 1,
    wide: float = 0.0,
    nodes: float = _PLAIN,
    own: bool = False,
    conjugate: bool = False,
    rows: int = 0,
    plain: float | None = None,
) -> Price:
    """The price of ``batch`` dense matrices and their factors in steps of GMRES, where to orthogonalise costs as much as the
    product, and more where there are few numbers; or in steps of conjugate gradients, which orthogonalise nothing.

    Args:
        weight: numbers that one product touches beside the state, a sample. alike: samples that have one matrix, each of
            which shows another row of it. wide: numbers that a product of all samples goes through beyond as many as the
            state has at each node of the graph, side by side no cheaper than one by one (nor are those added up at
            places of an index). nodes: of that graph.
            own: each sample is multiplied by a matrix of its own there, which need not be found by products
            (:mod:`implicitkit.foundation.structured`).
        conjugate: in steps of conjugate gradients.
        rows: what products multiply matrices by, of all samples, and do not share side by side: to show a row of the
            Jacobian takes as much again (:class:`~implicitkit.foundation.graph_size.Matrices`).
        plain: those of ``wide`` that are at no place of an index, which takes as long side by side; ``None``: all.
    """
    numbers, touched, longer = batch * size, batch * weight, max(1.0, nodes / _PLAIN)
    each = _SIDE * longer * numbers + _SIDE_WEIGHT * touched + _TOUCHED * wide
    shown = math.ceil(size / alike) * each
    found = 2 * CALL + (min(shown, _WRITTEN * longer * numbers * size) if own else shown)
    found += math.ceil(size / alike) * _WEIGHT * rows
    once = 0.0 if own else wide if plain is None else plain
    crowd = math.ceil(size / alike) * once
    found += _CROWDED * crowd * (min(1.0, crowd / _SPILT) - min(1.0, once / _SPILT))
    factored = batch / alike * (_SMALL + _DENSE * size**3 / (1 + size / _BLOCKED))
    product = longer * (CALL + numbers) + _WEIGHT * touched + _TOUCHED * wide
    beside = _CONJUGATE + _VECTORS * numbers if conjugate else _KRYLOV + _BASIS * numbers
    return Price(size, (found + factored) / (product + beside))


def price_of_dense_like(A: Operator, alike: int = 1, weight: int = 0, conjugate: bool = False) -> Price:
    """The price of the dense matrices of ``A``, where it is known what its products go through; ``weight``: numbers of
    parameters, a sample; ``conjugate``: in steps of conjugate gradients."""
    nodes, numbers, placed = A.graph() or (0, 0, 0)
    plain = max(0.0, float(numbers - nodes * A.batch * A.size))
    wide = plain + _PLACED / _TOUCHED * placed
    matrices = A.read()
    weight = max(weight, A.weight, matrices.read // max(1, A.batch))
    rows = matrices.behind if alike == 1 else matrices.rows  # of one for all samples every row is shown by a product
    return price_of_dense(A.batch, A.size, weight, alike, wide, nodes, A.own(), conjugate, rows, plain)


def eigenvalues(batch: int, size: int) -> float:
    """What the eigenvalues and vectors of ``batch`` symmetric matrices cost, in steps of conjugate gradients."""
    decomposed = batch * (_VALUE_SMALL + _VALUE * size**3 / (1 + size / _BLOCKED))
    return decomposed / (CALL + _CONJUGATE + (1 + _VECTORS) * batch * size)


def cost_of_product(numbers: int, nodes: int, through: int, parameters: int) -> float:
    """The cost of one product with the Jacobian of a batch of maps, or of an evaluation of them, in numbers that are
    touched.

    Args:
        numbers: of the state. nodes: of its graph; of an evaluation, two for each operation, and one. through: numbers that
            go through them; of an evaluation, three for each that an operation returns. parameters: of one sample.
    """
    spilt = through * (1 + min(through / _SPILT, _TIMES))
    return _AT_NODE * nodes + _THROUGH * spilt + _PARAMETER * numbers * parameters


class Work(NamedTuple):
    """What one product with the Jacobian of a batch of residuals takes: ``nodes`` of the graph, ``numbers`` that go through
    them, and how many of these are added up at places of an index
    (:func:`~implicitkit.foundation.graph_size.size_of_graph`); ``weight``: numbers of parameters."""

    nodes: int
    numbers: int
    placed: int = 0
    weight: int = 0

    @property
    def touched(self) -> float:
        """What a product touches, the calls left out."""
        return _TOUCHED * self.numbers + _PLACED * self.placed


def product_of_fit(batch: int, size: int, work: Work) -> float:
    """What a step of conjugate gradients on ``R'R`` costs, a product with ``R`` and one with ``R'``."""
    return _STEP + _VECTORS * batch * size + _NODE * work.nodes + work.touched + _WEIGHT * work.weight


def price_of_dense_fit(batch: int, rows: int, size: int, work: Work, singular: bool = False) -> float:
    """The price of ``batch`` dense Jacobians ``(rows, size)`` of residuals and the factors of their normal equations
    (``singular``: their singular values as well), in steps of conjugate gradients."""
    side = min(rows, 2 * size)
    found = 2 * CALL + side * max(_SIDE_FIT * batch * size + _SIDE_WEIGHT_FIT * work.weight, work.touched)
    mults = rows * size**2 / (1 + size / _BLOCKED)
    factored = batch * (_SMALL + _GRAM * mults + (_SINGULAR_SMALL + _SINGULAR * mults if singular else 0))
    return (found + factored) / product_of_fit(batch, size, work)


def price_of_sparse_fit(batch: int, size: int, products: int, entries: int, work: Work, fill: int, reach: int) -> float:
    """The price of sparse Jacobians of residuals and of their normal equations' factors, in steps of conjugate gradients.
    ``products``: that show the entries; ``entries``, ``fill`` and ``reach`` of ``R'R`` as in :func:`price_of`."""
    found = _FORMED + products * max(batch * size, work.touched)
    factored = _ENTRY_FIT / _ENTRY * price_of(batch, size, 0, entries, None, fill, reach).factors
    return (found + factored * (CALL + batch * size)) / product_of_fit(batch, size, work)
