"""``f`` where a part differentiates it, or maps it over points, itself; and what to say of a point that is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, graph
from implicitkit.foundation.faithful import unfused
from implicitkit.sparsity.patterns import SMALLEST

MOST = 1 << 16  # numbers of a state whose graphs of two points may be there at once


def with_graph(f: Any, kernel: Callable[[Tensor], Tensor], z: Tensor, name: str) -> dict[str, Tensor]:
    """``"f"``, ``"residual"``, ``"value"`` or ``"residuals"`` at ``z``, and what comes along with it, each with its graph at
    the levels of transforms at which ``z`` is; ``f``: the :class:`~implicitkit.solver.evaluations.Evaluations`."""
    problem = f.problem
    if f.of_map:
        image = kernel(z)
        return {"f": image, "residual": image - z}
    if name == "residuals":
        return {name: problem.flat_residuals(kernel, z)}
    if name == "value":
        return {name: problem.flat_objective(kernel, z)}
    if f.of_gradient:
        value, gradient = autodiff.gradient(lambda y: problem.flat_objective(kernel, y), z)
        residual = problem.flat_residual(kernel, z) if f.kind.returns_state else gradient
        return {"value": value, "f": gradient, "residual": residual}
    residual = problem.flat_residual(kernel, z)
    return {"f": residual, "residual": residual}


def may_keep_graphs(z: Tensor) -> bool:
    """May the graphs of two points ``(batch, n)`` be there at once, so that the one tried last serves the next step: are
    there few unknowns, and no more numbers than calls cost?"""
    return z.shape[1] < SMALLEST and z.numel() <= MOST


@contextlib.contextmanager
def kept_graphs(f: Any, wanted: bool) -> Iterator[None]:
    """Inside, ``f`` keeps the graph of its gradient at the points that a method tries."""
    f.linearises = wanted
    try:
        with unfused() if wanted else contextlib.nullcontext():
            yield
    finally:
        f.linearises = False


def slope(point: dict[str, Any], end: Tensor, cotangent: Tensor, kept: bool, twice: bool) -> Tensor | None:
    """The gradient by the leaf of a ``point``, whose graph is ``kept``; asked for ``twice``, with a graph of its own, which
    is then known of the point, if there is one to be had."""
    leaf = point["leaf"]
    if twice:
        try:
            (g,) = graph.pulled(end, (leaf,), cotangent, create_graph=True)
            if g is not None:
                point["made"] = g, leaf
                return g.detach()
        except RuntimeError as error:
            if not autodiff.lacks_second_derivative(error):
                raise
    return graph.pulled(end, (leaf,), cotangent, retain_graph=kept)[0]


def curvature(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The second derivative of one equation in one unknown, ``(batch, 1)``, without a graph."""

    def slope(y: Tensor) -> Tensor:
        out, pullback = autodiff.vjp(function, y)
        return pullback(torch.ones_like(out))[0]

    with torch.enable_grad():
        return autodiff.vjp(slope, z)[1](torch.ones_like(z))[0].detach()


def plain(z: Any) -> Any:
    """``z``, where a Jacobian is asked for, which has no graph.

    Raises:
        TypeError: ``z`` is differentiated, or mapped by ``torch.vmap``: nothing would be known of it in what comes out.
    """
    if isinstance(z, Tensor) and compat.tracked(z):
        raise TypeError(
            "Jacobians and products with them (linearize, jacobian, jvp, residuals_jacobian, second) are values without a "
            "graph in z: for derivatives of them, and under vmap, use the transforms of torch.func on f itself, as in "
            "torch.func.jacrev(f)(z)"
        )
    return z


def refuse(f: Any, z: Any) -> None:
    """Say what is wrong with a point at which ``f`` has raised an error, if it is no point of the problem.

    Raises:
        TypeError: it is no tensor. ValueError: it is one of another shape, dtype or device.
    """
    like, shape = f.system.layout, (f.batch, f.size)
    asked = f"f takes a tensor of shape (batch, n) = {shape}, {like.dtype} on {like.device}"
    if not isinstance(z, Tensor):
        raise TypeError(f"{asked}; got {type(z).__name__}")
    if (tuple(z.shape), z.dtype, z.device) != (shape, like.dtype, like.device):
        raise ValueError(
            f"{asked}; got {tuple(z.shape)}, {z.dtype} on {z.device}. To evaluate it at several points: "
            "torch.vmap(f)(points)"
        )


def none_of(f: Any, name: str) -> AttributeError:
    """What to raise where ``f`` has no such thing."""
    return AttributeError(
        f"f.{name}: there is none where {f.solves!r} is solved; a solver registered with "
        'solves="minimise" has f.value, one with solves="least_squares" f.residuals'
    )
