"""Bisection of scalar equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.bracketing import Bracketing, into_domain

__all__ = ["Bisection"]


@register_solver("bisection", solves="root", max_size=1)
@dataclass(frozen=True)
class Bisection(Bracketing):
    r"""Halve an interval in which ``F`` changes sign; one unknown a sample, any number of samples.

    The interval is ``bracket``, or is found by geometric expansion to both sides of ``z0``
    (:func:`~implicitkit.solver.steps.bracketing.expand`).  One evaluation and one bit a step, whatever ``F`` does; a sample
    without a sign change is given up, status ``STALLED``, and so is one whose interval can be halved no further: there
    ``F`` jumps, or rounding hides its zero.  A midpoint where ``F`` is not finite is moved towards the end whose ``|F|`` is
    smaller.

    Source: Brent (1973), *Algorithms for Minimization without Derivatives*, chapter 4.

    Args:
        width: half of the first interval; ``None``: ``max(|z0|, 1) / 8``.
        growth: of the interval from trial to trial, greater than 1. expansions: trials, at most.
        bracket: ``(low, high)``, numbers or tensors of the batch's shape, in place of the search; a sample in which ``F``
            has the same sign at both ends is given up.

    Raises:
        ValueError: an option out of range, ``low`` not below ``high``.
        CapabilityError (from the solve): more than one unknown a sample.
    """

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        (a, fa, b, fb), missing = self.opened(f, z, state)
        middle, F, bad = into_domain(f, a + 0.5 * (b - a), torch.where(fa.abs() < fb.abs(), a, b))
        stop = ((middle == a) | (middle == b) | bad).squeeze(1)
        f.stuck = stop if missing is None else stop | missing
        left = torch.sign(F) == torch.sign(fa)
        a, fa, b, fb = (
            torch.where(left, middle, a),
            torch.where(left, F, fa),
            torch.where(left, b, middle),
            torch.where(left, fb, F),
        )
        return middle, {"a": a, "fa": fa, "b": b, "fb": fb}
