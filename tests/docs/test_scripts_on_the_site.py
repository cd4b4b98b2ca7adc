"""Every script of ``examples/`` is on the site: in the gallery, which runs it, or on a page that shows it."""

from __future__ import annotations

import sys

from blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import script_pages


def test_every_script_has_a_page() -> None:
    shown = {path.relative_to(ROOT).as_posix() for path in script_pages.scripts()}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py")}
    assert {path for path in there - shown if not path.startswith("examples/gallery/")} == set()
    assert {path for path in there if path.startswith("examples/deq_")} <= shown


def test_a_page_has_a_title_its_text_and_its_source() -> None:
    pages = dict(script_pages.pages())
    for name, text in pages.items():
        assert text.startswith("# ") and len(text.splitlines()[0]) > 5, name
        assert name == "index" or "```{literalinclude} ../../examples/" in text, name
    assert all(f"\n{name}\n" in pages["index"] for name in pages if name != "index")
