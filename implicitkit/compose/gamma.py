r"""The joint map of a composition.

Modules ``k = 1..K`` with states ``z_k`` and maps ``f_k(z_k, what k reads)`` make one map on the stack,

    \Gamma(z; x) = (f_1(z_1, ...), ..., f_K(z_K, ...)),

whose fixed points are those of the modules, each at the others' states (Bai, Kolter & Koltun 2019, theorem 2, for two
modules in a row; it holds for any graph, loops included, by definition of a fixed point).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from implicitkit.compose.wiring import Wiring
from implicitkit.trees import tree_flatten

__all__ = ["Gamma"]


class Gamma:
    """``(state, *inputs) -> state`` on dicts by node name.

    Args:
        functions: name -> map. wiring: who reads what.

    Raises (when called):
        TypeError: the state is no dict, or the number of inputs is wrong.
        ValueError: a node's state is missing or unknown; a node returns another shape than its state has, or cannot take
            what it reads (both ends of the edge are named).
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], wiring: Wiring) -> None:
        self.functions, self.wiring = dict(functions), wiring

    def __call__(self, state: Any, *inputs: Any) -> Any:
        self._check(state, inputs)
        out = self.evaluate(state, state, inputs)
        for name, new in out.items():
            old = state[name]
            if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape != old.shape:
                raise ValueError(self._wrong_shape(name, new, old))
        return out

    def evaluate(self, names: Iterable[str], state: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
        """The maps of some nodes at the present states of those they read, all at once (Jacobi)."""
        known = self._known(state, inputs)
        return {name: self._call(name, known, inputs) for name in names}

    def sweep(self, names: Iterable[str], state: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
        """The maps of some nodes one after another, each reading the newest states (Gauss-Seidel)."""
        known = self._known(state, inputs)
        out = {}
        for name in names:
            out[name] = known[name] = self._call(name, known, inputs)
        return out

    # -------------------------------------------------------------------------------------------------------- details
    def _known(self, state: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
        known = dict(state) if self.wiring.open else dict(zip(self.wiring.inputs, inputs, strict=True))
        known.update(state)
        return known

    def _call(self, name: str, known: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
        reads = self.wiring.reads[name]
        try:
            if reads is None:
                return self.functions[name](known[name], *inputs)
            return self.functions[name](known[name], *[known[read] for read in reads])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if type(error) in (RuntimeError, ValueError, TypeError, IndexError):  # a subclass says what it is itself
                self._explain(name, known, inputs, error)
            raise

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
                + (f"a state for {', '.join(map(repr, unknown))}, which is no node" if unknown else "")
                + f"; the nodes are {', '.join(map(repr, nodes))}"
            )
        if not self.wiring.open and len(inputs) != len(self.wiring.inputs):
            names = ", ".join(map(repr, self.wiring.inputs)) or "none"
            raise TypeError(
                f"the composition has {len(self.wiring.inputs)} external inputs ({names}; a name that is no node is one), "
                f"and got {len(inputs)} argument{'s' if len(inputs) != 1 else ''}"
            )

    def _wrong_shape(self, name: str, new: Tensor, old: Tensor) -> str:
        readers = self.wiring.readers(name)
        text = f"node {name!r} returned shape {tuple(new.shape)}, but its state has shape {tuple(old.shape)}"
        if readers:
            text += f", and that is what {', '.join(map(repr, readers))} would read"
        return text + ": start from a state of the shape that the map returns"

    def _explain(self, name: str, known: Mapping[str, Any], inputs: Sequence[Any], error: Exception) -> None:
        reads = self.wiring.reads[name]
        parts = [f"its own state {_outline(known[name])}"]
        if reads is None:
            parts += [f"input {i} {_outline(x)}" for i, x in enumerate(inputs)]
        else:
            parts += [f"{read!r} {_outline(known[read])}" for read in reads]
        words = str(error)
        shapes = any(word in words.lower() for word in ("shape", "size", "dimension"))
        kind = ValueError if isinstance(error, RuntimeError) and shapes else type(error)
        raise kind(f"node {name!r} fails on what it reads ({', '.join(parts)}): {words}") from error


def _outline(tree: Any) -> str:
    leaves = tree_flatten(tree)[0]
    shapes = [f"{tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in leaves]
    return shapes[0] if isinstance(tree, Tensor) else f"[{', '.join(shapes)}]"
