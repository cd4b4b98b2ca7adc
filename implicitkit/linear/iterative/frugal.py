r"""GMRES, or conjugate gradients, for as long as that costs less than factors would.

After a few products, ``j`` of them, a quarter of those that factors cost (:mod:`implicitkit.linear.price`) and 8 to 16, or
4 where they cost less than 32, the
residuals of GMRES tell how fast it goes here: ``\log(r_{j/4} / r_j) / (3 j / 4)`` a product; after twice as many, and so
on, they are asked again, by what was gained in the second half.  Are more of them needed, at that rate, than factors cost,
or have that many been spent, the rest is left to the factors.  A matrix on which reaction dominates, or one nearly the
identity, is solved in a dozen products, whatever its factors would fill; one on which diffusion dominates is given up early.
Symmetric matrices have conjugate gradients, which orthogonalise nothing, until one shows that it is not definite; so have
those of which nobody said so, once their Krylov vectors tell it and more of these are needed than a basis holds.
Where the problem knows something near the inverse it preconditions, from the right.

Source: Saad & Schultz (1986), algorithm 4, and Hestenes & Stiefel (1952) for the methods, whose residuals tell each other's:
Cullum & Greenbaum (1996), SIAM J. Matrix Anal. 17(2), theorem 1; the rule is that of ski rental (Karlin, Manasse, Rudolph &
Sleator 1988, Algorithmica 3): never more is spent on trying than it may save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator, preconditioned
from implicitkit.foundation.options import at_least, check_options, flag, positive
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.iterative.by_entries import ByEntries
from implicitkit.linear.iterative.cycles import Correction, Task, column, in_working_precision, norms, restarted
from implicitkit.linear.iterative.gmres import arnoldi, vectors
from implicitkit.linear.iterative.inner_cg import conjugate, seems_definite

_FIRST, _LAST = 4, 16  # products after which it is asked how many more it takes, at least and at most ...
_LOOKS = 3  # times that it is asked, at least: by entries more are made than the price
_PART = 0.25  # ... and of those that may be spent; by what was gained since so many of these
_CHEAP = 32.0  # a price at which a quarter is too much to pay for an answer: it is asked as early as can be
_TIGHTER = 0.1  # times what is to be left of S r, each time that less was left of it, but not of r
_NEAR = 100.0  # products, at most, where the problem knows something near the inverse: it is that, or it is not
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
        usual = self if A.near is None else replace(self, price=min(self.price, _NEAR), unasked=0)
        trial = _Trial(usual, A, len(b))
        most = math.ceil(trial.by.affords(trial.price))
        most = most if max_steps is None else min(most, max_steps)
        found = restarted(trial.cycle, A, b, rtol=rtol, atol=atol, max_steps=most, stalled=_DEAR, failed=_DEAR)
        A.definite = trial.definite
        return found


class _Trial:
    """A solve, and what it has found out.

    Attributes:
        definite: is the matrix symmetric and definite, as far as is known? refuted: conjugate gradients have shown that it
            is not. asked: has it been asked how many more products it takes? slow: the samples that take too many.
        turned: a method has ended for another to go on from what it left. part: of what is asked of r, what is of S r.
    """

    def __init__(self, of: Frugal, A: Operator, batch: int) -> None:
        self.of, self.by = of, ByEntries(A)
        self.at, self.price = looks(of.price, of.unasked), of.times * of.price
        self.slow, self.asked = torch.zeros(batch, dtype=torch.bool, device=A.like.device), False
        self.M = A.near
        self.definite, self.refuted = self.M is None and (A.symmetric or A.definite), self.M is not None
        self.turned, self.part = False, 1.0

    def cycle(self, task: Task) -> Correction:
        """Methods one after another, for as long as they turn: a few vectors of one are not judged alone."""
        whole, dx, used = task.r, torch.zeros_like(task.r), torch.zeros_like(task.budget)
        while bool(task.live.any()):
            S = self.by.scale
            if self.M is not None:  # A M y = r, x = M y
                found = self._krylov(task)
                found = found._replace(dx=self.M.solve(found.dx))
            elif S is None:
                found = self._krylov(task)
            else:  # S A S y = S r, x = S y: less is left of S r, in the same proportion
                size, part, self.part = norms(S * task.r), self.part, _TIGHTER * self.part
                target = torch.where(task.live, part * task.target * size / task.norm, task.target)
                found = self._krylov(task._replace(r=S * task.r, norm=size, target=target))
                found = found._replace(dx=S * found.dx)
            dx, used = dx + found.dx, used + found.steps
            if not self._turns():
                break
            task = task.left(whole - self.by.plain.mv(dx), found.steps)
        return Correction(dx, used, self.slow)

    def _turns(self) -> bool:
        turned, self.turned = self.turned, False
        return turned

    def _krylov(self, task: Task) -> Correction:
        asks = () if self.asked else (*self.at, *self.by.looks)
        x, used = torch.zeros_like(task.r), torch.zeros_like(task.budget)

        def ask(least: Tensor, done: Tensor) -> bool:
            return self._ask(least, least * column(task.norm), task.target, task.live & ~done)

        if self.definite:
            x, r, used, self.definite = conjugate(self.by.operator, task, asks, ask)
            if self.turned:
                return Correction(x, used)
            task = task.left(r, used)
            self.asked, self.refuted = self.asked or self.definite, not self.definite
        if self.definite or not bool(task.live.any()):
            return Correction(x, used)
        columns = min(vectors(task.r), self.by.A.size, int(task.budget.max()))

        def look(Ht: Tensor, u: Tensor, done: Tensor) -> bool:
            least = u.square().cumsum(1).rsqrt()
            if not self.asked and least.shape[1] - 1 in asks and ask(least, done):
                return True
            open_ = task.live & ~done
            slow = self.by.written or bool((open_ & is_slow(least * column(task.norm), task.target, columns)).any())
            if slow and not self.refuted:
                self.turned = self.definite = bool((seems_definite(Ht) | ~open_).all())
            return self.definite

        places = (*(() if self.asked else asks), *(() if self.refuted else (columns,)))
        A = self.by.operator if self.M is None else preconditioned(self.by.plain, self.M.solve)
        found = arnoldi(A, task, columns, (places, look), (), self.of.beyond)
        self.asked = not self.turned
        rest = torch.where(column(task.live), found.dx, 0)
        return Correction(x + rest, used + torch.where(task.live, found.steps, 0))

    def _ask(self, least: Tensor, left: Tensor, target: Tensor, open_: Tensor) -> bool:
        """Is this to end?  ``least``: what minimal residuals leave of each residual after 0 to ``j`` products, ``(batch, j +
        1)``; ``left``: their norms."""
        ahead = torch.where(open_, products_ahead(left, target, self.at[0]), 0)
        j, slow, scale = least.shape[1] - 1, self.slow, self.by.scale
        if j in self.at:
            slow.copy_(~(ahead <= self.by.affords(self.price - j)))
            if self.of.together and bool(slow.any()):
                slow.copy_(open_)
            if bool(slow.any()) and not bool((open_ & ~slow).any()):
                return True
        if self.M is None:
            self.by.expect(float(torch.where(slow, 0, ahead).amax()))
            self.turned = self.by.scale is not scale
        return self.turned


def looks(price: float, unasked: int = 0) -> tuple[int, ...]:
    """Numbers of products after which it is asked how many more it takes, ``unasked`` at least, each twice the one before;
    none for a price that is infinite."""
    first = _FIRST if price < _CHEAP else min(int(_PART * min(price, 4.0 * _LAST)), _LAST)
    first = max(first, unasked)
    times = max(_LOOKS, math.ceil(math.log2(max(1.0, price / first)))) if price < math.inf else 0
    return tuple(first << k for k in range(times))


def is_slow(left: Tensor, target: Tensor, price: float) -> Tensor:
    """Which samples take more products than ``price`` at the rate of the last ones, also where that is NaN; ``(batch,)``.

    Args:
        left: norms of the residuals that 0 to ``j`` products leave, ``(batch, j + 1)``. target: what they must come to.
    """
    j = left.shape[1] - 1
    return ~(products_ahead(left, target, looks(price)[0]) <= price - j)


def products_ahead(left: Tensor, target: Tensor, first: int) -> Tensor:
    """How many more products each sample takes at the rate of the last ones, ``(batch,)``: infinitely many where what is
    left does not fall, NaN where it is.  ``first``: products after which it is asked first; by then fewer tell the rate."""
    j = left.shape[1] - 1
    since = int(_PART * j) if j <= first else j // 2
    rate = (left[:, since] / left[:, j]).log() / (j - since)
    return torch.where(rate <= 0, torch.inf, (left[:, j] / target).log() / rate)
