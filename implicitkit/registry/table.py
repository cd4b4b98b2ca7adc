"""Names for solvers, rules, linear solvers and problems, and the plugins that add to them.

Built-in parts register when their package is imported.  Third-party parts come through the entry-point group
``implicitkit.plugins``, which is read only when a name is not known yet or when somebody asks for a list.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from implicitkit.errors import CapabilityError, UnknownNameError

if TYPE_CHECKING:
    from implicitkit.problem.base import Problem

__all__ = [
    "GROUP",
    "Entry",
    "PluginInfo",
    "PluginWarning",
    "check_serves",
    "describe",
    "get_linear_solver",
    "get_problem_entry",
    "get_rule",
    "get_solver",
    "linear_solvers",
    "plugins",
    "problems",
    "refresh",
    "register_linear_solver",
    "register_problem",
    "register_rule",
    "register_solver",
    "rules",
    "serves",
    "solvers",
]

T = TypeVar("T")

GROUP = "implicitkit.plugins"
"""The entry-point group in which a distribution names the module that registers its parts."""

_SERVES: dict[str, frozenset[str]] = {
    "fixed_point": frozenset({"fixed_point"}),
    "root": frozenset(
        {"root", "fixed_point", "steady_state", "argmin", "least_squares", "constrained", "quadratic_program"}
    ),
    "least_squares": frozenset({"least_squares", "root", "fixed_point", "steady_state"}),
    "minimise": frozenset({"argmin", "least_squares", "root", "fixed_point", "steady_state"}),
    "constrained": frozenset({"constrained"}),
    "quadratic_program": frozenset({"quadratic_program"}),
}
_KINDS = ("root", "fixed_point", "argmin", "least_squares", "steady_state", "constrained", "quadratic_program")
_BATCHES = ("loop", "native", "joint")
_NOUNS = {"solvers": "solver", "rules": "rule", "linear_solvers": "linear solver", "problems": "problem"}
_REQUIRED = ("rtol", "atol", "max_steps")


class PluginWarning(RuntimeWarning):
    """A plugin could not be loaded; everything else works."""


@dataclass(frozen=True)
class Entry:
    """One registered part.

    Attributes:
        kind: ``"solvers"``, ``"rules"``, ``"linear_solvers"`` or ``"problems"``.
        name: the name it is looked up by.
        target: the class or function that was registered.
        origin: the distribution (or, outside any plugin, the top-level module) it came from.
        solves: solvers: ``"fixed_point"``, ``"root"``, ``"minimise"`` or ``"least_squares"``; problems: their kind.
        batch: black-box solvers: ``"loop"``, ``"native"`` or ``"joint"``; otherwise empty.
        max_size: solvers: the most unknowns that one sample may have (1: scalar equations); ``None``: any number.
        rule: problems: the rule that ``rule="auto"`` stands for.
        linear_solver: problems: the linear solver that fits large systems of this kind.
    """

    kind: str
    name: str
    target: Any
    origin: str
    solves: str = ""
    batch: str = ""
    max_size: int | None = None
    rule: Any = None
    linear_solver: Any = None

    @property
    def doc(self) -> str:
        """The first sentence of the target's docstring, on one line."""
        text = inspect.getdoc(self.target) or ""
        if dataclasses.is_dataclass(self.target) and inspect.isclass(self.target):
            written = f"{self.target.__name__}{inspect.signature(self.target)}".removesuffix(" -> None")
            text = "" if text == written else text  # what @dataclass writes says nothing
        return " ".join(text.split("\n\n", 1)[0].split())

    @property
    def options(self) -> dict[str, Any]:
        """The options it can be configured with and their defaults (``inspect.Parameter.empty``: none)."""
        return {p.name: p.default for p in _option_parameters(self.target)[0]}


@dataclass(frozen=True)
class PluginInfo:
    """One entry point in the group ``implicitkit.plugins``; ``error`` is empty when it loaded."""

    name: str
    distribution: str
    version: str
    module: str
    loaded: bool
    error: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" + (f" ({self.error})" if self.error else "")


_tables: dict[str, dict[str, Entry]] = {kind: {} for kind in _NOUNS}
_plugins: dict[tuple[str, str, str, str], PluginInfo] = {}
_lock = threading.RLock()
_scanned = False
_loading: ContextVar[PluginInfo | None] = ContextVar("_loading", default=None)


