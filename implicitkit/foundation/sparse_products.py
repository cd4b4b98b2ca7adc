"""Products with torch's sparse matrices as they lie in memory, inside a solve.

A gradient through ``T @ z`` is a product with the transposed matrix, which of compressed rows is one of compressed columns;
before such a product, and before each with a matrix in coordinates, torch sorts the entries anew.  That takes about twenty
times as long as the product, and a solve makes dozens.  Inside :func:`as_they_lie` they are made by SciPy, which sorts
nothing: ``y_i = sum_k a_ik x_k`` in the order of the entries, and what the entries of one place in coordinates add up to.

Below autograd, so that graphs, derivatives and transforms are torch's.  On processors only, of real matrices of one type
with the vectors; whatever else is asked goes to torch as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, tracers

_NUMBERS = (torch.float32, torch.float64)
_LEAST = 4096  # entries from which torch's sorting takes longer than the calls


def as_they_lie(sparse: bool) -> AbstractContextManager[Any]:
    """Inside, products with sparse matrices are made so; ``sparse``: there are any."""
    return _Products() if sparse else nullcontext()


class _Products(tracers.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = _PRODUCTS.get(tracers.operation(func)[0])
        found = None if product is None else product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


def _times(A: Any, X: Any, *more: Any, **options: Any) -> Tensor | None:
    """``A X``, of matrices, or of a matrix and a vector; ``None`` where torch is to do it."""
    if more or options or not (_fits(A) and _fits(X) and A.dtype == X.dtype):
        return None
    if X.layout is torch.strided and A.layout in (torch.sparse_csc, torch.sparse_coo):
        return _applied(A, X) if _entries(A) >= _LEAST else None
    if A.layout is torch.strided and X.layout in (torch.sparse_csr, torch.sparse_coo) and A.dim() == X.dim() == 2:
        return _applied(X.t(), A.t()).t() if _entries(X) >= _LEAST else None
    return None


def _added(t: Any, A: Any, X: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """``beta t + alpha A X``, of which nothing but ``A X`` is asked."""
    return _times(A, X) if beta == 0 and alpha == 1 else None


def _fits(t: Any) -> bool:
    return isinstance(t, Tensor) and t.device.type == "cpu" and t.dtype in _NUMBERS and t.dim() <= 2


def _entries(A: Tensor) -> int:
    return compat.entries_of(A)[1].numel() if A.layout is torch.sparse_coo else A.values().numel()


def _applied(A: Tensor, X: Tensor) -> Tensor:
    """``A X``, of compressed columns, or of coordinates."""
    import scipy.sparse as sp

    shape = tuple(A.shape)
    if A.layout is torch.sparse_coo:
        indices, values = compat.entries_of(A)
        M: Any = sp.coo_matrix((values.detach().numpy(), tuple(indices.numpy())), shape=shape)
    else:
        parts = (A.values().detach().numpy(), A.row_indices().numpy(), A.ccol_indices().numpy())
        M = sp.csc_matrix(parts, shape=shape)
    return torch.from_numpy(M @ X.detach().numpy())


_PRODUCTS: dict[str, Callable[..., Tensor | None]] = {
    "aten::mv": _times,
    "aten::mm": _times,
    "aten::_sparse_addmm": _added,
}
