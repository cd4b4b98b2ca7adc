r"""What one operation makes of diagonal cotangents (:mod:`~implicitkit.foundation.structured`).

For ``t = f(u)``, of which each entry of ``t`` acts on one entry of ``F``:

    entry by entry      dF_{places_i} / du_i = f'(u_i) values_i                             the same places
    moved, or summed    the entry of t that u_i has become, or become a part of             its place
    t = A u, constant   dF_j / du = sum_{i: places_i = j} values_i A_i                      full
    t = a u, one row    dF_{place} / du = a values                                          that place

Full cotangents ``C`` go through the first, ``C diag(f'(u))`` with ``f'`` evaluated once and not for each row, and through
products, ``C A``, all rows at once.  A rule gives what it has made to the arguments, and says whether it could.

Source: Griewank & Walther, *Evaluating Derivatives* (2nd ed., SIAM 2008), section 3.2 (adjoints).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from implicitkit.foundation import graph
from implicitkit.foundation.graph import Edge


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
        """Hand cotangents to what argument ``number`` of ``node`` came from, which may have been smaller than the result."""

    def give_full(self, node: Any, number: int, cotangents: Tensor) -> None:
        """Hand full cotangents ``(rows, *shape)`` to what argument ``number`` of ``node`` came from."""

    def affords(self, numbers: int) -> bool:
        """May ``rows`` times so many be held?"""


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


def through_full(way: Way, node: Any, full: Tensor) -> bool:
    """Take full cotangents ``(rows, *shape)`` of the only result of ``node`` through it; False: that is left to autograd."""
    name = graph.operation_of(node)
    if name in _PRODUCTS:
        return _product_full(way, node, full)
    if name in _ONE_RESULT:
        to = [k for k, (after, _) in enumerate(node.next_functions) if after in way.leads]
        if not all(way.affords(math.prod(graph.shape_at(node.next_functions[k]))) for k in to):
            return False

        def moved(cotangent: Tensor) -> list[Tensor]:
            found = graph.called(node, {0: cotangent})
            return [t for k, t in enumerate(found) if k in to and t is not None]

        for k, cotangents in zip(to, torch.func.vmap(moved)(full), strict=True):
            way.give_full(node, k, cotangents)
        return True
    if not (graph.is_pointwise(name) or name == "to_copy"):
        return False
    slopes = _slopes(way, node, full.new_ones(full.shape[1:]))
    for k, slope in slopes or ():
        way.give_full(node, k, full if bool((slope == 1).all()) else full * slope)
    return slopes is not None


Rule: TypeAlias = Callable[[Way, Any, Diagonal], bool]


def _slopes(way: Way, node: Any, cotangent: Tensor) -> list[tuple[int, Tensor]] | None:
    """What an operation that works entry by entry makes of a cotangent, for the arguments that lead to the point; ``None``
    where it is not one."""
    found = graph.called(node, {0: cotangent})
    slopes = []
    for k, (after, _) in enumerate(node.next_functions):
        slope = found[k]
        if after in way.leads:
            if slope is None or slope.shape != cotangent.shape:
                return None
            slopes.append((k, slope))
    return slopes


def _pointwise(way: Way, node: Any, given: Diagonal) -> bool:
    """Each entry of the result depends on the entry of each argument that stands in its place."""
    slopes = _slopes(way, node, given.values)
    for k, values in slopes or ():
        way.give(node, k, Diagonal(values, given.places))
    return slopes is not None


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


def _factors(way: Way, node: Any) -> list[tuple[int, Tensor, bool]]:
    """The factors of a product ``L R`` of matrices or batches of them that lead to the point: the number of each, the other
    factor ``(b, p, q)`` as it stands in ``A u``, and whether that is ``R' L'``, the product turned."""
    first, *names = _PRODUCTS[graph.operation_of(node)]
    found = []
    for k, other in ((first, names[1]), (first + 1, names[0])):
        if node.next_functions[k][0] in way.leads:
            matrix = graph.saved(node, other)
            matrix = matrix.unsqueeze(1) if matrix.ndim == 1 else matrix
            matrix = matrix.reshape(-1, *matrix.shape[-2:])
            found.append((k, matrix.mT if k == first else matrix, k == first))
    return found


def _as_blocks(t: Tensor, ndim: int) -> Tensor:
    """The last ``ndim`` dimensions, of a vector, a matrix or several, as those of ``(b, p, s)``."""
    if ndim == 1:
        return t.unsqueeze(-1).unsqueeze(-3)
    return t.unsqueeze(-3) if ndim == 2 else t


def _product(way: Way, node: Any, given: Diagonal) -> bool:
    """``L R``, or ``beta C + alpha L R``."""
    values, places = given
    if _PRODUCTS[graph.operation_of(node)][0]:
        way.give(node, 0, Diagonal(graph.saved(node, "beta") * values, places))
        values = graph.saved(node, "alpha") * values
    values, places = (_as_blocks(t, t.ndim) for t in (values, places))
    for k, A, turned in _factors(way, node):
        mine = Diagonal(values.mT, places.mT) if turned else Diagonal(values, places)
        _factor(way, (node, k), A, mine, turned)
    return True


def _product_full(way: Way, node: Any, full: Tensor) -> bool:
    """Take full cotangents through a product of matrices, all in one product."""
    factors = _factors(way, node)
    blocks = _as_blocks(full, full.ndim - 1)
    if not all(way.affords(blocks[0].numel() // A.shape[1] * A.shape[2]) for _, A, _ in factors):
        return False
    if _PRODUCTS[graph.operation_of(node)][0]:
        way.give_full(node, 0, graph.saved(node, "beta") * full)
        blocks = graph.saved(node, "alpha") * blocks
    for k, A, turned in factors:
        mine = blocks if turned else blocks.mT  # (rows, b, s, p)
        found = mine.transpose(0, 1).flatten(1, 2) @ A
        found = found.unflatten(1, mine.shape[::2][:2]).transpose(0, 1)
        way.give_full(node, k, found if turned else found.mT)
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
    if not way.affords(b * s * q):
        raise Unusual
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


_VIEWS = frozenset(
    ["view", "unsafe_view", "reshape_alias", "unsqueeze", "squeeze", "permute", "transpose", "t", "alias"]
)
_PARTS = [
    "clone",
    "slice",
    "select",
    "diagonal",
    "split",
    "split_with_sizes",
    "unbind",
    "cat",
    "stack",
    "constant_pad_nd",
]
_MOVES = _VIEWS.union(_PARTS, ["flip", "roll", "sum"])
_ONE_RESULT = _MOVES.union(["expand"]).difference(["split", "split_with_sizes", "unbind"])
_RULES: dict[str, Rule] = {
    "expand": _expand,
    "mean": _reduced,
    "logsumexp": _reduced,
    "to_copy": _pointwise,
    **dict.fromkeys(_PRODUCTS, _product),
}
