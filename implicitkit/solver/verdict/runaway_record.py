"""Which samples have been asked at a point whether they run away: none is asked there twice."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solution import Status


class RunawayRecord:
    """What is known at one point, which is remembered by identity.

    Attributes:
        point: ``(batch, n)``. which: the samples that have been asked there, ``(batch,)``. away: which of them run away.
        way: the last step of those that were found to run away anywhere, else zero, ``(batch, n)``; ``None``: none was.
    """

    def __init__(self, way: Tensor | None = None) -> None:
        self.point: Tensor | None = None
        self.way = way
        self.which = self.away = torch.zeros(0, dtype=torch.bool, device="cpu")

    def at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples have been asked at ``z``, and which of them run away, ``(batch,)`` each."""
        if self.point is not z:
            self.note(z, none := torch.zeros(len(z), dtype=torch.bool, device=z.device), none)
        return self.which, self.away

    def note(self, z: Tensor, which: Tensor, away: Tensor, came_from: tuple[Tensor, Tensor] | None = None) -> None:
        """These have been asked at ``z``, a step after they ``came_from`` a point."""
        self.point, self.which, self.away = z, which, away
        if came_from is not None and bool(away.any()):
            way = torch.zeros_like(z) if self.way is None else self.way
            self.way = torch.where(away.unsqueeze(1), z - came_from[0], way)

    def handed_over(self, status: Tensor) -> tuple[Tensor, Tensor]:
        """What has become of samples that a method gives up for another one to go on with, and which of them that is,
        ``(batch,)`` each: not those that were seen to run away."""
        handed = status == int(Status.STALLED)
        if self.way is None or len(self.way) != len(status):
            return status, handed
        gone = handed & (self.way != 0).any(1)
        return torch.where(gone, int(Status.DIVERGED), status), handed & ~gone

    def select(self, samples: Tensor) -> RunawayRecord:
        """What is known of these samples, of which none has been asked at any point that is to come."""
        return RunawayRecord(None if self.way is None else self.way.index_select(0, samples))

    def clues(self, came_from: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """What is known of how samples came to where they are: the point a step ago, ``F`` there, and :attr:`way`."""
        if came_from is None:
            return ()
        return came_from if self.way is None else (*came_from, self.way)

    def cleared(self, z: Tensor) -> Tensor | None:
        """Which samples have been asked at ``z`` and do not run away, ``(batch,)``; ``None`` where none was asked."""
        return self.which & ~self.away if self.point is z else None
