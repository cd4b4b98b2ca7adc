"""A test that asserts nothing cannot fail: each asserts, by itself or by a function that it calls."""

from __future__ import annotations

import ast
import gc
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
_ASSERTS = re.compile(
    r"^\s*(assert|raise)\b|\b(raises|warns|fail|assert_close|assert_allclose|assert_array_equal|gradcheck|gradgradcheck"
    r"|check_solver|check_rule|check_linear_solver)\(|\b(simplefilter|filterwarnings)\(\"error\"",
    re.M,
)
_CALLS = re.compile(r"\b(\w+)\(")
_OTHERWISE = {  # whose assertions are not called by name
    "test_accepts": "what is refused raises",
    "test_conformance": "the check is the parameter",
    "test_conformance_of_integrate": "the check is the parameter",
    "test_linear_solvers": "the check is the parameter",
    "test_rules": "the check is the parameter",
    "test_solvers_of_programs": "the check is the parameter",
    "test_a_sharded_cell": "the functions are started as processes",
    "test_a_sharded_layer": "the functions are started as processes",
}


def _functions(text: str) -> dict[str, str]:
    """The functions of a file at its top, and the text of each."""
    lines = text.splitlines()
    found = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return {node.name: "\n".join(lines[node.lineno : node.end_lineno]) for node in found}


def _asserts(body: str, known: dict[str, str], seen: tuple[str, ...] = ()) -> bool:
    """Does it assert, or call what does?  ``known``: the functions of the file, and those of the tables it may import."""
    if _ASSERTS.search(body):
        return True
    called = {name for name in _CALLS.findall(body) if name in known and name not in seen}
    return any(_asserts(known[name], known, (*seen, name)) for name in called)


def _idle(text: str, shared: dict[str, str]) -> list[str]:
    """The tests of a file that assert nothing."""
    own = _functions(text)
    return [name for name, body in own.items() if name.startswith("test_") and not _asserts(body, shared | own)]


def test_each_asserts() -> None:
    shared: dict[str, str] = {}
    for path in [*TESTS.glob("tables/*.py"), *TESTS.glob("docs/*.py"), *TESTS.glob("*/conftest.py")]:
        shared |= _functions(path.read_text())
    idle = {name: path for path in sorted(TESTS.rglob("test_*.py")) for name in _idle(path.read_text(), shared)}
    assert {name: str(path.relative_to(TESTS)) for name, path in idle.items() if name not in _OTHERWISE} == {}
    assert sorted(_OTHERWISE) == sorted(idle), "what asserts by name needs no exception"


def test_one_that_does_not_is_found() -> None:
    helpers = "def helper(x):\n    assert x\n\ndef other(x):\n    return other(x)\n\n"
    bodies = {"test_a": "helper(1)", "test_b": "other(1)", "test_c": "1 == 2", "test_d": "raises(1)"}
    text = "\n".join(f"def {name}():\n    {body}\n" for name, body in bodies.items())
    assert _idle(helpers + text, {}) == ["test_b", "test_c"]
    assert _idle(text, _functions(helpers)) == ["test_b", "test_c"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("third", range(5))
@pytest.mark.parametrize(("first", "second"), [(a, b) for a in range(2) for b in range(3)])
def test_one_row_in_three_is_quick(request: pytest.FixtureRequest, first: int, second: int, third: int) -> None:
    """Places are counted along the two axes of this table: the first has two names."""
    marked = request.node.get_closest_marker("slow") is not None
    assert marked == bool((3 * first + second + third) % 3)


def test_what_is_collected_is_not_searched_for_garbage() -> None:
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
