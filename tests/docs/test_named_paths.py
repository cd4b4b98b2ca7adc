"""Every file of the repository that a page or a source names is there."""

from __future__ import annotations

import re
from pathlib import Path

from blocks import ROOT

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
