"""What a user of SciPy's optimize relies on, and its result here, beside SciPy's own."""

from __future__ import annotations

import pytest
import scipy.optimize
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
T = torch.linspace(0, 2, 30, dtype=F64)
DATA = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(37 * T)


def model(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * torch.exp(-b * x) + c


def residuals(p: Tensor) -> Tensor:
    return model(T, *p) - DATA


@pytest.mark.parametrize("absolute", [False, True])
def test_curve_fit_and_its_covariance(absolute: bool) -> None:
    sigma = torch.linspace(0.05, 0.2, 30, dtype=F64)
    fit = ik.curve_fit(model, T, DATA, torch.ones(3, dtype=F64), sigma, absolute_sigma=absolute)
    numpy_model = lambda x, *p: model(torch.from_numpy(x), *(torch.tensor(q, dtype=F64) for q in p)).numpy()  # noqa: E731
    p, covariance = scipy.optimize.curve_fit(
        numpy_model, T.numpy(), DATA.numpy(), [1.0, 1.0, 1.0], sigma.numpy(), absolute_sigma=absolute
    )
    torch.testing.assert_close(fit.parameters, torch.from_numpy(p), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(fit.covariance, torch.from_numpy(covariance), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("loss", ["linear", "huber", "soft_l1", "cauchy"])
@pytest.mark.parametrize("bounded", [False, True])
def test_least_squares(loss: str, bounded: bool) -> None:
    low, high = [0.0, 0.0, 0.0], [2.2, 5.0, 5.0]
    box = (torch.tensor(low, dtype=F64), torch.tensor(high, dtype=F64)) if bounded else None
    ours = ik.least_squares(residuals, torch.ones(3, dtype=F64), bounds=box, loss=loss, f_scale=0.03).value
    theirs = scipy.optimize.least_squares(
        lambda p: residuals(torch.from_numpy(p)).numpy(), [1.0, 1.0, 1.0], loss=loss, f_scale=0.03, xtol=1e-14, ftol=1e-14,
        gtol=1e-14, bounds=(low, high) if bounded else (-float("inf"), float("inf")),
    ).x  # fmt: skip
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-4, atol=1e-5)


def test_brackets_of_a_batch() -> None:
    c = torch.linspace(0.1, 3, 20, dtype=F64)
    z = ik.root(lambda z, c: z.exp() - 1 - c, args=(c,), bracket=(torch.zeros(20, dtype=F64), 2.0), batch_dims=1).value
    theirs = [scipy.optimize.brentq(lambda z, c=float(k): torch.tensor(z).exp().item() - 1 - c, 0, 2) for k in c]
    torch.testing.assert_close(z, torch.tensor(theirs, dtype=F64), rtol=1e-6, atol=1e-7)


def test_a_constrained_minimum_with_its_multiplier() -> None:
    """``min x^2 + y^2, x + y >= 1``: (1/2, 1/2), and the multiplier is 1."""
    s = ik.argmin(
        lambda z: z.square().sum(), torch.zeros(2, dtype=F64), constraints=[ik.Inequality(lambda z: 1 - z.sum())]
    )
    torch.testing.assert_close(s.value, torch.full((2,), 0.5, dtype=F64), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(s.multipliers[0], torch.ones((), dtype=F64), rtol=1e-5, atol=1e-7)


def test_curve_fit_is_a_pair() -> None:
    """``popt, pcov = curve_fit(...)``, lists of numbers, and one standard deviation for all."""
    p, covariance = ik.curve_fit(lambda x, a, b: a * x + b, [0.0, 1.0, 2.0, 3.0], [1.0, 3.1, 4.9, 7.0], sigma=0.5)
    theirs = scipy.optimize.curve_fit(lambda x, a, b: a * x + b, [0.0, 1.0, 2.0, 3.0], [1.0, 3.1, 4.9, 7.0])
    torch.testing.assert_close(p, torch.tensor(theirs[0], dtype=p.dtype), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(covariance, torch.tensor(theirs[1], dtype=p.dtype), rtol=1e-3, atol=1e-5)


def test_a_fit_comes_through_a_transform() -> None:
    fit = torch.vmap(lambda y: ik.curve_fit(model, T, y, torch.ones(3, dtype=F64)))(torch.stack([DATA, 2 * DATA]))
    assert isinstance(fit, ik.CurveFit) and fit.covariance.shape == (2, 3, 3) and fit.solution is None


@pytest.mark.parametrize("form", ["lists", "Bounds", "tensors"])
def test_forms_of_bounds(form: str) -> None:
    low, high = [0.0, 0.0, 0.0], [2.2, 5.0, 5.0]
    bounds = {
        "lists": (low, high),
        "Bounds": scipy.optimize.Bounds(low, high),
        "tensors": (torch.tensor(low, dtype=F64), torch.tensor(high, dtype=F64)),
    }[form]
    found = ik.least_squares(residuals, torch.ones(3, dtype=F64), bounds=bounds).value
    theirs = scipy.optimize.least_squares(
        lambda p: residuals(torch.from_numpy(p)).numpy(), [1.0] * 3, bounds=(low, high)
    )
    torch.testing.assert_close(found, torch.from_numpy(theirs.x), rtol=1e-4, atol=1e-5)


def test_pairs_of_minimize_are_not_taken_for_ends() -> None:
    """For two unknowns SciPy's pairs ``(low, high)`` look like ends: they are refused where a tensor does not say which."""
    with pytest.raises(ValueError, match="SciPy's list of pairs"):
        ik.argmin(lambda z: z.square().sum(), torch.zeros(2, dtype=F64), bounds=[(0, 1), (1, 2)])


def test_the_loss_arctan() -> None:
    start = [2.5, 1.3, 0.5]  # it has several minima
    outlier = DATA.clone()
    outlier[3] += 3
    ours = ik.least_squares(
        lambda p: model(T, *p) - outlier, torch.tensor(start, dtype=F64), loss="arctan", f_scale=0.1
    ).value
    theirs = scipy.optimize.least_squares(
        lambda p: (model(T, *torch.from_numpy(p)) - outlier).numpy(), start, loss="arctan", f_scale=0.1, xtol=1e-14,
        ftol=1e-14, gtol=1e-14,
    ).x  # fmt: skip
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-5, atol=1e-6)


def test_a_loss_in_the_form_of_scipy_says_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"shape \(30,\).*returned shape \(3, 30\)"):
        ik.least_squares(residuals, torch.ones(3, dtype=F64), loss=lambda s: torch.stack([s, s, s]))
    with pytest.raises(TypeError, match="'newton' has no use for a bracket"):
        ik.root(lambda z: z - 1, bracket=(0.0, 2.0), solver="newton")
