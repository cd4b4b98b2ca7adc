"""Is the Hessian of a program sparse but for a few numbers, that is for a part of low rank?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_FEW_ROWS = 64  # constraints, each of which takes a product, where the Hessian has a low-rank part


def has_low_rank(f: Any, w: Tensor) -> bool:
    """Is the Hessian of a program's Lagrangian sparse but for a few numbers, and are there few constraints?  ``f``: the
    :class:`~implicitkit.solver.evaluations.Evaluations`. w: states and multipliers, ``(batch, n + m)``."""
    n = f.problem.size
    if w.shape[1] - n > _FEW_ROWS:
        return False
    stationarity = lambda y: f.problem.flat_stationarity(f.uncounted, y)  # noqa: E731
    found = f.system.sparsity("hessian").find_bordered(stationarity, w[:, :n])
    return found is not None and not len(found.alone)
