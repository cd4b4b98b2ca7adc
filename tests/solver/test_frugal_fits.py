"""Fits without factors: for as long as products with the Jacobian cost less, and no longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.foundation.graph_size import nodes_of, size_of_graph
from implicitkit.linear.factors.sparse_normal import price_of_factors
from implicitkit.linear.price import Work, price_of_dense_fit
from implicitkit.solver.least_squares import frugal, levenberg_marquardt
from implicitkit.solver.least_squares.frugal import FrugalLevenbergMarquardt
from implicitkit.sparsity.compression import as_pattern, coloured

D = torch.float64
Fit = tuple[Callable[..., Tensor], Tensor, Tensor]


def dense(n: int, batch: int = 64) -> Fit:
    """``2.1 z + z^3 - W z = x`` and ``z = 0``, by a tenth."""
    W = torch.randn(n, n, dtype=D, generator=torch.Generator().manual_seed(0)) / n**0.5
    x = torch.linspace(0.5, 1.5, n, dtype=D).expand(batch, n).contiguous()
    return lambda z, x: torch.cat([2.1 * z + z**3 - z @ W.T - x, 0.1 * z], -1), torch.zeros(batch, n, dtype=D), x


def stretched(n: int, batch: int = 64, condition: float = 1e6) -> Fit:
    """A dense fit whose Jacobian has singular values over six orders of magnitude."""
    generator = torch.Generator().manual_seed(1)
    U, V = (torch.linalg.qr(torch.randn(n, n, dtype=D, generator=generator))[0] for _ in range(2))
    A = U * torch.logspace(0, -math.log10(condition), n, dtype=D) @ V.mT
    x = torch.randn(batch, n, dtype=D, generator=generator)
    return lambda z, x: z @ A.T + 0.1 * (z @ A.T) ** 3 - x @ A.T, torch.zeros(batch, n, dtype=D), x


def solve(fit: Fit, **options: Any) -> ik.Solution:
    f, z0, x = fit
    return ik.least_squares(f, z0, (x,), batch_dims=1, **options)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products with ``R'R`` have been made, and how often a step was taken to factors."""
    count = [0, 0]
    plain, factored = frugal._gauss_newton, levenberg_marquardt.LevenbergMarquardt.step

    def gauss_newton(*given: Any) -> Any:
        A, made = plain(*given)
        mv = A._mv
        A._mv = lambda v: (count.__setitem__(0, count[0] + 1), mv(v))[1]
        return A, made

    def step(*given: Any) -> Any:
        count[1] += 1
        return factored(*given)

    monkeypatch.setattr(frugal, "_gauss_newton", gauss_newton)
    monkeypatch.setattr(levenberg_marquardt.LevenbergMarquardt, "step", step)
    return count


@pytest.mark.parametrize("n", [30, 65, 130])
def test_a_batch_of_easy_fits_takes_no_factors(n: int, products: list[int]) -> None:
    """An evaluation for each trial point, a few for the judge, and some fifty products."""
    want = solve(dense(n), solver="levenberg_marquardt").value
    products[:] = 0, 0
    s = solve(dense(n))
    assert bool(s.converged.all()) and s.solver == "auto (levenberg_marquardt)"
    assert products[1] == 0 and 0 < products[0] <= 60
    assert int(s.evaluations) <= 18
    torch.testing.assert_close(s.value, want, rtol=0, atol=1e-7)


