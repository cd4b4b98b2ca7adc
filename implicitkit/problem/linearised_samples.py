"""The linearisation of a system at some of its samples: from the user's function at these alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat
from implicitkit.foundation.operators import Operator, within
from implicitkit.system import System

Equations = Callable[[System, Sequence[Tensor]], Callable[[Tensor], Tensor]]


def selection(
    system: System, z: Tensor, theta: Sequence[Tensor], equations: Equations | None = None, **known: Any
) -> Callable[[Tensor], Operator | None] | None:
    r"""What makes ``dF_i/dz_i`` of some samples ``i`` an operator by itself (:meth:`Operator.selected_anew`).

    An operation of autograd takes all rows back or none, so that the residual is evaluated again, at these samples.  That is
    a selection only where a sample's equations are its own: where their products are others there, or the function fails,
    it has something with one entry a sample that is no argument, or draws numbers, or couples its samples; then there is
    none, which costs time and nothing else.

    Args:
        system, z, theta: the point ``(batch, n)``. known: what :func:`autodiff.linearise` is told.
        equations: ``(system of some samples, its theta) -> F`` of these; ``None``: their residual.

    Returns:
        ``None`` where it is not known which arguments have one row a sample, or the function draws random numbers.
    """
    if not system.can_select or system.lifted.random:
        return None
    per_row, equations_of = system.samples_per_row, equations or of_residual

    def select(samples: Tensor) -> Operator | None:
        rows = samples if per_row == 1 else (samples // per_row).unique()
        if 2 * len(rows) > len(z) // per_row:
            return None
        all_of_them = rows if per_row == 1 else _samples_of(rows, per_row)
        small, chosen = system.select(rows, [t.detach() for t in theta])
        point = z.detach().index_select(0, all_of_them)
        try:
            with compat.own_graphs():
                value, A = autodiff.linearise(equations_of(small, chosen), point, **known)
        except (RuntimeError, ValueError, IndexError):  # the whole of it is there, and goes on
            return None
        if value.shape != point.shape:
            return None
        A.weight = sum(t.numel() for t in chosen) // max(1, len(point))
        A.selected_anew(selection(small, point, chosen, equations, **known))
        return within(A, samples, all_of_them)

    return select


def of_residual(system: System, theta: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """The residual of the problem, by the state."""
    return lambda y: system.residual(y, *theta)


def _samples_of(rows: Tensor, per_row: int) -> Tensor:
    return (rows.unsqueeze(1) * per_row + torch.arange(per_row, device=rows.device)).flatten()
