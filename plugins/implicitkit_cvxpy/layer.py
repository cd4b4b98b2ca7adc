"""A cvxpy problem as a layer: canonicaliser, solver, residual, and implicitkit's rule for the derivative."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_cvxpy.assembly import Assembly
from implicitkit_cvxpy.backends import Backend, Data, Status, resolve
from implicitkit_cvxpy.checks import check_problem
from implicitkit_cvxpy.compat import CanonicalProgram, canonicalise
from implicitkit_cvxpy.cones import DualCone
from implicitkit_cvxpy.finish import finish
from implicitkit_cvxpy.kkt import POLICIES, ConeKKT
from implicitkit_cvxpy.parameters import Parameters
from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.report import ConeSolution, ProgramError, StructurallyZeroGradientWarning
from implicitkit_cvxpy.shortcut import Call, shortcut
from implicitkit_cvxpy.variables import Variables

__all__ = ["ConvexLayer"]

_FAILURES = ("raise", "warn", "nan")


class ConvexLayer(nn.Module):
    r"""The solution of a parametrised convex program as a differentiable function of its parameters.

        layer = ConvexLayer(problem, parameters=[A, b], variables=[x])      # as cvxpylayers' CvxpyLayer
        x_star, = layer(A_tensor, b_tensor)

    The problem is reduced once to ``minimise x'Px/2 + q'x subject to b - A x in K`` with data affine in the parameters, in
    float64; any solver finds ``(x, y)``; a Newton step on the optimality conditions takes it to rounding; and the
    conditions (:class:`ConeProgram`) are differentiated by the implicit function theorem, to any order (projections onto
    cones: up to the third), in every mode, under every transform of ``torch.func``.

    Args:
        problem: a DPP problem; ``quad_form(x, P)`` with a PSD parameter ``P`` is allowed in the objective.
        parameters: all ``cvxpy.Parameter`` of the problem, in the order of the tensors of a call.
        variables: what a call returns: variables of the problem, or dual variables of its constraints.
        solver: ``None`` or ``"auto"``; ``"interior_point"`` or ``"daqp"`` (quadratic programs); cvxpy's name of any solver
            it has installed.
        gp: the problem is a geometric program.
        verbose: print what was solved after each call.
        canon_backend: accepted as in cvxpylayers; only ``None`` and ``"diffcp"`` mean anything there, nothing here.
        solver_args: options of the solver. cvxpylayers' ``solve_method``, ``eps`` and ``max_iters`` are understood.
        degenerate: the derivative where the solution has none, because constraints are redundant, weakly active, or the
            solution is not unique: ``"lstsq"``, minimum norm; ``"raise"``, an error where the KKT matrix is singular;
            ``"smooth"``, that of the point of the central path at ``smoothing`` (which is then also the value).  At a kink
            whose matrix is regular (one weakly active constraint) the first two give the derivative of one side:
            ``solution.weakly_active`` tells of it.
        on_failure: programs without a solution ``"raise"``, ``"warn"`` or become ``"nan"``; with the last two the other
            samples, and their gradients, are unharmed.
        smoothing: ``mu`` of ``degenerate="smooth"``: products of multipliers and slacks.

    Attributes:
        solution: :class:`ConeSolution` of the last call: status, residuals, weakly active constraints, rank, condition.

    Raises:
        TypeError, ValueError: the problem is not convex, not DPP, has integer variables, lists do not fit it.
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
        degenerate: str = "lstsq",
        on_failure: str = "raise",
        smoothing: float = 1e-4,
    ) -> None:
        super().__init__()
        for name, value, allowed in (("degenerate", degenerate, POLICIES), ("on_failure", on_failure, _FAILURES)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        if not (smoothing > 0 and math.isfinite(smoothing)):
            raise ValueError(f"smoothing must be a positive number, got {smoothing!r}")
        if canon_backend not in (None, "diffcp", "cuclarabel"):
            raise ValueError(f"canon_backend must be None or 'diffcp', got {canon_backend!r}")
        check_problem(problem, parameters, variables, gp)
        program = canonicalise(problem, list(parameters), list(variables), gp)
        self.degenerate, self.on_failure, self.verbose, self.gp = degenerate, on_failure, verbose, gp
        self.solver_args = dict(solver_args or {})
        self._parameters_in = Parameters(parameters, program)
        program = self._parameters_in.program
        self._assembly = Assembly(program, _dual_rows(program), self._parameters_in.offsets)
        self._variables_out = Variables(program, self._assembly)
        self._dual = DualCone(self._assembly.cones, smoothing if degenerate == "smooth" else 0.0)
        self._problem = ConeProgram(self._dual, self._assembly.n)
        self._solver = solver
        self._backend = self._resolve(self.solver_args)
        self._idle = self._parameters_in.only_objective(self._assembly.constraining) if self._vertices else ()
        self._warm: Tensor | None = None
        self.solution = None

    def _resolve(self, options: dict[str, Any]) -> Any:
        form = self._assembly
        return resolve(self._solver, options, form.cones, not form.linear, form.curved, form.n)

    @property
    def _vertices(self) -> bool:
        """Is it a linear program, whose solutions are vertices?"""
        return self._assembly.linear and self._assembly.cones.polyhedral and self.degenerate != "smooth"

    @ik.opaque_to_compile
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
            ValueError: number, shapes or batch sizes do not fit, or a value violates its parameter's declared sign or
                symmetry. ProgramError: infeasible, unbounded, not solved, invalid data; names the samples.
        """
        values = self._parameters_in.check(parameters)
        lead, dtype = self._parameters_in.batch(values), self._parameters_in.dtype(values)
        if 0 in lead:
            return self._variables_out.empty(lead, dtype, values)
        if self._idle:
            self._say_idle(values)
        backend = self._backend if solver_args is None else self._resolve(self.solver_args | solver_args)
        start = self._warm if warm_start else None

        good: list[Tensor] = []  # which samples to let through, if not all

        def read(w: Tensor) -> tuple[Tensor, ...]:
            if good:
                w = torch.where(good[0].unsqueeze(1), w, torch.nan)
            return tuple(t.to(dtype) for t in self._variables_out(w, lead))

        def general(values: Sequence[Tensor], start: Tensor | None) -> tuple[Tensor, ...]:
            return tuple(t.to(dtype) for t in self._general(values, lead, backend, start))

        if ik.transforms_active() or ik.has_forward_level():
            return general(values, start)

        def assemble(values: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
            p, flags = self._parameters_in.vector(values, lead)
            return self._assembly(p), flags

        def find(data: Sequence[Tensor], flags: Tensor) -> Tensor:
            P, q, A, b = data
            found = finish(self._problem, backend, Data(P, q, A, b, self._assembly.cones), flags, start)
            if not self._judge([(*found, (P, q, A, b), flags)], backend.name, lead):
                good.append(found[1] == int(Status.CONVERGED))
            return found[0]

        return shortcut(Call(self._problem, ConeKKT(self.degenerate), assemble, find, read, general), values)

    # ------------------------------------------------------------------------------------------------------- details
    def _general(
        self, values: Sequence[Tensor], lead: tuple[int, ...], backend: Backend, start: Tensor | None
    ) -> list[Tensor]:
        """Solve and differentiate by the generic rule of implicitkit: any order, any mode, any transform."""
        p, flags = self._parameters_in.vector(values, lead)
        data = self._assembly(p)
        kept: list[Any] = []
        broken: list[Exception] = []

        def find(z0: Tensor, P: Tensor, q: Tensor, A: Tensor, b: Tensor, wrong: Tensor) -> Tensor:
            try:
                w, *figures = finish(self._problem, backend, Data(P, q, A, b, self._assembly.cones), wrong, start)
            except Exception as error:  # of the solver: raised when the levels of torch.func are closed
                broken.append(error)
                return z0
            kept.append((w, *figures, (P, q, A, b), wrong))
            return w

        rule = ik.Implicit(linear_solver=ConeKKT(self.degenerate))
        as_layer = ik.implicit(self._problem, rule=rule, batch_dims=1, rtol=1e-7, atol=1e-9, on_failure="ignore")
        solve = as_layer(find).solve  # type: ignore[attr-defined]
        size = self._assembly.n + self._assembly.cones.size
        found = solve(torch.zeros(p.batch, size, dtype=torch.float64, device=p.device), *data, flags)
        if broken:
            raise broken[0]
        w = found.value
        if not self._judge(kept, backend.name, lead):
            good = found.converged & ~(flags > 0).any(1)
            w = torch.where(good.unsqueeze(1), w, torch.nan)
        return self._variables_out(w, lead)

    def _judge(self, kept: list[Any], solver: str, lead: tuple[int, ...]) -> bool:
        """Gather the figures of every call of the solver (several under ``vmap``), obey the failure policy; all solved?"""
        w, status, norm, steps = (torch.cat(parts) for parts in list(zip(*kept, strict=True))[:4])
        data = tuple(torch.cat(parts) for parts in zip(*(k[4] for k in kept), strict=True))
        wrong = torch.cat([k[5] for k in kept])
        self.solution = report = ConeSolution(status, norm, steps, solver, w, self._problem, data)
        self._warm = w.detach()
        if self.verbose:
            print(report)
        if bool(report.converged.all()):
            return True
        message, broken = self._explain(report, wrong, lead if math.prod(lead) == len(status) else (len(status),))
        if self.on_failure == "raise":
            if broken:
                raise ValueError(message)
            raise ProgramError(message, report, tuple((~report.converged).nonzero().squeeze(1).tolist()))
        if self.on_failure == "warn":
            warnings.warn(message, ik.ConvergenceWarning, stacklevel=4)
        return False

    def _explain(self, report: ConeSolution, wrong: Tensor, lead: tuple[int, ...]) -> tuple[str, bool]:
        """What went wrong where, and whether a declared property is the cause."""
        bad = (~report.converged).nonzero().squeeze(1).tolist()

        def name(i: int) -> str:
            index = np.unravel_index(i, lead) if lead else ()
            return "the program" if not lead else f"sample {index[0] if len(index) == 1 else tuple(map(int, index))}"

        nonfinite, violated = wrong.tensor_split(2, 1)
        if bool((violated > 0).any()) and not bool((nonfinite > 0).any()):
            i, k = (int(v) for v in (violated > 0).nonzero()[0])
            return f"{name(i)}: {self._parameters_in.declared[k].complaint} (by {float(violated[i, k]):.3g})", True
        kinds: dict[str, list[int]] = {}
        for i in bad:
            kinds.setdefault(_MEANING[Status(int(report.status[i]))], []).append(i)
        listed = "; ".join(
            f"{meaning}: " + ", ".join(name(i) for i in those[:6]) + (", ..." if len(those) > 6 else "")
            for meaning, those in kinds.items()
        )
        total = len(report.status)
        count = f"{len(bad)} of {total} programs were not solved by {report.solver}: " if total > 1 else ""
        hint = ' on_failure="nan" lets the other samples through.' if total > len(bad) else ""
        culprits = [d.name for d, bad in zip(self._parameters_in.declared, (nonfinite > 0).any(0), strict=True) if bad]
        hint = f" NaN or Inf in parameter(s) {', '.join(culprits)}.{hint}" if culprits else hint
        return f"{count}{listed}.{hint}", False

    def _say_idle(self, values: Sequence[Tensor]) -> None:
        names = [name for i, name in self._idle if values[i].requires_grad]
        if names and torch.is_grad_enabled():
            self._idle = ()
            warnings.warn(
                f"the gradient with respect to {', '.join(names)} is zero wherever it exists: it enters only the objective "
                "of a linear program, whose solution stays at a vertex under small changes. Add a quadratic term to the "
                'objective, or use degenerate="smooth"',
                StructurallyZeroGradientWarning,
                stacklevel=4,
            )

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


_TRANSIENT = ("solution", "_warm")  # of the last call, not of the layer
_MEANING = {
    Status.INFEASIBLE: "infeasible, no point satisfies the constraints",
    Status.UNBOUNDED: "unbounded, the objective falls without limit on the constraints",
    Status.INACCURATE: "inaccurate, the solver stopped short of its tolerance (loosen it, or try another solver=)",
    Status.MAX_STEPS: "iteration limit reached",
    Status.STALLED: "the solver failed numerically",
    Status.NONCONVEX: "not convex, the quadratic part has a negative eigenvalue",
    Status.NONFINITE: "invalid data, NaN or Inf or a violated declaration",
}


def _dual_rows(program: CanonicalProgram) -> Any:
    """Rows of ``y`` that are asked for."""
    rows = [r.index for r in program.variables if r.dual]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)
