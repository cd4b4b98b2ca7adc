"""NIST's reference data sets for nonlinear regression: defaults against certified parameters, from both starts of each.

The Statistical Reference Datasets (StRD) of the National Institute of Standards and Technology, 27 sets in three grades of
difficulty, with parameters certified to eleven digits; https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml.  The first
start is far, the second near.  The derivative of a fit by its data is checked against the implicit function theorem, dense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

Model = Callable[[Tensor, Tensor], Tensor]
F64 = torch.float64
DATA = json.loads((Path(__file__).parent.parent / "tables" / "nist_strd.json").read_text())


def _saturation(x: Tensor, b: Tensor) -> Tensor:
    return b[0] * (1 - torch.exp(-b[1] * x))


def _chwirut(x: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-b[0] * x) / (b[1] + b[2] * x)


def _enso(x: Tensor, b: Tensor) -> Tensor:
    def wave(cosine: Tensor, sine: Tensor, period: Tensor | float) -> Tensor:
        return cosine * torch.cos(2 * math.pi * x / period) + sine * torch.sin(2 * math.pi * x / period)

    return b[0] + wave(b[1], b[2], 12.0) + wave(b[4], b[5], b[3]) + wave(b[7], b[8], b[6])


def _two_peaks(x: Tensor, b: Tensor) -> Tensor:
    peaks = [b[i] * torch.exp(-((x - b[i + 1]) ** 2) / b[i + 2] ** 2) for i in (2, 5)]
    return b[0] * torch.exp(-b[1] * x) + peaks[0] + peaks[1]


def _cubics(x: Tensor, b: Tensor) -> Tensor:
    return (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _three_decays(x: Tensor, b: Tensor) -> Tensor:
    return b[0] * torch.exp(-b[1] * x) + b[2] * torch.exp(-b[3] * x) + b[4] * torch.exp(-b[5] * x)


MODELS: dict[str, Model] = {
    "Bennett5": lambda x, b: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": _saturation,
    "Chwirut1": _chwirut,
    "Chwirut2": _chwirut,
    "DanWood": lambda x, b: b[0] * x ** b[1],
    "ENSO": _enso,
    "Eckerle4": lambda x, b: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": _two_peaks,
    "Gauss2": _two_peaks,
    "Gauss3": _two_peaks,
    "Hahn1": _cubics,
    "Kirby2": lambda x, b: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": _three_decays,
    "Lanczos2": _three_decays,
    "Lanczos3": _three_decays,
    "MGH09": lambda x, b: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda x, b: b[0] * torch.exp(b[1] / (x + b[2])),
    "MGH17": lambda x, b: b[0] + b[1] * torch.exp(-x * b[3]) + b[2] * torch.exp(-x * b[4]),
    "Misra1a": _saturation,
    "Misra1b": lambda x, b: b[0] * (1 - (1 + b[1] * x / 2) ** -2.0),
    "Misra1c": lambda x, b: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda x, b: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda x, b: b[0] - b[1] * x[:, 0] * torch.exp(-b[2] * x[:, 1]),  # of log y
    "Rat42": lambda x, b: b[0] / (1 + torch.exp(b[1] - b[2] * x)),
    "Rat43": lambda x, b: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda x, b: b[0] - b[1] * x - torch.atan(b[2] / (x - b[3])) / math.pi,
    "Thurber": _cubics,
}
ROWS = [(name, start) for name in MODELS for start in (0, 1)]
#: Evaluations, where they are more than 100; the first of each by Gauss-Newton's steps after others have led nowhere.
MORE = {
    ("MGH10", 0): 1100,
    ("MGH10", 1): 110,
    ("MGH17", 0): 800,
    ("BoxBOD", 0): 260,
    ("MGH09", 0): 200,
    ("Nelson", 0): 140,
}


def _data(name: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    row = DATA[name]
    y, x = (torch.tensor(row[key], dtype=F64) for key in ("y", "x"))
    return row["starts"], torch.tensor(row["certified"], dtype=F64), x, y.log() if name == "Nelson" else y


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "start"), ROWS, ids=[f"{name}-{start + 1}" for name, start in ROWS])
def test_certified_parameters(name: str, start: int) -> None:
    starts, certified, x, y = _data(name)
    model, seen = MODELS[name], y.clone().requires_grad_(True)
    fit = ik.curve_fit(lambda x, *b: model(x, b), x, seen, torch.tensor(starts[start], dtype=F64))
    error = float(((fit.parameters.detach() - certified) / certified).abs().max())
    assert error < 1e-7, f"{-math.log10(error):.1f} digits"
    assert fit.solution.evaluations <= MORE.get((name, start), 100), f"{fit.solution.evaluations} evaluations"

    units = certified.abs().diag()  # g(b, y) = J'(m(b) - y) = 0, so db/dy = -H^-1 dg/dy, in units of the parameters

    def gradient(b: Tensor, y: Tensor) -> Tensor:
        return torch.func.grad(lambda c: 0.5 * (model(x, c) - y).square().sum())(b)

    H, G = torch.func.jacrev(gradient, argnums=(0, 1))(fit.parameters.detach(), y)
    exact = -torch.linalg.solve(units @ H @ units, units @ (1 / certified)) @ (units @ G)
    (found,) = torch.autograd.grad((fit.parameters / certified).sum(), seen)
    assert float((found - exact).norm() / exact.norm()) < 1e-5


def test_a_peak_is_not_asked_how_far_out_it_is() -> None:
    """Half of the way to the origin nothing is left of it, and of its slopes: 45 evaluations were spent on that."""
    starts, _, x, y = _data("Eckerle4")
    fit = ik.curve_fit(lambda x, *b: MODELS["Eckerle4"](x, b), x, y, torch.tensor(starts[1], dtype=F64))
    assert bool(fit.solution.converged) and fit.solution.evaluations <= 25


@pytest.mark.parametrize("name", ["Lanczos1", "Lanczos2", "Lanczos3", "Bennett5"])
def test_bent_valleys_take_few_steps(name: str) -> None:
    """Straight steps take 92 to 341 there."""
    starts, _, x, y = _data(name)
    for start in starts:
        z0 = torch.tensor(start, dtype=F64)
        s = ik.least_squares(lambda b: MODELS[name](x, b) - y, z0, solver="levenberg_marquardt")
        assert int(s.steps) <= 36, f"{s.steps} steps"


@pytest.mark.parametrize("name", ["Misra1a", "Misra1d", "Roszman1", "Hahn1", "MGH17"])
def test_as_many_digits_as_single_precision_has(name: str) -> None:
    """Where columns nearly depend on each other the tolerance is met by a gradient at a distance: three digits were left."""
    starts, certified, x, y = _data(name)
    z0 = torch.tensor(starts[1], dtype=torch.float32)
    s = ik.least_squares(lambda b: MODELS[name](x.float(), b) - y.float(), z0)
    error = float(((s.value.double() - certified) / certified).abs().max())
    assert error < 6e-5, f"{-math.log10(error):.1f} digits"


@pytest.mark.parametrize(("name", "start", "steps"), [("Lanczos3", 0, 40), ("MGH10", 1, 60)])
def test_bends_in_single_precision(name: str, start: int, steps: int) -> None:
    """There the second derivative along a step needs a longer way: rounding is divided by it, twice.  It is rounding, too,
    that decides how near to Lanczos's exponentials one gets, of which half of the starts in a ten-thousandth lead to others
    that fit as well."""
    starts, certified, x, y = _data(name)
    z0 = torch.tensor(starts[start], dtype=torch.float32)
    residuals = lambda b: MODELS[name](x.float(), b) - y.float()  # noqa: E731
    s = ik.least_squares(residuals, z0, solver="levenberg_marquardt", on_failure="ignore")
    assert int(s.steps) <= steps, f"{s.steps} steps"
    least = torch.linalg.vector_norm(MODELS[name](x, torch.as_tensor(certified, dtype=F64)) - y)
    assert float(torch.linalg.vector_norm(residuals(s.value))) < 1.01 * float(least) + 1e-5
    if name == "MGH10":
        assert bool(s.converged) and float(((s.value.double() - certified) / certified).abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_linear_fit_takes_one_step_beside_one_that_is_bent(dtype: torch.dtype) -> None:
    """Gauss-Newton's step is tried first: linear fits of few unknowns took four steps, of eight powers twelve."""
    x = torch.linspace(0, 1, 40, dtype=dtype)
    powers = x[:, None] ** torch.arange(4)
    y, bent = x.exp(), torch.tensor([[0.0], [1.0]], dtype=dtype)

    def residuals(z: Tensor, bent: Tensor) -> Tensor:
        return (z + bent * z.sin()) @ powers.T - y

    s = ik.least_squares(residuals, torch.zeros(2, 4, dtype=dtype), (bent,), batch_dims=1)
    assert s.steps[0] == 1 and s.steps[1] > 1
    want = torch.linalg.lstsq(powers.to(F64), y.to(F64)[:, None]).solution[:, 0]
    torch.testing.assert_close(s.value[0].to(F64), want, rtol=1e-7 if dtype == F64 else 2e-3, atol=0)


