"""What a linear solver is given, and what it gives back.

Every derivative of a solution is the solution of a linear system with the Jacobian of the residual,
``A u = b`` with ``A = dF/dz`` or its transpose, one independent block per sample.  A linear solver sees
that system as an :class:`Operator` and plain ``(batch, n)`` matrices: no pytrees, no autograd, no transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from implicitkit.linear.blocks import Structure

__all__ = ["LinearSolution", "LinearSolver", "Operator"]

MatVec = Callable[[Tensor], Tensor]


class Operator:
    r"""The block-diagonal matrix ``A = diag(A_1, ..., A_batch)``, each block ``n x n``, by its products.

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
    """

    __slots__ = ("_dense", "_matrix", "batch", "fixed_point", "like", "mv", "rmv", "size", "structure", "symmetric")

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
        structure: Structure | None = None,
    ) -> None:
        self.mv, self.rmv, self._dense = mv, rmv, dense
        self.batch, self.size, self.like = batch, size, like
        self.symmetric, self.fixed_point, self.structure = symmetric, fixed_point, structure
        self._matrix: Tensor | None = None

    def dense(self) -> Tensor:
        """All blocks as one tensor of shape ``(batch, n, n)``, formed once."""
        if self._matrix is None:
            self._matrix = self._dense()
        return self._matrix

    @property
    def T(self) -> Operator:
        """The transposed operator; it shares the matrix if that has been formed."""
        return Operator(
            self.rmv,
            self.mv,
            lambda: self.dense().mT,
            batch=self.batch,
            size=self.size,
            like=self.like,
            symmetric=self.symmetric,
            fixed_point=self.fixed_point,
            structure=None if self.structure is None else self.structure.T,
        )


class LinearSolution(NamedTuple):
    """The answer of a linear solver, one entry per sample.

    ``x``: ``(batch, n)``.  ``residual_norm``: ``(batch,)``, ``|A x - b|_2``.  ``steps``: ``(batch,)`` int64, products
    with ``A`` or ``A^T`` that the sample needed.  ``converged``: ``(batch,)`` bool.  ``reason``: one clause for people,
    used when something did not converge ("the matrix is singular", "stagnated after 20 restarts").
    """

    x: Tensor
    residual_norm: Tensor
    steps: Tensor
    converged: Tensor
    reason: str = ""


@dataclass(frozen=True)
class LinearSolver:
    """Base class of linear solvers: a frozen dataclass of options with one method, :meth:`solve`.

    ``needs`` names the structure the method relies on: ``"symmetric"`` or ``"fixed_point"``.  An approximate
    method (``exact = False``: a truncated series) is not judged by its residual.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = True
    matrix_free: ClassVar[bool] = True

    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        """Solve ``A x = b``; per sample ``|A x - b| <= atol + rtol |b|``.

        Args:
            A: the operator. b: shape ``(batch, n)``.
            rtol, atol: tolerances per sample. max_steps: products allowed; ``None`` is the method's own default.

        A sample that fails (singular block, NaN) must not disturb the others, and nothing is raised for it: it is
        marked in ``converged``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solve method")
