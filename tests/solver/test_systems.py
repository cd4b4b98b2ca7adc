"""``auto`` and the root methods on systems of the literature: solved, never falsely claimed, derivatives right."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import implicitkit as ik

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.systems import TestSystem, systems

TOLERANCE = 1e-8
GROUPS = ("mgh", "classic", "equilibrium", "engineering")
STANDARD = {s.name: s for s in systems(*GROUPS)}
FAR = {s.from_start(factor).name: s.from_start(factor) for s in systems("mgh") for factor in (10.0, 100.0)}
LARGE = {s.name: s for s in systems("large")}


def solved(system: TestSystem, solver: object = "auto") -> ik.Solution:
    """Solved to the absolute tolerance, as an independent evaluation of the residual says."""
    solution = system.solve(solver=solver, rtol=0.0, atol=TOLERANCE, on_failure="ignore")
    worst = torch.linalg.vector_norm(system.residual(solution.value), dim=-1).max().item()
    assert bool(solution.converged.all()), f"{system.name}: {solution}"
    assert worst <= TOLERANCE * (1 + 1e-6), f"{system.name}: claimed, but |F| = {worst:.3g}"
    return solution


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", STANDARD)
def test_auto_from_the_standard_start(name: str) -> None:
    solution = solved(STANDARD[name])
    assert solution.solver.startswith("auto (")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAR)
def test_auto_from_far_starts(name: str) -> None:
    solved(FAR[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAR)
def test_default_tolerances_claim_nothing_false_from_far_starts(name: str) -> None:
    system = FAR[name]
    solution = system.solve(on_failure="ignore")
    assert bool(solution.converged)
    assert system.residual(solution.value).norm() <= 1e-6, f"{name}: {solution}"


@pytest.mark.parametrize("name", sorted(LARGE))
def test_auto_large(name: str) -> None:
    """Equations by Newton's method, a steady state along its flow."""
    solution = solved(LARGE[name])
    first = "pseudo_transient" if name.startswith("brusselator") else "newton"
    assert solution.solver == f"auto ({first})"


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_newton_krylov_alone(step: int) -> None:
    """At least 55 of 59 (93.2 %) of the standard problems, and no false claim."""
    missed = set()
    alone = [(name, system) for name, system in STANDARD.items() if not system.batch_dims][::step]
    for name, system in alone:
        solution = system.solve(
            solver="newton_krylov", rtol=0.0, atol=TOLERANCE, on_failure="ignore", max_steps=150
        )  # fmt: skip
        worst = torch.linalg.vector_norm(system.residual(solution.value)).item()
        assert bool(solution.converged) == (worst <= TOLERANCE * (1 + 1e-6)), f"{name}: {solution}, |F| = {worst:.3g}"
        if not bool(solution.converged):
            missed.add(name)
    assert len(missed) <= 4 / 59 * len(alone), f"missed {sorted(missed)} of {len(alone)}"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n for n, s in STANDARD.items() if s.regular])
def test_derivative_with_respect_to_the_parameter(name: str) -> None:
    """``dz/dtheta`` against ``-J^{-1} dF/dtheta`` by NumPy, with central differences of ``F`` in ``theta``."""
    system = STANDARD[name]
    theta = system.theta.clone().requires_grad_()
    batched = bool(system.batch_dims)
    rows = slice(0, 50) if batched else slice(None)
    start = system.start[rows] if batched else system.start
    given = theta[rows] if batched else theta
    solution = ik.solve(system.problem, start, (given,), batch_dims=system.batch_dims, rtol=0.0, atol=1e-9)
    z = solution.value.detach()
    weights = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (grad,) = torch.autograd.grad((solution.value * weights).sum(), theta)

    def residual(y: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        out = system.function(y, parameter)
        return out - y if system.kind == "fixed_point" else out

    direction = (
        torch.randn(given.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * given.detach()
    )
    step = 1e-6
    ahead, behind = (residual(z, given.detach() + sign * step * direction) for sign in (1, -1))
    change = (ahead - behind).numpy().reshape(-1) / (2 * step)
    jacobian = torch.func.jacrev(lambda y: residual(y, given.detach()))(z).numpy().reshape(z.numel(), z.numel())
    expected = -weights.numpy().reshape(-1) @ np.linalg.solve(jacobian, change)
    measured = (grad[rows] if batched else grad).mul(direction).sum().item()
    condition = np.linalg.cond(jacobian)
    assert measured == pytest.approx(expected, rel=1e-5 + 1e-10 * condition, abs=1e-9), name


def test_the_best_known_method_of_scipy_is_not_ahead() -> None:
    """A spot check against SciPy itself on the systems that are hardest for descent methods."""
    import scipy.optimize

    for name in ("rosenbrock", "helical_valley", "wood", "powell_badly_scaled", "heart_dipole", "power_flow5"):
        system = STANDARD[name]
        answer = scipy.optimize.root(
            lambda x, s=system: s.residual(torch.from_numpy(x)).numpy(), system.start.numpy(), method="hybr"
        )
        by_scipy = np.abs(answer.fun).max() <= TOLERANCE
        assert bool(solved(system).converged) >= by_scipy, name


def test_batch_of_kepler_orbits_is_solved_to_the_last() -> None:
    solution = STANDARD["kepler100000"].solve(rtol=0.0, atol=1e-12)
    assert bool((STANDARD["kepler100000"].residual(solution.value).abs() <= 1e-12).all())
