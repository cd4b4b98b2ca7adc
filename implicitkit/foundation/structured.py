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
from torch.autograd.graph import GradientEdge

from implicitkit.foundation import compat, seeded, tracers

__all__ = ["SMALLEST", "rows_by_structure"]

Edge: TypeAlias = "tuple[Any, int]"

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
            found = tracers.between_passes(_Backwards(out, point, max(most, batch * rows * n)).run)
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
        if not self.gained and any(not self._at_point(edge) for edge, _ in self._left):
            return None
        for edge, diagonal in self._left:
            self._write(edge, diagonal)
        return self._through_rest()

    def _at_point(self, edge: Edge) -> bool:
        return getattr(edge[0], "variable", None) is self.point

    # ------------------------------------------------------------------------------------------------ what is met
    def give(self, node: Any, number: int, diagonal: Diagonal) -> None:
        """To argument ``number`` of the operation of ``node``, which may have been smaller than its result."""
        after, which = node.next_functions[number]
        if after not in self.leads:
            return
        found = self._narrowed(diagonal, tracers.shapes_into(after)[which])
        if isinstance(found, Diagonal):
            self._add((after, which), found)
        else:
            self._add_full((after, which), found)

    def give_full(self, node: Any, number: int, cotangents: Tensor) -> None:
        """The same of full ones, ``(rows, *shape)``, of the shape of the argument when it is flat."""
        edge = node.next_functions[number]
        shape = tracers.shapes_into(edge[0])[edge[1]]
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
        name = tracers.operation_of(node)
        if name in _MOVES:
            return _move(self, node, given)
        if len(given) > 1 or 0 not in given:
            return False
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, node, given[0])
        return tracers.is_pointwise(name) and _pointwise(self, node, given[0])

    def _add(self, edge: Edge, diagonal: Diagonal) -> None:
        node, number = edge
        if self._at_point(edge):
            self._left.append((edge, diagonal))
            return
        if node not in self._open:
            self._open[node] = {}
            heapq.heappush(self._queue, (-tracers.age(node), next(self._number), node))
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

    def _write(self, edge: Edge, diagonal: Diagonal) -> None:
        """Add what is diagonal to what is full."""
        before, (values, places) = self._full.get(edge), (t.reshape(-1) for t in diagonal)
        if before is None:
            self.afford(len(values))
            before = values.new_zeros(self.rows, *diagonal.values.shape)
        before = before.contiguous()
        kept = (places >= 0).nonzero().squeeze(1)
        at = places[kept] % self.rows, kept
        before.view(self.rows, -1).index_put_(at, values[kept], accumulate=True)
        self._full[edge] = before

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
    def _through_rest(self) -> Tensor:
        """From where cotangents are full to the point, as autograd does it."""
        (batch, n), rows = self.point.shape, self.rows
        here = [edge for edge in self._full if self._at_point(edge)]
        found = self._full.pop(here[0]) if here else None
        if self._full:
            edges = [GradientEdge(*edge) for edge in self._full]

            def product(*cotangents: Tensor) -> Tensor:
                (g,) = torch.autograd.grad(edges, self.point, cotangents, retain_graph=True)
                return g

            chunk = max(1, self.most // max(1, batch * max(rows, n)))
            pieces = zip(*(t.split(chunk) for t in self._full.values()), strict=True)
            rest = torch.cat([torch.func.vmap(product)(*piece) for piece in pieces])
            found = rest if found is None else rest.add_(found)
        return self.point.new_zeros(rows, batch, n) if found is None else found


def _leading_to(root: Any, point: Tensor) -> set[Any]:
    """The nodes behind ``root`` from which a way leads to the leaf ``point``."""
    before: dict[Any, list[Any]] = {root: []}
    open_, ends = [root], []
    while open_:
        node = open_.pop()
        if getattr(node, "variable", None) is point:
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


def _called(node: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """What the derivative of one operation gives, one for each argument."""
    found = node(*cotangents)
    return found if isinstance(found, tuple) else (found,)


def _pointwise(way: _Backwards, node: Any, given: Diagonal) -> bool:
    """Each entry of the result depends on the entry of each argument that stands in its place."""
    found = _called(node, given.values)
    wanted = [k for k, (after, _) in enumerate(node.next_functions) if after in way.leads]
    if any(found[k] is None or found[k].shape != given.values.shape for k in wanted):
        return False
    for k in wanted:
        way.give(node, k, Diagonal(found[k], given.places))
    return True


def _move(way: _Backwards, node: Any, given: dict[int, Diagonal]) -> bool:
    """Entries of arguments become entries of results, or are summed: cotangents are moved or repeated."""
    sources = [given.get(k) for k in range(len(tracers.shapes_into(node)))]
    values = _called(node, *(None if d is None else d.values for d in sources))
    places = _called(node, *(None if d is None else d.places + 1 for d in sources))
    for k, (v, p) in enumerate(zip(values, places, strict=True)):
        if v is not None and p is not None:
            way.give(node, k, Diagonal(v, p.long() - 1))
    return True


def _expand(way: _Backwards, node: Any, given: Diagonal) -> bool:
    way.give(node, 0, given)
    return True


def _reduced(way: _Backwards, node: Any, given: Diagonal) -> bool:
    """Results that depend on a group of entries each: a mean, a logarithm of a sum of exponentials."""
    after, which = node.next_functions[0]
    shape = tracers.shapes_into(after)[which]
    (values,) = _called(node, given.values)
    if tuple(values.shape) != tuple(shape):
        return False
    places = given.places
    if places.ndim != len(shape):
        for d in sorted(tracers.dims_of(node, len(shape))):
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
    first, *names = _PRODUCTS[tracers.operation_of(node)]
    values, places = given
    if first:
        way.give(node, 0, Diagonal(tracers.saved(node, "beta") * values, places))
        values = tracers.saved(node, "alpha") * values
    shape = values.shape if values.ndim > 1 else (*values.shape, 1)  # (..., p, s)
    values, places = (t.reshape(-1, *shape[-2:]) for t in (values, places))
    for k, other in ((first, names[1]), (first + 1, names[0])):
        if node.next_functions[k][0] not in way.leads:
            continue
        matrix = tracers.saved(node, other)
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
        shape = tracers.shapes_into(edge[0].next_functions[edge[1]][0])[edge[0].next_functions[edge[1]][1]]
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
    "view unsafe_view reshape_alias unsqueeze squeeze permute transpose t slice select split split_with_sizes unbind stack "
    "cat clone alias flip roll diagonal constant_pad_nd sum".split()
)
_RULES: dict[str, Rule] = {
    "expand": _expand,
    "mean": _reduced,
    "logsumexp": _reduced,
    "to_copy": _pointwise,
    **dict.fromkeys(_PRODUCTS, _product),
}
