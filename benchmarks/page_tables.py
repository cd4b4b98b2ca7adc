"""Tables of pages of ``docs`` that are made from the rows of a benchmark."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class PageTable:
    """One table; its headings tell it from the others of its page.

    ``page``: below ``docs``. ``results``: the name of a file in ``benchmarks/results``. ``cells``: of one row.
    ``order``: which rows are shown, and in which order.
    """

    page: str
    results: str
    head: tuple[str, ...]
    cells: Callable[[dict[str, Any]], tuple[str, ...]]
    order: Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]] = iter

    @property
    def path(self) -> Path:
        """The page."""
        return ROOT / "docs" / self.page

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured."""
        rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{self.results}.json").read_text())[
            "rows"
        ]
        return rows

    def lines(self) -> list[str]:
        """Of the table, as it is to be."""
        return [_line(self.head), "|---" * len(self.head) + "|", *(_line(self.cells(r)) for r in self.order(self.rows))]

    def in_page(self) -> re.Match[str]:
        """Where the page has it."""
        found = re.search(rf"^{re.escape(_line(self.head))}\n(?:\|.*\n)+", self.path.read_text(), re.MULTILINE)
        assert found is not None, f"{self.page} has lost its table of {self.results}"
        return found

    def main(self, doc: str | None) -> None:
        """Print it, or with ``--write`` put it in the place of the one that is there."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--write", action="store_true")
        table = "\n".join(self.lines()) + "\n"
        if not parser.parse_args().write:
            print(table, end="")
            return
        text, old = self.path.read_text(), self.in_page()
        self.path.write_text(text[: old.start()] + table + text[old.end() :])


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
