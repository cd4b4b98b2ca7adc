"""An evaluation under observation: what it uses, what is put in its place, what it looks at, what it changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat
from implicitkit.foundation.compat import tensors_in
from implicitkit.foundation.errors import ImpureFunctionWarning, warn
from implicitkit.foundation.written import IN_PLACE
from implicitkit.lifting.overlay import replaced
from implicitkit.lifting.reach import version

__all__ = [
    "Constants",
    "Cuts",
    "Discover",
    "Looks",
    "Slot",
    "Substitute",
    "graph_leaves",
    "is_substituted",
    "leaks",
    "memory",
    "purity",
    "resolve",
    "substitutions",
    "swapped",
    "used",
]

Slot = tuple[nn.Module, str, str]  # a module, "_parameters" or "_buffers", and a key
Constants = list[tuple[list[Slot], Tensor]]  # tensors of modules that are no arguments, and where they are

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


def used(t: Tensor) -> Tensor:
    """:func:`resolve` of an argument; lifted functions around that capture it see, by an operation, that they use it."""
    if is_substituted(t):
        t.detach()
    return resolve(t)


def is_substituted(t: Tensor) -> bool:
    """Has a lifted function now running put a stand-in where ``t`` was, or is ``t`` itself one in a module?"""
    return any(id(t) in mapping for mapping in substitutions())


class Discover(TorchFunctionMode):
    """Collects the tensors that a function uses but neither created nor was given.

    What belongs to a transform that the function itself has begun (a ``torch.vmap`` over points inside it) came from inside;
    so did what such a transform returned, which no operation shows: it lies in memory that was first used in there.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.level = compat.level()
        self.made = {id(t): t for t in known}
        self.found: dict[int, Tensor] = {}
        self._within: set[int] = set()  # memory first used inside a transform that the function began

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _asks_only(func):
            return func(*args, **(kwargs or {}))
        given = tensors_in((*args, *(kwargs or {}).values()))
        for x in given:
            if id(x) not in self.made and self._from_outside(x):
                self.found.setdefault(id(x), x)
        out = func(*args, **(kwargs or {}))
        made = [x for x in tensors_in(out) if id(x) not in self.found]
        self.made.update((id(x), x) for x in made)  # keeps them alive, so that ids and memory stay their own
        if compat.level() > self.level:
            self._within |= set(map(memory, made)) - set(map(memory, given)) - {0}
        return out

    def _from_outside(self, x: Tensor) -> bool:
        """Not of a level above.  (Below a transform that is suspended for a solve around this one, what that solve has made
        explicit is of a level above, and from outside.)"""
        if is_substituted(x):
            return True
        if compat.level(x) > self.level:
            return False
        return not self._within or memory(x) not in self._within


def memory(t: Tensor) -> int:
    """The address of the memory under every wrapper of a transform; 0 where there is none."""
    t = compat.physical(t)
    return t.untyped_storage().data_ptr() if t.layout == torch.strided else 0


_PARTS = frozenset(["H", "T", "data", "grad", "imag", "mH", "mT", "real"])
_QUESTIONS = frozenset(
    [
        "dim",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "nelement",
        "numel",
        "size",
        "stride",
        "untyped_storage",
    ]
)


def _asks_only(func: Any) -> bool:
    """Does an operation ask for no numbers, but for a shape, or whether a tensor requires a gradient?"""
    name = getattr(func, "__name__", "")
    return name in _QUESTIONS or (name == "__get__" and getattr(func.__self__, "__name__", "") not in _PARTS)


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
            # shapes that depend on values
            "argwhere",
            "bincount",
            "masked_select",
            "nonzero",
            "repeat_interleave",
            "unique",
            "unique_consecutive",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.seen = (
            self.seen
            or name in self.NAMES
            or (name == "__getitem__" and _masks(args[1]))
            or (name == "where" and len(args) + len(kwargs or {}) == 1)
        )
        return func(*args, **(kwargs or {}))


