r"""Soft sorting and ranking: projections onto the permutahedron, the hull of all orders of a vector ``w``.

    P(z, w) = argmin_{p in hull(w)} |p - z|^2 / 2  =  z - u(z),

where ``u``, in the order in which ``z`` falls, is the falling vector nearest to ``z - w`` (isotonic regression).
With ``\rho = (n, ..., 1)``, a sort is the largest ``<p, \rho>`` over the orders ``p`` of ``v`` and a ranking the largest
``<r, -v>`` over the orders ``r`` of ``\rho``; both become smooth when ``strength`` times ``|.|^2 / 2`` is taken off.

Source: Blondel, Teboul, Berthet & Djolonga (2020), "Fast differentiable sorting and ranking", propositions 2 to 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.options import check_arguments, each, flag, positive
from implicitkit.sets.base import against
from implicitkit.sets.cones import Monotone

_STRENGTH, _FLAG = each(positive()), flag()
_FALLING = Monotone(decreasing=True)


def soft_sort(v: Tensor, strength: Any = 1.0, *, descending: bool = False) -> Tensor:
    r"""The entries of the last dimension in order, blended where they are close: ``P(\rho / strength, v)``.

        ik.relax.soft_sort(torch.tensor([3.0, 1.0, 2.0]), 0.1)  # [1.0, 2.0, 3.0]

    Exact where neighbouring values of the sorted vector differ by less than ``1 / strength``; towards infinite strength all
    entries tend to the mean.  The sum is kept.  Piecewise linear in ``v``: its derivative averages over each block.

    ``P(z, w) = argmin |p - z|^2`` over the hull of all orders of ``w``; ``\rho = (n, ..., 1)``.  Units: those of ``v``,
    ``strength`` their inverse.  Source: Blondel, Teboul, Berthet & Djolonga (2020), propositions 2 to 4.

    Args:
        v: ``(*batch, n)``. strength: positive number, or tensor of the batch's shape.
        descending: largest first.

    Raises:
        TypeError: ``v`` is not a real floating-point tensor.
        ValueError: ``v`` is a single number, or ``strength`` not positive.
    """
    strength = _checked("soft_sort", v, strength, descending)
    if not descending:
        return -soft_sort(-v, strength, descending=True)
    w = v.sort(dim=-1, descending=True).values
    z = _rho(v) / against(strength, v)
    return z.expand_as(w) - _FALLING.project(z - w)


def soft_rank(v: Tensor, strength: Any = 1.0, *, descending: bool = False) -> Tensor:
    r"""The place of each entry of the last dimension in the order, from 1, blended where they are close:
    ``P(-v / strength, \rho)`` counted from the largest, ``P(v / strength, \rho)`` from the smallest.

        ik.relax.soft_rank(torch.tensor([3.0, 1.0, 2.0]), 0.1)  # [3.0, 1.0, 2.0]

    Exact where neighbours differ by more than ``strength``; towards infinite strength all ranks tend to ``(n + 1) / 2``.
    Their sum is ``n (n + 1) / 2``.

    ``P(z, w) = argmin |p - z|^2`` over the hull of all orders of ``w``; ``\rho = (n, ..., 1)``.  Units: ``strength``
    has those of ``v``, ranks are dimensionless.  Source: Blondel, Teboul, Berthet & Djolonga (2020), propositions 2 to
    4.

    Args:
        v: ``(*batch, n)``. strength: positive number, or tensor of the batch's shape.
        descending: rank 1 is the largest.

    Raises:
        TypeError: ``v`` is not a real floating-point tensor.
        ValueError: ``v`` is a single number, or ``strength`` not positive.
    """
    strength = _checked("soft_rank", v, strength, descending)
    z = (-v if descending else v) / against(strength, v)
    ordered, order = z.sort(dim=-1, descending=True)
    moved = _FALLING.project(ordered - _rho(v))
    return z - moved.gather(-1, order.argsort(-1))


def _rho(v: Tensor) -> Tensor:
    """``(n, ..., 1)``."""
    return torch.arange(v.shape[-1], 0, -1, dtype=v.dtype, device=v.device)


def _checked(name: str, v: Any, strength: Any, descending: Any) -> Any:
    if not isinstance(v, Tensor) or not v.is_floating_point():
        raise TypeError(
            f"{name} takes a real floating-point tensor, got {v.dtype if isinstance(v, Tensor) else type(v).__name__}"
        )
    if v.ndim == 0:
        raise ValueError(f"{name} orders the last dimension, and a single number has none")
    check_arguments(name, strength=(_STRENGTH, strength), descending=(_FLAG, descending))
    return strength
