"""The state before the first step: shapes, dtypes, and where its values come from."""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.compat import trainable, version
from implicitkit_deq.starting.extrapolation import Trend
from implicitkit_deq.starting.warm_start import Followed, Last, usable

_STARTS = ("zeros", "learned", "last")


def is_shape(x: Any) -> bool:
    """Is this the shape of one tensor, rather than a pytree of shapes?"""
    return isinstance(x, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) for n in x)


def over_shapes(function: Callable[[tuple[int, ...]], Any], shapes: Any) -> Any:
    """``function`` of every shape in a pytree of shapes."""
    return function(shapes) if is_shape(shapes) else ik.extend.trees.tree_map(function, shapes, is_leaf=is_shape)


def shapes_of(cell: Any, inputs: tuple[Any, ...]) -> Any:
    """The shape of one sample's state, as the cell says for these inputs.

    Raises:
        TypeError: the cell takes another number of inputs (``ik.FixedPoint`` hands a map its state too).
    """
    try:
        return cell.state_shape(*inputs)
    except TypeError as error:
        try:
            inspect.signature(cell.state_shape).bind(*inputs)
        except TypeError as misfit:
            raise TypeError(
                f"{type(cell).__name__}.state_shape cannot be called with {len(inputs)} input(s): {misfit}. A DEQ is called "
                "as layer(x) and solves for its state itself; as a map of (z, x) in ik.FixedPoint use "
                "layer.cell; two layers in a row are first >> second"
            ) from error
        raise


def check_shapes(shapes: Any) -> None:
    """Raise unless ``shapes`` is a pytree of shapes of one sample.

    Raises:
        TypeError: a leaf is no shape. ValueError: a size less than 1, or no leaf.
    """

    def check(shape: Any) -> None:
        if not is_shape(shape):
            hint = f"; write ({shape},)" if isinstance(shape, int) and not isinstance(shape, bool) else ""
            raise TypeError(
                f"state must be the shape of one sample, as in state=(64,), or a tuple, list or dict of shapes; found "
                f"{shape!r}{hint}"
            )
        if math.prod(shape) < 1:
            raise ValueError(f"state has an empty shape {tuple(shape)}: every size must be at least 1")

    if isinstance(shapes, dict) and not shapes:
        raise ValueError("state has no leaf: there is nothing to solve for")
    over_shapes(check, shapes)


def check_state(state: Any) -> None:
    """Raise unless this is what a layer may be given for the shape of its state: shapes, or what tells them.

    Raises:
        TypeError, ValueError: as of :func:`check_shapes`; a class.
    """
    if callable(state):
        ik.extend.options.function("state(*inputs)").check("state", state)
    else:
        check_shapes(state)


def check_dims(name: str, dims: Any) -> None:
    """Raise unless ``dims`` says where batches lie: an integer, ``None``, or trees of these, one for each argument.

    Raises:
        TypeError: it does not.
    """
    leaves = ik.extend.trees.tree_flatten(dims)[0]
    if not all(d is None or (isinstance(d, int) and not isinstance(d, bool)) for d in leaves):
        raise TypeError(
            f"{name} must say in which dimension the batch is: an integer, None, or a tuple of these, one for each argument "
            f"after z; got {dims!r}"
        )


