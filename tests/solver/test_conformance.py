"""Every built-in solver passes the conformance suite, and every check finds a solver that is broken in its way."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.testing import CHECKS, ConformanceError, SolverCheck, check_solver, conformance, known_problems
from implicitkit.testing.check import NATIVE
from implicitkit.testing.known import KNOWN

# those of constrained problems and programs: tests/contract/test_suites_of_parts.py
OF_EQUATIONS = [name for name in ik.solvers() if ik.extend.get_solver(name).solves in NATIVE]


# SciPy's methods, of which there are many, run through the suite in test_scipy_solvers.py; nelder_mead, which compares
# values only and cannot reach the accuracy of the others, in test_direct_search.py; integrate follows a flow to its rest
@pytest.mark.one_in(3)
@ik.testing.parametrize_with_checks(
    [name for name in OF_EQUATIONS if not name.startswith("scipy.") and name not in ("nelder_mead", "integrate")]
)
def test_conformance(solver: Any, check: SolverCheck) -> None:
    check(solver)


@pytest.mark.one_in(7)
@ik.testing.parametrize_with_checks(["integrate"])
def test_conformance_of_integrate(solver: Any, check: SolverCheck) -> None:
    check(solver)


# ----------------------------------------------------------------------------------------------------- broken solvers
# Each is Picard's iteration, right but for one thing, and is found out by the check that it is listed under.
@dataclass(frozen=True)
class Good(ik.Method):
    name: ClassVar[str] = "good"
    solves: ClassVar[str] = "fixed_point"

    @property
    def differentiable(self) -> bool:
        return True

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z), state


class WrongSign(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return z - 0.5 * (f(z) - z), state


class GivesUpEarly(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        return (0,)

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return (f(z) if state[0] < 8 else z.clone()), (state[0] + 1,)


class MixesRows(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        step = f(z) - z
        return z + step / (1 + z.norm()), state


class OneFarSampleRules(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        step = f(z) - z
        return z + (0.1 * step if float(step.abs().max()) > 100.0 else step), state


class TurnsRoundTogether(Good):
    """Momentum whose sign is that of one sum over the whole batch."""

    def init(self, f: Any, z: Tensor) -> Any:
        return torch.zeros_like(z)

    def step(self, f: Any, z: Tensor, velocity: Any) -> tuple[Tensor, Any]:
        step = f(z) - z
        velocity = step + 0.1 * (step * velocity).sum().sign() * velocity
        return z + velocity, velocity


class FirstSampleRules(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        step = f(z) - z
        return z + step / (1 + 3 * z[:1].norm()), state


class SpreadsNaN(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z) + 0 * f(z).sum(), state


class ChangesItsInput(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        z.copy_(f(z))
        return z.clone(), state


class Random(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return z + (0.5 + 0.5 * torch.rand_like(z[:, :1])) * (f(z) - z), state


class DoublePrecisionOnly(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z).double(), state


class RemembersItsFirstSolve(Good):
    seen: ClassVar[list[Tensor]] = []

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.seen.append(z)
        return z + (0.5 + 0.5 / len(self.seen)) * (f(z) - z), state


class SharedState(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        return torch.zeros(z.shape[1])  # of no sample

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z), state


class LosesTheHistory(Good):
    """Momentum whose state is not selected: after dropping, the wrong samples' history is used."""

    def init(self, f: Any, z: Tensor) -> Any:
        return torch.zeros_like(z)

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        step = f(z) - z + 0.1 * state
        return z + step, step

    def select(self, state: Any, index: Tensor) -> Any:
        return state[: len(index)]


class ReturnsOneRow(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z)[:1], state


