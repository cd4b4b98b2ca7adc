"""Rows of further kinds: trajectories, fits with losses and bounds, brackets, rotations, what a function says beside its
value, structures of the Jacobian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .rows import LINEAR, SERIES, SYMMETRIC, Row, Setting, problem
from .sets import offset
from .smooth import ALL, FLOATS, ROOT

__all__ = ["KINDS"]

BRACKETING = ("auto", "chandrupatla", "bisection", "scipy.root_scalar.brentq", "scipy.root_scalar.toms748")


# -------------------------------------------------------------------------------------------------------- trajectories
def _decay(s: Setting) -> tuple[Any, Any]:
    function, args = s.hold(lambda y, w: -w * y, w=s.w)
    return (lambda t, y, *rest: function(y, *rest)), args


def _path(s: Setting) -> Tensor:
    """``y' = -w y`` from ``x``, at time 1 and, weighted, at time 1/2."""
    rhs, args = _decay(s)
    times = torch.tensor([0.0, 0.5, 1.0], dtype=s.x.dtype)
    path = ik.solve(ik.InitialValue(rhs, times, steps=2), s.x, args, **s.options).value
    times_in = 1 if s.batched else 0
    return path.select(times_in, 2) + 0.5 * path.select(times_in, 1)


def _event(s: Setting) -> Tensor:
    """The first entry falls from ``x`` at the rate ``w`` down to 0.2, at ``T = (x - 0.2) / w``."""
    function, args = s.hold(lambda y, w: -w * torch.ones_like(y), w=s.w)
    fall = ik.InitialValue(
        lambda t, y, *rest: function(y, *rest), torch.tensor([0.0, 5.0], dtype=s.x.dtype), lambda t, y, *rest: y[0] - 0.2,
        steps=4,
    )  # fmt: skip
    value = ik.solve(fall, s.x, args, **s.options).value
    return value["state"] + value["time"]


def _event_closed(x: Tensor, w: Tensor) -> Tensor:
    rate = w.expand(x.shape)
    time = (x[0] - 0.2) / rate[0]
    return x - rate * time + time


