"""Functions of ours around a function of the user's, which go by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Around:
    """A function made of ``function``; a subclass defines ``__call__``.

    ``identified_by``: the attributes that tell it from others (:mod:`implicitkit.sparsity.identity`).
    """

    identified_by: ClassVar[tuple[str, ...]] = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
