"""Samples that are solved are left out of later products.

The blocks of ``A = diag(A_1, ..., A_batch)`` are solved each to its own tolerance, and a product with ``A`` costs that of
all.  Once no more than half of the samples in work are still open, a method goes on with the operator of these
(:meth:`~implicitkit.foundation.operators.Operator.select`), its state narrowed to their rows; what it has found for the
others is kept.  A sample's own numbers do not change by it, but for rounding in products of other shapes.

Source: the rule is that of the forward solve (:mod:`implicitkit.solver.driver`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from implicitkit.foundation.operators import Operator

_SHARE = 0.5  # of the samples in work: no more than so many must be open, ...
_SPARED = 1 << 14  # ... and every product must spare so many numbers of the state: a selection costs a few calls
_ASKED = 1.0  # products of all samples that a selection costs where it is compared with the whole: it must spare more

Answers = tuple[Tensor, ...]


class Fewer:
    """The operator of the samples in work, and what is known of those left out.

    Args:
        may: may samples be left out at all?

    Attributes:
        A: the operator of the samples in work.
    """

    def __init__(self, A: Operator, may: bool = True) -> None:
        self.A = A
        self._places: Tensor | None = None  # of the samples in work among all
        self._kept: Answers = ()
        self._most = (
            1.0 if may and A.selects is not None else 0.0
        )  # times the share: of the samples in work may be open

    def drop(
        self, open_: Tensor, left: int, answers: Callable[[], Answers], ahead: Callable[[], float] | None = None
    ) -> Tensor | None:
        """Go on with the ``left`` samples that are ``open_`` (one entry for each of ``k``), if that pays and is possible.

        Args:
            answers: what is known of the samples in work, tensors ``(k, ...)``; asked only if some are left out.
            ahead: the products that the slowest of them still takes, where the method can tell; asked last.

        Returns:
            the rows of the state to go on with, ``(left,)``; ``None``: go on as before.
        """
        alive = len(open_)
        if not 0 < left <= self._most * _SHARE * alive or (alive - left) * self.A.size < _SPARED:
            return None
        if ahead is not None and (1 - left / alive) * ahead() <= _ASKED:
            return None
        index = open_.flatten().nonzero().squeeze(1)
        small = self.A.select(index)
        if small is None:  # asked again, if at all, when fewer are left
            self._most = _SHARE * left / alive
            return None
        self._kept = self.whole(answers())
        self._places = index if self._places is None else self._places.index_select(0, index)
        self.A, self._most = small, 1.0
        return index

    def spread(self, t: Tensor, rest: float) -> Tensor:
        """A tensor of the samples in work in full length, ``rest`` in the places of those left out."""
        if self._places is None:
            return t
        return t.new_full((len(self._kept[0]), *t.shape[1:]), rest).index_copy_(0, self._places, t)

    def whole(self, answers: Answers) -> Answers:
        """The answers of all samples, given those of the samples in work."""
        if self._places is None:
            return answers
        return tuple(t.index_copy(0, self._places, a) for t, a in zip(self._kept, answers, strict=True))


def narrowed(index: Tensor, *state: Tensor) -> Answers:
    """These rows of every tensor that has rows."""
    return tuple(t.index_select(0, index) if t.ndim else t for t in state)
