"""Checks of solvers of constrained problems and of quadratic programs: active and inactive, infeasible, unbounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError, ConvergenceError
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.constraints import Equality, Inequality
from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.solution import Solution, Status
from implicitkit.solving.verbs import solve
from implicitkit.testing.check import Suite, Unsolved, close, of_each_part, solved
from implicitkit.testing.common import add_common_checks
from implicitkit.testing.known import counting

_MORE = 20  # steps than twice those of samples with a solution: some go on as long as they may where there is none
_FAR = 200  # times the tolerance: how far a solution may be where the optimality conditions hold to it
_D, _a = (
    torch.tensor([1.0, 2.0], dtype=torch.float64, device="cpu"),
    torch.tensor([1.0, 0.5], dtype=torch.float64, device="cpu"),
)


@dataclass(frozen=True)
class Program:
    """A batch of programs ``min z'Dz/2 - p'z`` over a set, one argument ``theta`` a sample, with their solutions.

    Attributes:
        theta: ``(batch, m)``, of which some make constraints active and some do not.
        constraints: for ``Argmin``. rows: ``G``, ``h`` or ``A``, ``b`` of ``QuadraticProgram``, from ``theta``; empty: none.
        solution, multipliers: in closed form, differentiable, from ``theta``; ``multipliers`` ``None``: none are told of.
        linear: the term ``p`` from ``theta``. curved: is there ``z'Dz/2``?
    """

    name: str
    theta: Tensor
    constraints: Callable[[], dict[str, Any]]
    rows: Callable[[Tensor], dict[str, Tensor]] | None
    solution: Callable[[Tensor], Tensor]
    multipliers: Callable[[Tensor], Tensor] | None = None
    linear: Callable[[Tensor], Tensor] = lambda theta: theta
    curved: bool = True

    def solve(self, solver: Any, theta: Tensor, **options: Any) -> Solution:
        """Solve it as a batch."""
        D = _D.to(theta) if self.curved else torch.zeros_like(_D).to(theta)
        if solver.solves == "quadratic_program":
            assert self.rows is not None
            rows: dict[str, Any] = self.rows(theta)
            P = torch.diag(D).expand(len(theta), 2, 2)
            return solve(QuadraticProgram(P=P, q=-self.linear(theta), **rows), solver=solver, **options)

        def objective(z: Tensor, t: Tensor) -> Tensor:
            return (0.5 * D * z * z - self.linear(t) * z).sum(-1)

        z0 = options.pop("z0", theta.new_full((len(theta), 2), 0.3))
        problem = Argmin(counting(objective), **self.constraints())
        return solve(problem, z0, (theta,), solver=solver, batch_dims=1, **options)


def _along(z: Tensor) -> Tensor:
    """``a'z``, ``(batch, 1)``."""
    return (z * _a.to(z)).sum(-1, keepdim=True)


def _over(p: Tensor) -> Tensor:
    """By how much the minimiser without constraints is beyond ``a'z = 1``, as a multiplier, ``(batch, 1)``."""
    D, a = _D.to(p), _a.to(p)
    return (_along(p / D) - 1) / (a * a / D).sum()


def _moved(p: Tensor, multiplier: Tensor) -> Tensor:
    return (p - multiplier * _a.to(p)) / _D.to(p)


def _eyes(p: Tensor) -> dict[str, Tensor]:
    eye = torch.eye(2, dtype=p.dtype, device=p.device)
    G, h = torch.cat([eye, -eye]), torch.cat([torch.ones_like(p[0]), torch.zeros_like(p[0])])
    return {"G": G.expand(len(p), 4, 2), "h": h.expand(len(p), 4)}


def _row(p: Tensor, G: str, h: str) -> dict[str, Tensor]:
    return {G: _a.to(p).expand(len(p), 1, 2), h: torch.ones_like(p[:, :1])}


def _slab_rows(g: Tensor) -> dict[str, Tensor]:
    a = _a.to(g)
    return {"G": torch.stack([a, -a]).expand(len(g), 2, 2), "h": torch.cat([torch.ones_like(g), -g], 1)}


def _slab_push(g: Tensor) -> Tensor:
    return g.clamp_min(0) / (_a * _a / _D).sum().to(g)


