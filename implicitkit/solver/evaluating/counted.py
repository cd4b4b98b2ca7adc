"""How often a function is called in a solve."""

from __future__ import annotations


class Counted:
    """Something whose evaluations are counted, in a ``whole`` as well if there is one.

    Attributes:
        evaluations: calls of the user's function so far. sample_evaluations: the same times the samples in each call.
    """

    def __init__(self, whole: Counted | None = None) -> None:
        self.evaluations = self.sample_evaluations = 0
        self.whole = whole

    def count(self, samples: int) -> None:
        """Count an evaluation of so many samples."""
        self.evaluations += 1
        self.sample_evaluations += samples
        if self.whole is not None:
            self.whole.count(samples)
