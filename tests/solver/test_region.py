"""The ball in which a model is believed, by Nocedal & Wright (2006), algorithm 4.1."""

from __future__ import annotations

import math

import pytest
import torch

from implicitkit.solver.steps.region import Region

D = torch.float64

#: how much of the promise was kept, the length of the step in a radius of 2: is it taken, and the next radius
ROWS = {
    "nothing promised": (1.0, 0.0, 1.0, False, 0.25),
    "worse": (-1.0, 1.0, 2.0, False, 0.5),
    "uphill, as promised": (-1.0, -1.0, 2.0, False, 0.5),
    "no value": (math.nan, 1.0, 2.0, False, 0.5),
    "poor": (0.2, 1.0, 1.0, True, 0.25),
    "fair": (0.5, 1.0, 2.0, True, 2.0),
    "good, inside": (1.0, 1.0, 1.0, True, 2.0),
    "good, at the boundary": (1.0, 1.0, 2.0, True, 4.0),
    "no step": (0.0, 1.0, 0.0, False, 0.5),
}


def region() -> Region:
    n = len(ROWS)
    return Region(torch.full((n,), 2.0, dtype=D), torch.zeros(n, 3, dtype=D), torch.zeros(n, dtype=torch.bool))


@pytest.mark.parametrize("row", range(len(ROWS)), ids=list(ROWS))
def test_the_radius_follows_the_promise(row: int) -> None:
    kept, promised, length, _, _ = torch.tensor(list(ROWS.values()), dtype=D).T
    ball = region()
    accept, _ = ball.judge(torch.ones(len(ROWS), 3, dtype=D), length, kept, promised)
    _, _, _, taken, radius = list(ROWS.values())[row]
    assert bool(accept[row]) == bool(ball.found[row]) == bool(ball.z[row].all()) == taken
    assert float(ball.radius[row]) == radius


def test_whoever_has_a_trial_keeps_it() -> None:
    ball = region()
    ball.found[0] = True
    kept, one = torch.ones(len(ROWS), dtype=D), torch.ones(len(ROWS), dtype=D)
    ball.judge(torch.ones(len(ROWS), 3, dtype=D), 2 * one, kept, one)
    assert float(ball.z[0].sum()) == 0
    assert float(ball.radius[0]) == 2


def test_without_a_trial_at_the_smallest_radius_there_is_no_hope() -> None:
    ball = region()
    ball.found[0] = True
    assert ball.hopeless(torch.full((len(ROWS),), 2.0, dtype=D)).tolist() == [False] + [True] * (len(ROWS) - 1)
    assert not ball.hopeless(torch.full((len(ROWS),), 1.0, dtype=D)).any()
