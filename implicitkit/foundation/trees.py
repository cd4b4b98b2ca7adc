"""Pytrees of tensors as one real matrix ``(batch, n)`` and back.

A state is any nesting of tuples, lists and dicts of tensors.  Its first ``batch_dims`` dimensions are independent
samples; the rest of every leaf is laid out in one row.  Complex leaves are laid out through their real view (pairs
of real and imaginary part), so that every algorithm is real and derivatives follow PyTorch's convention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from implicitkit.foundation import pytrees, tracers
from implicitkit.foundation.arrays import is_array
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.numbers import real_parts
from implicitkit.foundation.pytrees import tree_flatten, tree_map, tree_unflatten
from implicitkit.foundation.wording import check_returned, kind_of

__all__ = [
    "Layout",
    "check_numbers",
    "describe_leaves",
    "hint_of_no_tensor",
    "hint_of_pair",
    "in_order",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]


_INSTEAD = {
    "DTensor": "each process solves for numbers of its own; pass its .full_tensor(), and shard the module that solves",
    "MaskedTensor": "a solver needs a number everywhere; pass its .to_tensor(value), and solve for what is not masked",
}
"""What to do about tensors of torch's own in which no solver can compute, by the names of their classes."""


def _instead(leaf: Any, name: str) -> str:
    """What to write in the place of a leaf that is no tensor, where that can be known."""
    if isinstance(leaf, int):
        return ": write it with a decimal point, or as a tensor"
    if isinstance(leaf, torch.nn.Module):
        return (
            f": the parameters of a module as unknowns are {name}=dict(module.named_parameters()), and the function calls "
            "it by torch.func.functional_call(module, z, inputs)"
        )
    if hasattr(leaf, "converged"):  # a Solution
        return f": pass its value, {name}.value"
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        own = type(leaf).__name__
        return (
            f": torch takes a dataclass for one leaf until torch.export.register_dataclass({own}) has been called; or use a "
            "dict or a named tuple"
        )
    return f": write {name}=tuple(...)" if isinstance(leaf, Iterator) else ""


def _check_unknown(leaf: Any, batch_dims: int, where: Callable[[], str], name: str) -> None:
    """Raise for what cannot be an unknown; ``where()``: which leaf of the state it is."""
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{where()} is {kind_of(leaf)}, not a tensor{_instead(leaf, name)}")
    if not (leaf.is_floating_point() or leaf.is_complex()):
        raise TypeError(
            f"{where()} has dtype {leaf.dtype}; an unknown must be real or complex floating point: pass "
            f"{name}.to(torch.get_default_dtype())"
        )
    narrow = leaf.dtype.itemsize == 1 or type(leaf).__name__ in _INSTEAD
    if narrow or leaf.is_nested or leaf.layout != torch.strided or tracers.is_fake(leaf):
        refuse_unusual(leaf, where())
    if leaf.ndim < batch_dims:
        raise ValueError(
            f"batch_dims={batch_dims} is larger than the rank of {where()}, which has shape {tuple(leaf.shape)}"
        )


def _check_alike(leaf: Tensor, first: Tensor, batch_dims: int, where: Callable[[], str], name: str) -> None:
    """Raise where a leaf of a state has another precision, device or batch than the first."""
    if _real(leaf) != _real(first):
        raise TypeError(
            f"the leaves of {name} have different precisions: {where()} has {leaf.dtype}, the first leaf has "
            f"{first.dtype}; convert them to one"
        )
    if leaf.device != first.device:
        raise ValueError(
            f"the leaves of {name} are on different devices: {where()} on {leaf.device}, the first leaf on {first.device}"
        )
    batch, expected = leaf.shape[:batch_dims], first.shape[:batch_dims]
    if batch != expected:
        raise ValueError(
            f"the leaves of {name} disagree on the batch: {where()} has batch shape {tuple(batch)}, the first leaf "
            f"{tuple(expected)}"
        )


