r"""Whether derivatives are followed by the steps of a trajectory, and which have to be halved for that: steps as matrices.

By a step of any Runge-Kutta method (``A``, ``c``, the last row that of the step's end) a solution of the variational
equation ``d' = J(t) d + g`` goes on by the matrix ``R`` of

    D_i = d + h sum_j a_ij J(t + c_j h) D_j,    R d = D_s,

and by ``F``, those of its halves, more accurately.  Two are followed, neither in a special direction: one that begins
anywhere, ``g = 0``, and one that begins at zero, ``g`` constant, a share of every derivative in a parameter.  What a step
loses of them is what is left of ``(R - F) d`` at the next time asked for: along what is damped until then, nothing, however
long the step; along what turns or grows, all.  Before and after the step ``d`` is followed by exponentials ``exp(h J)``,
since long steps damp what only turns, and before it by the steps, too, which may grow where they are not stable.  It is
measured as an explicit step does it (:mod:`~implicitkit.problem.trajectory.explicit_steps`), by the largest values of each
number so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import autodiff, seeded
from implicitkit.foundation.numbers import numbers
from implicitkit.problem.trajectory.explicit_steps import NODES, ROWS, Between

Slope = Callable[[Tensor, Tensor], Tensor]

_NUMBERS = 1 << 24  # of matrices, at once
_UNSTABLE = 1.5  # times the exponential, is the matrix of an explicit step that is not stable, whatever is damped later
_SHARE = 0.1  # of the accuracy, for each of them that is halved
_ZERO = 1e-4  # of the largest values so far, that is as good as zero
_LEAST = 1e-6  # of the mean of these, for the smallest
_ROUNDED = 10.0  # times what rounding leaves of Jacobians: what steps lose is not told from less
_ROUGH = 1e-8  # relative: where less is asked for, differences are too rough


class Parts(NamedTuple):
    """Parts of steps ``(P,)``, from one fraction of it to another, their matrices ``(P, batch, m, m)``, those of their
    halves, ``(P, 2, batch, m, m)``, and the exponentials of the Jacobians there, on average."""

    step: Tensor
    begin: Tensor
    end: Tensor
    whole: Tensor
    halves: Tensor
    flows: Tensor


def explicit_rule(like: Tensor) -> tuple[Tensor, Tensor]:
    """``A`` and ``c`` of the explicit steps."""
    rows = ((), *ROWS)
    A = like.new_tensor([[*row, *[0.0] * (len(rows) - len(row))] for row in rows])
    return A, like.new_tensor((*NODES, 1.0))


class Propagation:
    """The steps ``edges (N + 1,)`` of a trajectory, of which some end at times asked for.

    Args:
        f: of times ``(P,)`` and states ``(P, batch, n)``. between: the states in steps ``(P,)`` at fractions ``(P,)``.
        rule: ``A (s, s)`` and ``c (s,)``. asked: ``(N,)``, of the ends of the steps. units: of the state, ``(batch, n)``.
        accuracy: relative, of derivatives by each step that is halved. allowed: by all steps, unless one is.
    """

    def __init__(
        self,
        f: Slope,
        between: Between,
        edges: Tensor,
        rule: tuple[Tensor, Tensor],
        asked: Tensor,
        units: Tensor,
        accuracy: float,
        allowed: float,
    ) -> None:
        self.f, self.states_in, self.edges, self.asked, self.units = f, between, edges, asked, units
        (self.A, self.c), self.accuracy, self.allowed = rule, accuracy, allowed
        self.differences, eps = edges.dtype == torch.float64 and accuracy > _ROUGH, torch.finfo(edges.dtype).eps
        self.rounded = _ROUNDED * (eps ** (2 / 3) if self.differences else eps)
        self.explicit = not bool(self.A.triu().any())
        (self.batch, self.n), self.forced = units.shape, seeded.normal(units.shape[1], seed=1).to(units)

    def fits(self, count: int) -> bool:
        """Are so many steps as matrices few enough numbers?"""
        return 3 * count * self.batch * (len(self.c) * (self.n + 1)) ** 2 <= _NUMBERS

    def jacobians(self, t: Tensor, y: Tensor) -> Tensor:
        """``df/dy`` in units of the state, ``(P, batch, n, n)``."""
        n, small = self.n, torch.finfo(y.dtype).eps ** (1 / 3)
        ways = torch.diag_embed(self.units).movedim(1, 0).unsqueeze(1).expand(n, len(t), -1, -1).flatten(0, 1)
        t, y = t.repeat(n), y.repeat(n, 1, 1)
        if self.differences:  # which take a third of a product
            columns = (self.f(t, y + small * ways) - self.f(t, y - small * ways)) / (2 * small)
        else:
            columns = autodiff.jvp(lambda y: self.f(t, y), (y,), (ways,))
        return (columns / self.units).unflatten(0, (n, -1)).movedim(0, -1).nan_to_num(0, 0, 0)

    def matrices(self, step: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """The matrices of parts of steps, and the exponentials, ``(P, 2, batch, n + 1, n + 1)``; the last number is the
        constant one, that forces."""
        s, m, P = len(self.c), self.n + 1, len(step)
        x, which = (begin[:, None] + (end - begin)[:, None] * self.c).flatten(), step.repeat_interleave(s)
        length = self.edges[step + 1] - self.edges[step]
        J = self.jacobians(
            self.edges[which] + x * (self.edges[which + 1] - self.edges[which]), self.states_in(which, x)
        )
        J = torch.nn.functional.pad(J, (0, 1, 0, 1))
        J[..., :-1, -1] = self.forced / (self.edges[-1] - self.edges[0])
        J = (J * ((end - begin) * length).repeat_interleave(s)[:, None, None, None]).unflatten(0, (P, s))
        coupled = torch.einsum("ij,pjbvw->pbivjw", self.A, J).reshape(P, self.batch, s * m, s * m)
        whole = torch.eye(s * m, dtype=J.dtype, device=J.device) - coupled
        begun = torch.eye(m, dtype=J.dtype, device=J.device).repeat(s, 1).expand(P, self.batch, -1, -1)
        if self.explicit:
            R = torch.linalg.solve_triangular(whole, begun, upper=False, unitriangular=True)
        else:
            R = torch.linalg.solve_ex(whole, begun)[0]
        flow = torch.linalg.matrix_exp(torch.einsum("j,pjbvw->pbvw", self.A[-1], J))
        return torch.stack((R[..., -m:, :], flow), 1)

    def parts(self, step: Tensor, begin: Tensor, end: Tensor, whole: Tensor | None = None) -> Parts:
        """These, with the matrices of their halves, and their own unless they are known."""
        middle = (begin + end) / 2
        cuts = [(begin, middle), (middle, end)] + ([(begin, end)] if whole is None else [])
        every = self.matrices(step.repeat(len(cuts)), *(torch.cat(side) for side in zip(*cuts, strict=True)))
        every = every.unflatten(0, (len(cuts), -1)).movedim(0, 2)  # (P, 2, cuts, batch, m, m)
        return Parts(step, begin, end, every[:, 0, 2] if whole is None else whole, every[:, 0, :2], every[:, 1, :2])

    def losses(self, parts: Parts, allowed: float) -> tuple[Tensor, bool]:
        """What each part loses ``(P,)``, in units of its share, and whether all of them together lose no more than what
        is ``allowed``: of all samples and both variations, at the times asked for."""
        whole, halves, flows, n = *(numbers(v) for v in parts[3:]), self.n
        with np.errstate(all="ignore"):  # of steps that are not stable
            off, flows = whole - halves[:, 1] @ halves[:, 0], flows[:, 1] @ flows[:, 0]
            largest = np.maximum(np.abs(flows).max((1, 2, 3)), 1)
            stable = (not self.explicit) | (np.abs(whole).max((1, 2, 3)) <= _UNSTABLE * largest)
            rounded = np.maximum(np.abs(flows), np.where(stable[:, None, None, None], np.abs(whole), 0)) * self.rounded
        start = np.zeros((self.batch, n + 1, 2))
        start[:, :n, 0], start[:, n, 1] = numbers(seeded.normal(n, seed=0)), 1
        along = np.concatenate((start, start), -1)  # by the exponentials, and by the steps
        peaks, total, lost, units, good = np.abs(start[:, :n]), np.zeros_like(along), [], [], True
        ends = (self.asked[parts.step] & (parts.end == 1)).tolist()
        with np.errstate(all="ignore"):
            for R, D, E, least, asked in zip(whole, off, flows, rounded, ends, strict=True):
                loss = D @ along
                lost.append(np.where(np.abs(loss) <= least @ np.abs(along), 0, loss))
                total = E @ total + lost[-1]
                along = np.concatenate((E @ along[..., :2], R @ along[..., 2:]), -1)
                peaks = np.maximum(peaks, np.abs(along[:, :n, :2]))
                if asked:
                    unit = np.maximum(peaks, _LEAST * _size(peaks))
                    unit[unit == 0] = 1
                    size = np.tile(_size(along[:, :n, :2] / unit), 2)
                    unit = np.tile(unit, 2)
                    units.append(_SHARE * self.accuracy * (size + _ZERO) * unit)
                    off_by = _size(total[:, :n] / unit)
                    good = good and bool((off_by <= allowed * size + self.accuracy * _ZERO).all())
            each, onward = np.empty(len(ends)), flows[0]
            for i in range(len(ends) - 1, -1, -1):
                if ends[i]:
                    onward, unit = np.eye(n, n + 1), units.pop()
                each[i] = _size(onward @ lost[i] / unit).max() if stable[i] else np.inf
                onward = onward @ flows[i]
        return torch.from_numpy(np.nan_to_num(each, nan=np.inf)).to(self.edges), good

    @functools.cached_property
    def halved(self) -> tuple[Tensor, bool]:
        """The edges of steps by which derivatives are followed, and whether they are: else there are too many to halve
        some once more."""
        step = torch.arange(len(self.edges) - 1, device=self.edges.device)
        parts = self.parts(step, torch.zeros_like(self.edges[1:]), torch.ones_like(self.edges[1:]))
        each, good = self.losses(parts, self.allowed)
        added: list[Tensor] = []
        while not good and bool((each > 1).any()):
            coarse = each > 1
            if not self.fits(len(each) + int(coarse.sum())):
                return self._with(added), False
            step, begin, end, _, halves, _ = (part[coarse] for part in parts)
            middle = (begin + end) / 2
            added.append(self.edges[step] + middle * (self.edges[step + 1] - self.edges[step]))
            sides = torch.cat((begin, middle)), torch.cat((middle, end))
            cut = self.parts(step.repeat(2), *sides, torch.cat(halves.unbind(1)))
            both = [torch.cat((old[~coarse], new)) for old, new in zip(parts, cut, strict=True)]
            order = (both[0] + both[1]).argsort()
            parts = Parts(*(part[order] for part in both))
            each = self.losses(parts, self.allowed)[0]
        return self._with(added), True

    def _with(self, added: list[Tensor]) -> Tensor:
        """The edges with others between them."""
        if not added:
            return self.edges
        every = torch.unique(torch.cat((self.edges, *added)))
        return every.flip(0) if bool(self.edges[-1] < self.edges[0]) else every


def _size(v: np.ndarray) -> np.ndarray:
    size: np.ndarray = np.sqrt(np.square(v).mean(-2, keepdims=True))
    return size
