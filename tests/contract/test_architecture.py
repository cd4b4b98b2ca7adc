"""The laws of the house (docs/architecture.md), each held by a test; ``house.py`` beside this file does the measuring."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import house
import networkx as nx
import pytest
import torch

import implicitkit as ik

sys.path.insert(0, str(house.ROOT / "docs" / "_ext"))
from module_page import folders, page, purpose

MODULES = house.modules()
PUBLIC_MODULES = [m for m in (getattr(ik, n) for n in ik.__all__) if isinstance(m, ModuleType)]
PLUGIN_FILES = sorted(house.PLUGINS.rglob("*.py"))


@functools.cache
def _arrows() -> nx.DiGraph:
    return house.graph(MODULES)


# ---------------------------------------------------------------------------------------------------------------- law 1
def test_every_module_has_a_floor() -> None:
    assert {house.room(name) for name in MODULES} <= set(house.FLOOR)
    assert {room for room in house.FLOOR if room} <= {house.room(name) for name in MODULES}, "a floor without a room"


def test_there_is_no_circle_of_imports() -> None:
    assert house.circles(_arrows()) == []


def test_no_circle_in_the_plugins() -> None:
    for folder in sorted(p for p in house.PLUGINS.iterdir() if (p / "__init__.py").exists()):
        assert house.circles(house.graph(house.modules(folder))) == [], folder.name


def test_imports_go_down() -> None:
    assert house.upward(_arrows()) == []


def test_imports_count_wherever_they_stand() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from implicitkit.solving.verbs import solve\n"
        "def f():\n    import implicitkit.foundation.errors\n    from implicitkit.foundation import trees\n"
    )
    wanted = {"implicitkit.solving.verbs", "implicitkit.foundation.errors", "implicitkit.foundation.trees"}
    assert house.imports(source, MODULES) == wanted


def test_the_page_names_every_room_and_folder() -> None:
    text = (house.ROOT / "docs" / "architecture.md").read_text()
    names = {path.parent.name for path in house.LIBRARY.rglob("__init__.py")} - {house.LIBRARY.name}
    missing = {name for name in names if not re.search(rf"[` /]{name}/", text)}
    missing |= {path.name for path in house.LIBRARY.glob("*.py") if f"`{path.name}`" not in text}
    assert len(names) > 20 and missing == set()


def test_every_module_says_in_a_line_what_it_is_for() -> None:
    told = {path: purpose(path) for folder, files in folders() for path in (folder / "__init__.py", *files)}
    assert set(told) == {*MODULES.values(), *PLUGIN_FILES}
    assert {path: line for path, line in told.items() if not re.fullmatch(r".{4,125}[.?!]", line)} == {}
    assert len(re.findall(r"^\| `\w+\.py` \| .+ \|$", page(), re.M)) == sum(path.name != "__init__.py" for path in told)


# ---------------------------------------------------------------------------------------------------------------- law 2
RULES = ("implicit", "series", "unroll", "base", "catalogue")


def test_solvers_know_nothing_of_rules_and_rules_nothing_of_solvers() -> None:
    wrong = [
        f"{a} -> {b}"
        for a, b in _arrows().edges
        if (house.room(a) == "solver" and house.room(b) == "rule")
        or (house.room(a) == "rule" and a.rpartition(".")[2] in RULES and house.room(b) == "solver")
    ]
    assert wrong == []


# ---------------------------------------------------------------------------------------------------------------- law 3
@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_can_be_imported_by_their_own_names(name: str) -> None:
    """No public name is also the name of a module: ``import implicitkit.x.y as z`` is that module."""
    module = importlib.import_module(name)
    assert sys.modules[name] is module
    parent, _, leaf = name.rpartition(".")
    if parent:
        assert getattr(importlib.import_module(parent), leaf) is module


@pytest.mark.parametrize("path", sorted(p for p in house.PLUGINS.iterdir() if (p / "__init__.py").exists()))
def test_modules_of_plugins_can_be_imported_by_their_own_names(path: Path) -> None:
    for name in house.modules(path):
        module = importlib.import_module(name)
        parent, _, leaf = name.rpartition(".")
        if parent:
            assert getattr(importlib.import_module(parent), leaf) is module, name


def test_every_public_name_is_where_the_list_says() -> None:
    for name in ik.__all__:
        assert getattr(ik, name) is not None
    assert set(ik.__all__) <= set(dir(ik))
    with pytest.raises(AttributeError, match="no attribute 'solvr'"):
        ik.solvr  # noqa: B018


# ---------------------------------------------------------------------------------------------------------------- law 4
@functools.cache
def _members(path: Path) -> dict[str, set[str]]:
    """For each class of a file the attributes it defines: methods, annotated fields, ``self.x = ...``."""
    found: dict[str, set[str]] = {}
    for cls in (n for n in house.statements(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)):
        names = found.setdefault(cls.name, set())
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
    return found


def _public_classes() -> set[str]:
    places = [ik, ik.extend, *PUBLIC_MODULES]
    return {n for p in places for n in getattr(p, "__all__", ()) if inspect.isclass(getattr(p, n, None))}


#: What a public object hands out: attributes of these are part of the public object's contract.
HANDED_OUT = {"LinearReport", "BlockReport", "Joint", "Tied", "Gamma"}


_FOREIGN = ("ctx", "extend", "functools", "math", "torch", "torch.func")  # autograd's own object, and modules


def test_plugins_use_no_attribute_of_a_private_object() -> None:
    """An attribute that only classes behind the public API define is not for plugins."""
    public, private = set(), set()
    classes = _public_classes() | HANDED_OUT
    for path in MODULES.values():
        for name, members in _members(path).items():
            (public if name in classes else private).update(members)
    own = {m for path in PLUGIN_FILES for members in _members(path).values() for m in members}
    common = {n for kind in (torch.Tensor, torch.nn.Module, torch.Size, dict, list, str, set, tuple) for n in dir(kind)}
    forbidden = {n for n in private - public - own - common if not n.startswith("_")}
    found = []
    for path in PLUGIN_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in forbidden and ast.unparse(node.value) not in _FOREIGN:
                found.append(f"{path.relative_to(house.ROOT)}:{node.lineno} .{node.attr}")
    assert found == []


def test_the_private_attributes_would_be_found() -> None:
    """The check above can fail: these are attributes of objects that no plugin is handed."""
    classes = {n: ms for p in MODULES.values() for n, ms in _members(p).items()}
    assert "outcome" in classes["Record"] and "Record" not in _public_classes()
    assert "slots" in classes["Lifted"] and "Lifted" not in _public_classes()


# ---------------------------------------------------------------------------------------------------------------- law 5
def test_import_loads_torch_and_little_else() -> None:
    torch_seconds, own_seconds, packages = house.import_cost()
    assert packages == ["implicitkit"]
    assert own_seconds < torch_seconds / 3


# ---------------------------------------------------------------------------------------------------------------- law 6
def test_modules_and_functions_are_short() -> None:
    long = [
        f"{path}, {name}: {lines} lines"
        for path in [*MODULES.values(), *PLUGIN_FILES]
        for name, lines, most in [("all", len(path.read_text().splitlines()), 400)]
        + [(name, lines, 60) for name, lines in house.functions(path)]
        if lines > most
    ]
    assert long == []


# ---------------------------------------------------------------------------------------------------------------- law 7
#: What goes where torch would put it, and why.
AT_THE_DEFAULT_DEVICE = {
    "implicitkit/cli/doctor.py": "a program of its own, which asks whether this machine works as it is set up",
    "implicitkit/foundation/options.py": "arrays that a user gives, before there is a solve",
    "plugins/implicitkit_deq/pretraining.py": "a buffer, as those of torch's own modules",
    "plugins/implicitkit_deq/starting/start.py": "parameters, as those of torch's own modules",
}


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """A solve is where its tensors are, whatever ``torch.set_default_device`` says."""
    found = {
        str(path.relative_to(house.ROOT)): calls
        for path in [*MODULES.values(), *PLUGIN_FILES]
        if (calls := house.homeless_tensors(path.read_text()))
    }
    assert {name: calls for name, calls in found.items() if name not in AT_THE_DEFAULT_DEVICE} == {}
    assert set(AT_THE_DEFAULT_DEVICE) <= set(found), "an exception that is no longer needed"


def test_a_tensor_without_a_device_would_be_found() -> None:
    source = """
