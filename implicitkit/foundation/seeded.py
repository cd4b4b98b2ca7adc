"""Random numbers that are the same in every run, and nobody's else: the generator of torch is not touched.

They are NumPy's, since torch draws none while it batches gradients (``is_grads_batched=True``), and a solve may run there:
the recomputation of a checkpointed function does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

_FEW = 4096  # numbers that are remembered


def normal(*shape: int, seed: int) -> Tensor:
    """Independent standard normal numbers, float64."""
    return _drawn("standard_normal", shape, seed)


def uniform(*shape: int, seed: int) -> Tensor:
    """Independent numbers uniform in ``[0, 1)``, float64."""
    return _drawn("random", shape, seed)


def signs(*shape: int, seed: int) -> Tensor:
    """Independent signs, ``-1`` or ``1``, as integers."""
    return torch.from_numpy(2 * _generator(seed).integers(0, 2, shape) - 1)


def _drawn(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A few numbers are remembered: a generator takes longer than some thousands of them."""
    drawn = _remembered if math.prod(shape) <= _FEW else _draw
    return torch.from_numpy(drawn(kind, shape, seed).copy())


def _draw(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    return getattr(_generator(seed), kind)(shape)


_remembered = functools.lru_cache(maxsize=64)(_draw)


def _generator(seed: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.random.default_rng(seed)
