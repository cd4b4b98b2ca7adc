r"""Preconditioners: something near ``A^{-1}`` that is cheap to apply, for the Krylov methods.

They act from the right, ``A M^{-1} y = b``, ``x = M^{-1} y`` (conjugate gradients: from both sides), and solutions are
judged by ``b - A x``: a preconditioner changes how many products a solution takes, never which one it is.  For the
transposed system, the adjoint's, its transposed is used.

By name, made of the matrix of each sample (by its sparsity pattern; of a small one the dense matrix):

- ``"jacobi"``: the diagonal;
- ``"block_jacobi"``: blocks of 16 unknowns in a row, factored;
- ``"ilu"``: incomplete LU with threshold (SuperLU's ILUTP: Li & Shao 2011, ACM Trans. Math. Softw. 37(4)); where it breaks
  down, the diagonal;
- ``"amg"``: one V-cycle of smoothed aggregation (Vanek, Mandel & Brezina 1996, Computing 56) from the package pyamg; the
  transposed matrix has a hierarchy of its own.

Source: Saad, *Iterative Methods for Sparse Linear Systems* (2nd ed., SIAM 2003), chapters 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.linear_map import product
from implicitkit.foundation.numbers import array
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import check_call, check_options, one_of, optional
from implicitkit.foundation.wording import did_you_mean
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.factors.dense import factor_batched
from implicitkit.linear.factors.stale import Stale
from implicitkit.linear.factors.user_factor import UserFactor

NAMES = ("jacobi", "block_jacobi", "ilu", "amg")
_BLOCK = 16
_NUMBERS = 1 << 24  # in the dense matrices that stand in for a pattern, at most


def check_preconditioner(choice: Any) -> None:
    """Raise unless ``choice`` is a preconditioner: a name, a callable ``(z, v) -> M^-1 v``, a pair of callables (the second
    for the transposed), a factorisation with ``solve(b, trans)``, an :class:`~implicitkit.linear.Stale`, or ``None``.

    Raises:
        ValueError: an unknown name. TypeError: none of these.
    """
    made = not isinstance(choice, (type, Tensor))  # a class is none yet, and a tensor's methods are torch's own
    if choice is None or isinstance(choice, Stale) or (made and callable(getattr(choice, "solve", None))):
        return
    functions = choice if isinstance(choice, (tuple, list)) and len(choice) == 2 else (choice,) * made
    if functions and all(callable(f) for f in functions):
        for function in functions:
            check_call("preconditioner(z, v)", function)
        return
    if isinstance(choice, str):
        if choice in NAMES:
            return
        hint = did_you_mean(choice, NAMES, 0.5)
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"preconditioner must be one of {names}; got {choice!r}{hint and '.'}{hint}")
    raise TypeError(
        f"preconditioner must be a name ({', '.join(map(repr, NAMES))}), callable as (z, v) -> M^-1 v, a pair of such "
        f"(the second for the transposed), a factorisation with solve(b, trans), or ik.linear.Stale(); got {choice!r}"
    )


def preconditioner(choice: Any, A: Operator, z: Tensor) -> Any:
    """``choice`` for the operator ``A`` at ``z`` ``(batch, n)``: an object with ``solve(b)``, ``b`` ``(batch, n)`` or
    ``(batch, n, k)``, and ``T``; made when it is first used, and differentiable in ``b``.

    Raises (when it is used):
        CapabilityError: it needs a matrix that cannot be had, or a package that is not installed.
    """
    return _Linear(_made(choice, A, z))


def _made(choice: Any, A: Operator, z: Tensor) -> Any:
    if isinstance(choice, str):
        return _Deferred(lambda: _MAKERS[choice](A))
    if isinstance(choice, Stale):
        return _Deferred(lambda: choice.factors(A))
    if isinstance(choice, (tuple, list)) or callable(choice):
        pair = choice if isinstance(choice, (tuple, list)) else (choice, None)
        return _Function(pair[0], pair[1], z)
    return UserFactor([choice] * A.batch)


class _Linear:
    """What solves plain vectors, for a linear solver that differentiates its solutions, or maps them over vectors, too."""

    def __init__(self, of: Any) -> None:
        self.of = of

    @property
    def T(self) -> _Linear:
        """The transposed."""
        return _Linear(self.of.T)

    def solve(self, b: Tensor) -> Tensor:
        """``M^{-1} b``."""
        return product(self.of.solve, lambda y: self.of.T.solve(y), b, plain=True)


class _Deferred:
    """What ``make`` makes, made once for itself and its transposed."""

    def __init__(self, make: Callable[[], Any], transposed: bool = False, made: list[Any] | None = None) -> None:
        self.make, self.transposed, self.made = make, transposed, [] if made is None else made

    @property
    def T(self) -> _Deferred:
        """The transposed."""
        return _Deferred(self.make, not self.transposed, self.made)

    def solve(self, b: Tensor) -> Tensor:
        """``M^{-1} b``, or ``M^{-T} b``."""
        if not self.made:
            self.made.append(self.make())
        found: Tensor = (self.made[0].T if self.transposed else self.made[0]).solve(b)
        return found


_PAIR = (
    "the derivative needs the transposed of the preconditioner, and this function leaves torch: give a pair (apply, "
    "apply_transposed)"
)


class _Function:
    """``(z, v) -> M(z)^{-1} v`` of rows, linear in ``v``; without a function for the transposed, by differentiation."""

    def __init__(self, forward: Any, backward: Any, z: Tensor, transposed: bool = False) -> None:
        self.forward, self.backward, self.z, self.transposed = forward, backward, z.detach(), transposed

    @property
    def T(self) -> _Function:
        """The transposed."""
        return _Function(self.forward, self.backward, self.z, not self.transposed)

    def solve(self, b: Tensor) -> Tensor:
        """What the user's function makes of one vector a sample, or of several, one after another."""
        if b.ndim == 3:
            return torch.stack([self.solve(b[:, :, j]) for j in range(b.shape[2])], 2)
        if not self.transposed:
            return self._checked(self.forward(self.z, b), b).detach().to(b)
        if self.backward is not None:
            return self._checked(self.backward(self.z, b), b).detach().to(b)
        seen = []

        def forward(v: Tensor) -> Tensor:
            out = self._checked(self.forward(self.z, v), b)
            seen.append(compat.tracked(out))
            return out

        try:
            _, pull = autodiff.vjp(forward, torch.zeros_like(b))
        except (RuntimeError, TypeError) as error:
            if "numpy" not in str(error):
                raise
            raise CapabilityError(_PAIR) from error
        if not seen[-1]:
            raise CapabilityError(_PAIR)
        return pull(b)[0].detach()

    def _checked(self, x: Any, b: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.shape != b.shape:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"the preconditioner returned {shape} for vectors of shape {tuple(b.shape)}")
        return x


