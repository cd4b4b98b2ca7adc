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


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("project", [ik.project.nonnegative(), ik.project.simplex()], ids=["nonnegative", "simplex"])
def test_small_unknowns_that_are_known_as_was_asked_are_taken(project: object, dtype: torch.dtype) -> None:
    """``min (y - t)' W (y - t)`` is zero: what ``rtol`` leaves of ``y``, 1e-11, may be more than the least ``t``, and
    its square more than ``f``."""
    weight = torch.arange(1, 7).to(dtype)
    for seed in (0, 4, 6, 19):
        t = torch.softmax(6 * torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=D), 0).to(dtype)
        f = lambda z, t: (weight * (z - t) ** 2).sum()  # noqa: E731
        found = ik.argmin(f, torch.full_like(t, 1 / 6), (t,), project=project, on_failure="ignore")
        assert bool(found.converged), (seed, found.value, t)
        torch.testing.assert_close(found.value, t, rtol=0, atol=1000 * torch.finfo(dtype).eps ** 0.8)


def test_a_lower_point_near_a_minimum_at_zero_is_seen() -> None:
    """``|y - t|^2`` again, zero at its minimum, in units 1e10 apart."""
    s, t = torch.tensor([1e10, 1.0, 1.0], dtype=D), torch.tensor([0.3, 0.5, 0.7], dtype=D)
    f = lambda z: (z / s - t).square().sum() + 0.1 * (z / s - t).sum() ** 2  # noqa: E731
    found = ik.argmin(f, s, project=ik.project.nonnegative(), on_failure="ignore")
    assert not bool(found.converged) or torch.allclose(found.value / s, t, rtol=0, atol=1e-4), found.value / s


def test_where_no_unknown_has_a_slope_nothing_is_lower() -> None:
    t = torch.tensor([1.0, 1e-8], dtype=D)
    f = lambda z: (z - t).square().sum()  # noqa: E731
    assert bool(ik.argmin(f, t, project=ik.project.nonnegative()).converged)
