r"""Do numbers that a function makes of tensors (``a.item()``, ``torch.tensor([a, 1.0])``) carry something of ``\theta``?

Autograd does not see that.  ``F`` is evaluated beside ``\theta``, along a random direction ``w``, twice: as it is, and with
the numbers of ``\theta`` itself in the place of those that it makes there.  What autograd does not see is

    d = (F(\theta + h w) - F(\theta + h w; numbers of \theta)) / h

to first order: with ``4 h`` it must be the same.  A tensor that is detached is the same in both, as is a number that nothing
is computed with; a step size, which only scales ``F``, changes it by no more than ``|F|``, to first order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation.pytrees import tensors_in
from implicitkit.lifting.watch import Looks

_PART = 1e-3  # of what F changes by: what counts
_LOOSE = 10.0  # times |F|: what a step size may change by along w, where a solution is loose
_SAME = 0.1  # of it, how far two quotients may differ
_WIDER = 4.0


class _Numbers(TorchFunctionMode):
    """Notes the numbers that a function makes of tensors, or gives it those of another evaluation, in their order."""

    def __init__(self, known: list[Any] | None = None) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in Looks.NUMBERS or not tensors_in((*args, *(kwargs or {}).values())):
            return out
        self.made.append(out)
        if self.known is None:
            return _copied(out)
        if len(self.known) < len(self.made):
            raise _OtherNumbersError
        return _copied(self.known[len(self.made) - 1])


class _OtherNumbersError(Exception):
    """An evaluation makes more numbers than another: it branches."""


def _copied(value: Any) -> Any:
    """Tensors and arrays may be written into, or share the memory of others."""
    return value.clone() if isinstance(value, Tensor) else value.copy() if hasattr(value, "copy") else value


def by_numbers(residual: Callable[[float], Tensor], F: Tensor, h: float) -> tuple[Tensor, Tensor]:
    """What each sample's ``F`` changes by through numbers, and as a whole, both as a norm ``(batch,)``; the first is zero
    where it is no more than rounding, or of second order, or cannot be told.

    Args:
        residual: ``F`` at ``theta + s w``, ``(batch, n)``. F: that at ``theta``. h: a small ``s``.
    """
    nothing = torch.zeros_like(F[:, 0]), torch.zeros_like(F[:, 0])
    try:
        with _Numbers() as here:
            residual(0.0)
        quotients, whole = [], nothing[1]
        for s in (h, _WIDER * h):
            fresh = residual(s)
            with _Numbers(here.made) as again:
                held = residual(s)
            if len(again.made) != len(here.made):
                return nothing
            quotients.append((fresh - held) / s)
            whole = torch.linalg.vector_norm((fresh - F) / s, dim=1)
    except Exception:  # outside of its domain, perhaps
        return nothing
    near, far = quotients
    found = torch.linalg.vector_norm(near, dim=1)
    same = torch.linalg.vector_norm(far - near, dim=1) <= _SAME * found
    loose = _LOOSE * torch.linalg.vector_norm(F, dim=1)
    return torch.where(same & (found > _PART * whole + loose), found, 0), whole
