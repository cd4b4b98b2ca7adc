"""The filter of a line search: pairs of violation and objective that no later iterate may be worse than in both.

Sources: Fletcher & Leyffer (2002), Math. Prog. 91; Wächter & Biegler (2006), Math. Prog. 106, section 2.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_THETA, _PHI = 1e-5, 1e-8  # gamma_theta, gamma_phi
_SWITCH_THETA, _SWITCH_PHI = 1.1, 2.3  # s_theta, s_phi
_ARMIJO = 1e-4
_NOISE = 10.0  # units of rounding of the objective
_SMALL, _LARGE = 1e-4, 1e4  # theta_min and theta_max, of the first violation or 1


class Standing(NamedTuple):
    """Violation and objective of an iterate, and the derivative of the objective along the step; ``(batch,)`` each."""

    theta: Tensor
    phi: Tensor
    slope: Tensor


class Filter(NamedTuple):
    """Pairs ``(batch, k, 2)``, infinite where there is none, and the violations from which on the objective is not looked
    at, and that no iterate may have, ``(batch,)``."""

    pairs: Tensor
    least: Tensor
    most: Tensor

    @classmethod
    def empty(cls, theta: Tensor) -> Filter:
        """A filter without entries, for iterates that begin with this violation."""
        size = theta.clamp_min(1)
        return cls(theta.new_full((len(theta), 1, 2), torch.inf), _SMALL * size, _LARGE * size)

    def cleared(self, which: Tensor) -> Filter:
        """Without the pairs of these samples: their objective is another."""
        return self._replace(pairs=torch.where(which[:, None, None], torch.inf, self.pairs))

    def with_pair(self, which: Tensor, at: Standing) -> Filter:
        """With the pairs of these samples' iterates."""
        if not bool(which.any()):
            return self
        pair = torch.stack([(1 - _THETA) * at.theta, at.phi - _PHI * at.theta], 1)
        pair = torch.where(which.unsqueeze(1), pair, torch.inf).unsqueeze(1)
        known = self.pairs if bool(self.pairs.isfinite().any()) else self.pairs[:, :0]
        return self._replace(pairs=torch.cat([known, pair], 1))

    def allows(self, theta: Tensor, phi: Tensor) -> Tensor:
        """Is an iterate like this not worse than any of the pairs?  NaN is."""
        better = (theta.unsqueeze(1) < self.pairs[:, :, 0]) | (phi.unsqueeze(1) < self.pairs[:, :, 1])
        return better.all(1) & (theta <= self.most) & phi.isfinite()

    def accepts(self, at: Standing, theta: Tensor, phi: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Is a step of ``t`` good that leads to this violation and objective, and is that because the objective falls as its
        derivative says (equations 18 to 20 there)?"""
        noise = _NOISE * torch.finfo(phi.dtype).eps * at.phi.abs()
        falling = (at.slope < 0) & (at.theta <= self.least)
        falling = falling & (t * (-at.slope).clamp_min(0) ** _SWITCH_PHI > at.theta**_SWITCH_THETA)
        descends = phi <= at.phi + _ARMIJO * t * at.slope + noise
        either = (theta <= (1 - _THETA) * at.theta) | (phi <= at.phi - _PHI * at.theta + noise)
        good = torch.where(falling, descends, either) & self.allows(theta, phi)
        return good, good & falling
