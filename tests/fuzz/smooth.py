"""Rows without constraints: roots, fixed points, minimisers, least squares, states at rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .rows import LINEAR, SERIES, SYMMETRIC, Row, Setting, eliminate, matrix, problem, times

__all__ = ["SMOOTH"]

ROOT = (
    "auto",
    "newton",
    "trust_region",
    "chord",
    "broyden",
    "newton_krylov",
    "df_sane",
    "levenberg_marquardt",
    "scipy.root.hybr",
    "scipy.root.lm",
    "scipy.fsolve",
    "scipy.newton_krylov",
    "scipy.root.broyden1",
    "scipy.root.broyden2",
    "scipy.root.krylov",
    "scipy.root.df-sane",
    "dogleg",
    "lbfgs",
)
ITERATION = (
    "auto",
    "picard",
    "anderson",
    "anderson2",
    "broyden",
    "newton",
    "newton_krylov",
    "scipy.root.anderson",
    "relay",
    "continuation",
    "accelerated",
    "scipy.root.linearmixing",
)
MINIMISE = (
    "auto",
    "lbfgs",
    "bfgs",
    "newton",
    "newton_cg",
    "trust_region",
    "scipy.minimize.BFGS",
    "scipy.minimize.L-BFGS-B",
    "gradient_descent",
    "nonlinear_cg",
    "scipy.minimize.CG",
    "scipy.minimize.Newton-CG",
    "scipy.minimize.TNC",
    "scipy.minimize.dogleg",
    "scipy.minimize.trust-exact",
    "scipy.minimize.trust-krylov",
    "scipy.minimize.trust-ncg",
)
SQUARES = (
    "auto",
    "gauss_newton",
    "levenberg_marquardt",
    "dogleg",
    "lbfgs",
    "newton",
    "scipy.least_squares.trf",
    "scipy.least_squares.lm",
    "scipy.least_squares.dogbox",
)
REST = ("auto", "newton", "pseudo_transient", "integrate", "newton_krylov", "trust_region", "scipy.root.hybr")
FLOATS = ("float64", "float32", "bfloat16", "float16")
COMPLEX = ("complex128", "complex64")
ALL = (*FLOATS, *COMPLEX)
UNROLLED = ("implicit", "implicit", "unroll", "neumann80")


def _linear_root(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return times(matrix(z.shape[-1], z), z) + w * z - x


def _linear_closed(x: Tensor, w: Tensor) -> Tensor:
    n = x.shape[-1]
    A = matrix(n, x) + torch.diag_embed(w.expand(x.shape) if w.ndim <= x.ndim else w)
    return eliminate(A, x)


def _pair(s: Setting) -> Tensor:
    """A pytree of unknowns: ``a + b = x``, ``b = w a``."""

    def kernel(z: Any, x: Tensor, w: Tensor) -> Any:
        a, (b,) = z["a"], z["b"]
        return {"a": a + b - x, "b": (w * a - b,)}

    function, args = s.held(kernel)
    z0 = {"a": s.start(0.4), "b": (s.start(0.6),)}
    value = ik.root(function, z0, args, **s.options).value
    return value["a"] - 2 * value["b"][0]


def _map_of_pair(s: Setting) -> Tensor:
    def kernel(z: Any, x: Tensor, w: Tensor) -> Any:
        return {"a": 0.4 * z["b"] + x, "b": 0.3 * w * z["a"]}

    function, args = s.held(kernel)
    value = ik.fixed_point(function, {"a": s.start(0.0), "b": s.start(0.0)}, args, **s.options).value
    return value["a"] + value["b"]


def _coupled_map(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return 0.15 * w * times(matrix(z.shape[-1], z), z) + x


def _coupled_closed(x: Tensor, w: Tensor) -> Tensor:
    n = x.shape[-1]
    M = torch.eye(n, dtype=x.dtype) - 0.15 * (w.unsqueeze(-1) if w.ndim else w) * matrix(n, x)
    return eliminate(M, x)


def _objective(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Not quadratic: minimal at ``exp(z) = x w``."""
    return (torch.exp(z) - x * w * z).sum(-1)


