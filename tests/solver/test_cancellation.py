"""Minimisers of objectives whose values are what is left of terms that cancel: near a minimum only slopes can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

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
