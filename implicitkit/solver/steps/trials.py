"""Whether to try what may be in vain at the start of a solve, by how it ended in the solves of one function before."""

from __future__ import annotations

_PAUSES = 3  # trials in vain, one after another, after which 1, 3, 7 and no more solves begin without one


class Trials:
    """How trials of Krylov vectors ended at the start of solves of one function, kept with its pattern: after some in vain
    the next solves begin with factors at once, as they would after a trial, and so come to the same numbers."""

    def __init__(self) -> None:
        self.vain = self.left = 0

    def is_due(self) -> bool:
        """Is one made in this solve?"""
        self.left -= 1
        return self.left < 0

    def note(self, served: bool) -> None:
        """How it ended."""
        self.vain = 0 if served else min(self.vain + 1, _PAUSES)
        self.left = 2**self.vain - 1
