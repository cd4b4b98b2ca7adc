"""Vectors, and products: a manifold for each part of a pytree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.manifold.base import Manifold


@dataclass(frozen=True)
class Euclidean(Manifold):
    """All tensors of a shape, or pytrees of them: ``retract(z, delta) = z + delta``."""

    def zero(self, z: Any) -> Any:
        return trees.tree_map(torch.zeros_like, z)

    def retract(self, z: Any, delta: Any) -> Any:
        return trees.tree_map(torch.add, z, delta)

    def local(self, z: Any, y: Any) -> Any:
        return trees.tree_map(torch.sub, y, z)

    def project(self, z: Any) -> Any:
        return z

    def check(self, z: Any) -> None:
        return None


@dataclass(frozen=True)
class Product(Manifold):
    """Pytrees of points: ``{"pose": SE3(), "points": None}`` for a dict of poses and vectors, a tuple for a tuple.

    ``None`` is :class:`Euclidean`.  A manifold beside a pytree of tensors holds for each of them.

    Args:
        parts: manifolds in dicts, lists and tuples.

    Raises:
        TypeError: something is no manifold. ValueError (when it is used): ``z0`` has another structure.
    """

    parts: Any

    def __post_init__(self) -> None:
        _checked(self.parts)

    def zero(self, z: Any) -> Any:
        return _each(self.parts, lambda m, point: m.zero(point), z)

    def retract(self, z: Any, delta: Any) -> Any:
        return _each(self.parts, lambda m, point, step: m.retract(point, step), z, delta)

    def local(self, z: Any, y: Any) -> Any:
        return _each(self.parts, lambda m, point, other: m.local(point, other), z, y)

    def project(self, z: Any) -> Any:
        return _each(self.parts, lambda m, point: m.project(point), z)

    def check(self, z: Any) -> None:
        _each(self.parts, lambda m, point: m.check(point), z)


def as_manifold(given: Any) -> Product:
    """A manifold, or manifolds in a pytree, as one.

    Raises:
        TypeError: it is neither.
    """
    return given if isinstance(given, Product) else Product(given)


def _checked(parts: Any) -> None:
    if isinstance(parts, dict):
        parts = list(parts.values())
    if isinstance(parts, (list, tuple)):
        for part in parts:
            _checked(part)
    elif parts is not None and not isinstance(parts, Manifold):
        raise TypeError(
            f"manifold= takes ik.manifold.SO3() and the like, or a dict, list or tuple of them; got {type(parts).__name__}"
            + (" (the class: call it)" if isinstance(parts, type) else "")
        )


def _each(part: Any, function: Callable[..., Any], *points: Any) -> Any:
    """``function(manifold, tensor, ...)`` for every tensor, in the structure of the points."""
    if part is None or isinstance(part, Manifold):
        part = Euclidean() if part is None else part
        first = points[0]
        if isinstance(first, Tensor) or isinstance(part, Product):
            return function(part, *points)
        return trees.tree_map(lambda *tensors: function(part, *tensors), *points)
    names = list(part) if isinstance(part, dict) else list(range(len(part)))
    for point in points:
        fits = isinstance(point, type(part)) and len(point) == len(part)
        if not fits or (isinstance(part, dict) and set(point) != set(part)):
            got = f"keys {sorted(map(str, point))}" if isinstance(point, dict) else type(point).__name__
            raise ValueError(f"manifold= has the parts {', '.join(map(str, names))}, and z0 is not like that: {got}")
    if isinstance(part, dict):
        return {name: _each(part[name], function, *(p[name] for p in points)) for name in points[0]}
    values = [_each(part[i], function, *(p[i] for p in points)) for i in names]
    return values if isinstance(part, list) else tuple(values)