# ---------------------------------------------------------------------------------------------------------- registering
def register_solver(
    name: str, *, solves: str, batch: str | None = None, max_size: int | None = None, override: bool = False
) -> Callable[[T], T]:
    """Register a :class:`~implicitkit.Method` subclass, or a function, as a solver.

    Args:
        name: what users write in ``solver="..."``; dots are allowed.
        solves: ``"fixed_point"``, ``"root"``, ``"minimise"``, ``"least_squares"``, ``"constrained"`` or
            ``"quadratic_program"`` (see :func:`serves`).
        batch: functions only. ``"loop"`` (default): called once per sample with ``z0`` of shape ``(n,)``;
            ``"native"``: called with ``(batch, n)``; ``"joint"``: called with one big system ``(batch * n,)``.
        max_size: the most unknowns that one sample may have; 1 for methods that solve scalar equations only.
        override: replace a solver that already has this name.

    A function must have the form ``find(f, z0, *, rtol, atol, max_steps, **its own options)`` and return the point, or
    :class:`~implicitkit.Found`.  The class or function itself is returned unchanged.

    Raises:
        ValueError: the name is taken or malformed, or ``solves`` / ``batch`` is not one of the above.
        TypeError: the target is neither a ``Method`` subclass nor a function of that form.
    """
    _check_name(name)
    _check_choice("solves", solves, tuple(_SERVES))
    if batch is not None:
        _check_choice("batch", batch, _BATCHES)
    if max_size is not None and (not isinstance(max_size, int) or max_size < 1):
        raise ValueError(f"max_size must be an integer >= 1, or None for any number of unknowns; got {max_size!r}")

    def register(target: T) -> T:
        if inspect.isclass(target):
            from implicitkit.solver.base import Method, Strategy

            if not issubclass(target, (Method, Strategy)):
                raise TypeError(
                    f"cannot register the class {target.__name__} as solver {name!r}: it must be a subclass of "
                    "implicitkit.Method (init and step on plain matrices); register a function for a black box"
                )
            if batch is not None:
                raise TypeError(f"batch= is for functions; {target.__name__} is a Method, which is always batched")
        else:
            _check_black_box(name, target)
        mode = "" if inspect.isclass(target) else batch or "loop"
        entry = Entry("solvers", name, target, _origin(target), solves=solves, batch=mode, max_size=max_size)
        _add(entry, override)
        if inspect.isclass(target):
            _set_name(target, entry)
            target.solves, target.max_size = solves, max_size  # type: ignore[attr-defined]
        return target

    return register


def register_rule(name: str, *, override: bool = False) -> Callable[[T], T]:
    """Register a class as a rule: how the derivative of a solution is formed.  Sets its ``name``."""
    return _register_class("rules", name, override)


def register_linear_solver(name: str, *, override: bool = False) -> Callable[[T], T]:
    """Register a :class:`~implicitkit.LinearSolver` subclass under a name.  Sets its ``name``."""
    return _register_class("linear_solvers", name, override)


def register_problem(
    cls: T,
    *,
    name: str | None = None,
    rule: Any = "implicit",
    linear_solver: Any = "gmres",
    override: bool = False,
) -> T:
    """Register a :class:`~implicitkit.Problem` subclass, with the rule and the linear solver that fit it.

    Args:
        cls: the problem class; its ``kind`` says which solvers serve it.
        name: default: the class name in snake case.
        rule: a registered name or a configured object, for ``rule="auto"``.
        linear_solver: likewise, for the derivative's large linear systems.
        override: replace a problem that already has this name.

    Returns:
        The class itself, so that it can be used as a decorator.
    """
    if not inspect.isclass(cls):
        raise TypeError(f"register_problem takes a Problem subclass, not {_describe(cls)}")
    kind = getattr(cls, "kind", None)
    if kind not in _KINDS:
        raise TypeError(f"{cls.__name__}.kind must be one of {', '.join(_KINDS)}; it is {kind!r}")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower() if name is None else name
    _check_name(name)
    _add(
        Entry("problems", name, cls, _origin(cls), solves=kind, rule=rule, linear_solver=linear_solver),
        override,
    )
    return cls


def _register_class(kind: str, name: str, override: bool) -> Callable[[T], T]:
    _check_name(name)

    def register(cls: T) -> T:
        if not inspect.isclass(cls):
            raise TypeError(f"a {_NOUNS[kind]} is a class; cannot register {_describe(cls)} as {name!r}")
        entry = Entry(kind, name, cls, _origin(cls))
        _add(entry, override)
        _set_name(cls, entry)
        return cls

    return register


