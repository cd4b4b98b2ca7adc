r"""Unknowns measured in units of their own: ``z = s y`` with the scales ``s`` of ``x_scale=``.

The problem is solved for ``y``, so that steps, trust regions and the gradient ``s dF/dz`` that convergence is judged by are
in those units.  The solution does not depend on ``s``: its derivative by it is zero, and is not formed.

The start may show such units by itself (:func:`units_of_start`): a gradient has the inverse ones, ``|g_i| ~ 1 / |z_i|``.

Source: Moré (1978), "The Levenberg-Marquardt algorithm", section 6 (scaled variables); ``x_scale`` of
``scipy.optimize.least_squares``; Dennis & Schnabel (1983), "Numerical Methods for Unconstrained Optimization", section 7.1
(typical values of the unknowns as their units).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, trees
from implicitkit.foundation.arrays import from_arrays, from_numbers
from implicitkit.foundation.constants import look
from implicitkit.foundation.trees import Layout
from implicitkit.problem.wrapping import Around

_APART = 1e8  # times the number of unknowns: so far apart entries of a start are not by chance
_EVENER = 0.5  # of the decades that a gradient spans, what it spans in units of the start, at most
_FAR = (1e4, -1e4, 30.0, -30.0)  # times the start: within so many units a gradient changes, and does not fade
_CHANGED = 0.1  # of a gradient


def check_scales(x_scale: Any) -> None:
    """Raise unless ``x_scale`` is a tree of numbers and tensors, as far as can be said without the unknowns.

    Raises:
        TypeError: something else is in it. ValueError: a number that is not positive.
    """
    leaves = trees.tree_flatten(from_arrays(x_scale))[0]
    for leaf in leaves or [x_scale]:
        if isinstance(leaf, bool) or not isinstance(leaf, (int, float, Tensor)):
            raise TypeError(f"x_scale must be 'jac', a positive number or tensors of them, got {leaf!r}")
        if not isinstance(leaf, Tensor) and not 0 < leaf < float("inf"):
            raise ValueError(f"x_scale must be positive and finite, got {leaf}")


def scales(x_scale: Any, z0: Any) -> Any:
    """A positive scale for every leaf of ``z0``, as a tree like it.

    Raises:
        TypeError, ValueError: ``x_scale`` is no positive number, no tensor of them that fits, and no tree like ``z0``.
    """
    leaves, spec = trees.tree_flatten(z0)
    x_scale = from_numbers(x_scale, z0)
    with contextlib.suppress(ValueError):  # another structure: one number for all leaves, or an error
        x_scale = trees.in_order(x_scale, z0)
    given, given_spec = trees.tree_flatten(x_scale)
    if len(given) == 1 and given_spec != spec:
        given = given * len(leaves)
    elif given_spec != spec:
        raise ValueError("x_scale is a pytree of another structure than z0: give a number, a tensor, or a tree like z0")
    return trees.tree_unflatten([_scale(s, leaf) for s, leaf in zip(given, leaves, strict=True)], spec)


def _scale(given: Any, leaf: Tensor) -> Tensor:
    if not isinstance(given, (int, float, Tensor)) or isinstance(given, bool):
        raise TypeError(f"x_scale must be 'jac', a positive number or tensors of them, got {given!r}")
    s = torch.as_tensor(given, dtype=leaf.real.dtype if leaf.is_complex() else leaf.dtype, device=leaf.device).detach()
    look(_check_scales, s)
    try:
        fits = torch.broadcast_shapes(s.shape, leaf.shape) == leaf.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"x_scale has shape {tuple(s.shape)}, which does not fit z0's {tuple(leaf.shape)}")
    return s.expand(leaf.shape)


def _check_scales(s: Tensor) -> None:
    if not bool((right := (s > 0) & torch.isfinite(s)).all()):
        raise ValueError(f"x_scale must be positive and finite, got {s[~right][0]:.6g}")


def units_of_start(objective: Callable[..., Any], z0: Any, args: tuple[Any, ...], layout: Layout) -> Any:
    r"""``s_i = 2^k \approx |z0_i|``, as a tree like ``z0``, one for other samples; ``None`` where all are one.

    In the natural map ``z - P(z - df/dz)``, a trust region, or the first step of a quasi-Newton method unknowns of 1e9 are
    compared with others of 1e-12, and hide them.  Of a sample whose start has no zero, the entries are its units where they
    lie more than ``10^8 n`` apart and every ``g_i = df/dz_i`` there bears them out (:func:`_measured`):

    - they make the gradient more even: ``log |z_i g_i|`` spans no more than half of what ``log |g_i|`` does, and no ``g_i``
      is zero (not so of ``z_i log z_i`` with some ``z_i`` of 1e-10, where the small ones are no units);
    - it changes over ten thousand units, ``|g_i(1e4 z) - g_i(z)| > |g_i(z)| / 10`` (not so of a price or a weight of
      1e10), and does not fade, ``|g_i(1e4 z)| > |g_i(z)| / 10`` (not so of ``z_i - log z_i`` or ``1 / z_i``, which look the
      same in all units); or so at ``-1e4 z``, or at ``30 z`` or ``-30 z``, where less overflows.

    One evaluation where entries are so far apart, up to four more where the gradient at the start is right, else none.  What
    fails there is for the solve to say.
    """
    if layout.dtype in (torch.float16, torch.bfloat16) or layout.size < 2 or not layout.batch:
        return None
    if any(leaf.is_complex() for leaf in trees.tree_flatten(z0)[0]):
        return None
    try:
        with compat.unwatched():  # by a solve around this one: the uses are those of the evaluations to come
            z = layout.pack(trees.tree_map(torch.detach, z0))
            smallest, largest = z.abs().aminmax(dim=1)
            apart = (smallest > 0) & torch.isfinite(largest) & (largest > _APART * layout.size * smallest)
            if not bool(compat.physical(apart).any()):
                return None
            given = trees.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, args)
            apart = apart & _measured(lambda z: objective(layout.unpack(z), *given), z)
            s = torch.where(apart.unsqueeze(1), torch.exp2(torch.log2(z.abs()).round()), 1)
            return layout.unpack(s) if bool(compat.physical(s != 1).any()) else None
    except Exception:
        return None


def _measured(objective: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Are the sizes of its entries the units that ``f`` measures them by?  ``(batch,)``."""

    def gradient(point: Tensor) -> Tensor:
        value, pullback = autodiff.vjp(objective, point)
        return pullback(torch.ones_like(value))[0].detach()

    g = gradient(z)
    size = g.abs()
    right = (size > 0).all(1) & (_decades(z * g) <= _EVENER * _decades(g))
    if not bool(compat.physical(right).any()):
        return right
    borne_out = torch.zeros_like(right)
    for times in _FAR:
        there = gradient(times * z)
        borne_out = borne_out | (torch.minimum((there - g).abs(), there.abs()) > _CHANGED * size).all(1)
        if not bool(compat.physical(right & ~borne_out).any()):
            break
    return right & borne_out


def _decades(sizes: Tensor) -> Tensor:
    """How many the entries span, ``(batch,)``."""
    logs = torch.log10(sizes.abs())
    return logs.amax(1) - logs.amin(1)


def divided(tree: Any, by: Any) -> Any:
    """``tree / by``, leaf by leaf; ``None`` and infinite numbers stay."""
    if tree is None or isinstance(tree, (int, float)):
        return trees.tree_map(lambda s: None if tree is None else torch.as_tensor(tree, device=s.device).to(s) / s, by)
    if isinstance(tree, Tensor) and not isinstance(by, Tensor):
        return trees.tree_map(lambda s: tree / s, by)
    return trees.tree_map(lambda t, s: t if t is None else t / s, tree, by, is_leaf=lambda x: x is None)


class Rescaled(Around):
    """``function(s y, *args)`` as a function of ``y``, with ``s`` the first of the arguments."""

    def __call__(self, y: Any, s: Any, *args: Any) -> Any:
        return self.function(trees.tree_map(torch.mul, y, s), *args)