_P = torch.tensor([[2.0, 1.5], [0.3, 0.4], [-1.0, 3.0]], dtype=torch.float64, device="cpu")
PROGRAMS_KNOWN = (
    Program(
        "bounds",
        _P,
        lambda: {"bounds": (0.0, 1.0)},
        _eyes,
        lambda p: (p / _D.to(p)).clamp(0, 1),
        lambda p: torch.cat([(p - _D.to(p)).clamp_min(0), (-p).clamp_min(0)], 1),
    ),
    Program(
        "an inequality",
        _P,
        lambda: {"constraints": [Inequality(lambda z, p: _along(z) - 1)]},
        lambda p: _row(p, "G", "h"),
        lambda p: _moved(p, _over(p).clamp_min(0)),
        lambda p: _over(p).clamp_min(0),
    ),
    Program(
        "an equality",
        _P,
        lambda: {"constraints": [Equality(lambda z, p: _along(z) - 1)]},
        lambda p: _row(p, "A", "b"),
        lambda p: _moved(p, _over(p)),
        _over,
    ),
    Program(
        "two inequalities",
        torch.tensor([[0.5], [0.8], [-0.5]], dtype=torch.float64, device="cpu"),
        lambda: {"constraints": [Inequality(lambda z, g: torch.cat([_along(z) - 1, g - _along(z)], -1))]},
        _slab_rows,
        lambda g: _moved(torch.zeros_like(g), -_slab_push(g)),
        lambda g: torch.cat([torch.zeros_like(g), _slab_push(g)], 1),
        lambda g: torch.zeros_like(g).expand(-1, 2),
    ),
)
"""Programs with known solutions and multipliers; the last, ``g <= a'z <= 1``, has none where ``g > 1``."""

_LINEAR = Program(
    "a linear objective",
    torch.tensor([[1.0, 2.0], [-1.0, -1.0], [2.0, 0.5]], dtype=torch.float64, device="cpu"),
    lambda: {"bounds": (-torch.inf, 1.0)},
    lambda p: {k: t[:, :2] for k, t in _eyes(p).items()},
    torch.ones_like,
    curved=False,
)
"""Unbounded below where ``p < 0``; not a known program of the suite, as linear programs are refused by some."""


@dataclass(frozen=True)
class ProgramSubject:
    """A solver under test.

    Attributes:
        part: the configured object. accuracy: the tightest relative tolerance that is asked of it in float64.
    """

    part: Any
    accuracy: float

    @property
    def known(self) -> tuple[Program, ...]:
        """The programs that the solver does not refuse."""
        return _served(self.part)

    def rtol(self, dtype: torch.dtype = torch.float64) -> float:
        """The tightest tolerance that is asked for."""
        return float(max(self.accuracy, 1e-9 if dtype == torch.float64 else 1e-5))

    def solve(self, known: Program, theta: Tensor | None = None, **options: Any) -> Solution:
        """Solve a known program as a batch."""
        theta = known.theta if theta is None else theta
        tolerance = self.rtol(theta.dtype)
        return known.solve(self.part, theta, **({"rtol": tolerance, "atol": tolerance} | options))

    def enough(self, known: Program, theta: Tensor) -> int:
        """Steps that are enough beside a sample without a solution, where these have one."""
        return _MORE + 2 * int(self.solve(known, theta, on_failure="ignore").steps.max())

    def allowed(self, dtype: torch.dtype = torch.float64) -> float:
        """How far a solution may be."""
        return _FAR * self.rtol(dtype)

    def example(self) -> Tensor:
        """The argument of the first program."""
        return self.known[0].theta.clone()

    def act(self, theta: Tensor) -> Tensor:
        """Its solution."""
        return _z(self.solve(self.known[0], theta)).detach()


def _z(solution: Solution) -> Tensor:
    value: Tensor = solution.value
    return value


def _refuses(solver: Any, program: Program) -> bool:
    try:
        program.solve(solver, program.theta, on_failure="ignore", max_steps=1)
    except CapabilityError:
        return True
    except Exception:  # a check says what it is
        return False
    return False


@of_each_part
def _served(solver: Any) -> tuple[Program, ...]:
    return tuple(program for program in PROGRAMS_KNOWN if not _refuses(solver, program))


def _takes_some(solver: Any) -> bool:
    return bool(_served(solver))


def _takes_inequalities(solver: Any) -> bool:
    return PROGRAMS_KNOWN[-1] in _served(solver)


PROGRAMS = Suite("solver", ProgramSubject)
"""Of solvers with ``solves="constrained"`` or ``"quadratic_program"``."""


