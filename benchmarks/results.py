"""What a benchmark has found, kept as JSON beside the machine it was found on: ``benchmarks/results/NAME.json``.

    results.save("bench_core", [results.row("forward", 3.2, "times a bare loop", target=4.0)])

``docs/_ext/benchmark_page.py`` makes the page of the site and the README's plot from these files.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"
PACKAGES = (
    "torch", "numpy", "scipy", "implicitkit", "torchdeq", "jax", "jaxopt", "optimistix", "cvxpylayers", "diffcp", "cvxpy",
    "qpth", "theseus-ai", "pypose", "xitorch", "torchopt", "torchdiffeq",
)  # fmt: skip


def row(
    name: str, value: float, unit: str, *, target: float | None = None, more: bool = False, **details: Any
) -> dict[str, Any]:
    """One figure: ``more``: the more the better, else the less.  ``details``: further numbers and names."""
    return {"row": name, "value": value, "unit": unit, "target": target, "more": more, **details}


def machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "date": datetime.date.today().isoformat(),
        "versions": found,
    }


def _processor() -> str:
    try:
        names = [
            x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in x
        ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def save(
    name: str,
    rows: list[dict[str, Any]],
    about: str,
    folder: Path = FOLDER,
    *,
    part: bool = False,
    chosen: bool = False,
) -> Path:
    """Write the rows of a benchmark, ``about`` being what was measured and how.

    ``part``: rows of other names stay, if they were measured on this machine with these versions; what has been installed
    beside them since does not matter.  ``chosen``: no more rows than these were asked for; then rows of another machine
    are not given up for them, and nothing is written.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    here = machine()
    if part and path.exists():
        old = json.loads(path.read_text())
        same = all(old["machine"][key] == here[key] for key in ("processor", "cores", "python", "threads"))
        if same and old["machine"]["versions"].items() <= here["versions"].items():
            rows = _replaced(old["rows"], rows)
        elif chosen:
            print(
                f"{path.name} stays as it is: it is of another machine, or other versions. All rows replace it",
                flush=True,
            )
            return path
    path.write_text(json.dumps({"about": about, "machine": here, "rows": rows}, indent=1) + "\n")
    return path


def _replaced(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {row["row"]: row for row in new}
    kept = [by_name.pop(row["row"], row) for row in old]
    return kept + list(by_name.values())
