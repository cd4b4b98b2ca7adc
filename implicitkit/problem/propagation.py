r"""Whether derivatives are followed by the steps of a trajectory, and which have to be halved for that: steps as matrices.

By a step of any Runge-Kutta method (``A``, ``c``, the last row that of the step's end) a solution of the variational equation
``d' = J(t) d + g`` goes on by the matrix ``R`` of

    D_i = d + h sum_j a_ij J(t + c_j h) D_j,    R d = D_s,

and by ``F``, those of its halves, more accurately.  Two are followed, neither in a special direction: one that begins
anywhere, ``g = 0``, and one that begins at zero, ``g`` constant, a share of every derivative in a parameter.  What a step
loses of them is what is left of ``(R - F) d`` at the next time asked for: along what is damped until then, nothing, however
long the step; along what turns or grows, all.  It is measured as an explicit step does it
(:mod:`~implicitkit.problem.explicit`), relative to the largest values of each number so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded
from implicitkit.problem.explicit import NODES, ROWS, STEPS, Between

Slope = Callable[[Tensor, Tensor], Tensor]

_NUMBERS = 1 << 22  # of matrices, at once
_ROUNDS = 30  # a step is halved, at most
_ZERO = 1e-3  # of the largest values so far, that is as good as zero
_LEAST = 1e-6  # of the mean of these, for the smallest


class Parts(NamedTuple):
    """Parts of steps ``(P,)``, from one fraction of it to another, and their matrices and those of their halves,
    ``(P, batch, m, m)`` and ``(P, 2, batch, m, m)``."""

    step: Tensor
    begin: Tensor
    end: Tensor
    whole: Tensor
    halves: Tensor


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
    """

    def __init__(
        self, f: Slope, between: Between, edges: Tensor, rule: tuple[Tensor, Tensor], asked: Tensor, units: Tensor
    ) -> None:
        self.f, self.between, self.edges, self.asked, self.units = f, between, edges, asked, units
        self.A, self.c = rule
        (self.batch, self.n), self.forced = units.shape, seeded.normal(units.shape[1], seed=1).to(units)

    def fits(self, count: int) -> bool:
        """Are so many steps as matrices few enough numbers?"""
        return 3 * count * self.batch * (len(self.c) * (self.n + 1)) ** 2 <= _NUMBERS

    def jacobians(self, t: Tensor, y: Tensor) -> Tensor:
        """``df/dy`` in units of the state, ``(P, batch, n, n)``."""
        n, small = self.n, torch.finfo(y.dtype).eps ** (1 / 3)
        ways = torch.diag_embed(self.units).movedim(1, 0).unsqueeze(1).expand(n, len(t), -1, -1).flatten(0, 1)
        t, y = t.repeat(n), y.repeat(n, 1, 1)
        if y.dtype == torch.float64:
            columns = (self.f(t, y + small * ways) - self.f(t, y - small * ways)) / (2 * small)
        else:
            columns = autodiff.jvp(lambda y: self.f(t, y), (y,), (ways,))
        return (columns / self.units).unflatten(0, (n, -1)).movedim(0, -1).nan_to_num(0, 0, 0)

    def matrices(self, step: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Those of parts of steps, ``(P, batch, n + 1, n + 1)``; the last number is the constant one, that forces."""
        s, m, P = len(self.c), self.n + 1, len(step)
        x, which = (begin[:, None] + (end - begin)[:, None] * self.c).flatten(), step.repeat_interleave(s)
        length = self.edges[step + 1] - self.edges[step]
        J = self.jacobians(self.edges[which] + x * (self.edges[which + 1] - self.edges[which]), self.between(which, x))
        J = torch.nn.functional.pad(J, (0, 1, 0, 1))
        J[..., :-1, -1] = self.forced / (self.edges[-1] - self.edges[0])
        J = (J * ((end - begin) * length).repeat_interleave(s)[:, None, None, None]).unflatten(0, (P, s))
        coupled = torch.einsum("ij,pjbvw->pbivjw", self.A, J).reshape(P, self.batch, s * m, s * m)
        one = torch.eye(m, dtype=J.dtype, device=J.device)
        eye = torch.eye(s * m, dtype=J.dtype, device=J.device)
        return torch.linalg.solve_ex(eye - coupled, one.repeat(s, 1).expand(P, self.batch, -1, -1))[0][..., -m:, :]

    def parts(self, step: Tensor, begin: Tensor, end: Tensor, whole: Tensor | None = None) -> Parts:
        """These, with the matrices of their halves, and their own unless they are known."""
        middle = (begin + end) / 2
        cuts = [(begin, middle), (middle, end)] + ([(begin, end)] if whole is None else [])
        every = self.matrices(step.repeat(len(cuts)), *(torch.cat(side) for side in zip(*cuts, strict=True)))
        every = every.unflatten(0, (len(cuts), -1))
        return Parts(step, begin, end, every[2] if whole is None else whole, every[:2].movedim(0, 1))

    def losses(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """What each part loses ``(P,)``, and all of them together at the end of each, relative: the largest of all samples
        and of both variations."""
        fine, n = parts.halves[:, 1] @ parts.halves[:, 0], self.n
        now = fine.new_zeros(self.batch, n + 1, 2)
        now[:, :n, 0], now[:, n, 1] = seeded.normal(n, seed=0).to(now), 1
        peaks, off, lost, sizes, together = now[:, :n].abs(), torch.zeros_like(now), [], [], []
        for R, F in zip(parts.whole.unbind(), fine.unbind(), strict=True):
            lost.append((R - F) @ now)
            now, off = F @ now, F @ off + lost[-1]
            peaks = torch.maximum(peaks, now[:, :n].abs())
            units = torch.maximum(peaks, _LEAST * _size(peaks))
            units = torch.where(units > 0, units, 1)
            units = units * (_size(now[:, :n] / units) + _ZERO)
            sizes.append(units)
            together.append(_size(off[:, :n] / units).amax())
        ends, each, onward = (self.asked[parts.step] & (parts.end == 1)).tolist(), [], fine[0]
        for F, off, own, asked in zip(reversed(fine.unbind()), reversed(lost), reversed(sizes), reversed(ends), strict=True):
            if asked:
                onward, units = torch.eye(n + 1, dtype=F.dtype, device=F.device)[:n], own
            each.append(_size(onward @ off / units).amax())
            onward = onward @ F
        each.reverse()
        return torch.stack(each), torch.stack(together)[ends]

    def lost(self) -> float:
        """What derivatives lose by the steps, relative, at the times asked for."""
        return float(self.losses(self._all())[1].max())

    def halved(self, accuracy: float, allowed: float) -> Tensor:
        """The edges of steps by which each loses no more than ``accuracy``, unless all of them lose no more than what is
        allowed by those that there are."""
        parts = self._all()
        each, together = self.losses(parts)
        added: list[Tensor] = []
        if bool(together.max() <= allowed):
            return self.edges
        for _ in range(_ROUNDS):
            coarse = each > accuracy
            new = 2 * int(coarse.sum())
            if not new or len(each) + new > STEPS or not self.fits(new) or not bool(torch.isfinite(each).all()):
                break
            step, begin, end, _, halves = (part[coarse] for part in parts)
            middle = (begin + end) / 2
            added.append(self.edges[step] + middle * (self.edges[step + 1] - self.edges[step]))
            cut = self.parts(step.repeat(2), torch.cat((begin, middle)), torch.cat((middle, end)), torch.cat((*halves.unbind(1),)))
            both = (torch.cat((old[~coarse], more)) for old, more in zip(parts, cut, strict=True))
            parts = Parts(*both)
            order = (parts.step + parts.begin).argsort()
            parts = Parts(*(part[order] for part in parts))
            each, together = self.losses(parts)
        every = torch.unique(torch.cat((self.edges, *added)))
        return every.flip(0) if bool(self.edges[-1] < self.edges[0]) else every

    def _all(self) -> Parts:
        """The steps."""
        step = torch.arange(len(self.edges) - 1, device=self.edges.device)
        return self.parts(step, torch.zeros_like(self.edges[1:]), torch.ones_like(self.edges[1:]))


def _size(v: Tensor) -> Tensor:
    return v.square().mean(-2, keepdim=True).sqrt()
