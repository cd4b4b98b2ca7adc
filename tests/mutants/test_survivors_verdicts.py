"""What mutants survived before: the scale of a residual beside a jump, and fits of which nothing more need be asked."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import linearise
from implicitkit.solver.verdict.backward_error import row_scales
from implicitkit.solver.verdict.condition import is_lower
from implicitkit.solver.verdict.rounding_level import exceeds_rounding, rounding
from implicitkit.solver.verdict.runaway import runs_away
from implicitkit.solver.verdict.stationary_fit import well_fitted

D = torch.float64
EPS = torch.finfo(D).eps
H = EPS**0.5  # how far beside z a residual is looked at
ALL = torch.ones(1, dtype=torch.bool)


def _jump() -> Any:
    """Of 2 at 1, in every component."""
    return SimpleNamespace(residual=lambda z: torch.where(z > 1, 1.0, -1.0).to(z), kind=ik.Root.kind, eps=EPS)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_jump_on_one_side_is_no_scale(size: int) -> None:
    """1 - h / 2 is on one side of it, as are all nearer points; ``2 / h`` would excuse any residual."""
    z = torch.full((1, size), 1 - H / 2, dtype=D)
    hasty = row_scales(_jump(), z, ALL, 1e-6, 0.0, careful=False)
    careful = row_scales(_jump(), z, ALL, 1e-6, 0.0, careful=True)
    assert bool((hasty > 1e8).any())
    assert torch.equal(careful, torch.zeros_like(z))


def test_a_slope_is_the_same_from_both_sides() -> None:
    z = torch.tensor([[2.0, -4.0]], dtype=D)
    line = SimpleNamespace(residual=lambda z: 3 * z - 1e2, eps=EPS)
    scale = row_scales(line, z, ALL, 0.0, 0.0, careful=True)
    torch.testing.assert_close(scale, 3 * z.abs(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_jump_on_one_side_is_no_rounding(size: int) -> None:
    z = torch.full((1, size), 1 - H / 2, dtype=D)
    assert torch.equal(rounding(_jump(), z, ALL), torch.zeros_like(z))


def _fit(J: list[list[float]], r: list[float], z: list[float], least: float = 1e-30) -> bool:
    matrix, residuals = torch.tensor([J], dtype=D), torch.tensor([r], dtype=D)
    gradient = (matrix.mT @ residuals.unsqueeze(2)).squeeze(2)
    return bool(well_fitted(matrix, residuals, torch.tensor([z], dtype=D), gradient + least, ALL))


def test_a_fit_near_its_solution_is_believed() -> None:
    """Residuals all but orthogonal to the columns, and a correction of 1e-6, in whatever units the unknowns have."""
    assert _fit([[1.0, 0.0], [0.0, 1e-12], [0.0, 0.0]], [1e-6, 1e-6, 1.0], [1.0, 1e12])
    assert _fit([[1e9], [0.0]], [1e3, 1e5], [1.0])
    assert _fit([[1.0], [0.0]], [0.0, 5.0], [1.0])


def test_a_fit_with_a_large_correction_is_not() -> None:
    """The cosine between ``r`` and the column is 0.09, and yet the correction is -0.9 at ``z = 1``."""
    assert not _fit([[1.0], [0.0]], [0.9, 10.0], [1.0])


@pytest.mark.parametrize("apart", [1e-10, 3e-8])
def test_a_fit_with_columns_that_are_all_but_parallel_is_not(apart: float) -> None:
    """``(1, 1)`` and ``(1, 1 + apart)``: the correction is zero, and of the unknowns only the sum is known; of the second
    the normal equations are positive definite in double precision."""
    assert not _fit([[1.0, 1.0], [1.0, 1.0 + apart], [0.0, 0.0]], [0.0, 0.0, 1.0], [1.0, 1.0])


def test_a_fit_that_normal_equations_lose_is_believed_by_its_singular_values() -> None:
    """``(1, 1)`` and ``(1, 1 + 1e-6)``, a condition of 4e6, in units of 1 and 1e12."""
    columns = [[1.0, 1e-12], [1.0, (1.0 + 1e-6) * 1e-12], [0.0, 0.0]]
    assert _fit(columns, [0.0, 1e-9, 1.0], [1.0, 1e12])


def test_a_fit_whose_residuals_are_not_orthogonal_is_not() -> None:
    """``r = 5e-4 (1, 0)`` and a correction as small, at ``J z = 1``: more is left than near a solution."""
    assert not _fit([[1.0], [0.0]], [5e-4, 0.0], [1.0])


def test_a_fit_whose_gradient_is_zero_to_the_last_bit_may_have_underflowed() -> None:
    assert not _fit([[1.0], [0.0]], [0.0, 5.0], [1.0], least=0.0)


def test_a_fit_that_does_not_depend_on_an_unknown_is_not() -> None:
    assert not _fit([[1.0, 0.0], [0.0, 0.0]], [0.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize("value", [-1.0, -1e-9])
def test_a_point_before_a_jump_is_no_root_whoever_finds_it(value: float) -> None:
    @ik.implicit(ik.Root(lambda z: torch.where(z > 1, 1.0, value).to(z)), atol=0.0)
    def found(z0: Tensor) -> Tensor:
        return torch.full_like(z0, 1 - H / 2)

    with pytest.raises(ik.ConvergenceError):
        found(torch.zeros(1, dtype=D))


def test_a_good_fit_costs_no_questions() -> None:
    """Eleven of its evaluations are five steps of Gauss and Newton; a verdict by the gradient would take seven more."""
    t = torch.linspace(0, 1, 12, dtype=D)
    y = 2 * torch.exp(-3 * t) + 0.1 * torch.sin(40 * t)
    s = ik.least_squares(
        lambda z: z[0] * torch.exp(-z[1] * t) - y, torch.ones(2, dtype=D), solver="gauss_newton", rtol=1e-8
    )
    assert bool(s.converged) and int(s.evaluations) <= 2 * int(s.steps) + 5


def test_what_moves_an_unknown_by_itself_is_no_unit_in_the_last_place() -> None:
    """``x^2 y = -0.48`` at x = 5e-5 beside y = -1.7e8: two units in the last place of y are 4e-5 of x."""

    def brusselator(z: Tensor) -> Tensor:
        x, y = z.unbind(1)
        return torch.stack([1 + x * x * y - 4 * x, 3 * x - x * x * y], 1)

    z = torch.tensor([[5.3595667850458995e-05, -165645952.0]])
    f = SimpleNamespace(residual=brusselator, kind=ik.SteadyState(brusselator).kind, eps=EPS)
    assert float(rounding(f, z, ALL).max()) < 1e-3 * float(brusselator(z).abs().min())


def _runs_away(function: Any, z: float, size: int = 1, problem: type = ik.Root) -> bool:
    """What is said of a point of a problem, whatever else a solve would look at before it asks."""
    kind = problem(function).kind
    f = SimpleNamespace(
        residual=function, linearize=lambda z: linearise(function, z)[1], kind=kind, solves="root", eps=EPS
    )
    return bool(runs_away(f, torch.full((1, size), z, dtype=D), ALL))


@pytest.mark.parametrize("z", [83749291.75186355, 76676977.02319545, 67470375.28470114, 98884756.1372424])
def test_a_residual_that_is_rounded_to_zero_far_out_is_no_zero(z: float) -> None:
    """``sqrt(1 + z^2) - z`` is ``1 / (2 z)`` and comes out as 0; beside ``z`` it changes by a unit in the last place."""
    assert _runs_away(lambda z: torch.sqrt(1 + z * z) - z, z)
    assert not _runs_away(lambda y: y - z, z)
    assert not _runs_away(lambda y: torch.sqrt(1 + y * y) - 2 * y + z, z)


class _Slow(torch.autograd.Function):
    """``z^-0.3`` with a derivative a million times too large."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z**-0.3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.3e6 * g * ctx.saved_tensors[0] ** -1.3


