"""Checks of a rule: the derivative against closed forms, in every mode, sample by sample, and honest about its bias."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError, ConvergenceError
from implicitkit.problem.base import Problem
from implicitkit.solution import Solution
from implicitkit.solver.catalogue import serves
from implicitkit.solving.verbs import solve
from implicitkit.testing.check import PROBLEMS, Suite, close, of_each_part, solved
from implicitkit.testing.common import add_common_checks
from implicitkit.testing.known import KNOWN, Known, known_problems, unsolvable

_SHIFT = 1e-5  # of the arguments, for second derivatives by differences of first ones
_SAME_WAY = 0.5  # cosine of the angle to the exact gradient, at least, of an approximation on easy problems


@dataclass(frozen=True)
class RuleSubject:
    """A rule under test.

    Attributes:
        part: the configured object. accuracy: the tightest relative tolerance that is asked of its derivatives in float64.
        solver: what solves. kinds: of the problems; empty: all that the rule does not refuse.
    """

    part: Any
    accuracy: float
    solver: Any = "auto"
    kinds: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Does the rule say that its derivative is exact?"""
        return bool(getattr(self.part, "exact", True))

    def known(self, batch: int = 3, dtype: torch.dtype = torch.float64, *, linear: bool = True) -> Iterator[Known]:
        """Problems with known solutions, of every kind that the rule serves, a linear and a nonlinear one."""
        for kind in self.kinds or _served(self.part, self.solver):
            yield from known_problems(kind, batch=batch, size=3, dtype=dtype)[0 if linear else 1 :]

    def solve(self, known: Known, theta: Tensor, problem: Problem | None = None, **options: Any) -> Solution:
        """Solve a known problem as a batch."""
        how: dict[str, Any] = {"batch_dims": 1, "in_dims": (0,), "solver": self.solver, "rule": self.part}
        tolerance = max(min(self.accuracy, 1e-10), torch.finfo(theta.dtype).eps ** (2 / 3))
        how |= {"rtol": tolerance, "atol": tolerance}
        z0 = options.pop("z0", known.z0[:1].expand(len(theta), -1))
        return solve(problem or known.problem, z0, (theta,), **(how | options))

    def gradient(self, known: Known, theta: Tensor, **options: Any) -> Tensor:
        """The gradient of a nonlinear function of the solution."""
        theta = theta if theta.requires_grad else theta.detach().requires_grad_()
        return torch.autograd.grad(_loss(self.solve(known, theta, **options).value).sum(), theta)[0]

    def allowed(self, wanted: Tensor) -> float:
        """How far a derivative may be from this one."""
        eps = torch.finfo(wanted.dtype).eps
        return 20 * (max(self.accuracy, eps ** (2 / 3)) + 1e-9) * (1 + float(wanted.abs().max()))

    def example(self) -> Tensor:
        """The argument of the first problem."""
        return next(self.known()).theta.clone().requires_grad_()

    def act(self, theta: Tensor) -> Tensor:
        """Its gradient."""
        return self.gradient(next(self.known()), theta)


@of_each_part
def _served(rule: Any, solver: Any) -> tuple[str, ...]:
    """The kinds of problem that the rule takes, by what it says (``needs``) and does not refuse with this solver.

    Raises:
        CapabilityError: there is none.
    """
    found, refusal = [], ""
    for kind in KNOWN:
        known = known_problems(kind, batch=1, size=3)[0]
        if rule.needs and kind not in rule.needs:
            continue
        if not isinstance(solver, str) and not serves(solver.solves, kind):
            continue
        try:
            solve(known.problem, known.z0, (known.theta.requires_grad_(),), solver=solver, rule=rule, batch_dims=1)
        except CapabilityError as error:
            refusal = f" ({error})"
        except Exception:  # a check says what it is
            found.append(kind)
        else:
            found.append(kind)
    if not found:
        raise CapabilityError(
            f"the rule takes no problem of the kinds {', '.join(KNOWN)}: every one is refused{refusal}"
        )
    return tuple(found)


