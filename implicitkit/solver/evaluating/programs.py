"""What is known of a program at a point: optimality conditions, their derivative, objective and constraints.

What a solver of programs needs besides, it asks ``problem`` for, with the kernel of ``f``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat
from implicitkit.foundation.operators import Operator

_FEW_ROWS = 64  # constraints, each of which takes a product, where the Hessian has a low-rank part


def compute(f: Any, point: dict[str, Any], name: str) -> None:
    """``"values"``, or ``"residual"`` and all that comes with it, at a point; ``f``: the
    :class:`~implicitkit.solver.evaluations.Evaluations`."""
    z, problem, fits = point["z"], f.problem, f.fits
    if name == "values":
        point[name] = f.kernel(z).detach() if fits is None else fits.at(z).value.unsqueeze(1)
        return
    limits = f.limits(z)  # bounds are no function of the user's: their natural map is not counted
    if fits is not None:
        saddle = fits.at(z).slope
    elif f.keeps:
        saddle = linearised(f, point)[0]
    elif f.graphs and not compat.transforms_active():
        saddle = _with_graph(f, point)
    else:
        saddle = problem.flat_saddle(_noting(f, point), z)
    point["residual"] = point["f"] = problem.conditions(f.uncounted, z, saddle, limits).detach()


def _with_graph(f: Any, point: dict[str, Any]) -> Tensor:
    """``(dL/dz, constraints)`` where a method begins, or has used the graph of the last point: this one is kept, until
    another is looked at."""
    f.graphs, z, of = False, point["z"], weakref.ref(f)  # which holds the point
    leaf = z.detach().requires_grad_()
    with torch.enable_grad():
        known = autodiff.vjp(lambda w: of().kernel(w), leaf)  # type: ignore[union-attr]
    point.setdefault("values", known[0].detach())
    point["first"] = leaf, known
    with torch.no_grad():
        found: Tensor = f.problem.flat_saddle(f.kernel, z, known)
    return found


def linearised(f: Any, point: dict[str, Any]) -> tuple[Tensor, Operator]:
    """``(dL/dz, constraints)``, ``(batch, n + m)``, and its symmetric derivative, kept at the point."""
    if "saddle" not in point:
        made, first = None, point.pop("first", None)
        if first is not None:
            leaf, known = first
            with torch.enable_grad():
                made = f.problem.saddle_of(leaf, *known), leaf
        equations = lambda w: f.problem.flat_saddle(_noting(f, point), w)  # noqa: E731
        point["saddle"] = autodiff.linearise(equations, point["z"], symmetric=True, made=made)
    out, A = point["saddle"]
    return out.detach(), A


def rounded(f: Any, w: Tensor) -> Tensor:
    """Which constraints are not met by no more than ``eps |J| |z|``, as where all that they add up is rounded,
    ``(batch, n + m)``; by as many products as there are, of the graph at ``w``, and nothing where that is gone."""
    n, found = f.problem.size, torch.zeros_like(w, dtype=torch.bool)
    known = f.known_at(w).get("first") if 0 < w.shape[1] - n <= _FEW_ROWS else None
    if known is not None:
        out, pullback = known[1]
        J = autodiff.matrix(lambda e: pullback(e)[0], out.shape[1], out)[:, 1:, :n].detach()
        size = (J.abs() @ w[:, :n].abs().unsqueeze(2)).squeeze(2)
        found[:, n:] = f.residual(w)[:, n:].abs() <= torch.finfo(w.dtype).eps * size
    return found


def _noting(f: Any, point: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The kernel of ``f``, of which the first call is at this point: what it gives there is noted."""

    def kernel(w: Tensor) -> Tensor:
        out: Tensor = f.kernel(w)
        point.setdefault("values", out.detach())
        return out

    return kernel


def has_low_rank(f: Any, w: Tensor) -> bool:
    """Is the Hessian of a program's Lagrangian sparse but for a few numbers, and are there few constraints?  ``f``: the
    :class:`~implicitkit.solver.evaluations.Evaluations`. w: states and multipliers, ``(batch, n + m)``."""
    n = f.problem.size
    if w.shape[1] - n > _FEW_ROWS:
        return False
    stationarity = lambda y: f.problem.flat_stationarity(f.uncounted, y)  # noqa: E731
    found = f.system.sparsity("hessian").find_bordered(stationarity, w[:, :n])
    return found is not None and not len(found.alone)
