"""A solve from outside: a solver is run, and what it found is looked at once more.

Every solver judges its own points by the one :class:`~implicitkit.solver.verdict.judge.Judge`.  Of a minimisation the
gradient is only half the question: here a maximum or a saddle point is left again, whoever came to it, and a failure is
asked whether there is a minimum at all.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.wording import in_a_solver
from implicitkit.problem.constraint_qualification import balances_by_rounding
from implicitkit.solution import Status
from implicitkit.solver import return_checks
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.constrained.no_projection import NO_PROJECTION, moved_by_projection
from implicitkit.solver.constrained.out_of_domain import OUT_OF_DOMAIN, no_value_at_the_end, no_value_in_the_set
from implicitkit.solver.constrained.second_order import downhill_within, falls_forever_within
from implicitkit.solver.constrained.units_apart import UNITS_APART, lower_in_other_units
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.functions_of_steps import refuse_steps
from implicitkit.solver.norms import warn_of_seminorm
from implicitkit.solver.polyalgorithm import Polyalgorithm
from implicitkit.solver.root.along_the_flow import rest_of_flow
from implicitkit.solver.starts_without_slope import beside, is_lowest
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.alone import is_alone
from implicitkit.solver.verdict.curvature import downhill
from implicitkit.solver.verdict.differences import in_working_precision
from implicitkit.solver.verdict.higher_than_start import RISEN, Start
from implicitkit.solver.verdict.kinks import KINK
from implicitkit.solver.verdict.newton_correction import DENSE
from implicitkit.solver.verdict.no_solution import refuse_noise
from implicitkit.solver.verdict.rounding_level import ROUNDING
from implicitkit.solver.verdict.unbounded import falls_forever

_SPECTRUM = 256  # unknowns up to which it is asked whether a flow leaves the state found
_FAR = 1e6  # times the start, or 1
_CLOSELY, _EXACTLY = 55, 1000  # steps in which a flow is followed that has left a state, or drifts into a family
_ENDING = 30  # steps from where it was followed to
_ESCAPES = 3  # from stationary points that are no minima
_NO_SLOPE = (
    "The function has a value at z0, but no finite derivative there, nor close by: that of sqrt, of a power or of a norm "
    "at zero is infinite or NaN, and so is that of a branch that torch.where does not take, if it is outside its domain"
)
_IN_A_KINK = (
    "The objective is lower at z0 than all around it, but has no derivative there: a minimum in a kink, as of sqrt(z^2) at "
    "zero, has a value and no gradient that vanishes"
)
_NOT_ASKED = (
    f"Whether the flow stays at this state or leaves it is not asked of more than {_SPECTRUM} unknowns; "
    "ik.stability(solution) tells"
)
_ALONG_THE_FLOW = ("pseudo_transient", "integrate")
_NOT_ALONG_IT = (
    ". It was found by steps that leave the flow, and may be another state: solver='integrate' follows the flow"
)
_OTHERS = ("newton_cg",)  # for minima above their start ...
_OTHERS_WITHIN = ("sqp", "filter_interior_point", "proximal_gradient")  # ... within bounds, sets and constraints
_WRONG = (
    (moved_by_projection, NO_PROJECTION),
    (no_value_in_the_set, OUT_OF_DOMAIN),
    (lower_in_other_units, UNITS_APART),
)
_WAY = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16, 0.0)  # of the way out: where a point may be lower


def find(solver: Solver, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
    """Run the solver from ``z0`` ``(batch, n)``; of a minimisation, constrained or not, on to a minimum."""
    begun = Start(f, z0, solver)
    outcome = _run(solver, f, z0, options)
    warn_of_seminorm(f, z0, outcome, options)
    if refuse_noise(f, outcome):
        return outcome
    _begin_beside(solver, f, z0, options, outcome)
    if f.kind.equation and f.kind.flow:
        f.evaluations, f.sample_evaluations = outcome.evaluations, outcome.sample_evaluations
        neutral, left, J = _look_along_the_flow(f, outcome)
        if isinstance(solver, Polyalgorithm) and bool(left.any()):
            neutral, J = _follow_closely(f, z0, options, outcome, left) or (neutral, J)
        if isinstance(solver, Polyalgorithm) and bool(neutral.any()):
            _follow_exactly(f, z0, options, outcome, neutral, J)
        outcome.evaluations, outcome.sample_evaluations = f.evaluations, f.sample_evaluations
    if not (f.kind.minimisation or f.kind.returns_program) or outcome.examined:
        return outcome
    f.evaluations, f.sample_evaluations = outcome.evaluations, outcome.sample_evaluations
    if f.kind.returns_scalar:
        _look_at_value(f, outcome)
    refuse_steps(f, outcome)
    _look_down(f, z0, outcome)
    _leave_saddles(solver, begun, options, outcome)
    if _look_up(solver, begun, options, outcome):
        _leave_saddles(solver, begun, options, outcome)
    if f.kind.returns_program:
        ended = (outcome.status == int(Status.CONVERGED)) | (outcome.status == int(Status.STALLED))
        _refuse(f, outcome, ended, ((no_value_at_the_end, OUT_OF_DOMAIN),))
    if f.kind.minimisation:
        _look_back(f, outcome)
    kinds = (Status.MAX_STEPS, Status.STALLED, Status.NONFINITE, Status.SADDLE, Status.DIVERGED)
    failed = torch.stack([outcome.status == int(status) for status in kinds]).any(0)
    if bool(failed.any()):
        start = torch.where(torch.isfinite(outcome.z).all(1, keepdim=True), outcome.z, z0)
        unbounded = (falls_forever_within if f.kind.returns_program else falls_forever)(f, start, failed)
        outcome.status = torch.where(unbounded, int(Status.UNBOUNDED), outcome.status)
    outcome.evaluations, outcome.sample_evaluations = f.evaluations, f.sample_evaluations
    return outcome


def _run(solver: Solver, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
    """``solver.run``, looked at where it is somebody else's."""
    found = in_a_solver(solver.run, f, z0, options)
    ours = type(solver).run.__module__.partition(".")[0] == "implicitkit"
    return found if ours else return_checks.outcome(found, z0, solver.name or type(solver).__name__)


