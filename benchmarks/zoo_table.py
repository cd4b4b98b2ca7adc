"""The table of the model zoo in ``docs/migration_torchdeq.md``, from ``benchmarks/results/bench_zoo.json``.

    python benchmarks/zoo_table.py            # prints it
    python benchmarks/zoo_table.py --write    # puts it in the place of the one that is there

``tests/plugins/deq/test_zoo.py`` compares the two.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "migration_torchdeq.md"
RESULTS = ROOT / "benchmarks" / "results" / "bench_zoo.json"
TITLES = {
    "sequence": "DEQ-Transformer",
    "multiscale": "MDEQ",
    "graph": "IGNN",
    "flow": "DEQ-Flow",
    "representation": "DEQ-INR",
}
HEAD = (
    "model", "at", "here by", "error of the gradient", "cells + vjps", "ms",
    "TorchDEQ by", "error of the gradient", "cells + vjps", "ms", "time, here / TorchDEQ",
)  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Of the table."""
    return [_line(HEAD), "|---" * len(HEAD) + "|", *(_line(_cells(row)) for row in rows)]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    model, at = row["row"].split(", ")
    if "failed" in row:
        return (TITLES[model], at, "failed", *[""] * (len(HEAD) - 3))
    sides = [
        (
            row[f"{who} by"].replace("_", " "),
            f"{row[f'{who} gradient error']:.0e}",
            f"{row[f'{who} cells']} + {row[f'{who} vjps']}",
            f"{row[f'{who} ms']:.3g}",
        )
        for who in ("ours", "theirs")
    ]
    return (TITLES[model], at, *sides[0], *sides[1], f"{row['value']:.2f}")


def in_page(text: str) -> re.Match[str]:
    """Where the page has it."""
    found = re.search(r"^\| model \| at \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert found is not None, "the page has lost its table of the model zoo"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    table = "\n".join(lines(json.loads(RESULTS.read_text())["rows"])) + "\n"
    if not parser.parse_args().write:
        print(table, end="")
        return
    text = PAGE.read_text()
    old = in_page(text)
    PAGE.write_text(text[: old.start()] + table + text[old.end() :])


if __name__ == "__main__":
    main()