def test_a_batch_follows_its_bends_sample_by_sample() -> None:
    """Easy and hard samples together end where they end alone, after as many steps."""
    starts, certified, x, y = _data("Lanczos3")
    z0 = torch.tensor([starts[0], DATA["Lanczos3"]["certified"], starts[1]], dtype=F64)
    together = ik.least_squares(
        lambda b: MODELS["Lanczos3"](x, b.mT.unsqueeze(-1)) - y, z0, batch_dims=1, solver="levenberg_marquardt"
    )
    for i in range(3):
        alone = ik.least_squares(lambda b: MODELS["Lanczos3"](x, b) - y, z0[i], solver="levenberg_marquardt")
        assert float(((together.value[i] - alone.value) / certified).abs().max()) < 1e-7
        assert abs(int(together.steps[i]) - int(alone.steps)) <= 1


@pytest.mark.parametrize("name", ["Thurber", "MGH09"])
def test_those_that_end_early_leave_the_last_steps_to_the_others(name: str) -> None:
    """In single precision the last steps, up to three, are each sample's own: three digits were left of some."""
    starts, certified, x, y = _data(name)
    z0 = torch.stack([share * torch.tensor(starts[1]) for share in (0.9, 0.95, 1.0, 1.05, 1.1)] + [certified.float()])
    fit = ik.least_squares(lambda b: MODELS[name](x.float(), b.mT.unsqueeze(-1)) - y.float(), z0, batch_dims=1)
    error = ((fit.value.double() - certified) / certified).abs().amax(1)
    assert float(error.max()) < 1e-4, f"{(-error.log10()).tolist()} digits"


