"""Minimisation within bounds by default: Newton's steps on quadratic models within them, while the objective is convex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.constrained.projected import ProjectedNewton
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage

F64 = torch.float64


def _contact(u: Tensor, x: Tensor) -> Tensor:
    """A string over an obstacle: the active bounds are found from none, or from all."""
    ends = torch.nn.functional.pad(u, (1, 1))
    return 0.5 * len(u) * (ends[1:] - ends[:-1]).square().sum() - (2 + 0 * x).mean() * u.sum() / len(u)


def _logistic(w: Tensor, x: Tensor) -> Tensor:
    i, j = torch.arange(300, dtype=F64), torch.arange(len(x), dtype=F64)
    margin = torch.sin(1 + 7.3 * i.unsqueeze(1) * (1 + j).sqrt()) @ w
    return (
        torch.nn.functional.softplus(margin).mean()
        - ((torch.sin(3 * i) > 0) * margin).mean()
        + 1e-3 * w @ w
        + w @ x / 9
    )


def _rosenbrock(u: Tensor, x: Tensor) -> Tensor:
    return (100 * (u[1:] - u[:-1] ** 2) ** 2 + (1 - u[:-1]) ** 2).sum() + 0 * x.sum()


def _counts(u: Tensor, x: Tensor) -> Tensor:
    """A likelihood that ends at bounds of its domain."""
    i, j = torch.arange(2 * len(u), dtype=F64).unsqueeze(1), torch.arange(len(u), dtype=F64)
    rate = torch.sin(1 + i * (1 + j).sqrt()).abs() @ u
    return (rate - (1 + torch.cos(i.squeeze(1))) * torch.log(rate)).sum() + x @ u / 9


ROWS = {
    "contact": (_contact, (None, 0.05), 0.0),
    "logistic": (_logistic, (0.0, None), 0.0),
    "rosenbrock": (_rosenbrock, (-2.0, 0.8), -1.0),
    "counts": (_counts, (0.0, None), 1.0),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [3, 40, 150])
@pytest.mark.parametrize("name", ROWS)
def test_minima_within_bounds(name: str, n: int) -> None:
    """As SciPy's L-BFGS-B has them, at no more than a hundred evaluations, and with the derivative of the active bounds."""
    objective, (low, high), start = ROWS[name]
    x = torch.cos(torch.arange(n, dtype=F64)).requires_grad_()
    z0 = torch.full((n,), start, dtype=F64)
    s = ik.argmin(objective, z0, (x,), bounds=(low, high))
    assert s.solver == "auto (projected_newton)" and int(s.evaluations) <= 110, s

    def value(v: Any) -> tuple[float, Any]:
        z = torch.as_tensor(v).requires_grad_()
        f = objective(z, x.detach())
        return float(f.detach()), torch.autograd.grad(f, z)[0].numpy()

    other = minimize(value, z0.numpy(), jac=True, bounds=[(low, high)] * n, options={"maxiter": 3000, "ftol": 1e-15})
    assert float(objective(s.value, x).detach()) <= other.fun + 1e-9 * (1 + abs(other.fun))
    if name in ("logistic", "counts") and n < 50:
        seed = torch.cos(2 * torch.arange(n, dtype=F64))
        (g,) = torch.autograd.grad(s.value @ seed, x)
        e = 1e-5 * torch.sin(1 + torch.arange(n, dtype=F64))
        ends = [ik.argmin(objective, z0, (x.detach() + k * e,), bounds=(low, high)).value @ seed for k in (1, -1)]
        torch.testing.assert_close(g @ e, 0.5 * (ends[0] - ends[1]), rtol=1e-5, atol=1e-12)


def test_a_quadratic_takes_one_step_however_many_bounds_are_active() -> None:
    i = torch.arange(60, dtype=F64)
    Q = torch.sin(1 + i.unsqueeze(1) * (1 + i).sqrt())
    Q, b = Q @ Q.mT / 60 + 0.1 * torch.eye(60, dtype=F64), torch.cos(3 * i)
    s = ik.argmin(lambda z, b: 0.5 * z @ Q @ z - b @ z, torch.full((60,), 9.0, dtype=F64), (b,), bounds=(-0.3, 0.4))
    assert s.solver == "auto (projected_newton)" and int(s.steps) == 1
    slope = Q @ s.value - b
    at = torch.where(
        s.value <= -0.3 + 1e-12, slope.clamp_max(0), torch.where(s.value >= 0.4 - 1e-12, slope.clamp_min(0), slope)
    )
    assert float(at.abs().max()) < 1e-10 and 10 < int((slope.abs() > 1e-6).sum()) < 58