class CarriesAGraph(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        with torch.enable_grad():
            return f(z) * torch.ones(1, dtype=z.dtype, requires_grad=True), state


class CannotBeCopied(Good):
    def __reduce__(self) -> Any:
        raise TypeError("holds an open file")


class BeginsElsewhere(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        return torch.full_like(z, 0.5)

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(state), f(state)


class DropsADimension(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        d = (f(z) - z).squeeze()
        return z + (d if len(z) > 1 else d[None]), state


class MovesFourUnknowns(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return torch.cat([f(z)[:, :4], z[:, 4:]], 1), state


class CutsItsGraph(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return z.detach() + 0.9 * (f(z) - z), state


class Reseeds(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        return z + (1 - 0.1 * torch.rand(1, dtype=z.dtype)) * (f(z) - z), state


class StepsInTheDefaultDtype(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return z + torch.where(z > 0, 0.9, 0.8) * (f(z) - z), state


class StepsOnTheDefaultDevice(Good):
    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z) * torch.ones(z.shape[1], dtype=z.dtype), state


class SetsTheDefaultDtype(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        torch.set_default_dtype(z.dtype)
        return ()


class RemembersOnItself(Good):
    last: Any = None

    def init(self, f: Any, z: Tensor) -> Any:
        object.__setattr__(self, "last", torch.zeros_like(z))

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        object.__setattr__(self, "last", f(z) - z + 0.1 * self.last)
        return z + self.last, state

    def select(self, state: Any, index: Tensor) -> Any:
        object.__setattr__(self, "last", self.last[index])


class Sweeps(ik.extend.Solver):
    """Picard's iteration as a whole, judged by itself; right in the 2-norm."""

    name: ClassVar[str] = "sweeps"
    solves: ClassVar[str] = "fixed_point"  # type: ignore[assignment]

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        z, norm = z0, f.residual(z0).norm(dim=1)
        for _ in range(100):
            z = torch.where((norm > options.atol).unsqueeze(1), f(z), z)
            norm = f.residual(z).norm(dim=1)
        return ik.extend.Outcome(
            z, norm, torch.full_like(norm, 100, dtype=torch.int64), (norm > options.atol).long(), f.evaluations
        )


class CountsNothing(Sweeps):
    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        outcome = super().run(f, z0, options)
        outcome.evaluations = 0
        return outcome


class HoldsWhatItWasGiven(Good):
    held: ClassVar[list[Any]] = []

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.held[:] = [f]
        return f(z), state


class SilencesNumPy(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        np.seterr(all="ignore")
        return ()


class IgnoresWarnings(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        warnings.simplefilter("ignore")
        return ()


class TakesAnyOption(Good):
    def __init__(self, **options: Any) -> None:
        pass


class StopsNeither(Sweeps):
    """Its loop ends on convergence only."""

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        z = z0
        while not bool((f.residual(z).norm(dim=1) <= options.atol).all()):
            z = z - 0.5 * (z - f(z))
        return super().run(f, z, options)


def _sweeps_on(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    for _ in range(300):
        z0 = 0.5 * (z0 + f(z0))
    return ik.Found(z0)


def _claims_success(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    return ik.Found(z0, steps=1, message="success")


def _counts_wrongly(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    z = z0
    for _ in range(200):
        z = f(z)
    return ik.Found(z, steps=200)


def _returns_nan(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    for _ in range(max_steps):
        z0 = f(z0)
    return ik.Found(z0 / (f(z0) - z0).norm().le(1e-9), steps=max_steps)


def _swallows_errors(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    try:
        for _ in range(max_steps):
            z0 = f(z0)
    except Exception:
        pass
    return ik.Found(z0)


def _picard(f: Any, z: Tensor, atol: float, most: int) -> tuple[Tensor, int]:
    taken = 0
    while taken < most and float(f.residual(z).norm()) > atol:
        z, taken = f(z), taken + 1
    return z, taken


def _goes_on(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    return ik.Found(_picard(f, z0, atol, 300)[0])


def _counts_one(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    return ik.Found(_picard(f, z0, atol, max_steps)[0], steps=1)


def _counts_fourfold(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    z, taken = _picard(f, z0, atol, max_steps)
    return ik.Found(z, steps=min(4 * taken, max_steps))


def _swallows_interrupts(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    try:
        return ik.Found(_picard(f, z0, atol, max_steps)[0])
    except KeyboardInterrupt:
        return ik.Found(z0)


_BUFFER: dict[Any, Tensor] = {}


def _works_in_one_buffer(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    z, taken = _BUFFER.setdefault((z0.shape, z0.dtype), torch.empty_like(z0)).copy_(z0), 0
    while taken < max_steps and float(f.residual(z).norm(dim=-1).max()) > atol:
        z.copy_(f(z))
        taken += 1
    return ik.Found(z, steps=taken)


def _transposes(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Tensor:
    z = z0
    for _ in range(min(max_steps, 20)):
        z = z - torch.linalg.solve(torch.func.jacrev(f)(z).mT - torch.eye(len(z)).to(z), f(z) - z)
    return z


def _notes_the_day(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Tensor:
    os.environ["DAY_OF_THE_LAST_SOLVE"] = str(time.monotonic_ns())
    return _picard(f, z0, atol, max_steps)[0]


def _writes_to_standard_error(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Tensor:
    sys.stderr.write("solving")
    return _picard(f, z0, atol, max_steps)[0]


def _writes_past_python(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Tensor:
    os.write(2, b"solving")
    return _picard(f, z0, atol, max_steps)[0]


def _black_box(find: Any, batch: str = "loop", solves: str = "fixed_point") -> ik.extend.BlackBox:
    return ik.extend.BlackBox(find, find.__name__, solves, batch)


BROKEN = [
    ("finds_known_solutions", WrongSign()),
    ("finds_known_solutions", _black_box(_claims_success)),
    ("honours_tolerance", GivesUpEarly()),
    ("honours_max_steps", _black_box(_counts_wrongly)),
    ("batch_equals_loop", MixesRows()),
    ("step_is_per_sample", MixesRows()),
    ("a_far_sample_changes_no_other", OneFarSampleRules()),
    ("a_far_sample_changes_no_other", TurnsRoundTogether()),
    ("permutation_of_the_batch", FirstSampleRules()),
    ("nan_stays_in_its_sample", SpreadsNaN()),
    ("step_returns_a_new_point", ChangesItsInput()),
    ("step_returns_a_new_point", ReturnsOneRow()),
    ("step_returns_a_new_point", CarriesAGraph()),
    ("keeps_dtype_and_device", DoublePrecisionOnly()),
    ("is_deterministic", Random()),
    ("is_deterministic", RemembersItsFirstSolve()),
    ("step_is_per_sample", SharedState()),
    ("step_is_per_sample", LosesTheHistory()),
    ("errors_of_the_function_surface", _black_box(_swallows_errors)),
    ("copies_and_pickles", CannotBeCopied()),
    ("starts_where_it_is_told", BeginsElsewhere()),
    ("solves_one_unknown_and_many", DropsADimension()),
    ("solves_one_unknown_and_many", MovesFourUnknowns()),
    ("honours_the_norm", Sweeps()),
    ("gradient_of_the_steps", CutsItsGraph()),
    ("leaves_the_process_alone", Reseeds()),
    ("leaves_the_process_alone", SetsTheDefaultDtype()),
    ("keeps_dtype_and_device", StepsInTheDefaultDtype()),
    ("can_be_nested", RemembersOnItself()),
    ("counts_evaluations", CountsNothing()),
    ("keeps_nothing_alive", HoldsWhatItWasGiven()),
    ("leaves_the_process_alone", SilencesNumPy()),
    ("leaves_the_process_alone", IgnoresWarnings()),
    ("refuses_unknown_options", TakesAnyOption()),
    ("reports_failure", StopsNeither()),
    ("honours_tolerance", _black_box(_sweeps_on)),
    ("honours_max_steps", _black_box(_goes_on)),
    ("counts_steps", _black_box(_counts_one)),
    ("counts_steps", _black_box(_counts_fourfold)),
    ("errors_of_the_function_surface", _black_box(_swallows_interrupts)),
    ("can_be_nested", _black_box(_works_in_one_buffer, "native")),
    ("names_a_device", StepsOnTheDefaultDevice()),
    ("takes_the_jacobian_as_it_is", _black_box(_transposes)),
    ("leaves_the_process_alone", _black_box(_notes_the_day)),
    ("leaves_the_process_alone", _black_box(_writes_to_standard_error)),
    ("leaves_the_process_alone", _black_box(_writes_past_python)),
]


@pytest.mark.parametrize(
    ("name", "solver"), BROKEN, ids=[f"{n}-{getattr(s, 'name', '')}{i}" for i, (n, s) in enumerate(BROKEN)]
)
def test_broken_solver_is_found_out(name: str, solver: Any) -> None:
    default, errors = torch.get_default_dtype(), np.geterr()
    try:
        report = check_solver(solver, checks=[name], raise_on_failure=False)
    finally:
        torch.set_default_dtype(default)
        np.seterr(**errors)
    (result,) = report.results
    assert result.outcome == "failed", str(report)
    assert result.message and f"mend: {result.mend}" in str(report)
    assert result.mend.endswith(CHECKS[name].mend) or result.mend.startswith(("Go on to the", "what "))
    assert "of size one; name it" in result.mend or not isinstance(solver, DropsADimension)  # where its error is raised


def test_a_step_that_writes_into_its_point_is_named() -> None:
    """``f`` remembers its values by the point: the residual would stay that of the start."""
    with pytest.raises(TypeError, match=r"ChangesItsInput\.step wrote into the z"):
        ik.fixed_point(lambda z: 0.5 * torch.cos(z), torch.zeros(4, 1), solver=ChangesItsInput(), batch_dims=1)


def test_a_good_solver_passes_everything() -> None:
    report = check_solver(Good())
    assert report.passed and {r.outcome for r in report.results if r.check not in _OF_SOME} == {"passed"}, str(report)


_OF_SOME = ("refuses_unknown_options",)  # only of those that take any option


class MovesWhatItMade(Good):
    """It draws, counts and looks up on the default device, and moves what meets its point there."""

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        n = z.shape[1]
        drawn = torch.rand(n, n, generator=torch.Generator().manual_seed(0))
        mixed = (torch.eye(n) + 1e-3 * drawn).to(z)
        rows = torch.arange(n).flip(0)
        weight = torch.as_tensor(torch.tensor([0.5, 0.5]), device=z.device).to(z.device, z.dtype).sum()
        d = (f(z) - z)[:, rows][:, rows.tolist()] * weight
        return z + d + 0 * d @ mixed, state


def test_what_is_made_elsewhere_and_moved_is_right() -> None:
    report = check_solver(MovesWhatItMade(), checks=["names_a_device"], raise_on_failure=False)
    assert report.passed, str(report)


@dataclass(frozen=True)
class RoundsAtRandom(Good):
    """Two runs differ by rounding, as those of some libraries of linear algebra do."""

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return f(z) * (1 + 1e-15 * next(_ANY)), state


_ANY = itertools.cycle([0, 1, -1, 2, -2, 3, -3])


class HangsOnRounding(Good):
    """Each step by what rounding has made of the last one: a sample takes other steps in a batch than alone."""

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        d = f(z) - z
        size = (d @ torch.ones(d.shape[1], 7, dtype=d.dtype)).sum(1, keepdim=True)
        return z + (0.15 + 0.8 * (1e14 * size).frac().abs()) * d, state


def test_rounding_is_no_fault() -> None:
    assert check_solver(RoundsAtRandom()).passed
    assert check_solver(HangsOnRounding(), checks=["batch_equals_loop", "permutation_of_the_batch"]).passed


class AloneItStays(Good):
    """No step of a sample by itself."""

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return (f(z) if len(z) > 1 else z), state


def test_a_solve_that_does_not_converge_in_a_later_check_is_told_as_that() -> None:
    """It was advised to look for what the check looks for."""
    report = check_solver(AloneItStays(), checks=["batch_equals_loop"], raise_on_failure=False)
    assert report.results[0].mend.startswith("what keeps this solve from converging"), str(report)


def _newton_as_one_system(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    z, bound = z0, atol + rtol * float(f(z0).norm())
    for taken in range(max_steps):
        if not float(f(z).norm()) > bound:
            return ik.Found(z, steps=taken)
        z = z - torch.linalg.solve(f.jacobian(z), f(z))
    return ik.Found(z, steps=max_steps)


def _picard_on_rows(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
    z, steps = z0, torch.zeros(len(z0), dtype=torch.int64)
    for _ in range(max_steps):
        at_work = (f(z) - z).norm(dim=1) > atol + rtol * z.norm(dim=1)  # false for NaN
        if not bool(at_work.any()):
            break
        z, steps = torch.where(at_work[:, None], f(z), z), steps + at_work
    return ik.Found(z, steps=steps)


@pytest.mark.parametrize(
    ("find", "solves", "batch"), [(_newton_as_one_system, "root", "joint"), (_picard_on_rows, "fixed_point", "native")]
)
def test_samples_of_nan_change_no_tolerance_and_spoil_no_system(find: Any, solves: str, batch: str) -> None:
    assert check_solver(ik.extend.BlackBox(find, find.__name__, solves, batch)).passed


class ComparesValues(Good):
    """Gets no further than a search that compares values."""

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return torch.where(((f(z) - z).norm(dim=1) > 1e-8).unsqueeze(1), f(z), z.clone()), state


@pytest.mark.slow
def test_a_solver_that_comes_near_is_told_of_accuracy() -> None:
    report = check_solver(ComparesValues(), raise_on_failure=False)
    assert "It comes near" in report.failures[0].message and "accuracy=1e-0" in report.failures[0].mend
    assert check_solver(ComparesValues(), accuracy=1e-6).passed


def _gives_up(f: Any, z0: Tensor, **options: Any) -> Any:
    raise ZeroDivisionError("of its own")


def _returns_columns(f: Any, z0: Tensor, **options: Any) -> Tensor:
    return z0[:, :1]


def _exits(f: Any, z0: Tensor, **options: Any) -> Tensor:
    raise SystemExit(1)


def _newton(f: Any, z0: Tensor, max_steps: int) -> Tensor:
    z = z0.clone()
    for _ in range(min(max_steps, 12)):
        step: Tensor = torch.linalg.solve_ex(f.jacobian(z), f(z).unsqueeze(2)).result.squeeze(2)
        z = z - step
    return z


def _in_another_order(f: Any, z0: Tensor, *, max_steps: int, **options: Any) -> Tensor:
    return _newton(f, z0, max_steps).flip(0)


def _in_single_precision(f: Any, z0: Tensor, *, max_steps: int, **options: Any) -> Tensor:
    return _newton(f, z0, max_steps).float()


def _one_before_the_last(f: Any, z0: Tensor, *, max_steps: int, **options: Any) -> Tensor:
    z = before = z0
    for _ in range(min(max_steps, 12)):
        z, before = _newton(f, z, 1), z
        f(z)
        if bool((f(z).norm(dim=1) < 1e-12).all()):
            return before
    return before


def _five_steps(f: Any, z0: Tensor, *, max_steps: int, **options: Any) -> Tensor:
    return _newton(f, z0, min(max_steps, 5))


def _divides_by_zero(f: Any, z0: Tensor, **options: Any) -> Tensor:
    return z0 / z0


def _small_steps(f: Any, z0: Tensor, *, max_steps: int, **options: Any) -> ik.Found:
    for _ in range(max_steps):
        z0 = z0 - 1e-3 * f(z0)
    return ik.Found(z0, steps=max_steps)


class TakesTheMapForAResidual(Good):
    def init(self, f: Any, z: Tensor) -> Any:
        return torch.zeros_like(z)

    def step(self, f: Any, z: Tensor, velocity: Any) -> tuple[Tensor, Any]:
        velocity = 0.3 * velocity + f(z)
        return z + velocity, velocity


NAMED: dict[Any, tuple[str, str]] = {
    TakesTheMapForAResidual: ("nonfinite", "check signs and what f is"),
    _one_before_the_last: ("It was at the solution: f was evaluated there", "Return the point that was looked at last"),
    _five_steps: ("It ends there, too, where only rtol=0.5 is asked for", "Go on until"),
    _divides_by_zero: ("NaN", "look for divisions by zero"),
    _small_steps: ("In the first half of these steps", "go the right way, and are too short"),
    _gives_up: (
        r"raised ZeroDivisionError: of its own \(.*test_conformance\.py:\d+, in _gives_up\)",
        "what raises this",
    ),
    _exits: (r"SystemExit: 1 \(.*test_conformance\.py:\d+, in _exits\)", "what raises this"),
    _returns_columns: (r"of shape \(3, 1\).*\(.*test_conformance\.py:\d+, _returns_columns\)", "what it returns"),
    _in_another_order: ("Each sample alone is solved", "Row i of what is returned belongs to row i of z0"),
    _in_single_precision: ("It comes near", "computes in the dtype of z0"),
}


@pytest.mark.parametrize("find", NAMED, ids=lambda find: find.__name__)
def test_what_is_to_be_mended_follows_what_was_seen(find: Any) -> None:
    """And where: in the author's lines, not in those that look at what they return."""
    solver = find() if isinstance(find, type) else ik.extend.BlackBox(find, find.__name__, "root", "native")
    (result,) = check_solver(solver, checks=["finds_known_solutions"], raise_on_failure=False).results
    message, mend = NAMED[find]
    assert re.search(message, result.message) and mend in result.mend, (result.message, result.mend)
    if result.cause == "unsolved":
        with pytest.raises(AssertionError, match=re.escape(mend)):
            SolverCheck(CHECKS["finds_known_solutions"])(solver)


def test_what_cannot_be_copied_is_told_what_a_part_is() -> None:
    """And not of the line on which the suite has copied it."""
    (result,) = check_solver(CannotBeCopied(), checks=["copies_and_pickles"], raise_on_failure=False).results
    assert "a copy raises" in result.message and result.mend == CHECKS["copies_and_pickles"].mend


def test_one_cause_is_told_once() -> None:
    class Raises(Good):
        def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
            raise ZeroDivisionError("once")

    text = str(check_solver(Raises(), raise_on_failure=False))
    assert text.count("ZeroDivisionError: once") == 1 and "as in finds_known_solutions: mend that first" in text
    assert "mend: what raises this" in text


@pytest.mark.slow
def test_an_endless_solve_is_the_last() -> None:
    report = check_solver(StopsNeither(), raise_on_failure=False)
    failure = report.failures[-1]
    assert failure.check == "reports_failure" and "a solve does not end" in failure.message
    assert "stop after max_steps" in failure.message and report.results[-1].message == "not run: a solve does not end"


def test_checks_are_refused_where_assertions_are_left_out() -> None:
    """``python -O``: every solver would pass those that assert."""
    source = inspect.getsource(conformance)
    optimised: dict[str, Any] = {"__name__": conformance.__name__}
    exec(compile(source, conformance.__file__, "exec", optimize=1), optimised)
    for run in (
        lambda: optimised["check_solver"]("picard"),
        lambda: optimised["SolverCheck"](CHECKS["can_be_nested"])("picard"),
    ):
        with pytest.raises(RuntimeError, match="python -O"):
            run()


def test_nothing_checked_is_no_praise() -> None:
    report = check_solver("mirror_descent")
    assert str(report).startswith("solver 'mirror_descent': nothing was checked")


# ------------------------------------------------------------------------------------------------------- the interface
def test_error_lists_every_failure() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_solver(SpreadsNaN())
    report = caught.value.report
    assert report.failures and all(r.check in str(caught.value) for r in report.failures)


def test_expected_failures_are_reported_and_must_fail() -> None:
    report = check_solver(
        SpreadsNaN(), checks=["nan_stays_in_its_sample"], expected_failed_checks={"nan_stays_in_its_sample": "known"}
    )
    assert report.passed and report.results[0].outcome == "expected"
    with pytest.raises(ConformanceError, match="announced to fail"):
        check_solver("picard", checks=["is_deterministic"], expected_failed_checks={"is_deterministic": "known"})


@pytest.mark.parametrize(
    ("keywords", "error", "said"),
    [
        ({"solver": "picart"}, ik.UnknownNameError, "picard"),
        ({"solver": "picard", "checks": ["speed"]}, ValueError, "no check 'speed'"),
        ({"solver": "picard", "expected_failed_checks": {"speed": "x"}}, ValueError, "no check 'speed'"),
        ({"solver": "picard", "accuracy": 2.0}, ValueError, "accuracy"),
        ({"solver": "picard", "checks": []}, ValueError, "checks is empty"),
        ({"solver": print}, TypeError, "not registered"),
    ],
)
def test_bad_calls(keywords: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        check_solver(**keywords)


@pytest.mark.parametrize(("kind", "size"), list(itertools.product(KNOWN, (1, 4))))
def test_planted_solutions_solve_the_known_problems(kind: str, size: int) -> None:
    for known in known_problems(kind, batch=5, size=size):
        assert float(known.residual(known.solution, known.theta).abs().max()) < 1e-13, known.name
        assert float(known.residual(known.z0, known.theta).abs().min(1).values.max()) > 1e-3, known.name
        J = torch.func.vmap(torch.func.jacrev(lambda z, t, k=known: k.residual(z[None], t[None])[0]))(
            known.solution, known.theta
        )
        assert float(torch.linalg.cond(J).max()) < 20, known.name
