"""An evaluation under observation: what it uses, what is put in its place, what it looks at, what it changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit import compat
from implicitkit.errors import ImpureFunctionWarning, warn
from implicitkit.trees import tree_flatten

__all__ = [
    "Discover",
    "Looks",
    "Slot",
    "Substitute",
    "graph_leaves",
    "leaks",
    "purity",
    "resolve",
    "substitutions",
    "swapped",
]

Slot = tuple[dict[str, Any], str]  # a module's own dict of parameters or buffers, and a key

_active = threading.local()  # substitutions in force on this thread, for solves nested inside a lifted function


def substitutions() -> list[dict[int, Tensor]]:
    """The substitutions in force on this thread, innermost last."""
    if not hasattr(_active, "maps"):
        _active.maps = []
    return _active.maps


def resolve(t: Tensor) -> Tensor:
    """The tensor that ``t`` stands for inside the lifted functions now running (usually ``t`` itself)."""
    for mapping in reversed(substitutions()):
        t = mapping.get(id(t), t)
    return t


class Discover(TorchFunctionMode):
    """Collects the tensors that a function uses but neither created nor was given."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.made = {id(t): t for t in known}
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(x, Tensor) and id(x) not in self.made:
                self.found.setdefault(id(x), x)
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor):
                self.made[id(x)] = x  # keeps it alive, so that its id stays its own
        return out


class Substitute(TorchFunctionMode):
    """Replaces tensors, by identity, in the arguments of every torch operation."""

    def __init__(self, mapping: dict[int, Tensor]) -> None:
        super().__init__()
        self.mapping = mapping

    def __enter__(self) -> Substitute:
        substitutions().append(self.mapping)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        substitutions().pop()
        super().__exit__(*exc)

    def _replace(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.mapping.get(id(x), x)
        if type(x) in (list, tuple):
            return type(x)(map(self._replace, x))
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._replace, args), **{k: self._replace(v) for k, v in (kwargs or {}).items()})


class Looks(TorchFunctionMode):
    """Notes whether a function turns tensors into Python values, on which it may branch."""

    NAMES: ClassVar[frozenset[str]] = frozenset(
        [
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "__complex__",
            "__contains__",
            "__array__",
            "item",
            "tolist",
            "numpy",
            "equal",
            "allclose",
            "is_nonzero",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def swapped(slots: Sequence[Sequence[Slot]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """The tensors, in the modules, while it lasts."""
    old = [[owner[key] for owner, key in places] for places in slots]
    substitutions().append({})  # solves inside see that they are
    try:
        for places, t in zip(slots, tensors, strict=True):
            for owner, key in places:
                owner[key] = t
        yield
    finally:
        substitutions().pop()
        for places, values in zip(slots, old, strict=True):
            for (owner, key), value in zip(places, values, strict=True):
                owner[key] = value


def leaks(out: Any) -> bool:
    """Is anything in a tree of tensors tracked, or batched, at any level?"""
    return any(compat.tracked(t) for t in tree_flatten(out)[0] if isinstance(t, Tensor))


def graph_leaves(out: Any) -> list[Tensor]:
    """The leaves of the autograd graph of a tree of tensors."""
    tracked = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.requires_grad]
    found, seen = [t for t in tracked if t.grad_fn is None], set()
    nodes: list[Any] = [t.grad_fn for t in tracked]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes.extend(n for n, _ in node.next_functions)
    return found


@contextlib.contextmanager
def purity(
    frozen: list[tuple[list[Slot], Tensor]],
    given: Sequence[Tensor],
    states: int,
    constants: list[tuple[list[Slot], Tensor]],
) -> Iterator[None]:
    """Watch one evaluation: in-place changes of what was given raise; random numbers and updated buffers warn.

    The evaluation runs on copies of the modules' buffers; if it changed them, every later evaluation gets fresh copies
    too (the function is then one and the same map throughout, and the modules keep their statistics).
    """
    copies = [t.clone() for _, t in constants]
    versions = [_version(t) for t in given]
    device = given[0].device
    random = _random_state(device)
    if constants:
        with swapped([slots for slots, _ in constants], copies):
            yield
    else:
        yield
    for i, (t, version) in enumerate(zip(given, versions, strict=True)):
        if _version(t) != version:
            what = "its state z" if i < states else f"argument tensor number {i - states}"
            raise RuntimeError(
                f"the function changes {what} in place; an implicit equation needs a function without side effects: "
                "use out-of-place operations, or clone first"
            )
    changed = [
        (slots, t.detach().clone()) for (slots, t), copy in zip(constants, copies, strict=True) if _changed(t, copy)
    ]
    if changed:
        frozen.extend(changed)
        warn(
            f"the function updates {len(changed)} buffer(s) of its modules at every evaluation (BatchNorm in training, "
            "spectral normalisation, ...). During this solve they are held at their present values and not updated; "
            "call .eval() on those modules, or update the statistics once outside the solve",
            ImpureFunctionWarning,
        )
    if random is not None and not torch.equal(random, _random_state(device)):  # type: ignore[arg-type]
        warn(
            "the function draws random numbers (dropout in training, noise): each evaluation is another map, so there "
            "is no solution to converge to and the derivative is that of a different draw. Call .eval() on the module, "
            "or draw the mask once outside and pass it as an argument",
            ImpureFunctionWarning,
        )


def _changed(t: Tensor, copy: Tensor) -> bool:
    """Was the copy written to?  (Fused normalisation kernels do not raise the version counter.)"""
    if t.layout != torch.strided:  # sparse tensors cannot be compared, and no normalisation writes to them
        return _version(copy) > 0
    return _version(copy) > 0 or not torch.equal(t, copy)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _random_state(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return torch.default_generator.get_state()
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return None
