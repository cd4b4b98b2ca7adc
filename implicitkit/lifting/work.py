"""What an evaluation does, as far as its operations tell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.pytrees import tensors_in

_PRODUCTS = {
    "matmul": 0,
    "__matmul__": 0,
    "mm": 0,
    "bmm": 0,
    "mv": 0,
    "linear": 0,
    "addmm": 1,
    "addmv": 1,
    "baddbmm": 1,
}
_FILTERS = frozenset(["conv1d", "conv2d", "conv3d"])
_PASSES = frozenset(["linalg_norm", "linalg_vector_norm", "linalg_vecdot", "linalg_cross", "linalg_diagonal"])
# what takes more than a pass over the numbers that it returns, and is not counted
# fmt: off
_LONG = frozenset([
    "addbmm", "bilinear", "cdist", "chain_matmul", "cholesky", "cholesky_inverse", "cholesky_solve",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "det", "geqrf", "gru", "inverse", "logdet", "lobpcg",
    "lstm", "lu_solve", "matrix_exp", "matrix_power", "orgqr", "ormqr", "pinverse", "qr", "rnn_relu", "rnn_tanh",
    "scaled_dot_product_attention", "slogdet", "svd", "tensordot", "triangular_solve",
])
_LEAVES = frozenset(["numpy", "__array__", "tolist", "item", "__float__", "__complex__", "__dlpack__"])


#: Names of operations whose values have kinks.
KINKED = frozenset([
    "__abs__", "abs", "absolute", "amax", "amin", "clamp", "clamp_max", "clamp_min", "clip", "dist", "fmax", "fmin",
    "hinge_embedding_loss", "l1_loss", "leaky_relu", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm",
    "margin_ranking_loss", "max", "maximum", "min", "minimum", "multi_margin_loss", "norm", "prelu", "relu", "softshrink",
    "sort", "topk", "vector_norm", "where",
])
#: ... of norms and values of matrices that have kinks where singular values or eigenvalues coincide or vanish.
SPECTRAL = frozenset(["linalg_eigvalsh", "linalg_matrix_norm", "linalg_norm", "linalg_svdvals", "norm"])
# fmt: on


class Work(NamedTuple):
    """The work of one evaluation: ``operations``, the ``numbers`` that they return, and ``products`` of two numbers in
    products of matrices; zeros: that is not known."""

    operations: int = 0
    numbers: int = 0
    products: int = 0

    def share(self, part: float) -> Work:
        """The work of a ``part`` of a function all of whose parts are alike."""
        return Work(*(math.ceil(part * count) for count in self))


class Tally:
    """Counts the :class:`Work` of an evaluation.  Of a function that leaves torch, has operations of somebody's own, or
    factors matrices, operations and what they return do not tell how long it takes: it stays unknown.

    Attributes:
        sparse, kinked, spectral: an operation has met one of torch's sparse matrices, or was of a kind that has kinks, or
            that may have them where eigenvalues or singular values coincide.
    """

    def __init__(self) -> None:
        self.operations = self.numbers = self.products = 0
        self.known, self.sparse, self.kinked, self.spectral = True, False, False, False

    def add(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Count one operation."""
        name = getattr(func, "__name__", "")
        self.sparse = self.sparse or any(isinstance(t, Tensor) and t.layout is not torch.strided for t in args)
        made = sum(t.numel() for t in tensors_in(out))
        self.operations += 1
        self.numbers += made
        self.kinked = self.kinked or name in KINKED
        self.spectral = self.spectral or name in SPECTRAL
        if name in _PRODUCTS:
            self.products += made * _inner(args[_PRODUCTS[name] :])
        elif name in _FILTERS:
            self.products += made * math.prod(args[1].shape[1:]) if len(args) > 1 else 0
            self.known = self.known and len(args) > 1
        elif name == "einsum":
            sizes = dict(_indices(args))
            self.products += math.prod(sizes.values())
            self.known = self.known and bool(sizes)
        else:
            long = name in _LONG or (name.startswith("linalg_") and name not in _PASSES)
            foreign = name in _LEAVES or type(func).__module__ == "torch._ops"
            self.known = self.known and not (long or foreign)

    def work(self) -> Work:
        """All that was counted."""
        return Work(self.operations, self.numbers, self.products) if self.known else Work()


def _inner(given: tuple[Any, ...]) -> int:
    """How many products are added up for a number of a product of matrices."""
    first = given[0] if given else None
    return first.shape[-1] if isinstance(first, Tensor) and first.ndim else 1


def _indices(args: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
    """Every index of a sum and its length; none where they are not named one by one."""
    if args and isinstance(args[0], str) and "." not in args[0]:
        for names, t in zip(args[0].replace(" ", "").split("->")[0].split(","), tensors_in(args[1:]), strict=False):
            yield from zip(names, t.shape, strict=False)