def test_a_sparse_fit_takes_no_factors_where_they_would_fill(products: list[int]) -> None:
    n = 2000
    first, second = (torch.randperm(n, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    x = torch.linspace(0.5, 1.5, n, dtype=D).unsqueeze(0)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.cat([4 * z + z**3 - (z[:, first] + z[:, second]) / 2 - x, 0.1 * z], -1)

    s = solve((f, torch.zeros(1, n, dtype=D), x))
    assert bool(s.converged.all()) and products[1] == 0 and 0 < products[0] <= 60
    want = solve((f, torch.zeros(1, n, dtype=D), x), solver="levenberg_marquardt")
    torch.testing.assert_close(s.value, want.value, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("n", "handed"), [(64, True), (121, False)], ids=["as many products", "three times as many"])
def test_a_fit_whose_gradient_grows_has_factors_soon_where_they_cost_as_little(
    n: int, handed: bool, products: list[int]
) -> None:
    """A batch on a grid: each sample's gradient grows tenfold before it falls, which takes some 200 products."""
    side = math.isqrt(n)
    z0 = torch.zeros(64, n, dtype=D)
    x = torch.linspace(0.5, 1.5, n, dtype=D).roll(1) * torch.linspace(1, 2.5, 64, dtype=D).unsqueeze(1)

    def residuals(z: Tensor, x: Tensor) -> Tensor:
        Z = z.unflatten(-1, (side, side))
        near = (Z.roll(1, -1) + Z.roll(-1, -1) + Z.roll(1, -2) + Z.roll(-1, -2)).flatten(-2)
        return torch.cat([2.1 * z + z**3 - near / 2 - x, 0.1 * z], -1)

    found = solve((residuals, z0, x))
    assert bool(found.converged.all()) and bool(products[1]) == handed
    assert 20 < products[0] < 80 if handed else products[0] > 100


def test_one_fit_whose_gradient_grows_takes_a_hundred_products(
    products: list[int],
) -> None:
    """On a random graph, where three factorisations cost some hundred and fifty."""
    n = 1000
    turns = [torch.randperm(n, generator=torch.Generator().manual_seed(k)) for k in (0, 1)]
    turns = [*turns, *(turn.argsort() for turn in turns)]

    def residuals(z: Tensor, x: Tensor) -> Tensor:
        return torch.cat([2.1 * z + z**3 - sum(z[:, turn] for turn in turns) / 2 - x, 0.1 * z], -1)

    x = torch.linspace(0.5, 1.5, n, dtype=D).unsqueeze(0)
    found = solve((residuals, torch.zeros(1, n, dtype=D), x))
    assert bool(found.converged.all()) and products[1] == 0 and 60 < products[0] < 80


@pytest.mark.parametrize("condition", [1e4, 1e6])
def test_an_ill_conditioned_fit_has_factors_after_a_few_products(condition: float, products: list[int]) -> None:
    """As few of them as ``levenberg_marquardt`` takes, or one more, since that knows after its first step that a fit is
    linear; what has been spent before is a quarter of one for each."""
    want = solve(stretched(100, condition=condition), solver="levenberg_marquardt")
    products[:] = 0, 0
    s = solve(stretched(100, condition=condition))
    assert bool(s.converged.all()) and 0 < products[0] <= 80 and products[1] <= int(want.steps.max()) + 1
    assert int(s.evaluations) <= int(want.evaluations) + 9
    f, _, x = stretched(100, condition=condition)
    assert float(f(s.value, x).norm()) <= 1e-7


def test_all_steps_together_cost_no_more_than_the_factors(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A long valley, along which the trust region stays small: it is followed by factors in the end."""
    monkeypatch.setattr(frugal, "_price", lambda *_: 50.0)
    n = 40

    def f(z: Tensor) -> Tensor:
        return torch.cat([10 * (z[:, 1:] - z[:, :-1] ** 2), 1 - z[:, :-1]], -1)

    z0 = torch.tensor([-1.2, 1.0], dtype=D).repeat(n // 2).unsqueeze(0)
    s = ik.least_squares(f, z0, batch_dims=1)
    assert bool(s.converged.all()) and products[1] > 0 and 0 < products[0] <= 8 * 50
    torch.testing.assert_close(f(s.value).square().sum(), torch.zeros((), dtype=D), rtol=0, atol=1e-12)


def test_a_ball_that_has_to_shrink_again_and_again_is_left(products: list[int]) -> None:
    """Residuals that are finite in a small ball only: Levenberg-Marquardt shortens its steps as it always does."""
    f, z0, x = dense(65)
    g = lambda z, x: f(z, x) + 0 * (1e-6 - z.square().sum(1, keepdim=True)).log()  # noqa: E731
    for solver in ("auto", "levenberg_marquardt"):
        s = solve((g, z0, x), solver=solver, on_failure="ignore", max_steps=20)
        assert not bool(s.converged.any()) and bool((s.value.norm(dim=1) < 1e-3).all())
        assert products[1] > 0
        products[:] = 0, 0


@pytest.mark.parametrize(
    "case", ["few unknowns", "one sample", "units of the Jacobian", "half precision"], ids=lambda c: c.replace(" ", "-")
)
def test_who_has_factors_at_once(case: str, products: list[int]) -> None:
    f, z0, x = dense(65, 1 if case == "one sample" else 64) if case != "few unknowns" else dense(10, 2000)
    options: dict[str, Any] = {"x_scale": "jac"} if case == "units of the Jacobian" else {}
    if case == "half precision":
        f, z0, x = (lambda z, x: z + 0.1 * z**3 - x), z0.bfloat16(), x.bfloat16()
    s = solve((f, z0, x), **options)
    assert bool(s.converged.all()) and products[0] == 0 and products[1] > 0


def test_who_has_factors_at_once_takes_no_evaluation_more(products: list[int]) -> None:
    f, z0, x = dense(65, 1)
    want = solve((f, z0, x), solver="levenberg_marquardt")
    assert int(solve((f, z0, x)).evaluations) == int(want.evaluations)


def test_the_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithm of 5 of those that are missing, of three factorisations; a sixth of what is left at least."""
    seen: list[float] = []
    plain = frugal.steihaug

    def steihaug(*given: Any, path: Any) -> Any:
        seen.append(given[-1])
        return plain(*given, path=path)

    monkeypatch.setattr(frugal, "steihaug", steihaug)
    monkeypatch.setattr(frugal, "_price", lambda *_: 100.0)
    for rtol, part in ((1e-3, math.log(5) / math.log(1e3)), (1e-8, 1 / 6)):
        seen.clear()
        solve(dense(65), solver=FrugalLevenbergMarquardt(), rtol=rtol, atol=0.0)
        assert seen[0] == pytest.approx(300 * part, rel=1e-3)
        assert all(4 <= share <= 100 for share in seen)


def work(f: Callable[..., Tensor], z: Tensor, x: Tensor, weight: int = 0) -> Work:
    return Work(*size_of_graph(nodes_of(autodiff.recorded(lambda y: f(y, x), z)[0])), weight)


def test_prices_of_fits() -> None:
    """Within a factor of 1.6 of what was measured: the Jacobian and its factors, in steps of conjugate gradients."""
    measured = {(64, 16): 21, (64, 30): 57, (64, 65): 232}
    for (batch, n), price in measured.items():
        assert price / 1.6 <= price_of_dense_fit(batch, 2 * n, n, work(*dense(n, batch), n * n), True) <= 1.6 * price
    for (batch, n), price in {(64, 65): 62, (64, 130): 216, (64, 300): 936, (1, 130): 8, (1, 300): 38}.items():
        assert price / 1.6 <= price_of_dense_fit(batch, 2 * n, n, work(*dense(n, batch), n * n)) <= 1.6 * price


def neighbours(n: int, places: list[Any], batch: int) -> tuple[Any, Work]:
    """The pattern of residuals that see these neighbours of every unknown, and the work of a product."""
    rows = np.arange(n)
    columns = np.concatenate([(rows + k) % n if isinstance(k, int) else k.numpy() for k in places])
    pattern = sp.csr_matrix((np.ones(len(columns)), (np.tile(rows, len(places)), columns)), shape=(n, n))

    def f(z: Tensor, _: Tensor) -> Tensor:
        return z + z**3 - torch.stack([z.roll(k, -1) if isinstance(k, int) else z[:, k] for k in places]).sum(0)

    z = torch.zeros(batch, n, dtype=D)
    return coloured(as_pattern(pattern, n, n)), work(f, z, z)


def test_prices_of_sparse_fits() -> None:
    """A chain is cheap to factor, a random graph dear; many chains are worth a try."""
    generator = torch.Generator().manual_seed(0)
    chain, graph = [1, -1], [torch.randperm(1000, generator=generator) for _ in range(4)]
    alone, together, filling = (
        price_of_factors(batch, *neighbours(1000, places, batch))
        for batch, places in ((1, chain), (64, chain), (1, graph))
    )
    assert alone < 20 < 40 < together < filling


def test_what_a_product_takes_is_seen_in_the_graph() -> None:
    """Six nodes of 40 numbers; four times in rows of four; an index puts its numbers into their places, and a convolution
    of nine takes as long for each number as that for four and a half."""
    z = torch.zeros(1, 40, dtype=D)
    nodes, numbers, placed = size_of_graph(nodes_of(autodiff.recorded(lambda y: y.sin().cos().exp(), z)[0]))
    assert (nodes, numbers, placed) == (4, 160, 0)  # with the node that gathers the gradient
    rows = size_of_graph(nodes_of(autodiff.recorded(lambda y: y.view(10, 4).sin().cos(), z)[0]))
    assert rows[0] == 4 and rows[1] == 3 * 160 + 40
    index = torch.arange(20)
    assert size_of_graph(nodes_of(autodiff.recorded(lambda y: y[:, index], z)[0]))[2] == 20
    nine = torch.ones(1, 1, 9, dtype=D)
    blurred = autodiff.recorded(lambda y: torch.nn.functional.conv1d(y[None], nine, padding=4)[0], z)[0]
    assert size_of_graph(nodes_of(blurred))[2] == 180
    assert size_of_graph(nodes_of(torch.zeros(3))) == (0, 0, 0)
