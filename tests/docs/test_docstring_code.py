"""Code in docstrings runs, after what ``presumed.py`` says it takes as given; what its comments say of values is true.

Beside that, every ``ik.name`` in it is public and every keyword of a call to one is a parameter of it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT, run_apart
from comments import hooked, said, true
from house import statements
from presumed import COMMON, PRESUMED

import implicitkit as ik

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from docstrings import is_code, options_of, restructured

SOURCES = sorted([*(ROOT / "implicitkit").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])
INDENTED = re.compile(r"(?:^ {4}.*\n|^ *\n)+", re.M)


def snippets(path: Path) -> Iterator[tuple[str, str]]:
    """Name of the docstring and code, for each indented block of a file's docstrings that is Python."""
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for block in INDENTED.findall((ast.get_docstring(node) or "") + "\n"):
                code = textwrap.dedent(block).strip("\n")
                if code and is_code(code):
                    yield getattr(node, "name", "<module>"), code


def resolve(node: ast.expr) -> object:
    """What ``ik.a.b`` is; ``None`` for other expressions."""
    if isinstance(node, ast.Name):
        return ik if node.id == "ik" else None
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None or not (owner is ik or inspect.ismodule(owner)) else getattr(owner, node.attr)
    return None


CODE = [(path, name, code) for path in SOURCES for name, code in snippets(path)]
FILES = sorted({path for path, _, _ in CODE})


def presumed(path: Path, name: str) -> str:
    """What the docstring of a name takes as given."""
    fits = [code for key, code in PRESUMED.items() if f"{path.as_posix()}::{name}".endswith(f"/{key}")]
    assert len(fits) <= 1
    return COMMON + "".join(fits)


def test_there_is_code() -> None:
    assert len(CODE) > 35


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).with_suffix("").as_posix())
def test_code_in_docstrings_runs(path: Path, tmp_path: Path) -> None:
    page = tmp_path / f"{path.stem}.md"
    parts = [(presumed(path, name), code) for where, name, code in CODE if where == path]
    page.write_text("\n\n".join(f"```python\n{before}\n```\n\n```python\n{code}\n```" for before, code in parts))
    assert run_apart(str(page)) == []


def test_nothing_is_presumed_for_code_that_is_gone() -> None:
    there = [f"{path.as_posix()}::{name}" for path, name, _ in CODE]
    assert [key for key in PRESUMED if not any(name.endswith(f"/{key}") for name in there)] == []


@pytest.mark.parametrize(("path", "name", "code"), CODE, ids=[f"{p.stem}-{n}-{i}" for i, (p, n, _) in enumerate(CODE)])
def test_code_in_a_docstring_uses_what_exists(path: Path, name: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            resolve(node)
        if isinstance(node, ast.Call) and (target := resolve(node.func)) is not None and callable(target):
            known = inspect.signature(target).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                assert {k.arg for k in node.keywords if k.arg} <= set(known), f"{ast.unparse(node)} in {path}"


@pytest.mark.parametrize(
    ("comment", "value", "right"),
    [
        ("[1.0, 0.5]", [1.0, 0.5], True),
        ("[1.0, 0.5]", [1.0, 0.6], False),
        ("[1.0, 0.5]", [1.0], False),
        ("1 / (3 z^2 + 1) = [1/4, 1/13]", [0.25, 0.0769231], True),
        ("1 / (3 z^2 + 1) = [1/4, 1/13]", [0.25, 0.08], False),
        ("4 / 1.4", [2.857142857, 2.857142857], True),
        ("3", 3, True),
        ("3", 3.1, False),
    ],
)
def test_a_comment_about_values_is_compared(comment: str, value: object, right: bool) -> None:
    found = said(comment)
    assert found is not None and true(ast.unparse(found), value) == right


def test_a_comment_about_a_shape_is_compared() -> None:
    import torch

    for comment, right in (("(4, 2)", True), ("(batch, 2); more", True), ("(4, 3)", False), ("(batch, n, 2)", False)):
        found = said(comment)
        assert found is not None and true(ast.unparse(found), torch.zeros(4, 2)) == right
    assert said("differentiable in x") is None and said("(K - c, 1 - c K) / (1 - c^2)") is None


def test_comments_of_the_readme_are_compared() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    assert hooked(code, "README.md")[1] >= 2


def test_titles_of_books_are_slanted_and_products_are_not() -> None:
    (line,) = filter(None, restructured(["Seber (1989), *Nonlinear Regression*; a * b, *args."]))
    assert line == r"Seber (1989), *Nonlinear Regression*; a \* b, \*args."


def test_parts_are_shown_with_the_options_that_they_have() -> None:
    assert str(options_of(ik.Anderson)).startswith("(memory=8, damping=1.0, ")
    parts = [getattr(ik, name) for name in ik.__all__]
    shown = [options_of(part) for part in parts if isinstance(part, type) and issubclass(part, ik.extend.Configured)]
    assert len(shown) > 40 and all(text is not None and "*args" not in text for text in shown)
