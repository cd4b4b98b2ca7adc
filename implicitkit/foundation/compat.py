"""The private names of torch that cannot be avoided: of autograd, of its modes and of the levels of ``torch.func``.

Three modules beside this one have the others: ``pytrees.py`` those of pytrees, ``graph.py`` of the nodes of a graph,
``tracers.py`` of what records a program.  Nothing else touches one, and ``tests/contract/test_compat.py`` holds each
function to its contract: a new release of torch shows at once what moved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch._C._functorch as _functorch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

__all__ = [
    "Function",
    "around",
    "at_level_of",
    "autograd_on",
    "below_legacy_batch",
    "empty_batch",
    "forward_ad_enabled",
    "has_forward_level",
    "has_tangent",
    "in_inference",
    "is_legacy_batched",
    "is_wrapped",
    "keeps_parametrizations",
    "level",
    "mapped_over",
    "marked",
    "modes_active",
    "ordinary",
    "outside_inference",
    "own_graphs",
    "own_parametrizations",
    "own_tangents",
    "physical",
    "plain_sample",
    "reverse_inside_forward",
    "tracked",
    "transforms_active",
    "underived",
    "unseen",
    "untracked",
    "unwatched",
    "unwrap",
    "unwrap_dead_wrappers",
    "with_batches",
]

C = TypeVar("C", bound=Callable[..., Any])

# --- functorch levels
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Is a ``torch.func`` transform (grad, vjp, jvp, vmap, ...) running?"""


def modes_active() -> bool:
    """Does some dispatch mode see operations, or record them before they are dispatched?"""
    c: Any = torch._C
    before: bool = c._dispatch_tls_is_dispatch_key_included(c.DispatchKey.PreDispatch)
    return before or c._len_torch_dispatch_stack() > 0


def empty_batch() -> bool:
    """Does a ``torch.vmap`` that is running have no samples?"""
    return any(size == 0 for _, size in mapped_over())


def reverse_inside_forward() -> bool:
    """Does a reverse-mode transform run inside a forward-mode one (``torch.func.hessian``)?"""
    kinds = [c.key() for c in _functorch.get_interpreter_stack() or ()]
    forward, reverse = _functorch.TransformType.Jvp, _functorch.TransformType.Grad
    return forward in kinds and reverse in kinds[kinds.index(forward) :]


is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Does ``t`` belong to a level of a ``torch.func`` transform?"""


is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Is ``t`` a batched tensor of ``torch.autograd.grad(..., is_grads_batched=True)``, which allows no control flow?"""


