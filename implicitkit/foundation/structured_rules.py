r"""What one operation makes of diagonal cotangents (:mod:`~implicitkit.foundation.structured`).

For ``t = f(u)``, of which each entry of ``t`` acts on one entry of ``F``:

    entry by entry      dF_{places_i} / du_i = f'(u_i) values_i                             the same places
    moved, or summed    the entry of t that u_i has become, or become a part of             its place
    t = A u, constant   dF_j / du = sum_{i: places_i = j} values_i A_i                      full
    t = a u, one row    dF_{place} / du = a values                                          that place

A rule gives what it has made to the arguments, and says whether it could.

Source: Griewank & Walther, *Evaluating Derivatives* (2nd ed., SIAM 2008), section 3.2 (adjoints).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from implicitkit.foundation import graph
from implicitkit.foundation.graph import Edge

__all__ = ["Diagonal", "Unusual", "Way", "through"]


class Unusual(Exception):
    """Not a graph for this."""


class Diagonal(NamedTuple):
    """Cotangents of a tensor ``t`` for all of ``F``, of which each entry of ``t`` has one.

    Attributes:
        values: of the shape of ``t``. places: the same, integers: entry ``j`` of sample ``b`` is ``b rows + j``; -1:
        none, and the value is zero.
    """

    values: Tensor
    places: Tensor


class Way(Protocol):
    """A way back through a graph."""

    rows: int
    leads: set[Any]

    def give(self, node: Any, number: int, diagonal: Diagonal) -> None:
        """To argument ``number`` of the operation of ``node``, which may have been smaller than its result."""

    def give_full(self, node: Any, number: int, cotangents: Tensor) -> None:
        """The same of full ones, ``(rows, *shape)``, of the shape of the argument when it is flat."""

    def afford(self, numbers: int) -> None:
        """Raise where ``rows`` times so many are more than may be held."""


def through(way: Way, node: Any, given: dict[int, Diagonal]) -> bool:
    """Go through ``node``, given cotangents of its results by their numbers; False: it does not keep them diagonal.

    Raises:
        Unusual: it takes too much, or is not what it looks like.
    """
    name = graph.operation_of(node)
    if name in _MOVES:
        return _move(way, node, given)
    if len(given) > 1 or 0 not in given:
        return False
    rule = _RULES.get(name)
    if rule is not None:
        return rule(way, node, given[0])
    return graph.is_pointwise(name) and _pointwise(way, node, given[0])


Rule: TypeAlias = Callable[[Way, Any, Diagonal], bool]


def _pointwise(way: Way, node: Any, given: Diagonal) -> bool:
    """Each entry of the result depends on the entry of each argument that stands in its place."""
    found = graph.called(node, {0: given.values})
    wanted = [(k, found[k]) for k, (after, _) in enumerate(node.next_functions) if after in way.leads]
    if any(values is None or values.shape != given.values.shape for _, values in wanted):
        return False
    for k, values in wanted:
        assert values is not None
        way.give(node, k, Diagonal(values, given.places))
    return True


def _move(way: Way, node: Any, given: dict[int, Diagonal]) -> bool:
    """Entries of arguments become entries of results, or are summed: cotangents are moved or repeated."""
    values = graph.called(node, {k: d.values for k, d in given.items()})
    places = graph.called(node, {k: d.places + 1 for k, d in given.items()})
    for k, (v, p) in enumerate(zip(values, places, strict=True)):
        if v is not None and p is not None:
            way.give(node, k, Diagonal(v, p.long() - 1))
    return True


def _expand(way: Way, node: Any, given: Diagonal) -> bool:
    way.give(node, 0, given)
    return True


def _reduced(way: Way, node: Any, given: Diagonal) -> bool:
    """Results that depend on a group of entries each: a mean, a logarithm of a sum of exponentials."""
    shape = graph.shape_at(node.next_functions[0])
    values = graph.called(node, {0: given.values})[0]
    if values is None or values.shape != shape:
        return False
    places = given.places
    if places.ndim != len(shape):
        for d in sorted(graph.dims_of(node, len(shape))):
            places = places.unsqueeze(d)
    way.give(node, 0, Diagonal(values, places.expand(shape)))
    return True


_PRODUCTS = {
    "mm": (0, "self", "mat2"),
    "mv": (0, "self", "vec"),
    "bmm": (0, "self", "mat2"),
    "addmm": (1, "mat1", "mat2"),
    "addmv": (1, "mat", "vec"),
    "baddbmm": (1, "batch1", "batch2"),
}


def _product(way: Way, node: Any, given: Diagonal) -> bool:
    """``L R``, matrices or batches of them, and ``beta C + alpha L R``."""
    first, *names = _PRODUCTS[graph.operation_of(node)]
    values, places = given
    if first:
        way.give(node, 0, Diagonal(graph.saved(node, "beta") * values, places))
        values = graph.saved(node, "alpha") * values
    shape = values.shape if values.ndim > 1 else (*values.shape, 1)  # (..., p, s)
    values, places = (t.reshape(-1, *shape[-2:]) for t in (values, places))
    for k, other in ((first, names[1]), (first + 1, names[0])):
        if node.next_functions[k][0] not in way.leads:
            continue
        matrix = graph.saved(node, other)
        matrix = matrix.unsqueeze(1) if matrix.ndim == 1 else matrix
        matrix = matrix.reshape(-1, *matrix.shape[-2:])
        if k == first:  # L' of R' L'
            _factor(way, (node, k), matrix.mT, Diagonal(values.mT, places.mT), turned=True)
        else:
            _factor(way, (node, k), matrix, Diagonal(values, places), turned=False)
    return True


def _meet(rows: Tensor, count: int) -> bool:
    """Do two entries of a column of ``(b, p, s)`` act on the same of ``count`` rows?"""
    columns = torch.arange(rows.shape[0] * rows.shape[2], device=rows.device).view(rows.shape[0], 1, -1)
    return bool((torch.bincount((columns * count + rows).reshape(-1)) > 1).any())


def _factor(way: Way, edge: Edge, A: Tensor, given: Diagonal, turned: bool) -> None:
    """Cotangents of ``u`` ``(b, q, s)`` from those of ``A u`` ``(b, p, s)``; ``turned``: to be given as of ``u'``."""
    (values, places), (b, p, q) = given, A.shape
    s = values.shape[2]
    if p == 1:  # each entry of u acts on one of A u
        found = Diagonal(A.mT * values, places.expand(b, q, s))
        found = Diagonal(*(t.mT for t in found)) if turned else found
        shape = graph.shape_at(edge[0].next_functions[edge[1]])
        way.give(*edge, Diagonal(*(t.reshape(shape) for t in found)))
        return
    way.afford(b * s * q)
    rows = torch.where(places < 0, way.rows, places % way.rows)
    inner = torch.arange(p, device=A.device).view(1, p, 1)
    if p == way.rows and bool((rows == inner).all()):
        full = values.new_empty(p, b, s, q)
        torch.mul(values.permute(1, 0, 2).unsqueeze(3), A.transpose(0, 1).unsqueeze(2), out=full)
    else:
        full = values.new_zeros(way.rows + 1, b, s, q)
        at = rows, torch.arange(b, device=A.device).view(b, 1, 1), torch.arange(s, device=A.device)
        full.index_put_(at, values.unsqueeze(3) * A.unsqueeze(2), accumulate=_meet(rows, way.rows + 1))
        full = full[: way.rows]
    way.give_full(*edge, full if turned else full.mT)


_VIEWS = "view unsafe_view reshape_alias unsqueeze squeeze permute transpose t alias clone"
_PARTS = "slice select diagonal split split_with_sizes unbind cat stack constant_pad_nd flip roll sum"
_MOVES = frozenset(f"{_VIEWS} {_PARTS}".split())
_RULES: dict[str, Rule] = {
    "expand": _expand,
    "mean": _reduced,
    "logsumexp": _reduced,
    "to_copy": _pointwise,
    **dict.fromkeys(_PRODUCTS, _product),
}