def zeros(shapes: Any, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Zeros: every leaf ``(batch, *shape)``."""
    return over_shapes(lambda shape: torch.zeros(batch, *shape, dtype=dtype, device=device), shapes)


def make(init: Any, state: Any) -> Any:
    """What a layer keeps of its argument ``init``, for a state of these shapes.

    Raises:
        ValueError: no start has this name, or it needs a state of fixed shape.
    """
    if isinstance(init, str) and init == "learned":
        if state is None or callable(state):
            raise ValueError('init="learned" needs a state of fixed shape: pass state=, or a module as init=')
        return Learned(state)
    if isinstance(init, str) and init == "last":
        return Last()
    if init is None or (isinstance(init, str) and init == "zeros"):
        return "zeros"
    if callable(init):
        ik.extend.options.function("init(*inputs)").check("init", init)
        return init
    raise ValueError(
        f"init must be one of {', '.join(map(repr, (None, *_STARTS)))}, or callable (*inputs) -> state; got {init!r}"
    )


class Learned(nn.Module):
    """One start for all samples, a parameter per leaf.

    The equilibrium does not depend on where the solve starts, so its derivative with respect to these parameters is zero:
    they learn by :meth:`DEQ.start_loss`, or while the layer is unrolled.
    """

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        leaves, _ = ik.extend.trees.tree_flatten(over_shapes(lambda shape: nn.Parameter(torch.zeros(*shape)), shapes))
        self.values = nn.ParameterList(leaves)

    def forward(self, template: Any) -> Any:
        """A state like ``template``."""
        leaves, spec = ik.extend.trees.tree_flatten(template)
        mine = [p.to(t.dtype).expand_as(t) for p, t in zip(self.values, leaves, strict=True)]
        return ik.extend.trees.tree_unflatten(mine, spec)


def is_learned(init: Any) -> bool:
    """Is this a start with parameters?"""
    return isinstance(init, nn.Module) and any(p.requires_grad for p in init.parameters())


class Again:
    """Where the last equilibria lead (:class:`Trend`) where the very tensors of the last training call come back unchanged,
    as full batches do, or one graph, are solved with the same settings, and every trainable parameter of the cell has been
    written to since, as an optimiser does; else none.  A call that is only repeated (a checkpoint's, a difference by one
    parameter) starts where it started.  Tensors are known by identity and version, and not held.

    One such call in 31 starts from zero all the same: followed from step to step, a branch of equilibria may part from the
    one that a solve from zero finds, as evaluation does, and would be trained in its place.

    Args:
        wanted: is this the start of the layer? by_position: is the layer causal?
    """

    def __init__(self, wanted: bool, by_position: bool = False) -> None:
        self.wanted, self.by_position = wanted, by_position
        # settings, inputs, parameters, and where the solve started (None: from zero)
        self._kept: tuple[Any, list[Any], list[Any], Any] | None = None
        self._start: Any = None  # of the call under way
        self._followed, self._trend = Followed(), self._anew()
        self.follows = self._repeats = False  # is the call under way of the same samples; and with the same parameters?

    def __reduce__(self) -> Any:
        return Again, (self.wanted, self.by_position)  # a copy has seen nothing

    def _anew(self) -> Trend:
        return Trend(by_position=self.by_position, careful=True)

    def keep(self, inputs: Any, cell: Any, state: Any, settings: Any) -> None:
        """These inputs of a cell had this equilibrium; ``settings``: those of a training call, else ``None``."""
        if not self.wanted or settings is None:
            return
        leaves = ik.extend.trees.tree_flatten(inputs)[0]
        known = not ik.extend.transforms_active() and all(
            isinstance(t, Tensor) and not t.is_inference() for t in leaves
        )
        trained = trainable(cell)
        known = known and bool(trained) and not any(p.is_inference() for p in trained)
        self._kept = (settings, _versions(leaves), _versions(trained), self._start) if known else None
        if not known:
            self._trend = self._anew()
        elif not self._repeats:
            self._trend.keep(state)

    def __call__(self, inputs: Any, template: Any, settings: Any) -> Any:
        """A state like ``template``; that itself under other settings than those of the last training call."""
        self._start, self._repeats = None, False
        self.follows = self._kept is not None and settings is self._kept[0] and self._are_the_same(inputs)
        if not self.follows or self._kept is None:
            if settings is not None and self.wanted:
                self._followed, self._trend = Followed(), self._anew()
            return template
        _, _, trained, start = self._kept
        self._repeats = any((p := ref()) is None or version(p) == before for ref, before in trained)
        if not self._repeats:
            start = self._trend.expected() if self._followed.again() else None
        self._start = start
        return usable(start, template)

    def _are_the_same(self, inputs: Any) -> bool:
        """Are these the tensors of the last training call, unchanged?"""
        if self._kept is None or ik.extend.transforms_active():
            return False
        leaves, seen = ik.extend.trees.tree_flatten(inputs)[0], self._kept[1]
        return len(leaves) == len(seen) and all(
            ref() is t and version(t) == before for (ref, before), t in zip(seen, leaves, strict=True)
        )


def _versions(tensors: Sequence[Tensor]) -> list[tuple[weakref.ref[Tensor], int]]:
    return [(weakref.ref(t), version(t)) for t in tensors]


def check_index(index: Any, batch: int) -> Tensor:
    """Sample numbers of one call.

    Raises:
        TypeError: not integers. ValueError: not one a sample, or a negative one.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        kind = f"a tensor of {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index must be a tensor of integers, the number of each sample; got {kind}")
    if index.shape != (batch,):
        raise ValueError(f"index must have one number a sample, shape ({batch},); got shape {tuple(index.shape)}")
    if batch and int(index.min()) < 0:
        raise ValueError(
            f"index has a negative number, {int(index.min())}: they count the samples of a data set from 0 on"
        )
    return index.long()


def fitting(state: Any, template: Any, name: str) -> Any:
    """The state, its keys in the template's order, if it has the template's structure, shapes, dtypes and device.

    Raises:
        TypeError, ValueError: it has not.
    """
    with contextlib.suppress(ValueError):  # another structure, as is said below
        state = ik.extend.trees.in_order(state, template)
    leaves, spec = ik.extend.trees.tree_flatten(state)
    wanted, form = ik.extend.trees.tree_flatten(template)
    other = next((t for t in leaves if not isinstance(t, Tensor)), None)
    if other is not None:
        raise TypeError(f"{name} must hold tensors, as the state does; got {type(other).__name__}")
    if spec != form:
        raise TypeError(f"{name} has another structure than the state: {spec} instead of {form}")
    for t, w in zip(leaves, wanted, strict=True):
        if t.shape != w.shape:
            raise ValueError(f"{name} has a tensor of shape {tuple(t.shape)} where the state has {tuple(w.shape)}")
        if t.dtype != w.dtype or t.device != w.device:
            raise TypeError(
                f"{name} has a tensor of {t.dtype} on {t.device} where the state has {w.dtype} on {w.device}"
            )
    return state
