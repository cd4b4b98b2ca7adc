"""What is said, and done, when a solve or the linear solve of a derivative has failed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording, seeded
from implicitkit.foundation.autocast import computing_dtype
from implicitkit.foundation.errors import (
    ConvergenceError,
    ConvergenceWarning,
    ImpureFunctionWarning,
    warn,
)
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.trees import describe_leaves, tree_map
from implicitkit.solution import Record, Solution, Status

_MANY = 50  # evaluations after which two more are no matter, and before which nothing has been in the way
#: steps, of z, larger than the next lower precision rounds to, and what computes in that one
_LOWER = {
    torch.float64: (
        1e-6,
        "single precision (a number z of torch.float64 times a matrix of torch.float32 is one of torch.float32), or by a "
        "loop or a solve that ends before its own result is that exact: convert the rest to torch.float64, or tighten what "
        "is inside",
    ),
    torch.float32: (
        5e-3,
        "half precision (torch.autocast or .half() inside the function: put autocast around the solve instead, which then "
        "asks for what half precision can tell), or rounded to whole steps",
    ),
}
_NONFINITE = frozenset({Status.NONFINITE})
_SAY_WHY = (Status.STOPPED, Status.INFEASIBLE, Status.UNBOUNDED, Status.NONCONVEX)  # themselves, and what to do
_WAYS_OUT = (
    '. A singular Jacobian has the minimum-norm answer with rule=ik.Implicit(linear_solver="lsmr"); otherwise try '
    'another linear_solver=, raise its max_steps= or rtol=, or accept it with on_failure="warn" or "ignore"'
)
_UNDEFINED = (
    ". The Jacobian itself has NaN or Inf at the solution: the function has a value there, but torch no derivative of it "
    "(torch.linalg.eigh, svd or eig where two eigenvalues are equal, or so close that the precision cannot tell them apart; "
    "sqrt, norm or a power at zero; a branch that torch.where does not take). Write that part so that it has one, compute "
    'in float64, or accept none with on_failure="nan"'
)
POLICIES = ("raise", "warn", "ignore", "nan")
"""What ``on_failure=`` may be, everywhere."""


def check_policy(on_failure: Any) -> str:
    """The policy itself.

    Raises:
        ValueError: it is none.
    """
    if on_failure not in POLICIES:
        raise ValueError(f"on_failure must be one of {', '.join(map(repr, POLICIES))}, got {on_failure!r}")
    return str(on_failure)


# ------------------------------------------------------------------------------------------------------------ the solve
@recording.unrecorded()
def report_failure(solution: Solution, on_failure: str, why: tuple[str, frozenset[Status]]) -> None:
    """Raise or warn that a solve (on plain tensors) has failed; ``why``: by :func:`failure_hint`."""
    if on_failure == "raise":  # no name for the error here: its traceback would hold it, and all tensors of the solve
        raise solution._error(*why) from getattr(solution._record.outcome, "error", None)
    warn(str(solution._error(*why)), ConvergenceWarning)


def warn_if_unsteady(record: Record) -> None:
    """Warn where points were accepted whose residual no two evaluations agree on: what stands in the way of the tolerance
    was taken for rounding, and is something else."""
    outcome = record.outcome
    if outcome.evaluations < _MANY or outcome.tolerance is None:
        return
    with recording.unrecorded():
        if bool((outcome.residual_norm > outcome.tolerance).any()) and (said := record.unsteady(1.0)):
            warn(f"{said} What was found solves it to within that", ImpureFunctionWarning)


@recording.unrecorded()
def failure_hint(record: Record, z0: Any, args: tuple[Any, ...]) -> tuple[str, frozenset[Status]]:
    """A sentence on why, by looking at what was given and by asking the problem; and the statuses whose cure it is."""
    outcome, system = record.outcome, record.system
    lost = outcome.status == int(Status.NONFINITE)
    if bool((lost & (outcome.steps == 0)).any()):
        return _of_the_start(record, z0, args), _NONFINITE
    if system is None:
        return "", frozenset()
    problem, theta = system.problem, record.theta
    if bool(lost.any()):
        if culprits := problem.unusable(theta):
            return f"No z can satisfy the data: {', '.join(culprits)}.", _NONFINITE
        if said := _of_overflow(record):
            return said, _NONFINITE
    if outcome.kink is not None:
        return outcome.kink.message, frozenset({Status.STALLED})
    if said := problem.coupled(system, outcome.z, theta):
        return said, frozenset(Status) - _NONFINITE
    failed = outcome.status != int(Status.CONVERGED)
    for status in _SAY_WHY:
        explained = outcome.status == int(status)
        if status is Status.UNBOUNDED and problem.kind.returns_program:
            explained = explained & ~problem.violates(system, outcome.z, theta)
        failed = failed & ~explained
    if not bool(failed.any()):
        return "", frozenset()
    hint = problem.explain(system, outcome.z, theta, failed)
    if not hint and problem.kind.iteration:
        hint = _of_rounding(outcome.z[failed], outcome.residual_norm[failed]) or _of_slow_maps(outcome)
    hint = hint or _of_jumps(record, failed)
    return hint, frozenset({Status.MAX_STEPS, Status.STALLED}) if hint else frozenset()


def _of_the_start(record: Record, z0: Any, args: tuple[Any, ...]) -> str:
    """What to say where there is no residual at the start."""
    system = record.system
    culprits = describe_leaves(z0, "z0", _nonfinite) + describe_leaves(args, "args", _nonfinite)
    if culprits:
        return f"NaN or Inf in: {', '.join(culprits)}. Clean the data, or leave such samples out."
    if system is not None and system.problem.no_start:
        return str(system.problem.no_start)
    if system is not None and system.origin.lifted.failed:
        return f"The function has no value there: {system.origin.lifted.failed}"
    # a message says that it has a value there, but no derivative
    unsaid = "" if record.outcome.message else "The function is not finite at z0: start inside its domain."
    return _of_overflow(record) or unsaid


def _of_overflow(record: Record) -> str:
    """What to say where the numbers of a sample are finite and their norm is not: the squares overflow that it adds up."""
    outcome, system, F = record.outcome, record.system, None
    lost = outcome.status == int(Status.NONFINITE)
    with contextlib.suppress(Exception), compat.untracked(), compat.own_graphs():
        F = torch.cat([system.residual(outcome.z, *record.theta).detach(), outcome.z], 1)[lost]
    if F is None or not bool(torch.isfinite(F).all()):
        return ""
    if bool(torch.isfinite(torch.linalg.vector_norm(F.to(outcome.residual_norm), dim=1)).any()):
        return ""
    dtype = computing_dtype(F.dtype, F.device.type)
    other = "" if dtype is torch.float64 else ", or torch.float64"
    return (
        f"z and F are finite there, with numbers of {float(F.abs().max()):.3g}, but their squares, which norms add up, "
        f"overflow in {dtype}: use larger units, in which z and F are near one{other}."
    )


def _of_jumps(record: Record, failed: Tensor) -> str:
    """What to say where, along a line through the points that failed, the function jumps by as much as is left of it, which
    is more than it rounds to.

    Second differences of a smooth function fall to a sixteenth with steps of a quarter, those at a kink are few.  Rounding
    in a lower precision, or an iteration inside that ends early, is in a third of them and more.
    """
    outcome, system = record.outcome, record.system
    z, norms = outcome.z, outcome.residual_norm[failed]
    stuck = bool(((outcome.status == int(Status.STALLED)) | (outcome.status == int(Status.MAX_STEPS)))[failed].all())
    if system is None or system.lifted.random or z.dtype not in _LOWER or outcome.evaluations < _MANY:
        return ""
    largest, culprits = _LOWER[z.dtype]
    if bool((norms <= 100 * torch.finfo(z.dtype).eps * torch.linalg.vector_norm(z, dim=1)[failed]).any()):
        return ""
    if not stuck or record.unsteady(0.0):
        return ""
    sizes = []
    with contextlib.suppress(Exception), compat.untracked(), compat.own_graphs():
        direction = (1 + seeded.uniform(*z.shape, seed=0x6A).to(z)) * torch.where(
            z == 0, z.abs().amax(1, keepdim=True), z
        )
        for step in (largest, largest / 4):
            line = [system.residual(z + k * step * direction, *record.theta).detach() for k in range(-8, 9)]
            second = torch.linalg.vector_norm(torch.stack(line).diff(n=2, dim=0), dim=2)
            sizes.append(second.kthvalue(10, 0).values[failed])
    if len(sizes) < 2 or not bool(((sizes[1] >= 0.1 * norms) & (sizes[1] >= 0.25 * sizes[0])).all()):
        return ""
    return (
        f"The function is not smooth there: from one point to the next it jumps by about {float(sizes[1].max()):.1g}, no "
        f"less than what is left of it. A part may be computed in {culprits}. Or loosen rtol= / atol= to that."
    )


def _of_rounding(z: Tensor, norms: Tensor) -> str:
    """What to say of a fixed point where what is left of the residual is the rounding of the function's own precision."""
    dtype = computing_dtype(z.dtype, z.device.type)
    cast, rounding = dtype is not z.dtype, torch.finfo(dtype).eps
    if not bool((norms <= 2 * rounding * torch.linalg.vector_norm(z, dim=1)).all()):
        return ""
    where = f"Under autocast the function computes in {dtype}" if cast else f"The function computes in {dtype}"
    cure = (
        "Solve outside of autocast (torch.autocast(..., enabled=False)), or l"
        if cast
        else "Solve in torch.float64, or l"
    )
    return (
        f"{where}, which rounds to {rounding:.1g} of its values: less in |F| / |z| is luck. "
        f"{'L' if dtype is torch.float64 else cure}oosen rtol= to that."
    )


