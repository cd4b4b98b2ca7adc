"""Minimisers of |F| that stand where its slope is zero and F is not: no step from there moves, and they say so at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik

SOLVERS = {
    "bfgs": ik.BFGS(),
    "lbfgs": ik.LBFGS(),
    "nonlinear_cg": ik.NonlinearCG(),
    "gauss_newton": ik.GaussNewton(),
    "gradient_descent": ik.GradientDescent(),
    "gradient_descent, armijo": ik.GradientDescent(step_size="armijo"),
    "gradient_descent, fixed": ik.GradientDescent(step_size=0.1),
    "gradient_descent, nesterov": ik.GradientDescent(step_size=0.1, nesterov=True),
}
EQUATIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "a flat start": (lambda z: z**2 - 2, [0.0, 0.0]),
    "no solution": (lambda z: 0 * z + 1, [0.3, 0.2]),
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_zero_slope_is_the_end(name: str, equation: str) -> None:
    f, start = EQUATIONS[equation]
    z0 = torch.tensor([start, [1.0, 1.0]], dtype=torch.float64)  # the second sample may go on
    solution = ik.root(f, z0, solver=SOLVERS[name], batch_dims=1, max_steps=400, on_failure="ignore")
    assert solution.status[0] == int(ik.Status.STALLED), solution
    assert solution.steps[0] <= 3, solution
    if equation == "a flat start":
        assert solution.converged[1], solution
