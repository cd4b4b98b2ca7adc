"""Parts of a joint system: the nodes of one block as a system of their own, all other states given.

A :class:`~implicitkit.system.System` is the joint map on matrices ``(batch, n)``.  Here its columns are told apart by
node, and any selection of nodes is evaluated alone; batched systems (``torch.vmap``) and dropped samples included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from implicitkit.composition.gamma import Gamma
from implicitkit.foundation.trees import Layout, tree_unflatten
from implicitkit.system import LevelKernel, System


class Nodes:
    """The nodes of a joint system.

    Attributes:
        names: nodes in the order of their columns. sizes: columns of each. columns: where they lie.
        layouts: how each node's state is packed. leaves: each node's tree with the numbers of its leaves in the state.
        live_count: how many of the joint system's tensors a live kernel needs.
    """

    def __init__(self, gamma: Gamma, system: System) -> None:
        self.gamma, self.wiring, self.system = gamma, gamma.wiring, system
        layout = system.layout
        self.leaves = tree_unflatten(list(range(len(layout.sizes))), layout.spec)
        self.names = tuple(self.leaves)
        self.layouts: dict[str, Layout] = {name: layout.part(tree) for name, tree in self.leaves.items()}
        self.sizes = {name: part.size for name, part in self.layouts.items()}
        # on the spot, captured tensors are where the function finds them itself
        self.live_count = system.lifted.from_args if system.lifted.live else len(system.lifted.theta)
        self.columns: dict[str, slice] = {}
        start = 0
        for name, size in self.sizes.items():
            self.columns[name] = slice(start, start + size)
            start += size

    def split(self, z: Tensor) -> dict[str, Tensor]:
        """The joint matrix ``(batch, n)`` as one matrix a node."""
        return dict(zip(self.names, z.split(list(self.sizes.values()), 1), strict=True))

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        return torch.cat([parts[name] for name in self.names], 1)

    def kernel(
        self, nodes: Sequence[str], given: Sequence[str], *, sweep: bool = False, live: bool = False
    ) -> LevelKernel:
        """The maps of ``nodes`` as a function of the matrices of the nodes ``given`` (in that order).

        Args:
            sweep: one after another, newest states (Gauss-Seidel); else all at the given ones.
            live: valid, and cheaper, during the call of ``solve`` only; ``theta`` is that of :meth:`live_theta`.
        """
        nodes, given = tuple(nodes), tuple(given)
        layouts, autocast = self.layouts, self.system.autocast
        lifted = replace(self.system.lifted, function=self.gamma.bind(nodes, given, sweep))
        call = lifted.on_the_spot if live else lifted
        unpacks, packs = [layouts[n].unpack for n in given], [layouts[n].pack for n in nodes]

        def base(matrices: Sequence[Tensor], theta: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with autocast():
                out = call([unpack(m) for unpack, m in zip(unpacks, matrices, strict=True)], theta)
                return tuple([pack(new) for pack, new in zip(packs, out, strict=True)])

        return self.system.over_levels(base)

    def live_theta(self, theta: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of the joint system that a live kernel needs."""
        return tuple(theta[: self.live_count])

    def component(self, nodes: Sequence[str], *, sweep: bool) -> Component:
        """The nodes of one component as a system of their own."""
        return Component(self, tuple(nodes), sweep)


class Component:
    """One component: a fixed-point system whose unknowns are the nodes' states, and whose tensors are the states of the
    nodes it reads from outside, then those of the joint system that a live kernel needs.  Valid during the call of
    ``solve`` only.

    Attributes:
        nodes: its nodes, in the order of its columns and, if a ``sweep``, of evaluation.
        parents: the nodes outside that it reads. sizes: columns of each node.
        cost: node evaluations in one evaluation. depth: how many of them must follow one another.
    """

    def __init__(self, parts: Nodes, nodes: tuple[str, ...], sweep: bool) -> None:
        self.parts, self.nodes = parts, nodes
        wiring = parts.wiring
        self.parents = tuple(dict.fromkeys(p for n in nodes for p in wiring.parents[n] if p not in nodes))
        self.sizes = sizes = [parts.sizes[n] for n in nodes]
        self.cost = len(nodes)
        self.depth = len(nodes) if sweep else 1
        system, given = parts.system, nodes + self.parents
        several = len(nodes) > 1
        layout = system.layout.part({n: parts.leaves[n] for n in nodes}) if several else parts.layouts[nodes[0]]
        outer = len(self.parents)
        widths = [parts.sizes[p] for p in self.parents]

        evaluate = parts.kernel(nodes, given, sweep=sweep, live=True)
        per_row = system.samples_per_row

        def kernel(z: Tensor, *theta: Tensor) -> Tensor:
            read = theta[:outer]
            if per_row != 1:
                read = tuple(p.reshape(-1, n) for p, n in zip(read, widths, strict=True))
            if not several:
                return evaluate((z, *read), theta[outer:])[0]
            return torch.cat(evaluate((*z.split(sizes, 1), *read), theta[outer:]), 1)

        dims = None if system.row_dims is None else (*(0,) * outer, *system.row_dims[: parts.live_count])
        self.system = System(
            system.problem,
            layout,
            kernel,
            kernel,
            batch=system.batch,
            samples_per_row=per_row,
            row_dims=dims,
            lifted=replace(system.lifted, work=system.lifted.work.share(len(nodes) / len(parts.names))),
            autocast=system.autocast,
        )

    def theta(self, states: dict[str, Tensor], theta: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of this system, from the states of all nodes and the tensors of the joint system."""
        per_row = self.system.samples_per_row
        read = (states[p] for p in self.parents)
        rows = read if per_row == 1 else (m.reshape(-1, per_row, m.shape[1]) for m in read)
        return (*rows, *self.parts.live_theta(theta))

    def gather(self, states: dict[str, Tensor]) -> Tensor:
        """The states of its nodes as one matrix."""
        return states[self.nodes[0]] if len(self.nodes) == 1 else torch.cat([states[n] for n in self.nodes], 1)

    def scatter(self, z: Tensor, states: dict[str, Tensor]) -> None:
        """The inverse: write them into ``states``."""
        states.update(zip(self.nodes, z.split(self.sizes, 1), strict=True))
