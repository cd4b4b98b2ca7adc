"""An implicit graph network on the graphs that ship with networkx: karate club and Les Miserables.

    python examples/deq_graph.py

Karate club: from one labelled member of each side, tell which side the 32 others took (Zachary 1977).  The equilibrium
carries what the two labels say along all paths at once; a network of k layers sees k edges far.  Les Miserables: from a
quarter of the characters, tell the communities (greedy modularity) of the others.

Source: Gu et al. (2020), "Implicit graph neural networks".
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import torch
from common import figure, options, table
from networkx.algorithms.community import greedy_modularity_communities
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, cells


@dataclass
class Task:
    """A graph, a class for each node, and the nodes whose class is told."""

    name: str
    graph: nx.Graph
    classes: Tensor
    told: Tensor

    @property
    def edges(self) -> Tensor:
        """``(2, m)``, nodes numbered in the graph's order."""
        number = {node: i for i, node in enumerate(self.graph)}
        return torch.tensor([[number[a], number[b]] for a, b in self.graph.edges]).T


def karate() -> Task:
    """Two sides; the two leaders are told."""
    graph = nx.karate_club_graph()
    sides = torch.tensor([int(data["club"] == "Officer") for _, data in graph.nodes(data=True)])
    return Task("karate club", graph, sides, torch.tensor([0, 33]))


def miserables(seed: int) -> Task:
    """Communities; a quarter of each (at least two) is told."""
    graph = nx.les_miserables_graph()
    number = {node: i for i, node in enumerate(graph)}
    classes = torch.empty(len(graph), dtype=torch.int64)
    told = []
    generator = torch.Generator().manual_seed(seed)
    for label, members in enumerate(greedy_modularity_communities(graph)):
        nodes = torch.tensor(sorted(number[m] for m in members))
        classes[nodes] = label
        told.append(nodes[torch.randperm(len(nodes), generator=generator)[: max(2, len(nodes) // 4)]])
    return Task("Les Miserables", graph, classes, torch.cat(told))


class Network(nn.Module):
    """Equilibrium of ``relu(A Z W' + A X U' + b)``, read out linearly.  ``depth``: that many layers instead."""

    def __init__(self, task: Task, features: int = 16, depth: int | None = None) -> None:
        super().__init__()
        nodes, classes = len(task.graph), int(task.classes.max()) + 1
        adjacency = cells.normalised_adjacency(task.edges, nodes)
        self.cell = cells.Graph(adjacency, classes, features, bound=0.95)
        self.layer = DEQ(self.cell, state=(features,), batch_dims=0, rtol=1e-5, atol=1e-7)
        self.read, self.depth = nn.Linear(features, classes), depth
        seeds = torch.zeros(nodes, classes)
        seeds[task.told, task.classes[task.told]] = 1
        self.seeds: Tensor
        self.register_buffer("seeds", seeds)

    def forward(self) -> Tensor:
        if self.depth is None:
            return self.read(self.layer(self.seeds))
        z = self.seeds.new_zeros(len(self.seeds), self.cell.features)
        injected = self.cell.inject(self.seeds)
        for _ in range(self.depth):
            z = self.cell.update(z, *injected)
        return self.read(z)


def train(task: Task, depth: int | None, steps: int, seed: int) -> tuple[float, Network, list[float]]:
    """Accuracy on the nodes that were not told, the network, and the losses."""
    torch.manual_seed(seed)
    network = Network(task, depth=depth)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2, weight_decay=1e-4)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(network()[task.told], task.classes[task.told])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    rest = torch.ones(len(task.classes), dtype=torch.bool)
    rest[task.told] = False
    with torch.no_grad():
        right = (network().argmax(1) == task.classes)[rest].float().mean()
    return float(right), network, losses


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Train and compare; returns accuracy by task and model."""
    chosen = options(__doc__).parse_args(arguments)
    steps, seeds = (60, 1) if chosen.quick else (150, 5)
    results: dict[str, dict[str, float]] = {}
    rows = []
    with figure(chosen.output / "deq_graph.png", 2, title="Loss on the nodes that are told") as axes:
        for axis, task in zip(axes, (karate(), miserables(chosen.seed)), strict=True):
            results[task.name] = {}
            for label, depth in (("equilibrium", None), ("1 layer", 1), ("2 layers", 2), ("8 layers", 8)):
                runs = [train(task, depth, steps, chosen.seed + i) for i in range(seeds)]
                accuracy = sum(r[0] for r in runs) / seeds
                results[task.name][label] = accuracy
                axis.semilogy(runs[0][2], label=label)
                solution = runs[0][1].layer.solution
                evaluations = solution.evaluations if solution is not None else depth
                radius = ""
                if depth is None and solution is not None:
                    lipschitz = ik.certify(_again(runs[0][1])).lipschitz
                    radius = f"{float(lipschitz):.3f}" if lipschitz is not None else ""
                rows.append((task.name, label, accuracy, evaluations, radius))
            axis.set(title=task.name, xlabel="step", ylabel="cross-entropy")
            axis.legend()
    title = f"Accuracy on the other nodes, mean of {seeds} seed{'s' if seeds > 1 else ''}"
    print(table(title, ("graph", "model", "accuracy", "evaluations", "|J|_2 at the end"), rows))
    return results


def _again(network: Network) -> ik.Solution:
    """The last equilibrium once more, as a solution that can be certified."""
    with torch.no_grad():
        injected = network.cell.inject(network.seeds)
        z0 = network.seeds.new_zeros(len(network.seeds), network.cell.features)
        return ik.fixed_point(network.cell.update, z0, injected, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    main()
