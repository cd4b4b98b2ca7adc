r"""Claims of a batch that wait for each other, to be looked at together.

Samples come to their ends at different steps, and a look at one claim takes as many calls as a look at all.  Where a step
costs as much whether a sample is done or not, and does no harm after its end (an interval that shrinks), a sample that
claims to have converged is taken along, and its claim is looked at later, at the point where it was made.  What is refused
claims again at the first point since then that meets what is asked of it now: every sample is judged at the points, in the
order and by the figures of a solve of its own, so that what comes of it depends neither on the others nor on the waiting.

Steps of samples that wait are in vain if their claims hold.  They may cost as much as the look that they wait for, and no
more, so that both together cost at most twice the least, whenever the others end (the ski-rental problem: Karlin, Manasse,
Rudolph & Sleator 1988, Algorithmica 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.solver.costs import waiting_pays
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.judge import Judge
from implicitkit.solver.verdict.last_step import by_the_last_step


class Point(NamedTuple):
    """Where all samples were after a step: ``z (batch, n)``, ``|F| (batch,)``, ``F (batch, n)``, and ``|z|``, where that is
    measured (of iterations; nobody waits there)."""

    z: Tensor
    norm: Tensor
    F: Tensor
    size: Tensor | None = None


class Held(NamedTuple):
    """What came of claims, ``(batch,)`` each but ``z`` and ``F``; of samples that are not in ``which`` nothing is said."""

    which: Tensor  # whose claims hold
    point: Point  # where
    steps: Tensor  # after how many steps
    steep: Tensor  # what the last step says of them (:func:`by_the_last_step`)
    cleared: Tensor  # those that were asked whether they run away there, and do not
    refused: Tensor  # samples whose claim at the last point of all was refused


class Waiting:
    """The claims of one solve that nobody has looked at.

    Attributes:
        points: since before the first of them. numbers: of the steps after which these are.
        made: at which point each sample has claimed, ``(batch,)``; 0: it has not. some: are there any?
        in_vain: steps of samples that have waited, added up.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.numbers: list[int] = []
        self.made: Tensor | None = None
        self.in_vain = 0

    @property
    def some(self) -> bool:
        return self.made is not None

    def add(self, claims: Tensor, last: Point, here: Point, step: int) -> int:
        """A step has been taken, from ``last`` to ``here``, and these samples claim; how many wait now."""
        if self.made is None:
            self.points, self.numbers, self.in_vain = [last], [step - 1], 0
            self.made = torch.zeros_like(claims, dtype=torch.int64)
        self.points.append(here)
        self.numbers.append(step)
        self.made = torch.where((self.made == 0) & claims, len(self.points) - 1, self.made)
        count = int(torch.count_nonzero(self.made))
        self.in_vain += count
        return count

    def pays(self, f: Evaluations) -> bool:
        """Does it cost less to wait for the next step than to look now?"""
        return waiting_pays(f, self.in_vain)

    def look(self, judge: Judge, f: Evaluations) -> Held:
        """Look at all of them, and at those that samples whose claims are refused have made since."""
        assert self.made is not None
        made, self.made = self.made, None
        norms = torch.stack([point.norm for point in self.points])
        steps = torch.tensor(self.numbers, device=made.device)
        late = torch.arange(len(steps), device=made.device).unsqueeze(1)
        columns = [torch.stack(column) for column in zip(*(point[:3] for point in self.points), strict=True)]
        at = made
        held = steep = cleared = torch.zeros_like(made, dtype=torch.bool)
        while bool((claims := made > 0).any()):
            at = torch.where(claims, made, at)
            here, last = self._points(columns, at), self._points(columns, (at - 1).clamp_min(0))
            known = f.exchange({})
            f.know(here.z, here.F)
            judge.came_from = last.z, last.F
            holds = judge.examine(here.z, here.norm, claims, 2 * here.norm)
            said = by_the_last_step(False, here.z, here.F, last.z, last.F, claims)
            asked = judge.asked.cleared(here.z)
            held, steep = held | holds, steep | (said & holds)
            cleared = cleared if asked is None else cleared | (asked & holds)
            tolerance = judge.tolerance(here.z, here.norm)
            f.exchange(known)
            again = (norms <= tolerance) & (late > at) & (claims & ~holds)
            made = torch.where(again.any(0), again.int().argmax(0), 0)
        refused = (at == len(steps) - 1) & ~held
        return Held(held, self._points(columns, at), steps[at], steep, cleared, refused)

    @staticmethod
    def _points(columns: list[Tensor], at: Tensor) -> Point:
        """The point of each sample at its own step."""
        return Point(*(column[at, torch.arange(len(at), device=at.device)] for column in columns))
