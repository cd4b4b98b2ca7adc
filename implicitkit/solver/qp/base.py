r"""What all solvers of quadratic programs share: they see data, and are judged by the optimality conditions.

They see programs whose objectives have the size one, each by itself.

The norm of the natural map adds slopes of the objective to what is missing of constraints.  Beside an objective of 1e-12 any
feasible point would solve a program by that norm, and beside one of 1e12 a point that is not feasible; and methods whose
tolerances are absolute stop anywhere.  So programs are solved, and judged once more, with ``c P``, ``c q``, of which the
solution is ``z``, ``c y``, ``c lam``.  So is one in which everything that ``z`` can be as large as (``|q| / |P|``,
``|b| / |A|``, ``|h| / |G|``) is below 1e-3, or beyond 1e3: it is one of ``z / t``, with ``c t P``, ``c q``, ``b / t``,
``h / t``.  (Rows, and unknowns, have units of their own: :mod:`implicitkit.problem.qp_units`, one choice for a batch.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.qp.polish import QPPoint, polish
from implicitkit.solver.return_checks import programs_point
from implicitkit.solver.steps.refinement import refine

_LENIENT, _ROUNDED = 100.0, 2.0  # times the tolerance, or the rounding error of one operation: what may be left
_USUAL = 1e3  # size of an objective, or its inverse, up to which it is solved as it stands
_ROUNDING = 1e-13  # relative to |F| at the start: nothing is left to polish
_LENGTHS = (("q", "P"), ("b", "A"), ("h", "G"), ("lower", "G"))
_FINAL = (Status.INFEASIBLE, Status.UNBOUNDED, Status.NONFINITE, Status.NONCONVEX)


class Unit(NamedTuple):
    """The programs with objectives of the size one.

    Attributes:
        c: ``(batch, 1)``, a power of two; 1 where the objective is within a thousand of one, and of relaxed programs, whose
            ``lam s = kappa`` has a unit of its own. t: likewise, of ``z``. part: the data, by name. differs: is one another?
            start: packed, in the units of the user.
    """

    problem: Any
    c: Tensor
    t: Tensor
    part: dict[str, Tensor]
    differs: bool = False
    start: Tensor = torch.empty(0, device="cpu")

    @classmethod
    def of(cls, problem: Any, part: dict[str, Tensor]) -> Unit:
        """The unit of programs with the data of :meth:`QPConditions.data`."""
        sizes = {name: _largest(name, x) for name, x in part.items() if x.numel()}
        zero, one = part["q"].new_zeros(len(part["q"])), part["q"].new_ones(len(part["q"]), 1)
        t = _all_unusual(_lengths(sizes, zero))
        size = torch.maximum(sizes.get("P", zero) * t, sizes.get("q", zero))
        if problem.kappa or (bool(_is_usual(size).all()) and bool((t == 1).all())):
            return cls(problem, one, one, part)
        c, t = torch.where(_is_usual(size), 1, torch.exp2(-size.log2().round())).unsqueeze(1), t.unsqueeze(1)
        units = {"P": c * t, "q": c, "b": 1 / t, "h": 1 / t, "lower": 1 / t}
        scaled = {
            name: part[name] * u.view(-1, *(1,) * (part[name].ndim - 1)) for name, u in units.items() if name in part
        }
        return cls(problem, c, t, part | scaled, bool(((c != 1) | (t != 1)).any()))

    def back(self, w: Tensor) -> Tensor:
        """Packed states in the units of the user."""
        n = self.part["q"].shape[1]
        return torch.cat([w[:, :n] * self.t, w[:, n:] / self.c], 1)

    def at(self, w0: Tensor) -> Unit:
        """This unit with the start, packed."""
        return self._replace(start=w0)

    def holds(self, w: Tensor, options: Options) -> Tensor:
        """Where the conditions hold in this unit, too, by the tolerance, ``(batch,)``."""
        if not self.differs:
            return torch.ones(len(w), dtype=torch.bool, device=w.device)
        norm, start = options.size(self._in_reach(w)), options.size(self._residual(self.start)).nan_to_num(posinf=0)
        return norm <= self._not_below_rounding(w, norm, options.atol + options.rtol * start, options)

    def _in_reach(self, w: Tensor) -> Tensor:
        """The conditions, what is missing of rows as a share of ``|z|`` where that is large: no row is known better."""
        state, residual = self._state(w), self._residual(w)
        n, p = state["z"].shape[1], state["y"].shape[1] if "y" in state else 0
        reach, rows = torch.linalg.vector_norm(state["z"], torch.inf, dim=1, keepdim=True).clamp_min(1), residual[:, n:]
        inactive = rows[:, p:] == state.get("lam", rows[:, p:])
        share = torch.cat([rows[:, :p] / reach, torch.where(inactive, rows[:, p:], rows[:, p:] / reach)], 1)
        return torch.cat([residual[:, :n], share], 1)

    def bound(self, w: Tensor, norm: Tensor, bound: Tensor, options: Options) -> Tensor:
        """What is asked of ``|F|``, ``(batch,)``: ``bound``, that of rows of the size of ``t``, or what rounding alone may
        leave of it at ``w``."""
        bound = torch.maximum(bound, options.rtol * torch.where(self.t > 1, self.t, 0).squeeze(1))
        return self._not_below_rounding(w, norm, bound, options, self.c, self.t)

    def _not_below_rounding(
        self, w: Tensor, norm: Tensor, bound: Tensor, options: Options, c: Tensor | float = 1.0, t: Tensor | float = 1.0
    ) -> Tensor:
        if self.problem.kappa or bool((norm <= bound).all()):
            return bound
        lenient = max(1.0, min(_LENIENT, torch.finfo(w.dtype).eps ** 0.5 / max(options.rtol, 1e-300)))
        left = _ROUNDED * torch.finfo(w.dtype).eps * options.size(self._terms(w, c, t)).nan_to_num(posinf=0)
        return torch.maximum(bound, torch.minimum(left, lenient * bound))

    def _terms(self, w: Tensor, c: Tensor | float, t: Tensor | float) -> Tensor:
        """The sizes of what is added up in each condition (of a row that is not active, nothing), objectives by ``c``, rows
        times ``t``."""
        state, part, sizes = self._state(w), self.part, {}
        of = lambda name, x, back: (self.problem.back if back else self.problem.times)(name, part[name].abs(), x.abs())  # noqa: E731
        sizes["z"] = part["q"].abs() + sum(
            of(name, state[of_], True) for name, of_ in (("P", "z"), ("A", "y"), ("G", "lam")) if name in part
        )
        sizes["z"] = sizes["z"] / c
        if "A" in part:
            sizes["y"] = t * (part["b"].abs() + of("A", state["z"], False))
        if "G" in part:
            active = self.problem.residual(state, *part.values())["lam"] != state["lam"]
            sizes["lam"] = torch.where(active, t * of("G", state["z"], False), 0)
        return torch.cat(list(sizes.values()), 1)

    def _state(self, w: Tensor) -> dict[str, Tensor]:
        """Packed states of the user as those of the programs here, by name."""
        n, p = self.part["q"].shape[1], self.part["b"].shape[1] if "b" in self.part else 0
        z, y, lam = w.split([n, p, w.shape[1] - n - p], 1)
        there = {"z": z / self.t} | ({"y": y * self.c} if "A" in self.part else {})
        return there | ({"lam": lam * self.c} if "G" in self.part else {})

    def _residual(self, w: Tensor) -> Tensor:
        state = self._state(w)
        out = self.problem.residual(state, *self.part.values())
        return torch.cat([out[name] for name in state], 1)


def _largest(name: str, x: Tensor) -> Tensor:
    """The largest number of each sample, ``(batch,)``; a bound that is none has no size."""
    x = x.detach().flatten(1)
    return torch.linalg.vector_norm(x.nan_to_num(0, 0, 0) if name in ("h", "lower") else x, torch.inf, dim=1)


def _lengths(sizes: dict[str, Tensor], zero: Tensor) -> Tensor:
    """How large each side may make ``z``, ``(k, batch)``; nothing of its own where there is no matrix beside it."""
    pairs = [(sizes[side], sizes.get(matrix, zero)) for side, matrix in _LENGTHS if side in sizes]
    sides, matrices = (torch.stack(each) for each in zip(*pairs or [(zero, zero)], strict=True))
    return torch.where(matrices > 0, sides / matrices, 0)


def _all_unusual(lengths: Tensor) -> Tensor:
    """The largest of the lengths, ``(k, batch)``, where all are small, the smallest but zero where all are large, as a power
    of two; else 1, ``(batch,)``."""
    if bool(_is_near_one(lengths).any(0).all()):  # as nearly always
        return torch.ones_like(lengths[0])
    large, small = lengths.amax(0), torch.where(lengths > 0, lengths, torch.inf).amin(0)
    unit = torch.where(large < 1 / _USUAL, large, torch.where(small > _USUAL, small, 1))
    return torch.where((unit > 0) & (unit < torch.inf), torch.exp2(unit.log2().round()), 1)


def _is_near_one(size: Tensor) -> Tensor:
    return (size >= 1 / _USUAL) & (size <= _USUAL)


def _is_usual(size: Tensor) -> Tensor:
    """Objectives that are solved as they stand: of about the size one, zero, or not finite."""
    return _is_near_one(size) | ~((size > 0) & (size < torch.inf))


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
        point = programs_point(self, data, tol, options.max_steps or self.default_max_steps)
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
