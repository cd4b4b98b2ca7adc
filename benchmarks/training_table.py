"""The table of trainings of ``docs/trainings.md``, from ``benchmarks/results/bench_deq_training.json``.

    python benchmarks/training_table.py            # prints it
    python benchmarks/training_table.py --write    # puts it in the place of the one that is there

``tests/plugins/deq/test_training_table.py`` compares the two.
"""

from __future__ import annotations

from typing import Any

from page_tables import PageTable

WRITTEN = {"cells.MLP": "`cells.MLP`", "residual": "residual block"}
ORDER = ("tanh", "cells.MLP", "GRU", "residual", "LayerNorm(ReLU)")
HEAD = (
    "cell, learning rate", "seeds", "samples solved", "backward solved", "loss, of the reference",
    "in `eval()`, of the reference", "decades above it, in training", "in `eval()`", "evaluations a step",
)  # fmt: skip


def _order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Warm starts first, the larger rate before the smaller."""
    found = {row["row"]: row for row in rows}
    names = [
        f"{cell}, rate {rate}, {start}" for start in ("warm", "cold") for cell in ORDER for rate in ("0.01", "0.001")
    ]
    return [found[name] for name in names if name in found]


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


TABLE = PageTable("trainings.md", "bench_deq_training", HEAD, _cells, _order)

if __name__ == "__main__":
    TABLE.main(__doc__)