@pytest.mark.parametrize("size", [1, 100])
def test_a_derivative_that_the_function_does_not_follow_makes_no_zero(size: int) -> None:
    """Newton's correction by it is 3e-6 of z, and yet z is on its way to infinity."""
    for problem in (ik.Root, ik.FixedPoint):
        assert _runs_away(_Slow.apply, 1e6, size, problem)
        assert _runs_away(lambda z: z**-0.3, 1e6, size, problem)
    assert not _runs_away(lambda z: z**-0.3 - 1e6**-0.3, 1e6 * (1 + 3e-6), size)


@pytest.mark.parametrize("size", [1, 3])
def test_a_jump_across_zero_is_no_rounding_error(size: int) -> None:
    """What ``sign(z - c)`` changes by does not double with the way, but is of one sign before ``c`` and of the other behind;
    a step up to both sides is no zero."""
    z = torch.full((1, size), 1e8, dtype=D)
    asked, F = torch.ones(1, size, dtype=torch.bool), torch.zeros_like(z)
    assert bool(exceeds_rounding(SimpleNamespace(eps=EPS, residual=lambda y: torch.sign(y - z)), z, F, asked).all())
    assert not bool(
        exceeds_rounding(SimpleNamespace(eps=EPS, residual=lambda y: torch.sign(y - z).abs()), z, F, asked).any()
    )


def test_lower_is_by_more_than_rounding_and_whatever_the_sign() -> None:
    """Of 2: one unit in the last place is none; of numbers below zero as of those above."""
    known = SimpleNamespace(eps=EPS, beside=lambda kind: SimpleNamespace(value=lambda z: z[:, 0]))
    here = torch.tensor([[2.0], [2.0], [2.0], [-2.0], [2.0]], dtype=D)
    there = torch.tensor([[1.0], [2.0 - EPS], [3.0], [-3.0], [math.nan]], dtype=D)
    lower = is_lower(known, here, there, torch.ones(5, dtype=torch.bool))  # type: ignore[arg-type]
    assert lower.tolist() == [True, False, False, True, False]
