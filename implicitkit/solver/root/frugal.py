"""Newton's method that does not buy factors of a Jacobian before they pay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.iterative.frugal import Frugal
from implicitkit.solver.costs import have_one_matrix
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.root.newton import Newton
from implicitkit.solver.steps.factored import is_large
from implicitkit.solver.steps.forcing import after_step, forcing_term
from implicitkit.solver.steps.newton_damping import damped_step
from implicitkit.solver.steps.trials import Trials

_WORTH = 13.0  # products that factors must cost for Krylov vectors to be tried, which costs four where they are in vain
_FEW, _SAMPLES = 12, 8  # unknowns, of so many samples, whose factors never cost that, but a product each at most
_LEAST = 4.0  # products for a step
FRESH = 4.0  # factorisations that Newton's method takes where none serves several steps and the derivative
_TRIED = 0.1  # of what these cost: trials that are no dearer are not given up by their rate
_FORCING = 0.5  # of the residual that they may leave, ...
_ADVANCE = 0.1  # ... and that a step may spend the share for, on account of those after it


@dataclass(frozen=True)
class FrugalNewton(Newton):
    r"""``newton``, its steps by Krylov vectors for as long as factors of ``J`` would cost more.

    One factorisation costs as much as ``P`` products with ``J`` (:mod:`implicitkit.linear.price`), and Newton's method takes
    ``k`` of them or more: as many as the digits between ``|F|`` and the tolerance can be doubled, ``\log_2 \log_{10}(|F| /
    tolerance)``, one at least (the last serves the derivative), or about four below 128 unknowns, where every step takes its
    own.  Without them, a step that brings ``|F + J d|`` down to ``\eta |F|``, ``\eta \le 0.5``, is one of ``\log(|F| /
    tolerance) / \log(1 / \eta)`` such, and has its share,

        k P \log(1 / \eta) / \log(|F| / tolerance)

    products, ``P`` at most (of a batch: by the sample that has the longest way to go).  What one leaves of it those after it
    may spend, and one may spend the share for ``\eta = 0.1`` on their account.  Samples that have come to their ``\eta``
    take what the products made for others show: they often converge with them, in the same step.  Once a sample needs
    more, or would at the rate of its first few (:mod:`implicitkit.linear.iterative.frugal`; it is asked after ``P / 10``
    of them, or ``k P / 10`` where every step takes its own: residuals of few different eigenvalues fall suddenly), or
    ``patience`` steps in a row have brought little, this is ``newton``, whose full steps begin there.  Where reaction
    dominates a system, or it is nearly explicit, a few products are enough, whatever its factors would fill; where
    diffusion does, the first step shows that for a few hundredths of a factorisation.  While all samples have one
    matrix, as they do in a linear equation for many right-hand sides, or where all begin at one point, ``P`` is the
    price of that (sparse ones: where they have it at other points too).  Where the first step of a solve was in vain,
    that of the next one of the same function and shapes, with parameters of about that size, is not tried, after three
    in a row of the next seven (where the matrix is sparse: its pattern remembers it).

    Source: Dembo, Eisenstat & Steihaug (1982), SIAM J. Numer. Anal. 19 (inexact Newton methods); the rule is that of ski
    rental (Karlin, Manasse, Rudolph & Sleator 1988, Algorithmica 3): no more is spent on trying than it may save.
    """

    name: ClassVar[str] = "newton"
    solves: ClassVar[str] = "root"

    def init(self, f: Evaluations, z: Tensor) -> Any:
        begins = {"krylov": True, "alike": True, "begins": True, "definite": False}
        return begins | {"eta": None, "norm": None, "saved": 0.0, "newton": super().init(f, z)}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        A = f.linearize(z)
        few = z.shape[1] <= _FEW and len(z) <= _SAMPLES
        price = f.price(z, A) if state["krylov"] and not few else 0.0
        alike = state["alike"] and price >= _WORTH and _are_alike(f, A, z)
        if alike:
            price = f.price(z, A, len(z))
        trials = f.remembered(z, "krylov", Trials) if state["begins"] and price >= _WORTH and not alike else None
        if price >= _WORTH and (trials is None or trials.is_due()):
            eta = forcing_term(f, state, _FORCING).nan_to_num(nan=_FORCING).clamp(torch.finfo(z.dtype).eps, _FORCING)
            A.definite = state["definite"]  # as the last one was
            d, saved = _direction(f, A, f(z), eta, price, None if is_large(f, z) else FRESH, state["saved"])
            if trials is not None:
                trials.note(d is not None)
            if d is not None:
                z_next, t, weak = damped_step(
                    f, z, d, f.norm.to(z.dtype), state["newton"], self.halvings, self.patience
                )
                going = weak is None or not bool(((weak > self.patience) & f.active).any())
                after = {"krylov": going, "alike": alike, "newton": weak, "begins": False}
                return z_next, state | after_step(eta, t, f.norm) | after | {"saved": saved, "definite": A.definite}
        z_next, newton = self.factored_step(f, A, z, state["newton"])
        # at the next point they may differ
        after = {"krylov": alike, "alike": alike, "begins": False}
        return z_next, after | {"eta": None, "norm": None, "saved": 0.0, "definite": False, "newton": newton}


def _are_alike(f: Evaluations, A: Operator, z: Tensor) -> bool:
    """Do all samples have one matrix?  Sparse ones, whose factors fill by what they were last, are asked for at other points
    too, where all samples are at one: if they differ there, this was the only step of one matrix."""
    if not A.alike():
        return False
    if A.price() is None or bool((z != z[:1]).any()):
        return True
    return have_one_matrix(f, z)


def _direction(
    f: Evaluations, A: Operator, residual: Tensor, eta: Tensor, price: float, count: float | None, saved: float
) -> tuple[Tensor | None, float]:
    """``d`` with ``|F + A d| <= eta |F|`` for every sample at work; ``None`` where that is dearer than ``count``
    factorisations (``None``: one for each doubling of the digits).  ``saved``: what the steps before left of their shares;
    with what this one leaves of its own."""
    left = (f.norm / f.tolerance).log()[f.active].clamp_min(torch.finfo(eta.dtype).eps)
    most = float(left.amax())  # of the sample that has the longest way to go
    factorisations = max(1.0, math.log2(max(1.0, most / math.log(10)))) if count is None else count

    def share(eta: Tensor) -> float:
        rest = float((left + eta[f.active].log()).amax())
        return max(_LEAST, price * min(1.0, factorisations * (1 - max(0.0, rest) / most)))

    unasked = math.ceil(_TRIED * price * (1 if count is None else count))
    worth = min(max(_LEAST, share(eta.clamp_max(_ADVANCE)) + saved), max(_LEAST, price))
    rhs = torch.where(f.active.unsqueeze(1), -residual, 0)
    solver = Frugal(worth, unasked=unasked, beyond=True)
    found = solver.solve(A, rhs, rtol=eta, atol=0.0, max_steps=None)
    return (found.x if bool(found.converged.all()) else None), saved + share(eta) - float(found.steps.amax())