def _of_slow_maps(outcome: Any) -> str:
    """What to say of a fixed point in low precision whose residual met the tolerance where no fixed point can be seen."""
    far, dtype = outcome.status == int(Status.DIVERGED), outcome.z.dtype
    if dtype is torch.float64 or outcome.tolerance is None or not bool(far.any()):
        return ""
    if not bool((outcome.residual_norm <= outcome.tolerance)[far].all()):
        return ""
    return (
        "|F| is below rtol |z| there; but a map that contracts slowly, by L close to 1, may still be |F| / (1 - L) away "
        f"from its fixed point, and {dtype} rounds too much for that to be seen: solve in torch.float64."
    )


def plain_solution(solution: Solution) -> Solution:
    """A solution on plain tensors, whatever transforms surround the call (under ``torch.vmap`` with the batch in front)."""
    layout, z = solution._layout, solution._record.outcome.z
    if len(z) == layout.batch:
        value = layout.unpack(z)
    else:
        value = torch.func.vmap(layout.unpack)(z.reshape(-1, layout.batch, layout.size))
    return Solution(value, None, layout, solution._record, solution.solver, solution.rule)


def blank_failures(solution: Solution) -> None:
    """NaN for the samples that failed."""
    good = solution.converged

    def blank(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.where(good.reshape(good.shape + (1,) * (t.ndim - good.ndim)), t, torch.nan)

    solution.value, solution.multipliers = tree_map(blank, solution.value), tree_map(blank, solution.multipliers)


def _nonfinite(t: Tensor) -> str:
    """Where the first number that is not finite stands, for messages: empty where all are finite."""
    wrapped = compat.is_wrapped(t)
    while compat.is_wrapped(t):
        t = compat.unwrap(t)
    wrong = (~torch.isfinite(t.detach())).nonzero()
    if not len(wrong):
        return ""
    return " " if wrapped or not t.ndim else f" (first at {wrong[0].tolist()})"


# ------------------------------------------------------------------------------------------- the derivative's linear solve
def linear_failure(
    name: str, answer: Any, A: Operator, b: Tensor, transposed: bool, on_failure: str, record: Record
) -> None:
    """Raise or warn that ``A x = b`` was not solved for some samples (``transposed``: in reverse mode): what the linear
    solver of this ``name`` answered; ``record``: of the solve whose derivative is asked for."""
    converged, residual_norm = answer.converged, answer.residual_norm
    failed = failed_samples(converged, record)
    batch = _samples(converged, record)
    norms = torch.where(converged, 0, residual_norm).view(-1, batch).amax(0)[list(failed)]
    order = torch.argsort(torch.nan_to_num(norms, nan=torch.inf), descending=True)[:5].tolist()
    worst, worst_norms = [failed[i] for i in order], norms[order].tolist()
    where = "backward (reverse mode)" if transposed else "forward-mode derivative"
    text = (
        f"the linear solve of the {where} did not converge: {name}, {len(failed)} of {batch} samples; "
        "worst: " + ", ".join(f"sample {i}: residual {r:.3g}" for i, r in zip(worst, worst_norms, strict=True))
    )
    undefined = _is_undefined(A, b, ~converged)
    if answer.reason and not undefined:
        text += f". {answer.reason}"
    if not bool(torch.isfinite(b).all()):
        text += ". The incoming derivative itself has NaN or Inf"
    text += _UNDEFINED if undefined else _cause(record, worst[0]) + _WAYS_OUT
    if on_failure == "warn":
        warn(text, ConvergenceWarning)
        return
    raise ConvergenceError(text, None, tuple(worst), tuple(worst_norms))


def _is_undefined(A: Operator, b: Tensor, which: Tensor) -> bool:
    """Is a product of the Jacobian with a vector of ones NaN or infinite, in one of these right-hand sides' samples?"""
    product = A.mv(torch.ones_like(b[: A.batch]))
    return bool((which.view(-1, len(product)).any(0) & ~torch.isfinite(product).all(1)).any())


def _samples(rows: Tensor, record: Record) -> int:
    """How many samples the rows are of: many of each, the samples running fastest, where there are many derivatives."""
    known = 0 if record.outcome is None else len(record.outcome.status)
    return known if known and len(rows) % known == 0 else len(rows)


def failed_samples(converged: Tensor, record: Record) -> tuple[int, ...]:
    """The samples of a solve that have a derivative which was not found."""
    good = converged.view(-1, _samples(converged, record)).all(0)
    return tuple((~good).nonzero().squeeze(1).tolist())


def _cause(record: Record, sample: int) -> str:
    """What the solve itself tells of a linear system that cannot be solved: where ``z`` is, and how it came there."""
    outcome = record.outcome
    if outcome is None or len(outcome.status) == 0:
        return ""
    sample %= len(outcome.status)  # of part of a batch
    size = float(torch.linalg.vector_norm(outcome.z[sample].double()))
    status = Status(int(outcome.status[sample]))
    text = f". |z| = {size:.3g} there"
    if status is not Status.CONVERGED:
        return (
            f"{text}, and the solve had not converged ({status.meaning}): the Jacobian of a point that is no solution"
        )
    if size > 1e3:
        return f"{text}: is that a solution, or has z run away? ik.certify(solution) tells"
    if record.system is not None and record.system.problem.kind.flow > 0:
        return (
            f"{text}: a double or otherwise singular solution, or one of many beside each other, of which the way from the "
            "start chooses one (who is left of an epidemic). The derivative of that is the way's own: for a flow that of "
            "ik.InitialValue(rhs, (0, T)) to a time at which it rests, for a map that of rule=ik.Unroll()"
        )
    return (
        f"{text}: a double or otherwise singular solution, one of a whole curve of solutions, or an equation that does not "
        "depend on z; ik.certify(solution) tells how far a solution can be"
    )
