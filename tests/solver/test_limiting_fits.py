"""Fits whose residuals tend to a limit as the unknowns go to infinity have diverged there, however small the gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import jacobian
from implicitkit.solver.verdict.limiting_fits import has_a_limit

_S = torch.linspace(0.5, 4, 9)
_DATA = 3 * _S / (0.7 + _S) + 0.02 * torch.cos(7 * _S)


def _saturation(z: Tensor) -> Tensor:
    s = _S.to(z)
    return z[..., :1] * s / (z[..., 1:] + s) - _DATA.to(z)


def _line(z: Tensor) -> Tensor:
    """What ``_saturation`` fits perfectly, at infinity only."""
    s = _S.to(z)
    return z[..., :1] * s / (z[..., 1:] + s) - 2 * s


def _ratio(z: Tensor) -> Tensor:
    return (z[..., :1] / z[..., 1:] - 2) * _S.to(z) - _DATA.to(z)


def _plateau(z: Tensor) -> Tensor:
    return torch.cat([z[..., :1], torch.relu(1 - z[..., 1:]) + 1], -1)


# a fit, where it is asked, and whether it has a limit out there
_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float], bool]] = {
    "a straight line in the end": (_saturation, (-1.68e7, -2.03e7), True),
    "from the other side": (_saturation, (9.04e12, 1.0925e13), True),
    "a perfect one in the end": (_line, (9.3e8, 4.65e8), True),
    "the fit itself": (_saturation, (3.0, 0.7), False),
    "in units of a millionth": (lambda z: _saturation(1e-6 * z), (3e6, 7e5), False),
    "a worse one further out": (_saturation, (9.04e2, 1.0925e3), False),
    "of a ratio only": (_ratio, (2.98e6, 1.05e6), False),
    "at a plateau": (_plateau, (0.0, 20.0), False),
    "refused further out": (lambda z: _saturation(z) + 0 * torch.sqrt(1e10 - z[..., :1]), (9e9, 1.1e10), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", _ROWS)
def test_what_a_ray_says(name: str, dtype: torch.dtype) -> None:
    """Beside a sample that is not asked."""
    function, at, expected = _ROWS[name]
    z = torch.tensor([at, at], dtype=dtype)
    f = SimpleNamespace(problem=SimpleNamespace(flat_residuals=lambda kernel, z: kernel(z)), kernel=function)
    found = has_a_limit(f, jacobian(function, z), function(z), z, torch.tensor([True, False]))
    assert found.tolist() == [expected, False]


@pytest.mark.parametrize(
    ("function", "start", "converged"),
    [(_saturation, (-1.68e7, -2.03e7), False), (_saturation, (9.04e5, 1.0925e6), False), (_line, (2e8, 1e8), False),
     (_saturation, (2.0, 1.0), True), (_ratio, (3e6, 1e6), True)],
)  # fmt: skip
@pytest.mark.parametrize("solver", ["auto", "gauss_newton", "levenberg_marquardt"])
def test_what_is_no_fit_is_not_claimed(
    function: Callable[[Tensor], Tensor], start: tuple[float, float], converged: bool, solver: str
) -> None:
    z0 = torch.tensor([start])
    found = ik.least_squares(function, z0, batch_dims=1, solver=solver, on_failure="ignore")
    if not converged and float(found.value.abs().max()) > 10:  # else it has come back to the fit itself
        assert ik.Status(int(found.status)).name in ("DIVERGED", "SADDLE"), found
    else:
        assert bool(found.converged), found


@pytest.mark.parametrize(
    ("solver", "unknown", "data", "dtype"),
    [
        ("auto", 1e-6, 1.0, torch.float64),
        *(
            ("levenberg_marquardt", unknown, data, dtype)
            for unknown in (1e-9, 1e-6, 1.0, 1e6)
            for data in (1e-6, 1.0, 1e6)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
)
def test_a_straight_line_is_no_saturation_in_any_units(
    solver: str, unknown: float, data: float, dtype: torch.dtype
) -> None:
    """``z_1 s / (z_2 + s)`` fitted to a line: counted in units so small that no ``z`` is large, it runs away as well."""
    s = torch.linspace(0.1, 3, 40, dtype=dtype)

    def residuals(z):
        return data * (z[0] / unknown * s / (z[1] / unknown + s) - 2 * s)

    start = torch.full((2,), unknown, dtype=dtype)
    found = ik.least_squares(residuals, start, solver=solver, on_failure="ignore")
    assert not bool(found.converged), found
