"""Writes the reference: one page a noun, every public name on exactly one of them, and the tables of what is registered.

Only public names are used (``ik.__all__``, the ``__all__`` of public modules and plugins, the registry's listing), so that
modules may move without a change here.  A name that fits no page is put on the last one.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from docstrings import greek
from made_pages import write_pages

import implicitkit as ik

VERBS = ("solve", "root", "fixed_point", "argmin", "least_squares", "steady_state", "implicit", "solve_qp", "curve_fit")
LISTINGS = ("get_solver", "solvers", "problems", "rules", "linear_solvers", "plugins")
MEMBERS = {
    "Solution",
    "Problem",
    "Method",
    "Rule",
    "LinearSolver",
    "Operator",
    "Certificate",
    "Status",
    "DEQ",
    "Solver",
}


def _is(*bases: str) -> Any:
    classes = tuple(getattr(ik, base) for base in bases if hasattr(ik, base))
    return lambda name, part: inspect.isclass(part) and issubclass(part, classes)


def _named(*names: str) -> Any:
    return lambda name, part: name in names


def _module(name: str, part: Any) -> bool:
    return isinstance(part, ModuleType)


# page -> (title, what it is, which names); the first page that fits has the name
PAGES: dict[str, tuple[str, str, Any]] = {
    "problems": ("Problems", "What must hold at the solution.", _is("Problem")),
    "solving": (
        "Solving",
        "The verb, its short forms, and the decorator that makes any solver a layer.",
        _named(*VERBS),
    ),
    "errors": ("Errors and warnings", "What is raised, and when.", _is("ConvergenceError", "Exception", "Warning")),
    "solutions": (
        "Solutions and certificates",
        "What a solve returns, and how far it can be from the exact solution.",
        _named("Solution", "Status", "Certificate", "Stability", "certify", "Found", "LinearSolution", "Outcome"),
    ),
    "constraints": (
        "Constraints",
        "What else must hold; sets and proximal operators are on a page of their own.",
        _named("Equality", "Inequality"),
    ),
    "composition": ("Composition", "Several equations as one.", _named("compose", "tie", "Blocks")),
    "solvers": (
        "Solvers",
        "How a point is found. Every class is also known by a name; see {doc}`registered`.",
        lambda name, part: _is("Method", "BlackBox", "Strategy", "Solver")(name, part) or name == "Stage",
    ),
    "rules": ("Rules", "How the derivative is formed.", _is("Rule")),
    "linear": ("Linear solvers", "How the linear system of the derivative is solved.", _is("LinearSolver", "Operator")),
    "registry": (
        "Registry",
        "Parts of your own, and what is there.",
        lambda name, part: name.startswith("register_") or name in LISTINGS,
    ),
    "modules": ("Public modules", "", _module),
    "others": ("Further names", "For authors of parts.", lambda name, part: True),
}
PLUGINS = {
    "implicitkit_deq": "Deep equilibrium models",
    "implicitkit_cvxpy": "Convex programs by cvxpy",
}


def place() -> dict[str, list[str]]:
    """Page -> the public names on it."""
    found: dict[str, list[str]] = {page: [] for page in PAGES}
    for name in ik.__all__:
        part = getattr(ik, name)
        found[next(page for page, (_, _, fits) in PAGES.items() if fits(name, part))].append(name)
    return found


def public(module: ModuleType) -> list[str]:
    """The public names of a module: its ``__all__``, else what it defines itself."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        n for n, p in vars(module).items() if not n.startswith("_") and getattr(p, "__module__", "") == module.__name__
    ]


def entry(module: str, name: str, owner: Any) -> str:
    """The directive for one name, and its example."""
    part = getattr(owner, name)
    if module not in ("implicitkit", *PLUGINS) and (home := _home(name, part, module)):
        return f"`{name}`: see {{py:obj}}`{home}`.\n"
    members = "\n:members:" if name in MEMBERS else ""
    if inspect.isclass(part):
        kind = "autoexception" if issubclass(part, BaseException) else "autoclass"
        members += "\n:show-inheritance:"  # shapes, units and errors may stand in the class that it derives from
    elif callable(part):
        kind = "autofunction"
    else:
        kind, members = "autodata", "\n:no-value:"
    example = EXAMPLES.get(f"{module}.{name}", "")
    return f"```{{eval-rst}}\n.. {kind}:: {module}.{name}{_indent(members)}\n```\n" + (
        f"\n{example}\n" if example else ""
    )