def _begin_beside(solver: Solver, f: Evaluations, z0: Tensor, options: Options, outcome: Outcome) -> None:
    """From a start beside ``z0``, for samples that never got away from it since the derivative there is not finite."""
    if outcome.all_converged:
        return
    failed = (outcome.status != int(Status.CONVERGED)) & (outcome.status != int(Status.STOPPED))
    failed = failed & (outcome.z == z0).all(1)
    later = options.after(outcome.taken, outcome.shown)
    if solver.general or not bool(failed.any()):
        return
    f.evaluations, f.sample_evaluations = outcome.evaluations, outcome.sample_evaluations
    lowest = is_lowest(f, z0, failed, options.atol) if f.kind.minimisation else torch.zeros_like(failed)
    if bool(lowest.any()):  # no step from beside it comes to rest anywhere else
        outcome.status, outcome.message = torch.where(lowest, int(Status.STALLED), outcome.status), _IN_A_KINK
    start, lost = beside(f, z0, failed & ~lowest)
    if bool(lost.any()):
        outcome.message = _NO_SLOPE
    moved = (start != z0).any(1)
    if later.max_steps is not None and later.max_steps < 1:
        outcome.status = torch.where(moved, int(Status.MAX_STEPS), outcome.status)
    elif bool(moved.any()):
        _run_again(solver, f, start, moved, replace(later, start_norm=None), outcome)
    outcome.evaluations, outcome.sample_evaluations = f.evaluations, f.sample_evaluations


def _run_again(
    solver: Solver, f: Evaluations, start: Tensor, which: Tensor, options: Options, outcome: Outcome
) -> None:
    """Some samples from another start; what came of that is what came of them, at the better of both points."""
    samples, system, theta = subset(f, which, whole=options.watched)
    part = Evaluations(system, theta, f.solves)
    part.evaluations, part.sample_evaluations = f.evaluations, f.sample_evaluations
    begin = torch.where(which.unsqueeze(1), start, outcome.z).index_select(0, samples)
    again = _run(solver, part, begin, options)
    f.evaluations, f.sample_evaluations = again.evaluations, again.sample_evaluations
    for name in ("z", "residual_norm", "status", "steps", "tolerance"):
        old, new = getattr(outcome, name), getattr(again, name)
        if old is not None and new is not None:
            setattr(again, name, old.index_copy(0, samples, new.to(old.dtype)))
    old_norm, new_norm = outcome.residual_norm, again.residual_norm
    better = (again.status == int(Status.CONVERGED)) | (new_norm < old_norm) | ~torch.isfinite(old_norm)
    outcome.examined = outcome.examined and again.examined
    _take(outcome, again, which & better, which)
    outcome.status = torch.where(which, again.status, outcome.status)


