"""The judge must notice what it is there for: an error is planted behind the library, and each must be called wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from torch import Tensor

from .case import ROWS
from .judge import judge
from .rows import Setting
from .trials import parse


def _steeper(z: Tensor) -> Tensor:
    """The right value, a derivative off by two in a hundred."""
    return z + 0.02 * (z - z.detach())


def _cut(z: Tensor) -> Tensor:
    return z.detach() + 0 * z


def _moved(z: Tensor) -> Tensor:
    return z + 1e-4


def _bent(z: Tensor) -> Tensor:
    """The right value and first derivative."""
    return z + 0.02 * (z - z.detach()).square()


CASES = [
    ("ode.event", "jvp:w", _steeper),
    ("fit.huber", "backward:w", _cut),
    ("fit.bounds", "jacrev:x", _steeper),
    ("fit.curve", "vjp:x", _steeper),
    ("root.between", "dual:w", _steeper),
    ("root.between", "backward:x,batched_backward:w", _bent),
    ("root.aux", "batched_backward:w", _steeper),
    ("root.diagonal", "jacfwd:x", _steeper),
    ("manifold.rotation", "vmap:w", _moved),
    ("nested.map_in_root", "hessian:w", _bent),
    ("nested.bounds_in_node", "saved_elsewhere:x", _steeper),
    ("min.complex", "grad:w", _steeper),
    ("joint.then", "accumulate:w", _cut),
]


@pytest.mark.parametrize(("name", "do", "plant"), CASES, ids=[f"{name}-{do}" for name, do, _ in CASES])
def test_a_planted_error_is_called_wrong(
    name: str, do: str, plant: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[name]

    def run(s: Setting) -> Tensor:
        return plant(row.run(s))

    dtype = " dtype=complex128 cp=1 state=named" if "complex" in name else ""
    case = parse(f"{name} do={do} n={row.sizes[-1]} w=closure{dtype}")
    monkeypatch.setitem(ROWS, name, dataclasses.replace(row, run=run))
    assert judge(case, limit=30.0).kind == "wrong"
