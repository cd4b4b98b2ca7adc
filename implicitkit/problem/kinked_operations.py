r"""Operations of torch with a kink, each by the greatest of several smooth functions.

    relu(u) = max(u, 0),   |u| = 2 relu(u) - u,   max(a, b) = b + relu(a - b),   min(a, b) = b - relu(b - a),
    max_i u_i,   |u|_2 = max_{|s| <= 1} s'u,   u_[1] + .. + u_[k] = max_{0 <= w <= 1, sum w = k} w'u

so that four are left: ``relu``, the largest of several numbers, the sum of the ``k`` largest, and a length.  Sorted numbers
are differences of such sums, and what ``torch.where`` takes may be the greater or the lesser of the two.  While a
:class:`Kinked` lasts, what these give is its own to say, whatever operation of torch they are in.

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

from implicitkit.foundation import compat, nesting
from implicitkit.sets.simplex import onto_simplex

Kind: TypeAlias = Literal["relu", "largest", "length"] | int
"""``"relu"``, number by number; the others of the last dimension, ``k`` the sum of the ``k`` largest."""
Side: TypeAlias = Literal["greater", "lesser", "neither"]
"""What ``torch.where`` takes of two."""

NEAR = 0.1  # of another: a gap that is small


class Kinked(TorchFunctionMode):
    """While it lasts, operations with a kink have the values that :meth:`take` says; not those of a solve inside, whose
    solution is a smooth function of what it is given, or has a kink that no operation shows.

    Raises:
        RuntimeError: one is inside a transform that the function itself has begun, so that its values are no tensors
            outside, and may not be ``anywhere``.
    """

    def __init__(self, anywhere: bool = False) -> None:
        super().__init__()
        self.level, self.depth = math.inf if anywhere else compat.level(), nesting.depth()

    @abstractmethod
    def take(self, kind: Kind, u: Tensor) -> Tensor:
        """What ``kind`` gives for ``u``."""

    @abstractmethod
    def side(self, condition: Tensor, a: Tensor, b: Tensor) -> Side:
        """What ``torch.where(condition, a, b)`` takes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        rule = _RULES.get(name)
        if (
            rule is not None
            and self.depth == nesting.depth()
            and args
            and isinstance(args[0], Tensor)
            and (args[0].is_floating_point() or name == "where")
        ):
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
    if isinstance(kind, int):
        return u.topk(kind, dim=-1).values.sum(-1)
    return torch.linalg.vector_norm(u, dim=-1) if kind == "length" else u.amax(-1)


def gaps(kind: Kind, u: Tensor) -> Tensor:
    """How far each is from its kink: a number or a length from zero, the greatest of several from the next."""
    if kind == "largest" or isinstance(kind, int):
        k = kind if isinstance(kind, int) else 1
        first = u.topk(min(k + 1, u.shape[-1]), dim=-1).values
        return first[..., min(k, u.shape[-1]) - 1] - first[..., -1]
    return u.abs() if kind == "relu" else torch.linalg.vector_norm(u, dim=-1)


def is_near(kind: Kind, u: Tensor, batch_dims: int) -> bool:
    """Is any of these within a tenth of the largest of its sample of its kink?  What has no others beside it may be."""
    apart = gaps(kind, u)
    sizes: Tensor | None = apart
    if kind == "largest" or isinstance(kind, int):
        sizes = torch.stack([apart, u.amax(-1) - u.amin(-1)], -1) if u.shape[-1] > 2 else None
    if sizes is None or sizes.ndim <= batch_dims or sizes.shape[batch_dims:].numel() < 2:
        return True
    sizes = sizes.reshape((*sizes.shape[:batch_dims], -1))
    return bool((sizes.amin(-1) <= NEAR * sizes.amax(-1)).any())


def nearest_weights(kind: Kind, v: Tensor) -> Tensor:
    """The projection of ``v`` on the weights ``w`` whose greatest ``w'u`` is the value: ``[0, 1]``, the ball, the simplex,
    and ``0 <= w <= 1`` of the sum ``k``."""
    if kind == "relu":
        return v.clamp(0, 1)
    if kind == "length":
        return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1)
    return onto_simplex(v, v.new_ones(())) if kind == "largest" else _onto_capped_simplex(v, kind)


def _onto_capped_simplex(v: Tensor, k: int) -> Tensor:
    """``min(max(v - tau, 0), 1)`` with ``tau`` such that the sum is ``k``, at most as many as there are: the sum falls
    with ``tau`` from one of ``v`` and ``v - 1`` to the next in a straight line."""
    with torch.no_grad():
        ends = torch.cat([v.detach(), v.detach() - 1], -1).sort(-1).values
        sums = (v.detach().unsqueeze(-2) - ends.unsqueeze(-1)).clamp(0, 1).sum(-1)
        last = (sums >= k).sum(-1, keepdim=True).clamp(1, ends.shape[-1] - 1) - 1
        middle = (ends.gather(-1, last) + ends.gather(-1, last + 1)) / 2
        whole, free = v >= middle + 1, (v > middle) & (v < middle + 1)
        count = free.sum(-1, keepdim=True)
    tau = (torch.where(free, v, 0).sum(-1, keepdim=True) + whole.sum(-1, keepdim=True) - k) / count.clamp_min(1)
    return torch.where(count > 0, (v - tau).clamp(0, 1), whole.to(v))


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


