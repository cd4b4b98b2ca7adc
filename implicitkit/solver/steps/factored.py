r"""Newton steps of large systems: the Jacobian is factored, and its factors serve for as long as they pay.

    z <- z + t d,  J d = -F           a Newton step with halving, then
    z <- z - J^{-1} F(z)              with the same factors, while |F| falls to a fifth (Kelley 1995, section 5.4.1)

The last factors are left with the system, for the derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations

__all__ = ["chord_steps", "factored_direction", "is_noise"]

_ROUNDING = 4.0  # units of rounding in |J| |z| that are all that is left of a residual
_CONTRACTION = 0.2  # what a step with old factors must leave of |F| at most
_STEPS = 10  # with the same factors
_BEYOND = 1e-3  # times the tolerance: a Newton step would have overshot it, and steps with old factors cost little


def factored_direction(f: Evaluations, A: Operator, blocks: Any, residual: Tensor) -> Tensor:
    """``d`` with ``A d = -F``.

    Where a block is singular, GMRES gives a direction that lowers ``|F + A d|``; zero where nothing is finite.
    """
    d: Tensor = -blocks.solve(residual)
    regular = blocks.factor.ok.to(d.device)
    if len(d) == f.system.batch and bool(regular.all()):
        f.system.factored = blocks
    bad = ~regular & torch.isfinite(residual).all(1)
    if bool(bad.any()):
        rhs = torch.where(bad.unsqueeze(1), -residual, 0)
        d = torch.where(bad.unsqueeze(1), GMRES().solve(A, rhs, rtol=1e-3, atol=0.0, max_steps=200).x, d)
    return torch.where(torch.isfinite(d), d, 0)


def is_noise(blocks: Any, z: Tensor, norm: Tensor) -> Tensor:
    """Where ``|F|`` is nothing but rounding errors, ``|F| <= 4 eps | |A| |z| |``: no step can do better; ``(batch,)``."""
    size = torch.linalg.vector_norm(blocks.size(z), dim=1)
    return norm <= _ROUNDING * torch.finfo(z.dtype).eps * size


def chord_steps(f: Evaluations, blocks: Any, z: Tensor, before: Tensor) -> Tensor:
    """Go on from ``z``, where a Newton step has led, with the same factors, sample by sample.

    Only samples whose Newton step has brought ``|F|`` (``before``) down to a fifth go on.  Those that end with nothing but
    rounding errors are marked in ``f.at_rounding``.
    """
    residual = f(z)
    norm, goal = torch.linalg.vector_norm(residual, dim=1), _BEYOND * f.tolerance
    going = f.active & (norm <= _CONTRACTION * before) & (norm > goal)
    for _ in range(_STEPS):
        if not bool(going.any()):
            break
        trial = z - torch.where(going.unsqueeze(1), blocks.solve(residual), 0)
        trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
        better = going & (trial_norm <= _CONTRACTION * norm)
        taken = better | (going & (trial_norm < norm))
        z = trial if bool((taken | ~going).all()) else torch.where(taken.unsqueeze(1), trial, z)
        norm = torch.where(taken, trial_norm, norm)
        going = better & (norm > goal)
        if bool(going.any()):
            residual = f(z)
    open_ = f.active & (norm > f.tolerance) & (norm <= _CONTRACTION * before)
    if bool(open_.any()):
        f.at_rounding = open_ & is_noise(blocks, z, norm)
    return z
