"""Newton's steps through a proximal map, as soon as gradient steps have cost as much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.proximal_gradient import Momentum, ProximalGradient
from implicitkit.solver.constrained.second_order import falls_forever_within
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.steps.region import taken_where

_PAYS = 0.5  # of the residual that a Newton step may leave
_LATER = 2  # times as many gradient steps before the next one, after one that does not pay
_FIRST = 3  # gradient steps that one costs at least
_STEP = 2.0  # products that a gradient step costs
_IN_A_ROW = 10  # Newton steps in one trial
_ROUNDING = 4.0  # units in the last place of ``z`` that ``T`` may move it by, where nothing more is to be had
_LINEAR = 1e-10  # of ``|g| |d|``: a gradient that falls by more along a step is that of no convex function
_NEVER = 1 << 40
_LARGEST, _NUMBERS = 4096, 1 << 25  # unknowns of a matrix, and numbers in those of all samples


@dataclass(frozen=True)
class ProximalNewton(ProximalGradient):
    r"""``z <- T(y + d)``, a Newton step for ``z = T(z) = prox(z - t df(z), t)``, where that pays; else accelerated proximal
    gradient.

    The derivative of the proximal map has rows of zeros ``N`` where it is constant: numbers that a penalty makes zero, that
    a set holds at its bounds.  There ``y`` is ``T(z)`` already; for the others, ``S``, semismooth Newton steps solve

        (I - P_SS (I - t H_SS)) d_S = T(y)_S - y_S,       y_N = T(z)_N,  y_S = z_S,  d_N = 0,

    with the Hessian ``H`` of ``f``, and the step length ``t`` of the gradient steps: as many products as ``S`` has numbers,
    and ``O(|S|^3)``.  The gradient step after it puts the point into the set, and small numbers to zero.  Up to ten in a
    row, which may change what is free, are taken where they leave at most half of the least ``|T(z) - z|`` so far, and the
    gradient has risen along each of them, as that of a convex function does.  ``T`` is nonexpansive for a convex ``f`` and
    ``t <= 1/L``, so gradient steps alone converge; and Newton's converge at least quadratically, or end after one step, once
    the piece of the map is that of the solution (Qi & Sun 1993, "A nonsmooth version of Newton's method", Math. Prog. 58).

    Nobody knows beforehand when that is.  Newton steps are first tried when gradient steps have cost as much as one
    (:mod:`implicitkit.linear.price`), as many as these have paid for; and after a trial that fails, when at least twice as
    many gradient steps have been made as before it: of what either alone would take it is twice, at most.  Objectives
    without a second derivative have gradient steps alone.  A sample that ``T`` moves by rounding only is given up (status
    ``STALLED``), if it is not converged by then; and so is one of whose objective a trial that fails shows that it falls
    forever (:func:`~implicitkit.solver.constrained.second_order.falls_forever_within`).

    Raises:
        CapabilityError: the problem has constraints.
    """

    name: ClassVar[str] = "proximal_newton"
    default_max_steps: ClassVar[int] = 20000
    hands_over: ClassVar[bool] = True

    def init(self, f: Evaluations, z: Tensor) -> Any:
        momentum = super().init(f, z)
        wait = torch.full_like(f.active, _FIRST, dtype=torch.int64)
        return {
            "momentum": momentum,
            "wait": wait,
            "made": 0 * wait,
            "least": torch.full_like(momentum.theta, torch.inf),
        }

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        made, wait, momentum = state["made"], state["wait"], Momentum(*state["momentum"])
        due, least, trial = f.active & (made >= wait), state["least"], None
        if bool(due.any()):
            try:
                wait, due, trial = _tried(f, z, momentum.length, due, made, wait, least)
            except torch.linalg.LinAlgError:  # a matrix of the objective's own is singular there
                wait, made = torch.where(due, _LATER * wait, wait), torch.where(due, 0, made)
            except RuntimeError as error:
                if not autodiff.lacks_second_derivative(error):
                    raise
                wait = torch.full_like(wait, _NEVER)
        if trial is None:
            z_next, momentum = super().step(f, z, momentum)
            return z_next, {"momentum": momentum, "wait": wait, "made": made + 1, "least": least}
        least = torch.where(due, torch.minimum(least, trial.before), least)
        good = due & (trial.left < least) & (trial.left <= _PAYS * least)
        least, failed = torch.where(good, trial.left, least), due & ~good
        f.stuck = failed & (trial.before <= _ROUNDING * torch.finfo(z.dtype).eps * torch.linalg.vector_norm(z, dim=1))
        if bool((failed & ~f.stuck).any()):
            f.stuck = f.stuck | falls_forever_within(f, z, failed & ~f.stuck)
        wait, made = torch.where(failed, _LATER * wait, wait), torch.where(failed, 0, made)
        if bool((good | ~f.active).all()):
            z_next, later = trial.z, momentum
        else:
            z_next, later = super().step(f, z, momentum)
            if bool(good.any()):  # else what is known there is kept
                z_next = taken_where(good, trial.z, z_next)
            made = torch.where(good, made, made + 1)
        last = torch.where(good.unsqueeze(1), z_next, later.last)
        momentum = Momentum(last, torch.where(good, 1.0, later.theta), torch.where(good, momentum.length, later.length))
        return z_next, {"momentum": momentum, "wait": wait, "made": made, "least": least}


class _Trial(NamedTuple):
    """Newton steps: the best point that they lead to, ``(batch, n)``, and ``|T(z) - z|`` there, at least what rounding
    leaves of it, infinite where it is not finite, and before them, ``(batch,)``."""

    z: Tensor
    left: Tensor
    before: Tensor


class _Look(NamedTuple):
    """A point, the gradient there, ``T`` of it, and where that changes with it, ``(batch, n)``."""

    y: Tensor
    gradient: Tensor
    moved: Tensor
    free: Tensor

    def left(self) -> Tensor:
        """``|T(y) - y|``, at least what rounding leaves of it; infinite where it is not finite."""
        size = torch.linalg.vector_norm(self.moved - self.y, dim=1)
        rounding = torch.finfo(size.dtype).eps * torch.linalg.vector_norm(self.y, dim=1)
        return torch.where(torch.isfinite(size), torch.maximum(size, rounding), torch.inf)


class _Map:
    """``T``."""

    def __init__(self, model: Model, t: Tensor) -> None:
        self.model, self.t = model, t

    def __call__(self, y: Tensor) -> Tensor:
        gradient = autodiff.gradient(lambda x: self.model.values(x)[0], y)[1]
        return self.model.proximal(y - self.t.unsqueeze(1) * gradient, self.t)

    def look(self, y: Tensor) -> _Look:
        """One evaluation, and one product with the derivative of the proximal map."""
        gradient = self.model.slope(y)[2]
        moved, P = autodiff.linearise(lambda v: self.model.proximal(v, self.t), y - self.t.unsqueeze(1) * gradient)
        weights = 1.5 + torch.cos(torch.arange(y.shape[1], dtype=y.dtype, device=y.device))  # no row cancels by chance
        return _Look(y, gradient, moved.detach(), P.rmv(weights.expand_as(y)) != 0)

    def newton(self, at: _Look, S: Tensor) -> tuple[Tensor, Operator]:
        """``T(y)_S - y_S`` with ``y_N = T(z)_N``, and its derivative by ``y_S``."""
        y = at.moved.index_copy(1, S, at.y.index_select(1, S))
        return autodiff.linearise(lambda x: self(y.index_copy(1, S, x)).index_select(1, S) - x, y.index_select(1, S))


def _tried(
    f: Evaluations, z: Tensor, t: Tensor, due: Tensor, made: Tensor, wait: Tensor, least: Tensor
) -> tuple[Tensor, Tensor, _Trial | None]:
    """How long to wait for the price of a Newton step, which samples have done so, and where there are any, as many steps as
    they have paid for, until these pay.

    Args:
        t: step lengths. due: the samples that ask. made: gradient steps since their last trial. wait: how many are to be
            made. least: of ``|T(z) - z|``, so far.
    """
    T = _Map(Model(f), t)
    at = T.look(z)
    best, before = z, at.left()
    left, convex, steps = torch.full_like(before, torch.inf), torch.ones_like(due), 0
    while True:
        S = (at.free & due.unsqueeze(1)).any(0).nonzero().squeeze(1)
        if len(S) > _LARGEST or len(z) * len(S) ** 2 > _NUMBERS:
            break
        y = at.moved
        if len(S):
            r, M = T.newton(at, S)
            if not steps:
                price = _FIRST + int(f.price_of_dense(r, A=M) / _STEP)
                wait = torch.where(due, wait.clamp_min(price), wait)
                due = due & (made >= wait)
                if not bool(due.any()):
                    return wait, due, None
                steps = min(_IN_A_ROW, int(made[due].max()) // price)
            J = M.dense()
            if not bool(J[due].any()):  # no curvature: a linear f, or one whose second derivative autograd does not see
                break
            y = y.index_copy(1, S, at.y.index_select(1, S) + newton_direction(J, r.detach()))
        there = T.look(y)
        rise = ((there.gradient - at.gradient) * (y - at.y)).sum(1)
        convex = convex & (rise >= -_LINEAR * (at.gradient.norm(dim=1) * (y - at.y).norm(dim=1)))
        at = T.look(there.moved)
        new = torch.where(convex, at.left(), torch.inf)
        best, left = torch.where((new < left).unsqueeze(1), at.y, best), torch.minimum(new, left)
        steps -= 1
        if steps <= 0 or bool((~due | ~convex | (left <= _PAYS * torch.minimum(least, before))).all()):
            break
    return wait, due, _Trial(best, left, before)
