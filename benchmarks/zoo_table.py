"""The table of the model zoo in ``docs/migration_torchdeq.md``, from ``benchmarks/results/bench_zoo.json``.

    python benchmarks/zoo_table.py            # prints it
    python benchmarks/zoo_table.py --write    # puts it in the place of the one that is there

``tests/plugins/deq/test_zoo.py`` compares the two.
"""

from __future__ import annotations

from typing import Any

from page_tables import PageTable

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


TABLE = PageTable("migration_torchdeq.md", "bench_zoo", HEAD, _cells)

if __name__ == "__main__":
    TABLE.main(__doc__)
