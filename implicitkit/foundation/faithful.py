r"""Operations whose derivatives torch has right up to some order only, made of others wherever more may be asked for.

torch's formulas for these hold a part fixed that depends on the input, so that one derivative more of them is wrong, without
a word: of ``layer_norm``, ``batch_norm`` and ``instance_norm`` the mean and the deviation (right: two derivatives backwards,
wrong: three, or any behind one forwards), of a ``scatter_reduce`` of products the product (right: derivatives backwards,
wrong: any forwards; in place too).  The second derivative of ``logcumsumexp`` takes the logarithm of a cotangent that is
zero.  While :func:`faithful` lasts they are

    norms               (x - m) / sqrt(v + eps) * w + b,   m and v the mean and the variance of x over its dimensions
    logcumsumexp        y_i = logsumexp_{j <= i} x_j
    products by index   y_k = [self_k] prod_{j: index_j = k} x_j
    nearest neighbours  y_i = x_{j(i)}: the first derivative of F.interpolate by a factor is that of other neighbours
    distances           y_ij = |a_i - b_j|_p, which have a second derivative only so

as equal as rounding allows, and differentiable as often as one likes, the last two by doubling, in ``log n`` passes (sums
of complex numbers over all pairs); equations and determinants: :mod:`~implicitkit.foundation.faithful_factors`.

:func:`mapped` is for evaluations inside ``torch.vmap`` that derivatives are taken of from outside, where torch's of
``select_scatter`` is wrong; :func:`transposed` for those that are differentiated by a transposed derivative, where that of a
sparse tensor is lost, and fused attention has none.  What was found so is all that a table of 440 functions shows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.faithful_factors import FACTORS, IN_ANY_MODE
from implicitkit.foundation.numbers_in_forward_mode import NUMBERS

_HALF = (torch.float16, torch.bfloat16)
_AS_IT_IS = nullcontext()


def is_replaced(func: Any) -> bool:
    """Is it one of those that :func:`faithful` makes of others?"""
    return func in _INSTEAD


def faithful(*, as_torch: bool = False) -> AbstractContextManager[Any]:
    """Around an evaluation whose derivatives may be differentiated: inside transforms, and where gradients are recorded.
    Every operation takes two microseconds there to be looked at.  ``as_torch``: nothing is done there that has wrong
    derivatives, but for numbers in forward mode (:mod:`~implicitkit.foundation.numbers_in_forward_mode`)."""
    if compat.has_forward_level():
        return _Instead(_PLAINLY if as_torch else _FORWARD)
    derives = torch.is_grad_enabled() or compat.transforms_active()
    return _Instead(_INSTEAD) if derives and not as_torch else _AS_IT_IS


def mapped() -> AbstractContextManager[Any]:
    """Around an evaluation inside ``torch.vmap``."""
    return _Instead(_MAPPED) if torch.is_grad_enabled() else _AS_IT_IS


@contextmanager
def transposed() -> Iterator[None]:
    """Around an evaluation of which ``J v`` is taken as the derivative of ``w -> J'w``."""
    with _Instead(_TRANSPOSED), unfused():
        yield


class unfused(AbstractContextManager[None]):
    """Around an evaluation whose derivative may be differentiated: attention and distances by their formulas, since torch's
    fast kernels have one derivative, backwards.  Torch's switch is one for all threads: the first one inside turns it, the
    last one back."""

    _lock = threading.Lock()
    _inside = 0
    _switch: AbstractContextManager[Any] = _AS_IT_IS

    @staticmethod
    def on() -> bool:
        return unfused._inside > 0

    def __enter__(self) -> None:
        with unfused._lock:
            if not unfused._inside:
                unfused._switch = sdpa_kernel(SDPBackend.MATH)
                unfused._switch.__enter__()
            unfused._inside += 1

    def __exit__(self, *error: object) -> None:
        with unfused._lock:
            unfused._inside -= 1
            if not unfused._inside:
                unfused._switch.__exit__(None, None, None)


