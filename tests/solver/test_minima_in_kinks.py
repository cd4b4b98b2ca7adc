"""Minima without a derivative: refused at once where the search begins in one, and in words that hold."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrices import randn
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.constrained import model
from implicitkit.solver.verdict import curvature
from implicitkit.solver.verdict.curvature import lanczos
from implicitkit.solver.verdict.kinks import in_a_kink

F64 = torch.float64
_AT = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
_IN_KINKS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "sqrt(z^2)": (lambda z: torch.sqrt(z * z).sum(), torch.zeros(1, dtype=F64)),
    "sum sqrt((z - a)^2)": (lambda z: torch.sqrt((z - _AT.to(z)).square()).sum(), _AT),
    "one of two": (lambda z: torch.sqrt(z[0] * z[0]) + (z[1] - 1) ** 2, torch.tensor([0.0, 1.0], dtype=F64)),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", list(_IN_KINKS))
def test_a_start_in_a_kink(name: str, dtype: torch.dtype) -> None:
    objective, at = _IN_KINKS[name]
    with pytest.raises(ik.ConvergenceError, match="minimum in a kink") as caught:
        ik.argmin(objective, at.to(dtype))
    assert "left the domain" not in str(caught.value)
    found = caught.value.solution
    assert found.evaluations < 60
    torch.testing.assert_close(found.value, at.to(dtype))


@pytest.mark.parametrize(
    ("name", "objective", "start", "best"),
    [
        ("a slope beside", lambda z: torch.sqrt(z * z).sum() - 2 * z.sum() + z.square().sum(), [0.0, 0.0], [0.5, 0.5]),
        (
            "lower along each of the two alone",
            lambda z: 0.2 * (z[0] + z[1]).square().sqrt() - (z[0] - z[1]).square().sqrt() + z[0] ** 2 + 2 * z[1] ** 2,
            [0.0, 0.0],
            [0.4, 0.3],
        ),
        ("a kink that is no minimum", lambda z: -torch.sqrt(z * z).sum() + z.square().sum(), [0.0], [0.5]),
    ],
)
def test_a_start_without_a_derivative_that_is_no_minimum(
    name: str, objective: Callable[[Tensor], Tensor], start: list[float], best: list[float]
) -> None:
    found = ik.argmin(objective, torch.tensor(start, dtype=F64))
    torch.testing.assert_close(found.value.abs(), torch.tensor(best, dtype=F64), rtol=1e-6, atol=1e-6)


def test_another_unknown_may_move_on() -> None:
    """``z_1`` has a slope where the search begins: nothing is said yet of the kink of ``z_0``."""
    objective = lambda z: torch.sqrt(z[0] ** 2) - 3 * z[0] * z[1] + (z[1] - 1) ** 2 + z[0] ** 4 + z[1] ** 4  # noqa: E731
    found = ik.argmin(objective, torch.zeros(2, dtype=F64))
    assert float(found.value[0]) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("solver", ["auto", "newton_cg", "lbfgs"])
def test_a_search_that_ends_in_a_kink_has_left_no_domain(solver: str, dtype: torch.dtype) -> None:
    start = torch.tensor([1.0, 0.5], dtype=dtype)
    found = ik.argmin(lambda z: torch.sqrt(z * z).sum(), start, solver=solver, on_failure="ignore", max_steps=200)
    assert ik.Status(int(found.status)).name in ("STALLED", "MAX_STEPS")


def test_a_sum_of_kinks_is_told_to_be_a_linear_program() -> None:
    """Which has the minimum, where as many kinks meet as there are unknowns, and its derivative; as has the solve where the
    method is left open."""
    m, q = 21, 0.3
    generator = torch.Generator().manual_seed(0)
    X, noise = (torch.randn(m, k, generator=generator, dtype=F64) for k in (2, 1))
    y = (X.sum(1) + noise.squeeze(1)).requires_grad_()
    zero = torch.zeros(2, dtype=F64)

    def quantile(w: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(q * (y - X @ w), (q - 1) * (y - X @ w)).sum()

    with pytest.raises(ik.ConvergenceError, match=r"sum of kinks .* linear program: ik.QuadraticProgram\(None, q"):
        ik.argmin(quantile, zero, (y,), solver="lbfgs")
    one = torch.eye(m, dtype=F64)
    cost = torch.cat([zero, q * one.new_ones(m), (1 - q) * one.new_ones(m)])
    signs = torch.cat([one.new_zeros(2 * m, 2), -torch.eye(2 * m, dtype=F64)], 1)
    program = ik.QuadraticProgram(None, cost, torch.cat([X, one, -one], 1), y, signs, signs.new_zeros(2 * m))
    w = ik.solve(program).value[:2]
    residuals = (y - X @ w).detach()
    met = residuals.abs() < 1e-9
    assert int(met.sum()) == 2
    moved = w.detach() + 1e-4 * torch.randn(50, 2, generator=generator, dtype=F64)
    assert all(quantile(v, y) > quantile(w, y) for v in moved)
    (slope,) = torch.autograd.grad(w[0], y)
    want = torch.zeros(m, dtype=F64)
    want[met] = torch.linalg.inv(X[met])[0]
    torch.testing.assert_close(slope, want, rtol=1e-7, atol=1e-9)
    found = ik.argmin(quantile, zero, (y,))
    assert found.evaluations < 200
    torch.testing.assert_close(found.value, w)
    torch.testing.assert_close(torch.autograd.grad(found.value[0], y)[0], want, rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Inflections of one unknown, ``x^3``, beside others that have a minimum: a few products with the Hessian must show it.
def _bowl(n: int) -> Tensor:
    return torch.logspace(0, 2, n, dtype=F64)


INFLECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "one curvature": lambda x: x[0] ** 3 + (x[1:] ** 2).sum(),
    "many": lambda x: x[0] ** 3 + (_bowl(len(x))[1:] * x[1:] ** 2).sum(),
    "of fifth order": lambda x: x[0] ** 5 + (_bowl(len(x))[1:] * x[1:] ** 2).sum(),
    "two of them": lambda x: (x[:2] ** 3).sum() + (_bowl(len(x))[2:] * x[2:] ** 2).sum(),
}
MINIMA: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "of fourth order": (lambda x: x[0] ** 4 + (_bowl(len(x))[1:] * x[1:] ** 2).sum(), 0.0),
    "badly conditioned": (lambda x: (10.0 ** torch.linspace(-6, 0, len(x), dtype=F64) * (x - 0.3) ** 2).sum(), 0.3),
    "flat on both sides": (lambda x: torch.log(torch.cosh(_bowl(len(x)) * x)).sum(), 0.0),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [3, 5, 10, 300])
@pytest.mark.parametrize("name", INFLECTIONS)
def test_no_inflection_is_called_a_minimum(name: str, n: int) -> None:
    with pytest.raises(ik.ConvergenceError, match=r"without bound|saddle"):
        ik.argmin(INFLECTIONS[name], torch.ones(n, dtype=F64), max_steps=40)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [3, 5, 10, 300])
@pytest.mark.parametrize("name", MINIMA)
def test_flat_minima_are_minima(name: str, n: int) -> None:
    f, end = MINIMA[name]
    found = ik.argmin(f, torch.full((n,), 0.5, dtype=F64))
    assert float((found.value - end).abs().max()) < 0.05, found


@pytest.mark.parametrize("values", [(2.0,), (2.0, 1e-5), (2.0, -1.0), (3.0, 2.0, 1.0)])
def test_fewer_eigenvalues_than_lanczos_steps(values: tuple[float, ...]) -> None:
    """An exhausted space has no further Ritz value, zero say, that hides the least of those there are."""
    diagonal = torch.tensor(values, dtype=F64).repeat(4)
    lowest, direction, largest = lanczos(lambda q: q * diagonal, torch.zeros(1, len(diagonal), dtype=F64), 6)
    torch.testing.assert_close(lowest, torch.tensor([min(values)], dtype=F64), rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(largest, torch.tensor([max(values)], dtype=F64))
    assert abs(float(torch.linalg.vector_norm(direction)) - 1) < 1e-6


@pytest.mark.parametrize("n", [1, 2, 40])
@pytest.mark.parametrize("solver", ["auto", "newton_cg", "lbfgs", "bfgs"])
def test_an_objective_may_refuse_points_beside_its_minimum(solver: str, n: int) -> None:
    """A third of ``|z|`` away it raises, and between ``1e-4`` to one side and to the other it is asked for the curvature."""

    def objective(z: Tensor) -> Tensor:
        if bool(((z < 0.77) | (z > 0.84)).any()):
            raise ValueError("outside of the domain")
        return (0.5 * (z - 1).square() + 0.1 * z**3).sum()

    found = ik.argmin(objective, torch.full((n,), 0.79, dtype=F64), solver=solver)
    end = (-1 + 2.2**0.5) / 0.6
    torch.testing.assert_close(found.value, torch.full((n,), end, dtype=F64))


@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_saddle_is_left_where_points_further_off_are_refused(n: int) -> None:
    def objective(z: Tensor) -> Tensor:
        if bool((z.abs() > 0.2).any()):
            raise ValueError("outside of the domain")
        return (z**2).sum() - 3 * z[-1] ** 2

    with pytest.raises(ValueError, match="outside of the domain"):  # on the way down from there
        ik.argmin(objective, torch.zeros(n, dtype=F64), solver="newton_cg")


# ---------------------------------------------------------------------------------------------------------------------
# Minimisers of objectives whose values are what is left of terms that cancel: near a minimum only slopes can tell.
A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
OBJECTIVES: dict[str, Callable[[Tensor], Tensor]] = {  # all with their minimum at zero, or as near as rounding lets
    "cosh(z) - 1": lambda z: torch.cosh(z).sum() - z.numel(),
    "1 - cos(z)": lambda z: (1 - torch.cos(z)).sum(),
    "sqrt(1 + z^2) - 1": lambda z: (torch.sqrt(1 + z**2) - 1).sum(),
    "log(1 + z^2)": lambda z: torch.log(1 + z**2).sum(),
    "1e8 + quadratic": lambda z: 1e8 + 0.5 * z @ A @ z,
    "1e8 + coupled": lambda z: 1e8 + torch.log1p(z**2).sum() + torch.cosh(z[0] - z[1]),
    "exponentials": lambda z: 1e6 * (torch.exp(1e-3 * z) - 1 - 1e-3 * z).sum(),
    "large cubics": lambda z: (1e6 * (1 + z) ** 3 - 1e6 * (1 + 3 * z) - 1e6 * z**3).sum() / 3e6,
}
STARTS = (1.0, 1e-3, 1e-9, 1e-13)
OWN = ("auto", "bfgs", "lbfgs", "newton_cg", "nonlinear_cg", "gradient_descent")
OWN_OPTIONS = {
    "armijo": ik.GradientDescent(step_size="armijo"),
    "nesterov": ik.GradientDescent(nesterov=True),
    "polak_ribiere": ik.NonlinearCG("polak_ribiere"),
}
#: whose own tests of progress stop them at 1e-17: from starts of 1e-9 that may be too early, and is said
SCIPY = ("BFGS", "CG", "Newton-CG", "trust-exact")


def minimise(name: str, start: float, solver: Any, **options: Any) -> tuple[ik.Solution, float]:
    z0 = torch.tensor([start, -0.7 * start], dtype=torch.float64)
    found = ik.argmin(OBJECTIVES[name], z0, solver=solver, **options)
    return found, float(found.value.abs().max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("solver", [*OWN, *OWN_OPTIONS])
def test_minima_are_found_where_values_cannot_tell(name: str, solver: str) -> None:
    # Nesterov's steps wander where gradients are rounding, as those of the exponentials (2e-13) are at 5e-14 of 1e-3
    starts = STARTS if solver != "nesterov" else STARTS[:1] if name == "exponentials" else STARTS[:2]
    for start in starts:
        found, error = minimise(name, start, OWN_OPTIONS.get(solver, solver))
        assert error < 2e-10, f"from {start}: {found}, off by {error:.1e}"
        assert int(found.evaluations) < 200, f"from {start}: {found}"


@pytest.mark.parametrize("name", ["cosh(z) - 1", "sqrt(1 + z^2) - 1", "1e8 + coupled"])
@pytest.mark.parametrize("solver", SCIPY)
def test_minimisers_of_scipy_are_told_differences_that_values_do_not_resolve(name: str, solver: str) -> None:
    for start in STARTS[:2]:
        found, error = minimise(name, start, f"scipy.minimize.{solver}")
        assert error < 2e-10 and int(found.evaluations) < 300, f"from {start}: {found}, off by {error:.1e}"
    for start in STARTS[2:]:
        _, error = minimise(name, start, f"scipy.minimize.{solver}", on_failure="ignore")
        assert error < 1e-10, f"from {start}: off by {error:.1e}"


@pytest.mark.parametrize("name", ["cosh(z) - 1", "log(1 + z^2)"])
def test_golden_sections_of_values_that_cancel(name: str) -> None:
    for start in STARTS:
        found = ik.argmin(OBJECTIVES[name], torch.tensor([start], dtype=torch.float64), solver=ik.GoldenSection())
        assert float(found.value.abs()) < 2e-10, f"from {start}: {found}"


@pytest.mark.parametrize("solver", ["bfgs", "newton_cg", "nonlinear_cg", "gradient_descent"])
def test_a_gradient_that_contradicts_its_objective_is_not_followed_uphill(solver: str) -> None:
    """Values that rise where slopes fall are rounding only if they do so near as well as far."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            ctx.save_for_backward(z)
            return z**2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -g / ctx.saved_tensors[0]  # flatter uphill

    z0 = torch.tensor([1.0], dtype=torch.float64)
    found = ik.argmin(lambda z: Wrong.apply(z).sum() + 0 * z.sum(), z0, solver=solver, on_failure="ignore", max_steps=5)
    assert not bool(found.converged) and float(found.value.abs()) <= 1 + 1e-6


