r"""Operations whose derivatives torch has right up to some order only, made of others wherever more may be asked for.

torch's formulas for these hold a part fixed that depends on the input, so that one derivative more of them is wrong, without
a word: of ``layer_norm``, ``batch_norm`` and ``instance_norm`` the mean and the deviation (right: two derivatives backwards,
wrong: three, or any behind one forwards), of a ``scatter_reduce`` of products the product.  The second derivative of
``logcumsumexp`` takes the logarithm of a cotangent that is zero.  While :func:`faithful` lasts they are

    norms               (x - m) / sqrt(v + eps) * w + b,   m and v the mean and the variance of x over its dimensions
    logcumsumexp        y_i = logsumexp_{j <= i} x_j
    products by index   y_k = [self_k] prod_{j: index_j = k} x_j

as equal as rounding allows, and differentiable as often as one likes.  ``logcumsumexp`` and the products go over all pairs.

:func:`mapped` is for evaluations inside ``torch.vmap`` that derivatives are taken of from outside, where torch's of
``select_scatter`` is wrong; :func:`transposed` for those that are differentiated by a transposed derivative, where that of a
sparse tensor is lost.  What was found so is all that a table of 440 functions shows (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError

__all__ = ["faithful", "mapped", "transposed"]


def faithful() -> AbstractContextManager[Any]:
    """Around an evaluation whose derivatives may be differentiated: inside transforms, and where gradients are recorded."""
    return _Instead(_INSTEAD) if compat.transforms_active() or torch.is_grad_enabled() else nullcontext()


def mapped() -> AbstractContextManager[Any]:
    """Around an evaluation inside ``torch.vmap``."""
    return _Instead(_MAPPED) if torch.is_grad_enabled() else nullcontext()


def transposed() -> AbstractContextManager[Any]:
    """Around an evaluation of which ``J v`` is taken as the derivative of ``w -> J'w``."""
    return _Instead(_TRANSPOSED)


class _Instead(TorchFunctionMode):
    """Other functions in the place of some."""

    def __init__(self, instead: dict[Any, Callable[..., Tensor]]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.instead.get(func, func)(*args, **(kwargs or {}))


def _normed(x: Tensor, dims: list[int], eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    y = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if list(input.shape[input.ndim - len(shape) :]) != shape:
        return F.layer_norm(input, shape, weight, bias, eps)  # torch's error
    return _normed(input, list(range(-len(shape), 0)), eps, weight, bias)


def _by_channel(t: Tensor | None, x: Tensor) -> Tensor | None:
    return None if t is None else t.view(-1, *[1] * (x.ndim - 2))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or input.ndim < 2 or input.numel() == input.shape[1]:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if running_mean is not None:  # which it moves
        F.batch_norm(input.detach(), running_mean, running_var, None, None, True, momentum, eps)
    dims = [0, *range(2, input.ndim)]
    return _normed(input, dims, eps, _by_channel(weight, input), _by_channel(bias, input))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats or input.ndim < 3 or input.shape[2:].numel() == 1:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if running_mean is not None:
        F.instance_norm(input.detach(), running_mean, running_var, None, None, True, momentum, eps)
    return _normed(input, list(range(2, input.ndim)), eps, _by_channel(weight, input), _by_channel(bias, input))


def _logcumsumexp(input: Tensor, dim: int, **named: Any) -> Tensor:
    if named or not input.ndim:
        return torch.logcumsumexp(input, dim, **named)
    x = input.movedim(dim, -1)
    n = x.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    if x.is_complex():
        top = x.real.detach().cummax(-1).values.unsqueeze(-1)
        pairs = (x.unsqueeze(-2) - top).exp().masked_fill(later, 0)
        found = (pairs.sum(-1).log() + top.squeeze(-1)).movedim(-1, dim)
        turns = (torch.logcumsumexp(input.detach(), dim) - found.detach()).imag / (2 * math.pi)
        return found + torch.complex(torch.zeros_like(turns), 2 * math.pi * turns.round())  # on torch's branch
    pairs = x.unsqueeze(-2).expand(*x.shape, n).masked_fill(later, -torch.inf)
    return pairs.logsumexp(-1).movedim(-1, dim)


def _scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True, **named: Any
) -> Tensor:
    if reduce != "prod" or named or not input.ndim or input.ndim != index.ndim:
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self, **named)
    part = tuple(slice(0, n) for n in index.shape)
    x, index = src[part].movedim(dim, -1), index.movedim(dim, -1)
    place = torch.arange(input.shape[dim], device=input.device).unsqueeze(-1)
    hit = index.unsqueeze(-2) == place
    made = torch.where(hit, x.unsqueeze(-2), 1).prod(-1)
    here = input.movedim(dim, -1)[tuple(slice(0, n) for n in made.shape)]
    made = made * here if include_self else torch.where(hit.any(-1), made, here)
    if made.shape == input.movedim(dim, -1).shape:
        return made.movedim(-1, dim)
    out = input.movedim(dim, -1).clone()
    out[tuple(slice(0, n) for n in made.shape)] = made
    return out.movedim(-1, dim)


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    dim, n = dim % input.ndim, input.shape[dim]
    index = index % n
    parts = input.narrow(dim, 0, index), src.unsqueeze(dim), input.narrow(dim, index + 1, n - index - 1)
    return torch.cat(parts, dim)


def _sparse(maker: Callable[..., Tensor], where: int) -> Callable[..., Tensor]:
    """Of a maker of sparse tensors whose values are its argument number ``where``."""

    def made(*args: Any, **named: Any) -> Tensor:
        values = args[where] if len(args) > where else named.get("values")
        if isinstance(values, Tensor) and compat.tracked(values):
            raise CapabilityError(
                f"torch loses the derivative of {maker.__name__} wherever a product with the Jacobian is formed (forward "
                "mode, Hessians): fill a dense tensor, torch.zeros(...).index_put((rows, columns), values), or use reverse "
                "mode"
            )
        return maker(*args, **named)

    return made


_MAPPED: dict[Any, Callable[..., Tensor]] = {
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
}
_TRANSPOSED: dict[Any, Callable[..., Tensor]] = {
    torch.sparse_coo_tensor: _sparse(torch.sparse_coo_tensor, 1),
    torch.sparse_csr_tensor: _sparse(torch.sparse_csr_tensor, 2),
    torch.sparse_csc_tensor: _sparse(torch.sparse_csc_tensor, 2),
}
_INSTEAD: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch.logcumsumexp: _logcumsumexp,
    Tensor.logcumsumexp: _logcumsumexp,
    torch.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce: _scatter_reduce,
}
