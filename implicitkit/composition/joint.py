"""Compositions of fixed-point problems: ``first >> second``, ``compose({...}, output=...)``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import networkx as nx
from torch import Tensor, nn

from implicitkit.composition import drawing, jacobian
from implicitkit.composition.gamma import Gamma
from implicitkit.composition.wiring import Wiring
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import check_arguments, string
from implicitkit.foundation.trees import Layout
from implicitkit.foundation.wording import kind_of
from implicitkit.problem.base import Problem
from implicitkit.problem.catalogue import register_problem
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.registry.operations import operation
from implicitkit.system import System

_SEPARATOR = "."


@dataclass(frozen=True, repr=False)
class Joint(FixedPoint):
    r"""A graph of fixed-point maps as one fixed-point problem, ``\Gamma(z) = z`` (see :mod:`implicitkit.composition.gamma`).

    Its state is a dict by node name; ``solve`` returns it, and :meth:`output` picks the one that is wanted.  Made by
    :func:`compose` and by ``first >> second``.  Every solver, rule and transform takes it as the plain problem it is;
    ``solver=ik.Blocks()`` and the derivative's ``linear_solver="blocks"`` (the default) use its structure.

    Attributes:
        graph: ``networkx.DiGraph``, edges from producer to consumer.  Nodes carry ``map`` and ``reads`` (the names it
            reads in argument order, external inputs included), edges ``arguments`` (the positions at which the consumer
            reads the producer, counted after its own state).
        inputs: names of the external inputs, in order of first use. blocks: strongly connected components in
            topological order. gamma: the map itself, ``gamma(state, *inputs) -> state``.
        output_node: the name of the node that is wanted. live: the nodes from which it can be reached.
    """

    map: Gamma
    by_blocks: ClassVar[bool] = True
    graph: nx.DiGraph = field(init=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        wiring, graph = self.map.wiring, nx.DiGraph()
        for name, function in self.map.functions.items():
            reads = wiring.reads[name]
            graph.add_node(name, map=function, reads=wiring.inputs if reads is None else reads)
        for name in graph:
            for parent in wiring.parents[name]:
                places = tuple(i for i, read in enumerate(wiring.reads[name] or ()) if read == parent)
                graph.add_edge(parent, name, arguments=places)
        object.__setattr__(self, "graph", graph)

    @property
    def gamma(self) -> Gamma:
        return self.map

    @property
    def wiring(self) -> Wiring:
        """Names, edges and order."""
        return self.map.wiring

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.wiring.inputs

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return self.wiring.blocks

    @property
    def output_node(self) -> str:
        return self.wiring.output

    @property
    def live(self) -> frozenset[str]:
        return self.wiring.live

    def pieces(self, layout: Layout) -> tuple[int, ...] | None:
        """A composition holds where every node does."""
        return tuple(layout.sizes) if len(layout.sizes) > 1 else None

    def split(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of a joint state, in topological order; those of a nested composition as a dict of their own.

        Where another node has the name of the nested composition, the parts keep their full names, ``"name.inner"``.
        """
        parts: dict[str, Any] = {}
        for name in (n for block in self.blocks for n in block):
            pieces = name.split(_SEPARATOR)
            if any(_SEPARATOR.join(pieces[:i]) in self.graph for i in range(1, len(pieces))):
                pieces = [name]
            place, *path = parts, *pieces
            for step in path[:-1]:
                place = place.setdefault(step, {})
            place[path[-1]] = state[name]
        return parts

    def output(self, state: Mapping[str, Any]) -> Any:
        """The part of a joint state that is wanted."""
        return state[self.output_node]

    def draw(self, ax: Any = None) -> Any:
        """Draw the graph with its blocks (needs matplotlib: ``pip install implicitkit[plot]``); returns the axes."""
        return drawing.draw(self.wiring, ax)

    def analyse(self, state: Mapping[str, Any], inputs: Any = (), **options: Any) -> Any:
        """Spectrum, transient growth and predicted cost at a state: :func:`implicitkit.diagnostics.composition.analyse`."""
        return operation("analyse")(self, state, inputs, **options)

    def linearise(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        as_solved: Any = system.lifted.function  # :attr:`map`, whatever its functions' variables are bound to now
        return jacobian.linearise(as_solved, system, z, theta)

    def __repr__(self) -> str:
        return f"Joint({len(self.graph)} nodes, {len(self.blocks)} blocks, output={self.output_node!r})"

    def __str__(self) -> str:
        wiring = self.wiring
        lines = [
            f"Joint fixed point of {len(self.graph)} node{'s' if len(self.graph) != 1 else ''} in {len(self.blocks)} "
            f"block{'s' if len(self.blocks) != 1 else ''}; inputs: {', '.join(self.inputs) or 'none'}; output: "
            f"{self.output_node}"
        ]
        for number, block in enumerate(self.blocks, 1):
            kind = " (feedback loop)" if block in wiring.cyclic else ""
            lines.append(f"  block {number}{kind}")
            for name in block:
                reads = ", ".join((f"z[{name}]", *self.graph.nodes[name]["reads"]))
                unused = "" if name in wiring.live else "   cannot reach the output"
                lines.append(f"    {name} = {_title(self.map.functions[name])}({reads}){unused}")
        return "\n".join(lines)


register_problem(Joint, name="joint", rule="implicit", linear_solver="blocks")


def compose(nodes: Mapping[str, Any] | Iterable[tuple[str, Any]], *, output: str) -> Joint:
    """Any graph of fixed-point maps as one problem.

        ik.compose({"f": (f, "x"), "v": (v, "f")}, output="v")     # f(z_f, x) = z_f,   v(z_v, z_f) = z_v

    Every map keeps its units: ``z_k`` has those of ``f_k``.  Source: Bai, Kolter & Koltun (2019), theorem 2, for two of
    them.

    Args:
        nodes: name -> ``(map, *names of what it reads)``, or pairs ``(name, (map, ...))``.  A map is called with its own
            state, then with what it reads: states of nodes, and external inputs (names that are no node).  It may be a
            function, an ``nn.Module``, a ``FixedPoint``, a layer that says by ``as_fixed_point()`` what it solves (a
            ``DEQ``: its cell), or another composition: that is flattened, its nodes named
            ``"name.inner"``, what it reads bound to its inputs in their order, and ``"name"`` read as its output.
            Edges may form loops.  Maps may share modules and parameters.
        output: the node whose state is wanted.

    Returns:
        A :class:`Joint`; ``ik.solve(joint, {"f": z1, "v": z2}, inputs)``.

    Raises:
        ValueError: an empty graph, a name used twice, an unknown output, an isolated node.
        TypeError: a map that cannot be called, or takes another number of arguments than its node reads.
    """
    check_arguments("compose", output=(string(), output))
    pairs = list(nodes.items()) if isinstance(nodes, Mapping) else _pairs(nodes)
    names = [name for name, _ in pairs]
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a node's name must be a string that is not empty, got {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is used for two nodes")
    parsed = {name: _parse(name, entry) for name, entry in pairs}
    alias = {n: n + _SEPARATOR + m.output_node for n, (m, _) in parsed.items() if isinstance(m, Joint)}
    functions: dict[str, Callable[..., Any]] = {}
    reads: dict[str, tuple[str, ...] | None] = {}
    for name, (function, sources) in parsed.items():
        bound = tuple(alias.get(s, s) for s in sources)
        for inner, (f, r) in _flatten(name, function, bound).items():
            if inner in functions or (inner != name and inner in parsed):
                raise ValueError(f"the name {inner!r} is used for two nodes (one of them inside {name!r})")
            functions[inner], reads[inner] = f, r
    return Joint(Gamma(functions, Wiring(reads, alias.get(output, output))))


def chain(first: FixedPoint, second: FixedPoint) -> Joint:
    r"""``first >> second``: ``\Gamma([w_1, w_2]; x) = [f(w_1; x), v(w_2; w_1)]``, theorem 2.

    All arguments of the solve go to the first map; the second reads the first's state (its output, if it is a
    composition).  Nodes are named after their functions, a second one of the same name ``"name_2"`` and so on.

    Raises:
        TypeError: ``second`` is no fixed-point problem, or a composition with several inputs.
    """
    if not isinstance(second, FixedPoint):
        raise TypeError(f"first >> second composes two FixedPoint problems, got {type(second).__name__} on the right")
    functions: dict[str, Callable[..., Any]] = {}
    reads: dict[str, tuple[str, ...] | None] = {}
    if isinstance(first, Joint):
        functions.update(first.map.functions)
        reads.update(first.wiring.reads)
        last, inputs = first.output_node, first.inputs
    else:
        last, inputs = _name(first.map), _argument_names(first.map)
        functions[last], reads[last] = first.function, None
    if not isinstance(second, Joint):
        name = _distinct(_name(second.map), functions, inputs)
        _check_arity(name, second.map, 1)
        functions[name], reads[name] = second.function, (last,)
        return Joint(Gamma(functions, Wiring(reads, name, inputs)))
    if not second.wiring.open and len(second.inputs) != 1:
        raise TypeError(
            f"first >> second feeds the first's state to the only input of the second, which has {len(second.inputs)} "
            f"({', '.join(second.inputs)}): use ik.compose to say which"
        )
    renamed: dict[str, str] = {}
    for old in second.map.functions:
        renamed[old] = _distinct(old, {*functions, *renamed.values()}, inputs)
    if not second.wiring.open:
        renamed[second.inputs[0]] = last
    for old, function in second.map.functions.items():
        old_reads = second.wiring.reads[old]
        functions[renamed[old]] = function
        reads[renamed[old]] = (last,) if old_reads is None else tuple(renamed[r] for r in old_reads)
    return Joint(Gamma(functions, Wiring(reads, renamed[second.output_node], inputs)))


# ------------------------------------------------------------------------------------------------------------- details
def _pairs(nodes: Any) -> list[tuple[Any, Any]]:
    pairs = list(nodes) if isinstance(nodes, Iterable) else [nodes]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"compose takes {{name: (map, *names it reads)}} or pairs (name, (map, ...)), got {pair!r}")
    return [tuple(pair) for pair in pairs]


