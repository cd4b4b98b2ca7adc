"""What a solve returns."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError, ConvergenceError
from implicitkit.foundation.inverse_estimate import InverseEstimate
from implicitkit.foundation.linear_report import LinearReport
from implicitkit.foundation.pytrees import tree_flatten, tree_map
from implicitkit.foundation.wording import UNSTEADY

if TYPE_CHECKING:
    from implicitkit.foundation.trees import Layout

# other libraries' names, and ours
_OTHER_NAMES = {
    "x": "value", "z": "value", "zs": "value", "z_star": "value", "params": "value", "root": "value", "result": "value",
    "solution": "value", "y": "value", "success": "converged", "nit": "steps", "niter": "steps", "iterations": "steps",
    "nfev": "evaluations", "fun": "residual_norm", "residual": "residual_norm", "message": "status", "state": "aux",
    "info": "aux", "duals": "multipliers", "dual": "multipliers",
}  # fmt: skip


class Status(enum.IntEnum):
    """How the solve of one sample ended (``solution.status`` holds these numbers)."""

    CONVERGED = 0
    MAX_STEPS = 1
    NONFINITE = 2
    STOPPED = 3
    STALLED = 4
    INFEASIBLE = 5
    UNBOUNDED = 6
    INACCURATE = 7
    NONCONVEX = 8
    DIVERGED = 9
    SADDLE = 10

    @property
    def meaning(self) -> str:
        """One clause for people."""
        return _MEANING[self]


_MEANING = {
    Status.CONVERGED: "the residual met the tolerance",
    Status.MAX_STEPS: "the step limit was reached first",
    Status.NONFINITE: "the residual became NaN or Inf",
    Status.STOPPED: "a callback asked to stop",
    Status.STALLED: "the solver gave up before the residual met the tolerance",
    Status.INFEASIBLE: "no point satisfies the constraints",
    Status.UNBOUNDED: "the objective falls without bound, within the constraints if there are any",
    Status.INACCURATE: "close, but the residual did not meet the tolerance",
    Status.NONCONVEX: "the quadratic part is not positive semidefinite: a stationary point need be no minimum",
    Status.DIVERGED: (
        "z has run away, or stands so far out that nothing there tells a solution from the way to a zero at infinity"
    ),
    Status.SADDLE: "the gradient vanishes at a saddle point or a maximum: the objective falls along a direction from there",
}


_NEVER_BEGAN = (
    "The function is not finite where the search begins: look for NaN or Inf in z0 and in what the function is given or "
    "captures, or start inside its domain."
)

#: What can be done about it.
_ADVICE = {
    Status.MAX_STEPS: "Raise max_steps=, loosen rtol= / atol=, or try another solver= or z0.",
    Status.NONFINITE: (
        "The search left the domain of the function, to whose edge it is led where there is no solution inside (as of "
        "sqrt(z) + 1 = 0): start elsewhere, keep z inside (bounds=, a change of variables such as z = exp(y)), or try "
        "another solver=."
    ),
    Status.INACCURATE: "Loosen rtol= / atol=, or scale the data.",
    Status.INFEASIBLE: "Check the data of the constraints.",
    Status.NONCONVEX: "A stationary point is found by ik.argmin with constraints= and a z0.",
    Status.DIVERGED: (
        "There may be no solution: what vanishes as z grows has its zero at infinity. Rule that out in the problem (a "
        "bound, a normalisation, other unknowns), or start nearer to a solution. If solutions are that large, count z in "
        "larger units (solve for z / 1000, say), so that it is of size one."
    ),
    Status.UNBOUNDED: "State what keeps z back: bounds=, constraints=, or a term that grows.",
    Status.SADDLE: (
        "A minimiser (solver='auto', 'lbfgs', 'newton_cg') leaves such a point, a solver of equations may be drawn to it; "
        "or start elsewhere."
    ),
}
_NO_ROOT = (
    "Perhaps there is no solution near: |F| may have a minimum there that is not zero. Start elsewhere (z0= or bracket=), "
    "try another solver=, or loosen rtol= / atol= if that |F| is small enough."
)
_AGAIN = 0.1  # share of a residual that failed, by which two evaluations may differ
_KINK = (
    "Loosen rtol= / atol=, or try another solver= or z0. A gradient that does not vanish where the objective stops falling "
    "is that of a kink (relu, abs, max): smooth it, or state it as prox= or constraints=. A sum of kinks (|X w - y|_1, the "
    "loss of quantile regression) is a linear program: ik.QuadraticProgram(None, q, ...), with the parts of X w - y above "
    "and below zero as further unknowns."
)


@dataclass
class Record:
    """Figures that a solve leaves behind on plain tensors, whatever transforms surround it (shared with its Solution)."""

    outcome: Any = None
    linear: list[LinearReport] = field(default_factory=list)
    system: Any = None  # what was solved, and the plain tensors it was solved for
    theta: tuple[Tensor, ...] = ()
    truncated: bool = False  # so many steps were asked for, and not to converge is no failure
    stand_in: Any = None  # a solved sample, for derivatives in the place of lost ones
    start: Any = None  # of a flow or an iteration, which may conserve sums of it
    held: Any = None  # these (:mod:`implicitkit.rule.conserved`), once somebody has asked
    told: int = 0  # the order of derivatives up to which it has been said what they lack

    def __getstate__(self) -> dict[str, Any]:  # the user's function need not be picklable
        return self.__dict__ | {"system": None, "theta": (), "stand_in": None, "start": None, "held": None}

    def unsteady(self, share: float) -> str:
        """A sentence, if two evaluations of the function at the points that were found differ by more than was asked for,
        and than a ``share`` of the residual: it is then no function.  That it draws from torch's own generator is known."""
        outcome, system = self.outcome, self.system
        if system is None or system.lifted.random or compat.transforms_active() or compat.has_forward_level():
            return ""
        try:
            with compat.untracked(), compat.own_graphs():
                first, second = (system.residual(outcome.z, *self.theta).detach() for _ in range(2))
        except Exception:  # what is reported now is another failure
            return ""
        differ = torch.linalg.vector_norm(first - second, dim=1).to(outcome.residual_norm)
        least = share * outcome.residual_norm
        noisy = differ > (least if outcome.tolerance is None else torch.maximum(least, outcome.tolerance))
        return UNSTEADY.format(float(differ[noisy].max())) if bool(noisy.any()) else ""


