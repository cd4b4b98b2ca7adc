"""Checks of a solver's conduct: what comes in is left alone, what goes out is as promised; what only a method promises."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, trees
from implicitkit.foundation.trees import Layout
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solving.verbs import solve
from implicitkit.system import System
from implicitkit.testing.check import PROBLEMS, SOLVERS, Subject, all_converged, check, close, same
from implicitkit.testing.common import add_common_checks
from implicitkit.testing.known import Known, known_problems, turning

_EQUATIONS = ("root", "fixed_point", "steady_state")  # Jacobians of the others are symmetric, or not square
_NESTED = (4, 5, 8)  # in which evaluations a function solves another problem: some are the driver's own


# ------------------------------------------------------------------------------------------------- tensors as they came
@check(
    "Create tensors with z.new_* / *_like, convert what comes back from NumPy with torch.as_tensor(..., dtype=z.dtype). "
    "Not solved in float32? Take steps of differences and tolerances from torch.finfo(z.dtype).eps, or take derivatives "
    "from f: f.jacobian(z), f.jvp(z, v)."
)
def keeps_dtype_and_device(subject: Subject) -> None:
    """float32 and float64 come back as they came, on every device there is, whatever torch's default is."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    default = torch.get_default_dtype()
    try:
        for dtype, other in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
            torch.set_default_dtype(other)
            _keeps(subject, dtype, devices)
    finally:
        torch.set_default_dtype(default)


def _keeps(subject: Subject, dtype: torch.dtype, devices: list[str]) -> None:
    for device in devices:
        for known in known_problems(subject.kind, batch=2, size=subject.size, dtype=dtype, device=device):
            solution = subject.solve(known, on_failure="ignore")
            assert solution.value.dtype == dtype, f"{known.name}: {dtype} came back as {solution.value.dtype}"
            assert solution.value.device == known.z0.device, f"{known.name}: came back on {solution.value.device}"
            all_converged(solution, known)
            close(solution.value, known.solution, subject.tolerance(known), f"{known.name} in {dtype}: the solution")


@check("Never write into z or into what f returned (no z += d, no torch.add(out=z)): make new tensors.")
def does_not_change_its_input(subject: Subject) -> None:
    """``z0`` and the arguments are unchanged, and so is their memory."""
    for known in subject.known():
        z0, theta = known.z0.clone(), known.theta.clone()
        versions = z0._version, theta._version
        solution = subject.solve(known, theta, z0=z0)
        assert torch.equal(z0, known.z0) and torch.equal(theta, known.theta), f"{known.name}: input was written to"
        assert (z0._version, theta._version) == versions, f"{known.name}: input was written to (version counter)"
        kept = solution.value.detach().clone()
        subject.solve(known, known.theta + 1)
        assert torch.equal(solution.value, kept), f"{known.name}: a later solve changed an earlier solution"


@check("Keep no state between solves (in self, in globals), and draw no random numbers without a fixed generator.")
def is_deterministic(subject: Subject) -> None:
    """A second solve takes the same steps to the same point but for rounding, at its end and on the way there."""
    for known in subject.known():
        for limit in (2, None):
            first, second = (subject.solve(known, max_steps=limit, on_failure="ignore") for _ in range(2))
            same(first, second, f"{known.name}, once more")


@check(
    "What is counted is every call of f: the outcome of a Solver has evaluations and sample_evaluations, those of f."
)
def counts_evaluations(subject: Subject) -> None:
    """``solution.evaluations`` is how often the function was called, but for a look or two that the solve itself takes."""
    for known in subject.known():
        function, calls = known.problem.function, 0

        def counted(z: Tensor, theta: Tensor, function: Any = function) -> Any:
            nonlocal calls
            calls += 1
            return function(z, theta)

        problem = PROBLEMS[known.problem.kind.name](counted)
        tolerance = max(1e-6, subject.accuracy)
        solution = solve(
            problem, known.z0, (known.theta,), solver=subject.solver, batch_dims=1, rtol=tolerance, atol=tolerance
        )
        told = solution.evaluations
        assert calls - 2 <= told <= calls, f"{known.name}: {told} evaluations are told of, and there were {calls}"


