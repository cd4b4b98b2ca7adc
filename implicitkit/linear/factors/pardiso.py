r"""LU factors of sparse matrices by MKL's PARDISO, from the package pypardiso.

``P A Q = L U`` with nested dissection and supernodes, by all threads that MKL is allowed (``MKL_NUM_THREADS``): for large
grids in space, whose factors are nearly dense.  Its analysis costs more than all of SuperLU's work on small systems.

Source: Schenk & Gaertner (2004), "Solving unsymmetric sparse systems of linear equations with PARDISO", Future Generation
Computer Systems 20(3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.sparse_elsewhere import FactorsElsewhere

__all__ = ["Pardiso"]

_UNSYMMETRIC = 11  # mtype: real, unsymmetric


@register_linear_solver("pardiso")
@dataclass(frozen=True)
class Pardiso(FactorsElsewhere):
    """Sparse LU by MKL's PARDISO, on several threads: large grids in space (``pip install "implicitkit[pardiso]"``).

    Equation: ``P A Q = L U``.  Source: Schenk & Gaertner (2004).
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
