"""What a user of qpth relies on, and its result here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
GEN = torch.Generator().manual_seed(4)
P = torch.eye(4, dtype=F64) * 2
DATA = {
    "P": P, "q": torch.randn(4, generator=GEN, dtype=F64), "A": torch.ones(1, 4, dtype=F64), "b": torch.ones(1, dtype=F64),
    "G": -torch.eye(4, dtype=F64), "h": torch.full((4,), 0.05, dtype=F64),
}  # fmt: skip


def solve(**changed: Tensor) -> Tensor:
    value: Tensor = ik.solve(ik.QuadraticProgram(**{**DATA, **changed}), rtol=1e-11).value
    return value


@pytest.mark.parametrize("name", ["q", "A", "b", "G", "h"])
def test_gradients_by_every_part(name: str) -> None:
    assert torch.autograd.gradcheck(lambda t: solve(**{name: t}), (DATA[name].clone().requires_grad_(),), atol=1e-5)


def test_a_batch_is_its_samples_and_tells_which_failed() -> None:
    q = torch.randn(5, 4, dtype=F64)
    batch = ik.solve(ik.QuadraticProgram(P, q, G=DATA["G"], h=DATA["h"])).value
    single = torch.stack([ik.solve(ik.QuadraticProgram(P, one, G=DATA["G"], h=DATA["h"])).value for one in q])
    torch.testing.assert_close(batch, single, rtol=1e-8, atol=1e-9)
    empty = torch.tensor([[0.05] * 4, [-1.0] * 3 + [0.5]], dtype=F64)
    rows = torch.cat([DATA["G"], -DATA["G"]])
    h = torch.cat([empty, torch.full((2, 4), 0.5, dtype=F64)], 1)
    s = ik.solve(ik.QuadraticProgram(P, q[:2], G=rows, h=h), on_failure="ignore")
    assert s.converged.tolist() == [True, False]


def test_multipliers_meet_the_conditions() -> None:
    s = ik.solve(ik.QuadraticProgram(**DATA))
    y, lam = s.multipliers
    stationary = P @ s.value + DATA["q"] + DATA["A"].mT @ y + DATA["G"].mT @ lam
    assert float(stationary.abs().max()) < 1e-7 and bool((lam >= -1e-9).all())
