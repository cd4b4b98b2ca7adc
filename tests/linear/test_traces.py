"""Traces and log-determinants from products, against dense ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik

N = 60
LIKE = torch.zeros(N, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(decay: float, *, shift: float = 0.0) -> Tensor:
    """Symmetric, eigenvalues ``shift + k^-decay``."""
    Q = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64, generator=generator(7)))[0]
    return Q @ torch.diag(shift + torch.arange(1.0, N + 1, dtype=torch.float64) ** -decay) @ Q.T


def times(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda V: V @ A.T


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_trace_is_unbiased_and_its_error_is_what_it_says(method: str, symmetric: bool) -> None:
    A = matrix(0.5) if symmetric else torch.randn(N, N, dtype=torch.float64, generator=generator(1))
    found = [ik.linear.trace(times(A), LIKE, products=30, method=method, generator=generator(s)) for s in range(400)]
    values, errors = torch.stack([f.value for f in found]), torch.stack([f.error for f in found])
    assert abs(values.mean() - A.trace()) < 4 * values.std() / 20
    assert 0.8 < errors.square().mean().sqrt() / values.std() < 1.25


def test_the_variance_of_hutchinson() -> None:
    A = matrix(0.5)
    values = torch.stack(
        [
            ik.linear.trace(times(A), LIKE, products=10, method="hutchinson", generator=generator(s)).value
            for s in range(800)
        ]
    )
    theory = 2 * (A.square().sum() - A.diagonal().square().sum()) / 10
    assert float(values.var() / theory) == pytest.approx(1, abs=0.2)


def test_hutch_plus_plus_is_better_where_eigenvalues_decay_and_exact_at_low_rank() -> None:
    A = matrix(2.0)

    def spread(method: str) -> float:
        found = [
            ik.linear.trace(times(A), LIKE, products=30, method=method, generator=generator(s)).value for s in range(60)
        ]
        return float((torch.stack(found) - A.trace()).square().mean().sqrt())

    assert 10 * spread("hutch++") < spread("hutchinson")
    U = torch.randn(N, 8, dtype=torch.float64, generator=generator(2))
    exact = ik.linear.trace(times(U @ U.T), LIKE, products=30, generator=generator())
    torch.testing.assert_close(exact.value, U.square().sum())
    whole = ik.linear.trace(times(A), LIKE, products=3 * N, generator=generator())
    torch.testing.assert_close(whole.value, A.trace())
    assert whole.error == 0


@pytest.mark.parametrize("shift", [0.01, 1.0])
def test_the_log_determinant(shift: float) -> None:
    A = matrix(1.0, shift=shift)
    found = ik.linear.log_determinant(times(A), LIKE, probes=100, steps=40, generator=generator())
    assert abs(found.value - A.logdet()) < 4 * found.error
    assert 0 < found.error < 0.05 * A.logdet().abs() + 0.2


def test_the_quadrature_is_exact_on_the_whole_space() -> None:
    """With every step a probe's value is that of ``g^T log(A) g``; an exhausted space does no harm."""
    for A in (matrix(1.0, shift=0.1), torch.diag(torch.tensor([2.0, 3.0] * (N // 2), dtype=torch.float64))):
        w, Q = torch.linalg.eigh(A)
        log = Q @ torch.diag(w.log()) @ Q.T
        signs = 2.0 * torch.randint(0, 2, (5, N), generator=generator(3)).double() - 1
        found = ik.linear.log_determinant(times(A), LIKE, probes=5, steps=N, generator=generator(3))
        torch.testing.assert_close(found.value, ((signs @ log) * signs).sum(1).mean())


def test_derivatives_are_unbiased() -> None:
    base, slope = matrix(1.0, shift=0.3), matrix(0.3)
    for estimate, exact in (
        (
            lambda A, s: ik.linear.trace(times(A @ A), LIKE, products=30, generator=generator(s)),
            lambda A: (A @ A).trace(),
        ),
        (
            lambda A, s: ik.linear.log_determinant(times(A), LIKE, probes=10, steps=40, generator=generator(s)),
            lambda A: A.logdet(),
        ),
    ):
        grads = []
        for seed in range(100):
            t = torch.zeros((), dtype=torch.float64, requires_grad=True)
            grads.append(torch.autograd.grad(estimate(base + t * slope, seed).value, t)[0])
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (wanted,) = torch.autograd.grad(exact(base + t * slope), t)
        found = torch.stack(grads)
        assert abs(found.mean() - wanted) < 4 * found.std() / 10
        assert found.std() < 0.2 * wanted.abs()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ik.linear.trace(times(matrix(1.0)), LIKE, method="exact"), "method must be"),
        (lambda: ik.linear.trace(times(matrix(1.0)), LIKE, products=5), "6 products"),
        (lambda: ik.linear.trace(times(matrix(1.0)), LIKE[None]), "real vector"),
        (lambda: ik.linear.log_determinant(times(-matrix(1.0)), LIKE), "positive definite"),
        (lambda: ik.linear.log_determinant(times(matrix(1.0)), LIKE, probes=1), "probes must be at least 2"),
    ],
)
def test_errors(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
