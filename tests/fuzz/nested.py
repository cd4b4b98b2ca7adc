"""Solves inside solves: every kind inside every kind, and three deep.

Each inner solve finds ``y = w x - 0.2 z`` where the outer one asks for it; it captures everything, or is given it.  So the
outer solutions are quotients of ``x`` and ``w``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .rows import LINEAR, Row, Setting

__all__ = ["NESTED"]

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]


def _target(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return w * x - 0.2 * z


def _by_root(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    start = torch.zeros_like(z)
    return ik.root(lambda y, z, x, w: 2 * y - 2 * _target(z, x, w), start, (z, x, w)).value


def _by_map(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return ik.fixed_point(lambda y: 0.4 * y + 0.6 * _target(z, x, w), torch.zeros_like(z)).value


def _by_minimum(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return ik.argmin(lambda y, z: (y - _target(z, x, w)).square().sum(), torch.zeros_like(z), (z,)).value


def _by_squares(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """With residuals that do not vanish."""
    return ik.least_squares(lambda y, t: (y - t + 0.3, y - t - 0.3), torch.zeros_like(z), (_target(z, x, w),)).value


def _by_rest(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return ik.steady_state(lambda y, x, w: _target(z, x, w) - y, torch.zeros_like(z), (x, w)).value


def _by_bounds(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """At its lower bound."""
    low = _target(z, x, w)
    return ik.argmin(lambda y: 0.5 * (y - low + 1).square().sum(), torch.ones_like(z), bounds=(low, None)).value


def _by_constraint(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    condition = ik.Equality(lambda y: y - _target(z, x, w))
    return ik.argmin(lambda y: 0.5 * y.square().sum(), torch.zeros_like(z), constraints=[condition]).value


def _by_program(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    one = torch.eye(z.shape[-1], dtype=z.dtype)
    return ik.solve(ik.QuadraticProgram(one, -_target(z, x, w), G=one, h=torch.full_like(z, 9.0))).value


def _by_path(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The end of a path that falls by half while time goes by."""
    t = torch.tensor([0.0, 1.0], dtype=z.dtype)
    fall = ik.InitialValue(lambda t, y: -0.5 * y / (1 - 0.5 * t), t, steps=2)
    return 2 * ik.solve(fall, _target(z, x, w)).value[-1]


