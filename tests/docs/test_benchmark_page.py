"""The page of benchmarks is made from JSON, says where it was measured, and marks what is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from blocks import ROOT

sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "benchmarks")]
import benchmark_page  # noqa: E402
import results  # noqa: E402

FILES = sorted(benchmark_page.RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_was_measured(path: Path) -> None:
    found = json.loads(path.read_text())
    assert found["about"].strip() and found["rows"]
    assert {"processor", "cores", "threads", "python", "versions", "date", "load"} <= set(found["machine"])
    assert (ROOT / "benchmarks" / path.with_suffix(".py").name).exists()


def test_the_page_has_every_row_and_marks_losses(tmp_path: Path) -> None:
    rows = [
        results.row("won", 1.0, "ms", target=2.0),
        results.row("lost", 3.0, "ms", target=2.0),
        results.row("fast", 5.0, "times faster", target=4.0, more=True),
        results.row("slow", 3.0, "times faster", target=4.0, more=True),
        *(results.row("size", t, "ms", who=w, at=8) for w, t in (("implicitkit", 2.0), ("another", 1.0))),
        results.row("size", 0.1, "ms", who="a third", at=8, residual=1e-3, asked=1e-4),
    ]
    text = benchmark_page.page([results.save("bench_this", rows, "What was measured.", folder=tmp_path)])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "met" in lines["won"] and "met" in lines["fast"]
    assert "**missed**" in lines["lost"] and "**missed**" in lines["slow"]
    assert "0.50 **slower**" in lines["8"] and "0.1 (missed)" in lines["8"], "who missed the tolerance is not compared"
    benchmark_page.draw(tmp_path / "bench_this.json", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_picture_of_the_readme_is_of_the_results() -> None:
    assert "docs/pictures/bench_scaling.png" in (ROOT / "README.md").read_text()
    assert {
        row["row"] for row in json.loads((benchmark_page.RESULTS / "bench_scaling.json").read_text())["rows"]
    } == set(benchmark_page.AXES)