def check(mend: str, applies: Callable[[Any], bool] = _takes_some) -> Any:
    """A check (:meth:`Suite.check`) of solvers that take some of the programs."""
    return PROGRAMS.check(mend, applies)


def _solved(solution: Solution, what: str, keep: Any = slice(None)) -> None:
    if not bool(solution.converged[keep].all()):
        status = [Status(s).name.lower() for s in solution.status.tolist()]
        norms = [f"{r:.2g}" for r in solution.residual_norm.tolist()]
        raise Unsolved(f"{what}: status {status}, |F| = {norms} ({solution.message})")


# ------------------------------------------------------------------------------------------------------ right and honest
@check(
    "The point is not the minimiser: check signs (constraints are g <= 0, A z = b and G z <= h), and return z together with "
    "its multipliers, in the packed order that came in."
)
def finds_known_solutions(subject: ProgramSubject) -> None:
    """Programs whose bounds, inequalities and equalities are active in some samples and not in others are solved."""
    for known in subject.known:
        solution = subject.solve(known, on_failure="ignore")
        _solved(solution, known.name)
        solved(_z(solution).detach(), known.solution(known.theta), subject.allowed(), f"{known.name}: the solution")


@check(
    "The Lagrangian is objective + y'h(z) + lam'g(z): lam is at least zero, and zero where a constraint is not active. A "
    "solver of the other sign turns its multipliers round before they are returned."
)
def multipliers_are_those_of_the_lagrangian(subject: ProgramSubject) -> None:
    """Multipliers of inequalities are not negative, complementary to the slack, and those of the closed form."""
    for known in subject.known:
        solution = subject.solve(known)
        told = solution.multipliers
        if told is None or known.multipliers is None:  # those of bounds=
            continue
        told = [t for t in told if t is not None]
        got, wanted = torch.cat(told, 1).detach(), known.multipliers(known.theta)
        close(got, wanted, 10 * subject.allowed(), f"{known.name}: the vector of multipliers")
        if known.name != "an equality":
            assert bool((got >= -subject.allowed()).all()), f"{known.name}: the multipliers {got.tolist()} are negative"


@check("The tolerance is rtol and atol of the options, for the conditions of optimality at the point returned.")
def honours_tolerance(subject: ProgramSubject) -> None:
    """What is called converged is as near to the solution as the tolerance says."""
    for known in subject.known:
        for rtol in (1e-3, 1e-6, subject.rtol()):
            if rtol < subject.rtol():
                continue
            solution = subject.solve(known, rtol=rtol, atol=rtol, on_failure="ignore")
            _solved(solution, f"{known.name} with rtol={rtol:g}")
            wanted = known.solution(known.theta)
            solved(_z(solution).detach(), wanted, 20 * rtol, f"{known.name} with rtol={rtol:g}: the solution")


@check("Count the iterations, and stop after max_steps of them; what is not solved by then is not converged.")
def honours_max_steps(subject: ProgramSubject) -> None:
    """With ``max_steps=1`` no more is told of (by solvers of constrained problems), and no success that is none."""
    for known in subject.known:
        solution = subject.solve(known, max_steps=1, on_failure="ignore")
        counted = subject.part.solves != "constrained" or int(solution.steps.max()) <= 1  # those of programs have units
        assert counted, f"{known.name}: with max_steps=1 it tells of {solution.steps.tolist()}"
        wrong = (_z(solution).detach() - known.solution(known.theta)).abs().amax(1) > subject.allowed()
        assert not bool((solution.converged & wrong).any()), f"{known.name}: converged is claimed at another point"


@check(
    "A program without a point that keeps its constraints has no solution: say so (Status.INFEASIBLE where it is proved) "
    "and let the other samples be; an exception for one is one for all.",
    _takes_inequalities,
)
def tells_of_infeasible_samples(subject: ProgramSubject) -> None:
    """A sample without a feasible point is not called solved, alone it raises, and its neighbours are solved."""
    known, keep = PROGRAMS_KNOWN[-1], torch.tensor([0, 2], device="cpu")
    theta = known.theta.index_fill(0, torch.tensor([1], device="cpu"), 2.0)
    _one_fails(subject, known, theta, keep, "infeasible")


