r"""Equations and determinants under ``vmap``, whose derivatives torch has from the factors of other matrices.

Its kernel of ``lu_solve`` finds the factors of a matrix by their place in memory, and where the batch of the matrices is
broadcast in a dimension that is not the first, ``(5, 1, n, n)`` beside ``(5, 9, n, k)``, it takes others, or what lies
behind all.  So do derivatives in forward mode of all that is made of it under ``vmap``, be it one of ``jacfwd``: of
``solve`` and determinants the first one in ``vmap(jacfwd(f))``, and ``vmap(hessian(f))``; of ``lu_solve`` itself in any
mode.  The third derivative of ``det`` is NaN in any.  With ``A = PLU``, whose triangular equations are solved as they
should be,

    lu_solve    x = U^{-1} L^{-1} P^T b,   x = P L^{-H} U^{-H} b
    solve       lu_solve with the factors of A
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

_DEPTH = 3  # levels of vmap, those of jacfwd and jacrev among them, under which torch's derivatives are wrong


def _named(name: str, *of: Tensor) -> Any:
    """As torch returns several."""
    return getattr(torch.return_types, name)(of)


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


def _lu_solve_in_torchs_order(b: Tensor, LU_data: Tensor, LU_pivots: Tensor, **named: Any) -> Tensor:
    return _lu_solve(LU_data, LU_pivots, b, **named)


def _solve(A: Tensor, B: Tensor, *, left: bool = True, **named: Any) -> Tensor:
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    if named or A.ndim < 2 or A.shape[-1] != A.shape[-2] or (vector and not left):
        return torch.linalg.solve(A, B, left=left, **named)
    try:
        factors = torch.linalg.lu_factor(A)
    except RuntimeError:
        return torch.linalg.solve(A, B, left=left)  # whose error says more
    found = _lu_solve(factors[0], factors[1], B.unsqueeze(-1) if vector else B, left=left)
    return found.squeeze(-1) if vector else found


def _solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False, **named: Any) -> Any:
    if named or check_errors:
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors, **named)
    info = torch.linalg.lu_factor_ex(A.detach()).info
    regular = torch.where(info.ne(0)[..., None, None], torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A)
    return _named("linalg_solve_ex", _solve(regular, B, left=left), info)


def _slogdet(A: Tensor, **named: Any) -> Any:
    if named:
        return torch.linalg.slogdet(A, **named)
    u = torch.linalg.lu_factor_ex(A).LU.diagonal(dim1=-2, dim2=-1)
    sign = torch.linalg.slogdet(A.detach()).sign
    if A.is_complex():  # it turns with the matrix
        turned = u / u.abs()
        sign = sign * (turned / turned.detach()).prod(-1)
    return _named("linalg_slogdet", sign, u.abs().log().sum(-1))


def _logdet(A: Tensor) -> Tensor:
    sign, log = _slogdet(A)
    return log + sign.log() if A.is_complex() else torch.where(sign < 0, torch.nan, log)


def _det(A: Tensor, **named: Any) -> Tensor:
    if named or A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        return torch.linalg.det(A, **named)
    singular = torch.linalg.lu_factor_ex(A.detach()).info.ne(0)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    at, of = (torch.where(which[..., None, None], A, identity) for which in (singular, ~singular))
    u = torch.linalg.lu_factor_ex(of).LU.diagonal(dim1=-2, dim2=-1)
    parity = torch.linalg.slogdet(of.detach()).sign / u.detach().sgn().prod(-1)
    return torch.where(singular, torch.linalg.det(at), parity * u.prod(-1))


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if len(compat.mapped_over()) >= _DEPTH:
            raise CapabilityError(
                f"torch's derivatives of {function.__name__} in forward mode are wrong under so many levels of vmap (those "
                "of jacfwd and jacrev are counted): take them in reverse mode, torch.func.jacrev, or sample by sample"
            )
        return function(*args, **named)

    return called


#: wherever derivatives are taken, and those in forward mode
IN_ANY_MODE: dict[Any, Callable[..., Any]] = {
    torch.linalg.lu_solve: _lu_solve,
    torch.lu_solve: _lu_solve_in_torchs_order,
    Tensor.lu_solve: _lu_solve_in_torchs_order,
    **dict.fromkeys([torch.linalg.det, torch.det, Tensor.det], _det),
}
FACTORS: dict[Any, Callable[..., Any]] = {
    torch.linalg.solve: _solve,
    torch.linalg.solve_ex: _solve_ex,
    **dict.fromkeys([torch.linalg.slogdet, torch.slogdet, Tensor.slogdet], _slogdet),
    **dict.fromkeys([torch.logdet, Tensor.logdet], _logdet),
    **{f: _refused(f) for f in (torch.linalg.eig, torch.linalg.eigvals, torch.linalg.householder_product)},
}
