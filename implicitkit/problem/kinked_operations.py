r"""Operations of torch with a kink, each by the greatest of several smooth functions.

    relu(u) = max(u, 0),   |u| = 2 relu(u) - u,   max(a, b) = b + relu(a - b),   min(a, b) = b - relu(b - a),
    max_i u_i,   |u|_2 = max_{|s| <= 1} s'u

so that three are left: ``relu``, the largest of several numbers, and a length.  While a :class:`Kinked` lasts, what these
give is its own to say, whatever operation of torch they are in.

Source: Boyd & Vandenberghe (2004), *Convex Optimization*, sections 3.2.3 and 3.2.4.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat
from implicitkit.sets.simplex import onto_simplex

Kind: TypeAlias = Literal["relu", "largest", "length"]
"""``"relu"``, number by number; the others of the last dimension."""


_NEAR = 0.1


class Kinked(TorchFunctionMode):
    """While it lasts, operations with a kink have the values that :meth:`take` says.

    Raises:
        RuntimeError: one is inside a transform that the function itself has begun, so that its values are no tensors
            outside, and may not be ``anywhere``.
    """

    def __init__(self, anywhere: bool = False) -> None:
        super().__init__()
        self.level = math.inf if anywhere else compat.level()

    @abstractmethod
    def take(self, kind: Kind, u: Tensor) -> Tensor:
        """What ``kind`` gives for ``u``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(getattr(func, "__name__", ""))
        if rule is not None and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            if compat.level() > self.level:
                raise RuntimeError("an operation with a kink inside a transform")
            found = rule(self, *args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))


def value(kind: Kind, u: Tensor) -> Tensor:
    """The value itself."""
    if kind == "relu":
        return u.clamp_min(0)
    return torch.linalg.vector_norm(u, dim=-1) if kind == "length" else u.amax(-1)


def is_near(kind: Kind, u: Tensor, batch_dims: int) -> bool:
    """Is any of these within a tenth of the largest of its sample of its kink, a number or a length of zero, the greatest of
    several of the next?  What has no others beside it may be."""
    if kind == "largest":
        first = u.topk(min(2, u.shape[-1]), dim=-1).values
        sizes = torch.stack([first[..., 0] - first[..., -1], u.amax(-1) - u.amin(-1)], -1) if u.shape[-1] > 2 else None
    else:
        sizes = u.abs() if kind == "relu" else torch.linalg.vector_norm(u, dim=-1)
    if sizes is None or sizes.ndim <= batch_dims or sizes.shape[batch_dims:].numel() < 2:
        return True
    sizes = sizes.flatten(batch_dims)
    return bool((sizes.amin(-1) <= _NEAR * sizes.amax(-1)).any())


def nearest_weights(kind: Kind, v: Tensor) -> Tensor:
    """The projection of ``v`` on the weights ``w`` whose greatest ``w'u`` is the value: ``[0, 1]``, the ball, and
    the simplex."""
    if kind == "relu":
        return v.clamp(0, 1)
    if kind == "length":
        return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1)
    return onto_simplex(v, v.new_ones(()))


def _relu(mode: Kinked, u: Tensor, inplace: bool = False) -> Any:
    return NotImplemented if inplace else mode.take("relu", u)


def _abs(mode: Kinked, u: Tensor) -> Any:
    return 2 * mode.take("relu", u) - u


def _greater(mode: Kinked, a: Tensor, b: Any) -> Any:
    return b + mode.take("relu", a - b)


def _lesser(mode: Kinked, a: Tensor, b: Any) -> Any:
    return b - mode.take("relu", b - a)


def _clamp(mode: Kinked, u: Tensor, min: Any = None, max: Any = None) -> Any:
    u = u if min is None else _greater(mode, u, min)
    return u if max is None else _lesser(mode, u, max)


def _amax(mode: Kinked, u: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    return _over(mode, "largest", u, dim, keepdim)


def _amin(mode: Kinked, u: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    return -_over(mode, "largest", -u, dim, keepdim)


def _max(mode: Kinked, u: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _of_max(mode, torch.max, _greater, _amax, u, *args, **kwargs)


def _min(mode: Kinked, u: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _of_max(mode, torch.min, _lesser, _amin, u, *args, **kwargs)


def _of_max(mode: Kinked, plain: Any, two: Any, many: Any, u: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Three functions of one name: of two tensors, of all numbers, along a dimension with their places."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        return two(mode, u, other)
    if not args and not kwargs:
        return many(mode, u)
    found = plain(u, *args, **kwargs)
    return type(found)((many(mode, u, *args, **kwargs), found.indices))


def _over(mode: Kinked, kind: Kind, u: Tensor, dim: Any, keepdim: bool) -> Any:
    """Along some dimensions, or all."""
    dims = tuple(d % u.ndim for d in ((dim,) if isinstance(dim, int) else dim or range(u.ndim)))
    if not dims:
        return u if kind == "largest" else _abs(mode, u)
    last = u.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    found = mode.take(kind, last)
    return found.reshape([1 if d in dims else size for d, size in enumerate(u.shape)]) if keepdim else found


def _norm(mode: Kinked, u: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype is not None:
        return NotImplemented
    if ord == 1:
        size = _abs(mode, u)
        return size.sum() if dim is None else size.sum(dim, keepdim)
    if ord == torch.inf:
        return _amax(mode, _abs(mode, u), dim or (), keepdim)
    return _over(mode, "length", u, dim, keepdim) if ord == 2 else NotImplemented


def _any_norm(mode: Kinked, u: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    if p == "fro" or p is None:
        p = 2
    return NotImplemented if isinstance(p, str) else _norm(mode, u, p, dim, keepdim, **more)


def _linalg_norm(mode: Kinked, u: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    of_matrix = u.ndim != 1 and not isinstance(dim, int) and ord is not None
    return NotImplemented if of_matrix else _norm(mode, u, 2 if ord is None else ord, dim, keepdim, **more)


def _l1_loss(mode: Kinked, u: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    if args or kwargs or reduction not in _REDUCTIONS:
        return NotImplemented
    return _REDUCTIONS[reduction](_abs(mode, u - target))


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": Tensor.mean, "sum": Tensor.sum, "none": Tensor.clone}
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("abs", "absolute", "__abs__"), _abs),
    "relu": _relu,
    **dict.fromkeys(("maximum", "fmax", "clamp_min"), _greater),
    **dict.fromkeys(("minimum", "fmin", "clamp_max"), _lesser),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "amax": _amax,
    "amin": _amin,
    "max": _max,
    "min": _min,
    **dict.fromkeys(("vector_norm", "linalg_vector_norm"), _norm),
    "norm": _any_norm,
    "linalg_norm": _linalg_norm,
    "l1_loss": _l1_loss,
}
