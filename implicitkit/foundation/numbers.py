"""The numbers of a tensor, for libraries that know no tensors, the largest of them, and what complex ones consist of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat


def numbers(t: Tensor) -> np.ndarray:
    """``t`` in double precision on the host, whatever transforms surround it; what ``torch.vmap`` maps over stays where it
    is stored."""
    inner = compat.physical(t.to(device="cpu", dtype=torch.float64))
    with compat.at_level_of(inner):
        array: np.ndarray = inner.detach().numpy()
    return array


def array(t: Tensor) -> np.ndarray:
    """A plain tensor in double precision on the host; below all transforms, where solvers run."""
    found: np.ndarray = t.detach().to(device="cpu", dtype=torch.float64).numpy()
    return found


def largest(t: Tensor) -> float:
    """The largest entry, under ``torch.vmap`` of all that are mapped over; NaN if there is one."""
    return float(compat.batches_in_front(t)[0].max())


def largest_moduli(x: Tensor) -> Tensor:
    """``max |x|`` of each sample, 0 of nothing, ``(batch, k) -> (batch,)``."""
    return x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))


def real_parts(leaf: Tensor) -> Tensor:
    """Real and imaginary parts of complex numbers, in one more dimension; real ones as they are."""
    if not leaf.is_complex():
        return leaf
    leaf = leaf.resolve_conj()  # of one that is not resolved, vmap does not know the imaginary part
    return torch.stack((leaf.real, leaf.imag), -1)