def _loss(z: Tensor) -> Tensor:
    """A number for each sample, ``(batch, n) -> (batch,)``."""
    w = torch.linspace(-1, 1.5, z.shape[-1], dtype=z.dtype, device=z.device)
    return (w * z + 0.3 * z.square()).sum(-1)


def jacobian_of(known: Known, z: Tensor, theta: Tensor) -> Tensor:
    r"""``dz/d\theta = -(dF/dz)^{-1} dF/d\theta`` of each sample, ``(batch, n, m)``, by dense matrices written out."""

    def one(z: Tensor, t: Tensor) -> Tensor:
        return known.residual(z[None], t[None])[0]

    J = torch.func.vmap(torch.func.jacrev(one))(z, theta)
    D = torch.func.vmap(torch.func.jacrev(one, 1))(z, theta)
    return -torch.linalg.solve(J, D)


def _exact(known: Known, theta: Tensor, weight: Tensor | None = None) -> Tensor:
    """The gradient of :func:`_loss`, or of ``weight * loss``, at the solution, found here."""
    z = known.solution
    for _ in range(6):  # Newton's method, from a solution nearby

        def one(z: Tensor, t: Tensor) -> Tensor:
            return known.residual(z[None], t[None])[0]

        J = torch.func.vmap(torch.func.jacrev(one))(z, theta)
        z = z - torch.linalg.solve(J, known.residual(z, theta))
    slope = torch.func.vmap(torch.func.grad(_loss))(z)
    return (slope.unsqueeze(1) @ jacobian_of(known, z, theta)).squeeze(1)


RULES = Suite("rule", RuleSubject)
check = RULES.check


def _says_exact(rule: Any) -> bool:
    return bool(getattr(rule, "exact", True))


@check(
    "attach returns z and the figures as request.solve (or request.unroll) gave them: the derivative is theirs to carry, "
    "and the point is not the rule's to change."
)
def keeps_the_solution(subject: RuleSubject) -> None:
    """The value is the solution, with a graph where something is differentiated and without one where nothing is."""
    for known in subject.known():
        for tracked in (False, True):
            solution = subject.solve(known, known.theta.clone().requires_grad_(tracked))
            assert solution.value.requires_grad == tracked, (
                f"{known.name}: the value {'has no graph' if tracked else 'has a graph though nothing asks for one'}"
            )
            close(solution.value.detach(), known.solution, max(1e-8, subject.accuracy), f"{known.name}: the solution")


@check(
    "The derivative is not that of the solution: request.solve(linear_solver, rtol=...) solves A^T u = g; a loose rtol or a "
    "cut series is an approximation. If that is intended, say so: exact = False on the class (or pass accuracy=).",
    _says_exact,
)
def gradient_is_exact(subject: RuleSubject) -> None:
    r"""Reverse mode gives ``-(dF/d\theta)' (dF/dz)^{-T} g``, formed densely at the known solution."""
    for known in subject.known():
        wanted = _exact(known, known.theta)
        got = subject.gradient(known, known.theta)
        solved(got, wanted, subject.allowed(wanted), f"{known.name}: the gradient")


@check(
    "An approximation is to descend: its gradient must point the way of the exact one. Check signs (A = J - I of fixed "
    "points, so that (I - J)^{-1} g is -A^{-1} g), and that it is transposed.",
    lambda rule: not _says_exact(rule),
)
def gradient_points_the_same_way(subject: RuleSubject) -> None:
    """Each sample's gradient by a rule that says ``exact = False`` is within 60 degrees of the exact one."""
    for known in subject.known():
        got, wanted = subject.gradient(known, known.theta), _exact(known, known.theta)
        cosine = torch.nn.functional.cosine_similarity(got, wanted, dim=1)
        assert bool((cosine > _SAME_WAY).all()), (
            f"{known.name}: the cosines of the angles to the exact gradients are {cosine.tolist()}"
        )


