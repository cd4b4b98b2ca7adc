"""Minimisers and least-squares solvers: five problems each, derivatives against closed forms, batches, NaN, failure."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.verdict import unbounded

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A problem, where to start, its argument, and the minimiser (or a way to check one)."""

    problem: ik.Problem
    z0: Tensor
    theta: Tensor
    solution: Tensor


def _rosenbrock(z: Tensor, a: Tensor) -> Tensor:
    """Minimum at ``(a, a^2)``."""
    return 100 * (z[..., 1] - z[..., 0] ** 2) ** 2 + (a[..., 0] - z[..., 0]) ** 2


_EIGENVALUES = torch.logspace(0, 4, 8, dtype=F64)


def _quadratic(z: Tensor, b: Tensor) -> Tensor:
    """Condition number ``10^4``; minimum at ``b / eigenvalues``."""
    return (0.5 * _EIGENVALUES * z**2 - b * z).sum(-1)


_generator = torch.Generator().manual_seed(3)
_X = torch.randn(60, 4, generator=_generator, dtype=F64)
_LABELS = torch.where(torch.randn(60, generator=_generator, dtype=F64) + _X[:, 0] > 0, 1.0, -1.0).to(F64)


def _logistic(z: Tensor, penalty: Tensor) -> Tensor:
    return torch.nn.functional.softplus(-_LABELS * (z @ _X.mT)).sum(-1) + 0.5 * penalty[..., 0] * z.square().sum(-1)


def _logistic_solution() -> Tensor:
    """By Newton's method on the gradient written out by hand."""
    z = torch.zeros(4, dtype=F64)
    for _ in range(30):
        s = torch.sigmoid(-_LABELS * (_X @ z))
        g = -_X.mT @ (_LABELS * s) + z
        z = z - torch.linalg.solve(_X.mT @ ((s * (1 - s)).unsqueeze(1) * _X) + torch.eye(4, dtype=F64), g)
    return z.unsqueeze(0)


_T = torch.linspace(0, 3, 25, dtype=F64)


def _decay(z: Tensor, data: Tensor) -> Tensor:
    return z[..., :1] * torch.exp(-z[..., 1:2] * _T) + z[..., 2:] - data


def _decay_problem() -> tuple[Tensor, Tensor]:
    """Data that the model cannot fit: the residual at the solution is about 1."""
    data = 2.5 * torch.exp(-1.3 * _T) + 0.5 + 0.3 * torch.sin(7 * _T)
    z = torch.tensor([2.0, 1.0, 0.5], dtype=F64)
    for _ in range(100):  # Newton on half the squared norm, by autograd
        H = torch.autograd.functional.hessian(lambda y: 0.5 * _decay(y, data).square().sum(), z)
        g = torch.autograd.functional.jacobian(lambda y: 0.5 * _decay(y, data).square().sum(), z)
        z = z - torch.linalg.solve(H, g)
    return data.unsqueeze(0), z.unsqueeze(0)


_SCALES = 10.0 ** torch.arange(-4, 5, 2, dtype=F64).unsqueeze(1)


def _scaled(z: Tensor, unit: Tensor) -> Tensor:
    """Rosenbrock's function in units that differ by 16 orders of magnitude in value and 8 in length from first to last."""
    return unit[..., 0] ** 2 * _rosenbrock(z / unit, torch.ones_like(unit))


def _cases() -> dict[str, Case]:
    data, fit = _decay_problem()
    ones = torch.ones(1, 1, dtype=F64)
    start = torch.tensor([[-1.2, 1.0]], dtype=F64)
    b = torch.arange(1.0, 9.0, dtype=F64).unsqueeze(0)
    return {
        "rosenbrock": Case(ik.Argmin(_rosenbrock), start, ones, torch.ones(1, 2, dtype=F64)),
        "quadratic": Case(ik.Argmin(_quadratic), torch.zeros(1, 8, dtype=F64), b, b / _EIGENVALUES),
        "logistic": Case(ik.Argmin(_logistic), torch.zeros(1, 4, dtype=F64), ones, _logistic_solution()),
        "curve fit": Case(ik.LeastSquares(_decay), torch.tensor([[1.0, 1.0, 0.0]], dtype=F64), data, fit),
        "scales": Case(ik.Argmin(_scaled), start * _SCALES, _SCALES, _SCALES.expand(-1, 2)),
    }


