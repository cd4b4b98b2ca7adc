r"""The joint map of a composition.

Modules ``k = 1..K`` with states ``z_k`` and maps ``f_k(z_k, what k reads)`` make one map on the stack,

    \Gamma(z; x) = (f_1(z_1, ...), ..., f_K(z_K, ...)),

whose fixed points are those of the modules, each at the others' states (Bai, Kolter & Koltun 2019, theorem 2, for two
modules in a row; it holds for any graph, loops included, by definition of a fixed point).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.composition.wiring import Wiring
from implicitkit.foundation.trees import tree_flatten

_PLAIN = (RuntimeError, ValueError, TypeError, IndexError)
Bound = Callable[..., tuple[Any, ...]]


class _Cache:
    """What a map has prepared: no copy or pickle takes it."""

    __slots__ = ("bound", "functions")

    def __init__(self, functions: object = None) -> None:
        self.functions = functions
        self.bound: dict[tuple[tuple[str, ...], tuple[str, ...], bool], Bound] = {}

    def __reduce__(self) -> tuple[type[_Cache], tuple[()]]:
        return _Cache, ()


class Gamma:
    """``(state, *inputs) -> state`` on dicts by node name.

    Args:
        functions: name -> map. wiring: who reads what.

    Raises (when called):
        TypeError: the state is no dict, or the number of inputs is wrong.
        ValueError: a node's state is missing or unknown; a node returns another shape than its state has, or cannot take
            what it reads (both ends of the edge are named).
    """

    reaches: ClassVar[tuple[str, ...]] = ("functions",)

    def __init__(self, functions: Mapping[str, Callable[..., Any]], wiring: Wiring) -> None:
        self.functions, self.wiring = dict(functions), wiring
        self._cache = _Cache(self.functions)

    def __call__(self, state: Any, *inputs: Any) -> Any:
        self._check(state, inputs)
        names = tuple(state)
        out = dict(zip(names, self.bind(names, names)(tuple(state.values()), *inputs), strict=True))
        for name, new in out.items():
            old = state[name]
            if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape != old.shape:
                raise ValueError(self._wrong_shape(name, new, old))
        return out

    def bind(self, nodes: tuple[str, ...], given: tuple[str, ...], sweep: bool = False) -> Bound:
        """The maps of ``nodes`` as one function ``(states of the nodes given, *inputs) -> their new states``, tuples both.

        Args:
            sweep: one after another, each reading the newest states (Gauss-Seidel); else all at those given (Jacobi).
        """
        key = (nodes, given, sweep)
        if self._cache.functions is not self.functions:  # in a copy with others
            self._cache = _Cache(self.functions)
        made = self._cache.bound
        if key not in made:
            if len(made) > 4 * len(self.functions) + 16:  # a joint solved with its nodes in ever other orders
                made.clear()
            made[key] = self._bind(*key)
        return made[key]

    # -------------------------------------------------------------------------------------------------------- details
    def _bind(self, nodes: tuple[str, ...], given: tuple[str, ...], sweep: bool) -> Bound:
        place = (
            {name: i for i, name in enumerate((*given, *self.wiring.inputs))}
            if not self.wiring.open
            else {name: i for i, name in enumerate(given)}
        )
        states, plans, wiring = len(given), [], self.wiring  # evaluate is kept by self: it must not hold self
        for name in nodes:
            reads = self.wiring.reads[name]
            plans.append(
                (name, self.functions[name], place[name], None if reads is None else [place[r] for r in reads])
            )

        def evaluate(state: Sequence[Any], *inputs: Any) -> tuple[Any, ...]:
            known, out = [*state, *inputs], []
            node = ""
            try:
                for plan in plans:
                    node, function, own, reads = plan
                    value = function(known[own], *(known[states:] if reads is None else [known[i] for i in reads]))
                    if sweep:
                        known[own] = value
                    out.append(value)
            except _PLAIN as error:
                if type(error) in _PLAIN:  # a subclass says what it is itself
                    _explain(wiring, node, dict(zip(given, known, strict=False)), inputs, error)
                raise
            return tuple(out)

        return evaluate

    def _check(self, state: Any, inputs: Sequence[Any]) -> None:
        nodes = self.wiring.reads
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state of a composition is a dict by node name, {{{', '.join(f'{n!r}: ...' for n in nodes)}}}; got "
                f"{type(state).__name__}"
            )
        if state.keys() != nodes.keys():
            missing = [n for n in nodes if n not in state]
            unknown = [n for n in state if n not in nodes]
            raise ValueError(
                (f"no initial state for node {', '.join(map(repr, missing))}" if missing else "")
                + (" and " if missing and unknown else "")
                + (f"a state for {', '.join(map(repr, unknown))}, which is not a node" if unknown else "")
                + f"; the nodes are {', '.join(map(repr, nodes))}"
            )
        if not self.wiring.open and len(inputs) != len(self.wiring.inputs):
            names = ", ".join(map(repr, self.wiring.inputs)) or "none"
            raise TypeError(
                f"the composition has {len(self.wiring.inputs)} external inputs ({names}: names that are no nodes), "
                f"and got {len(inputs)} argument{'s' if len(inputs) != 1 else ''}"
            )

    def _wrong_shape(self, name: str, new: Tensor, old: Tensor) -> str:
        readers = self.wiring.readers(name)
        text = f"node {name!r} returned shape {tuple(new.shape)}, but its state has shape {tuple(old.shape)}"
        if readers:
            text += f", and that is what {', '.join(map(repr, readers))} would read"
        return text + ": start from a state of the shape that the map returns"


def _explain(wiring: Wiring, name: str, known: Mapping[str, Any], inputs: Sequence[Any], error: Exception) -> None:
    reads = wiring.reads[name]
    parts = [f"its own state {_outline(known[name])}"]
    if reads is None:
        parts += [f"input {i} {_outline(x)}" for i, x in enumerate(inputs)]
    else:
        known = dict(zip(wiring.inputs, inputs, strict=False)) | dict(known)
        parts += [f"{read!r} {_outline(known[read])}" for read in reads]
    words = str(error)
    shapes = any(word in words.lower() for word in ("shape", "size", "dimension"))
    kind = ValueError if isinstance(error, RuntimeError) and shapes else type(error)
    raise kind(f"node {name!r} fails on what it reads ({', '.join(parts)}): {words}") from error


def _outline(tree: Any) -> str:
    leaves = tree_flatten(tree)[0]
    shapes = [f"{tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in leaves]
    return shapes[0] if isinstance(tree, Tensor) else f"[{', '.join(shapes)}]"
