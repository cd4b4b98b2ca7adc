"""Equations of one unknown: a change of sign is found wherever Newton's steps are caught, and nothing is made of a jump."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik

F32, F64 = torch.float32, torch.float64
SAMPLES = 400


def peng_robinson(Z: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """The compressibility of a fluid (Peng & Robinson 1976): one root or three, and between them slopes of zero."""
    return Z**3 - (1 - B) * Z**2 + (A - 3 * B**2 - 2 * B) * Z - (A * B - B**2 - B**3)


@pytest.mark.parametrize("dtype", (F32, F64), ids=str)
@pytest.mark.parametrize("start", (1.0, 0.3, 0.01))
def test_every_cubic_has_a_root(start: float, dtype: torch.dtype) -> None:
    r = torch.Generator().manual_seed(0)
    A = (torch.rand(SAMPLES, 1, generator=r) * 0.4 + 0.05).to(dtype).requires_grad_()
    B = (torch.rand(SAMPLES, 1, generator=r) * 0.08 + 0.01).to(dtype)
    found = ik.root(peng_robinson, torch.full((SAMPLES, 1), start, dtype=dtype), (A, B), batch_dims=1)
    assert found.evaluations <= 1500
    Z, (g,) = found.value.detach(), torch.autograd.grad(found.value.sum(), A)
    residual = peng_robinson(Z, A.detach(), B).abs()
    assert residual.max() <= 3e-5 if dtype == F32 else residual.max() <= 5e-11
    for a, b, z in zip(A.detach().double(), B.double(), Z.double(), strict=True):
        roots = np.roots([1, float(b) - 1, float(a - 3 * b**2 - 2 * b), float(-(a * b - b**2 - b**3))])
        assert np.abs(roots - float(z)).min() <= (5e-3 if dtype == F32 else 1e-6), (float(a), float(b), float(z))
    slope = 3 * Z**2 - 2 * (1 - B) * Z + A.detach() - 3 * B**2 - 2 * B
    torch.testing.assert_close(g, -(Z - B) / slope, rtol=1e-3 if dtype == F32 else 1e-8, atol=0)


#: name -> (residual, start, root)
TRAPS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "a minimum of |F| between": (lambda z: z**3 - 3 * z + 2.1, 1.2, -2.0110037),
    "waves on a slope": (lambda z: torch.sin(3 * z) + 1.2 + 0.1 * z, -0.4, -2.8275),
    "a well far from the root": (lambda z: (z - 40) * ((z - 1) ** 2 + 0.1), 1.1, 40.0),
    "on the other side": (lambda z: (z + 40) * ((z - 1) ** 2 + 0.1), 0.9, -40.0),
}


@pytest.mark.parametrize("kind", (ik.root, ik.steady_state))
@pytest.mark.parametrize("name", TRAPS)
def test_a_minimum_of_the_residual_is_left(name: str, kind: Callable[..., ik.Solution]) -> None:
    residual, start, _ = TRAPS[name]
    sign = -1 if kind is ik.steady_state else 1
    found = kind(lambda z: sign * residual(z), torch.tensor(start, dtype=F64))
    assert residual(found.value.detach()).abs() <= 1e-9, name
    assert found.evaluations <= 800, (name, found.evaluations)


@pytest.mark.parametrize(
    ("name", "residual"),
    (
        ("a jump", lambda z: torch.where(z < 2, -1.0, 1.0) * (1 + z**2)),
        ("a pole", lambda z: 1 / (z - 3) ** 3),
        ("none", lambda z: z**2 + 1),
        ("a constant", lambda z: 0 * z + 1),
    ),
)
def test_what_is_no_zero_is_refused(name: str, residual: Callable[[Tensor], Tensor]) -> None:
    """At a cost that is bounded, too."""
    for dtype in (F32, F64):
        with pytest.raises(ik.ConvergenceError, match=r"stalled|diverged") as caught:
            ik.root(residual, torch.tensor([0.5], dtype=dtype))
        assert caught.value.solution.evaluations <= 1300, (name, caught.value.solution.evaluations)


def test_many_unknowns_without_a_zero_are_left_sooner() -> None:
    with pytest.raises(ik.ConvergenceError, match="stalled") as caught:
        ik.root(lambda z: z**2 + 1, torch.linspace(0.1, 1, 4, dtype=F64))
    assert caught.value.solution.evaluations <= 2000