def test_last_steps_of_one_are_steps_of_all() -> None:
    """A batch of sums of two exponentials in single precision: 283 evaluations where each ended alone; 196 now."""
    g = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 4, 40, dtype=F64)

    def model(p: Tensor) -> Tensor:
        at = x.to(p)
        return p[:, 0:1] * torch.exp(-p[:, 1:2] * at) + p[:, 2:3] * torch.exp(-p[:, 3:4] * at)

    def spread(centre: list[float]) -> Tensor:
        return torch.tensor(centre, dtype=F64) * torch.exp(0.3 * torch.randn(200, 4, generator=g, dtype=F64))

    y = (model(spread([2.0, 0.5, 1.0, 3.0])) + 0.01 * torch.randn(200, 40, generator=g, dtype=F64)).float()
    z0 = spread([1.0, 1.0, 1.0, 2.0])
    fit = ik.least_squares(lambda p, y: model(p) - y, z0.float(), (y,), batch_dims=1, in_dims=(0,))
    exact = ik.least_squares(lambda p, y: model(p) - y, z0, (y.double(),), batch_dims=1, in_dims=(0,))
    assert fit.evaluations <= 230
    lost = (model(fit.value.double()) - y).square().sum() / (model(exact.value) - y).square().sum() - 1
    assert float(lost) < 1e-6, f"{lost:.1e} more than the least sum of squares"
