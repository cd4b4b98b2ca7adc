"""Linear solvers that take their sparse factors from another package: CHOLMOD, PARDISO.

Each says how its package factors a matrix, and nothing else.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.cholmod import definite_factors
from implicitkit.linear.factors.dense import SINGULAR
from implicitkit.linear.factors.direct import DirectSolver
from implicitkit.linear.factors.sparse import solve_with

_UNSYMMETRIC = 11  # mtype: real, unsymmetric


@dataclass(frozen=True)
class FactorsElsewhere(DirectSolver):
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

    def factorise(self, A: sp.csc_matrix) -> Any:
        """Factors of one matrix, an object with ``solve(b, trans)`` for ``b`` ``(n, k)`` and ``trans`` one of ``"N"`` and
        ``"T"``; ``None`` where there are none."""
        raise NotImplementedError(f"{type(self).__name__} has no method factorise")

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


@register_linear_solver("cholmod")
@dataclass(frozen=True)
class Cholmod(FactorsElsewhere):
    """Sparse Cholesky by CHOLMOD, for symmetric definite blocks: minima, diffusion (``pip install "implicitkit[cholmod]"``).

    Equation: ``P D^{-1/2} A D^{-1/2} P' = L L'``.  A block that is not definite is marked as not converged.
    Source: Chen, Davis, Hager & Rajamanickam (2008), "Algorithm 887: CHOLMOD".
    """

    needs: ClassVar[tuple[str, ...]] = ("symmetric",)
    package: ClassVar[str] = "cvxopt"
    module: ClassVar[str] = "cvxopt.cholmod"
    failure: ClassVar[str] = (
        'the matrix is not definite (a saddle point or a maximum), or singular; use linear_solver="sparse_lu"'
    )

    def factorise(self, A: sp.csc_matrix) -> Any:
        return definite_factors(A)


@register_linear_solver("pardiso")
@dataclass(frozen=True)
class Pardiso(FactorsElsewhere):
    """Sparse LU by MKL's PARDISO, on several threads: large grids in space (``pip install "implicitkit[pardiso]"``).

    Equation: ``P A Q = L U``, with nested dissection and supernodes, by all threads that MKL is allowed
    (``MKL_NUM_THREADS``): for large grids in space, whose factors are nearly dense.  Its analysis costs more than all of
    SuperLU's work on small systems.

    Source: Schenk & Gaertner (2004), "Solving unsymmetric sparse systems of linear equations with PARDISO", Future
    Generation Computer Systems 20(3).
    """

    package: ClassVar[str] = "pypardiso"
    module: ClassVar[str] = "pypardiso"

    def factorise(self, A: sp.csc_matrix) -> Any:
        return _Factors(self.load(), A.tocsr())


class _Factors:
    """Factors of a matrix, and of its transposed when that is first asked for: pypardiso has no solve with it."""

    def __init__(self, module: Any, A: sp.csr_matrix) -> None:
        self.module, self.sides = module, {"N": self._factored(module, A)}

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b``, or with ``"T"`` that of the transposed."""
        if trans not in self.sides:
            self.sides[trans] = self._factored(self.module, self.sides["N"][0].T.tocsr())
        A, solver = self.sides[trans]
        x: np.ndarray = solver.solve(A, np.asfortranarray(b))
        return x.reshape(b.shape)

    @staticmethod
    def _factored(module: Any, A: sp.csr_matrix) -> tuple[sp.csr_matrix, Any]:
        A.sort_indices()
        solver = module.PyPardisoSolver(mtype=_UNSYMMETRIC)
        solver.factorize(A)
        return A, solver

    def __del__(self) -> None:
        for _, solver in self.sides.values():
            solver.free_memory(everything=True)
