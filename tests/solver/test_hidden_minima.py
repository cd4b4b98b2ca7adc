"""Large linear fits whose minimum ``R'R`` does not show, since it has the square of the condition of ``R``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors import sparse_normal
from implicitkit.linear.factors.sparse_normal import NormalFactors

D = torch.float64
N = 200


def design(kind: str, size: float) -> np.ndarray:
    """A band ``(2 N, N)``: two columns that differ by ``size``, or rows with weights from one to ``size``."""
    rng, A = np.random.default_rng(7), np.zeros((2 * N, N))
    middle = np.arange(2 * N) * (N - 1) // (2 * N - 1)
    for shift in (-1, 0, 1):
        inside = (middle + shift >= 0) & (middle + shift < N)
        A[inside, (middle + shift)[inside]] = rng.standard_normal(inside.sum()) + (2 if shift == 0 else 0)
    if kind == "parallel":
        A[:, N // 2] = A[:, N // 2 - 1] + size * A[:, N // 2]
    return A * np.logspace(0, np.log10(size), 2 * N)[rng.permutation(2 * N)][:, None] if kind == "weights" else A


@pytest.mark.parametrize(
    ("kind", "size", "dtype", "accuracy"),
    [
        ("parallel", 1e-4, D, 1e-9),
        ("parallel", 1e-6, D, 1e-7),
        ("parallel", 1e-8, D, 1e-5),
        ("weights", 1e-12, D, 1e-5),
        ("parallel", 1e-2, torch.float32, 1e-3),
        ("weights", 1e-4, torch.float32, 1e-4),
    ],
)
def test_values_are_those_of_orthogonal_factors(kind: str, size: float, dtype: torch.dtype, accuracy: float) -> None:
    """They were wrong by 5e-8 to 0.7 of the largest where the gradient was met to eleven digits."""
    A = design(kind, size)
    y = A @ np.cos(np.arange(N)) + 0.1 * np.random.default_rng(1).standard_normal(2 * N) * np.linalg.norm(A, axis=1)
    i, j = (torch.from_numpy(k) for k in np.nonzero(A))
    v = torch.from_numpy(A)[i, j].to(dtype)

    def residuals(z: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(2 * N, dtype=dtype).index_add(0, i, v * z[j]) - y

    z = ik.least_squares(residuals, torch.zeros(N, dtype=dtype), (torch.from_numpy(y).to(dtype),)).value
    want = torch.from_numpy(np.linalg.lstsq(A, y, rcond=None)[0])
    assert float((z.to(D) - want).abs().max()) <= accuracy * float(want.abs().max())


@pytest.mark.parametrize("bent", [0.0, 1e-3])
def test_the_system_of_all_residuals_is_factored_for_linear_ones_only(
    bent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step would not be taken where residuals bend, and 10,000 poses took 2.4 times as long for it."""
    A = torch.from_numpy(design("parallel", 1e-4))
    rows, columns = A.nonzero().unbind(1)
    v, y = A[rows, columns], A @ torch.cos(torch.arange(N, dtype=D)) + 0.1
    factored, inner = [], sparse_normal.least_squares
    monkeypatch.setattr(sparse_normal, "least_squares", lambda *given: factored.append(1) or inner(*given))

    def residuals(z: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(2 * N, dtype=D).index_add(0, rows, v * (z + bent * z**3)[columns]) - y

    ik.least_squares(residuals, torch.zeros(N, dtype=D), (y,))
    assert bool(factored) == (bent == 0)


def test_a_column_twice_leaves_the_shortest_step() -> None:
    """``R'R`` is singular there, which is no minimum that hides."""
    A = torch.from_numpy(design("parallel", 0.0))
    y = A @ torch.cos(torch.arange(N, dtype=D)) + 0.1
    rows, columns = A.nonzero().unbind(1)
    v = A[rows, columns]
    residuals = lambda z, y: torch.zeros(2 * N, dtype=D).index_add(0, rows, v * z[columns]) - y  # noqa: E731
    z = ik.least_squares(residuals, torch.zeros(N, dtype=D), (y,)).value
    torch.testing.assert_close(z, torch.linalg.pinv(A) @ y, rtol=0, atol=1e-7)


def test_a_linear_fit_takes_one_trial_and_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places and speeds: the start, the minimum, which products with ``R'R`` have freed of damping and whose gradient is
    rounding by factors that held along the step, and one difference of gradients, which tells curvature and that a zero is
    near: two solves and one more, beside two to free it."""
    solves, plain = [], NormalFactors.solve
    monkeypatch.setattr(NormalFactors, "solve", lambda self, b: (solves.append(1), plain(self, b))[1])
    F = torch.eye(4, dtype=D)
    F[0, 2] = F[1, 3] = 0.1
    residuals = lambda x, m: (2 * (x[:, :2] - m), 10 * (x[1:] - x[:-1] @ F.mT), 0.1 * x[0])  # noqa: E731
    m = 0.1 * torch.sin(torch.arange(100, dtype=D)).view(50, 2).cumsum(0) + torch.arange(50, dtype=D).unsqueeze(1)
    assert int(ik.least_squares(residuals, torch.zeros(50, 4, dtype=D), (m,)).evaluations) == 3
    assert len(solves) == 5
