r"""Functions of the user's own (``autograd.Function``) whose derivative autograd takes for a constant.

Where a ``backward`` detaches what it has saved, computes in NumPy, or with numbers that ``forward`` has kept, the first
derivative is right, and the second one is zero, without a word.  Whether it is so is asked once of each such Function and
those of its inputs that lead to a point, of the function that it is in, beside the point at hand: along a random direction
``v`` of one point, and what the function takes beside its points,

    D = (g(p + h v) - g(p - h v)) / (2 h),    g = (df/dp)^T c,    and    w'D = (dg/dp v)'w    with w = D

must hold, to 0.3 % and what differences are off by, or else with ``4 h`` still differ, ``D`` being the same.  Nothing is
said where ``g'v`` itself is no derivative of ``c'f``, as of Functions that pass gradients straight through, scaled or
reversed: they have the derivatives of another function, of any order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat, graph, seeded

_STEP = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative to the point
_ASIDE, _WIDER = 0.1, 4.0
_TIMES_K = 10.0  # what is explained
_PART, _SAME = 3e-3, 0.1  # of D: what is too much, and how far two quotients may differ
_RIGHT = 1e-3  # of a first derivative, that it may be off by
_TRIES, _REMEMBERED = 4, 1000  # where nothing is decided; Functions
_SAID = (
    "trying to differentiate twice a function whose backward is taken for a constant: the derivative of {} changes with its "
    "input, and autograd does not see that. Compute it in backward by torch's operations from ctx.saved_tensors, the inputs "
    "as they are (no detach, no torch.no_grad(), no NumPy, no numbers kept from forward), or ask for first derivatives only"
)
_asked: dict[frozenset[Any], tuple[int, bool]] = {}  # how often it was, and whether there is a second derivative


class _Comparing(threading.local):
    now: bool = False


_comparing = _Comparing()


@dataclass(frozen=True)
class Judge:
    """Whether Functions in ``function``, between its result and one of its ``points``, have a second derivative."""

    function: Callable[..., Tensor]  # of those beside, and the points
    points: Sequence[Tensor]
    beside: Sequence[Tensor] = ()

    def __call__(self, i: int, asked: graph.Asked) -> str:
        """Why derivatives in the point ``i`` have no derivative; empty, if they have, or nothing shows that."""
        key = frozenset((weakref.ref(f), inputs) for f, inputs in asked)
        times, good = _asked.get(key, (0, True))
        if times < _TRIES and not _comparing.now:  # of evaluations inside of this one nothing is asked
            _comparing.now = True
            try:
                decided = self._compared(i)
            finally:
                _comparing.now = False
            good = decided is not False
            if len(_asked) >= _REMEMBERED:
                _asked.clear()
            _asked[key] = times + 1 if decided is None else _TRIES, good
        return "" if good else _SAID.format(", ".join(sorted({f.__name__ for f, _ in asked})))

    def _compared(self, i: int) -> bool | None:
        """Is the derivative of that in a point what differences say?  ``None``: nothing is decided."""
        dtype = self.points[i].dtype
        if dtype not in _STEP:
            return None
        h = _STEP[dtype]
        try:
            with compat.own_graphs():
                near, far = (_Change(self, i, step).seen() for step in (h, _WIDER * h))
        except Exception:  # outside of its domain, or it has no second derivative, and says so itself
            return None
        (found, said, K, clear), (again, *_) = near, far
        wrong = (found - said).abs() > K + _PART * torch.maximum(found, said.abs())
        same = (again - found).abs() <= _SAME * found
        return not bool((wrong & same & clear).any()) if bool(clear.any()) else None


class _Change(NamedTuple):
    """How derivatives in all points, and in those beside them, change along a random direction of one of them, and these."""

    judge: Judge
    i: int
    h: float

    def seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``w'D``, the same as autograd has it, what the former is off by, and whether it is clear, where the first
        derivative is, too, one for each sample that ``torch.vmap`` maps over."""
        beside = len(self.judge.beside)
        points = [p.detach() for p in (*self.judge.beside, *self.judge.points)]
        ways = [_way(p, j) for j, p in enumerate(points)]
        points = [p + _ASIDE * v for p, v in zip(points, ways, strict=True)]
        moving = (*range(beside), beside + self.i)

        def value_and_slopes(*moved: Tensor) -> Tensor:
            now = dict(enumerate(points)) | dict(zip(moving, moved, strict=True))
            out, pullback = _vjp(self.judge.function, *now.values())
            c = seeded.normal(*out.shape, seed=0x2D).to(out)
            slopes = [(g * way).flatten() for g, way in zip(pullback(c), ways, strict=True)]
            return torch.cat([(c * out).sum().reshape(1), *slopes])

        there, back = (
            value_and_slopes(*(points[j] + step * ways[j] for j in moving)).detach() for step in (self.h, -self.h)
        )
        here, pullback = _vjp(value_and_slopes, *(points[j] for j in moving))

        def along(w: Tensor) -> Tensor:
            return torch.stack([(g * ways[j]).sum() for j, g in zip(moving, pullback(w), strict=True)]).sum()

        D, eps = (there - back) / (2 * self.h), torch.finfo(here.dtype).eps
        K = _TIMES_K * ((there - 2 * here + back).abs() + eps * (there.abs() + back.abs())) / self.h
        (k, slope), D, K = (K[0], D[0]), torch.cat((0 * D[:1], D[1:])), (D.abs() * K)[1:].sum()
        first = along(torch.cat((torch.ones_like(D[:1]), 0 * D[1:])))
        right = (slope - first).abs() <= k + _RIGHT * torch.maximum(slope.abs(), first.abs())
        found, said = (D * D).sum(), along(D)
        found, said, K, clear = (compat.batches_in_front(t)[0] for t in (found, said, K, right & (found > K)))
        return found, said, K, clear


def _vjp(function: Callable[..., Tensor], *points: Tensor) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """:func:`implicitkit.foundation.autodiff.vjp`, of which nothing is asked."""
    if compat.transforms_active():
        return torch.func.vjp(function, *points)[:2]
    with torch.enable_grad():
        leaves = [p if p.requires_grad else p.detach().requires_grad_() for p in points]
        out = function(*leaves)

    def pullback(w: Tensor) -> Sequence[Tensor]:
        if not out.requires_grad:
            return [torch.zeros_like(p) for p in leaves]
        with torch.enable_grad():
            found = graph.pulled(out, leaves, w, create_graph=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True)]

    return out, pullback


def _way(p: Tensor, j: int) -> Tensor:
    """A random direction, of the size of a point."""
    size = p.abs().square().mean().sqrt()
    return (p.abs() + _ASIDE * torch.where(size > 0, size, 1)) * seeded.normal(*p.shape, seed=0x2C + j).to(p)
