"""The plugins in ``examples/`` are really installed, into environments of their own, and used from there."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PLUGIN = EXAMPLES / "custom_solver_plugin"
BROKEN = EXAMPLES / "broken_solver_plugin"


def run(*command: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=240, cwd=cwd)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with both plugins installed; torch is borrowed from this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=sys.platform != "win32")
    paths = {"base": str(home), "platbase": str(home)}
    here = sysconfig.get_path("purelib")
    borrowed = Path(sysconfig.get_path("purelib", "venv", paths)) / "borrowed.pth"
    borrowed.write_text(f"import site; site.addsitedir({here!r})\n")
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    sources = [shutil.copytree(folder, home / folder.name) for folder in (PLUGIN, BROKEN)]  # building writes there
    done = run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", *sources, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return python


def test_plugin_is_found_by_name(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "implicitkit", "list", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    plugins = {row["name"]: row for row in report["plugins"]}
    assert plugins["squarem"]["loaded"] and plugins["squarem"]["distribution"] == "implicitkit-squarem"
    solvers = {row["name"]: row for row in report["solvers"]}
    assert solvers["squarem"]["origin"] == "implicitkit-squarem"
    assert solvers["squarem"]["options"] == {"slack": 1.0}


def test_plugin_passes_the_conformance_suite(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "implicitkit", "check", "squarem", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_broken_plugin_is_told_what_to_mend(python: Path, tmp_path: Path) -> None:
    checks = "step_is_per_sample,nan_stays_in_its_sample"
    done = run(python, "-m", "implicitkit", "check", "broken_squarem", "--checks", checks, "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = {row["check"]: row for row in json.loads(done.stdout)["results"] if row["outcome"] == "failed"}
    assert "step_is_per_sample" in failed and "nan_stays_in_its_sample" in failed
    assert "row by row" in failed["nan_stays_in_its_sample"]["mend"]


@pytest.mark.slow
def test_plugin_trains(python: Path) -> None:
    pytest.importorskip("sklearn")
    done = run(python, PLUGIN / "train.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1].rstrip(",")) > 0.9, done.stdout


@pytest.mark.parametrize("module", [PLUGIN / "implicitkit_squarem.py", BROKEN / "implicitkit_broken_squarem.py"])
def test_plugin_uses_only_the_public_api_and_is_short(module: Path) -> None:
    tree = ast.parse(module.read_text())
    imported = [
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("implicitkit")
    ]
    assert not imported, "use `import implicitkit as ik` and its names"
    private = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_")]
    assert not private
    documentation = {
        node.lineno + i
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for i in range(node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    }
    lines = module.read_text().splitlines()
    code = [s for i, s in enumerate(lines, 1) if i not in documentation and s.strip() and not s.strip().startswith("#")]
    assert len(code) < 60
