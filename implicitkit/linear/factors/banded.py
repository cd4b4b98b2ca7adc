"""Cholesky factors of symmetric matrices whose entries stand in a band, or may as well fill a square, by LAPACK.

Those of a narrow band take a tenth of the time of general sparse factors, dense ones of some hundred unknowns a quarter, and
both say whether the matrix is positive definite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.linalg as la

from implicitkit.linear.factors.analysis import Analysis
from implicitkit.linear.factors.ordering import Renumbered


class SymmetricBand:
    """Where the entries of symmetric matrices with one pattern stand in a band.

    Args:
        analysis: of the pattern, which has a band.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.order = analysis.order
        below = analysis.rows - analysis.columns
        self.shape = (int(below.max(initial=0)) + 1, analysis.pattern.shape[0])
        kind = np.int32 if max(math.prod(self.shape), len(below)) < 2**31 else np.int64
        self.kept = np.flatnonzero(below >= 0).astype(kind)
        self.place = analysis.columns[self.kept].astype(kind) * self.shape[0] + below[self.kept]

    def cholesky(self, data: np.ndarray) -> Any:
        """Factors of the matrix with the entries ``data``, in the order of the pattern; ``None`` where that is not positive
        definite."""
        numbers = np.zeros(math.prod(self.shape))
        numbers[self.place] = data[self.kept]
        band = numbers.reshape(self.shape, order="F")
        factor, back = la.get_lapack_funcs(("pbtrf", "pbtrs"), (band,))
        factors, info = factor(band, lower=1, overwrite_ab=1)
        if info:
            return None
        found = Cholesky(factors, back)
        return found if self.order is None else Renumbered(found, self.order)


class SymmetricSquare:
    """Where the entries of symmetric matrices with one pattern stand in a dense one.

    Args:
        rows, columns: of each entry. size: of the matrix.
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray, size: int) -> None:
        self.place, self.size = columns * size + rows, size

    def cholesky(self, data: np.ndarray) -> Any:
        """Factors of the matrix with the entries ``data``; ``None`` where that is not positive definite."""
        numbers = np.zeros(self.size**2)
        numbers[self.place] = data
        square = numbers.reshape(self.size, self.size, order="F")
        factor, back = la.get_lapack_funcs(("potrf", "potrs"), (square,))
        factors, info = factor(square, lower=1, overwrite_a=1, clean=0)
        return None if info else Cholesky(factors, back)


class Cholesky:
    """``A = L L'``, in the form that LAPACK's function to solve with it, ``back``, takes.

    Attributes:
        negative: how many eigenvalues are negative: none.
    """

    negative = 0

    def __init__(self, factors: np.ndarray, back: Any) -> None:
        self.factors, self._back = factors, back

    def solve(self, b: np.ndarray) -> np.ndarray:
        """``A x = b``, ``(n,)``."""
        x: np.ndarray = self._back(self.factors, b, lower=1)[0]
        return x
