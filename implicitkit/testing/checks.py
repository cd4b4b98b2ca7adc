"""The checks of the conformance suite, one function each.

A check gets a :class:`Subject` and raises ``AssertionError`` with what it saw.  ``mend`` says what the author of a solver
should change.  Nothing here looks inside a solver but the two checks of ``Method.init`` and ``Method.step``.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit import trees
from implicitkit.errors import ConvergenceError
from implicitkit.lifting.lifted import lift
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.kind import as_kind
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.root import Root
from implicitkit.problem.steady_state import SteadyState
from implicitkit.solution import Solution, Status
from implicitkit.solver.catalogue import serves
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solving import solve
from implicitkit.system import System, check_output
from implicitkit.testing.known import KNOWN, Known, known_problems, unsolvable
from implicitkit.trees import Layout

__all__ = ["CHECKS", "Check", "Subject"]

_NATIVE = {
    "fixed_point": "fixed_point",
    "root": "root",
    "minimise": "argmin",
    "least_squares": "least_squares",
    "steady_state": "steady_state",
}
_PROBLEMS: dict[str, Callable[[Any], Problem]] = {
    "fixed_point": FixedPoint,
    "root": Root,
    "argmin": Argmin,
    "least_squares": LeastSquares,
    "steady_state": SteadyState,
}


@dataclass(frozen=True)
class Subject:
    """A solver under test.

    Attributes:
        solver: the configured object. accuracy: the tightest relative tolerance that is asked of it in float64.
    """

    solver: Any
    accuracy: float

    @property
    def kind(self) -> str:
        """The problem kind that the solver is made for."""
        return _NATIVE[self.solver.solves]

    @property
    def size(self) -> int:
        """Unknowns of one sample: 4, or what the solver is limited to."""
        return min(4, self.solver.max_size or 4)

    def known(self, kind: str | None = None, *, batch: int = 3, dtype: torch.dtype = torch.float64) -> list[Known]:
        """Problems with known solutions, of the solver's own kind unless told."""
        return known_problems(kind or self.kind, batch=batch, size=self.size, dtype=dtype)

    def solve(self, known: Known, theta: Tensor | None = None, **options: Any) -> Solution:
        """Solve a known problem as a batch."""
        tolerance = max(self.accuracy, torch.finfo(known.z0.dtype).eps ** (2 / 3))
        defaults = {"rtol": tolerance, "atol": tolerance, "batch_dims": 1, "in_dims": (0,), "solver": self.solver}
        args = (known.theta if theta is None else theta,)
        return solve(known.problem, options.pop("z0", known.z0), args, **(defaults | options))

    def tolerance(self, known: Known) -> float:
        """How far a solution within the tolerance of :meth:`solve` may be from the true one (condition below 20)."""
        rounding = 100 * torch.finfo(known.z0.dtype).eps
        tolerance = max(self.accuracy, torch.finfo(known.z0.dtype).eps ** (2 / 3))
        scale = known.residual(known.z0, known.theta).norm(dim=1).max() + known.solution.norm(dim=1).max()
        return 20 * (tolerance * (1 + float(scale)) + rounding)


@dataclass(frozen=True)
class Check:
    """One check: ``run(subject)`` raises if the solver does not pass; ``mend`` is advice to its author.

    ``applies(solver)``: does the check say anything about this solver?
    """

    name: str
    mend: str
    run: Callable[[Subject], None]
    applies: Callable[[Any], bool]

    @property
    def doc(self) -> str:
        """What is checked."""
        return " ".join((self.run.__doc__ or "").split())


CHECKS: dict[str, Check] = {}
"""Every check by name, in the order in which they run."""