def _parse(name: str, entry: Any) -> tuple[Any, tuple[str, ...]]:
    """``(map, *reads)`` of a node; the map of a plain fixed point, or a composition as it is."""
    parts = entry if isinstance(entry, (tuple, list)) else (entry,)
    if not parts:
        raise TypeError(f"node {name!r} has no map: write {name!r}: (map, *names of what it reads)")
    function, *sources = parts
    if isinstance(function, Problem) and not isinstance(function, FixedPoint):
        raise TypeError(
            f"node {name!r} is {kind_of(function)}; only fixed-point maps can be composed. A residual r makes one: "
            "ik.FixedPoint(lambda z, *args: z - r(z, *args))"
        )
    if not isinstance(function, Problem) and hasattr(function, "as_fixed_point"):
        function = function.as_fixed_point()
    if isinstance(function, FixedPoint) and not isinstance(function, Joint):
        function = function.function
    if not isinstance(function, Joint) and not callable(function):
        raise TypeError(
            f"node {name!r} must start with a callable map(z, *what it reads), got {type(function).__name__}"
        )
    for source in sources:
        if not isinstance(source, str) or not source:
            raise TypeError(f"node {name!r} reads {source!r}; what it reads must be given by name, as a string")
    if not isinstance(function, Joint):
        _check_arity(name, function, len(sources))
    elif not function.wiring.open and len(sources) != len(function.inputs):
        raise TypeError(
            f"node {name!r} is a composition with {len(function.inputs)} inputs ({', '.join(function.inputs) or 'none'}), "
            f"but it reads {len(sources)} ({', '.join(sources) or 'nothing'})"
        )
    return function, tuple(sources)


