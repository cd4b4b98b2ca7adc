"""What the graph of an evaluation tells of the work that going through it backwards takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.graph import age, nodes_behind

_PASSES = ("LinalgVectorNorm", "LinalgNorm", "LinalgCross")
_OWN, _MORE = torch.autograd.function.BackwardCFunction, ("Linalg", "Conv", "Cdist")
_MATRICES, _BATCHED = ("Mm", "Addmm", "MvBackward", "Addmv"), ("Bmm", "Baddbmm")
_SAVED = ("_saved_self", "_saved_mat1", "_saved_mat2", "_saved_batch1", "_saved_batch2")
_READ, _ROWS, _EACH_OWN = 3, 3, 7  # what a matrix counts, to be read; so many rows as it again; each of a batch of them
_TAPS = 2  # products of a convolution in the time of a number at a place of an index
_SHORT, _SLOWER = 8, 4  # numbers in a row below which an operation takes as many times longer for each


class Matrices(NamedTuple):
    """How many numbers are in the matrices that a product through a graph multiplies by.

    Attributes:
        read: each three times, since to read one takes as long as nine rows that are multiplied by it, and once more for
            every three of these; those of a batch, each with a vector of its own, as seven times as many.
        rows: the part of it that products side by side do not share, once for every three rows.
        behind: that of matrices that are met behind another one.  A Jacobian has to be multiplied by these; those that are
            met first are written down in it as they are (:mod:`implicitkit.foundation.structured`).
    """

    read: int = 0
    rows: int = 0
    behind: int = 0


def nodes_of(out: Tensor) -> list[Any]:
    """The nodes of the graph of ``out``, to be asked more than once about."""
    return nodes_behind([out.grad_fn])


def size_of_graph(nodes: Sequence[Any], unknown: int = 1) -> tuple[int, int, int]:
    """How many ``nodes`` a graph has, the numbers that come into all of them when it is gone through backwards (those in
    rows of a few four times: torch's loops run along rows), and those that are added up at places of an index, or take as
    long: half of the products that a convolution adds up.  A node of somebody's own, or one whose work the numbers do not
    tell, counts as ``unknown`` nodes."""
    count = numbers = 0
    placed = 0.0
    for node in nodes:
        is_long, is_placed = _kind_of(type(node).__name__)
        for given in getattr(node, "_input_metadata", ()):
            shape = given.shape
            numbers += (through := math.prod(shape)) * (_SLOWER if shape and shape[-1] <= _SHORT else 1)
            placed += through * (1.0 if is_placed else _taps(node) / _TAPS if is_long else 0.0)
        count += unknown if is_long or isinstance(node, _OWN) else 1
    return count, numbers, int(placed)


def _taps(node: Any) -> int:
    """How many products a convolution adds up in each number; none of other nodes."""
    weight = getattr(node, "_saved_weight", None) if "Conv" in type(node).__name__ else None
    return 0 if weight is None else math.prod(weight.shape[1:])


def read_by_products(nodes: Sequence[Any]) -> Matrices:
    """The matrices that these ``nodes`` of a graph multiply by."""
    found = {node: _matrices_at(node) for node in nodes if _multiplies(type(node).__name__)[0]}
    later = _behind(nodes, found) if len(found) > 1 else set()
    read, rows = (sum(sizes[k] for sizes in found.values()) for k in (0, 1))
    return Matrices(int(read), int(rows), int(sum(found[node][1] for node in later)))


def _matrices_at(node: Any) -> tuple[float, float]:
    """What a node reads of matrices, and what of that is for the rows."""
    own, read, each = _multiplies(type(node).__name__)[1], 0.0, 0.0
    given = sum(math.prod(m.shape) for m in node._input_metadata)
    for name, matrix in ((name, getattr(node, name, None)) for name in _SAVED):
        if matrix is not None and matrix.numel():
            several = len(matrix) if own else 1
            rows = matrix.numel() / several * given / matrix.shape[-1 if name.endswith("2") else -2] / _ROWS
            read += _EACH_OWN * matrix.numel() if several > 1 else _READ * matrix.numel() + rows
            each += rows
    return read, each


def _behind(nodes: Sequence[Any], chosen: Collection[Any]) -> set[Any]:
    """Which of the chosen nodes another one leads to."""
    behind = set[Any]()
    for node in sorted(nodes, key=age, reverse=True):
        if node in behind or node in chosen:
            behind.update(after for after, _ in node.next_functions)
    return behind.intersection(chosen)


def has_own_matrices(nodes: Sequence[Any], z: Tensor) -> bool:
    """Do the ``nodes`` of a graph multiply each sample of ``z`` by a matrix of its own, all of them together of more numbers
    than ``z``?  One that is repeated by a stride of zero is one, and so is one of another number of matrices, be it the one
    that an ``einsum`` of a matrix for all multiplies by, or one for each head."""
    batch, numbers = len(z), z.numel()

    def of_each(matrices: Tensor) -> bool:
        return matrices.numel() > numbers and len(matrices) % batch == 0 and bool(matrices.stride(0))

    for node in nodes if batch > 1 else ():
        if _multiplies(type(node).__name__)[1]:
            matrices = (getattr(node, name, None) for name in _SAVED)
            if any(m is not None and of_each(m) for m in matrices):
                return True
    return False


@functools.lru_cache(maxsize=1024)
def _multiplies(name: str) -> tuple[bool, bool]:
    """Does the derivative of this name multiply by a matrix, and by one of a batch of them?"""
    own = name.startswith(_BATCHED)
    return own or name.startswith(_MATRICES), own


@functools.lru_cache(maxsize=1024)
def _kind_of(name: str) -> tuple[bool, bool]:
    """Is the work of the derivative of this name not told by its numbers, and does it add up at places of an index?"""
    return name.startswith(_MORE) and not name.startswith(_PASSES), "Index" in name
