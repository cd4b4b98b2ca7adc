"""From a user's function to a pure function of explicit tensors.

The primitive that carries derivatives (``primitive.py``) takes explicit tensors only: whatever a function captures
would be a constant to it, silently.  :func:`lift` finds what the function uses besides its arguments and makes it an
argument:

1. parameters and buffers of every ``nn.Module`` within reach (the function itself, closure cells, ``partial``, bound
   objects, referenced globals, containers): swapped into the module during each evaluation, as
   ``torch.func.functional_call`` does, so that a later evaluation sees the tensors of *this* call;
2. any other tensor, found by running the function once under a ``TorchFunctionMode`` and substituted by identity at
   every torch operation from then on.

Then one evaluation on detached stand-ins must come out untracked at every autograd and ``torch.func`` level.  If it
does not, something differentiable is used in a way that nothing here can see, and :class:`CapturedTensorError` is
raised rather than a derivative lost.  In the common case that one evaluation is all lifting costs, and it is not lost
either: it is the solver's first.  A function that branches on values may use other tensors at the solution than at the
start: :func:`check_leaves` finds them when a derivative is taken, :func:`check_solution` where none would be.

What nobody can see: a tensor turned into a number before (``float(w)``, ``w.numpy()``), or detached.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from implicitkit import compat
from implicitkit.errors import CapturedTensorError, ImpureFunctionWarning, warn
from implicitkit.trees import tree_flatten, tree_unflatten

__all__ = ["Lifted", "check_leaves", "check_solution", "lift", "lift_closed", "modules_held", "resolve"]

_DEPTH = 6  # how far reachable objects are followed
# Evaluations that swap tensors into modules, and those that read modules, exclude each other between threads.
_modules_in_use = threading.RLock()
_active = threading.local()  # substitutions in force on this thread, for solves nested inside a lifted function


@contextlib.contextmanager
def modules_held() -> Iterator[None]:
    """Inside, no solve on another thread swaps tensors into modules: for code that runs modules beside its solves."""
    with _modules_in_use:
        yield


def _substitutions() -> list[dict[int, Tensor]]:
    if not hasattr(_active, "maps"):
        _active.maps = []
    return _active.maps


def resolve(t: Tensor) -> Tensor:
    """The tensor that ``t`` stands for inside the lifted functions now running (usually ``t`` itself)."""
    for mapping in reversed(_substitutions()):
        t = mapping.get(id(t), t)
    return t


# --------------------------------------------------------------------------------------------- what can be reached
def reachable_modules(function: Any) -> list[nn.Module]:
    """The outermost modules within reach of a callable, each once, in order of discovery."""
    found: list[nn.Module] = []
    _walk(function, found, set(), 0)
    return found


def _walk(x: Any, found: list[nn.Module], seen: set[int], depth: int) -> None:
    if isinstance(x, (Tensor, str, int, float, type, types.ModuleType)) or x is None or id(x) in seen or depth > _DEPTH:
        return
    seen.add(id(x))
    if isinstance(x, nn.Module):
        found.append(x)
    elif isinstance(x, functools.partial):
        for v in (x.func, *x.args, *x.keywords.values()):
            _walk(v, found, seen, depth + 1)
    elif inspect.ismethod(x):
        _walk(x.__self__, found, seen, depth + 1)
        _walk(x.__func__, found, seen, depth + 1)
    elif inspect.isfunction(x):
        for cell in x.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell not yet filled
                _walk(cell.cell_contents, found, seen, depth + 1)
        for v in x.__defaults__ or ():
            _walk(v, found, seen, depth + 1)
        for name in _global_names(x.__code__):
            v = x.__globals__.get(name)
            if isinstance(v, (nn.Module, types.FunctionType, functools.partial)):
                _walk(v, found, seen, depth + 1)
        if hasattr(x, "__wrapped__"):
            _walk(x.__wrapped__, found, seen, depth + 1)
    elif isinstance(x, dict):
        for v in x.values():
            _walk(v, found, seen, depth + 1)
    elif isinstance(x, (list, tuple, set, frozenset)):
        for v in x:
            _walk(v, found, seen, depth + 1)
    elif not type(x).__module__.startswith(("torch", "numpy", "builtins")) and hasattr(x, "__dict__"):
        for v in vars(x).values():
            _walk(v, found, seen, depth + 1)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Global names that a code object and those nested in it refer to."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return tuple(names)


# ------------------------------------------------------------------------------------- tensors seen, tensors swapped
class _Discover(TorchFunctionMode):
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


class _Substitute(TorchFunctionMode):
    """Replaces tensors, by identity, in the arguments of every torch operation."""

    def __init__(self, mapping: dict[int, Tensor]) -> None:
        super().__init__()
        self.mapping = mapping

    def __enter__(self) -> _Substitute:
        _substitutions().append(self.mapping)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        _substitutions().pop()
        super().__exit__(*exc)

    def _replace(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.mapping.get(id(x), x)
        if type(x) in (list, tuple):
            return type(x)(map(self._replace, x))
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._replace, args), **{k: self._replace(v) for k, v in (kwargs or {}).items()})


class _Looks(TorchFunctionMode):
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


Slot = tuple[dict[str, Any], str]  # a module's own dict of parameters or buffers, and a key


@contextlib.contextmanager
def _swapped(slots: Sequence[Sequence[Slot]], tensors: Sequence[Tensor]) -> Iterator[None]:
    old = [[owner[key] for owner, key in places] for places in slots]
    _substitutions().append({})  # solves inside see that they are
    try:
        for places, t in zip(slots, tensors, strict=True):
            for owner, key in places:
                owner[key] = t
        yield
    finally:
        _substitutions().pop()
        for places, values in zip(slots, old, strict=True):
            for (owner, key), value in zip(places, values, strict=True):
                owner[key] = value


# --------------------------------------------------------------------------------------------------------- the result
@dataclass
class Lifted:
    """A function whose tensors are all explicit: ``lifted(z, theta)`` equals ``function(z, *args)``.

    Attributes:
        theta: the tensors: first those of ``args``, then those of modules, then other captured ones.
        from_args: how many of them come from ``args``.
        guarded: modules are within reach, and no other thread may swap their tensors during an evaluation.
        live: the captured tensors are plain ones, so that an evaluation on the spot may use the function as it is.
        branches: the function looked at values, and may use other tensors elsewhere, which no linearisation would show.
        inside: lifted inside the evaluation of another: what it captures may have been that one's constant.
        probe: the output of the first evaluation at the very ``z0`` and ``args``, if it was made on plain tensors and
            the function is pure; else ``None``.
    """

    function: Callable[..., Any]
    theta: tuple[Tensor, ...]
    from_args: int
    rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]]
    slots: list[list[Slot]] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)
    frozen: list[tuple[list[Slot], Tensor]] = field(default_factory=list)
    live: bool = True
    guarded: bool = False
    branches: bool = False
    inside: bool = False
    probe: Any = None

    def __call__(self, z: Any, theta: Sequence[Tensor]) -> Any:
        if not self.guarded:
            return self._evaluate(z, theta)
        with _modules_in_use:
            return self._evaluate(z, theta)

    def _evaluate(self, z: Any, theta: Sequence[Tensor]) -> Any:
        k, m = self.from_args, self.from_args + len(self.slots)
        args = self.rebuild(theta[:k])
        if not (self.slots or self.captured or self.frozen):
            return self.function(z, *args)
        with contextlib.ExitStack() as stack:
            if self.slots or self.frozen:  # buffers that the function updates: each evaluation starts from a fresh copy
                slots = [*self.slots, *(places for places, _ in self.frozen)]
                stack.enter_context(_swapped(slots, [*theta[k:m], *(t.clone() for _, t in self.frozen)]))
            if self.captured:
                mapping = dict(zip(map(id, self.captured), theta[m:], strict=True))
                stack.enter_context(_Substitute(mapping))
            return self.function(z, *args)

    def on_the_spot(self, z: Any, theta: Sequence[Tensor]) -> Any:
        """The same value during the call that lifted, where the modules still hold their tensors."""
        if not self.live:
            return self(z, theta)
        args = self.rebuild(theta[: self.from_args])
        if not self.guarded:
            return self.function(z, *args)
        with _modules_in_use:
            return self.function(z, *args)


def lift(function: Callable[..., Any], z0: Any, args: tuple[Any, ...], check: Callable[[Any], None]) -> Lifted:
    """Make every tensor that ``function(z, *args)`` uses explicit.

    Args:
        function: the user's function or module. z0: a state. args: the arguments after it, pytrees of anything.
        check: raises unless the function's output has the right form.

    Raises:
        CapturedTensorError: a derivative would be lost.
        RuntimeError: the function changes ``z`` or an argument in place.
    """
    rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]]
    if all(isinstance(arg, Tensor) for arg in args):
        leaves, where, rebuild = list(args), list(range(len(args))), tuple
    else:
        leaves, spec = tree_flatten(args)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def rebuild(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
            full = list(leaves)
            for i, t in zip(where, tensors, strict=True):
                full[i] = t
            return tree_unflatten(full, spec)

    theta = [resolve(leaves[i]) for i in where]
    transforms, needed = compat.transforms_active(), torch.is_grad_enabled()
    levels = transforms or compat.has_forward_level()
    lifted = Lifted(function, tuple(theta), len(theta), rebuild, inside=bool(_substitutions()))
    modules = reachable_modules(function)
    lifted.guarded = bool(modules)
    with _modules_in_use if modules else contextlib.nullcontext():
        _lift(lifted, modules, z0, check, needed, levels)
    return lifted


def lift_closed(function: Callable[..., Any], args: tuple[Tensor, ...]) -> Lifted:
    """:func:`lift` for a function of tensors that is known to use nothing but its arguments: nothing is evaluated."""
    return Lifted(function, tuple(map(resolve, args)), len(args), tuple)


def _lift(
    lifted: Lifted, modules: list[nn.Module], z0: Any, check: Callable[[Any], None], needed: bool, levels: bool
) -> None:
    """Find what the function uses, by looking at modules and by evaluating once (or three times)."""
    constants = _lift_modules(lifted, modules, explicit=needed or levels)

    def stand_in(t: Tensor) -> Tensor:
        return compat.plain_sample(t) if levels else t.detach()

    z_leaves, z_spec = tree_flatten(z0)
    z_plain = [stand_in(resolve(t)) for t in z_leaves]
    plain = [stand_in(t) for t in lifted.theta]
    looks = _Looks() if levels or (needed and not any(_explicit(t) for t in lifted.theta)) else None
    with torch.enable_grad() if needed or levels else contextlib.nullcontext():
        watch = _purity(lifted, [*z_plain, *plain[: lifted.from_args]], len(z_plain), constants)
        with watch, looks or contextlib.nullcontext():
            out = lifted(tree_unflatten(z_plain, z_spec), plain)
        if (needed or levels) and _leaks(out):
            _lift_captured(lifted, modules, tree_unflatten(z_plain, z_spec), plain)
            plain = [stand_in(t) for t in lifted.theta]
            out = lifted(tree_unflatten(z_plain, z_spec), plain)
            if _leaks(out) and (levels or not _tracks_state_only(lifted, z_plain, z_spec, plain)):
                raise CapturedTensorError(
                    "the function uses a tensor that requires grad, or belongs to a torch.func transform, in a way that "
                    "implicitkit cannot see (through a custom autograd.Function, say, or a traced module): its "
                    "derivative would be lost. Pass that tensor as an argument: ik.solve(problem, z0, (..., tensor))"
                )
    check(out)
    lifted.branches = looks is not None and looks.seen and (levels or not lifted.captured)
    if not levels and not lifted.frozen:
        lifted.probe = out
    lifted.live = not lifted.frozen and not any(
        compat.is_wrapped(t) or compat.has_tangent(t) for t in lifted.theta[lifted.from_args :]
    )


def check_leaves(lifted: Lifted, out: Tensor, theta: Sequence[Tensor], z: Tensor) -> None:
    """Raise :class:`CapturedTensorError` if a linearisation's value at ``z`` depends on more than ``z`` and ``theta``."""
    if lifted.inside:
        return
    storage = z.untyped_storage().data_ptr()
    known = {id(t) for t in theta}
    if any(id(t) not in known and t.untyped_storage().data_ptr() != storage for t in _graph_leaves(out)):
        raise CapturedTensorError(_ELSEWHERE)


