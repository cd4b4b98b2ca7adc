"""The line search of the Newton methods: monotone halving, and full steps where that crawls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.factored import is_noise
from implicitkit.solver.steps.region import at_work_only

_DECREASE = 1e-4  # of |F|, relative, that a full step must bring
_WEAK = 0.99  # a step that leaves more than this of |F| is weak
_FULL_STEPS = 50
_AGAIN = 3  # weak steps in a row, of a length that rounding has, that need no more
_SHORT = 0.1  # times sqrt(eps): the length of such a step, relative to every unknown


class Damped(NamedTuple):
    """A step: the points, the factors ``t`` ``(batch,)``, and how many weak steps in a row (``None``: none anywhere)."""

    z: Tensor
    t: Tensor
    weak: Tensor | None


def damped_step(
    f: Evaluations,
    z: Tensor,
    d: Tensor,
    norm: Tensor,
    weak: Tensor | None,
    halvings: int,
    patience: int,
    blocks: Any = None,
) -> Damped:
    """A step along ``d`` by :func:`halve`; after ``patience`` weak steps in a row (``|F|`` hardly lowered) full steps.

    Monotone descent on ``|F|`` gets caught where ``|F|`` is stationary and the Jacobian singular, while undamped Newton
    steps jump off; on most other problems damping is what makes Newton's method work.  The driver keeps the best
    iterate whichever it is.  Full steps are cut only where ``F`` is not finite; a sample that 50 of them have not brought
    home is given up (``f.stuck``), and so is one whose steps change no unknown by more than a tenth of ``sqrt(eps)``, if
    they are exact or full: there the next one squares what is left, unless that is rounding; or which has no direction
    at all.  Exact steps that lead nowhere, however often they are halved, are followed by the very same: one is enough where
    it is so short, or where rounding is all that is left of ``F``.

    Args:
        f, z, d, norm, halvings: as for :func:`halve`. weak: from the step before. patience: at least 0.
        blocks: factors of the ``J`` of this point, where ``J d = -F`` holds to rounding.
    """
    bound = norm if weak is None else torch.where(weak > patience, torch.inf, norm)
    z_next, t, norm_next = halve(f, z, d, bound, halvings)
    fast = norm_next.le(norm.mul(_WEAK))
    if weak is None and bool(fast.all()):
        return Damped(z_next, t, None)
    slow = ~fast
    if weak is None:
        if not bool((slow & f.active).any()):
            return Damped(z_next, t, None)
        f.stuck = (d == 0).all(1)  # no direction (a Jacobian that is not finite has none): nor will there be one
        f.stuck = f.stuck | _stays(f, z, d, z_next, slow, blocks)
        return Damped(z_next, t, slow.long())
    weak = torch.where(slow | (weak > patience), weak + 1, 0)
    f.stuck = (weak > patience + _FULL_STEPS) | (d == 0).all(1)
    waiting = f.active & (weak >= (patience + 2 if blocks is None else _AGAIN))
    if bool(waiting.any()):
        f.stuck = f.stuck | (waiting & is_short(d, z))
    f.stuck = f.stuck | _stays(f, z, d, z_next, slow & ~f.stuck, blocks)
    return Damped(z_next, t, weak)


def _stays(f: Evaluations, z: Tensor, d: Tensor, z_next: Tensor, which: Tensor, blocks: Any) -> Tensor:
    """Where an exact step ``d`` has led nowhere, and is short or made of rounding: so will the next one be, ``(batch,)``."""
    stays = which & f.active & (z_next == z).all(1)
    if blocks is None or not bool(stays.any()):
        return torch.zeros_like(which)
    return stays & (is_short(d, z) | is_noise(blocks, z, f.norm.to(z.dtype), f(z_next)))


def is_short(d: Tensor, z: Tensor) -> Tensor:
    """Where a step changes every unknown by as little as rounding may, ``(batch,)``; one that vanishes beside the others
    by a unit in the last place of theirs."""
    eps, size = torch.finfo(z.dtype).eps, z.abs()
    least = eps * size.amax(1, keepdim=True)
    return (d.abs() <= torch.maximum(_SHORT * eps**0.5 * size, least)).all(1)


def halve(f: Evaluations, z: Tensor, d: Tensor, norm: Tensor, halvings: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first of ``t = 1, 1/2, 1/4, ...`` with ``|F(z + t d)| < (1 - 1e-4 t) |F(z)|``, sample by sample.

    (Deuflhard 2011, *Newton Methods for Nonlinear Problems*, section 3.1; Kelley 1995, eq. 8.1.)  A trial that is not
    finite counts as too long.  Where no ``t`` down to ``2^-halvings`` will do, it is the best of those tried.

    Args:
        f: the residual. z, d: point and direction ``(batch, n)``.
        norm: ``|F(z)|``, ``(batch,)``; Inf for a sample whose next point only has to be finite.
        halvings: how often at most.

    Returns:
        ``z + t d``, where ``f`` has been evaluated last; ``t``; and ``|F|`` there.
    """
    d = at_work_only(f, d)
    trial = z + d
    trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
    t = torch.ones_like(norm)
    falls = trial_norm.lt(norm.mul(1 - _DECREASE))
    if bool(falls.all()):  # as nearly always
        return trial, t, trial_norm
    searching = f.active & ~falls & (trial != z).any(1)
    if not bool(searching.any()):
        return trial, t, trial_norm
    best_t, best_norm = t, torch.where(searching & ~(trial_norm < torch.inf), torch.inf, trial_norm)
    for _ in range(halvings):
        t = torch.where(searching, 0.5 * t, best_t)
        trial = torch.addcmul(z, t.unsqueeze(1), d)
        trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
        better = searching & (trial_norm < best_norm)
        best_t, best_norm = torch.where(better, t, best_t), torch.where(better, trial_norm, best_norm)
        # a step so short that it leads nowhere is followed by no other
        searching = searching & ~(trial_norm < (1 - _DECREASE * t) * norm) & (trial != z).any(1)
        if not bool(searching.any()):
            break
    if not bool((t == best_t).all()):
        trial = torch.addcmul(z, best_t.unsqueeze(1), d)
    return trial, best_t, best_norm
