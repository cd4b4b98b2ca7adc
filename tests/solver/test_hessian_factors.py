"""A minimum that Newton's steps have come to is known by the factors of the last one: one product, in place of a search."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.steps.hessian_factors import HessianFactors

D = torch.float64


def _positive(n: int, seed: int) -> Tensor:
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=D)
    return A @ A.T + 0.1 * torch.eye(n, dtype=D)


@pytest.mark.parametrize("n", [1, 2, 10])
def test_factors_hold_where_the_hessian_is_the_same(n: int) -> None:
    """In any units, sample by sample; not where it is indefinite, half of what it was, or not finite."""
    units = torch.logspace(-6, 6, n, dtype=D)
    N = torch.stack([units.unsqueeze(1) * _positive(n, seed) * units for seed in range(5)])
    known = HessianFactors.dense(N, torch.linalg.cholesky(N))
    H = N.clone()
    values, vectors = torch.linalg.eigh(N[1] / (units.unsqueeze(1) * units))
    values[0] = -values[0]
    H[1] = units.unsqueeze(1) * (vectors @ torch.diag(values) @ vectors.T) * units
    H[2] = 0.5 * H[2]
    H[3] = torch.nan
    H[4] = (1 + 1e-6) * H[4]
    held = known.hold(lambda q: (H @ q.unsqueeze(2)).squeeze(2), torch.zeros(5, n, dtype=D))
    assert held.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("turned", [0, 1])
def test_a_saddle_shows_in_whichever_units_it_falls(turned: int) -> None:
    N = torch.diag(torch.tensor([1e-12, 1e12], dtype=D)).unsqueeze(0)
    H = N[0].diagonal().clone()
    H[turned] = -H[turned]
    known = HessianFactors.dense(N, torch.linalg.cholesky(N))
    assert not bool(known.hold(lambda q: H * q, torch.zeros(1, 2, dtype=D)))


def test_a_small_minimum_is_not_searched_for_a_way_down() -> None:
    a = torch.linspace(-1, 1, 10, dtype=D)
    found = ik.argmin(lambda z: torch.cosh(z - a).sum() + 0.5 * z.square().sum(), torch.zeros(10, dtype=D))
    assert int(found.steps) == 4 and found.evaluations <= 11, found


@pytest.mark.parametrize("power", [2, 3])
def test_a_sparse_minimum_is_not_searched_for_a_way_down(power: int) -> None:
    """By sparse factors of the last step, too: nine evaluations for thirteen; and an inflection in one of 300 unknowns is
    still none."""
    a = torch.linspace(-1, 1, 300, dtype=D)
    f = lambda z: torch.cosh(z - a)[1:].sum() + 5 * z[1:].diff().square().sum() + z[0] ** power  # noqa: E731
    if power == 3:
        with pytest.raises(ik.ConvergenceError):
            ik.argmin(f, torch.ones(300, dtype=D), max_steps=200)
        return
    found = ik.argmin(f, torch.ones(300, dtype=D))
    assert bool(found.converged) and found.evaluations <= 9, found


@pytest.mark.parametrize("n", [5, 50])
def test_the_end_of_a_quadratic_is_looked_at_once(n: int) -> None:
    """That its gradient does not vanish for its units, and that it is a minimum, is one evaluation (nine without: some of
    its entries are zero to the last bit)."""
    Q, c = _positive(n, 0), torch.linspace(-1, 1, n, dtype=D)
    found = ik.argmin(lambda z: 0.5 * z @ (Q @ z) - c @ z, torch.zeros(n, dtype=D))
    assert int(found.steps) == 1 and found.evaluations <= 5, found
    torch.testing.assert_close(found.value, torch.linalg.solve(Q, c))


@pytest.mark.parametrize("fall", [lambda z: torch.exp(-z), lambda z: torch.erfc(z), lambda z: 1 / z])
def test_a_way_to_infinity_is_no_minimum_by_factors(fall: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ik.ConvergenceError):
        ik.argmin(lambda z: fall(z).sum() + 1e-3 * z.new_ones(()), torch.full((3,), 5.0, dtype=D), max_steps=500)


@pytest.mark.parametrize("power", [3, 5])
def test_an_inflection_beside_a_minimum_is_none(power: int) -> None:
    """``x^2 + y^3``: Newton's steps come down to zero, where the Hessian was positive definite all the way."""
    with pytest.raises(ik.ConvergenceError):
        ik.argmin(lambda z: z[0] ** 2 + z[1] ** power, torch.tensor([1.0, 1.0], dtype=D), max_steps=200)
