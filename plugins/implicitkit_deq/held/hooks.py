"""What a cell shows of an evaluation besides its value: tensors that its modules keep, and what forward hooks see."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from implicitkit_deq.compat import observed

_TORCHS = frozenset(vars(nn.Module())) - {"_buffers"}  # attributes of every module, where no evaluation leaves a tensor


class Shown:
    """Is somebody to read a cell's evaluation after a solve?

    A cell may keep a tensor in passing, ``self.load = p.square().mean()``, that is added to the loss or plotted, and a
    forward hook on one of its modules may pick up features.  What the solve leaves there is of some evaluation on the way,
    of the samples that were left in it, and without derivative.

    Args:
        modules: those of the cell; of a function, none, nothing is known.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.before = {id(t): weakref.ref(t) for t in _kept(self.modules)}

    def anything(self) -> bool:
        """Has a tensor been kept since, or are there hooks?"""
        return any(map(observed, self.modules)) or any(map(self._is_new, _kept(self.modules)))

    def _is_new(self, t: Tensor) -> bool:
        known = self.before.get(id(t))
        return known is None or known() is not t


class Copied(nn.Module):
    """A layer whose copies hold nothing of a call that has a graph, which torch does not copy.

    There is no ``solution`` in them and no start; what the modules keep is detached (in a pickle that is torch's business).
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "solution": None, "_start": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for t in _kept(self.modules()):
            if t.grad_fn is not None:
                memo[id(t)] = t.detach().clone()
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


def _kept(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Tensors that are attributes of modules, or lie in a list, tuple or dict that is one (as buffers do)."""
    for module in modules:
        own = vars(module)
        for name in own.keys() - _TORCHS:
            value = own[name]
            if isinstance(value, Tensor):
                yield value
            elif type(value) in (dict, list, tuple):  # nothing else is asked whether it is empty: an array will not say
                held = value.values() if type(value) is dict else value
                yield from [t for t in held if isinstance(t, Tensor)]
