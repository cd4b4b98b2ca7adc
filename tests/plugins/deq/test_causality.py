"""Causal means causal: what comes later changes nothing, not even when a solve stops, at any tolerance, with any solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ, PerPosition, cells, future_leak

F64 = torch.float64
SOLVERS: dict[str, Any] = {
    "default": "relay",
    "auto": "auto",
    "picard": "picard",
    "damped": ik.Picard(damping=0.7),
    "anderson": "anderson",
    "broyden": "broyden",
    "newton": ik.Newton(line_search=False),
    "blocks": ik.Blocks("picard"),
}
CELLS: dict[str, Callable[[], cells.Cell]] = {
    "transformer": lambda: cells.Transformer(4, 8, 2, scale=0.5, dtype=F64),
    "trellis": lambda: cells.TrellisNet(4, 6, scale=1.2, dtype=F64),
}


def _whole_sequence_leak(cell: cells.Cell, x: Tensor, rtol: float) -> float:
    layer = DEQ(cell, rtol=rtol, atol=0.0, solver="picard", causal=False, on_failure="ignore")
    return max(future_leak(layer, x, 10, size=2.0) for _ in range(4))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("rtol", [1e-1, 1e-2, 1e-3])
def test_no_leak_at_any_tolerance(name: str, solver: str, rtol: float) -> None:
    """With the whole sequence deciding when to stop, the same layers leak 1e-4 to 1e-1."""
    torch.manual_seed(0)
    full_steps = solver == "newton"  # which need not converge from far away; nor may they leak then
    policy = "ignore" if full_steps else "raise"
    layer = DEQ(CELLS[name](), rtol=rtol, atol=0.0, solver=SOLVERS[solver], on_failure=policy)
    x = torch.randn(2, 20, 4, dtype=F64)
    assert max(future_leak(layer, x, 10, size=2.0) for _ in range(4)) < 1e-12
    assert layer.solution is not None and (full_steps or bool(layer.solution.converged.all()))


def test_stopping_as_a_whole_does_leak() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 4, dtype=F64)
    assert max(_whole_sequence_leak(CELLS[name](), x, rtol) for name in CELLS for rtol in (1e-1, 1e-2)) > 1e-3


@pytest.mark.parametrize("solver", ["default", "anderson", "broyden"])
@pytest.mark.parametrize(("rtol", "atol"), [(1e-2, 0.0), (0.0, 1e-3), (1e-3, 1e-4)])
def test_positions_that_all_hold_make_a_sequence_that_holds(solver: str, rtol: float, atol: float) -> None:
    torch.manual_seed(1)
    layer = DEQ(CELLS["transformer"](), rtol=rtol, atol=atol, solver=SOLVERS[solver])
    layer(torch.randn(3, 15, 4, dtype=F64))
    assert layer.solution is not None
    size = torch.linalg.vector_norm(layer.solution.value.flatten(1), dim=1)
    assert bool((layer.solution.residual_norm <= atol + rtol * size).all())


def test_a_front_costs_no_more_evaluations_than_it_has_positions() -> None:
    """Gates that remember without loss: position t is exact once t - 1 is, and by no acceleration before."""
    torch.manual_seed(0)
    x = torch.randn(4, 30, 4, dtype=F64)
    cell = cells.TrellisNet(4, 6, scale=0.5, dtype=F64)
    evaluations = {}
    for solver in ("relay", "anderson"):
        layer = DEQ(cell, rtol=1e-3, atol=0.0, solver=solver)
        layer(x)
        assert layer.solution is not None
        evaluations[solver] = layer.solution.evaluations
    assert evaluations["relay"] <= 31 and 2 * evaluations["relay"] < evaluations["anderson"]


class Swing(cells.Cell):
    """z_t = -1.5 tanh(1.3 z_t) + 0.2 z_{t-1} + x_t: slope below -1, so that the plain iteration has no chance."""

    causal = True

    def update(self, z: Tensor, x: Tensor) -> Tensor:
        past = torch.nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return -1.5 * torch.tanh(1.3 * z) + 0.2 * past + x

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[1:])


def test_a_sequence_that_gets_nowhere_is_handed_on_and_still_nothing_leaks() -> None:
    torch.manual_seed(0)
    layer = DEQ(Swing(), rtol=1e-6, atol=0.0)
    x = 0.3 * torch.randn(3, 12, 2, dtype=F64)
    z = layer(x)
    assert layer.solution is not None and int(layer.solution.steps.max()) < 200
    torch.testing.assert_close(z, layer.cell(z, x), rtol=1e-5, atol=1e-6)
    assert max(future_leak(layer, x, 6) for _ in range(4)) < 1e-12
    with pytest.raises(ik.ConvergenceError):
        DEQ(Swing(), rtol=1e-6, atol=0.0, solver="picard", max_steps=300)(x)


def test_steps_of_all_stages_are_limited_together_and_traced() -> None:
    layer = DEQ(Swing(), rtol=1e-12, atol=0.0, max_steps=20, trace=True, on_failure="ignore")
    seen: list[int] = []
    with layer.using(callback=lambda step, z, norm: seen.append(step)):
        layer(0.3 * torch.randn(2, 5, 2, dtype=F64))
    assert layer.solution is not None and layer.solution.trace is not None
    assert int(layer.solution.steps.max()) == 20 == seen[-1] and seen == sorted(set(seen))
    assert len(layer.solution.trace) == 21
    with layer.using(callback=lambda step, z, norm: step >= 3):
        layer(0.3 * torch.randn(2, 5, 2, dtype=F64))
    assert set(layer.solution.status.tolist()) == {int(ik.Status.STOPPED)}


def test_the_object_of_the_default_and_its_name_are_the_same() -> None:
    x = torch.randn(2, 6, 4, dtype=F64)
    cell = CELLS["transformer"]()
    named, made = DEQ(cell, solver="relay"), DEQ(cell, solver=ik.Relay())
    assert torch.equal(named(x), made(x))
    direct = PerPosition(ik.Picard(), (8,), 6, 6)
    torch.testing.assert_close(DEQ(cell, solver=direct)(x), named(x), rtol=1e-9, atol=1e-10)


class Scaled(Swing):
    """z_t = t (0.5 tanh(z_t / t) + 0.2 z_{t-1} / t) + x_t, the same in units of any size t."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit

    def update(self, z: Tensor, x: Tensor) -> Tensor:
        past = torch.nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return 0.5 * self.unit * torch.tanh(z / self.unit) + 0.2 * past + x


def test_positions_are_solved_alike_in_all_units() -> None:
    torch.manual_seed(0)
    x = 0.3 * torch.randn(2, 7, 3, dtype=F64)
    x[:, 4:] *= 1e-3  # positions have sizes of their own
    expected = DEQ(Scaled(1.0), rtol=1e-12, atol=0.0)(x)
    for unit in (1e-12, 1e-6, 1.0, 1e9):
        found = DEQ(Scaled(unit))(unit * x) / unit
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9, msg=lambda m, u=unit: f"units of {u}: {m}")


def test_positions_are_solved_where_the_layer_is_whatever_the_default_device() -> None:
    x = torch.linspace(-1, 1, 42, dtype=F64).reshape(2, 7, 3)
    expected = DEQ(Scaled(1.0), rtol=1e-9, atol=1e-12)(x)
    with torch.device("meta"):
        found = DEQ(Scaled(1.0), rtol=1e-9, atol=1e-12)(x)
    torch.testing.assert_close(found, expected)
