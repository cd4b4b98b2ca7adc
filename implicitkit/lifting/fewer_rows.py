"""A function on the rows of a batch that are left, once the others have converged and been dropped.

What it makes of a row shall not depend on the others.  A failure on fewer rows is explained by those that were dropped, and
so is another value than on the larger batch, of which the function is asked once: it may capture a tensor that carries the
batch, ``X[: len(z)]``, or its samples may depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.wording import UNSTEADY

Kernel = Callable[..., Tensor]

_ALIKE: dict[Hashable, None] = {}  # functions that have had the same values on fewer rows, the oldest first
_MANY = 4096

_COUPLED = (
    "the samples are not independent, as batch_dims says they are: what it returns for one of them changes with the z of "
    "others. A mean or a norm over the batch does that, batch normalisation in training mode, and attention and recurrent "
    "layers without batch_first=True, which take the batch as their second dimension: transpose what they get and return, "
    "or make them with batch_first=True. Samples that are meant to depend on each other are one system: batch_dims=0"
)
_CAPTURED = (
    "a tensor that it captures carries the batch{names}. Pass it in args, with its dimension in in_dims; or leave in_dims "
    "out, and no row is dropped. (Or an argument is shared by the samples, and has as many rows by chance: None in in_dims. "
    "Or the samples are not independent, as after a mean over the batch: make one system of them with batch_dims=0)"
)


class Larger(NamedTuple):
    """A larger batch: the kernel of ``size`` samples and its tensors, and which ``rows`` of it are left."""

    kernel: Kernel
    theta: Sequence[Tensor]
    rows: Tensor
    size: int

    def at(self, z: Tensor, others: Tensor) -> Tensor:
        """What the kernel returns for the rows that are left, at ``z``, while all others are at ``others`` ``(1, n)``."""
        point = others.expand(self.size, -1).index_copy(0, self.rows, z)
        return self.kernel(point, *self.theta).index_select(0, self.rows)

    def couples(self, z: Tensor) -> bool:
        """Do the rows that are left depend on where the others are?"""
        if compat.transforms_active() or not 0 < len(self.rows) == len(z) < self.size:
            return False
        with torch.no_grad():
            try:
                here, moved = (self.at(z, z[:1] + shift) for shift in (0, 1))
            except (RuntimeError, ValueError, IndexError):
                return False
        return not _near(moved, here)


def watched(kernel: Kernel, total: int, before: Larger, names: Sequence[str], key: Hashable) -> Kernel:
    """The kernel, on the rows of ``total`` that ``before`` says are left.

    Args:
        names: of tensors that the function captures and that have as many rows as there were; with one, the values are
            compared once in each solve. key: what tells the function from others; of one they are compared once else.
    """
    left = len(before.rows)
    compare = (bool(names) or key not in _ALIKE) and before.size > left

    def blame(z: Tensor, happens: str = "the function fails") -> str:
        said = f" (perhaps {', '.join(map(repr, names))})" if names else ""
        return (
            f"{total - left} of {total} rows have converged and were dropped (in_dims says which arguments carry the batch) "
            f"and on the {left} left {happens}: " + (_COUPLED if before.couples(z) else _CAPTURED.format(names=said))
        )

    def checked(z: Tensor, *theta: Tensor) -> Tensor:
        try:
            out = kernel(z, *theta)
        except (RuntimeError, ValueError, IndexError) as error:
            if not any(word in str(error) for word in ("size", "shape", "dimension", "index")):
                raise
            raise type(error)(f"{blame(z)}. It says: {error}") from error
        if len(out) != len(z):
            raise ValueError(blame(z))
        nonlocal compare
        if compare and len(z) == left and not compat.transforms_active():
            compare = False
            with torch.no_grad():
                full = before.at(z, z[:1])
                if not _near(out, full):
                    again = [kernel(z, *theta) for _ in range(4)]  # it may take turns, or draw few numbers
                    if moved := [a for a in again if not _near(out, a)]:
                        raise ValueError(UNSTEADY.format(float((moved[0] - out).abs().max())))
                    raise ValueError(blame(z, "the function has other values"))
            _ALIKE[key] = None
            if len(_ALIKE) > _MANY:
                del _ALIKE[next(iter(_ALIKE))]
        return out

    return checked


def _near(a: Tensor, b: Tensor) -> bool:  # of the largest finite number: a trial point may have NaN, or Inf
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.nan_to_num(0, 0, 0).abs().max()), equal_nan=True)