def _by_steps(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Along this path, which is straight, by explicit steps, which are exact there."""
    fall = ik.InitialValue(lambda t, y: -0.5 * y / (1 - 0.5 * t), (0.0, 1.0))
    return 2 * ik.solve(fall, _target(z, x, w)).value[-1]


def _by_graph(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    joint = ik.compose({"a": (lambda a, t: 0.5 * a + 0.25 * t, "t"), "b": (lambda b, a: 0.5 * b + a, "a")}, output="b")
    start = {"a": torch.zeros_like(z), "b": torch.zeros_like(z)}
    return ik.solve(joint, start, (_target(z, x, w),)).value["b"]


def _by_layer(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    (y,) = _layer(z.shape[-1])(_target(z, x, w))
    return y


@functools.lru_cache
def _layer(n: int) -> Any:
    import cvxpy as cp

    from implicitkit_cvxpy import ConvexLayer

    t, y = cp.Parameter(n), cp.Variable(n)
    return ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(y - t)), [y <= 9]), [t], [y])


def _by_deq(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    from implicitkit_deq import DEQ

    rtol = 1e-10 if z.dtype == torch.float64 else 1e-5
    layer = DEQ(lambda y, t: 0.5 * y + 0.5 * t, (z.shape[-1],), rtol=rtol)
    return layer(_target(z, x, w).reshape(-1, z.shape[-1])).reshape(z.shape)


INNER: dict[str, Inner] = {
    "root": _by_root,
    "map": _by_map,
    "minimum": _by_minimum,
    "squares": _by_squares,
    "rest": _by_rest,
    "bounds": _by_bounds,
    "constraint": _by_constraint,
    "program": _by_program,
    "path": _by_path,
    "steps": _by_steps,
    "graph": _by_graph,
    "layer": _by_layer,
    "deq": _by_deq,
}


# --------------------------------------------------------------------------------------------------------------- outside
def _verb(verb: Any, make: Callable[[Inner], Inner]) -> Callable[[Inner], Callable[[Setting], Tensor]]:
    def outer(inner: Inner) -> Callable[[Setting], Tensor]:
        def run(s: Setting) -> Tensor:
            function, args = s.held(make(inner))
            return verb(function, s.start(0.5), args, **s.options).value

        return run

    return outer


def _in_node(inner: Inner) -> Callable[[Setting], Tensor]:
    """``a = 0.3 a + y(a)`` in a graph, ``b = 0.5 b + a / 2`` behind it."""

    def run(s: Setting) -> Tensor:
        function, args = s.held(lambda a, x, w: 0.3 * a + inner(a, x, w))
        names = [f"a{i}" for i in range(len(args))]
        nodes = {"a": (function, *names), "b": (lambda b, a: 0.5 * b + 0.5 * a, "a")}
        start = {"a": s.start(0.5), "b": s.start(0.5)}
        return ik.solve(ik.compose(nodes, output="b"), start, args, **s.options).value["b"]

    return run


def _in_constraint(inner: Inner) -> Callable[[Setting], Tensor]:
    """The nearest point to ``x`` at which ``y(z) = z``."""

    def run(s: Setting) -> Tensor:
        objective, args = s.held(lambda z, x, w: 0.5 * (z - x).square().sum(-1) + 0 * w.sum())
        condition, _ = s.held(lambda z, x, w: inner(z, x, w) - z)
        return ik.argmin(objective, s.start(0.5), args, constraints=[ik.Equality(condition)], **s.options).value

    return run


def _in_path(inner: Inner) -> Callable[[Setting], Tensor]:
    """``u' = y(u) - w x = -0.2 u`` from one, at time one: a solve in every evaluation of a flow."""

    def run(s: Setting) -> Tensor:
        function, args = s.held(lambda u, x, w: inner(u, x, w) - w * x)
        flow = ik.InitialValue(
            lambda t, u, *rest: function(u, *rest), torch.tensor([0.0, 1.0], dtype=s.x.dtype), steps=2
        )
        return s.x * ik.solve(flow, torch.ones_like(s.x), args, **s.options).value[-1]

    return run


def _thrice(inner: Inner) -> Inner:
    """A solve around the inner one: ``y = 0.5 y + inner / 2``."""

    def middle(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return ik.fixed_point(lambda y, z: 0.5 * y + 0.5 * inner(z, x, w) + 0 * y, torch.zeros_like(z), (z,)).value

    return middle


_EQUAL = lambda x, w: w * x / 1.2  # noqa: E731
OUTER: dict[str, tuple[Callable[[Inner], Callable[[Setting], Tensor]], Callable[[Tensor, Tensor], Tensor]]] = {
    "root": (_verb(ik.root, lambda y: lambda z, x, w: y(z, x, w) - z), _EQUAL),
    "map": (_verb(ik.fixed_point, lambda y: lambda z, x, w: 0.3 * z + y(z, x, w)), lambda x, w: w * x / 0.9),
    "minimum": (
        _verb(ik.argmin, lambda y: lambda z, x, w: 0.5 * (z.square() + y(z, x, w).square()).sum(-1)),
        lambda x, w: 0.2 * w * x / 1.04,
    ),
    "squares": (
        _verb(ik.least_squares, lambda y: lambda z, x, w: (y(z, x, w), z - 1)),
        lambda x, w: (1 + 0.2 * w * x) / 1.04,
    ),
    "rest": (_verb(ik.steady_state, lambda y: lambda z, x, w: y(z, x, w) - z), _EQUAL),
    "node": (_in_node, lambda x, w: w * x / 0.9),
    "constraint": (_in_constraint, _EQUAL),
    "path": (_in_path, lambda x, w: x * torch.exp(torch.tensor(-0.2, dtype=x.dtype)) + 0 * w),
    "three": (_verb(ik.root, lambda y: lambda z, x, w: _thrice(y)(z, x, w) - z), _EQUAL),
}
_ROW: dict[str, Any] = {
    "batch": False,
    "in_dims": False,
    "dtypes": ("float64", "float32"),
    "weight": 0.08,
    "scalar_w": False,
}


def _row(inner: str, outer: str) -> Row:
    around, closed = OUTER[outer]
    flow = outer == "path"
    return Row(
        around(INNER[inner]),
        closed,
        linear=("auto",) if flow or outer == "constraint" else LINEAR,
        starts=not flow,
        callback=not flow,
        prepare=_layer if inner == "layer" else None,
        **_ROW,
    )


NESTED = {f"nested.{inner}_in_{outer}": _row(inner, outer) for outer in OUTER for inner in INNER}
