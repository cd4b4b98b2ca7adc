"""Who watches the evaluation of a function, and what it is told of the solves inside it.

What a solve returns does not depend on its arguments as its steps do: these go as far as the numbers at hand ask for, and at
a start that is a solution there are none.  By the implicit function theorem the solution depends on all that its equations
depend on, and its derivative likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Watcher(Protocol):
    """A trace of one evaluation (:class:`~implicitkit.sparsity.tracing.Trace`)."""

    def asleep(self, run: Callable[[], T]) -> T:
        """``run()``, of which nothing is noted."""

    def rowwise(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        """Each row of ``out`` depends on all that the rows of ``sources`` with its number depend on, these repeated if they
        are fewer."""


_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())  # a solve within a solve: two of them


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Inside, :func:`solved_inside` tells ``watcher``."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def solved_inside(
    run: Callable[[], tuple[Tensor, T]], equations: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[Tensor, T]:
    """``run()``, the matrix ``(rows, n)`` that it begins with solving ``equations``; noted by those who watch."""
    watchers = _watchers.get()
    if not watchers:
        return run()
    token = _watchers.set(())
    try:
        for watcher in watchers:
            run = _unseen(watcher, run)
        found = run()
    finally:
        _watchers.reset(token)
    sources = equations(found[0])
    for watcher in watchers:
        watcher.rowwise(found[0], sources)
    return found


def _unseen(watcher: Watcher, run: Callable[[], T]) -> Callable[[], T]:
    return lambda: watcher.asleep(run)
