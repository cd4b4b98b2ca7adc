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
    z = plain(z)
    f.keeps, point = True, _known(f, z)
    if "vector" in point:
        return point["vector"], point["leaf"]
    f.count(f.system.batch)
    vector, leaf = autodiff.recorded(lambda y: f.problem.flat_residuals(f.uncounted, y), z)
    if point.get("z") is z and {"f", "value", "residuals"} <= point.keys():
        point["vector"], point["leaf"] = vector, leaf
    return vector, leaf


def residuals_jacobian(f: Any, z: Tensor) -> Tensor:
    """The Jacobian of the residuals at ``z``, ``(batch, m, n)``, by that graph; it is formed once."""
    graph, point = residuals_graph(f, z), _known(f, plain(z))
    if point.get("vector") is not graph[0]:
        return autodiff.jacobian_of(*graph)
    if "R" not in point:
        point["R"] = autodiff.jacobian_of(*graph)
    R: Tensor = point["R"]
    return R


def lend(f: Any, other: Any, z: Tensor) -> None:
    """Tell ``other``, of the same samples, the residual at ``z``, and what is known of a fit there."""
    other.know(z, f.residual(z))
    other.lent = f.known_at(z)


def _known(f: Any, z: Tensor) -> dict[str, Any]:
    """What is known at ``z``, or was lent."""
    point: dict[str, Any] = f.known_at(z)
    return point if "vector" in point or f.lent.get("z") is not z else f.lent
