"""The Jacobian of a composition by blocks: its products, block by block, from one evaluation of every node.

The graph of that evaluation falls into one piece a component: a product with one diagonal block, or with one coupling,
runs through the nodes of that component and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from implicitkit.composition.gamma import Gamma
from implicitkit.composition.nodes import Nodes
from implicitkit.foundation import autodiff, compat, graph
from implicitkit.foundation.operators import Operator
from implicitkit.system import System


def _every(found: Sequence[Tensor | None]) -> list[Tensor]:
    """Derivatives by points that each enter their own residual, ``map(z) - z``: none is left out."""
    return [g for g in found if g is not None]


def linearise(gamma: Gamma, system: System, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
    r"""``F = \Gamma(z) - z`` at a plain ``z`` ``(batch, n)``, on its graph, and ``dF/dz = J - I`` with its blocks."""
    parts = Nodes(gamma, system)
    blocks = JacobianByComponent(parts, z, theta)
    residuals, points = blocks.residuals, blocks.points
    with torch.enable_grad(), compat.own_graphs():
        out = blocks.join(residuals)

    def rmv(w: Tensor) -> Tensor:
        cotangents = [blocks.take(i, w) for i in range(len(blocks))]
        return blocks.join(_every(graph.pulled(residuals, points, cotangents)))

    transposed: list[list[Tensor]] = []

    def mv(v: Tensor) -> Tensor:  # the double-backward trick, as in autodiff.products
        if not transposed:
            with torch.enable_grad(), compat.own_graphs():
                ws = [torch.zeros_like(r, requires_grad=True) for r in residuals]
                transposed.extend((ws, _every(graph.pulled(residuals, points, ws, create_graph=True))))
        ws, pulled = transposed
        tangents = [blocks.take(i, v) for i in range(len(blocks))]
        return blocks.join(_every(graph.pulled(pulled, ws, tangents)))

    return out, Operator(
        mv,
        rmv,
        lambda: autodiff.matrix(rmv, z.shape[1], z),
        batch=z.shape[0],
        size=z.shape[1],
        like=z,
        fixed_point=True,
        structure=blocks,
    )


class JacobianByComponent:
    """``A = J - I`` by the components of a composition (a :class:`~implicitkit.foundation.operators.BlockStructure`).

    Attributes:
        components: the nodes of each block, in topological order. points: their states, a leaf ``(batch, n_i)`` each.
        residuals: ``f_i - z_i`` ``(batch, n_i)``, on the graph.
        unsolved: nodes that are held at their start: no equation, no derivative.
    """

    def __init__(self, parts: Nodes, z: Tensor, theta: Sequence[Tensor]) -> None:
        wiring = parts.wiring
        self.components = wiring.blocks
        self.unsolved: frozenset[str] = frozenset()
        self.number = {name: i for i, block in enumerate(self.components) for name in block}
        self._sizes = [[parts.sizes[n] for n in block] for block in self.components]
        self._columns = [[parts.columns[n] for n in block] for block in self.components]
        self._order = [(self.number[n], self.components[self.number[n]].index(n)) for n in parts.names]
        self.parents = [
            sorted({self.number[p] for n in block for p in wiring.parents[n]} - {i})
            for i, block in enumerate(self.components)
        ]
        self.children: list[list[int]] = [[] for _ in self.components]
        for i, parents in enumerate(self.parents):
            for p in parents:
                self.children[p].append(i)
        self.points = [self.take(i, z).detach().requires_grad_() for i in range(len(self))]
        names = [name for block in self.components for name in block]
        with torch.enable_grad(), compat.own_graphs():
            states = [part for i in range(len(self)) for part in self._split(i, self.points[i])]
            outputs = dict(zip(names, parts.kernel(names, names)(states, theta), strict=True))
            self.values = [_cat([outputs[n] for n in block]) for block in self.components]
            parts.system.lifted.cut = not all(value.requires_grad for value in self.values)
            self.residuals = [value - point for value, point in zip(self.values, self.points, strict=True)]
        self.theta = theta
        self._leaves = {get_gradient_edge(t).node: k for k, t in enumerate(theta) if t.requires_grad}
        self._reached: dict[int, set[Any]] = {}
        self._pulled: dict[int, tuple[Tensor, list[int], Sequence[Tensor | None]]] = {}
        self._products: dict[tuple[int, int], tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {}

    @property
    def T(self) -> TransposedBlocks:
        return TransposedBlocks(self)

    def __len__(self) -> int:
        return len(self.components)

    def name(self, i: int) -> str:
        return f"{{{', '.join(self.components[i])}}}"

    def solved(self, i: int) -> bool:
        return not self.unsolved.issuperset(self.components[i])

    def explicit(self, i: int) -> bool:
        """Does the graph show no way from the block's state to its maps?"""
        return get_gradient_edge(self.points[i]).node not in self._ends(i)

    def take(self, i: int, b: Tensor) -> Tensor:
        return _cat([b[:, columns] for columns in self._columns[i]])

    def join(self, parts: list[Tensor]) -> Tensor:
        split = [self._split(i, part) for i, part in enumerate(parts)]
        return _cat([split[i][k] for i, k in self._order])

    def diagonal(self, i: int) -> Operator:
        point = self.points[i]
        mv, rmv = self.products(i, i)
        return Operator(
            mv,
            rmv,
            lambda: autodiff.matrix(rmv, point.shape[1], point),
            batch=point.shape[0],
            size=point.shape[1],
            like=point,
            fixed_point=True,
        )

    def couple(self, i: int, x: Tensor) -> dict[int, Tensor]:
        return {j: self.products(j, i)[0](x) for j in self.children[i] if self.solved(j)}

    def couple_transposed(self, i: int, u: Tensor) -> dict[int, Tensor]:
        """``{j: A_ij^T u_i}`` for the blocks ``j`` that block ``i`` reads."""
        sources = [j for j in self.parents[i] if self.solved(j)]
        if not sources or not self.values[i].requires_grad:
            return {}
        # the same pass gives what the block contributes to the tensors' derivatives, for pull
        wanted = self._wanted(i)
        inputs = [*(self.points[j] for j in sources), *(self.theta[k] for k in wanted)]
        found = graph.pulled(self.values[i], inputs, u)
        self._pulled[i] = u, wanted, found[len(sources) :]
        return {j: g for j, g in zip(sources, found, strict=False) if g is not None}

    def pull(self, u: Tensor) -> list[Tensor | None]:
        r"""``-(dF/d\theta)^T u`` for the tensors that require it (zero where nothing solved depends on one), ``None`` for
        the others, by blocks: those that :meth:`couple_transposed` has passed through are not passed through again."""
        total: list[Tensor | None] = [None] * len(self.theta)
        for i in range(len(self)):
            part, wanted = self.take(i, u), self._wanted(i)
            if not wanted or not self.solved(i) or not bool(part.any()):
                continue
            known = self._pulled.get(i)
            if known is not None and torch.equal(known[0], part):
                found = known[2]
            else:
                inputs = [self.theta[k] for k in wanted]
                found = graph.pulled(self.values[i], inputs, part)
            for k, g in zip(wanted, found, strict=True):
                if g is not None:
                    before = total[k]
                    total[k] = -g if before is None else before - g
        return [
            torch.zeros_like(t) if g is None and t.requires_grad else g for g, t in zip(total, self.theta, strict=True)
        ]

    def _wanted(self, i: int) -> list[int]:
        """The tensors on which the block's maps depend, of those that require a derivative."""
        return [self._leaves[end] for end in self._ends(i) if end in self._leaves]

    def _ends(self, i: int) -> set[Any]:
        """The leaves of the block's graph."""
        if i not in self._reached:
            self._reached[i] = _ends(self.values[i])
        return self._reached[i]

    def products(self, i: int, j: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """``v -> A_ij v`` and ``w -> A_ij^T w``."""
        if (i, j) not in self._products:
            self._products[i, j] = autodiff.products(self.residuals[i], self.points[j])
        return self._products[i, j]

    def _split(self, i: int, part: Tensor) -> Sequence[Tensor]:
        return (part,) if len(self._sizes[i]) == 1 else part.split(self._sizes[i], 1)


class TransposedBlocks:
    """``A^T`` with its blocks in reverse order, which makes it lower triangular again."""

    def __init__(self, blocks: JacobianByComponent) -> None:
        self.T, self.unsolved, self.points = blocks, blocks.unsolved, blocks.points
        self._last = len(blocks) - 1

    def __len__(self) -> int:
        return len(self.T)

    def name(self, i: int) -> str:
        return self.T.name(self._last - i)

    def solved(self, i: int) -> bool:
        return self.T.solved(self._last - i)

    def explicit(self, i: int) -> bool:
        return self.T.explicit(self._last - i)

    def take(self, i: int, b: Tensor) -> Tensor:
        return self.T.take(self._last - i, b)

    def join(self, parts: list[Tensor]) -> Tensor:
        return self.T.join(parts[::-1])

    def diagonal(self, i: int) -> Operator:
        return self.T.diagonal(self._last - i).T

    def pull(self, u: Tensor) -> list[Tensor | None]:
        return self.T.pull(u)

    def couple(self, i: int, x: Tensor) -> dict[int, Tensor]:
        return {self._last - j: change for j, change in self.T.couple_transposed(self._last - i, x).items()}


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _ends(out: Tensor) -> set[Any]:
    """The nodes at which the graph of ``out`` ends; of a leaf (a map may return what it reads), its own."""
    if not out.requires_grad:
        return set()
    return {node for node in graph.nodes_behind([get_gradient_edge(out).node]) if not node.next_functions}
