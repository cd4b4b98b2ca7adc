"""Make a failing case as plain as it can be while it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .case import Case
from .judge import Verdict, judge

__all__ = ["shrink"]

PLAIN = ("root.power", "map.affine")
FAMILIES = ("root", "map", "min", "squares", "rest", "joint")


def shrink(case: Case, verdict: Verdict) -> Case:
    """The smallest case found, field by field and level by level, with a verdict of the same kind."""
    found = True
    while found:
        found = False
        for smaller in _smaller(case):
            other = judge(smaller)
            if other.kind == verdict.kind and _class(other) == _class(verdict):
                case, found = smaller, True
                break
    return case


def _class(verdict: Verdict) -> str:
    """Wrong is wrong; errors are the same if they begin alike."""
    return "" if verdict.kind == "wrong" else verdict.detail[:60]


def _smaller(case: Case) -> Iterator[Case]:
    levels = case.do.split(",") if case.do else []
    for i in range(len(levels)):
        yield dataclasses.replace(case, do=",".join(levels[:i] + levels[i + 1 :]))
    for field in dataclasses.fields(case)[1:]:
        if field.name not in ("do", "n", "seed") and getattr(case, field.name) != field.default:
            if field.name == "batch" and case.dims:
                continue
            yield dataclasses.replace(case, **{field.name: field.default})
    for name in ("x", "w"):
        if getattr(case, name) not in ("args", "closure"):
            yield dataclasses.replace(case, **{name: "closure"})
    if case.n > 1:
        yield dataclasses.replace(case, n=1)
    if case.seed:
        yield dataclasses.replace(case, seed=0)
    if case.row not in PLAIN and case.row.split(".")[0] in FAMILIES:
        for row in PLAIN:
            yield dataclasses.replace(case, row=row, dtype="float64", solver="auto", linear="auto", rule="implicit")
