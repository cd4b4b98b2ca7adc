"""What differentiates inside works under ``torch.inference_mode`` too, and with tensors that were made there.

Autograd records nothing there, and may not save what was made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.trees import tree_map
from implicitkit.foundation.unversioned_writes import IN_INFERENCE
from implicitkit.lifting.replacing import Replacing

F = TypeVar("F", bound=Callable[..., Any])


def despite_inference_mode(function: F) -> F:
    """A function that differentiates inside, for callers that may be in ``torch.inference_mode``: there it runs as under
    ``torch.no_grad``, on ordinary copies of the inference tensors among its positional arguments.

    It runs a second time, with such tensors replaced in every operation, where a function that it is given captures one and
    a derivative is taken by it.
    """

    @functools.wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with compat.autograd_on():
            args = tuple(tree_map(compat.ordinary, a) for a in args)
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if IN_INFERENCE not in str(error):
                    raise
            with Ordinary():
                return function(*args, **kwargs)

    return entry  # type: ignore[return-value]


class Ordinary(Replacing):
    """Gives every operation ordinary tensors in place of those made in inference mode, which nothing may save."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def instead(self, t: Tensor) -> Tensor:
        return self.copies.setdefault(id(t), (t, t.clone()))[1] if t.is_inference() else t
