"""Python's numbers beside 0-dim tensors, in forward mode.

Of ``c s``, ``c + s``, ``s / c`` and their like, with a float ``c`` and a 0-dim tensor ``s``, torch makes ``c`` a tensor of
float64 whose tangent is zero, and a tangent of ``s`` in float32 is one of float64 from there on; so is that of the cotangent
that ``c s`` hands back.  ``jacfwd(lambda x: 0.5 * x.sum())`` is then float64 of float32, and a matrix product behind it an
error.  As a tensor of the precision that ``c s`` has, the number does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMES = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide")
_METHODS = (f"__{side}{name}__" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv"))


def _as_tensor(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` of two, with a number beside a 0-dim tensor made a tensor."""

    def called(*given: Any, **named: Any) -> Tensor:
        operands = [*given, *[named.pop(name) for name in ("input", "other") if name in named]]
        if len(operands) != 2:  # of a signature that is seldom used: torch's business
            return function(*operands, **named)
        a, b = operands
        if _has_number(a, b):
            b = a.new_full((), b, dtype=torch.result_type(a, b))
        elif _has_number(b, a):
            a = b.new_full((), a, dtype=torch.result_type(a, b))
        return function(a, b, **named)

    return called


def _has_number(tensor: Any, number: Any) -> bool:
    """Is this a 0-dim tensor, and the other a number with digits behind its point?"""
    return isinstance(number, (float, complex)) and isinstance(tensor, Tensor) and not tensor.ndim


NUMBERS: dict[Any, Callable[..., Tensor]] = {
    function: _as_tensor(function)
    for function in (
        *(getattr(torch, name) for name in _NAMES),
        *(getattr(Tensor, name) for name in (*_NAMES, "add_", "sub_", "mul_", "div_", *_METHODS)),
    )
}
"""What to call instead of torch's function, by that function."""