@check(
    "Keep what a solve remembers in the state that init and step return, never on self: solves are nested in solves."
)
def can_be_nested(subject: Subject) -> None:
    """A solve that begins and ends inside the function of another, by the same solver, leaves that one as it was."""
    known = subject.known(batch=3)[1]
    function = known.problem.function
    plain = subject.solve(known, in_dims=None)
    for place in _NESTED:
        calls = 0

        def solves_another(z: Tensor, theta: Tensor, place: int = place) -> Any:
            nonlocal calls
            calls += 1
            if calls == place:
                subject.solve(subject.known(batch=3)[0], in_dims=None)
            return function(z, theta)

        nested = subject.solve(replace(known, problem=PROBLEMS[known.problem.kind.name](solves_another)), in_dims=None)
        assert calls > 3, f"the function was called {calls} times only: the solve cannot have been right"
        same(plain, nested, f"{known.name}, with another solve in its function")


@check(
    "Accept any pytree: the driver packs it; a black box that remembers shapes must take them from its z0.",
    lambda solver: solver.max_size is None or solver.max_size >= 4,
)
def solves_pytrees(subject: Subject) -> None:
    """A state that is a dictionary of tensors of several shapes is solved."""
    known = subject.known()[0]
    tolerance = subject.rtol()

    def join(tree: dict[str, Tensor]) -> Tensor:
        return torch.cat([tree["a"].flatten(1), tree["b"]], 1)

    def split(z: Tensor) -> dict[str, Tensor]:
        return {"a": z[:, :3].reshape(-1, 3, 1), "b": z[:, 3:]}

    function = known.problem.function
    whole = known.problem.kind.minimisation

    def on_tree(tree: dict[str, Tensor], theta: Tensor) -> Any:
        out = function(join(tree), theta)
        return out if whole else split(out)

    problem = PROBLEMS[known.problem.kind.name](on_tree)
    solution = solve(
        problem, split(known.z0), (known.theta,), solver=subject.solver, batch_dims=1, rtol=tolerance, atol=tolerance
    )
    close(join(solution.value), known.solution, subject.tolerance(known), "the solution")


@check(
    "Row i of f.jacobian(z) is the derivative of equation i, and f.jvp(z, v) is that matrix times v: the transposed is "
    "another matrix. A step is -J^{-1} F, torch.linalg.solve(J, -F.unsqueeze(-1)).",
    lambda solver: solver.solves in _EQUATIONS and (solver.max_size is None or solver.max_size >= 2),
)
def takes_the_jacobian_as_it_is(subject: Subject) -> None:
    """An equation whose Jacobian is far from its transposed is solved by all that ask for derivatives of ``f``."""
    known, asked = turning(subject.kind, batch=3, size=subject.size), False
    function = known.problem.function

    def seen(z: Tensor, b: Tensor) -> Any:
        nonlocal asked
        asked = asked or z.requires_grad or compat.transforms_active()
        return function(z, b)

    solution = subject.solve(replace(known, problem=PROBLEMS[subject.kind](seen)), on_failure="ignore")
    if asked:
        all_converged(solution, known)


add_common_checks(SOLVERS)


# ------------------------------------------------------------------------------------------- what only a Method promises
_FAR = 1e3  # from where a sample begins in other tests


def _is_method(solver: Any) -> bool:
    return isinstance(solver, Method)


def _function(subject: Subject, known: Known, z: Tensor, theta: Tensor) -> Evaluations:
    """What a method sees of a known problem at ``z``."""
    system = System.at(known.problem, Layout(z, 1), z, (theta,), (0,))
    f = Evaluations(system, system.lifted.theta, subject.solver.solves)
    f.norm = f.residual(z).norm(dim=1)
    f.best, f.best_norm = z, f.norm
    return f


def _steps(subject: Subject) -> Iterator[tuple[str, Evaluations, Tensor, Any]]:
    """The first three steps of a method, on plain matrices: name, function, point and state before each."""
    for known in subject.known(batch=3):
        for f, z, state in _steps_from(subject, known, known.z0):
            yield known.name, f, z, state