def test_a_start_that_is_a_solution_at_zero_costs_few_evaluations() -> None:
    start = torch.tensor([1e-13, -7e-14], dtype=torch.float64)
    for solver in ("newton", "bfgs", "auto"):
        assert int(ik.argmin(OBJECTIVES["cosh(z) - 1"], start, solver=solver).evaluations) <= 19
    for solver in ("newton", "broyden", "auto"):
        assert int(ik.root(lambda z: torch.exp(z) - 1, start, solver=solver).evaluations) <= 12


def test_a_start_that_is_a_solution_is_looked_at_once() -> None:
    """The scale of ``F`` near it answers both questions about the claim."""
    root = torch.tensor([0.5, 0.7], dtype=torch.float64)
    found = ik.root(lambda z: torch.exp(z) - torch.exp(root) * (1 + 1e-15), root, solver="newton")
    assert int(found.steps) == 0 and float(found.residual_norm) > 0 and int(found.evaluations) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Minimisation along valleys in which the gradient rises and falls, and down slopes without an end.
def chained_rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "n, most", [(50, 600), (100, 900), (200, 1800), pytest.param(2000, 18000, marks=pytest.mark.slow)]
)
def test_chained_rosenbrock(n, most):
    """From -1.2 everywhere each unknown in turn comes out of its bend; scipy's L-BFGS-B takes 328, 615, 1203 and 11572
    evaluations."""
    found = ik.argmin(chained_rosenbrock, torch.full((n,), -1.2, dtype=F64))
    torch.testing.assert_close(found.value, torch.ones(n, dtype=F64), rtol=0, atol=1e-7)
    assert found.evaluations <= most, found


