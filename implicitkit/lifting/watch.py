"""An evaluation under observation: what it uses, which modules it calls, what it looks at, what it cuts off."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat, graph
from implicitkit.foundation.faithful import is_replaced
from implicitkit.foundation.pytrees import tensors_in
from implicitkit.lifting.substitution import is_substituted
from implicitkit.lifting.work import Tally


class Discover(TorchFunctionMode):
    """Collects the tensors that a function uses but neither created nor was given.

    What belongs to a transform that the function itself has begun (a ``torch.vmap`` over points inside it) came from inside;
    so did what such a transform returned, which no operation shows: it lies in memory that was first used in there.  What it
    captures it may give to such a transform, whose operations show it wrapped: then ``within`` is set.
    """

    watches: ClassVar[bool] = True

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.level = compat.level()
        self.made = {id(t): t for t in known}
        self.found: dict[int, Tensor] = {}
        self.within = False
        self._within: set[int] = set()  # memory first used inside a transform that the function began

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling() or _asks_only(func):
            return func(*args, **(kwargs or {}))
        given = tensors_in((*args, *(kwargs or {}).values()))
        for shown in given:
            x = self._given(shown)
            if id(x) not in self.made and self._from_outside(x):
                self.found.setdefault(id(x), x)
                self.within = self.within or x is not shown
        out = func(*args, **(kwargs or {}))
        made = [x for x in tensors_in(out) if id(x) not in self.found]
        self.made.update((id(x), x) for x in made)  # keeps them alive, so that ids and memory stay their own
        if compat.level() > self.level:
            self._within |= set(map(memory, made)) - set(map(memory, given)) - {0}
        return out

    def _given(self, x: Tensor) -> Tensor:
        """What the function has given to a transform that it has begun, which no operation shows but wrapped."""
        while compat.level(x) > self.level and id(x) not in self.made and not is_substituted(x):
            x = compat.unwrap(x)
        return x

    def _from_outside(self, x: Tensor) -> bool:
        """Was a tensor made outside, on no level above?  (Below a transform that is suspended for a solve around this one,
        what that solve has made explicit is of a level above, and from outside.)"""
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


# questions that a function may branch on, and whose answers are others where a derivative is taken
_OF_TRACKING = frozenset(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf"))

# results that torch records nothing of, though they are floating-point numbers that depend smoothly on others
_UNDERIVED = (
    "histc",
    "histogram",
    "special_airy_ai",
    "special_spherical_bessel_j0",
    *(f"special_bessel_{kind}{order}" for kind in "jy" for order in "01"),
    *(
        f"special_{scaled}modified_bessel_{kind}{order}"
        for scaled in ("", "scaled_")
        for kind in "ik"
        for order in "01"
    ),
    *(f"special_{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *(f"special_{name}" for name in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l")),
    "special_legendre_polynomial_p",
)


class Called:
    """Collects the modules that are called inside."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}

    def __enter__(self) -> Called:
        self._thread = get_ident()
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._handle.remove()

    def _note(self, module: nn.Module, _: Any) -> None:
        if get_ident() == self._thread:  # the hook is called on all threads
            self.modules.setdefault(id(module), module)


class Looks(TorchFunctionMode):
    """Notes whether a function turns tensors into Python values: ``seen``, on which it may branch; ``numbers``, with which
    it may compute (floating-point ones, not under ``no_grad``); ``outside``, some of these of what it captures, tracked.
    And what it does: a ``tally``; ``rewritten``: some of it is what torch has wrong derivatives of, or may be elsewhere:
    it asks what is tracked, which nothing is here; ``recomputed``: some of it is in an activation checkpoint.
    """

    watches: ClassVar[bool] = True
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

    # what makes numbers of the tensors that it is given (a factory asks them for their item)
    NUMBERS: ClassVar[frozenset[str]] = frozenset(
        [
            "__float__",
            "__complex__",
            "__array__",
            "item",
            "tolist",
            "numpy",
            "arange",
            "full",
            "full_like",
            "linspace",
            "logspace",
            "new_full",
            "new_tensor",
            "tensor",
            *_UNDERIVED,
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.numbers = self.outside = self.rewritten = self.recomputed = False
        self.tally = Tally()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self.NUMBERS and torch.is_grad_enabled():
            given = [
                x for x in tensors_in((*args, *(kwargs or {}).values())) if x.is_floating_point() or x.is_complex()
            ]
            self.numbers = self.numbers or bool(given)
            self.outside = self.outside or any(compat.physical(x).requires_grad for x in given)
        self.recomputed = self.recomputed or graph.checkpoint_of() is not None
        self.rewritten = self.rewritten or is_replaced(func) or func in _OF_TRACKING
        self.seen = (
            self.seen
            or name in self.NAMES
            or (name == "__getitem__" and _masks(args[1]))
            or (name == "where" and len(args) + len(kwargs or {}) == 1)
        )
        out = func(*args, **(kwargs or {}))
        if not _asks_only(func):
            self.tally.add(func, args, out)
        return out


class Cuts(TorchFunctionMode):
    """Notes whether a function switches tracking off for something tracked."""

    watches: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (torch.compiler.is_dynamo_compiling() or self.seen or _asks_only(func)):
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


def leaks(out: Any) -> bool:
    """Is anything in a tree of tensors tracked, or batched, at any level?"""
    return any(map(compat.tracked, tensors_in(out)))


def graph_leaves(out: Any, nodes: Sequence[Any] | None = None) -> list[Tensor]:
    """The leaves of the autograd graph of a tree of tensors; ``nodes``: of that graph, where they are known."""
    tensors = list(tensors_in(out))
    nodes = graph.nodes_behind([t.grad_fn for t in tensors]) if nodes is None else nodes
    leaves = [getattr(node, "variable", None) for node in nodes if not node.next_functions]
    found = [t for t in tensors if t.grad_fn is None and t.requires_grad]
    return found + [leaf for leaf in leaves if leaf is not None]
