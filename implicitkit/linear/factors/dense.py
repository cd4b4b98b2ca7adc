r"""Every batched dense solve of the project, guarded: nothing here raises, hangs, or lets one block spoil another.

Why a guard.  torch 2.13 (MKL) on the CPU is broken in batched LU (``torch.linalg.solve``, ``inv``, ``lu_factor``) for
two or more blocks of size about 150 and up with two or more threads: it hangs, or prints "Parameter 6 was
incorrect on entry to SLASWP" and returns garbage factors and pivots with ``info = 0``.  The LU of a single matrix is
safe.  Hence blocks of size :data:`LOOP_SIZE` and up are factored one at a time on the CPU; smaller ones, and all on
other devices, in one call.  No other file of the project calls a batched dense factorisation.

A block is singular when elimination with partial pivoting, ``P A = L U``, meets a pivot that rounding could have made:
``min |U_ii| < n eps max |U_ii|``.  A block whose pivots differ by a thousand and more, and whose rows, or then columns, do,
is factored with these scaled to equal size: bad units alone (``diag(1, 1e-20)``) condemn no matrix, nor do they choose
pivots (a row in units of 1e13 would be taken first, whatever stands in it).

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), algorithm 3.4.1 (LU with partial pivoting), section
3.5.2 (scaling of rows and columns), section 5.5 (minimum-norm least squares by the SVD).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.in_parts import sizes

LOOP_SIZE = 100
_LARGE = 2048  # entries of a matrix from which on the order of its products matters
_UNEVEN = 1e-3  # of the largest, a pivot, row or column from which on units may be what makes it small
_LOW_PRECISION = (torch.float16, torch.bfloat16)
SINGULAR = 'the matrix is singular; linear_solver="lsmr" gives the minimum-norm solution'
NOT_FINITE = "the matrix is not finite"
RHS_NOT_FINITE = "the right-hand side or the solution is not finite"


def mv(A: Tensor, x: Tensor) -> Tensor:
    """``A x`` block by block: ``(batch, m, n), (batch, n) -> (batch, m)``."""
    return torch.bmm(A, x.unsqueeze(2)).squeeze(2)


def mm(A: Tensor, x: Tensor) -> Tensor:
    """``A x`` block by block: ``(batch, m, n), (batch, n, k) -> (batch, m, k)``; of a large matrix as ``(x^T A^T)^T``, which
    takes a half to a fifth of the time on a CPU where ``k`` is small."""
    return torch.bmm(A, x) if A.shape[1] * A.shape[2] < _LARGE else torch.bmm(x.mT, A.mT).mT


def _must_loop(A: Tensor) -> bool:
    return A.device.type == "cpu" and A.shape[0] >= 2 and max(A.shape[1:]) >= LOOP_SIZE


def is_one(A: Tensor) -> bool:
    """Are these blocks one matrix, expanded?"""
    return A.shape[0] > 1 and A.stride(0) == 0


def _factor(A: Tensor) -> tuple[Tensor, Tensor]:
    if not _must_loop(A):
        lu, pivots, _ = torch.linalg.lu_factor_ex(A)
        return lu, pivots
    blocks = [torch.linalg.lu_factor_ex(block) for block in A]
    return torch.stack([block[0] for block in blocks]), torch.stack([block[1] for block in blocks])


def _regular(lu: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks have no pivot that is rounding noise, and which have pivots of like size, ``(batch,)`` each."""
    n = lu.shape[-1]
    if n == 0:
        regular = torch.ones(lu.shape[0], dtype=torch.bool, device=lu.device)
        return regular, regular
    pivots = lu.diagonal(dim1=1, dim2=2).abs()
    smallest, largest = pivots.aminmax(dim=1)
    threshold = min(n * torch.finfo(lu.dtype).eps, 0.1)
    usable = (smallest > 0) & (largest < torch.inf)
    even = (smallest >= _UNEVEN * largest) & usable
    if threshold <= _UNEVEN and bool(even.all()):
        return even, even
    return (smallest >= threshold * largest) & usable, even


def _are_uneven(size: Tensor) -> Tensor:
    """Which blocks have rows, or columns, that differ by a thousand and more, ``(batch,)``."""
    smallest, largest = size.flatten(1).aminmax(dim=1)
    return smallest < _UNEVEN * largest


