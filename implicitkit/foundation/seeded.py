"""Random numbers that are the same in every run, and nobody's else: the generator of torch is not touched.

They are NumPy's, since torch draws none while it batches gradients (``is_grads_batched=True``), and a solve may run there:
the recomputation of a checkpointed function does.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["normal", "signs", "uniform"]


def normal(*shape: int, seed: int) -> Tensor:
    """Independent standard normal numbers, float64."""
    return torch.from_numpy(_generator(seed).standard_normal(shape))


def uniform(*shape: int, seed: int) -> Tensor:
    """Independent numbers uniform in ``[0, 1)``, float64."""
    return torch.from_numpy(_generator(seed).random(shape))


def signs(*shape: int, seed: int) -> Tensor:
    """Independent signs, ``-1`` or ``1``, as integers."""
    return torch.from_numpy(2 * _generator(seed).integers(0, 2, shape) - 1)


def _generator(seed: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.random.default_rng(seed)
