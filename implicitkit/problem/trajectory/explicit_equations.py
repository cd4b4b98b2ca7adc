r"""A trajectory as a root: the steps of an explicit method.

    y_{n+1} = \Phi(t_n, y_n, h_n),        n = 0..N-1

with the step ``\Phi`` of Dormand & Prince (:mod:`~implicitkit.problem.trajectory.explicit_steps`), for the states at the
ends of all steps as one system.  What an integrator has found by these very steps is its solution, and its Jacobian, ``I``
less ``d\Phi/dy`` below the diagonal, is triangular: the derivative is what differentiating step after step would give
("discretise, then differentiate": Onken & Ruthotto 2020, arXiv:2005.13420), of every order and in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import compat, graph
from implicitkit.foundation.operators import Operator
from implicitkit.problem.trajectory.collocation import Collocation, evaluate, starts, times
from implicitkit.problem.trajectory.explicit_steps import stages
from implicitkit.problem.trajectory.running_sums import RunningSums

if TYPE_CHECKING:
    from implicitkit.system import System

_MANY = 3000  # numbers in the Jacobians of a step, of all samples, from which substitution takes less than factors

Links = list[tuple[Tensor, Tensor]]  # the state before every step, and behind it, on one graph
_links: ContextVar[Links | None] = ContextVar("links", default=None)


@dataclass(frozen=True)
class Substitution(RunningSums):
    r"""``A^{-T} b`` step by step, ``x_n = b_n + (d\Phi/dy)^T x_{n+1}``: the adjoint of a trajectory.

    ``A^{-1}`` is no more than near: in that direction each step would take two derivatives.
    """

    links: Links | None = None

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.transposed

    @property
    def T(self) -> Substitution:
        return Substitution(self.steps, self.stages, self.n, not self.transposed, self.links)

    def _sums(self, b: Tensor) -> Tensor:
        if not self.transposed:
            return super()._sums(b)
        assert self.links is not None
        if b.ndim == 3:  # (batch, k, ...)
            return graph.each(self._sums, b.movedim(1, 0)).movedim(0, 1)
        B = b.unflatten(-1, (self.steps, self.n)).unbind(-2)
        x = [B[-1]]
        for left, (before, behind) in zip(B[-2::-1], self.links[:0:-1], strict=True):
            (pulled,) = graph.pulled(behind, (before,), x[-1].reshape(behind.shape), retain_graph=True)
            x.append(left if pulled is None else left + pulled.reshape(left.shape))
        return torch.stack(x[::-1], -2).flatten(-2)


@dataclass(frozen=True, repr=False, eq=False)
class ExplicitEquations(Collocation):
    """The equations of all explicit steps, and of an event.  The state is ``Y (*batch, N, 1, n)``."""

    linked: ClassVar[bool] = True

    @property
    def determined(self) -> bool:
        """State after state follows from the one before."""
        return self.event is None

    def defects(self, slope: Callable[..., Tensor], Y: Tensor, y0: Tensor, t: Tensor, rest: tuple[Any, ...]) -> Tensor:
        h, at = times(self.mesh, t, t.new_zeros(1))
        now, y, links = at.squeeze(1), starts(y0, Y), _links.get()
        if links is None or compat.transforms_active():
            f = lambda now, y: evaluate(slope, now, y, rest)  # noqa: E731
            new = stages(f, now, y, f(now, y), h.unsqueeze(1))[0][-1]
        else:
            f = lambda now, y: slope(now, y, *rest)  # noqa: E731
            for t_n, before, h_n in zip(now.unbind(), y.unbind(-2), h.unsqueeze(1).unbind(), strict=True):
                before = before.reshape(-1, before.shape[-1])
                links.append((before, stages(f, t_n, before, f(t_n, before), h_n)[0][-1]))
            new = torch.stack([behind for _, behind in links], -2).reshape(y.shape)
        return Y - new.unsqueeze(-2)

    def linearise(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        if self.event is not None or z.numel() * self.layout.size < _MANY * len(self.mesh.number):
            return super().linearise(system, z, theta)
        links: Links = []
        token = _links.set(links)
        try:
            out, A = super().linearise(system, z, theta)
        finally:
            _links.reset(token)
        if links:
            A.near = Substitution(len(self.mesh.number), 1, self.layout.size, links=links)
        return out, A
