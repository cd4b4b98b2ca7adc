"""Checks of the answer: right, honest, the same in a batch, and differentiable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.problem.base import Problem
from implicitkit.problem.kind import as_kind
from implicitkit.solution import Solution, Status
from implicitkit.solver.catalogue import serves
from implicitkit.solver.method import Method
from implicitkit.solving.verbs import solve
from implicitkit.testing.check import PROBLEMS, Subject, Unsolved, all_converged, check, close
from implicitkit.testing.diagnosis import ROWS, diagnosed
from implicitkit.testing.known import ERRORS, KNOWN, Known, known_problems, twofold, unsolvable

_SHARE = 3  # of the steps that are told of, which is not enough
_PLACES = (2, 3, 4, 5, 8)  # in which evaluation a function raises
_ARGUMENTS = 12  # that differ by rounding alone
_MANY = 200  # evaluations: fewer may be what any tolerance takes


# ------------------------------------------------------------------------------------------------------ right and honest
@check(
    "The step does not lead to the solution of well-conditioned problems: check signs and what f is (a root method sees the "
    "residual, a fixed-point method the map itself, a minimiser the gradient, a least-squares method the gradient of half "
    "the squared norm of f.residuals(z), a steady-state method dz/dt), and that the last point is the one returned."
)
def finds_known_solutions(subject: Subject) -> None:
    """The solutions of one linear and one nonlinear problem, planted, are found to the tolerance."""
    for known in subject.known():
        solution = subject.solve(known, on_failure="ignore")
        try:
            all_converged(solution, known)
        except Unsolved as error:
            raise diagnosed(subject, known, solution, error) from None
        close(solution.value, known.solution, subject.tolerance(known), f"{known.name}: the solution")


@check(
    "The solver serves this problem kind (see implicitkit.extend.serves), but does not solve it; register it with a "
    "narrower solves=... or make it robust there."
)
def serves_every_kind_it_claims(subject: Subject) -> None:
    """Every kind of problem that the solver may be given is solved, not only its own."""
    for kind in KNOWN:
        if kind != subject.kind and serves(subject.solver.solves, kind):
            for known in subject.known(kind):
                solution = subject.solve(known, rtol=max(1e-6, subject.accuracy), on_failure="ignore")
                all_converged(solution, known)
                close(solution.value, known.solution, 1e-3, f"{known.name}: the solution")


@check(
    "The tolerance is that of the residual at the point returned: |F(z)| <= atol + rtol * scale. A black box must pass its "
    "rtol and atol on; a Method must not stop improving on its own."
)
def honours_tolerance(subject: Subject) -> None:
    """Asked for 1e-2, 1e-5 and the tightest, the residual at the point returned, evaluated afresh, is within it; and
    where that is dear, fewer digits are cheaper."""
    for known in subject.known():
        spent = []
        for rtol in (1e-2, 1e-5, subject.accuracy):
            if rtol < subject.accuracy:
                continue
            atol = subject.accuracy * 0.1
            solution = subject.solve(known, rtol=rtol, atol=atol, on_failure="ignore")
            all_converged(solution, known)
            norm, scale = _sizes(known, solution)
            bound = atol + rtol * scale
            assert bool((norm <= bound * (1 + 1e-6) + 1e-14).all()), (
                f"{known.name}: claimed |F| <= {bound.tolist()}, but |F| = {norm.tolist()} at the point returned"
            )
            close(solution.residual_norm, norm, 1e-12 + 1e-6 * float(norm.max()), f"{known.name}: residual_norm")
            spent.append(solution.evaluations)
        assert spent[-1] < _MANY or spent[0] < spent[-1], (
            f"{known.name}: {spent[0]} evaluations for two digits, {spent[-1]} for all of them: it does not stop when it may"
        )


@check(
    "Count one step for every iteration, and stop after max_steps of them; what is not within the tolerance by then has not "
    "converged (status MAX_STEPS)."
)
def honours_max_steps(subject: Subject) -> None:
    """With ``max_steps`` 1 and 2, no more steps are reported, and no success that the residual does not bear out."""
    for known in subject.known():
        for limit in (1, 2):
            solution = subject.solve(known, max_steps=limit, on_failure="ignore")
            steps = solution.steps.tolist()
            assert max(steps) <= limit, f"{known.name}: with max_steps={limit} it tells of {steps} steps"
            norm, scale = _sizes(known, solution)
            tolerance = subject.rtol()
            wrong = solution.converged & (norm > 1.01 * tolerance * (1 + scale))
            assert not bool(wrong.any()), f"{known.name}: converged is claimed at |F| = {norm.tolist()}"
            solved = limit == 1 and not _is_linear(known) and bool(solution.converged.any())
            assert not solved, (
                f"{known.name}: with max_steps=1 it goes on until it is solved ({solution.evaluations} evaluations): "
                "max_steps is not looked at"
            )


def _sizes(known: Known, solution: Solution) -> tuple[Tensor, Tensor]:
    """``|F|`` at the point returned, evaluated afresh, and what it is relative to."""
    norm = known.residual(solution.value, known.theta).norm(dim=1)
    if known.problem.kind.iteration:
        return norm, solution.value.norm(dim=1)
    return norm, known.residual(known.z0, known.theta).norm(dim=1)


def _is_linear(known: Known) -> bool:
    """Whether one step of Newton's may solve it."""
    return known.name == known_problems(known.problem.kind.name, batch=1, size=1)[0].name


