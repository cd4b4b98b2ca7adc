"""Pages that are lists of links serve twice: as they stand on a code host, and as tables of contents of the site.

Two things are done to a page while Sphinx reads it.  A list of links (``- [Title](page.md): a sentence``) on one of
``LISTS`` gets a hidden ``toctree`` of the same pages in the same order.  And a link to a source from which the site makes
pages leads to those pages: the source is there before a build, the page only after it.
"""

from __future__ import annotations

import re
from typing import Any

LISTS = {"index", "more", "tutorials/index", "howto/index", "coming_from/index", "decisions/index"}
#: a source, seen from ``docs``, and the page that is made from it; the first that fits
MADE = (
    (r"\.\./examples/gallery/(\w+)\.py", r"/gallery/\1.rst"),
    (r"\.\./examples/gallery", "/gallery/index.rst"),
    (r"\.\./examples", "/scripts/index.md"),
    (r"\.\./benchmarks", "/benchmarks.md"),
    (r"\.\./implicitkit", "/modules.md"),
    (r"examples_by_name\.md", "/reference/index.md"),
)
_ITEM = re.compile(r"^- \[[^]]+\]\((\S+?)\)", re.M)
_LINK = re.compile(r"\]\(([^()\s:#]+)\)")


def _made(target: str, depth: int) -> str:
    """Where a link of a page ``depth`` folders below ``docs`` leads on the site."""
    up = "../" * depth
    if target.startswith(up):
        for source, page in MADE:
            if found := re.fullmatch(source, target[len(up) :]):
                return found.expand(page)
    return target


def on_the_site(name: str, text: str) -> str:
    """A page as the site reads it; ``name`` is that of the document, without its ending."""
    text = _LINK.sub(lambda link: f"]({_made(link[1], name.count('/'))})", text)
    if name in LISTS:
        pages = "\n".join(re.sub(r"\.(md|rst)$", "", page) for page in _ITEM.findall(text))
        text += f"\n```{{toctree}}\n:hidden:\n:maxdepth: 2\n\n{pages}\n```\n"
    return text


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""

    def read(app: Any, name: str, text: list[str]) -> None:
        if str(app.env.doc2path(name)).endswith(".md"):
            text[0] = on_the_site(name, text[0])

    app.connect("source-read", read)
    return {"parallel_read_safe": True}
