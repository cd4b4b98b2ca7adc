"""One row of the table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]


@dataclass(frozen=True)
class Mutant:
    """In ``file``, ``old`` (found exactly once) becomes ``new``; ``tests`` are arguments of pytest."""

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())[:70]}  ->  {' '.join(self.new.split())[:70]}"


def mutants(file: str, tests: str, *changes: tuple[str, str] | tuple[str, str, str]) -> list[Mutant]:
    """Rows of one file; a change may name tests of its own."""
    return [Mutant(file, change[0], change[1], change[2] if len(change) == 3 else tests) for change in changes]