def below_legacy_batch(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """``function`` of the plain tensor under a legacy batched one, with its batches in front, and its result batched again.

    Inside ``function`` everything is allowed that is so outside of ``is_grads_batched=True``: control flow, random numbers.
    """
    top = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    levels: list[int] = []
    for level in range(1, top + 1):
        # a tensor that is not batched at this level is expanded to whatever size is asked for
        one, two = (torch._remove_batch_dim(t, level, size, 0) for size in (1, 2))
        if one.shape == two.shape:
            levels.append(level)
            t = one
    for _ in range(top):
        torch._C._vmapmode_decrement_nesting()
    try:
        out = function(t)
    finally:
        for _ in range(top):
            torch._C._vmapmode_increment_nesting()
    for i, level in enumerate(levels):  # the batch of the last level stands first
        out = torch._add_batch_dim(out, len(levels) - 1 - i, level)
    return out


unwrap: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
"""The tensor one level below."""


def around(inner: Tensor, t: Tensor) -> Tensor:
    """``inner`` in a wrapper like that of ``t``: of the same level, and batched along the same dimension."""
    if _functorch.is_batchedtensor(t):
        return _functorch._add_batch_dim(inner, _functorch.maybe_get_bdim(t), _functorch.maybe_get_level(t))
    return _functorch._wrap_for_grad(inner, _functorch.maybe_get_level(t))


def level(t: Tensor | None = None) -> int:
    """The number of the transform that ``t`` belongs to, or of the innermost one running; 0: none."""
    if t is not None:
        return _functorch.maybe_get_level(t) if is_wrapped(t) else 0
    top = _functorch.peek_interpreter_stack()
    return 0 if top is None else top.level()


@contextlib.contextmanager
def at_level_of(t: Tensor) -> Iterator[None]:
    """Inside, the transforms above the level that ``t`` belongs to (all of them, for a plain tensor) are suspended: while an
    inner level is current, torch does not see the tangents of outer ones."""
    wanted, suspended = level(t), []
    try:
        while level() > wanted:
            suspended.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while suspended:
            _functorch.push_dynamic_layer_stack(suspended.pop())


def marked(t: Tensor) -> Tensor:
    """A leaf of plain autograd like the plain tensor ``t``, also while transforms run (torch refuses to make one there)."""
    with at_level_of(t), autograd_on() if in_inference() else contextlib.nullcontext():
        leaf = ordinary(t.detach())
        allowed = _functorch.get_inplace_requires_grad_allowed()
        _functorch.set_inplace_requires_grad_allowed(True)
        try:
            return leaf.requires_grad_()
        finally:
            _functorch.set_inplace_requires_grad_allowed(allowed)


def tracked(t: Tensor, batched: bool = True) -> bool:
    """Does ``t`` depend on something differentiable, or ``batched`` if that counts, at any level?  (A grad level wraps the
    output of every operation, tracked or not, so that "is wrapped" is not the question.)"""
    while _functorch.is_functorch_wrapped_tensor(t):
        if (batched and _functorch.is_batchedtensor(t)) or t.requires_grad or has_tangent(t):
            return True
        t = _functorch.get_unwrapped(t)
    return t.requires_grad or (forward_ad._current_level >= 0 and has_tangent(t))


def physical(t: Tensor) -> Tensor:
    """The plain tensor under every wrapper of a transform, with the batches it has there."""
    while _functorch.is_functorch_wrapped_tensor(t):
        t = _functorch.get_unwrapped(t)
    return t


def batches_in_front(t: Tensor) -> tuple[Tensor, int]:
    """The plain tensor under every wrapper, detached, with the batches of ``vmap`` in front, the outermost first, and how
    many there are."""
    if not _functorch.is_functorch_wrapped_tensor(t):
        return t.detach(), 0
    dim = _functorch.maybe_get_bdim(t) if _functorch.is_batchedtensor(t) else -1
    inner, count = batches_in_front(_functorch.get_unwrapped(t))
    return (inner.movedim(dim + count, count), count + 1) if dim >= 0 else (inner, count)


def mapped_over() -> list[tuple[int, int]]:
    """The levels of the ``vmap``s that run, the outermost first, with how many samples each maps over."""
    found = (c for c in _functorch.get_interpreter_stack() or () if c.key() == _functorch.TransformType.Vmap)
    return [(c.level(), _functorch.CVmapInterpreterPtr(c).batchSize()) for c in found]


def with_batches(t: Tensor, levels: Sequence[int]) -> Tensor:
    """The tensor whose batches at these levels of ``vmap``, the outermost first, a plain one has in front: the inverse of
    :func:`batches_in_front`."""
    t = physical(t)  # which levels of derivatives above have wrapped
    for level in levels:
        t = _functorch._add_batch_dim(t, 0, level)
    return t


def plain_sample(t: Tensor) -> Tensor:
    """A detached plain tensor of the shape that the user's function sees: under ``vmap`` the first sample, or zeros."""
    with torch._C.DisableTorchFunction():  # what lies under a wrapper is no tensor that a function uses
        while _functorch.is_functorch_wrapped_tensor(t):
            dim = _functorch.maybe_get_bdim(t) if _functorch.is_batchedtensor(t) else -1
            t = _functorch.get_unwrapped(t)
            if dim is not None and dim >= 0:
                t = t.select(dim, 0) if t.shape[dim] else t.new_zeros(t.shape[:dim] + t.shape[dim + 1 :])
    return t.detach()


def unseen() -> Any:
    """A context in which no mode of ``__torch_function__`` sees what is done: for looks that are no use of a tensor."""
    return torch._C.DisableTorchFunction()


def unwatched(*why: str) -> Any:
    """A context in which modes of ``__torch_function__`` whose class says that it ``watches``, or else something of ``why``,
    do not see what is done: for values of which nobody asks where they come from.  Others, which put tensors in place of
    others, stay in force."""
    stack = torch.overrides._get_current_function_mode_stack()
    watching = [any(getattr(mode, name, False) for name in why or ("watches",)) for mode in stack]
    return _set_aside(stack, watching) if any(watching) else contextlib.nullcontext()


@contextlib.contextmanager
def _set_aside(stack: Sequence[Any], aside: Sequence[bool]) -> Iterator[None]:
    for _ in stack:
        torch.overrides._pop_mode()
    kept = [mode for mode, is_aside in zip(stack, aside, strict=True) if not is_aside]
    for mode in kept:
        torch.overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            torch.overrides._pop_mode()
        for mode in stack:
            torch.overrides._push_mode(mode)


def unwrap_dead_wrappers(values: Sequence[Any]) -> tuple[Any, ...]:
    """These values as they are, but tensors that have outlived their transform unwrapped."""
    return tuple([_functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in values])


# --- inference mode
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


keeps_parametrizations: Callable[[], int] = functools.partial(getattr, parametrize, "_cache_enabled")
"""Inside of how many ``parametrize.cached()`` is this?  Asked at every evaluation: no call of Python's."""


@contextlib.contextmanager
def own_parametrizations() -> Iterator[None]:
    """Inside ``parametrize.cached()``, a cache for what is evaluated within: weights that somebody else has computed are not
    used there, and none that is computed there, of stand-ins or untracked, is met outside."""
    outside, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = outside


def in_inference() -> bool:
    """Is autograd off because of ``torch.inference_mode``, for plain tensors?  (Below a ``torch.func`` transform
    ``torch.is_inference_mode_enabled`` says no, and all the same nothing records there.)"""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)


