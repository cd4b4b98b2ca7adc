"""Tables of names: one for each noun (solvers, rules, linear solvers, problems), each knowing nothing of what it holds."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from implicitkit.foundation.errors import UnknownNameError
from implicitkit.foundation.options import check_arguments, flag
from implicitkit.foundation.wording import did_you_mean, kind_of, option_error
from implicitkit.registry import plugins

T = TypeVar("T")

_LISTED = 40  # so many names are listed, of more the nearest

_defaults: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()

REQUIRED = ("rtol", "atol", "max_steps")
"""The keywords that every black-box solver is called with; all its others are options."""


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
        """The first paragraph of the target's docstring, on one line, as far as its last whole sentence."""
        text = inspect.getdoc(self.target) or ""
        if dataclasses.is_dataclass(self.target) and inspect.isclass(self.target):
            written = f"{self.target.__name__}{inspect.signature(self.target)}".removesuffix(" -> None")
            text = "" if text == written else text  # what @dataclass writes says nothing
        paragraph = " ".join(text.split("\n\n", 1)[0].split())
        if not paragraph or paragraph.endswith("."):
            return paragraph
        whole = paragraph.rpartition(". ")[0] or paragraph.rstrip(":,;")  # what follows leads to a formula
        return f"{whole}."

    @property
    def options(self) -> dict[str, Any]:
        """The options it can be configured with and their defaults (``inspect.Parameter.empty``: none)."""
        return {p.name: p.default for p in option_parameters(self.target)[0]}


