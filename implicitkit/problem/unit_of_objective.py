r"""The unit in which an objective is minimised over a set, or under constraints.

The natural map ``z - prox(z - df/dz)`` compares slopes with unknowns.  Where ``df/dz`` is smaller than a unit in the last
place of ``z`` (an objective of 1e-12, an unknown of 1e6) it is zero for every ``z`` of the set: whatever point is reached
first counts as the solution, and multipliers of that size are nothing beside constraints in units of ``z``.  So ``c f`` and
``c phi`` are minimised in the place of ``f`` and ``phi``: the minimisers are the same, the multipliers ``c`` times as large,

    c = 1 / max(kappa, |df/dz| / s),        kappa = |df/dz(z0 + d) - df/dz(z0)| / |d|,
    s = max(|z0|, |prox(z0 - df/dz / kappa, 1 / kappa)|),

with ``kappa`` the curvature along a short ``d`` and ``s`` the size of the unknowns, as far as the start and one step of
proximal gradients show them: slopes are then as large as unknowns, and the step of the natural map is that of this method.
``c`` is a power of two of each sample (nothing is rounded), a constant for derivatives, and one where slopes are no smaller
than ``eps^(1/4)`` of the unknowns.  Nor larger than its inverse: with a set or a term alone, where the slope of 1e7 times an
unknown of one is nothing but rounding errors of float32 beside it, all around the solution.  There rounding errors of a
slope are soon further than a bound is (a string of 1,000 points, of curvature 2,000), and whoever differentiates the natural
map takes the unknown for one at its bound: below double precision ``kappa`` is asked for whatever slopes are at the start,
and of a way between that of the slope and a random one.  A small ``c`` leaves every slope at the start ``eps^(1/4)`` of its
unknown at least: the curvature of one may be far beyond what moves another.

Source: Parikh & Boyd (2014), "Proximal algorithms", sections 4.2 and 4.2.1 (the step ``1 / L``; the fixed points of the map
do not depend on it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded, trees
from implicitkit.foundation.trees import Layout

_WAYS = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)  # of z, the ways along which curvature is looked at: the first that shows some
_SEEN = 1e3  # units of rounding of a slope by which it must change for that
_MOST = 2.0**200  # of c; in float32 2^60


def cost_of(
    objective: Callable[..., Any],
    prox: Callable[..., Any] | None,
    z0: Any,
    args: tuple[Any, ...],
    layout: Layout,
    both: bool = False,
) -> Tensor | None:
    """``c`` of every sample, of the batch's shape; ``None`` where all are one.

    One evaluation, and more where a slope is small, or digits are few: two, or seven where none shows any curvature.  What
    fails there is for the solve to say.

    Args:
        objective: ``(z, *args)``, one number a sample. prox: ``(z, step)``, or ``None``. z0, args: as the user gave them.
        layout: of ``z0``. both: of large slopes, too.
    """
    if layout.dtype in (torch.float16, torch.bfloat16) or not layout.batch:
        return None
    z0, args = trees.tree_map(_held, z0), trees.tree_map(_held, args)

    def slope(z: Tensor) -> Tensor:
        def value(*leaves: Tensor) -> Tensor:
            return objective(trees.tree_unflatten(list(leaves), spec), *args).sum()

        leaves, spec = trees.tree_flatten(layout.unpack(z))
        out, pullback = autodiff.vjp(value, *leaves)
        return layout.pack(trees.tree_unflatten(list(pullback(torch.ones_like(out))), spec)).detach()

    try:
        # unwatched by a solve around this one: the uses are those of the evaluations to come
        with compat.unwatched(), torch.no_grad():
            z = layout.pack(z0).detach()
            g = slope(z)
            size, share = _length(z).clamp_min(1), torch.finfo(z.dtype).eps ** 0.25
            steep = (
                share * _length(g) > size if z.dtype == torch.float64 else torch.ones_like(g[:, 0], dtype=torch.bool)
            )
            if not _any((_length(g) < share * size) | (both & steep)):
                return None
            c = _cost(slope, lambda v, t: _step(prox, layout, v, t), z, g, both)
            plain = compat.physical(c)  # what belongs to no batch of a transform is a number of its own
            c = plain if plain.shape == c.shape else c
            return c.reshape(layout.batch_shape) if _any(c != 1) else None
    except Exception:
        return None


def in_the_users_units(multipliers: Any, cost: Tensor) -> Any:
    """Multipliers of ``c f`` as those of ``f``."""
    return trees.tree_map(lambda t: t / cost.reshape(cost.shape + (1,) * (t.ndim - cost.ndim)), multipliers)


def _cost(slope: Callable[[Tensor], Tensor], step: Callable[..., Tensor], z: Tensor, g: Tensor, both: bool) -> Tensor:
    """``c``, ``(batch,)``, by the slope ``g`` at ``z``, both ``(batch, n)``."""
    length, size = _length(g), _length(z)
    reach = torch.where(size > 0, size, 1)
    random = seeded.normal(z.shape[1], seed=0).to(z).expand_as(z)
    way = torch.where(length.unsqueeze(1) > 0, -g, random)
    if both and z.dtype != torch.float64:  # the slope may lead where little curves
        along = torch.where((random * way).sum(1, keepdim=True) < 0, -random, random)
        way = way / _length(way).unsqueeze(1) + along / _length(along).unsqueeze(1)
    way = (reach / _length(way)).unsqueeze(1) * way
    kappa, open_ = torch.zeros_like(length), torch.ones_like(length, dtype=torch.bool)
    for share in _WAYS:
        change = _length(slope(z + share * way) - g)
        seen = open_ & (change > _SEEN * torch.finfo(z.dtype).eps * length)
        kappa = torch.where(seen, change / (share * reach), kappa)
        open_ = open_ & ~seen & torch.isfinite(change)
        if not _any(open_):
            break
    t = torch.where(kappa > 0, 1 / kappa, torch.where(length > 0, reach / length, 1))
    s = torch.maximum(size, _length(step(z - t.unsqueeze(1) * g, t)))
    c = 1 / torch.maximum(kappa, torch.where(s > 0, length / s, 0))
    seen = torch.finfo(z.dtype).eps ** 0.25 * torch.where(g != 0, z.abs() / g.abs(), 0).amax(1)
    c = torch.where(c < 1, torch.maximum(c, seen.clamp_max(1)), c)
    c = torch.exp2(torch.log2(c).round()).clamp_max(_MOST if z.dtype == torch.float64 else _MOST**0.3)
    apart = torch.finfo(z.dtype).eps ** -0.25
    return torch.where(torch.isfinite(c) & ((c > apart) | (both & (c * apart < 1))), c, 1)


def _step(prox: Callable[..., Any] | None, layout: Layout, v: Tensor, t: Tensor) -> Tensor:
    if prox is None:
        return v
    return layout.pack(prox(layout.unpack(v), t.reshape(layout.batch_shape))).detach()


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=1)


def _any(mask: Tensor) -> bool:
    """Is it true of any sample, below whatever transforms there are?"""
    return bool(compat.physical(mask).any())


def _held(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