@contextlib.contextmanager
def autograd_on() -> Iterator[None]:
    """Inside, ``torch.inference_mode`` is off and the modes of autograd (reverse and forward) are as they were."""
    grad, forward = torch.is_grad_enabled(), forward_ad._is_fwd_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad), forward_ad._set_fwd_grad_enabled(forward):
        yield


def outside_inference(function: C) -> C:
    """A function of plain tensors that computes as if ``torch.inference_mode`` were off: what it differentiates inside is
    recorded, and inference tensors among its arguments, which nothing may save, are copied.  (At the level of a transform
    it runs as it is: what it calls below is another such function.)"""

    @functools.wraps(function)
    def entry(*args: Any) -> Any:
        if not in_inference() or transforms_active():
            return function(*args)
        with autograd_on():
            return function(*map(ordinary, args))

    return entry  # type: ignore[return-value]


def ordinary(x: Any) -> Any:
    """A copy of a plain inference tensor that autograd may save; anything else as it is."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


@contextlib.contextmanager
def underived() -> Iterator[None]:
    """Inside, no derivative is recorded, nor carried along forwards."""
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        yield


def untracked() -> Any:
    """``torch.no_grad()``, where that is not so already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


# --- saved-tensor hooks
def own_graphs() -> Any:
    """A context for graphs that nobody else sees: the hooks on saved tensors that are active around it do not apply.

    Activation checkpointing is such a pair of hooks: it would compute the whole of its function, and the solve in it, anew
    for every product with a Jacobian inside the solver; and ``torch.func`` refuses to run under any.
    """
    return _NOTHING if _top_hooks(False) is None else _without_hooks()


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    suspended = []
    try:
        while (pair := _top_hooks(False)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            suspended.append(pair)
        yield
    finally:
        while suspended:
            torch._C._autograd._push_saved_tensors_default_hooks(*suspended.pop())


# --- forward-mode AD
def has_forward_level() -> bool:
    """Is a ``torch.autograd.forward_ad.dual_level`` (or a forward-mode transform) open?"""
    return forward_ad._current_level >= 0


def has_tangent(t: Tensor) -> bool:
    """Does ``t`` carry a forward-mode tangent, at the level of transforms that it belongs to?"""
    if forward_ad._current_level < 0:
        return False
    if _functorch.is_batchedtensor(t):
        return has_tangent(_functorch.get_unwrapped(t))
    with torch._C.DisableTorchFunction(), at_level_of(t):  # a look at a tensor is no use of it
        if t.is_inference() or t.layout != torch.strided or not (t.is_floating_point() or t.is_complex()):
            return False  # torch makes no dual tensor of a sparse one
        return forward_ad.unpack_dual(t).tangent is not None


@contextlib.contextmanager
def forward_ad_enabled(saved: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Inside ``Function.jvp``: forward AD switched on again, and the saved tensors without this level's own tangents.

    torch calls ``Function.jvp`` with forward AD switched off, so that an outer forward level silently sees zeros
    (pytorch/pytorch#197867); the tangents of this level must be stripped first, or torch refuses to nest them.  Under
    ``is_grads_batched=True``, where no tensor can be stripped, no outer level can be open either: it stays off.
    """
    if any(map(is_legacy_batched, saved)):
        yield list(saved)
        return
    with forward_ad._set_fwd_grad_enabled(True):
        yield [forward_ad.unpack_dual(t).primal if t.layout == torch.strided else t for t in saved]


def own_tangents(t: Tensor) -> Tensor:
    """``t`` with tangents of its own precision: torch gives ``0.5 * w``, of a 0-dim ``w`` in float32, one of float64, and
    has no matrix product of such a pair."""
    narrow = has_forward_level() and t.is_floating_point() and t.dtype != torch.float64
    return t.double().to(t.dtype) if narrow else t


def entries_of(t: Tensor) -> tuple[Tensor, Tensor]:
    """``(places, values)`` of a sparse tensor in coordinates, which may name a place several times."""
    return t._indices(), t._values()


class Function(torch.autograd.Function):
    """An ``autograd.Function`` whose ``forward`` takes positional arguments without defaults: torch looks for defaults in
    its signature at every call, a twentieth of a small solve."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """``forward(*args)``, with this Function's rules for derivatives."""
        if transforms_active():
            return super().apply(*args)
        # a tensor that has outlived its transform is taken for what is in it, as torch does
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]
