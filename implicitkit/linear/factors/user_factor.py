"""A user's own factorisation of ``dF/dz``, as something that the derivative's linear systems can use.

It is never believed: solutions are refined and judged by products with the Jacobian, and where that does not help the
factorisation is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.factors.direct import Verdict


class UserFactor:
    """One factorisation a sample.

    Args:
        each: for every sample an object with ``solve(b, trans)``, ``trans`` one of ``"N"`` and ``"T"`` (SciPy's ``splu``),
            or a pair of functions ``(b -> A^-1 b, b -> A^-T b)``; ``b`` is an array ``(n,)``, unknowns in the order of the
            flattened leaves of ``z``.

    Raises:
        TypeError: one of them is neither.
    """

    def __init__(self, each: Sequence[Any], transposed: bool = False) -> None:
        for one in each:
            pair = isinstance(one, (tuple, list)) and len(one) == 2 and all(callable(f) for f in one)
            if not pair and not callable(getattr(one, "solve", None)):
                raise TypeError(
                    "Found(factorisation=) takes an object with solve(b, trans), as scipy.sparse.linalg.splu returns, or a "
                    f"pair of functions (solve, solve_transposed); got {type(one).__name__}"
                )
        self.each, self.transposed = tuple(each), transposed
        self.factor = Verdict(torch.ones(len(self.each), dtype=torch.bool, device="cpu"))

    @property
    def T(self) -> UserFactor:
        """The transposed."""
        return UserFactor(self.each, not self.transposed)

    def solve(self, b: Tensor) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``."""
        rhs = array(b)
        columns = rhs[:, :, None] if b.ndim == 2 else rhs
        x = np.empty(columns.shape)
        for i, one in enumerate(self.each):
            for j in range(columns.shape[2]):
                x[i, :, j] = self._solve(one, np.ascontiguousarray(columns[i, :, j]))
        return torch.from_numpy(x[:, :, 0] if b.ndim == 2 else x).to(b)

    def size(self, x: Tensor) -> Tensor:
        """Zeros: what is added up in a product with ``A`` is not known."""
        return torch.zeros_like(x)

    def _solve(self, one: Any, b: np.ndarray) -> np.ndarray:
        if isinstance(one, (tuple, list)):
            return np.asarray(one[int(self.transposed)](b), dtype=np.float64)
        return np.asarray(one.solve(b, "T" if self.transposed else "N"), dtype=np.float64)
