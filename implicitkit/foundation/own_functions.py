r"""Functions of the user's own (``autograd.Function``) whose derivative autograd takes for a constant.

Where a ``backward`` detaches what it has saved, computes in NumPy, or with numbers that ``forward`` has kept, the first
derivative is right, and the second one is zero, without a word.  Whether it is so is asked once of each such Function and
those of its inputs that lead to a point, of the function that it is in, beside the point at hand: along a random direction ``v`` of one point

    D = (g(p + h v) - g(p - h v)) / (2 h),    g = (df/dp)^T c,    and    w'D = (dg/dp v)'w    with w = D

must hold, to 3 % and what differences are off by, or else with ``4 h`` still differ, ``D`` being the same.
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
_PART, _SAME = 0.03, 0.1  # of D: what is too much, and how far two quotients may differ
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

    function: Callable[..., Tensor]
    points: Sequence[Tensor]

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
        (found, said, K), (again, *_) = near, far
        decided = bool((found > K).any())
        wrong = (found - said).abs() > K + _PART * torch.maximum(found, said.abs())
        same = (again - found).abs() <= _SAME * found
        return not bool((wrong & same & (found > K)).any()) if decided else None


class _Change(NamedTuple):
    """How derivatives in all points change along a random direction of one of them."""

    judge: Judge
    i: int
    h: float

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """``w'D``, the same as autograd has it, and what the former is off by, one for each sample that ``torch.vmap`` maps
        over."""
        points = [p.detach() for p in self.judge.points]
        ways = [_way(p, j) for j, p in enumerate(points)]
        points = [p + _ASIDE * v for p, v in zip(points, ways, strict=True)]
        at, v = points[self.i], ways[self.i]

        def slopes(moved: Tensor) -> Tensor:
            out, pullback = _vjp(self.judge.function, *points[: self.i], moved, *points[self.i + 1 :])
            found = pullback(seeded.normal(*out.shape, seed=0x2D).to(out))
            return torch.cat([(g * way).flatten() for g, way in zip(found, ways, strict=True)])

        there, back = (slopes(at + step * v).detach() for step in (self.h, -self.h))
        here, pullback = _vjp(slopes, at)
        D, eps = (there - back) / (2 * self.h), torch.finfo(at.dtype).eps
        K = _TIMES_K * ((there - 2 * here + back).abs() + eps * (there.abs() + back.abs())) / self.h
        K = (D.abs() * K).sum()
        found, said = (D * D).sum(), (pullback(D)[0] * v).sum()
        found, said, K = (compat.batches_in_front(t)[0] for t in (found, said, K))
        return found, said, K


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
