"""The last equilibrium of every sample, and where its last changes lead: where the next solve begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.compat import version
from implicitkit_deq.starting.extrapolation import CHANGES, Trend, lasting, told

_ANEW = 31  # one training call in so many starts from zero; a prime, so that in epochs it is not always the same batch


class Last:
    """The last equilibrium, sample by sample: for frames of a video, iterations of an outer loop, epochs over a data set.

    Without ``index`` it is that of the last call; where that has none of the right shape (the first call, another batch
    size), or where a sample of it is not finite, the start is zero.  With ``index``, the numbers of the samples in a data
    set, it is that of the last call in which a sample with this number took part: a table of one state a sample, which lives
    where the state does and is no part of a ``state_dict``.  Equilibria found under ``torch.vmap`` are not kept: they end
    with it.

    Args:
        before: a solve that was not told to remember.
        leads: in training with ``index`` start where the last changes of each sample lead
            (:mod:`~implicitkit_deq.starting.extrapolation`), if parameters were written to since it was seen; the table then
            has four states a sample.
        by_position: positions of a sequence, the second dimension, are told nothing of each other.
    """

    def __init__(self, before: ik.Solution | None = None, *, leads: bool = False, by_position: bool = False) -> None:
        self.trend = Trend(0)
        self.leads, self.by_position = leads, by_position
        self._followed = Followed()
        self.table: list[Tensor] = []  # by leaf: (samples seen, *shape)
        self._changes: list[
            Tensor
        ] = []  # by leaf: (CHANGES, samples seen, *shape), the latest first; zero: there was none
        self._told: list[Tensor] = []  # by leaf: where the last change was expected (:func:`told`), (samples seen, ...)
        self._when: Tensor | None = None  # how often parameters had been written to, (samples seen,); -1: not seen
        if before is not None:  # that of a call which was not told to remember
            self.keep(before.value)

    @property
    def state(self) -> Any:
        """The last equilibrium of a call without ``index``, if there was any."""
        return self.trend.last

    def keep(self, state: Any, index: Tensor | None = None, cell: Any = None) -> None:
        """Start from this state, of this ``cell``, the next time; an empty batch leaves what is kept as it is."""
        leaves = ik.extend.trees.tree_flatten(state)[0]
        if not leaves[0].numel():
            return
        try:
            for leaf in leaves:
                leaf.flatten()[:1].tolist()
        except RuntimeError:  # vmap shows no values
            return
        if index is None:
            self.trend.keep(state)
            return
        with torch.inference_mode(False):  # a table made in that mode could not be written to outside of it
            self._enter(leaves, index, _written(cell) if self.leads else 0)

    def _enter(self, leaves: list[Tensor], index: Tensor, written: int) -> None:
        """Write into the table, which grows as larger numbers come."""
        most = int(index.max()) + 1
        if not self.table or any(not _same_kind(t, leaf) for t, leaf in zip(self.table, leaves, strict=True)):
            self.table = [leaf.new_zeros(0, *leaf.shape[1:]) for leaf in leaves]
            self._changes = [leaf.new_zeros(CHANGES, 0, *leaf.shape[1:]) for leaf in leaves] if self.leads else []
            self._told = [told(self.by_position, t, t) for t in self.table] if self.leads else []
            self._when = index.new_zeros(0) if self.leads else None
        if len(self.table[0]) < most:
            self._lengthen(max(most, 2 * len(self.table[0])), most)
        if self._when is not None:
            when = self._when[index]
            moved = (when >= 0) & (when != written)
            self._when[index] = written
            for t, changes, known, leaf in zip(self.table, self._changes, self._told, leaves, strict=True):
                old, new = changes[:, index], leaf - t[index]
                expected = told(self.by_position, new, lasting(self.by_position, *old))
                known[index] = torch.where(_beside(moved, leaf), expected, known[index])
                changes[:, index] = torch.where(_beside(moved, leaf), torch.stack([new, *old[:-1]]), old)
        for t, leaf in zip(self.table, leaves, strict=True):
            t[index] = leaf

    def _lengthen(self, rows: int, most: int) -> None:
        """Make room for samples up to the number ``most``."""
        try:
            table, known = ([_longer(t, 0, rows) for t in leaves] for leaves in (self.table, self._told))
            changes = [_longer(t, 1, rows) for t in self._changes]
            when = None if self._when is None else _longer(self._when, 0, rows, -1)
        except RuntimeError as error:
            raise RuntimeError(
                f"index has the number {most - 1}, and there is no room for the states of as many samples: they count the "
                "samples of a data set from 0 on (positions in it, not keys or hashes). Number yours so, or leave index out"
            ) from error
        self.table, self._told, self._changes, self._when = table, known, changes, when

    def __call__(self, template: Any, index: Tensor | None = None, trained: Any = None) -> Any:
        """A state like ``template``; with a cell that is ``trained``, that itself in one call of 31, as :class:`Again` has
        it.  Those whose samples were all seen with these very parameters are not counted: one that is repeated follows."""
        leaves, spec = ik.extend.trees.tree_flatten(template)
        if index is None:
            return usable(self.trend.last, template)
        written = None if trained is None else _written(trained)
        if len(self.table) != len(leaves) or not all(map(_same_kind, self.table, leaves)):
            return template
        known, index = index < len(self.table[0]), index.clamp_max(len(self.table[0]) - 1)
        if written is not None and self._when is not None:
            repeated = bool((known & (self._when[index] == written)).all())
            if not repeated and not self._followed.again():
                return template
        states = [t[index] for t in self.table]
        if written is not None and self._when is not None:
            moved = self._when[index] != written
            ahead = [lasting(self.by_position, *c[:, index]) for c in self._changes]
            believed = [_beside(moved, z) & t[index] for z, t in zip(states, self._told, strict=True)]
            states = [z + torch.where(b, d, 0) for z, b, d in zip(states, believed, ahead, strict=True)]
        kept = [torch.where(_beside(known, leaf), z, leaf) for z, leaf in zip(states, leaves, strict=True)]
        return usable(ik.extend.trees.tree_unflatten(kept, spec), template)


def _beside(which: Tensor, leaf: Tensor) -> Tensor:
    """``which`` ``(batch,)``, to be broadcast against a leaf ``(batch, ...)``."""
    return which.view(-1, *[1] * (leaf.ndim - 1))


def _longer(t: Tensor, dim: int, rows: int, value: int = 0) -> Tensor:
    room = t.new_full((*t.shape[:dim], rows, *t.shape[dim + 1 :]), value)
    room.narrow(dim, 0, t.shape[dim]).copy_(t)
    return room


def usable(state: Any, template: Any) -> Any:
    """A state where it is one like ``template`` and finite, sample by sample; that elsewhere."""
    if state is None or not alike(state, template):
        return template
    shown = not ik.extend.transforms_active()  # vmap shows no values

    def finite(kept: Tensor, zero: Tensor) -> Tensor:
        if shown and bool(kept.sum().isfinite()):  # the everyday case: one pass, nothing to choose
            return kept
        good = torch.isfinite(kept).flatten(1).all(1) if kept.ndim > 1 else torch.isfinite(kept)
        return torch.where(good.view(-1, *[1] * (kept.ndim - 1)), kept, zero)

    return ik.extend.trees.tree_map(finite, state, template)


class Followed:
    """Counts the calls in a row that start from a last equilibrium: at most 30, then one starts from zero."""

    def __init__(self) -> None:
        self.calls = 0

    def again(self) -> bool:
        """Does this call, too, start from a last equilibrium?"""
        self.calls = (self.calls + 1) % _ANEW
        return self.calls > 0


def _written(cell: Any) -> int:
    """How often the trainable parameters of a cell have been written to."""
    trained = cell.parameters() if isinstance(cell, nn.Module) else ()
    return sum(version(p) for p in trained if p.requires_grad and not p.is_inference())


def _same_kind(kept: Tensor, leaf: Tensor) -> bool:
    return kept.shape[1:] == leaf.shape[1:] and kept.dtype == leaf.dtype and kept.device == leaf.device


def alike(a: Any, b: Any) -> bool:
    """Are two states of the same structure, shapes, dtypes and device?"""
    (mine, spec), (theirs, other) = ik.extend.trees.tree_flatten(a), ik.extend.trees.tree_flatten(b)
    return spec == other and all(
        s.shape == t.shape and s.dtype == t.dtype and s.device == t.device for s, t in zip(mine, theirs, strict=True)
    )
