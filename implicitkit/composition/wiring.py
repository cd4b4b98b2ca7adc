"""Which node reads what: names, edges, and the order that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import networkx as nx

from implicitkit.foundation.wording import did_you_mean


class Wiring:
    """The names of a composition: nodes, what each reads, external inputs.  Immutable.

    A node's map is called as ``map(own state, *what it reads)``.  A name that is no node is an external input.

    Attributes:
        reads: for each node the names it reads, in argument order; ``None``: all external inputs, however many.
        inputs: external names in order of first use (of an open wiring, one with a ``None``: for display only).
        output: the node whose state is wanted.
        graph: edges from producer to consumer, input nodes left out.
        blocks: strongly connected components in topological order; inside a cyclic one, an order in which as few nodes
            as a depth-first search can tell read what comes later.
        live: nodes from which the output can be reached.
    """

    # slots, no __dict__: lifting, which walks through what it can reach, need not look in here
    __slots__ = ("blocks", "cyclic", "graph", "inputs", "live", "open", "output", "parents", "reads")

    def __init__(self, reads: Mapping[str, tuple[str, ...] | None], output: str, inputs: Iterable[str] = ()) -> None:
        if not reads:
            raise ValueError("the graph is empty: compose needs at least one node, {name: (map, *names it reads)}")
        if output not in reads:
            known = f"{did_you_mean(output, list(reads))} Nodes: {', '.join(map(repr, reads))}"
            raise ValueError(f"unknown output {output!r}: it is not a node.{known}")
        self.reads, self.output = dict(reads), output
        self.open = any(names is None for names in reads.values())
        outer = [name for names in reads.values() for name in names or () if name not in reads]
        self.inputs = tuple(inputs) if self.open else tuple(dict.fromkeys(outer))
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(reads)
        self.parents = {
            name: tuple(dict.fromkeys(n for n in names or () if n in reads)) for name, names in reads.items()
        }
        self.graph.add_edges_from((parent, name) for name, parents in self.parents.items() for parent in parents)
        self._refuse_isolated()
        rank = {name: i for i, name in enumerate(reads)}
        condensed = nx.condensation(self.graph)
        members = {c: sorted(condensed.nodes[c]["members"], key=rank.__getitem__) for c in condensed}
        order = nx.lexicographical_topological_sort(condensed, key=lambda c: rank[members[c][0]])
        self.blocks = tuple(self._sweep_order(members[c]) for c in order)
        #: components in which a node depends on itself through others (a self-loop is the node's own affair)
        self.cyclic = frozenset(block for block in self.blocks if len(block) > 1)
        self.live = frozenset(nx.ancestors(self.graph, output) | {output})

    def _sweep_order(self, names: list[str]) -> tuple[str, ...]:
        """The nodes of a component, producers before consumers except along the edges that close a loop."""
        if len(names) == 1:
            return tuple(names)
        inside = self.graph.subgraph(names)
        entered = [n for n in names if any(p not in inside for p in self.parents[n])]
        first = (entered or names)[0]
        return tuple(reversed(list(nx.dfs_postorder_nodes(inside, first))))

    def _refuse_isolated(self) -> None:
        if len(self.reads) == 1:
            return
        for name, names in self.reads.items():
            if names == () and self.graph.out_degree(name) == 0:
                raise ValueError(
                    f"node {name!r} reads nothing and nobody reads it: connect it, or leave it out (its neighbours would "
                    f"be among {', '.join(repr(n) for n in self.reads if n != name)})"
                )

    def readers(self, name: str) -> list[str]:
        """The nodes that read this one, itself left out."""
        return [n for n in self.graph.successors(name) if n != name]
