r"""How far the linear system of an inexact Newton step is solved, ``|F + J d| \le \eta_k |F|``.

Source: Dembo, Eisenstat & Steihaug (1982), SIAM J. Numer. Anal. 19 (inexact Newton methods); Eisenstat & Walker (1996), SIAM
J. Sci. Comput. 17 (the choice of ``\eta``); Kelley (2003), *Solving Nonlinear Equations with Newton's Method*, eq. 3.20.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

_GAMMA, _ALPHA = 0.9, 2.0  # Eisenstat & Walker's choice 2
_SMALLER = 4.0  # times smaller than the scale of all equations is that of some
_OF_CLAIM = 1e-3  # of what is asked of a gradient: a claim that holds of all of it may not of one of its entries
_SINGLE = 1e-10  # roundings that are larger are those of single precision, or of less


def forcing_term(f: Evaluations, state: Any, largest: float) -> Tensor:
    r"""``\eta`` of every sample, ``(batch,)``: ``0.9 (|F_k| / |F_{k-1}|)^2``, at least ``0.9 \eta_{k-1}^2`` where that is
    above 0.1, and no smaller than the last step needs, ``tolerance / (c |F_k|)``; ``largest`` in the first step.

    ``c`` is 2 where only the norm is judged, of fixed points.  Other equations are judged one by one: what is left is spread
    over the ``N`` of all samples much as random numbers are, of which the largest is about ``\sqrt{2 \log N}`` times their
    root mean square, and the scales of some are a quarter of the others': ``4 \sqrt{2 \log N}``.  A few products more in the
    last step cost less than a claim that is refused, which asks about rounding, and a step after it.  In single precision
    tolerances are some hundred roundings, which a finer last step does not come below: 2.

    Args:
        state: with ``eta`` and ``norm`` of the step before (:func:`after_step`), ``None`` in the first.
    """
    norm = f.norm
    if state["eta"] is None:
        return torch.full_like(norm, largest)
    before = _GAMMA * state["eta"] ** _ALPHA
    eta = _GAMMA * (norm / state["norm"]) ** _ALPHA
    eta = torch.where(before > 0.1, torch.maximum(eta, before), eta)
    return torch.maximum(eta, f.tolerance / (_margin(f) * norm))


def _margin(f: Evaluations) -> float:
    """``c``."""
    coarse = f.kind.iteration or torch.finfo(f.norm.dtype).eps > _SINGLE
    return 2.0 if coarse else max(2.0, _SMALLER * math.sqrt(2 * math.log(f.batch * f.size)))


def aim_of_model(f: Evaluations, g: Tensor, largest: float, state: dict[str, Any]) -> Tensor:
    r"""What a step of a minimiser may leave of the gradient of its model, ``(batch,)``: ``\eta |g|`` with

        \eta = min(largest, \sqrt{|g| / |g_0|}, |g - r| / |g_{-}|),

    of which the last one is by how much the model of the step before, which left ``r``, was wrong (choice 1 of Eisenstat &
    Walker): nothing where the objective is quadratic, so that one step more solves it.  A thousandth of what the next claim
    asks is enough, of ``|g|`` where one was refused.

    Args:
        state: ``first``, ``|g_0|``; ``left`` and ``norm``, ``r`` and ``|g|`` of the step before, if these are known.
    """
    norm = torch.linalg.vector_norm(g, dim=1)
    eta = (norm / state["first"]).sqrt().clamp_max(largest)
    eta = torch.fmin(eta, how_wrong(g, state))  # the other one where it is NaN
    least = _OF_CLAIM * torch.minimum(f.tolerance.to(norm), norm)
    return torch.maximum(eta * norm, least)


def how_wrong(g: Tensor, state: dict[str, Any]) -> Tensor:
    """By what share of the gradient then the model of the step before was wrong, ``(batch,)``; NaN where that is not known.
    ``state``: as of :func:`aim_of_model`."""
    if state.get("left") is None:
        return torch.full_like(g[:, 0], torch.nan)
    return torch.linalg.vector_norm(g - state["left"], dim=1) / state["norm"].to(g)


def least_share(f: Evaluations, eta: Tensor) -> Tensor:
    """``eta``, where that is no smaller than the last step needs (:func:`forcing_term`)."""
    return torch.maximum(eta, f.tolerance / (_margin(f) * f.norm))


def after_step(eta: Tensor, t: Tensor, norm: Tensor) -> dict[str, Tensor]:
    """What the next forcing term builds on: of a step cut to ``t`` of its length, the reduction that was had."""
    return {"eta": 1 - t.to(eta) * (1 - eta), "norm": norm}