def _look_down(f: Evaluations, z0: Tensor, outcome: Outcome) -> None:
    """``UNBOUNDED`` where a claim lies so far out that a gradient vanishes by rounding, and the objective falls forever;
    ``STALLED`` where only rounding meets the conditions (large multipliers), by units, off the set, or by no projection."""
    if f.kind.returns_program:
        size, claims = f.problem.size, outcome.status == int(Status.CONVERGED)
        grown = balances_by_rounding(f.kernel, outcome.z, size, claims)
        outcome.status = torch.where(grown, int(Status.STALLED), outcome.status)
        _refuse(f, outcome, claims & ~grown, _WRONG)
    far = outcome.z.abs().amax(1) > _FAR * z0.abs().amax(1).clamp_min(1)
    far = far & (outcome.status == int(Status.CONVERGED))
    if bool(far.any()):
        forever = falls_forever_within if f.kind.returns_program else falls_forever
        outcome.status = torch.where(forever(f, outcome.z, far), int(Status.UNBOUNDED), outcome.status)


def _refuse(f: Evaluations, outcome: Outcome, claims: Tensor, looks: tuple[tuple[Any, str], ...]) -> None:
    """``STALLED``, and why, where one of these says so of a claim."""
    for look, said in looks:
        wrong = look(f, outcome.z, claims)
        if bool(wrong.any()):
            outcome.status, outcome.message = torch.where(wrong, int(Status.STALLED), outcome.status), said
            claims = claims & ~wrong


def _look_up(solver: Solver, start: Start, options: Options, outcome: Outcome) -> bool:
    """Once more from the start for what has ended higher than it began, by others where the solver is to be chosen; is
    there another point now?  ``STALLED`` where that comes to nothing.  A user's own solver need not begin there."""
    before = outcome.z
    if solver.general or outcome.descended:
        return False
    f, risen = start.f, start.risen(outcome.z, outcome.status == int(Status.CONVERGED))
    if not bool(risen.any()):
        return False
    others = (_OTHERS_WITHIN if f.kind.returns_program else _OTHERS) if isinstance(solver, Polyalgorithm) else ()
    for name in others:
        left = options.after(outcome.taken, outcome.shown)
        if not bool(risen.any()) or (left.max_steps is not None and left.max_steps < 1):
            break
        with suppress(CapabilityError):  # not for this set, or so many unknowns
            _run_again(get_solver(name), f, start.z0, risen, replace(left, start_norm=None), outcome)
            found = risen & (outcome.status == int(Status.CONVERGED))
            risen = (risen & ~found) | start.risen(outcome.z, found)
    risen = risen & (outcome.status != int(Status.STOPPED))
    if bool(risen.any()):
        outcome.status, outcome.message = torch.where(risen, int(Status.STALLED), outcome.status), RISEN
    return outcome.z is not before


def _look_at_value(f: Evaluations, outcome: Outcome) -> None:
    """``NONFINITE`` where the gradient is zero and the objective no number: torch's derivative of ``|z - nan|`` is zero."""
    flat = (outcome.status == int(Status.CONVERGED)) & (outcome.residual_norm == 0)
    if bool(flat.any()):
        without = flat & f.value(outcome.z).isnan()
        outcome.status = torch.where(without, int(Status.NONFINITE), outcome.status)


def _look_back(f: Evaluations, outcome: Outcome) -> None:
    """``SADDLE`` where a sample that ``DIVERGED`` stands still, its gradient zero, and the objective is lower on its way
    from the origin: it has climbed, to a plateau (``clip(z - 5, -2, 2)^2`` at 9) or to where a well ends."""
    still = (outcome.status == int(Status.DIVERGED)) & (outcome.residual_norm == 0)
    if not bool(still.any()):
        return
    probe, z = f.beside("minimise"), outcome.z
    value = probe.value(z)
    least = value - ROUNDING * f.eps * value.abs()
    for share in _WAY:
        lower = probe.value(share * z) < least  # false for NaN
        outcome.status = torch.where(still & lower, int(Status.SADDLE), outcome.status)


