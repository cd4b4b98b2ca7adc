"""Linear operators by their products: what a linear solver is given, and what a linearisation gives.

A Jacobian of independent samples is block-diagonal, ``A = diag(A_1, ..., A_batch)``; nobody forms it unless a direct
method asks.  Combinations (:func:`shifted`, :func:`minus`, :func:`preconditioned`, :func:`single`) are operators again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from implicitkit.foundation import graph, linear_map, seeded
from implicitkit.foundation.graph_size import Matrices

MatVec = Callable[[Tensor], Tensor]
_SAMPLES, _ROWS = 4, 128  # from which it is asked whether all samples have one matrix
_NEAR = 1e-3  # of its largest number, what a product with some samples alone may differ by in arithmetic of few digits
_LIKELY = 1e-6  # of themselves, what products may differ by before the matrix is known


class BlockStructure(Protocol):
    """A matrix by blocks.  Blocks are numbered in an order in which :meth:`couple` only reaches later ones.

    ``unsolved``: names of parts of the state that the solver left as they were, whose equations do not hold.
    ``points``: the states, one leaf of the graph a block.
    """

    unsolved: frozenset[str]
    points: list[Tensor]

    @property
    def T(self) -> BlockStructure:
        """The transposed matrix (its blocks are numbered in reverse)."""

    def __len__(self) -> int:
        """How many blocks."""

    def name(self, i: int) -> str:
        """A block's name, for messages."""

    def solved(self, i: int) -> bool:
        """Is there an equation for this block?  Where not, its unknowns are zero."""

    def explicit(self, i: int) -> bool:
        """Is the diagonal block known to be ``-I``?"""

    def take(self, i: int, b: Tensor) -> Tensor:
        """The block's entries of ``(batch, n)``: ``(batch, n_i)``."""

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of :meth:`take` for all blocks at once."""

    def diagonal(self, i: int) -> Operator:
        """The diagonal block."""

    def pull(self, u: Tensor) -> list[Tensor | None]:
        r"""``-(dF/d\theta)^T u``, for every tensor of theta."""

    def couple(self, i: int, x: Tensor) -> dict[int, Tensor]:
        """What the unknowns of block ``i`` contribute to the equations of later blocks ``j``, ``{j: A_ji x_i}``."""


class Operator:
    r"""The block-diagonal matrix ``A = diag(A_1, ..., A_batch)``, each block ``n x n``, by its products.

    Units: those of ``A``, the residual's by those of ``z``.

    Args:
        mv: ``v -> A v``, both of shape ``(batch, n)``, block by block.
        rmv: ``w -> A^T w``, both of shape ``(batch, n)``.
        dense: returns all blocks, shape ``(batch, n, n)``; called at most once, and only by direct methods.
        batch: number of blocks.
        size: ``n``.
        like: a tensor with the dtype and device of the vectors.
        symmetric: ``A = A^T`` is known (Hessians).
        fixed_point: ``A = J - I`` where ``J`` is the Jacobian of a fixed-point map, so that
            ``u <- u + (A u - b)`` is the Neumann series.
        structure: ``A`` as a block triangular matrix, if its blocks are known (:mod:`implicitkit.linear.blocks`).
        sparse: makes the blocks sparse matrices (:class:`~implicitkit.linear.factors.sparse_blocks.SparseBlocks`) or says
            ``None``; called at most once.

    Attributes:
        asked: a product has been asked for, or a matrix, or the structure is known: an answer can have regard to ``A``.
        weight: numbers that one product touches beside the state (parameters), for judging what a matrix costs.
        graph: says what one product goes through, nodes and numbers, as
            :func:`~implicitkit.foundation.graph_size.size_of_graph` counts them; ``None`` where that is not known.
        nodes: says the nodes of the graph that products go through, if there is one.
        read: says what matrices one product multiplies by (:class:`~implicitkit.foundation.graph_size.Matrices`), if known.
        own: says whether each sample is known to be multiplied by a matrix of its own.
        preconditioner: something near ``A`` that the Krylov methods may use, with ``solve(b)`` and ``T``; no part of ``A``.
        near: the same, as the problem knows it: worth a trial; ``exact``: it is the inverse.
        wants_factors: the problem knows that Krylov methods would take more products than factors cost.
        definite: Krylov vectors have said that ``A`` (or one like it) is symmetric and definite; not part of what ``A`` is.
        known: something near ``A`` that has been factored already, with ``solve(b)`` and ``T``; not part of what ``A`` is.
        matrix: the blocks, once :meth:`dense` has formed them.
        formed_dense: is told the blocks once they are formed.
        exact: the dense matrices of ``A`` itself with their factors, once a direct method has made them.
        even: what was solved in its place, with rows and columns of like size.  singular: factors have found a block so.
        selects: makes the operator of some of the samples (:meth:`select`); ``None`` where they cannot be told apart.
        step: products with ``J`` and its transposed, of ``A = J - I``, where those with ``A`` are made of them.
        told_singular: whoever asks for a solution wants to be told at once that sparse factors found the matrix singular.
        price: says what :meth:`sparse` and factors of it cost (:class:`~implicitkit.linear.price.Price`), ``None`` where
            there is no pattern; told how many samples have one matrix (``alike``), if that is known.
    """

    # fmt: off
    __slots__ = (
        "_alike", "_dense", "_mv", "_rmv", "_sparse", "asked", "batch", "definite", "even", "exact", "fixed_point",
        "formed_dense", "graph", "known", "like", "matrix", "near", "nodes", "own", "preconditioner", "price",
        "read", "selects", "singular", "size", "step", "structure", "symmetric", "told_singular", "wants_factors", "weight",
    )
    # fmt: on

    def __init__(
        self,
        mv: MatVec,
        rmv: MatVec,
        dense: Callable[[], Tensor],
        *,
        batch: int,
        size: int,
        like: Tensor,
        symmetric: bool = False,
        fixed_point: bool = False,
        structure: BlockStructure | None = None,
        sparse: Callable[[Operator], Any] | None = None,
    ) -> None:
        self._mv, self._rmv, self._dense, self._sparse = mv, rmv, dense, sparse
        self.known: Any = None
        self.exact: Any = None
        self.even: Operator | None = None
        self.preconditioner: Any = None
        self.near: Any = None
        self.wants_factors = False
        self.selects: Callable[[Tensor], Operator | None] | None = None
        self.step: tuple[MatVec, MatVec] | None = None
        self.weight = 0
        self.formed_dense: Callable[[Tensor], object] = id  # to nobody
        self.graph: Callable[[], tuple[int, int, int] | None] = _unknown
        self.nodes: Callable[[], Sequence[Any] | None] = _unknown
        self.read: Callable[[], Matrices] = Matrices
        self.own: Callable[[], bool] = bool
        self.price: Callable[..., Any] = getattr(sparse, "price", _unknown)
        self.batch, self.size, self.like = batch, size, like
        self.symmetric, self.fixed_point, self.structure = symmetric, fixed_point, structure
        self.matrix: Tensor | None = None
        self._alike: bool | None = None
        self.asked = structure is not None
        self.told_singular = self.definite = self.singular = False

    def mv(self, v: Tensor) -> Tensor:
        """``A v``, block by block, ``(batch, n)``, differentiable with respect to ``v``."""
        self.asked = True
        return linear_map.product(self._mv, self._rmv, v)

    def stepped(self, v: Tensor) -> Tensor:
        """``J v``, of ``A = J - I``: a step of the Neumann series."""
        if self.step is None:
            return self.mv(v) + v
        self.asked = True
        return linear_map.product(*self.step, v)

    def rmv(self, w: Tensor) -> Tensor:
        """``A^T w``, block by block, ``(batch, n)``, differentiable with respect to ``w``."""
        self.asked = True
        return linear_map.product(self._rmv, self._mv, w)

    def dense(self) -> Tensor:
        """All blocks as one tensor of shape ``(batch, n, n)``, formed once."""
        self.asked = True
        if self.matrix is None:
            self.matrix = self._dense()
            self.formed_dense(self.matrix)
        return self.matrix

    def alike(self) -> bool:
        """Do all samples seem to have one matrix (:func:`seem_alike`)?  One product, asked once, and none where each is
        known to be multiplied by a matrix of its own."""
        if self._alike is None:
            self._alike = not self.own() and seem_alike(self.rmv, self.size, self.like)
        return self._alike

    @property
    def formed(self) -> Any:
        """What :meth:`sparse` gives, if it has been asked; else ``None``."""
        return None if callable(self._sparse) else self._sparse

    def sparse(self) -> Any:
        """All blocks as sparse matrices, formed once; ``None`` where no pattern is known or worth having."""
        self.asked = True
        if callable(self._sparse):
            self._sparse = self._sparse(self)
        return self._sparse

    def select(self, samples: Tensor) -> Operator | None:
        """``diag(A_i, i in samples)``, whose products cost those of so many samples, ``(k, n) -> (k, n)``.

        Args:
            samples: their numbers, ``(k,)`` int64, each once.

        Returns:
            ``None`` where nobody knows the products of a sample alone: go on with all of them.
        """
        return None if self.selects is None else self.selects(samples)

    def selected_anew(self, make: Callable[[Tensor], Operator | None] | None) -> None:
        """``make`` evaluates a function again at some of the samples: what it finds is their operator where a random vector
        has the same product with its transposed as with this one's (one product of all samples).  ``None``: there is none.
        """
        if make is None:
            return
        rmv, batch, size, like = self._rmv, self.batch, self.size, self.like

        def selects(samples: Tensor) -> Operator | None:
            small = make(samples)
            if small is None:
                return None
            w = seeded.normal(len(samples), size, seed=0xF3E).to(like)
            whole = rmv(w.new_zeros(batch, size).index_copy(0, samples, w)).index_select(0, samples)
            wrong = (small.rmv(w) - whole).abs().amax(1)
            return small if bool((wrong <= _NEAR * whole.abs().amax(1)).all()) else None

        self.selects = selects

    def selected_by(self, of: Callable[..., Operator], *parts: Operator) -> Operator:
        """This operator, told how to make that of some samples: ``of(samples, *selected parts)``, of the operators ``parts``
        that it is made of itself."""
        if all(part.selects is not None for part in parts):

            def selects(samples: Tensor) -> Operator | None:
                small = [found for part in parts if (found := part.select(samples)) is not None]
                return of(samples, *small) if len(small) == len(parts) else None

            self.selects = selects
        return self

    @property
    def T(self) -> Operator:
        """The transposed operator; it shares the matrices if they have been formed."""
        other = Operator(
            self._rmv,
            self._mv,
            lambda: self.dense().mT,
            batch=self.batch,
            size=self.size,
            like=self.like,
            symmetric=self.symmetric,
            fixed_point=self.fixed_point,
            structure=None if self.structure is None else self.structure.T,
            sparse=lambda _: None if self.sparse() is None else self.sparse().T,
        )
        other.weight, other.price, other.graph = self.weight, self.price, self.graph
        other.read, other.own = self.read, self.own
        other.step = None if self.step is None else self.step[::-1]
        other.known = None if self.known is None else self.known.T
        other.exact = None if self.exact is None else self.exact.T
        other.preconditioner = None if self.preconditioner is None else self.preconditioner.T
        other.near = None if self.near is None else self.near.T
        other.wants_factors = self.wants_factors
        return other.selected_by(lambda _, small: small.T, self)

    def derived(self, mv: MatVec, rmv: MatVec, dense: Callable[[], Tensor], **changes: Any) -> Operator:
        """An operator of the same shape by other products; it has no structure but what ``changes`` say."""
        shape: dict[str, Any] = {"batch": self.batch, "size": self.size, "like": self.like}
        return Operator(mv, rmv, dense, **(shape | changes))


def _unknown(alike: float | None = None) -> None:
    return None


def seem_alike(product: MatVec, rows: int, like: Tensor) -> bool:
    """Has a random vector all but the same product with the matrix of each sample?  Of few samples, or few rows, whose
    matrices cost little, it is not asked.

    Args:
        product: ``(batch, rows) -> (batch, n)``, block by block. like: ``(batch, n)``, or so many samples.
    """
    batch = len(like)
    if batch < _SAMPLES or rows < _ROWS:
        return False
    shown = product(seeded.normal(1, rows, seed=0xA11CE).to(like).expand(batch, -1))
    return bool(((shown - shown[:1]).abs() <= _LIKELY * shown[:1].abs()).all())


def shifted(A: Operator, shift: Tensor | float, scale: Tensor | float = 1.0) -> Operator:
    """``shift I + scale A``; each a number or one for each sample, ``(batch,)``.  As symmetric as ``A``."""
    a, b = (torch.as_tensor(x, dtype=A.like.dtype, device=A.like.device).reshape(-1, 1) for x in (shift, scale))

    def dense() -> Tensor:
        eye = torch.eye(A.size, dtype=A.like.dtype, device=A.like.device)
        return a.unsqueeze(2) * eye + b.unsqueeze(2) * A.dense()

    def of(samples: Tensor, small: Operator) -> Operator:
        return shifted(small, *(t if len(t) == 1 else t.index_select(0, samples) for t in (a, b)))

    found = A.derived(lambda v: a * v + b * A.mv(v), lambda w: a * w + b * A.rmv(w), dense, symmetric=A.symmetric)
    return found.selected_by(of, A)


def minus(A: Operator, B: Operator) -> Operator:
    """``A - B``, of two operators of one shape."""
    return A.derived(
        lambda v: A.mv(v) - B.mv(v),
        lambda w: A.rmv(w) - B.rmv(w),
        lambda: A.dense() - B.dense(),
        symmetric=A.symmetric and B.symmetric,
    ).selected_by(lambda _, a, b: minus(a, b), A, B)


def preconditioned(A: Operator, M: MatVec) -> Operator:
    """``A M``, preconditioned from the right, for methods that need products with it only (``rmv`` is that of ``A``)."""
    return A.derived(lambda v: A.mv(M(v)), A.rmv, A.dense)


def repeated(A: Operator, times: int) -> Operator:
    """``A`` for ``times`` right-hand sides a block: vectors of ``times * batch`` rows, the samples running fastest."""

    def over(product: MatVec) -> MatVec:
        return lambda v: graph.each(product, v.unflatten(0, (times, -1))).flatten(0, 1)

    def dense() -> Tensor:
        return A.dense().repeat(times, 1, 1)

    many = A.derived(over(A.mv), over(A.rmv), dense, symmetric=A.symmetric, fixed_point=A.fixed_point)
    many.batch, many.weight, many.graph, many.read, many.own = times * A.batch, A.weight, A.graph, A.read, A.own
    if A.preconditioner is not None:
        many.preconditioner = _Repeated(A.preconditioner, times)
    many.near = None if A.near is None else _Repeated(A.near, times)
    many.wants_factors = A.wants_factors

    def selects(samples: Tensor) -> Operator | None:
        blocks = (samples % A.batch).unique()
        small = A.select(blocks) if 2 * len(blocks) <= A.batch else None
        if small is None:
            return None
        every = (torch.arange(times, device=blocks.device).unsqueeze(1) * A.batch + blocks).flatten()
        return within(repeated(small, times), samples, every)

    many.selects = None if A.selects is None else selects
    return many


def within(A: Operator, samples: Tensor, available: Tensor) -> Operator:
    """The operator of ``samples``, made of ``A``, that of the samples ``available`` (in rising order): the others are given
    zeros."""
    if len(samples) == len(available):
        return A
    places = torch.searchsorted(available, samples)

    def over(product: MatVec) -> MatVec:
        return lambda v: product(v.new_zeros(A.batch, A.size).index_copy(0, places, v)).index_select(0, places)

    found = A.derived(
        over(A.mv),
        over(A.rmv),
        lambda: A.dense().index_select(0, places),
        batch=len(samples),
        like=A.like.index_select(0, places) if len(A.like) == A.batch else A.like,
        symmetric=A.symmetric,
        fixed_point=A.fixed_point,
    )
    found.weight, found.graph, found.read, found.own = A.weight, A.graph, A.read, A.own
    return found


class _Repeated:
    """A preconditioner for several right-hand sides a block."""

    def __init__(self, each: Any, times: int) -> None:
        self.each, self.times = each, times

    @property
    def T(self) -> _Repeated:
        """The transposed."""
        return _Repeated(self.each.T, self.times)

    def solve(self, b: Tensor) -> Tensor:
        """``M^{-1} b``, ``(times * batch, n)``."""
        x: Tensor = self.each.solve(b.unflatten(0, (self.times, -1)).permute(1, 2, 0))
        return x.permute(2, 0, 1).flatten(0, 1)


def single(A: Operator) -> Operator:
    """``A`` with vectors in float32, for an operator in half precision: products in its own, sums in float32."""
    low = A.like.dtype
    up = A.derived(
        lambda v: A.mv(v.to(low)).float(),
        lambda w: A.rmv(w.to(low)).float(),
        lambda: A.dense().float(),
        like=A.like.float(),
        symmetric=A.symmetric,
        fixed_point=A.fixed_point,
    )
    up.preconditioner, up.near, up.weight = A.preconditioner, A.near, A.weight
    up.graph, up.read, up.own, up.wants_factors = A.graph, A.read, A.own, A.wants_factors
    return up.selected_by(lambda _, small: single(small), A)
