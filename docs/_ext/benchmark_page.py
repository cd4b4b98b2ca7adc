"""Writes the page of benchmarks from ``benchmarks/results/*.json``: nothing on it is typed by hand, losses are marked too.

A row whose JSON has a target is judged by it, one that is a ratio of times without a target by 1; rows that name who was
measured (``who``) at which setting (``at``) become plots, one for each quantity that is varied; rows that name another
library (``peer``) a table with a reason for each loss, and a line for each library at the head of the page.  A row that has
``failed`` says so in place of a figure.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pictures
from made_pages import write_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
AXES = {
    "size": "unknowns a sample",
    "batch": "samples",
    "tolerance": "relative tolerance",
    "radius": "spectral radius",
}


RATIO = re.compile(r"times (as fast as|faster|\w+(?:'s|') time)")


def verdict(row: dict[str, Any]) -> str:
    """``met`` or ``missed``; of a ratio of times without a target whether it is a loss; else nothing."""
    if "failed" in row:
        return "**failed**"
    if row["target"] is None:
        lost = RATIO.match(row["unit"]) and (row["value"] < 1 if row["more"] else row["value"] > 1)
        return "**slower**" if lost else ""
    return "met" if (row["value"] >= row["target"]) == row["more"] or row["value"] == row["target"] else "**missed**"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows with a figure, a target and what came of it."""
    lines = ["| row | measured | target | |", "|---|---|---|---|"]
    for row in rows:
        bound = "" if row["target"] is None else f"{'at least' if row['more'] else 'at most'} {row['target']:g}"
        known = ("row", "value", "unit", "target", "more", "failed", "seeds")
        rest = ", ".join(f"{_words(k)} {_short(v)}" for k, v in row.items() if k not in known)
        rest = _cell(row["failed"]) if "failed" in row else rest
        note = " ".join(part for part in (verdict(row), f"({rest})" if rest else "") if part)
        value = f"{_figure(row['value'])} {row['unit']}" if math.isfinite(row["value"]) else "-"
        lines.append(f"| {_cell(row['row'])} | {value} | {bound} | {note} |")
    return lines


def _words(key: str) -> str:
    return key.replace("_", " ")


def _short(value: Any) -> str:
    return _figure(value) if isinstance(value, float) else "-" if value is None else _cell(str(value))


