"""Scalar equations between points of opposite sign: bisection, and Chandrupatla's inverse quadratic interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.bracketing import Bracketing, into_domain


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
        bracket, missing = self.opened(f, z, state)
        a, fa, b, fb = bracket
        middle, F, bad = into_domain(f, torch.lerp(a, b, 0.5), lambda: torch.where(fa.abs() < fb.abs(), a, b))
        self.give_up(f, bracket, middle, bad, missing)
        left = torch.sign(F) == torch.sign(fa)
        a, fa, b, fb = (
            torch.where(left, middle, a),
            torch.where(left, F, fa),
            torch.where(left, b, middle),
            torch.where(left, fb, F),
        )
        return middle, {"a": a, "fa": fa, "b": b, "fb": fb}


@register_solver("chandrupatla", solves="root", max_size=1)
@dataclass(frozen=True)
class Chandrupatla(Bracketing):
    r"""Inverse quadratic interpolation where it is trustworthy, bisection elsewhere; one unknown a sample.

    Of the last three points ``a`` (newest), ``b`` (opposite sign), ``c``, with ``xi = (a - b) / (c - b)`` and
    ``phi = (fa - fb) / (fc - fb)``, the interpolation is taken if ``phi^2 < xi`` and ``(1 - phi)^2 < 1 - xi``, which says
    that it is monotone in the interval (Chandrupatla 1997, Adv. Eng. Software 28; Scherer 2013, section 6.1.7.3).
    Convergence is superlinear, and the interval cannot be lost.  Search for the interval, samples that have none, options
    and errors as in :class:`Bisection`.
    """

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        return super().init(f, z) | {"t": None}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        bracket, missing = self.opened(f, z, state)
        a, fa, b, fb = bracket
        t = torch.full_like(z, 0.5) if state["t"] is None else state["t"]
        new, F, bad = into_domain(f, a + t * (b - a), lambda: bracket.a)
        self.give_up(f, bracket, new, bad, missing)
        # the new point becomes a; b stays on the other side; what is left over is c
        same = torch.sign(F) == torch.sign(fa)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = new, F
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        trust = (phi.square() < xi) & ((1 - phi).square() < 1 - xi)
        inverse = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        # a step shorter than rounding of the better point would change nothing
        least = (2 * torch.finfo(z.dtype).eps * torch.where(fa.abs() < fb.abs(), a, b).abs() / (b - a).abs()).clamp(
            0, 0.5
        )
        t = torch.where(trust & torch.isfinite(inverse), inverse, 0.5)
        t = torch.minimum(torch.maximum(t, least), 1 - least)
        return new, {"a": a, "fa": fa, "b": b, "fb": fb, "t": t}
