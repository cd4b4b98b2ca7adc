"""Code in docstrings uses what exists: every ``ik.name`` is public, every keyword of a call to one is a parameter of it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

import pytest
from blocks import ROOT

import implicitkit as ik

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from docstrings import is_code

SOURCES = sorted([*(ROOT / "implicitkit").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])
INDENTED = re.compile(r"(?:^ {4}.*\n|^ *\n)+", re.M)


def snippets(path: object) -> Iterator[str]:
    """The indented blocks of a file's docstrings that are Python."""
    for node in ast.walk(ast.parse(path.read_text())):  # type: ignore[attr-defined]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for block in INDENTED.findall((ast.get_docstring(node) or "") + "\n"):
                code = textwrap.dedent(block).strip("\n")
                if code and is_code(code):
                    yield code


def resolve(node: ast.expr) -> object:
    """What ``ik.a.b`` is; ``None`` for other expressions."""
    if isinstance(node, ast.Name):
        return ik if node.id == "ik" else None
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None or not (owner is ik or inspect.ismodule(owner)) else getattr(owner, node.attr)
    return None


CODE = [(path, code) for path in SOURCES for code in snippets(path)]


def test_there_is_code() -> None:
    assert len(CODE) > 20


@pytest.mark.parametrize(("path", "code"), CODE, ids=[f"{path.stem}-{i}" for i, (path, _) in enumerate(CODE)])
def test_code_in_a_docstring_uses_what_exists(path: object, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            resolve(node)
        if isinstance(node, ast.Call) and (target := resolve(node.func)) is not None and callable(target):
            known = inspect.signature(target).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                assert {k.arg for k in node.keywords if k.arg} <= set(known), f"{ast.unparse(node)} in {path}"