def _home(name: str, part: Any, module: str) -> str:
    """Where the same object is documented already, ``ik.Method`` for ``ik.extend.Method``; empty if nowhere else."""
    inner = [f"implicitkit.{n}" for n in ik.__all__ if isinstance(getattr(ik, n), ModuleType) and n != "extend"]
    for place in ("implicitkit", *PLUGINS, *(inner if module == "implicitkit.extend" else ())):
        owner = importlib.import_module(place)
        if place != module and name in public(owner) and getattr(owner, name) is part:
            return f"{place}.{name}"
    return ""


def examples(path: Path) -> dict[str, str]:
    """Full name -> the blocks under its heading in the page of examples (``## ik.Anderson, ik.Picard`` serves two)."""
    found = {}
    for section in path.read_text().split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        for name in heading.split(", "):
            found[re.sub(r"^ik\.", "implicitkit.", name.strip())] = body.strip()
    return found


EXAMPLES = examples(Path(__file__).parents[1] / "examples_by_name.md")


def _indent(text: str) -> str:
    return text.replace("\n", "\n   ")


def pages() -> Iterable[tuple[str, str]]:
    """Name and text of every page."""
    placed = place()
    for page, (title, lead, _) in PAGES.items():
        names = placed[page]
        if page == "modules":
            for name in names:
                yield f"module_{name}", module_page(f"implicitkit.{name}", f"ik.{name}")
        elif names:
            yield page, f"# {title}\n\n{lead}\n\n" + "\n".join(entry("implicitkit", name, ik) for name in names)
    for plugin, title in PLUGINS.items():
        module = importlib.import_module(plugin)
        inner = [n for n in public(module) if not isinstance(getattr(module, n), ModuleType)]
        text = f"# {title}\n\n`import {plugin}`\n\n" + "\n".join(entry(plugin, n, module) for n in inner)
        yield plugin, text
        for name in public(module):
            if isinstance(getattr(module, name), ModuleType):
                yield f"{plugin}_{name}", module_page(f"{plugin}.{name}", f"{plugin}.{name}")
    yield "registered", registered()


def module_page(path: str, title: str) -> str:
    """A page for a public module."""
    module = importlib.import_module(path)
    names = [n for n in public(module) if not isinstance(getattr(module, n), ModuleType)]
    lead = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
    return f"# {title}\n\n{plain(lead)}\n\n" + "\n".join(entry(path, name, module) for name in names)


def registered() -> str:
    """The registry as tables."""
    done = subprocess.run(
        [sys.executable, "-m", "implicitkit", "list", "--json"], capture_output=True, text=True, check=True
    )
    lines = ["# What is registered", "", "Generated from `python -m implicitkit list --json`.", ""]
    for section, rows in json.loads(done.stdout).items():
        lines += [f"## {section.capitalize().replace('-', ' ')}", ""]
        keys = [k for k in rows[0] if k not in ("target", "error", "version", "loaded")]
        lines += ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        for row in rows:
            lines.append("| " + " | ".join(_cell(key, row[key]) for key in keys) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{k}={v}`" for k, v in value.items()) or "-"
    text = "any" if value is None else str(value)
    if key == "name":
        return f"`{text}`"
    return plain(greek(text).replace("|", r"\|")).replace("*args", r"\*args")


def plain(text: str) -> str:
    """A line of a docstring on a page of Markdown: names in the place of Sphinx's roles, literals in single marks."""
    return re.sub(r":[\w:]+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def write(folder: Path) -> None:
    """Write the pages, touching only those that changed."""
    made = dict(pages())
    toc = "\n".join(sorted(made, key=lambda page: (list(PAGES).index(page) if page in PAGES else 99, page)))
    made["index"] = (
        "# Reference\n\nEvery public name, from its docstring, with an example that the tests run.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n../examples_by_name\n{toc}\n```\n"
    )
    write_pages(folder, made)


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("config-inited", lambda app, config: write(Path(app.srcdir) / "reference"))
    return {"parallel_read_safe": True}
