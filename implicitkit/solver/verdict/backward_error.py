r"""The backward error: how large is ``F_i`` beside the size ``S_i`` of what cancels in it near ``z``?

Rigal & Gaches (1967); Higham, *Accuracy and Stability of Numerical Algorithms* (2nd ed., 2002), section 7.1: a point solves
equations that differ from the given ones by the share ``max_i |F_i| / S_i`` of their terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import change, directions, in_working_precision
from implicitkit.solver.verdict.rounding_level import NOISE, rounding

_PART = 1e-6  # a part of a composition is judged by its own size, or this share of the whole
_SHARE = 1e-16  # of max |z|, what z_j counts for at least: unknowns may have units of their own
_FEW = 3  # sign vectors, along which is asked first what cancels
_MANY = 8  # unknowns, from which it may be asked along more
_RULER = (0, 1, 4, 9, 15, 22, 32, 34)  # Golomb's, of which no two distances are equal: shares of unknowns so few
_CHANCE = 4.0  # times 2^-k: two equal signs in k vectors, of which the first is that of z, and twice as many
_STEP, _CANCELLED = 1.5, 100.0  # times what it may be, an F_i that a step more serves, and one of which terms cancel
_HEALTHY = 1e-6  # of its change with z: |F| near a zero; on the way to infinity exp(-z^p) is 1 / (745 p) of it and more
_HEALTHY_LOW = 3e-4  # ... in lower precisions, 1 / (103 p)


def backward_error(
    f: Evaluations,
    z: Tensor,
    which: Tensor,
    rtol: float | Tensor,
    floor: float | Tensor,
    began: Tensor | None,
    *,
    careful: bool,
    noise: bool,
    worst: Callable[[Tensor], Tensor],
) -> Tensor:
    """``|F_i| / (floor + rtol S_i)``, below 1 where ``F`` is nothing but rounding errors (asked if ``noise``), and whether
    every ``F_i`` is far below ``S_i``, or accepted as rounding; ``(batch, 2)``.

    Args:
        which: ``(batch,)``, the samples. floor: ``(batch, n)`` where it is a tensor. began: ``|z|`` at the start.
        careful: as in :func:`row_scales`. worst: ``(batch, n) -> (batch,)``, of the equations'.
    """
    F = in_working_precision(f.residual(z)).abs()
    scale = row_scales(f, z, which, rtol, floor, careful, began, both_sides=f.kind.returns_program)
    bound = floor + rtol * scale
    found = worst(_ratio(F, bound))
    refused, healthy = which & (found > 1), is_healthy(F, scale)
    if noise and bool(refused.any()):
        least = worst(_ratio(F, torch.maximum(bound, NOISE * rounding(f, z, refused, began, careful))))
        found = torch.where(least <= 1, least, found)
        healthy = healthy | (refused & (least <= 1))
    return torch.stack([found, healthy.to(found)], 1)


def _ratio(value: Tensor, bound: Tensor) -> Tensor:
    return torch.where(value > 0, value / bound, 0)


def by_pieces(
    F: Tensor,
    z: Tensor,
    pieces: tuple[int, ...],
    norm: Callable[[Tensor], Tensor],
    whole: Tensor,
    size: Tensor,
    floor: float | Tensor,
    rtol: float,
) -> Tensor:
    """``|F|`` (``whole``) over the largest excess of a part, ``(batch,)``: a composition holds where every part of it does.

    Args:
        pieces: unknowns of each part. norm: of a part. size: ``|z|``. floor, rtol: what ``|F|`` of a part may be.
    """
    worst = torch.zeros_like(whole)
    for residual, part in zip(F.split(pieces, 1), z.split(pieces, 1), strict=True):
        F_norm = norm(residual)
        ratio = F_norm / (floor + rtol * torch.maximum(norm(part), _PART * size))
        worst = torch.maximum(worst, torch.where(F_norm > 0, ratio, 0))
    return torch.where(worst > 0, whole / worst, torch.inf)


def row_scales(
    f: Evaluations,
    z: Tensor,
    which: Tensor,
    good: float | Tensor,
    atol: float | Tensor,
    careful: bool,
    began: Tensor | None = None,
    both_sides: bool = False,
) -> Tensor:
    """The size of what cancels in each ``F_i`` near ``z``, ``S_i = max_k |(J w_k)_i|``, ``(batch, n)``.

    Stops as soon as ``|F_i| <= atol + good S_i`` for all samples ``which``: one evaluation then.  Two terms of an ``F_i``
    (``(z_{i+1} - z_i) / h``) cancel along every second ``w_k``: of more than 8 unknowns it is asked along ``3 + 2 log_2 n``
    (all miss one of ``n`` with probability ``1 / (4 n)``), for as long as no more than four times as many are refused as by
    chance (of those refused at first; of all, where the look is ``careful``).  Not where a step more costs less: some
    ``F_i`` is too large by more than a half, and none a hundred times too large, as where all that was seen of it had
    cancelled; after a ``careful`` look there is no step.  Of 3 to 8, along one more, in which each ``z_j`` moves by another
    share of itself, and neither first nor second differences stay as they are.

    Args:
        careful: the smaller change to both sides counts, since of a jump one side may see nothing, and none that is as large
            over a sixteenth of the way. both_sides: the former, of natural maps, which beyond a bound change as ``z`` does.
        began: ``|z|`` at the start, ``(batch, n)``: no ``z_j`` moves by more than itself and that for the sake of others
            that are larger by sixteen orders of magnitude: its units are others.
    """
    F = in_working_precision(f.residual(z))
    scale, h, first = torch.zeros_like(F), f.eps**0.5, 0
    for asked, direction in enumerate(_ways(z, began), 1):
        size = change(f, z, F, direction, h)
        if careful or both_sides:
            size = torch.minimum(size, change(f, z, F, direction, -h))
        if careful:
            size = torch.where(change(f, z, F, direction, h / 16) > 4 * size, 0, size)
        scale = torch.maximum(scale, size)
        most = atol + good * scale
        refused = int(((F.abs() > most) & which.unsqueeze(1)).count_nonzero())
        first = F.numel() if careful else min(F.numel(), 2 * refused) if asked == 1 else first
        if not refused or (asked >= _FEW and refused > 1 + _CHANCE * first * 2.0**-asked):
            break
        if asked >= _FEW and not careful and _takes_a_step(F.abs()[which], (most + torch.zeros_like(F))[which]):
            break
    return scale


def _takes_a_step(size: Tensor, most: Tensor) -> bool:
    """Is some ``F_i`` so much too large that a step is needed, and none so much that its terms have cancelled?"""
    return bool((size > _STEP * most).any()) and not bool((size > _CANCELLED * most).any())


def _ways(z: Tensor, began: Tensor | None) -> Iterator[Tensor]:
    """The directions of :func:`row_scales`, in order."""
    yield from directions(z, share=_SHARE, most=_FEW, began=began)
    n = z.shape[1]
    if n > _MANY:
        yield from directions(z, share=_SHARE, most=_FEW + 2 * math.ceil(math.log2(n)), began=began)[_FEW:]
    elif n > 2:
        marks = torch.tensor(_RULER[:n], device=z.device).to(z)
        yield directions(z, share=_SHARE, most=1, began=began)[0] * (2 * marks / marks[-1] - 1)


def is_healthy(F: Tensor, scale: Tensor) -> Tensor:
    """Where every ``F_i`` is far smaller than its change with ``z``, as near a zero, ``(batch,)``."""
    return (F.abs() <= healthy_share(F) * scale).all(1)


def healthy_share(F: Tensor) -> float:
    """How much ``|F_i|`` may be near a zero, of its change with ``z``."""
    return _HEALTHY if F.dtype == torch.float64 else _HEALTHY_LOW