def check_solution(lifted: Lifted, z: Any) -> None:
    """Raise :class:`CapturedTensorError` if the function, at ``z``, uses something differentiable that is not in theta."""
    leaves, spec = tree_flatten(z)
    points, plain = ([compat.plain_sample(t) for t in tensors] for tensors in (leaves, lifted.theta))
    with torch.enable_grad():
        out = lifted(tree_unflatten(points, spec), plain)
        levels = compat.transforms_active() or compat.has_forward_level()
        if _leaks(out) and (levels or not _tracks_state_only(lifted, points, spec, plain)):
            raise CapturedTensorError(_ELSEWHERE)


_ELSEWHERE = (
    "at the solution the function uses a tensor that requires grad, or belongs to a torch.func transform, which it did not "
    "use at z0 (it branches on values): its derivative would be lost. Pass that tensor as an argument: "
    "ik.solve(problem, z0, (..., tensor))"
)


def _explicit(t: Tensor) -> bool:
    """Must this captured tensor become an argument for its derivative, or its batch, to be seen?"""
    if compat.is_wrapped(t):
        return True
    return (t.is_floating_point() or t.is_complex()) and (t.requires_grad or compat.has_tangent(t))


def _lift_modules(lifted: Lifted, modules: Sequence[nn.Module], explicit: bool) -> list[tuple[list[Slot], Tensor]]:
    """Parameters and buffers of ``modules`` to ``lifted``; returns copies of the other buffers (they may be updated)."""
    places: dict[int, tuple[Tensor, list[Slot]]] = {}
    constants: dict[int, tuple[list[Slot], Tensor]] = {}
    seen: set[int] = set()
    for module in modules:
        for m in module.modules():
            if id(m) in seen:
                continue
            seen.add(id(m))
            for owner, is_buffer in ((m._parameters, False), (m._buffers, True)):
                for key, t in owner.items():
                    if t is None:
                        continue
                    if explicit and _explicit(resolve(t)):
                        places.setdefault(id(t), (t, []))[1].append((owner, key))
                    elif is_buffer:
                        constants.setdefault(id(t), ([], t))[0].append((owner, key))
    lifted.theta = (*lifted.theta, *(resolve(t) for t, _ in places.values()))
    lifted.slots = [slots for _, slots in places.values()]
    return list(constants.values())