def _steps_from(subject: Subject, known: Known, z: Tensor) -> Iterator[tuple[Evaluations, Tensor, Any]]:
    f = _function(subject, known, z, known.theta)
    state = subject.solver.init(f, z)
    for _ in range(3):
        yield f, z, state
        z, state = subject.solver.step(f, z, state)
        f.norm = f.residual(z).norm(dim=1)
        f.best, f.best_norm = z, f.norm


@check("Return z_next as a new tensor of the shape, dtype and device of z, without a graph.", _is_method)
def step_returns_a_new_point(subject: Subject) -> None:
    """``step`` returns a tensor like ``z``, not ``z`` itself changed, and writes into nothing it was given."""
    for name, f, z, state in _steps(subject):
        before, value = z._version, f(z)
        output = value._version
        z_next, _ = subject.solver.step(f, z, state)
        assert isinstance(z_next, Tensor), f"{name}: step returned {type(z_next).__name__} instead of a tensor"
        assert z_next.shape == z.shape, f"{name}: step returned shape {tuple(z_next.shape)} for {tuple(z.shape)}"
        assert z_next.dtype == z.dtype and z_next.device == z.device, f"{name}: step returned {z_next.dtype}"
        assert not z_next.requires_grad, f"{name}: what step returned carries a graph"
        assert z._version == before, f"{name}: step wrote into z"
        assert value._version == output, f"{name}: step wrote into what f returned"


@check(
    "Every tensor in the state has the batch as its first dimension; keep counters that all samples share as Python "
    "numbers, or override Method.select. A norm or a step length over the whole batch? Take it with dim=1, keepdim=True.",
    _is_method,
)
def step_is_per_sample(subject: Subject) -> None:
    """``select`` takes the rows of the samples that go on: the step of a part is the part of the step."""
    keep = torch.tensor([1, 2], device="cpu")
    for known in subject.known(batch=3):
        for name, f, z, state in _steps(subject):
            if name != known.name:
                continue
            for leaf in trees.tree_flatten(state)[0]:
                if isinstance(leaf, Tensor) and type(subject.solver).select is Method.select:
                    assert leaf.ndim == 0 or leaf.shape[0] == 3, f"{name}: a state tensor has shape {tuple(leaf.shape)}"
            small = _function(subject, known, z[keep], known.theta[keep])
            part = subject.solver.select(copy.deepcopy(state), keep)
            whole, _ = subject.solver.step(f, z, copy.deepcopy(state))
            selected, _ = subject.solver.step(small, z[keep], part)
            close(selected, whole[keep], 1e-8, f"{name}: the step of sample 1 or 2")


@check(
    "One sample that is far away changes the steps of the others: a threshold, a step length or a choice between ways is "
    "taken for the whole batch (max(), any(), norm() without dim=1). Decide row by row, with torch.where.",
    _is_method,
)
def a_far_sample_changes_no_other(subject: Subject) -> None:
    """The first steps of two samples are the same beside a third that begins near and beside one that begins far away; and
    beside one that is thrown far to the other side of its solution on its way, where what it remembers points elsewhere."""
    for known in subject.known(batch=3):
        far = known.z0 + torch.tensor([[_FAR], [0.0], [0.0]], dtype=known.z0.dtype, device=known.z0.device)
        beside_near, beside_far = ([z for _, z, _ in _steps_from(subject, known, start)] for start in (known.z0, far))
        for number, (near, away) in enumerate(zip(beside_near, beside_far, strict=True)):
            close(away[1:], near[1:], 1e-8, f"{known.name}: after {number} steps, sample 1 or 2")
        for f, z, state in _steps_from(subject, known, known.z0):
            thrown = z.clone()
            thrown[0] = known.solution[0] - _FAR * (z[0] - known.solution[0])
            beside_it = _function(subject, known, thrown, known.theta)
            beside, _ = subject.solver.step(beside_it, thrown, copy.deepcopy(state))
            whole, _ = subject.solver.step(f, z, copy.deepcopy(state))
            close(beside[1:], whole[1:], 1e-8, f"{known.name}: beside one that turns back, the step of sample 1 or 2")
