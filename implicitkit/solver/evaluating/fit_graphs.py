"""The residual vector of a fit with its graph, and its Jacobian, at a point where somebody has them already."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.solver.evaluating.differentiated import plain


def residuals_graph(f: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    """The residuals at ``z`` with their graph, and the point that it leads to: those of that point if they are there, or
    were lent, else from one evaluation; ``f``: the :class:`~implicitkit.solver.evaluations.Evaluations`."""
    if f.fits is not None:
        graph: tuple[Tensor, Tensor] = f.fits.at(z).graph
        return graph
    return _recorded(f, z)[:2]


def residuals_jacobian(f: Any, z: Tensor) -> Tensor:
    """The Jacobian of the residuals at ``z``, ``(batch, m, n)``, by that graph; it is formed once."""
    if f.fits is not None:
        return autodiff.jacobian_of(*f.fits.at(z).graph)
    vector, leaf, point = _recorded(f, z)
    R: Tensor | None = point.get("R")
    if R is None:
        R = autodiff.jacobian_of(vector, leaf)
        if "vector" in point:
            point["R"] = R
    return R


def _recorded(f: Any, z: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The graph, and what is known at ``z``, or was lent; that keeps the graph if it has kept all else."""
    point = f.known_at(z) or {"z": plain(z)}  # what is remembered is plain
    point = point if "vector" in point or f.lent.get("z") is not z else f.lent
    f.keeps = True
    if "vector" in point:
        return point["vector"], point["leaf"], point
    f.count(f.system.batch)
    vector, leaf = autodiff.recorded(lambda y: f.problem.flat_residuals(f.uncounted, y), z)
    if point.get("z") is z and {"f", "value", "residuals"} <= point.keys():
        point["vector"], point["leaf"] = vector, leaf
    return vector, leaf, point


def lend(f: Any, other: Any, z: Tensor) -> None:
    """Tell ``other``, of the same samples, the residual at ``z``, and what is known of a fit there."""
    other.know(z, f.residual(z))
    other.lent = f.known_at(z)