def _add(entry: Entry, override: bool) -> None:
    noun = _NOUNS[entry.kind]
    with _lock:
        old = _tables[entry.kind].get(entry.name)
        if old is not None and old.target is not entry.target and not _redefined(old.target, entry.target):
            first = f"{noun} {entry.name!r} is already registered, by {_where(old)}"
            if not override:
                raise ValueError(f"{first}. Choose another name, or pass override=True to replace it.")
            if _loading.get() is not None and old.origin != entry.origin:
                # Plugins load at the first unknown name: what a known name means must not depend on that moment.
                raise ValueError(f"{first}; a plugin cannot replace it while it is loaded through its entry point")
        _tables[entry.kind][entry.name] = entry


def _redefined(old: Any, new: Any) -> bool:
    """Is ``new`` the same definition run once more (a notebook cell, a reloaded module)?"""
    places = [(getattr(t, "__module__", None), getattr(t, "__qualname__", "<locals>")) for t in (old, new)]
    return places[0] == places[1] and "<locals>" not in places[0][1] and places[0][1] != "<lambda>"


def _set_name(cls: Any, entry: Entry) -> None:
    if not any(e.target is cls and e.name == cls.__dict__.get("name") for e in _tables[entry.kind].values()):
        cls.name = entry.name  # a second name for the same class is an alias


def _origin(target: Any) -> str:
    plugin = _loading.get()
    if plugin is not None:
        return plugin.distribution
    return str(getattr(target, "__module__", None) or "?").partition(".")[0]


def _where(entry: Entry) -> str:
    target = entry.target
    return f"{getattr(target, '__module__', '?')}.{_qualname(target)}"


def _qualname(target: Any) -> str:
    return str(getattr(target, "__qualname__", type(target).__name__))


def _describe(value: Any) -> str:
    if callable(value):
        return str(getattr(value, "__qualname__", repr(value)))
    return f"{value!r} (a {type(value).__name__})"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.\-]*", name) or name.endswith("."):
        raise ValueError(
            f"a name is a non-empty string of letters, digits, '_', '-' and '.', starting with a letter; got {name!r}"
        )


