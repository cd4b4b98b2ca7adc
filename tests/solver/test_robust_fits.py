"""Robust losses with outliers of any size, in small and large fits: the model of the loss, steps, and SciPy's answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.problem.robust import LOSSES, Robust
from implicitkit.solver.steps.robust_model import next_share

F64 = torch.float64
NAMES = ("huber", "soft_l1", "cauchy", "arctan")


@pytest.mark.parametrize("share", [1.0, 0.1, 1e-4])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("loss", NAMES)
def test_the_curvature_is_the_larger_of_two(loss: str, scale: float, share: float) -> None:
    """``max(rho' + 2 s rho'', share rho')``, by torch, over the square of the derivative of ``r w^1/2``."""
    r = torch.tensor([1e-9, 1e-3, 0.03, 0.2, 0.55, 0.9, 1.2, 3.0, 40.0], dtype=F64) * scale
    leaf = (r / scale).square().requires_grad_()
    rho = leaf * LOSSES[loss](leaf)
    (first,) = torch.autograd.grad(rho.sum(), leaf, create_graph=True)
    second = torch.autograd.grad(first.sum(), leaf)[0] if first.requires_grad else torch.zeros_like(r)
    robust, x = Robust(lambda z: z, loss, scale), r.clone().requires_grad_()
    (slope,) = torch.autograd.grad(robust(x).sum(), x)
    k = robust.curvature(robust(r).unsqueeze(0), torch.tensor([share], dtype=F64))
    assert k is not None
    s, d = leaf.detach(), first.detach()
    torch.testing.assert_close(
        k[0] * slope.square(), torch.maximum(d + 2 * s * second, share * d), rtol=2e-3, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("loss", NAMES)
def test_the_curvature_of_outliers_is_a_positive_number(loss: str, dtype: torch.dtype) -> None:
    robust = Robust(lambda z: z, loss, 1e-3)
    r = robust(torch.tensor([[0.0, 1e-30, 1.0, 1e4, 1e12]], dtype=dtype))
    k = robust.curvature(r, torch.tensor([1e-4], dtype=dtype))
    assert k is not None and bool(torch.isfinite(k).all()) and bool((k > 0).all()) and float(k[0, 0]) == 1


def test_a_loss_of_somebody_else_or_of_several_scales_has_no_model() -> None:
    r, share = torch.ones(1, 3, dtype=F64), torch.ones(1, dtype=F64)
    assert Robust(lambda z: z, lambda s: s / (1 + s), 1.0).curvature(r, share) is None
    assert Robust(lambda z: z, "huber", torch.ones(3, dtype=F64)).curvature(r, share) is None
    one = torch.full((1,), 0.5, dtype=F64)
    several, number = (Robust(lambda z: z, "cauchy", scale).curvature(r, share) for scale in (one, 0.5))
    torch.testing.assert_close(several, number)


def test_the_share_follows_the_promise() -> None:
    share = torch.tensor([1.0, 1.0, 0.01, 0.01, 0.01, 1e-4, 0.01])
    ratio = torch.tensor([0.9, 0.5, 0.9, 0.2, 0.9, 0.9, 0.5])
    at_once = torch.tensor([True, True, True, True, False, True, True])
    expected = torch.tensor([0.1, 1.0, 1e-3, 0.1, 0.1, 1e-4, 0.01])
    torch.testing.assert_close(next_share(share, ratio, at_once), expected)


# ------------------------------------------------------------------------------------------------------------- whole fits
def decay(outliers: float) -> tuple[Any, Tensor, Tensor]:
    """Three unknowns, sixty observations, eight of them wrong."""
    rng = np.random.default_rng(3)
    t = torch.linspace(0, 4, 60, dtype=F64)
    y = 2 * torch.exp(-0.9 * t) + 0.5 + 0.02 * torch.from_numpy(rng.standard_normal(60))
    y[torch.from_numpy(rng.permutation(60)[:8])] += outliers * torch.from_numpy(1 + rng.random(8))
    return lambda p, y: p[0] * torch.exp(-p[1] * t) + p[2] - y, torch.tensor([1.0, 0.5, 0.2], dtype=F64), y


def walk(outliers: float) -> tuple[Any, Tensor, Tensor]:
    """A path of 70 points in the plane, seen from three beacons and from each other; one in ten distances is wrong."""
    rng = np.random.default_rng(5)
    angle = np.linspace(0, 5, 70)
    true = torch.from_numpy(np.stack([3 * np.cos(angle), 2 * np.sin(angle)], 1))
    beacons = torch.tensor([[6.0, 5.0], [-6.0, 4.0], [0.0, -7.0]], dtype=F64)

    def distances(z: Tensor) -> Tensor:
        p = z.view(-1, 2)
        return torch.cat([(p[:, None] - beacons).norm(dim=2).reshape(-1), (p[1:] - p[:-1]).reshape(-1)])

    y = distances(true.reshape(-1))
    y = y + 0.02 * torch.from_numpy(rng.standard_normal(len(y)))
    wrong = torch.from_numpy(rng.permutation(210)[:21])
    y[wrong] += outliers * torch.from_numpy(rng.standard_normal(21))
    start = true.reshape(-1) + 0.3 * torch.from_numpy(rng.standard_normal(140))
    return lambda z, y: distances(z) - y, start, y


FITS = {"small": decay, "large": walk}
# of a path of 120 points Gauss and Newton's model of the losses took 26, 45, 31 and 526, and this one 6, 6, 8 and 36
STEPS = {"huber": 20, "soft_l1": 20, "cauchy": 40, "arctan": 60}


@pytest.mark.parametrize("outliers", [1.0, 1e4])
@pytest.mark.parametrize("loss", NAMES)
@pytest.mark.parametrize("size", FITS)
@pytest.mark.parametrize("bounded", [False, True])
def test_outliers_of_any_size(size: str, loss: str, outliers: float, bounded: bool) -> None:
    f, z0, y = FITS[size](outliers)
    scale, bounds = 0.05, (torch.full_like(z0, -20), torch.full_like(z0, 20)) if bounded else None
    s = ik.least_squares(f, z0, (y,), loss=loss, f_scale=scale, bounds=bounds)
    robust = Robust(f, loss, scale)
    cost = lambda z: float(0.5 * robust(z, y).square().sum())  # noqa: E731
    jac = torch.func.jacrev(lambda z: f(z, y))
    found = scipy.optimize.least_squares(
        lambda z: f(torch.from_numpy(z), y).numpy(), z0.numpy(), jac=lambda z: jac(torch.from_numpy(z)).numpy(),
        loss=loss, f_scale=scale, x_scale="jac", max_nfev=60,
    )  # fmt: skip
    assert cost(s.value) <= cost(torch.from_numpy(found.x)) * (1 + 1e-7), (cost(s.value), found.cost)
    assert int(s.steps) <= STEPS[loss], (s, found.nfev)
