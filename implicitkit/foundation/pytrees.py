"""Pytrees as torch has them: their leaves, their structure, and where a leaf stands.

The transforms of ``torch.func`` use the same registry, so that nodes registered there work everywhere.  The private names of
torch for them, as in :mod:`~implicitkit.foundation.compat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree

__all__ = [
    "TreeSpec",
    "key_path",
    "tensors_in",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_unflatten",
]

TreeSpec = _pytree.TreeSpec
_LEAF = _pytree.tree_flatten(0)[1]
IsLeaf = Callable[[Any], bool]


def tree_flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of a pytree, and its structure; most are one tensor, or tuples of tensors."""
    if isinstance(tree, Tensor):
        return [tree], _LEAF
    if type(tree) is tuple and is_leaf is None:
        leaves: list[Any] = []
        shape = _of_tuples(tree, leaves)
        if shape is not None:
            return leaves, _spec_of(shape)
    return _pytree.tree_flatten(tree, is_leaf)


def _of_tuples(part: Any, leaves: list[Any]) -> Any:
    """The structure of tuples of tensors, zeros for these, which become ``leaves``; ``None``: there is something else."""
    if isinstance(part, Tensor):
        leaves.append(part)
        return 0
    if type(part) is not tuple:
        return None
    shapes = [_of_tuples(inner, leaves) for inner in part]
    return None if None in shapes else tuple(shapes)


@functools.lru_cache(maxsize=256)
def _spec_of(shape: Any) -> TreeSpec:
    """The structure of a tree that ``_of_tuples`` has described."""
    return _pytree.tree_flatten(shape)[1]


def tree_unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The pytree of this structure with these leaves."""
    return leaves[0] if spec is _LEAF else _pytree.tree_unflatten(leaves, spec)


def tree_map(function: Callable[..., Any], tree: Any, *more: Any, is_leaf: IsLeaf | None = None) -> Any:
    """``function`` of every leaf (of all leaves that stand in one place of several trees)."""
    one = isinstance(tree, Tensor)
    return function(tree, *more) if one else _pytree.tree_map(function, tree, *more, is_leaf=is_leaf)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors among the leaves of a pytree; in tuples and lists by hand, which is many times faster."""
    if isinstance(x, Tensor):
        return [x]
    if type(x) in (tuple, list):
        return [t for part in x for t in tensors_in(part)]
    if x is None or isinstance(x, (int, float, str)):
        return []
    return [t for t in tree_flatten(x)[0] if isinstance(t, Tensor)]


def tree_flatten_with_path(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with a readable path, ``[("['h']", leaf), ...]``."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_flatten_with_path(tree)[0]]


def key_path(tree: Any, index: int) -> str:
    """Where leaf number ``index`` of ``tree`` stands, as ``['h'][0]`` (empty for a bare tensor)."""
    return tree_flatten_with_path(tree)[index][0]
