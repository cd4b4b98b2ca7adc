"""The derivative-free spectral residual method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.region import taken_where
from implicitkit.solver.steps.restarts import in_vain

_GAMMA, _SHORTEST, _LONGEST = 1e-4, 0.1, 0.5  # of the line search


@register_solver("df_sane", solves="root")
@dataclass(frozen=True)
class DFSANE(Method):
    r"""``z <- z -/+ alpha sigma F(z)`` with the spectral (Barzilai-Borwein) step and a non-monotone line search.

    ``sigma_k = s^T s / s^T y`` with ``s = z_k - z_{k-1}``, ``y = F_k - F_{k-1}``; both signs of the direction are tried,
    and a trial is accepted when, with ``phi = |F|^2``,

        phi(trial) <= max(phi of the last ``memory`` points) + phi_0 / (1 + k)^2 - 1e-4 alpha^2 phi_k

    (La Cruz, Martínez & Raydan 2006, Math. Comp. 75, algorithm 2.1; steps are cut by quadratic interpolation within
    [0.1, 0.5]).  No derivative of ``F`` is used; two evaluations a trial at most; memory ``O(batch n)``.

    Args:
        memory: points the search looks back on. cuts: of a step, at most; a sample with no acceptable step is given up,
            as is one whose residual 200 steps have not lowered.

    Raises:
        ValueError: an option out of range.
    """

    memory: int = 10
    cuts: int = 30
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(self, memory=at_least(1), cuts=at_least(1))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        phi = f(z).square().sum(1)
        return {
            "history": phi.unsqueeze(1).repeat(1, self.memory),
            "start": phi,
            "last_z": None,
            "last_F": None,
            "step": 0,
            "idle": {},
        }

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        residual, k = f(z), state["step"]
        phi = residual.square().sum(1)
        history = state["history"].clone()
        history[:, k % self.memory] = phi
        sigma = torch.ones_like(phi) if k == 0 else _spectral(z - state["last_z"], residual - state["last_F"], phi)
        d = -sigma.unsqueeze(1) * residual
        bound = history.amax(1) + state["start"] / (1 + k) ** 2
        z_next, found = z, torch.zeros_like(f.active)
        lengths = [torch.ones_like(phi), torch.ones_like(phi)]  # of the two signs
        for _ in range(self.cuts):
            for i, sign in enumerate((1, -1)):
                alpha = lengths[i]
                trial = taken_where(f.active & ~found, torch.addcmul(z, sign * alpha.unsqueeze(1), d), z_next)
                trial_phi = f(trial).square().sum(1)
                accept = f.active & ~found & (trial_phi <= bound - _GAMMA * alpha**2 * phi)
                z_next = taken_where(accept, trial, z_next)
                found = found | accept
                cut = (alpha * phi / (trial_phi / alpha + (2 - 1 / alpha) * phi)).nan_to_num(nan=0.0, posinf=0.0)
                lengths[i] = torch.clamp(cut, min=_SHORTEST * alpha, max=_LONGEST * alpha)
                if bool((found | ~f.active).all()):
                    break
            else:
                continue
            break
        spent, idle = in_vain(f, state["idle"])
        f.stuck = f.active & ~found if spent is None else spent | (f.active & ~found)
        return z_next, {
            "history": history,
            "start": state["start"],
            "last_z": z,
            "last_F": residual,
            "step": k + 1,
            "idle": idle,
        }


def _spectral(s: Tensor, y: Tensor, phi: Tensor) -> Tensor:
    """``s^T s / s^T y``, replaced where it is not within ``[1e-10, 1e10]`` in size by a step of moderate length."""
    sigma = s.square().sum(1) / (s * y).sum(1)
    norm = phi.sqrt()
    moderate = torch.where(norm > 1, 1.0, torch.where(norm < 1e-5, 1e5, 1 / norm))
    sound = (sigma.abs() >= 1e-10) & (sigma.abs() <= 1e10)
    return torch.where(sound, sigma, moderate.to(sigma))
