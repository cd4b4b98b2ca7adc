"""What the repository promises about itself: typing marks, docstrings, who may import what, the README's commands."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import implicitkit as ik

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
from made_pages import MADE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "implicitkit").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

HOMES = ("compat.py", "graph.py", "pytrees.py", "tracers.py")  # where private names of other libraries may be
LEANS = re.compile(r"(Of|Those|That of|The same|Likewise|As :)\b")  # "Of every sample.", "The same by rows.": what is?
PRIVATE = re.compile(
    r"^(torch\._|torch\.utils\._|torch\.autograd\.forward_ad\._|forward_ad\._|fwAD\._|(scipy|cvxpy)(\.\w+)*\._)"
)


# ----------------------------------------------------------------------------------------------------------- checkers
@functools.lru_cache(maxsize=1)
def nodes(source: str) -> list[ast.AST]:
    """Of one file, for each of its checkers."""
    return list(ast.walk(ast.parse(source)))


def private_names(source: str) -> list[str]:
    """Private names of torch, SciPy or cvxpy that the code uses, by import or by attribute."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        else:
            continue
        found += [name for name in names if PRIVATE.match(name) and not re.search(r"__\w+__$", name)]
    return found


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for an attribute chain of plain names; otherwise empty."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def behind_the_api(source: str) -> list[str]:
    """What the code imports of implicitkit, or uses by ``ik.name``, that is no public name of it.

    A plugin writes ``import implicitkit as ik`` or ``from implicitkit import Name``; a module below implicitkit is open
    to it when it is itself a public name (``implicitkit.testing``).
    """
    public, found, aliases = set(ik.__all__), [], set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top == "implicitkit":
                    aliases.add(alias.asname or top)
                    if rest and rest not in public:
                        found.append(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "implicitkit":
            rest = (node.module or "").partition(".")[2]
            names = [rest] if rest else [alias.name for alias in node.names]
            found += [f"implicitkit.{name}" for name in names if name not in public]
    used = {n for n in map(dotted, (n for n in nodes(source) if isinstance(n, ast.Attribute))) if n}
    for alias, _, rest in (name.partition(".") for name in sorted(used)):
        first = rest.partition(".")[0]
        if alias in aliases and first not in public and not re.fullmatch(r"__\w+__", first):
            found.append(f"implicitkit.{first}")
    return found


def weak_spots(source: str) -> list[str]:
    """Handlers that swallow everything, unfinished places, and docstrings that lean on what stands somewhere else."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.ExceptHandler):
            everything = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            if node.type is None or (everything and all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)):
                found.append(f"line {node.lineno}: swallows every exception")
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and LEANS.match(ast.get_docstring(node) or ""):
            found.append(f"line {node.lineno}: the docstring of {node.name} does not say what it is")
    found += [
        f"line {i}: unfinished" for i, line in enumerate(source.splitlines(), 1) if re.search(r"#\s*TO" "DO", line)
    ]
    return found


def public_parts(module: object) -> Iterator[tuple[str, object]]:
    """The public functions and classes that a module defines; of classes that users see, the public members too."""
    for name, part in vars(module).items():
        if name.startswith("_") or not (inspect.isfunction(part) or inspect.isclass(part)):
            continue
        if part.__module__ != module.__name__:  # type: ignore[attr-defined]
            continue
        yield name, part
        if inspect.isclass(part) and name in ik.__all__:
            for inner, member in vars(part).items():
                if not inner.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{name}.{inner}", getattr(part, inner)


# ------------------------------------------------------------------------------------------- the checkers on bad files
@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch._functorch import eager_transforms",
        "from torch.utils import _pytree",
        "import torch.utils._pytree as pytree",
        "import torch; torch._dynamo.reset()",
        "import torch; torch._C._functorch.current_level()",
        "from torch.autograd import forward_ad; forward_ad._current_level",
        "from scipy.optimize._nonlin import newton_krylov",
        "import scipy.sparse; scipy.sparse._base",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert private_names(line)


def test_public_names_are_not_called_private() -> None:
    good = "import torch, scipy.optimize\nfrom torch.func import vjp\nprint(torch.__version__, x._hidden, self._C)"
    assert private_names(good) == []


@pytest.mark.parametrize(
    "line",
    [
        "from implicitkit.lifting.lifted import lift",
        "from implicitkit.solver.base import Method",
        "import implicitkit.rule.primitive",
        "from implicitkit import primitive",
        "import implicitkit as ik; ik.primitive.root()",
        "import implicitkit; implicitkit.foundation.compat",
        "def f():\n    from implicitkit.registry.table import _tables",
    ],
)
def test_a_plugin_that_reaches_behind_the_api_is_found(line: str) -> None:
    assert behind_the_api(line)


def test_a_plugin_that_keeps_to_the_api_is_not() -> None:
    good = (
        "import implicitkit as ik\nfrom implicitkit import Method\nik.register_solver, ik.__version__\nfrom . import x"
    )
    assert behind_the_api(good) == []


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    f()\nexcept:\n    raise",
        "try:\n    f()\nexcept Exception:\n    pass",
        "while 1:\n    try:\n        f()\n    except BaseException:\n        continue",
        "x = 1  # TODO",
        'def f():\n    """Of every sample."""',
        'class Rows:\n    """The same by rows."""',
    ],
)
def test_a_weak_spot_is_found(code: str) -> None:
    assert weak_spots(code)


# -------------------------------------------------------------------------------------------------- the repository
def test_source_files() -> None:
    faults: dict[Path, list[str]] = {}
    for path in [*LIBRARY, *PLUGINS]:
        source = path.read_text()
        found = faults[path] = weak_spots(source)
        if not ast.get_docstring(nodes(source)[0]):
            found += ["a module says what it is for"]
        if path.name not in HOMES:  # private names of other libraries belong into the compatibility modules
            found += private_names(source)
        if path in PLUGINS:  # which use nothing but the public API
            found += behind_the_api(source)
    assert len(faults) > 400 and {path: found for path, found in faults.items() if found} == {}


@pytest.mark.parametrize("name", HOMES)
def test_the_compatibility_modules_are_where_the_private_names_are(name: str) -> None:
    assert private_names((ROOT / "implicitkit" / "foundation" / name).read_text())


def test_public_names_have_docstrings() -> None:
    modules = ["implicitkit", *(m.name for m in pkgutil.walk_packages(ik.__path__, "implicitkit."))]
    loaded = [importlib.import_module(name) for name in modules if name != "implicitkit.__main__"]
    parts = [(module.__name__, name, part) for module in loaded for name, part in public_parts(module)]
    assert [(module, name) for module, name, part in parts if not inspect.getdoc(part)] == []


def test_public_names_exist_and_are_sorted_once() -> None:
    assert len(set(ik.__all__)) == len(ik.__all__)
    assert [name for name in ik.__all__ if not hasattr(ik, name)] == []
    for name in ik.__all__:
        part = getattr(ik, name)
        if inspect.isclass(part) or inspect.isfunction(part):
            assert inspect.getdoc(part), f"ik.{name} has no docstring"


def test_typing_marks() -> None:
    packages = [ROOT / "implicitkit", *(p.parent for p in (ROOT / "plugins").glob("*/__init__.py"))]
    assert [str(p) for p in packages if not (p / "py.typed").exists()] == []
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["*"]


def test_version_is_said_once() -> None:
    assert PROJECT["project"]["version"] == ik.__version__
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert ik.__version__ in headings or headings == ["Unreleased"]  # the first release is still to come


def test_declared_plugins_exist_and_existing_ones_are_declared() -> None:
    declared = PROJECT["project"].get("entry-points", {}).get("implicitkit.plugins", {})
    present = {p.parent.name for p in (ROOT / "plugins").glob("*/__init__.py")}
    assert {value.partition(":")[0].partition(".")[0] for value in declared.values()} == present


def test_all_extras_are_in_all() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    # the peers, which only a benchmark compares with, are heavy and nobody's dependency
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == set(extras) - {"all", "peers"}


def test_dependencies_of_the_tests_are_pinned() -> None:
    pinned = {
        re.split(r"[=<>!~ ;]", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [PROJECT["project"]["dependencies"], *(extras[name] for name in ("plot", "progress", "demo", "test"))]
    names = {re.split(r"[=<>!~\[ ;]", requirement)[0].lower() for group in needed for requirement in group}
    assert names - {"implicitkit", "tomli"} <= pinned  # tomli: Python 3.10 only, which is left free


def test_readme_commands_are_in_the_makefile() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    commands = set(
        re.findall(r"\bmake ([a-z]+)\b(?= |`|\n|$)", "\n".join(re.findall(r"`make \w+`|^    make .*$", readme, re.M)))
    )
    assert {"demo", "test"} <= commands
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    assert commands <= targets
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony and targets <= set(phony[1].split())


def test_ci_runs_the_test_command_of_the_readme_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "make test"]
    assert script.stat().st_mode & 0o111


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("fails", ["nothing", "ruff", "codespell", "mypy", "python"])
def test_make_test_runs_every_check_and_fails_with_any(fails: str, tmp_path: Path) -> None:
    """With stand-ins for the programs: that of mypy waits for the tests to begin."""
    began = tmp_path / "began"
    (tmp_path / "bin").mkdir()
    for name in ("pyvenv.cfg", ".test"):
        (tmp_path / name).touch()
    for name, does in {
        "ruff": "", "mypy": f"for i in $(seq 500); do test -e {began} && break; sleep 0.01; done; test -e {began} || exit 2",
        "python": f"touch {began}", "codespell": "",
    }.items():  # fmt: skip
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{does}\necho '{name} has run'\nexit {int(name == fails)}\n")
        program.chmod(0o755)
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # not of a make around us
    command = ["make", "test", f"VENV={tmp_path}"]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode == 0) == (fails == "nothing"), done.stdout + done.stderr
    said = re.findall(r"^(\w+) has run$", done.stdout, re.M)
    before = ["ruff", "codespell"]
    assert said == (before[: before.index(fails) + 1] if fails in before else [*before, "python", "mypy"])


def test_readme_has_code() -> None:
    """It is run, and what it prints is compared, in ``tests/docs``."""
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)) >= 3
    assert "Solution(32/32 converged" in text


def test_the_source_distribution_holds_what_its_tests_need(tmp_path: Path) -> None:
    """Everything that the tests import, read or run, is in it."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "output")
    shutil.copytree(
        ROOT, copy, ignore=lambda at, names: {*ignored(at, names), *(MADE if at == str(ROOT / "docs") else ())}
    )
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, timeout=300, cwd=copy)
    assert done.returncode == 0, done.stderr
    with tarfile.open(copy / "dist" / done.stdout.split()[-1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", "constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "pyproject.toml"}
    for folder in ("tests", "docs", "examples", "benchmarks", "implicitkit", "plugins"):
        files = (
            p
            for p in (copy / folder).rglob("*")
            if p.is_file() and p.suffix in (".py", ".md", ".txt", ".toml", ".typed")
        )
        wanted |= {str(p.relative_to(copy)) for p in files if ".egg-info" not in str(p) and "/reference/" not in str(p)}
    assert not wanted - held, sorted(wanted - held)[:20]
