r"""Linear systems whose unknowns or equations have units of their own, made of like size without a matrix.

A norm of ``b - A u`` hides rows in small units behind others in large ones, and a Krylov method never sees them: with
unknowns ``z_j`` between 1e-8 and 1e8 a derivative to ``|b - A u| <= rtol |b|`` can be wrong in most of its entries.  So
where the solution, or the right-hand side, spans six orders of magnitude, diagonal matrices are looked for with

    S^{-1} J T,    T_0 = |z|,    S = |J T_0 w|,    T = 1 / |J' S^{-1} w|

rows and columns of like size, by six products with random signs ``w`` (``J = dF/dz``), or where there are factors of a
matrix nearby by that, with all signs left out; and

    J u = b        becomes  (S^{-1} J T) v = S^{-1} b,   u = T v
    J' u = b       becomes  (T J' S^{-1}) v = T b,       u = S^{-1} v

A Hessian stays symmetric with ``T H T``, the Jacobian of a map ``K - I`` what it is with ``T^{-1} (K - I) T``.

Source: Bradley & Murray (2011), "Matrix-free approximate equilibration", arXiv:1110.2805; Golub & Van Loan, *Matrix
Computations* (4th ed., 2013), section 3.5.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.in_parts import largest, rows
from implicitkit.foundation.operators import MatVec, Operator
from implicitkit.linear.base import LinearSolution

_APART = 1e-6  # of the largest entry of a sample: how small others are where they may have other units
_CHANCE = 1e-4  # part of all entries that may be so by chance
_UNEVEN = 1e3  # times the smallest, rows or columns that are worth the trouble
_SIGNS = 3


class Equilibrated(NamedTuple):
    """``A u = b`` as ``(L A R) v = L b``, ``u = R v``.

    ``A``: ``L A R``. left, right: the diagonals of ``L`` and ``R``, ``(k * batch, n)``: of each right-hand side.
    """

    A: Operator
    left: Tensor
    right: Tensor

    def back(self, found: LinearSolution, A: Operator, b: Tensor, many: Operator) -> LinearSolution:
        """A solution of the scaled system as one of ``A u = b`` (``many``: ``A`` for each right-hand side).  What it leaves
        of ``b`` is told by the matrix, where that has been formed: it has been judged by products."""
        x = found.x * self.right.to(found.x)
        by_matrix = getattr(A.formed, "product", None) if many is A else None
        left = (many.mv if by_matrix is None else by_matrix)(x) - b
        return found._replace(x=x, residual_norm=torch.linalg.vector_norm(left, dim=1))


def equilibrated(A: Operator, b: Tensor, z: Tensor, transposed: bool) -> Equilibrated | None:
    """The system with rows and columns of like size; ``None`` where they seem to be so, or nothing can be told.

    Args:
        A: ``dF/dz`` at ``z`` or, ``transposed``, its transposed. b: right-hand sides, ``(k * batch, n)``. z: ``(batch, n)``.
    """
    if A.size < 2 or A.batch != len(z) or A.structure is not None or not (_spans(z) or _spans(b)):
        return None
    J = A.T if transposed else A
    size = torch.nan_to_num(z.abs())
    known = torch.where(size > 0, size, torch.nan).nanmedian(1, keepdim=True).values
    T = torch.where(size > 0, size, torch.where(known > 0, known, 1))
    near = A.known if A.known is None or not transposed else A.known.T
    sized = hasattr(near, "size") and not getattr(near, "gone", False)  # what a user hands over need not
    sizes = near.size(T) if sized and not A.fixed_point else None
    knows = sizes is not None and bool(sizes.any())  # a matrix near J, with signs left out
    S = _rows(J.mv, T) if sizes is None or not knows else _or_one(sizes)
    if A.fixed_point:  # a similarity: what adds up in F_i has the units of z_i
        S = T = S + size
    elif A.symmetric:
        S = S / S.amax(1, keepdim=True).sqrt()  # T_i T_j H_ij is of size one where S is that of T
        T = 1 / S
    else:
        T = 1 / (_or_one(near.T.size(1 / S)) if knows else _rows(J.rmv, 1 / S))
    usable = torch.isfinite(S) & torch.isfinite(T) & (S > 0) & (T > 0)
    if not bool(usable.all()) or not (_is_uneven(S) or _is_uneven(T)):
        return None
    left, right = (T, 1 / S) if transposed else (1 / S, T)
    times = len(b) // A.batch
    return Equilibrated(_scaled(A, left, right), left.repeat(times, 1), right.repeat(times, 1))


def _spans(t: Tensor) -> bool:
    """Has a sample entries that are too small beside its largest, and too many, to be so by chance?"""
    parts = rows(t.unsqueeze(0))
    ends = [part.abs().aminmax() for part in parts]
    least, most = ends[0]
    if len(ends) > 1:
        lows, highs = zip(*ends, strict=True)
        least, most = torch.stack(lows).amin(), torch.stack(highs).amax()
    if bool(least >= _APART * most):  # of the whole batch, which takes two passes in place of five
        return False
    size, before, found = largest(t, keepdim=True).unsqueeze(0), 0, 0
    if int(t.count_nonzero()) - int(size.count_nonzero()) <= _CHANCE * t.numel():  # one of each sample is its largest
        return False
    for part in parts:
        some = size[:, before : (before := before + part.shape[1])]
        found += int(((part.abs() < _APART * some) & (part != 0)).count_nonzero())
    return found > _CHANCE * t.numel()


def _rows(product: Any, columns: Tensor) -> Tensor:
    """About the size of each row of a matrix whose columns have these sizes, ``(batch, n)``; 1 where it is zero."""
    n = columns.shape[1]
    signs = seeded.signs(_SIGNS, n, seed=n)
    return _or_one(torch.stack([product(columns * sign.to(columns)).abs() for sign in signs]).amax(0))


def _or_one(sizes: Tensor) -> Tensor:
    return torch.where(sizes > 0, sizes, 1)


def _is_uneven(size: Tensor) -> bool:
    smallest, largest = size.aminmax(dim=1)
    return bool((largest > _UNEVEN * smallest).any())


def _scaled(A: Operator, left: Tensor, right: Tensor) -> Operator:
    """``L A R``, with what is known of ``A``."""
    scaled = A.derived(
        lambda v: left * A.mv(right * v),
        lambda w: right * A.rmv(left * w),
        lambda: left.unsqueeze(2) * A.dense() * right.unsqueeze(1),
        symmetric=A.symmetric,
        fixed_point=A.fixed_point,
        sparse=lambda _: _Factors.of(A.sparse(), left, right),
    )
    scaled.weight, scaled.price, scaled.wants_factors = A.weight, A.price, A.wants_factors
    scaled.graph, scaled.read, scaled.own = A.graph, A.read, A.own
    scaled.told_singular = A.told_singular
    scaled.known = _Factors.of(A.known, left, right)
    scaled.preconditioner = _Factors.of(A.preconditioner, left, right)
    scaled.near = _Factors.of(A.near, left, right)

    def of(samples: Tensor, small: Operator) -> Operator:
        return _scaled(small, left.index_select(0, samples), right.index_select(0, samples))

    return scaled.selected_by(of, A)


class _Factors:
    """Factors of ``A``, or of something near it, for ``L A R``."""

    def __init__(self, of: Any, left: Tensor, right: Tensor) -> None:
        self._of, self.left, self.right = of, left, right

    @staticmethod
    def of(factors: Any, left: Tensor, right: Tensor) -> Any:
        """``None`` of nothing."""
        return None if factors is None else _Factors(factors, left, right)

    def __getattr__(self, name: str) -> Any:
        if name in ("product", "size") and hasattr(self._of, name):
            act = getattr(self._of, name)
            return lambda x: self._times(self.left, act(self._times(self.right, x)))
        if name in ("factor", "regular", "rough", "unlike", "let_go", "batch", "exact"):
            return getattr(self._of, name)
        raise AttributeError(name)

    @property
    def T(self) -> _Factors:
        """The transposed."""
        return _Factors(self._of.T, self.right, self.left)

    def solve(self, b: Tensor) -> Tensor:
        """``(L A R)^{-1} b``, ``(batch, n)`` or ``(batch, n, k)``."""
        return self._times(1 / self.right, self._of.solve(self._times(1 / self.left, b)))

    @property
    def diagonal(self) -> Tensor:
        """``(batch, n)``."""
        return self.left * self._of.diagonal * self.right

    def products(self, dtype: torch.dtype) -> tuple[MatVec, MatVec]:
        """``v -> L A R v`` and ``w -> R A' L w`` of plain vectors ``(batch, n)``."""
        forth, back = self._of.products(dtype)
        left, right = self.left, self.right
        return lambda v: left * forth(right * v), lambda w: right * back(left * w)

    def some(self, samples: Tensor) -> _Factors:
        """The matrices of some samples ``(k,)``."""
        return _Factors(self._of.some(samples), self.left[samples], self.right[samples])

    def factored(self, factorise: Any) -> _Factors:
        """These matrices, factored by ``factorise``."""
        return _Factors(self._of.factored(factorise), self.left, self.right)

    @staticmethod
    def _times(scale: Tensor, x: Tensor) -> Tensor:
        return x * (scale if x.ndim == 2 else scale.unsqueeze(2))
