"""One evaluation of a function, watched: which unknowns every number in memory depends on.

Sets belong to *storages*, not to tensors: a view costs nothing, a write through a view is seen by everyone who shares the
memory, and what autograd keeps for its backward pass (the gradient of an objective is a function like any other) is known
although it comes back as another tensor.  They go with their storage: numbers that nobody can read any more tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import tracers
from implicitkit.foundation.pytrees import tree_flatten
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.index_sets import IndexSets
from implicitkit.sparsity.watching import watched_by

T = TypeVar("T")


class NotTraceable(Exception):
    """Something leaves the sight of the trace (NumPy, a sparse tensor made of unknowns)."""


_NONE = UntypedStorage(0)  # the memory of what has none
_WIDE = 64  # unknowns that a number depends on, above which it is named where that is asked for

Rule = Callable[["Trace", Any, Sequence[Any], dict[str, Any], Any], None]


def names(text: str) -> list[str]:
    """Names of operations, between blanks."""
    return text.split()


class Trace(tracers.TorchDispatchMode):
    """Runs every operation and, by the rule for it, notes what its results depend on.

    Args:
        rules: by the name of the operation without a trailing underscore. unknowns: how many there are.
        scalars: so many numbers of a sample that depend on many unknowns (a mean) may be named: whoever uses them depends
            on member ``unknowns + k``, and no longer on all of those. batch: samples, which lie in front.

    Attributes:
        guessed: names of operations without a rule: their results depend on all their inputs. named: how many numbers have
            been. seen: names of the operations that have met an unknown.
    """

    def __init__(self, rules: dict[str, Rule], unknowns: int, scalars: int = 0, batch: int = 1) -> None:
        super().__init__()
        self.rules, self.unknowns = rules, unknowns + scalars
        self.scalars, self.batch, self.named = scalars, batch, 0
        self.guessed: list[str] = []
        self.seen: set[str] = set()
        self._sets: WeakKeyDictionary[UntypedStorage, IndexSets] = WeakKeyDictionary()
        self._unit: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()  # bytes for one row of the sets
        self._chosen: WeakSet[UntypedStorage] = WeakSet()  # of integers and masks that values of unknowns have chosen
        self._others: dict[int, UntypedStorage] = {}  # memory that torch has not taken, by its address
        self.sleeps = 0

    # ------------------------------------------------------------------------------------------------- what is known
    def tracked(self, t: Any) -> bool:
        """Does a floating-point tensor depend on an unknown?"""
        return isinstance(t, Tensor) and self._memory(t) in self._sets

    def chosen(self, t: Any) -> bool:
        """Have values of the unknowns decided over these numbers (an index from ``argsort``, a mask)?"""
        return isinstance(t, Tensor) and ((memory := self._memory(t)) in self._chosen or memory in self._sets)

    def read(self, t: Tensor) -> IndexSets:
        """The sets of the entries of ``t``, in the order of ``t.reshape(-1)``."""
        memory = self._memory(t)
        if memory not in self._sets:
            return index_sets.empty(t.numel(), self.unknowns)
        sets = self._sets[memory]
        ratio = t.element_size() / self._unit[memory]
        if ratio < 1:  # the real view of complex numbers
            parts = round(1 / ratio)
            sets = index_sets.take(sets, np.arange(sets.shape[0] * parts) // parts)
            self._sets[memory], self._unit[memory] = sets, t.element_size()
            ratio = 1
        if ratio == 1 and t.is_contiguous() and t.storage_offset() == 0 and t.numel() == sets.shape[0]:
            return sets
        rows = places(t)
        if ratio == 1:
            return index_sets.take(sets, rows)
        return index_sets.union([index_sets.take(sets, rows * int(ratio) + k) for k in range(int(ratio))])

    def write(self, t: Tensor, sets: IndexSets) -> None:
        """Note the sets of the entries of ``t``, in the order of ``t.reshape(-1)``."""
        memory = self._memory(t)
        if memory is _NONE or not (t.is_floating_point() or t.is_complex()):
            return
        sets = self.name(sets)
        size = memory.nbytes() // t.element_size()
        known = memory in self._sets
        if known and self._unit[memory] != t.element_size():
            raise NotTraceable("memory is written as one type and as another")
        if not known:
            self._hold(memory)
            self._unit[memory] = t.element_size()
        if t.is_contiguous() and t.storage_offset() == 0 and t.numel() == size:
            self._sets[memory] = sets
            return
        old = self._sets[memory] if known else index_sets.empty(size, self.unknowns)
        self._sets[memory] = index_sets.overwrite(old, places(t), sets)

    def name(self, sets: IndexSets) -> IndexSets:
        """The sets, of which those of many members have got a name each, the same in every sample.

        Raises:
            TooDense: there are more of them than may be named.
        """
        if not self.scalars:
            return sets
        wide = np.flatnonzero(np.diff(sets.indptr) > _WIDE)
        if not len(wide):
            return sets
        places, which = np.unique(wide % max(1, sets.shape[0] // self.batch), return_inverse=True)
        if self.named + len(places) > self.scalars:
            raise index_sets.TooDense(f"more than {self.scalars} numbers that depend on many unknowns each")
        first = self.unknowns - self.scalars + self.named
        self.named += len(places)
        return index_sets.named(sets, wide, first + which)

    def guess(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note, without a rule, that outputs depend on all inputs."""
        self.guessed.append(name)
        collections = [self.read(t) for t in inputs if self.tracked(t)]
        for out in outputs:
            self.write(out, index_sets.everything(collections, out.numel()))

    def asleep(self, run: Callable[[], T]) -> T:
        """``run()``, of which nothing is noted, and which may take numbers out of torch."""
        self.sleeps += 1
        try:
            return run()
        finally:
            self.sleeps -= 1

    def rowwise(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        """Each row of ``out`` depends on all that the rows of ``sources`` with its number depend on, these repeated if they
        are fewer."""
        rows = np.arange(len(out))
        found = [index_sets.empty(len(out), self.unknowns)]
        for source in filter(self.tracked, sources):
            count, width = len(source), max(1, source[0].numel())
            merged = index_sets.merge(self.read(source), np.arange(count * width) // width, count)
            found.append(index_sets.take(merged, rows % count))
        self.write(out, index_sets.take(index_sets.union(found), np.repeat(rows, out[0].numel())))

    # ----------------------------------------------------------------------------------------------------- dispatch
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if self.sleeps or not any(self.chosen(t) for t in inputs):
            return out
        outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        if not tracers.operation(func)[1]:
            shared = {self._memory(t) for t in inputs}
            outputs = [t for t in outputs if self._memory(t) not in shared]  # the others are views
        if not outputs:
            return out
        if any(t.layout is not torch.strided for t in outputs):
            raise NotTraceable(f"{func} makes a sparse tensor of the unknowns")
        if not any(self.tracked(t) for t in inputs):
            self._choose(outputs)
            return out
        self._choose([t for t in outputs if not (t.is_floating_point() or t.is_complex())])
        if any(t.is_floating_point() or t.is_complex() for t in outputs):
            name = tracers.operation(func)[0].split("::")[1].rstrip("_")
            self.seen.add(name)
            rule = self.rules.get(name, self.rules["pointwise"] if torch.Tag.pointwise in func.tags else None)
            if rule is None:
                self.guess(name, inputs, outputs)
            else:
                rule(self, func, args, kwargs, out)
        return out

    def _choose(self, outputs: Sequence[Tensor]) -> None:
        for memory in {self._memory(t) for t in outputs} - {_NONE}:
            self._hold(memory)
            self._chosen.add(memory)

    def _memory(self, t: Tensor) -> UntypedStorage:
        """Where the numbers of ``t`` are; :data:`_NONE` if it has none."""
        storage = t.untyped_storage() if t.layout is torch.strided else _NONE
        if not storage.nbytes():
            return _NONE
        return storage if storage.resizable() else self._others.get(storage.data_ptr(), storage)

    def _hold(self, memory: UntypedStorage) -> None:
        """Keep memory that torch has not taken (NumPy's): other storages may have the same, and somebody may read it when
        this one is gone."""
        if not memory.resizable():
            self._others.setdefault(memory.data_ptr(), memory)


def places(t: Tensor) -> np.ndarray:
    """Where the entries of ``t`` lie in its storage, in the order of ``t.reshape(-1)``."""
    rows: np.ndarray = np.asarray(t.storage_offset(), dtype=np.int64)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        rows = rows[..., None] + np.arange(size, dtype=np.int64) * stride
    return rows.reshape(-1)


class NumpyGuard(TorchFunctionMode):
    """Refuses to let a tracked tensor out of the sight of the trace."""

    _EXITS = ("numpy", "__array__", "tolist", "__dlpack__", "data_ptr")

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._EXITS and args and not self.trace.sleeps and self.trace.tracked(args[0]):
            raise NotTraceable(f"Tensor.{name} takes the unknowns out of torch")
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(trace: Trace) -> Iterator[None]:
    """What is evaluated inside is seen by ``trace``."""
    with _eager(), NumpyGuard(trace), watched_by(trace), trace, torch.no_grad():
        yield


def _eager() -> AbstractContextManager[Any]:
    """Compiled functions do not show their operations: they are run uncompiled."""
    if tracers.compiles() and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
