"""Anderson acceleration that stops where Newton's method with sparse factors would have cost less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.anderson import Anderson
from implicitkit.solver.fixed_point.attracting import outward
from implicitkit.sparsity.patterns import SMALLEST

_WINDOW = 10  # steps between two looks
_SOON = 2.0  # windows that it may still need in any case
_ENOUGH = 0.5  # of what factors cost, to be spent before they are bought
_LARGE = 1 << 15  # numbers in the state, above which differences are not kept beside those of the samples at work
_SAMPLES = 8  # above which nobody asks: a factorisation each


@dataclass(frozen=True)
class FrugalAnderson(Anderson):
    r"""``anderson``, given up for all samples once one of them is slow and factors would be cheap.

    Sweeps over a discretised equation (Jacobi's, Gauss and Seidel's, one of a multigrid or of overlapping domains) are
    fixed-point maps whose convergence slows down as the grid is refined, while the Jacobian is sparse.  Factors of it cost
    as much as ``P`` products with it (:mod:`implicitkit.linear.price`), and a step of acceleration is dearer than a product.
    With the smallest residual ``b`` of a sample, ``b'`` ``j >= 10`` steps earlier, the tolerance is
    ``j \log(tolerance / b) / \log(b / b')`` steps away; if that is more than ``P``, and ``P / 2`` have been taken, this is
    left for others to go on from.  A sample whose residual has not fallen in ten steps is not left: it is on its way between
    fixed points, perhaps, of which Newton's method would take any, the repelling ones too.

    The rule is that of ski rental (Karlin, Manasse, Rudolph & Sleator 1988, Algorithmica 3).
    """

    name: ClassVar[str] = "anderson"
    hands_over: ClassVar[bool] = True

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        asked = z.shape[1] >= SMALLEST and len(z) <= _SAMPLES
        return super().init(f, z) | {
            "taken": 0,
            "looked": 0,
            "asked": asked,
            "before": None,
            "price": None,
            "working": f.active,
            "at_work": f.at_work,
            "seen": None,
            "at_once": z.numel() >= _LARGE,
        }

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if f.at_work < state["at_work"]:
            state = state | {"seen": _seen(state, f.active), "working": f.active, "at_work": f.at_work}
        z_next, after = super().step(f, z, state)
        after = after | {"taken": state["taken"] + f.taken}
        before, best, since = state["before"], f.best_norm, state["taken"] - state["looked"]
        if not state["asked"] or (before is not None and since < _WINDOW):
            return z_next, after
        after.update(before=best, looked=state["taken"])
        if before is None:
            return z_next, after
        left = since * (f.tolerance / best).log() / (best / before).log()
        far = f.active & ~((best < before) & (left <= _SOON * _WINDOW)) & (best > f.tolerance)
        if not bool(far.any()):
            return z_next, after
        price = f.price_of_sparse(z) if state["price"] is None else state["price"]
        after.update(price=price, asked=price is not None)
        if price is not None and state["taken"] >= _ENOUGH * price:
            slow = far & (best < before) & (left > price)
            if bool(slow.any()):
                f.stuck = f.active if f.stuck is None else f.stuck | f.active
        return z_next, after

    def keep(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """What every sample remembered when it ended, if anything: the differences, ``history``, or what they say
        (:func:`~implicitkit.solver.fixed_point.attracting.outward`), where to keep them costs more."""
        seen = _seen(state, torch.zeros_like(state["working"]))
        return {} if seen is None else {"outward" if state["at_once"] else "history": seen}


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
