"""Rows with constraints, bounds, sets and proximal terms, and quadratic programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .rows import Row, Setting

__all__ = ["SETS"]

CONSTRAINED = ("auto", "sqp", "filter_interior_point", "augmented_lagrangian", "scipy.slsqp", "scipy.trust_constr")
PROXIMAL = ("auto", "proximal_gradient", "projected_gradient")
PROGRAMS = ("auto", "interior_point", "daqp", "clarabel")
KKT = ("auto", "kkt", "lu")
_FIXED: dict[str, Any] = {"rules": ("implicit",), "linear": ("auto",), "scalar_w": False}


def offset(n: int, like: Tensor) -> Tensor:
    """``-1, 1, -1, ...``: added to ``w`` it is far below or far above ``x``."""
    return torch.tensor([-1.0, 1.0], dtype=like.dtype).repeat(n)[:n]


def signs(n: int, like: Tensor) -> Tensor:
    """``1, -1, 0.1, 1, ...``."""
    return torch.tensor([1.0, -1.0, 0.1], dtype=like.dtype).repeat(n)[:n]


def _distance(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return 0.5 * (z - x).square().sum(-1)


def _near(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (z - x).square().sum(-1)


# --------------------------------------------------------------------------------------------------------- constraints
def _constrained(kind: Any, constraint: Any, start: float = 0.3, multiplier: float = 0.0) -> Any:
    def run(s: Setting) -> Tensor:
        function, args = s.held(_distance)
        condition, _ = s.held(constraint)
        solution = ik.argmin(function, s.start(start), args, constraints=[kind(condition)], **s.options)
        return solution.value + multiplier * solution.multipliers[0] if multiplier else solution.value

    return run


def _sum_condition(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return z.sum(-1) - w.sum(-1)


def _sum_closed(x: Tensor, w: Tensor) -> Tensor:
    return x + (w.expand(x.shape).sum(-1, keepdim=True) - x.sum(-1, keepdim=True)) / x.shape[-1]


def _sphere_condition(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return z.square().sum(-1) - w.mean(-1).square()


def _sphere_closed(x: Tensor, w: Tensor) -> Tensor:
    return x * w.mean(-1, keepdim=True) / torch.sqrt(x.square().sum(-1, keepdim=True))


def _below(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return z - w - offset(z.shape[-1], z)


def _least(x: Tensor, w: Tensor) -> Tensor:
    return torch.minimum(x, w + offset(x.shape[-1], x))


def _least_with_multiplier(x: Tensor, w: Tensor) -> Tensor:
    least = _least(x, w)
    return least + 0.5 * (x - least)


def _most(x: Tensor, w: Tensor) -> Tensor:
    return torch.maximum(x, w + offset(x.shape[-1], x))


# --------------------------------------------------------------------------------------- bounds, sets, proximal terms
def _with(**make: Any) -> Any:
    """An argmin whose ``bounds=``, ``prox=`` or ``project=`` is made of ``w``; the objective holds ``x`` alone."""

    def run(s: Setting) -> Tensor:
        function, args = s.hold(_near, x=s.x)
        extra = {name: build(s) for name, build in make.items()}
        return ik.argmin(function, s.start(0.9), args, **extra, **s.options).value

    return run


def _shrunk(make: Any) -> Any:
    """The same for a target of mixed signs, ``x * signs``."""

    def run(s: Setting) -> Tensor:
        def kernel(z: Tensor, x: Tensor) -> Tensor:
            return _near(z, x * signs(z.shape[-1], z))

        function, args = s.hold(kernel, x=s.x)
        return ik.argmin(function, s.start(0.2), args, **make(s), **s.options).value

    return run


def _soft(v: Tensor, threshold: Tensor) -> Tensor:
    return v.sign() * torch.relu(v.abs() - threshold)


def _soft_closed(x: Tensor, w: Tensor) -> Tensor:
    return _soft(x * signs(x.shape[-1], x), 0.3 * w)


def _simplex_closed(x: Tensor, w: Tensor) -> Tensor:
    """Bisection for the shift, then the shift from the support it finds."""
    v, radius = x * signs(x.shape[-1], x), w.mean(-1, keepdim=True)
    with torch.no_grad():
        high = v.detach().amax(-1, keepdim=True)
        low = high - radius.detach()
        for _ in range(60):
            middle = 0.5 * (low + high)
            above = (v.detach() - middle).clamp_min(0).sum(-1, keepdim=True) > radius.detach()
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        support = (v.detach() > low).to(v.dtype)
    shift = ((v * support).sum(-1, keepdim=True) - radius) / support.sum(-1, keepdim=True)
    return support * (v - shift)


def _rotation(like: Tensor) -> Tensor:
    return torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=like.dtype)


def _cone(s: Setting) -> Tensor:
    """Eigenvalues ``x_1 > 0`` and ``-w_1 < 0`` about fixed axes: what is left is the first."""

    def kernel(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
        values = torch.stack([x[..., 0], -w[..., 0].expand(x[..., 0].shape)], -1)
        Q = _rotation(z)
        return 0.5 * (z - Q @ torch.diag_embed(values) @ Q.mT).square().sum((-2, -1))

    function, args = s.held(kernel)
    z0 = torch.zeros((*s.start(0.0).shape[:-1], 2, 2), dtype=s.x.dtype)
    return ik.argmin(function, z0, args, project=ik.project.psd_cone(), **s.options).value


def _cone_closed(x: Tensor, w: Tensor) -> Tensor:
    q = _rotation(x)[:, 0]
    return x[..., 0, None, None] * torch.outer(q, q)


# ------------------------------------------------------------------------------------------------------------ programs
def _program(make: Any, multiplier: float = 0.0) -> Any:
    def run(s: Setting) -> Tensor:
        options = {key: v for key, v in s.options.items() if key not in ("batch_dims", "in_dims")}
        solution = ik.solve(make(s.x, s.w), **options)
        return solution.value + multiplier * solution.multipliers.inequality if multiplier else solution.value

    return run


def _eye(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype)


def _budget(x: Tensor, w: Tensor) -> ik.QuadraticProgram:
    n = x.shape[-1]
    ones = torch.ones(1, n, dtype=x.dtype)
    return ik.QuadraticProgram(torch.diag_embed(1 + w), -x, ones, ones[0, :1])


def _budget_closed(x: Tensor, w: Tensor) -> Tensor:
    d = 1 / (1 + w)
    d = d.expand(x.shape)
    price = ((d * x).sum(-1, keepdim=True) - 1) / d.sum(-1, keepdim=True)
    return d * (x - price)


def _upper(x: Tensor, w: Tensor) -> ik.QuadraticProgram:
    return ik.QuadraticProgram(_eye(x), -x, G=_eye(x), h=w + offset(x.shape[-1], x))


def _lower(x: Tensor, w: Tensor) -> ik.QuadraticProgram:
    return ik.QuadraticProgram(_eye(x), -x, G=_eye(x), lower=w + offset(x.shape[-1], x))


def _both(x: Tensor, w: Tensor) -> ik.QuadraticProgram:
    h = w + offset(x.shape[-1], x)
    return ik.QuadraticProgram(_eye(x), -x, G=_eye(x), h=h, lower=h - 0.5)


def _both_closed(x: Tensor, w: Tensor) -> Tensor:
    h = w + offset(x.shape[-1], x)
    return torch.minimum(torch.maximum(x, h - 0.5), h)


def _lower_with_multiplier(x: Tensor, w: Tensor) -> Tensor:
    most = _most(x, w)
    return most + 0.5 * (x - most)


def _box(s: Setting) -> Any:
    low = s.w + offset(s.x.shape[-1], s.x)
    return ik.project.box(low, low + 5)


_SET: dict[str, Any] = {
    "solvers": PROXIMAL,
    "held": ("x",),
    **_FIXED,
    "dtypes": ("float64", "float32", "bfloat16", "float16"),
}
_PROGRAM: dict[str, Any] = {
    "solvers": PROGRAMS,
    "held": (),
    **_FIXED,
    "linear": KKT,
    "in_dims": False,
    "starts": False,
    "callback": False,
}

SETS = {
    "equality.sum": Row(_constrained(ik.Equality, _sum_condition), _sum_closed, solvers=CONSTRAINED, **_FIXED),
    "equality.sphere": Row(
        _constrained(ik.Equality, _sphere_condition), _sphere_closed, solvers=CONSTRAINED, **{**_FIXED, "sizes": (2, 3)}
    ),
    "inequality": Row(_constrained(ik.Inequality, _below), _least, solvers=CONSTRAINED, **_FIXED),
    "inequality.multiplier": Row(
        _constrained(ik.Inequality, _below, multiplier=0.5), _least_with_multiplier, solvers=CONSTRAINED, **_FIXED
    ),
    "bounds.lower": Row(_with(bounds=lambda s: (s.w + offset(s.x.shape[-1], s.x), None)), _most, **_SET),
    "bounds.upper": Row(_with(bounds=lambda s: (None, s.w + offset(s.x.shape[-1], s.x))), _least, **_SET),
    "bounds.numbers": Row(_with(bounds=lambda s: (0.1, 5.0)), lambda x, w: x * 1, **_SET),
    "project.own": Row(
        _with(project=lambda s: lambda v: torch.maximum(v, s.w + offset(v.shape[-1], v))), _most, **_SET
    ),
    "project.box": Row(_with(project=_box), _most, **_SET),
    "project.ball": Row(
        _with(project=lambda s: ik.project.l2_ball(0.1 * s.w.mean(-1))), lambda x, w: 0.1 * _sphere_closed(x, w), **_SET
    ),
    "project.simplex": Row(_shrunk(lambda s: {"project": ik.project.simplex(s.w.mean(-1))}), _simplex_closed, **_SET),
    "project.psd": Row(_cone, _cone_closed, **{**_SET, "held": ("x", "w"), "starts": False}),
    "prox.l1": Row(_shrunk(lambda s: {"prox": ik.prox.l1(0.3 * s.w)}), _soft_closed, **_SET),
    "prox.own": Row(
        _shrunk(lambda s: {"prox": lambda v, step: _soft(v, step.unsqueeze(-1) * 0.3 * s.w)}), _soft_closed, **_SET
    ),
    "prox.ridge": Row(_with(prox=lambda s: ik.prox.ridge(0.7)), lambda x, w: x / 1.7, **_SET),
    "qp.budget": Row(_program(_budget), _budget_closed, **_PROGRAM),
    "qp.upper": Row(_program(_upper, 0.5), _least_with_multiplier, **_PROGRAM),
    "qp.lower": Row(_program(_lower, 0.5), _lower_with_multiplier, **_PROGRAM),
    "qp.both": Row(_program(_both), _both_closed, **_PROGRAM),
}
