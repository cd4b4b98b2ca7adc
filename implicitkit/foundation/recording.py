r"""Solves inside ``torch.func.linearize``, which records what a function does to a tangent.

``linearize(f, x)`` runs ``f`` on dual numbers ``x + \dot x`` under a recorder (``make_fx``) and keeps the operations on
tangents as a graph, ``\dot x -> J \dot x``.  What a solve does with values is none of that graph's business: it is done
while the recorder is paused (:func:`unrecorded`).  Its tangent, ``A^{-1} b`` with ``b`` linear in ``\dot x``, is one node
(:func:`recorded`), which solves when the graph is called.

A recorder that is not linearize's would keep the value of one input for every other: nothing is paused there.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError

F = TypeVar("F", bound=Callable[..., Any])
_paused = contextvars.ContextVar("_paused", default=False)


def paused() -> bool:
    """Is this inside :func:`unrecorded`, and a graph being recorded outside?"""
    return _paused.get()


def recorder() -> Any:
    """The mode that records operations as a graph, or ``None``; asked of torch only where some dispatch mode is at work."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if module is None or not compat.modes_active():
        return None
    return module.get_proxy_mode()


def linearising() -> bool:
    """Is what is recorded now the graph of ``torch.func.linearize``?  (It evaluates its function before that: a recorder
    around it is met there.)

    Raises:
        CapabilityError: it is called inside another transform, where the graph has numbers of memory that nobody has
            written, whatever the function (torch 2.13).
    """
    parts = torch.func.linearize.__code__.co_consts
    traced = next((c for c in parts if isinstance(c, types.CodeType) and c.co_name == "trace_fn"), None)
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not traced:
        frame = frame.f_back
    if _in_transform(frame):
        raise CapabilityError(
            "torch.func.linearize gives wrong numbers inside another transform, of a solve or not: use torch.func.jvp there"
        )
    return frame is not None


def _in_transform(frame: types.FrameType | None) -> bool:
    """Is a frame inside a call of one of torch's transforms?  What these track may be captured by what is called there."""
    codes = compat.codes_of_transforms()
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


class _Recorded:
    """A context around what may be recorded, or a decorator of it: nothing at all where nothing is."""

    __slots__ = ("_entered", "_make")

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if recorder() is not None:
            self._entered = self._make()
            self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return None if self._entered is None else self._entered.__exit__(*error)

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            if recorder() is None:
                return function(*args, **kwargs)
            with self._make():
                return function(*args, **kwargs)

        return entry  # type: ignore[return-value]


def unrecorded() -> _Recorded:
    """Inside, what is computed leaves no trace in the graph of ``torch.func.linearize``: it is a constant to it."""
    return _Recorded(_unrecorded)


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        _paused.set(True)
        try:
            yield
        finally:
            _paused.set(False)


def holds(condition: Tensor) -> bool:
    """``bool(condition)``, also of numbers that are being recorded."""
    with unrecorded():
        return bool(condition)


def refusing() -> _Recorded:
    """Where operations are recorded, what a graph cannot hold is refused: that something inside reads a value (torch's
    refusal in other words), or writes numbers into a part of a tensor (``a[0] = b``), which torch forgets.

    Raises:
        CapabilityError: it does.
    """
    return _Recorded(_refusing)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    mode = recorder()
    before = len(mode.tracer.graph.nodes)
    try:
        yield
    except RuntimeError as error:
        if "value out of a tracing tensor" not in str(error):
            raise
        raise CapabilityError(
            "torch.func.linearize records what a function does to a tangent, and here what it does depends on values that "
            "are not known to it (an `if`, .item(), or a rule that needs them): use torch.func.jvp"
        ) from error
    if any(map(_writes_constants, list(mode.tracer.graph.nodes)[before:])):
        raise CapabilityError(
            "torch.func.linearize forgets what a function writes into a part of a tensor (a[0] = b): use torch.where, "
            "torch.stack or torch.cat in the function, or torch.func.jvp"
        )


def _writes_constants(node: Any) -> bool:
    """Does it write into a view, and nothing that depends on the tangent?"""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or not getattr(node.args[0].target, "is_view", False):
        return False
    return not any(map(_moves, node.all_input_nodes))


def recorded(
    function: Callable[..., Tensor], given: Sequence[Tensor], like: Tensor, held: Sequence[Tensor] = ()
) -> Tensor | None:
    """A linear map of what is ``given`` to something ``like`` this, as one node of the graph that is being recorded, or
    ``None`` if there is none, or all are constants to it.  The numbers of what is returned mean nothing, like those of the
    tangent at work.  Inside the node nothing is forgotten that is written in place.  It has a graph of autograd if something
    given, or ``held`` by the function, requires grad."""
    mode = recorder()
    if mode is None:
        return None
    from torch.fx.experimental import proxy_tensor

    slots = [proxy_tensor.get_proxy_slot(t, mode.tracer, None) for t in given]
    if not any(slot is not None and _moves(slot.proxy.node) for slot in slots):
        return None
    with proxy_tensor.disable_proxy_modes_tracing():
        out = torch.zeros_like(like)
    args = tuple(t if slot is None else slot.proxy for t, slot in zip(given, slots, strict=True))

    def node(*given: Tensor) -> Tensor:
        graph = compat.transforms_active() or any(t.requires_grad for t in (*given, *held))
        with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
            return function(*given)

    proxy = mode.tracer.create_proxy("call_function", node, args, {})
    proxy_tensor.track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)
    return out


def _moves(node: Any) -> bool:
    """Does a node depend on the tangent?"""
    seen, left = set[Any](), [node]
    while left:
        node = left.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            left.extend(node.all_input_nodes)
    return False
