"""Every page is on a list of links that reads well as it stands; the site makes its tables of contents of these."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from breaks import broken
from page_lists import LISTS, on_the_site

DOCS = ROOT / "docs"
WRITTEN = {
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not {"_build", "gallery", "reference", "scripts", "benchmarks.md"} & set(path.relative_to(DOCS).parts)
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
    made = {"gallery/index", "reference/index", "scripts/index", "benchmarks"}
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
