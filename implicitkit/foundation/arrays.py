"""What users write in the place of tensors, as tensors: numbers, lists of numbers, NumPy's arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.pytrees import tree_flatten, tree_map, tree_unflatten


def as_state(z0: Any, args: Any) -> Any:
    """``z0`` with its Python floats, complex numbers and NumPy arrays as tensors: arrays as they are, numbers in the
    precision of the first floating-point tensor beside them in ``z0``, or in ``args`` (else torch's default), both on the
    device of the first tensor there (else torch's default)."""
    if isinstance(z0, Tensor):
        return z0
    leaves, spec = tree_flatten(z0)
    device = _device(leaves, args)
    arrays = [
        torch.tensor(x, device=device)
        if type(x).__module__ == "numpy" and hasattr(x, "__array__") and not isinstance(x, float)
        else x
        for x in leaves
    ]
    near = [t for t in (*arrays, *tree_flatten(args)[0]) if isinstance(t, Tensor) and t.is_floating_point()]
    place: dict[str, Any] = {"dtype": near[0].dtype, "device": near[0].device} if near else {"device": device}
    numbers = [torch.tensor(x, **place) if isinstance(x, float) else x for x in arrays]
    if near and any(isinstance(x, complex) for x in numbers):
        place["dtype"] = torch.promote_types(near[0].dtype, torch.complex32)
    return tree_unflatten([torch.tensor(x, **place) if isinstance(x, complex) else x for x in numbers], spec)


def from_arrays(tree: Any, *beside: Any) -> Any:
    """A tree with its NumPy arrays of numbers as tensors, everything else as it is; they go to the device of the first
    tensor in it or in the trees ``beside``, else to torch's default."""
    if isinstance(tree, Tensor):
        return tree
    leaves, spec = tree_flatten(tree)
    if not any(map(is_array, leaves)):
        return tree
    device = _device(leaves, *beside)
    return tree_unflatten([torch.as_tensor(x, device=device) if is_array(x) else x for x in leaves], spec)


def _device(*trees: Any) -> torch.device | None:
    """The device of the first tensor among the leaves."""
    return next((leaf.device for tree in trees for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)), None)


def from_numbers(given: Any, like: Any) -> Any:
    """A list or tuple of numbers as a tensor, where ``like`` is one tensor, of its dtype; everything else as it is."""
    if not isinstance(like, Tensor) or not isinstance(given, (list, tuple)) or not given:
        return given
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in given)
    return torch.tensor(given, dtype=like.real.dtype, device=like.device) if numbers else given


def as_args(args: Any, *beside: Any) -> Any:
    """``args`` of a solve: arrays as tensors (see :func:`from_arrays`), NumPy's single numbers as Python's, ``None`` as no
    arguments."""
    if isinstance(args, Tensor) or (type(args) is tuple and all(isinstance(arg, Tensor) for arg in args)):
        return args
    if args is None:
        return ()
    if not any(map(is_array, tree_flatten(args)[0])):
        return args
    return from_arrays(tree_map(lambda x: x.item() if is_array(x) and not x.ndim else x, args), *beside)


def is_array(x: Any) -> bool:
    """Is it an array, or a single number, of NumPy's?"""
    return type(x).__module__ == "numpy" and hasattr(x, "__array__") and x.dtype.kind in "fciub"
