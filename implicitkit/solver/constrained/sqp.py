"""Sequential quadratic programming, batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from implicitkit.foundation.numbers import largest_moduli
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.conditions.active_factors import DenseActiveFactors
from implicitkit.linear.factors.dense import cholesky_batched, mv
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.convexity import Curved
from implicitkit.solver.constrained.early_verdicts import has_no_solution
from implicitkit.solver.constrained.model import First, Local, Model
from implicitkit.solver.constrained.step_program import Program
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.verdict.newton_correction import DENSE

_FALLS = 0.95  # of |F| that a step may leave whose active set is not that of its quadratic program yet
_EXPECTATIONS = 4  # programs a step, each of what the one before let down; the last expects equalities only
_INSIDE = 2  # steps more that one costs whose program is solved from inside
_HEAVIER = 2.0  # times the rise of the objective along a step: the weighted violation that it takes off
_HEAVIEST = 1e6  # times the weights, of one step


@register_solver("sqp", solves="constrained")
@dataclass(frozen=True)
class SQP(Method):
    r"""Newton's method for the KKT conditions.  Each step solves, for all samples at once, the quadratic program

        minimise  d'Hd/2 + df'd   subject to   h + Jh d = 0,   g + Jg d <= 0,   lower <= z + d <= upper

    with ``H`` the Hessian of the Lagrangian, made positive definite where it is not: by ``rho J'J`` of the active
    constraints (which leaves the step as it is where they are met), else by the modulus of its eigenvalues.  Where the
    program has no solution its constraints become penalties.  Steps are shortened by the exact penalty
    ``f + nu |violation|_1``; a full step that halves the KKT residual is taken whatever the penalty says (no Maratos
    effect), and so is one to 0.95 of it by one active set of a sparse program that changes from step to step.  Local
    convergence is quadratic.

    (Nocedal & Wright 2006, algorithms 18.1 and 18.3, section 18.4.)  From 256 unknowns and multipliers on, where the
    Hessian of the Lagrangian and the constraints have a sparsity pattern: a few products, and for each sample a sparse
    quadratic program by active sets (:mod:`implicitkit.solver.qp.sparse`), of any size; its ``H`` gets a multiple of the
    identity where it is not positive definite on the active constraints.  Else dense: ``n + m + 1`` products and one batch
    of quadratic programs a step.

    Args:
        halvings: of a step at most.

    Raises:
        ValueError: negative ``halvings``. CapabilityError: the problem has ``prox=`` or ``project=``, or more than 1,000
            unknowns and multipliers without a sparsity pattern.
    """

    halvings: int = 25
    default_max_steps: ClassVar[int] = 100

    def __post_init__(self) -> None:
        check_options(self, halvings=at_least(0))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        model = Model(f)
        bounds = model.bounds(z[:, : f.problem.size])
        if not model.is_sparse(z):
            model.affordable(z, "sqp")
        return z.new_zeros(len(z), model.count), z.new_zeros(len(z), 0), bounds

    def step(self, f: Evaluations, w: Tensor, state: Any) -> tuple[Tensor, Any]:
        weight, last, bounds = state  # of the penalty, (batch, m); entries of the sparse matrices, (batch, nnz)
        model = Model(f)
        direction = self._sparsely(model, w, bounds)
        at: First | Local | None
        at, d, new, dense, factors = None, None, None, None, None
        if direction is None:
            dense = _Dense(model, w, bounds, weight)
            at, d, new = dense.at, *dense.step()
        else:
            d, new = direction.d, direction.y
        trial = _moved(w, d, new, bounds)
        if direction is not None and direction.same:
            f.keeps, f.graphs = False, True  # the last step, as it seems: no products are asked for where it leads
        good = _fallen(f, trial)
        if dense is not None and bool((uphill := ~good & dense.is_uphill(d, new)).any()):
            d, new = dense.downhill(uphill, d, new)
            trial = _moved(w, d, new, bounds)
            good = good | (uphill & _fallen(f, trial))
        if direction is not None and not bool(good.all()):
            good = good | (direction.changed(last) & _fallen(f, trial, _FALLS))
        if not bool(good.all()):
            if direction is not None:
                direction.finish(~good)
                at, d, new = direction.first, direction.d, direction.y
            assert at is not None
            trial = self._searched(
                model, w, at, (d, new), bounds, weight, torch.where(good.unsqueeze(1), trial, w), good
            )
        elif dense is not None:
            factors = dense.factors(trial)
        if direction is not None:
            factors, f.dear = direction.factors, _INSIDE if direction.inside else 0
        if factors is not None:
            factors.began = w, direction.conditions if dense is None else dense.smooth()
        # for the derivative, and to judge where this has led
        f.system.factored, f.curved = factors, None if dense is None else dense.curved.factors
        # the penalty must outweigh the multipliers
        return trial, (_outweighing(weight, new), last if direction is None else direction.entries, bounds)

    def _searched(
        self,
        model: Model,
        w: Tensor,
        at: First | Local,
        step: tuple[Tensor, Tensor],
        bounds: tuple[Tensor, Tensor] | None,
        weight: Tensor,
        best: Tensor,
        done: Tensor,
    ) -> Tensor:
        """The step shortened until the penalty falls or, of its whole length, the residual is halved; ``best`` for the
        samples that are ``done``."""
        f, (d, new) = model.f, step
        d = _within_reach(w[:, : model.size], d)
        weight = _outweighing(weight, new)
        rise, violation = (at.slope * d).sum(1), (weight * model.violation(at.constraints)).sum(1)
        # where the objective rises along the step, what it takes off the violation must outweigh that
        heavier = torch.where(violation > 0, _HEAVIER * rise / violation, 1).clamp(1, _HEAVIEST)
        weight, violation = weight * heavier.unsqueeze(1), violation * heavier
        slope = rise - violation
        base = at.value + violation
        noise = 1e-12 * (1 + base.abs())
        t = torch.ones_like(base)
        for trial_number in range(self.halvings + 1):
            trial = _moved(w, d, new, bounds, t)
            good = done | _fallen(f, trial) if trial_number == 0 else done
            if not bool(good.all()):
                value, constraints = model.values(trial[:, : model.size])
                merit = value + (weight * model.violation(constraints)).sum(1)
                good = good | (merit <= base + 1e-4 * t * slope.clamp(max=0) + noise)
            taken = ~done & (good | (trial_number == self.halvings))
            best = trial if bool(taken.all()) else torch.where(taken.unsqueeze(1), trial, best)
            done = good
            if bool(done.all()):
                break
            t = torch.where(done, t, 0.5 * t)
        return best

    @staticmethod
    def _sparsely(model: Model, w: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Any:
        """The step where there is a pattern; else ``None``."""
        if not model.is_sparse(w):
            return None
        from implicitkit.solver.constrained.sparse_step import sparse_direction

        return sparse_direction(model, w, bounds)


class _Dense:
    """The step by dense matrices.

    Attributes:
        at: first order at the point.
    """

    def __init__(self, model: Model, w: Tensor, bounds: tuple[Tensor, Tensor] | None, weight: Tensor) -> None:
        z, multipliers = model.split(w)
        model.affordable(w, "sqp")
        self.model, self.weight, self.w, self.at = model, weight, w, model.local(z, w)
        self.z, self.multipliers, self.bounds = z, multipliers, bounds
        known = (multipliers != 0).any(1, keepdim=True) if model.count else None
        curved_by = multipliers if known is None else torch.where(known, multipliers, _estimate(model, self.at))
        self.curved, self.near = Curved(model, z, curved_by, self.at, bounds, w), curved_by
        self.program = Program(model, z, self.at, bounds)

    def step(self) -> tuple[Tensor, Tensor]:
        """``(batch, n)`` and the new multipliers ``(batch, m)``."""
        curved, program = self.curved, self.program
        for number in range(_EXPECTATIONS):
            H, slope = curved.model()
            d, found, failed = program.solve(H, slope, self.near)
            if number == 0 and self._has_no_solution(H, failed):
                return torch.zeros_like(d), self.multipliers
            if not curved.falls_forever(failed) and not curved.disappointed(d, failed):
                break
        if bool(failed.any()):
            elastic = program.solve_elastic(H, slope, self.weight)
            d, found = (
                torch.where(failed.unsqueeze(1), new, old) for new, old in zip(elastic, (d, found), strict=False)
            )
            failed = failed & elastic[2]
        if bool(failed.any()):
            push, pull = _penalised(self.model, H, self.at)
            d = torch.where(failed.unsqueeze(1), push, d)
            found = torch.where(failed.unsqueeze(1), pull, found)
        return d, found

    def _has_no_solution(self, H: Tensor, failed: Tensor) -> bool:
        """Are all samples at work, which have no step, given up in the first one, as those that have no solution are?"""
        f = self.model.f
        alone = failed & f.active & (self.weight == 0).all(1)
        if not self.model.count or not bool(alone.any()) or not bool((alone | ~f.active).all()):
            return False
        f.stuck = has_no_solution(f, self.w, alone, (H == 0).flatten(1).all(1))
        return bool((f.stuck | ~f.active).all())

    def factors(self, w: Tensor) -> DenseActiveFactors | None:
        """Factors of the optimality conditions, of more than 64 unknowns, by what is active at ``w``, where a whole step has
        led; ``None`` where that is a near thing in any sample."""
        (z, multipliers), at, model = self.model.split(w), self.at, self.model
        if w.shape[1] <= DENSE:
            return None
        J, d = at.jacobian, z - self.z
        values = at.constraints + mv(J, d)
        slope = at.slope + mv(self.curved.H, d) + mv(J.mT, multipliers)
        rows, doubtful = _active(multipliers, values, values.abs() + mv(J.abs(), z.abs()))
        equalities = ~model.one_sided
        rows, doubtful = rows | equalities, (doubtful & model.one_sided).any(1)
        free, size = torch.ones_like(z, dtype=torch.bool), z.abs().amax(1, keepdim=True)
        for side, bound in () if self.bounds is None else zip((1, -1), self.bounds, strict=True):
            held, near = _active(side * slope, side * (bound - z), size)
            free, doubtful = free & ~held, doubtful | near.any(1)
        if bool(doubtful.any()):
            return None
        K = torch.cat([torch.cat([self.curved.H, J.mT], 2), F.pad(J, (0, model.count))], 1)
        sign = torch.cat([torch.ones_like(z), torch.where(rows & ~equalities, -1, 1).to(z)], 1)
        return DenseActiveFactors(K, torch.cat([free, rows], 1), sign)

    def smooth(self) -> Tensor:
        """``(dL/dz, h, g)`` at the point, ``(batch, n + m)``."""
        at = self.at
        return torch.cat([at.slope + mv(at.jacobian.mT, self.multipliers), at.constraints], 1)

    def is_uphill(self, d: Tensor, multipliers: Tensor) -> Tensor:
        """Where the penalty rises along a step that inequalities draw which hold already, ``(batch,)``: no part of such a
        step is taken, since the penalty does not see how far from its bound an inequality is."""
        falls = (_outweighing(self.weight, multipliers) * self.model.violation(self.at.constraints)).sum(1)
        return ((self.at.slope * d).sum(1) > falls) & self.curved.draws()

    def downhill(self, which: Tensor, d: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """The step and the multipliers of the samples ``which`` without what draws them; the others' as they are."""
        self.curved.let_go(which)
        new = self.step()
        return torch.where(which.unsqueeze(1), new[0], d), torch.where(which.unsqueeze(1), new[1], multipliers)


