r"""Left null spaces of the matrices of a batch, in units in which rows and columns are of one size.

Rates may be 1e6 beside 1e-7, and what is slow is not zero: with diagonal ``L`` and ``R`` that make the rows and columns of
``M = L J R`` of one size (Ruiz 2001), rows ``U'`` with ``U' M = 0`` are looked for.

Dense matrices have singular values.  Of sparse ones subspaces are iterated with a shift near rounding,

    X <- orth((M - \delta I)^{-T} X),

in which what is zero outgrows what is not by ``|\lambda| / \delta`` a step, and the small singular values of ``M' X`` say
how much of ``X`` is in the null space.  ``(M - \delta I)^{-1} = R^{-1} (J - \delta (L R)^{-1})^{-1} L^{-1}``, so that ``J``
changes on its diagonal only.  The right null space ``V`` is found likewise, as large; without both, eigenvalues that are
zero are defective.

Source: Ruiz (2001), RAL-TR-2001-034; Saad, *Numerical Methods for Large Eigenvalue Problems* (2nd ed., 2011), section 5.2
(subspace iteration).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.operators import Operator
from implicitkit.sparsity.patterns import SMALLEST

_DENSE = 768  # unknowns of which singular values are taken
_NUMBERS = 1 << 24  # in all dense matrices, at most
_SEVERAL = (8, 64)  # sums of many unknowns that are looked for, first and then
_PASSES = 4  # for rows and columns of one size
_STEPS, _SHIFT = 4, 5 / 6  # of subspace iterations, and the power of rounding that they shift by
_ROUNDED = 20.0  # units of rounding


class NullSpace(NamedTuple):
    """``U' L J R = 0`` of every sample.

    Attributes:
        U: ``(samples, n, k)``, orthonormal columns, or zero where there are fewer. L, R: diagonals, ``(samples, n)``.
        size: of ``L J R``, ``(samples, 1, 1)``. V: ``L J R V = 0``, as ``U``; known of sparse matrices only.
    """

    U: Tensor
    L: Tensor
    R: Tensor
    size: Tensor
    V: Tensor | None = None

    @property
    def dimension(self) -> Tensor:
        """The dimension of every sample's, ``(samples,)``."""
        return self.U.any(1).sum(1)

    def on(self, device: torch.device) -> NullSpace:
        """The null spaces on another device."""
        U, L, R, size = (t.to(device) for t in (self.U, self.L, self.R, self.size))
        return NullSpace(U, L, R, size, None if self.V is None else self.V.to(device))

    def repeated(self, times: int) -> NullSpace:
        """The null spaces of so many times these samples."""
        of_rows, of_columns = self.L.repeat(times, 1), self.R.repeat(times, 1)
        U, V = self.U.repeat(times, 1, 1), None if self.V is None else self.V.repeat(times, 1, 1)
        return NullSpace(U, of_rows, of_columns, self.size.repeat(times, 1, 1), V)


def left_null_space(J: Operator, units: Tensor) -> NullSpace | None:
    """Null spaces of the first blocks of ``J``, as many as there are samples; ``None`` where these are regular, or neither
    small nor sparse.  ``units``: how large each unknown is, or was, ``(samples, n)``, which tells dense ones what is
    rounding."""
    samples = len(units)
    with torch.no_grad():
        blocks = J.sparse() if J.size >= SMALLEST else None
        if blocks is not None:
            blocks = blocks if blocks.batch == samples else blocks.some(torch.arange(samples, device="cpu"))
            found = _of_sparse(blocks, torch.finfo(J.like.dtype).eps)
            if found is not None:
                return found.on(J.like.device)  # factors are on the CPU
        small = J.size <= _DENSE and J.batch * J.size**2 <= _NUMBERS
        return _of_dense(J.dense()[:samples].detach(), units) if small else None


def _of_dense(matrix: Tensor, units: Tensor) -> NullSpace | None:
    eps = torch.finfo(matrix.dtype).eps
    finite = torch.isfinite(matrix).flatten(1).all(1)
    matrix, L, R = _even(torch.where(finite[:, None, None], matrix, 0), units.to(matrix))
    left, values, _ = torch.linalg.svd(matrix)
    null = (values <= eps**0.75 * values[:, :1]) & (values[:, :1] > 0) & finite.unsqueeze(1)
    most = int(null.sum(1).max())
    if not most:
        return None
    U = torch.where(null.unsqueeze(1), left, 0)[:, :, -most:]
    return NullSpace(U, L, R, values[:, :1, None])


