"""When a sample has converged: ``|F| <= atol + rtol * scale``."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.base import Options
from implicitkit.solver.evaluations import Evaluations

__all__ = ["Judge"]


class Judge:
    """Says of each sample whether ``|F| <= atol + rtol * scale``: scale is ``|z|`` for fixed points, else ``|F(z0)|``."""

    def __init__(self, f: Evaluations, options: Options) -> None:
        self.rtol, self.atol = options.rtol, options.atol
        self.relative_to_state = f.kind.iteration
        self.start_norm = options.start_norm
        self.bound: Tensor | None = None

    def norm(self, residual: Tensor) -> Tensor:
        """``|F|_2`` of each sample, ``(batch,)``."""
        if residual.dtype in (torch.float16, torch.bfloat16):
            residual = residual.float()
        return torch.linalg.vector_norm(residual, dim=1)

    def tolerance(self, z: Tensor, norm: Tensor) -> Tensor:
        """What ``|F|`` must come down to, ``(batch,)``; ``norm``: that at the start, used once."""
        if self.relative_to_state:
            bound = self.norm(z).mul_(self.rtol)
            return bound.add_(self.atol) if self.atol else bound
        if self.bound is None:
            norm = norm if self.start_norm is None else self.start_norm
            self.bound = torch.where(torch.isfinite(norm), norm * self.rtol, 0).add_(self.atol)
        return self.bound

    def select(self, samples: Tensor) -> None:
        """Only these samples are left."""
        if self.bound is not None:
            self.bound = self.bound.index_select(0, samples)
