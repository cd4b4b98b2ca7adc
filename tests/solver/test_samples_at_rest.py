"""What a batch costs once some of its samples have converged: as much as the others alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.steps.region import taken_where
from implicitkit.solver.verdict.judge import Judge

D = torch.float64
N = 12


def _valley(z: Tensor, x: Tensor) -> Tensor:
    return (30 * (z[:, 1:] - z[:, :-1] ** 2) ** 2).sum(1) + ((x - z) ** 2).sum(1)


def _equations(z: Tensor, x: Tensor) -> Tensor:
    return z + z**3 - 0.9 * z.roll(1, 1).sin() * z - x


def _residuals(z: Tensor, x: Tensor) -> Tensor:
    return torch.cat([3 * (z[:, 1:] - z[:, :-1] ** 2), x - z], 1)


_VERBS: dict[str, tuple[Any, Any]] = {
    "lbfgs": (ik.argmin, _valley),
    "bfgs": (ik.argmin, _valley),
    "nonlinear_cg": (ik.argmin, _valley),
    "gradient_descent": (ik.argmin, _valley),
    "newton_cg": (ik.argmin, _valley),
    "newton": (ik.root, _equations),
    "newton_krylov": (ik.root, _equations),
    "trust_region": (ik.root, _equations),
    "levenberg_marquardt": (ik.least_squares, _residuals),
    "dogleg": (ik.least_squares, _residuals),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(_VERBS))
def test_samples_that_have_converged_cost_no_evaluations(name: str) -> None:
    """One begins where it ends, and stays there: the last trial of each step is its end, and is not evaluated again."""
    verb, function = _VERBS[name]
    x = torch.linspace(-1, 4, N, dtype=D).unsqueeze(0)
    options: dict[str, Any] = {"batch_dims": 1, "solver": name, "max_steps": 400, "on_failure": "ignore"}
    alone = verb(function, torch.zeros(1, N, dtype=D), (x,), **options)
    end = verb(function, alone.value, (x,), **options | {"solver": "auto", "rtol": 1e-13, "atol": 0.0}).value
    start = torch.cat([end, torch.zeros(1, N, dtype=D)])
    both = verb(function, start, (x.expand(2, -1),), **options)
    assert int(both.steps[0]) == 0 and int(both.steps[1]) == int(alone.steps) >= 5
    torch.testing.assert_close(both.value[1], alone.value[0], rtol=1e-7, atol=1e-7)
    more = 15 if function is not _equations else 5  # is it a saddle, or in a kink?
    # alone, the factors of its last step say that newton_cg has come to a minimum: 11; what rests there is asked
    most = 27 if name == "newton_cg" else int(alone.evaluations) + more
    assert int(both.evaluations) <= most


def test_what_is_taken_of_a_trial_is_the_trial_where_that_is_all() -> None:
    z, trial, some = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), torch.tensor([True, False])
    assert taken_where(some, trial, z) is trial
    assert taken_where(torch.tensor([True, True]), trial, z) is trial
    other = taken_where(~some, trial, z)
    assert other is not trial and torch.equal(other, z)
    assert taken_where(some, torch.full((2, 3), torch.nan), z)[1].tolist() == [0.0, 0.0, 0.0]


def test_samples_that_another_method_goes_on_with_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's steps end where an objective is not convex, and the next method begins; that one has the last word of it."""
    words: list[int] = []
    plain = Judge.last_word

    def last_word(self: Judge, z: Tensor, norm: Tensor, failed: Tensor) -> Tensor:
        words.append(int(failed.count_nonzero()))
        return plain(self, z, norm, failed)

    monkeypatch.setattr(Judge, "last_word", last_word)
    x = torch.tensor([[-1.0], [-2.0], [-3.0], [4.0]], dtype=D)
    found = ik.argmin(
        lambda z, x: (z**4 / 4 - x * z**2 / 2 - 0.1 * z).sum(1), torch.zeros(4, N, dtype=D), (x,), batch_dims=1
    )
    assert bool(found.converged.all()) and found.solver == "auto (newton, newton_cg)"
    assert words == []