def _check(
    mend: str, applies: Callable[[Any], bool] = lambda solver: True
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    def register(run: Callable[[Subject], None]) -> Callable[[Subject], None]:
        name = run.__name__
        # solvers of constrained problems are judged by the optimality conditions at every call, not by this suite
        CHECKS[name] = Check(name, mend, run, lambda solver: solver.solves in _NATIVE and applies(solver))
        return run

    return register


def _close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    worst = float((got - wanted).abs().max())
    assert worst <= tolerance, f"{what} is off by {worst:.3g} (allowed: {tolerance:.3g})"


def _converged(solution: Solution, known: Known) -> None:
    assert bool(solution.converged.all()), (
        f"{known.name}: status {[Status(s).name.lower() for s in solution.status.tolist()]}, "
        f"|F| = {[f'{r:.2g}' for r in solution.residual_norm.tolist()]} after {solution.steps.tolist()} steps"
        + (f" ({solution.message})" if solution.message else "")
    )


# ------------------------------------------------------------------------------------------------------ right and honest
@_check(
    "The step does not lead to the solution of well-conditioned problems: check signs (a root method sees the residual, a "
    "fixed-point method the map itself, a minimiser the gradient), and that the last point is the one returned."
)
def finds_known_solutions(subject: Subject) -> None:
    """The solutions of one linear and one nonlinear problem, planted, are found to the tolerance."""
    for known in subject.known():
        solution = subject.solve(known, on_failure="ignore")
        _converged(solution, known)
        _close(solution.value, known.solution, subject.tolerance(known), f"{known.name}: the solution")


@_check(
    "The solver serves this problem kind (see implicitkit.extend.serves), but does not solve it; register it with a "
    "narrower solves=... or make it robust there."
)
def serves_every_kind_it_claims(subject: Subject) -> None:
    """Every kind of problem that the solver may be given is solved, not only its own."""
    for kind in KNOWN:
        if kind != subject.kind and serves(subject.solver.solves, kind):
            for known in subject.known(kind):
                solution = subject.solve(known, rtol=max(1e-6, subject.accuracy), on_failure="ignore")
                _converged(solution, known)
                _close(solution.value, known.solution, 1e-3, f"{known.name}: the solution")


@_check(
    "The tolerance is that of the residual at the point returned: |F(z)| <= atol + rtol * scale. A black box must pass its "
    "rtol and atol on; a Method must not stop improving on its own."
)
def honours_tolerance(subject: Subject) -> None:
    """Asked for 1e-2, 1e-5 and the tightest, the residual at the point returned, evaluated afresh, is within it."""
    for known in subject.known():
        for rtol in (1e-2, 1e-5, subject.accuracy):
            if rtol < subject.accuracy:
                continue
            atol = subject.accuracy * 0.1
            solution = subject.solve(known, rtol=rtol, atol=atol, on_failure="ignore")
            _converged(solution, known)
            norm = known.residual(solution.value, known.theta).norm(dim=1)
            start = known.residual(known.z0, known.theta).norm(dim=1)
            scale = solution.value.norm(dim=1) if known.problem.kind.iteration else start
            bound = atol + rtol * scale
            assert bool((norm <= bound * (1 + 1e-6) + 1e-14).all()), (
                f"{known.name}: claimed |F| <= {bound.tolist()}, but |F| = {norm.tolist()} at the point returned"
            )
            _close(solution.residual_norm, norm, 1e-12 + 1e-6 * float(norm.max()), f"{known.name}: residual_norm")


@_check("Count one step for every iteration, and stop after max_steps of them.")
def honours_max_steps(subject: Subject) -> None:
    """With ``max_steps`` 1 and 2, no more steps are reported, and no success that the residual does not bear out."""
    for known in subject.known():
        for limit in (1, 2):
            solution = subject.solve(known, max_steps=limit, on_failure="ignore")
            assert int(solution.steps.max()) <= limit, f"{known.name}: {solution.steps.tolist()} steps of {limit}"
            norm = known.residual(solution.value, known.theta).norm(dim=1)
            start = known.residual(known.z0, known.theta).norm(dim=1)
            scale = solution.value.norm(dim=1) if known.problem.kind.iteration else start
            tolerance = max(subject.accuracy, torch.finfo(torch.float64).eps ** (2 / 3))
            wrong = solution.converged & (norm > 1.01 * tolerance * (1 + scale))
            assert not bool(wrong.any()), f"{known.name}: converged is claimed at |F| = {norm.tolist()}"


@_check(
    "A solver that cannot go on must say so: return the best point it has, or raise; never loop forever, and never return "
    "NaN where the start was finite."
)
def reports_failure(subject: Subject) -> None:
    """A problem without a solution raises ``ConvergenceError``; ignored, it is marked, and its point is finite."""
    kinds = [subject.kind] + (["root"] if as_kind(subject.kind).minimisation else [])
    for kind in kinds:
        problem, z0 = unsolvable(kind, batch=2, size=subject.size)
        options: dict[str, Any] = {"solver": subject.solver, "batch_dims": 1, "max_steps": 30}
        solution = solve(problem, z0, (), on_failure="ignore", **options)
        assert not bool(solution.converged.any()), f"{kind} without a solution: convergence is claimed"
        assert bool(torch.isfinite(solution.value).all()), (
            f"{kind} without a solution: the point returned is not finite"
        )
        assert bool(torch.isfinite(solution.residual_norm).all()), f"{kind} without a solution: |F| is not finite"
        try:
            solve(problem, z0, (), **options)
        except ConvergenceError as error:
            assert error.solution is not None
        else:
            raise AssertionError(f"{kind} without a solution: no ConvergenceError was raised")


@_check("Keep the point with the least residual, or start from z0 again when the iteration has run away.")
def never_worse_than_the_start(subject: Subject) -> None:
    """Stopped early, the residual is not larger than it was at ``z0``."""
    for known in subject.known():
        start = known.residual(known.z0, known.theta).norm(dim=1)
        for limit in (1, 3):
            solution = subject.solve(known, max_steps=limit, on_failure="ignore")
            norm = known.residual(solution.value, known.theta).norm(dim=1)
            assert bool((norm <= start * (1 + 1e-9)).all()), f"{known.name}: |F| {start.tolist()} -> {norm.tolist()}"


@_check("Evaluate f at the start, and return at once if the residual vanishes there.")
def stays_at_a_solution(subject: Subject) -> None:
    """Started at the solution, it returns the solution."""
    for known in subject.known():
        solution = subject.solve(known, z0=known.solution, atol=1e-9 if subject.accuracy < 1e-9 else subject.accuracy)
        _converged(solution, known)
        _close(solution.value, known.solution, subject.tolerance(known), f"{known.name}: the solution")


# ------------------------------------------------------------------------------------------------------------- batches
@_check(
    "Rows of z are independent samples: norms, inner products, step lengths and coefficients are per row (dim=1, keepdim), "
    "never over the whole matrix, and every tensor in the state has the batch as its first dimension."
)
def batch_equals_loop(subject: Subject) -> None:
    """A batch gives what its samples give one at a time."""
    for known in subject.known(batch=4):
        together = subject.solve(known)
        for i in range(4):
            alone = subject.solve(
                Known(
                    known.name,
                    known.problem,
                    known.z0[i : i + 1],
                    known.theta[i : i + 1],
                    known.solution,
                    known.residual,
                )
            )
            what = f"{known.name}: sample {i} of the batch, against the sample alone,"
            _close(together.value[i], alone.value[0], 2 * subject.tolerance(known), what)
            if isinstance(subject.solver, Method):
                a, b = int(together.steps[i]), int(alone.steps[0])
                assert abs(a - b) <= max(1, 0.1 * b), f"{what} took {a} steps instead of {b}"


@_check("Something depends on where a sample stands in the batch: look for z[0], for loops, for state that is shared.")
def permutation_of_the_batch(subject: Subject) -> None:
    """Samples in another order give the same solutions in that order."""
    order = torch.tensor([2, 0, 3, 1])
    for known in subject.known(batch=4):
        plain = subject.solve(known)
        permuted = subject.solve(known, known.theta[order], z0=known.z0[order])
        _close(permuted.value, plain.value[order], 2 * subject.tolerance(known), f"{known.name}: the permuted solution")
        if isinstance(subject.solver, Method):
            difference = (permuted.steps - plain.steps[order]).abs().max()
            assert int(difference) <= 1, f"{known.name}: steps {permuted.steps.tolist()} after {plain.steps.tolist()}"


@_check(
    "NaN spreads over the batch: a sum, mean, max or matrix product mixes rows, or a decomposition raises for the whole "
    "batch when one matrix is not finite. Work row by row and use torch.where."
)
def nan_stays_in_its_sample(subject: Subject) -> None:
    """One sample whose argument is NaN fails; the others are solved as if it were not there."""
    for known in subject.known(batch=4):
        theta = known.theta.clone()
        theta[1] = torch.nan
        others = torch.tensor([0, 2, 3])
        for dropped in (
            True,
            False,
        ):  # with in_dims the driver drops the sample that has failed, else it stays in sight
            solution = subject.solve(known, theta, in_dims=(0,) if dropped else None, on_failure="ignore")
            assert not bool(solution.converged[1]), f"{known.name}: the sample with NaN is called converged"
            assert bool(torch.isfinite(solution.value[1]).all()), f"{known.name}: the start of the NaN sample is lost"
            assert bool(solution.converged[others].all()), (
                f"{known.name}: the other samples did not converge: "
                f"{[Status(s).name.lower() for s in solution.status[others].tolist()]} {solution.message}"
            )
            _close(
                solution.value[others], known.solution[others], subject.tolerance(known), f"{known.name}: other samples"
            )


@_check("An empty batch must be refused with a ValueError that says so.")
def refuses_an_empty_batch(subject: Subject) -> None:
    """A batch of no samples raises ``ValueError`` and does not reach the solver."""
    known = subject.known()[0]
    try:
        subject.solve(known, known.theta[:0], z0=known.z0[:0])
    except ValueError as error:
        assert "empty" in str(error) or "no samples" in str(error), f"the message does not say so: {error}"
    else:
        raise AssertionError("no error was raised")


@_check("vmap gives the solver one larger batch; whatever breaks here breaks there (state without a batch dimension?).")
def vmap_equals_batch(subject: Subject) -> None:
    """``torch.vmap`` over a solve without batch dimensions gives what ``batch_dims=1`` gives."""
    for known in subject.known():
        tolerance = max(subject.accuracy, torch.finfo(torch.float64).eps ** (2 / 3))

        def one(z0: Tensor, theta: Tensor, problem: Problem = known.problem, tolerance: float = tolerance) -> Tensor:
            # the functions of the known problems work on the last dimension: one sample is a vector
            return solve(problem, z0, (theta,), solver=subject.solver, rtol=tolerance, atol=tolerance).value

        mapped = torch.func.vmap(one)(known.z0, known.theta)
        _close(mapped, known.solution, subject.tolerance(known), f"{known.name}: the solution under vmap")


# ------------------------------------------------------------------------------------------------- tensors as they came
@_check(
    "Create tensors with z.new_* / *_like, convert what comes back from NumPy with torch.as_tensor(..., dtype=z.dtype)."
)
def keeps_dtype_and_device(subject: Subject) -> None:
    """float32 and float64 come back as they came, on every device there is."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            for known in known_problems(subject.kind, batch=2, size=subject.size, dtype=dtype, device=device):
                solution = subject.solve(known, on_failure="ignore")
                assert solution.value.dtype == dtype, f"{known.name}: {dtype} came back as {solution.value.dtype}"
                assert solution.value.device == known.z0.device, f"{known.name}: came back on {solution.value.device}"
                _converged(solution, known)
                _close(
                    solution.value, known.solution, subject.tolerance(known), f"{known.name} in {dtype}: the solution"
                )


@_check("Never write into z or into what f returned (no z += d, no torch.add(out=z)): make new tensors.")
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


@_check("Keep no state between solves (in self, in globals), and draw no random numbers without a fixed generator.")
def is_deterministic(subject: Subject) -> None:
    """The same solve twice gives the same bits."""
    for known in subject.known():
        first, second = subject.solve(known), subject.solve(known)
        assert torch.equal(first.value, second.value), f"{known.name}: two runs differ"
        assert torch.equal(first.steps, second.steps), f"{known.name}: two runs took different numbers of steps"


@_check(
    "Accept any pytree: the driver packs it; a black box that remembers shapes must take them from its z0.",
    lambda solver: solver.max_size is None or solver.max_size >= 4,
)
def solves_pytrees(subject: Subject) -> None:
    """A state that is a dictionary of tensors of several shapes is solved."""
    known = subject.known()[0]
    tolerance = max(subject.accuracy, torch.finfo(torch.float64).eps ** (2 / 3))

    def join(tree: dict[str, Tensor]) -> Tensor:
        return torch.cat([tree["a"].flatten(1), tree["b"]], 1)

    def split(z: Tensor) -> dict[str, Tensor]:
        return {"a": z[:, :3].reshape(-1, 3, 1), "b": z[:, 3:]}

    function = known.problem.function
    whole = known.problem.kind.minimisation

    def on_tree(tree: dict[str, Tensor], theta: Tensor) -> Any:
        out = function(join(tree), theta)
        return out if whole else split(out)

    problem = _PROBLEMS[known.problem.kind.name](on_tree)
    solution = solve(
        problem, split(known.z0), (known.theta,), solver=subject.solver, batch_dims=1, rtol=tolerance, atol=tolerance
    )
    _close(join(solution.value), known.solution, subject.tolerance(known), "the solution")


# ---------------------------------------------------------------------------------------------------------- derivatives
@_check("The point returned is not the solution (derivatives are formed there), or it carries a graph of its own.")
def gradient_of_the_solution(subject: Subject) -> None:
    r"""Reverse mode gives ``-(dF/d\theta)' u`` with ``(dF/dz)' u = w``, formed densely at the known solution."""
    for known in subject.known():
        theta = known.theta.clone().requires_grad_()
        value = subject.solve(known, theta).value
        w = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).reshape(value.shape)
        (gradient,) = torch.autograd.grad((w * value).sum(), theta)
        for i in range(len(w)):
            z, t = known.solution[i : i + 1], known.theta[i : i + 1]
            J, D = (d[0, :, 0] for d in torch.autograd.functional.jacobian(known.residual, (z, t)))
            wanted = -D.mT @ torch.linalg.solve(J.mT, w[i])
            what = f"{known.name}: the gradient of sample {i}"
            _close(gradient[i], wanted, 10 * subject.tolerance(known), what)


@_check("Let exceptions of f pass: catch only your own, never a bare `except`.")
def errors_of_the_function_surface(subject: Subject) -> None:
    """An exception raised by the user's function in the middle of a solve arrives as it was raised."""
    known = subject.known()[1]
    function, calls = known.problem.function, 0

    class Own(Exception):
        pass

    def failing(z: Tensor, theta: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Own("of the user")
        return function(z, theta)

    problem = _PROBLEMS[known.problem.kind.name](failing)
    try:
        solve(problem, known.z0, (known.theta,), solver=subject.solver, batch_dims=1, in_dims=(0,))
    except Own:
        return
    assert calls > 2, f"the function was called {calls} times only: the solve cannot have been right"
    raise AssertionError("the exception of the user's function was swallowed")


@_check("Make it a (frozen) dataclass at module level, with plain values as options.")
def copies_and_pickles(subject: Subject) -> None:
    """The configured solver survives ``copy.deepcopy`` and ``pickle`` and solves alike."""
    known = subject.known()[0]
    wanted = subject.solve(known).value
    local = "<locals>" in getattr(subject.solver, "find", type(subject.solver)).__qualname__
    for name, clone in (
        ("deepcopy", copy.deepcopy),
        *(() if local else (("pickle", lambda s: pickle.loads(pickle.dumps(s))),)),
    ):
        again = Subject(clone(subject.solver), subject.accuracy).solve(known).value
        assert torch.equal(again, wanted), f"after {name} the solution is another"


# ------------------------------------------------------------------------------------------- what only a Method promises
def _is_method(solver: Any) -> bool:
    return isinstance(solver, Method)


def _function(subject: Subject, known: Known, z: Tensor, theta: Tensor) -> Evaluations:
    """What a method sees of a known problem."""
    layout = Layout(z, 1)
    lifted = lift(known.problem.function, z, (theta,), check_output(known.problem, layout))
    return Evaluations(System.of(known.problem, layout, lifted, (0,), (theta,)), lifted.theta, subject.solver.solves)


def _steps(subject: Subject) -> Iterator[tuple[str, Evaluations, Tensor, Any]]:
    """The first three steps of a method, on plain matrices: name, function, point and state before each."""
    for known in subject.known(batch=3):
        z = known.z0
        f = _function(subject, known, z, known.theta)
        f.norm = f.residual(z).norm(dim=1)
        f.best, f.best_norm = z, f.norm
        state = subject.solver.init(f, z)
        for _ in range(3):
            yield known.name, f, z, state
            z, state = subject.solver.step(f, z, state)
            f.norm = f.residual(z).norm(dim=1)
            f.best, f.best_norm = z, f.norm


@_check("Return z_next as a new tensor of the shape, dtype and device of z, without a graph.", _is_method)
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


@_check(
    "Every tensor in the state has the batch as its first dimension; keep counters that all samples share as Python "
    "numbers, or override Method.select.",
    _is_method,
)
def step_is_per_sample(subject: Subject) -> None:
    """``select`` takes the rows of the samples that go on: the step of a part is the part of the step."""
    keep = torch.tensor([1, 2])
    for known in subject.known(batch=3):
        for name, f, z, state in _steps(subject):
            if name != known.name:
                continue
            for leaf in trees.tree_flatten(state)[0]:
                if isinstance(leaf, Tensor) and type(subject.solver).select is Method.select:
                    assert leaf.ndim == 0 or leaf.shape[0] == 3, f"{name}: a state tensor has shape {tuple(leaf.shape)}"
            small = _function(subject, known, z[keep], known.theta[keep])
            small.norm = small.residual(z[keep]).norm(dim=1)
            small.best, small.best_norm = z[keep], small.norm
            part = subject.solver.select(copy.deepcopy(state), keep)
            whole, _ = subject.solver.step(f, z, copy.deepcopy(state))
            selected, _ = subject.solver.step(small, z[keep], part)
            _close(selected, whole[keep], 1e-8, f"{name}: the step of the samples 1 and 2")
