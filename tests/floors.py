"""``make floors``: the tests on the oldest dependencies that ``pyproject.toml`` allows, and on the newest there are.

Each in a virtual environment of its own under ``.floors/``.  torch is one version in both, unless ``--torch`` says
another: from the usual index every older release comes with CUDA (2 GB), so only the release of ``constraints.txt`` is
tested, and the requirement in ``pyproject.toml`` says no more than that.

    python tests/floors.py --only oldest
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/core",
    "tests/linear/test_linear.py",
    "tests/derivatives/test_closed_forms.py",
    "tests/solver/test_scipy_solvers.py",
    "tests/composition/test_compose.py",
    "tests/fuzz",
)
TOOLS = ("pytest>=8", "pytest-timeout>=2.2", "setuptools>=77", "tqdm>=4.60")


def requirements(oldest: bool, torch: str) -> list[str]:
    """What pip is asked for: every dependency at its floor, or without an upper bound."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = []
    for requirement in given:
        name, _, floor = requirement.partition(">=")
        if name == "torch":
            found.append(f"torch=={torch}")
        elif oldest and not floor:
            raise SystemExit(f"{name} has no floor in pyproject.toml")
        else:
            found.append(f"{name}~={floor}.0" if oldest else name)
    return found


def tested_torch() -> str:
    """The release of ``constraints.txt``."""
    found = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    if found is None:
        raise SystemExit("constraints.txt does not pin torch")
    return found.group(1)


def run(which: str, torch: str) -> int:
    """Make the environment ``which`` and run the tests in it; the exit status of pytest."""
    folder = ROOT / ".floors" / which
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", *requirements(which == "oldest", torch), *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    shown = "import torch, numpy, scipy, networkx; "
    shown += "print(*(m.__name__ + ' ' + m.__version__ for m in (torch, numpy, scipy, networkx)))"
    subprocess.run([str(python), "-c", shown], check=True)
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    return subprocess.run([str(python), "-m", "pytest", *options, *TESTS], cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("oldest", "newest"))
    parser.add_argument("--torch", default=tested_torch())
    options = parser.parse_args()
    chosen = [options.only] if options.only else ["oldest", "newest"]
    failed = [which for which in chosen if run(which, options.torch)]
    print("failed: " + ", ".join(failed) if failed else "passed: " + ", ".join(chosen))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
