"""The ball in which a model is believed: when a trial is taken, and how the radius follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

_TAKEN, POOR, _GOOD = 1e-4, 0.25, 0.75  # of the decrease that was promised
_BOUNDARY = 0.99  # of the radius


@dataclass
class Region:
    r"""``|p| <= radius``, sample by sample, while the trials of one step are made.

    With ``rho`` the decrease over the one that the model promised, a trial is taken when ``rho > 1e-4``; below 1/4 the
    radius becomes a quarter of the trial's length, above 3/4 at the boundary twice itself.

    Source: Nocedal & Wright (2006), "Numerical optimization", algorithm 4.1.

    Args:
        radius: ``(batch,)``. z: the points so far, ``(batch, n)``: those before the step, until a trial is taken.
        found: ``(batch,)`` bool, the samples that have their trial or need none.
    """

    radius: Tensor
    z: Tensor
    found: Tensor

    def tried(self, trial: Tensor) -> Tensor:
        """The ``trial`` of the samples that search, and of the others the points that they have: where each has its own in
        the end, all of them have been evaluated together."""
        return taken_where(~self.found, trial, self.z)

    def judge(self, trial: Tensor, length: Tensor, decrease: Tensor, promised: Tensor) -> tuple[Tensor, Tensor]:
        """Take the ``trial`` ``(batch, n)`` of the samples that it serves, and follow with the radius; ``length``: of the
        step to it, ``(batch,)``.  Which samples took it, and ``rho``, minus one where there is none."""
        rho = (decrease / promised).nan_to_num(-1, -1, -1)
        rho = torch.where(promised > 0, rho, -1)
        accept = ~self.found & (rho > _TAKEN)
        self.z = taken_where(accept, trial, self.z)
        smaller = 0.25 * torch.where(length > 0, length, self.radius)
        larger = torch.where((rho > _GOOD) & self.reaches(length), 2 * self.radius, self.radius)
        self.radius = torch.where(self.found, self.radius, torch.where(rho < POOR, smaller, larger))
        self.found = self.found | accept
        return accept, rho

    def reaches(self, length: Tensor) -> Tensor:
        """For which samples does a step of that ``length`` end at the boundary, ``(batch,)`` bool?"""
        return length >= _BOUNDARY * self.radius

    def hopeless(self, smallest: Tensor) -> Tensor:
        """Which samples have found none within a radius above ``smallest``, ``(batch,)``."""
        return ~self.found & ~(self.radius > smallest)


def taken_where(accept: Tensor, trial: Tensor, z: Tensor) -> Tensor:
    """``trial`` of the samples that ``accept`` it, ``(batch,)`` bool, and ``z`` of the others, ``(batch, n)``; where all do,
    or the trial left the others where they are, the same tensor, of which
    :class:`~implicitkit.solver.evaluations.Evaluations` remembers what is known."""
    return trial if bool(accept.all()) else some_taken(accept, trial, z)


def some_taken(accept: Tensor, trial: Tensor, z: Tensor) -> Tensor:
    """:func:`taken_where` of fewer than all samples."""
    taken = torch.where(accept.unsqueeze(1), trial, z)
    return trial if torch.equal(taken, trial) else taken


def at_work_only(f: Evaluations, d: Tensor) -> Tensor:
    """A direction ``d`` ``(batch, n)`` for the samples at work; the others stay where they are, so that the last trial is
    the point where a step ends, and need not be evaluated again."""
    return d if f.at_work == len(d) else torch.where(f.active.unsqueeze(1), d, 0)
