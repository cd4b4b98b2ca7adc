"""A minimisation that ends higher than it began: solved again from there where the solver is to be chosen, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import BlackBox
from implicitkit.solver import finding
from implicitkit.solver.verdict.higher_than_start import Start

F64 = torch.float64
ANGLES = [21.158931, 17.591719, 14.046854, 10.519732, 7.0058392, 3.5007293, 0.0]
ANGLES += [-a for a in reversed(ANGLES[:-1])] + [-24.753206, -28.379405, -32.042552, -35.747869]


def _beam(z: Tensor) -> Tensor:
    """Residuals of YFITU (CUTEst), ``z_2 tan(z_0 (1 - t) + z_1 t)``; all in vain where ``z_2 = 0``."""
    t = torch.linspace(0, 1, 17, dtype=z.dtype)
    return z[2] * torch.tan(z[0] * (1 - t) + z[1] * t) - torch.tensor(ANGLES, dtype=z.dtype)


@pytest.mark.parametrize("start", [(0.34815377946832027, 0.0, 24.13427367001466), (0.65, 0.0, 12.5)])
def test_a_fit_within_bounds_comes_down(start: tuple[float, ...]) -> None:
    """SQP jumps over a pole of the tangent to ``z_2 = 0``, where all gradients but that into the bound vanish."""
    z0, inf = torch.tensor(start, dtype=F64), torch.full((3,), torch.inf, dtype=F64)
    objective = lambda z: _beam(z).square().sum()  # noqa: E731
    found = ik.argmin(objective, z0, bounds=(0 * inf.sign(), inf))
    assert float(objective(found.value)) < float(objective(z0)) - 500


def _waves(z: Tensor) -> Tensor:
    return (torch.cos(z) + 0.005 * z * z).sum(-1)


JUMPS: dict[str, dict[str, Any]] = {
    "a gradient": {},
    "within bounds": {"bounds": (-50.0, 50.0)},
    "within constraints": {"constraints": [ik.Inequality(lambda z: z - 50)]},
}


@pytest.mark.parametrize("name", list(JUMPS))
def test_a_jump_into_a_higher_valley_is_refused(name: str) -> None:
    """Newton's step on the gradient where the curvature is small."""
    z0 = torch.tensor([1.6], dtype=F64)
    with pytest.raises(ik.ConvergenceError, match="higher at the point found than at z0") as caught:
        ik.argmin(_waves, z0, solver="newton", **JUMPS[name])
    assert float(_waves(caught.value.solution.value)) > float(_waves(z0)) + 0.1
    assert float(_waves(ik.argmin(_waves, z0, **JUMPS[name]).value)) < float(_waves(z0))


def test_the_sample_that_has_risen_alone() -> None:
    z0 = torch.tensor([[1.6], [3.0]], dtype=F64)
    found = ik.argmin(_waves, z0, solver="newton", batch_dims=1, on_failure="ignore")
    assert [ik.Status(int(s)).name for s in found.status] == ["STALLED", "CONVERGED"]


def _ends_beside_one(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> ik.Found:
    return ik.Found(torch.ones_like(z0) - (1e-8 if rtol < 1e-3 else 1e-3))


ENDS_BESIDE_ONE = BlackBox(_ends_beside_one, name="ends_beside_one", solves="minimise")


def _bowl(z: Tensor) -> Tensor:
    return (z - 1).square().sum()


def _rounded(z: Tensor) -> Tensor:
    """Of which the second term is all rounding, 1e-8 beside 1 and nothing at 1."""
    return _bowl(z) + ((z + 2.0**30) - 2.0**30 - z).sum()


NO_RISE: dict[str, Callable[[], Any]] = {
    "from the minimum itself, loosely": lambda: ik.argmin(
        _bowl, torch.ones(1, dtype=F64), solver=ENDS_BESIDE_ONE, rtol=1e-2, atol=1e-2
    ),
    "an objective that is all rounding": lambda: ik.argmin(
        _rounded, torch.ones(1, dtype=F64), solver=ENDS_BESIDE_ONE, atol=1e-6
    ),
    "from outside of the constraints": lambda: ik.argmin(
        lambda z: z.square().sum(), torch.zeros(3, dtype=F64), constraints=[ik.Equality(lambda z: z.sum() - 1)]
    ),
    "from outside of a curved constraint in small units": lambda: ik.argmin(
        lambda z: z.square().sum(), torch.ones(1, dtype=F64), constraints=[ik.Equality(lambda z: 1e-12 * (z**3 - 8))]
    ),
    "from outside of the bounds": lambda: ik.argmin(
        lambda z: z.square().sum(), torch.zeros(3, dtype=F64), bounds=(1.0, 2.0), solver="newton"
    ),
    "from just outside of a constraint": lambda: ik.argmin(
        lambda z: 1e3 * z.sum(), torch.full((1,), 1 - 1e-9, dtype=F64), constraints=[ik.Inequality(lambda z: 1 - z)]
    ),
    "from where it is minus infinity": lambda: ik.argmin(
        lambda z: torch.where(z == 0, torch.log(z), (z - 1).square()).sum(),
        torch.zeros(1, dtype=F64),
        solver=ENDS_BESIDE_ONE,
        atol=1e-6,
    ),
}


@pytest.mark.parametrize("name", list(NO_RISE))
def test_no_rise_is_seen_where_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rises: list[bool] = []
    risen = Start.risen
    monkeypatch.setattr(Start, "risen", lambda *args: rises.append(bool(risen(*args).any())) or risen(*args))
    NO_RISE[name]()
    assert rises == [False]


def test_of_a_users_own_solver_nobody_knows_that_it_begins_there() -> None:
    higher = float(ik.argmin(_waves, torch.tensor([15.5], dtype=F64)).value)
    solve = ik.implicit(ik.Argmin(_waves))(lambda z0: 0 * z0 + higher)
    assert float(solve(torch.tensor([3.0], dtype=F64))) == higher


def test_what_is_asked_costs_no_minimum_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective at the start and at the end is what others have asked for; methods that descend are not asked."""

    def counts() -> list[int]:
        one = torch.ones(4, dtype=F64)
        rows = lambda z: torch.cat([1 - z[:-1], 10 * (z[1:] - z[:-1] ** 2)])  # noqa: E731
        objective = lambda z: rows(z).square().sum()  # noqa: E731
        return [
            ik.argmin(objective, -one).evaluations,
            ik.argmin(objective, -one, solver="lbfgs").evaluations,
            ik.least_squares(rows, -one).evaluations,
            ik.argmin(objective, -one, bounds=(-2 * one, 0.5 * one)).evaluations,
            ik.least_squares(rows, -one, bounds=(-2 * one, 0.5 * one)).evaluations,
        ]

    asked = counts()
    monkeypatch.setattr(finding, "_look_up", lambda *_: False)
    assert asked == counts()
