"""Unknowns on which nothing depends at the start: multipliers and prices of complementarity problems, ``relu`` of a negative
number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.root.idle_unknowns import Awakened
from implicitkit.solver.root.trust_region import TrustRegion

F32, F64 = torch.float32, torch.float64


def _wardrop(z: Tensor, demand: Tensor) -> Tensor:
    """Braess' network under the travel times of the Bureau of Public Roads: three paths that are used only if none costs
    less, ``min(f, c(f) - u) = 0``, and all travellers on them."""
    f, u = z[:3], z[3:]
    links = torch.stack([f[0] + f[2], f[1], f[0], f[1] + f[2], f[2]])
    free, capacity = (torch.tensor(v).to(z) for v in ([1.0, 2.0, 2.0, 1.0, 0.25], [2.0, 4.0, 4.0, 2.0, 1.0]))
    t = free * (1 + 0.15 * (links / capacity) ** 4)
    costs = torch.stack([t[0] + t[2], t[1] + t[3], t[0] + t[4] + t[3]])
    return torch.cat([torch.minimum(f, costs - u), f.sum().reshape(1) - demand])


def _spatial_prices(z: Tensor, theta: Tensor) -> Tensor:
    """One good in two places: shipped from one to the other only where the difference of prices pays for it."""
    supply, shipped, price = z[:2], z[2:3], z[3:]
    balance = torch.stack([supply[0] - shipped[0], supply[1] + shipped[0]]) - (theta[:2] - price)
    return torch.cat(
        [torch.minimum(supply, 1 + supply - price), torch.minimum(shipped, price[:1] + 0.5 - price[1:]), balance]
    )


def _rectified(z: Tensor, theta: Tensor) -> Tensor:
    return torch.relu(z) - theta * (1 + 0.1 * torch.relu(z.flip(0)))


_PROBLEMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], list[list[float]], list[float]]] = {
    "Wardrop": (
        _wardrop,
        [5.0],
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -9.0], [0.0, 0.0, 0.0, 0.0]],
        [2.0212865381260947, 2.0212865381260947, 0.9574269237478102, 3.7576117670618094],
    ),
    "spatial prices": (
        _spatial_prices,
        [8.0, 5.0],
        [[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, -5.0, -5.0]],
        [3.5, 2.0, 0.0, 4.5, 3.0],
    ),
    "relu": (_rectified, [1.0, 2.0], [[-1.0, -1.0], [-0.5, 3.0]], [1.2 / 0.98, 2.2 / 0.98]),
}
_ROWS = [(name, k) for name, row in _PROBLEMS.items() for k in range(len(row[2]))]


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize(("name", "k"), _ROWS)
def test_an_idle_unknown_is_moved(name: str, k: int, dtype: torch.dtype) -> None:
    equations, theta, starts, solution = _PROBLEMS[name]
    t = torch.tensor(theta, dtype=dtype)
    found = ik.root(equations, torch.tensor(starts[k], dtype=dtype), (t,))
    close = 1e-8 if dtype == F64 else 1e-3
    torch.testing.assert_close(found.value, torch.tensor(solution, dtype=dtype), rtol=close, atol=close)
    assert found.evaluations < 300, found.evaluations


def test_its_derivative_is_that_by_a_smooth_form() -> None:
    """Where all paths are used, ``c(f) = u``."""
    start = torch.ones(4, dtype=F64)

    def smooth(z: Tensor, demand: Tensor) -> Tensor:
        low = torch.cat([z[:3], z[3:] + 1e3])  # a price at which min(f, c - u) = c - u
        return torch.cat([_wardrop(low, demand)[:3] + 1e3, _wardrop(z, demand)[3:]])

    demand = torch.tensor([5.0], dtype=F64)
    by_kinks, by_costs = (
        torch.func.jacrev(lambda d, g=g: ik.root(g, start, (d,)).value)(demand) for g in (_wardrop, smooth)
    )
    torch.testing.assert_close(by_kinks, by_costs, rtol=1e-6, atol=1e-8)


def test_what_depends_on_nothing_anywhere_is_refused_soon() -> None:
    found = ik.root(
        lambda z: torch.stack([z[0] ** 2 + 1 + 0 * z[1], z[0] - 1 + 0 * z[1]]),
        torch.ones(2, dtype=F64),
        on_failure="ignore",
    )
    assert not bool(found.converged) and found.evaluations < 2000


@pytest.mark.parametrize("in_dims", [None, (0,)])
def test_the_others_go_the_way_that_they_go_alone(in_dims: tuple[int, ...] | None) -> None:
    """One sample has an idle unknown, one converges at once, and one is solved by a later method."""

    def equations(z: Tensor, t: Tensor) -> Tensor:
        hard = torch.stack([10 * (z[:, 1] - z[:, 0] ** 3), torch.atan(20 * (z[:, 0] - 1)) + 0.1 * (z[:, 1] - 1)], 1)
        idle = torch.relu(z) - 1 - 0.1 * torch.relu(z.flip(1))
        return torch.where(t[:, :1] > 0, hard, idle) + 0 * t

    start = torch.tensor([[-1.0, -1.0], [1.1, 1.2], [-30.0, 5.0]], dtype=F64)
    t = torch.tensor([[-1.0], [1.0], [1.0]], dtype=F64)
    options = {"batch_dims": 1, "in_dims": in_dims, "on_failure": "ignore"}
    together = ik.root(equations, start, (t,), **options)
    for i in range(3):
        alone = ik.root(equations, start[i : i + 1], (t[i : i + 1],), **options)
        torch.testing.assert_close(together.value[i : i + 1], alone.value, rtol=0, atol=0)
        assert int(together.status[i]) == int(alone.status[0])


def test_a_sample_without_idle_unknowns_is_left_to_the_next_method() -> None:
    start = torch.tensor([[-1.0], [0.5]], dtype=F64)
    awakened = Awakened(TrustRegion())
    found = ik.root(lambda z: torch.relu(z) - 1, start, solver=awakened, batch_dims=1, on_failure="ignore")
    assert [int(s) for s in found.status] == [int(ik.Status.CONVERGED), int(ik.Status.STALLED)]
    torch.testing.assert_close(found.value, torch.tensor([[1.0], [0.5]], dtype=F64))
    assert found.steps.tolist()[1] == 0