def _flatten(name: str, function: Any, sources: tuple[str, ...]) -> dict[str, tuple[Any, tuple[str, ...] | None]]:
    """The nodes that one entry stands for: itself, or those of a composition with names and inputs bound."""
    if not isinstance(function, Joint):
        return {name: (function, sources)}
    wiring = function.wiring
    bound = {old: name + _SEPARATOR + old for old in wiring.reads}
    if not wiring.open:
        bound.update(zip(wiring.inputs, sources, strict=True))
    return {
        bound[old]: (
            function.map.functions[old],
            sources if (reads := wiring.reads[old]) is None else tuple(bound[r] for r in reads),
        )
        for old in wiring.reads
    }


def _check_arity(name: str, function: Any, count: int) -> None:
    """Raise unless ``function`` can be called with a state and ``count`` arguments more."""
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*[None] * (1 + count))
    except TypeError as error:
        raise TypeError(
            f"node {name!r} reads {count} name{'s' if count != 1 else ''}, so its map is called with {1 + count} "
            f"argument{'s' if count else ''} (its own state first), and {_title(function)}{signature} does not take that: "
            f"{error}"
        ) from None


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


def _argument_names(function: Any) -> tuple[str, ...]:
    """The names of the positional arguments after the state, for display."""
    signature = _signature(function)
    if signature is None:
        return ("*args",)
    named = list(signature.parameters.values())[1:]
    return tuple(
        ("*" if p.kind is p.VAR_POSITIONAL else "") + p.name
        for p in named
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    )


def _title(function: Any) -> str:
    if isinstance(function, nn.Module):
        return type(function).__name__
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__name__", type(function).__name__))


def _name(function: Any) -> str:
    """A node's name from its function: ``tanh_cell``, ``map`` for a lambda."""
    title = re.sub(r"\W", "", _title(function).replace("<lambda>", "map"))
    return title.lower() if isinstance(function, nn.Module) else title


def _distinct(name: str, taken: Iterable[str], inputs: Iterable[str]) -> str:
    taken, number, candidate = {*taken, *inputs}, 2, name
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate
