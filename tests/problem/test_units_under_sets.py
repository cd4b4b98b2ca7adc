"""A minimum over a set, in unknowns of units far apart: right, or refused, and never another point."""

from __future__ import annotations

import pytest
import torch

import implicitkit as ik

D = torch.float64


@pytest.mark.parametrize(
    ("exponents", "start", "known"),
    [
        ((0, 0, 0, 0), 1.0, True),
        ((0, 1, 2, 3), 1.0, True),
        ((0, 0, 9, 0), 1.0, False),
        ((0, 0, 0, 9), 0.3, False),
        ((0, 3, 6, 9), 1.0, False),
    ],
    ids=str,
)
def test_right_or_refused(exponents: tuple[int, ...], start: float, known: bool) -> None:
    """``min |y - t|^2 + (sum y)^2 / 100`` over ``y >= 0``, ``y_i = z_i / s_i``: by hand ``y = (0, 0, 0.289, 0.789)``."""
    s = 10.0 ** torch.tensor(exponents, dtype=D)
    t = torch.tensor([-0.7, -0.2, 0.3, 0.8], dtype=D)
    both = torch.linalg.solve(torch.eye(2, dtype=D) + 0.01, t[2:])
    f = lambda z: ((z / s - t) ** 2).sum() + 0.01 * (z / s).sum() ** 2  # noqa: E731
    found = ik.argmin(f, start * s, project=ik.project.nonnegative(), on_failure="ignore")
    right = torch.allclose(found.value / s, torch.cat([0 * both, both]), rtol=0, atol=1e-4)
    assert right or not bool(found.converged), found.value / s
    assert right or not known
    if not right:
        with pytest.raises(ik.ConvergenceError, match="sizes of the unknowns are so far apart"):
            ik.argmin(f, start * s, project=ik.project.nonnegative())
