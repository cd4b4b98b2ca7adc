"""Every code block of the README and of the pages runs, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import ROOT, blocks, run_apart, same

PAGES = sorted(
    path
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if not {"_build", "reference", "gallery", "scripts"} & set(path.relative_to(ROOT).parts)
    and blocks(path.read_text())
)


SLOW = {"bilevel", "converged", "deq"}  # tutorials that train


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in SLOW), id=str(p.relative_to(ROOT))) for p in PAGES]
)
def test_a_page_runs_and_prints_what_it_says(page: Path) -> None:
    assert run_apart(str(page)) == []


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("loss 0.501", "loss 0.5", True),
        ("loss 0.52", "loss 0.500", False),
        ("3 steps", "4 steps", False),
        ("Solution(32/32 converged; residual 3.1e-9)", "Solution(32/32 converged; ...", True),
        ("Solution(31/32 converged; residual 3.1e-9)", "Solution(32/32 converged; ...", False),
        ("a b c", "a ... c", True),
        ("a b", "a ... c", False),
        ("tensor([1.0000, 2.0000])", "tensor([1.0000, 2.0001])", True),
        ("tensor([1.0000, 2.0000])", "tensor([1.0000, 3.0000])", False),
        ("tensor(2.0000)", "tensor(2.)", True),
        ("tensor([-1., 2.])", "tensor([-1.0000, 2.0001])", True),
        ("tensor([2.1000, 0.])", "tensor([2., 0.])", False),
        ("on page 34.", "on page 35.", False),
        ("1e-9", "2e-9", True),
        ("something", "", False),
    ],
)
def test_what_is_printed_is_compared(printed: str, expected: str, equal: bool) -> None:
    assert same(printed, expected) == equal


def test_a_wrong_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\nx = 1\n```\n")
    assert len(run_apart(str(page))) == 1
    page.write_text("# Title\n\n```python\nraise ValueError('no')\n```\n")
    assert "ValueError" in run_apart(str(page))[0]
    page.write_text("# Title\n\n```python\nprint('unannounced')\n```\n")
    assert len(run_apart(str(page))) == 1