def _active(multipliers: Tensor, values: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Which conditions ``multipliers >= 0 >= values`` are active, and which of them nearly both ways: values are measured in
    ``size``, multipliers in the largest of a sample."""
    near = torch.finfo(values.dtype).eps ** 0.5
    doubtful = (multipliers <= near * largest_moduli(multipliers).unsqueeze(1)) & (-values <= near * size)
    return multipliers + values > 0, doubtful


def _penalised(model: Model, H: Tensor, at: Local) -> tuple[Tensor, Tensor]:
    """Where the linearised constraints cannot all hold: the minimiser of the model with quadratic penalties."""
    steep = F.pad(at.jacobian.square().sum(2), (0, 1)).amax(1)  # of no constraint: 0
    rho = 10 * (1 + H.abs().flatten(1).amax(1)) / torch.where(steep > 0, steep, 1)
    violated = torch.where(model.one_sided, (at.constraints > 0).to(H), 1.0)
    J = at.jacobian * violated.unsqueeze(2)
    force = rho.unsqueeze(1) * at.constraints * violated
    K = H + rho[:, None, None] * (J.mT @ J)
    L, _ = cholesky_batched(K)
    d = -torch.cholesky_solve((at.slope + mv(J.mT, force)).unsqueeze(2), L).squeeze(2)
    return torch.nan_to_num(d), force + rho.unsqueeze(1) * mv(J, d)


def _within_reach(z: Tensor, d: Tensor) -> Tensor:
    """A step whose largest entry is no more than ten times ``1 + max |z|``, however many unknowns there are."""
    reach = 10 * (1 + largest_moduli(z)) / largest_moduli(d).clamp_min(1e-30)
    return d * reach.clamp(max=1.0).unsqueeze(1)


def _moved(
    w: Tensor, d: Tensor, multipliers: Tensor, bounds: tuple[Tensor, Tensor] | None, t: Tensor | None = None
) -> Tensor:
    """``w`` moved by ``t`` (1 if not given) times the step, within the bounds, and its multipliers as far to new ones."""
    n = d.shape[1]
    z, old = w[:, :n], w[:, n:]
    d = _within_reach(z, d) if t is None else t.unsqueeze(1) * d
    z = z + d if bounds is None else (z + d).maximum(bounds[0]).minimum(bounds[1])
    return torch.cat([z, multipliers if t is None else old + t.unsqueeze(1) * (multipliers - old)], 1)


def _fallen(f: Evaluations, trial: Tensor, to: float = 0.5) -> Tensor:
    """Where the residual at ``trial`` is no more than half (``to``) of what it was, or nothing is at work, ``(batch,)``."""
    return ~f.active | (torch.linalg.vector_norm(f.residual(trial), dim=1) <= to * f.norm)


def _outweighing(weight: Tensor, multipliers: Tensor) -> Tensor:
    """The weights of the penalty, ``(batch, m)``: no less than the multipliers, and half way down to them where these have
    fallen (Powell 1978, eq. 4.6), so that a wild first step is forgotten."""
    size = 1.5 * multipliers.abs() + 1e-3
    return torch.maximum(size, 0.5 * (weight + size))


def _estimate(model: Model, at: Local) -> Tensor:
    """Multipliers for a start without: least squares of the stationarity over the constraints that hold with equality
    or are violated (Nocedal & Wright 2006, eq. 18.22)."""
    in_force = torch.where(model.one_sided, (at.constraints >= 0).to(at.slope), 1.0)
    J = at.jacobian * in_force.unsqueeze(2)
    gram = J @ J.mT
    ridge = 1e-8 * gram.diagonal(dim1=1, dim2=2).amax(1).clamp_min(1e-30)
    gram = gram + torch.diag_embed(ridge.unsqueeze(1) + (1 - in_force))
    L, _ = cholesky_batched(gram)
    found = -torch.cholesky_solve(mv(J, at.slope).unsqueeze(2), L).squeeze(2) * in_force
    return torch.nan_to_num(torch.where(model.one_sided, found.clamp_min(0), found))