CASES = _cases()

MINIMISERS: dict[str, Any] = {
    "gradient_descent": "gradient_descent",
    "nesterov": ik.GradientDescent(nesterov=True),
    "lbfgs": "lbfgs",
    "lbfgs, memory 3": ik.LBFGS(memory=3),
    "bfgs": "bfgs",
    "nonlinear_cg": "nonlinear_cg",
    "nonlinear_cg, polak_ribiere": ik.NonlinearCG("polak_ribiere"),
    "newton_cg": "newton_cg",
    "newton_cg, few inner steps": ik.NewtonCG(inner_steps=5),
    "auto": "auto",
}
LEAST_SQUARES: dict[str, Any] = {name: name for name in ("dogleg", "gauss_newton", "levenberg_marquardt")}
SOLVERS = MINIMISERS | LEAST_SQUARES
FITTING = ("lbfgs", "nonlinear_cg", "newton_cg", "dogleg", "gauss_newton", "levenberg_marquardt", "auto")
ROWS = [(s, c) for s in MINIMISERS for c in CASES] + [(s, "curve fit") for s in LEAST_SQUARES]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("solver", "case"), ROWS, ids=[f"{s} on {c}" for s, c in ROWS])
def test_finds_the_minimum(solver: str, case: str) -> None:
    c = CASES[case]
    solution = ik.solve(c.problem, c.z0, (c.theta,), solver=SOLVERS[solver], batch_dims=1, in_dims=(0,), rtol=1e-9)
    error = ((solution.value - c.solution) / c.solution.abs().amax(1, keepdim=True)).abs().max()
    assert error < 1e-5, f"relative error {error:.2e} after {solution.steps.tolist()} steps"


def test_steps_of_the_quick_ones_are_few() -> None:
    """Second-order and quasi-Newton methods, on problems whose cost is known from the literature to about this."""
    table = [("bfgs", "rosenbrock", 60), ("lbfgs", "rosenbrock", 60), ("newton_cg", "rosenbrock", 40),
             ("newton_cg", "quadratic", 12), ("bfgs", "quadratic", 80), ("newton_cg", "logistic", 12),
             ("levenberg_marquardt", "curve fit", 30), ("gauss_newton", "curve fit", 40)]  # fmt: skip
    for solver, case, limit in table:
        c = CASES[case]
        solution = ik.solve(c.problem, c.z0, (c.theta,), solver=solver, batch_dims=1, in_dims=(0,))
        assert int(solution.steps.max()) <= limit, f"{solver} on {case}: {solution.steps.tolist()} steps"


def _trigonometric(z: Tensor) -> Tensor:
    """Moré, Garbow & Hillstrom (1981), no. 26: residuals are what is left of ``n``, and so is their rounding."""
    n = z.shape[-1]
    i = torch.arange(1, n + 1, dtype=z.dtype)
    return n - torch.cos(z).sum(-1, keepdim=True) + i * (1 - torch.cos(z)) - torch.sin(z)


@pytest.mark.parametrize(
    "solver", ["lbfgs", "bfgs", "nonlinear_cg", "newton_cg", "levenberg_marquardt", "gauss_newton", "auto"]
)
def test_an_objective_with_cancellation(solver: str) -> None:
    """Its values round a thousand to a million times as coarsely as ``eps |f|``: what goes on is the gradient."""
    z0 = torch.ones(70, dtype=F64) / 70
    solution = ik.least_squares(_trigonometric, z0, solver=solver)
    most = 240 if solver == "nonlinear_cg" else 205  # its line searches among rounding: 221 on another processor
    assert int(solution.evaluations) <= most, f"{solution.evaluations} evaluations, {solution.steps} steps"
    half = lambda z: 0.5 * _trigonometric(z).square().sum()  # noqa: E731
    z, H = solution.value, torch.func.hessian(half)(solution.value)
    assert float(torch.linalg.eigvalsh(H).min()) > 0, "not a minimum"
    assert float(torch.linalg.solve(H, torch.func.grad(half)(z)).norm()) < 1e-7


