r"""Cholesky factors of sparse symmetric definite matrices by CHOLMOD, where the package cvxopt is there.

``P D^{-1/2} A D^{-1/2} P' = L L'``, and of negative definite ones that of ``-A``, with an ordering ``P`` that keeps ``L``
sparse (AMD) and dense supernodes; about half of the entries and of the operations of an LU factorisation, and no pivots to
look for.  ``A`` is scaled to a diagonal of ones first.

Source: Chen, Davis, Hager & Rajamanickam (2008), "Algorithm 887: CHOLMOD", ACM Trans. Math. Softw. 35(3).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import scipy.sparse as sp

_SAME = 8.0  # units of rounding that entries across the diagonal may differ by, of those on it


@functools.cache
def is_installed() -> bool:
    """Is CHOLMOD there?"""
    return importlib.util.find_spec("cvxopt") is not None


def is_symmetric(A: sp.csc_matrix) -> bool:
    """Is ``A`` symmetric up to rounding, and its diagonal of one sign, as that of a definite matrix is?"""
    diagonal = A.diagonal()
    if not (len(diagonal) and (diagonal * diagonal[0] > 0).all()):
        return False
    d = 1 / np.sqrt(np.abs(diagonal))
    across = abs(A - A.T).tocoo()
    left = across.data * d[across.row] * d[across.col]
    return bool(left.max(initial=0.0) <= _SAME * np.finfo(np.float64).eps)


def definite_factors(A: sp.csc_matrix) -> Any:
    """Factors of ``A``, an object with ``solve(b, trans)``, ``b`` ``(n, k)``; ``None`` where it is not definite.  Only the
    lower triangle is looked at.

    Raises:
        ImportError: cvxopt is not installed.
    """
    import cvxopt
    from cvxopt import cholmod

    diagonal = A.diagonal()
    sign = np.sign(diagonal[0]) if len(diagonal) else 1.0
    if not (sign * diagonal > 0).all():
        return None
    d = 1 / np.sqrt(np.abs(diagonal))
    lower = sp.tril(A, format="coo")
    values = sign * lower.data * d[lower.row] * d[lower.col]
    L = cvxopt.spmatrix(values, lower.row.astype(np.int64), lower.col.astype(np.int64), A.shape)
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
        from cvxopt import cholmod

        x = cvxopt.matrix(np.asfortranarray(self.left * b))
        cholmod.solve(self.factor, x)
        return self.right * np.array(x).reshape(b.shape)
