"""One solve, as a rule and the primitive see it: everything that is not differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.autocast import default_tolerance, full_precision
from implicitkit.foundation.errors import DegenerateWarning, warn
from implicitkit.foundation.linear_report import LinearReport
from implicitkit.foundation.nesting import nested
from implicitkit.foundation.operators import Operator, repeated
from implicitkit.foundation.sparse_products import as_they_lie
from implicitkit.linear.auto import Auto
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.blocks import BlockSubstitution
from implicitkit.linear.catalogue import get_linear_solver
from implicitkit.linear.claims import answer
from implicitkit.linear.equilibrated import equilibrated
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.independence import refuse_coupled
from implicitkit.linear.iterative.preconditioners import preconditioner
from implicitkit.reporting import failed_samples, linear_failure
from implicitkit.rule.changed_function import refuse_changed, refuse_cut, refuse_hidden, refuse_other_tensors
from implicitkit.rule.conserved import hold
from implicitkit.rule.constant_sums import BY_THE_WAY, Held, at_constant_sums, is_ambiguous, is_suspect, unsolved
from implicitkit.rule.determinacy import warn_if_singular
from implicitkit.rule.gauge import without_gauge
from implicitkit.rule.hidden_dependence import warn_if_hidden
from implicitkit.rule.lost_samples import is_lost, lost_rows, or_nan, status_of, without_derivative, without_lost
from implicitkit.rule.primitive import root
from implicitkit.solution import Record, Status
from implicitkit.solver.base import Options, Solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.finding import find
from implicitkit.solver.method import TrackedEvaluations
from implicitkit.sparsity.watching import solved_inside
from implicitkit.system import System


@dataclass
class Request:
    """One solve: a system on matrices, a start, the explicit tensors, how to find the solution and how to report.

    A rule calls :meth:`solve` (or :meth:`unroll`); the primitive the other methods, on plain tensors.

    Attributes:
        system, solver, options: what holds, and how it is solved.
        z0, theta: the start ``(batch, n)`` and the explicit tensors (absent once the primitive has them).
        on_failure: the policy. record: where the figures of the solve go.
        first: the kernel's value at ``z0``, if it is known.
        linear_solver, linear_options: how the derivative's linear systems are solved.
        preconditioner: for these (:mod:`implicitkit.linear.iterative.preconditioners`).
        batchable: the figures of the solve must be a tensor of the caller's ``torch.func`` level.
        watched: what autograd does not see of the function is looked for.
        reversed_: a reverse pass uses what a solve with ``A`` itself finds: the family of a gauge is not asked for.
        order: of the derivatives that its linear solves make.
    """

    system: System
    solver: Solver
    options: Options
    z0: Tensor | None
    theta: tuple[Tensor, ...]
    on_failure: str
    record: Record
    first: Tensor | None = None
    linear_solver: LinearSolver | None = None
    linear_options: dict[str, Any] = field(default_factory=dict)
    preconditioner: Any = None
    batchable: bool = field(default_factory=compat.transforms_active)
    watched: bool = False
    reversed_: bool = False
    order: int = 1

    # ------------------------------------------------------------------------------------------------------ for a rule
    def solve(
        self,
        linear_solver: LinearSolver | str,
        *,
        rtol: float | None = None,
        atol: float = 0.0,
        max_steps: int | None = None,
        watched: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Solve, and differentiate by the implicit function theorem with this linear solver (or that of this name), to
        ``|A u - b| <= atol + rtol |b|`` (``None``: :func:`default_tolerance`) with at most ``max_steps`` products
        (``None``: its own default).

        A truncated one works on the blocks of a composition one after another: as if layer by layer, where a few terms of
        the joint series would not even reach from the output to the input.

        ``watched``: what autograd does not see of the function is said under ``on_failure="ignore"`` too (for a rule that
        deals with failures itself).
        """
        chosen = linear_solver if isinstance(linear_solver, LinearSolver) else get_linear_solver(linear_solver)
        layout, kind = self.system.layout, self.system.problem.kind
        rtol = default_tolerance(layout.dtype, layout.device.type, kind.iteration) if rtol is None else rtol
        if self.system.problem.by_blocks and not chosen.exact:
            chosen = BlockSubstitution(chosen)
        assert self.z0 is not None
        bare = Request(  # written out: once a solve, and dataclasses.replace looks every field up
            system=self.system,
            solver=self.solver,
            options=self.options,
            z0=None,
            theta=(),
            on_failure=self.on_failure,
            record=self.record,
            first=self.first,
            linear_solver=chosen,
            linear_options={"rtol": rtol, "atol": atol, "max_steps": max_steps},
            preconditioner=self.preconditioner,
            batchable=self.batchable,
            watched=watched or self.on_failure != "ignore",
        )
        return root(bare, self.z0, self.theta)

    def unroll(self, steps: int) -> Tensor:
        """``steps`` steps of the solver from the start, differentiable by ordinary differentiation."""
        assert self.z0 is not None
        return self.solver.unroll(TrackedEvaluations(self.system, self.theta, self.solver.solves), self.z0, steps)

    @property
    def kept(self) -> dict[str, Tensor]:
        """What the solver kept of its final state (``Method.keep``), once it has run; plain tensors ``(batch, ...)``."""
        kept: dict[str, Tensor] = self.record.outcome.kept
        return kept

    # ----------------------------------------------------------------------------------------- for the primitive: forward
    def batched(self, dims: Sequence[int | None], batch: int) -> Request:
        """This request ``batch`` times over (see :meth:`System.batched`)."""
        return replace(self, system=self.system.batched(dims, batch), first=None, batchable=True)

    def for_reverse(self) -> Request:
        """This request, where a reverse pass uses what is solved in forward mode."""
        return self if self.reversed_ else replace(self, reversed_=True)

    def find(self, z0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Run the solver on plain tensors: ``z (batch, n)``, and under transforms also ``(batch, 3)``: residual norm,
        steps and status, as a tensor that the levels can batch.

        Raises:
            TypeError: a rule asks, whose derivative would be lost.
        """
        if self.z0 is not None:
            raise TypeError(
                "request.find is what the primitive calls, on plain tensors: its point has no derivative. A rule calls "
                "request.solve(linear_solver, rtol=...) or request.unroll(steps)"
            )
        return solved_inside(lambda: self._find(z0, theta), lambda z: [self.system.residual(z, *theta)])

    def _find(self, z0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        own, sparse = compat.own_graphs(), as_they_lie(self.system.lifted.sparse)
        with compat.untracked(), full_precision(z0.device.type), own, sparse:
            f = Evaluations(self.system, theta, self.solver.solves)
            if self.first is not None:
                f.prime(z0, self.first)
                self.first = None
            outcome = find(self.solver, f, z0, self.options)
            self.system.lifted.found()
            self.record.outcome, self.record.system, self.record.theta = outcome, self.system, tuple(theta)
            follows = self.system.problem.kind.flow > 0
            self.record.start, self.record.held = (z0 if follows else None), None
            z = outcome.z.clone()  # a solver may return what the map returned, and that may be anyone's
            if self.on_failure == "nan" and not outcome.all_converged:  # finite, so that a derivative of zero is zero
                z = torch.where((outcome.status == int(Status.CONVERGED)).unsqueeze(1), z, z0)
            if not self.batchable:
                return z, None
            kind = torch.float32 if z0.device.type == "mps" else torch.float64
            return z, torch.stack([t.to(kind) for t in (outcome.residual_norm, outcome.steps, outcome.status)], 1)

    # ---------------------------------------------------------------------------------- for the primitive: linear solves
    @property
    def factors_once(self) -> bool:
        """Does one factorisation serve all right-hand sides?"""
        return self.linear_solver is not None and self.linear_solver.factors and not self.system.problem.by_blocks

    @property
    def incomplete(self) -> bool:
        """Have samples failed, without an error?"""
        return self.on_failure != "raise" and not self.record.outcome.all_converged

    def solved(self, z: Tensor, theta: Sequence[Tensor], figures: Tensor | None) -> tuple[Tensor, list[Tensor]] | None:
        """``z`` and ``theta`` without what lost samples would make NaN (:mod:`implicitkit.rule.lost_samples`)."""
        self.system.lifted.as_found()
        return without_lost(self.system, self.record, self.on_failure, z, theta, figures)

    def linearise(self, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        """The residual at ``z``, as a plain tensor, with its graph, and ``A`` there.

        Raises:
            CapturedTensorError: the function uses something tracked that it did not use before, or tracks nothing.
            ChangedFunctionError: it is no longer the function that was solved.
            ValueError: the samples of the batch depend on each other.
        """
        lifted, outcome = self.system.lifted, self.record.outcome
        lifted.as_found()
        lifted.cut = False
        with compat.own_graphs():
            out, A = self.system.problem.linearise(self.system, z.detach(), theta)
        known = theta if A.structure is None else [*theta, *A.structure.points]
        refuse_other_tensors(lifted, out, known, z, A.nodes())
        if A.structure is not None:
            A.structure.unsolved = getattr(outcome, "unsolved", frozenset())
        if getattr(self.system.factored, "gone", False):
            self.system.factored = None
        A.known, A.weight = self.system.factored, sum(t.numel() for t in theta) // max(1, self.system.batch)
        if self.preconditioner is not None:
            A.preconditioner = preconditioner(self.preconditioner, A, z)
        if lifted.cut:
            refuse_cut(self.system, z, theta)
        identity = self.system.identity if self.watched or self.system.batch > 1 else ()
        if self.system.batch > 1:
            refuse_coupled(A, (*identity, self.system.settings_now))
        lost = is_lost(outcome.status, outcome.residual_norm, self.on_failure) if self.incomplete else None
        refuse_changed(lifted, outcome, self.options, out, A, z, None if lost is None else ~lost)
        if self.watched:
            warn_if_hidden(self.record, self.system, z, theta, out, A, identity)
        return out, A

    @nested
    def solve_linear(self, A: Operator, b: Tensor, transposed: bool) -> Tensor:
        """``A x = b`` on plain tensors, for one or many right-hand sides of each block, reported, and judged by the failure
        policy."""
        made_of = lambda _: [b, self._equations()]  # noqa: E731
        return solved_inside(lambda: (self._solve_linear(A, b, transposed), None), made_of)[0]

    def _equations(self) -> Tensor:
        """The residual, for what it depends on: of as many samples as the solve or this request had."""
        return self.record.system.residual(self.record.outcome.z, *self.record.theta)

    def _solve_linear(self, A: Operator, b: Tensor, transposed: bool) -> Tensor:
        assert self.linear_solver is not None
        rows = b.shape[0]
        limited, lost = self._limited(), lost_rows(self.record, self.on_failure, rows)
        if lost is not None:
            b = torch.where(lost, 0, b)
        auto = isinstance(self.linear_solver, Auto)
        gauges = (transposed or self.reversed_) and auto
        A.told_singular = gauges or (auto and self.follows)
        held, whole = self.held, False
        if held is not None and bool(held.which.all()):
            answer = at_constant_sums(A, b, unsolved(b), held, transposed)
            whole = bool(answer.converged.all())
        if not whole:
            answer, whole = self._answer(A, b, transposed, limited)
            again = lambda b: self._answer(A, b, transposed, limited)[0].x  # noqa: E731
            follows = self.follows and auto
            asks = follows and (held is not None or not whole or is_suspect(A))
            if follows and not asks and (ambiguous := is_ambiguous(A, again)) is not None:
                asks = ambiguous
                self.record.start = self.record.start if asks else None  # it is regular: nobody asks again
            held = self._held(A.T if transposed else A) if asks else None
            if held is not None:
                answer = at_constant_sums(A, b, answer, held, transposed)
                whole, gauges = bool(answer.converged.all()), gauges and answer.reason != BY_THE_WAY
            elif not whole and A.told_singular and A.formed is not None and not gauges:
                A.told_singular = False
                answer, whole = self._answer(A, b, transposed, limited)
        if gauges and not whole:
            answer, whole = self._without_gauge(A, b, answer, transposed, limited)
        if answer.error is not None and not whole:
            raise answer.error(failed_samples(answer.converged, self.record))
        self._keep_factors(A, transposed)
        self._refuse_hidden(A, b, answer.x)
        shaped = self.system.layout.unpack_batch
        self.record.linear.append(
            LinearReport(shaped(answer.converged), shaped(answer.residual_norm), shaped(answer.steps), transposed)
        )
        del self.record.linear[:-8]  # the last few are enough
        if self.on_failure != "ignore" and self.linear_solver.exact and held is None:
            solve = lambda A, b: self._answer(A, b, transposed, limited)[0]  # noqa: E731
            warn_if_singular(self.record, self.options.rtol, A, b, answer.x, transposed, solve)
        if answer.doubt and self.on_failure != "ignore":
            warn(answer.doubt, DegenerateWarning)
        if self.on_failure == "nan":
            return or_nan(answer, b, status_of(self.record, len(b)))
        if lost is not None:
            answer = without_derivative(answer, b, lost, status_of(self.record, len(b)))
            whole = bool(answer.converged.all())
        if whole:
            return answer.x
        # where the incoming derivative is not finite, neither is the outgoing one, as of any operation of torch: a scaled
        # loss that overflows (torch.amp.GradScaler) is no failure of the solve
        finite = torch.isfinite(b).all(1)
        answer = answer._replace(
            x=torch.where(finite.unsqueeze(1), answer.x, torch.nan), converged=answer.converged | ~finite
        )
        if self.on_failure != "ignore" and not bool(answer.converged.all()):
            name = self.linear_solver.name or type(self.linear_solver).__name__
            linear_failure(name, answer, A, b, transposed, self.on_failure, self.record)
        return answer.x

    def _keep_factors(self, A: Operator, transposed: bool) -> None:
        """The next derivative at this point finds the factors that this one has made."""
        made = A.formed if A.formed is not None and A.formed.regular else None
        if made is None and isinstance(self.system.factored, DenseBlocks):
            made = A.exact  # in place of those of a point nearby, which have done their work
        if made is not None:
            self.system.factored = made.T if transposed else made

    def _refuse_hidden(self, A: Operator, b: Tensor, x: Tensor) -> None:
        """Raise where the solution of ``(J - I) x = b`` is ``x = -b``: then ``J = 0``, and autograd has seen no ``z`` in the
        map."""
        assert self.linear_solver is not None
        is_minus = A.asked and A.fixed_point and self.linear_solver.exact and torch.equal(x, -b) and bool(b.any())
        if is_minus and (len(b) != A.batch or torch.equal(A.mv(x), b)):
            refuse_hidden(self.record)

    def _held(self, J: Operator) -> Held | None:
        """Sums that a flow conserves, asked for once."""
        if self.held is None and isinstance(self.linear_solver, Auto):
            hold(self.record, J, self.options.rtol, quietly=self.on_failure == "ignore")
        return self.held

    @property
    def follows(self) -> bool:
        """Does the solution follow a flow or an iteration from the start, of which sums may remain?"""
        return self.start is not None

    @property
    def start(self) -> Tensor | None:
        """Where it began then, as plain tensors."""
        return self.record.start

    @property
    def held(self) -> Held | None:
        """The sums of the start that the solution keeps, if a linear solve has met any."""
        held: Held | None = self.record.held
        return held

    def _without_gauge(
        self, A: Operator, b: Tensor, found: LinearSolution, transposed: bool, limited: dict[str, Any]
    ) -> tuple[LinearSolution, bool]:
        """:meth:`_answer`, where ``found`` has failed at one that is singular."""
        residual = lambda z: self.record.system.residual(z, *self.record.theta)  # noqa: E731
        known: dict[str, Any] = {"near": self.options.rtol, "residual": residual, "z": self.record.outcome.z}
        known["transposed"] = transposed
        found = without_gauge(A, b, found, rtol=limited["rtol"], **known)
        A.told_singular = False
        if bool(found.converged.all()):
            return found, True
        # no family: whatever else there is, of which the last are dense factors
        other, whole = self._answer(A, b, transposed, limited)
        other = other if whole else without_gauge(A, b, other, rtol=limited["rtol"], **known)
        return other, bool(other.converged.all())

    def _answer(self, A: Operator, b: Tensor, transposed: bool, limited: dict[str, Any]) -> tuple[LinearSolution, bool]:
        """What the linear solver finds, where unknowns or equations have units of their own in units of like size, and for
        right-hand sides so large that their squares overflow by units of their own; and whether that is the solution
        everywhere."""
        solver = self.linear_solver
        assert solver is not None
        with full_precision(b.device.type):
            scales = solver.exact and not solver.has_units and not getattr(A.near, "exact", False)
            even = equilibrated(A, b, self.record.outcome.z, transposed) if scales else None
            A.even = None if even is None else even.A
            if even is not None:
                found = answer(solver, even.A, b * even.left, limited)
                if bool(found.converged.all()):
                    many = A if len(b) == A.batch else repeated(A, len(b) // A.batch)
                    return even.back(found, A, b, many), True
            found = answer(solver, A, b, limited)
            if bool(found.converged.all()):
                return found, True
            unit = b.abs().amax(1, keepdim=True)
            large = (unit > torch.finfo(b.dtype).max ** 0.25) & (unit < torch.inf)
            if not bool(large.any()):
                return found, False
            unit = torch.where(large, unit, 1)
            found = answer(solver, A, b / unit, limited)
            found = found._replace(x=found.x * unit, residual_norm=found.residual_norm * unit.squeeze(1))
            return found, bool(found.converged.all())

    def _limited(self) -> dict[str, Any]:
        """The options of the linear solve: where no sample of the solve converged, it is the derivative of nothing, and may
        take no more products than the solve was given steps."""
        outcome, options = self.record.outcome, self.linear_options
        if options.get("max_steps", 0) is not None or outcome is None:
            return options
        if outcome.all_converged or int(outcome.status.count_nonzero()) < len(outcome.status):  # CONVERGED is 0
            return options
        return {**options, "max_steps": max(self.options.max_steps or int(outcome.steps.max()), 1)}
