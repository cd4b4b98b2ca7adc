r"""A dense Jacobian without as many products as it has rows: cotangents that stay diagonal until they meet a matrix.

``J = dF/dz`` by rows is one cotangent for each entry of ``F``, and at ``F`` they are the identity.  Going back through a
graph, the cotangents of a tensor ``t`` stay as sparse as that for as long as each entry of ``t`` acts on one entry of ``F``
only: through whatever works entry by entry (``\tanh``, sums, products), moves entries (views, slices) or adds them up.  They
are then two arrays of the shape of ``t``,

    values_i = dF_{places_i} / dt_i,          dF_j / dt_i = 0   for all other j.

A product with a matrix of constants, ``t = A u``, makes full ones of them, and no product of two matrices is needed:

    dF_j / du = sum_{i: places_i = j} values_i A_i,           n^2 operations, and not n^3.

What is full goes on through the graph as it always does, all rows at once.  Hence the Jacobian of ``\tanh(W z) - z`` costs
what ``W`` does to write down, and that of ``V \tanh(W z) - z`` one product ``V diag(d) W``.

Every Jacobian found in this way is compared with one product of a random vector, by the graph: a rule that is wrong, or
entries that act on more than is seen (samples that depend on each other), show there, and nothing is returned.

Source: Griewank & Walther, *Evaluating Derivatives* (2nd ed., SIAM 2008), sections 3.2 (adjoints) and 10.1 (elimination of
vertices, of which this is the reverse order with the sparsity of each).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from implicitkit.foundation import compat, graph, seeded
from implicitkit.foundation.graph import Edge

__all__ = ["SMALLEST", "rows_by_structure"]

SMALLEST = 128  # unknowns below which products side by side cost no more
_NODES = 4000  # of a graph that is gone through, at most
_UNITS = 64.0  # of rounding that a product may differ by
_DTYPES = (torch.float32, torch.float64)


class _Unusual(Exception):
    """Not a graph for this."""


class Diagonal(NamedTuple):
    """Cotangents of a tensor ``t`` for all of ``F``, of which each entry of ``t`` has one.

    Attributes:
        values: of the shape of ``t``. places: the same, integers: entry ``j`` of sample ``b`` is ``b rows + j``; -1: none.
    """

    values: Tensor
    places: Tensor


def rows_by_structure(out: Tensor, point: Tensor, most: int) -> Tensor | None:
    """``d out / d point`` by samples, where that takes fewer products than it has rows.

    Args:
        out: ``(batch, m)``, row by row a function of ``point`` ``(batch, n)``, with its graph. most: numbers to be held at
            once, beside as many as the Jacobian has.

    Returns:
        ``(batch, m, n)``, plain; ``None``: it takes as many products, or the graph is not for this.  Raises nothing.
    """
    if compat.is_wrapped(out) or compat.is_wrapped(point) or out.dtype not in _DTYPES or out.dtype != point.dtype:
        return None
    (batch, n), rows = point.shape, out.shape[1]
    try:
        with torch.no_grad():
            found = graph.between_passes(_Backwards(out, point, max(most, batch * rows * n)).run)
            found = None if found is None else found.transpose(0, 1)
            return found if found is None or _confirmed(found, out, point) else None
    except (_Unusual, RuntimeError):  # a graph that is freed, an operation without a batching rule
        return None


def _confirmed(J: Tensor, out: Tensor, point: Tensor) -> bool:
    """Has a random vector the product with ``J`` that the graph gives it, to what rounding leaves of ``|v| |J|``?  It gives
    each row the size one, so that a large row does not hide a small one."""
    sizes = J.abs()
    largest = sizes.amax(2)
    v = seeded.normal(*largest.shape, seed=0xD1A6).to(out) / torch.where(largest > 0, largest, 1)
    (shown,) = compat.pulled(out, (point,), v)
    shown = torch.zeros_like(point) if shown is None else shown
    rounding = _UNITS * torch.finfo(J.dtype).eps * (v.abs().unsqueeze(1) @ sizes).squeeze(1)
    return bool(((shown - (v.unsqueeze(1) @ J).squeeze(1)).abs() <= rounding).all())


class _Backwards:
    """One way back through a graph, from ``out`` to ``point``."""

    def __init__(self, out: Tensor, point: Tensor, most: int) -> None:
        self.out, self.point, self.most = out, point, most
        self.rows = out.shape[1]
        self.leads = _leading_to(out.grad_fn, point)
        self.gained = False
        self._open: dict[Any, dict[int, Diagonal]] = {}
        self._queue: list[tuple[int, int, Any]] = []
        self._number = count()
        self._full: dict[Edge, Tensor] = {}
        self._left: list[tuple[Edge, Diagonal]] = []  # where they do not stay diagonal

    def run(self) -> Tensor | None:
        """``(rows, batch, n)``; ``None`` where nothing is gained."""
        places = torch.arange(self.out.numel(), device=self.out.device).view_as(self.out)
        self._add((self.out.grad_fn, 0), Diagonal(torch.ones_like(self.out), places))
        while self._queue:
            node = heapq.heappop(self._queue)[2]
            given = self._open.pop(node)
            if not self._through(node, given):
                self._left += [((node, number), diagonal) for number, diagonal in given.items()]
        here = [d for edge, d in self._left if graph.is_leaf(edge[0], self.point)]
        if not self.gained and len(here) < len(self._left):
            return None
        for edge, diagonal in self._left:
            if not graph.is_leaf(edge[0], self.point):
                self._full[edge] = self._written(diagonal, self._full.get(edge))
        found = self._through_rest()
        for diagonal in here:
            found = self._written(diagonal, found)
        return self.point.new_zeros(self.rows, *self.point.shape) if found is None else found

    # ------------------------------------------------------------------------------------------------ what is met
    def give(self, node: Any, number: int, diagonal: Diagonal) -> None:
        """To argument ``number`` of the operation of ``node``, which may have been smaller than its result."""
        edge = node.next_functions[number]
        if edge[0] not in self.leads:
            return
        found = self._narrowed(diagonal, graph.shape_at(edge))
        if isinstance(found, Diagonal):
            self._add(edge, found)
        else:
            self._add_full(edge, found)

    def give_full(self, node: Any, number: int, cotangents: Tensor) -> None:
        """The same of full ones, ``(rows, *shape)``, of the shape of the argument when it is flat."""
        edge = node.next_functions[number]
        shape = graph.shape_at(edge)
        if cotangents[0].numel() != math.prod(shape):
            raise _Unusual
        self.gained = True
        self._add_full(edge, cotangents.reshape(self.rows, *shape))

    def afford(self, numbers: int) -> None:
        """Raise where ``rows`` times so many are more than may be held."""
        if numbers * self.rows > self.most:
            raise _Unusual

    def _through(self, node: Any, given: dict[int, Diagonal]) -> bool:
        """Go through ``node``; False: it is not one that keeps cotangents diagonal."""
        name = graph.operation_of(node)
        if name in _MOVES:
            return _move(self, node, given)
        if len(given) > 1 or 0 not in given:
            return False
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, node, given[0])
        return graph.is_pointwise(name) and _pointwise(self, node, given[0])

    def _add(self, edge: Edge, diagonal: Diagonal) -> None:
        node, number = edge
        if graph.is_leaf(edge[0], self.point):
            self._left.append((edge, diagonal))
            return
        if node not in self._open:
            self._open[node] = {}
            heapq.heappush(self._queue, (-graph.age(node), next(self._number), node))
        before = self._open[node].get(number)
        if before is None:
            self._open[node][number] = diagonal
            return
        same = (before.places == diagonal.places) | (before.places < 0) | (diagonal.places < 0)
        if bool(same.all()):
            places = torch.maximum(before.places, diagonal.places)
            self._open[node][number] = Diagonal(before.values + diagonal.values, places)
        else:
            self._left.append((edge, diagonal))

    def _add_full(self, edge: Edge, cotangents: Tensor) -> None:
        before = self._full.get(edge)
        self._full[edge] = cotangents if before is None else before.add_(cotangents)

    def _written(self, diagonal: Diagonal, before: Tensor | None) -> Tensor:
        """What is diagonal, full; added to what there is ``before``."""
        values, places = (t.reshape(-1) for t in diagonal)
        if before is None:
            self.afford(len(values))
            before = values.new_zeros(self.rows, *diagonal.values.shape)
        before = before.contiguous()
        kept = (places >= 0).nonzero().squeeze(1)
        before.view(self.rows, -1).index_put_((places[kept] % self.rows, kept), values[kept], accumulate=True)
        return before

    def _narrowed(self, diagonal: Diagonal, shape: Sequence[int]) -> Diagonal | Tensor:
        """Of a tensor of this ``shape`` that has been expanded: added up; full, where one entry acts on several of ``F``."""
        values, places = diagonal
        extra = values.ndim - len(shape)
        if tuple(values.shape) == tuple(shape):
            return diagonal
        if extra < 0 or any(s not in (1, v) for s, v in zip(shape, values.shape[extra:], strict=True)):
            raise _Unusual
        dims = [d for d in range(values.ndim) if d < extra or shape[d - extra] != values.shape[d]]
        first = places
        for d in dims:
            first = first.narrow(d, 0, 1)
        if bool((places == first).all()):
            return Diagonal(values.sum(dims, keepdim=True).reshape(shape), first.reshape(shape))
        size = math.prod(shape)
        self.afford(size)
        self.gained = True
        where = torch.arange(size, device=places.device).view(tuple(shape)).expand_as(places)
        where = where + torch.where(places < 0, self.rows, places % self.rows) * size
        full = values.new_zeros((self.rows + 1) * size).index_add_(0, where.reshape(-1), values.reshape(-1))
        return full[: self.rows * size].view(self.rows, *shape)

    # ------------------------------------------------------------------------------------------------- what is left
    def _through_rest(self) -> Tensor | None:
        """What is full, from where it is to the point, as autograd does it."""
        here = [edge for edge in self._full if graph.is_leaf(edge[0], self.point)]
        found = self._full.pop(here[0]) if here else None
        if not self._full:
            return found

        def product(*cotangents: Tensor) -> Tensor:
            return graph.pulled_from(list(self._full), self.point, cotangents)

        chunk = max(1, self.most // max(1, len(self.point) * max(self.rows, self.point.shape[1])))
        pieces = zip(*(t.split(chunk) for t in self._full.values()), strict=True)
        parts = [torch.func.vmap(product)(*piece) for piece in pieces]
        rest = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rest if found is None else rest + found


def _leading_to(root: Any, point: Tensor) -> set[Any]:
    """The nodes behind ``root`` from which a way leads to the leaf ``point``."""
    before: dict[Any, list[Any]] = {root: []}
    open_, ends = [root], []
    while open_:
        node = open_.pop()
        if graph.is_leaf(node, point):
            ends.append(node)
        for after, _ in node.next_functions:
            if after is None:
                continue
            if after not in before:
                before[after] = []
                open_.append(after)
            before[after].append(node)
        if len(before) > _NODES:
            raise _Unusual
    found = set(ends)
    while ends:
        for node in before[ends.pop()]:
            if node not in found:
                found.add(node)
                ends.append(node)
    return found


# ------------------------------------------------------------------------------------------------------------- rules
Rule: TypeAlias = Callable[[_Backwards, Any, Diagonal], bool]


def _pointwise(way: _Backwards, node: Any, given: Diagonal) -> bool:
    """Each entry of the result depends on the entry of each argument that stands in its place."""
    found = graph.called(node, {0: given.values})
    wanted = [(k, found[k]) for k, (after, _) in enumerate(node.next_functions) if after in way.leads]
    if any(values is None or values.shape != given.values.shape for _, values in wanted):
        return False
    for k, values in wanted:
        assert values is not None
        way.give(node, k, Diagonal(values, given.places))
    return True


def _move(way: _Backwards, node: Any, given: dict[int, Diagonal]) -> bool:
    """Entries of arguments become entries of results, or are summed: cotangents are moved or repeated."""
    values = graph.called(node, {k: d.values for k, d in given.items()})
    places = graph.called(node, {k: d.places + 1 for k, d in given.items()})
    for k, (v, p) in enumerate(zip(values, places, strict=True)):
        if v is not None and p is not None:
            way.give(node, k, Diagonal(v, p.long() - 1))
    return True


def _expand(way: _Backwards, node: Any, given: Diagonal) -> bool:
    way.give(node, 0, given)
    return True


def _reduced(way: _Backwards, node: Any, given: Diagonal) -> bool:
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


def _product(way: _Backwards, node: Any, given: Diagonal) -> bool:
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


def _factor(way: _Backwards, edge: Edge, A: Tensor, given: Diagonal, turned: bool) -> None:
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
        if int(torch.bincount(places[places >= 0], minlength=1).max()) > 1:
            raise _Unusual
        full = values.new_zeros(way.rows + 1, b, s, q)
        at = rows, torch.arange(b, device=A.device).view(b, 1, 1), torch.arange(s, device=A.device)
        full[at] = values.unsqueeze(3) * A.unsqueeze(2)
        full = full[: way.rows]
    way.give_full(*edge, full if turned else full.mT)


_MOVES = frozenset(
    ("view", "unsafe_view", "reshape_alias", "unsqueeze", "squeeze", "permute", "transpose", "t", "alias", "clone")
    + ("slice", "select", "diagonal", "split", "split_with_sizes", "unbind", "cat", "stack", "constant_pad_nd")
    + ("flip", "roll", "sum")
)
_RULES: dict[str, Rule] = {
    "expand": _expand,
    "mean": _reduced,
    "logsumexp": _reduced,
    "to_copy": _pointwise,
    **dict.fromkeys(_PRODUCTS, _product),
}
