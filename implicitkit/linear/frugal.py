r"""GMRES for as long as it costs less than factors would.

After a few products, ``j`` of them, a quarter of those that factors cost (:mod:`implicitkit.linear.price`) and 4 to 16, the
residuals of GMRES tell how fast it goes here: ``\log(r_{j/4} / r_j) / (3 j / 4)`` a product; after twice and four times as
many they are asked again, by what was gained in the second half.  Are more of them needed, at that rate, than factors cost,
or have that many been spent, the rest is left to the factors.  A matrix on which reaction dominates, or one nearly the
identity, is solved in a dozen products, whatever its factors would fill; one on which diffusion dominates is given up early.

Source: Saad & Schultz (1986), algorithm 4, for the method; the rule is that of ski rental (Karlin, Manasse, Rudolph &
Sleator 1988, Algorithmica 3): never more is spent on trying than it may save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import check_options, flag, positive
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.cycles import Correction, restarted
from implicitkit.linear.gmres import arnoldi, vectors

__all__ = ["Frugal"]

_FIRST, _LAST = 4, 16  # products after which it is asked how many more it takes, at least and at most ...
_PART = 0.25  # ... and of those that may be spent; by what was gained since so many of these
_DEAR = "GMRES would take more products than sparse factors cost"


@dataclass(frozen=True)
class Frugal(LinearSolver):
    """GMRES that gives up where factors cost less.

    ``rtol`` may also be a tensor ``(batch,)``.

    Args:
        price: what they cost, in products. together: if one sample is given up, all are: their factors have one price.

    Raises:
        ValueError: ``price`` is not positive.
    """

    price: float = 50.0
    together: bool = True

    def __post_init__(self) -> None:
        check_options(self, price=positive(), together=flag())

    def solve(
        self, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        most = math.ceil(self.price)
        most = most if max_steps is None else min(most, max_steps)
        look_at = min(max(_FIRST, int(_PART * self.price)), _LAST)
        looks = (look_at, 2 * look_at, 4 * look_at)
        slow, asked = torch.zeros(len(b), dtype=torch.bool, device=b.device), False

        def cycle(r: Tensor, norm: Tensor, target: Tensor, live: Tensor, budget: Tensor) -> Correction:
            nonlocal asked

            def look(Ht: Tensor, u: Tensor, done: Tensor) -> bool:
                least, open_ = u.square().cumsum(1).rsqrt(), live & ~done  # what j products leave of a residual
                j = u.shape[1] - 1
                since = int(_PART * j) if j == look_at else j // 2
                rate = (least[:, since] / least[:, j]).log() / (j - since)
                left = (least[:, j] * norm / target).log()
                slow.copy_(open_ & ~(left <= rate * (self.price - j)))  # also where it is NaN
                if self.together and bool(slow.any()):
                    slow.copy_(open_)
                return bool(slow.any()) and not bool((open_ & ~slow).any())

            columns = min(vectors(b), A.size, int(budget.max()))
            found = arnoldi(A, r, norm, target, live, budget, columns, None if asked else (looks, look))
            asked = True
            return found._replace(failed=slow)

        return restarted(cycle, A, b, rtol=rtol, atol=atol, max_steps=most, stalled=_DEAR, failed=_DEAR)
