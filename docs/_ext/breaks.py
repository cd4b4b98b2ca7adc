"""Where a name in a table may be broken on a narrow screen: after a mark, ``ik.|argmin(|f, |z0)``, never inside a word."""

from __future__ import annotations

import re
from typing import Any

_CELL = re.compile(r"<td\b.*?</td>", re.S)
_WORD = re.compile(r'(<span class="pre">)([^<]*)(</span>)')
_MARK = re.compile(r"(?<=\w)([.,(=/_|]+)(?=\w|&quot;|&#39;)")


def broken(body: str) -> str:
    """A page's HTML with ``<wbr>`` in the literals of its tables."""

    def word(found: re.Match[str]) -> str:
        return found[1] + _MARK.sub(r"\1<wbr>", found[2]) + found[3]

    return _CELL.sub(lambda cell: _WORD.sub(word, cell[0]), body)


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""

    def page(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
        if "body" in context:
            context["body"] = broken(context["body"])

    app.connect("html-page-context", page)
    return {"parallel_read_safe": True}
