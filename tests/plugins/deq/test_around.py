"""A linear solver around another one says of itself what is true of that one."""

from __future__ import annotations

from typing import Any

import pytest

import implicitkit as ik
from implicitkit_deq.starting.extrapolation import Onward, Trend
from implicitkit_deq.unsolved_samples import Forgive, _Linear
from implicitkit_deq.wrapped_linear_solver import Around

SAID = [name for name, kind in vars(ik.LinearSolver)["__annotations__"].items() if "ClassVar" in str(kind)]
ALL = [*SAID, *(name for name, value in vars(ik.LinearSolver).items() if isinstance(value, property))]


def _other(value: Any) -> Any:
    """What no linear solver says if nothing is said."""
    return not value if isinstance(value, bool) else "another" if isinstance(value, str) else ("adjoint",)


def test_there_is_something_to_be_said() -> None:
    assert {"needs", "exact", "has_units", "checks_itself"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_what_is_said_is_true_of_the_one_inside(name: str) -> None:
    plain = ik.LinearSolver()
    said = _other(getattr(plain, name))
    inner = type("Inner", (ik.LinearSolver,), {name: said})()
    for solver in (Around(inner), Onward(inner, Trend()), _Linear(inner, Forgive())):
        assert getattr(solver, name) == said
