"""What evaluations of maps cost, and when rows are left out of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import linearise
from implicitkit.lifting.work import Tally, Work
from implicitkit.linear import GMRES
from implicitkit.linear.iterative.contraction import Contraction
from implicitkit.linear.price import CALL
from implicitkit.solver import costs

D = torch.float64
SAMPLES, N = 4, 80


def _dear(out: Tensor) -> Tensor:
    for _ in range(100):
        out = out.view_as(out)
    return out


def test_rows_of_cheap_maps_are_dropped_where_that_pays() -> None:
    """Half of a small batch is kept on board; of a large one it is not, nor of a dear map."""
    spent = {}
    for rows, size, dear in ((8, 80, False), (8192, 80, False), (8, 80, True)):
        slow = torch.arange(rows) % 2 == 0
        rate = torch.where(slow, 0.7, 0.1).unsqueeze(1)
        c = torch.ones(rows, size)

        def step(z: Tensor, rate: Tensor, c: Tensor, dear: bool = dear) -> Tensor:
            out = rate * torch.sin(z) + c
            return _dear(out) if dear else out

        found = ik.fixed_point(step, 0 * c, (rate, c), batch_dims=1, in_dims=0, rtol=1e-5)
        assert bool(found.converged.all())
        spent[rows, dear] = found.sample_evaluations / rows / found.evaluations
    assert spent[8, False] == 1 and spent[8192, False] < 0.9 and spent[8, True] < 0.9, spent


def test_rows_are_dropped_where_four_evaluations_of_them_cost_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a method that weighs it, by what they cost; by any other one always."""
    rows = ((True, 2e5, 0.5, False), (True, 2e5, 0.2, True), (True, 4e5, 0.5, True), (False, 1e3, 0.5, True))
    for weighs, cost, share, pays in rows:
        monkeypatch.setattr(costs, "cost_of", lambda _, cost=cost: cost)
        assert costs.dropping_pays(SimpleNamespace(weighs=weighs), share) is pays  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Maps of few operations that take long, of which nothing says that they are cheap.
C = torch.randn(SAMPLES, N, generator=torch.Generator().manual_seed(2), dtype=D)
Q = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(3), dtype=D)).Q
A = (Q * torch.cat([torch.tensor([0.6], dtype=D), torch.linspace(0, 0.2, N - 1, dtype=D)])) @ Q.mT
WIDE = 1e-4 * torch.randn(N, 40_000, generator=torch.Generator().manual_seed(4), dtype=D)


class _Own(torch.autograd.Function):
    """A product that nobody sees into."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, M: Tensor) -> Tensor:
        ctx.save_for_backward(M)
        return torch.from_numpy(z.detach().numpy() @ M.numpy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g @ ctx.saved_tensors[0].mT, None


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "factors": lambda z: torch.linalg.solve(torch.eye(N, dtype=D), (z @ A + C).mT).mT,
    "numpy": lambda z: torch.from_numpy(z.detach().numpy() @ A.numpy()) + C,
    "a wide layer": lambda z: z @ A + 1e-9 * ((z @ WIDE) @ WIDE.mT) + C,
    "somebody's own": lambda z: _Own.apply(z, A) + C,
    "an exponential": lambda z: z @ torch.linalg.matrix_exp(0 * A) @ A + C,
}


def _cost(function: Callable[[Tensor], Tensor]) -> float | None:
    """What an evaluation costs in calls; ``None`` where that is not known."""
    said: list[float | None] = []

    class Noted(ik.Anderson):
        def init(self, f: Any, z: Tensor) -> Any:
            said.append(costs.cost_of(f))
            return super().init(f, z)

    with torch.no_grad():
        found = ik.fixed_point(function, 0 * C, batch_dims=1, solver=Noted(), rtol=1e-10)
    assert bool(found.converged.all()) and len(said) == 1
    return None if said[0] is None else said[0] / CALL


@pytest.mark.parametrize("name", MAPS)
def test_a_map_that_may_take_long_is_not_known_as_cheap(name: str) -> None:
    cost = _cost(MAPS[name])
    assert cost is None or cost > 30, cost


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer": lambda z: z @ A + C,
    "its product by itself": lambda z: torch.addmm(C, z, A),
    "a sum over an index": lambda z: torch.einsum("bj,ji->bi", z, A) + C,
    "a filter": lambda z: 0.2 * torch.conv1d(z.unsqueeze(1), torch.ones(1, 1, 3, dtype=D), padding=1)[:, 0] + C,
    "many given numbers": lambda z: 0.5 * torch.tanh(C * z + C) + C,
}


@pytest.mark.parametrize("name", ALIKE)
def test_maps_whose_operations_tell_what_they_take_are_known_as_cheap(name: str) -> None:
    """However they are written."""
    cost = _cost(ALIKE[name])
    assert cost is not None and cost < 10, cost


def test_products_with_somebodys_own_operation_are_dear() -> None:
    """One node of a graph, or how long it takes is not known: GMRES is not given up for more of them."""
    M = (Q * torch.linspace(-0.6, 0.6, N, dtype=D)) @ Q.mT
    ways: tuple[tuple[Callable[[Tensor], Tensor], bool], ...] = (
        (lambda z: _Own.apply(z, M) - z, True),
        (lambda z: torch.linalg.solve(torch.eye(N, dtype=D) + 0 * z[0, 0], (z @ M).mT).mT - z, True),
        (lambda z: z @ M - z, False),
    )
    for function, dear in ways:
        _, J = linearise(function, 0 * C, fixed_point=True)
        limits = {"rtol": 1e-10, "atol": 0.0, "max_steps": None}
        found, least = (int(s.solve(J.T, C, **limits).steps.max()) for s in (Contraction(), GMRES()))
        assert (found <= least + 1) == dear, (found, least)


def test_products_of_numbers_are_counted() -> None:
    """As many for each number of a product of matrices as its rows are long."""
    a, b, c = torch.ones(3, 50), torch.ones(50, 2), torch.ones(3, 2)
    for func, args in ((torch.matmul, (a, b)), (torch.addmm, (c, a, b)), (torch.einsum, ("ij,jk->ik", a, b))):
        tally = Tally()
        tally.add(func, args, func(*args))  # type: ignore[operator]
        assert tally.work() == Work(1, 6, 300)