@pytest.mark.parametrize("offset", [1e3, 1e8])
@pytest.mark.parametrize("solver", ["lbfgs", "bfgs", "newton_cg", "gradient_descent"])
def test_a_constant_changes_nothing(solver: str, offset: float) -> None:
    """Where the constant hides the change of the values, the minimum is found no later and no less exactly."""
    c = CASES["rosenbrock"]
    options: dict[str, Any] = {"solver": solver, "batch_dims": 1}
    plain = ik.argmin(_rosenbrock, c.z0, (c.theta,), **options)
    lifted = ik.argmin(lambda z, a: _rosenbrock(z, a) + offset, c.z0, (c.theta,), **options)
    assert float((lifted.value - c.solution).abs().max()) < 1e-7
    assert int(lifted.evaluations) <= 1.3 * int(plain.evaluations) + 5


def test_conjugate_gradients_end_on_a_quadratic_after_as_many_steps_as_there_are_eigenvalues() -> None:
    """With line searches that are nearly exact; three eigenvalues."""
    eigenvalues = torch.tensor([1.0, 1, 1, 5, 5, 5, 20, 20], dtype=F64)
    solver = ik.NonlinearCG("polak_ribiere", curvature=1e-3)
    objective = lambda z: (0.5 * eigenvalues * z**2 - z).sum(-1)  # noqa: E731
    solution = ik.argmin(objective, torch.zeros(1, 8, dtype=F64), solver=solver, batch_dims=1)
    assert int(solution.steps) <= 5, f"{solution.steps} steps"
    torch.testing.assert_close(solution.value, (1 / eigenvalues).unsqueeze(0))


def test_the_directions_of_hager_and_zhang() -> None:
    """Their eq. 1.3 to 1.6 for one sample at a time; every direction descends by at least ``7/8 |g|^2``."""
    generator = torch.Generator().manual_seed(0)
    d, before, g = (torch.randn(50, 4, generator=generator, dtype=F64) for _ in range(3))
    state = {"d": d, "g": before, "t": torch.ones(50, dtype=F64), "slope": torch.ones(50, dtype=F64)}
    found = ik.NonlinearCG()._beta(g, state)
    for i in range(50):
        y = g[i] - before[i]
        dy = float(d[i] @ y)
        plain = float(y @ g[i]) / dy - 2 * float(y @ y) * float(d[i] @ g[i]) / dy**2
        bound = -1 / (float(d[i].norm()) * min(0.01, float(before[i].norm())))
        assert float(found[i]) == pytest.approx(max(plain, bound))
        if plain >= bound:
            assert float((found[i] * d[i] - g[i]) @ g[i]) <= -0.875 * float(g[i] @ g[i]) + 1e-12


@pytest.mark.parametrize("where", ["along the gradient", "at the bend", "on the second leg", "all the way"])
def test_the_path_of_the_dogleg(where: str) -> None:
    """One step on linear residuals with columns of length 1."""
    generator = torch.Generator().manual_seed(5)
    A = torch.randn(6, 3, generator=generator, dtype=F64)
    A[:, 1] += 3 * A[:, 0]
    A, b = A / A.norm(dim=0), torch.randn(6, generator=generator, dtype=F64)
    g = -A.T @ b
    cauchy = -g * (g @ g) / (A @ g).square().sum()
    newton = torch.linalg.lstsq(A, b.unsqueeze(1)).solution[:, 0]
    far = float(newton.norm() / cauchy.norm())
    assert far > 1.01
    part = {
        "along the gradient": 0.5,
        "at the bend": 1.0,
        "on the second leg": 0.5 * (1 + far),
        "all the way": 2 * far,
    }[where]
    low, high = 0.0, 1.0
    for _ in range(60):  # where the second leg leaves the ball
        middle = 0.5 * (low + high)
        inside = (cauchy + middle * (newton - cauchy)).norm() <= part * cauchy.norm()
        low, high = (middle, high) if inside else (low, middle)
    wanted = 0.5 * cauchy if part == 0.5 else cauchy + low * (newton - cauchy)
    found = ik.least_squares(
        lambda z: A @ z - b, torch.zeros(3, dtype=F64), solver=ik.Dogleg(radius=part), max_steps=1, on_failure="ignore"
    )
    torch.testing.assert_close(found.value, wanted)


