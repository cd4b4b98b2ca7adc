"""An approximate backward for free: the forward solver's own estimate of the inverse Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik


@ik.register_rule("shine")
@dataclass(frozen=True)
class Shine(ik.Rule):
    r"""**Approximate.** ``(I - J)^{-1}`` replaced by Broyden's estimate ``-B`` (SHINE: Ramzi et al. 2022, arXiv 2106.00553).

    For the adjoint ``A^T u = g`` (``A = J - I``): ``u = B^T g`` in place of a linear solve.  The estimate has seen only the
    directions that the forward solve took; it may be good to some digits or point uphill.  So its residual is measured, for
    each sample, beside that of the Jacobian-free ``u = -g`` (:class:`ik.OneStep`), and the better one is taken (the paper's
    fallback): two or three products with the Jacobian instead of a solve, and the residual is in ``solution.backward``.

        layer = DEQ(cell, (64,), solver=ik.Broyden(keep_inverse=True), rule=Shine())

    Raises (when called):
        ik.CapabilityError: the solver keeps no estimate.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)
    exact: ClassVar[bool] = False

    def attach(self, request: Any) -> tuple[Tensor, Tensor | None]:
        if not getattr(request.solver, "keep_inverse", False):
            name = getattr(request.solver, "name", type(request.solver).__name__)
            raise ik.CapabilityError(
                f"rule 'shine' reuses the estimate of the inverse Jacobian that Broyden's method leaves, and {name!r} "
                "keeps none: use solver=ik.Broyden(keep_inverse=True)"
            )
        return request.solve(_Estimate(request), rtol=0.0, atol=0.0, max_steps=None)


@dataclass(frozen=True)
class _Estimate(ik.LinearSolver):
    """The best, sample by sample, of ``B^T b``, ``B b`` (one of them belongs to ``A``, the other to its transpose) and
    ``-b``, by their residuals."""

    request: Any
    name: ClassVar[str] = "shine"
    exact: ClassVar[bool] = False

    def solve(
        self, A: ik.extend.Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None
    ) -> ik.extend.LinearSolution:
        candidates = [-b]
        kept = self.request.kept
        if kept:  # no step was taken: nothing was learnt
            copies = len(b) // len(kept["scale"])  # several directions at once
            tensors = {k: v if copies == 1 else v.repeat(copies, *[1] * (v.ndim - 1)) for k, v in kept.items()}
            estimate = ik.linear.InverseEstimate(**tensors)
            candidates += [estimate.rmv(b), estimate.mv(b)]
        residuals = torch.stack([torch.linalg.vector_norm(A.mv(x) - b, dim=1) for x in candidates])
        norm, best = torch.nan_to_num(residuals, nan=torch.inf).min(0)
        x = torch.stack(candidates)[best, torch.arange(len(b), device=b.device)]
        steps = torch.full((len(b),), len(candidates), dtype=torch.int64, device=b.device)
        return ik.extend.LinearSolution(x, norm, steps, torch.isfinite(norm))