def _matrix_norm(
    mode: Kinked, u: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **m: Any
) -> Any:
    return _norm(mode, u, 2, dim, keepdim, **m) if ord == "fro" else NotImplemented


def _dist(mode: Kinked, u: Tensor, other: Tensor, p: Any = 2) -> Any:
    return _norm(mode, u - other, p)


def _leaky_relu(mode: Kinked, u: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return NotImplemented if inplace else negative_slope * u + (1 - negative_slope) * mode.take("relu", u)


def _prelu(mode: Kinked, u: Tensor, weight: Tensor) -> Any:
    return weight * u + (1 - weight) * mode.take("relu", u) if weight.numel() == 1 else NotImplemented


def _softshrink(mode: Kinked, u: Tensor, lambd: float = 0.5) -> Any:
    return mode.take("relu", u - lambd) - mode.take("relu", -u - lambd)


def _where(mode: Kinked, *args: Any, **kwargs: Any) -> Any:
    """``torch.where(condition, a, b)`` and ``a.where(condition, b)``."""
    if kwargs or len(args) != 3:
        return NotImplemented
    condition, a, b = args if args[0].dtype is torch.bool else (args[1], args[0], args[2])
    given = [t for t in (a, b) if isinstance(t, Tensor)]
    if not given or not isinstance(condition, Tensor) or not all(t.is_floating_point() for t in given):
        return NotImplemented
    a, b = (t if isinstance(t, Tensor) else given[0].new_full((), t) for t in (a, b))
    side = mode.side(condition, *torch.broadcast_tensors(a, b, condition)[:2])
    if side == "neither":
        return NotImplemented
    return (_greater if side == "greater" else _lesser)(mode, a + 0 * b, b + 0 * a)


def _topk(mode: Kinked, u: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    found = torch.topk(u, k, dim, largest)
    return type(found)((_ordered(mode, u, k, dim, largest), found.indices))


def _sort(mode: Kinked, u: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    found = torch.sort(u, dim=dim, descending=descending, stable=stable)
    return type(found)((_ordered(mode, u, u.shape[dim], dim, descending), found.indices))


def _ordered(mode: Kinked, u: Tensor, k: int, dim: int, descending: bool) -> Tensor:
    """The first ``k`` of the numbers in order: each is by how much one more of the largest add up to more."""
    last, n = u.movedim(dim, -1), u.shape[dim]
    counts = range(k + 1) if descending else range(n - k, n + 1)
    made = [last.sum(-1) if j == n else mode.take(j, last) if j else torch.zeros_like(last[..., 0]) for j in counts]
    found = torch.stack(made, -1).diff(dim=-1)
    return (found if descending else found.flip(-1)).movedim(-1, dim)


def _l1_loss(mode: Kinked, u: Tensor, target: Tensor, **kwargs: Any) -> Any:
    return _reduced(lambda: _abs(mode, u - target), **kwargs)


def _hinge_embedding_loss(mode: Kinked, u: Tensor, target: Tensor, margin: float = 1.0, **kwargs: Any) -> Any:
    return _reduced(lambda: torch.where(target == 1, u, mode.take("relu", margin - u)), **kwargs)


def _margin_ranking_loss(mode: Kinked, a: Tensor, b: Tensor, target: Tensor, margin: float = 0, **kwargs: Any) -> Any:
    return _reduced(lambda: mode.take("relu", margin - target * (a - b)), **kwargs)


def _multi_margin_loss(
    mode: Kinked, u: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Any = None, **kwargs: Any
) -> Any:
    if weight is not None:
        return NotImplemented
    right = torch.nn.functional.one_hot(target, u.shape[-1]).to(u)
    above = lambda: mode.take("relu", margin + u - (right * u).sum(-1, keepdim=True)) ** p  # noqa: E731
    return _reduced(lambda: ((1 - right) * above()).mean(-1), **kwargs)


def _reduced(values: Callable[[], Tensor], reduction: Any = "mean", **other: Any) -> Any:
    """What a loss makes of its numbers."""
    if reduction not in _REDUCTIONS or any(given is not None for given in other.values()):
        return NotImplemented
    return _REDUCTIONS[reduction](values())


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
    "linalg_matrix_norm": _matrix_norm,
    "dist": _dist,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "softshrink": _softshrink,
    "where": _where,
    "topk": _topk,
    "sort": _sort,
    "l1_loss": _l1_loss,
    "hinge_embedding_loss": _hinge_embedding_loss,
    "margin_ranking_loss": _margin_ranking_loss,
    "multi_margin_loss": _multi_margin_loss,
}