def test_armijo_steps_fall_and_polyak_steps_are_those_of_the_formula() -> None:
    eigenvalues = torch.tensor([1.0, 4.0, 9.0], dtype=F64)

    def objective(z: Tensor) -> Tensor:
        return 0.5 * (eigenvalues * (z - 1) ** 2).sum(-1) + 2.0

    z0 = torch.zeros(2, 3, dtype=F64) + torch.tensor([[0.0], [5.0]], dtype=F64)
    points: list[Tensor] = []
    watch = {"callback": lambda step, z, norm: points.append(z.clone()), "batch_dims": 1, "max_steps": 400}
    for solver in (ik.GradientDescent(step_size="armijo"), ik.GradientDescent(step_size="polyak", optimum=2.0)):
        points.clear()
        solution = ik.argmin(objective, z0, solver=solver, **watch)
        torch.testing.assert_close(solution.value, torch.ones(2, 3, dtype=F64))
        if solver.step_size == "armijo":
            values = torch.stack([objective(z) for z in [z0, *points]])
            assert float((values[1:] - values[:-1]).max()) < 1e-13, "the objective rose"
            assert int(solution.steps.max()) < 110, "lengths that lower the objective by next to nothing"
        else:  # the callback sees the best point, which the first step is
            g = eigenvalues * (z0 - 1)
            t = (objective(z0) - 2.0) / g.square().sum(1)
            torch.testing.assert_close(points[0], z0 - t.unsqueeze(1) * g)
    with pytest.raises(ik.ConvergenceError):
        ik.argmin(objective, z0, solver=ik.GradientDescent(step_size="polyak", optimum=3.0), batch_dims=1)


# ------------------------------------------------------------------------------------------------------------ derivatives
@pytest.mark.parametrize("solver", ["gradient_descent", "lbfgs", "bfgs", "newton_cg", "auto"])
def test_derivative_of_the_minimum(solver: str) -> None:
    """``z = (a, a^2)``: ``dz/da = (1, 2a)``; and ``z = b / eigenvalues``."""
    a = torch.tensor([[0.8]], dtype=F64, requires_grad=True)
    value = ik.argmin(_rosenbrock, CASES["rosenbrock"].z0, (a,), solver=solver, batch_dims=1).value
    rows = [torch.autograd.grad(value[0, i], a, retain_graph=True)[0].item() for i in range(2)]
    assert rows == pytest.approx([1.0, 1.6], abs=1e-5)
    b = CASES["quadratic"].theta.clone().requires_grad_()
    value = ik.argmin(_quadratic, CASES["quadratic"].z0, (b,), solver=solver, batch_dims=1).value
    (gradient,) = torch.autograd.grad(value.sum(), b)
    assert torch.allclose(gradient, 1 / _EIGENVALUES.unsqueeze(0), rtol=1e-6)


