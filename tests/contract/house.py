"""The house in figures, by what the code itself says: floors, circles, arrows between rooms, sizes, import cost.

    python tests/contract/house.py            # prints the table that docs/architecture.md shows
    python tests/contract/house.py --draw     # draws its two pictures anew

Imports count wherever they stand: at the top of a module, under ``TYPE_CHECKING``, inside a function.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import torch

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "implicitkit"
PLUGINS = ROOT / "plugins"

#: The floors from the ground up; a module belongs to the entry of the longest prefix.  Imports go down, or stay on a floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("foundation",),
    ("registry", "sparsity"),
    ("lifting", "linear", "manifold", "sets"),
    ("system", "solution", "prox", "relax"),
    ("problem", "reporting"),
    ("solver",),
    ("composition", "interop", "rule"),
    ("solving",),
    ("project", "diagnostics", "testing", "callbacks"),
    ("cli", "extend"),
    ("__main__", ""),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules(root: Path = LIBRARY) -> dict[str, Path]:
    """Every module below a package folder, by its dotted name."""
    return {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(root.rglob("*.py"))
    }


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree and its statements, in the order of ``ast.walk`` but without their expressions, which are most of a tree."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        yield (node := todo.popleft())
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            todo.extend(getattr(node, part, ()))


def imports(source: str, known: dict[str, Path]) -> set[str]:
    """The known modules that a source imports, wherever the import stands."""
    found: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inner]
        else:
            continue
        found.update(name for name in names if name in known)
    return found


def graph(known: dict[str, Path]) -> nx.DiGraph:
    """Modules and what they import."""
    arrows = nx.DiGraph()
    arrows.add_nodes_from(known)
    for name, path in known.items():
        arrows.add_edges_from((name, target) for target in imports(path.read_text(), known) if target != name)
    return arrows


def circles(arrows: nx.DiGraph) -> list[list[str]]:
    """Sets of modules that import each other."""
    return [sorted(c) for c in nx.strongly_connected_components(arrows) if len(c) > 1]


def room(module: str) -> str:
    """The folder (or the single file) of the library that a module lies in."""
    return module.split(".")[1] if "." in module else ""


def upward(arrows: nx.DiGraph) -> list[str]:
    """Imports of a module on a higher floor."""
    return [f"{a} -> {b}" for a, b in arrows.edges if FLOOR[room(a)] < FLOOR[room(b)]]


def between_rooms(arrows: nx.DiGraph) -> set[tuple[str, str]]:
    """Which rooms import which."""
    return {(room(a), room(b)) for a, b in arrows.edges if room(a) != room(b)}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Functions of a file and their lines of code, docstrings, comments and blank lines left out."""
    source = path.read_text()
    lines = source.splitlines()
    for node in statements(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        skip: set[int] = set()
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            skip.update(range(first.lineno, (first.end_lineno or 0) + 1))
        own = range(node.lineno, (node.end_lineno or 0) + 1)
        code = [i for i in own if i not in skip and lines[i - 1].strip() and not lines[i - 1].strip().startswith("#")]
        yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", len(code)


KIND_WORDS = (
    r"(root|fixed_point|argmin|least_squares|steady_state|constrained|quadratic_program|state|scalar|vector|program)"
)
COMPARISON = re.compile(
    rf"\b(kind|returns)\b\s*(==|!=|(not\s+)?in)\s*[(\[{{]?\s*[\"']{KIND_WORDS}[\"']|[\"']{KIND_WORDS}[\"']\s*(==|!=)\s*\w*\.?kind\b"
)


def kind_comparisons() -> list[str]:
    """Places outside ``problem/kind.py`` that compare the name of a kind with a string."""
    found = []
    for path in [*LIBRARY.rglob("*.py"), *PLUGINS.rglob("*.py")]:
        if path.name == "kind.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if COMPARISON.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    return found


@functools.cache
def makes_tensors(function: Any) -> bool:
    """Does it make a tensor, or move one, to a device that a call may name, and to torch's default where none is named?

    By what torch says of itself: its own list of what ``torch.set_default_device`` changes, and everything that takes a
    dtype and a device but no tensor, by the schemas of its operations and the signatures of its Python functions.
    """
    from torch.utils._device import _device_constructors

    if not callable(function) or not hasattr(function, "__name__"):
        return False
    if function in _device_constructors():
        return True
    with contextlib.suppress(TypeError, ValueError):
        return {"dtype", "device"} <= set(inspect.signature(function).parameters)
    packet = getattr(torch.ops.aten, function.__name__, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet is not None else []
    return any(
        {"dtype", "device"} <= {a.name for a in schema.arguments}
        and not any("Tensor" in str(a.type) for a in schema.arguments)
        for schema in schemas
    )


def _names_of_torch(tree: ast.AST) -> dict[str, str]:
    """What a source calls torch, its modules and functions: ``{"F": "torch.nn.functional", "zeros": "torch.zeros"}``."""
    found = {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {"torch": "torch"} | found


def homeless_tensors(source: str) -> list[str]:
    """Calls of torch that make a tensor without naming its device: it goes where torch's default device is."""
    tree = ast.parse(source)
    names, found = _names_of_torch(tree), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg in ("device", None) for keyword in node.keywords):
            continue
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in names:
            continue
        head, *rest = ast.unparse(node.func).split(".")
        with contextlib.suppress(AttributeError):
            parts = [*names[head].split(".")[1:], *rest]
            if makes_tensors(functools.reduce(getattr, parts, torch)):
                found.append(ast.unparse(node))
    return found


_COST = """
import sys, time
start = time.perf_counter(); import torch; middle = time.perf_counter(); before = set(sys.modules)
import implicitkit; end = time.perf_counter()
print(middle - start, end - middle, *sorted({n.partition(".")[0] for n in set(sys.modules) - before}))
"""


def import_cost() -> tuple[float, float, list[str]]:
    """Seconds for torch, seconds on top of it, and the top-level packages that come on top of what torch imports."""
    out = subprocess.run(
        [sys.executable, "-c", _COST], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    return float(out[0]), float(out[1]), out[2:]


_WAY = """
import pathlib, sys
import torch, implicitkit as ik
root, way = pathlib.Path("implicitkit").resolve(), []
z0 = torch.zeros(3, dtype=torch.float64)

def watch(frame, event, arg):
    name = frame.f_code.co_filename
    if event != "call" or not name.startswith(str(root)):
        return
    given = [frame.f_locals.get(n) for n in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    given += [x for value in given if isinstance(value, tuple) for x in value]
    if any(isinstance(v, torch.Tensor) and v.data_ptr() == z0.data_ptr() for v in given):
        short = str(pathlib.Path(name).relative_to(root))
        if not way or way[-1] != short:
            way.append(short)
    if frame.f_code.co_name == "step":
        sys.setprofile(None)

ik.fixed_point(torch.cos, z0, solver="picard")
sys.setprofile(watch)
ik.fixed_point(torch.cos, z0, solver="picard")
sys.setprofile(None)
print(*way)
"""


def way_of_the_start() -> list[str]:
    """The files through whose calls ``z0`` goes, in order, from the verb to the first line of the method."""
    found = subprocess.run([sys.executable, "-c", _WAY], capture_output=True, text=True, check=True, cwd=ROOT)
    return found.stdout.split()


def figures() -> dict[str, object]:
    """Everything that docs/architecture.md claims."""
    arrows = graph(modules())
    torch_seconds, own_seconds, packages = import_cost()
    sizes = [n for path in LIBRARY.rglob("*.py") for _, n in functions(path)]
    import implicitkit

    return {
        "circles": len(circles(arrows)),
        "upward arrows": len(upward(arrows)),
        "arrows between rooms": len(between_rooms(arrows)),
        "rooms that z0 enters before the solver's first line": len({way.split("/")[0] for way in way_of_the_start()}),
        "string comparisons on kinds outside Kind": len(kind_comparisons()),
        "longest function (lines of code)": max(sizes),
        "longest module (lines)": max(len(p.read_text().splitlines()) for p in LIBRARY.rglob("*.py")),
        "public names in ik": len(implicitkit.__all__),
        "import on top of torch, share of torch's": f"{own_seconds / torch_seconds:.1%}",
        "packages imported on top of torch": ", ".join(packages) or "none",
    }


# ------------------------------------------------------------------------------------------------------------- pictures
_INK, _PAPER, _LINE = "#1b3a57", "#e8f0f7", "#8aa4bc"


def draw_rooms(path: Path) -> None:
    """The rooms on their floors, with the arrows between them (those to the ground floor left out)."""
    import matplotlib.pyplot as plt

    rooms = {room(name) for name in modules()} - {"", "__main__"}
    rows = [[r for r in floor if r in rooms] for floor in FLOORS if any(r in rooms for r in floor)]
    place = {r: ((i + 1) / (len(row) + 1), y) for y, row in enumerate(rows) for i, r in enumerate(row)}
    figure, ax = plt.subplots(figsize=(9, 0.95 * len(rows) + 0.4))
    for a, b in sorted(between_rooms(graph(modules()))):
        if (
            a in place and b in place and FLOOR[b] > 0
        ):  # everything stands on the ground floor: arrows to it say nothing
            ax.annotate(
                "", place[b], place[a], zorder=1,
                arrowprops={"arrowstyle": "-|>", "color": _LINE, "alpha": 0.35, "lw": 0.7, "shrinkA": 12, "shrinkB": 12},
            )  # fmt: skip
    for name, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": _PAPER, "edgecolor": _INK}
        ax.text(x, y, name, ha="center", va="center", fontsize=9.5, color=_INK, bbox=box, zorder=2)
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_axis_off()
    _save(figure, path)


#: The way of the data: what happens, and where.
WAY = (
    ("solve(problem, z0, args)", "solving/verbs.py"),
    ("pytrees -> one matrix (batch, n)", "foundation/trees.py"),
    ("every tensor the function uses -> theta", "lifting/"),
    ("F(z, theta) on matrices", "system.py"),
    ("one Request: all that is no tensor", "rule/request.py"),
    ("root: (z0, theta) -> z, with its vjp, jvp, vmap", "rule/primitive.py"),
    ("Solver.run on plain tensors", "solver/"),
    ("Solution: value, status, figures", "solution.py"),
)


def draw_way(path: Path) -> None:
    """The way that ``z0`` and ``args`` take."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.6, 6.2))
    for i, (what, where) in enumerate(WAY):
        y = -i
        box = {"boxstyle": "round,pad=0.4", "facecolor": _PAPER, "edgecolor": _INK}
        ax.text(0.38, y, what, ha="center", va="center", fontsize=10, color=_INK, bbox=box)
        ax.text(0.80, y, where, ha="left", va="center", fontsize=9, color=_INK, family="monospace")
        if i:
            ax.annotate("", (0.38, y + 0.27), (0.38, y + 0.73), arrowprops={"arrowstyle": "-|>", "color": _INK})
    back = {"arrowstyle": "-|>", "color": "#b5523b", "connectionstyle": "arc3,rad=-0.35", "lw": 1.4}
    ax.annotate("", (0.0, -5.0), (0.0, -7.0), arrowprops=back)
    ax.text(-0.13, -6.0, "derivatives", ha="center", va="center", rotation=90, fontsize=9, color="#b5523b")
    ax.set_xlim(-0.16, 1.05)
    ax.set_ylim(-7.5, 0.5)
    ax.set_axis_off()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    print(path.relative_to(ROOT))


if __name__ == "__main__" and "--draw" in sys.argv:
    draw_rooms(ROOT / "docs/pictures/rooms.svg")
    draw_way(ROOT / "docs/pictures/way.svg")
elif __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:72} {value}")
