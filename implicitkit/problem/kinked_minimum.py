r"""The derivative of a minimum in kinks, where more of them meet than unknowns can follow.

Where the conditions of :mod:`implicitkit.problem.kinked_conditions` are singular, either they say one thing twice (a tie of
numbers, in several sums of the largest) and there is a derivative; or kinks that meet at this point part as soon as data
change (an exact fit, whose residuals are all zero): then the minimum moves to one side only, along most ways.  Which of the
two it is, the equations for some change of everything that is given show: ``A dz = -F_\theta d\theta`` has a solution, or
not.

Source: Lewis (2002), "Active sets, nonsmoothness, and sensitivity", SIAM J. Optim. 13, 702-725 (transversality).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded, trees
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.conditions.kkt import KKT
from implicitkit.linear.factors.dense import lstsq_batched
from implicitkit.problem.epigraph import Function, Replacing, Site, Sites, size_of
from implicitkit.problem.kinked_operations import Kind, Side, value
from implicitkit.problem.root import Root

_LEFT = 1e-3  # of a right-hand side that the least-squares solution leaves: more is no rounding
_ROUNDING = 1e3  # units of it, by which two are equal
_DENSE = 1024  # unknowns of which matrices are formed
PART = (
    "more kinks meet at this minimum than its unknowns can follow (as where all residuals of an exact fit are zero): as "
    "soon as data change they part, and the minimum moves to one side only, so that it has no derivative there. What comes "
    'out is that of least squares through these kinks; degenerate="raise" makes it an error. Smooth the kinks '
    "(torch.nn.functional.huber_loss) where a derivative is needed"
)


@dataclass(frozen=True, repr=False)
class KinkedMinimum(Root):
    """The conditions, whose derivative obeys the policy ``degenerate`` of :class:`~implicitkit.Argmin`.

    Args:
        follows: holds, once it has been solved, whether the solution follows a change of all that is given.
    """

    degenerate: str = "lstsq"
    follows: list[Callable[[], bool]] = field(default_factory=list, compare=False)

    @property
    def linear_solver(self) -> Any:
        policy = "raise" if self.degenerate == "raise" else "lstsq"
        return _OfKinks(policy, dense_size=_DENSE, follows=self.follows)


@dataclass(frozen=True)
class _OfKinks(KKT):
    """What is of least norm is doubted, where kinks part."""

    follows: list[Callable[[], bool]] = field(default_factory=list, compare=False)

    def _least_norm(
        self, A: Operator, b: Tensor, x: Tensor, converged: Tensor, rtol: float, atol: float
    ) -> tuple[Tensor, Tensor, Tensor, str]:
        x, norm, converged, reason = super()._least_norm(A, b, x, converged, rtol, atol)
        return x, norm, converged, reason or _ASK

    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        found = super().solve(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        if found.reason != _ASK:
            return found
        parts = any(not follows() for follows in self.follows)
        return found._replace(reason="", doubt=PART if parts else "")


_ASK = "least norm"


class _Sides(Replacing):
    """``holds``: of which samples ``torch.where`` takes what it took where the relaxation began, of the batch's shape."""

    def __init__(self, sites: Sequence[Site], like: Tensor) -> None:
        super().__init__(sites, (None,) * len(sites))
        self.holds = torch.ones_like(like, dtype=torch.bool)

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        return value(kind, u)

    def side(self, condition: Tensor, a: Tensor, b: Tensor) -> Side:
        side = super().side(condition, a, b)
        if side != "neither":
            best = torch.maximum(a, b) if side == "greater" else torch.minimum(a, b)
            off = (torch.where(condition, a, b) - best).abs()
            known = off <= _ROUNDING * torch.finfo(a.dtype).eps * torch.maximum(a.abs(), b.abs())
            self.holds = self.holds & known.reshape((*self.holds.shape, -1)).all(-1)
        return side


def takes_the_same(
    functions: Sequence[Function], sites: Sites, z: Any, step: Any, args: Any, batch_dims: int
) -> Tensor:
    """Where is what ``torch.where`` takes, here and a ``step`` to both sides, the greater or the lesser of two as it was
    where the relaxation began?  Elsewhere this is one of another function.  ``(*batch)``."""
    found = torch.ones_like(size_of(trees.tree_flatten(z)[0], batch_dims), dtype=torch.bool)
    if not any(site.kind in ("greater", "lesser") for own in sites for site in own):
        return found
    for side in (-1.0, 0.0, 1.0):
        there = trees.tree_map(lambda t, s, side=side: t + side * s, z, step)
        for function, own in zip(functions, sites, strict=True):
            with torch.no_grad(), _Sides(own, found) as sides:
                function(there, *args)
            found = found & sides.holds
    return found


def follows(residual: Callable[..., Tensor], z: Tensor, theta: tuple[Tensor, ...]) -> bool:
    """Has ``A dz = -F_theta dtheta`` a solution for some change of all that is given?  Of one that is too large to be asked:
    no.

    Args:
        residual: of ``(z, *theta)``, ``(batch, n)`` as ``z``.
    """
    if z.shape[1] > _DENSE:
        return False
    moved = [i for i, t in enumerate(theta) if t.is_floating_point()]
    given = [theta[i].detach() for i in moved]
    ways = [seeded.normal(t.numel(), seed=3 + i).to(t).reshape(t.shape) for i, t in enumerate(given)]

    def of_theta(*changed: Tensor) -> Tensor:
        point = dict(zip(moved, changed, strict=True))
        return residual(z, *(point.get(i, t) for i, t in enumerate(theta)))

    with compat.own_graphs():
        b = autodiff.jvp(of_theta, given, ways).detach()
        A = autodiff.jacobian(lambda w: residual(w, *theta), z).detach()
    with torch.no_grad():
        x = lstsq_batched(A, b, rcond=1e-10)[0]
        left = torch.linalg.vector_norm(b - (A @ x.unsqueeze(2)).squeeze(2), dim=1)
        return bool((left <= _LEFT * torch.linalg.vector_norm(b, dim=1)).all())
