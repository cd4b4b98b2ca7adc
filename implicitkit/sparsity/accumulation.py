r"""The entries of a sparse Jacobian from one evaluation: sparse forward accumulation.

For every number ``v`` in memory the row ``dv / dz`` is kept, a sparse vector, and carried through every operation by its
own derivatives, ``dw / dz = \sum_v (dw / dv) (dv / dz)`` (Griewank & Walther, *Evaluating Derivatives*, 2nd ed., SIAM 2008,
section 7.3, "dynamically sparse" forward mode).  What that takes goes with the entries of the rows, whatever the graph of
the unknowns looks like: where a few nodes have hundreds of links, no colouring shows the matrix in fewer products than the
longest row has entries.

Only operations of which the derivatives are written down here are followed; where another one meets the unknowns, the
entries are found by products.  Whoever uses them confirms them by a product, as those from colours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.foundation.numbers import array
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.index_sets import IndexSets, TooDense
from implicitkit.sparsity.rules import mixing, moves, pointwise, scatter
from implicitkit.sparsity.same_pattern import with_entries
from implicitkit.sparsity.tracing import NotTraceable, Rule, Trace, watching

_MOST = 64  # entries of a row, on average, for each number that an operation returns: a dense factor costs more

Parts = list[tuple[Any, Any]]  # an argument, and the derivative of the result by it, entry by entry


class Accumulation(Trace):
    """A trace whose sets are rows of derivatives.

    Attributes:
        before: what is written into by an operation, and the numbers that were there.
    """

    def __init__(self, unknowns: int, batch: int) -> None:
        super().__init__(RULES, unknowns, 0, batch)
        self.before: tuple[Tensor, Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, self.before = args[0] if args else None, None
        if isinstance(first, Tensor) and tracers.operation(func)[1] and self.tracked(first):
            self.before = first, first.clone()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def value(self, t: Tensor) -> Tensor:
        """The numbers of an argument, as they were."""
        if self.before is None:
            return t
        if t is not self.before[0] and t.untyped_storage().data_ptr() == self.before[0].untyped_storage().data_ptr():
            raise NotTraceable("an operation reads what it writes")
        return self.before[1] if t is self.before[0] else t

    def guess(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        raise NotTraceable(f"the derivatives of {name} are not written down")

    def rowwise(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        raise NotTraceable("what is solved inside has derivatives of its own")


def accumulated(function: Callable[[Tensor], Tensor], z: Tensor, pattern: IndexSets) -> np.ndarray | None:
    """The entries of ``d function / dz`` of every sample, ``(batch, nnz)``, in the order of ``pattern`` ``(m, n)``.

    Args:
        function: ``(batch, n) -> (batch, m)``, row by row independent. z: ``(batch, n)``, plain.

    Returns:
        ``None`` where they cannot be found so: an operation without its derivatives, an entry that the pattern does not
        have, or one that is not finite.
    """
    batch, n = z.shape
    point = z.detach().clone()
    trace = Accumulation(n, batch)
    ones = index_sets.identity(point.numel(), n)
    trace.write(point, with_entries(ones, np.ones(ones.nnz)))
    try:
        with index_sets.limited(_MOST * (pattern.nnz + n) * batch), watching(trace):
            out = function(point)
        rows = trace.read(out.detach() if out.requires_grad else out)
    except (TooDense, NotTraceable):
        return None
    except Exception:  # whatever the function does that a trace does not allow
        return None
    rows = sp.csr_matrix(rows)
    rows.sum_duplicates()
    return _in_order(rows, pattern, batch)


def _in_order(rows: sp.csr_matrix, pattern: IndexSets, batch: int) -> np.ndarray | None:
    (m, n), data = pattern.shape, np.asarray(rows.data, dtype=np.float64)
    if rows.shape != (batch * m, n) or not np.isfinite(data).all():
        return None
    if batch == 1 and rows.nnz == pattern.nnz and np.array_equal(rows.indices, pattern.indices):
        return data[None] if np.array_equal(rows.indptr, pattern.indptr) else None
    row = np.repeat(np.arange(batch * m, dtype=np.int64), np.diff(rows.indptr))
    keys = row % m * n + rows.indices
    known = np.repeat(np.arange(m, dtype=np.int64), np.diff(pattern.indptr)) * n + pattern.indices
    if not len(known):
        return None if len(keys) else np.zeros((batch, 0))
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    if not np.array_equal(known[places], keys):
        return None
    values = np.zeros((batch, len(known)))
    values[row // m, places] = data
    return values


# ------------------------------------------------------------------------------------------------------------- the rules
def _scaled(rows: IndexSets, by: Tensor | float, shape: Sequence[int]) -> IndexSets:
    """Row by row times a number."""
    if not isinstance(by, Tensor):
        return rows if by == 1 else with_entries(rows, by * rows.data)
    each = array(by.detach().expand(tuple(shape)).reshape(-1))
    return with_entries(rows, np.repeat(each, np.diff(rows.indptr)) * rows.data)


def _by_entries(partial: Callable[..., Parts]) -> Rule:
    """The rule of an operation that is taken entry by entry; ``partial(value, args, kwargs, out)``: its derivatives."""

    def rule(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        assert isinstance(trace, Accumulation)
        read = lambda t: trace.value(t) if isinstance(t, Tensor) else t  # noqa: E731
        parts = partial([read(t) for t in args], args, kwargs, out)
        found = [
            _scaled(pointwise.broadcast(trace, t, out.shape), by, out.shape) for t, by in parts if trace.tracked(t)
        ]
        trace.write(out, index_sets.union(found) if found else index_sets.empty(out.numel(), trace.unknowns))

    return rule


def _same(v: Any, a: Any, k: Any, out: Any) -> Parts:
    return [(a[0], 1.0)]


def _sum_of(sign: float, turned: bool = False) -> Callable[..., Parts]:
    def partial(v: Any, a: Any, k: Any, out: Any) -> Parts:
        times = sign * k.get("alpha", a[2] if len(a) > 2 else 1)
        return [(a[1], 1.0), (a[0], times)] if turned else [(a[0], 1.0), (a[1], times)]

    return partial


def _quotient(v: Any, a: Any, k: Any, out: Any) -> Parts:
    if k.get("rounding_mode") is not None:
        raise NotTraceable("a quotient that is rounded")
    return [(a[0], 1 / v[1]), (a[1], -v[0] / (v[1] * v[1]) if isinstance(a[1], Tensor) else 0.0)]


def _power(v: Any, a: Any, k: Any, out: Any) -> Parts:
    if isinstance(a[1], Tensor) or not isinstance(a[0], Tensor):
        raise NotTraceable("a power of unknowns")
    return [(a[0], 2 * v[0] if a[1] == 2 else a[1] * v[0] ** (a[1] - 1) if a[1] != 0 else 0.0)]


def _of(slope: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Parts]:
    """A function of one number ``x`` with the value ``y``: ``slope(x, y)``."""
    return lambda v, a, k, out: [(a[0], slope(v[0], out))]


def _soft(x: Tensor, beta: float, threshold: float) -> tuple[Tensor, Tensor]:
    """Both derivatives of ``softplus``."""
    s, linear = torch.sigmoid(beta * x), beta * x > threshold
    return torch.where(linear, 1.0, s), torch.where(linear, 0.0, beta * s * (1 - s))


def _softplus(v: Any, a: Any, k: Any, out: Any) -> Parts:
    return [(a[0], _soft(v[0], *(*a[1:], *(1, 20)[len(a) - 1 :]))[0])]


def _softplus_backward(v: Any, a: Any, k: Any, out: Any) -> Parts:
    first, second = _soft(v[1], *a[2:4])
    return [(a[0], first), (a[1], v[0] * second)]


_PARTIALS: dict[str, Callable[..., Parts]] = {
    **dict.fromkeys(("_to_copy", "alias", "lift", "lift_fresh", "detach", "clone", "contiguous"), _same),
    "add": _sum_of(1.0),
    "sub": _sum_of(-1.0),
    "rsub": _sum_of(-1.0, turned=True),
    "neg": lambda v, a, k, out: [(a[0], -1.0)],
    "mul": lambda v, a, k, out: [(a[0], v[1]), (a[1], v[0])],
    "div": _quotient,
    "pow": _power,
    "exp": _of(lambda x, y: y),
    "expm1": _of(lambda x, y: y + 1),
    "log": _of(lambda x, y: 1 / x),
    "log1p": _of(lambda x, y: 1 / (1 + x)),
    "sqrt": _of(lambda x, y: 0.5 / y),
    "rsqrt": _of(lambda x, y: -0.5 * y / x),
    "reciprocal": _of(lambda x, y: -y * y),
    "sin": _of(lambda x, y: torch.cos(x)),
    "cos": _of(lambda x, y: -torch.sin(x)),
    "sinh": _of(lambda x, y: torch.cosh(x)),
    "cosh": _of(lambda x, y: torch.sinh(x)),
    "atan": _of(lambda x, y: 1 / (1 + x * x)),
    "asinh": _of(lambda x, y: 1 / torch.sqrt(1 + x * x)),
    "tanh": _of(lambda x, y: 1 - y * y),
    "sigmoid": _of(lambda x, y: y * (1 - y)),
    "tanh_backward": lambda v, a, k, out: [(a[0], 1 - v[1] * v[1]), (a[1], -2 * v[0] * v[1])],
    "sigmoid_backward": lambda v, a, k, out: [(a[0], v[1] * (1 - v[1])), (a[1], v[0] * (1 - 2 * v[1]))],
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "where": lambda v, a, k, out: [(a[1], a[0].to(out.dtype)), (a[2], 1 - a[0].to(out.dtype))],
}


def _mean(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    share = out.numel() / max(1, args[0].numel())
    mixing.RULES["mean"](trace, func, args, kwargs, out)
    trace.write(out, _scaled(trace.read(out), share, out.shape))


def _without_factor(rule: Rule) -> Rule:
    """The rule of what is added as it is: with ``alpha``, or of a sum that is none, there is none."""

    def plain(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        if kwargs.get("alpha", 1) != 1 or "reduce" in kwargs:
            raise NotTraceable("added with a factor")
        rule(trace, func, args, kwargs, out)

    return plain


def _constant(trace: Trace, t: Tensor) -> sp.csr_matrix:
    """A matrix ``(m, k)``, or a column ``(k,)``, that no unknown has made."""
    if trace.chosen(t):
        raise NotTraceable("a product of unknowns")
    t = t.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if t.layout is torch.sparse_csr:
            parts = (array(t.values()), t.col_indices().numpy(), t.crow_indices().numpy())
            return sp.csr_matrix(parts, shape=tuple(t.shape))
        if t.layout is torch.sparse_csc:
            parts = (array(t.values()), t.row_indices().numpy(), t.ccol_indices().numpy())
            return sp.csc_matrix(parts, shape=tuple(t.shape)).tocsr()
        if t.layout is torch.sparse_coo:
            t = t.coalesce()
            return sp.csr_matrix((array(t.values()), tuple(t.indices().numpy())), shape=tuple(t.shape))
    return sp.csr_matrix(array(t if t.dim() == 2 else t.unsqueeze(1)))


def _through(links: sp.csr_matrix, rows: IndexSets) -> IndexSets:
    """``links @ rows``."""
    counts = np.diff(rows.indptr)
    index_sets.afford(int(counts[links.indices].sum(dtype=np.int64)), links.shape[0])
    found = sp.csr_matrix(links @ rows)
    found.sort_indices()
    return found


def _times(with_bias: bool) -> Rule:
    """``mm(A, B)`` and ``mv(A, b)``, of which one factor is constant; with something added, whose factors are one."""

    def rule(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        bias, A, B = args[:3] if with_bias else (None, *args[:2])
        beta = kwargs.get("beta", 1)
        if with_bias and (kwargs.get("alpha", 1) != 1 or beta not in (0, 1) or len(args) > 3):
            raise NotTraceable("added with a factor")
        if trace.tracked(B):
            links = _constant(trace, A)
            if B.dim() > 1 and B.shape[1] != 1:
                links = sp.kron(links, sp.identity(B.shape[1]), format="csr")
            found = _through(links, trace.read(B))
        else:
            links = sp.csr_matrix(_constant(trace, B).T)
            found = _through(sp.kron(sp.identity(A.shape[0]), links, format="csr"), trace.read(A))
        if bias is not None and beta and trace.tracked(bias):
            found = index_sets.union([found, pointwise.broadcast(trace, bias, out.shape)])
        trace.write(out, found)

    return rule


def _dot(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    found = [
        _through(sp.csr_matrix(array(other.detach()).reshape(1, -1)), trace.read(t))
        for t, other in (args[:2], args[1::-1])
        if trace.tracked(t)
    ]
    trace.write(out, index_sets.union(found))


def _unknown(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    raise NotTraceable(f"the derivatives of {func} are not written down")


_ADDS = ("index_add", "scatter_add", "index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "index_fill")
_BACK = ("col2im", "unfold_backward", "embedding_dense_backward")
RULES: dict[str, Rule] = {
    "pointwise": _unknown,
    **{name: _by_entries(partial) for name, partial in _PARTIALS.items()},
    **dict.fromkeys(("squeeze", "unsqueeze", "transpose", "t"), pointwise.in_place_view),
    **dict.fromkeys(pointwise.NOTHING, pointwise.nothing),
    "copy": pointwise.copied,
    "fill": pointwise.copied,
    **moves.RULES,
    **{name: _without_factor(scatter.RULES[name]) for name in (*_ADDS, *_BACK)},
    "sum": mixing.RULES["sum"],
    "mean": _mean,
    **dict.fromkeys(("mm", "mv"), _times(False)),
    **dict.fromkeys(("addmm", "addmv", "_sparse_addmm"), _times(True)),
    **dict.fromkeys(("dot", "vdot"), _dot),
}


def follows(seen: frozenset[str]) -> bool:
    """Are the derivatives of all these operations written down?"""
    return seen <= RULES.keys()
