"""A picture of a composition: nodes from left to right in topological order, one box a block."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx

from implicitkit.composition.wiring import Wiring

_BOX = 0.32  # half the size of a node's surroundings


def draw(wiring: Wiring, ax: Any = None) -> Any:
    """Draw on ``ax`` (default: new axes) and return it.  Loops are red, what cannot reach the output is grey.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.patches import FancyBboxPatch
    except ImportError:
        raise ImportError("joint.draw() needs matplotlib: pip install implicitkit[plot]") from None
    position = _positions(wiring)
    columns = max(x for x, _ in position.values()) + 1
    if ax is None:
        rows = max(y for _, y in position.values()) - min(y for _, y in position.values()) + 1
        ax = plt.subplots(figsize=(1.6 * columns + 0.8, 1.2 * rows + 0.8))[1]
    graph = nx.DiGraph(wiring.graph)
    for name, reads in wiring.reads.items():
        names = wiring.inputs if reads is None else reads
        graph.add_edges_from((read, name) for read in names if read in wiring.inputs)
    for block in wiring.blocks:
        xs, ys = zip(*(position[n] for n in block), strict=True)
        edge = "tab:red" if block in wiring.cyclic else "tab:blue"
        color = edge if wiring.live.issuperset(block) else "tab:gray"
        ax.add_patch(
            FancyBboxPatch(
                (min(xs) - _BOX, min(ys) - _BOX),
                max(xs) - min(xs) + 2 * _BOX,
                max(ys) - min(ys) + 2 * _BOX,
                boxstyle="round,pad=0.03",
                facecolor=color,
                edgecolor=color,
                alpha=0.2,
            )
        )
    inside = [(a, b) for a, b in graph.edges if any(a in block and b in block for block in wiring.blocks)]
    outside = [edge for edge in graph.edges if edge not in inside]
    over = [(a, b) for a, b in outside if any(_between(p, position[a], position[b]) for p in position.values())]
    straight = [edge for edge in outside if edge not in over]
    sizes = [max(900.0, (6.5 * len(str(name)) + 10) ** 2) for name in graph]  # points: arrows end before names begin
    for edges, style in ((inside, "arc3,rad=0.25"), (over, "arc3,rad=-0.25"), (straight, "arc3")):
        ends: dict[str, Any] = {"nodelist": list(graph), "node_size": sizes}
        nx.draw_networkx_edges(graph, position, edges, ax=ax, connectionstyle=style, arrowsize=12, **ends)
    for name, (x, y) in position.items():
        weight = "bold" if name == wiring.output else "normal"
        style = "italic" if name in wiring.inputs else "normal"
        ax.text(x, y, name, ha="center", va="center", weight=weight, style=style)
    ax.set_axis_off()
    ax.margins(0.1)
    return ax


def _between(point: tuple[float, float], a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Does a straight edge from ``a`` to ``b`` run over what stands at ``point``?"""
    length = math.dist(a, b)
    if length == 0 or point in (a, b):
        return False
    along = ((point[0] - a[0]) * (b[0] - a[0]) + (point[1] - a[1]) * (b[1] - a[1])) / length
    across = ((point[0] - a[0]) * (b[1] - a[1]) - (point[1] - a[1]) * (b[0] - a[0])) / length
    return 0 < along < length and abs(across) < _BOX / 2


def _positions(wiring: Wiring) -> dict[str, tuple[float, float]]:
    """Inputs in the first column, then one column for every generation of blocks; the nodes of a loop side by side."""
    condensed = nx.condensation(wiring.graph)
    members = {frozenset(condensed.nodes[c]["members"]): c for c in condensed}
    blocks = {members[frozenset(block)]: block for block in wiring.blocks}
    position: dict[str, tuple[float, float]] = {}
    for row, name in enumerate(wiring.inputs):
        position[name] = (0.0, -float(row))
    column = 1.0 if wiring.inputs else 0.0
    for generation in nx.topological_generations(condensed):
        row, width = 0, 1
        for c in sorted(generation, key=lambda c: wiring.blocks.index(blocks[c])):
            for k, name in enumerate(blocks[c]):  # a loop zigzags, so that its edges do not lie on each other
                position[name] = (column + k // 2 * 0.9, -float(row + k % 2))
            width = max(width, (len(blocks[c]) + 1) // 2)
            row += 2 if len(blocks[c]) > 1 else 1
        column += width
    return position
