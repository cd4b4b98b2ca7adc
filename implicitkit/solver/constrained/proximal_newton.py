"""Newton's steps through a proximal map, as soon as gradient steps have cost as much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.proximal_gradient import Momentum, ProximalGradient
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.steps.trials import taken_where

__all__ = ["ProximalNewton"]

_PAYS = 0.5  # of the residual that a Newton step may leave
_LATER = 2  # times as many gradient steps before the next one, after one that does not pay
_FIRST = 3  # gradient steps before one is thought of
_STEP = 4.0  # products that a gradient step costs
_ROUNDING = 4.0  # units in the last place of ``z`` that ``T`` may move it by, where nothing more is to be had
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
    and ``O(|S|^3)``.  The gradient step after it puts the point into the set, and small numbers to zero.  It is taken where
    it leaves at most half of the least ``|T(z) - z|`` so far.  ``T`` is nonexpansive for a convex ``f`` and ``t <= 1/L``, so
    gradient steps alone converge; and Newton's converge at least quadratically, or end after one step, once the piece of the
    map is that of the solution (Qi & Sun 1993, "A nonsmooth version of Newton's method", Math. Prog. 58).

    Nobody knows beforehand when that is.  A Newton step is first tried when gradient steps have cost as much
    (:mod:`implicitkit.linear.price`), and after each that fails, when at least twice as many have been made as before it: of
    what either alone would take it is twice, at most.  Objectives without a second derivative have gradient steps alone.  A
    sample that ``T`` moves by rounding only is given up (status ``STALLED``), if it is not converged by then.

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
                wait, due, trial = _tried(f, z, momentum.length, due, made, wait)
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
        wait, made = torch.where(failed, _LATER * wait, wait), torch.where(failed, 0, made)
        if bool((good | ~f.active).all()):
            z_next, later = trial.z, momentum
        else:
            z_next, later = super().step(f, z, momentum)
            z_next, made = taken_where(good, trial.z, z_next), torch.where(good, made, made + 1)
        last = torch.where(good.unsqueeze(1), z_next, later.last)
        momentum = Momentum(last, torch.where(good, 1.0, later.theta), torch.where(good, momentum.length, later.length))
        return z_next, {"momentum": momentum, "wait": wait, "made": made, "least": least}


class _Trial(NamedTuple):
    """A Newton step: where it leads, ``(batch, n)``, and ``|T(z) - z|`` there (infinite where it is not finite) and before
    it, ``(batch,)``."""

    z: Tensor
    left: Tensor
    before: Tensor


def _tried(
    f: Evaluations, z: Tensor, t: Tensor, due: Tensor, made: Tensor, wait: Tensor
) -> tuple[Tensor, Tensor, _Trial | None]:
    """How long to wait for the price of a Newton step, which samples have done so, and the step if there are any.

    Args:
        t: step lengths. due: the samples that ask. made: gradient steps since their last one. wait: how many are to be made.
    """
    model, length = Model(f), t.unsqueeze(1)

    def mapped(y: Tensor) -> Tensor:
        gradient = autodiff.gradient(lambda x: model.values(x)[0], y)[1]
        return model.proximal(y - length * gradient, t)

    moved, P = autodiff.linearise(lambda v: model.proximal(v, t), z - length * model.slope(z)[2])
    moved = moved.detach()
    weights = 1.5 + torch.cos(
        torch.arange(z.shape[1], dtype=z.dtype, device=z.device)
    )  # none of which cancel by chance
    S = ((P.rmv(weights.expand_as(z)) != 0) & due.unsqueeze(1)).any(0).nonzero().squeeze(1)
    if len(S) > _LARGEST or len(z) * len(S) ** 2 > _NUMBERS:
        return torch.where(due, _LATER * wait, wait), torch.zeros_like(due), None
    y = moved.index_copy(1, S, z.index_select(1, S))
    if len(S):
        r, M = autodiff.linearise(lambda x: mapped(y.index_copy(1, S, x)).index_select(1, S) - x, y.index_select(1, S))
        wait = torch.where(due, wait.clamp_min(int(f.price_of_dense(r, A=M) / _STEP)), wait)
        due = due & (made >= wait)
        if not bool(due.any()):
            return wait, due, None
        y = y.index_add(1, S, newton_direction(M.dense(), r.detach()))
    ahead = mapped(y).detach()
    left = torch.linalg.vector_norm(mapped(ahead).detach() - ahead, dim=1)
    left = torch.where(torch.isfinite(left), left, torch.inf)
    return wait, due, _Trial(ahead, left, torch.linalg.vector_norm(moved - z, dim=1))
