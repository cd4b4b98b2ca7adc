"""Python's numbers beside 0-dim tensors, in forward mode.

Of ``c s``, ``c + s``, ``s / c`` and their like, with a float ``c`` and a 0-dim tensor ``s``, torch makes ``c`` a tensor of
float64 whose tangent is zero, and a tangent of ``s`` in float32 is one of float64 from there on; so is that of the cotangent
that ``c s`` hands back.  ``jacfwd(lambda x: 0.5 * x.sum())`` is then float64 of float32, and a matrix product behind it an
error.  As a tensor of the precision that ``c s`` has, the number does neither; in half precision, which may not hold the
number (1e5, 1e-9), ``c s`` is found in float32 and rounded, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMES = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide")
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_METHODS = (f"__{side}{name}__" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv"))


def _as_tensor(function: Callable[..., Tensor], *, in_place: bool) -> Callable[..., Tensor]:
    """``function`` of two, with a number beside a 0-dim tensor made a tensor."""

    def called(*given: Any, **named: Any) -> Tensor:
        operands = [*given, *[named.pop(name) for name in ("input", "other") if name in named]]
        if len(operands) != 2:  # of a signature that is seldom used: torch's business
            return function(*operands, **named)
        first, second = operands
        which = int(_has_number(first, second))  # the number is this one, if any is
        if not (which or _has_number(second, first)):
            return function(first, second, **named)
        kind = torch.result_type(first, second)
        at = _WIDER.get(kind, kind)
        if abs(operands[which]) > torch.finfo(at).max or (at != kind and (in_place or "out" in named)):
            return function(first, second, **named)
        operands[which] = operands[1 - which].new_full((), operands[which], dtype=at)
        if at == kind:
            return function(*operands, **named)
        operands[1 - which] = operands[1 - which].to(at)
        return function(*operands, **named).to(kind)

    return called


def _has_number(tensor: Any, number: Any) -> bool:
    """Is this a 0-dim tensor, and the other a number with digits behind its point?"""
    return isinstance(number, (float, complex)) and isinstance(tensor, Tensor) and not tensor.ndim


_FUNCTIONS = {
    **{getattr(torch, name): False for name in _NAMES},
    **{getattr(Tensor, name): False for name in _NAMES},
    **{getattr(Tensor, f"{name}_"): True for name in ("add", "sub", "mul", "div")},
    **{getattr(Tensor, name): name.startswith("__i") for name in _METHODS},
}  # and whether they write into the tensor
NUMBERS: dict[Any, Callable[..., Tensor]] = {
    function: _as_tensor(function, in_place=in_place) for function, in_place in _FUNCTIONS.items()
}
"""What to call instead of torch's function, by that function."""
