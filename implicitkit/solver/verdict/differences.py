r"""How ``F`` changes beside a point: what every other question of a verdict is answered by.

``F`` is evaluated at ``z + h w_k``, ``w_k = s_k (|z| + c max |z|)``, for a few sign vectors ``s_k``: of a scale one digit is
enough, and a difference of ``F`` asks less of the user's function than its derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solver.evaluations import Evaluations

FLOOR = 1e-6  # of the largest: smaller components count as if they were so large
_DOUBLES = 1.9  # of a change, how much it grows at least where the way is twice as long
_MOVE, _MANY = 1e-2, 10  # of z, by which it moves for a size nearby; and directions of many equations, at most
SOUND = 1e-3  # of its change with z, a residual near a solution; of z, a correction there


def in_working_precision(t: Tensor) -> Tensor:
    """float16 and bfloat16 as float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def directions(
    z: Tensor, least: float = 0.0, most: int = 3, share: float = FLOOR, began: Tensor | None = None
) -> list[Tensor]:
    """``s_k (|z| + c max |z|)``, ``(batch, n)`` each, ``most`` of them: along ``z``, and with other signs; of size ``least``
    where ``z`` vanishes beside that.  ``share``: ``c``.  ``began``: more than ``c max |z|`` is not asked of it, where it is
    not zero."""
    n = z.shape[1]
    lift = share * z.abs().amax(1, keepdim=True)
    size = z.abs() + (lift if began is None else torch.where(began > 0, torch.minimum(began, lift), lift))
    if least:
        tiny = size.amax(1, keepdim=True) < torch.finfo(z.dtype).eps ** 0.5 * least
        size = torch.where(tiny, least, size)
    own = torch.where(z < 0, -size, size)
    if n == 1:
        return [own, -own][:most]
    flips = torch.tensor([[1, -1], [-1, 1]], device="cpu") if n == 2 else seeded.signs(max(2, most - 1), n, seed=n)
    return [own, *(own * flip.to(own) for flip in flips[: most - 1])]


def uneven(z: Tensor) -> list[Tensor]:
    """Two ways to move, ``(batch, n)`` each: along ``z``, and each ``z_j`` by another share of itself, in either direction;
    along half of those by whole ``z_j``, with other signs, two terms cancel."""
    n = z.shape[1]
    if n <= 2:
        return directions(z, most=2)
    own = directions(z, most=1)[0]
    return [own, own * (2 * seeded.uniform(1, n, seed=n) - 1).to(own)]


def own_units(z: Tensor) -> Tensor:
    """``max(|z_j|, 1e-6 max |z|)``, ``(batch, n)``: what each unknown is measured in."""
    return torch.maximum(z.abs(), FLOOR * z.abs().amax(1, keepdim=True))


def row_norm(t: Tensor) -> Tensor:
    """The 2-norm of each row, ``(batch,)``, in working precision."""
    return torch.linalg.vector_norm(in_working_precision(t), dim=1)


def change(f: Evaluations, z: Tensor, F: Tensor, direction: Tensor, h: float) -> Tensor:
    """``|F(z + h w) - F(z)| / |h|``, ``(batch, n)``; zero where that is not finite."""
    change = in_working_precision(f.residual(z + h * direction)) - F
    return torch.nan_to_num(change.abs() / abs(h), nan=0.0, posinf=0.0)


def doubling(f: Evaluations, z: Tensor, F: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``F_i`` changes by twice as much when ``z`` moves twice as far, and again, ``(batch, n)``; and how it changes
    when ``z`` moves once, twice and four times as far as ``move``, ``(3, batch, n)``."""
    side = torch.stack([in_working_precision(f.residual(z + k * move)) - F for k in (1, 2, 4)])
    return ((side[1:].abs() >= _DOUBLES * side[:-1].abs()) & (side[:-1] != 0)).all(0), side


def steepness(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """How much ``F`` changes with ``z`` as a whole, ``|J w_2|``, ``(batch,)``; one evaluation."""
    F, h = in_working_precision(f.residual(z)), f.eps**0.5
    return torch.linalg.vector_norm(change(f, z, F, directions(z, most=2)[-1], h), dim=1)


def size_nearby(f: Evaluations, z: Tensor, F: Tensor, w: Tensor, rows: Tensor, careful: bool = False) -> Tensor:
    """By how much each ``F_i`` changes when ``z`` moves by a hundredth of ``|w|``, to and fro, times a hundred.

    Along two directions, and on until every equation of ``rows`` has changed, beside what the others have or by far more
    than it is, or if ``careful`` until their samples can be trusted; along ten at most: two terms that cancel at ``z`` do so
    along half of them, and a second difference of what lies on a line is zero, or rounding, along a quarter.
    """
    size, which = torch.zeros_like(F), rows.any(1)
    for count, direction in enumerate(directions(w.to(z.dtype), most=_MANY), start=1):
        there, back = (change(f, z, F, direction, sign * _MOVE) for sign in (1.0, -1.0))
        size = torch.maximum(size, torch.minimum(there, back))
        if careful:
            enough = bool((((F.abs() <= SOUND * size).all(1) & (size > 0).any(1)) | ~which).all())
        else:
            least = torch.finfo(F.dtype).eps ** 0.5 * size.amax(1, keepdim=True)
            moved = (size > least) | ((F.abs() <= SOUND * size) & (size > 0))
            enough = count > 1 and bool((moved | ~rows).all())
        if enough:
            break
    return size


def both_changes(f: Evaluations, z: Tensor, F: Tensor, w: Tensor, h: float) -> Tensor:
    """The larger change of each ``F_i`` to both sides of ``z``, over ``h w``, divided by ``h``, ``(batch, n)``."""
    return torch.maximum(change(f, z, F, w, h), change(f, z, F, w, -h))
