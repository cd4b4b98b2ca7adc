"""Pseudo-transient continuation: follow the flow with implicit steps that grow into Newton's method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import shifted
from implicitkit.foundation.options import above, at_least, check_options, optional, positive
from implicitkit.linear.factors.dense import factor_batched
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.steps.factored import Jacobian, at_rounding, jacobian_at, leave
from implicitkit.solver.steps.newton_damping import is_short

_SAFE = 0.9  # of the step that an error allows
_GROWTH = 2.0  # of steps, at least, as far as the error allows
_IDLE = 3  # Newton's steps in a row that do not halve |F|: no further one will
_NEAR = 0.1  # of |F|, what a step leaves of Newton's equations that is near enough
_DENSE = 768  # unknowns a sample up to which Jacobians without a sparsity pattern are formed


@register_solver("pseudo_transient", solves="root")
@dataclass(frozen=True)
class PseudoTransient(Method):
    r"""``z <- z + p``, ``(I / \delta - s J) p = s F(z)``, ``J = dF/dz``: a linearly implicit Euler step of ``dz/dt = s F``.

    Switched evolution relaxation (Mulder & van Leer 1985; Kelley & Keyes 1998, eq. 2.4): ``\delta`` grows as the residual
    falls, ``\delta_k = \delta_{k-1} max(|F_{k-1}| / |F_k|, 2)`` as far as errors allow, so that the path follows the flow
    while it is far from rest and the method is Newton's at the end (``1 / \delta`` is dropped once it has fallen by
    ``switch``; a sample of which three such steps in a row, or others as near to them as rounding, have not halved ``|F|``
    goes no further).  Of several
    states at rest it tends to find the one that the flow leads to, and it does not stop where ``|F|`` has a minimum that is
    no root.

    The sign ``s`` is part of the problem: ``+1`` for a steady state ``dz/dt = F`` and a fixed point (``F = f(z) - z``),
    ``-1`` for a gradient that is to vanish.  Plain equations have none: it is taken such that ``s F' J F <= 0`` at the
    start, where the flow then lets ``|F|`` fall.

    A step stands if its local error, what it differs by from the trapezoidal rule (filtered as in Hairer & Wanner 1996,
    equation IV.8.20), is no more than ``accuracy`` of ``z``:

        e = (I / \delta - s J)^{-1} s (F(z) - F(z + p)) / 2,    |e| <= accuracy * max(|z|, |z + p|)

    else it is taken back, and ``\delta`` shortened as the error asks, ``\delta (accuracy |z| / |e|)^{1/2}``, beyond which no
    other step grows, either.  Where ``F = a z``, what dies out meets a half at any ``\delta``, so that Newton's steps at
    the end are left alone; what grows meets it up to ``\delta = 0.6 / a``, and never beyond: there implicit steps damp
    what grows, and end in states that the flow leaves.  What is little beside other unknowns this does not see.

    One Jacobian and two solves with it a step: sparse where the Jacobian has a sparsity pattern (from 128 unknowns a
    sample on; ``jac_sparsity``), else dense up to 768 unknowns, and above that GMRES with Jacobian-vector products.  A step
    into a state where ``F`` is not finite is taken back and ``\delta`` divided by ten; after ``retreats`` in a row of both
    kinds a sample is given up.

    Args:
        step_size: the first ``\delta``, in units of time; ``None``: that which moves ``z`` by a tenth of
            ``max(|z|, sqrt(n))``, and no more than half the time in which the flow speeds up e-fold, ``F'F / F'JF``: beyond
            that time the implicit step would go against the flow.
        switch: factor of growth of ``\delta`` beyond which steps are Newton's. retreats: at most, in a row.
        accuracy: the error of a step, at most, beside ``z``; a hundredth follows the flow closely.

    Raises:
        ValueError: an option out of range.
    """

    step_size: float | None = None
    switch: float = 1e10
    retreats: int = 40
    accuracy: float = 0.5
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(self, step_size=optional(positive()), switch=above(1), retreats=at_least(0), accuracy=positive())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        F = f(z)
        norm = torch.linalg.vector_norm(F, dim=1)
        speeding = (F * f.linearize(z).mv(F)).sum(1) / norm.square()
        sign = _orientation(f, speeding)
        if self.step_size is None:
            first = 0.1 * torch.linalg.vector_norm(z, dim=1).clamp_min(z.shape[1] ** 0.5) / norm
            first = torch.where(sign * speeding > 0, torch.minimum(first, 0.5 / speeding.abs()), first)
        else:
            first = torch.full_like(norm, self.step_size)
        return {
            "delta": first,
            "first": first,
            "most": torch.full_like(first, torch.inf),
            "norm": norm,
            "sign": sign,
            "retreats": torch.zeros_like(norm, dtype=torch.int64),
            "idle": torch.zeros_like(norm, dtype=torch.int64),
        }

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        F, sign = f(z), state["sign"].unsqueeze(1)
        norm, first = torch.linalg.vector_norm(F, dim=1), state["first"]
        fall = (state["norm"] / norm).nan_to_num(torch.inf, torch.inf, 0)
        delta = torch.where(state["retreats"] > 0, state["delta"], state["delta"] * fall.clamp_min(_GROWTH))
        delta = torch.minimum(delta, state["most"])
        inverse = torch.where(delta > self.switch * first, 0, 1 / delta)
        J = jacobian_at(f, z, _DENSE)
        settled = at_rounding(f, J.blocks, z)
        solve = _implicit_euler(f, J, inverse, state["sign"])
        p = torch.where(settled.unsqueeze(1), 0, solve(sign * F))
        trial = z + p
        there = f(trial)
        longer = _SAFE * self._allowed(z, trial, solve(0.5 * sign * (F - there)))
        finite = torch.isfinite(torch.linalg.vector_norm(there, dim=1)) & torch.isfinite(p).all(1)
        finite = finite & ((p != 0).any(1) | settled)  # no step at all comes from a matrix that is singular
        stands = finite & (longer >= _SAFE)  # false for NaN
        most = torch.where(stands, longer.clamp_min(_SAFE), torch.inf) * delta
        idle = torch.where(stands & _is_newtons(z, p, inverse, norm) & (fall < _GROWTH), state["idle"] + 1, 0)
        retreats = torch.where(stands, 0, state["retreats"] + 1)
        z_next = trial
        if not bool((stands | ~f.active).all()):
            z_next = torch.where(stands.unsqueeze(1), trial, z)
            done = torch.linalg.vector_norm(p, dim=1) / norm  # the time in which the flow itself would go so far
            done = torch.fmin(delta, torch.where(done > 0, done, delta))
            delta = torch.where(stands, delta, torch.where(finite, longer.clamp(0.1, 0.5), 0.1) * done)
            first = torch.minimum(first, delta)
        tired = f.active & ((retreats > self.retreats) | (idle > _IDLE))
        f.stuck = tired if bool(tired.any()) else f.stuck
        leave(f, settled)
        return z_next, {
            "delta": delta, "first": first, "most": most.nan_to_num(torch.inf, torch.inf), "norm": norm,
            "sign": state["sign"], "retreats": retreats, "idle": idle,
        }  # fmt: skip

    def _allowed(self, z: Tensor, trial: Tensor, error: Tensor) -> Tensor:
        """How many times as long a step could be for its ``error`` to be what is allowed, ``(batch,)``."""
        lengths = [torch.linalg.vector_norm(t, dim=1) for t in (z, trial, error)]
        times = (self.accuracy * torch.maximum(lengths[0], lengths[1]) / lengths[2]).sqrt()
        return torch.where(lengths[2] == 0, torch.inf, times.nan_to_num(0.0, torch.inf))


def _is_newtons(z: Tensor, p: Tensor, inverse: Tensor, norm: Tensor) -> Tensor:
    r"""Where a step ``p`` is Newton's; or is that to a tenth, ``|p| / \delta <= |F| / 10``, and so short that what is not
    linear is nothing beside rounding, ``(batch,)``."""
    near = is_short(p, z) & (torch.linalg.vector_norm(p, dim=1) * inverse <= _NEAR * norm)
    return (inverse == 0) | near


def _implicit_euler(f: Evaluations, J: Jacobian, inverse: Tensor, sign: Tensor) -> Callable[[Tensor], Tensor]:
    """What solves ``(I / delta - s J) p = b`` for ``p``, by one factorisation."""
    if J.dense is not None:
        matrix = sign[:, None, None] * J.dense
        matrix.diagonal(dim1=1, dim2=2).sub_(inverse.unsqueeze(1))
        return _dense(matrix)
    if J.sparse is not None:
        return J.sparse.shifted(inverse, -sign).solve
    A, at_work = shifted(J.A, inverse, -sign), f.active.unsqueeze(1)
    gmres = GMRES(restart=50)
    return lambda b: gmres.solve(A, torch.where(at_work, b, 0), rtol=1e-3, atol=0.0, max_steps=500).x


def _dense(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Newton's directions by one dense factorisation."""
    factor = None if matrix.shape[1] == 1 else factor_batched(matrix)

    def solve(b: Tensor) -> Tensor:
        if factor is not None and not factor.reason:
            p = factor.solve(-b)
            if math.isfinite(float(p.sum())):
                return p
        return newton_direction(matrix, b)

    return solve


def _orientation(f: Evaluations, speeding: Tensor) -> Tensor:
    """The sign ``s`` of the flow ``dz/dt = s F``, ``(batch,)``; ``speeding``: ``F'JF / F'F`` at the start."""
    if f.kind.flow > 0:
        return torch.ones_like(speeding)
    if f.kind.flow < 0:
        return -torch.ones_like(speeding)
    return torch.where(speeding > 0, -1.0, 1.0).to(speeding)
