"""The order of a derivative, and what those of a high one lack, said when one is taken.

A problem whose equations have right derivatives up to some order only (a trajectory across kinks) says so
(:attr:`~implicitkit.problem.base.Problem.orders`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from implicitkit.foundation.errors import ConvergenceWarning, warn


def next_order(request: Any) -> Any:
    """A request whose linear solve is differentiated, for those that this takes; once in a solve and order it is said what
    derivatives lack."""
    problem = request.system.problem
    if problem.orders == float("inf"):
        return request
    order, record = request.order + 1, request.record
    if order > max(problem.orders, record.told) and request.on_failure != "ignore":
        record.told = order
        warn(problem.beyond, ConvergenceWarning)
    return replace(request, order=order)