ENDLESS = {
    "linear": lambda x: x.sum(),
    "cubic": lambda x: (x**3 - 3 * x).sum(),
    "logarithm": lambda x: -torch.log1p(x * x).sum(),
    "saddle": lambda x: (x[1:] * x[:-1]).sum() + 0.1 * (x[::2] ** 2).sum(),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [2, 20, 100, 400])
@pytest.mark.parametrize("name", ENDLESS)
def test_no_end(name, n):
    """That there is no minimum is found out soon, and said."""
    with pytest.raises(ik.ConvergenceError, match=r"unbounded|diverged") as caught:
        ik.argmin(ENDLESS[name], torch.full((n,), -2.0, dtype=F64) - 0.01 * torch.arange(n, dtype=F64) / n)
    most = 600 if name in ("linear", "cubic") else 1200  # two methods, one after the other
    assert caught.value.solution.evaluations < most, caught.value.solution


def test_samples_beside_one_without_an_end():
    """A sample that falls forever is given up, and the others go on."""
    slope = torch.tensor([[1.0], [0.0], [0.0]], dtype=F64)

    def objective(x, slope):
        steep = 10 * slope * x
        return torch.where(slope > 0, steep, (x - 3) ** 2).sum(-1)

    found = ik.argmin(objective, torch.zeros(3, 2, dtype=F64), slope, batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [False, True, True]
    torch.testing.assert_close(found.value[1:], torch.full((2, 2), 3.0, dtype=F64), rtol=1e-6, atol=0)


_A = torch.tensor([0.3, -1.2, 2.5], dtype=F64)
_X, _Y = (
    torch.randn(20, 3, dtype=F64, generator=torch.Generator().manual_seed(0)),
    torch.tensor([1.0, -2.0, 0.5], dtype=F64),
)
#: Objectives, starts, and the minimum.
_SHARP: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float] | None]] = {
    "lasso": (lambda z: ((_X @ (z - _Y)) ** 2).sum() / 2 + 15 * z.abs().sum(), [1.0, 1.0, 1.0], None),
    "two bowls": (
        lambda z: torch.maximum((z - _A).square().sum(), (z + _A).square().sum()),
        [0.5, 0.5, 0.5],
        [0.0, 0.0, 0.0],
    ),
    "crescent": (
        lambda z: z[1] + torch.maximum(z[0] ** 2 + (z[1] - 1) ** 2 - 1, 1 - z[0] ** 2 - (z[1] - 1) ** 2),
        [-1.5, 2.0],
        [0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", _SHARP)
def test_a_minimum_in_a_kink_is_solved(name: str) -> None:
    """By the epigraph of what is kinked: refused after 500 to 1,900 evaluations before."""
    objective, start, at = _SHARP[name]
    found = ik.argmin(objective, torch.tensor(start, dtype=F64))
    assert found.evaluations <= 1200
    directions = torch.randn(50, len(start), generator=torch.Generator().manual_seed(0), dtype=F64)
    assert all(objective(found.value + 1e-4 * d) > objective(found.value) for d in directions)
    if at is not None:
        torch.testing.assert_close(found.value, torch.tensor(at, dtype=F64), rtol=0, atol=1e-6)


def test_kinks_beside_a_sample_without() -> None:
    """The minimum moves with ``a`` as no derivative of the objective there says: it is no solution."""
    a = _A.clone().requires_grad_()
    both = ik.argmin(
        lambda z: torch.stack([(z[0] - a).abs().sum() + 0.1 * z[0].square().sum(), (z[1] - a).square().sum()]),
        torch.zeros(2, 3, dtype=F64),
        batch_dims=1,
        on_failure="nan",
    )
    assert both.converged.tolist() == [False, True]
    torch.testing.assert_close(both.value[1], a)
    (found,) = torch.autograd.grad(both.value[1].sum(), a)
    torch.testing.assert_close(found, torch.ones_like(a))


def test_an_edge_beside_kinks_that_the_objective_falls_from_is_no_minimum() -> None:
    """There autograd says zero, too; the slope of the edge is small beside those of the others."""
    edge = lambda z: z[0].abs() + (z[1] - 0.5).abs() - 4e-3 * z[2].abs() + 1e-3 * z[2] ** 2  # noqa: E731
    found = ik.argmin(edge, torch.tensor([1.0, 1.0, 0.0], dtype=F64), on_failure="ignore", max_steps=300)
    assert not bool(found.converged) or edge(found.value) < -3e-3, found


@pytest.mark.parametrize("steep", (1e8, 1e-8))
def test_a_bowl_however_steep_has_no_kink(steep: float) -> None:
    """What has stalled by rounding goes on to others."""
    found = ik.argmin(lambda z: steep * ((z - _A) ** 4).sum() + z[0] ** 2, torch.zeros(3, dtype=F64))
    assert bool(found.converged)


#: Objectives whose gradient is zero in a kink, as autograd has it, and starts.
_T = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0])
_ZERO_IN_A_KINK: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "|z| + z^2": (lambda z: (z.abs() + z * z).sum(), [0.0]),
    "some unknowns of a lasso": (lambda z: ((z - _T.to(z)) ** 2 / 2 + 0.3 * z.abs()).sum(), [0.0] * 5),
    "in small units": (lambda z: 1e-9 * (z.abs() + z * z).sum(), [0.0, 0.0]),
    "a weak one": (lambda z: (1e-3 * z.abs() + z * z).sum(), [0.0]),
    "a tie": (lambda z: torch.maximum((z - 1).square().sum(), (z + 1).square().sum()), [0.0, 0.0]),
    "to one side": (lambda z: (torch.relu(z) + z * z).sum(), [0.0, 0.0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", list(_ZERO_IN_A_KINK))
def test_a_gradient_that_is_zero_in_a_kink_is_no_minimum(name: str, dtype: torch.dtype) -> None:
    """``|z| + (z - y)^2`` stays at zero while ``|y| < 1/2``; its derivatives at zero say that it moves with ``y``."""
    objective, start = _ZERO_IN_A_KINK[name]
    with pytest.raises(ik.ConvergenceError, match="stops falling in a kink") as caught:
        ik.argmin(objective, torch.tensor(start, dtype=dtype))
    assert caught.value.solution.evaluations < 50


def test_an_edge_where_the_gradient_is_zero_to_one_side_is_left() -> None:
    objective = lambda z: (z * z / 2 - torch.relu(-z)).sum()  # noqa: E731
    found = ik.argmin(objective, torch.zeros(2, dtype=F64))
    torch.testing.assert_close(found.value, -torch.ones(2, dtype=F64))


_SMOOTH_AT_ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded off within 1e-10": lambda z: torch.sqrt(z * z + 1e-20) + z * z,
    "a corner of curvature": lambda z: torch.relu(z) ** 2 + z * z / 2,
    "fourth order": lambda z: z**4,
    "steep": lambda z: 1e12 * z * z,
    "hardly curved": lambda z: 1e-12 * z * z,
    "all rounding": lambda z: (z - 1e8) ** 2 + (z + 1e8) ** 2,
}


@pytest.mark.parametrize("moved", (0.0, 1e-9))
@pytest.mark.parametrize("name", list(_SMOOTH_AT_ZERO))
def test_what_is_smooth_has_no_kink_where_it_begins(name: str, moved: float) -> None:
    start = torch.full((2,), moved, dtype=F64)
    assert bool(ik.argmin(lambda z: _SMOOTH_AT_ZERO[name](z).sum(), start).converged)


def test_a_kink_that_counts_for_nothing_is_none() -> None:
    assert bool(ik.argmin(lambda z: (1e-9 * z.abs() + z * z).sum(), torch.zeros(2, dtype=F64)).converged)


def test_a_kink_of_one_sample_is_none_of_the_others() -> None:
    weights = torch.tensor([1.0, 0.0], dtype=F64)
    found = ik.argmin(
        lambda z: weights * z.abs().sum(1) + (z * z).sum(1),
        torch.zeros(2, 3, dtype=F64),
        batch_dims=1,
        on_failure="ignore",
    )
    assert found.converged.tolist() == [False, True]


def test_what_comes_from_afar_is_not_asked_for_kinks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(curvature, "jumps_at", lambda f, z, *_: asked.append(len(z)))
    for objective in (
        lambda z: ((z - 3) ** 2).sum(),
        lambda z: torch.cosh(z - 2).sum(),
        lambda z: 1e6 * ((z - 3) ** 4).sum(),
    ):
        ik.argmin(objective, torch.zeros(3, dtype=F64))
    assert not asked


def test_an_edge_of_which_no_sample_shows_the_fall_is_no_minimum() -> None:
    """``10 |z_0| - 0.8 z_1`` falls within 5 degrees of an axis alone; means of its gradients are all far from zero."""

    def in_kink(slope: float) -> bool:
        value = lambda z: 10 * z[:, 0].abs() - slope * z[:, 1]  # noqa: E731
        probe = _Probe(value, lambda z: torch.stack([10 * z[:, 0].sign(), -slope + 0 * z[:, 1]], 1))
        one, z = torch.ones(1, dtype=torch.bool), torch.zeros(1, 2, dtype=F64)
        return bool(in_a_kink(SimpleNamespace(beside=lambda _: probe), z, one, torch.ones(1, dtype=F64)))  # type: ignore[arg-type]

    assert in_kink(0.0) and not in_kink(0.8)


class _Probe:
    """A gradient, and the objective."""

    def __init__(self, value: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> None:
        self.value, self.gradient = value, gradient

    def __call__(self, z: Tensor) -> Tensor:
        return self.gradient(z)


def test_kinks_of_which_no_program_can_be_made_are_refused_as_kinks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the limit of a method for the program over their epigraphs, of which the user knows nothing."""
    A, b = randn(50, 20, seed=0), randn(50, seed=1)

    def solve() -> ik.Solution:
        return ik.argmin(lambda z: (A @ z - b).abs().max(), torch.zeros(20, dtype=A.dtype))

    assert bool(solve().converged)
    monkeypatch.setattr(model, "DENSE", 20)
    with pytest.raises(ik.ConvergenceError):
        solve()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_kinks_that_all_unknowns_reach_together(n: int) -> None:
    """``|y - a|^2 + |y|_1 / 2`` where all ``a_i`` are alike: beside its kink none is nearer than the others."""
    a = torch.full((n,), 0.2, dtype=torch.float64, requires_grad=True)
    found = ik.argmin(
        lambda y: (y - a).square().sum() + 0.5 * y.abs().sum(), torch.full((n,), 0.3, dtype=torch.float64)
    )
    torch.testing.assert_close(found.value, torch.zeros(n, dtype=torch.float64), rtol=0.0, atol=1e-9)
    assert float(torch.autograd.grad(found.value.sum(), a)[0].abs().max()) < 1e-9


@pytest.mark.parametrize("p", [0.5, 2.0])
def test_a_kink_beside_a_solve_inside(p: float) -> None:
    """``p |y(z) - t|_1 + |z|^2 / 2`` with ``y^3 + y = z``: what the solve inside evaluates, its own ``abs`` among it, is no
    kink of the objective.  Where ``y`` is off ``t``, ``z = p / (3 y^2 + 1)`` with the sign of ``t - y``."""
    t = torch.tensor([1.0, -2.0, 0.05], dtype=torch.float64)

    def inner(z: torch.Tensor) -> torch.Tensor:
        return ik.root(lambda y: y**3 + y - z, torch.zeros_like(z)).value

    found = ik.argmin(lambda z: p * (inner(z) - t).abs().sum() + 0.5 * z.square().sum(), torch.full_like(t, 0.2)).value
    y = inner(found)
    open_ = (y - t).abs() > 1e-6
    assert open_.tolist() == [True, True, False]
    torch.testing.assert_close(found[open_], (p * (t - y).sign() / (3 * y**2 + 1))[open_], rtol=1e-7, atol=0.0)
