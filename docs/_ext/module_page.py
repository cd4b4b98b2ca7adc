"""Writes the page of modules: what each file of the library and of its plugins is for, in the words of its docstring.

python docs/_ext/module_page.py WORDS    # the lines with these words in them, in a shell
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api_pages import plain
from made_pages import write_page

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "implicitkit", *sorted(path.parent for path in (ROOT / "plugins").glob("*/__init__.py")))


@functools.cache
def purpose(path: Path) -> str:
    """The first paragraph of a module's docstring, as one line; empty if there is none."""
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(told.partition("\n\n")[0].split())


def folders() -> Iterator[tuple[Path, list[Path]]]:
    """Every package and what lies in it, ``__init__.py`` left out: the file says what the folder is."""
    for package in PACKAGES:
        for start in sorted(package.rglob("__init__.py")):
            yield start.parent, sorted(path for path in start.parent.glob("*.py") if path != start)


def name(path: Path) -> str:
    """Where a file or folder lies, seen from the root or from ``plugins``."""
    return path.relative_to(ROOT).as_posix().removeprefix("plugins/")


def page() -> str:
    """One section a folder, one row a module."""
    lines = [
        "# Every module in a line",
        "",
        "Made from the docstrings. [The house](architecture.md) says how the folders stand to each other. In each folder",
        "`base.py` says what its parts have in common, `catalogue.py` holds their names, and `builtin.py` registers ours.",
    ]
    for folder, files in folders():
        lines += ["", f"## `{name(folder)}/`", "", plain(purpose(folder / "__init__.py"))]
        if files:
            lines += ["", "| module | |", "|---|---|"]
        lines += [f"| `{path.name}` | {_cell(plain(purpose(path)))} |" for path in files]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("config-inited", lambda app, config: write_page(Path(app.srcdir) / "modules.md", page()))
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    words = [word.lower() for word in sys.argv[1:]]
    for _, files in folders():
        for path in files:
            line = f"{name(path):60} {purpose(path)}"
            if all(word in line.lower() for word in words):
                print(line)
