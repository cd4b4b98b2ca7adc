"""Who has been asked at a point whether he runs away: nobody is asked there twice."""

from __future__ import annotations

import torch
from torch import Tensor


class Asked:
    """What is known at one point, which is remembered by identity.

    Attributes:
        point: ``(batch, n)``. which: the samples that have been asked there, ``(batch,)``. away: which of them run away.
    """

    def __init__(self) -> None:
        self.point: Tensor | None = None
        self.which = self.away = torch.zeros(0, dtype=torch.bool, device="cpu")

    def at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Who has been asked at ``z``, and who runs away, ``(batch,)`` each."""
        if self.point is not z:
            self.note(z, none := torch.zeros(len(z), dtype=torch.bool, device=z.device), none)
        return self.which, self.away

    def note(self, z: Tensor, which: Tensor, away: Tensor) -> None:
        """These have been asked at ``z``."""
        self.point, self.which, self.away = z, which, away

    def cleared(self, z: Tensor) -> Tensor | None:
        """Who has been asked at ``z``, and does not run away, ``(batch,)``; ``None`` where nobody was asked."""
        return self.which & ~self.away if self.point is z else None