@check(
    "An objective without a lower bound has no minimum: say so (Status.UNBOUNDED where it is proved), stop, and let the "
    "other samples be.",
    lambda solver: _takes_some(solver) and not _refuses(solver, _LINEAR),
)
def tells_of_unbounded_samples(subject: ProgramSubject) -> None:
    """A sample unbounded below is not called solved, alone it raises, and its neighbours are solved."""
    _one_fails(subject, _LINEAR, _LINEAR.theta, torch.tensor([0, 2], device="cpu"), "unbounded")


def _one_fails(subject: ProgramSubject, known: Program, theta: Tensor, keep: Tensor, what: str) -> None:
    enough = subject.enough(known, theta[keep])
    solution = subject.solve(known, theta, on_failure="ignore", max_steps=enough)
    assert not bool(solution.converged[1]), f"a sample that is {what} is called converged"
    _solved(solution, f"the samples beside one that is {what}", keep)
    wanted = known.solution(theta)[keep]
    solved(_z(solution).detach()[keep], wanted, subject.allowed(), f"the samples beside one that is {what}")
    try:
        subject.solve(known, theta[1:2], max_steps=enough)
    except ConvergenceError:
        return
    raise AssertionError(f"a program that is {what}: no ConvergenceError was raised")


# --------------------------------------------------------------------------------------------------------------- batches
@check("NaN spreads over the batch, or an exception for one sample ends all: work sample by sample.")
def nan_stays_in_its_sample(subject: ProgramSubject) -> None:
    """One sample whose argument is NaN fails; the others are solved."""
    keep = torch.tensor([0, 2], device="cpu")
    for known in subject.known:
        theta = known.theta.index_fill(0, torch.tensor([1], device="cpu"), torch.nan)
        enough = subject.enough(known, theta[keep])
        solution = subject.solve(known, theta, on_failure="ignore", max_steps=enough)
        assert not bool(solution.converged[1]), f"{known.name}: the sample with NaN is called converged"
        _solved(solution, f"{known.name}: the samples beside NaN", keep)
        wanted = known.solution(known.theta)[keep]
        solved(_z(solution).detach()[keep], wanted, subject.allowed(), f"{known.name}: the samples beside NaN")


@check("Samples are programs of their own: step lengths, barrier parameters and active sets are those of a sample.")
def batch_equals_loop(subject: ProgramSubject) -> None:
    """A batch gives what its samples give one at a time."""
    for known in subject.known:
        together = _z(subject.solve(known)).detach()
        alone = torch.cat([_z(subject.solve(known, known.theta[i : i + 1])).detach() for i in range(len(together))])
        close(together, alone, subject.allowed(), f"{known.name}: a batch, against one by one")


@check(
    "Create tensors with new_* / *_like, convert what comes back from NumPy with torch.as_tensor(..., dtype=z.dtype)."
)
def keeps_dtype(subject: ProgramSubject) -> None:
    """float32 comes back as float32, and right."""
    for known in subject.known:
        solution = subject.solve(known, known.theta.float(), on_failure="ignore")
        assert _z(solution).dtype == torch.float32, f"{known.name}: torch.float32 came back as {_z(solution).dtype}"
        _solved(solution, f"{known.name} in float32")
        wanted = known.solution(known.theta).float()
        solved(_z(solution).detach(), wanted, subject.allowed(torch.float32), f"{known.name} in float32")


# ----------------------------------------------------------------------------------------------------------- derivatives
@check("Derivatives are formed at the point and the multipliers returned: an active constraint needs its multiplier.")
def gradient_of_the_solution(subject: ProgramSubject) -> None:
    """Reverse and forward mode are those of the solution in closed form, through active sets."""
    for known in subject.known:
        theta = known.theta.clone().requires_grad_()
        w = torch.tensor([[1.0, -0.5], [0.7, 2.0], [-1.0, 0.3]], dtype=torch.float64, device="cpu")
        (got,) = torch.autograd.grad((w * _z(subject.solve(known, theta))).sum(), theta)
        (wanted,) = torch.autograd.grad((w * known.solution(theta)).sum(), theta)
        close(got, wanted, 10 * subject.allowed(), f"{known.name}: the gradient")
        t = torch.ones_like(known.theta)
        moved = torch.func.jvp(lambda p, k=known: _z(subject.solve(k, p)), (known.theta,), (t,))[1]
        wanted = torch.func.jvp(known.solution, (known.theta,), (t,))[1]
        close(moved, wanted, 10 * subject.allowed(), f"{known.name}: the derivative in forward mode")


add_common_checks(PROGRAMS, _takes_some)