class Table:
    """The parts of one noun by name.

    Args:
        kind: the plural, ``"solvers"``. noun: what messages call one of them.
    """

    def __init__(self, kind: str, noun: str) -> None:
        self.kind, self.noun = kind, noun
        self.entries: dict[str, Entry] = {}
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------------ registering
    def add(self, entry: Entry, override: bool) -> None:
        """Add an entry.

        Raises:
            ValueError: the name is taken by something else and ``override`` is false, or a plugin that is being loaded
                would replace another's.
        """
        if entry.origin != "implicitkit":  # our own rooms do not wait for each other
            plugins.prepare(entry.name)
        with self._lock:
            old = self.entries.get(entry.name)
            if old is not None and old.target is not entry.target and not _redefined(old.target, entry.target):
                first = f"{self.noun} {entry.name!r} is already registered, by {_where(old)}"
                if not override:
                    raise ValueError(f"{first}. Choose another name, or pass override=True to replace it.")
                if plugins.loading() is not None and old.origin != entry.origin:
                    # Plugins load at the first unknown name: what a known name means must not depend on that moment.
                    raise ValueError(f"{first}; a plugin cannot replace it while it is loaded through its entry point")
            self.entries[entry.name] = entry

    def register(self, name: str, override: bool, method: str, base: str) -> Callable[[T], T]:
        """A decorator that registers a class with this ``method`` under ``name`` and sets the class's ``name``; ``base``:
        what such classes derive from."""
        check_name(name)
        check_arguments(f"register {name!r}", override=(flag(), override))

        def register(cls: T) -> T:
            if not inspect.isclass(cls):
                raise TypeError(f"a {self.noun} is a class; cannot register {describe_value(cls)} as {name!r}")
            if not hasattr(cls, method):
                raise TypeError(
                    f"cannot register the class {cls.__name__} as {self.noun} {name!r}: it must be a subclass of {base}, "
                    f"with a method {method}"
                )
            entry = Entry(self.kind, name, cls, origin(cls))
            self.add(entry, override)
            self.set_name(cls, entry)
            return cls

        return register

    def set_name(self, cls: Any, entry: Entry) -> None:
        """Give a registered class its name; a second name for the same class is an alias."""
        own = cls.__dict__.get("name")
        if not any(e.target is cls and e.name == own for e in self.entries.values()):
            cls.name = entry.name

    # ------------------------------------------------------------------------------------------------------- looking up
    def find(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            UnknownNameError: there is none; names the nearest.
        """
        if name not in self.entries:
            plugins.prepare(name)
        if name not in self.entries:
            plugins.load_all()
        if name in self.entries:
            return self.entries[name]
        text = f"unknown {self.noun} {name!r}."
        near = _nearest(name, sorted(self.entries))
        if near:
            text += f" Did you mean {near[0]!r}?"
        others = [t.noun for t in TABLES.values() if t is not self and name in t.entries]
        if others:
            text += f" (There is a {' and a '.join(others)} of that name.)"
            if self.kind == "rules" and "linear solver" in others:
                text += f" A rule uses it: rule=ik.Implicit(linear_solver={name!r})."
        listed = sorted(self.entries)
        if len(listed) > _LISTED:
            some = [*near, *(n for n in listed if n not in near)][:5]
            text += f" Registered {self.noun}s: {', '.join(some)} and {len(listed) - len(some)} more: "
            text += f"`python -m implicitkit list {self.kind}`."
        else:
            text += f" Registered {self.noun}s: {', '.join(listed) or 'none'}."
        text += " Your own parts are registered when the module that defines them is imported."
        broken = [str(p) for p in plugins.broken()]
        if broken:
            text += f" Plugins that failed to load: {'; '.join(broken)}."
        raise UnknownNameError(text)

    def get(self, value: Any, options: dict[str, Any], attribute: str, example: str) -> Any:
        """The configured object for a name, a class, or an object that has ``attribute`` (which passes through)."""
        if isinstance(value, str):
            entry = self.find(value)
            return instantiate(entry.target, options, entry.name)
        if not hasattr(value, attribute) or value is None:
            raise TypeError(
                f"{self.noun.replace(' ', '_')} must be a registered name or a configured object such as {example}; "
                f"got {describe_value(value)}"
            )
        if isinstance(value, type):
            return instantiate(value, options)
        if options:
            refuse_options(value, options)
        return value

    def names(self) -> list[str]:
        """All names, plugins' included, sorted."""
        plugins.load_all()
        return sorted(self.entries)


TABLES = {
    "solvers": Table("solvers", "solver"),
    "rules": Table("rules", "rule"),
    "linear_solvers": Table("linear_solvers", "linear solver"),
    "problems": Table("problems", "problem"),
}
"""The table of each noun."""


def describe(kind: str) -> list[Entry]:
    """The entries of one kind (``"solvers"``, ``"rules"``, ``"linear_solvers"``, ``"problems"``), sorted by name."""
    kind = kind.replace("-", "_")
    check_choice("kind", kind, tuple(TABLES))
    plugins.load_all()
    entries = sorted(TABLES[kind].entries.items())
    return [dataclasses.replace(entry, origin=plugins.owner(entry.origin)) for _, entry in entries]


# ---------------------------------------------------------------------------------------------------------- configuring
def instantiate(cls: Any, options: dict[str, Any], name: str | None = None) -> Any:
    """``cls(**options)``; an option it does not have is refused by name, with the nearest it has."""
    if not options:
        return _default(cls)
    known, anything = option_parameters(cls)
    for option in options:
        if not anything and option not in {p.name for p in known}:
            raise TypeError(option_error(repr(name or cls.__name__), option, [p.name for p in known]))
    return cls(**options)


def _default(cls: Any) -> Any:
    """``cls()``: of a frozen dataclass, which cannot change, always the same object."""
    if not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
        return cls()
    found = _defaults.get(cls)
    if found is None:
        found = _defaults[cls] = cls()
    return found


def refuse_options(value: Any, options: dict[str, Any]) -> None:
    """Raise if options are given for an object that is configured already."""
    if options:
        raise TypeError(f"{', '.join(options)}: this {type(value).__name__} is configured already; options go there")


def option_parameters(target: Any) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of a class or black-box function that are options, and whether it takes any other keyword."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return [], True
    if not inspect.isclass(target):
        parameters = [p for p in parameters[2:] if p.name not in REQUIRED]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def with_option(kind: str, option: str) -> dict[str, str]:
    """Names of the registered classes of one kind that have an option of this name, each with how it is written."""
    found = [e for e in describe(kind) if inspect.isclass(e.target) and option in e.options]
    return {e.target.__name__: ("ik." if e.origin == "implicitkit" else "") + e.target.__name__ for e in found}


# ------------------------------------------------------------------------------------------------------------- details
def origin(target: Any) -> str:
    """The distribution of the plugin that is being loaded, or the top-level module that ``target`` comes from."""
    plugin = plugins.loading()
    if plugin is not None:
        return plugin.distribution
    return str(getattr(target, "__module__", None) or "?").partition(".")[0]


def describe_value(value: Any) -> str:
    """A value for messages."""
    if callable(value):
        return str(getattr(value, "__qualname__", repr(value)))
    return f"{value!r} ({kind_of(value)})"


def check_name(name: Any) -> None:
    """Raise unless ``name`` may be registered."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.\-]*", name) or name.endswith("."):
        raise ValueError(
            f"a name is a non-empty string of letters, digits, '_', '-' and '.', starting with a letter; got {name!r}"
        )


def check_choice(option: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``; names the nearest."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{option} must be one of {listed}; got {value!r}.{did_you_mean(value, choices)}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _nearest(name: str, names: list[str]) -> list[str]:
    """Up to five names that may be meant, nearest first: the same but for case and dashes, the same last part of a dotted
    name, or alike."""
    wanted = _plain(name)
    plain = {n: _plain(n) for n in names}
    same = [n for n in names if plain[n] == wanted]
    last = [n for n in names if "." not in name and plain[n].rpartition(".")[2] == wanted]
    alike = difflib.get_close_matches(wanted, [*plain.values()], 5, 0.6)
    found = [*same, *last, *(n for a in alike for n in names if plain[n] == a)]
    return list(dict.fromkeys(found))[:5]


def _redefined(old: Any, new: Any) -> bool:
    """Is ``new`` the same definition run once more (a notebook cell, a reloaded module)?"""
    places = [(getattr(t, "__module__", None), getattr(t, "__qualname__", "<locals>")) for t in (old, new)]
    return places[0] == places[1] and "<locals>" not in places[0][1] and places[0][1] != "<lambda>"


def _where(entry: Entry) -> str:
    target = entry.target
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', type(target).__name__)}"
