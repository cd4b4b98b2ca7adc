"""SCS: operator splitting, for large programs at low accuracy (O'Donoghue 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from implicitkit import extend
from implicitkit_cvxpy.backends.base import Data, Found, Status, loop
from implicitkit_cvxpy.cones.form import Cones
from implicitkit_cvxpy.storage import DENSE


def _lower_by_columns(cones: Cones) -> Any:
    """SCS takes the lower triangle by columns where we have the upper one: our row for each row of SCS."""
    order, row = np.arange(cones.size), cones.linear + sum(cones.soc)
    for k in cones.psd:
        place = {(i, j): row + j * (j + 1) // 2 + i for j in range(k) for i in range(j + 1)}
        order[row : row + k * (k + 1) // 2] = [place[(j, i)] for j in range(k) for i in range(j, k)]
        row += k * (k + 1) // 2
    return order


def solve(data: Data, options: dict[str, Any]) -> Found:
    """Solve each sample; ``options`` as for ``scs.SCS``, which wants a row: ``0 x <= 1`` where there is none."""
    import scs

    settings = {"verbose": False, "eps_abs": 1e-7, "eps_rel": 1e-7, "max_iters": 100_000, **options}
    cones = data.cones
    if not cones.size:
        row = data._replace(
            A=data.A.new_zeros(len(data.q), 1, data.q.shape[1]),
            b=torch.ones_like(data.q[:, :1]),
            cones=Cones(nonneg=1),
            A_held=DENSE,
        )
        found = solve(row, options)
        return found._replace(w=found.w[:, :-1])
    order = _lower_by_columns(cones)
    form: dict[str, Any] = {"z": cones.zero, "l": cones.nonneg, "q": list(cones.soc), "s": list(cones.psd)}
    form |= {"ep": cones.exp, "p": list(cones.power)}

    def one(P: Any, q: Any, A: Any, b: Any) -> tuple[Any, Any, int, int]:
        problem = {"P": sp.triu(sp.csc_matrix(P), format="csc"), "A": sp.csc_matrix(A[order]), "b": b[order], "c": q}
        solution = scs.SCS(problem, form, **settings).solve()
        info = solution["info"]
        status = extend.SCS_ENDS.get(info["status_val"], Status.STALLED)
        if "inaccurate" in info["status"] and status == Status.CONVERGED:
            status = Status.INACCURATE
        if status in (Status.INFEASIBLE, Status.UNBOUNDED):
            return None, None, int(status), info["iter"]
        y = np.empty_like(solution["y"])
        y[order] = solution["y"]
        return solution["x"], y, int(status), info["iter"]

    return loop(one, data)
