"""Steady states by pseudo-transient continuation and by integration, and their linear stability."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.diagnostics import Stability, stability

F64 = torch.float64


def _vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


@dataclass(frozen=True)
class Flow:
    """``dz/dt = rhs(z)``, where to start, and the state at rest that the flow reaches from there."""

    rhs: Callable[[Tensor], Tensor]
    z0: Tensor
    rest: Tensor


def _logistic(z: Tensor) -> Tensor:
    return z * (1 - z / 3)


def _competition(z: Tensor) -> Tensor:
    """Two species; they coexist at ``(2/3, 2/3)``."""
    x, y = z
    return torch.stack([x * (1 - x - 0.5 * y), y * (1 - y - 0.5 * x)])


def _brusselator(z: Tensor, a: float = 1.0, b: float = 1.5) -> Tensor:
    """At rest in ``(a, b / a)``, a Hopf bifurcation at ``b = 1 + a^2``."""
    x, y = z[..., 0], z[..., 1]
    return torch.stack([a + x**2 * y - (b + 1) * x, b * x - x**2 * y], -1)


def _robertson(z: Tensor) -> Tensor:
    """Robertson's reactions in a stirred tank fed with the first species: rates from 0.04 to 3e7."""
    x, y, w = z
    one, two = 0.04 * x - 1e4 * y * w, 3e7 * y**2
    return torch.stack([-one + 0.01 * (1 - x), one - two - 0.01 * y, two - 0.01 * w])


def _toggle(z: Tensor) -> Tensor:
    """A genetic switch: two stable states and a saddle between them."""
    x, y = z
    return torch.stack([4 / (1 + y**3) - x, 4 / (1 + x**3) - y])


