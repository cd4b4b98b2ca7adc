"""Functions that write into what they capture, and deep copies of solutions."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik


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
