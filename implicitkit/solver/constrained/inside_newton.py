r"""Newton's steps inside a set at whose edge the domain of the objective ends.

Entropies on the simplex are such objectives, and ``-log det`` on the cone.  Gradient steps are led to that edge, where
there is no gradient, and Newton's through the projection change the set of numbers that lie at it.  The minimum lies
inside, where the set is the flat piece that it spans, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.linear.factors.dense import mv
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.steps.region import taken_where

_FAR = 1e3  # times ``1 + |z|``: a gradient step that leads to the edge
_FLAT = 1e-6  # what the derivative of the projection may differ by from a projector, where the set is flat
_BISECTIONS = 10  # of the way to the edge
_SHARE = 0.99  # of the way to the edge, at most
_HALVINGS = 30
_ARMIJO = 1e-4
_LOST = 1e3  # units of rounding of the objective below which differences of it say nothing
_PAYS = 0.5  # of the residual that a step may leave there
_ROUNDING = 64.0  # units in the last place of ``z`` that the projection of a point of the set may move it by


@dataclass(frozen=True)
class InsideNewton(Method):
    r"""``z <- z + t p``, ``p`` the minimiser of ``g'p + p'Hp / 2`` in the directions of the set, ``t`` such that ``z`` stays
    inside.

    Inside the set its projection has the derivative ``D``, the projector on these directions, and with ``E = I - D``

        [ H   E ] [ p ]     [     g     ]
        [ E  -D ] [ y ] = - [ E(z - z0) ],        so that ``E(z + p) = E z0``, ``D y = 0``, ``D (H p + g) = 0``,

    where ``y`` is only what is new of it.  ``t`` is 1, or 0.99 of the way to the edge, which bisections with the projection
    find, and halved until the objective and its gradient are finite and it falls by ``10^{-4} t p'Hp``; where rounding hides
    that, until the residual is halved.  Source: Nesterov & Nemirovskii (1994), "Interior-point polynomial algorithms in
    convex programming", section 2.2, for self-concordant ``f``.

    A sample is given up at once (status ``STALLED``) where :func:`domain_ends` says no: others are for that; and as soon as
    ``p'Hp`` is not positive, or no ``t`` is found.

    An evaluation or two and ``n`` Hessian products a step, ``O(n^3)``.
    """

    name: ClassVar[str] = "inside_newton"
    solves: ClassVar[str] = "constrained"
    default_max_steps: ClassVar[int] = 100
    descends: ClassVar[bool] = True

    def init(self, f: Evaluations, z: Tensor) -> Any:
        """Which samples are for this method, ``(batch,)``; ``P(z)`` and ``D`` there, which is that of the whole inside."""
        model = Model(f)
        working = domain_ends(model, z)
        if not bool(working.any()):
            return {"working": working}
        start, P = autodiff.linearise(lambda y: model.proximal(y, 1.0), z)
        D = P.dense()
        flat = (D - D.mT).abs().amax((1, 2)) + (D @ D - D).abs().amax((1, 2)) <= _FLAT
        return {"working": working & flat, "start": start.detach(), "D": D, "normal": torch.zeros_like(z)}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model, working = Model(f), f.active & state["working"]
        f.stuck = f.active & ~working
        if not bool(working.any()):
            return z, state
        value, _, g = model.slope(z)
        p, promised, normal = self._direction(model, z, g, state)
        working = working & (promised > 0)
        lost = promised <= _LOST * torch.finfo(z.dtype).eps * value.abs()
        start, D = state["start"], state["D"]  # where rounding has led off the set is no way to its edge
        t = _way(model, start + mv(D, z - start), mv(D, p))
        found, z_next = ~working, z
        for _ in range(_HALVINGS):
            trial = taken_where(~found, torch.addcmul(z, t.unsqueeze(1), p), z_next)
            there, _, slope = model.slope(trial)
            fallen = value - there >= _ARMIJO * t * promised
            if bool((lost & ~found).any()):
                fallen = torch.where(lost, torch.linalg.vector_norm(f(trial), dim=1) <= _PAYS * f.norm, fallen)
            good = ~found & fallen & torch.isfinite(there) & torch.isfinite(slope).all(1)
            z_next, found = taken_where(good, trial, z_next), found | good
            if bool(found.all()):
                break
            t = 0.5 * t
        f.stuck = f.active & ~(found & working)
        return z_next, state | {"normal": normal}

    def _direction(self, model: Model, z: Tensor, g: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor]:
        """``p``, and ``p'Hp``, both zero where there is none; and ``E y``, of which only what is new is solved for: a small
        ``p`` has no digits beside a large ``y``."""
        n, D, working = z.shape[1], state["D"], state["working"]
        eye = torch.eye(n, dtype=z.dtype, device=z.device)
        off = z - state["start"]
        off = off - mv(D, off)
        H = model.hessian(z, z[:, :0])
        E = eye - D
        K = torch.cat([torch.cat([H, E], 2), torch.cat([E, -D], 2)], 1)
        p, y = newton_direction(K, torch.cat([g + state["normal"], off], 1)).split(n, 1)
        curvature = (p * mv(H, p)).sum(1)
        good = working & (curvature > 0) & torch.isfinite(p).all(1)
        return torch.where(good.unsqueeze(1), p, 0), torch.where(good, curvature, 0), state["normal"] + y - mv(D, y)


def domain_ends(model: Model, z: Tensor) -> Tensor:
    """For which samples ``z`` lies in the set, and a long gradient step from there ends where objective or gradient are not
    finite, ``(batch,)``?  One evaluation, beside that of ``z``."""
    value, _, g = model.slope(z)
    size = 1 + torch.linalg.vector_norm(z, dim=1, keepdim=True)
    far = model.proximal(z - _FAR * size / torch.linalg.vector_norm(g, dim=1, keepdim=True) * g, 1.0)
    there, _, slope = model.slope(far)
    ends = ~(torch.isfinite(there) & torch.isfinite(slope).all(1)) & torch.isfinite(far).all(1)
    return ends & torch.isfinite(value) & torch.isfinite(g).all(1) & _inside(model, z)


def _inside(model: Model, z: Tensor) -> Tensor:
    """Which points the projection leaves where they are, up to rounding, ``(batch,)``."""
    moved = torch.linalg.vector_norm(model.proximal(z, 1.0) - z, dim=1)
    return moved <= _ROUNDING * torch.finfo(z.dtype).eps * torch.linalg.vector_norm(z, dim=1)


def _way(model: Model, z: Tensor, p: Tensor) -> Tensor:
    """One where ``z + p`` lies in the set, else 0.99 of the ``t`` to the edge, ``(batch,)``, to some digits, by bisection of
    exponents."""
    inside = _inside(model, z + p)
    low, high = z.new_full(z.shape[:1], -40.0), z.new_zeros(z.shape[:1])  # of powers of two
    for _ in range(0 if bool(inside.all()) else _BISECTIONS):
        middle = 0.5 * (low + high)
        within = _inside(model, torch.addcmul(z, middle.exp2().unsqueeze(1), p))
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    return torch.where(inside, 1.0, _SHARE * low.exp2()).to(z)
