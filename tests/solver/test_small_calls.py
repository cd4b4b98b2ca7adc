"""What small calls cost beside the user's function: operations of torch, and functions of this library that are entered.

Both are counts, the same on every machine.  The limits are what was measured when they were written (torch 2.13), and a
twentieth more: who raises one should know why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit.solver import driver
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.fixed_point.picard import Picard

D = torch.float64
LIBRARY = str(Path(ik.__file__).parent)
W = 0.2 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=D)
TIMES = torch.linspace(0, 3, 20, dtype=D)


def _peak(z: Tensor, a: Tensor) -> Tensor:
    return z[0] * torch.exp(-(((TIMES - z[1]) / z[2]) ** 2)) + z[3] + z[4] * TIMES - a


def _layer(a: Tensor) -> Any:
    @ik.implicit(ik.Root(lambda z, a: z**3 - a))
    def solver(z0: Tensor, a: Tensor) -> Tensor:
        return a ** (1 / 3)

    return solver(torch.ones((), dtype=D), a)


ROWS: dict[str, tuple[Callable[[Tensor], Any], Tensor, int, int]] = {
    "root, 1": (
        lambda a: ik.root(lambda z, a: z**3 - a, torch.ones((), dtype=D), (a,)).value,
        torch.tensor(2.0, dtype=D), 450, 1100,
    ),
    "fixed point, 16": (
        lambda a: ik.fixed_point(lambda z, a: torch.tanh(W @ z + a), torch.zeros(16, dtype=D), (a,)).value,
        torch.linspace(-1, 1, 16, dtype=D), 1170, 2350,
    ),
    "least squares, 5": (
        lambda a: ik.least_squares(_peak, torch.tensor([1.0, 1.2, 0.7, 0.0, 0.0], dtype=D), (a,)).value,
        _peak(torch.tensor([1.5, 1.3, 0.5, 0.2, 0.1], dtype=D), 0.01 * torch.sin(40 * TIMES)), 3130, 2200,
    ),
    "minimum, 10": (
        lambda a: ik.argmin(
            lambda z, a: torch.cosh(z - a).sum() + 0.5 * z @ z, torch.zeros(10, dtype=D), (a,)
        ).value,
        torch.linspace(-1, 1, 10, dtype=D), 1330, 1460,
    ),
    "own solver, 1": (_layer, torch.tensor(2.0, dtype=D), 390, 820),
}  # fmt: skip


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _entered(call: Callable[[], Any]) -> int:
    count, before = 0, sys.getprofile()

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


class _Counted(TorchDispatchMode):
    """The status numbers whose entries are counted."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.count_nonzero.default and args[0].dtype == torch.int64
        return func(*args, **(kwargs or {}))


def _two_ends(solver: Any) -> ik.Solution:
    """A solve whose samples end after 8 and 30 steps, or so."""
    rate = torch.tensor([[0.1], [0.5]], dtype=D)
    return ik.fixed_point(lambda z, q: q * z + 1, torch.zeros(2, 1, dtype=D), (rate,), batch_dims=1, solver=solver)


def test_nobody_counts_samples_that_have_ended_by_their_claims() -> None:
    with _Counted() as seen:
        found = _two_ends("picard")
    assert found.converged.all() and len(set(found.steps.tolist())) == 2
    assert seen.count == 0


def test_whom_nobody_gives_up_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that gives up asks every other step; the driver hears of it only where there is a sample to give up."""
    said, look = [], driver._Loop.look
    monkeypatch.setattr(driver._Loop, "look", lambda loop: said.append(loop.stuck is None) or look(loop))
    assert _two_ends(Impatient(Picard(), window=2)).converged.all()
    assert len(said) > 8 and all(said)


STEPS = {"auto": 1, "newton_cg": 3}


@pytest.mark.parametrize("solver", STEPS)
def test_the_start_of_a_minimisation_has_one_graph(solver: str) -> None:
    """Its value, its slope and its Hessian are from one evaluation; there is one where each step leads, one beside the end,
    and the first of all, which shows what the function is made of."""
    calls: list[int] = []
    weights = torch.arange(1, 6, dtype=D)
    objective = lambda z: calls.append(1) or (weights * (z - 2).square()).sum()  # noqa: E731
    found = ik.argmin(objective, torch.zeros(5, dtype=D), solver=solver)
    assert (int(found.steps), found.evaluations, len(calls)) == (STEPS[solver], 2 + STEPS[solver], 3 + STEPS[solver])


@pytest.mark.parametrize("name", ROWS)
def test_a_small_call_and_its_gradient(name: str) -> None:
    solve, start, operations, functions = ROWS[name]
    a = start.clone().requires_grad_()

    def call() -> Tensor:
        return torch.autograd.grad(solve(a).sum(), a)[0]

    call()  # what is imported, made or remembered once
    with _Operations() as seen:
        call()
    found = seen.count, _entered(call)
    assert found[0] <= operations and found[1] <= functions, found