def test_samples_that_are_not_convex_go_on_otherwise() -> None:
    """Beside others that are: each with the value that it has alone; equal bounds hold an unknown, infinite ones none."""
    well = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=F64)
    low = torch.tensor([[-torch.inf, 0.3, -1.0]], dtype=F64).expand(4, 3)
    high = torch.tensor([[torch.inf, 0.3, 0.5]], dtype=F64).expand(4, 3)
    f = lambda z, c: ((z - 2).square() * (1 - c).unsqueeze(1) + c.unsqueeze(1) * (z.square() - 1).square()).sum(-1)  # noqa: E731
    z0 = torch.full((4, 3), 0.1, dtype=F64)
    s = ik.argmin(f, z0, (well,), bounds=(low, high), batch_dims=1, in_dims=0)
    want = torch.tensor([[2.0, 0.3, 0.5], [1.0, 0.3, 0.5]], dtype=F64)[well.long()]
    torch.testing.assert_close(s.value.abs(), want, rtol=0, atol=1e-7)
    assert "projected_newton" in s.solver and "proximal_gradient" in s.solver


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    c = torch.tensor([0.25, 2.0, -3.0], dtype=dtype)
    f = lambda z, c: ((z - c) ** 2).sum() + 0.1 * (z**4).sum()  # noqa: E731
    s = ik.argmin(f, torch.zeros(3, dtype=dtype), (c,), bounds=(-1, 1))
    want = ik.argmin(f, torch.zeros(3, dtype=F64), (c.double(),), bounds=(-1, 1))
    torch.testing.assert_close(s.value.double(), want.value, rtol=0, atol=30 * torch.finfo(dtype).eps)


def test_an_objective_without_second_derivative_is_left_to_gradients() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            ctx.save_for_backward(z)
            return (z - 2).square().sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            if torch.is_grad_enabled():
                raise RuntimeError("no second derivative")
            return 2 * g * (ctx.saved_tensors[0] - 2)

    s = ik.argmin(Once.apply, torch.zeros(3, dtype=F64), bounds=(0, 1))
    torch.testing.assert_close(s.value, torch.ones(3, dtype=F64))
    assert s.solver == "auto (proximal_gradient)"


def test_a_start_outside_the_bounds_may_lie_outside_the_domain() -> None:
    """As SciPy's L-BFGS-B takes it; elsewhere a start that is not in the domain is refused."""
    entropy = lambda z: (z * torch.log(z)).sum(-1)  # noqa: E731
    z0 = torch.tensor([[-1.0, -1.0], [0.5, -2.0], [0.5, 0.5]], dtype=F64)
    s = ik.argmin(entropy, z0, bounds=(1e-3, 1), batch_dims=1)
    torch.testing.assert_close(s.value, torch.full_like(z0, float(np.exp(-1))), rtol=0, atol=1e-8)
    with pytest.raises(ik.ConvergenceError, match="start inside its domain"):
        ik.argmin(entropy, z0[0], bounds=(None, 1))


def test_what_is_not_convex_costs_a_few_evaluations_more() -> None:
    f = lambda z: (torch.cos(3 * z) + 0.1 * z * z).sum()  # noqa: E731
    z0 = torch.linspace(-0.3, 0.3, 20, dtype=F64)
    s, named = (ik.argmin(f, z0, bounds=(-1, 1.5), solver=name) for name in ("auto", "proximal_gradient"))
    assert int(s.evaluations) <= int(named.evaluations) + 10
    torch.testing.assert_close(s.value, named.value, rtol=0, atol=1e-6)