class _Diagonal:
    """``diag(d)``; one where an entry is zero or not finite."""

    def __init__(self, d: Tensor) -> None:
        self.d = torch.where((d != 0) & d.isfinite(), d, 1)

    @property
    def T(self) -> _Diagonal:
        """Itself: a diagonal matrix is symmetric."""
        return self

    def solve(self, b: Tensor) -> Tensor:
        """``b / d``."""
        return b / (self.d if b.ndim == 2 else self.d.unsqueeze(2)).to(b)


class _Blocks:
    """Dense diagonal blocks ``(batch * count, s, s)``, the last of them completed by the identity."""

    def __init__(self, factor: Any, count: int, transposed: bool = False) -> None:
        self.factor, self.count, self.transposed = factor, count, transposed

    @property
    def T(self) -> _Blocks:
        """The transposed."""
        return _Blocks(self.factor, self.count, not self.transposed)

    def solve(self, b: Tensor) -> Tensor:
        """Block by block; a singular block is the identity."""
        columns = b.unsqueeze(2) if b.ndim == 2 else b
        batch, n, k = columns.shape
        padded = torch.nn.functional.pad(columns, (0, 0, 0, self.count * _BLOCK - n))
        x = self.factor.solve(padded.reshape(batch * self.count, _BLOCK, k), self.transposed)
        x = torch.where(self.factor.ok[:, None, None], x, padded.reshape(x.shape))
        x = x.reshape(batch, self.count * _BLOCK, k)[:, :n]
        return x.squeeze(2) if b.ndim == 2 else x


