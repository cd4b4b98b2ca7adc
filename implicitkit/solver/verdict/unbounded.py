r"""Is there a minimum at all, and does a minimisation still get on?  An infimum that is not attained, and no progress."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.rounding_level import ROUNDING

POWERS = (2, 4, 6, 8, 10, 12)  # of ten: how far a ray is followed, in units of max(|z|, 1)
_SHARE = 1e-2  # of what a slope promises: so much an objective falls that falls forever
_EVERY = 50  # steps between two looks at the progress
_PATIENCE = 3  # looks in a row without any, before a sample is given up
_STEEP = 0.9  # where the gradient has not come down to this, the objective may fall forever
_LOWER = 0.999  # it gets on if it has come down to this ...
_FALLEN = 1e-2  # ... or the objective by this share of what it has fallen since the first look ...
_STEADY = 0.25  # ... or by this share of what it has fallen between two looks on the average: it goes along a valley
_AS_MUCH = 0.9  # ... or by this share of what it fell between the two looks before: so does one on a bend of the valley
_FURTHER, _RUNS = 10.0, 2  # times as far out as a look before, so often in a row


def falls_forever(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Where the objective falls along a ray from ``z`` as far as it is followed, at least a hundredth as fast as the slope
    at ``z`` says, ``(batch,)``: along steepest descent, or, which waves do not turn aside, away from the origin."""
    probe = f.beside("minimise")
    g, value = probe(z), probe.value(z)
    slope = torch.linalg.vector_norm(g, dim=1)
    which = which & torch.isfinite(value) & torch.isfinite(slope) & (slope > 0)
    falls = _falls_along(probe, z, -g, which, value, slope)
    return falls | _falls_along(probe, z, z, which & ~falls & (z != 0).any(1), value, slope)


def _falls_along(f: Evaluations, z: Tensor, way: Tensor, which: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """Where the objective falls from its ``value`` at ``z`` along a ``way``, a hundredth as fast as ``slope`` or more."""
    length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
    ray = way / length.clamp_min(torch.finfo(z.dtype).tiny)
    falls, size, last = which, z.abs().amax(1).clamp_min(1), value
    for power in POWERS:
        if not bool(falls.any()):
            break
        t = size * 10.0**power
        new = f.value(z + t.unsqueeze(1) * ray)
        falls = falls & ((new < last) | (new == -torch.inf)) & (value - new >= _SHARE * t * slope)
        last = new
    return falls


@dataclass
class Progress:
    """Looks every fifty steps whether a minimisation still gets on, ``(batch,)`` each.

    Attributes:
        first: the objective at the first look. value, norm: the least objective and gradient at the last one.
        fall: of the objective between the last two. slope: the gradient at the first look. looks: how many so far.
        far: ``max |z|``, 1 or more, at the last one. idle: looks in a row at which neither had come down.
        runs: looks in a row at which it had run on downhill.
        unbounded: samples whose gradient has not, and whose objective falls forever.
        endless: searches along a line without an end.
    """

    first: Tensor | None = None
    value: Tensor | None = None
    norm: Tensor | None = None
    fall: Tensor | None = None
    slope: Tensor | None = None
    far: Tensor | None = None
    idle: Tensor | None = None
    runs: Tensor | None = None
    unbounded: Tensor | None = None
    endless: Tensor | None = None
    looks: int = 0

    @staticmethod
    def due(f: Evaluations, step: int) -> bool:
        """Is there something to look at?"""
        return step % _EVERY == 0 and step > 0 and f.of_gradient and f.kind.minimisation

    def spent(self, f: Evaluations, z: Tensor) -> Tensor:
        """Samples to be given up; which of them are ``unbounded`` is kept."""
        value, norm = f.value(z), f.best_norm
        if self.first is None or self.value is None or self.norm is None or self.idle is None:
            self.first, self.value, self.norm, self.slope = value, value, norm, norm
            self.far = z.abs().amax(1).clamp_min(1)
            self.idle = self.runs = torch.zeros_like(norm, dtype=torch.int64)
            return self.idle > 0
        steep = f.active & ~(norm < _STEEP * self.norm)
        idle = f.active & ~(norm < _LOWER * self.norm)
        rounding = ROUNDING * f.eps * self.value.abs()
        self.looks += 1
        least = min(_FALLEN, _STEADY / self.looks) * (self.first - self.value)
        if self.fall is not None:
            least = torch.where(self.fall > 0, least.minimum(_AS_MUCH * self.fall), least)
        fallen = torch.maximum(rounding, least)
        self.unbounded = steep & self._runs_on(z, value)
        if bool((steep & ~self.unbounded).any()):
            self.unbounded = self.unbounded | falls_forever(f, z, steep & ~self.unbounded)
        self.idle, self.fall = torch.where(idle & ~(value < self.value - fallen), self.idle + 1, 0), self.value - value
        self.value, self.norm = torch.minimum(value, self.value), norm
        return self.unbounded | (self.idle >= _PATIENCE)

    def _runs_on(self, z: Tensor, value: Tensor) -> Tensor:
        """Where look after look has found ``z`` ten times as far out, and the objective lower by a hundredth of what its
        first slope promised over that way, ``(batch,)``: it falls forever, though no ray shows it that leads down on a
        wave (``z + sin(z)``) or beside the bottom of a valley."""
        assert self.far is not None and self.slope is not None and self.value is not None and self.runs is not None
        far = z.abs().amax(1).clamp_min(1)
        fallen = self.value - value >= _SHARE * self.slope * (far - self.far)
        self.runs = torch.where((far >= _FURTHER * self.far) & fallen, self.runs + 1, 0)
        self.far = far
        return self.runs >= _RUNS

    def fallen(self, f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
        """Samples to be given up among those for which a search along a line found no end: as ``unbounded``, or because it
        is not the first time (``-log(z)`` falls forever, ever more slowly)."""
        self.unbounded = falls_forever(f, z, which)
        self.endless = which.long() if self.endless is None else self.endless + which
        return self.unbounded | (self.endless >= _PATIENCE)

    def select(self, samples: Tensor) -> None:
        """Only these samples are left."""
        for name, kept in vars(self).items():
            if isinstance(kept, Tensor):
                setattr(self, name, kept.index_select(0, samples))