def _finite(x: Tensor) -> Tensor:
    """Which samples are finite: ``(batch, ...) -> (batch,)``; by their sums, which are where every entry is, unless one
    overflows (to look at each entry takes a third of the time of the factors)."""
    found = x.sum(tuple(range(1, x.ndim))).mul(0).eq(0)  # in a third of the time of isfinite
    return found if bool(found.all()) else x.isfinite().flatten(1).all(dim=1)


def _some(A: Tensor, which: Tensor) -> Tensor:
    """Some blocks, ``which`` ``(k,)``; all of them without a copy."""
    return A if len(which) == len(A) else A[which]


@dataclass(frozen=True)
class Factor:
    """LU factors of every block, to be used for many right-hand sides.

    ``ok``: ``(batch,)`` bool, the blocks that are finite and not singular.  ``reason``: one clause when not all are.
    ``dtype``: that of the matrix; float16 and bfloat16 are factored in float32 and solutions cast back.
    ``row_scale``, ``column_scale``: what is factored is ``R^{-1} A C^{-1}``, ``(batch, n, 1)`` and ``(batch, 1, n)``;
    ``None``: ``A`` as it is.
    """

    ok: Tensor
    reason: str
    dtype: torch.dtype
    lu: Tensor
    pivots: Tensor
    row_scale: Tensor | None
    column_scale: Tensor | None = None

    def solve(self, b: Tensor, transpose: bool = False) -> Tensor:
        """Solve ``A x = b`` or, with ``transpose``, ``A^T x = b``.

        Args:
            b: ``(batch, n)`` or ``(batch, n, k)``.

        Returns:
            ``x`` of the shape of ``b``; NaN throughout for a block that is not ``ok``, so that a solution nobody
            checked cannot pass for one.
        """
        rhs = b.to(self.lu.dtype)
        rhs = rhs.unsqueeze(2) if b.ndim == 2 else rhs
        before, after = self.scales(transpose)
        if before is not None:
            rhs = rhs / before
        if is_one(self.lu):
            columns = rhs.transpose(0, 1).flatten(1)
            x = torch.linalg.lu_solve(self.lu[0], self.pivots[0], columns, adjoint=transpose)
            x = x.unflatten(1, (len(rhs), -1)).transpose(0, 1)
        elif _must_loop(self.lu):
            blocks = zip(self.lu, self.pivots, rhs, strict=True)
            x = torch.stack([torch.linalg.lu_solve(lu, p, r, adjoint=transpose) for lu, p, r in blocks])
        else:
            x = torch.linalg.lu_solve(self.lu, self.pivots, rhs, adjoint=transpose)
        if after is not None:
            x = x / after
        if self.reason:
            x = torch.where(self.ok[:, None, None], x, x.new_full((), torch.nan))
        return (x.squeeze(2) if b.ndim == 2 else x).to(b.dtype)

    def scales(self, transpose: bool) -> tuple[Tensor | None, Tensor | None]:
        """What right-hand sides, and then solutions, are divided by, ``(batch, n, 1)`` each; ``None``: by nothing."""
        if self.row_scale is None or self.column_scale is None:
            return None, None
        rows, columns = self.row_scale, self.column_scale.mT
        return (columns, rows) if transpose else (rows, columns)


