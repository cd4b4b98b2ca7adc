"""What is said where rows were dropped and the function is not what it was: which of two mistakes it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.lifting.fewer_rows import Larger

D = torch.float64
BATCH, N = 6, 4
SLOW = torch.linspace(0.05, 0.95, BATCH, dtype=D).view(BATCH, 1)  # samples that end one after another
HELD = torch.linspace(0, 1, BATCH, dtype=D).view(BATCH, 1) * torch.ones(N, dtype=D)
MATRIX = torch.full((BATCH, BATCH), 1 / BATCH, dtype=D)

COUPLED = r"the samples are not independent.*changes with the z of others.*batch_first=True.*batch_dims=0"
CAPTURED = "a tensor that it captures carries the batch"


def _gru() -> Callable[[Tensor, Tensor], Tensor]:
    """A recurrent layer that takes the batch second: what it is given for samples are steps in time."""
    torch.manual_seed(0)
    layer = nn.GRU(N, N, dtype=D)
    return lambda z, a: a * layer(z.unsqueeze(1))[0].squeeze(1) + 0.3


CASES: dict[str, tuple[Callable[[], Callable[[Tensor, Tensor], Tensor]], str]] = {
    "a mean over the batch": (lambda: lambda z, a: a * torch.cos(z) + 0.5 * z.mean(0), COUPLED),
    "a layer with the batch second": (_gru, COUPLED),
    "a matrix of the samples": (lambda: lambda z, a: a * torch.tanh(MATRIX @ z) + 0.3, COUPLED),
    "captured, another value": (lambda: lambda z, a: a * torch.cos(z) + HELD[: len(z)], CAPTURED),
    "captured, another shape": (lambda: lambda z, a: a * torch.cos(z) + HELD, CAPTURED),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_left_say_which_mistake_it_is(name: str) -> None:
    function, words = CASES[name]
    with pytest.raises((RuntimeError, ValueError), match=rf"rows have converged and were dropped .*: {words}"):
        ik.fixed_point(
            function(), torch.zeros(BATCH, N, dtype=D), (SLOW,), batch_dims=1, in_dims=0, solver="picard", rtol=1e-12
        )


def test_what_fails_on_the_larger_batch_too_tells_nothing() -> None:
    def fails(z: Tensor, *theta: Tensor) -> Tensor:
        raise RuntimeError("size mismatch")

    assert not Larger(fails, (), torch.tensor([0, 2]), 4).couples(torch.zeros(2, N, dtype=D))
    mean = Larger(lambda z: z - z.mean(0), (), torch.tensor([0, 2]), 4)
    assert mean.couples(torch.zeros(2, N, dtype=D))