class Solution:
    """The solution of an implicit equation and how it was found.

    Units: ``value`` has those of ``z0``, residuals those of the problem's residual.

    Attributes:
        value: pytree like ``z0``, differentiable.
        evaluations: calls of the user's function. sample_evaluations: the same, times the samples in each call.
        trace: residual norms after each step, shape ``(steps + 1, *batch)``, if asked for; else ``None``.
        solver: name of the solver.
        multipliers: dual variables of a constrained problem; ``None`` without constraints.
        aux: what the function returns beside its value at the solution (``has_aux=True``), differentiable; of
            ``ik.implicit(..., has_aux=True)`` what the solver returns beside ``z``, with derivative zero; else ``None``.
    """

    multipliers: Any = None
    aux: Any = None

    def __init__(
        self, value: Any, stats: Tensor | None, layout: Layout, record: Record, solver: str, rule: str
    ) -> None:
        self.value = value
        self._stats, self._layout, self._record = stats, layout, record
        self.solver, self.rule = solver, rule

    # ---- one entry a sample
    @property
    def residual_norm(self) -> Tensor:
        """``|F(z)|_2`` of each sample at ``value``, shape ``batch``."""
        return self._per_sample(0, "residual_norm").to(self._layout.dtype)

    @property
    def steps(self) -> Tensor:
        """Steps that each sample took, shape ``batch``, int64."""
        return self._per_sample(1, "steps").to(torch.int64)

    @property
    def status(self) -> Tensor:
        """A :class:`Status` number for each sample, shape ``batch``, int64."""
        return self._per_sample(2, "status").to(torch.int64)

    @property
    def converged(self) -> Tensor:
        """Did the residual of each sample meet the tolerance?  Shape ``batch``, bool."""
        return self.status == int(Status.CONVERGED)

    @property
    def truncated(self) -> bool:
        """Is it no failure that samples have not converged, as nothing but steps was asked for?  With ``rtol=0, atol=0``,
        or by ``ik.Unroll(steps=)``."""
        return bool(self._record.truncated)

    def _per_sample(self, column: int, name: str) -> Tensor:
        # under transforms a tensor of the caller's level, else (and when the transforms have ended) plain figures
        stats = self._stats
        if stats is not None and compat.is_wrapped(stats) and not compat.transforms_active():
            stats = None
        values = getattr(self._record.outcome, name) if stats is None else stats[..., column]
        return self._layout.unpack_batch(values)

    # ---- figures of the whole call
    @property
    def evaluations(self) -> int:
        """Calls of the user's function."""
        return self._record.outcome.evaluations

    @property
    def sample_evaluations(self) -> int:
        """Calls of the user's function, times the samples in each call: what dropping converged samples saves."""
        return self._record.outcome.sample_evaluations

    @property
    def trace(self) -> Tensor | None:
        """Residual norms at the start and after each step, ``(steps + 1, *batch)``; ``None`` unless ``trace=True``."""
        norms = self._record.outcome.trace
        if not norms:
            return None
        return self._layout.unpack_batch(torch.stack(norms))

    @property
    def message(self) -> str:
        """What a black-box solver said, or what is to be known of the points that were found, if anything."""
        return self._record.outcome.message

    @property
    def blocks(self) -> Any:
        """What a solve by blocks reports besides (``BlockReport``: evaluations per node, depth);
        ``None`` after any other."""
        return getattr(self._record.outcome, "report", None)

    @property
    def inverse_estimate(self) -> InverseEstimate | None:
        """The solver's own estimate of ``(dF/dz)^{-1}`` at the solution, on plain tensors, one block a sample; ``None``
        unless the solver was told to keep it (``ik.Broyden(keep_inverse=True)``)."""
        kept = self._record.outcome.kept
        return InverseEstimate(kept["scale"], kept["U"], kept["V"]) if {"scale", "U", "V"} <= set(kept) else None

    @property
    def backward(self) -> LinearReport | None:
        """The figures of the last derivative's linear solve; ``None`` until one has run."""
        return self._record.linear[-1] if self._record.linear else None

    def __getattr__(self, name: str) -> Any:
        if name in _OTHER_NAMES:
            raise AttributeError(f"a Solution has no attribute {name!r}: did you mean solution.{_OTHER_NAMES[name]}?")
        if not name.startswith("_") and hasattr(Tensor, name):
            raise AttributeError(f"a Solution is not a tensor: did you mean solution.value.{name}?")
        raise AttributeError(f"a Solution has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Solution:
        leaves = tree_flatten((self.value, self.multipliers, self.aux))[0]
        if any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in leaves):
            raise CapabilityError(
                "a Solution whose value carries a derivative cannot be copied deeply: torch copies no graph. "
                "copy.deepcopy(solution.detach()) has the values and the figures, without the derivative"
            )
        other = copy.copy(self)
        memo[id(self)] = other
        other.__dict__.update((name, copy.deepcopy(value, memo)) for name, value in self.__dict__.items())
        return other

    def detach(self) -> Solution:
        """These figures beside a value without derivative: to keep a solution without its graph and its inputs.

        What was solved goes with them: a detached solution cannot be certified.
        """
        other = copy.copy(self)
        free = lambda t: t.detach() if isinstance(t, Tensor) else t  # noqa: E731
        other.value = tree_map(free, self.value)
        other.multipliers = None if self.multipliers is None else tree_map(free, self.multipliers)
        # the same list: a later backward adds to it
        other._record = Record(self._record.outcome, self._record.linear, truncated=self._record.truncated)
        return other

    def raise_for_status(self) -> Solution:
        """Raise :class:`~implicitkit.ConvergenceError` unless every sample converged; returns itself."""
        outcome = self._record.outcome
        if bool((outcome.status != int(Status.CONVERGED)).any()):
            raise self._error()
        return self

    def _error(self, hint: str = "", answered: frozenset[Status] = frozenset()) -> ConvergenceError:
        """What to raise; ``hint``: a sentence on why, which says what to do about the statuses ``answered``."""
        outcome = self._record.outcome
        failed = (outcome.status != int(Status.CONVERGED)).nonzero().squeeze(1)
        norms = outcome.residual_norm[failed]
        order = torch.argsort(torch.nan_to_num(norms, nan=torch.inf), descending=True)[:5]
        worst, worst_norms = failed[order].tolist(), norms[order].tolist()
        kinds = ", ".join(
            f"{int((outcome.status == int(s)).sum())} x {s.name.lower()} ({s.meaning})"
            for s in Status
            if s is not Status.CONVERGED and bool((outcome.status == int(s)).any())
        )
        total = len(outcome.status)
        many = f"{len(failed)} of {total} samples did not converge" if total > 1 else "the solve did not converge"
        names = ", ".join(
            f"{f'sample {i} ({Status(int(outcome.status[i])).name.lower()}): ' if total > 1 else ''}"
            f"|F| = {r:.3g}{self._missed(i)}{self._how_far(i)} after step {int(outcome.steps[i])}"
            for i, r in zip(worst, worst_norms, strict=True)
        )
        text = f"{self.solver}: {many}: {kinds}. Worst: {names}."
        if outcome.message:
            text += f" {' '.join(outcome.message.split()).rstrip('.')}."
        present = {Status(int(code)) for code in outcome.status[failed].unique()}
        if not hint and (hint := self._record.unsteady(_AGAIN)):
            answered = frozenset(Status)
        if hint:
            text += f" {hint}"
        if outcome.error is None:  # what a user's own solver raised is mended there
            text += "".join(f" {advice}" for advice in self._advice(present - answered))
        text += ' on_failure="warn" or "ignore" accepts the point, but a derivative there is not that of a solution'
        known = present - {Status.NONFINITE, Status.INFEASIBLE, Status.UNBOUNDED}
        text += "; ik.certify(error.solution) says how far the next solution can be." if known else "."
        return ConvergenceError(text, self, tuple(worst), tuple(worst_norms))

    def _advice(self, statuses: set[Status]) -> list[str]:
        """What can be done about samples that ended so, a sentence or two for each status."""
        nonfinite = self._record.outcome.status == int(Status.NONFINITE)
        at_once = nonfinite & (self._record.outcome.steps == 0)
        never_began = Status.NONFINITE in statuses and bool(at_once.any())
        if never_began and bool((nonfinite == at_once).all()):
            statuses = statuses - {Status.NONFINITE}  # no sample searched, none can have left the domain
        advice = [_NEVER_BEGAN] * never_began + [text for status, text in _ADVICE.items() if status in statuses]
        if Status.STALLED in statuses:
            system = self._record.system
            kind = None if system is None else system.problem.kind
            advice.append(_KINK if kind is not None and (kind.minimisation or kind.returns_program) else _NO_ROOT)
        return advice

    def _missed(self, sample: int) -> str:
        """The tolerance, where ``|F|`` is known to be above it."""
        outcome = self._record.outcome
        if outcome.tolerance is None:
            return ""
        tolerance = float(outcome.tolerance[sample])
        return f" > tolerance {tolerance:.3g}" if float(outcome.residual_norm[sample]) > tolerance else ""

    def _how_far(self, sample: int) -> str:
        """``|z|``, where it tells something, without multipliers behind it."""
        outcome, system = self._record.outcome, self._record.system
        program = system is not None and system.problem.kind.returns_program
        z = outcome.z[sample, : system.problem.size if program else None]
        size = float(torch.linalg.vector_norm(z.double()))
        far = Status(int(outcome.status[sample])) in (Status.DIVERGED, Status.UNBOUNDED) or not size <= 1e3
        return f" at |z| = {size:.3g}" if far else ""

    def __repr__(self) -> str:
        outcome = self._record.outcome
        status, norm = outcome.status, outcome.residual_norm
        total, good = len(status), int((status == int(Status.CONVERGED)).sum())
        if not total:
            return "Solution(an empty batch)"
        state = (
            ("converged" if good == total else Status(int(status.max())).name.lower())
            if total == 1
            else (f"{good}/{total} converged")
        )
        steps = outcome.steps
        taken = "-".join(str(n) for n in sorted({int(steps.min()), int(steps.max())}))
        worst = torch.nan_to_num(norm, nan=torch.inf).max().item()
        parts = [
            state,
            f"solver={self.solver}",
            f"steps={taken}",
            f"evaluations={outcome.evaluations}",
            f"residual={worst:.2e}",
            f"rule={self.rule}",
        ]
        if self.backward is not None:
            parts.append(f"backward: {self.backward.summary()}")
        if outcome.message and good:
            parts.append(outcome.message)
        return f"Solution({'; '.join(parts)})"