@check(
    "Forward mode asks for A^{-1}, reverse mode for its transposed, Jacobians for many right-hand sides at once: a linear "
    "solver of the rule's own must serve all of them, from the operator it is given.",
    _says_exact,
)
def jacobians_in_both_modes(subject: RuleSubject) -> None:
    """``jacrev``, ``jacfwd`` and ``jvp`` give the closed form."""
    for known in subject.known(batch=2, linear=False):

        def value(theta: Tensor, known: Known = known) -> Tensor:
            return subject.solve(known, theta).value

        wanted = torch.zeros(2, 3, 2, known.theta.shape[1], dtype=torch.float64, device="cpu")
        exact = jacobian_of(known, known.solution, known.theta)
        for i in range(2):
            wanted[i, :, i] = exact[i]
        allowed = subject.allowed(wanted)
        for mode, transform in (("jacrev", torch.func.jacrev), ("jacfwd", torch.func.jacfwd)):
            solved(transform(value)(known.theta), wanted, allowed, f"{known.name}: {mode}")
        t = torch.linspace(-1, 1, known.theta.numel(), dtype=torch.float64, device="cpu").reshape(known.theta.shape)
        tangent = torch.func.jvp(value, (known.theta,), (t,))[1]
        solved(tangent, (exact @ t.unsqueeze(-1)).squeeze(-1), allowed, f"{known.name}: jvp")


@check(
    "Second derivatives come from the linear solve being differentiable itself: what attach returns must be what "
    "request.solve gave, and a linear solver of the rule's own must not be given a graph of its own.",
    _says_exact,
)
def second_order(subject: RuleSubject) -> None:
    """Derivatives of a gradient, in reverse over reverse and forward over reverse, are its finite differences."""
    for known in subject.known(batch=2, linear=False):
        v = torch.linspace(-1, 1, known.theta.numel(), dtype=torch.float64, device="cpu").reshape(known.theta.shape)
        ahead, behind = (_exact(known, known.theta + h * v) for h in (_SHIFT, -_SHIFT))
        wanted = (ahead - behind) / (2 * _SHIFT)

        def loss(theta: Tensor, known: Known = known) -> Tensor:
            return _loss(subject.solve(known, theta).value).sum()

        theta = known.theta.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(theta), theta, create_graph=True)
        allowed = max(1e-6, 10 * subject.accuracy) * (10 + 10 * float(wanted.abs().max()))
        reverse = _of_product(first, theta, v)
        solved(reverse, wanted, allowed, f"{known.name}: the Hessian by a vector, reverse over reverse")
        forward = torch.func.jvp(torch.func.grad(loss), (known.theta,), (v,))[1]
        solved(forward, wanted, allowed, f"{known.name}: the Hessian by a vector, forward over reverse")


def _of_product(first: Tensor, theta: Tensor, v: Tensor) -> Tensor:
    if not first.requires_grad:
        return torch.zeros_like(theta)
    (found,) = torch.autograd.grad((first * v).sum(), theta, allow_unused=True)
    return torch.zeros_like(theta) if found is None else found


@check("Rows are samples: norms, step lengths and tests are those of a row, dim=1.")
def batch_equals_loop(subject: RuleSubject) -> None:
    """The gradients of a batch are those of its samples alone."""
    for known in subject.known(linear=False):
        together = subject.gradient(known, known.theta)
        alone = torch.cat([subject.gradient(known, known.theta[i : i + 1]) for i in range(3)])
        solved(together, alone, subject.allowed(alone), f"{known.name}: the gradients of a batch, against one by one")


@check(
    "Under vmap the request is a larger batch: what the rule keeps of shapes must come from the request it is given."
)
def vmap_of_the_gradient(subject: RuleSubject) -> None:
    """``vmap(grad)`` over single samples is the gradient of the batch."""
    for known in subject.known(linear=False):

        def one(theta: Tensor, known: Known = known) -> Tensor:
            options: dict[str, Any] = {"batch_dims": 0, "in_dims": None, "z0": known.z0[0]}
            return _loss(subject.solve(known, theta, **options).value)

        mapped = torch.func.vmap(torch.func.grad(one))(known.theta)
        wanted = subject.gradient(known, known.theta)
        solved(mapped, wanted, subject.allowed(wanted), f"{known.name}: vmap(grad)")


