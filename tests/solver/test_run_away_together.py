"""Many unknowns that run away together, while their differences are determined: each equation looks healthy out there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import linearise
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage
from implicitkit.solver.verdict.newton_correction import LEFT
from implicitkit.solver.verdict.runaway_together import fade_together

F64 = torch.float64
DIVERGED = int(ik.Status.DIVERGED)


def _ratings(players: int, wins_of_the_first: float, free: bool = False) -> ik.Solution:
    """Bradley & Terry's model; the first rating is zero, unless all are ``free``."""
    rng = torch.Generator().manual_seed(players)
    wins = torch.randint(0, 5, (players, players), generator=rng).to(F64).fill_diagonal_(0)
    wins[0] *= wins_of_the_first

    def loss(z: Tensor) -> Tensor:
        s = z if free else torch.cat([z.new_zeros(1), z])
        return (wins * torch.nn.functional.softplus(s - s[:, None])).sum()

    z0 = torch.full((players,), 30.0, dtype=F64) if free else torch.zeros(players - 1, dtype=F64)
    return ik.argmin(loss, z0, on_failure="ignore")


def test_ratings_without_a_finite_maximum_likelihood_have_diverged() -> None:
    """The first has never won.  From 66 players on, more unknowns than factors are formed for, 22.7 was claimed."""
    found = _ratings(70, 0)
    assert int(found.status) == DIVERGED, found
    assert found.evaluations < 600


def test_ratings_that_may_all_be_moved_alike_have_not() -> None:
    assert bool(_ratings(70, 1, free=True).converged)
    assert bool(_ratings(70, 1).converged)


@pytest.mark.parametrize("order", [4, 6])
def test_minima_that_are_met_slowly_far_out_are_minima(order: int) -> None:
    """A step takes the ``order - 2`` of ``order - 1`` of what is missing."""
    target = torch.linspace(30, 40, 70, dtype=F64)
    found = ik.argmin(lambda z: (z - target).pow(order).sum() / order, 0.9 * target)
    assert float((found.value - target).abs().max()) < 0.1


@pytest.mark.parametrize("unknowns", [65, 130])
def test_a_minimum_that_was_taken_for_a_way_to_infinity_is_one_once_it_is_reached(unknowns: int) -> None:
    """``1 / z`` falls like that until far out; where ``|F|`` is all rounding, one step further there is more of it."""
    found = ik.argmin(lambda z: (1 / (z + 2) + 1e-12 * (z + 2)).sum(), torch.zeros(unknowns, dtype=F64))
    torch.testing.assert_close(found.value, torch.full_like(found.value, 1e6 - 2), rtol=1e-6, atol=0)


class _GivesUp(ik.Solver):
    """Says that every sample has run away."""

    name = "gives_up"
    solves = "minimise"

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        status = torch.full((len(z0),), DIVERGED)
        return ik.extend.Outcome(z0, torch.linalg.vector_norm(f(z0), dim=1), torch.ones_like(status), status)


@pytest.mark.parametrize("times", [1, 2])
def test_a_minimum_further_out_than_one_method_comes_is_found_by_the_next(times: int) -> None:
    """Ridge regression of nearly separable data, in units of 1e-4: the minimum was another 1e6 away."""
    again = (Stage("lbfgs", scale=None),)
    found = ik.argmin(
        lambda z: torch.cosh(z - 3).sum(),
        torch.zeros(2, dtype=F64),
        solver=Polyalgorithm((Stage(_GivesUp()), *(Stage(_GivesUp(), scale=None),) * (times - 1), *again)),
        on_failure="ignore",
    )
    assert bool(found.converged) == (times == 1)


def test_no_third_method_goes_on_from_where_two_have_run_away_to() -> None:
    """Separable data: 1,778 evaluations of two methods in turn, ever further out."""
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=rng, dtype=F64)
    y = (X[:, 0] > 0).to(F64)
    found = ik.argmin(
        lambda w: torch.nn.functional.binary_cross_entropy_with_logits(X @ w, y),
        torch.zeros(3, dtype=F64),
        on_failure="ignore",
    )
    assert int(found.status) == DIVERGED
    assert found.evaluations < 500


def _fades(residual: Callable[[Tensor], Tensor], z: Tensor, *last: Tensor) -> bool:
    f: Any = SimpleNamespace(residual=residual, linearize=lambda y: linearise(residual, y)[1])
    return bool(fade_together(f, z, residual(z), torch.ones(1, dtype=torch.bool), last, LEFT))


def test_a_flat_direction_whose_zero_a_correction_finds_is_no_way_out() -> None:
    A, zero = torch.ones(70, dtype=F64), torch.full((1, 70), 0.1, dtype=F64)
    A[-1], zero[:, -1] = 1e-9, 30.02
    z, point = zero.clone(), zero.clone()
    z[:, -1], point[:, -1] = 30.0, 29.98
    residual = lambda y: A * (y - zero)  # noqa: E731
    assert not _fades(residual, z, point, residual(point))
    far = torch.full_like(z, 30)
    assert _fades(lambda y: torch.exp(-y), far, far - 1, torch.exp(1 - far))


def test_rounding_errors_all_along_a_line_are_no_way_out() -> None:
    z, noise = torch.full((1, 70), 30.0, dtype=F64), 1e-15 * torch.linspace(-1, 1, 70, dtype=F64)
    assert not _fades(lambda y: 0 * y + noise, z, z - 1, noise.unsqueeze(0), torch.ones_like(z))
