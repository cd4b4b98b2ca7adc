"""DAQP: dual active set for small strictly convex quadratic programs; exact (Arnstroem, Bemporad & Axehill 2022)."""

from __future__ import annotations

from typing import Any

import numpy as np

from implicitkit_cvxpy.backends.base import Data, Found, Status, loop

__all__ = ["solve"]

_STATUS = {1: Status.CONVERGED, 2: Status.INACCURATE, -1: Status.INFEASIBLE, -3: Status.UNBOUNDED, -4: Status.MAX_STEPS}


def solve(data: Data, options: dict[str, Any]) -> Found:
    """Solve each sample (polyhedral cones only); ``options`` as for ``daqp.solve``."""
    import daqp

    m, zero = data.b.shape[1], data.cones.zero
    sense = np.zeros(m, dtype=np.int32)
    sense[:zero] = 5  # equalities
    below = np.full(m, -1e30)

    def one(P: Any, q: Any, A: Any, b: Any) -> tuple[Any, Any, int, int]:
        lower = below if not zero else np.concatenate([b[:zero], below[zero:]])
        x, _, flag, info = daqp.solve(P, q, A, b, lower, sense, **options)
        status = _STATUS.get(flag, Status.STALLED)
        if status in (Status.INFEASIBLE, Status.UNBOUNDED):
            return None, None, int(status), info["iterations"]
        return x, np.asarray(info["lam"]), int(status), info["iterations"]

    return loop(one, data)
