"""Random numbers, matrices and operators that tests of several rooms begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are the same in every run; the generator of torch is not touched."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operator(M: Tensor, **flags: bool) -> Operator:
    """The matrices ``(batch, n, n)`` as an operator."""
    return Operator(
        lambda v: torch.einsum("bij,bj->bi", M, v),
        lambda w: torch.einsum("bij,bi->bj", M, w),
        lambda: M,
        batch=M.shape[0],
        size=M.shape[1],
        like=M[:, :, 0],
        **flags,
    )


def with_eigenvalues(n: int, inner: float, outer: list[float], seed: int = 0) -> Tensor:
    """A matrix ``(n, n)`` with the eigenvalues ``outer``, the others in a disk of radius ``inner``; near to normal."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
    core = torch.randn(n, n, generator=g, dtype=torch.float64)
    core *= inner / torch.linalg.eigvals(core).abs().max()
    k = len(outer)
    core[:k], core[:, :k] = 0, 0
    core[:k, :k] = torch.diag(torch.tensor(outer, dtype=torch.float64))
    return Q @ core @ Q.mT
