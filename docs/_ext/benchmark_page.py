"""Writes the page of benchmarks from ``benchmarks/results/*.json``: nothing on it is typed by hand, losses are marked too.

A row whose JSON has a target is judged by it; rows that name who was measured (``who``) at which setting (``at``) become
plots, one for each quantity that is varied; rows that name another library (``peer``) a table with a reason for each loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
AXES = {
    "size": "unknowns a sample",
    "batch": "samples",
    "tolerance": "relative tolerance",
    "radius": "spectral radius of the Jacobian",
}


def verdict(row: dict[str, Any]) -> str:
    """``met`` or ``missed``; nothing where there is no target."""
    if row["target"] is None:
        return ""
    return "met" if (row["value"] >= row["target"]) == row["more"] or row["value"] == row["target"] else "**missed**"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows with a figure, a target and what came of it."""
    lines = ["| row | measured | target | |", "|---|---|---|---|"]
    for row in rows:
        bound = "" if row["target"] is None else f"{'at least' if row['more'] else 'at most'} {row['target']:g}"
        rest = ", ".join(
            f"{k} {_short(v)}" for k, v in row.items() if k not in ("row", "value", "unit", "target", "more")
        )
        note = " ".join(part for part in (verdict(row), f"({rest})" if rest else "") if part)
        lines.append(f"| {row['row']} | {row['value']:.3g} {row['unit']} | {bound} | {note} |")
    return lines


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def versus(rows: list[dict[str, Any]]) -> list[str]:
    """Both times on each problem, what they differ by, and why where ours takes longer than it may."""
    lines = [
        "| peer | problem | ours, ms | theirs, ms | ours / theirs | values differ by | gradients differ by | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['peer']} | {row['row']} | {row['ours_ms']:.3g} | {row['theirs_ms']:.3g} | {row['value']:.2f} | "
            f"{row['value_differs']:.0e} | {row['vjp_differs']:.0e} | {verdict(row)} {row['reason']} |"
        )
    won = sum(row["value"] < 1 for row in rows)
    return [*lines, "", f"Ours is faster on {won} of {len(rows)}, theirs on {len(rows) - won}."]


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
            ratio = min(others) / found[who[0]]["value"]
            cells = " | ".join(f"{found[w]['value']:.1f}{'' if met(found[w]) else ' (missed)'}" for w in who)
            lines.append(f"| {at:g} | {cells} | {ratio:.2f}{'' if ratio >= 1 else ' **slower**'} |")
        lines.append("")
    return lines


def page(files: list[Path]) -> str:
    """The page."""
    lines = [
        "# Benchmarks",
        "",
        "Made from `benchmarks/results/*.json`, which `make bench` writes. What we lose is marked like what we win.",
        "",
    ]
    for path in files:
        found = json.loads(path.read_text())
        machine, rows = found["machine"], found["rows"]
        versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        lines += [f"## {path.stem}", "", found["about"].strip(), ""]
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
            lines += [f"![Time by size, batch, tolerance and spectral radius](pictures/{path.stem}.png)", ""]
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
    figure, panels = plt.subplots(
        1, len(axes_there), figsize=(3.1 * len(axes_there), 3), layout="constrained", sharey=True, squeeze=False
    )
    panels = panels[0]
    for axis, panel in zip(axes_there, panels, strict=True):
        for who, style in zip(dict.fromkeys(row["who"] for row in rows), ("o-", "s--", "^:", "d-."), strict=False):
            here = [row for row in rows if row["row"] == axis and row["who"] == who]
            points = [(row["at"], row["value"]) for row in here if met(row)]
            (line,) = panel.plot(*zip(*points, strict=True), style, label=who, ms=4)
            missed = [(row["at"], row["value"]) for row in here if not met(row)]
            if missed:  # hollow, on no line: not the time of a solution
                panel.plot(*zip(*missed, strict=True), style[0], ms=6, mfc="none", color=line.get_color())
        panel.set(xlabel=AXES[axis], yscale="log", xscale="linear" if axis == "radius" else "log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("forward and backward, ms")
    panels[0].legend(fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def write(docs: Path) -> None:
    """The page and its pictures, touched only where they change."""
    files = sorted(RESULTS.glob("*.json"))
    text = page(files)
    target = docs / "benchmarks.md"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
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
