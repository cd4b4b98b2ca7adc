"""The batched interior-point method of implicitkit: the whole batch at once, on any device (polyhedral cones only)."""

from __future__ import annotations

from typing import Any

import torch

import implicitkit as ik
from implicitkit_cvxpy.backends.base import Data, Found, Status

__all__ = ["solve"]


def solve(data: Data, options: dict[str, Any]) -> Found:
    """Solve all samples; ``options`` as for :func:`implicitkit.solve_qp`: ``tol``, ``max_steps``."""
    zero = data.cones.zero
    A, G = data.A[:, :zero], data.A[:, zero:]
    b, h = data.b[:, :zero], data.b[:, zero:]
    x, y, lam, status = ik.solve_qp(data.P, data.q, A, b, G, h, **options)
    failed = (status == int(Status.INFEASIBLE)) | (status == int(Status.UNBOUNDED))
    w = torch.cat([x, y, lam], 1)
    w = torch.where(failed.unsqueeze(1) | ~w.isfinite(), 0.0, w)
    return Found(w, status, torch.zeros_like(status))
