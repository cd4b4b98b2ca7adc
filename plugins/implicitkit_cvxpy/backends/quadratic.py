"""Solvers of quadratic programs, which are those of ``ik.QuadraticProgram`` (polyhedral cones only)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import implicitkit as ik
from implicitkit import extend
from implicitkit_cvxpy.backends.base import Data, Found, Status, loop


def solve(data: Data, options: dict[str, Any], solver: str) -> Found:
    """Solve all samples.

    Args:
        data: of the programs. solver: ``"qp"`` (the best by size), ``"interior_point"`` or ``"daqp"``.
        options: ``tol``, ``max_steps``; for ``"daqp"`` the settings of ``daqp.solve``.
    """
    tol, steps, zero = options.get("tol", 1e-9), options.get("max_steps"), data.cones.zero
    configured = extend.get_solver(solver, **({"settings": options} if solver == "daqp" else {}))
    A, G, b, h = data.A[:, :zero], data.A[:, zero:], data.b[:, :zero], data.b[:, zero:]
    point = configured.find(extend.QPData(data.P, data.q, A, b, G, h), tol, steps or configured.default_max_steps)
    failed = (point.status == int(Status.INFEASIBLE)) | (point.status == int(Status.UNBOUNDED))
    w = torch.cat([point.z, point.y, point.lam], 1)
    return Found(torch.where(failed.unsqueeze(1) | ~w.isfinite(), 0.0, w), point.status, point.steps)


def active_rows(data: Data) -> Found:
    """Solve programs with sparse matrices by the sets of their active rows, one after another."""
    zero = data.cones.zero

    def one(P: Any, q: Any, A: Any, b: Any) -> tuple[Any, Any, int, int]:
        held = ((A[:zero], b[:zero]), (A[zero:], b[zero:]))
        equality, inequality = (part if len(part[1]) else (None, None) for part in held)
        found = ik.solve(ik.QuadraticProgram(P, torch.from_numpy(q), *equality, *inequality), on_failure="ignore")
        known = [t.numpy() for t in found.multipliers if t is not None]
        return found.value.numpy(), np.concatenate([b[:0], *known]), int(found.status), int(found.steps)

    return loop(one, data)
