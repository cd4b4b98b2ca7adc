"""How far the last linear system of an inexact Newton method is solved."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.steps.forcing import forcing_term
from implicitkit.solver.verdict import judge

D = torch.float64


@pytest.mark.parametrize(
    ("kind", "batch", "size", "dtype", "margin"),
    [
        pytest.param(ik.Root.kind, 1, 3, D, 4 * math.sqrt(2 * math.log(3)), id="few equations"),
        pytest.param(ik.Root.kind, 1, 1, D, 2.0, id="one equation"),
        pytest.param(ik.Root.kind, 64, 300, D, 4 * math.sqrt(2 * math.log(19200)), id="many equations"),
        pytest.param(ik.FixedPoint.kind, 64, 300, D, 2.0, id="fixed points"),
        pytest.param(ik.Root.kind, 64, 300, torch.float32, 2.0, id="single precision"),
    ],
)
def test_the_last_step_leaves_each_equation_what_it_may_leave(
    kind: Any, batch: int, size: int, dtype: torch.dtype, margin: float
) -> None:
    norm = torch.full((batch,), 1e-3, dtype=dtype)
    f: Any = SimpleNamespace(norm=norm, tolerance=torch.full_like(norm, 1e-5), kind=kind, batch=batch, size=size)
    eta = forcing_term(f, {"eta": torch.full_like(norm, 0.1), "norm": 1e6 * norm}, 0.9)
    torch.testing.assert_close(eta, torch.full_like(norm, 1e-2 / margin))


def graph(z: Tensor, x: Tensor) -> Tensor:
    """Reaction on a random graph, of which every unknown has four neighbours."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(z.shape[1], generator=generator) for _ in range(2))
    back, again = first.argsort(), second.argsort()
    return 2.1 * z + z**3 - (z[:, first] + z[:, back] + z[:, second] + z[:, again]) / 2 - x


def test_what_many_equations_claim_at_last_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 samples of 300: hardly a claim is refused, in few evaluations."""
    refused, examine = [], judge.Judge.examine

    def counted(self: Any, z: Tensor, norm: Tensor, claims: Tensor, *more: Any) -> Tensor:
        holds = examine(self, z, norm, claims, *more)
        refused.append(int((claims & ~holds).count_nonzero()))
        return holds

    monkeypatch.setattr(judge.Judge, "examine", counted)
    ramp, which = torch.linspace(0.5, 1.5, 300, dtype=D), torch.arange(64)
    turned = (torch.arange(300) + (which * 300 // 64).unsqueeze(1)) % 300
    x = ramp[turned] * (1 + 1.5 * which / 64).unsqueeze(1)
    found = ik.root(graph, torch.zeros_like(x), (x,), batch_dims=1)
    assert sum(refused) <= 4 and found.evaluations <= 28, (refused, found.evaluations)
