"""One bad sample never spoils its batch: of every kind of problem, the others have the values and the derivatives that they
have alone, to the last digits, and cost no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
_NAN, _INF = float("nan"), float("inf")
_GOOD = torch.tensor([[0.5, 1.0], [0.8, 0.3]], dtype=F64)


def _start(t: Tensor, n: int, at: float) -> Tensor:
    return torch.full((len(t), n), at, dtype=F64)


def _energy(z: Tensor, t: Tensor) -> Tensor:
    return t[:, 0] * (z**2).sum(1) + torch.cosh(z - t[:, 1:]).sum(1)


_SUM = [ik.Equality(lambda z, t: z.sum(1, keepdim=True) - 1), ik.Inequality(lambda z, t: z - 0.9)]
_PROBLEMS: dict[str, Callable[..., Any]] = {
    "map": lambda t, **o: ik.fixed_point(
        lambda z, t: torch.tanh(t[:, :1] * z + t[:, 1:]), _start(t, 3, 0.0), (t,), **o
    ),
    "affine map": lambda t, **o: ik.fixed_point(lambda z, t: t[:, :1] * z + t[:, 1:], _start(t, 3, 0.0), (t,), **o),
    "root": lambda t, **o: ik.root(lambda z, t: z**3 + t[:, :1] * z - t[:, 1:], _start(t, 2, 1.0), (t,), **o),
    "minimum": lambda t, **o: ik.argmin(_energy, _start(t, 3, 0.0), (t,), **o),
    "quadratic": lambda t, **o: ik.argmin(
        lambda z, t: t[:, 0] * (z**2).sum(1) + (z * t[:, 1:]).sum(1), _start(t, 3, 1.0), (t,), **o
    ),
    "fit": lambda t, **o: ik.least_squares(
        lambda z, t: torch.cat([t[:, :1] * z - 1, torch.exp(-t[:, 1:] * z)], 1), _start(t, 2, 0.0), (t,), **o
    ),
    "steady state": lambda t, **o: ik.steady_state(
        lambda z, t: t[:, :1] * z * (1 - z) + 0.1 * t[:, 1:], _start(t, 2, 0.5), (t,), **o
    ),
    "within bounds": lambda t, **o: ik.argmin(_energy, _start(t, 3, 0.1), (t,), bounds=(0.0, 2.0), **o),
    "constrained": lambda t, **o: ik.argmin(_energy, _start(t, 3, 0.1), (t,), constraints=_SUM, **o),
}
_ROWS = [
    *((name, "NaN", (_NAN, 1.0)) for name in _PROBLEMS),
    *((name, "infinite", (_INF, 1.0)) for name in ("map", "root", "minimum", "fit")),
    *((name, "at its solution", (0.5, 0.0)) for name in ("map", "affine map", "minimum", "constrained")),
    ("map", "singular", (1.0, 0.0)),
    ("map", "far out", (50.0, 1e8)),
    ("map", "repels", (-5.0, 0.3)),
    ("affine map", "repels", (-1.02, 1.0)),
    ("affine map", "overflows", (2.0, 1e300)),
    ("root", "singular", (0.0, 0.0)),
    ("root", "at its solution", (0.0, 1.0)),
    ("minimum", "a saddle", (-3.0, 0.0)),
    ("quadratic", "unbounded", (0.0, 1.0)),
    ("quadratic", "flat", (0.0, 0.0)),
    ("quadratic", "concave", (-1.0, 1.0)),
    ("fit", "runs away", (0.0, 1.0)),
    ("fit", "singular", (0.0, 0.0)),
    ("steady state", "none", (-1.0, -9.0)),
    ("within bounds", "concave", (-9.0, 1.0)),
    ("constrained", "concave", (-9.0, 1.0)),
]


@pytest.mark.parametrize("in_dims", [None, (0,)], ids=["frozen", "dropped"])
@pytest.mark.parametrize(("name", "kind", "bad"), _ROWS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_others_are_as_they_are_alone(
    name: str, kind: str, bad: tuple[float, float], in_dims: tuple[int, ...] | None
) -> None:
    solve = _PROBLEMS[name]
    options = {"batch_dims": 1, "in_dims": in_dims, "on_failure": "ignore"}
    t = torch.cat([_GOOD[:1], torch.tensor([bad], dtype=F64), _GOOD[1:]]).requires_grad_()
    others = [0, 2]
    found = solve(t, **options)
    (slope,) = torch.autograd.grad(found.value[others].square().sum(), t)
    alone = [solve(t[i : i + 1].detach().clone().requires_grad_(), **options) for i in range(3)]
    for i in others:
        own = t[i : i + 1].detach().clone().requires_grad_()
        value = solve(own, **options).value
        (expected,) = torch.autograd.grad(value.square().sum(), own)
        said = f"{name}, beside one that is {kind}, sample {i}"
        assert int(found.status[i]) == int(ik.Status.CONVERGED), said
        torch.testing.assert_close(found.value[i : i + 1], value, rtol=1e-12, atol=1e-12, msg=said)
        torch.testing.assert_close(slope[i : i + 1], expected, rtol=1e-11, atol=1e-12, msg=said)
    assert torch.equal(found.status[1], alone[1].status[0])
    assert found.evaluations <= 1.5 * sum(s.evaluations for s in alone) + 40
    if in_dims is not None:
        assert found.sample_evaluations <= 2 * sum(s.sample_evaluations for s in alone) + 60
