r"""Cholesky factors of sparse matrices by CHOLMOD, from the package cvxopt.

``P A P' = L L'`` for symmetric positive definite blocks (and for negative definite ones, by ``-A``), with an ordering
``P`` that keeps ``L`` sparse (AMD) and dense supernodes; about half of the entries and of the operations of an LU
factorisation, and no pivots to look for.  ``A`` is scaled to a diagonal of ones first, ``D^{-1/2} A D^{-1/2}``.

Source: Chen, Davis, Hager & Rajamanickam (2008), "Algorithm 887: CHOLMOD", ACM Trans. Math. Softw. 35(3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.sparse_elsewhere import FactorsElsewhere

__all__ = ["Cholmod"]


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
        import cvxopt

        diagonal = A.diagonal()
        sign = np.sign(diagonal[0]) if len(diagonal) else 1.0
        if not (sign * diagonal > 0).all():
            return None
        d = 1 / np.sqrt(np.abs(diagonal))
        lower = sp.tril(A, format="coo")
        values = sign * lower.data * d[lower.row] * d[lower.col]
        L = cvxopt.spmatrix(values, lower.row.astype(np.int64), lower.col.astype(np.int64), A.shape)
        cholmod = self.load()
        factor = cholmod.symbolic(L)
        try:
            cholmod.numeric(L, factor)
        except ArithmeticError:  # not positive definite
            return None
        return _Factors(factor, sign * d, d)


class _Factors:
    """``solve(b, trans)`` by ``L``; ``left`` and ``right``: the scales of rows, before and after."""

    def __init__(self, factor: Any, left: np.ndarray, right: np.ndarray) -> None:
        self.factor, self.left, self.right = factor, left[:, None], right[:, None]

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b``; the matrix is its own transposed."""
        import cvxopt

        x = cvxopt.matrix(np.asfortranarray(self.left * b))
        Cholmod.load().solve(self.factor, x)
        return self.right * np.array(x).reshape(b.shape)
