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


COMMANDS = {
    "list": ["list", "--json"],
    "a good one": ["check", "squarem"],
    "a broken one": ["check", "broken_squarem", "--checks", "step_is_per_sample,nan_stays_in_its_sample", "--json"],
}
PROGRAM = """
import contextlib, io, json, sys
from implicitkit.cli.commands import main
said = {}
for name, arguments in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    said[name] = code, out.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code of each command and what it prints, in one process."""
    done = run(python, "-c", PROGRAM, json.dumps(COMMANDS), cwd=tmp_path_factory.mktemp("user"))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_plugin_is_found_by_name(said: dict[str, tuple[int, str]]) -> None:
    code, out = said["list"]
    assert code == 0, out
    report = json.loads(out)
    plugins = {row["name"]: row for row in report["plugins"]}
    assert plugins["squarem"]["loaded"] and plugins["squarem"]["distribution"] == "implicitkit-squarem"
    solvers = {row["name"]: row for row in report["solvers"]}
    assert solvers["squarem"]["origin"] == "implicitkit-squarem"
    assert solvers["squarem"]["options"] == {"slack": 1.0}


def test_plugin_passes_the_conformance_suite(said: dict[str, tuple[int, str]]) -> None:
    code, out = said["a good one"]
    assert code == 0, out


def test_broken_plugin_is_told_what_to_mend(said: dict[str, tuple[int, str]]) -> None:
    code, out = said["a broken one"]
    assert code == 1, out
    failed = {row["check"]: row for row in json.loads(out)["results"] if row["outcome"] == "failed"}
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