def _figure(value: float) -> str:
    """Three digits, no powers of ten for times of seconds and minutes."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _cell(text: str) -> str:
    """A text in one line that cannot end a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def about(text: str) -> list[str]:
    """What a benchmark says of itself, its command lines as a block."""
    paragraphs = [part.strip("\n") for part in text.strip().split("\n\n")]
    command = [all(re.match(r"\s*(python|pip) ", line) for line in part.split("\n")) for part in paragraphs]
    blocks = (
        ["```sh", *(line.strip() for line in part.split("\n")), "```", ""] if is_command else [part, ""]
        for part, is_command in zip(paragraphs, command, strict=True)
    )
    return [line for block in blocks for line in block]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each library: on how many problems ours takes less time, and the ratios at both ends."""
    lines = ["| library | problems | ours is faster on | ours / theirs, from | to |", "|---|---|---|---|---|"]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        ratios = [row["value"] for row in rows if row["peer"] == peer]
        won = sum(ratio < 1 for ratio in ratios)
        lines.append(f"| {peer} | {len(ratios)} | {won} | {min(ratios):.2f} | {max(ratios):.2f} |")
    return lines


def versus(rows: list[dict[str, Any]]) -> list[str]:
    """Both times on each problem, what they differ by, and why where ours takes longer than it may."""
    lines = [
        "| peer | problem | ours, ms | theirs, ms | ours / theirs | values differ by | gradients differ by | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['peer']} | {row['row']} | {_figure(row['ours_ms'])} | {_figure(row['theirs_ms'])} | "
            f"{row['value']:.2f} | "
            f"{_difference(row['value_differs'])} | {_difference(row['vjp_differs'])} | "
            f"{_cell(verdict(row) + ' ' + row['reason'])} |"
        )
    won = sum(row["value"] < 1 for row in rows)
    return [*lines, "", f"Ours is faster on {won} of {len(rows)}, theirs on {len(rows) - won}."]


def _difference(number: float | None) -> str:
    return "-" if number is None else f"{number:.0e}"


def met(row: dict[str, Any]) -> bool:
    """Has this run come down to what was asked for (but for the rounding of its last test)?"""
    return bool(row.get("residual", 0.0) <= 1.1 * row.get("asked", float("inf")))


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """Times of everybody at every setting, and the ratio of the best other to ours: above 1 we are faster.  Who missed the
    tolerance is not compared."""
    lines = []
    for axis, words in AXES.items():
        here = [row for row in rows if row["row"] == axis]
        if not here:
            continue
        who = list(dict.fromkeys(row["who"] for row in here))
        lines += [
            f"### By {axis}",
            "",
            f"| {words} | " + " | ".join(f"{w}, ms" for w in who) + " | best other / ours |",
        ]
        lines.append("|---" * (len(who) + 2) + "|")
        for at in dict.fromkeys(row["at"] for row in here):
            found = {row["who"]: row for row in here if row["at"] == at}
            others = [row["value"] for name, row in found.items() if name != who[0] and met(row)]
            ratio = min(others) / found[who[0]]["value"] if others and who[0] in found else None
            said = "-" if ratio is None else f"{ratio:.2f}{'' if ratio >= 1 else ' **slower**'}"
            cells = " | ".join(_time(found.get(w)) for w in who)
            lines.append(f"| {at:g} | {cells} | {said} |")
        lines.append("")
    return lines


def _time(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['value']:.1f}{'' if met(row) else ' (missed)'}"


def page(files: list[Path]) -> str:
    """The page."""
    lines = [
        "# Benchmarks",
        "",
        "Made from `benchmarks/results/*.json`, which `make bench` writes. What we lose is marked like what we win.",
        "",
    ]
    every = [row for path in files for row in json.loads(path.read_text())["rows"] if "peer" in row]
    if every:
        lines += ["## Every library at a glance", "", "Value and gradient together, at equal accuracy.", ""]
        lines += [*summary(every), ""]
    for path in files:
        found = json.loads(path.read_text())
        machine, rows = found["machine"], found["rows"]
        versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        lines += [f"## {path.stem}", "", *about(found["about"])]
        lines += [
            f"*Measured {machine['date']} on {machine['processor']}, {machine['cores']} cores (load {machine['load']}), "
            f"{machine['threads']} thread(s); {machine['system']}, Python {machine['python']}; {versions}.*",
            "",
        ]
        peers = [row for row in rows if "peer" in row]
        plain = [row for row in rows if "who" not in row and "peer" not in row]
        if peers:
            lines += [*versus(peers), ""]
        if plain:
            lines += [*table(plain), ""]
        if any("who" in row for row in rows):
            varied = ", ".join(axis for axis in AXES if any(row["row"] == axis for row in rows))
            lines += [f"![Time by {varied}](pictures/{path.stem}.png)", ""]
            lines += compared(rows)
    return "\n".join(lines)


def draw(path: Path, picture: Path) -> None:
    """Time against what is varied, a panel each, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    rows = [row for row in json.loads(path.read_text())["rows"] if "who" in row]
    axes_there = [axis for axis in AXES if any(row["row"] == axis for row in rows)]
    columns, lines = min(2, len(axes_there)), -(-len(axes_there) // 2)
    pictures.style()
    figure, panels = plt.subplots(
        lines, columns, figsize=(2.8 * columns, 2.4 * lines + 0.3), layout="constrained", sharey=True, squeeze=False
    )
    for panel in panels.flat[len(axes_there) :]:
        panel.remove()
    for axis, panel in zip(axes_there, panels.flat, strict=False):
        for who, style in zip(dict.fromkeys(row["who"] for row in rows), ("o-", "s--", "^:", "d-."), strict=False):
            here = [row for row in rows if row["row"] == axis and row["who"] == who]
            points = [(row["at"], row["value"]) for row in here if met(row)]
            x, y = zip(*points, strict=True) if points else ((), ())
            (line,) = panel.plot(x, y, style, label=who, ms=4)
            missed = [(row["at"], row["value"]) for row in here if not met(row)]
            if missed:  # hollow, on no line: not the time of a solution
                panel.plot(*zip(*missed, strict=True), style[0], ms=6, mfc="none", color=line.get_color())
        panel.set(xlabel=AXES[axis], yscale="log", xscale="linear" if axis == "radius" else "log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        points = sorted({row["at"] for row in rows if row["row"] == axis})
        if axis in ("size", "batch"):
            panel.set_xticks(points, [f"{point:g}" for point in points])
        panel.grid(alpha=0.3)
    figure.supylabel("forward and backward, ms", fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    if wrong := pictures.faults(figure):
        raise ValueError(f"{picture.name}: {'; '.join(wrong)}")
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def write(docs: Path) -> None:
    """The page and its pictures, touched only where they change."""
    files = sorted(RESULTS.glob("*.json"))
    write_page(docs / "benchmarks.md", page(files))
    for path in files:
        picture = docs / "pictures" / f"{path.stem}.png"
        drawn = any("who" in row for row in json.loads(path.read_text())["rows"])
        if drawn and (not picture.exists() or picture.stat().st_mtime < path.stat().st_mtime):
            draw(path, picture)


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("config-inited", lambda app, config: write(Path(app.srcdir)))
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    write(ROOT / "docs")
