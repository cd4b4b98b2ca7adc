"""Sparse factors from another package: what its linear solver has to say, and nothing else."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import scipy.sparse as sp
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.factors.dense import SINGULAR
from implicitkit.linear.factors.sparse import solve_with
from implicitkit.linear.iterative.cycles import in_working_precision

__all__ = ["FactorsElsewhere"]


@dataclass(frozen=True)
class FactorsElsewhere(LinearSolver):
    """Base class of linear solvers that factor sparse blocks by another package.

    As ``sparse_lu``: the matrix is found by the colouring of its pattern (the problem's ``jac_sparsity=``, or found
    automatically for 128 unknowns and more), solutions are refined and judged by products with the operator itself.

    Attributes:
        package: what pip installs. module: what is imported. failure: why a block has no factors.

    Raises:
        ImportError: the package is not installed.
        CapabilityError: the matrix has no sparsity pattern.
    """

    package: ClassVar[str] = ""
    module: ClassVar[str] = ""
    failure: ClassVar[str] = SINGULAR
    matrix_free: ClassVar[bool] = False
    factors: ClassVar[bool] = True

    def factorise(self, A: sp.csc_matrix) -> Any:
        """Factors of one matrix, an object with ``solve(b, trans)`` for ``b`` ``(n, k)`` and ``trans`` one of ``"N"`` and
        ``"T"``; ``None`` where there are none."""
        raise NotImplementedError(f"{type(self).__name__} has no method factorise")

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        return self.solve_many(A, b.unsqueeze(0), rtol=rtol, atol=atol, max_steps=max_steps)

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        self.load()
        blocks = A.sparse()
        if blocks is None:
            raise CapabilityError(
                f"linear solver {self.name!r} factors sparse matrices, and none of the Jacobian's zeros are known: say "
                "jac_sparsity= (a matrix, or bandwidths) if it is sparse, or use 'lu', 'gmres'"
            )
        found = solve_with(blocks.factored(self.factorise), A, b, rtol=rtol, atol=atol)
        return found._replace(reason=self.failure) if found.reason == SINGULAR else found

    @classmethod
    def load(cls) -> Any:
        """The package's module."""
        try:
            return importlib.import_module(cls.module)
        except ImportError as error:
            raise ImportError(
                f'linear solver {cls.name!r} needs the package {cls.package}: pip install "implicitkit[{cls.name}]"; '
                "'sparse_lu' needs nothing more"
            ) from error
