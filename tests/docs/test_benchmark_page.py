"""The page of benchmarks is made from JSON, says where it was measured, and marks what is lost."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from runpy import run_path

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


@pytest.mark.parametrize(("name", "peer"), [("bench_qp", "cvxpylayers"), ("bench_zoo", "torchdeq")])
def test_what_compares_with_a_peer_says_that_it_is_missing(
    name: str, peer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``make bench`` goes on to the next."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == peer else found(name, *more))
    monkeypatch.setattr(sys, "argv", [name])
    run_path(str(ROOT / "benchmarks" / f"{name}.py"))["main"]()
    assert capsys.readouterr().out.startswith(f"{peer} is not installed: pip install")


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


def test_a_ratio_without_a_target_a_failure_and_a_peer_without_a_gradient(tmp_path: Path) -> None:
    peer = {"ours_ms": 2.0, "theirs_ms": 1.0, "value_differs": 1e-9, "vjp_differs": None, "reason": "a | b"}
    rows = [
        results.row("lost", 0.5, "times as fast as another", more=True),
        results.row("dear", 1.3, "times SciPy's time"),
        results.row("won", 2.0, "times as fast as another", more=True),
        results.row("no ratio", 3456.7, "ms", depth=None),
        results.row("none", float("inf"), "times by hand", target=1.5, failed="out of\nmemory | gone"),
        results.row("theirs", 2.0, "times the peer's time", target=1.2, peer="another", **peer),
        results.row("theirs too", 0.5, "times the peer's time", target=1.2, peer="another", **peer),
        results.row("size", 1.0, "ms", who="implicitkit", at=8),
        results.row("size", 1.0, "ms", who="another", at=9, residual=1.0, asked=0.1),
    ]
    about = "python benchmarks/bench_this.py [--quick]\n\nWhat was measured."
    text = benchmark_page.page([results.save("bench_this", rows, about, folder=tmp_path)])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert {name for name, line in lines.items() if "**slower**" in line} == {"lost", "dear"}
    assert lines["none"].split(" | ")[1:] == ["-", "at most 1.5", r"**failed** (out of memory \| gone) |"]
    assert r"| theirs | 2 | 1 | 2.00 | 1e-09 | - | **missed** a \| b |" in text
    assert lines["no ratio"] == "| no ratio | 3,457 ms |  | (depth -) |"
    assert "| another | 2 | 1 | 0.50 | 2.00 |" in text, "the line of the library at the head"
    assert "```sh\npython benchmarks/bench_this.py [--quick]\n```" in text
    assert lines["8"].endswith("| 1.0 | - | - |") and lines["9"].endswith("| - | 1.0 (missed) | - |")
    benchmark_page.draw(tmp_path / "bench_this.json", tmp_path / "picture.png")


def test_the_picture_of_the_readme_is_of_the_results() -> None:
    assert "docs/pictures/bench_scaling.png" in (ROOT / "README.md").read_text()
    assert {
        row["row"] for row in json.loads((benchmark_page.RESULTS / "bench_scaling.json").read_text())["rows"]
    } == set(benchmark_page.AXES)


@pytest.mark.parametrize("chosen", [True, False])
def test_rows_of_another_machine_are_not_given_up_for_a_few(tmp_path: Path, chosen: bool) -> None:
    old = results.save("bench_this", [results.row("a", 1.0, "s"), results.row("b", 2.0, "s")], "What.", folder=tmp_path)
    found = json.loads(old.read_text())
    found["machine"]["processor"] = "another"
    old.write_text(json.dumps(found))
    results.save("bench_this", [results.row("a", 3.0, "s")], "What.", folder=tmp_path, part=True, chosen=chosen)
    values = {row["row"]: row["value"] for row in json.loads(old.read_text())["rows"]}
    assert values == ({"a": 1.0, "b": 2.0} if chosen else {"a": 3.0})
