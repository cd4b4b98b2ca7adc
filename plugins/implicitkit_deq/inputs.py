"""What a layer reads off its inputs: the batch, the state's dtype and device, and what the cell gets besides the state."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.compat import autocast_on, called_whole, unseen
from implicitkit_deq.held import hoist
from implicitkit_deq.held.frozen import called, statistics_held
from implicitkit_deq.held.sharding import bare

_BY_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD
_HALF = (torch.float16, torch.bfloat16)


class IgnoredInputWarning(UserWarning):
    """The equilibrium does not depend on the inputs: the cell does not use them."""


def describe(cell: Any, inputs: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[int, torch.dtype, torch.device]:
    """Batch size, dtype and device of the state.

    Raises:
        TypeError: no tensor. ValueError: no batch dimension.
    """
    tensors = [t for t in ik.extend.trees.tree_flatten(inputs)[0] if isinstance(t, Tensor)]
    if not tensors:
        given = ", ".join(type(x).__name__ for x in inputs) or "nothing"
        raise TypeError(
            f"layer(x, ...) needs at least one tensor, whose leading dimension is the batch; got {given}. Arrays and "
            "lists become one by torch.as_tensor(x, dtype=torch.get_default_dtype())"
        )
    for i, t in enumerate(tensors):
        if t.is_nested:
            ik.extend.trees.check_numbers(t, f"input {i} of the layer")
    first = tensors[0]
    if first.ndim == 0:
        raise ValueError(
            "the first input is a scalar; its leading dimension must be the batch: give it shape (batch, ...)"
        )
    if dtype is None:
        own = cell.parameters() if isinstance(cell, nn.Module) else ()
        known = (t.dtype for t in itertools.chain(tensors, own) if t.is_floating_point() or t.is_complex())
        dtype = next(known, torch.get_default_dtype())
        if dtype in _HALF and autocast_on(first.device):
            dtype = torch.float32
    return first.shape[0], dtype, first.device


def by_position(cell: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """What a cell gets after ``z``, in the order of its parameters: those of ``inject``, or of ``update`` where a
    :class:`Cell` injects nothing of its own.

    Raises:
        TypeError: it has no parameter of such a name, or one that cannot be given by position.
    """
    before: tuple[None, ...] = (None,)
    function = cell.forward if isinstance(cell, nn.Module) else cell
    if isinstance(cell, Cell) and type(cell).forward is Cell.forward:
        injects = type(cell).inject is not Cell.inject
        function, before = (cell.inject, ()) if injects else (cell.update, before)
    own = inspect.signature(function)
    try:
        bound = own.bind(*before, *inputs, **named)
        bound.apply_defaults()
        by_place = [str(name) for name, parameter in own.parameters.items() if parameter.kind is _BY_PLACE]
        only = [name for name in named if name not in by_place]  # of its **kwargs, too
        why = f"{', '.join(only)} cannot be given by position (behind a * in its signature)"
    except TypeError as error:
        only, why = list(named), str(error)
    if only:
        raise TypeError(
            f"layer(x, ..., {', '.join(f'{name}=' for name in named)}): inputs of the layer are those of its cell after z, "
            f"{type(cell).__name__}{own}, where {why}. Give them by position, layer(x, ...), or by the names that the "
            "cell has for positions after z (z0=, index= and at= are the layer's)"
        )
    given: tuple[Any, ...] = bound.args[len(before) :]
    return given


def factors(
    cell: Any,
    inputs: tuple[Any, ...],
    in_dims: Any,
    batch: int | None,
    places: Sequence[hoist.Place],
    weights: Sequence[Tensor],
) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """The map on the state, what it gets besides, and the batch dimensions of that (``None``: not known).

    A cell with hooks, or compiled (:func:`called_whole`) is called as a module, its injection included, at every
    evaluation; any other computes its injection once.

    Args:
        in_dims: ``"auto"``, or what the layer was told. batch: samples; ``None``: one joint system.

    Raises:
        TypeError: ``inject`` returns no tuple. ValueError: ``in_dims`` or the batch do not fit what it returns.
    """
    function, injected = bare(cell), inputs
    dims: Any = 0 if isinstance(cell, nn.Module) and not isinstance(cell, Cell) and len(inputs) == 1 else None
    if isinstance(cell, Cell):
        dims = cell.injected_dims
        if called_whole(cell):
            dims = dims if isinstance(dims, int) else None
        else:
            with ik.extend.modules_held(), hoist.held(places, weights), called(type(cell).__name__, ("inputs", inputs)):
                injected = cell.inject(*inputs)
            function = cell.update
        if not isinstance(injected, tuple):
            raise TypeError(
                f"{type(cell).__name__}.inject must return a tuple (what update gets after z), got "
                f"{type(injected).__name__}"
            )
    if in_dims != "auto":
        dims = in_dims
    if batch is None or dims is None:
        return function, injected, None
    dims = (dims,) * len(injected) if isinstance(dims, int) else tuple(dims)
    if len(dims) != len(injected):
        raise ValueError(f"in_dims has {len(dims)} entries, but the cell gets {len(injected)} arguments after z")
    _check_batch(cell, inputs, injected, dims, batch)
    return function, injected, dims


def _check_batch(cell: Any, inputs: tuple[Any, ...], injected: tuple[Any, ...], dims: Any, batch: int) -> None:
    """Raise ValueError where a tensor that should have the batch in front has not."""
    for i, (entry, dim) in enumerate(zip(injected, dims, strict=True)):
        for t in ik.extend.trees.tree_flatten(entry)[0]:
            if dim == 0 and isinstance(t, Tensor) and (t.ndim == 0 or t.shape[0] != batch):
                shapes = ", ".join(
                    str(tuple(x.shape)) for x in ik.extend.trees.tree_flatten(inputs)[0] if isinstance(x, Tensor)
                )
                raise ValueError(
                    f"the first dimension of the first input is the batch: inputs of shape {shapes} are {batch} samples, "
                    f"but argument {i + 1} of {type(cell).__name__} after z has shape {tuple(t.shape)}. For one sample give "
                    "a batch of one, layer(x.unsqueeze(0))[0]; for an argument that the samples share pass "
                    "DEQ(..., in_dims=...) with None in its place"
                )


def check_returned(cell: Any, layout: Any, device: torch.device, out: Any) -> None:
    """Raise unless a cell returned a state of this ``layout``, in any precision under autocast.

    Raises:
        TypeError, ValueError: of another structure, shape, dtype or device.
    """
    try:
        with unseen():  # it is no work of the cell's
            layout.check(out, f"the cell {type(cell).__name__}", autocast_on(device))
    except TypeError as misfit:
        said, found, _ = str(misfit).partition("start from a z0 of the dtype")
        if not found:
            raise
        raise TypeError(
            f"{said}the state has the dtype of the inputs, or of the cell's parameters where no input is floating point: "
            "convert the inputs, say DEQ(..., dtype=...), or let the cell return z.dtype"
        ) from None


def refuse_unbatched(cell: Any, z: Any, inputs: tuple[Any, ...]) -> None:
    """Raise where one sample's features were given for a batch of numbers, which a linear layer takes without a word.

    Then all samples have the same equilibrium, and what the cell makes of the first depends on the others' numbers.

    Raises:
        ValueError: so it is.
    """
    first = next(t for t in ik.extend.trees.tree_flatten(inputs)[0] if isinstance(t, Tensor))
    if first.ndim != 1 or len(first) < 2 or not first.is_floating_point() or ik.extend.transforms_active():
        return
    if not _alike(ik.extend.trees.tree_flatten(z)[0]):
        return
    total, wanted = _traced(cell, z, inputs, first=True)
    g = torch.autograd.grad(total, wanted[:1], allow_unused=True)[0] if total.requires_grad else None
    if g is not None and bool(g[1:].any()):
        raise ValueError(
            f"the first dimension of the first input is the batch: inputs of shape ({len(first)},) are {len(first)} "
            f"samples, but {type(cell).__name__} takes all their numbers for each of them. For one sample give a "
            "batch of one, layer(x.unsqueeze(0))[0]"
        )


def _alike(leaves: Sequence[Tensor]) -> bool:
    """Is the state of all samples the same?"""
    return all(bool(torch.isclose(t[1:], t[:1], rtol=1e-5).all()) for t in leaves)


def _traced(cell: Any, z: Any, inputs: tuple[Any, ...], first: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The sum of the sizes of one evaluation's outputs (``first``: of the first sample's), and the input tensors to which
    its graph leads."""

    def leaf(t: Any) -> Any:
        follows = isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())
        # no leaf of the graph: torch refuses to differentiate by one that hooks of a module watch (FlopCounterMode)
        return t.detach().requires_grad_().view_as(t) if follows else t

    random = torch.get_rng_state()
    with torch.enable_grad(), ik.extend.own_graphs(), statistics_held(cell):
        tracked = ik.extend.trees.tree_map(leaf, inputs)
        out = [t for t in ik.extend.trees.tree_flatten(bare(cell)(z, *tracked))[0] if t.requires_grad]
        total = sum(((t[0] if first else t).abs().sum() for t in out), torch.zeros((), device="cpu"))
    torch.set_rng_state(random)
    return total, [t for t in ik.extend.trees.tree_flatten(tracked)[0] if isinstance(t, Tensor) and t.requires_grad]


def check_use(cell: Any, z: Any, inputs: tuple[Any, ...]) -> bool:
    """Is the layer seen to use its inputs?  A warning if it is not; ``False``, too, where that cannot be told yet.

    Seen at no cost from equilibria that differ from sample to sample; asked of the graph of one evaluation only where all
    are the same, as they are when nothing but the start tells samples apart.
    """
    leaves = ik.extend.trees.tree_flatten(z)[0]
    if len(leaves[0]) < 2 or ik.extend.transforms_active():
        return False
    if not _alike(leaves):
        return True
    given = [t for t in ik.extend.trees.tree_flatten(inputs)[0] if isinstance(t, Tensor)]
    if not all(t.is_floating_point() or t.is_complex() for t in given):
        return True  # what is looked up or branched on leaves no trace in a graph
    total, wanted = _traced(cell, z, inputs)
    if total.requires_grad and any(g is not None for g in torch.autograd.grad(total, wanted, allow_unused=True)):
        return True
    ik.extend.warn(
        f"{type(cell).__name__} does not use its inputs: every sample has the same equilibrium, and the gradient to the "
        "inputs is zero. A cell maps (z, *inputs); most add a function of the inputs to that of the state",
        IgnoredInputWarning,
    )
    return True
