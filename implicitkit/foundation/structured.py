r"""A dense Jacobian without as many products as it has rows: cotangents that stay diagonal until they meet a matrix.

``J = dF/dz`` by rows is one cotangent for each entry of ``F``, and at ``F`` they are the identity.  Going back through a
graph, the cotangents of a tensor ``t`` stay as sparse as that for as long as each entry of ``t`` acts on one entry of ``F``
only: through whatever works entry by entry (``\tanh``, sums, products), moves entries (views, slices) or adds them up.  They
are then two arrays of the shape of ``t``,

    values_i = dF_{places_i} / dt_i,          dF_j / dt_i = 0   for all other j;

or a few such pairs, added up, where a stencil uses each entry a few times.
A product with a matrix of constants, ``t = A u``, makes full ones of them, and no product of two matrices is needed:

    dF_j / du = sum_{i: places_i = j} values_i A_i,           n^2 operations, and not n^3.

What is full goes on through the graph all rows at once, as autograd does it, or with fewer passes.  Hence the Jacobian of
``\tanh(W z) - z`` costs what ``W`` does to write down, and that of ``V \tanh(W z) - z`` one product ``V diag(d) W``.

Every Jacobian found in this way is compared with one product of a random vector, by the graph: a rule that is wrong, or
entries that act on more than is seen (samples that depend on each other), show there, and nothing is returned.

Source: Griewank & Walther, *Evaluating Derivatives* (2nd ed., SIAM 2008), section 3.2 (adjoints) and chapter 9 (Jacobians
by the elimination of vertices, of which this is one order).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, graph, in_parts, seeded
from implicitkit.foundation.graph import Edge
from implicitkit.foundation.structured_rules import Diagonal, Unusual, through, through_full

WORTH = 1 << 22  # multiplications of the products, all samples and rows, below which these cost no more
_NODES = 4000  # of a graph that is gone through, at most
_SEVERAL = 16  # diagonals of one tensor, at most: what stencils make of it takes a few
_UNITS = 64.0  # of rounding that a product may differ by
_DTYPES = (torch.float32, torch.float64)
_CHUNK, _CHUNK_ELSEWHERE = 1 << 20, 1 << 24  # numbers in one batch of products, on a CPU and on what needs more at once


def side_by_side(like: Tensor, numbers: int) -> int:
    """How many products of so many ``numbers`` each are best made at once: with fewer the calls cost, with more every
    operation goes through memory that is neither in a cache nor at hand (two to three times as long on a CPU)."""
    return max(1, (_CHUNK if like.device.type == "cpu" else _CHUNK_ELSEWHERE) // max(1, numbers))


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
            way = _Backwards(out, point, max(most, batch * rows * n))
            found = graph.between_passes(way.run)
            found = None if found is None else found.transpose(0, 1)
            return found if found is None or _confirmed(found, out, point, way.added) else None
    except Exception:  # it is unusual, has been freed, has an operation without a batching rule: products say so, or do
        return None


def _confirmed(J: Tensor, out: Tensor, point: Tensor, added: Tensor) -> bool:
    """Has a random vector the product with ``J`` that the graph gives it, to what rounding leaves of ``|v| |J|``?  It gives
    each row the size one, so that a large row does not hide a small one; that of what cancels in it, if this is more:
    ``added``, ``(batch, m)``."""
    w, before, parts = seeded.normal(*added.shape, seed=0xD1A6).to(out), 0, []
    product = size = J.new_zeros(len(J), 1, J.shape[2])
    for rows in in_parts.rows(J):
        some = slice(before, before := before + rows.shape[1])
        sizes = rows.abs()
        largest = torch.maximum(sizes.amax(2), added[:, some])
        v = w[:, some] / torch.where(largest > 0, largest, 1)
        product, size = product + torch.bmm(v.unsqueeze(1), rows), size + torch.bmm(v.abs().unsqueeze(1), sizes)
        parts.append(v)
    (shown,) = graph.pulled(out, (point,), torch.cat(parts, 1))
    wrong = ((torch.zeros_like(point) if shown is None else shown) - product.squeeze(1)).abs()
    return bool((wrong <= _UNITS * torch.finfo(J.dtype).eps * size.squeeze(1)).all())


class _Backwards:
    """One way back through a graph, from ``out`` to ``point``."""

    def __init__(self, out: Tensor, point: Tensor, most: int) -> None:
        self.out, self.point, self.most = out, point, most
        self.rows = out.shape[1]
        self.leads = _leading_to(out.grad_fn, point)
        self.gained = False
        self.added = out.new_zeros(out.shape)
        self._open: dict[Any, dict[int, list[Diagonal]]] = {}
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
            several = self._open.pop(node)
            for k in range(max(map(len, several.values()), default=0)):
                given = {number: diagonals[k] for number, diagonals in several.items() if k < len(diagonals)}
                if not through(self, node, given):
                    self._left += [((node, number), diagonal) for number, diagonal in given.items()]
            full = self._full.get((node, 0))
            if full is not None and through_full(self, node, full):
                del self._full[node, 0]
        here = [d for edge, d in self._left if graph.is_leaf(edge[0], self.point)]
        if not self.gained and len(here) < len(self._left):
            return None
        for edge, diagonal in self._left:
            if not graph.is_leaf(edge[0], self.point):
                full = self._full.get(edge)
                self._full[edge] = self._written(diagonal, None if full is None else full.clone())
        found = self._through_rest()
        for diagonal in here:
            found = self._written(diagonal, found)
            self._note(diagonal)
        return self.point.new_zeros(self.rows, *self.point.shape) if found is None else found

    def _note(self, diagonal: Diagonal) -> None:
        """Note how much is added to the rows of the Jacobian."""
        values, places = (t.reshape(-1) for t in diagonal)
        self.added.view(-1).index_add_(0, places.clamp_min(0), values.abs())  # of none the values are zero

    # ------------------------------------------------------------------------------------------------ what is met
    def give(self, node: Any, number: int, diagonal: Diagonal) -> None:
        """Hand cotangents to what argument ``number`` of ``node`` came from, which may have been smaller than the result."""
        edge = node.next_functions[number]
        if edge[0] not in self.leads:
            return
        found = self._narrowed(Diagonal(self._cast(diagonal.values, edge), diagonal.places), graph.shape_at(edge))
        if isinstance(found, Diagonal):
            self._add(edge, found)
        else:
            self._add_full(edge, found)

    def give_full(self, node: Any, number: int, cotangents: Tensor) -> None:
        """Hand full cotangents ``(rows, *shape)`` to what argument ``number`` of ``node`` came from."""
        edge = node.next_functions[number]
        if edge[0] not in self.leads:
            return
        shape = graph.shape_at(edge)
        if cotangents[0].numel() != math.prod(shape):
            extra = cotangents.ndim - 1 - len(shape)
            cotangents = cotangents.sum(tuple(range(1, 1 + extra))) if extra else cotangents
            cotangents = cotangents.sum_to_size(self.rows, *shape)
        self.gained = True
        self._add_full(edge, self._cast(cotangents, edge).reshape(self.rows, *shape))

    @staticmethod
    def _cast(cotangents: Tensor, edge: Edge) -> Tensor:
        """The cotangents in the dtype of the tensor that they belong to, in which torch would give them."""
        dtype = graph.dtype_at(edge)
        if not (dtype.is_floating_point and cotangents.is_floating_point()):
            raise Unusual
        return cotangents.to(dtype)

    def affords(self, numbers: int) -> bool:
        """May ``rows`` times so many be held?"""
        return numbers * self.rows <= self.most

    def _add(self, edge: Edge, diagonal: Diagonal) -> None:
        node, number = edge
        if graph.is_leaf(edge[0], self.point):
            self._left.append((edge, diagonal))
            return
        self._enqueue(node)
        several = self._open[node].setdefault(number, [])
        for k, before in enumerate(several):
            same = (before.places == diagonal.places) | (before.places < 0) | (diagonal.places < 0)
            if bool(same.all()):
                places = torch.maximum(before.places, diagonal.places)
                several[k] = Diagonal(before.values + diagonal.values, places)
                return
        if len(several) < min(_SEVERAL, self.rows // 4):
            several.append(diagonal)
        else:
            self._left.append((edge, diagonal))

    def _enqueue(self, node: Any) -> None:
        if node not in self._open:
            self._open[node] = {}
            heapq.heappush(self._queue, (-graph.age(node), next(self._number), node))

    def _add_full(self, edge: Edge, cotangents: Tensor) -> None:
        before = self._full.get(edge)
        self._full[edge] = cotangents if before is None else before + cotangents
        if not graph.is_leaf(edge[0], self.point):
            self._enqueue(edge[0])

    def _written(self, diagonal: Diagonal, before: Tensor | None) -> Tensor:
        """What is diagonal, full; added to what there is ``before``."""
        values, places = (t.reshape(-1) for t in diagonal)
        if before is None:
            if not self.affords(len(values)):
                raise Unusual
            before = values.new_zeros(self.rows, *diagonal.values.shape)
        before = before.contiguous()
        kept = (places >= 0).nonzero().squeeze(1)
        before.view(self.rows, -1).index_put_((places[kept] % self.rows, kept), values[kept], accumulate=True)
        return before

    def _narrowed(self, diagonal: Diagonal, shape: Sequence[int]) -> Diagonal | Tensor:
        """Cotangents of a tensor of this ``shape`` from those of its expansion: added up; full, where one entry acts on
        several of ``F``."""
        values, places = diagonal
        extra = values.ndim - len(shape)
        if tuple(values.shape) == tuple(shape):
            return diagonal
        if extra < 0 or any(s not in (1, v) for s, v in zip(shape, values.shape[extra:], strict=True)):
            raise Unusual
        dims = [d for d in range(values.ndim) if d < extra or shape[d - extra] != values.shape[d]]
        first = places
        for d in dims:
            first = first.narrow(d, 0, 1)
        if bool((places == first).all()):
            return Diagonal(values.sum(dims, keepdim=True).reshape(shape), first.reshape(shape))
        size = math.prod(shape)
        if not self.affords(size):
            raise Unusual
        self.gained = True
        where = torch.arange(size, device=places.device).view(tuple(shape)).expand_as(places)
        where = where + (places % self.rows) * size  # of none the values are zero
        full = values.new_zeros(self.rows * size).index_add_(0, where.reshape(-1), values.reshape(-1))
        return full.view(self.rows, *shape)

    # ------------------------------------------------------------------------------------------------- what is left
    def _through_rest(self) -> Tensor | None:
        """What is full, from where it is to the point, as autograd does it."""
        here = [edge for edge in self._full if graph.is_leaf(edge[0], self.point)]
        found = self._full.pop(here[0]) if here else None
        if not self._full:
            return found

        def product(*cotangents: Tensor) -> Tensor:
            return graph.pulled_from(list(self._full), self.point, cotangents)

        some = side_by_side(self.point, len(self.point) * max(self.rows, self.point.shape[1]))
        pieces = zip(*(t.split(some) for t in self._full.values()), strict=True)
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
            raise Unusual
    found = set(ends)
    while ends:
        for node in before[ends.pop()]:
            if node not in found:
                found.add(node)
                ends.append(node)
    return found
