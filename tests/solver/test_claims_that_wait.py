"""Claims of a batch are looked at together, and what comes of a sample depends neither on the others nor on that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

METHODS = ("bisection", "chandrupatla")
F64 = torch.float64


def _away(z: Tensor, a: Tensor) -> Tensor:
    return torch.where(a > 3, 1 / (1 + z * z), z - a)


# residual(z, a): only operations whose results do not depend on where in a tensor a number is
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cubic": lambda z, a: z * z * z + a * z - 7 * a * a,
    "far out": lambda z, a: 1e-6 * (z - 1e7 * a) * (1 + 1e-14 * z * z),
    "claims are refused at every step": lambda z, a: 1e-3 * (z - a) * (z - a) * (z - a),
    "some jump": lambda z, a: torch.where(a > 3, torch.where(z > a, z - a + 1e-9, z - a - 1e-9), z * z - a),
    "some have no root": _away,
    "units": lambda z, a: 1e-12 * (z * z - a),
}


def _solve(residual: Any, a: Tensor, method: str, start: float = 1.1, **options: Any) -> ik.Solution:
    options = {"solver": method, "on_failure": "ignore", "batch_dims": 1, "in_dims": 0} | options
    return ik.root(residual, torch.full_like(a, start), (a,), **options)


@pytest.mark.parametrize("max_steps", [None, 20], ids=["", "few steps"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", RESIDUALS)
def test_a_sample_is_as_it_is_alone(name: str, method: str, max_steps: int | None) -> None:
    a = torch.arange(6, dtype=F64) * 0.91 + 0.3
    batch = _solve(RESIDUALS[name], a, method, max_steps=max_steps)
    for i in (0, 2, 5):
        alone = _solve(RESIDUALS[name], a[i : i + 1], method, max_steps=max_steps)
        for field in ("value", "steps", "status", "residual_norm"):
            torch.testing.assert_close(getattr(batch, field)[i : i + 1], getattr(alone, field), rtol=0, atol=0)


@pytest.mark.parametrize("method, most", [("bisection", 75), ("chandrupatla", 48)])
def test_claims_are_looked_at_together(method: str, most: int) -> None:
    """Each at once took 136 and 63 evaluations, of which 37 and 9 are steps, and 8 find the intervals."""
    a = torch.linspace(0.5, 5.5, 200, dtype=F64)
    batch = _solve(lambda z, a: z * z * z + a * z - 0.7 * torch.exp(a), a, method, start=10.0)
    assert bool(batch.converged.all()) and len(set(batch.steps.tolist())) > 3
    assert batch.evaluations <= most


@pytest.mark.parametrize("method", METHODS)
def test_a_callback_sees_samples_end_where_they_do(method: str) -> None:
    """Whoever watches is shown no steps of samples that have ended."""
    a, seen = torch.linspace(0.5, 5.5, 5, dtype=F64), []
    batch = _solve(RESIDUALS["cubic"], a, method, callback=lambda step, z, norm: seen.append(z.clone()))
    for i, step in enumerate(batch.steps.tolist()):
        assert all(float(z[i]) == float(batch.value[i]) for z in seen[step - 1 :])


def test_work_in_vain_is_bounded() -> None:
    """A sample that takes twenty times as many steps keeps no others in work that have claimed long before, where an
    evaluation costs nobody knows what (it leaves torch)."""
    rows: list[int] = []

    class Late(ik.Method):
        solves, encloses = "root", True

        def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
            return z - torch.where(z > 50, 0.5, 1.0) * torch.minimum(f.residual(z), torch.ones_like(z)), state

    def residual(z: Tensor, a: Tensor) -> Tensor:
        rows.append(len(z))
        return torch.from_numpy((z - a).detach().numpy().copy())

    a = torch.zeros(100, dtype=F64)
    z0 = torch.full_like(a, 3.0)
    z0[0] = 60.0
    found = ik.root(residual, z0, (a,), solver=Late(), batch_dims=1, in_dims=0)
    assert bool(found.converged.all())
    assert found.steps.tolist()[1:] == [3] * 99 and int(found.steps[0]) > 60
    assert sum(rows) < 2500  # and not the 7000 of all samples in all steps