class _Instead(TorchFunctionMode):
    """Other functions in the place of some, for the sake of their derivatives."""

    derives: ClassVar[bool] = True

    def __init__(self, instead: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.instead.get(func, func)(*args, **(kwargs or {}))


def _normed(x: Tensor, dims: list[int], eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """In single precision at least, as torch computes it: squares leave the range of half precision."""
    wide = x.float() if x.dtype in _HALF else x
    centred = wide - wide.mean(dims, keepdim=True)
    y = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    shape = None if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or any(list(t.shape[-len(shape) :]) != shape for t in (input, weight, bias) if t is not None):
        return torch.layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)  # torch's error
    device = input.device.type
    if input.dtype in _HALF and device != "cpu" and torch.is_autocast_enabled(device):
        input = input.float()  # there it is one of those that autocast has in single precision
    return _normed(input, list(range(-len(shape), 0)), eps, weight, bias)


def _native_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(-len(normalized_shape), 0))
    return _layer_norm(input, normalized_shape, weight, bias, eps), *_moments(input, dims, eps, True)


def _moments(x: Tensor, dims: list[int], eps: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The mean, and one over the deviation."""
    return x.mean(dims, keepdim=keepdim), (x.var(dims, correction=0, keepdim=keepdim) + eps).rsqrt()


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
    return _normed(input, _of_channels(input), eps, _by_channel(weight, input), _by_channel(bias, input))


def _of_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _in_torchs_order(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of :mod:`torch.nn.functional`, its arguments in the order of the one in :mod:`torch`."""

    def called(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *how: Any,
        cudnn_enabled: bool = True,
        **named: Any,
    ) -> Tensor:
        return norm(input, running_mean, running_var, weight, bias, *how[:3], **named)

    return called


def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not training:
        return torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    out = _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return out, *_moments(input, _of_channels(input), eps, False)


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
    if named or not input.ndim or not (input.is_floating_point() or input.is_complex()):
        return torch.logcumsumexp(input, dim, **named)
    if input.is_complex():
        return _logcumsumexp_of_complex(input, dim)
    y, k = input.movedim(dim, -1), 1
    while k < y.shape[-1]:  # of the last k, then of the last 2 k
        y = torch.cat([y[..., :k], _logaddexp(y[..., k:], y[..., :-k])], -1)
        k *= 2
    return y.movedim(-1, dim)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))``, whose derivative is zero where both are minus infinity, as masked entries are."""
    top = torch.maximum(a, b).detach()
    top = torch.where(top.isfinite(), top, 0)
    summed = (a - top).exp() + (b - top).exp()
    none = summed == 0
    return (summed.masked_fill(none, 1).log() + top).masked_fill(none, -torch.inf)


def _logcumsumexp_of_complex(input: Tensor, dim: int) -> Tensor:
    x = input.movedim(dim, -1)
    n = x.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    top = x.real.detach().cummax(-1).values.unsqueeze(-1)
    pairs = (x.unsqueeze(-2) - top).exp().masked_fill(later, 0)
    found = (pairs.sum(-1).log() + top.squeeze(-1)).movedim(-1, dim)
    turns = (torch.logcumsumexp(input.detach(), dim) - found.detach()).imag / (2 * math.pi)
    return found + torch.complex(torch.zeros_like(turns), 2 * math.pi * turns.round())  # on torch's branch


def _scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True, **named: Any
) -> Tensor:
    plain = reduce != "prod" or named or not input.ndim or not index.numel() or src.dtype != input.dtype
    if plain or not input.ndim == index.ndim == src.ndim:
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self, **named)
    x = src[tuple(slice(0, n) for n in index.shape)].movedim(dim, -1)
    places, order = index.movedim(dim, -1).sort(dim=-1, stable=True)
    x, k = x.gather(-1, order), 1
    while k < x.shape[-1]:  # products of the last k, then of the last 2 k, of those that have one place
        x = torch.cat([x[..., :k], x[..., k:] * torch.where(places[..., k:] == places[..., :-k], x[..., :-k], 1)], -1)
        k *= 2
    more = torch.nn.functional.pad(places.diff(dim=-1) == 0, (0, 1))  # of the same place, behind
    here = input.movedim(dim, -1)
    part = here[tuple(slice(0, n) for n in places.shape[:-1])]
    made = torch.zeros_like(part).scatter_add(-1, places, torch.where(more, 0, x))
    hit = torch.zeros_like(part).scatter_add(-1, places, torch.where(more, 0, torch.ones_like(x))) > 0
    made = part * torch.where(hit, made, 1) if include_self else torch.where(hit, made, part)
    if made.shape == here.shape:
        return made.movedim(-1, dim)
    out = here.clone()
    out[tuple(slice(0, n) for n in made.shape)] = made
    return out.movedim(-1, dim)


def _scatter_reduce_(input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **named: Any) -> Tensor:
    if reduce != "prod":
        return input.scatter_reduce_(dim, index, src, reduce, **named)
    return input.copy_(_scatter_reduce(input.clone(), dim, index, src, reduce, **named))


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    dim, n = dim % input.ndim, input.shape[dim]
    index = index % n
    parts = input.narrow(dim, 0, index), src.unsqueeze(dim), input.narrow(dim, index + 1, n - index - 1)
    return torch.cat(parts, dim)


def _sparse(maker: Callable[..., Tensor], where: int) -> Callable[..., Tensor]:
    """``maker``, which makes sparse tensors, refusing values (its argument number ``where``) whose derivative torch would
    lose."""

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


def _interpolate(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *more: Any, **named: Any
) -> Tensor:
    """Where the nearest are found by a factor they are picked by index, one dimension after another; torch's derivative
    finds others by the inverse of the factor as it is rounded (1.3 of three numbers, of volumes of any size)."""
    plain = not more and not any(named.values())
    if mode != "nearest" or scale_factor is None or size is not None or not plain or input.ndim < 3:
        return F.interpolate(input, size, scale_factor, mode, *more, **named)
    factors = tuple(scale_factor) if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * (input.ndim - 2)
    if len(factors) != input.ndim - 2 or all(float(factor).is_integer() for factor in factors):
        return F.interpolate(input, size, scale_factor, mode, **named)
    out, dtype = input, torch.promote_types(input.dtype, torch.float32)
    for dim in range(2, input.ndim):  # of the input's own shape: torch rounds the factor as that has it
        along = [1] * (dim - 2) + [-1] + [1] * (input.ndim - dim - 1)
        places = torch.arange(input.shape[dim], dtype=dtype, device=input.device).view(1, 1, *along)
        chosen = F.interpolate(places.expand(input.shape).contiguous(), scale_factor=scale_factor)[0, 0]
        out = out.index_select(dim, chosen.movedim(dim - 2, -1).reshape(-1, chosen.shape[dim - 2])[0].long())
    return out


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, *more: Any, **named: Any) -> Tensor:
    """Between all rows, by the formula where it may be differentiated twice: torch has one derivative, backwards."""
    if not unfused.on() or not (x1.ndim > 1 and x2.ndim > 1 and x1.shape[-1] == x2.shape[-1]):
        return torch.cdist(x1, x2, p, *more, **named)
    return _lengths(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Between the rows, the same."""
    if not unfused.on() or input.ndim != 2:
        return torch.pdist(input, p)
    i, j = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _lengths(input.index_select(0, i) - input.index_select(0, j), p)


