"""Other tensors in the arguments of every torch operation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Replacing(TorchFunctionMode):
    """While it lasts, every torch operation gets ``instead(t)`` for each tensor ``t`` among its arguments, in lists and
    tuples too."""

    @abstractmethod
    def instead(self, t: Tensor) -> Tensor:
        """What is to be used for ``t``, perhaps ``t`` itself."""

    def _replace(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.instead(x)
        if type(x) in (list, tuple):
            return type(x)(map(self._replace, x))
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead, replace = self.instead, self._replace  # for every operation: no call more than is needed
        args = [instead(x) if isinstance(x, Tensor) else replace(x) for x in args]
        return func(*args, **{k: replace(v) for k, v in kwargs.items()}) if kwargs else func(*args)