import torch
import torch.nn.functional as F
from torch import fft, ones as one
from torch.signal import windows
a = torch.zeros(3)
b = torch.eye(3, device=a.device) + torch.full((2,), 1.0, **place)
c = fft.fftfreq(3) + one(3) + F.softplus(a) + torch.zeros_like(a) + a.new_zeros(3) + own.zeros(3)
d = torch.normal(0.0, 1.0, (3,)) + windows.cosine(3) + torch.as_tensor(a) + torch.sparse_coo_tensor(b, a, (3, 3))
"""
    found = house.homeless_tensors(source)
    homeless = {"torch.zeros(3)", "fft.fftfreq(3)", "one(3)", "torch.normal(0.0, 1.0, (3,))", "windows.cosine(3)"}
    assert set(found) == homeless | {"torch.as_tensor(a)", "torch.sparse_coo_tensor(b, a, (3, 3))"}


def test_what_makes_tensors_is_what_torch_says() -> None:
    """By what they do: what is made goes where the default device is, as far as torch keeps its word."""
    made = {name for name in dir(torch) if not name.startswith("_") and house.makes_tensors(getattr(torch, name))}
    assert len(made) > 25
    calls = {
        "zeros": (3,),
        "arange": (3,),
        "eye": (3,),
        "tril_indices": (3, 3),
        "full": ((3,), 1.0),
        "asarray": ([1.0],),
    }
    assert made >= {"normal", *calls}  # of torch.normal the default device says nothing: it is the CPU
    for name, given in calls.items():
        with torch.device("meta"):
            assert getattr(torch, name)(*given).is_meta, name
    assert not made & {"zeros_like", "cat", "sin", "where", "stack", "from_numpy", "Generator"}


# ------------------------------------------------------------------------------------------------------------- the table
def test_kinds_are_compared_nowhere() -> None:
    assert house.kind_comparisons() == []
    assert house.COMPARISON.search('if problem.kind == "root":') and house.COMPARISON.search(
        "kind in ('argmin', 'root')"
    )


def test_rooms_are_not_tied_together_further() -> None:
    assert len(house.between_rooms(_arrows())) < 95


def test_the_way_is_short() -> None:
    """From the verb to the first line of a method ``z0`` enters at most eight rooms."""
    way = house.way_of_the_start()
    rooms = list(dict.fromkeys(step.split("/")[0] for step in way))
    assert way[-1] == "solver/fixed_point/picard.py" and len(rooms) <= 8, rooms
