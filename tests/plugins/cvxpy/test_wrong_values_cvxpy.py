"""A wrong value of any argument of a ``ConvexLayer`` is refused at once, by name (the rule: ``wrong_values``)."""

from __future__ import annotations

from typing import Any

import pytest
from wrong_values import Row, complaints

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConeKKT, ConvexLayer  # noqa: E402


def program() -> dict[str, Any]:
    x, q = cp.Variable(2), cp.Parameter(2)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - q)), [x >= 0])
    return {"problem": problem, "parameters": [q], "variables": [x]}


ROWS = {"ConvexLayer": Row(ConvexLayer, program, said="SCS|Geometric|CLARABEL|and verbose"), "ConeKKT": Row(ConeKKT)}


@pytest.mark.parametrize("name", ROWS)
def test_wrong_values_are_refused_at_once_and_by_name(name: str) -> None:
    assert complaints(name, ROWS[name]) == []


def test_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"ConvexLayer has no option 'solver_arg'. Did you mean 'solver_args'"):
        ConvexLayer(**program(), solver_arg={})
