r"""A trajectory as a root: the steps of an explicit method.

    y_{n+1} = \Phi(t_n, y_n, h_n),        n = 0..N-1

with the step ``\Phi`` of Dormand & Prince (:mod:`~implicitkit.problem.explicit`), for the states at the ends of all steps as
one system.  What an integrator has found by these very steps is its solution, and its Jacobian, ``I`` less ``d\Phi/dy`` below
the diagonal, is triangular: the derivative is what differentiating step after step would give ("discretise, then
differentiate": Onken & Ruthotto 2020, arXiv:2005.13420), of every order and in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.problem.collocation import Collocation, evaluate, starts, times
from implicitkit.problem.explicit import stages


@dataclass(frozen=True, repr=False, eq=False)
class ExplicitEquations(Collocation):
    """The equations of all explicit steps, and of an event.  The state is ``Y (*batch, N, 1, n)``."""

    linked: ClassVar[bool] = True

    def defects(self, slope: Callable[..., Tensor], Y: Tensor, y0: Tensor, t: Tensor, rest: tuple[Any, ...]) -> Tensor:
        h, at = times(self.mesh, t, t.new_zeros(1))
        f = lambda now, y: evaluate(slope, now, y, rest)  # noqa: E731
        now, y = at.squeeze(1), starts(y0, Y)
        new = stages(f, now, y, f(now, y), h.unsqueeze(1))[0][-1]
        return Y - new.unsqueeze(-2)
