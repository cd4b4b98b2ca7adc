"""What the experiments share: their options, their tables, their figures."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "output"
# told apart by colour-blind readers too: Okabe & Ito (2008), "Color universal design"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLUMN, PAGE = 3.4, 7.0  # inches: the widths of a column and of a page that has two, at which letters are read
_STYLE = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "figure.titlesize": 8.5,
    "legend.fontsize": 6.5,
    "pdf.fonttype": 42,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "axes.linewidth": 0.6,
}


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--quick``, ``--seed`` and ``--output`` (a folder for figures)."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small version, for tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder that figures go to")
    return parser


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: words to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    left = [all(isinstance(row[i], str) for row in rows) for i in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        parts = [c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in zip(row, widths, left, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([title, line(headings), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
    return str(value)


@contextlib.contextmanager
def figure(
    path: Path, columns: int = 1, rows: int = 1, *, title: str = "", size: tuple[float, float] | None = None
) -> Iterator[Any]:
    """Axes (one, or an array) whose figure is saved to ``path``, a PNG, and as a PDF beside it.

    One column of axes is as wide as a column of a paper, more are as wide as its page; ``size`` is in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE | {"axes.prop_cycle": plt.cycler(color=COLOURS)}):
        wide = COLUMN if columns == 1 else PAGE
        made, axes = plt.subplots(rows, columns, figsize=size or (wide, 2.5 * rows), layout="constrained")
        if title:
            made.suptitle(title)
        try:
            yield axes
            path.parent.mkdir(parents=True, exist_ok=True)
            made.savefig(path, dpi=300)
            made.savefig(path.with_suffix(".pdf"))
        finally:
            plt.close(made)
    print(f"figure: {path}, and as a PDF beside it")


def band(
    axes: Any,
    x: Sequence[float],
    runs: Sequence[Sequence[float]],
    label: str,
    between: tuple[float, float] = (0.0, 1.0),
    **style: Any,
) -> None:
    """Several runs of one thing as the line of their median and a band from one quantile to another."""
    import numpy as np

    values = np.asarray(runs, dtype=float)
    (line,) = axes.plot(x, np.median(values, 0), label=label, **style)
    low, high = np.quantile(values, between, 0)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
