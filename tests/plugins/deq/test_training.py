"""Training by default: failures that are forgiven and counted, warm starts by sample, cells as modules among modules."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import tempfile
import warnings
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import implicitkit as ik
from implicitkit.linear.catalogue import get_linear_solver
from implicitkit_deq import (
    DEQ,
    CausalityWarning,
    Forgive,
    ForgivenWarning,
    IgnoredInputWarning,
    Monitor,
    StabilityWarning,
    bound_weights,
    cells,
    compat,
    unsolved_samples,
)
from implicitkit_deq.advice import cure
from implicitkit_deq.unsolved_samples import Effort, _Linear

F64 = torch.float64


class Scalar(nn.Module):
    """z = x z + w: solved by Picard for |x| < 1 only; then dz/dw = 1 / (1 - x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=F64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return x * z + self.w


def _layer(**options: Any) -> DEQ:
    return DEQ(Scalar(), (1,), solver="picard", max_steps=60, rtol=1e-10, **options)


GOOD = torch.tensor([[0.5], [0.2], [-0.4], [0.1], [0.3]], dtype=F64)
ONE_BAD = torch.cat([GOOD, torch.tensor([[-2.0]], dtype=F64)])  # diverges: 0, 1, -1, 3, ...; the best iterate is 0


# ------------------------------------------------------------------------------------------------------- forgiveness
@pytest.mark.parametrize(("derivative", "of_the_bad_one"), [("truncated", 1.0), ("none", 0.0)])
def test_a_failure_is_forgiven_with_the_best_iterate_and_the_derivative_asked_for(
    derivative: str, of_the_bad_one: float
) -> None:
    layer = _layer(on_failure=Forgive(derivative=derivative))
    with pytest.warns(ForgivenWarning, match=r"1 of 6 samples .* best iterate"):
        z = layer(ONE_BAD)
    assert layer.solution is not None and layer.solution.converged.tolist() == [True] * 5 + [False]
    torch.testing.assert_close(z[:5], 1 / (1 - GOOD), rtol=1e-8, atol=0.0)
    torch.testing.assert_close(z[5], layer.solution.value[5])
    z.sum().backward()
    want = (1 / (1 - GOOD)).sum() + of_the_bad_one
    torch.testing.assert_close(layer.cell.w.grad[0], want, rtol=1e-7, atol=0.0)


def test_forgiveness_is_the_default_in_training_warns_once_and_ends_in_evaluation() -> None:
    layer = _layer()
    with pytest.warns(ForgivenWarning):
        layer(ONE_BAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(ONE_BAD)
    with pytest.raises(ik.ConvergenceError, match="1 of 6"):
        layer.eval()(ONE_BAD)
    layer = _layer(evaluation={"on_failure": Forgive()}).eval()
    with pytest.warns(ForgivenWarning):
        layer(ONE_BAD)


@pytest.mark.parametrize("policy", [Forgive(share=0.1), "raise"])
def test_more_failures_than_allowed_raise(policy: Any) -> None:
    layer = _layer(on_failure=policy)
    with pytest.raises(ik.ConvergenceError, match="1 of 6"):
        layer(ONE_BAD)
    assert layer.solution is not None and int(layer.solution.converged.sum()) == 5


class Jump(nn.Module):
    """z = tanh(x z + 1); where ``x`` is above ten a map that jumps over the diagonal: there is no fixed point."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 10, torch.where(z > 0, -1.0, 1.0), torch.tanh(x * z + 1))


@pytest.mark.slow
def test_dear_members_of_the_relay_that_were_in_vain_are_spared_for_some_calls() -> None:
    x = torch.tensor([[0.5], [0.2], [0.4], [100.0], [0.1]], dtype=F64)

    def evaluations(layer: DEQ, calls: int) -> list[int]:
        found = []
        for _ in range(calls):
            layer(x)
            assert layer.solution is not None and layer.solution.converged.tolist() == [True] * 3 + [False, True]
            found.append(layer.solution.evaluations)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)
        whole, brief, again = evaluations(DEQ(Jump(), (1,), on_failure=Forgive(every=2)), 3)
        assert whole == again and 2 * brief < whole
        assert evaluations(DEQ(Jump(), (1,), on_failure=Forgive(every=1)), 2) == [whole, whole]
        lenient = DEQ(Jump(), (1,), evaluation={"on_failure": Forgive()}).eval()  # evaluation spares nothing
        assert evaluations(lenient, 2) == [whole, whole]
    strict = DEQ(Jump(), (1,), on_failure=Forgive(share=0.1))
    for _ in range(2):  # more than may fail: the whole relay is asked in every call
        with pytest.raises(ik.ConvergenceError, match="1 of 5"):
            strict(x)
        assert strict.solution is not None and strict.solution.evaluations == whole


@pytest.mark.parametrize(("policy", "fewer"), [(Forgive(), True), ("raise", True), (Forgive(share=0.5), False)])
def test_a_call_that_is_to_fail_does_so_after_a_few_samples(policy: Any, fewer: bool) -> None:
    """None of 32 samples has an equilibrium: the dear members are asked about 8, where a call without these raises."""
    x = torch.full((32, 200), 100.0, dtype=F64)
    stages = (ik.extend.Stage("picard", max_steps=3), ik.extend.Stage("newton_krylov", scale=None, max_steps=7))
    spent, free = [], ik.Relay(stages)
    for solver in (free, ik.Relay(stages, work=unsolved_samples._MORE)):
        layer = DEQ(Jump(), (200,), solver=solver, on_failure=policy)
        with pytest.raises(
            ik.ConvergenceError, match="first calls" if isinstance(policy, Forgive) else "32 of 32"
        ) as said:
            layer(x)
        spent.append(layer.solution.sample_evaluations)  # type: ignore[union-attr]
        assert ("not asked about the other 24" in str(said.value)) == (fewer and solver is free)
    assert (spent[0] < spent[1]) == fewer


@pytest.mark.parametrize(
    ("evaluations", "left", "asked"),
    [(301, 2, "wbbwbb"), (300, 2, "wwwwww"), (301, 3, "wbwbwbw")],
    ids=["dear", "cheap", "too many are left"],
)
def test_dear_members_are_spared_where_a_call_took_many_evaluations(evaluations: int, left: int, asked: str) -> None:
    """``w``: the whole relay, ``b``: its cheap members, which leave so many of 32 samples.  A quarter of them may fail, and
    a sixteenth be left to rest."""
    effort, calls, spared = Effort(), "", []

    def find(solver: Any, before: Any = None) -> Any:
        nonlocal calls
        whole = solver == "relay" or len(solver.stages) == len(ik.Relay().stages)
        calls += "w" if whole else "b"
        converged = torch.arange(32) >= (0 if whole else left)
        return SimpleNamespace(converged=converged, evaluations=evaluations if whole else 20)

    while len(calls) < 6:
        effort.spend(find, "relay", Forgive(every=3))
        spared.append(effort.spared)
    assert calls == asked
    assert sum(spared) == (4 if left == 2 and "b" in asked else 0)
    effort.spend(find, "relay", None)
    assert not effort.spared and calls[-1] == "w"


def test_dear_members_that_leave_samples_are_spared_while_no_more_fail_than_may() -> None:
    """Of 32 samples eight may fail.  The cheap members leave six, the whole relay one or none."""
    effort, calls = Effort(), ""
    left = {"w": 1, "b": 6}

    def find(solver: Any, before: Any = None) -> Any:
        nonlocal calls
        calls += "w" if solver == "relay" or len(solver.stages) == len(ik.Relay().stages) else "b"
        return SimpleNamespace(converged=torch.arange(32) >= left[calls[-1]], evaluations=301)

    def spend(times: int) -> str:
        nonlocal calls
        calls = ""
        for _ in range(times):
            effort.spend(find, "relay", Forgive(every=3))
        return calls

    assert spend(4) == "wbbw"
    left["b"] = 9  # more than may fail
    assert spend(1) == "bw"
    left |= {"b": 6, "w": 0}
    assert spend(3) == "bbw", "what they left decides"
    assert spend(2) == "bwbw", "dear, and not in vain"


class GroupNormOfReLU(nn.Module):
    """GroupNorm(ReLU(W * z + U * x)), W twice as large as PyTorch begins with: an equilibrium exists, nothing contracts."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.W, self.U = (nn.Conv2d(c, channels, 3, padding=1) for c in (channels, 3))
        self.norm = nn.GroupNorm(4, channels)
        with torch.no_grad():
            self.W.weight *= 2

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.relu(self.W(z) + self.U(x)))
        return out


@pytest.mark.slow
def test_no_call_takes_long_to_say_that_samples_have_no_equilibrium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuation, which solves them all, factors (256, 256) Jacobians in a thousand steps: not for 4,000 evaluations."""
    monkeypatch.setattr(unsolved_samples, "_MORE", 4000.0)
    torch.manual_seed(0)
    layer = DEQ(GroupNormOfReLU(4), (4, 8, 8), rtol=1e-3)
    dense, taken = ik.extend.Continuation.step, []
    monkeypatch.setattr(
        ik.extend.Continuation, "step", lambda self, f, z, state: taken.append(1) or dense(self, f, z, state)
    )
    for training in (False, True):
        with pytest.raises(ik.ConvergenceError, match=r"Relay\(work=math.inf\)"):
            layer.train(training)(torch.randn(16, 3, 8, 8))
        assert not taken
    layer.train_settings = layer.train_settings.changed({"solver": ik.Relay(work=math.inf), "max_steps": 160})
    with pytest.raises(ik.ConvergenceError):
        layer(torch.randn(16, 3, 8, 8))
    assert taken


@pytest.mark.slow
def test_a_call_that_would_raise_is_granted_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(GroupNormOfReLU(4), (4, 2, 2), rtol=1e-3), 2 * torch.randn(16, 3, 2, 2)
    monkeypatch.setattr(unsolved_samples, "_WORK", 1.0)
    z = layer(x)
    assert bool(layer.solution.converged.all())
    assert float((layer.cell(z, x) - z).detach().norm()) < 1e-2
    monkeypatch.setattr(unsolved_samples, "_MORE", 1.0)
    with pytest.raises(ik.ConvergenceError, match="samples did not converge"):
        layer(x)


@pytest.mark.slow
def test_a_call_that_is_granted_more_goes_on_from_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that the first solve has solved are evaluated once more by the second, and keep their solutions."""
    torch.manual_seed(0)
    cell = GroupNormOfReLU(4)
    layer, x = DEQ(cell, (4, 2, 2), rtol=1e-3), 2 * torch.randn(16, 3, 2, 2)
    monkeypatch.setattr(unsolved_samples, "_WORK", 1.0)
    runs: list[ik.Solution] = []
    solve = ik.solve
    monkeypatch.setattr(ik, "solve", lambda *args, **options: runs.append(solve(*args, **options)) or runs[-1])
    z = layer(x)
    first, second = runs
    solved = first.converged
    assert 0 < int(solved.sum()) < len(x)
    assert not bool(second.steps[solved].any())
    assert torch.equal(z[solved], first.value[solved])
    again = DEQ(cell, (4, 2, 2), rtol=1e-3, solver=ik.Relay(work=unsolved_samples._MORE))(
        x
    )  # the same, from zero at once
    torch.testing.assert_close(z[~solved], again[~solved], rtol=1e-2, atol=1e-2)


def test_what_was_not_asked_is_said() -> None:
    """A sample that dearer solvers might solve is not called unsolvable."""
    layer = _layer()
    status = torch.tensor([int(ik.Status.CONVERGED), int(ik.Status.STALLED)])
    solution = SimpleNamespace(converged=torch.tensor([True, False]), solver="relay (anderson)", status=status)
    with pytest.warns(ForgivenWarning, match="dearer ones are asked in one of 30 calls"):
        layer.train_settings.on_failure.tell(solution, True, False)  # type: ignore[union-attr, arg-type]
    with pytest.warns(ForgivenWarning, match=r"no equilibrium that relay \(anderson\) could find"):
        layer.train_settings.on_failure.tell(solution, False, False)  # type: ignore[union-attr, arg-type]


def test_data_that_are_no_numbers_are_named() -> None:
    """One sample of eight holds a NaN: so does its value, the others are solved, and what gradients become is said."""
    layer, x = DEQ(cells.MLP(4, 8)), torch.randn(8, 4)
    x[2] = torch.nan
    with pytest.warns(ForgivenWarning, match=r"1 of 8 .* \(of 1 because NaN or Inf came up: where an input holds it"):
        z = layer(x)
    assert layer.solution.converged.tolist() == [True, True, False, *[True] * 5]
    assert torch.equal(z.isfinite().all(1), layer.solution.converged)  # NaN, as behind any layer: the loss shows it


@pytest.mark.parametrize(
    ("made", "called", "told"),
    [
        ({}, {}, True),
        ({"init": "last"}, {}, False),
        ({}, {"index": torch.arange(6)}, False),
        ({}, {"z0": "last"}, False),
    ],
)
def test_who_starts_every_solve_anew_is_told_of_the_index(
    made: dict[str, Any], called: dict[str, Any], told: bool
) -> None:
    with pytest.warns(ForgivenWarning) as said:
        _layer(**made)(ONE_BAD, **called)
    (text,) = [str(w.message) for w in said if "samples of a training call" in str(w.message)]
    assert ("layer(x, index=their numbers)" in text) == told and text.endswith('on_failure="raise" forgives nothing')


class Adrift(nn.Module):
    """``z = z / 2 + w x``, and ``z = z + 1`` for the last sample: at 4.5e15 rounding says that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 5, z + 1, 0.5 * z + self.w * x)


@pytest.mark.filterwarnings("ignore::implicitkit_deq.ForgivenWarning")
@pytest.mark.parametrize("how", [{}, {"index": torch.arange(40)}], ids=["full batches", "index"])
def test_what_runs_away_from_its_last_point_is_given_that(how: dict[str, Any]) -> None:
    layer, x = DEQ(Adrift(), (1,), rtol=1e-8, dtype=F64), torch.arange(40, dtype=F64).div(7.7).unsqueeze(1)
    for _ in range(3):
        with torch.no_grad():
            layer.cell.w.mul_(0.999)
        z = layer(x, **how)
        assert layer.solution is not None and layer.solution.converged.tolist() == [True] * 39 + [False]
        assert z[-1].abs() < 100
        torch.testing.assert_close(z[:-1], 2 * layer.cell.w * x[:-1], rtol=1e-6, atol=1e-6)


def test_nothing_is_forgiven_under_transforms() -> None:
    layer = _layer()
    with pytest.raises(ik.ConvergenceError):
        torch.func.vmap(lambda x: layer(x[None])[0])(ONE_BAD)
    torch.testing.assert_close(torch.func.vmap(lambda x: layer(x[None])[0])(GOOD), 1 / (1 - GOOD), rtol=1e-8, atol=0.0)


def test_nan_policy_marks_the_failures_and_keeps_gradients_finite() -> None:
    layer = _layer(on_failure="nan")
    z = layer(ONE_BAD)
    assert torch.isnan(z).flatten().tolist() == [False] * 5 + [True]
    z.nansum().backward()
    torch.testing.assert_close(layer.cell.w.grad[0], (1 / (1 - GOOD)).sum(), rtol=1e-7, atol=0.0)


# ------------------------------------------------------------------------------------------------- full batches
def _steps_of(layer: DEQ, x: Tensor, written: bool = True, **how: Any) -> int:
    """Of one call; every parameter is written to before, as by an optimiser, unless told otherwise."""
    with torch.no_grad():
        for p in layer.parameters() if written else ():
            p.mul_(1.0)
    layer(x, **how).sum().backward()
    assert layer.solution is not None
    return int(layer.solution.steps.max())


def test_a_solve_starts_where_the_very_tensor_ended_in_training() -> None:
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10), torch.randn(5, 4, dtype=F64)
    first = _steps_of(layer, x)
    assert first > 5
    assert _steps_of(layer, x) == 0
    assert _steps_of(layer, x.clone()) == first, "equal numbers in another tensor are another batch"
    assert _steps_of(layer, x) == first, "only the last call is remembered"
    x += 0.0
    assert _steps_of(layer, x) == first, "it was written to"
    assert _steps_of(layer, x, z0=torch.zeros(5, 6, dtype=F64)) == first
    assert _steps_of(copy.deepcopy(layer), x) == first
    assert len(layer.states(x, at=(2, 4))) == 3, "its steps count from zero"
    assert _steps_of(layer, x) == 0
    with torch.no_grad():
        layer.cell.recurrent.weight.mul_(1.01)
    assert 0 < _steps_of(layer, x) <= first
    assert _steps_of(layer.eval(), x) == _steps_of(layer, x) >= 5, "evaluation remembers nothing"
    layer.train()
    with layer.using(solver="picard"):
        assert _steps_of(layer, x) > 5, "solvers are compared from one start"
    assert _steps_of(layer, x) > 5
    always = DEQ(layer.cell, rtol=1e-10, init="zeros")
    assert _steps_of(always, x) == _steps_of(always, x) > 5
    both = layer.train() >> DEQ(cells.MLP(6, 3, dtype=F64), rtol=1e-10)
    assert _steps_of(both, x) > 5 and _steps_of(both, x) == 0
    del x
    assert _steps_of(layer, torch.randn(5, 4, dtype=F64)) > 5


@pytest.mark.parametrize("steps", [0, 1])
def test_a_call_that_is_only_repeated_repeats_what_it_did(steps: int) -> None:
    """Recomputed by a checkpoint, or for a difference by one of the parameters; in the first step, and later."""
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-3), torch.randn(5, 4, dtype=F64)
    for _ in range(steps):
        layer(x)
        with torch.no_grad():
            for p in layer.parameters():
                p.mul_(1.1)
    first = layer(x)
    layer.eval()(x)  # in between, which changes nothing
    layer.train()
    assert torch.equal(layer(x), first)
    weight = layer.cell.recurrent.weight
    changed = []
    for h in (1e-5, -1e-5):
        with torch.no_grad():
            weight[0, 0] += h
        changed.append(layer(x))
        with torch.no_grad():
            weight[0, 0] -= h
    assert not torch.equal(*changed), "from the last equilibrium both would end at once"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [{}, {"index": torch.arange(5)}], ids=["full", "index"])
@pytest.mark.parametrize("init", [None, "last"])
def test_one_training_call_in_so_many_starts_from_zero(init: str | None, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10, init=init), torch.randn(5, 4, dtype=F64)
    anew = [k for k in range(70) if _steps_of(layer, x, **how) > 0]
    assert anew == ([0, 31, 62] if init is None else [0])
    for _ in range(40):  # evaluation is not counted
        layer.eval()(x, **how)
    layer.train()
    assert _steps_of(layer, x, **how) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batches", [2, 3])
def test_samples_of_several_calls_a_step_each_start_from_zero_at_times(batches: int) -> None:
    """Gradients are gathered over the same few batches: none of them may follow its equilibria for ever."""
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10), torch.randn(2 * batches, 4, dtype=F64)
    anew = torch.zeros(batches)
    for _ in range(32 * batches):
        with torch.no_grad():
            next(layer.parameters()).mul_(1.0)
        for b, index in enumerate(torch.arange(2 * batches).split(2)):
            layer(x[index], index=index)
            assert layer.solution is not None
            anew[b] += int(layer.solution.steps.min()) > 1
    assert bool((anew >= 2).all()), anew


class Bistable(nn.Module):
    """z = tanh(3 z + b) + 0 x: for small b of either sign two stable solutions; from zero that of the sign of b."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(1, dtype=F64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(3 * z + self.b) + 0 * x


def test_a_checkpoint_recomputes_the_equilibrium_that_was_found() -> None:
    """Its recomputation is no call that might start from zero, and find the other one."""
    layer, x, index = DEQ(Bistable(), (1,), rtol=1e-10), torch.ones(1, 1, dtype=F64), torch.arange(1)
    for b in (1.0, *[-0.8] * 40):
        with torch.no_grad():
            layer.cell.b.fill_(b)
        z = checkpoint(lambda x: layer(x, index=index), x, use_reentrant=False)
        (slope,) = torch.autograd.grad(z.sum(), layer.cell.b)
        a = 1 - z.detach() ** 2
        torch.testing.assert_close(slope, (a / (1 - 3 * a)).sum(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("how", [{}, {"index": torch.arange(3)}], ids=["full", "index"])
def test_what_is_trained_is_what_evaluation_finds(how: dict[str, Any]) -> None:
    layer, x = DEQ(Bistable(), (1,), rtol=1e-8), torch.arange(1.0, 4.0, dtype=F64).unsqueeze(1)
    trained = []
    for b in (1.0, *[-0.8] * 40):
        with torch.no_grad():
            layer.cell.b.fill_(b)
        trained.append(float(layer(x, **how)[0].detach()))
    assert min(trained[:31]) > 0 > max(trained[31:]), "the branch that is followed, then the one from zero"
    assert (layer.eval()(x) < 0).all()


def test_the_tensors_that_come_back_are_not_held() -> None:
    layer, x = DEQ(cells.MLP(4, 6), rtol=1e-3), torch.randn(5, 4)
    ref = weakref.ref(x)
    layer(x).sum().backward()
    del x
    gc.collect()
    assert ref() is None
    pickle.loads(pickle.dumps(layer))


def test_nothing_is_remembered_of_mapped_calls() -> None:
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10), torch.randn(3, 5, 4, dtype=F64)
    want = torch.stack([layer(part) for part in x])
    for _ in range(2):
        torch.testing.assert_close(torch.func.vmap(layer)(x), want, rtol=1e-8, atol=1e-10)
    assert _steps_of(layer, x[0]) > 5


class Switch(nn.Module):
    """z = (1 - s) x^2 + s z + w - w.detach() s: for s = 1 every z solves, and I - J is singular."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=F64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        s = (x > 0.5).to(z)
        return (1 - s) * x**2 + s * z + self.w


@pytest.mark.parametrize(("derivative", "of_the_bad_one"), [("truncated", 1.0), ("none", 0.0)])
def test_a_singular_backward_is_forgiven_too(derivative: str, of_the_bad_one: float) -> None:
    layer = DEQ(Switch(), (1,), on_failure=Forgive(derivative=derivative), rule=ik.Implicit(linear_solver="gmres"))
    x = torch.tensor([[0.1], [0.2], [0.3], [0.4], [1.0]], dtype=F64)
    with pytest.warns(ForgivenWarning, match=f"have an equilibrium and no derivative there.*{derivative}"):
        layer(x).sum().backward()
    assert layer.solution is not None and layer.solution.backward is not None
    assert layer.solution.backward.converged.tolist() == [True] * 4 + [False]
    torch.testing.assert_close(layer.cell.w.grad, torch.tensor([4 + of_the_bad_one], dtype=F64))
    layer = DEQ(Switch(), (1,), on_failure=Forgive(backward_share=0.1), rule=ik.Implicit(linear_solver="gmres"))
    with pytest.raises(
        ik.ConvergenceError, match=r"backward did not converge.*1 of 5 samples, more than the backward_share"
    ):
        layer(x).sum().backward()


@pytest.mark.parametrize("linear_solver", ["auto", "gmres", "lu"])
def test_a_derivative_that_would_outweigh_all_others_is_scaled_down_and_counted(linear_solver: str) -> None:
    x = torch.tensor([[0.5], [0.9], [1 - 1e-3], [-0.5]], dtype=F64)  # dz/dw = 2, 10, 1000, 2/3
    rule = ik.Implicit(linear_solver=linear_solver)

    def layer(policy: Any) -> DEQ:
        return DEQ(Scalar(), (1,), solver="newton", rtol=1e-10, on_failure=policy, rule=rule)

    def gradient(layer: DEQ) -> list[float]:
        layer(x).backward(torch.tensor([[1.0], [-1.0], [3.0], [1.0]], dtype=F64), inputs=[layer.cell.w])
        return [*layer.cell.w.grad.tolist(), *layer.solution.backward.converged.tolist()]

    with pytest.warns(ForgivenWarning, match=r"outweigh all others.*100 times.*backward.converged.*bound_weights"):
        got = gradient(layer(Forgive()))
    assert got == [pytest.approx(2 - 10 + 3 * 100 + 2 / 3), True, True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exact in (Forgive(amplification=float("inf")), Forgive(amplification=1000.1), "raise"):
            assert gradient(layer(exact)) == [pytest.approx(2 - 10 + 3000 + 2 / 3), True, True, True, True]
        strict = layer(Forgive(amplification=1.5)).eval()  # evaluation scales nothing
        assert gradient(strict) == [pytest.approx(2 - 10 + 3000 + 2 / 3), True, True, True, True]
    with pytest.warns(ForgivenWarning, match="outweigh"):  # of all, and this is no failure: a share of zero may have it
        got = gradient(layer(Forgive(amplification=1.5, backward_share=0.0)))
    assert got == [pytest.approx(1.5 - 1.5 + 3 * 1.5 + 2 / 3), False, False, False, True]


@pytest.mark.filterwarnings("error::implicitkit_deq.ForgivenWarning")
def test_a_derivative_asked_for_by_name_is_not_scaled_down() -> None:
    layer, x = DEQ(Scalar(), (1,), solver="newton", rtol=1e-10), torch.tensor([[1 - 1e-3], [0.5]], dtype=F64)
    f = lambda w: torch.func.functional_call(layer, {"cell.w": w}, (x,))  # noqa: E731
    w, want = layer.cell.w.detach(), torch.tensor([[1000.0], [2.0]], dtype=F64)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(f)(w).squeeze(-1), want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(f(dual)).tangent, want)


@pytest.mark.filterwarnings("error::implicitkit_deq.ForgivenWarning")
@pytest.mark.parametrize("step", [1e-2, 1e-4])
def test_a_cell_that_takes_short_steps_has_the_derivative_of_one_that_takes_long_ones(step: float) -> None:
    class Short(nn.Module):  # (1 - a) z + a f(z): I - J is a times that of f
        def __init__(self) -> None:
            super().__init__()
            self.f = Scalar()

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return (1 - step) * z + step * self.f(z, x)

    layer, x = DEQ(Short(), (1,), solver="newton", rtol=1e-10), torch.tensor([[0.5], [0.0], [-1.0]], dtype=F64)
    z = layer(x)
    seeds = torch.tensor([[[1.0], [0.0], [0.0]], [[0.0], [2.0], [1.0]]], dtype=F64)
    (got,) = torch.autograd.grad(z, layer.cell.f.w, seeds, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(got, torch.tensor([[2.0], [2.5]], dtype=F64))
    z.sum().backward()
    torch.testing.assert_close(layer.cell.f.w.grad, torch.tensor([2 + 1 + 0.5], dtype=F64))


def test_what_is_scaled_down_does_not_hang_on_samples_whose_backward_failed() -> None:
    """Of three samples that take short steps, and a full one that nothing solves."""
    slopes = torch.tensor([[1e-3], [2e-3], [1.0]], dtype=F64)
    A, b = SimpleNamespace(mv=lambda v: slopes * v), torch.ones(2, 3, 1, dtype=F64)
    x = torch.tensor([500.0, 500.0, 500.0], dtype=F64).repeat(2).unsqueeze(1)
    steps = torch.ones(6, dtype=torch.int64)
    for solved, want in ((True, 100.0), (False, 500.0)):
        converged = torch.tensor([True, True, solved]).repeat(2)
        answer = ik.extend.LinearSolution(x, 0 * x.squeeze(1), steps, converged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgivenWarning)
            scaled = _Linear(get_linear_solver("lu"), Forgive())._scaled(answer, A, b)
        torch.testing.assert_close(scaled.x[:2].squeeze(1), torch.full((2,), want, dtype=F64))


def test_each_of_several_cotangents_is_scaled_down_by_itself() -> None:
    layer = DEQ(Scalar(), (1,), solver="newton", rtol=1e-10)
    x = torch.tensor([[1 - 1e-3], [-1.0]], dtype=F64)
    z = layer(x)
    seeds = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]], [[2.0], [1.0]]], dtype=F64)
    with pytest.warns(ForgivenWarning, match="outweigh"):
        (got,) = torch.autograd.grad(z, layer.cell.w, seeds, is_grads_batched=True)
    torch.testing.assert_close(got, torch.tensor([[100.0], [0.5], [200.5]], dtype=F64))


def test_a_forgiving_linear_solver_is_what_the_one_within_it_is() -> None:
    class Foreign(ik.LinearSolver):
        """One of a plugin: its claims are judged."""

    lu = get_linear_solver("lu")
    ours, theirs = (Forgive().rule(ik.Implicit(linear_solver=s)) for s in (lu, Foreign()))
    seen = []
    for rule in (ours, theirs):
        request = SimpleNamespace(
            system=SimpleNamespace(problem=ik.FixedPoint(lambda z: z)), solve=lambda solver, **o: seen.append(solver)
        )
        rule.attach(request)
    assert [s.checks_itself for s in seen] == [True, False] and [s.factors for s in seen] == [True, False]


def test_several_cotangents_at_once_are_forgiven_one_by_one() -> None:
    layer = _layer()
    x = GOOD[:2].clone()
    z = layer(x)
    seeds = torch.randn(3, 2, 1, dtype=F64)
    (got,) = torch.autograd.grad(z, layer.cell.w, seeds, is_grads_batched=True)
    torch.testing.assert_close(got, (seeds / (1 - x)).sum(1), rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore::implicitkit_deq.ForgivenWarning")
def test_any_share_of_singular_backwards_is_forgiven_and_not_of_unsolved_samples() -> None:
    layer = DEQ(Switch(), (1,), rule=ik.Implicit(linear_solver="gmres"))
    layer(torch.ones(4, 1, dtype=F64)).sum().backward()
    torch.testing.assert_close(layer.cell.w.grad, torch.tensor([4.0], dtype=F64))
    with pytest.raises(ik.ConvergenceError, match="did not converge"):
        _layer()(torch.full((4, 1), -2.0, dtype=F64))


def test_too_many_failures_are_told_with_what_helps_then() -> None:
    layer, bad = _layer(), torch.full((4, 1), -2.0, dtype=F64)
    with pytest.raises(
        ik.ConvergenceError, match=r"a tenth of.*Pretraining\(calls=100, steps=8, deepest=20\).*share=1"
    ) as first:
        layer(bad)
    assert first.value.solution is not None and len(first.value.samples) == 4
    layer(GOOD[:4])
    with pytest.raises(ik.ConvergenceError, match=r"has lost the equilibria: add jacobian_penalty.*share=1"):
        layer(bad)


@pytest.mark.parametrize(
    ("asked", "said", "not_said"),
    [
        ({"callback": lambda step, z, norm: step > 1}, "because a callback stopped them", "equilibri|bound"),
        ({"max_steps": 2}, r"because they had no more than max_steps=2", "^$"),
    ],
    ids=["callback", "max_steps"],
)
def test_what_was_asked_for_is_not_called_a_lack_of_equilibria(asked: Any, said: str, not_said: str) -> None:
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), **asked), torch.randn(5, 4, dtype=F64)
    with pytest.raises(ik.ConvergenceError, match=said) as error:
        layer(x)
    assert not re.search(not_said, str(error.value).partition("This is")[2])
    layer.train_settings = layer.train_settings.changed({"on_failure": Forgive(share=1)})
    with pytest.warns(ForgivenWarning, match=f"5 of 5 samples of a training call are not solved, {said}"):
        layer(x)


class _Normalised(nn.Module):
    """w z + x, with a normalisation that is not used."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.w = norm, nn.Parameter(torch.ones(1, dtype=F64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 0, 0.5 * z, self.w * z + x)


@pytest.mark.parametrize(
    ("cell", "normalised"),
    [
        (_Normalised(nn.GroupNorm(1, 2)), True),
        (_Normalised(nn.Sequential(nn.LayerNorm(3))), True),
        (_Normalised(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), False),
        ((lambda f: lambda z, x: f(z, x))(_Normalised(nn.RMSNorm(2))), True),
        (_Normalised(nn.GroupNorm(1, 2)).forward, True),
        ((lambda f: lambda z, x: f(z, x))(_Normalised(nn.Linear(2, 2))), False),
    ],
    ids=["module", "below", "of a weight", "function", "method", "function, plain"],
)
def test_where_something_is_normalised_its_gain_is_to_be_bounded(cell: Any, normalised: bool) -> None:
    """``n(W z)`` does not know how large ``W`` is: a training that has lost its equilibria is told so, and a monitor's."""
    wanted = (
        r"bound that normalisation's gain \(bound_weights" if normalised else "add jacobian_penalty.*bound the weights"
    )
    layer = DEQ(cell, (1,), solver="picard", max_steps=40)
    layer(torch.ones(4, 1, dtype=F64))
    with pytest.raises(ik.ConvergenceError, match=f"Training has lost the equilibria: .*{wanted}"):
        layer(torch.full((4, 1), -2.0, dtype=F64))
    layer = DEQ(cell, (1,), solver="picard", max_steps=40, on_failure=Forgive(share=1))
    with Monitor(layer, jacobian=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)
        with pytest.warns(StabilityWarning, match=f"To keep its equilibria .*{wanted}"):
            layer(torch.full((4, 1), -2.0, dtype=F64))


def test_a_function_that_holds_a_name_without_a_value_is_no_reason_to_say_nothing() -> None:
    later: Any

    def cell(z: Tensor) -> Tensor:
        return later(z)

    assert "bound the weights" in cure(cell)
    later = torch.tanh
    assert "bound the weights" in cure(cell) and "bound the weights" in cure(torch.tanh)


def test_the_advice_for_a_gain_can_be_taken() -> None:
    cell, c = nn.GroupNorm(2, 4), 4
    bound_weights(cell, 0.1 * c**0.5, "frobenius", weights=[cell.weight])
    torch.testing.assert_close(cell.weight, torch.full((c,), 0.1))


def test_a_monitor_counts_the_forgiven() -> None:
    layer = _layer()
    with Monitor(layer, jacobian=False) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)
        with pytest.warns(StabilityWarning, match="have not converged"):
            layer(ONE_BAD)
    assert monitor.history[0][1]["unsolved"] == 1 and monitor.history[0][1]["converged"] == pytest.approx(5 / 6)


def test_bad_policies() -> None:
    for arguments in (
        {"share": 1.5},
        {"share": -0.1},
        {"backward_share": 2.0},
        {"derivative": "exact"},
        {"every": 0},
        {"amplification": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            Forgive(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_failure"):
        DEQ(Scalar(), (1,), on_failure="forgive")


# ------------------------------------------------------------------------------------------------------ it trains
class LayerNormOfReLU(nn.Module):
    """Bounded, so that it has equilibria (Brouwer), and far from contracting after a few steps."""

    def __init__(self, in_features: int, features: int) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(features, features), nn.Linear(in_features, features)
        self.norm = nn.LayerNorm(features)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.W(z) + self.U(x)))


@pytest.mark.parametrize(
    ("name", "rate", "steps", "goal", "missed"),
    [
        ("mlp", 1e-2, 60, 0.1, 0.01),
        pytest.param("mlp_f64", 1e-2, 40, 0.2, 0.01, marks=pytest.mark.slow),
        ("layer_norm", 1e-2, 15, 0.6, 0.1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*dearer ones are asked:implicitkit_deq.ForgivenWarning")
@pytest.mark.filterwarnings("ignore:.*would outweigh all others:implicitkit_deq.ForgivenWarning")
def test_an_unbounded_cell_trains_with_defaults(name: str, rate: float, steps: int, goal: float, missed: float) -> None:
    """``DEQ(cells.MLP(4, 16), rtol=1e-3)`` lost its equilibria after 11 to 28 steps while Anderson was all it tried."""
    torch.manual_seed(0)
    dtype = F64 if name == "mlp_f64" else torch.float32
    cell: nn.Module = LayerNormOfReLU(4, 16) if name == "layer_norm" else cells.MLP(4, 16, dtype=dtype)
    layer, head = DEQ(cell, (16,), rtol=1e-3), nn.Linear(16, 1, dtype=dtype)
    x = torch.randn(64, 4, dtype=dtype)
    y = torch.sin(x.sum(1, keepdim=True))
    optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], rate)
    unsolved = 0
    for _ in range(steps):
        loss = (head(layer(x)) - y).square().mean()
        assert layer.solution is not None
        unsolved += int((~layer.solution.converged).sum())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < goal
    assert unsolved <= missed * 64 * steps


# ----------------------------------------------------------------------------------------------- warm starts by sample
@pytest.mark.parametrize("how", ["init", "z0", "index alone"])
def test_a_sample_starts_where_it_ended_when_it_was_seen_last(how: str) -> None:
    torch.manual_seed(0)
    layer = DEQ(cells.MLP(4, 6, dtype=F64), init="last" if how == "init" else "zeros", rtol=1e-10)
    keyword: dict[str, Any] = {"z0": "last"} if how == "z0" else {}
    x = torch.randn(12, 4, dtype=F64)
    order = torch.randperm(12)
    for index in order.split(5):
        cold = layer(x[index], index=index, **keyword)
        assert int(layer.solution.steps.min()) > 0
        torch.testing.assert_close(cold, layer(x[index]), rtol=1e-8, atol=1e-9)
    for index in torch.randperm(12).split(4):  # other batches of the same samples
        layer(x[index], index=index, **keyword)
        assert int(layer.solution.steps.max()) == 0


def test_last_is_the_call_before_even_if_that_was_not_told() -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10)
    x = torch.randn(3, 4, dtype=F64)
    layer(x)
    layer(x, z0="last")
    assert int(layer.solution.steps.max()) == 0


def test_new_numbers_start_from_zeros_and_old_ones_are_kept() -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64), init="last", rtol=1e-10)
    x = torch.randn(3, 4, dtype=F64)
    layer(x[:2], index=torch.tensor([0, 7]))
    layer(x, index=torch.tensor([0, 7, 90]))
    assert layer.solution.steps[:2].tolist() == [0, 0] and int(layer.solution.steps[2]) > 0


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (torch.tensor([0.0, 1.0]), TypeError, r"integers.*got a tensor of torch\.float32"),
        ([0, 1], TypeError, "integers.*got list"),
        (torch.tensor([0]), ValueError, r"shape \(2,\)"),
        (torch.tensor([0, -1]), ValueError, "negative"),
        (torch.tensor([0, 2**60]), RuntimeError, "no room for .*not keys or hashes"),
    ],
)
def test_bad_sample_numbers(index: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DEQ(cells.MLP(4, 6), init="last")(torch.zeros(2, 4), index=index)


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ValueError, match='or "last"'):
        DEQ(cells.MLP(4, 6))(torch.zeros(2, 4), z0="best")


