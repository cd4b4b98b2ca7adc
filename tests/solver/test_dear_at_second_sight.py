"""Maps of few operations that take long: nothing says that they are cheap, and no evaluation more is spent on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import linearise
from implicitkit.lifting.work import Tally, Work
from implicitkit.linear import GMRES
from implicitkit.linear.iterative.contraction import Contraction
from implicitkit.solver.fixed_point import anderson, cheap_maps

D = torch.float64
SAMPLES, N = 4, 80
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


@pytest.mark.parametrize("name", MAPS)
def test_no_evaluation_more_than_where_no_map_is_cheap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigenvalue apart, of which plain steps take three times as many."""
    with torch.no_grad():
        spent = []
        for cheap in (cheap_maps.is_cheap, lambda _, period: False):
            monkeypatch.setattr(anderson, "is_cheap", cheap)
            found = ik.fixed_point(MAPS[name], 0 * C, batch_dims=1, solver="anderson", rtol=1e-10)
            spent.append(found.evaluations)
            torch.testing.assert_close(found.value, torch.linalg.solve(torch.eye(N, dtype=D) - A, C.mT).mT)
    assert spent[0] == spent[1]


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer": lambda z: z @ A + C,
    "its product by itself": lambda z: torch.addmm(C, z, A),
    "a sum over an index": lambda z: torch.einsum("bj,ji->bi", z, A) + C,
    "a filter": lambda z: 0.2 * torch.conv1d(z.unsqueeze(1), torch.ones(1, 1, 3, dtype=D), padding=1)[:, 0] + C,
    "many given numbers": lambda z: 0.5 * torch.tanh(C * z + C) + C,
}


@pytest.mark.parametrize("name", ALIKE)
def test_maps_whose_operations_tell_what_they_take_are_known_as_cheap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are written."""
    said: list[bool] = []

    def noted(f: Any, period: int) -> bool:
        said.append(cheap_maps.is_cheap(f, period))
        return said[-1]

    monkeypatch.setattr(anderson, "is_cheap", noted)
    assert bool(ik.fixed_point(ALIKE[name], 0 * C, batch_dims=1, solver="anderson").converged.all())
    assert said == [True]


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
