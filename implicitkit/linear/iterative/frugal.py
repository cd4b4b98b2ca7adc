r"""GMRES, or conjugate gradients, for as long as that costs less than factors would.

After a few products, ``j`` of them, a quarter of those that factors cost (:mod:`implicitkit.linear.price`) and 8 to 16, or
4 where they cost less than 32, the
residuals of GMRES tell how fast it goes here: ``\log(r_{j/4} / r_j) / (3 j / 4)`` a product; after twice and four times as
many they are asked again, by what was gained in the second half.  Are more of them needed, at that rate, than factors cost,
or have that many been spent, the rest is left to the factors.  A matrix on which reaction dominates, or one nearly the
identity, is solved in a dozen products, whatever its factors would fill; one on which diffusion dominates is given up early.
Symmetric matrices have conjugate gradients, which orthogonalise nothing, until one shows that it is not definite; so have
those of which nobody said so, once their Krylov vectors tell it and more of these are needed than a basis holds.

Source: Saad & Schultz (1986), algorithm 4, and Hestenes & Stiefel (1952) for the methods, whose residuals tell each other's:
Cullum & Greenbaum (1996), SIAM J. Matrix Anal. 17(2), theorem 1; the rule is that of ski rental (Karlin, Manasse, Rudolph &
Sleator 1988, Algorithmica 3): never more is spent on trying than it may save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options, flag, positive
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.iterative.by_entries import ByEntries
from implicitkit.linear.iterative.cycles import Correction, column, in_working_precision, norms, restarted
from implicitkit.linear.iterative.gmres import arnoldi, vectors
from implicitkit.linear.iterative.inner_cg import conjugate, seems_definite

_FIRST, _LAST = 4, 16  # products after which it is asked how many more it takes, at least and at most ...
_PART = 0.25  # ... and of those that may be spent; by what was gained since so many of these
_CHEAP = 32.0  # a price at which a quarter is too much to pay for an answer: it is asked as early as can be
_DEAR = "GMRES would take more products than sparse factors cost"


@dataclass(frozen=True)
class Frugal(LinearSolver):
    """GMRES (of symmetric matrices: CG) that gives up where factors cost less.

    ``rtol`` may also be a tensor ``(batch,)``.

    Args:
        price: what they cost, in products, at least. times: that price may be spent; when it is asked goes by the least.
        together: if one sample is given up, all are: their factors have one price.
        unasked: products that may be spent before it is asked how many more it takes.
        beyond: samples that are solved take what the products made for others show, down to the root of eps.

    Raises:
        ValueError: ``price`` is not positive, or ``unasked`` negative.
    """

    price: float = 50.0
    times: float = 1.0
    together: bool = True
    unasked: int = 0
    beyond: bool = False

    def __post_init__(self) -> None:
        check_options(self, price=positive(), times=positive(), together=flag(), unasked=at_least(0), beyond=flag())

    @in_working_precision
    def solve(
        self, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        by, price = ByEntries(A), self.times * self.price
        most = math.ceil(by.affords(price))
        most = most if max_steps is None else min(most, max_steps)
        at = looks(self.price, self.unasked)
        asks = (*at, *by.looks)
        slow, asked = torch.zeros(len(b), dtype=torch.bool, device=b.device), False
        definite = A.symmetric or A.definite  # as far as is known
        refuted = False  # conjugate gradients have shown that it is not

        def cycle(r: Tensor, norm: Tensor, target: Tensor, live: Tensor, budget: Tensor) -> Correction:
            nonlocal asked, definite, refuted

            def ask(least: Tensor, done: Tensor) -> bool:
                """``least``: what is left of each residual after 0 to ``j`` products, ``(batch, j + 1)``."""
                open_ = live & ~done
                ahead = torch.where(open_, products_ahead(least * column(norm), target, at[0]), 0)
                j = least.shape[1] - 1
                if j in at:
                    slow.copy_(~(ahead <= by.affords(price - j)))
                    if self.together and bool(slow.any()):
                        slow.copy_(open_)
                    if bool(slow.any()) and not bool((open_ & ~slow).any()):
                        return True
                by.expect(float(torch.where(slow, 0, ahead).amax()))
                return False

            x, used = torch.zeros_like(r), torch.zeros_like(budget)
            if definite:
                x, r, used, definite = conjugate(by.operator, r, target, live, budget, () if asked else asks, ask)
                budget, norm = budget - used, norms(r)
                live = live & (norm > target) & (budget > 0)
                asked, refuted = asked or definite, not definite
            if definite or not bool(live.any()):
                return Correction(x, used, slow)
            columns = min(vectors(b), A.size, int(budget.max()))

            def look(Ht: Tensor, u: Tensor, done: Tensor) -> bool:
                nonlocal definite
                least = u.square().cumsum(1).rsqrt()
                if not asked and least.shape[1] - 1 in asks and ask(least, done):
                    return True
                open_ = live & ~done
                if not refuted and (by.written or bool((open_ & is_slow(least * column(norm), target, columns)).any())):
                    definite = bool((seems_definite(Ht) | ~open_).all())
                return definite

            places = (*(() if asked else asks), *(() if refuted else (columns,)))
            found = arnoldi(by.operator, r, norm, target, live, budget, columns, (places, look), (), self.beyond)
            asked = not definite
            rest = torch.where(column(live), found.dx, 0)
            return Correction(x + rest, used + torch.where(live, found.steps, 0), slow)

        found = restarted(cycle, A, b, rtol=rtol, atol=atol, max_steps=most, stalled=_DEAR, failed=_DEAR)
        A.definite = definite
        return found


def looks(price: float, unasked: int = 0) -> tuple[int, ...]:
    """Numbers of products after which it is asked how many more it takes, ``unasked`` at least; none for a price that is
    infinite."""
    first = _FIRST if price < _CHEAP else min(int(_PART * min(price, 4.0 * _LAST)), _LAST)
    first = max(first, unasked)
    return (first, 2 * first, 4 * first) if price < math.inf else ()


def is_slow(left: Tensor, target: Tensor, price: float, unasked: int = 0) -> Tensor:
    """Which samples take more products than ``price`` at the rate of the last ones, also where that is NaN; ``(batch,)``.

    Args:
        left: norms of the residuals that 0 to ``j`` products leave, ``(batch, j + 1)``. target: what they must come to.
        unasked: as in :func:`looks`.
    """
    j = left.shape[1] - 1
    return ~(products_ahead(left, target, looks(price, unasked)[0]) <= price - j)


def products_ahead(left: Tensor, target: Tensor, first: int) -> Tensor:
    """How many more products each sample takes at the rate of the last ones, ``(batch,)``: infinitely many where what is
    left does not fall, NaN where it is.  ``first``: products after which it is asked first; by then fewer tell the rate."""
    j = left.shape[1] - 1
    since = int(_PART * j) if j <= first else j // 2
    rate = (left[:, since] / left[:, j]).log() / (j - since)
    return torch.where(rate <= 0, torch.inf, (left[:, j] / target).log() / rate)