class Layout:
    """How a state of some structure is packed into a matrix.

    Attributes:
        inner: the batch shape after its first dimension (a row of the leading batch dimension holds
            ``samples_per_row`` samples); packing and unpacking work for any number of rows.
        batch_shape: the full batch shape, ``()`` when ``batch_dims`` is 0.
        size: ``n``, real numbers a sample.
        dtype, device: of the matrix (real).
        keyed: are there dicts in the state?  The order of their keys is that of the state, whatever others return.
    """

    def __init__(self, tree: Any, batch_dims: int, name: str = "z0") -> None:
        leaves, self.spec = tree_flatten(tree)
        if not leaves:
            raise ValueError(f"{name} is empty: the state has no tensor in it")
        where = lambda i: f"{name}{pytrees.key_path(tree, i)}"  # noqa: E731
        for i, leaf in enumerate(leaves):
            _check_unknown(leaf, batch_dims, functools.partial(where, i), name)
        first = leaves[0]
        for i, leaf in enumerate(leaves[1:], 1):
            _check_alike(leaf, first, batch_dims, functools.partial(where, i), name)
        self.dtype, self.device = _real(first), first.device
        if self.device.type == "meta":
            refuse_unusual(first, name)
        alone = isinstance(tree, Tensor)
        self.keyed = not alone and any(
            isinstance(x, dict) for x in tree_flatten(tree, is_leaf=lambda x: isinstance(x, dict))[0]
        )
        kinds = tuple([(leaf.shape, leaf.is_complex()) for leaf in leaves])
        self.__dict__.update(_arranged(kinds, batch_dims, alone))
        if self.size == 0:
            raise ValueError(f"{name} has size zero (shape {tuple(first.shape)}): there is no unknown to solve for")

    def _arrange(self, kinds: tuple[tuple[torch.Size, bool], ...], batch_dims: int, one_leaf: bool) -> Layout:
        """What follows from shapes, and from which leaves are complex."""
        self.batch_dims, self.batch_shape = batch_dims, kinds[0][0][:batch_dims]
        self.inner = self.batch_shape[1:]
        self.samples_per_row = math.prod(self.inner)
        self.batch = math.prod(self.batch_shape)
        self.events = [shape[batch_dims:] for shape, _ in kinds]
        self.complex = [is_complex for _, is_complex in kinds]
        self.sizes = [math.prod(e) * (2 if c else 1) for e, c in zip(self.events, self.complex, strict=True)]
        self.size = sum(self.sizes)
        self._classify(one_leaf)
        return self

    def _classify(self, one_leaf: bool) -> None:
        """The simple cases that packing takes short cuts for."""
        self.single = len(self.events) == 1 and not self.complex[0]
        self.mixed = any(self.complex) and not all(self.complex)
        self.bare = self.single and one_leaf
        # the state is the matrix itself
        self.identity = self.bare and self.batch_dims == 1 and len(self.events[0]) == 1

    def part(self, leaves: Any) -> Layout:
        """The layout of a part of the state: ``leaves`` is that part's tree with the numbers of its leaves in it."""
        numbers, spec = tree_flatten(leaves)
        other = Layout.__new__(Layout)
        other.__dict__.update(self.__dict__, spec=spec)
        other.events, other.complex, other.sizes = (
            [values[i] for i in numbers] for values in (self.events, self.complex, self.sizes)
        )
        other.size = sum(other.sizes)
        other._classify(isinstance(leaves, int))
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"spec": self._skeleton()}  # plain containers, whatever torch's specs are

    def _skeleton(self) -> Any:
        return tree_unflatten(list(range(len(self.events))), self.spec)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, spec=tree_flatten(state["spec"])[1])

    def pack(self, tree: Any) -> Tensor:
        """A tree of this structure as a matrix ``(rows * samples_per_row, n)``; shapes are taken on trust."""
        if self.bare:
            matrix = tree if self.identity else tree.reshape(-1, self.size)
            return matrix if matrix.dtype == self.dtype else matrix.to(self.dtype)
        leaves, spec = tree_flatten(tree)
        if self.keyed and spec != self.spec:
            leaves = tree_flatten(in_order(tree, self._skeleton()))[0]
        rows = [
            (self._pairs(leaf) if leaf.is_complex() else leaf).reshape(
                -1 if n else leaf.shape[: leaf.ndim - len(event)].numel(), n
            )
            for leaf, n, event in zip(leaves, self.sizes, self.events, strict=True)
        ]
        matrix = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        return matrix if matrix.dtype == self.dtype else matrix.to(self.dtype)

    def unpack(self, matrix: Tensor) -> Any:
        """The inverse of :meth:`pack`."""
        if self.identity:
            return matrix
        shape = (matrix.shape[0] // self.samples_per_row, *self.inner) if self.batch_dims else ()
        if self.single:
            leaf = matrix.reshape(shape + self.events[0])
            return leaf if self.bare else tree_unflatten([leaf], self.spec)
        leaves = []
        for part, event, is_complex in zip(matrix.split(self.sizes, 1), self.events, self.complex, strict=True):
            if is_complex:
                leaves.append(self._complex(part.reshape(shape + event + (2,))))
            else:
                leaves.append(part.reshape(shape + event))
        return tree_unflatten(leaves, self.spec)

    def _pairs(self, leaf: Tensor) -> Tensor:
        """Real and imaginary parts, in one more dimension.  A view where that can be: the cotangent of one needs an even
        number of reals before it in memory, which is not so beside real leaves."""
        return real_parts(leaf) if self.mixed else torch.view_as_real(leaf.resolve_conj())

    def _complex(self, pairs: Tensor) -> Tensor:
        """The inverse: a copy, since torch.compile takes no view of another shape.  ``torch.complex`` takes the imaginary
        part of its cotangent, which ``vmap`` does not know of one that is not resolved: there and back resolves it."""
        leaf = torch.complex(*pairs.unbind(-1))
        return torch.view_as_complex(torch.view_as_real(leaf))

    def unpack_batch(self, vector: Tensor) -> Tensor:
        """One number a sample, ``(..., batch)``, in the batch's own shape, all calls of a vmap in front of it."""
        calls = () if vector.shape[-1] == self.batch else (vector.shape[-1] // self.batch,)
        if not calls and self.batch_dims == 1:
            return vector
        return vector.reshape(vector.shape[:-1] + calls + tuple(self.batch_shape))

    def check(self, tree: Any, what: str, cast: bool = False, rows: int | None = None, aux: bool = False) -> Any:
        """``tree``, its keys in the order of this structure; raise unless it has this structure, these shapes, dtypes and
        devices (``cast``: any precision; ``rows``: the length of the first batch dimension where samples have been
        dropped; ``aux``: something beside the value may be reported)."""
        leaves, spec = tree_flatten(tree)
        batch = tuple(self.batch_shape) if rows is None else (rows, *self.inner)
        if self.keyed and spec != self.spec:
            with contextlib.suppress(ValueError):  # it is another structure
                tree = in_order(tree, self._skeleton())
                leaves, spec = tree_flatten(tree)
        if spec is not self.spec and spec != self.spec:
            z = tree_unflatten([torch.Size(batch + tuple(event)) for event in self.events], self.spec)
            raise TypeError(
                f"{what} returned another structure than z: got {_outline(tree)}, z is {_outline(z)}{_hint(tree, z, aux)}"
            )
        for i, (leaf, event, is_complex) in enumerate(zip(leaves, self.events, self.complex, strict=True)):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{what} returned {kind_of(leaf)}{_at(tree, i)}, not a tensor{hint_of_no_tensor(leaf)}")
            expected = batch + tuple(event)
            if tuple(leaf.shape) != expected:
                raise ValueError(
                    f"{what} returned shape {tuple(leaf.shape)}{_at(tree, i)}, but z has shape {expected} there: there "
                    f"must be one equation per unknown{_reshaped(leaf, expected)}"
                )
            if type(leaf).__name__ in _INSTEAD:
                refuse_unusual(leaf, f"what {what} returned{_at(tree, i)}")
            if leaf.layout != torch.strided:
                raise TypeError(f"{what} returned a sparse tensor{_at(tree, i)}: return a dense one (.to_dense())")
            check_returned(leaf, self.device, what, functools.partial(_at, tree, i))
            if leaf.is_complex() != is_complex or (_real(leaf) != self.dtype and not cast):
                raise TypeError(
                    f"{what} returned dtype {leaf.dtype}{_at(tree, i)}, but z has {'complex ' if is_complex else ''}"
                    f"{self.dtype} there; start from a z0 of the dtype that the function computes in"
                )
        return tree


@functools.lru_cache(maxsize=256)
def _arranged(kinds: tuple[tuple[torch.Size, bool], ...], batch_dims: int, one_leaf: bool) -> dict[str, Any]:
    """The attributes that :meth:`Layout._arrange` finds, which nobody changes: found once for states of these shapes."""
    return vars(Layout.__new__(Layout)._arrange(kinds, batch_dims, one_leaf))


def hint_of_no_tensor(leaf: Any) -> str:
    """What to do where a function returned ``leaf``, which is no tensor."""
    if leaf is None:
        return ": a `return` is missing"
    if hasattr(leaf, "converged"):  # a Solution
        return ": return its value, solution.value"
    if is_array(leaf):
        return ": write it in torch's operations (a solver written in NumPy becomes a layer by @ik.implicit)"
    return ": write it in torch's operations" if isinstance(leaf, (float, int)) else ""


def _reshaped(leaf: Tensor, expected: tuple[int, ...]) -> str:
    """What to do with as many numbers in another shape; else empty."""
    return f". There is: reshape them, out.reshape({expected})" if leaf.numel() == math.prod(expected) else ""


def in_order(tree: Any, like: Any) -> Any:
    """``tree`` with the keys of its dicts in the order that they have in ``like``, and of its kinds of dict.

    Raises:
        ValueError: it has another structure.
    """
    return tree_map(lambda _, leaf: leaf, like, tree)


def hint_of_pair(out: Any) -> str:
    """What to do if the second of two things that were returned was meant to stand beside the value."""
    pair = isinstance(out, tuple) and len(out) == 2
    return "; if the second is to be reported beside the value, pass has_aux=True" if pair else ""


def _hint(out: Any, z: Any, aux: bool) -> str:
    """What to do about another structure."""
    sequences = isinstance(out, (list, tuple)) and isinstance(z, (list, tuple)) and not isinstance(z, torch.Size)
    if sequences and len(out) == len(z) and type(out) is not type(z):
        return f": a {type(out).__name__} where z is a {type(z).__name__}"
    return hint_of_pair(out) if aux else ""


def check_numbers(t: Tensor, name: str) -> None:
    """Raise unless this is an ordinary tensor with numbers in it.

    Raises:
        TypeError: it is nested, or on the meta device. CapabilityError: it is fake.
    """
    if t.is_nested or t.device.type == "meta" or tracers.is_fake(t):
        refuse_unusual(t, name)


def refuse_unusual(leaf: Tensor, name: str) -> NoReturn:
    """Say why no solver can compute with this tensor."""
    if tracers.is_fake(leaf):
        raise CapabilityError(tracers.NO_NUMBERS.format(what=f"fake tensors (FakeTensorMode), of which {name} is one,"))
    own = type(leaf).__name__
    if own in _INSTEAD:
        raise TypeError(f"{name} is a {own}: {_INSTEAD[own]}")
    if leaf.device.type == "meta":
        raise TypeError(f"{name} is on the meta device, which holds no numbers: nothing can be solved there")
    if leaf.is_nested:
        raise TypeError(
            f"{name} is a nested tensor: pad it (torch.nested.to_padded_tensor), or solve its parts as a list"
        )
    if leaf.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({leaf.layout}): an unknown must be dense; pass {name}.to_dense()")
    raise TypeError(f"{name} has dtype {leaf.dtype}, in which nothing can be computed: pass {name}.to(torch.bfloat16)")


def _real(t: Tensor) -> torch.dtype:
    """The precision of a tensor."""
    return t.real.dtype if t.is_complex() else t.dtype


def _at(tree: Any, index: int) -> str:
    where = pytrees.key_path(tree, index)
    return f" at {where}" if where else ""


def _outline(tree: Any) -> str:
    """A tree with its leaves replaced by their shapes, for messages."""

    def leaf(x: Any) -> Any:
        return (
            tuple(x.shape) if isinstance(x, Tensor) else (tuple(x) if isinstance(x, torch.Size) else type(x).__name__)
        )

    return repr(tree_map(leaf, tree, is_leaf=lambda x: isinstance(x, torch.Size)))


def describe_leaves(tree: Any, name: str, test: Callable[[Tensor], str]) -> list[str]:
    """The paths of the leaves of which ``test`` says something, followed by that, for messages."""
    leaves = [
        (path, test(leaf))
        for path, leaf in pytrees.tree_flatten_with_path(tree)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    return [f"{name}{path}{said}".rstrip() for path, said in leaves if said]
