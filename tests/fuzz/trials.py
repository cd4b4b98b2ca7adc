"""The numbered trials of the fuzzer, and the line of text of each."""

from __future__ import annotations

import random

from .case import Case, draw_case
from .messy import MESSY, Mess
from .options import OPTIONS, Option

__all__ = ["Trial", "draw", "parse"]

Trial = Case | Mess | Option


def draw(number: int) -> Trial:
    """Trial number ``number``: every tenth a messy function, every fiftieth an option."""
    r = random.Random(number)
    if number % 50 == 7:
        return Option(r.choice(list(OPTIONS)))
    if number % 10 == 3:
        return Mess(r.choice(list(MESSY)), r.randrange(1000))
    return draw_case(r)


def parse(line: str) -> Trial:
    """The trial that a line describes."""
    if line.startswith("messy."):
        return Mess.parse(line)
    return Option.parse(line) if line.startswith("option.") else Case.parse(line)