def _lift_captured(lifted: Lifted, modules: list[nn.Module], z: Any, plain: Sequence[Tensor]) -> None:
    """Find captured tensors by one evaluation under observation, and modules that only their call reveals."""
    called: dict[int, nn.Module] = {}

    def note(module: nn.Module, _: Any) -> None:
        called.setdefault(id(module), module)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with torch.no_grad(), _Discover([*tree_flatten(z)[0], *plain]) as seen:
            lifted(z, plain)
    finally:
        handle.remove()
    inside = {id(m) for module in modules for m in module.modules()}
    hidden = [m for key, m in called.items() if key not in inside]
    if hidden:
        lifted.guarded = True
        known = {id(t) for t in lifted.theta}
        extra = Lifted(lifted.function, (), 0, lifted.rebuild)
        _lift_modules(extra, hidden, explicit=True)
        fresh = [(t, s) for t, s in zip(extra.theta, extra.slots, strict=True) if id(t) not in known]
        lifted.theta = (*lifted.theta, *(t for t, _ in fresh))
        lifted.slots = [*lifted.slots, *(s for _, s in fresh)]
    # a tensor that is an argument as well, or a module's own (handed back to it by functional_call), is substituted where
    # it is captured, all the same
    lifted.captured = [t for t in seen.found.values() if _explicit(resolve(t))]
    lifted.theta = (*lifted.theta, *(resolve(t) for t in lifted.captured))


def _leaks(out: Any) -> bool:
    return any(compat.tracked(t) for t in tree_flatten(out)[0] if isinstance(t, Tensor))


def _tracks_state_only(lifted: Lifted, z_leaves: Sequence[Tensor], z_spec: Any, plain: Sequence[Tensor]) -> bool:
    """Does a tracked state explain why the output is tracked?

    A function that differentiates (the gradient of an energy, by ``torch.autograd.grad``) makes a leaf of a state that is
    not tracked, and its output then depends on that leaf: nothing is lost if it takes a tracked state as it is.
    """
    leaves = [t.detach().requires_grad_() for t in z_leaves]
    out = lifted(tree_unflatten(leaves, z_spec), plain)
    return {id(t) for t in _graph_leaves(out)} <= {id(t) for t in leaves}


def _graph_leaves(out: Any) -> list[Tensor]:
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
def _purity(
    lifted: Lifted, given: Sequence[Tensor], states: int, constants: list[tuple[list[Slot], Tensor]]
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
        with _swapped([slots for slots, _ in constants], copies):
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
        lifted.frozen = changed
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