# ---------------------------------------------------------------------------------------------------------------- fits
def _outlier(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Near ``x``, and far from 10: beyond ``f_scale`` a residual pulls with the force ``f_scale`` alone."""
    return torch.cat([z - x, 0.5 * w * (z - 10)], -1)


def _curve(s: Setting) -> Tensor:
    """``x_i = p w_i``: ``p = sum w x / sum w^2``."""
    function, args = s.hold(lambda p, w: p * w, w=s.w)
    options = {key: v for key, v in s.options.items() if key != "in_dims"}
    return ik.curve_fit(lambda t, p: function(p, *args), torch.ones_like(s.x), s.x, **options).solution.value


def _curve_closed(x: Tensor, w: Tensor) -> Tensor:
    w = w.expand(x.shape)
    return (w * x).sum(-1, keepdim=True) / w.square().sum(-1, keepdim=True)


def _bounded_fit(s: Setting) -> Tensor:
    function, args = s.hold(lambda z, x: z - x, x=s.x)
    low = s.w + offset(s.x.shape[-1], s.x)
    return ik.least_squares(function, s.start(2.5), args, bounds=(low, None), **s.options).value


def _bounded_closed(x: Tensor, w: Tensor) -> Tensor:
    return torch.maximum(x, w + offset(x.shape[-1], x))


# --------------------------------------------------------------------------------------------- brackets and rotations
def _cube(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return z**3 - x * w


def _between(s: Setting) -> Tensor:
    """Between ends that are tensors of which one moves with the variables; the root does not move with it."""
    function, args = s.held(_cube)
    low = torch.zeros_like(s.x[..., 0])
    high = 1 + (s.x * s.w)[..., 0]
    return ik.root(function, s.start(0.5), args, bracket=(low, high), **s.options).value


def _turn(angle: Tensor) -> Tensor:
    """About the third axis."""
    c, s, o, i = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle), torch.ones_like(angle)
    return torch.stack([torch.stack([c, -s, o], -1), torch.stack([s, c, o], -1), torch.stack([o, o, i], -1)], -2)


def _rotation(s: Setting) -> Tensor:
    """The rotation nearest to one by the angle ``x w``."""
    function, args = s.held(lambda R, x, w: 0.5 * (R - _turn((x * w).sum())).square().sum())
    start = torch.eye(3, dtype=s.x.dtype)
    return ik.argmin(function, start, args, manifold=ik.manifold.SO3(), **s.options).value


# ------------------------------------------------------------------------------------------------ beside the residual
def _said(verb: Any, kernel: Any, start: float) -> Any:
    """``value + aux`` of a function that returns both."""

    def run(s: Setting) -> Tensor:
        function, args = s.held(kernel)
        solution = verb(function, s.start(start), args, has_aux=True, **s.options)
        return solution.value + solution.aux["t"]

    return run


def _elementwise(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return z**3 + w * z - x * (x.square() + w)


_FEW: dict[str, Any] = {"linear": LINEAR, "in_dims": False}

KINDS = {
    "ode.path": Row(
        _path,
        lambda x, w: x * (torch.exp(-w) + 0.5 * torch.exp(-0.5 * w)),
        held=("w",), linear=("auto",), in_dims=False, starts=False, callback=False,
    ),
    "ode.event": Row(
        _event, _event_closed,
        held=("w",), batch=False, linear=("auto",), in_dims=False, starts=False, callback=False,
    ),
    "fit.huber": Row(
        problem(ik.least_squares, _outlier, 0.0, loss="huber", f_scale=0.4),
        lambda x, w: x + 0.2 * w,
        solvers=("auto", "gauss_newton", "levenberg_marquardt", "lbfgs", "scipy.least_squares.trf"),
        linear=SYMMETRIC, states=True, dtypes=FLOATS,
    ),
    "fit.bounds": Row(
        _bounded_fit, _bounded_closed, held=("x",), scalar_w=False, linear=("auto",), dtypes=FLOATS,
        solvers=("auto", "scipy.least_squares.trf", "scipy.least_squares.dogbox"),
    ),
    "fit.curve": Row(_curve, _curve_closed, held=("w",), sizes=(2, 3, 4), in_dims=False, starts=False, linear=("auto",)),
    "root.bracket": Row(
        problem(ik.root, _cube, 0.5, bracket=(0.0, 3.0)),
        lambda x, w: (x * w) ** (1 / 3),
        solvers=BRACKETING, sizes=(1,), dtypes=FLOATS,
    ),
    "root.between": Row(
        _between, lambda x, w: (x * w) ** (1 / 3), solvers=BRACKETING[:3], sizes=(1,), in_dims=False, starts=False
    ),
    "manifold.rotation": Row(
        _rotation, lambda x, w: _turn((x * w).sum()), batch=False, starts=False, callback=False, **_FEW
    ),
    "root.aux": Row(
        _said(ik.root, lambda z, x, w: (x - z * w**2, {"t": z * w, "n": 3}), 1.0),
        lambda x, w: x / w**2 + x / w,
        solvers=ROOT[:4], dtypes=ALL, **_FEW,
    ),
    "map.aux": Row(
        _said(ik.fixed_point, lambda z, x, w: (0.5 * w * z + x, {"t": x * z}), 0.0),
        lambda x, w: x / (1 - 0.5 * w) * (1 + x),
        solvers=("auto", "anderson", "picard"), linear=SERIES, in_dims=False,
    ),
    "min.aux": Row(
        _said(ik.argmin, lambda z, x, w: ((0.5 * (z - x).square() + 0.5 * w * z.square()).sum(-1), {"t": w * z}), 0.0),
        lambda x, w: x,
        solvers=("auto", "lbfgs"), **_FEW,
    ),
    "root.diagonal": Row(
        problem(ik.root, _elementwise, 1.0, jac_sparsity=(0, 0)), lambda x, w: x * 1,
        linear=("auto", "sparse_lu", "lu", "gmres"), dtypes=FLOATS,
    ),
    "root.definite": Row(
        problem(ik.root, lambda z, x, w: (1 + w) * z - x, 0.0, positive_definite=True), lambda x, w: x / (1 + w),
        solvers=("auto", "newton_krylov", "newton"), linear=SYMMETRIC, dtypes=FLOATS,
    ),
}  # fmt: skip