def factor_batched(A: Tensor, columns_too: bool = True) -> Factor:
    """Factor every block of ``A`` ``(batch, n, n)``; never raises for its values.

    A block that is singular or not finite is marked in ``Factor.ok`` and leaves the others alone.  Not ``columns_too``:
    unknowns have been made of like size, and a small column is one that is missing.

    ``P A = L U``.  Units: ``U`` has those of ``A``.  Source: Golub & Van Loan (2013), *Matrix Computations*, section
    3.4.

    Raises:
        ValueError: ``A`` is not ``(batch, n, n)``.
    """
    if A.ndim != 3 or A.shape[1] != A.shape[2]:
        raise ValueError(f"expected square blocks of shape (batch, n, n), got {tuple(A.shape)}")
    if is_one(A):
        one, batch = factor_batched(A[:1], columns_too), len(A)
        scales = (None if s is None else s.expand(batch, -1, -1) for s in (one.row_scale, one.column_scale))
        lu, pivots = one.lu.expand(batch, -1, -1), one.pivots.expand(batch, -1)
        return Factor(one.ok.expand(batch), one.reason, one.dtype, lu, pivots, *scales)
    matrix = A.float() if A.dtype in _LOW_PRECISION else A
    finite = _finite(matrix)
    if not bool(finite.all()):
        identity = torch.eye(A.shape[1], dtype=matrix.dtype, device=A.device)
        matrix = torch.where(finite[:, None, None], matrix, identity)
    lu, pivots = _factor(matrix)
    regular, even = _regular(lu)
    row_scale = column_scale = None
    if not bool(even.all()):
        doubtful = (~even).nonzero().squeeze(1)
        rows, columns = sizes(_some(matrix, doubtful))
        columns = columns if columns_too else torch.ones_like(columns)
        scaled = _are_uneven(rows) | _are_uneven(columns)
        doubtful, rows, columns = doubtful[scaled], rows[scaled], columns[scaled]
        if len(doubtful):
            scaled_lu, scaled_pivots = _factor(_some(matrix, doubtful) / rows / columns)
            ones = torch.ones(A.shape[0], A.shape[1], 1, dtype=matrix.dtype, device=A.device)
            row_scale = ones.index_copy(0, doubtful, rows)
            column_scale = ones.mT.index_copy(0, doubtful, columns)
            lu = lu.index_copy(0, doubtful, scaled_lu)
            pivots = pivots.index_copy(0, doubtful, scaled_pivots)
            regular = regular.index_copy(0, doubtful, _regular(scaled_lu)[0])
    ok = finite & regular
    reason = "" if bool(ok.all()) else SINGULAR if not bool(regular.all()) else NOT_FINITE
    return Factor(ok, reason, A.dtype, lu, pivots, row_scale, column_scale)


def solve_batched(A: Tensor, b: Tensor) -> tuple[Tensor, Tensor, str]:
    """Solve ``A x = b`` block by block, by LU with partial pivoting.

    Units: ``x`` has those of ``b`` by those of ``A``.  Source: Golub & Van Loan (2013), *Matrix Computations*, section
    3.4.

    Args:
        A: ``(batch, n, n)``. b: ``(batch, n)`` or ``(batch, n, k)``.

    Returns:
        ``x`` of the shape of ``b``, ``ok`` ``(batch,)`` bool and ``reason``, a clause saying why a block is not ok (it
        is singular, or something is not finite).  Where not ok, ``x`` is NaN.

    Raises:
        ValueError: ``A`` is not ``(batch, n, n)``.
    """
    factor = factor_batched(A)
    x = factor.solve(b)
    finite = _finite(x)
    if not factor.reason and bool(finite.all()):
        return x, finite, ""
    return x, factor.ok & finite, factor.reason or RHS_NOT_FINITE


def _pseudo_solve(A: Tensor, b: Tensor, rcond: float) -> Tensor:
    U, s, Vh = torch.linalg.svd(A, full_matrices=False)
    keep = s > rcond * s[..., :1]
    inverse = torch.where(keep, 1 / torch.where(keep, s, torch.ones_like(s)), torch.zeros_like(s))
    x: Tensor = Vh.mT @ (inverse.unsqueeze(-1) * (U.mT @ b))
    return x


