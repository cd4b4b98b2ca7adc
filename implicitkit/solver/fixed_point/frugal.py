"""Anderson acceleration that goes over to Newton's method where that costs less."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.anderson import Anderson
from implicitkit.solver.fixed_point.attracting import outward
from implicitkit.solver.root.frugal import FRESH
from implicitkit.solver.steps.factored import chord_steps, is_large, jacobian_at
from implicitkit.solver.steps.sums import direction_of_map

_WINDOW = 10  # steps between two looks
_SOON = 3.0  # windows that it may still need in any case
_ENOUGH = 0.5  # of what factors cost, to be spent before they are bought
_PAYS = 0.5  # of a residual that one of Newton's steps may leave
_NUMBERS = 1 << 25  # in dense Jacobians of all samples, at most
_LARGE = 1 << 15  # numbers in the state, above which differences are not kept beside those of the samples at work


@dataclass(frozen=True)
class FrugalAnderson(Anderson):
    r"""``anderson``, and Newton's steps once a sample is slow and factors would be cheap.

    Sweeps over a discretised equation (Jacobi's, Gauss and Seidel's, one of a multigrid or of overlapping domains) are
    fixed-point maps whose convergence slows down as the grid is refined, while the Jacobian is sparse; of few unknowns it
    may as well be dense.  Dense factors cost as much as ``P`` steps of acceleration (:mod:`implicitkit.linear.price`: of
    GMRES, which are as dear), and Newton's method takes ``k`` of them: as many as the digits between the residual and the
    tolerance can be doubled, ``\log_2 \log_{10}(b / tolerance)``, one at least, or about four below 128 unknowns, where
    every step takes its own.  Of sparse ones, which cost ``P`` products, ``k`` is one: a step is dearer than a product.

    With the smallest residual ``b`` of a sample, ``b'`` ``j >= 10`` steps earlier, the tolerance is
    ``j \log(tolerance / b) / \log(b / b')`` steps away.  If that is more than ``k P``, and more than 30, and ``P / 2`` have
    been taken, Newton's steps follow, of every sample whose residual they halve, while these are half of those at work; the
    others go on as they were, and are looked at again after twice as many steps.  None follows while a sample's residual has
    not fallen in ten steps: it is on its way between fixed points, perhaps, of which Newton's method would take any, the
    repelling ones too.

    The rule is that of ski rental (Karlin, Manasse, Rudolph & Sleator 1988, Algorithmica 3).
    """

    name: ClassVar[str] = "anderson"
    hands_over: ClassVar[bool] = True

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        return super().init(f, z) | {
            "taken": 0,
            "looked": 0,
            "window": _WINDOW,  # ``inf``: nobody looks
            "before": None,
            "price": None,  # of factors, and how many are needed
            "newton": None,  # samples whose steps are Newton's, ``(batch,)`` ...
            "finished": None,  # ... and those whose last one was
            "working": f.active,
            "at_work": f.at_work,
            "seen": None,
            "at_once": z.numel() >= _LARGE,
        }

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if f.at_work < state["at_work"]:
            state = state | {"seen": _seen(state, f.active), "working": f.active, "at_work": f.at_work}
        if state["before"] is None:
            state = state | {"before": f.best_norm}
        elif state["newton"] is None and state["taken"] - state["looked"] >= state["window"]:
            state, A = _look(f, z, state)
            if A is not None:
                return self._newton_step(f, z, state | {"newton": f.active}, A)
        elif state["newton"] is not None and bool((state["newton"] & f.active).any()):
            return self._newton_step(f, z, state)
        z_next, after = super().step(f, z, state | {"newton": None})
        return z_next, after | {"taken": state["taken"] + f.taken}

    def _newton_step(
        self, f: Evaluations, z: Tensor, state: dict[str, Any], A: Operator | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Newton's step, with factors of ``A``, the Jacobian of the residual at ``z``, of samples whose residual it halves,
        and one of acceleration of the others."""
        g = _equation(f, z, state["newton"] & f.active)
        jacobian = jacobian_at(g, z, A=A)
        d, blocks = direction_of_map(g, jacobian, g(z))
        trial = z + torch.where(g.active.unsqueeze(1), d, 0)
        if is_large(g, z):
            trial = chord_steps(g, blocks, trial, g.norm, z)
            f.at_rounding = f.stuck = g.at_rounding
        good = g.active & (torch.linalg.vector_norm(g(trial), dim=1) <= _PAYS * f.norm)
        finished = good if state["finished"] is None else good | (state["finished"] & ~f.active)
        state = state | {"newton": good, "finished": finished, "taken": state["taken"] + 1}
        if bool((good | ~f.active).all()):
            f.know(trial, g(trial))
            return trial, state
        f.ahead = 1
        if 2 * int(torch.count_nonzero(good)) < f.at_work:
            state = state | {"newton": None}
        z_next, after = super().step(f, z, state | {"window": 2 * state["window"], "looked": state["taken"]})
        return torch.where(good.unsqueeze(1), trial, z_next), after

    def keep(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """What every sample remembered when it ended, if anything: the differences, ``history``, or what they say
        (:func:`~implicitkit.solver.fixed_point.attracting.outward`), where to keep them costs more; and whether it came to
        its end by Newton's steps, ``newton``."""
        seen = _seen(state, torch.zeros_like(state["working"]))
        kept = {"outward" if state["at_once"] else "history": seen, "newton": state["finished"]}
        return {name: value for name, value in kept.items() if value is not None}


def _equation(f: Evaluations, z: Tensor, active: Tensor) -> Evaluations:
    """The residual for Newton's method, of some samples, where ``f`` is at ``z``."""
    g = f.beside("root")
    g.active, g.norm, g.tolerance = active, f.norm.to(z.dtype), f.tolerance
    g.know(z, f.residual(z))
    return g


def _look(f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[dict[str, Any], Operator | None]:
    """The state after a look at the rate; and the Jacobian of the residual at ``z``, if its factors are to be bought."""
    before, best, since = state["before"], f.best_norm, state["taken"] - state["looked"]
    state, A = state | {"before": best, "looked": state["taken"]}, None
    away = (f.tolerance / best).log()[f.active]
    left = float((since * away / (best / before).log()[f.active]).amax())
    if not bool((best < before)[f.active].all()) or left <= _SOON * _WINDOW:
        return state, None
    price = state["price"]
    with suppress(Exception):  # a map may have no derivative, which acceleration does not need
        g = _equation(f, z, f.active)
        if price is None and (sparse := f.price_of_sparse(z)) is not None:
            price = sparse, 1.0
        elif price is None and z.numel() * z.shape[1] <= _NUMBERS:
            A = g.linearize(z)
            price = f.price_of_dense(z, 1, A), FRESH
            if is_large(f, z):
                price = price[0], max(1.0, math.log2(max(1.0, -float(away.amin()) / math.log(10))))
        if price is not None and state["taken"] >= _ENOUGH * price[0] and left > price[0] * price[1]:
            return state | {"price": price}, g.linearize(z) if A is None else A
    return state | {"price": price, "window": state["window"] if price is not None else math.inf}, None


def _seen(state: dict[str, Any], active: Tensor) -> Tensor | None:
    """What samples that have ended remembered then, before anybody writes over it."""
    seen: Tensor | None = state["seen"]
    dR, dW, ended = state["dR"], state["dW"], state["working"] & ~active
    if dR is None or not bool(ended.any()):
        return seen
    whole = bool(ended.all())
    samples = ended.nonzero().squeeze(1)
    found = torch.cat([t if whole else t.index_select(0, samples) for t in (dR, dW)], 2)
    found = outward(found) if state["at_once"] else found
    if whole:
        return found
    seen = found.new_zeros(len(dR), *found.shape[1:]) if seen is None else seen
    return seen.index_copy(0, samples, found)
