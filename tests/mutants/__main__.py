"""``python -m tests.mutants``: make each change in a copy, run its tests (the quick ones, and where these notice nothing the
slow ones), print what lives."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
_PARTS = (
    "implicitkit",
    "plugins",
    "tests",
    "examples",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "Makefile",
)
_VERDICTS = {0: "LIVES", 1: "noticed", 2: "noticed", 5: "no tests"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose line contains this")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", help="I/N: every N-th of them, from the I-th on")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="for the tests of one mutant; beyond, it is noticed"
    )
    parser.add_argument("--stale", action="store_true", help="only say which texts are not found exactly once")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in str(m)]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    part, parts = map(int, options.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    stale = [m for m in chosen if not (ROOT / m.file).exists() or (ROOT / m.file).read_text().count(m.old) != 1]
    for mutant in stale:
        print(f"stale: {mutant}")
    if options.stale:
        return int(bool(stale))
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        verdicts = [run(m, Path(folder), options.seconds) for m in chosen if m not in stale]
    count = Counter(verdicts)
    print(f"{len(chosen)} mutants: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items())), end="")
    print(f", {len(stale)} stale")
    return int(bool(stale) or set(count) != {"noticed"})


def copy_sources(folder: Path) -> None:
    """What the tests need, into an empty folder."""
    skip = shutil.ignore_patterns("__pycache__", ".*", "_build", "output")
    for name in _PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=skip)
        elif source.exists():
            shutil.copy(source, folder / name)


def run(mutant: Mutant, folder: Path, seconds: float) -> str:
    """The verdict on one mutant, printed as it comes."""
    file = folder / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    begin = time.monotonic()
    try:
        verdict = _tests(mutant.tests, "not slow", folder, seconds)
        if verdict in ("LIVES", "no tests"):
            slow = _tests(mutant.tests, "slow", folder, seconds)
            verdict = verdict if slow == "no tests" else slow
    finally:
        file.write_text(text)
    print(f"{verdict:9s} {time.monotonic() - begin:5.0f} s  {mutant}", flush=True)
    if verdict != "noticed":
        print(f"          pytest {mutant.tests}", flush=True)
    return verdict


def _tests(selection: str, marked: str, folder: Path, seconds: float) -> str:
    path = os.pathsep.join([str(folder), str(folder / "plugins")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *shlex.split(selection)],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "noticed"
    return _VERDICTS.get(done.returncode, f"exit {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