def _ridge(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return (0.5 * (z - x).square() + 0.5 * w * z.square()).sum(-1)


def _coupled_objective(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """``z'Sz/2 + w|z|^2/2 - x'z`` with a full symmetric matrix."""
    A = matrix(z.shape[-1], z)
    return 0.25 * (z * times(A + A.mT, z)).sum(-1) + (0.5 * w * z.square() - x * z).sum(-1)


def _coupled_minimum(x: Tensor, w: Tensor) -> Tensor:
    A = matrix(x.shape[-1], x)
    H = 0.5 * (A + A.mT) + torch.diag_embed(w.expand(x.shape))
    return eliminate(H, x)


def _ignores(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """``w`` scales the objective: the minimiser does not depend on it."""
    return (0.5 * (1 + w) * (z - x).square()).sum(-1)


def _energy(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A map that differentiates an energy inside."""
    return z - 0.2 * torch.func.grad(lambda u: (0.5 * (1 + w) * u.square() - x * u).sum())(z)


def _residuals(z: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals that do not vanish: ``z = (x + w) / (1 + w^2)``."""
    return z - x, w * z - 1


def _bent_residuals(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([torch.exp(z) - x * w, 0.7 * torch.ones_like(z)], -1)


def _complex_residuals(z: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return z - x, w * z - 1


def _complex_objective(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The same fit, as an objective: ``|z - x|^2 / 2 + |w z - 1|^2 / 2`` is real and not holomorphic."""
    return sum(0.5 * (r * r.conj()).real.sum(-1) for r in _complex_residuals(z, x, w))  # type: ignore[return-value]


def _real_view(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.view_as_real(torch.cat(_complex_residuals(z, x, w), -1)).flatten(-2)


def _complex_fit(x: Tensor, w: Tensor) -> Tensor:
    return (x + w.conj()) / (1 + w * w.conj())


def _conjugate_root(x: Tensor, w: Tensor) -> Tensor:
    """``z + p z* = c``, hence ``z = (c - p c*) / (1 - |p|^2)``."""
    p, c = 0.5 * w, x * (1 + 1j)
    return (c - p * c.conj()) / (1 - p * p.conj())


_ROOT: dict[str, Any] = {"solvers": ROOT, "states": True}
_MAP: dict[str, Any] = {"solvers": ITERATION, "rules": UNROLLED, "linear": SERIES, "states": True}
_MIN: dict[str, Any] = {"solvers": MINIMISE, "linear": SYMMETRIC, "states": True}

SMOOTH = {
    "root.power": Row(problem(ik.root, lambda z, x, w: x - z * w**2), lambda x, w: x / w**2, dtypes=ALL, **_ROOT),
    "root.exp": Row(
        problem(ik.root, lambda z, x, w: torch.exp(z) - x * w, 0.3), lambda x, w: torch.log(x * w), dtypes=ALL, **_ROOT
    ),
    "root.quadratic": Row(
        problem(ik.root, lambda z, x, w: z**2 + w * z - x),
        lambda x, w: 0.5 * (torch.sqrt(w**2 + 4 * x) - w),
        dtypes=ALL,
        **_ROOT,
    ),
    "root.cubic": Row(
        problem(ik.root, lambda z, x, w: z**3 - x * w), lambda x, w: (x * w) ** (1 / 3), dtypes=ALL, **_ROOT
    ),
    "root.linear": Row(
        problem(ik.root, _linear_root), _linear_closed, sizes=(2, 3, 4), scalar_w=False, dtypes=ALL, **_ROOT
    ),
    "root.pytree": Row(
        _pair, lambda x, w: x / (1 + w) - 2 * w * x / (1 + w), solvers=ROOT[:6], linear=LINEAR, dtypes=ALL
    ),
    "root.complex": Row(
        problem(ik.root, lambda z, x, w: z * (1 + 0.5j * w) - x - 0.3j * w),
        lambda x, w: (x + 0.3j * w) / (1 + 0.5j * w),
        solvers=("auto", "newton", "scipy.root.hybr", "broyden"),
        dtypes=COMPLEX,
        states=True,
    ),
    "root.conjugate": Row(
        problem(ik.root, lambda z, x, w: z + 0.5 * w * z.conj() - x * (1 + 1j)),
        _conjugate_root,
        solvers=("auto", "newton", "newton_krylov"),
        dtypes=COMPLEX,
        states=True,
    ),
    "map.affine": Row(
        problem(ik.fixed_point, lambda z, x, w: 0.5 * w * z + x, 0.0),
        lambda x, w: x / (1 - 0.5 * w),
        dtypes=ALL,
        **_MAP,
    ),
    "map.coupled": Row(
        problem(ik.fixed_point, _coupled_map, 0.0), _coupled_closed, sizes=(2, 3, 4), scalar_w=False, dtypes=ALL, **_MAP
    ),
    "map.babylon": Row(
        problem(ik.fixed_point, lambda z, x, w: 0.5 * (z + x * w / z)),
        lambda x, w: torch.sqrt(x * w),
        dtypes=ALL,
        **_MAP,
    ),
    "map.log": Row(
        problem(ik.fixed_point, lambda z, x, w: z + 0.4 * (x * w * torch.exp(-z) - 1), 0.0),
        lambda x, w: (x * w).log(),
        dtypes=ALL,
        **_MAP,
    ),
    "map.complex": Row(
        problem(ik.fixed_point, lambda z, x, w: 0.4j * w * z + x, 0.0),
        lambda x, w: x / (1 - 0.4j * w),
        solvers=("auto", "picard", "anderson"),
        dtypes=COMPLEX,
        states=True,
    ),
    "map.pytree": Row(
        _map_of_pair,
        lambda x, w: x * (1 + 0.3 * w) / (1 - 0.12 * w),
        solvers=ITERATION[:6],
        rules=UNROLLED,
        linear=SERIES,
        dtypes=ALL,
    ),
    "map.energy": Row(
        problem(ik.fixed_point, _energy, 0.0),
        lambda x, w: x / (1 + w),
        solvers=("auto", "anderson", "newton"),
        dtypes=FLOATS,
        states=True,
    ),
    "min.exp": Row(problem(ik.argmin, _objective, 0.3), lambda x, w: (x * w).log(), dtypes=FLOATS, **_MIN),
    "min.ridge": Row(problem(ik.argmin, _ridge, 0.0), lambda x, w: x / (1 + w), dtypes=FLOATS, **_MIN),
    "min.coupled": Row(
        problem(ik.argmin, _coupled_objective, 0.0),
        _coupled_minimum,
        sizes=(2, 3, 4),
        scalar_w=False,
        dtypes=FLOATS,
        **_MIN,
    ),
    "min.ignores": Row(problem(ik.argmin, _ignores, 0.0), lambda x, w: x + 0 * w, **_MIN),
    "min.complex": Row(
        problem(ik.argmin, _complex_objective, 0.0),
        _complex_fit,
        dtypes=COMPLEX,
        solvers=("auto", "lbfgs", "newton", "trust_region"),
        linear=SYMMETRIC,
        states=True,
    ),
    "squares.complex": Row(
        problem(ik.least_squares, _real_view, 0.0),
        _complex_fit,
        dtypes=COMPLEX,
        solvers=("auto", "gauss_newton", "levenberg_marquardt", "lbfgs"),
        linear=SYMMETRIC,
        states=True,
    ),
    "squares.linear": Row(
        problem(ik.least_squares, _residuals, 0.0),
        lambda x, w: (x + w) / (1 + w**2),
        dtypes=FLOATS,
        solvers=SQUARES,
        linear=SYMMETRIC,
        states=True,
    ),
    "squares.exp": Row(
        problem(ik.least_squares, _bent_residuals, 0.3),
        lambda x, w: (x * w).log(),
        solvers=SQUARES,
        linear=SYMMETRIC,
        dtypes=FLOATS,
        states=True,
    ),
    "rest.linear": Row(
        problem(ik.steady_state, lambda z, x, w: x - w * z), lambda x, w: x / w, dtypes=ALL, solvers=REST, states=True
    ),
    "rest.logistic": Row(
        problem(ik.steady_state, lambda z, x, w: z * (x - w * z)),
        lambda x, w: x / w,
        dtypes=FLOATS,
        solvers=REST[:5],  # those that follow the flow: zero is a root, too, from which it leads away
        states=True,
    ),
}
