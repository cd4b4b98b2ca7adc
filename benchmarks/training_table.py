"""The table of trainings of ``docs/trainings.md``, from ``benchmarks/results/bench_deq_training.json``.

    python benchmarks/training_table.py            # prints it
    python benchmarks/training_table.py --write    # puts it in the place of the one that is there

``tests/plugins/deq/test_training_table.py`` compares the two.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trainings.md"
RESULTS = ROOT / "benchmarks" / "results" / "bench_deq_training.json"
WRITTEN = {"cells.MLP": "`cells.MLP`", "residual": "residual block"}
ORDER = ("tanh", "cells.MLP", "GRU", "residual", "LayerNorm(ReLU)")
HEAD = (
    "cell, learning rate", "seeds", "samples solved", "backward solved", "loss, of the reference",
    "in `eval()`, of the reference", "decades above it, in training", "in `eval()`", "evaluations a step",
)  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Of the table, warm starts first, the larger rate before the smaller."""
    found = {row["row"]: row for row in rows}
    names = [
        f"{cell}, rate {rate}, {start}" for start in ("warm", "cold") for cell in ORDER for rate in ("0.01", "0.001")
    ]
    return [_line(HEAD), "|---" * len(HEAD) + "|", *(_line(_cells(found[name])) for name in names if name in found)]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    cell, rate, start = row["row"].split(", ")
    return (
        f"{WRITTEN.get(cell, cell)}, {rate.removeprefix('rate ')}{', from zero' if start == 'cold' else ''}",
        str(len(row["seeds"]["seed"])),
        f"{100 * row['solved']:.1f} %",
        f"{100 * row['backward']:.1f} %",
        f"{row['loss']:.1e}, {row['bounded']:.1e}",
        f"{row['evaluated']:.1e}, {row['bounded evaluated']:.1e}",
        row["decades"].replace("+-", "±"),
        row["evaluated_decades"].replace("+-", "±"),
        f"{row['evaluations']:.0f}",
    )


def in_page(text: str) -> re.Match[str]:
    """Where the page has it."""
    found = re.search(r"^\| cell, learning rate \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert found is not None, "the page has lost its table of trainings"
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
