"""Pages that are made while the site is built, from sources that stand elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: what a build leaves in ``docs``: not in the repository, and not looked at by tests of its pages
MADE = {"_build", "gallery", "reference", "scripts", "benchmarks.md", "modules.md"}


def write_page(path: Path, text: str) -> None:
    """``text`` into a file, which is not touched if it says that already, so that its page is not built again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_pages(folder: Path, made: Mapping[str, str]) -> None:
    """``made``, the texts by their names, and no other page."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.stem not in made:
            path.unlink()
    for name, text in made.items():
        write_page(folder / f"{name}.md", text)
