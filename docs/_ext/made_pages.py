"""Pages that are made while the site is built, from sources that stand elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_pages(folder: Path, made: Mapping[str, str]) -> None:
    """``made``, the texts by their names, and no other page; one that has not changed is not touched, so that it is not
    built again."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.stem not in made:
            path.unlink()
    for name, text in made.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
