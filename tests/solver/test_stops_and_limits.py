"""A callback's word and a step limit hold for all of a solve, whatever it is made of; and who found it is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64


def _pass(z: Tensor) -> Tensor:
    """Two minima, and the saddle between them that the start leads to."""
    x, y, w = z.unbind(-1)
    return (x**2 - 1) ** 2 + 0.2 * y * w + 3 * y**2 + y**4 + w**2 + w**4


_START = torch.tensor([0.0, 1.0, 0.5], dtype=F64)
_SOLVERS = ["auto", "lbfgs", "newton_cg", "gradient_descent"]


@pytest.mark.parametrize("solver", _SOLVERS)
def test_a_stop_in_every_step(solver: str) -> None:
    """Before the saddle, at it, and on the way down from it."""
    whole = int(ik.argmin(_pass, _START, solver=solver).steps)
    assert whole > 3
    for last in range(1, whole):
        seen: list[int] = []
        found = ik.argmin(
            _pass,
            _START,
            solver=solver,
            on_failure="ignore",
            callback=lambda step, z, norm, seen=seen, last=last: seen.append(step) or step == last,
        )
        assert ik.Status(int(found.status)).name == "STOPPED", (last, found)
        assert seen == list(range(1, last + 1))
        assert float(_pass(found.value)) <= float(_pass(_START))
    # of several stages the point with the least |F| is kept, and that is the saddle
    assert solver == "auto" or float(_pass(found.value)) < 0.9, "on the way down, below the saddle, which is at 1"


@pytest.mark.parametrize("solver", _SOLVERS)
def test_a_limit_of_every_size(solver: str) -> None:
    whole = int(ik.argmin(_pass, _START, solver=solver).steps)
    for most in range(1, whole):
        seen: list[int] = []
        found = ik.argmin(
            _pass,
            _START,
            solver=solver,
            on_failure="ignore",
            max_steps=most,
            callback=lambda step, z, norm, seen=seen: seen.append(step),
        )
        assert len(seen) <= most and int(found.steps) <= most, (most, found)
        assert most == whole - 1 or not bool(found.converged), "in the last step a point may be taken as it is"
    if solver != "auto":  # of several stages the point with the least |F| is kept, and that is the saddle
        assert ik.Status(int(found.status)).name != "SADDLE" and float(_pass(found.value)) < 0.9


@pytest.mark.parametrize("n", [2, 40, 200])
def test_a_limit_where_a_method_hands_over(n: int) -> None:
    """Newton's steps on a convex objective give this one up at once, and the limit leaves none to those that go on."""
    wells = lambda z: (z.square() - 1).square().sum()  # noqa: E731
    found = ik.argmin(wells, torch.full((n,), 0.1, dtype=F64), max_steps=1, on_failure="ignore")
    assert ik.Status(int(found.status)).name == "MAX_STEPS" and int(found.steps) <= 1


def test_a_stop_is_for_the_whole_batch() -> None:
    """The second sample is at its minimum when the first is still on its way from the saddle."""
    start = torch.stack([_START, ik.argmin(_pass, torch.tensor([1.0, 0, 0], dtype=F64)).value])
    found = ik.argmin(
        _pass, start, batch_dims=1, solver="lbfgs", on_failure="ignore", callback=lambda step, z, norm: step == 3
    )
    assert [ik.Status(int(s)).name for s in found.status] == ["STOPPED", "CONVERGED"]


def test_who_found_it() -> None:
    """Anderson's steps come to a fixed point that repels, and the plain iteration to the one that is returned."""

    def magnet(m: Tensor, field: Tensor) -> Tensor:
        return torch.tanh(0.3 * m.sum(-1, keepdim=True).expand_as(m) + field)

    fields = torch.tensor([[0.01], [5.0]], dtype=F64)
    alone = [ik.fixed_point(magnet, torch.zeros(10, dtype=F64), field).solver for field in fields]
    assert alone == ["auto (picard)", "auto (anderson)"]
    both = ik.fixed_point(magnet, torch.zeros(2, 10, dtype=F64), fields, batch_dims=1)
    assert both.solver == "auto (anderson, picard)"
