"""Formulas as MathML, made while the site is built: every browser draws them, with no script and no network.

The converter is docutils' own.  A formula that it cannot read is a warning, and so stops the build.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

log = logging.getLogger(__name__)
#: What docutils' converter does not know, in words that it knows.
SAME = {
    r"\tfrac": r"\frac",
    r"\dfrac": r"\frac",
    r"\lVert": r"\|",
    r"\rVert": r"\|",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\Longrightarrow": r"\Rightarrow",
    r"\dots": r"\ldots",
    r"\Big": "",
    r"\,": r"\;",
}


def mathml(node: nodes.Node, *, block: bool) -> str:
    """The formula of a node as MathML; as its TeX, with a warning, where that fails."""
    tex = node.astext()
    for name, other in SAME.items():
        tex = tex.replace(name, other)
    tex = re.sub(r"\\frac\s*(\w)\s*(\w)(?![{\w])", r"\\frac{\1}{\2}", tex)  # \frac12: the converter wants braces
    try:
        # a bar or a dot as a script above: as an accent it is drawn into the letter where no font for formulas is there
        return latex2mathml.tex2mathml(tex, as_block=block).replace(' accent="true"', "")
    except (MathError, ValueError, KeyError, IndexError, TypeError) as error:
        log.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{node.astext()}</code>"


def _inline(translator: Any, node: nodes.Node) -> None:
    translator.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.Node) -> None:
    number = ""
    if node.get("number"):
        number = f'<span class="eqno">({node["number"]})</span>'
    translator.body.append(f'<div class="math">{number}{mathml(node, block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True}