class Cuts(TorchFunctionMode):
    """Notes whether a function switches tracking off for something tracked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.seen and not _asks_only(func):
            off = not torch.is_grad_enabled() or getattr(func, "__name__", "") in (
                "detach",
                "detach_",
                "numpy",
                "tolist",
            )
            self.seen = off and any(
                compat.physical(x).requires_grad for x in tensors_in((*args, *(kwargs or {}).values()))
            )
        return func(*args, **(kwargs or {}))


def _masks(index: Any) -> bool:
    """Does an index select by a mask?"""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


class swapped(replaced):
    """The tensors, in the modules, while it lasts; solves inside see the first ``explicit`` of them as stand-ins.

    ``everywhere``: for all threads, not for this one only (:class:`~implicitkit.lifting.overlay.replaced`).
    """

    __slots__ = ("_mapping",)

    def __init__(
        self, slots: Sequence[Sequence[Slot]], tensors: Sequence[Tensor], explicit: int, everywhere: bool = False
    ) -> None:
        entries = [(*slot, t) for places, t in zip(slots, tensors, strict=True) for slot in places]
        super().__init__(entries, everywhere)
        self._mapping = {id(t): t for t in tensors[:explicit]}

    def __enter__(self) -> None:
        substitutions().append(self._mapping)
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        substitutions().pop()


def leaks(out: Any) -> bool:
    """Is anything in a tree of tensors tracked, or batched, at any level?"""
    return any(map(compat.tracked, tensors_in(out)))


def graph_leaves(out: Any) -> list[Tensor]:
    """The leaves of the autograd graph of a tree of tensors."""
    tensors = tensors_in(out)
    found = [t for t in tensors if t.grad_fn is None and t.requires_grad]
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        after = node.next_functions
        for n, _ in after:
            if n is not None and n not in seen:
                seen.add(n)
                nodes.append(n)
        leaf = None if after else getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
    return found


class Impurities(Protocol):
    """What :func:`purity` notes: buffers that every evaluation updates, and whether random numbers are drawn."""

    frozen: Constants
    random: bool
    compiled: bool


@contextlib.contextmanager
def purity(
    into: Impurities,
    given: Sequence[Tensor],
    states: int,
    constants: Constants,
) -> Iterator[None]:
    """Watch one evaluation: in-place changes of what was given raise; random numbers and updated buffers warn.

    The evaluation runs on copies of the modules' buffers; if it changed them, every later evaluation gets fresh copies
    too (the function is then one and the same map throughout, and the modules keep their statistics).
    """
    copies = [t.clone() for _, t in constants]
    versions = [version(t) for t in given]
    device = given[0].device
    random = _random_state(device)
    after: list[Any] = []
    if constants:
        with swapped([slots for slots, _ in constants], copies, 0, into.compiled):
            yield
            after = [_present(slots[0]) for slots, _ in constants]
    else:
        yield
    for i, (t, before) in enumerate(zip(given, versions, strict=True)):
        if version(t) != before:
            what = "its state z" if i < states else f"argument tensor number {i - states}"
            raise RuntimeError(IN_PLACE.format(what=what))
    changed = [
        (slots, t.detach().clone())
        for (slots, t), copy, now in zip(constants, copies, after, strict=True)
        if _changed(t, copy) or _rebound(t, copy, now)
    ]
    if changed:
        into.frozen = changed
        warn(
            f"the function updates {len(changed)} buffer(s) of its modules at every evaluation: {_owners(changed)} "
            "(BatchNorm in training, spectral normalisation, ...). During this solve they are held at their present values "
            "and not updated; call .eval() on those modules, use a normalisation without running statistics (GroupNorm, "
            "LayerNorm), or update them once outside the solve",
            ImpureFunctionWarning,
        )
    if random is not None and not torch.equal(random, _random_state(device)):  # type: ignore[arg-type]
        into.random = True
        warn(
            "the function draws random numbers (dropout in training, noise): each evaluation is another map, so there "
            "is no solution to converge to and the derivative is that of a different draw. Call .eval() on the module, "
            "or draw the mask once outside and pass it as an argument",
            ImpureFunctionWarning,
        )


def _present(slot: Slot) -> Any:
    """What the slot holds now."""
    module, kind, key = slot
    where = module.__dict__ if key in module.__dict__ else getattr(module, kind)
    return where[key] if key in where else None  # noqa: SIM401 (the dicts of a traced module have no get)


def _rebound(t: Tensor, copy: Tensor, now: Any) -> bool:
    """Was another tensor put in the copy's place, with other values?  (Of another shape it is a cache, made once.)"""
    if now is copy or not isinstance(now, Tensor) or now.layout != torch.strided or compat.tracked(now):
        return False
    return now.shape == t.shape and now.dtype == t.dtype and not torch.equal(now, t)


def _owners(changed: Constants) -> str:
    """The modules' classes and the names of their buffers, three modules at most."""
    names: dict[int, tuple[str, list[str]]] = {}
    for slots, _ in changed:
        module, _, key = slots[0]
        names.setdefault(id(module), (type(module).__name__, []))[1].append(key)
    told = [f"{', '.join(keys)} of {owner}" for owner, keys in names.values()]
    return "; ".join([*told[:3], *(["..."] if len(told) > 3 else [])])


def _changed(t: Tensor, copy: Tensor) -> bool:
    """Was the copy written to?  (Fused normalisation kernels do not raise the version counter.)"""
    if t.layout != torch.strided:  # sparse tensors cannot be compared, and no normalisation writes to them
        return version(copy) > 0
    return version(copy) > 0 or not torch.equal(t, copy)


def _random_state(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return torch.default_generator.get_state().view(torch.int64)  # fewer numbers to compare
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return None
