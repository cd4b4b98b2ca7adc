"""Turns the plain docstrings of implicitkit into reStructuredText.

The docstrings are written to be read in an editor: formulas and code are indented, ``Args:`` lists several names in one
line, Greek letters have their TeX names.  Here indented blocks become literal blocks, sections become definition lists,
and references to modules, which may move, become references to public names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import implicitkit as ik
import implicitkit_cvxpy
import implicitkit_deq

PUBLIC = {*implicitkit_cvxpy.__all__, *implicitkit_deq.__all__}
NAMES = """alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi psi omega
Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"""
GREEK = dict(zip(NAMES.split(), "αβγδεζηθκλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ", strict=True))
SECTION = re.compile(r"^[A-Z][A-Za-z ]{2,40}( \([^)]*\))?:$")
ITEM = re.compile(r"(?:^|(?<=[.;)]) )(\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*): ")
LITERAL = re.compile(r"(``.+?``|:\w+(?::\w+)*:`[^`]+`|(?<![\w*])\*[A-Z][^*`]+\w\*(?![\w*]))", re.S)  # titles, too
BULLET = re.compile(r"^([-*+]|\d+[.)]) ")


def restructured(text: list[str]) -> list[str]:
    """The docstring as lines of reStructuredText."""
    out: list[str] = []
    bullets = False
    for block in _paragraphs(text):
        heading = SECTION.match(block[0])
        if heading and len(block) > 1:
            out += [f".. rubric:: {block[0][:-1].replace('Args', 'Arguments')}", ""]
            body = _dedent(block[1:])
            out += list(_items(body)) if not block[0].startswith("Example") else _literal(body)
        elif set(block[0]) <= {"=", " "}:  # a table: its columns must not change their widths
            out += _literal(block)
        elif block[0].startswith((" ", "\t")) and not (bullets and len(block[0]) - len(block[0].lstrip()) < 4):
            out += _literal(_dedent(block))
        else:
            bullets = bool(BULLET.match(block[0])) or (bullets and block[0].startswith(" "))
            out += [*_inline("\n".join(block)).split("\n"), ""]
    return out


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Groups between blank lines; a section and an indented block keep theirs."""
    block: list[str] = []
    for i, line in enumerate(lines):
        if line.strip():
            indented = line.startswith(" ")
            after_blank = bool(block) and not block[-1].strip()
            belongs = indented and bool(block) and (block[0].startswith(" ") or _open(block))
            if block and ((after_blank and not belongs) or SECTION.match(line)):
                yield _stripped(block)
                block = []
            block.append(line)
        elif block and i + 1 < len(lines):
            block.append("")
    if block:
        yield _stripped(block)


def _open(block: list[str]) -> bool:
    return bool(SECTION.match(block[0]))


def _stripped(block: list[str]) -> list[str]:
    while block and not block[-1].strip():
        block.pop()
    return block


def _dedent(lines: list[str]) -> list[str]:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


def _literal(lines: list[str]) -> list[str]:
    code = "\n".join(lines)
    language = "python" if is_code(code) else "text"
    return [f".. code-block:: {language}", "", *(f"    {greek(line)}" for line in lines), ""]


def is_code(text: str) -> bool:
    """Whether an indented block is Python, not a formula: it parses, and does something that only code does."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    telling = (ast.Call, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return bool(called & PUBLIC) or (
        ("ik." in text or "import " in text or "def " in text) and any(isinstance(n, telling) for n in ast.walk(tree))
    )


def _items(lines: list[str]) -> Iterator[str]:
    """``name: text`` (several in one line, more lines indented) as a definition list; other text as it is."""
    paragraph: list[str] = []
    groups: list[list[str]] = []
    for line in [*lines, ""]:
        if paragraph and (not line.strip() or (not line.startswith(" ") and ITEM.match(line))):
            groups.append(paragraph)
            paragraph = []
        if line.strip():
            paragraph.append(line)
    for group in groups:
        joined = " ".join(line.strip() for line in group)
        parts = ITEM.split(joined)
        if parts[0].strip():
            yield from [_inline(parts[0].strip()), ""]
        for names, text in zip(parts[1::2], parts[2::2], strict=True):
            yield f"``{names}``"
            yield "    " + (_inline(text.strip()) or "-")
            yield ""


def _inline(text: str) -> str:
    """Escape what reStructuredText would read as markup outside literals; resolve references to public names."""
    parts = LITERAL.split(text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            part = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", part)
            pieces = re.split(r"(``.+?``)", part)
            pieces[::2] = [re.sub(r"(?<!\*)\*(?!\*)|\||(?<=\w)_(?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
            parts[i] = "".join(pieces)
        elif part.startswith(":"):
            parts[i] = _reference(part)
    return greek("".join(parts))


def _reference(role: str) -> str:
    kind, target = re.fullmatch(r":(.+):`~?([^`]+)`", role).groups()  # type: ignore[union-attr]
    target = re.sub(r"^ik\.", "implicitkit.", target)
    if not target.startswith("implicitkit"):
        return f":{kind}:`~{target}`" if "." in target else f"``{target}``"
    name = target.rpartition(".")[2]
    if name in ik.__all__:
        return f":py:obj:`~implicitkit.{name}`"
    return (
        f":py:obj:`~{target}`"
        if hasattr(ik, target.split(".")[1]) and target.split(".")[1] in ik.__all__
        else f"``{name}``"
    )


def greek(text: str) -> str:
    return re.sub(r"\\([A-Za-z]+)", lambda m: GREEK.get(m[1], m[0]), text)


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "data":
        lines[:] = []  # the documentation of the type of a table is not that of the table
    elif name.startswith("implicitkit"):
        lines[:] = restructured(list(lines))


def options_of(cls: type) -> str | None:
    """What a class is made with, ``(memory=8, ...)``; ``None`` where Python cannot tell.  Sphinx would show the ``__new__``
    that all parts share, which takes anything to say what was misspelt."""
    if cls.__init__ is object.__init__:  # a base class, which has none
        return "()"
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return None
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(
        r"<(?:built-in method|built-in function|function) ([\w.<>]+?)(?: of [^>]*)?(?: at 0x\w+)?>", r"\1", text
    )


def _sign(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returned: str) -> Any:
    if what == "class" and isinstance(thing, type) and issubclass(thing, ik.extend.Configured):
        return options_of(thing) or signature, None
    return None


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _sign)
    return {"parallel_read_safe": True}
