"""Minima without a derivative: refused at once where the search begins in one, and in words that hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
_AT = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
_IN_KINKS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "sqrt(z^2)": (lambda z: torch.sqrt(z * z).sum(), torch.zeros(1, dtype=F64)),
    "sum sqrt((z - a)^2)": (lambda z: torch.sqrt((z - _AT.to(z)).square()).sum(), _AT),
    "one of two": (lambda z: torch.sqrt(z[0] * z[0]) + (z[1] - 1) ** 2, torch.tensor([0.0, 1.0], dtype=F64)),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", list(_IN_KINKS))
def test_a_start_in_a_kink(name: str, dtype: torch.dtype) -> None:
    objective, at = _IN_KINKS[name]
    with pytest.raises(ik.ConvergenceError, match="minimum in a kink") as caught:
        ik.argmin(objective, at.to(dtype))
    assert "left the domain" not in str(caught.value)
    found = caught.value.solution
    assert found.evaluations < 60
    torch.testing.assert_close(found.value, at.to(dtype))


@pytest.mark.parametrize(
    ("name", "objective", "start", "best"),
    [
        ("a slope beside", lambda z: torch.sqrt(z * z).sum() - 2 * z.sum() + z.square().sum(), [0.0, 0.0], [0.5, 0.5]),
        (
            "lower along each of the two alone",
            lambda z: 0.2 * (z[0] + z[1]).square().sqrt() - (z[0] - z[1]).square().sqrt() + z[0] ** 2 + 2 * z[1] ** 2,
            [0.0, 0.0],
            [0.4, 0.3],
        ),
        ("a kink that is no minimum", lambda z: -torch.sqrt(z * z).sum() + z.square().sum(), [0.0], [0.5]),
    ],
)
def test_a_start_without_a_derivative_that_is_no_minimum(
    name: str, objective: Callable[[Tensor], Tensor], start: list[float], best: list[float]
) -> None:
    found = ik.argmin(objective, torch.tensor(start, dtype=F64))
    torch.testing.assert_close(found.value.abs(), torch.tensor(best, dtype=F64), rtol=1e-6, atol=1e-6)


def test_another_unknown_may_move_on() -> None:
    """``z_1`` has a slope where the search begins: nothing is said yet of the kink of ``z_0``."""
    objective = lambda z: torch.sqrt(z[0] ** 2) - 3 * z[0] * z[1] + (z[1] - 1) ** 2 + z[0] ** 4 + z[1] ** 4  # noqa: E731
    found = ik.argmin(objective, torch.zeros(2, dtype=F64))
    assert float(found.value[0]) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("solver", ["auto", "newton_cg", "lbfgs"])
def test_a_search_that_ends_in_a_kink_has_left_no_domain(solver: str, dtype: torch.dtype) -> None:
    start = torch.tensor([1.0, 0.5], dtype=dtype)
    found = ik.argmin(lambda z: torch.sqrt(z * z).sum(), start, solver=solver, on_failure="ignore", max_steps=200)
    assert ik.Status(int(found.status)).name in ("STALLED", "MAX_STEPS")
