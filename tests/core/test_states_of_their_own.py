"""Functions that write into what they capture, and deep copies of solutions."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.lifting.fewer_rows import Larger


def _stateful(kind: str) -> Callable[..., Tensor]:
    kept, calls = torch.zeros(1), torch.zeros(())

    def accumulates(z: Tensor, x: Tensor) -> Tensor:
        kept.mul_(0.5).add_(0.1 * z.detach())
        return torch.tanh(0.5 * z + x + kept)

    def copies(z: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = torch.tanh(0.5 * z + x + kept)
            kept.copy_(z)
        return torch.tanh(0.5 * z + x) + 0 * out + 0.1 * out

    def within(z: Tensor, x: Tensor) -> Tensor:
        return accumulates(z, x)

    def counts(z: Tensor, x: Tensor) -> Tensor:
        calls.add_(1)
        return torch.tanh(0.5 * z + x)

    def remembers(z: Tensor, x: Tensor) -> Tensor:
        kept.copy_(z.detach())
        return torch.tanh(0.5 * z + x)

    def works(z: Tensor, x: Tensor) -> Tensor:
        torch.mul(z.detach(), 0.0, out=kept)
        return torch.tanh(0.5 * z + x + kept)

    return {f.__name__: f for f in (accumulates, copies, within, counts, remembers, works)}[kind]


@pytest.mark.parametrize("kind", ["accumulates", "copies", "within"])
@pytest.mark.parametrize("verb", ["fixed_point", "root"])
def test_a_state_of_its_own_warns(verb: str, kind: str) -> None:
    step = _stateful(kind)
    function = step if verb == "fixed_point" else lambda z, x: step(z, x) - z
    with pytest.warns(ik.ImpureFunctionWarning, match=r"writes into 'kept'.*part of z"):
        getattr(ik, verb)(function, torch.zeros(1), (torch.tensor([0.3]),), on_failure="ignore")


@pytest.mark.parametrize("kind", ["counts", "remembers", "works"])
def test_what_is_written_and_not_read_does_not(kind: str) -> None:
    x = torch.tensor([0.3], requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = ik.fixed_point(_stateful(kind), torch.zeros(1), (x,)).value
        z.sum().backward()
    slope = 1 - z.detach().square()  # of tanh at the solution: dz/dx = slope / (1 - slope / 2)
    torch.testing.assert_close(z.detach(), torch.tanh(0.5 * z.detach() + 0.3), rtol=1e-4, atol=0)
    torch.testing.assert_close(x.grad, slope / (1 - slope / 2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.1], ids=["counts", "depends on it"])
def test_under_vmap_of_what_is_captured(share: float) -> None:
    """What is returned then belongs to a transform, and is compared all the same."""
    calls = torch.zeros((), device="cpu")

    def solve(c: Tensor) -> Tensor:
        def step(z: Tensor) -> Tensor:
            calls.add_(1)
            return 0.5 * c * z + 1 + share * calls

        return ik.fixed_point(step, torch.zeros(1, device="cpu"), max_steps=30, on_failure="ignore").value

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.vmap(solve)(torch.tensor([0.1, 0.2], device="cpu"))
    assert any(issubclass(w.category, ik.ImpureFunctionWarning) for w in said) == (share > 0)


def test_deep_copies_of_solutions() -> None:
    step = torch.nn.Linear(2, 2)
    x = torch.tensor([0.3, 0.1], requires_grad=True)
    found = ik.fixed_point(lambda z, x: torch.tanh(0.3 * step(z) + x), torch.zeros(2), (x,))
    with pytest.raises(ik.CapabilityError, match=r"copy.deepcopy\(solution.detach\(\)\)"):
        copy.deepcopy(found)
    free = copy.deepcopy(found.detach())
    assert torch.equal(free.value, found.value) and free.value is not found.value
    assert free.evaluations == found.evaluations and torch.equal(free.status, found.status)
    plain = ik.fixed_point(lambda z: torch.tanh(0.3 * z + 0.1), torch.zeros(2))
    assert torch.equal(copy.deepcopy(plain).value, plain.value)
    assert torch.equal(pickle.loads(pickle.dumps(plain)).value, plain.value)


# ---------------------------------------------------------------------------------------------------------------------
# What is said where rows were dropped and the function is not what it was: which of two mistakes it is.
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
