"""Every page is on a list of links that reads well as it stands; the site makes its tables of contents of these."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from api_pages import plain
from breaks import broken
from made_pages import MADE
from page_lists import LISTS, on_the_site

DOCS = ROOT / "docs"
WRITTEN = {
    path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if not MADE & set(path.relative_to(DOCS).parts)
}


def contents(name: str) -> list[str]:
    """What the site has in the table of contents of a list, seen from ``docs``."""
    made = on_the_site(name, (DOCS / f"{name}.md").read_text())
    entries = made.rpartition(":maxdepth: 2\n\n")[2].removesuffix("\n```\n").split("\n")
    folder = Path(name).parent
    return [
        entry[1:] if entry.startswith("/") else (DOCS / folder / entry).resolve().relative_to(DOCS).as_posix()
        for entry in entries
    ]


def test_every_page_is_on_one_list() -> None:
    listed = [entry for name in LISTS for entry in contents(name)]
    assert len(listed) == len(set(listed))
    made = {"gallery/index", "reference/index", "scripts/index", "benchmarks", "modules"}
    assert set(listed) - made == {page.removesuffix(".md") for page in WRITTEN} - {"index", "examples_by_name"}
    assert made <= set(listed)


@pytest.mark.parametrize("name", sorted(LISTS))
def test_a_list_is_links_with_a_sentence_each(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    assert "{toctree}" not in text and "{grid" not in text
    items = re.findall(r"^- .*(?:\n  .*)*", text, re.M)
    assert len(items) == len(contents(name))
    assert [item for item in items if not re.fullmatch(r"- \[[^]]+\]\(\S+\): [^:]{15,}.*\.", item, re.S)] == []


def test_a_link_to_a_source_leads_to_the_page_made_from_it() -> None:
    text = "[a](../examples/gallery/svm.py) [b](../benchmarks) [c](start.md) [d](../../examples/gallery)"
    assert on_the_site("start", text) == (
        "[a](/gallery/svm.rst) [b](/benchmarks.md) [c](start.md) [d](../../examples/gallery)"
    )
    assert on_the_site("howto/fast", "[d](../../examples/gallery)") == "[d](/gallery/index.rst)"


def test_names_in_tables_may_be_broken_after_marks_only() -> None:
    literal = '<span class="pre">{}</span>'.format
    cell = f"<td>{literal('ik.argmin(f,')} {literal('s=&quot;a_b&quot;)')} a.b</td>"
    wanted = f"<td>{literal('ik.<wbr>argmin(<wbr>f,')} {literal('s=<wbr>&quot;a_<wbr>b&quot;)')} a.b</td>"
    assert broken(cell + literal("ik.argmin")) == wanted + literal("ik.argmin")


def test_roles_of_docstrings_are_names_on_markdown_pages() -> None:
    assert plain("a :class:`~implicitkit_deq.DEQ`, :mod:`a.b` and ``x``") == "a `implicitkit_deq.DEQ`, `a.b` and `x`"


# ---------------------------------------------------------------------------------------------------------------------
# The figures of the README are those of ``benchmarks/results``.
Rows = dict[str, dict[str, Any]]


def _share(pattern: str) -> Callable[[Rows], list[float]]:
    """Our time, in units of theirs, on the rows whose name matches (they say how many times as fast we are)."""
    return lambda rows: [1 / row["value"] for name, row in rows.items() if re.fullmatch(pattern, name)]


FIGURES: dict[str, tuple[str, Callable[[Rows], list[float]], tuple[float, float]]] = {
    "| cvxpylayers | a quadratic program of 50 unknowns | 1/4 |": (
        "bench_qp",
        _share("n = 50, batch 1, qp"),
        (1 / 4, 1 / 4),
    ),
    "| the same in batches of 32 | 1/28 |": ("bench_qp", _share("n = 50, batch 32, qp"), (1 / 28, 1 / 28)),
    "| the same in batches of 128 | 1/40 |": ("bench_qp", _share("n = 50, batch 128, qp"), (1 / 40, 1 / 40)),
    "With its defaults, the gradient of cvxpylayers is off by 0.7 of its size": (
        "bench_qp",
        lambda rows: [rows["n = 50, batch 1, qp"]["cvxpylayers' error"]],
        (0.7, 0.7),
    ),
    "unknowns and rows | 1/9 to 1/3 |": ("bench_cvxpy_sparse", _share(".*"), (1 / 9, 1 / 3)),
    "| TorchDEQ | its Anderson against ours | 1/5 |": ("bench_fixed_point", _share("anderson : .*"), (1 / 5, 1 / 5)),
    "spectrum fills a disk, equal gradient error | 0.55 to 0.65 |": ("bench_deq", _share(".*: TorchDEQ"), (0.55, 0.65)),
    "heterogeneous batches, equal tolerance | 1/10 to 1/6 |": (
        "bench_deq_rows",
        _share("(outliers|heterogeneous), .*: torchdeq"),
        (1 / 10, 1 / 6),
    ),
    "training on the same samples, equal tolerance | 0.4 to 0.55 |": (
        "bench_deq_rows",
        _share("training, .*: torchdeq"),
        (0.4, 0.55),
    ),
    "equal gradient error | 0.18 |": (
        "bench_deq_rows",
        _share("(outliers|heterogeneous), 64x128: equal error"),
        (0.18, 0.18),
    ),
    "equal gradient error | 0.51 |": ("bench_deq_rows", _share("training, 64x128: equal error"), (0.51, 0.51)),
    "compiled there or by hand | 6 to 45 |": (
        "bench_peers",
        lambda rows: [row["value"] for row in rows.values() if row.get("peer") in ("jaxopt", "optimistix", "scipy")],
        (6, 45),
    ),
    "called 32 times a step in place of 184": (
        "bench_deq_training",
        lambda rows: [rows[f"tanh, rate 0.01, {start}"]["evaluations"] for start in ("warm", "cold")],
        (32, 184),
    ),
}


@pytest.mark.parametrize("words", FIGURES)
def test_a_figure_of_the_readme_is_that_of_the_results(words: str) -> None:
    name, found, (least, most) = FIGURES[words]
    assert words in " ".join((ROOT / "README.md").read_text().split())
    rows = {
        row["row"]: row for row in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    }
    values = found(rows)
    assert min(values) == pytest.approx(least, rel=0.1) and max(values) == pytest.approx(most, rel=0.1)