def _check_choice(option: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{option} must be one of {', '.join(map(repr, choices))}; got {value!r}.{hint}")


def _check_black_box(name: str, target: Any) -> None:
    form = f"{name!r} must have the form find(f, z0, *, rtol, atol, max_steps, ...)"
    if not callable(target):
        raise TypeError(f"the solver {form}; got {_describe(target)}")
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        raise TypeError(f"the solver {form}; the signature of {target!r} cannot be read: wrap it in a def") from None
    keywords = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [] if anything else [k for k in _REQUIRED if k not in keywords]
    if missing:
        raise TypeError(
            f"the solver {form}; it does not accept {', '.join(missing)}. Its signature: {inspect.signature(target)}"
        )
    try:
        inspect.signature(target).bind(None, None, rtol=0.0, atol=0.0, max_steps=1)
    except TypeError as error:
        raise TypeError(f"the solver {form}; such a call fails: {error}") from None


# ----------------------------------------------------------------------------------------------------------- looking up
def get_solver(solver: Any, **options: Any) -> Any:
    """The configured solver for a name, a class, a registered function, or an object (which passes through)."""
    if isinstance(solver, str):
        return _configure(_lookup("solvers", solver), options)
    from implicitkit.solver.base import BlackBox, Method, Strategy

    if inspect.isclass(solver):
        if issubclass(solver, (Method, Strategy)):
            return _instantiate(solver, options)
    elif isinstance(solver, (Method, BlackBox)) or (isinstance(getattr(solver, "solves", None), str) and solver.solves):
        _refuse_options(solver, options)
        if not solver.solves:
            raise TypeError(
                f"{type(solver).__name__} does not say what it solves: register it with "
                "@implicitkit.register_solver(name, solves=...) or set its class attribute `solves`"
            )
        return solver
    elif callable(solver):
        for entry in _tables["solvers"].values():
            if entry.target is solver:
                return _configure(entry, options)
        raise TypeError(
            f"the function {_describe(solver)} is not registered as a solver: decorate it with "
            "@implicitkit.register_solver(name, solves=...), or make it a layer with @implicitkit.implicit(problem)"
        )
    raise TypeError(
        f"solver must be a registered name, a configured object such as implicitkit.Anderson(memory=5), or a Method "
        f"subclass; got {_describe(solver)}"
    )


def get_rule(rule: Any, **options: Any) -> Any:
    """The configured rule for a name, a class, or an object (which passes through)."""
    return _get("rules", rule, options, "name", "implicitkit.Implicit(linear_solver='gmres')")


def get_linear_solver(linear_solver: Any, **options: Any) -> Any:
    """The configured linear solver for a name, a class, or an object (which passes through)."""
    return _get("linear_solvers", linear_solver, options, "solve", "implicitkit.linear.GMRES(restart=20)")


def get_problem_entry(problem: Problem | type[Problem] | str) -> Entry:
    """What is registered for a problem object, class or name.

    A class that is not registered itself takes the entry of its nearest registered ancestor, or else the entry of its
    ``kind``.
    """
    if isinstance(problem, str):
        return _lookup("problems", problem)
    cls = problem if inspect.isclass(problem) else type(problem)
    entries = {entry.target: entry for entry in _tables["problems"].values()}
    for ancestor in cls.__mro__:
        if ancestor in entries:
            return entries[ancestor]
    kind = getattr(cls, "kind", None)
    if kind in _KINDS:
        return _lookup("problems", kind)
    raise TypeError(f"{cls.__name__} is not a problem: expected an implicitkit.Problem such as implicitkit.Root(f)")


def _get(kind: str, value: Any, options: dict[str, Any], attribute: str, example: str) -> Any:
    if isinstance(value, str):
        return _configure(_lookup(kind, value), options)
    if not hasattr(value, attribute) or value is None:
        raise TypeError(
            f"{_NOUNS[kind].replace(' ', '_')} must be a registered name or a configured object such as {example}; "
            f"got {_describe(value)}"
        )
    if inspect.isclass(value):
        return _instantiate(value, options)
    _refuse_options(value, options)
    return value


def _lookup(kind: str, name: str) -> Entry:
    table = _tables[kind]
    if name not in table:
        _load_plugins()
    if name in table:
        return table[name]
    noun = _NOUNS[kind]
    text = f"unknown {noun} {name!r}."
    near = difflib.get_close_matches(name.lower().replace("-", "_").replace(" ", "_"), table, 1, 0.6)
    if near:
        text += f" Did you mean {near[0]!r}?"
    others = [_NOUNS[k] for k, t in _tables.items() if k != kind and name in t]
    if others:
        text += f" (There is a {' and a '.join(others)} of that name.)"
    text += f" Registered {noun}s: {', '.join(sorted(table)) or 'none'}."
    broken = [str(p) for p in _plugins.values() if not p.loaded]
    if broken:
        text += f" Plugins that failed to load: {'; '.join(broken)}."
    raise UnknownNameError(text)


def _configure(entry: Entry, options: dict[str, Any]) -> Any:
    if inspect.isclass(entry.target):
        return _instantiate(entry.target, options, entry.name)
    from implicitkit.solver.base import BlackBox

    known, anything = _option_parameters(entry.target)
    unknown = [] if anything else [o for o in options if o not in {p.name for p in known}]
    if unknown:
        raise TypeError(_option_error(entry.name, unknown[0], [p.name for p in known]))
    return BlackBox(entry.target, entry.name, entry.solves, entry.batch, tuple(sorted(options.items())), entry.max_size)


def _instantiate(cls: Any, options: dict[str, Any], name: str | None = None) -> Any:
    if not options:
        return cls()
    known, anything = _option_parameters(cls)
    for option in options:
        if not anything and option not in {p.name for p in known}:
            raise TypeError(_option_error(name or cls.__name__, option, [p.name for p in known]))
    return cls(**options)


def _option_error(name: str, option: str, known: list[str]) -> str:
    near = difflib.get_close_matches(option, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{name!r} has no option {option!r}.{hint} Its options: {', '.join(known) or 'none'}."


def _refuse_options(value: Any, options: dict[str, Any]) -> None:
    if options:
        raise TypeError(f"{', '.join(options)}: this {type(value).__name__} is configured already; options go there")


def _option_parameters(target: Any) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of a class or black-box function that are options, and whether it takes any other keyword."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return [], True
    if not inspect.isclass(target):
        parameters = [p for p in parameters[2:] if p.name not in _REQUIRED]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


# ----------------------------------------------------------------------------------------------------------- capability
def serves(solver_solves: str, problem_kind: str) -> bool:
    """Can a solver of this kind find the solution of such a problem?

    ==================  ================================================================================
    solver's ``solves``  problem kinds it serves
    ==================  ================================================================================
    ``fixed_point``     fixed_point
    ``root``            root, fixed_point, steady_state; stationary points of all other kinds
    ``least_squares``   least_squares, root, fixed_point, steady_state
    ``minimise``        argmin, least_squares, root, fixed_point, steady_state
    ``constrained``     argmin with constraints, bounds, a set or a proximal term
    ``quadratic_program``  quadratic_program
    ==================  ================================================================================
    """
    return problem_kind in _SERVES.get(solver_solves, ())


def check_serves(solver: Any, problem: Any, size: int) -> None:
    """Raise :class:`~implicitkit.CapabilityError` unless ``solver`` serves ``problem`` with ``size`` unknowns a sample.

    The message names solvers that would.
    """
    limit = getattr(solver, "max_size", None)
    if serves(solver.solves, problem.kind) and (limit is None or size <= limit):
        return
    entries = [e for e in describe("solvers") if serves(e.solves, problem.kind)]
    fitting = [e.name for e in entries if e.max_size is None or size <= e.max_size]
    name = getattr(solver, "name", "") or type(solver).__name__
    if serves(solver.solves, problem.kind):
        raise CapabilityError(
            f"solver {name!r} solves systems of at most {limit} unknown{'s' if limit != 1 else ''} a sample; this one has "
            f"{size}. If they are independent, pass batch_dims= so that each is a sample of its own. Solvers that fit: "
            f"{', '.join(fitting)}."
        )
    takes = ", ".join(k for k in _KINDS if serves(solver.solves, k)) or "nothing"
    raise CapabilityError(
        f"solver {name!r} (solves={solver.solves!r}) serves problems of kind {takes}; {problem.title} is of "
        f"kind {problem.kind!r}. Solvers that fit: {', '.join(fitting) or 'none is registered'}."
    )


# -------------------------------------------------------------------------------------------------------------- listing
def solvers() -> list[str]:
    """Names of all solvers, plugins' included."""
    return [e.name for e in describe("solvers")]


def problems() -> list[str]:
    """Names of all problem kinds, plugins' included."""
    return [e.name for e in describe("problems")]


def rules() -> list[str]:
    """Names of all rules, plugins' included."""
    return [e.name for e in describe("rules")]


def linear_solvers() -> list[str]:
    """Names of all linear solvers, plugins' included."""
    return [e.name for e in describe("linear_solvers")]


def plugins() -> list[PluginInfo]:
    """Every plugin found, loaded or broken."""
    _load_plugins()
    return sorted(_plugins.values(), key=lambda p: (p.distribution, p.name))


def describe(kind: str) -> list[Entry]:
    """The entries of one kind (``"solvers"``, ``"rules"``, ``"linear_solvers"``, ``"problems"``), sorted by name."""
    kind = kind.replace("-", "_")
    _check_choice("kind", kind, tuple(_NOUNS))
    _load_plugins()
    packages = {p.module.partition(".")[0]: p.distribution for p in _plugins.values()}
    return [
        dataclasses.replace(entry, origin=packages.get(entry.origin, entry.origin))
        for _, entry in sorted(_tables[kind].items())
    ]


# -------------------------------------------------------------------------------------------------------------- plugins
def refresh() -> list[PluginInfo]:
    """Look for plugins again: new ones are loaded, broken ones tried once more, and all of them listed."""
    global _scanned
    with _lock:
        importlib.invalidate_caches()
        _scanned = False
        return plugins()


def _load_plugins() -> None:
    global _scanned
    broken: list[PluginInfo] = []
    with _lock:
        if _scanned:
            return
        _scanned = True  # before loading: a plugin may look names up itself
        before = dict(_plugins)
        _plugins.clear()
        for key, point in _entry_points():
            info = before.get(key)
            if info is None or not info.loaded:
                info = _load(point)
                if not info.loaded:
                    broken.append(info)
            _plugins[key] = info
    if broken:
        warnings.warn(
            "plugins that failed to load: " + "; ".join(map(str, broken)) + ". Everything else works; see "
            "`python -m implicitkit list plugins`.",
            PluginWarning,
            stacklevel=3,
        )


def _entry_points() -> Iterator[tuple[tuple[str, str, str, str], metadata.EntryPoint]]:
    """Entry points of the group, each once (an editable install can be found twice on the path)."""
    seen = set()
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        key = (dist.name if dist else "?", dist.version if dist else "?", point.name, point.value)
        if key not in seen:
            seen.add(key)
            yield key, point


def _load(point: metadata.EntryPoint) -> PluginInfo:
    dist = point.dist
    info = PluginInfo(point.name, dist.name if dist else "?", dist.version if dist else "?", point.value, True)
    token = _loading.set(info)
    try:
        target = point.load()
        if inspect.isfunction(target):
            target()
    except (Exception, SystemExit) as error:  # whatever a stranger's module does wrong, the others still load
        text = " ".join(str(error).split())
        return dataclasses.replace(info, loaded=False, error=f"{type(error).__name__}: {text}")
    finally:
        _loading.reset(token)
    return info
