r"""Sparse linear least squares without ``R'R``, whose condition is the square of that of ``R``.

    [ \alpha I   R ] [ s ]   [ b ]
    [ R'         0 ] [ x ] = [ 0 ]          minimises  |R x - b|,   s = (b - R x) / \alpha

by SuperLU with partial pivoting, and refinement.  With ``\alpha`` about the smallest singular value of ``R`` the condition
is that of ``R``, within a small factor; what is smaller than the square root of the rounding, times the largest, is not what
factors find that have not been given a rank.

Source: Björck, *Numerical Methods for Least Squares Problems* (1996), section 2.5.3; Arioli, Duff & de Rijk (1989), Numer.
Math. 55, for the choice of ``\alpha``.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.factors.ordering import superlu

_ALPHA = 1e-7  # of the norm of R, its columns of length one
_SWEEPS = 3


def least_squares(R: sp.csr_matrix, D: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The minimiser of ``|R x - b|``, its columns in units of ``1 / D``; NaN where it is not found.

    Args:
        R: ``(m, n)``. D: ``(n,)``, the sizes of its columns, not zero. b: ``(m,)``.
    """
    m, n = R.shape
    A = R @ sp.diags_array(1 / D)
    rows = np.sqrt(np.asarray(A.multiply(A).sum(0)).max(initial=0.0)) or 1.0
    K = sp.csc_matrix(sp.bmat([[_ALPHA * rows * sp.identity(m), A], [A.T, None]]))
    if not np.isfinite(K.data).all():
        return np.full(n, np.nan)
    lu = superlu(K, 1.0, permc_spec="COLAMD", options={"SymmetricMode": False}, panel_size=None, relax=None)
    if lu is None:
        return np.full(n, np.nan)
    rhs = np.r_[b, np.zeros(n)]
    x = lu.solve(rhs)
    for _ in range(_SWEEPS):
        x = x + lu.solve(rhs - K @ x)
    found: np.ndarray = x[m:] / D
    return found