def _leave_saddles(solver: Solver, start: Start, options: Options, outcome: Outcome) -> None:
    """Go on from a lower point where the gradient vanishes and the objective does not stop falling; ``SADDLE`` where
    that comes to nothing.  ``STALLED`` where the gradient is zero in a kink."""
    f, claimed = start.f, outcome.status == int(Status.CONVERGED)
    look, forever = (downhill_within, falls_forever_within) if f.kind.returns_program else (downhill, falls_forever)
    falls_by_itself = not solver.general and (f.of_gradient or solver.solves == f.kind.name)
    for escape in range(_ESCAPES + 1):
        if not bool(claimed.any()):
            return
        descended = outcome.steps > 0 if falls_by_itself else torch.zeros_like(claimed)
        descended = descended if outcome.blind is None else descended & ~outcome.blind
        kinked = torch.zeros_like(claimed)
        descended = descended & (escape == 0)  # an edge that was left may be one of several
        more = () if f.kind.returns_program else (start.steep, kinked)
        lower = look(f, outcome.z, claimed, descended, *more)
        if bool(kinked.any()):
            outcome.status, outcome.message = torch.where(kinked, int(Status.STALLED), outcome.status), KINK
        open_ = (lower != outcome.z).any(1)
        if not bool(open_.any()):
            return
        outcome.status = torch.where(open_, int(Status.SADDLE), outcome.status)
        if solver.general or escape == _ESCAPES:
            return
        if outcome.halted:
            outcome.status = torch.where(open_, int(Status.STOPPED), outcome.status)
            return
        later = options.after(int(outcome.steps[open_].max()), outcome.shown)
        if later.max_steps is not None and later.max_steps < 1:
            return
        again = _run(solver, f, lower, replace(later, start_norm=None))
        f.evaluations, f.sample_evaluations = again.evaluations, again.sample_evaluations
        claimed = open_ & (again.status == int(Status.CONVERGED))
        if bool(claimed.any()):  # far out a gradient may vanish by rounding (z - sin z at -1e40)
            claimed = claimed & ~forever(f, again.z, claimed)
        halted = (again.status == int(Status.STOPPED)) | (again.status == int(Status.MAX_STEPS))
        _take(outcome, again, claimed | (open_ & halted & torch.isfinite(again.residual_norm)), open_)
        outcome.obey(again.status)
        outcome.halted = again.halted


def _take(outcome: Outcome, again: Outcome, better: Tensor, open_: Tensor) -> None:
    """Put what was found from a lower point in the place of a saddle."""
    outcome.z = torch.where(better.unsqueeze(1), again.z, outcome.z)
    outcome.residual_norm = torch.where(better, again.residual_norm, outcome.residual_norm)
    outcome.status = torch.where(better, again.status, outcome.status)
    if outcome.tolerance is not None and again.tolerance is not None:
        outcome.tolerance = torch.where(better, again.tolerance, outcome.tolerance)
    shown = outcome.shown + again.shown
    outcome.steps = torch.where(open_, outcome.steps + again.steps, outcome.steps)
    outcome.shown = shown
    outcome.trace = outcome.trace + again.trace[1:]
    outcome.message = again.message or outcome.message
    outcome.solver = again.solver or outcome.solver


def _look_along_the_flow(f: Evaluations, outcome: Outcome) -> tuple[Tensor, Tensor, Tensor]:
    r"""Which states belong to a family, and which the flow leaves, ``(batch,)`` each; and ``s dF/dz``.  Say so where
    disturbances of a state at rest grow: an eigenvalue of ``s dF/dz`` has a positive real part, beyond
    ``sqrt(eps) |dF/dz|``.  Not asked of more than 256 unknowns, which is said, or where there is no derivative.

    Newton's steps solve ``g(z) = 0`` and do not care whether ``dz/dt = g(z)`` would come to ``z``, and long implicit steps
    damp what grows: logistic growth rests at zero, too, and a flow that circles for ever has a state in its midst.  Such a
    state solves the problem, and rarely is the one that is meant.

    Source: linear stability, Strogatz (1994), *Nonlinear Dynamics and Chaos*, section 2.4 and 5.2.
    """
    z, which = outcome.z, outcome.status == int(Status.CONVERGED)
    nowhere, J = torch.zeros_like(which), z
    if z.shape[1] > _SPECTRUM or not bool(which.any()):
        if bool(which.any()):
            strayed = bool(outcome.solver) and not any(name in outcome.solver for name in _ALONG_THE_FLOW)
            outcome.message = outcome.message or (_NOT_ASKED + _NOT_ALONG_IT if strayed else _NOT_ASKED)
        return nowhere, nowhere, J
    probe = f.beside("root")
    try:
        J = f.kind.flow * in_working_precision(probe.linearize(z).dense())
    except Exception:  # the function is not to be differentiated, and no derivative was asked for
        return nowhere, nowhere, J
    which = which & torch.isfinite(J).flatten(1).all(1)
    J = torch.where(which[:, None, None], J, 0)
    if z.shape[1] > DENSE:  # where |dz|^2 falls in every direction, no disturbance grows; and this is cheap to see
        which = which & (torch.linalg.cholesky_ex(-J - J.mT)[1] != 0)
        J = torch.where(which[:, None, None], J, 0)
    if not bool(which.any()):
        return nowhere, nowhere, J
    values, margin = torch.linalg.eigvals(J), f.eps**0.5 * torch.linalg.matrix_norm(J)
    growth = values.real.amax(1)
    leaves = which & (growth > margin)
    if bool(leaves.any()):
        states = "this state" if len(z) == 1 else f"{int(leaves.sum())} of {len(z)} states found"
        outcome.message = (
            f"The flow leaves {states}: a disturbance grows by e in {1 / float(growth.max()):.3g} units of time; "
            "to find where the flow goes, start beside this state; ik.stability(solution) says more"
        )
    return which & ~leaves & (values.abs().amin(1) <= margin), leaves, J


