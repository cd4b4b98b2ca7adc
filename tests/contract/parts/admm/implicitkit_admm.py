"""A QP solver from a plugin: the alternating direction method of multipliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import implicitkit as ik


@ik.register_solver("plugin_admm", solves="quadratic_program")
@dataclass(frozen=True)
class ADMM(ik.extend.QPSolver):
    """``min z'Pz/2 + q'z`` with ``Cz = s``, ``s`` in a box (Boyd et al. 2011, section 5.2).

    Args:
        rho: the penalty. steps: of the iteration.
    """

    rho: float = 1.0
    steps: int = 4000

    def find(self, data: ik.extend.QPData, tol: float, max_steps: int) -> ik.extend.QPPoint:
        P, q, A, b, G, h = data
        batch, n = q.shape
        C, equalities = torch.cat([A, G], 1), b.shape[1]
        K = P + self.rho * C.mT @ C + 1e-9 * torch.eye(n, dtype=P.dtype)
        factor = ik.linear.factor_batched(K)
        s = u = q.new_zeros(batch, C.shape[1])
        for _ in range(self.steps):
            z = factor.solve(self.rho * (C.mT @ (s - u).unsqueeze(2)).squeeze(2) - q)
            v = (C @ z.unsqueeze(2)).squeeze(2) + u
            s = torch.cat([b, v[:, equalities:].minimum(h)], 1)
            u = v - s
        y = self.rho * u
        done = torch.zeros(batch, dtype=torch.int64)
        return ik.extend.QPPoint(z, y[:, :equalities], y[:, equalities:].clamp_min(0), done, done + self.steps)
