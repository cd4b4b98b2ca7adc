"""Inventories of other projects, kept as text so that the site builds offline and its links can be read and mended.

A file ``torch.txt`` has the address of the project's pages in its first line, then one name a line:
``torch.func.vjp function generated/torch.func.vjp.html``.  A trailing ``#$`` stands for ``#`` and the name.
"""

from __future__ import annotations

import zlib
from pathlib import Path


def mapping(folder: Path, built: Path) -> dict[str, tuple[str, str]]:
    """What ``intersphinx_mapping`` wants, from every ``*.txt`` in ``folder``; binary inventories are put into ``built``."""
    built.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in sorted(folder.glob("*.txt")):
        address, *rows = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        target = built / f"{path.stem}.inv"
        content = _binary(path.stem, rows)
        if not target.exists() or target.read_bytes() != content:
            target.write_bytes(content)
        found[path.stem] = (address, str(target))
    return found


def _binary(project: str, rows: list[str]) -> bytes:
    """Version 2 of Sphinx's format: four lines of text, then the names, compressed."""
    lines = []
    for row in rows:
        name, kind, place = row.split()
        lines.append(f"{name} py:{kind} 1 {place} -\n")
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    return head.encode() + zlib.compress("".join(lines).encode(), 9)
