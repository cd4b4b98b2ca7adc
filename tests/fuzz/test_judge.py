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


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("map.affine do=vmap:x,batched_backward:w,vjp:x", "none"),  # nothing that torch batches so requires a gradient
        ("root.diagonal do=vmap:w,dual:x", "none"),  # no dual numbers below vmap
        ("map.affine do=vmap:w,jacrev:x,batched_backward:x", "refused"),  # torch could, for a closed form
    ],
)
def test_what_torch_refuses_of_any_function_is_nobodys_fault(line: str, kind: str) -> None:
    assert judge(parse(line + " w=closure"), limit=30.0).kind == kind


def test_what_only_the_solve_says_is_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["root.diagonal"]

    def run(s: Setting) -> Tensor:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")

    monkeypatch.setitem(ROWS, "root.diagonal", dataclasses.replace(row, run=run))
    assert judge(parse("root.diagonal do=jvp:x w=closure"), limit=30.0).kind == "unhelpful"
