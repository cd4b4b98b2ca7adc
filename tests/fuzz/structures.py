"""Rows made of several solves: compositions, nested solves, solvers of the user's own, DEQ and convex layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .rows import LINEAR, SERIES, Row, Setting
from .sets import offset
from .smooth import ALL

__all__ = ["STRUCTURES"]

JOINT = ("auto", "anderson", "picard", "blocks", "newton")


# -------------------------------------------------------------------------------------------------------- compositions
def _first(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return 0.5 * w * z + x


def _compose(s: Setting) -> Tensor:
    """``f = 0.5 w f + x``, then ``v = 0.3 v + f``."""
    function, args = s.held(_first)
    names = [f"a{i}" for i in range(len(args))]
    joint = ik.compose(
        {"f": (ik.FixedPoint(function), *names), "v": (ik.FixedPoint(lambda v, f: 0.3 * v + f), "f")}, output="v"
    )
    return ik.solve(joint, {"f": s.start(0.0), "v": s.start(0.0)}, args, **s.options).value["v"]


def _then(s: Setting) -> Tensor:
    function, args = s.held(_first)

    def second(v: Tensor, f: Tensor) -> Tensor:
        return 0.3 * v + f

    joint = ik.FixedPoint(function) >> ik.FixedPoint(second)
    names = list(joint.graph)
    return ik.solve(joint, {name: s.start(0.0) for name in names}, args, **s.options).value[names[-1]]


def _cycle(s: Setting) -> Tensor:
    """``a = 0.3 b + x w``, ``b = 0.4 a``: ``a = x w / 0.88``."""
    function, args = s.held(lambda b, x, w: 0.3 * b + x * w)
    names = [f"a{i}" for i in range(len(args))]

    def first(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return function(b, *rest)

    joint = ik.compose(
        {"a": (ik.FixedPoint(first), "b", *names), "b": (ik.FixedPoint(lambda b, a: 0.4 * a), "a")}, output="a"
    )
    return ik.solve(joint, {"a": s.start(0.0), "b": s.start(0.0)}, args, **s.options).value["a"]


# ------------------------------------------------------------------------------------------------------- nested solves
def _inner_root(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """``y = w x - 0.2 z`` by a solve that captures everything; ``z = 0.3 z + y``."""
    y = ik.root(lambda y: y - w * x + 0.2 * z, torch.zeros_like(x * w + z)).value
    return 0.3 * z + y


def _inner_arguments(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    y = ik.root(lambda y, x, w, z: y - w * x + 0.2 * z, torch.zeros_like(x * w + z), (x, w, z)).value
    return 0.3 * z + y


def _inner_map(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """``u = 0.3 sin(0) + w z`` by a contraction with one tensor in ``args`` and one captured; ``z = x / (1 + w)``."""
    u = ik.fixed_point(lambda u, v: 0.4 * u + 0.6 * v * w, torch.zeros_like(z * w), (z,)).value
    return x - u - z


def _bilevel(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """``u = argmin (u - w z)^2 / 2``; ``z`` minimises ``(z - x)^2 / 2 + u^2 / 2``."""
    u = ik.argmin(lambda u: 0.5 * (u - w * z).square().sum(), torch.zeros_like(z * w)).value
    return (0.5 * (z - x).square() + 0.5 * u.square()).sum(-1)


def _nested(verb: Any, kernel: Any) -> Any:
    def run(s: Setting) -> Tensor:
        function, args = s.held(kernel)
        return verb(function, s.start(0.5), args, **s.options).value

    return run


def _sequence(s: Setting) -> Tensor:
    """The solution of one solve is the argument of the next, which captures it as well."""
    function, args = s.held(lambda z, x, w: z * w - x)
    y = ik.root(function, s.start(0.5), args, **s.options).value
    return ik.fixed_point(lambda z, v: 0.5 * z + 0.25 * v + 0.25 * y, torch.zeros_like(y), (y,)).value


def _own_solver(s: Setting) -> Tensor:
    """A solver in NumPy, behind ``@ik.implicit``; only ``x`` and ``w`` in args reach it."""

    @ik.implicit(ik.Root(lambda z, x, w: x - z * w**2))
    def closed(z0: Tensor, x: Tensor, w: Tensor) -> Any:
        return (x.numpy() / w.numpy() ** 2) + 0 * z0.numpy()

    return closed(s.start(0.0), s.x, s.w)


# -------------------------------------------------------------------------------------------------------------- layers
def _deq(s: Setting) -> Tensor:
    from implicitkit_deq import DEQ

    function, _ = s.held(_first)
    x = s.x if s.batched else s.x.unsqueeze(0)
    options = {key: v for key, v in s.options.items() if key in ("solver", "rule") and v != "auto"}
    out = DEQ(function, (x.shape[-1],), rtol=1e-10, **options)(x)
    return out if s.batched else out[0]


@functools.lru_cache
def _layer(n: int) -> Any:
    import cvxpy as cp

    from implicitkit_cvxpy import ConvexLayer

    x, h, z = cp.Parameter(n), cp.Parameter(n), cp.Variable(n)
    return ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(z - x)), [z <= h]), [x, h], [z])


def _convex(s: Setting) -> Tensor:
    (z,) = _layer(s.x.shape[-1])(s.x, s.w + offset(s.x.shape[-1], s.x))
    return z


@functools.lru_cache
def _ball_layer(n: int) -> Any:
    import cvxpy as cp

    from implicitkit_cvxpy import ConvexLayer

    c, r, z = cp.Parameter(n), cp.Parameter(), cp.Variable(n)
    return ConvexLayer(cp.Problem(cp.Minimize(c @ z), [cp.norm(z) <= r]), [c, r], [z])


def _convex_ball(s: Setting) -> Tensor:
    (z,) = _ball_layer(s.x.shape[-1])(s.x, s.w.mean(-1))
    return z


_JOINT: dict[str, Any] = {"solvers": JOINT, "linear": (*SERIES, "blocks"), "scalar_w": True, "dtypes": ALL}
_NEST: dict[str, Any] = {"linear": LINEAR, "in_dims": False, "dtypes": ALL}
_LAYER: dict[str, Any] = {
    "held": (),
    "scalar_w": False,
    "linear": ("auto",),
    "in_dims": False,
    "dtypes": ("float64",),
    "starts": False,
    "callback": False,
}

STRUCTURES = {
    "joint.compose": Row(_compose, lambda x, w: x / (1 - 0.5 * w) / 0.7, **_JOINT),
    "joint.then": Row(_then, lambda x, w: x / (1 - 0.5 * w) / 0.7, **_JOINT),
    "joint.cycle": Row(_cycle, lambda x, w: x * w / 0.88, **_JOINT),
    "nested.captured": Row(_nested(ik.fixed_point, _inner_root), lambda x, w: x * w / 0.9, batch=False, **_NEST),
    "nested.arguments": Row(_nested(ik.fixed_point, _inner_arguments), lambda x, w: x * w / 0.9, batch=False, **_NEST),
    "nested.mixed": Row(_nested(ik.root, _inner_map), lambda x, w: x / (1 + w), batch=False, **_NEST),
    "nested.bilevel": Row(
        _nested(ik.argmin, _bilevel), lambda x, w: x / (1 + w**2), batch=False, linear=LINEAR, in_dims=False
    ),
    "sequence": Row(_sequence, lambda x, w: x / w, solvers=("auto", "newton"), in_dims=False, dtypes=ALL),
    "own_solver": Row(
        _own_solver, lambda x, w: x / w**2, **{**_LAYER, "dtypes": ("float64", "float32"), "scalar_w": True}
    ),
    "layer.deq": Row(
        _deq,
        lambda x, w: x / (1 - 0.5 * w),
        solvers=("auto", "anderson", "broyden"),
        held=("w",),
        scalar_w=True,
        in_dims=False,
        rules=("implicit",),
        linear=SERIES,
        starts=False,
        callback=False,
    ),
    "layer.convex": Row(_convex, lambda x, w: torch.minimum(x, w + offset(x.shape[-1], x)), prepare=_layer, **_LAYER),
    "layer.ball": Row(
        _convex_ball,
        lambda x, w: -w.mean(-1, keepdim=True) * x / x.square().sum(-1, keepdim=True).sqrt(),
        prepare=_ball_layer,
        **_LAYER,
    ),
}
