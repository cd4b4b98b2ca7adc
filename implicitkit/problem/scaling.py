r"""Unknowns measured in units of their own: ``z = s y`` with the scales ``s`` of ``x_scale=``.

The problem is solved for ``y``, so that steps, trust regions and the gradient ``s dF/dz`` that convergence is judged by are
in those units.  The solution does not depend on ``s``: its derivative by it is zero, and is not formed.

Source: Moré (1978), "The Levenberg-Marquardt algorithm", section 6 (scaled variables); ``x_scale`` of
``scipy.optimize.least_squares``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, trees
from implicitkit.problem.around import Around

__all__ = ["Rescaled", "check_scales", "divided", "scales"]


def check_scales(x_scale: Any) -> None:
    """Raise unless ``x_scale`` is a tree of numbers and tensors, as far as can be said without the unknowns.

    Raises:
        TypeError: something else is in it. ValueError: a number that is not positive.
    """
    leaves = trees.tree_flatten(trees.from_arrays(x_scale))[0]
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
    x_scale = trees.from_numbers(x_scale, z0)
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
    if not compat.is_wrapped(s) and not bool((right := (s > 0) & torch.isfinite(s)).all()):
        raise ValueError(f"x_scale must be positive and finite, got {s[~right][0]:.6g}")
    try:
        fits = torch.broadcast_shapes(s.shape, leaf.shape) == leaf.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"x_scale has shape {tuple(s.shape)}, which does not fit z0's {tuple(leaf.shape)}")
    return s.expand(leaf.shape)


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
