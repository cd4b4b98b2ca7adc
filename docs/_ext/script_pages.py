"""Writes one page for each script of ``examples/``: what it says of itself, and its source.

The gallery runs while the site is built; these scripts train models or measure memory for minutes to hours, and are shown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from made_pages import write_pages

EXAMPLES = Path(__file__).parents[2] / "examples"


def scripts() -> list[Path]:
    """The scripts that somebody can run, and the modules that they are made of."""
    return sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("deq_*/*.py"), *EXAMPLES.glob("*_plugin/*.py")])


def page(path: Path) -> str:
    """Title, text and source of a script."""
    told = ast.get_docstring(ast.parse(path.read_text())) or path.stem
    title, _, rest = told.partition("\n")
    place = path.relative_to(EXAMPLES).as_posix()
    source = f"```{{literalinclude}} ../../examples/{place}\n:language: python\n```"
    return f"# {title.rstrip('.')}\n\n`examples/{place}`\n\n{rest.strip()}\n\n## Source\n\n{source}\n"


def pages() -> Iterable[tuple[str, str]]:
    """Name and text of every page, the list of them last."""
    names = []
    for path in scripts():
        names.append("-".join(path.relative_to(EXAMPLES).with_suffix("").parts))
        yield names[-1], page(path)
    listed = "\n".join(names)
    yield (
        "index",
        "# Scripts\n\nExperiments of `examples/` that are run from a shell: each says how, and how long it takes.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n",
    )


def write(folder: Path) -> None:
    """Write the pages, touching only those that changed."""
    write_pages(folder, dict(pages()))


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("config-inited", lambda app, config: write(Path(app.srcdir) / "scripts"))
    return {"parallel_read_safe": True}
