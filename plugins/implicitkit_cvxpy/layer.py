"""A cvxpy problem as a layer: canonicaliser, solver, residual, and implicitkit's rule for the derivative."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit import extend
from implicitkit_cvxpy.assembly import Assembly, SparseAssembly, Variables, is_sparse
from implicitkit_cvxpy.attained import NOT_ATTAINED
from implicitkit_cvxpy.backends import Backend, Data, Status, resolve, takes_dense
from implicitkit_cvxpy.checks import check_problem
from implicitkit_cvxpy.compat import CanonicalProgram, canonicalise
from implicitkit_cvxpy.cones import DualCone
from implicitkit_cvxpy.custom_method import CustomMethod
from implicitkit_cvxpy.failures import explain, names, program_error
from implicitkit_cvxpy.kkt import ConeKKT
from implicitkit_cvxpy.parameters import Parameters
from implicitkit_cvxpy.polish import Told, finish
from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.report import ConeSolution
from implicitkit_cvxpy.rounds import Rounds
from implicitkit_cvxpy.shortcut import Call, shortcut


class ConvexLayer(extend.Configured, nn.Module):
    r"""The solution of a parametrised convex program as a differentiable function of its parameters.

        layer = ConvexLayer(problem, parameters=[A, b], variables=[x])      # as cvxpylayers' CvxpyLayer
        x_star, = layer(A_tensor, b_tensor)

    The problem is reduced once to ``minimise x'Px/2 + q'x subject to b - A x in K`` with data affine in the parameters, in
    float64, in units of their own, and of large sparse programs by their entries only; any solver finds ``(x, y)``; a
    Newton step on the optimality conditions takes it to rounding; and the conditions (:class:`ConeProgram`) are
    differentiated by the implicit function theorem, to any order (projections onto cones: up to the third), in every mode,
    under every transform of ``torch.func`` but ``linearize``.

    Units: solutions have those of the variables, derivatives theirs by those of the parameters.  Source: Agrawal, Amos,
    Barratt, Boyd, Diamond & Kolter (2019), "Differentiable convex optimization layers".

    Args:
        problem: a DPP problem; ``quad_form(x, P)`` with a PSD parameter ``P`` is allowed in the objective.
        parameters: all ``cvxpy.Parameter`` of the problem, in the order of the tensors of a call.
        variables: what a call returns: variables of the problem, or dual variables of its constraints.
        solver: ``None`` or ``"auto"``; ``"interior_point"`` or ``"daqp"`` (quadratic programs); cvxpy's name of any solver
            it has installed.
        gp: the problem is a geometric program.
        verbose: print what was solved after each call.
        canon_backend: accepted as in cvxpylayers; only ``None`` and ``"diffcp"`` mean anything there, nothing here.
        solver_args: options of the solver, by its names; for any of them ``eps`` (or ``tol``), ``max_iters`` (or
            ``max_iter``), ``verbose`` and cvxpylayers' ``solve_method``.  A name that the solver does not have is an error.
        custom_method: ``(forward, backward)`` of cvxpylayers 0.1, which then do all the work
            (:class:`~implicitkit_cvxpy.custom_method.CustomMethod`).
        degenerate: the derivative where the solution has none, because constraints are redundant, weakly active, or the
            solution is not unique: ``"lstsq"``, minimum norm, with a warning where that solves the equations in the sense of
            least squares only; ``"raise"``, an error where the KKT matrix is singular;
            ``"smooth"``, that of the point of the central path at ``smoothing`` (which is then also the value).  At a kink
            whose matrix is regular (one weakly active constraint) the first two give the derivative of one side:
            ``solution.weakly_active`` tells of it.
        on_failure: programs without a solution ``"raise"``, become ``"nan"`` (with a derivative of zero), or are let pass
            with a ``"warn"``-ing or silently (``"ignore"``): then as the point that the solver had reached, and NaN where
            there is none.  Except with the first, the other samples, and their gradients, are unharmed.
        smoothing: ``mu`` of ``degenerate="smooth"``: products of multipliers and slacks.

    Attributes:
        solution: :class:`ConeSolution` of the last call: status, residuals, weakly active constraints, rank, condition.

    Raises:
        TypeError, ValueError: the problem is not convex, not DPP, has integer variables, lists do not fit it; the solver
            has no such option.
        ImportError, CapabilityError: the solver is not there, or cannot take these cones.
    """

    solution: ConeSolution | None

    def __init__(
        self,
        problem: Any,
        parameters: Sequence[Any],
        variables: Sequence[Any],
        solver: Any = None,
        gp: bool = False,
        verbose: bool = False,
        canon_backend: str | None = None,
        solver_args: dict[str, Any] | None = None,
        *,
        custom_method: Any = None,
        degenerate: str = "lstsq",
        on_failure: str = "raise",
        smoothing: float = 1e-4,
    ) -> None:
        super().__init__()
        extend.check_degenerate(degenerate)
        extend.check_policy(on_failure)
        options = extend.options
        options.check_arguments(
            "ConvexLayer",
            gp=(options.flag(), gp),
            verbose=(options.flag(), verbose),
            canon_backend=(options.optional(options.one_of("diffcp", "cuclarabel")), canon_backend),
            solver_args=(options.optional(options.instance("a dict of options", dict)), solver_args),
            smoothing=(options.between(0, math.inf), smoothing),
        )
        check_problem(problem, parameters, variables, gp)
        program = canonicalise(problem, list(parameters), list(variables), gp)
        self.degenerate, self.on_failure, self.verbose, self.gp = degenerate, on_failure, verbose, gp
        self.solver_args = dict(solver_args or {})
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # of tensors made in inference mode nothing can be differentiated
            self._parameters_in = Parameters(parameters, program)
            program = self._parameters_in.program
            self._assembly: Assembly | SparseAssembly
            if is_sparse(program) and not takes_dense(solver, self.solver_args):
                self._assembly = SparseAssembly(program, self._parameters_in.offsets)
            else:
                self._assembly = Assembly(program, _dual_rows(program), self._parameters_in.offsets)
            self._variables_out = Variables(program, self._assembly)
            self._dual = DualCone(self._assembly.cones, smoothing if degenerate == "smooth" else 0.0)
            self._problem = ConeProgram(self._dual, self._assembly.n, self._assembly.P_held, self._assembly.A_held)
        self._solver = solver
        self._custom = None if custom_method is None else CustomMethod(custom_method, parameters, variables, gp)
        self._backend = self._resolve({} if self._custom else self.solver_args)
        self._idle = self._parameters_in.only_objective(self._assembly.constraining) if self._vertices else ()
        self._warm: Tensor | None = None
        self.solution = None

    def _resolve(self, options: dict[str, Any]) -> Any:
        form = self._assembly
        return resolve(self._solver, options, form.cones, not form.linear, form.n)

    def _data(self, P: Tensor, q: Tensor, A: Tensor, b: Tensor) -> Data:
        form = self._assembly
        return Data(P, q, A, b, form.cones, form.P_held, form.A_held)

    @property
    def _vertices(self) -> bool:
        """Is it a linear program, whose solutions are vertices?"""
        return self._assembly.linear and self._assembly.cones.polyhedral and self.degenerate != "smooth"

    @ik.extend.opaque_to_compile
    @ik.extend.despite_inference_mode
    def forward(
        self, *parameters: Tensor, solver_args: dict[str, Any] | None = None, warm_start: bool = False
    ) -> tuple[Tensor, ...]:
        """Solve.

        Args:
            parameters: one tensor for each parameter, of its shape, with any number of batch dimensions in front; tensors
                without batch dimensions are shared by the batch.
            solver_args: options of the solver for this call, over those of the layer.
            warm_start: try the last solution first; often a Newton step from there is all it takes.

        Returns:
            One tensor for each of ``variables``, ``batch + shape``, of the parameters' dtype.

        Raises:
            ValueError: a parameter is missing; number, shapes or batch sizes do not fit, or a value violates its
                parameter's declared sign or symmetry.
            ProgramError: infeasible, unbounded, not solved, invalid data; names the samples.  It is a
                ``cvxpy.SolverError`` too.
        """
        extend.refuse_tracing()
        values = self._parameters_in.check(parameters)
        lead, dtype = self._parameters_in.batch(values), self._parameters_in.dtype(values)
        if 0 in lead:
            return self._variables_out.empty(lead, dtype, values)
        if self._custom is not None:
            return self._custom(values, lead, dtype, self.solver_args | (solver_args or {}))
        if self._idle:
            self._say_idle(values)
        backend = self._backend if solver_args is None else self._resolve(self.solver_args | solver_args)
        start = self._warm if warm_start else None

        good: list[Tensor] = []  # which samples to let through, if not all

        def read(w: Tensor) -> tuple[Tensor, ...]:
            if good:
                w = torch.where(good[0].unsqueeze(1), w, torch.nan)
            return tuple(t.to(dtype, copy=True) for t in self._variables_out(w, lead))  # the caller may write to them

        def general(values: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, ...]:
            return tuple(t.to(dtype, copy=True) for t in self._general(values, lead, backend, start))

        if ik.extend.transforms_active() or ik.extend.has_forward_level():
            return general(values, start)

        def assemble(values: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
            p, flags = self._parameters_in.vector(values, lead)
            return self._assembly(p), flags

        def find(data: Sequence[Tensor], flags: Tensor) -> Tensor:
            told = finish(self._problem, backend, self._data(*data), flags, start)
            if bool(told.uneven.any()):
                raise _UnevenError(told)
            if not self._judge(told, backend, lead):
                good.append(self._passes(told.status == int(Status.CONVERGED), told.w, flags))
            return told.w

        try:
            return shortcut(Call(self._problem, ConeKKT(self.degenerate), assemble, find, read, general), values)
        except _UnevenError as error:
            return tuple(t.to(dtype, copy=True) for t in self._general(values, lead, backend, None, error.args[0]))

    # ------------------------------------------------------------------------------------------------------- details
    def _general(
        self,
        values: Sequence[Tensor],
        lead: tuple[int, ...],
        backend: Backend,
        start: Tensor | None,
        known: Told | None = None,
    ) -> list[Tensor]:
        """Solve and differentiate by the generic rule of implicitkit: any order, any mode, any transform; ``known`` is what
        has been found in the user's units."""
        p, flags = self._parameters_in.vector(values, lead)
        rounds = Rounds(self._problem, ConeKKT(self.degenerate), backend)
        w, converged, told = rounds(self._data(*self._assembly(p)), flags, start, known)
        if not self._judge(told, backend, lead):
            good = self._passes(converged, w, flags)
            w = torch.where(good.unsqueeze(1), w, torch.nan)
        return self._variables_out(w, lead)

    def _passes(self, converged: Tensor, w: Tensor, flags: Tensor) -> Tensor:
        """Which samples to let through: by the failure policy also those with a point that is not good enough."""
        reached = (w.detach() != 0).any(1) if self.on_failure in ("warn", "ignore") else torch.zeros_like(converged)
        return (converged | reached) & ~(flags > 0).any(1)

    def _judge(self, told: Told, backend: Backend, lead: tuple[int, ...]) -> bool:
        """Keep the figures of a call, obey the failure policy; all solved?"""
        report = ConeSolution(told.status, told.norm, told.steps, backend.name, told.w, self._problem, told.data)
        self.solution, self._warm = report, told.w.detach()
        if self.verbose or backend.verbose:
            print(report)
        shape = lead if math.prod(lead) == len(told.w) else (len(told.w),)
        if bool(told.away.any()) and self.on_failure != "ignore":
            extend.warn(f"{names(told.away, shape)}: {NOT_ATTAINED}.", ik.ConvergenceWarning)
        if bool(report.converged.all()):
            return True
        message, broken = explain(report, told.wrong, shape, self._parameters_in.declared)
        if self.on_failure == "raise":
            if broken:
                raise ValueError(message)
            raise program_error(message, report, tuple((~report.converged).nonzero().squeeze(1).tolist()))
        if self.on_failure == "warn":
            extend.warn(message, ik.ConvergenceWarning)
        return False

    def _say_idle(self, values: Sequence[Tensor]) -> None:
        names = [name for i, name in self._idle if values[i].requires_grad]
        if names and torch.is_grad_enabled():
            self._idle = ()
            extend.warn_zero_gradient(", ".join(names))

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvexLayer:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in _TRANSIENT}, memo))
        twin.__dict__.update(dict.fromkeys(_TRANSIENT))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict.fromkeys(_TRANSIENT)

    def extra_repr(self) -> str:
        cones = self._assembly.cones
        return f"n={self._assembly.n}, {cones}, solver={self._backend.name!r}, degenerate={self.degenerate!r}"


class _UnevenError(Exception):
    """The numbers of a program ask for units of their own."""


_TRANSIENT = ("solution", "_warm")  # of the last call, not of the layer


def _dual_rows(program: CanonicalProgram) -> Any:
    """Rows of ``y`` that are asked for."""
    rows = [r.index for r in program.variables if r.dual]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)