def _lengths(d: Tensor, p: float) -> Tensor:
    """Norms of the rows; of those that are zero the derivatives are, too."""
    none = (d == 0).all(-1)
    return torch.linalg.vector_norm(d.masked_fill(none.unsqueeze(-1), 1), p, dim=-1).masked_fill(none, 0)


_MAPPED: dict[Any, Callable[..., Tensor]] = {
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
}
_TRANSPOSED: dict[Any, Callable[..., Tensor]] = {
    torch.sparse_coo_tensor: _sparse(torch.sparse_coo_tensor, 1),
    torch.sparse_csr_tensor: _sparse(torch.sparse_csr_tensor, 2),
    torch.sparse_csc_tensor: _sparse(torch.sparse_csc_tensor, 2),
}
_INSTEAD: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    torch.native_layer_norm: _native_layer_norm,
    torch.batch_norm: _in_torchs_order(_batch_norm),
    torch.native_batch_norm: _native_batch_norm,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _in_torchs_order(_instance_norm),
    torch.logcumsumexp: _logcumsumexp,
    Tensor.logcumsumexp: _logcumsumexp,
    torch.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce_: _scatter_reduce_,
    F.interpolate: _interpolate,
    torch.cdist: _cdist,
    torch.pdist: _pdist,
    **IN_ANY_MODE,
}
_PLAINLY = NUMBERS | FACTORS
_FORWARD = _INSTEAD | _PLAINLY
