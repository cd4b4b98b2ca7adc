"""Private names of torch, and a size of NumPy's, that the layer reads, all of them here (tested against those installed)."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.random import MT19937, get_state, mtrand
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import CheckpointFunction

import implicitkit as ik
from implicitkit_deq.held.sharding import is_gathered

SETTING = "_forward_pre_hooks"  # where a module keeps hooks that are called before it

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_OTHERS = (torch.autograd.backward.__code__, inspect.unwrap(ik.solve).__code__)


def called_whole(cell: Any) -> bool:
    """Must a cell be called as a module, because somebody is to see, shard or replace its calls?

    True with forward and backward hooks and after ``cell.compile()``; not for a sharded cell, which is called once around
    the whole solve.
    """
    if not isinstance(cell, nn.Module) or is_gathered(cell):
        return False
    return any(getattr(cell, name) for name in _HOOKS) or cell._compiled_call_impl is not None


def parametrized(module: nn.Module) -> bool:
    """Has it weights under ``torch.nn.utils.parametrize``?  Torch's own question raises an error inside for each that has
    none."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def hooks_that_set(module: nn.Module) -> Iterator[tuple[int, str, Callable[[nn.Module, Any], None]]]:
    """The hooks of ``torch.nn.utils`` that set a weight before every call of the module: key, name of the weight, hook."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, (SpectralNorm, WeightNorm)):
            yield key, hook.name, hook
        elif isinstance(hook, BasePruningMethod):
            yield key, hook._tensor_name, hook


def observed(module: nn.Module) -> bool:
    """Has a module hooks that see what it returns?"""
    return bool(module._forward_hooks)


def is_batched(t: Tensor) -> bool:
    """Does a tensor belong to a level of ``torch.vmap``, be it below one of ``torch.func.grad`` or ``jvp``?"""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t) and not functorch.is_batchedtensor(t):
        t = functorch.get_unwrapped(t)
    return bool(functorch.is_batchedtensor(t))


def is_plain(t: Tensor) -> bool:
    """Has a tensor numbers of its own, and no derivative, tangent or batch of a transform?"""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
    _, tangent = unpack_dual(t)
    return not (wrapped or t.requires_grad or t.layout != torch.strided or tangent is not None)


def autocast_on(device: torch.device) -> bool:
    """Is autocast on for a device?  Never for one that autocast does not know (``meta``)."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def computed_again() -> bool:
    """Is this a call that ``checkpoint(..., use_reentrant=True)`` makes for the second time, in its backward?

    Told by the frames: torch's checkpoint calls its function from its own ``backward``.  Not in a backward that a checkpoint
    has started, as in the derivative of a solve before it, and not in a solve, which moves no buffer of its function.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in _OTHERS:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def trainable(cell: Any) -> list[nn.Parameter]:
    """The parameters of a cell that require a gradient; one that two modules share more than once."""
    modules = cell.modules() if isinstance(cell, nn.Module) else ()
    return [p for module in modules for p in module._parameters.values() if p is not None and p.requires_grad]


def version(t: Tensor) -> int:
    """How often a tensor has been written to."""
    return t._version


def numbers_of_numpy() -> bytes:
    """What NumPy's global generator holds in memory: its words and the place of the next one, ``mt19937_state``."""
    generator = mtrand.get_bit_generator()
    if not isinstance(generator, MT19937):  # that somebody has put there
        return repr(get_state(legacy=False)).encode()
    return ctypes.string_at(generator.ctypes.state_address, 624 * 4 + 4)


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, nobody who looks at what a function does with tensors is shown it: it is no work of the function."""
    off: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return off