def test_it_is_for_bounds_alone() -> None:
    for kwargs in ({"project": ik.project.simplex()}, {"constraints": ik.Equality(lambda z: z.sum() - 1)}):
        with pytest.raises(ik.CapabilityError, match="bounds"):
            ik.argmin(lambda z: z @ z, torch.full((3,), 0.4, dtype=F64), solver=ProjectedNewton(), **kwargs)


def test_a_step_out_of_the_domain_is_halved() -> None:
    """Newton's first step from far below goes to where the objective is not defined."""
    z0 = torch.tensor([0.01, 0.5, 0.99], dtype=F64)
    f = lambda z: (1e-3 / (1 - z)).sum() - torch.log(z).sum() * 1e-3 + (z - np.pi / 10).square().sum()  # noqa: E731
    s = ik.argmin(f, z0, bounds=(0, 1))
    assert bool(s.converged) and float((s.value - s.value.mean()).abs().max()) < 1e-9


def _wood(z: Tensor) -> Tensor:
    """Colville's function; stationary at f = 7.877 too, a saddle at the end of a long valley."""
    a, b, c, d = z
    return (
        100 * (b - a**2) ** 2 + (1 - a) ** 2 + 90 * (d - c**2) ** 2 + (1 - c) ** 2
        + 10.1 * ((b - 1) ** 2 + (d - 1) ** 2) + 19.8 * (b - 1) * (d - 1)
    )  # fmt: skip


def _rosenbrock(z: Tensor) -> Tensor:
    return (100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()


#: An objective, a start, bounds, the least value among minima that may be reached, evaluations.
VALLEYS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], tuple[float, float], float, int]] = {
    "Wood": (_wood, [-3.0, -1.0, -3.0, -1.0], (-10.0, 10.0), 0.0, 700),
    "five links": (_rosenbrock, [-1.2, 1.0, -1.2, 1.0, -1.2], (-10.0, 10.0), 3.930839434, 500),
    "five links, a bound holds": (_rosenbrock, [-1.2, 0.8, -1.2, 0.8, -1.2], (-10.0, 0.8), 4.0802180678, 500),
    "twenty links": (_rosenbrock, [-1.2, 1.0] * 10, (-10.0, 10.0), 3.9866238543, 750),
    "twenty links, bounds hold": (_rosenbrock, [-1.2, 0.8] * 10, (-10.0, 0.8), 15.8999851340, 600),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", VALLEYS)
def test_long_valleys_within_bounds(case: str) -> None:
    """They end in a minimum, not in the saddle that Newton's steps on the conditions of optimality are drawn to."""
    f, start, bounds, least, evaluations = VALLEYS[case]
    s = ik.argmin(f, torch.tensor(start, dtype=F64), bounds=bounds)
    assert abs(float(f(s.value)) - least) < 1e-8
    assert s.evaluations <= evaluations, f"{s.evaluations} evaluations"


def test_what_a_method_for_equations_finds_is_looked_at_more_closely() -> None:
    """It need not be lower than where it began, and a negative curvature of a hundredth of a percent may be all there is."""
    stages = (Stage("proximal_gradient", max_steps=100), Stage("newton", max_steps=30, scale=None))
    z0 = torch.tensor([-3.0, -1.0, -3.0, -1.0], dtype=F64)
    s = ik.argmin(_wood, z0, bounds=(-10.0, 10.0), solver=Polyalgorithm(stages), on_failure="ignore")
    H = torch.func.hessian(_wood)(s.value)
    assert not bool(s.converged) or float(torch.linalg.eigvalsh(H).min()) > 0


@pytest.mark.parametrize("unit", [1e15, 1e16])
def test_an_objective_of_any_size_has_its_minimum(unit: float) -> None:
    """A unit in the last place of ``z`` changes the slope by more than the bounds are apart: 44,000 evaluations, and refused
    at the last digit."""
    at = torch.tensor([0.3, -1.2, 2.5], dtype=F64)
    found = ik.argmin(lambda z: unit * (z - at).square().sum() + z.sum(), torch.zeros(3, dtype=F64), bounds=(-1.0, 1.0))
    torch.testing.assert_close(found.value, at.clamp(-1, 1), rtol=0, atol=1e-15)
    assert found.evaluations <= 400