@pytest.mark.parametrize("solver", FITTING)
def test_derivative_of_a_fit_uses_the_full_hessian(solver: str) -> None:
    """``dz/d(data) = H^{-1} R'`` with the full Hessian ``H``; with ``R'R`` instead it is visibly wrong here."""
    c = CASES["curve fit"]
    data = c.theta[0].clone().requires_grad_()
    value = ik.least_squares(_decay, c.z0[0], (data,), solver=solver).value
    J = torch.stack([torch.autograd.grad(v, data, retain_graph=True)[0] for v in value])
    z, plain = c.solution[0], c.theta[0]
    H = torch.autograd.functional.hessian(lambda y: 0.5 * _decay(y, plain).square().sum(), z)
    R = torch.autograd.functional.jacobian(lambda y: _decay(y, plain), z)
    wanted, shortcut = torch.linalg.solve(H, R.mT), torch.linalg.solve(R.mT @ R, R.mT)
    assert torch.allclose(J, wanted, atol=1e-6)
    assert not torch.allclose(J, shortcut, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------------- batches
ALL = [*SOLVERS, "Adam", "SGD"]


def _solver(name: str) -> Any:
    optimisers = {
        "Adam": ik.TorchOptim(torch.optim.Adam, lr=0.05),
        "SGD": ik.TorchOptim(torch.optim.SGD, lr=0.1, momentum=0.5),
    }
    return optimisers[name] if name in optimisers else SOLVERS[name]


def _batch(count: int = 4) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    """Fits of different difficulty: ``r = [z - t, (z_1 z_2 - 1) / 2]``."""
    t = torch.linspace(-1.5, 2.0, 2 * count, dtype=F64).reshape(count, 2)

    def residuals(z: Tensor, t: Tensor) -> Tensor:
        return torch.cat([z - t, 0.5 * (z.prod(-1, keepdim=True) - 1)], -1)

    return residuals, torch.zeros(count, 2, dtype=F64), t


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ALL)
def test_batch_equals_loop(name: str) -> None:
    residuals, z0, t = _batch()
    options: dict[str, Any] = {"solver": _solver(name), "rtol": 1e-8, "atol": 1e-8}
    together = ik.least_squares(residuals, z0, (t,), batch_dims=1, in_dims=(0,), **options)
    frozen = ik.least_squares(residuals, z0, (t,), batch_dims=1, **options)
    for i in range(len(t)):
        alone = ik.least_squares(residuals, z0[i], (t[i],), **options)
        assert torch.allclose(together.value[i], alone.value, atol=1e-6), f"sample {i}"
        assert torch.allclose(frozen.value[i], alone.value, atol=1e-6), f"sample {i}, frozen"
        assert abs(int(together.steps[i]) - int(alone.steps)) <= 1, f"sample {i}: {together.steps.tolist()}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["gradient_descent", "lbfgs", "bfgs", "newton_cg", "gauss_newton", "levenberg_marquardt", "auto"]
)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    t = torch.tensor([[2.0, 1.5], [0.7, 1.0]], dtype=dtype)
    solution = ik.least_squares(
        lambda z, t: z**3 + z - t, torch.ones_like(t), (t,), solver=name, batch_dims=1, on_failure="ignore"
    )
    exact = torch.tensor([[1.0, 0.861224], [0.541351, 0.682328]])  # z^3 + z = t
    assert solution.value.dtype == dtype
    assert bool(solution.converged.all()), solution
    assert (solution.value.float() - exact).abs().max() < 4 * torch.finfo(dtype).eps ** (
        2 / 3
    )  # gradients at z0: 1 to 8


