"""What records a program or watches it run: ``torch.compile``, exporters and tracers, dispatch modes.

The private names of torch for them, as in :mod:`~implicitkit.foundation.compat`.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from implicitkit.foundation import recording
from implicitkit.foundation.by_class import by_class
from implicitkit.foundation.errors import CapabilityError

__all__ = [
    "NO_NUMBERS",
    "TorchDispatchMode",
    "compiles",
    "is_compiled",
    "is_fake",
    "lost_second_derivative",
    "opaque_to_compile",
    "operation",
    "refuse_tracing",
]

C = TypeVar("C", bound=Callable[..., Any])

NO_NUMBERS = (
    "a solve needs numbers, and {what} have none: how many steps it takes depends on values. Its solution has the shapes, "
    "dtypes and device of z0: torch.empty_like(z0) stands for it"
)
_MODES: Any = torch._C._TorchDispatchModeKey
_COMPILED_TWICE = "CompiledFunctionBackwardBackward"
_at_work: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback  # who looks at the frames that this thread runs
_outside = contextvars.ContextVar("_outside", default=False)  # is this inside a call that the compiler does not see?


# --- what only records
def refuse_tracing(linearisable: bool = False) -> None:
    """Raise where operations are recorded (``torch.jit.trace``, ``torch.onnx.export``, ``torch.export``, ``make_fx``,
    ``torch.fx.symbolic_trace``), or shapes inferred from tensors without numbers (``FakeTensorMode``): the steps of one
    solve would be those of every input.  Also in ``torch.func.linearize``, unless the caller is ``linearisable``.

    Raises:
        CapabilityError: one of these is at work.
    """
    if torch._C._is_tracing() or torch.compiler.is_exporting():
        raise CapabilityError(
            "a solve cannot be traced or exported (torch.jit.trace, torch.onnx.export, torch.export): how many steps it "
            "takes depends on values, and the graph would hold those of one input. Export the parts around it, or a loop "
            "of your own with a fixed number of evaluations of the function"
        )
    if recording.paused():
        return
    if recording.recorder() is not None:
        if recording.linearising() and linearisable:
            return
        raise CapabilityError(
            "a solve cannot be recorded by make_fx, nor a convex layer by torch.func.linearize: how many steps they take "
            "depends on values. Use torch.func.jvp, or torch.func.vjp of vjp, for products with the Jacobian"
        )
    if getattr(sys.modules.get("torch.fx._symbolic_trace"), "_is_fx_tracing_flag", False):
        raise CapabilityError(
            "a solve cannot be traced (torch.fx.symbolic_trace): how many steps it takes depends on values. Make the layer "
            "with the solve a leaf (a torch.fx.Tracer whose is_leaf_module says so), or wrap the call (torch.fx.wrap)"
        )
    if torch._C._get_dispatch_mode(_MODES.FAKE) is not None:
        raise CapabilityError(NO_NUMBERS.format(what="tensors inside FakeTensorMode"))


def is_fake(t: Tensor) -> bool:
    """Is this a fake tensor, which has a shape and no numbers?"""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(t, module.FakeTensor)


def lost_second_derivative(nodes: Callable[[], Iterable[Any]]) -> bool:
    """Is there a first derivative through a function that AOTAutograd has compiled among these nodes of a graph?

    The backward of such a function is one node of a graph that ends there: some second derivatives raise ("does not
    currently support double backward"), and those by inputs that were saved detached are zero without a word.
    """
    if "torch._functorch._aot_autograd.runtime_wrappers" not in sys.modules:
        return False
    return _COMPILED_TWICE in [type(node).__name__ for node in nodes()]


# --- dispatch modes
class TorchDispatchMode(_python_dispatch.TorchDispatchMode):  # no public home
    """Sees every operation below autograd, and does not import ``torch._dynamo``, which takes seconds, to be left alone."""

    _should_skip_dynamo = classmethod(lambda cls: False)


def operation(func: Any) -> tuple[str, bool]:
    """The name of an operation as a dispatch mode sees it, ``aten::add_``, and whether it writes into its arguments."""
    return func._schema.name, func._schema.is_mutable


# --- torch.compile
def opaque_to_compile(function: C) -> C:
    """``torch.compiler.disable``, without importing the compiler (over a second) before someone uses it.

    Behind it ``torch.compile`` breaks the graph around the call; were it to trace inside, it would drop the custom
    backward under ``torch.func`` transforms without a word (pytorch/pytorch#192985).  A call from within another, with no
    compiler at work on this thread, is a plain call: all that the outer one has set holds.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if not compiles() or (_outside.get() and _at_work() is None):
            return function(*args, **kwargs)
        if disabled is None:
            disabled = _disable(function, entry)
        return disabled(*args, **kwargs)

    # autograd.Function.apply binds its arguments by signature at every call: found here, it need not be made again
    entry.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    vars(entry).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="a solve cannot be traced or exported")
    if compiles():
        disabled = _disable(function, entry)
    return entry  # type: ignore[return-value]


def compiles() -> bool:
    """Can anything be compiled: has the compiler been loaded?  Not while a thread is loading it: to import a part of it then
    breaks that import, in both threads."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and not getattr(compiler.__spec__, "_initializing", False)


def is_compiled(x: Any) -> bool:
    """Is this a function or a module that ``torch.compile`` returned, or a module with a compiled method?"""
    if not compiles():
        return False
    if not isinstance(x, torch.nn.Module):
        return _is_compiled_function(x)
    own = vars(x).values()
    if types.FunctionType in map(type, own) and any(map(_is_compiled_function, own)):
        return True
    return x._compiled_call_impl is not None or "_orig_mod" in x._modules or _has_compiled_methods(type(x))


def _is_compiled_function(x: Any) -> bool:
    compiled = isinstance(x, types.FunctionType) and hasattr(x, "_torchdynamo_orig_callable")
    return compiled and not getattr(x, "_torchdynamo_disable", False)


@by_class
def _has_compiled_methods(cls: type) -> bool:
    return any(_is_compiled_function(a) for base in cls.__mro__ for a in vars(base).values())


def _graphs_kept() -> Callable[[], object]:
    """From now on, on this thread, compiled functions keep what their backward needs, until what is returned is called:
    products with a Jacobian go through it many times, and AOTAutograd else gives the buffers of a graph away at the first
    ("compiled with non-empty donated buffers")."""
    config = sys.modules.get("torch._functorch.config")
    if config is None:
        return bool
    revert: Callable[[], object] = _not_donated(config)()
    return revert


@functools.cache
def _not_donated(config: Any) -> Any:
    """Changes the setting, also from within and on several threads, and returns what restores it; a context of torch's that
    does takes as long as ten small operations to enter."""
    return config._make_closure_patcher(donated_buffer=False)


def _disable(function: C, entry: Callable[..., Any]) -> C:
    """The function as the compiler must not see it; the frame of the wrapper around it is not to be traced either."""
    from torch._dynamo.eval_frame import skip_code

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        skip_code(entry.__code__)  # one code object for every wrapper; torch._dynamo.reset() forgets it
        token, donated_again = _outside.set(True), _graphs_kept()
        try:
            return function(*args, **kwargs)
        finally:
            donated_again()
            _outside.reset(token)

    return torch.compiler.disable(unseen)


_disable._torchdynamo_disable = True  # type: ignore[attr-defined]
