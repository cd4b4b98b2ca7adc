r"""Equations and determinants under ``vmap``, whose derivatives torch has from the factors of other matrices.

Its kernel of ``lu_solve`` finds the factors of a matrix by their place in memory, and where the batch of the matrices is
broadcast in a dimension that is not the first, ``(5, 1, n, n)`` beside ``(5, 9, n, k)``, it takes others, or what lies
behind all.  So do derivatives in forward mode of all that is made of it under ``vmap``, be it one of ``jacfwd``: of
``solve``, ``tensorsolve`` and determinants the first one in ``vmap(jacfwd(f))``, and ``vmap(hessian(f))``; of ``lu_solve``
itself, and of ``solve`` where matrices are broadcast, in any mode.  The third derivative of ``det`` is NaN in any, and the
one in forward mode of a derivative of ``cholesky_inverse`` is wrong.  With ``A = PLU``, whose triangular equations are
solved as they should be,

    lu_solve    x = U^{-1} L^{-1} P^T b,   x = P L^{-H} U^{-H} b
    solve       lu_solve with the factors of A, under vmap; all right-hand sides of one matrix as columns
    slogdet     sum log |u_ii|,   det = \pm prod u_ii

as equal as rounding allows, and differentiable as often as one likes.  Eigenvalues of matrices that are not symmetric, and
products of reflections, are refused where torch's are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError

# levels of vmap, those of jacfwd and jacrev among them, under which torch's derivatives in forward mode are wrong
_DEPTH, _DEPTH_OF_SOLVE = 3, 2


def _named(name: str, *of: Tensor) -> Any:
    """As torch returns several."""
    return getattr(torch.return_types, name)(of)


def _square(A: Tensor) -> bool:
    """Are they square matrices, of which torch says no error?"""
    return A.ndim > 1 and A.shape[-1] == A.shape[-2] and (A.is_floating_point() or A.is_complex())


def _lu_solve(
    LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False, **named: Any
) -> Tensor:
    if named or min(LU.ndim, B.ndim) < 2:
        return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint, **named)
    if not left:
        return _lu_solve(LU, pivots, B.mH, adjoint=not adjoint).mH
    P, L, U = torch.lu_unpack(LU, pivots)
    if adjoint:
        y = torch.linalg.solve_triangular(U.mH, B, upper=False)
        return P @ torch.linalg.solve_triangular(L.mH, y, upper=True, unitriangular=True)
    y = torch.linalg.solve_triangular(L, P.mT @ B, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(U, y, upper=True)


def _solve(A: Tensor, B: Tensor, *, left: bool = True, **named: Any) -> Tensor:
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    if named or not _square(A) or (vector and not left):
        return torch.linalg.solve(A, B, left=left, **named)
    try:
        if len(compat.mapped_over()) < _DEPTH_OF_SOLVE or not compat.has_forward_level():
            return torch.linalg.solve(A, B) if vector else _side_by_side(A, B) if left else _side_by_side(A.mT, B.mT).mT
        factors = torch.linalg.lu_factor(A)
        found = _lu_solve(factors[0], factors[1], B.unsqueeze(-1) if vector else B, left=left)
    except RuntimeError:
        return torch.linalg.solve(A, B, left=left)  # whose error says more
    return found.squeeze(-1) if vector else found


def _side_by_side(A: Tensor, B: Tensor) -> Tensor:
    """Right-hand sides of one matrix as its columns: where matrices are broadcast torch's derivatives in reverse mode are
    errors, or wrong, of second order and under ``vmap``."""
    if A.shape[:-2] == B.shape[:-2]:
        return torch.linalg.solve(A, B)
    over = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A, B = A[(None,) * (len(over) + 2 - A.ndim)], B.expand(*over, *B.shape[-2:])
    shared = [i for i, size in enumerate(over) if size != A.shape[i]]
    beside = list(range(-1 - len(shared), -1))
    X = torch.linalg.solve(A.squeeze(shared), B.movedim(shared, beside).flatten(-1 - len(shared)))
    return X.unflatten(-1, [*(over[i] for i in shared), B.shape[-1]]).movedim(beside, shared)


def _solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False, **named: Any) -> Any:
    """NaN of matrices that have no inverse."""
    if named or check_errors or not _square(A):
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors, **named)
    info = torch.linalg.lu_factor_ex(A.detach()).info
    singular = info.ne(0)[..., None, None]
    kept = torch.where(singular, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A)
    found = _solve(kept, B, left=left)
    lost = singular if found.ndim >= A.ndim else singular.squeeze(-1)
    return _named("linalg_solve_ex", torch.where(lost, torch.nan, found), info)


def _tensorsolve(A: Tensor, B: Tensor, dims: Any = None, **named: Any) -> Tensor:
    if named or A.numel() != B.numel() ** 2:
        return torch.linalg.tensorsolve(A, B, dims=dims, **named)
    A = A if dims is None else A.movedim(dims, list(range(-len(dims), 0)))
    return _solve(A.reshape(B.numel(), B.numel()), B.flatten()).reshape(A.shape[B.ndim :])


def _cholesky_inverse(L: Tensor, upper: bool = False, **named: Any) -> Tensor:
    if named or L.ndim < 2:
        return torch.cholesky_inverse(L, upper, **named)
    return torch.cholesky_solve(torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L), L, upper)


def _slogdet(A: Tensor, **named: Any) -> Any:
    if named or not _square(A):
        return torch.linalg.slogdet(A, **named)
    parity, u = _diagonal(A)
    size = u.abs()
    turned = u / torch.where(size == 0, 1, size) if A.is_complex() else u.sgn()  # torch has no third derivative of sgn
    return _named("linalg_slogdet", parity * turned.prod(-1), size.log().sum(-1))


def _logdet(A: Tensor) -> Tensor:
    if not _square(A):
        return torch.logdet(A)
    sign, log = _slogdet(A)
    return log + sign.log() if A.is_complex() else torch.where(sign < 0, torch.nan, log)


def _det(A: Tensor, **named: Any) -> Tensor:
    if named or not _square(A):
        return torch.linalg.det(A, **named)
    singular = torch.linalg.lu_factor_ex(A.detach()).info.ne(0)
    if not compat.batches_in_front(singular)[0].any():
        parity, u = _diagonal(A)
        return parity * u.prod(-1)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    at, of = (torch.where(which[..., None, None], A, identity) for which in (singular, ~singular))
    parity, u = _diagonal(of)
    return torch.where(singular, torch.linalg.det(at), parity * u.prod(-1))


def _diagonal(A: Tensor) -> tuple[Tensor, Tensor]:
    """``det P`` and ``u``, of the same factors: torch's signs are of those of the transposed matrix, in which another number
    may be zero."""
    LU, pivots, _ = torch.linalg.lu_factor_ex(A)
    swaps = pivots.ne(torch.arange(1, 1 + pivots.shape[-1], device=A.device)).sum(-1)
    return (1 - 2 * (swaps % 2)).to(A.dtype), LU.diagonal(dim1=-2, dim2=-1)


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if len(compat.mapped_over()) >= _DEPTH:
            raise CapabilityError(
                f"torch's derivatives of {function.__name__} in forward mode are wrong under so many levels of vmap (those "
                "of jacfwd and jacrev are counted): take them in reverse mode, torch.func.jacrev, or sample by sample"
            )
        return function(*args, **named)

    return called


def _by_name(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """``function``, of arguments that torch calls so."""

    def called(*given: Any, **named: Any) -> Any:
        return function(*given, *[named.pop(name) for name in names if name in named], **named)

    return called


_EQUATIONS: dict[Any, Callable[..., Any]] = {torch.linalg.solve: _solve, torch.linalg.solve_ex: _solve_ex}
#: wherever derivatives are taken, and those in forward mode
IN_ANY_MODE: dict[Any, Callable[..., Any]] = {
    torch.linalg.lu_solve: _lu_solve,
    **dict.fromkeys(
        [torch.lu_solve, Tensor.lu_solve],
        _by_name(lambda B, LU, pivots, **named: _lu_solve(LU, pivots, B, **named), "input", "LU_data", "LU_pivots"),
    ),
    torch.linalg.det: _det,
    **dict.fromkeys([torch.det, Tensor.det], _by_name(_det, "input")),
    **_EQUATIONS,
}
FACTORS: dict[Any, Callable[..., Any]] = {
    **_EQUATIONS,
    torch.linalg.tensorsolve: _by_name(_tensorsolve, "input", "other"),
    **dict.fromkeys([torch.cholesky_inverse, Tensor.cholesky_inverse], _by_name(_cholesky_inverse, "input")),
    torch.linalg.slogdet: _slogdet,
    **dict.fromkeys([torch.slogdet, Tensor.slogdet], _by_name(_slogdet, "input")),
    **dict.fromkeys([torch.logdet, Tensor.logdet], _by_name(_logdet, "input")),
    **{f: _refused(f) for f in (torch.linalg.eig, torch.linalg.eigvals, torch.linalg.householder_product)},
}
