"""What users of other libraries reach for first: each feature under every transform, against differences and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vmap

import implicitkit as ik

F64 = torch.float64
GEN = torch.Generator().manual_seed(5)
A = torch.randn(8, 3, generator=GEN, dtype=F64)
Y = torch.randn(8, generator=GEN, dtype=F64)
T = torch.linspace(0, 2, 6, dtype=F64)
DATA = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(37 * T)
ONES, C = torch.ones(3, dtype=F64), torch.tensor([1.2, 2.0, 2.9], dtype=F64)
W0 = torch.zeros(3, dtype=F64)
W1 = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=F64)
SCALES = torch.tensor([1.0, 10.0, 0.1], dtype=F64)
TIGHT = {"rtol": 1e-13, "atol": 1e-14}
ROWS = torch.full((2, 3), 1 / 3, dtype=F64)


def model(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * torch.exp(-b * x) + c


def residuals(p: Tensor, y: Tensor) -> Tensor:
    return model(T, *p) - y


def ridge(w: Tensor, m: Tensor) -> Tensor:
    return 0.5 * (A @ w - Y).square().sum() + 0.5 * (w - m).square().sum()


def rows(B: Tensor, x: Tensor) -> Tensor:
    return (B - x * torch.arange(1.0, 7, dtype=F64).view(2, 3) / 6).square().sum()


def coupled(B: Tensor, x: Tensor) -> Tensor:
    """Rows that depend on each other."""
    return rows(B, x) + 0.3 * (B[0] * B[1]).sum()


def turned(R: Tensor, a: Tensor) -> Tensor:
    return torch.eye(3, dtype=F64)[:2] @ R.mT - torch.stack([a, a.flip(0)]) / 3


SO3, EYE = ik.manifold.SO3(), torch.eye(3, dtype=F64)
SOLVED = ik.implicit(ik.Root(lambda z, a: z**2 - a), has_aux=True)(lambda z0, a: (a.sqrt(), {"steps": 0}))
argmin, fit = ik.argmin, ik.least_squares

FEATURES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "aux of a root": (lambda a: ik.root(lambda z, a: (z**2 - a, z * a), ONES, (a,), has_aux=True, **TIGHT).aux, C),
    "aux of a minimum": (lambda m: argmin(lambda w, m: (ridge(w, m), w * m), W0, (m,), has_aux=True, **TIGHT).aux, C),
    "a solver called by name": (lambda a: SOLVED(ONES, a=a)[0], C),
    "a bracket": (
        lambda a: ik.root(lambda z, a: z**3 - a, args=(a,), bracket=(0.0, 2 * ONES), batch_dims=1, **TIGHT).value, C,
    ),
    "numbers for a bracket": (
        lambda a: ik.root(lambda z, a: z**3 - a, args=(a,), bracket=(0, 5), batch_dims=1, **TIGHT).value, C,
    ),
    "a bracket that moves": (
        lambda a: ik.root(lambda z, a: z**3 - a, args=(a,), bracket=(0.1 * a, 2 + a), batch_dims=1, **TIGHT).value, C,
    ),
    "SciPy's brackets": (
        lambda a: ik.root(
            lambda z, a: z**3 - a, args=(a,), bracket=(0.0, 2 * ONES), batch_dims=1, solver="scipy.root_scalar.brentq"
        ).value,
        C,
    ),
    "bounds": (lambda y: fit(residuals, ONES, (y,), bounds=(0.0, 2.2), **TIGHT).value, DATA),
    "the loss arctan": (lambda y: fit(residuals, 2 * ONES, (y,), loss="arctan", f_scale=0.3, **TIGHT).value, DATA),
    "a robust loss": (lambda y: fit(residuals, ONES, (y,), loss="soft_l1", f_scale=0.1, **TIGHT).value, DATA),
    "units of the unknowns": (lambda y: fit(residuals, ONES, (y,), x_scale=y[:3].clamp(1.0), **TIGHT).value, DATA),
    "curve_fit": (lambda y: ik.curve_fit(model, T, y, ONES, **TIGHT).parameters, DATA),
    "its covariance": (lambda y: 100 * ik.curve_fit(model, T, y, ONES, **TIGHT).covariance.flatten(), DATA),
    "a fit's errors": (lambda s: ik.curve_fit(model, T, DATA, ONES, s, **TIGHT).parameters, 0.1 + 0.1 * T),
    "a fit's bounds": (lambda u: ik.curve_fit(model, T, DATA, ONES, bounds=(0.0, u), **TIGHT).parameters, 2 * C),
    "mirror descent on rows": (
        lambda x: argmin(
            rows, ROWS, (x,), project=ik.project.simplex(), solver="mirror_descent", **TIGHT
        ).value.flatten(),
        C,
    ),
    "box section": (lambda v: ik.project.box_section(0.0, 1.0, 1.5, ONES)(v - 1.3), C),
    "l2 sphere": (ik.project.l2_sphere(2.0), C),
    "l1 sphere": (ik.project.l1_sphere(), C - 1.3),
    "sparse simplex": (ik.project.sparse_simplex(2, 3.0), C),
    "Kullback-Leibler": (ik.project.kl_simplex(), C),
    "nonnegative ridge": (lambda v: ik.prox.nonnegative_ridge(0.5)(v - 1.5, 1.0), C),
    "total variation": (lambda v: ik.prox.total_variation(0.3)(v, 1.0), C),
    "soft sort": (lambda v: ik.relax.soft_sort(v, 1.7), C),
    "soft rank": (lambda v: ik.relax.soft_rank(v, 1.7), C),
    "Fenchel-Young": (lambda v: ik.relax.FenchelYoung(ik.project.simplex())(v / 4, EYE[0]).reshape(1), C),
    "rows for blocks": (
        lambda x: argmin(
            coupled, ROWS, (x,), prox=ik.prox.l2(0.1), solver="block_coordinate_descent", **TIGHT
        ).value.flatten(),
        C,
    ),
    "groups for blocks": (
        lambda x: argmin(
            coupled, ROWS, (x,), prox=ik.prox.group_lasso((2, 1), 0.05), solver="block_coordinate_descent", **TIGHT
        ).value.flatten(),
        C,
    ),
    "step lengths by Armijo": (
        lambda m: argmin(ridge, W0, (m,), solver=ik.GradientDescent("armijo"), **TIGHT).value, C,
    ),
    "gradient descent, accelerated": (
        lambda m: argmin(ridge, W0, (m,), solver=ik.Accelerated(ik.GradientDescent(0.05)), **TIGHT).value, C,
    ),
    "proximal gradients, accelerated": (
        lambda m: argmin(
            ridge, W0, (m,), prox=ik.prox.l1(0.2), solver=ik.Accelerated(ik.extend.get_solver("proximal_gradient")), **TIGHT
        ).value,
        C,
    ),
    "dogleg": (lambda y: fit(residuals, ONES, (y,), solver="dogleg", **TIGHT).value, DATA),
    "a norm of one's own": (
        lambda a: ik.root(lambda z, a: z**2 - a, ONES, (a,), norm=lambda z: (z.abs() * SCALES).amax(), **TIGHT).value, C,
    ),
    "a long series for a minimum": (
        lambda m: argmin(ridge, W0, (m,), rule=ik.Neumann(terms=400, step=0.05), **TIGHT).value, C,
    ),
    "a rotation": (lambda a: fit(turned, EYE, (a,), manifold=SO3, **TIGHT).value.flatten(), C),
    "a rotation under a robust loss": (
        lambda a: fit(turned, EYE, (a,), manifold=SO3, loss="soft_l1", f_scale=0.1, **TIGHT).value.flatten(), C,
    ),
    "one number by golden section": (
        lambda a: argmin(lambda z, a: torch.cosh(z - a).sum(-1), torch.zeros(3, 1, dtype=F64), (a[:, None],), batch_dims=1,
                         solver="golden_section").value.flatten(), C,
    ),
    "a unit quaternion": (
        lambda a: fit(lambda q, a: q - a / 3, W1, (torch.cat([a, a[:1]]),), manifold=ik.manifold.UnitQuaternion(),
                      **TIGHT).value, C,
    ),
    "step lengths by Polyak": (
        lambda m: argmin(lambda w, m: (w - m).square().sum(), W0, (m,), solver=ik.GradientDescent("polyak"), **TIGHT).value,
        C,
    ),
    "a transport plan of least divergence": (
        lambda x: ik.project.kl_transport(ROWS[0], ROWS[0])(torch.outer(x, x.flip(0)).sin() + 2).flatten(), C,
    ),
    "nonlinear CG": (lambda m: argmin(ridge, W0, (m,), solver=ik.NonlinearCG("dai_yuan"), **TIGHT).value, C),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_every_transform(name: str) -> None:
    f, x = FEATURES[name]
    x = x + 0.01 * torch.sin(torch.arange(len(x), dtype=F64))  # no kinks by chance
    J = jacrev(f)(x)
    scale = 1 + float(J.abs().max())
    h = 1e-5
    along = torch.linspace(-0.5, 1, len(x), dtype=F64)
    differences = (f(x + h * along) - f(x - h * along)) / (2 * h)
    torch.testing.assert_close(J @ along, differences, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(jacfwd(f)(x), J, rtol=0, atol=1e-7 * scale)
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, J.sum(0), rtol=0, atol=1e-7 * scale)
    batch = torch.stack([x, 1.01 * x])
    torch.testing.assert_close(vmap(f)(batch), torch.stack([f(v) for v in batch]), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(vmap(jacrev(f))(batch)[0], J, rtol=0, atol=1e-6 * scale)
    short: Callable[[Tensor], Tensor] = lambda s: f(x + s * along).sin().sum()  # noqa: E731
    zero = torch.zeros((), dtype=F64)
    second = hessian(short)(zero)
    torch.testing.assert_close(second, jacrev(jacrev(short))(zero), rtol=1e-5, atol=1e-6 * scale)
    slope = jacrev(short)
    torch.testing.assert_close(second, (slope(zero + h) - slope(zero - h)) / (2 * h), rtol=1e-4, atol=1e-4 * scale)


BRACKET: Any = {"args": (C,), "batch_dims": 1}
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no change of sign": (
        lambda: ik.root(lambda z, a: z - a, bracket=(0.0, torch.tensor([2.0, 1.0, 4.0], dtype=F64)), **BRACKET),
        ik.ConvergenceError, r"does not change its sign between the ends of sample\(s\) 1",
    ),
    "an infinite end": (lambda: ik.root(lambda z: z, bracket=(0.0, float("inf"))), ValueError, "must be finite"),
    "a batch nobody knows": (
        lambda: ik.root(lambda z: z - C, bracket=(0.0, 4.0), batch_dims=1), ValueError, "nothing of the batch",
    ),
    "aux undeclared": (lambda: ik.root(lambda z: (z - 1, 2.0), ONES), TypeError, "has_aux=True"),
    "aux of a minimum undeclared": (lambda: argmin(lambda z: (z.sum(), z), ONES), ValueError, "2 tensors.*has_aux=True"),
    "info undeclared": (
        lambda: ik.implicit(ik.Root(lambda z, a: z - a))(lambda z0, a: (a, {"steps": 1}))(ONES, C), ValueError,
        "has_aux=True",
    ),
    "x_scale where none is": (
        lambda: fit(residuals, ONES, (DATA,), x_scale="jac", solver="newton_cg"), ik.CapabilityError, "x_scale.*newton_cg",
    ),
    "a model of another shape": (
        lambda: ik.curve_fit(lambda x, a: a * x[:, None], T, DATA), ValueError,
        r"shape \(6,\); it returned shape \(6, 1\)",
    ),
    "labels that are numbers of classes": (
        lambda: ik.relax.FenchelYoung(ik.project.simplex())(C, 1), TypeError, "one_hot",
    ),
    "parameters nobody counts": (lambda: ik.curve_fit(lambda x, *p: p[0] * x, T, DATA), ValueError, "pass p0"),
    "a set of many beside a manifold": (
        lambda: fit(turned, EYE, (C,), manifold=SO3, bounds=(0.0, 1.0)), ValueError,
        "manifold= cannot be combined with bounds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    call, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        call()


def test_arrays_and_numbers_are_what_they_say() -> None:
    fitted = ik.curve_fit(model, T.numpy(), DATA.numpy())
    torch.testing.assert_close(fitted.parameters, ik.curve_fit(model, T, DATA, ONES).parameters)
    bounded = fit(residuals, ONES.numpy(), (DATA,), bounds=(W0.numpy(), 2.2 * ONES.numpy())).value
    torch.testing.assert_close(bounded, fit(residuals, ONES, (DATA,), bounds=(0.0, 2.2)).value)
    z = ik.root(lambda z: z**2 + 1, 1 + 1j, rtol=1e-6).value
    assert abs(complex(z) - 1j) < 1e-4


def test_data_that_do_not_tell_parameters_apart_say_so() -> None:
    with pytest.warns(ik.ConvergenceWarning, match="do not determine all parameters"):
        blind = ik.curve_fit(lambda x, a, b: (a + b) * x, T, DATA)
    assert bool(torch.isinf(blind.covariance).all())


def test_samples_of_an_accelerated_method_do_not_see_each_other() -> None:
    starts = torch.randn(4, 2, dtype=F64)
    bowl: Callable[[Tensor], Tensor] = lambda z: torch.cosh(z[..., 0] - 1) + (z[..., 1] + 2) ** 4 + z[..., 1] ** 2  # noqa: E731
    solve = lambda z: argmin(bowl, z, batch_dims=1, solver=ik.Accelerated("gradient_descent"))  # noqa: E731
    together = solve(starts)
    for i in (0, 3):
        pair = solve(starts[[i, 1]])
        assert int(pair.steps[0]) == int(together.steps[i])
        torch.testing.assert_close(pair.value[0], together.value[i], rtol=1e-9, atol=1e-10)
