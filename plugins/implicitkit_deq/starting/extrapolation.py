r"""Where what changes little from call to call is expected next: the last one, and its last changes as far as they last.

In a training on the same samples equilibria ``z_k``, and the solutions of ``(I - J)^T u_k = dL/dz_k`` alike, move with the
parameters.  Both are found by iterations, which may begin anywhere: with ``d_k = z_k - z_{k-1}``, from

    z_k + \alpha d_k + \beta (d_k - d_{k-1}),
    \alpha, \beta = argmin |d_k - \alpha d_{k-1} - \beta (d_{k-1} - d_{k-2})|^2,  0 <= \alpha <= 1,  |\beta| <= 1,

each sample with those that would have been best the last time (``\alpha`` is the best for the ``\beta`` allowed), and the
second term no larger than the first.  After a leap, ``|d_k| > 2 |d_{k-1}|``, as from one branch of equilibria to another, no
more is expected than the step before it: ``\alpha = <d_k, d_{k-1}> / |d_k|^2``, ``\beta = 0``.  Where steps are of one
kind, as an optimiser's are, both are near one and what is left to find is of third order in a step; where they are noise
both are near zero, and the start is the last one.  Equilibria, of which there may be several, begin elsewhere only where
the change before was told to half its size at least (:func:`told`).

Shapes: tensors are ``(batch, ...)``, each row by itself; of the equilibria of a causal layer, ``(batch, positions, ...)``,
each position of each row, so that what is expected of the past tells nothing of the future.  Units: those of the tensors;
``\alpha`` and ``\beta`` have none.

Source: extrapolation of the starts of a sequence of systems (Fischer 1998, Comput. Methods Appl. Mech. Eng. 163,
193-204, has the projection on what was found before, of which :class:`Onward` takes one vector); the two
coefficients are this library's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicitkit.extend import LinearSolution, trees
from implicitkit_deq.wrapped_linear_solver import Around

CHANGES = 3  # that are remembered
_TOLD = 0.5  # of a change, which may not have been expected of it, for the next one to be expected
_LEAP = 2.0  # times the change before: one that is larger is no step like that
_FEW = 3  # products, of which none is saved by one more


class Trend:
    """What is expected of a state by its last values; a copy of it has seen none.

    Args:
        changes: how many are remembered; of none the last value is all that is expected.
        by_position: each of a sequence, the second dimension, by itself, so that none tells another of what is to come.
        careful: nothing is added for rows of which the last change was not told well before (:func:`told`).
    """

    def __init__(self, changes: int = CHANGES, by_position: bool = False, careful: bool = False) -> None:
        self._most, self._by_position, self._careful = changes, by_position, careful
        # leaves of the last state, its last changes, the latest first, what they tell of the next, and the structure of all
        self._seen: tuple[list[Tensor], list[list[Tensor]], list[Tensor], Any] | None = None
        self._added: list[Tensor] = []  # as much of that as is believed

    def __reduce__(self) -> Any:
        return Trend, (self._most, self._by_position, self._careful)

    def keep(self, state: Any) -> None:
        """Take in the state as it is now; one that is not like the last begins anew."""
        (leaves, spec), seen = trees.tree_flatten(state), self._seen
        self._added = []
        if not self._most or seen is None or seen[3] != spec or not all(map(_alike, leaves, seen[0])):
            self._seen = leaves, [], [], spec
            return
        now = [new - old for new, old in zip(leaves, seen[0], strict=True)]
        changes = [now, *seen[1][: self._most - 1]]
        ahead = [lasting(self._by_position, *d) for d in zip(*changes, strict=True) if len(d) > 1]
        self._seen, self._added = (leaves, changes, ahead, spec), ahead
        if self._careful and ahead:
            before = seen[2] or [torch.zeros_like(d) for d in now]
            believed = (told(self._by_position, *pair) for pair in zip(now, before, strict=True))
            self._added = [b * d for b, d in zip(believed, ahead, strict=True)]

    @property
    def last(self) -> Any:
        """The state now; ``None`` before there was any."""
        return None if self._seen is None else trees.tree_unflatten(self._seen[0], self._seen[3])

    def expected(self) -> Any:
        """The state to come; ``None`` before there was any."""
        if self._seen is None:
            return None
        (leaves, _, _, spec), added = self._seen, self._added
        return trees.tree_unflatten([a + b for a, b in zip(leaves, added, strict=True)] if added else leaves, spec)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def lasting(by_position: bool, now: Tensor, before: Tensor, earlier: Tensor | None = None) -> Tensor:
    """The next change to expect: as much of the last one, and of what it changed itself, as the ones before let expect, each
    row by itself, or each position of each row; ``(batch, ...)``.  After changes that are zero nothing is expected."""
    changes = [t for t in (now, before, earlier) if t is not None]
    if by_position and now.ndim > 1:
        return _lasting(*(t.flatten(0, 1) for t in changes)).view(now.shape)
    return _lasting(*changes)


def told(by_position: bool, change: Tensor, before: Tensor) -> Tensor:
    """Did rows, or positions of rows, change much as was expected ``before``, at most half of the ``change`` off?  To be
    broadcast against ``change``.  Where they did not, as in steps that are large or noise, the last value is the better
    start."""
    rows = 2 if by_position and change.ndim > 1 else 1
    shape = (*change.shape[:rows], *[1] * (change.ndim - rows))
    off, size = (
        _in_rows(torch.view_as_real(t) if t.is_complex() else t)
        for t in ((d.flatten(0, 1) if rows > 1 else d) for d in (change - before, change))
    )
    return (_dot(off, off) <= _TOLD**2 * _dot(size, size)).view(shape)


def _lasting(now: Tensor, before: Tensor, earlier: Tensor | None = None) -> Tensor:
    """The next change to expect of each row; none where that is not finite."""
    if now.is_complex():
        return torch.view_as_complex(
            _lasting(*(torch.view_as_real(t) for t in (now, before, earlier) if t is not None))
        )
    a, b = _in_rows(now), _in_rows(before)
    parts = (a, b) if earlier is None else (a, b, b - _in_rows(earlier))
    rows = torch.stack(parts, 1)
    dots = torch.bmm(rows, rows.mT).flatten(1).unbind(1)  # of each with each
    own, along, length = dots[0], dots[1], dots[len(parts) + 1]
    leapt = own > _LEAP**2 * length
    alpha = torch.where(leapt, along / own, along / length)
    if earlier is None:
        first = alpha.clamp_(0, 1)
        added, known = _by_rows(first, a), first + own
    else:
        told = dots[5] / length
        # of the part of it that the change itself does not tell: its products with the change now, and with itself
        across = torch.addcmul(dots[2], told, along, value=-1)
        own_size = torch.addcmul(dots[8], told.square(), length, value=-1).clamp_min_(0)
        beta = across.div_(own_size).nan_to_num_(0, 0, 0).clamp_(-1, 1).masked_fill_(leapt, 0)
        first = alpha.addcmul_(told, beta, value=-1).clamp_(0, 1)
        bend = torch.add(own + length, along, alpha=-2).clamp_min_(0)  # |a - b|^2; rounding where it is far below |a|^2
        most = (own / bend).sqrt_().mul_(first).nan_to_num_(0, torch.inf)
        beta = beta.clamp(-most, most)  # so that the second term is no larger than the first
        added = torch.addcmul(_by_rows(first + beta, a), beta.unsqueeze(1), b, value=-1)
        known = first + own + length
    if math.isfinite(float(known.sum())):
        return added if added.shape == now.shape else added.view(now.shape)
    return torch.where(added.isfinite().all(1, keepdim=True), added, 0).view(now.shape)


def _by_rows(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.unsqueeze(1) * rows


def _in_rows(t: Tensor) -> Tensor:
    return t if t.ndim == 2 else t.reshape(len(t), math.prod(t.shape[1:]))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


@dataclass(frozen=True)
class Onward(Around):
    r"""A linear solver that begins where the last systems of the same samples let expect the solution.

    With ``g`` expected, ``x = \alpha g + y`` where ``A y = b - \alpha A g`` and ``\alpha = <A g, b> / |A g|^2``, sample
    by sample: never more is left than ``b``, whatever ``g`` is worth, and a loss in other units (a scaled one) changes
    ``\alpha`` alone, since solutions are kept for ``|b| = 1``. What is asked of ``y`` is what is asked of ``x``, ``|A x -
    b| <= atol + rtol |b|``. One product more.

    Only the first system of a call that has one right-hand side is begun so, and kept: of a second derivative come others.
    Nor is one kept that took three products or fewer, as with factors.

    Shapes: as of any linear solver, ``b`` ``(batch, n)``.

    Args:
        inner: the solver. trend: what is known of the systems before. begun: one entry as soon as the call has had one.
    """

    trend: Trend
    begun: list[bool] = field(default_factory=list)

    def solve(self, A: Any, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        if self.begun or not self.exact or not b.numel():
            return self.inner.solve(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        self.begun.append(True)
        size = torch.linalg.vector_norm(b, dim=1)
        answer = self._onward(A, b, size, rtol, atol, max_steps)
        if answer is None:
            answer = self.inner.solve(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
            if int(answer.steps.amax()) <= _FEW:  # by factors, or as good as: there is nothing to be saved
                return answer
        self.trend.keep(answer.x / size.unsqueeze(1))
        return answer

    def _onward(
        self, A: Any, b: Tensor, size: Tensor, rtol: float, atol: float, max_steps: int | None
    ) -> LinearSolution | None:
        """The solution from the one expected on; ``None`` where there is none, or where squares of ``b`` leave the range."""
        g = self.trend.expected()
        if not isinstance(g, Tensor) or not _alike(g, b) or (max_steps is not None and max_steps < 2):
            return None
        low, high = (float(t) for t in size.aminmax())
        smallest = torch.finfo(b.dtype).tiny ** 0.25
        if not (low > smallest and high < 1 / smallest):  # NaN, too
            return None
        if not math.isfinite(float(g.sum())):
            g = torch.where(g.isfinite().all(1, keepdim=True), g, 0)
        product, unit = A.mv(g), size.unsqueeze(1)
        alpha = (_dot(product, b) / _dot(product, product)).nan_to_num_(0, 0, 0).unsqueeze(1)
        left = torch.addcmul(b, alpha, product, value=-1) / unit
        limits: dict[str, Any] = {"rtol": 0.0, "atol": rtol + atol / high}
        found = self.inner.solve(A, left, max_steps=None if max_steps is None else max_steps - 1, **limits)
        x = torch.addcmul(unit * found.x, alpha, g)
        return found._replace(x=x, residual_norm=size * found.residual_norm, steps=found.steps + 1)