@check(
    "steps are those of the iteration that max_steps limits, each once: Found(z, steps=...), one number for each sample of "
    "a batch (0: not known)."
)
def counts_steps(subject: Subject) -> None:
    """As many steps as are told of are enough, and a third of them is not."""
    for known in subject.known():
        solution = subject.solve(known, on_failure="ignore")
        all_converged(solution, known)
        most = int(solution.steps.max())
        slowest = solution.steps == most
        for limit in [most, most // _SHARE] if most >= _SHARE else [most] if most else []:
            again = subject.solve(known, max_steps=limit, on_failure="ignore").converged[slowest]
            what = f"{known.name}: {most} steps are told of, and with max_steps={limit}"
            if limit == most:
                assert bool(again.all()), f"{what} it is not solved: there were more"
            else:
                assert not bool(again.any()), f"{what} it is solved: there were fewer"


@check(
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


@check("Keep the point with the least residual, or start from z0 again when the iteration has run away.")
def never_worse_than_the_start(subject: Subject) -> None:
    """Stopped early, the residual is not larger than it was at ``z0``."""
    for known in subject.known():
        start = known.residual(known.z0, known.theta).norm(dim=1)
        for limit in (1, 3):
            solution = subject.solve(known, max_steps=limit, on_failure="ignore")
            norm = known.residual(solution.value, known.theta).norm(dim=1)
            assert bool((norm <= start * (1 + 1e-9)).all()), f"{known.name}: |F| {start.tolist()} -> {norm.tolist()}"


@check("Evaluate f at the start, and return at once if the residual vanishes there.")
def stays_at_a_solution(subject: Subject) -> None:
    """Started at the solution, it returns the solution."""
    for known in subject.known():
        solution = subject.solve(known, z0=known.solution, atol=1e-9 if subject.accuracy < 1e-9 else subject.accuracy)
        all_converged(solution, known)
        close(solution.value, known.solution, subject.tolerance(known), f"{known.name}: the solution")


@check(
    "Begin at z0, and take every step from the point it was given: a start near one of several solutions chooses it."
)
def starts_where_it_is_told(subject: Subject) -> None:
    """Where there are two solutions, the one is found that ``z0`` is next to."""
    problem, chosen = twofold(subject.kind, batch=3, size=subject.size)
    tolerance = subject.rtol()
    z0 = 1.01 * chosen
    options: dict[str, Any] = {"batch_dims": 1, "rtol": tolerance, "atol": tolerance}
    solution = solve(problem, z0, (), solver=subject.solver, **options)
    close(solution.value, chosen, 40 * tolerance, "the solution next to the start")


@check(
    "Nothing may depend on how many unknowns there are: squeeze() drops a dimension of size one; name it, squeeze(1)."
)
def solves_one_unknown_and_many(subject: Subject) -> None:
    """Samples of a single unknown are solved, and of nine."""
    for size in (1, 9):
        if size > (subject.solver.max_size or size):
            continue
        for known in known_problems(subject.kind, batch=3, size=size):
            solution = subject.solve(known, on_failure="ignore")
            all_converged(solution, known)
            what = f"{known.name}, number of unknowns {size}: the solution"
            close(solution.value, known.solution, subject.tolerance(known), what)


@check(
    "Converged is |F| <= atol + rtol * scale in the norm asked for: options.size(rows), or ik.extend.Judge(f, options), and "
    "not the 2-norm alone."
)
def honours_the_norm(subject: Subject) -> None:
    """In a norm that counts a thousandfold, the residual at the point returned is within the tolerance."""
    atol = max(1e-6, 1e3 * subject.accuracy)
    for known in subject.known():
        strict = lambda z: 1e3 * z.norm(dim=1)  # noqa: E731
        solution = subject.solve(known, rtol=0.0, atol=atol, norm=strict, on_failure="ignore")
        norm = strict(known.residual(solution.value, known.theta))
        wrong = solution.converged & (norm > atol * (1 + 1e-6))
        assert not bool(wrong.any()), f"{known.name}: claimed |F| <= {atol:.3g}, but |F| = {norm.tolist()}"


# ------------------------------------------------------------------------------------------------------------- batches
def _same_steps(subject: Subject, known: Known, i: int, taken: int, wanted: int, slack: float, what: str) -> None:
    """Assert that a sample took as many steps as it should, or as it does with an argument that is the same but for
    rounding."""
    one, eps, counts = slice(i, i + 1), torch.finfo(known.z0.dtype).eps, [wanted]
    theta = known.theta[one]
    while not min(counts) - slack <= taken <= max(counts) + slack and len(counts) <= _ARGUMENTS:
        by = len(counts) * eps * seeded.signs(*theta.shape, seed=len(counts)).to(theta)
        counts.append(int(subject.solve(known, theta * (1 + by), z0=known.z0[one]).steps[0]))
    assert len(counts) <= _ARGUMENTS, f"{what} took {taken} steps instead of {wanted}"


@check(ROWS)
def batch_equals_loop(subject: Subject) -> None:
    """A batch gives what its samples give one at a time."""
    for known in subject.known(batch=4):
        together = subject.solve(known)
        for i in range(4):
            alone = subject.solve(replace(known, z0=known.z0[i : i + 1], theta=known.theta[i : i + 1]))
            what = f"{known.name}: sample {i} of the batch, against the sample alone,"
            close(together.value[i], alone.value[0], 2 * subject.tolerance(known), what)
            if isinstance(subject.solver, Method):
                a, b = int(together.steps[i]), int(alone.steps[0])
                _same_steps(subject, known, i, a, b, max(1, 0.1 * b), what)


@check("Something depends on where a sample stands in the batch: look for z[0], for loops, for state that is shared.")
def permutation_of_the_batch(subject: Subject) -> None:
    """Samples in another order give the same solutions in that order."""
    order = torch.tensor([2, 0, 3, 1], device="cpu")
    for known in subject.known(batch=4):
        plain = subject.solve(known)
        permuted = subject.solve(known, known.theta[order], z0=known.z0[order])
        close(permuted.value, plain.value[order], 2 * subject.tolerance(known), f"{known.name}: the permuted solution")
        if isinstance(subject.solver, Method):
            for i, a, b in zip(order.tolist(), permuted.steps.tolist(), plain.steps[order].tolist(), strict=True):
                _same_steps(subject, known, i, a, b, 1, f"{known.name}: sample {i}, in another order,")


@check(
    "NaN spreads over the batch: a sum, mean, max or matrix product mixes rows, or a decomposition raises for the whole "
    "batch when one matrix is not finite. Work row by row and use torch.where."
)
def nan_stays_in_its_sample(subject: Subject) -> None:
    """One sample whose argument is NaN fails; the others are solved as if it were not there."""
    for known in subject.known(batch=4):
        theta = known.theta.clone()
        theta[1] = torch.nan
        taken = int(subject.solve(known).steps.max())
        enough = max(100, 5 * taken) if taken else None  # some go on with NaN as long as they may
        others = torch.tensor([0, 2, 3], device="cpu")
        # with in_dims the driver drops the sample that has failed, else it stays in sight, and of one big system in the way
        for dropped in (True,) if getattr(subject.solver, "batch", "") == "joint" else (True, False):
            in_dims = (0,) if dropped else None
            solution = subject.solve(known, theta, in_dims=in_dims, max_steps=enough, on_failure="ignore")
            assert not bool(solution.converged[1]), f"{known.name}: the sample with NaN is called converged"
            assert bool(torch.isfinite(solution.value[1]).all()), f"{known.name}: the start of the NaN sample is lost"
            assert bool(solution.converged[others].all()), (
                f"{known.name}: the other samples did not converge: "
                f"{[Status(s).name.lower() for s in solution.status[others].tolist()]} {solution.message}"
            )
            close(
                solution.value[others], known.solution[others], subject.tolerance(known), f"{known.name}: other samples"
            )


@check(
    "Nothing may fail for want of samples: an empty batch does not reach the solver, unless something asks it before."
)
def an_empty_batch_has_an_empty_solution(subject: Subject) -> None:
    """A batch of no samples has a solution without samples, as models that route samples meet it."""
    known = subject.known()[0]
    solution = subject.solve(known, known.theta[:0], z0=known.z0[:0])
    assert solution.value.shape == known.z0[:0].shape, f"the solution has shape {tuple(solution.value.shape)}"
    assert solution.converged.shape == (0,), f"converged has shape {tuple(solution.converged.shape)}"


@check("vmap gives the solver one larger batch; whatever breaks here breaks there (state without a batch dimension?).")
def vmap_equals_batch(subject: Subject) -> None:
    """``torch.vmap`` over a solve without batch dimensions gives what ``batch_dims=1`` gives."""
    for known in subject.known():

        def one(z0: Tensor, theta: Tensor, problem: Problem = known.problem) -> Tensor:
            # the functions of the known problems work on the last dimension: one sample is a vector
            return solve(problem, z0, (theta,), solver=subject.solver, rtol=subject.rtol(), atol=subject.rtol()).value

        mapped = torch.func.vmap(one)(known.z0, known.theta)
        close(mapped, known.solution, subject.tolerance(known), f"{known.name}: the solution under vmap")


# ---------------------------------------------------------------------------------------------------------- derivatives
@check("The point returned is not the solution (derivatives are formed there), or it carries a graph of its own.")
def gradient_of_the_solution(subject: Subject) -> None:
    r"""Reverse mode gives ``-(dF/d\theta)' u`` with ``(dF/dz)' u = w``, formed densely at the known solution."""
    for known in subject.known():
        theta = known.theta.clone().requires_grad_()
        value = subject.solve(known, theta).value
        w = torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
        (gradient,) = torch.autograd.grad((w * value).sum(), theta)
        for i in range(len(w)):
            z, t = known.solution[i : i + 1], known.theta[i : i + 1]
            J, D = (d[0, :, 0] for d in torch.autograd.functional.jacobian(known.residual, (z, t)))
            wanted = -D.mT @ torch.linalg.solve(J.mT, w[i])
            what = f"{known.name}: the gradient of sample {i}"
            close(gradient[i], wanted, 10 * subject.tolerance(known), what)


@check(
    "differentiable = True promises steps of plain differentiable operations: no detach(), item() or no_grad() in them.",
    lambda solver: bool(getattr(solver, "differentiable", False)),
)
def gradient_of_the_steps(subject: Subject) -> None:
    """Where the steps can be unrolled, their derivative comes to that of the solution."""
    for known in subject.known():
        gradients: list[Tensor] = []
        for rule in ("implicit", "unroll"):
            theta = known.theta.clone().requires_grad_()
            value = subject.solve(known, theta, rule=rule).value
            gradients += torch.autograd.grad(value.square().sum(), theta)
        # errors of the steps' derivative fall like those of the steps, times their number
        allowed = max(1e-4, subject.tolerance(known))
        close(gradients[1], gradients[0], allowed, f"{known.name}: the gradient of the steps")


@check(
    "Let exceptions of f pass: catch only your own, never a bare `except`, and let Ctrl-C (KeyboardInterrupt) through."
)
def errors_of_the_function_surface(subject: Subject) -> None:
    """An exception raised by the user's function in the middle of a solve, or an interrupt there, arrives as it was
    raised."""
    known = subject.known()[1]
    function = known.problem.function
    for own in ERRORS:
        for place in _PLACES:
            calls = 0

            def failing(z: Tensor, theta: Tensor, place: int = place, own: Any = own) -> Any:
                nonlocal calls
                calls += 1
                if calls == place:
                    raise own("of the user")
                return function(z, theta)

            problem = PROBLEMS[known.problem.kind.name](failing)
            how: dict[str, Any] = {"batch_dims": 1, "in_dims": (0,), "on_failure": "ignore"}
            try:
                solve(problem, known.z0, (known.theta,), solver=subject.solver, **how)
            except own:
                continue
            if calls < place:
                break
            raised = f"{own.__mro__[1].__name__} that the function raised in its evaluation {place}"
            raise AssertionError(f"the {raised} was swallowed")
        assert calls > 2, f"the function was called {calls} times only: the solve cannot have been right"
