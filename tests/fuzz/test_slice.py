"""A fixed slice of the fuzzer, in every run of the tests.

``slice.txt`` holds one trial a line.  They were drawn by the fuzzer and chosen so that every row, level, pair of adjacent
levels, holder, layout, dtype, solver and linear solver, and every level with every family of rows, comes at least once; a
defect that is mended adds its line.  Those in which nothing comes for the first time are slow tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .judge import judge
from .trials import parse

QUICK, SLOW = (Path(__file__).parent / "slice.txt").read_text().split("# of the slow tests")
LINES = [
    pytest.param(line, id=line, marks=marks)
    for part, marks in ((QUICK, ()), (SLOW.partition("\n")[2], pytest.mark.slow))
    for line in part.splitlines()
    if line and line[0] != "#"
]
#: what a trial needs beside the core (``make floors`` has no more than that)
NEEDS = dict.fromkeys(("layer.ball", "layer.convex", "layer_in_map", "empty_layer"), "cvxpy")
NEEDS |= {"solver=daqp": "daqp", "solver=clarabel": "clarabel"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("line", LINES)
def test_the_answer_is_right_or_refused(line: str) -> None:
    for part, package in NEEDS.items():
        if part in line and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    verdict = judge(parse(line), limit=30.0)
    wanted = ("right",) if not line.startswith(("messy.", "option.")) else ("right", "refused")
    assert verdict.kind in wanted, f"{verdict.kind}: {verdict.detail}\npython -m tests.fuzz --case '{line}'"