@pytest.mark.parametrize("name", ALL)
def test_nan_is_contained(name: str) -> None:
    residuals, z0, t = _batch()
    clean = ik.least_squares(residuals, z0, (t,), batch_dims=1, solver=_solver(name), rtol=1e-8, atol=1e-8)
    t = t.clone()
    t[2] = torch.nan
    solution = ik.least_squares(
        residuals, z0, (t,), batch_dims=1, solver=_solver(name), rtol=1e-8, atol=1e-8, on_failure="ignore"
    )
    assert solution.converged.tolist() == [True, True, False, True]
    others = [0, 1, 3]
    assert torch.allclose(solution.value[others], clean.value[others], atol=1e-6)
    assert bool(torch.isfinite(solution.value).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("limit", [1, 2])
def test_max_steps_and_failure(name: str, limit: int) -> None:
    """Stopped early: no more steps than allowed, nothing claimed, no worse than the start, and an error that says so."""
    residuals, z0, t = _batch()
    options: dict[str, Any] = {"solver": _solver(name), "batch_dims": 1, "max_steps": limit}
    solution = ik.least_squares(residuals, z0, (t,), on_failure="ignore", **options)
    start = ik.least_squares(residuals, z0, (t,), on_failure="ignore", trace=True, **options).trace
    assert int(solution.steps.max()) <= limit and not bool(solution.converged.any())
    assert start is not None and bool((solution.residual_norm <= start[0]).all())
    with pytest.raises(ik.ConvergenceError, match="step limit"):
        ik.least_squares(residuals, z0, (t,), **options)


@pytest.mark.parametrize("name", [*MINIMISERS, "Adam", "SGD"])
def test_an_objective_without_minimum_is_reported(name: str) -> None:
    solution = ik.argmin(
        lambda z: z.sum(-1), torch.zeros(2, 2, dtype=F64), solver=_solver(name), batch_dims=1, max_steps=50,
        on_failure="ignore",
    )  # fmt: skip
    assert not bool(solution.converged.any()) and bool(torch.isfinite(solution.value).all())


@pytest.mark.slow
def test_limited_memory_grows_where_it_helps() -> None:
    """``H`` of a sample is what all its pairs make, whether room for them was there from the start or came as they did, and
    whatever was forgotten in between; large states keep ten."""
    scales = torch.logspace(0, 5, 30, dtype=torch.float64)

    def ill(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (scales * (z - x).square()).sum(1)

    x = torch.stack([torch.ones(30, dtype=torch.float64), torch.linspace(1, 2, 30, dtype=torch.float64)])
    steps = {
        memory: ik.argmin(ill, torch.zeros_like(x), (x,), batch_dims=1, solver=ik.LBFGS(memory=memory)).steps
        for memory in (10, None, 40)
    }
    assert bool((4 * steps[None] < steps[10]).all()) and bool((steps[None] < 1.2 * steps[40]).all())

    method, generator = ik.LBFGS(), torch.Generator().manual_seed(0)
    whole = ik.LBFGS(memory=40)
    z = torch.zeros(2, 30, dtype=torch.float64)
    grown, full = method.blank(z), whole.blank(z)
    for k in range(25):
        s = torch.randn(2, 30, dtype=torch.float64, generator=generator)
        pair = (s, scales * s, (scales * s * s).sum(1), torch.tensor([True, k != 7]))
        grown, full = method.learn(grown, *pair), whole.learn(full, *pair)
        if k == 12:
            grown, full = (method.forget(memory, torch.tensor([False, True])) for memory in (grown, full))
    assert grown["inverse"].shape == (2, 40, 40)
    torch.testing.assert_close(method.direction(x, grown), whole.direction(x, full))

    large = method.blank(torch.zeros(1, 1000))
    for _ in range(12):
        s = torch.randn(1, 1000, generator=generator)
        large = method.learn(large, s, s, s.square().sum(1), torch.tensor([True]))
    assert large["inverse"].shape == (1, 10, 10)


@pytest.mark.parametrize("name", ["lbfgs", "bfgs", "newton_cg", "levenberg_marquardt"])
def test_regions_where_the_objective_is_not_finite_are_avoided(name: str) -> None:
    """``log`` barriers: a full step would leave the domain."""
    if name == "levenberg_marquardt":
        solution = ik.least_squares(
            lambda z: torch.stack([torch.log(z[..., 0]), z[..., 0] - 0.5], -1),
            torch.tensor([9.0], dtype=F64),
            solver=name,
        )
        z = float(solution.value)
        assert torch.log(torch.tensor(z)).item() / z + z - 0.5 == pytest.approx(0, abs=1e-6)
    else:
        solution = ik.argmin(lambda z: (z - torch.log(z)).sum(-1), torch.tensor([1e-3, 30.0], dtype=F64), solver=name)
        assert torch.allclose(solution.value, torch.ones(2, dtype=F64), atol=1e-6)


def test_newton_cg_leaves_a_saddle() -> None:
    """Started where the Hessian is indefinite, it goes along negative curvature to a minimum."""
    solution = ik.argmin(
        lambda z: z[0] ** 2 - z[1] ** 2 + 0.25 * z[1] ** 4, torch.tensor([1.0, 1e-3], dtype=F64), solver="newton_cg"
    )
    assert solution.value.abs().tolist() == pytest.approx([0.0, 2**0.5], abs=1e-6)


@pytest.mark.parametrize("name", ["lbfgs", "bfgs", "newton_cg", "levenberg_marquardt", "gauss_newton", "auto"])
def test_the_gradient_goes_below_the_rounding_of_values(name: str) -> None:
    """The objective is 10^6 at its minimum: differences of values end at gradients of about 1e-5, these do not."""
    offset = 1e3 * 2**0.5

    def residuals(z: Tensor) -> Tensor:
        return torch.stack([torch.sinh(z[0]), z[1] - 1 + 0.1 * z[0], 0 * z[0] + offset])

    solution = ik.least_squares(residuals, torch.tensor([1.0, -2.0], dtype=F64), solver=name, rtol=0, atol=1e-11)
    assert float(solution.residual_norm) <= 1e-11
    assert torch.allclose(solution.value, torch.tensor([0.0, 1.0], dtype=F64), atol=1e-10)


def test_levenberg_marquardt_is_invariant_to_units() -> None:
    """Unknowns in other units give the same iterates in those units."""
    units = torch.tensor([1e-6, 1.0, 1e5], dtype=F64)
    c = CASES["curve fit"]
    plain = ik.least_squares(_decay, c.z0[0], (c.theta[0],), solver="levenberg_marquardt", rtol=1e-10)
    scaled = ik.least_squares(
        lambda y, d: _decay(y / units, d), c.z0[0] * units, (c.theta[0],), solver="levenberg_marquardt", rtol=1e-10,
        max_steps=int(plain.steps), on_failure="ignore",
    )  # fmt: skip
    assert torch.allclose(scaled.value / units, plain.value, rtol=1e-6)


def test_rank_deficient_least_squares() -> None:
    """One unknown that nothing depends on stays where it is."""
    for name in ("gauss_newton", "levenberg_marquardt", "newton_cg", "lbfgs"):
        solution = ik.least_squares(
            lambda z: torch.stack([z[0] ** 2 - 2, z[0] - 1]), torch.tensor([1.0, 7.0], dtype=F64), solver=name
        )
        assert float(solution.value[1]) == pytest.approx(7.0, abs=1e-8), name
        z = float(solution.value[0])
        assert 2 * z * (z**2 - 2) + z - 1 == pytest.approx(0, abs=1e-7), name


# ------------------------------------------------------------------------------------------------------------ torch.optim
OPTIMISERS = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.5}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "lambd": 0.0}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_torch_optim_takes_the_steps_of_the_optimiser(name: str) -> None:
    """Twenty steps in a batch are the twenty steps of the optimiser itself on each sample's parameter alone."""
    cls, options = OPTIMISERS[name]
    residuals, z0, t = _batch()
    z0 = z0 + 0.3
    points: list[Tensor] = []

    def keep(step: int, z: Tensor, norm: Tensor) -> None:
        points.append(norm.clone())

    ik.least_squares(
        residuals, z0, (t,), solver=ik.TorchOptim(cls, **options), batch_dims=1, in_dims=(0,), max_steps=20, rtol=1e-12,
        on_failure="ignore", callback=keep,
    )  # fmt: skip
    for i in range(len(t)):
        parameter = torch.nn.Parameter(z0[i].clone())
        optimiser = cls([parameter], **options)
        for step in range(20):
            optimiser.zero_grad()
            (0.5 * residuals(parameter, t[i]).square().sum()).backward()
            if step:
                assert parameter.grad is not None
                assert float(points[step - 1][i]) == pytest.approx(float(parameter.grad.norm()), rel=1e-9), (
                    f"sample {i}, step {step}"
                )
            optimiser.step()


