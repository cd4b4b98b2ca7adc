"""Wrong values for every argument of a public name: what each of them must be refused with, and how to ask.

The annotation of an argument says which of the probes mean something to it; whatever else it takes is listed by hand.  A
probe that is taken must be one of these; one that is refused must be refused at once, by an error for users
(``TypeError``, ``ValueError``), whose message has the name of the argument, or of what it was given to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["PROBES", "Row", "arguments", "complaints"]


class Odd:
    """What nothing was made for."""

    def __repr__(self) -> str:
        return "<Odd>"


#: By name, so that a table can say which of them an argument takes.
PROBES: dict[str, Any] = {
    "object": Odd(),
    "text": "no such",
    "whole": 3,
    "negative": -1,
    "nan": float("nan"),
    "list": [3],
    "none": None,
    "flag": True,
    "real": 2.5,
    "dict": {"a": 1},
    "class": dict,
    "tensor": torch.ones(2, 3, dtype=torch.float64),
}
_BY_ANNOTATION = {
    "int": {"whole"},
    "float": {"whole", "real"},
    "bool": {"flag"},
    "Tensor": {"tensor"},
    "None": {"none"},
}


@dataclass
class Row:
    """One public name: ``call(**base())`` is right.

    ``takes``: by argument, probes that mean something to it, beyond its annotation.  ``free``: arguments that may be
    anything, or that others than this library check.  ``more``: arguments that its signature does not list.  ``said``: what
    messages call an argument instead, words between bars.
    """

    call: Callable[..., Any]
    base: Callable[[], dict[str, Any]] = dict
    takes: Mapping[str, str] = field(default_factory=dict)
    free: str = ""
    more: Mapping[str, str] = field(default_factory=dict)
    said: str = "'no such'"


def arguments(row: Row) -> Iterator[tuple[str, set[str]]]:
    """The arguments of a row that are checked, each with the probes that it may take."""
    given: dict[str, str] = {}
    for name, p in inspect.signature(row.call).parameters.items():
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            given[name] = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", "")
            given[name] += " | None" * (p.default is None)
    for name, annotation in (given | dict(row.more)).items():
        if name not in row.free.split():
            allowed = set().union(*(_BY_ANNOTATION.get(word.strip("'\" "), set()) for word in annotation.split("|")))
            yield name, allowed | set(row.takes.get(name, "").split())


def complaints(name: str, row: Row) -> list[str]:
    """What is wrong with how wrong values of its arguments are met; nothing, if nothing is."""
    row.call(**row.base())
    found = []
    for argument, allowed in arguments(row):
        for probe, value in PROBES.items():
            try:
                row.call(**(row.base() | {argument: value}))
            except (TypeError, ValueError) as error:
                said = str(error)
                if not any(word in said for word in (argument, name, *row.said.split("|"))):
                    found.append(f"{argument}={probe}: named nowhere: {said[:150]}")
            except Exception as error:
                if probe not in allowed:
                    found.append(f"{argument}={probe}: {type(error).__name__}: {str(error)[:150]}")
            else:
                if probe not in allowed:
                    found.append(f"{argument}={probe}: taken without a word")
    return found
