"""Forward over forward: every ``autograd.Function`` of ours that has a ``jvp`` reads what it saved through the guard.

torch calls ``Function.jvp`` with forward AD switched off: saved tensors read there directly have lost the tangents of an
outer forward level, and the second derivative is wrong without a word.  ``compat.forward_ad_enabled`` is the one way round.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("implicitkit/**/*.py"), *ROOT.glob("plugins/**/*.py")])
GUARD = "forward_ad_enabled"


def _functions(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Classes derived from ``Function`` or ``autograd.Function``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).split(".")[-1] == "Function" for b in node.bases):
            yield node


def _faults(cls: ast.ClassDef) -> list[str]:
    """What is wrong with the ``jvp`` of a class (nothing, if it has none, or one that says there is no derivative)."""
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    if "jvp" not in methods or [ast.unparse(node) for node in methods["jvp"].body] == ["return None"]:
        return []
    guards = [
        call
        for call in ast.walk(methods["jvp"])
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == GUARD
    ]
    guarded = {id(node) for call in guards for node in ast.walk(call)}
    found = [] if guards else [f"{cls.name}.jvp does not use compat.{GUARD}"]
    for node in ast.walk(methods["jvp"]):
        if isinstance(node, ast.Attribute) and node.attr == "saved_tensors" and id(node) not in guarded:
            found.append(f"{cls.name}.jvp reads ctx.saved_tensors outside compat.{GUARD} (line {node.lineno})")
    for node in cls.body:
        if isinstance(node, ast.Assign) and ast.unparse(node) == "generate_vmap_rule = True":
            found.append(f"{cls.name} generates its vmap rule: the guard's unpack_dual has none, write vmap by hand")
    return found


def test_every_jvp_goes_through_the_guard() -> None:
    checked, faults = [], []
    for source, path in ((path.read_text(), path) for path in SOURCES):
        for cls in _functions(ast.parse(source)) if "def jvp" in source else ():
            if any(isinstance(node, ast.FunctionDef) and node.name == "jvp" for node in cls.body):
                checked.append(cls.name)
                faults += [f"{path.relative_to(ROOT)}: {fault}" for fault in _faults(cls)]
    assert not faults, "\n".join(faults)
    assert {"_Root", "LinSolve", "Kept", "_PositivePart", "_Lyapunov"} <= set(checked), f"only {checked} were found"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    def jvp(ctx, t):\n        (x,) = ctx.saved_tensors\n        return x * t", "does not use"),
        (
            "    def jvp(ctx, t):\n        with compat.forward_ad_enabled(ctx.saved_tensors) as (x,):\n"
            "            return ctx.saved_tensors[0] * t",
            "outside",
        ),
        (
            "    generate_vmap_rule = True\n    def jvp(ctx, t):\n"
            "        with compat.forward_ad_enabled(ctx.saved_tensors) as (x,):\n            return x * t",
            "vmap",
        ),
    ],
    ids=["no guard", "around the guard", "generated rule"],
)
def test_the_check_sees_what_is_wrong(body: str, said: str) -> None:
    (cls,) = _functions(ast.parse(f"class F(torch.autograd.Function):\n{body}"))
    assert any(said in fault for fault in _faults(cls))
