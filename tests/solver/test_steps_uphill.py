"""Sequential quadratic programming where the curved model draws a step uphill to an inequality that holds already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
#: seed, unknowns, inequalities, size of the start -> evaluations that the method may take
CASES = {(14, 3, 3, 2.0): 110, (8, 4, 5, 2.0): 230}


def _program(seed: int, n: int, m: int, size: float) -> tuple[Any, Any, Tensor]:
    """An indefinite quadratic with a quartic, between indefinite quadrics."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)  # noqa: E731
    B, Q, c, C = draw(m, n), draw(n, n), draw(n), 0.3 * draw(m, n, n)
    objective = lambda z: c @ z + z @ (Q + Q.T) @ z / 2 + 0.1 * z.pow(4).sum()  # noqa: E731
    return objective, lambda z: B @ z + torch.einsum("i,kij,j->k", z, C + C.mT, z) - 1, size * draw(n)


@pytest.mark.parametrize("case", CASES)
def test_nonconvex(case: tuple[int, int, int, float]) -> None:
    objective, g, z0 = _program(*case)
    s = ik.argmin(objective, z0, constraints=ik.Inequality(g), bounds=(-1.5, 1.0), solver="sqp", on_failure="ignore")
    assert bool(s.converged) and s.evaluations <= CASES[case], (case, s.steps, s.evaluations)
    assert float(g(s.value).max()) <= 1e-9, case
