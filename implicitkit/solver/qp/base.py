"""What all solvers of quadratic programs share: they see data, and are judged by the optimality conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.qp.polish import QPPoint, polish
from implicitkit.solver.qp.unit import Unit
from implicitkit.solver.steps.refinement import refine

__all__ = ["QPSolver", "judge"]

_ROUNDING = 1e-13  # relative to |F| at the start: nothing is left to polish
_FINAL = (Status.INFEASIBLE, Status.UNBOUNDED, Status.NONFINITE, Status.NONCONVEX)


@dataclass(frozen=True)
class QPSolver(Solver):
    """A solver of ``min z'Pz/2 + q'z, Az = b, Gz <= h``: a subclass defines :meth:`find`.

    Whatever it says of itself, a sample has converged only if the natural map meets the tolerance; but that a sample is
    infeasible or unbounded is taken on its word where it has not.
    """

    solves: ClassVar[str] = "quadratic_program"
    default_max_steps: ClassVar[int] = 100
    takes_sparse: ClassVar[bool] = False  # programs whose matrices are sparse

    def find(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        """Solve a batch of programs in float64, to a relative accuracy ``tol``."""
        raise NotImplementedError(f"{type(self).__name__} has no find method")

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        problem: Any = f.problem
        tol = min(max(options.rtol, 1e-9), 1e-6)
        if problem.places:
            return self._sparsely(f, z0, tol, options)
        part = problem.data(f.system, f.theta)
        unit = Unit.of(problem, part)
        data = problem.one_sided(unit.part)

        def norms(w: Tensor) -> Tensor:
            f.prime(w, problem.packed_residual(part, w))
            return options.size(f.residual(w))

        start = norms(z0)
        point = self.find(data, tol, options.max_steps or self.default_max_steps)
        w = unit.back(problem.join(*point[:3])).to(z0)
        norm = norms(w)
        if unit.differs or not bool((norm <= _ROUNDING * start).all()):
            point = polish(data, point, tol)
            w = unit.back(problem.join(*point[:3])).to(z0)
            if problem.kappa:
                w = refine(f, w, _direction, steps=60, halvings=20)  # from the solution to that of the relaxed program
            norm = norms(w)
        return judge(f, w, start, norm, point.status, point.steps, options, unit.at(z0))

    def _sparsely(self, f: Evaluations, z0: Tensor, tol: float, options: Options) -> Outcome:
        """Programs with sparse matrices."""
        if not self.takes_sparse:
            raise CapabilityError(
                f"solver {self.name!r} takes dense matrices, and a part of this QuadraticProgram is sparse: use "
                "solver='interior_point' (or 'auto'), or make it dense (.to_dense())"
            )
        from implicitkit.solver.qp.sparse_run import find_sparse

        start = options.size(f.residual(z0))
        unit = Unit.of(f.problem, f.problem.data(f.system, f.theta))
        most = options.max_steps or self.default_max_steps
        w, status, steps, said = find_sparse(f, unit.part, tol, most, own=not unit.differs)
        w = unit.back(w)
        norm = options.size(f.residual(w))
        proof = (status == int(Status.INFEASIBLE)) | (status == int(Status.UNBOUNDED))
        if f.problem.kappa or not bool(((norm <= _ROUNDING * start) | proof).all()):
            better = refine(f, w, _direction, steps=60 if f.problem.kappa else 3, halvings=20)
            w = torch.where(proof.unsqueeze(1), w, better)
            norm = options.size(f.residual(w))
        outcome = judge(f, w, start, norm, status, steps, options, unit.at(z0))
        outcome.message = said
        return outcome


def judge(
    f: Evaluations,
    w: Tensor,
    start: Tensor,
    norm: Tensor,
    status: Tensor,
    steps: Tensor,
    options: Options,
    unit: Unit | None = None,
) -> Outcome:
    """The outcome for points ``w`` with ``|F|`` ``norm``: converged by that alone (a relaxed program, where it also keeps
    ``lam s = kappa``; others where they hold in their ``unit``, too), else what the solver said.  Less than rounding
    leaves is not asked for, as long as that is a hundred times the tolerance at most."""
    bound = options.atol + options.rtol * torch.where(start.isfinite(), start, 0)
    problem: Any = f.problem  # of any kind
    kept = torch.ones_like(norm, dtype=torch.bool)
    if unit is not None:
        bound, kept = unit.bound(w, norm, bound, options), unit.holds(w, options)
    if getattr(problem, "kappa", 0.0):
        w, kept = problem.relaxed(problem.data(f.system, f.theta), w)
        norm = options.size(f.residual(w))
    converged = (norm <= bound) & kept
    trace = [start, norm] if options.trace else []
    if bool(converged.all()) and not bool((status == int(Status.NONCONVEX)).any()):
        verdict = torch.zeros_like(status)
        return Outcome(w, norm, steps, verdict, f.evaluations, f.sample_evaluations, trace)
    said = torch.zeros_like(converged)
    for end in _FINAL:
        said |= status == int(end)
    loose = norm <= 1e-3 * (1 + start)
    verdict = torch.where(loose, int(Status.INACCURATE), int(Status.MAX_STEPS))
    verdict = torch.where(said, status, verdict)
    verdict = torch.where(norm.isfinite() | said, verdict, int(Status.NONFINITE))
    verdict = torch.where(converged & (status != int(Status.NONCONVEX)), int(Status.CONVERGED), verdict)
    return Outcome(w, norm, steps, verdict, f.evaluations, f.sample_evaluations, trace, tolerance=bound)


def _direction(f: Evaluations, w: Tensor, r: Tensor) -> Tensor:
    A: Any = f.problem.linearise(f.system, w, f.theta)[1]
    solved: Tensor = torch.nan_to_num(A.sparse().solve(r)) if f.problem.places else A.solve(r)[0]
    return solved
