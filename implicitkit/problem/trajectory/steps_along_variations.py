r"""Whether derivatives are followed by implicit steps, and shorter ones by which they are: variations.

Along a trajectory a variation solves ``d' = J(t) d + g``, ``J = df/dy``.  A few are followed that begin anywhere, ``g = 0``,
and a few that begin at zero, ``g`` constant, a share of every derivative in a parameter.  By a step of Radau's
(:mod:`~implicitkit.problem.trajectory.collocation`) they go on as ``R d = D_s``,

    D_i = d + h sum_j a_ij (J(t + c_j h) D_j + g),

one sparse system of ``s n`` unknowns a step, whatever the number of unknowns: no matrix ``R`` is formed
(:mod:`~implicitkit.problem.trajectory.steps_as_matrices` does that for few).  They are followed by the steps of the
trajectory, ``d_N = R_N .. R_1 d_0``, and by parts of these, halved until

    |R d - R'' R' d| <= accuracy (|d| + 10^{-4})

for the matrix ``R`` of a part and those of its halves (step doubling: Hairer, Norsett & Wanner 1993, *Solving Ordinary
Differential Equations I*, section II.4), which gives the variation ``d(t)`` itself, as accurately.  The matrix by which
derivatives in the initial state are off is ``E = R_N .. R_1 - \Phi(t_N, t_0)``, and for ``d_0 = U x`` with a random normal
``x`` and the units ``U`` of the state

    d_N - d(t_N) = E U x,    the mean of ``|E U x|^2`` is ``|E U|_F^2``:

and that of ``|d(t_N)|^2`` is ``|\Phi U|_F^2``.  So a few differences at each time that is asked for say how far
derivatives are off beside their size, all that is damped until then left out; a few, since of what one number is left one
variation may have next to no share.  Where it is too much the parts are the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat, seeded
from implicitkit.foundation.numbers import numbers
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.trajectory.collocation import radau
from implicitkit.problem.trajectory.explicit_steps import Between, Followed
from implicitkit.problem.trajectory.step_systems import Map, StepSystems

Slope = Callable[[Tensor, Tensor], Tensor]
Part = tuple[int, float, float]  # of a step, from one fraction of it to another

FINEST = 1e-11  # relative: differences are rounded
_LESS = 300.0  # times the accuracy, that derivatives may lose without a step of their own, ...
_MOST = 1e-2  # ... and no more than this
_LOOSE = 10.0  # times the accuracy, that a part may lose at first; and of what derivatives may, no more than its share
_ZERO = 1e-4  # of the largest values so far, that is as good as zero
_LEAST = 1e-6  # of the mean of these, for the smallest
_ENTRIES = 1 << 24  # of the matrices of all steps, at most
_NUMBERS = 1 << 22  # of Jacobians at once, as if they were full, a step at least
_MORE = 1000  # parts at most, besides the steps
_EACH = 4  # variations that begin alike
_STAGES = 3  # of the parts, at least: by less than order five they would be many
_SHORTEST = 64.0  # units of rounding of the time, that are not halved


class Verdict(NamedTuple):
    """Steps that follow derivatives, ``None`` where these are too many; and what each sample's derivatives are off by the
    steps of the trajectory, relative to their size, ``(samples,)``: infinity where that is not known."""

    edges: Tensor | None
    off: np.ndarray


class Cut(NamedTuple):
    """A part of a step, and what leads through it and its halves."""

    part: Part
    by: Map
    halves: Sequence[Map]


class Variations:
    """The variations of a trajectory.

    Args:
        f: of times ``(P,)`` and states ``(P, batch, n)``. between: the states in steps ``(P,)`` at fractions ``(P,)`` of
            them. edges: of the steps, ``(N + 1,)``. stages: points of each. asked: ``(N,)``, of the ends of the steps.
            units: of the state, ``(batch, n)``. moves: ``(batch,)``, which samples count. accuracy: relative, of a variation
            in each part. jacobian: of ``f``.
    """

    def __init__(
        self,
        f: Slope,
        between: Between,
        edges: Tensor,
        stages: int,
        asked: Tensor,
        units: Tensor,
        moves: Tensor,
        accuracy: float,
        jacobian: JacobianMatrix,
    ) -> None:
        self.f, self.states_in, self.edges, self.asked, self.jacobian = f, between, edges, asked.tolist(), jacobian
        self.stages, self.accuracy, self.batch, self.n = stages, accuracy, *units.shape
        self.units = numbers(compat.batches_in_front(units)[0]).reshape(-1, self.n)  # (samples, n)
        self.moves = numbers(compat.batches_in_front(moves)[0]).reshape(-1, 1)
        x, g = (self.moves[..., None] * numbers(seeded.normal(self.n, _EACH, seed=seed)) for seed in (0, 1))
        zero = np.zeros((len(self.units), self.n, _EACH))
        self.start = np.stack((zero + x, zero), 2)  # (samples, n, 2, _EACH), in units
        self.forced = np.stack((zero, zero + g / float(edges[-1] - edges[0])), 2)
        times = edges.abs().max()
        self.shortest = _SHORTEST * torch.finfo(edges.dtype).eps * float(times)
        self.entries = 0
        self.order: np.ndarray | None = None  # of the numbers of the state, in which the last systems were narrow
        self._begin(accuracy)

    def _begin(self, tolerated: float) -> None:
        """Begin to follow, by parts that each lose so much."""
        self.tolerated, self.peaks = tolerated, _size(self.start, 3)
        self.ends: list[tuple[int, float]] = []  # of parts
        self.ready: dict[int, tuple[Map, list[Map]]] = {}
        self.pairs: dict[int, Map] = {}

    def maps(self, parts: Sequence[Part], stages: int) -> list[Map]:
        """``d -> R d`` of each part of a step, which is factored when that is first asked."""
        A, c = radau(stages, self.edges.dtype, self.edges.device)
        begin, end = (self.edges.new_tensor(side) for side in list(zip(*parts, strict=True))[1:])
        step = torch.tensor([part[0] for part in parts], device=self.edges.device).repeat_interleave(stages)
        x = (begin[:, None] + (end - begin)[:, None] * c).flatten()
        length = self.edges[step[::stages] + 1] - self.edges[step[::stages]]
        every, size = numbers((end - begin) * length), self.units.size
        systems = StepSystems(*self._jacobians(step, x), every, numbers(A), size, self.order)
        self.order = systems.order
        self.entries, points = max(self.entries, systems.entries), numbers(c)[:, None, None, None, None]

        def of(i: int) -> Map:
            known: list[Map] = []
            forced = every[i] * points * self.forced

            def by(d: np.ndarray) -> np.ndarray:
                if not known:
                    known.append(systems.factored(i))
                return known[0]((d + forced).reshape(stages, size, -1)).reshape(d.shape)

            return by

        return [of(i) for i in range(len(parts))]

    def _jacobians(self, step: Tensor, x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``J`` in units of the state at points ``x (P,)`` of steps ``(P,)``, along the diagonal, one point after another:
        entries, their rows, which do not fall, and columns."""
        import scipy.sparse as sp

        length = self.edges.diff()
        t, beyond = self.edges[step] + x * length[step], x > 1  # of two steps
        after = length[(step + 1).clamp_max(len(length) - 1)]
        x = torch.where(beyond, ((x - 1) * length[step] / after).clamp_max(1), x)
        y = self.states_in(torch.where(beyond, step + 1, step), x)
        J = sp.csr_matrix(
            self.jacobian.at(lambda rows: self.f(t, rows.reshape(y.shape)).reshape(rows.shape), y.reshape(-1, self.n))
        )
        mapped = len(self.units) // self.batch
        if mapped > 1:  # these come first
            order = np.arange(J.shape[0]).reshape(mapped, len(x), -1).swapaxes(0, 1).reshape(-1)
            J = J[order][:, order]
        rows, columns = np.repeat(np.arange(J.shape[0]), np.diff(J.indptr)), J.indices.astype(np.int64)
        units = self.units.reshape(-1)
        entries = np.nan_to_num(J.data, nan=0.0, posinf=0.0, neginf=0.0)
        some = entries != 0
        entries, rows, columns = entries[some], rows[some], columns[some]
        return entries * units[columns % len(units)] / units[rows % len(units)], rows, columns

    def followed(self, allowed: float) -> Verdict:
        """The steps themselves where derivatives are off by no more than what is ``allowed``, else parts of them.

        It is first asked whether two steps in a row are followed by one as long as both, and then they themselves all the
        more, or each by parts that lose more: what these two differ by is more than what the steps are off by."""
        loose = min(_LOOSE * self.accuracy, allowed / _LOOSE)
        if loose > self.accuracy:
            self._begin(loose)
            verdict = self._verdict(allowed, self.stages >= _STAGES)
            if verdict.edges is self.edges or (verdict.edges is None and np.isinf(verdict.off).all()):
                return verdict  # by finer parts they would be still more
            self._begin(self.accuracy)
        return self._verdict(allowed, False)

    def _verdict(self, allowed: float, in_pairs: bool) -> Verdict:
        d = along = self.start
        off, own, unknown = np.zeros(len(d)), max(self.stages, _STAGES), np.full(len(d), np.inf)
        alone = step = 0  # until then
        while step < len(self.asked):
            pair = self._as_pair(step, d, along) if in_pairs and step >= alone else None
            if pair is not None:
                d, along = pair
                step += 1
            else:
                alone = step + 2 if step >= alone else alone
                whole, parts = self._begun(step, own)
                along = whole(along)
                while parts and self.entries <= _ENTRIES:
                    d = self._taken(d, parts, own)
                    if len(self.ends) > len(self.asked) + _MORE:
                        return Verdict(None, unknown)
            if self.entries > _ENTRIES:
                return Verdict(None, unknown)
            if self.asked[step]:
                unit = self._unit(self.peaks)
                size, apart = _size(d / unit), _size((along - d) / unit)
                share = np.where(apart <= self.accuracy * _ZERO, 0, apart / size)
                off = np.maximum(off, np.nan_to_num(share, nan=np.inf).max((1, 2, 3)))
            step += 1
        if bool((off <= allowed).all()):
            return Verdict(self.edges, off)
        return Verdict(self._through() if len(self.ends) * self.entries <= _ENTRIES else None, off)

    def _as_pair(self, step: int, d: np.ndarray, along: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Through two steps, and by one as long as both; ``None`` where that loses too much."""
        if step + 1 == len(self.asked) or self.asked[step]:
            return None
        if step not in self.pairs:
            last = min(step + self._at_once(self.stages), len(self.asked))
            firsts = range(step, max(step + 2, step + (last - step) // 2 * 2), 2)
            length = self.edges.diff()
            long = [(k, 0.0, 1.0 + float(length[k + 1] / length[k])) for k in firsts]
            maps = self.maps([*((k, 0.0, 1.0) for k in range(step, firsts[-1] + 2)), *long], self.stages)
            self.ready = {step + i: (maps[i], [maps[i]]) for i in range(2 * len(firsts))}
            self.pairs = dict(zip(firsts, maps[2 * len(firsts) :], strict=True))
        by, first, second = self.pairs.pop(step), self.ready[step][0], self.ready[step + 1][0]
        fine = second(first(d))
        peaks = np.maximum(self.peaks, _size(fine, 3))
        if not self._keeps(by(d), fine, peaks):
            return None
        self.peaks = peaks
        self.ends += [(step, 1.0), (step + 1, 1.0)]
        return fine, by(along)

    def _at_once(self, own: int) -> int:
        """How many steps are linearised at once."""
        return max(1, _NUMBERS // (own * self.units.size * self.n))

    def _begun(self, step: int, own: int) -> tuple[Map, list[Cut]]:
        """A step, and as a part of its own that is to be followed; some steps at once are linearised."""
        if step not in self.ready:
            some = range(step, min(step + self._at_once(own), len(self.asked)))
            cuts = [(k, *cut) for k in some for cut in ((0.0, 1.0), (0.0, 0.5), (0.5, 1.0))]
            maps = self.maps(cuts, own)
            given = maps[::3] if own == self.stages else self.maps([(k, 0.0, 1.0) for k in some], self.stages)
            self.ready = {k: (given[i], maps[3 * i : 3 * i + 3]) for i, k in enumerate(some)}
        whole, (by, *halves) = self.ready.pop(step)
        if not halves:
            halves = self.maps([(step, 0.0, 0.5), (step, 0.5, 1.0)], own)
        return whole, [Cut((step, 0.0, 1.0), by, halves)]

    def _taken(self, d: np.ndarray, parts: list[Cut], own: int) -> np.ndarray:
        """``d`` at the end of the next part, which is halved where it loses too much."""
        (step, begin, end), by, (first, second) = parts.pop()
        halved = second(first(d))
        peaks = np.maximum(self.peaks, _size(halved, 3))
        if self._is_short(step, end - begin) or self._keeps(by(d), halved, peaks):
            self.peaks = peaks
            self.ends.append((step, end))
            return halved
        edges = [begin + i / 4 * (end - begin) for i in range(5)]
        quarters = self.maps([(step, *cut) for cut in itertools.pairwise(edges)], own)
        parts.append(Cut((step, edges[2], end), second, quarters[2:]))
        parts.append(Cut((step, begin, edges[2]), first, quarters[:2]))
        return d

    def _keeps(self, found: np.ndarray, finer: np.ndarray, peaks: np.ndarray) -> bool:
        """Does it lose no more than is tolerated?"""
        unit = self._unit(peaks)
        lost = _size((found - finer) / unit) / (self.tolerated * (_size(finer / unit) + _ZERO))
        return bool((lost <= 1).all())

    def _is_short(self, step: int, part: float) -> bool:
        return part * abs(float(self.edges[step + 1] - self.edges[step])) <= self.shortest

    @staticmethod
    def _unit(peaks: np.ndarray) -> np.ndarray:
        """The unit of each number of a variation: the largest value that it has had."""
        unit: np.ndarray = np.maximum(peaks, _LEAST * _size(peaks, 1))
        unit[unit == 0] = 1
        return unit

    def _through(self) -> Tensor:
        """The edges of the parts."""
        step, x = (torch.as_tensor(v, device=self.edges.device) for v in zip(*self.ends, strict=True))
        inside = x < 1
        begin, x = self.edges[step[inside]], x[inside].to(self.edges)
        every = torch.unique(torch.cat((self.edges, begin + x * (self.edges[step[inside] + 1] - begin))))
        return every.flip(0) if bool(self.edges[-1] < self.edges[0]) else every


def along(
    f: Slope, between: Between, found: Followed, stages: int, t: Tensor, accuracy: float, jacobian: JacobianMatrix
) -> Verdict:
    """Whether variations are followed by the steps of what has been found, of so many points, to the times ``t``."""
    edges, states = found.edges, found.states
    moves, asked = torch.isfinite(states).all(-1).all(0), torch.isin(edges[1:], t)
    variations = Variations(f, between, edges, stages, asked, units_of(states), moves, max(accuracy, FINEST), jacobian)
    with np.errstate(all="ignore"):  # of what grows without bound
        return variations.followed(allowed(accuracy))


def units_of(states: Tensor) -> Tensor:
    """Units of a variation, ``(batch, n)``, of states at edges ``(N + 1, batch, n)``."""
    peaks = states.nan_to_num(0, 0, 0).abs().amax(0)
    whole, eps = peaks.square().mean(-1, keepdim=True).sqrt(), torch.finfo(states.dtype).eps
    return torch.maximum(peaks, eps ** (1 / 6) * torch.where(whole > 0, whole, 1))  # else rounding is all that differs


def allowed(accuracy: float) -> float:
    """What derivatives may lose, relative to their size, by the steps of a trajectory that is so accurate."""
    return min(_LESS * accuracy, _MOST)


def _size(v: np.ndarray, over: int | tuple[int, int] = (1, 3)) -> np.ndarray:
    """Root mean squares, over the numbers and all variations that begin alike."""
    size: np.ndarray = np.sqrt(np.square(v).mean(over, keepdims=True))
    return size
