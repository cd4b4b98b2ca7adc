r"""What Anderson's method remembers: how ``r`` and ``w`` changed in each of the last steps, and the Gram matrix ``dR^T dR``.

Rows are written round and round; of a matrix that has lost digits the diagonal is raised, ``(1 + \lambda) (dR^T dR)_{ii}``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def slices_of(slots: list[int]) -> list[slice]:
    """Numbers that count down, but for a turn of the ring, as slices of numbers that count up."""
    pieces: list[slice] = []
    for slot in slots:
        if pieces and slot == pieces[-1].start - 1:
            pieces[-1] = slice(slot, pieces[-1].stop)
        else:
            pieces.append(slice(slot, slot + 1))
    return pieces


NOTHING: dict[str, Any] = {"dR": None, "dW": None, "gram": None}


def empty(z: Tensor, rows: int) -> dict[str, Tensor]:
    """An empty one: differences of ``r`` and of ``w``, each ``(batch, rows, n)`` with a row of all samples in one piece of
    memory, as it is written, and the Gram matrix of the former."""
    batch, n = z.shape
    small = torch.float32 if z.dtype in (torch.float16, torch.bfloat16) else z.dtype  # no LAPACK in half precision
    gram = torch.zeros(batch, rows, rows, dtype=small, device=z.device)
    dR, dW = (z.new_zeros(rows, batch, n).transpose(0, 1) for _ in range(2))
    return {"dR": dR, "dW": dW, "gram": gram}


def remember(state: dict[str, Any], row: int, now: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> None:
    """Writes how ``r`` and ``w`` changed into a row of every sample's memory."""
    torch.sub(now[0], old[0], out=state["dR"].select(1, row))
    torch.sub(now[1], old[1], out=state["dW"].select(1, row))


def raised(gram: Tensor, memory: int, ridge: float | None) -> Tensor:
    """A Gram matrix with the ridge on its diagonal; an empty column keeps a pivot."""
    floor, factor = _ridge(gram.shape[1], memory, ridge, gram.dtype, gram.device)
    return torch.addcmul(floor, gram, factor)


@functools.lru_cache(maxsize=128)
def _ridge(size: int, memory: int, ridge: float | None, dtype: torch.dtype, device: torch.device) -> Any:
    """What is added to the Gram matrix, and what it is multiplied by, entry by entry."""
    relative = 10 * memory * torch.finfo(dtype).eps if ridge is None else ridge
    eye = torch.eye(size, dtype=dtype, device=device)
    return torch.finfo(dtype).tiny * eye, 1 + relative * eye