def _matrices(A: Operator, name: str) -> list[Any]:
    """Every sample's matrix, sparse."""
    import scipy.sparse as sp

    from implicitkit.linear.factors.sparse_blocks import SparseBlocks

    blocks = A.sparse()
    if isinstance(blocks, SparseBlocks):
        return [blocks.ready.matrix(values) for values in blocks.values]
    if A.batch * A.size**2 > _NUMBERS:
        raise CapabilityError(
            f"preconditioner={name!r} is made of the matrix, and this Jacobian has {A.size} unknowns and no sparsity "
            "pattern: pass jac_sparsity= to the problem, or a callable (z, v) -> M^-1 v"
        )
    return [sp.csr_matrix(M) for M in array(A.dense())]


def _jacobi(A: Operator) -> _Diagonal:
    return _Diagonal(torch.stack([torch.from_numpy(M.diagonal()) for M in _matrices(A, "jacobi")]).to(A.like))


def _block_jacobi(A: Operator) -> _Blocks:
    count = -(-A.size // _BLOCK)
    blocks = torch.eye(_BLOCK, dtype=torch.float64, device="cpu").repeat(A.batch, count, 1, 1)
    for i, M in enumerate(_matrices(A, "block_jacobi")):
        entries = M.tocoo()
        rows, columns = (torch.from_numpy(t).long() for t in (entries.row, entries.col))
        inside = rows // _BLOCK == columns // _BLOCK
        rows, columns, values = rows[inside], columns[inside], torch.from_numpy(entries.data)[inside]
        here = torch.arange(A.size, device="cpu")
        blocks[i, here // _BLOCK, here % _BLOCK, here % _BLOCK] = 0.0
        blocks[i, rows // _BLOCK, rows % _BLOCK, columns % _BLOCK] = values
    return _Blocks(factor_batched(blocks.flatten(0, 1).to(A.like)), count)


def _ilu(A: Operator) -> UserFactor:
    import scipy.sparse.linalg as sla

    def one(M: Any) -> Any:
        try:
            return sla.spilu(M.tocsc(), drop_tol=1e-4, fill_factor=10)
        except (RuntimeError, ValueError):  # exactly singular, or not finite
            diagonal = _Diagonal(torch.from_numpy(M.diagonal()))
            return (lambda b: b / diagonal.d.numpy(),) * 2

    return UserFactor([one(M) for M in _matrices(A, "ilu")])


def _amg(A: Operator) -> UserFactor:
    try:
        import pyamg
    except ImportError:
        raise CapabilityError(
            'preconditioner="amg" needs the package pyamg: pip install "implicitkit[amg]"; "ilu" needs nothing more'
        ) from None

    def cycle(M: Any) -> Any:
        levels = pyamg.smoothed_aggregation_solver(M, symmetry="symmetric" if A.symmetric else "nonsymmetric")
        return levels.aspreconditioner(cycle="V").matvec

    pairs = []
    for M in _matrices(A, "amg"):
        M.indptr, M.indices = M.indptr.astype("int32"), M.indices.astype("int32")
        forward = cycle(M)
        pairs.append((forward, forward if A.symmetric else cycle(M.T.tocsr())))
    return UserFactor(pairs)


_MAKERS: dict[str, Callable[[Operator], Any]] = {
    "jacobi": _jacobi,
    "block_jacobi": _block_jacobi,
    "ilu": _ilu,
    "amg": _amg,
}


@dataclass(frozen=True)
class PreconditionedSolver(LinearSolver):
    """A linear solver that uses ``A.preconditioner`` or, where there is none, one made of the matrix of ``A`` by name
    (:mod:`implicitkit.linear.iterative.preconditioners`).  Functions of the state and factorisations go to
    ``ik.Implicit(preconditioner=)``, which has priority.

    Args:
        preconditioner: ``"jacobi"``, ``"block_jacobi"``, ``"ilu"``, ``"amg"`` or ``None``.

    Raises:
        ValueError: another name, or, for a solver of symmetric systems, ``"ilu"``, which is not symmetric.
    """

    preconditions: ClassVar[bool] = True
    preconditioner: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names = tuple(name for name in NAMES if name != "ilu" or "symmetric" not in self.needs)
        check_options(self, preconditioner=optional(one_of(*names)))

    def preconditioner_of(self, A: Operator) -> Any:
        """The preconditioner of ``A``, which is given this solver's if it has none; without either what the problem knows,
        or ``None``."""
        if A.preconditioner is None and self.preconditioner is not None:
            A.preconditioner = preconditioner(self.preconditioner, A, A.like)
        return A.near if A.preconditioner is None else A.preconditioner

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        self.preconditioner_of(A)  # one for all right-hand sides
        return super().solve_many(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