# ------------------------------------------------------------------------------------------------- modules among modules
def test_hooks_of_a_library_cell_fire_and_change_nothing() -> None:
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64)), torch.randn(3, 4, dtype=F64)
    plain = layer(x)
    counts = {"pre": 0, "forward": 0, "backward": 0}

    def hook(name: str) -> Any:
        def called(*_: Any) -> None:
            counts[name] += 1

        return called

    handles = [
        layer.cell.register_forward_pre_hook(hook("pre")),
        layer.cell.register_forward_hook(hook("forward")),
        layer.cell.register_full_backward_hook(hook("backward")),
    ]
    z = layer(x)
    z.sum().backward()
    assert counts["pre"] == counts["forward"] >= layer.solution.evaluations and counts["backward"] >= 1
    torch.testing.assert_close(z, plain)
    for handle in handles:
        handle.remove()
    before = dict(counts)
    layer(x)
    assert counts == before


def test_a_compiled_cell_is_used() -> None:
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64)), torch.randn(3, 4, dtype=F64)
    plain, calls = layer(x), []
    layer.cell.compile(backend=lambda module, inputs: calls.append(1) or module.forward)
    torch.testing.assert_close(layer(x), plain)
    assert calls


def test_the_private_names_of_torch_are_there() -> None:
    cell, found = nn.Linear(2, 2), []
    assert not compat.called_whole(cell) and not compat.called_whole(torch.tanh)
    for register in (
        cell.register_forward_pre_hook,
        cell.register_forward_hook,
        cell.register_full_backward_hook,
        cell.register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert compat.called_whole(cell), register.__name__
        handle.remove()
        assert not compat.called_whole(cell), register.__name__
    cell.compile(backend="eager")
    assert compat.called_whole(cell)

    handle = cell.register_forward_hook(lambda *_: None)
    assert compat.observed(cell)
    handle.remove()
    assert not compat.observed(cell)

    assert not compat.is_batched(torch.ones(2))
    torch.func.vmap(lambda t: found.append(compat.is_batched(t)) or t)(torch.ones(2))
    assert found == [True]

    nn.utils.spectral_norm(cell)
    nn.utils.prune.random_unstructured(cell, "bias", amount=1)
    hooks = {name: (key, hook) for key, name, hook in compat.hooks_that_set(cell)}
    assert list(hooks) == ["weight", "bias"]
    assert all(getattr(cell, compat.SETTING)[key] is hook for key, hook in hooks.values())
    assert not compat.autocast_on(torch.device("meta"))

    class Seen(torch.overrides.TorchFunctionMode):
        names: ClassVar[list[str]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Seen():
        with compat.unseen():
            torch.ones(2).add(1).numpy()
        torch.ones(2).sub(1)
    assert Seen.names[-1] == "sub" and not {"add", "numpy"} & set(Seen.names)


class _Plain(nn.Module):
    """A cell that is no Cell."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(6, 6, dtype=F64), nn.Linear(4, 6, dtype=F64)
        with torch.no_grad():
            self.W.weight.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


def _sharded_cells(rank: int, store: str, world: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
    for make in (lambda: DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10), lambda: DEQ(_Plain(), (6,), rtol=1e-10)):
        torch.manual_seed(0)
        layer = make()
        # other samples on each process, some of them harder: solves take different numbers of evaluations
        parts = [torch.randn(3, 4, dtype=F64) * 8**i for i in range(world)]
        want = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
        for part in parts:
            layer.zero_grad()
            layer(part).square().sum().backward()
            for name, p in layer.named_parameters():
                want[name] += p.grad / world
        layer.zero_grad()
        fully_shard(layer.cell)
        for _ in range(2):  # two steps: nothing is left behind by the first
            layer.zero_grad()
            layer(parts[rank]).square().sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), want[name], rtol=1e-7, atol=1e-9)
        assert "forward" not in layer.cell.__dict__
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sharded_cell(world: int) -> None:
    """``fully_shard(layer.cell)``: the gradients of one process, though each takes as many evaluations as it needs."""
    arguments = (tempfile.mktemp(), world)
    torch.multiprocessing.start_processes(_sharded_cells, arguments, nprocs=world, start_method="fork")


def _sharded(rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = DEQ(cells.MLP(4, 6, dtype=F64), rtol=1e-10)
    x = torch.randn(3, 4, dtype=F64)
    layer(x).sum().backward()
    want = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    fully_shard(layer)
    layer(x).sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want[name], rtol=1e-7, atol=1e-9)
    dist.destroy_process_group()


def test_a_sharded_layer() -> None:
    """``fully_shard(layer)`` on two processes: the gradients of one process."""
    torch.multiprocessing.start_processes(_sharded, (tempfile.mktemp(),), nprocs=2, start_method="fork")


def test_state_dicts_hold_each_parameter_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deq = DEQ(cells.MLP(4, 6))
            self.head = nn.Linear(6, 1)

    model = Model()
    assert len(model.state_dict()) == len({id(p) for p in model.parameters()}) == 5


def test_shapes_on_the_meta_device() -> None:
    layer = DEQ(cells.TrellisNet(4, 6)).to("meta")
    out = layer(torch.zeros(2, 5, 4, device="meta"))
    assert out.device.type == "meta" and out.shape == (2, 5, 6)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo itself looks at it
def test_compile_sees_one_opaque_call() -> None:
    layer, head = DEQ(cells.MLP(4, 6, dtype=F64)), nn.Linear(6, 1, dtype=F64)
    x = torch.randn(3, 4, dtype=F64)
    run = lambda x: head(layer(torch.sin(x)))  # noqa: E731
    explained = torch._dynamo.explain(run)(x)
    assert explained.graph_break_count <= 1 and explained.graph_count <= 2
    torch.testing.assert_close(torch.compile(run, backend="eager")(x), run(x))


# --------------------------------------------------------------------------------------------------------- messages
def test_one_unbatched_sample_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"layer\(x.unsqueeze\(0\)\)\[0\]"):
        DEQ(cells.MLP(4, 6))(torch.zeros(4))


class Deaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(6, 6)
        with torch.no_grad():
            self.W.weight.mul_(0.3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z))


def test_warnings_stand_at_the_line_of_the_caller() -> None:
    """Not at one of ours, which would also be the same for every layer, and so shown for the first alone."""
    told = Monitor(DEQ(Deaf(), (6,)), krylov=4, radius_limit=1e-9)
    singular = DEQ(Switch(), (1,), rule=ik.Implicit(linear_solver="gmres"))
    with warnings.catch_warnings(record=True) as said, told:
        warnings.simplefilter("always")
        _layer()(ONE_BAD)
        singular(torch.tensor([[0.1], [1.0]], dtype=F64)).sum().backward()
        told.layer(torch.randn(5, 6))
        DEQ(Deaf(), (5, 6), solver="lbfgs", causal=True, on_failure="ignore", max_steps=2)(torch.randn(2, 5, 6))
    kinds = {ForgivenWarning, IgnoredInputWarning, StabilityWarning, CausalityWarning}
    assert {w.category for w in said} == kinds and sum(w.category is ForgivenWarning for w in said) == 2
    assert {w.filename for w in said} == {__file__}


def test_a_cell_that_ignores_its_input_is_told_so() -> None:
    with pytest.warns(IgnoredInputWarning, match="Deaf does not use its inputs"):
        DEQ(Deaf(), (6,))(torch.randn(3, 4))


def test_one_unbatched_sample_of_any_cell_is_told_so() -> None:
    """A linear layer takes a vector for one sample, and what comes out fits every row of the state."""
    layer = DEQ(Dense(), (6,))
    layer(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"inputs of shape \(3,\) are 3 samples, but Dense takes all .*unsqueeze"):
        layer(torch.randn(3))
    with torch.no_grad(), pytest.raises(ValueError, match="3 samples"):
        layer.eval()(torch.randn(3))
    times = DEQ(lambda z, x: torch.tanh(z * x.unsqueeze(1) + 1), (6,))
    for numbers in ([0.1, 0.2, 0.3], [0.1, 0.1, 0.1]):  # a number a sample is as good an input as any
        assert times(torch.tensor(numbers)).shape == (3, 6)


@pytest.mark.parametrize("x", [torch.ones(3, 4), torch.randn(3, 4), torch.zeros(3, 4)])
def test_a_cell_that_listens_is_left_alone(x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DEQ(cells.MLP(4, 6))(x)
        with torch.no_grad():
            DEQ(cells.MLP(4, 6))(x)


# ------------------------------------------------------------------------------------------------- what is held
def test_the_last_solution_holds_neither_graph_nor_inputs() -> None:
    import gc
    import weakref

    layer, encoder = DEQ(cells.MLP(8, 8)), nn.Linear(8, 8)
    hidden = encoder(torch.randn(4, 8))
    seen, out = weakref.ref(hidden), layer(hidden)
    del hidden, out
    gc.collect()
    assert seen() is None and layer.solution is not None


class Dense(nn.Module):
    """tanh(W z + U x) for states of width 6 and inputs of width 3."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


@pytest.mark.parametrize(
    ("layer", "x", "said"),
    [
        (DEQ(cells.MLP(3, 6)), torch.zeros(5, 4), r"cell MLP was called with inputs \(5, 4\).*do not fit.*5x4 and 3x6"),
        (
            DEQ(Dense(), (6,)),
            torch.zeros(5, 4),
            r"cell Dense was called with z \(5, 6\), and then \(5, 4\).*5x4 and 3x6",
        ),
        (
            DEQ(Dense(), (7,)),
            torch.zeros(5, 3),
            r"cell Dense was called with z \(5, 7\), and then \(5, 3\).*5x7 and 6x6",
        ),
        (
            DEQ(cells.MLP(3, 6)),
            torch.zeros(5, 3, dtype=torch.float64),
            r"cell MLP was called with inputs torch\.float64, .*convert the inputs, x\.to\(dtype\)",
        ),
        (
            DEQ(Dense(), (6,)),
            torch.zeros(5, 3, dtype=torch.float64),
            r"cell Dense was called with z torch\.float64, and then torch\.float64.*x\.to\(dtype\)",
        ),
    ],
)
def test_widths_and_precisions_that_do_not_fit_are_named(layer: DEQ, x: Tensor, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        layer(x)


def test_a_cell_of_another_precision_than_the_inputs_is_told_of_dtype() -> None:
    table = nn.Embedding(4, 6, dtype=torch.float64)
    cell, numbers = (lambda z, i: 0.5 * torch.tanh(z) + table(i)), torch.arange(4)
    with pytest.raises(TypeError, match=r"returned dtype torch\.float64, .*say DEQ\(\.\.\., dtype=\.\.\.\)") as told:
        DEQ(cell, (6,))(numbers)
    assert "z0" not in str(told.value)
    assert DEQ(cell, (6,), dtype=torch.float64)(numbers).dtype == torch.float64


def test_other_errors_of_a_cell_are_its_own() -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        raise RuntimeError("no more of this")

    with pytest.raises(RuntimeError, match=r"^no more of this$"):
        DEQ(cell, (6,))(torch.zeros(5, 3))


def test_a_layer_where_a_map_is_wanted_is_named() -> None:
    layer = DEQ(cells.MLP(4, 6))
    x, z = torch.randn(2, 4), torch.zeros(2, 6)
    with pytest.raises(
        TypeError, match=r"MLP\.state_shape cannot be called with 2 input.*use layer\.cell.*first >> second"
    ):
        ik.fixed_point(layer, z, (x,), batch_dims=1)