def lstsq_batched(A: Tensor, b: Tensor, *, rcond: float | None = None) -> tuple[Tensor, Tensor, str]:
    """The minimum-norm least-squares solution ``A^+ b`` block by block, by the singular value decomposition.

    ``x = argmin |A x - b|``, of all such the one with the least ``|x|``.  Units: those of ``b`` by those of ``A``.
    Source: Golub & Van Loan (2013), *Matrix Computations*, section 5.5.

    Args:
        A: ``(batch, m, n)``, of any rank. b: ``(batch, m)`` or ``(batch, m, k)``.
        rcond: singular values below ``rcond`` times the largest count as zero; ``None`` is ``max(m, n) eps``.

    Returns:
        ``x`` ``(batch, n)`` or ``(batch, n, k)``, ``ok`` ``(batch,)`` bool (False only where something is not finite or
        the decomposition failed; ``x`` is NaN there) and ``reason``.

    Raises:
        ValueError: ``A`` is not ``(batch, m, n)``.
    """
    if A.ndim != 3:
        raise ValueError(f"expected blocks of shape (batch, m, n), got {tuple(A.shape)}")
    dtype = torch.float32 if A.dtype in _LOW_PRECISION else A.dtype
    matrix, rhs = A.to(dtype), b.to(dtype)
    rhs = rhs.unsqueeze(2) if b.ndim == 2 else rhs
    cut = max(A.shape[1:]) * torch.finfo(dtype).eps if rcond is None else rcond
    finite = _finite(matrix)
    matrix = torch.where(finite[:, None, None], matrix, matrix.new_zeros(()))
    x = _pseudo_solve_each(matrix, rhs, cut) if _must_loop(matrix) else _pseudo_solve_all(matrix, rhs, cut)
    ok = finite & _finite(x)
    x = torch.where(ok[:, None, None], x, x.new_full((), torch.nan))
    reason = "" if bool(ok.all()) else NOT_FINITE if not bool(finite.all()) else RHS_NOT_FINITE
    return (x.squeeze(2) if b.ndim == 2 else x).to(b.dtype), ok, reason


def _pseudo_solve_all(A: Tensor, b: Tensor, rcond: float) -> Tensor:
    try:
        return _pseudo_solve(A, b, rcond)
    except torch.linalg.LinAlgError:  # one block did not converge: find it
        return _pseudo_solve_each(A, b, rcond)


def _pseudo_solve_each(A: Tensor, b: Tensor, rcond: float) -> Tensor:
    x = b.new_full((A.shape[0], A.shape[2], b.shape[2]), torch.nan)
    for i in range(A.shape[0]):
        try:
            x[i] = _pseudo_solve(A[i], b[i], rcond)
        except torch.linalg.LinAlgError:
            continue
    return x


def svd_batched(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``A = U diag(s) V^T`` block by block, ``s`` descending.

    Args:
        A: ``(batch, m, n)``; float16 and bfloat16 are decomposed in float32.

    Returns:
        ``U`` ``(batch, m, k)``, ``s`` ``(batch, k)``, ``V^T`` ``(batch, k, n)``, ``k = min(m, n)``; NaN throughout for a
        block that is not finite or whose decomposition failed.

    Raises:
        ValueError: ``A`` is not ``(batch, m, n)``.
    """
    if A.ndim != 3:
        raise ValueError(f"expected blocks of shape (batch, m, n), got {tuple(A.shape)}")
    matrix = A.float() if A.dtype in _LOW_PRECISION else A
    ok = _finite(matrix)
    matrix = torch.where(ok[:, None, None], matrix, matrix.new_zeros(()))
    try:
        U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:  # one block did not converge: find it
        ok = ok & torch.tensor([_svd_converges(block) for block in matrix], device=A.device)
        U, s, Vh = torch.linalg.svd(torch.where(ok[:, None, None], matrix, matrix.new_zeros(())), full_matrices=False)
    nan = matrix.new_full((), torch.nan)
    return (
        torch.where(ok[:, None, None], U, nan),
        torch.where(ok[:, None], s, nan),
        torch.where(ok[:, None, None], Vh, nan),
    )


def _svd_converges(block: Tensor) -> bool:
    try:
        torch.linalg.svdvals(block)
    except torch.linalg.LinAlgError:
        return False
    return True


def cholesky_batched(A: Tensor) -> tuple[Tensor, Tensor]:
    """``A = L L^T`` block by block, for symmetric positive definite blocks; torch's batched Cholesky needs no guard.

    Units: ``L`` has the root of those of ``A``.  Raises: nothing for values.  Source: Golub & Van Loan (2013), *Matrix
    Computations*, section 4.2.

    Args:
        A: ``(batch, n, n)``; only the lower triangle is read.

    Returns:
        ``L`` ``(batch, n, n)`` for ``torch.cholesky_solve``, and ``ok`` ``(batch,)`` bool; ``L`` is the identity where a
        block is not positive definite or not finite.
    """
    L, info = torch.linalg.cholesky_ex(A)
    ok = (info == 0) & L.diagonal(dim1=1, dim2=2).isfinite().all(1)
    if not bool(ok.all()):
        L = torch.where(ok[:, None, None], L, torch.eye(A.shape[1], dtype=A.dtype, device=A.device))
    return L, ok