def _reference(rhs: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
    """Where SciPy's integrator is after a long time, polished by Newton's method in float64."""
    end = scipy.integrate.solve_ivp(
        lambda t, z: rhs(torch.from_numpy(z)).numpy(), (0, 1e5), z0.numpy(), method="Radau", rtol=1e-8, atol=1e-12
    ).y[:, -1]
    z = torch.from_numpy(np.array(end))
    for _ in range(5):
        z = z - torch.linalg.solve(torch.autograd.functional.jacobian(rhs, z), rhs(z))
    return z


FLOWS = {
    "logistic": Flow(_logistic, _vector(0.01), _vector(3.0)),
    "competition": Flow(_competition, _vector(0.1, 0.9), _vector(2 / 3, 2 / 3)),
    "brusselator": Flow(_brusselator, _vector(1.0, 1.0), _vector(1.0, 1.5)),
    "robertson": Flow(_robertson, _vector(1.0, 0.0, 0.0), _reference(_robertson, _vector(1.0, 0.0, 0.0))),
    "toggle, first": Flow(_toggle, _vector(3.0, 1.0), _reference(_toggle, _vector(3.0, 1.0))),
    "toggle, second": Flow(_toggle, _vector(1.0, 1.5), _reference(_toggle, _vector(1.0, 1.5))),
}
SOLVERS: dict[str, Any] = {
    "auto": "auto",
    "pseudo_transient": "pseudo_transient",
    "integrate": "integrate",
    "Radau": ik.extend.get_solver("integrate", method="Radau"),
    "LSODA": ik.extend.get_solver("integrate", method="LSODA"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_reaches_the_state_that_the_flow_leads_to(solver: str, flow: str) -> None:
    case = FLOWS[flow]
    solution = ik.steady_state(case.rhs, case.z0, solver=SOLVERS[solver], atol=1e-10, rtol=0)
    assert torch.allclose(solution.value, case.rest, rtol=1e-5, atol=1e-7)
    assert bool(stability(solution).stable)


def _enzyme(z: Tensor) -> Tensor:
    """Enzyme, substrate, complex and product in a closed vessel: ``E + C`` and ``S + C + P`` stay what they are."""
    E, S, C, P = z
    bound, released = E * S - 0.5 * C, 0.3 * C - 0.1 * E * P
    return torch.stack([released - bound, -bound, bound - released, released])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["auto", "pseudo_transient"])
@pytest.mark.parametrize("substrate", [2.0, 10.0, 100.0])
def test_what_a_flow_conserves_is_kept(solver: str, substrate: float) -> None:
    """The states at rest are a surface that is bent: of large amounts they were said to have run away, and others taken."""
    z0 = _vector(1.0, substrate, 0.0, 0.0)
    end = scipy.integrate.solve_ivp(
        lambda t, z: _enzyme(torch.from_numpy(z)).numpy(), (0, 1e5), z0.numpy(), method="Radau", rtol=1e-10, atol=1e-12
    ).y[:, -1]
    solution = ik.steady_state(_enzyme, z0, solver=solver)
    assert torch.allclose(solution.value, torch.from_numpy(end.copy()), rtol=1e-6)
    assert solution.evaluations < 150


def _riccati(n: int, seed: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """``A'X + XA - X B B' X + I`` of an ``A`` that is not stable, and where its flow from 0 and from ``I`` ends."""
    random = torch.Generator().manual_seed(seed)
    A, B = (torch.randn(n, k, generator=random, dtype=F64) for k in (n, 2))
    X = scipy.linalg.solve_continuous_are(A.numpy(), B.numpy(), np.eye(n), np.eye(2))
    return lambda X: A.T @ X + X @ A - X @ B @ B.T @ X + torch.eye(n, dtype=F64), torch.from_numpy(X)


@pytest.mark.parametrize(("n", "seed", "most"), [(2, 200, 60), (8, 800, 60), (12, 1202, 90), (16, 1600, 90)])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_riccati_equations_end_where_their_flow_does(n: int, seed: int, most: int, start: float) -> None:
    """Most solutions are states that the flow leaves: implicit steps longer than it grows damp what leads away."""
    rhs, rest = _riccati(n, seed)
    solution = ik.steady_state(rhs, start * torch.eye(n, dtype=F64))
    assert torch.allclose(solution.value, rest, rtol=1e-8, atol=1e-10 * float(rest.abs().max()))
    assert solution.evaluations <= most and not solution.message


def test_a_step_whose_matrix_is_singular_is_taken_back() -> None:
    """``1 / delta`` doubles onto the one eigenvalue: no step comes of it, and none came for ever."""
    solution = ik.steady_state(lambda z: z - z**3 + 0.1, _vector(0.01), solver="pseudo_transient", max_steps=40)
    assert torch.allclose(solution.value, _vector(1.0466805318), rtol=1e-7)


def _epidemic(z: Tensor) -> Tensor:
    """Susceptible and infected with births: endemic at ``(0.24, 0.02 * 0.76 / 0.12)``."""
    S, infected = z
    return torch.stack([0.02 * (1 - S) - 0.5 * S * infected, 0.5 * S * infected - 0.12 * infected])


@pytest.mark.parametrize(
    ("rhs", "z0", "rest"),
    [
        (_epidemic, (0.999, 1e-3), (0.24, 0.02 * 0.76 / 0.12)),
        (_epidemic, (0.999999, 1e-6), (0.24, 0.02 * 0.76 / 0.12)),
        (lambda z: z - z**3 + 0.1, (0.01,), (1.0466805318,)),
        (_logistic, (1e-3,), (3.0,)),
    ],
    ids=["epidemic", "few_infected", "one_step_is_singular", "logistic"],
)
def test_what_grows_from_little_is_followed(rhs: Any, z0: tuple[float, ...], rest: tuple[float, ...]) -> None:
    """Beside other unknowns it is too little for the error of a step to notice: a state that the flow leaves is left."""
    solution = ik.steady_state(rhs, _vector(*z0))
    assert torch.allclose(solution.value, _vector(*rest), rtol=1e-7) and not solution.message


_TURNED = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=F64)
_INVADED = {  # a flow of (..., n), its start and where it rests, as functions of what there is at first and of a rate
    "epidemic": (
        lambda z, b: torch.stack([0.1 * (1 - z[..., 0]) - b * z.prod(-1), b * z.prod(-1) - z[..., 1]], -1),
        lambda few, b: torch.stack([0.1 + 0 * b, few + 0 * b], -1),
        lambda few, b: torch.stack([1 / b, 0.1 * (1 - 1 / b)], -1),
    ),
    "invasion, of two that are one turned": (
        lambda z, b: (lambda r, i: torch.stack([5 * r * (1 - r - 0.5 * i), i * (b - 0.8 * r - i)], -1) @ _TURNED)(
            *(z @ _TURNED.mT).unbind(-1)
        ),
        lambda few, b: torch.stack([0.1 + 0 * b, few + 0 * b], -1) @ _TURNED,
        lambda few, b: torch.stack([(1 - 0.5 * b) / 0.6, (b - 0.8) / 0.6], -1) @ _TURNED,
    ),
    "epidemic without births": (
        lambda z, b: torch.stack([-b * z.prod(-1), b * z.prod(-1) - z[..., 1]], -1),
        lambda few, b: torch.stack([1 - few + 0 * b, few + 0 * b], -1),
        lambda few, b: torch.stack([_left(few, b), 0 * b], -1),
    ),
}


def _left(few: float, b: Tensor) -> Tensor:
    """Who is never infected: ``s = s_0 exp(-b (1 - s))`` (Kermack & McKendrick 1927)."""
    left = torch.full_like(b, 0.01)
    for _ in range(500):
        left = (1 - few) * torch.exp(-b * (1 - left))
    return left


@pytest.mark.parametrize("few", [1e-6, 1e-12])
@pytest.mark.parametrize("name", _INVADED)
def test_what_grows_from_next_to_nothing_is_followed_in_batches_of_any_size(name: str, few: float) -> None:
    """Long steps damp it, and by a tolerance of an integrator it was not seen: batches of more than eight ended in the state
    that it leaves, and smaller ones from 1e-9 on."""
    rhs, start, rest = _INVADED[name]
    for batch in (1, 9):
        b = torch.linspace(1.5, 1.7, batch, dtype=F64)
        solution = ik.steady_state(rhs, start(few, b), (b,), batch_dims=1, in_dims=(0,))
        assert torch.allclose(solution.value, rest(few, b), rtol=1e-6, atol=1e-7) and not solution.message


def test_samples_beside_those_that_are_followed_stay_as_they_are() -> None:
    z0 = torch.tensor([[0.999, 1e-3], [1.0, 0.0], [0.3, 0.1]], dtype=F64)
    solution = ik.steady_state(lambda z: _epidemic(z.T).T, z0, batch_dims=1)
    endemic = [0.24, 0.02 * 0.76 / 0.12]
    assert torch.allclose(solution.value, torch.tensor([endemic, [1, 0], endemic], dtype=F64), rtol=1e-7)
    assert "1 of 3 states" in solution.message and bool(solution.converged.all())


def test_a_flow_that_circles_leaves_the_state_in_its_midst_and_that_is_said() -> None:
    solution = ik.steady_state(lambda z: _brusselator(z, b=3.0), _vector(1.0, 1.0))
    assert bool(solution.converged) and "flow leaves" in solution.message
    assert torch.allclose(solution.value, _vector(1.0, 3.0))


def test_many_flows_that_circle_are_followed_at_once() -> None:
    """Van der Pol's: all of a batch leave the state in their midst, and none comes to rest."""
    z0 = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    solution = ik.steady_state(
        lambda z: torch.stack((z[:, 1], 2 * (1 - z[:, 0] ** 2) * z[:, 1] - z[:, 0]), 1), z0, batch_dims=1
    )
    assert bool(solution.converged.all()) and "64 of 64 states" in solution.message
    assert solution.evaluations < 1000


def test_pseudo_transient_ends_with_newton_steps() -> None:
    """The last residuals fall quadratically, far faster than any integration in time."""
    solution = ik.steady_state(
        _competition, _vector(0.1, 0.9), solver="pseudo_transient", trace=True, atol=1e-13, rtol=0
    )
    assert solution.trace is not None
    last = solution.trace.flatten().tolist()
    ratios = [b / a for a, b in pairwise(last)]
    assert ratios[-1] < 1e-3 and ratios[0] > 0.5
    assert int(solution.steps) < 40


def test_a_step_factors_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the implicit step; the factors of the Jacobian itself, which steps do not use, take as long again."""
    counted, factor = [0], torch.linalg.lu_factor_ex

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return factor(*args, **kwargs)

    n = 130
    W = 0.5 * torch.randn(n, n, dtype=F64, generator=torch.Generator().manual_seed(0)) / n**0.5
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", counting)
    s = ik.steady_state(lambda z: torch.tanh(W @ z) + 1 - z, torch.zeros(n, dtype=F64), solver="pseudo_transient")
    assert 0 < counted[0] <= int(s.steps) + 1


def test_a_limit_cycle_has_no_state_to_reach() -> None:
    """Beyond the Hopf bifurcation the flow never comes to rest: reported; a solver that finds the state says what it is."""
    flow = ik.SteadyState(lambda z: _brusselator(z, b=3.0))
    for solver in ("pseudo_transient", "integrate"):
        solution = ik.solve(flow, _vector(1.0, 1.0), solver=solver, max_steps=100, on_failure="ignore")
        assert not bool(solution.converged), solver
        with pytest.raises(ik.ConvergenceError):
            ik.solve(flow, _vector(1.0, 1.0), solver=solver, max_steps=100)
    for solver in ("newton", "auto"):
        found = ik.solve(flow, _vector(1.1, 2.9), solver=solver)
        assert torch.allclose(found.value, _vector(1.0, 3.0)) and bool(stability(found).unstable)
        assert "flow leaves this state" in found.message and "flow leaves" in repr(found)


@pytest.mark.parametrize("in_dims", [None, (0,)])
def test_a_state_of_a_family_is_the_one_that_the_flow_comes_to(in_dims: Any) -> None:
    """An epidemic: ``s = s_0 exp(-(1 - s) beta / gamma)`` susceptible are left (Kermack & McKendrick 1927), here with
    ``s_0 + i_0 = 1``; long steps kept the sum of all three and ended in another ``s``."""
    beta = _vector(0.1, 0.5, 0.8)

    def rhs(z: Tensor, beta: Tensor) -> Tensor:
        s, i, _ = z.unbind(-1)
        return torch.stack([-beta * s * i, beta * s * i - 0.2 * i, 0.2 * i], -1)

    left = _vector(1.0, 0.1, 0.1)
    for _ in range(500):
        left = 0.99 * torch.exp(-(1 - left) * beta / 0.2)
    z0 = _vector(0.99, 0.01, 0.0).repeat(3, 1)
    found = ik.steady_state(rhs, z0, (beta,), batch_dims=1, in_dims=in_dims)
    assert torch.allclose(found.value[:, 0], left, rtol=1e-5)


@pytest.mark.parametrize("bent", [0.0, 0.3])
def test_a_state_with_a_singular_jacobian_may_be_the_only_one(bent: float) -> None:
    """``dx/dt = -x^3 + c x y``, where ``y`` follows ``x^2 / 2``: integrated, ``x`` would be 3e-4 after 1,900 evaluations."""
    rhs = lambda z: torch.stack([-(z[0] ** 3) + bent * z[0] * z[1], z[0] ** 2 / 2 - z[1]])  # noqa: E731
    found = ik.steady_state(rhs, torch.ones(2, dtype=torch.float64))
    assert float(found.value.abs().max()) < 1e-6 and found.evaluations < 300


@pytest.mark.parametrize("radius", [0.2, 3.0])
def test_a_family_may_be_bent(radius: float) -> None:
    """All points of a circle are at rest, and the flow turns as it comes to it."""
    turn = torch.tensor([[1.0, -2.0], [2.0, 1.0]], dtype=torch.float64)
    found = ik.steady_state(lambda z: (1 - z @ z) * (turn @ z), torch.tensor([radius, 0.0], dtype=torch.float64))
    angle = torch.tensor(-2 * np.log(radius))  # dr/dt = (1 - r^2) r, and twice as fast around
    assert torch.allclose(found.value, torch.stack([angle.cos(), angle.sin()]), atol=1e-4)


def test_integration_that_runs_out_of_time_is_reported() -> None:
    solver = ik.extend.get_solver("integrate", duration=0.1)
    with pytest.raises(ik.ConvergenceError, match="end of the integration interval"):
        ik.steady_state(lambda z: 1 - z, _vector(0.0), solver=solver)


@pytest.mark.parametrize("solver", ["pseudo_transient", "integrate"])
def test_derivative_of_the_state(solver: str) -> None:
    """Brusselator: ``z = (a, b / a)``."""
    a, b = _vector(1.2).requires_grad_(), _vector(1.1).requires_grad_()

    def rhs(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a + z[:1] ** 2 * z[1:] - (b + 1) * z[:1], b * z[:1] - z[:1] ** 2 * z[1:]])

    value = ik.steady_state(rhs, _vector(1.0, 1.0), (a, b), solver=solver).value
    rows = [[g.item() for g in torch.autograd.grad(v, (a, b), retain_graph=True)] for v in value]
    assert np.allclose(rows, [[1.0, 0.0], [-1.1 / 1.2**2, 1 / 1.2]], atol=1e-8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["pseudo_transient", "integrate"])
@pytest.mark.parametrize("in_dims", [None, (0,)])
def test_batch_equals_loop_and_nan_is_contained(solver: str, in_dims: Any) -> None:
    rates = torch.logspace(-3, 3, 5, dtype=F64).unsqueeze(1)

    def rhs(z: Tensor, k: Tensor) -> Tensor:
        return k * (1 - z) - z**3

    z0 = torch.zeros(5, 1, dtype=F64)
    together = ik.steady_state(rhs, z0, (rates,), solver=solver, batch_dims=1, in_dims=in_dims)
    for i in range(5):
        alone = ik.steady_state(rhs, z0[i], (rates[i],), solver=solver)
        assert torch.allclose(together.value[i], alone.value, rtol=1e-8)
        assert abs(int(together.steps[i]) - int(alone.steps)) <= 1
    rates[3] = torch.nan
    spoilt = ik.steady_state(rhs, z0, (rates,), solver=solver, batch_dims=1, in_dims=in_dims, on_failure="ignore")
    assert spoilt.converged.tolist() == [True, True, True, False, True]
    assert torch.allclose(spoilt.value[[0, 1, 2, 4]], together.value[[0, 1, 2, 4]], rtol=1e-8)


@pytest.mark.parametrize("solver", ["pseudo_transient", "integrate"])
@pytest.mark.parametrize("limit", [1, 3])
def test_max_steps(solver: str, limit: int) -> None:
    case = FLOWS["robertson"]
    solution = ik.steady_state(case.rhs, case.z0, solver=solver, max_steps=limit, on_failure="ignore")
    assert int(solution.steps) == limit and not bool(solution.converged)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equations_have_no_sign(sign: float) -> None:
    """Of a plain equation the sign is chosen; of a steady state it is the user's, and the wrong one runs away."""

    def rhs(z: Tensor) -> Tensor:
        return sign * (1 - z - z**3)

    z0 = _vector(3.0)
    assert bool(ik.root(rhs, z0, solver="pseudo_transient").converged)
    assert bool(ik.root(rhs, z0, solver="integrate").converged)
    flow = ik.steady_state(rhs, z0, solver="integrate", on_failure="ignore")
    assert bool(flow.converged) == (sign > 0)


def test_domain_errors_shorten_the_step() -> None:
    """A Newton step leaves the domain of the square root; NaN trial states only cut the step."""
    solution = ik.steady_state(
        lambda z: 1 - torch.sqrt(z), _vector(100.0), solver=ik.PseudoTransient(step_size=1e6), atol=1e-10
    )
    assert float(solution.value) == pytest.approx(1.0)


def test_large_systems_go_matrix_free() -> None:
    """A reaction-diffusion equation with 800 unknowns, against the dense solve of its linear part."""
    n = 800
    h = 1 / (n + 1)

    def laplacian(u: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(u, (1, 1))
        return (padded[2:] - 2 * u + padded[:-2]) / h**2

    solution = ik.steady_state(
        lambda u: 1e-3 * laplacian(u) + 1 - u, torch.zeros(n, dtype=F64), solver="pseudo_transient", rtol=1e-9
    )
    x = torch.arange(1, n + 1, dtype=F64) * h
    k = 1e-3**-0.5
    exact = 1 - torch.cosh(k * (x - 0.5)) / math.cosh(0.5 * k)
    assert torch.allclose(solution.value, exact, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [lambda: ik.PseudoTransient(step_size=0.0), lambda: ik.PseudoTransient(switch=1.0),
     lambda: ik.PseudoTransient(retreats=-1), lambda: ik.PseudoTransient(accuracy=0.0)],
)  # fmt: skip
def test_options_out_of_range(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        make()


@pytest.mark.parametrize("options", [{"method": "Euler"}, {"accuracy": 0.0}, {"duration": -1.0}])
def test_options_of_integrate(options: dict[str, Any]) -> None:
    with pytest.raises(ik.ConvergenceError, match="ValueError"):
        ik.steady_state(lambda z: 1 - z, _vector(0.0), solver=ik.extend.get_solver("integrate", **options))


# -------------------------------------------------------------------------------------------------------------- stability
@pytest.mark.parametrize(
    ("b", "stable", "unstable"),
    [(1.5, True, False), (2.0, False, False), (3.0, False, True)],
    ids=["below", "at", "above"],
)
def test_hopf_bifurcation(b: float, stable: bool, unstable: bool) -> None:
    """Brusselator, ``a = 1``: eigenvalues ``((b - 2) +- sqrt((b - 2)^2 - 4)) / 2``."""
    report = stability(ik.SteadyState(lambda z: _brusselator(z, b=b)), _vector(1.0, b))
    exact = np.roots([1, 2 - b, 1])
    assert float(report.growth_rate) == pytest.approx(exact.real.max(), abs=1e-12)
    assert abs(float(report.frequency)) == pytest.approx(abs(exact.imag).max(), abs=1e-12)
    assert (bool(report.stable), bool(report.unstable)) == (stable, unstable)
    word = "stable" if stable else "unstable" if unstable else "neutral"
    assert word in str(report) and "oscillating" in str(report)


def test_the_saddle_between_two_stable_states() -> None:
    states = [ik.root(_toggle, z0, solver="newton").value for z0 in (_vector(4, 0), _vector(1.3, 1.3), _vector(0, 4))]
    reports = stability(
        ik.SteadyState(lambda z: torch.stack(list(torch.func.vmap(_toggle)(z)))), torch.stack(states), batch_dims=1
    )
    assert reports.stable.tolist() == [True, False, True]
    assert reports.unstable.tolist() == [False, True, False]
    assert reports.eigenvalues.shape == (3, 2) and "2 of 3 states stable" in str(reports)


@pytest.mark.slow
def test_large_systems_by_arnoldi() -> None:
    """The discrete Laplacian with 520 unknowns plus a reaction: ``-4/h^2 sin^2(pi h / 2) + r``, also by dense LAPACK."""
    n, h = 520, 1 / 521

    def rhs(u: Tensor, rate: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(u, (1, 1))
        return (padded[..., 2:] - 2 * u + padded[..., :-2]) / h**2 + rate * u

    exact = -4 / h**2 * math.sin(math.pi * h / 2) ** 2
    for rate, is_stable in ((5.0, True), (12.0, False)):
        report = stability(ik.SteadyState(rhs), torch.zeros(n, dtype=F64), (torch.tensor(rate, dtype=F64),), count=2)
        assert not report.exact
        assert float(report.growth_rate) == pytest.approx(exact + rate, rel=1e-6)
        assert bool(report.stable) is is_stable and bool(report.unstable) is not is_stable


def test_fixed_points_by_modulus() -> None:
    """Rotation by one radian with a factor: stable below one, with the frequency of the rotation."""
    R = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=F64)
    for factor in (0.9, 1.1):
        report = stability(ik.FixedPoint(lambda z, A: A @ z), torch.zeros(2, dtype=F64), (factor * R,))
        assert report.discrete
        assert float(report.growth_rate) == pytest.approx(math.log(factor))
        assert abs(float(report.frequency)) == pytest.approx(1.0)
        assert bool(report.stable) == (factor < 1) and bool(report.unstable) == (factor > 1)


def test_minimum_and_saddle() -> None:
    for objective, stable in ((lambda z: z[0] ** 2 + 3 * z[1] ** 2, True), (lambda z: z[0] ** 2 - z[1] ** 2, False)):
        assert bool(stability(ik.Argmin(objective), torch.zeros(2, dtype=F64)).stable) is stable
    fit = stability(ik.LeastSquares(lambda z: torch.stack([z[0] - 1, 2 * z[1], z[0] * z[1]])), _vector(1.0, 0.0))
    assert bool(fit.stable) and float(fit.growth_rate) == pytest.approx(-1.0)


def test_under_vmap_and_with_nan() -> None:
    """A solution from inside ``vmap`` has a leading dimension; a sample that is not finite has no verdict."""
    solutions: list[ik.Solution] = []

    def solve(b: Tensor) -> Tensor:
        solutions.append(ik.steady_state(lambda z, b: b - z - z**3, torch.zeros(2, dtype=F64), (b,), solver="newton"))
        return solutions[0].value

    torch.func.vmap(solve)(torch.ones(3, 2, dtype=F64))
    assert stability(solutions[0]).stable.tolist() == [True] * 3
    report = stability(ik.SteadyState(lambda z: -(z**3)), torch.tensor([[1.0], [math.nan]], dtype=F64), batch_dims=1)
    assert report.stable.tolist() == [True, False] and report.unstable.tolist() == [False, False]
    assert "unknown" in str(report)


def test_stability_refuses() -> None:
    with pytest.raises(ik.CapabilityError, match="no dynamics"):
        stability(ik.Root(lambda z: z), _vector(0.0))
    with pytest.raises(ValueError, match="count"):
        stability(ik.SteadyState(lambda z: -z), _vector(0.0), count=0)
    with pytest.raises(TypeError, match="pass the state"):
        stability(ik.SteadyState(lambda z: -z))
    with pytest.raises(TypeError, match="Solution, or a Problem"):
        stability(lambda z: -z, _vector(0.0))  # type: ignore[arg-type]
    assert isinstance(stability(ik.steady_state(lambda z: 1 - z, _vector(0.0))), Stability)


@pytest.mark.parametrize(
    "solver", ["newton", "newton_krylov", "broyden", "scipy.root.hybr", "auto", "pseudo_transient"]
)
def test_a_state_that_the_flow_leaves_is_said_to_be_one(solver: str) -> None:
    """Logistic growth from a little: Newton's steps come to zero, which the flow leaves."""
    z0 = torch.tensor([0.05], dtype=torch.float64)
    found = ik.steady_state(lambda z: 2 * z * (1 - z), z0, solver=solver)
    left = abs(float(found.value)) < 0.5
    assert left == (solver not in ("auto", "pseudo_transient"))
    assert ("flow leaves this state: a disturbance grows by e in 0.5 " in found.message) == left
    there = ik.steady_state(lambda z: 2 * z * (1 - z), z0 + 1.2, solver=solver)
    assert not there.message


def test_states_of_a_batch_that_the_flow_leaves_are_counted() -> None:
    rates = torch.tensor([[1.0], [-1.0], [3.0]], dtype=torch.float64)
    z0 = torch.full((3, 1), 0.05, dtype=torch.float64)
    found = ik.steady_state(lambda z, r: r * z * (1 - z), z0, (rates,), batch_dims=1, solver="newton")
    assert "2 of 3 states" in found.message


@pytest.mark.parametrize("n", [3, 100])
def test_a_start_at_rest_in_a_state_that_the_flow_leaves(n: int) -> None:
    """Of many unknowns too, where all but one disturbance die out."""
    rates = torch.linspace(-3, -1, n, dtype=torch.float64)
    z0 = torch.zeros(n, dtype=torch.float64)
    assert not ik.steady_state(lambda z: rates * z - z**3, z0).message
    rates = torch.cat([rates[1:], torch.ones(1, dtype=torch.float64)])
    assert "flow leaves" in ik.steady_state(lambda z: rates * z - z**3, z0).message


def test_of_how_many_unknowns_it_is_asked_is_said() -> None:
    rates = torch.linspace(-3, 1, 300, dtype=torch.float64)
    found = ik.steady_state(lambda z: rates * z - z**3, torch.zeros_like(rates))
    assert "not asked of more than 256 unknowns; ik.stability(solution)" in found.message
    assert bool(ik.stability(found).unstable) and "leave the flow" not in found.message
    found = ik.steady_state(lambda z: z - 1, torch.zeros(300))  # which runs away from there
    assert bool(found.converged) and "leave the flow" in found.message


def test_a_spiral_that_turns_outwards() -> None:
    """No real eigenvalue: ``0.1 +- i``."""
    turn = torch.tensor([[0.1, 1.0], [-1.0, 0.1]], dtype=torch.float64)
    start = torch.ones(2, dtype=torch.float64)
    one_way = torch.tensor([[-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    neutral = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    for matrix, leaves in ((turn, True), (-turn, False), (neutral, False), (one_way, True)):
        found = ik.steady_state(lambda z, A: A @ z, start, (matrix,), solver="newton")
        assert bool(found.converged) and ("flow leaves" in found.message) == leaves


def test_a_state_that_has_lost_the_sum_of_its_start_says_so() -> None:
    """Robertson's three substances add up to one, of which nothing was left, without a word."""

    def rhs(z: Tensor) -> Tensor:
        a, b, c = z.unbind(-1)
        slow, back, fast = 0.04 * a, 1e4 * b * c, 3e7 * b**2
        return torch.stack([back - slow, slow - back - fast, fast], -1)

    solution = ik.steady_state(rhs, _vector(1.0, 0.0, 0.0))
    assert abs(float(solution.value.sum()) - 1) < 1e-6 or "family" in solution.message
