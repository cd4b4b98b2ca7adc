"""Names that pages mention exist, and tables that should be complete are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
from blocks import ROOT, blocks
from test_spelling_and_links import PAGES

import implicitkit as ik
import implicitkit_cvxpy
import implicitkit_deq

SCIPY = re.compile(r"\"(scipy\.\w+\.[\w-]+)\"")


def test_every_solver_of_scipy_that_a_page_names_is_registered() -> None:
    named = {(page.name, name) for page in PAGES for name in SCIPY.findall(page.read_text())}
    assert len(named) > 5
    known = set(ik.solvers())
    assert {(page, name) for page, name in named if name not in known} == set()


@pytest.mark.parametrize("status", list(ik.Status), ids=lambda status: status.name)
def test_the_page_of_errors_explains_every_status(status: ik.Status) -> None:
    table = (ROOT / "docs" / "howto" / "errors.md").read_text()
    (row,) = re.findall(rf"^\| `{status.name}` \|(.*)\|$", table, re.M)
    assert len(row.split("|")[0].strip()) > 5


@pytest.mark.parametrize(
    "module", [ik, ik.extend, ik.testing, implicitkit_deq, implicitkit_cvxpy], ids=lambda m: m.__name__
)
def test_the_page_of_errors_explains_every_error_and_warning(module: ModuleType) -> None:
    page = (ROOT / "docs" / "howto" / "errors.md").read_text()
    public = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    raised = {thing.__name__ for thing in public.values() if isinstance(thing, type) and issubclass(thing, Exception)}
    assert raised and {name for name in raised if f"`{name}`" not in page} == set()


LIBRARIES = [
    (ROOT / "docs" / "coming_from" / name).resolve()
    for name in re.findall(r"^- \[[^]]+\]\((\S+?)\)", (ROOT / "docs" / "coming_from" / "index.md").read_text(), re.M)
]


@pytest.mark.parametrize("page", LIBRARIES, ids=lambda page: page.stem)
def test_a_page_for_users_of_a_library_has_its_four_parts(page: Path) -> None:
    """What is the same, a complete program before and after, a table of names, and what is different on purpose."""
    text = page.read_text()
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert {"What is the same", "The same program twice", "Different on purpose"} <= set(parts)
    assert all(len(part.split()) > 25 for part in parts.values())
    programs = parts["The same program twice"]
    theirs = re.findall(r"^```\{code-block\} python\n(.*?)^```", programs, re.M | re.S)
    ours = blocks(programs)
    assert page.stem == "scipy" or theirs, "theirs: shown, since it is not installed"
    for program in theirs:
        assert "import " in program and ast.parse(program)
    assert any(block.expected for block in ours), "ours: run, and what it prints is compared"
    assert len(re.findall(r"^\| .+ \| .+ \|$", text, re.M)) > 6


# ---------------------------------------------------------------------------------------------------------------------
# Every file of the repository that a page or a source names is there.
_PATH = re.compile(
    r"(?<![\w/.-])(?:implicitkit|plugins|benchmarks|tests|docs|examples)/[\w/.-]+\.(?:py|md|json|svg|png)\b"
)
_MEANT = ("benchmarks/results/NAME.json",)  # a form, not a file


def _sources() -> list[Path]:
    folders = ("implicitkit", "plugins", "benchmarks", "examples", "docs")
    found = [p for folder in folders for end in ("*.py", "*.md") for p in (ROOT / folder).rglob(end)]
    return [p for p in (*found, *ROOT.glob("*.md")) if not {"_build", "build"} & set(p.parts)]


def test_what_is_named_is_there() -> None:
    missing = [
        f"{source.relative_to(ROOT)}: {name}"
        for source in _sources()
        for name in sorted(set(_PATH.findall(source.read_text())))
        if name not in _MEANT and not (ROOT / name).exists()
    ]
    assert missing == []


_OURS = re.compile(r"\bik\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


def _is_there(name: str) -> bool:
    found: object = ik
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_what_sources_and_their_messages_call_ours_is_there() -> None:
    """A message that says what to call names what can be called."""
    sources = [
        p for p in _sources() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in ("implicitkit", "plugins")
    ]
    named = {(p.name, name) for p in sources for name in _OURS.findall(p.read_text())}
    assert len(named) > 100
    assert {(page, name) for page, name in named if not _is_there(name)} == set()
