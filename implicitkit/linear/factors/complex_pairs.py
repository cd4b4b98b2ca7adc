r"""Factors of real matrices that are complex ones: half the unknowns, half the operations, half the memory.

An equation in complex unknowns is solved in their real and imaginary parts, one beside the other.  Where it is holomorphic
its Jacobian consists of blocks

    [ a  -b ]
    [ b   a ]      which is the complex number  a + ib  (Cauchy & Riemann's equations),

and the matrix is factored as the complex one that it is.  Its transposed is that one's conjugate transposed, and
``C^H x = b`` is ``C^T conj(x) = conj(b)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

_SMALLEST = 256  # unknowns from which looking pays
_SAME = 16 * np.finfo(np.float64).eps  # rounding of the difference of two equal entries, in rows of size one


class Pairs:
    """A pattern whose blocks of two may be complex numbers.

    Args:
        pattern: of the complex matrix, in compressed rows. place: of each real entry among the complex ones. corner: which
            of the four it is, row by row.
    """

    def __init__(self, pattern: sp.csr_matrix, place: np.ndarray, corner: np.ndarray) -> None:
        self.pattern = pattern
        self._where = 4 * place + corner

    def entries(self, values: np.ndarray) -> np.ndarray | None:
        """The complex entries, in the order of the pattern; ``None`` where blocks are no complex numbers.

        Args:
            values: ``(nnz,)``, of the real matrix, its rows scaled to size one.
        """
        blocks = np.zeros(4 * self.pattern.nnz)
        blocks[self._where] = values
        left, up, low, right = blocks.reshape(-1, 4).T
        if max(np.abs(left - right).max(initial=0.0), np.abs(up + low).max(initial=0.0)) > _SAME:
            return None
        found: np.ndarray = (left + right) / 2 + 0.5j * (low - up)
        return found


def pairs_of(pattern: sp.csr_matrix) -> Pairs | None:
    """The pairs of unknowns ``(0, 1), (2, 3), ...``, where the pattern treats both of each alike; else ``None``."""
    n = pattern.shape[0]
    if n % 2 or n < _SMALLEST:
        return None
    rows, columns = np.repeat(np.arange(n, dtype=np.int64), np.diff(pattern.indptr)), pattern.indices.astype(np.int64)
    keys, corner = (rows // 2) * (n // 2) + columns // 2, 2 * (rows % 2) + columns % 2
    places, place = np.unique(keys, return_inverse=True)
    there = np.zeros((len(places), 4), dtype=bool)
    there[place, corner] = True
    if not (np.array_equal(there[:, 0], there[:, 3]) and np.array_equal(there[:, 1], there[:, 2])):
        return None
    pointer = np.searchsorted(places, np.arange(n // 2 + 1, dtype=np.int64) * (n // 2))
    halved = sp.csr_matrix((np.ones(len(places), dtype=bool), places % (n // 2), pointer), shape=(n // 2, n // 2))
    return Pairs(halved, place, corner)


class AsReal:
    """Factors of a complex matrix, for systems in real and imaginary parts."""

    def __init__(self, factors: Any) -> None:
        self.factors = factors

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b``, or with ``"T"`` that of the transposed; ``(n,)`` or ``(n, k)``."""
        parts = b.reshape(len(b) // 2, 2, -1)
        given = parts[:, 0] + 1j * (parts[:, 1] if trans == "N" else -parts[:, 1])
        x = np.asarray(self.factors.solve(given, trans)).reshape(given.shape)
        imaginary = x.imag if trans == "N" else -x.imag
        found: np.ndarray = np.stack([x.real, imaginary], axis=1).reshape(b.shape)
        return found
