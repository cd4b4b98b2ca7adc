"""What the graph of an evaluation tells of the work that going through it backwards takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.graph import nodes_behind

_PASSES = ("LinalgVectorNorm", "LinalgNorm", "LinalgCross")
_OWN, _MORE = torch.autograd.function.BackwardCFunction, ("Linalg", "Conv", "Cdist")
_MATRICES, _BATCHED = ("Mm", "Addmm", "Mv", "Addmv"), ("Bmm", "Baddbmm")
_SAVED = ("_saved_self", "_saved_mat1", "_saved_mat2", "_saved_batch1", "_saved_batch2")
_READ, _ROWS, _EACH_OWN = 3, 3, 7  # what a matrix counts, to be read; so many rows as it again; each of a batch of them
_SHORT, _SLOWER = 8, 4  # numbers in a row below which an operation takes as many times longer for each


def nodes_of(out: Tensor) -> list[Any]:
    """The nodes of the graph of ``out``, to be asked more than once about."""
    return list(nodes_behind([out.grad_fn]))


def size_of_graph(nodes: Sequence[Any], unknown: int = 1) -> tuple[int, int, int]:
    """Of the ``nodes`` of a graph: how many they are, the numbers that come into all of them when it is gone through
    backwards (those in rows of a few four times: torch's loops run along rows), and those that are added up at places of an
    index.  A node of somebody's own, or one whose work the numbers do not tell, counts as ``unknown`` nodes."""
    count = numbers = placed = 0
    for node in nodes:
        is_long, is_placed = _kind_of(type(node).__name__)
        for given in getattr(node, "_input_metadata", ()):
            shape = given.shape
            numbers += (through := math.prod(shape)) * (_SLOWER if shape and shape[-1] <= _SHORT else 1)
            placed += through if is_placed else 0
        count += unknown if is_long or isinstance(node, _OWN) else 1
    return count, numbers, placed


def read_by_products(nodes: Sequence[Any]) -> int:
    """Numbers of the matrices that a product through the ``nodes`` of a graph multiplies by: each three times, since to read
    one takes as long as nine rows that are multiplied by it, and once more for every three of these; those of a batch, each
    with a vector of its own, as seven times as many."""
    found = 0
    for node in nodes:
        multiplies, own = _multiplies(type(node).__name__)
        if multiplies:
            given = sum(math.prod(m.shape) for m in node._input_metadata)
            for name, matrix in ((name, getattr(node, name, None)) for name in _SAVED):
                if matrix is not None and matrix.numel():
                    rows = given / matrix.shape[-1 if name.endswith("2") else -2]
                    several = own and len(matrix) > 1
                    found += int(matrix.numel() * (_EACH_OWN if several else _READ + rows / _ROWS))
    return found


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
