"""Clarabel: interior point for every cone, with the quadratic objective as it is (Goulart & Chen 2024)."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from implicitkit import extend
from implicitkit_cvxpy.backends.base import Data, Found, Status, loop
from implicitkit_cvxpy.cones.form import Cones


def _cones(cones: Cones) -> list[Any]:
    import clarabel

    parts: list[Any] = []
    if cones.zero:
        parts.append(clarabel.ZeroConeT(cones.zero))
    if cones.nonneg:
        parts.append(clarabel.NonnegativeConeT(cones.nonneg))
    parts += [clarabel.SecondOrderConeT(k) for k in cones.soc]
    parts += [clarabel.PSDTriangleConeT(k) for k in cones.psd]
    parts += [clarabel.ExponentialConeT() for _ in range(cones.exp)]
    parts += [clarabel.PowerConeT(a) for a in cones.power]
    return parts


def solve(data: Data, options: dict[str, Any]) -> Found:
    """Solve each sample; ``options`` are fields of ``clarabel.DefaultSettings``."""
    import clarabel

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    for name, value in options.items():
        setattr(settings, name, value)
    cones = _cones(data.cones)

    def one(P: Any, q: Any, A: Any, b: Any) -> tuple[Any, Any, int, int]:
        upper = sp.triu(sp.csc_array(P), format="csc")
        solution = clarabel.DefaultSolver(upper, q, sp.csc_array(A), b, cones, settings).solve()
        status = extend.CLARABEL_ENDS.get(str(solution.status), Status.STALLED)
        if status in (Status.INFEASIBLE, Status.UNBOUNDED):
            return None, None, int(status), solution.iterations
        return np.asarray(solution.x), np.asarray(solution.z), int(status), solution.iterations

    return loop(one, data)