def test_torch_optim_refuses_what_it_cannot_run() -> None:
    with pytest.raises(TypeError, match="lrr"):
        ik.TorchOptim(torch.optim.Adam, lrr=0.1)
    with pytest.raises(ValueError, match="learning rate"):
        ik.TorchOptim(torch.optim.Adam, lr=-1.0)
    with pytest.raises(TypeError, match="closure"):
        ik.TorchOptim(torch.optim.LBFGS)
    with pytest.raises(TypeError, match="class such as"):
        ik.TorchOptim("adam")  # type: ignore[arg-type]


def test_torch_optim_copies() -> None:
    solver = ik.TorchOptim(torch.optim.Adam, lr=0.05)
    assert pickle.loads(pickle.dumps(solver)) == solver == copy.deepcopy(solver)
    assert repr(solver) == "TorchOptim(Adam, lr=0.05)"


# ---------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    "make",
    [
        lambda: ik.LBFGS(memory=0), lambda: ik.BFGS(trials=0), lambda: ik.NewtonCG(radius=0.0),
        lambda: ik.NewtonCG(inner_steps=0), lambda: ik.GaussNewton(halvings=-1),
        lambda: ik.LevenbergMarquardt(damping=0.0), lambda: ik.GradientDescent(step_size=-1.0),
        lambda: ik.GradientDescent(memory=0), lambda: ik.GradientDescent(step_size="wolfe"),
        lambda: ik.GradientDescent(step_size="armijo", nesterov=True), lambda: ik.NonlinearCG(curvature=2.0),
        lambda: ik.NonlinearCG("steepest"), lambda: ik.NonlinearCG(trials=0), lambda: ik.Dogleg(radius=0.0),
    ],
)  # fmt: skip
def test_options_out_of_range(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be|takes a number"):
        make()


def test_fixed_step_gradient_descent_can_be_unrolled() -> None:
    """Through enough plain steps the unrolled derivative is the implicit one."""
    b = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
    value = ik.argmin(
        lambda z, b: (z**2 - b * z).sum(), torch.zeros(2, dtype=F64), (b,), solver=ik.GradientDescent(step_size=0.3),
        rule="unroll",
    ).value  # fmt: skip
    (gradient,) = torch.autograd.grad(value.sum(), b)
    assert torch.allclose(gradient, torch.full_like(gradient, 0.5), atol=1e-6)


CONFORM = [ik.NonlinearCG("polak_ribiere"), ik.GradientDescent(step_size="armijo")]  # by name: test_conformance.py


@pytest.mark.one_in(7)
@ik.testing.parametrize_with_checks(CONFORM)
def test_conformance(solver: Any, check: Any) -> None:
    check(solver)


@pytest.mark.slow
def test_a_long_valley_is_followed_to_its_end() -> None:
    """Rosenbrock's function in a chain of 300 unknowns: some 2,000 steps, and the smallest gradient is not at their end."""

    def chain(z: torch.Tensor) -> torch.Tensor:
        return (100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()

    z0 = torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(150)
    for solver in ("auto", "lbfgs"):
        solution = ik.argmin(chain, z0, solver=solver)
        assert torch.autograd.functional.jacobian(chain, solution.value).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("falls", "spent"),
    [
        ((7.0, 6.4, 4.25, 0.124, 0.0056, 0.056, 0.076, 0.069, 0.07), False),  # L-BFGS in a valley of the regret table
        ((7.0, 6.4, 4.25, 0.124, 0.0056, 0.004, 0.003, 0.002, 0.001), True),
        ((7.0, 6.4, 4.25, 0.124, 0.0056, 0.0, 0.003, 0.0, 0.003), True),
    ],
)
def test_what_falls_as_much_as_before_gets_on(falls: tuple[float, ...], spent: bool, monkeypatch: Any) -> None:
    """A valley that is flat beside the slope that led into it (valley, chain and none, 300 x 1) is followed; what falls less
    from look to look is left."""
    monkeypatch.setattr(unbounded, "falls_forever", lambda f, z, which: which & False)
    one = torch.ones(1, dtype=torch.float64)
    look, value, z, given_up = unbounded.Progress(), 316 * one, one.unsqueeze(1), False
    for fall in (0.0, *falls):
        value = value - fall
        f: Any = SimpleNamespace(value=lambda z, value=value: value, best_norm=0.05 * one, active=one > 0, eps=2.2e-16)
        given_up = given_up or bool(look.spent(f, z))
    assert given_up == spent


@pytest.mark.parametrize("z0", [-5.0, 0.0, 0.5, 30.0])
@pytest.mark.parametrize("power", [1, 2])
def test_a_plateau_behind_a_slope_is_a_minimum(z0: float, power: int) -> None:
    solution = ik.argmin(lambda z: torch.relu(1 - z) ** power, torch.tensor(z0, dtype=torch.float64))
    assert solution.value >= 1 - 1e-6