def _follow_closely(
    f: Evaluations, z0: Tensor, options: Options, outcome: Outcome, left: Tensor
) -> tuple[Tensor, Tensor] | None:
    """States that the flow leaves, and to which long steps damped what grows: where the flow itself comes to rest; as they
    are where it does not (it circles), or where the flow begins.

    Every sample is followed from the start by steps of its own (:mod:`~implicitkit.solver.root.along_the_flow`), and solved
    from where that ends.  Which states now belong to a family, and ``s dF/dz``; ``None``: there was nothing to do.
    """
    left = left & (outcome.z != z0).any(1)
    moves = options.after(outcome.taken, outcome.shown)
    if not bool(left.any()) or (moves.max_steps is not None and moves.max_steps < 1):
        return None
    most = _CLOSELY if moves.max_steps is None else min(_CLOSELY, moves.max_steps)
    there, said = rest_of_flow(f, z0, left, 3e-3, most)[0], outcome.message
    later = replace(options, start_norm=None, max_steps=min(most, _ENDING))
    found = _at_rest(get_solver("pseudo_transient"), f, there, later, outcome, left)
    outcome.message = ""
    neutral, _, J = _look_along_the_flow(f, outcome)
    outcome.message = outcome.message or ("" if bool(found[left].all()) else said)
    return neutral, J


def _at_rest(solver: Solver, f: Evaluations, z0: Tensor, options: Options, outcome: Outcome, which: Tensor) -> Tensor:
    """Some samples once more, along the flow; as they were where that does not come to rest.  Those that have,
    ``(batch,)``."""
    before = outcome.z, outcome.residual_norm, outcome.status
    _run_again(solver, f, z0, which, options, outcome)
    found = which & (outcome.status == int(Status.CONVERGED))
    lost = which & ~found
    outcome.z = torch.where(lost.unsqueeze(1), before[0], outcome.z)
    outcome.residual_norm, outcome.status = (
        torch.where(lost, old, new)
        for old, new in zip(before[1:], (outcome.residual_norm, outcome.status), strict=True)
    )
    return found


def _follow_exactly(f: Evaluations, z0: Tensor, options: Options, outcome: Outcome, neutral: Tensor, J: Tensor) -> None:
    r"""States of a family, of which the path alone says which one the flow ends in: found anew by integration in time.

    Along the family ``J = dg/dz`` is singular.  Where its left null vectors ``l`` are sums that the flow conserves,
    ``l'g = 0`` everywhere, steps of any length keep them, and the state is the one that they name, unless the solver has
    gone another way and lost them; else (the susceptible that an epidemic leaves) it is where long steps happen to end.
    """
    probe = f.beside("root")
    F = in_working_precision(probe.residual(z0))
    U, S, Vh = torch.linalg.svd(J)
    eps = f.eps
    S = torch.where(S.le(eps ** (2 / 3) * S[:, :1]), 0, S)
    moved = torch.where(S == 0, (U.mT @ F.unsqueeze(2)).squeeze(2).abs(), 0).amax(1)
    least, way = torch.linalg.vector_norm(F, dim=1), in_working_precision(outcome.z - z0)
    left = torch.where(S == 0, (U.mT @ way.unsqueeze(2)).squeeze(2).abs(), 0).amax(1)  # of sums that the flow keeps
    adrift = neutral & ((moved > eps**0.25 * least) | (left > eps**0.25 * torch.linalg.vector_norm(way, dim=1)))
    if bool(adrift.any()):
        adrift = adrift & ~is_alone(probe, outcome.z, outcome.z - z0, (U, S, Vh), eps**0.5 * least)
    if not bool(adrift.any()):
        return
    there, rests = rest_of_flow(f, z0, adrift, 1e-6, _EXACTLY)
    found = _at_rest(get_solver("pseudo_transient"), f, there, replace(options, start_norm=None), outcome, rests)
    if bool((adrift & ~found).any()):
        outcome.message = (
            "A state of a family at rest: which of them the flow comes to is a matter of the path, which was followed by "
            "long steps; solver='integrate' takes shorter ones"
        )