@check("Derivatives are in request.theta, which has captured tensors and parameters too: leave none of them out.")
def reaches_captured_tensors(subject: RuleSubject) -> None:
    """A tensor that the function captures has the gradient that it has as an argument."""
    for known in subject.known(linear=False):
        theta, function = known.theta.clone().requires_grad_(), known.problem.function
        problem = PROBLEMS[known.problem.kind.name](lambda z: function(z, theta))  # noqa: B023
        how: dict[str, Any] = {"batch_dims": 1, "solver": subject.solver, "rule": subject.part}
        value = solve(problem, known.z0, (), rtol=1e-10, atol=1e-10, **how).value
        assert value.requires_grad, f"{known.name}: the solution has no derivative by a captured tensor"
        (got,) = torch.autograd.grad(_loss(value).sum(), theta)
        wanted = subject.gradient(known, known.theta)
        solved(got, wanted, subject.allowed(wanted), f"{known.name}: the gradient by a captured tensor")


@check(
    "NaN spreads: a sum, a mean or a test over the whole batch. One bad sample must not spoil the derivative of others."
)
def nan_stays_in_its_sample(subject: RuleSubject) -> None:
    """Beside a sample whose argument is NaN, the gradients of the others are what they are."""
    keep = torch.tensor([0, 2], device="cpu")
    for known in subject.known(linear=False):
        theta = known.theta.clone()
        theta[1] = torch.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = subject.gradient(known, theta, on_failure="ignore", max_steps=100)[keep]
        wanted = subject.gradient(known, known.theta)[keep]
        solved(got, wanted, subject.allowed(wanted), f"{known.name}: the gradients beside a sample of NaN")


@check(
    "A derivative that does not exist is refused or warned of, never returned as a number: let what request.solve raises "
    "pass, and mark in converged what a linear solver of your own could not solve.",
    _says_exact,
)
def tells_of_failure(subject: RuleSubject) -> None:
    """Where ``dF/dz`` is singular a derivative raises or warns, and a problem without a solution raises."""
    served = {known.problem.kind.name: known.problem.kind for known in subject.known(1)}
    for kind in served.keys() & {"root", "fixed_point"}:
        theta = torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64, device="cpu")
        sign = -1 if served[kind].iteration else 1

        def flat(z: Tensor, t: Tensor, sign: int = sign) -> Tensor:
            return (z - t) ** 3 if sign > 0 else z - (z - t) ** 3

        known = Known("singular", PROBLEMS[kind](flat), theta, theta, theta, lambda z, t: (z - t) ** 3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                got = subject.gradient(known, theta, z0=theta)
            except RuntimeError:
                got = None
        assert got is None or said, f"dF/dz = 0 at a solution, and the gradient {got.tolist()} is returned silently"
        problem, z0 = unsolvable(kind, batch=2, size=3)
        try:
            solve(problem, z0, (), batch_dims=1, solver=subject.solver, rule=subject.part, max_steps=30)
        except ConvergenceError:
            continue
        raise AssertionError(f"{kind} without a solution: no ConvergenceError was raised")


@check("Work in the dtype of z: tensors by z.new_* / *_like, tolerances by torch.finfo(z.dtype).eps.")
def keeps_dtype(subject: RuleSubject) -> None:
    """In float32 the gradient is float32, and that of an exact rule as good as that allows."""
    for known in subject.known(dtype=torch.float32, linear=False):
        got = subject.gradient(known, known.theta)
        assert got.dtype == torch.float32, f"{known.name}: the gradient is {got.dtype}"
        if not subject.exact:
            continue
        double = known_problems(known.problem.kind.name, batch=3, size=3)
        wanted = subject.gradient(next(k for k in double if k.name == known.name), known.theta.double())
        allowed = max(2e-3, 20 * subject.accuracy) * (1 + float(wanted.abs().max()))
        close(got.double(), wanted, allowed, f"{known.name}: the gradient in float32")


add_common_checks(RULES)