def _even(matrix: Tensor, units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``L J R``, ``L`` and ``R``, the largest of every row and column near one; rows of rounding are zero, and so are
    columns of which no row would see more than rounding, were all unknowns as large as they are, or were."""
    size, eps = matrix.abs() * units.unsqueeze(1), torch.finfo(matrix.dtype).eps
    most = size.amax(2, keepdim=True)
    seen = (size / torch.where(most > 0, most, 1)).amax(1, keepdim=True)
    matrix = torch.where(seen > _ROUNDED * eps, matrix, 0)
    size = matrix.abs()
    most, each = size.amax((1, 2)), size.amax(2)
    matrix = torch.where((each > _ROUNDED * eps * most.unsqueeze(1)).unsqueeze(2), matrix, 0)
    size = matrix.abs()
    L, R = _evened(
        lambda R: (size * R.unsqueeze(1)).amax(2), lambda L: (size * L.unsqueeze(2)).amax(1), torch.ones_like(each)
    )
    return L.unsqueeze(2) * matrix * R.unsqueeze(1), L, R


def _evened(of_rows: Any, of_columns: Any, ones: Tensor) -> tuple[Tensor, Tensor]:
    """``L`` and ``R`` from the sizes of the rows of ``J R`` and of the columns of ``L J``; those of empty rows and columns
    as the smallest and the largest of others."""
    L = R = ones
    for _ in range(_PASSES):
        rows = L * of_rows(R)
        L = L / torch.where(rows > 0, rows, 1).sqrt()
        columns = R * of_columns(L)
        R = R / torch.where(columns > 0, columns, 1).sqrt()
    L = torch.where(rows > 0, L, torch.where(rows > 0, L, torch.inf).amin(1, keepdim=True)).nan_to_num(1, 1, 1)
    R = torch.where(columns > 0, R, torch.where(columns > 0, R, 0).amax(1, keepdim=True))
    return L, torch.where(R > 0, R, 1).nan_to_num(1, 1, 1)


def _of_sparse(blocks: Any, eps: float) -> NullSpace | None:
    """Null spaces of sparse blocks (:class:`~implicitkit.linear.factors.sparse_blocks.SparseBlocks`, or with a border),
    whose entries have been rounded to ``eps``."""
    ones = torch.ones_like(blocks.diagonal)
    L, R = _evened(blocks.size, blocks.T.size, ones)
    near = blocks.shifted(-(eps**_SHIFT) / (L * R), ones[:, 0])
    of_rows, of_columns = L.unsqueeze(2), R.unsqueeze(2)
    for several in _SEVERAL:
        X = seeded.normal(ones.shape[1], several + 1, seed=0x71).to(L).expand(blocks.batch, -1, -1)
        U = _iterated(lambda X: near.T.solve(X / of_columns) / of_rows, X)
        left, more = _smallest(U, of_columns * blocks.T.product(of_rows * U), eps)
        if not more:
            break
    if not left.any():
        return None
    V = _iterated(lambda X: near.solve(X / of_rows) / of_columns, X)
    right, _ = _smallest(V, of_rows * blocks.product(of_columns * V), eps)
    if right.shape != left.shape:
        return None
    both = (left.any(1) == right.any(1)).all(1)[:, None, None]
    return NullSpace(left * both, L, R, torch.ones_like(L[:, :1, None]), right * both)


def _iterated(solve: Any, X: Tensor) -> Tensor:
    """``X`` after some steps, of every sample that has factors."""
    for _ in range(_STEPS):
        further = solve(X)
        further = further / further.abs().amax(1, keepdim=True)
        X = torch.linalg.qr(torch.where(further.isfinite().all(1, keepdim=True).all(2, keepdim=True), further, X))[0]
    return X


def _smallest(X: Tensor, image: Tensor, eps: float) -> tuple[Tensor, bool]:
    """The combinations of ``X`` whose ``image`` is rounding, of samples where these are not all, and whether of any they
    are."""
    finite = image.isfinite().flatten(1).all(1)
    _, values, right = torch.linalg.svd(torch.where(finite[:, None, None], image, 0), full_matrices=False)
    null = (values <= eps**0.75) & finite.unsqueeze(1)
    all_ = null.all(1, keepdim=True)
    null &= ~all_
    least = X.shape[2] - int(null.sum(1).max())
    return torch.where(null.unsqueeze(1), X @ right.mT, 0)[:, :, least:], bool(all_.any())
