"""By how much a residual exceeds what is asked of it near a point."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.rounding_level import NOISE, in_working_precision, is_healthy, rounding, row_scales

_PART = 1e-6  # a part of a composition is judged by its own size, or this share of the whole


def excess(
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
        careful: as in :func:`~implicitkit.solver.verdict.rounding_level.row_scales`. worst: ``(batch, n) -> (batch,)``, of the
            equations'.
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
