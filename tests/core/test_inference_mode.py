"""What differentiates inside gives under ``torch.inference_mode`` what it gives outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cvxpy as cp
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_cvxpy import ConvexLayer
from implicitkit_deq import DEQ, cells, condition_number, jacobian_penalty, scale_to_radius, spectral_radius

D = torch.float64
X = torch.tensor([0.6, -0.9, 1.3], dtype=D)


def _map(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.3 * z + x)


def _cell() -> cells.MLP:
    torch.manual_seed(0)
    return cells.MLP(3, 4).to(D)


def _at_rest(of: Callable[..., Any], **options: Any) -> Any:
    return of(_cell(), torch.zeros(1, 4, dtype=D), (X[None],), **options)


def _norm(cone: str) -> Tensor:
    """``min |z|^2 / 2 - p'z`` on a ball, a set of positive semidefinite matrices, below an exponential, above a power."""
    z, p = cp.Variable(3), cp.Parameter(3)
    constraint = {
        "second order": lambda: cp.norm(z) <= 0.5,
        "semidefinite": lambda: cp.bmat([[1.0, z[0]], [z[0], z[1]]]) >> 0,
        "exponential": lambda: cp.exp(z[0]) <= z[1],
        "power": lambda: cp.power(z[0], 3) <= z[1],
    }[cone]()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(z) / 2 - p @ z), [constraint]), [p], [z])
    return layer(X)[0]


def _radius() -> Tensor:
    layer = DEQ(_cell(), (4,), rtol=1e-9)
    scale_to_radius(layer, (0.1 * X[None],), 0.5)
    return layer(X[None]).detach()


def _constrained() -> ik.Solution:
    below = [ik.Inequality(lambda z, x: z - 1)]
    return ik.argmin(lambda z, x: (z - x).square().sum(), torch.zeros(3, dtype=D), (X,), constraints=below)


def _two() -> Any:
    node = ik.FixedPoint(_map)
    joint = ik.compose({"a": (node, "x"), "b": (node, "a")}, output="b")
    return joint, ik.solve(joint, {"a": torch.zeros(3, dtype=D), "b": torch.zeros(3, dtype=D)}, (X,)).value


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "certify, a fixed point": lambda: ik.certify(ik.fixed_point(_map, torch.zeros(3, dtype=D), (X,), rtol=1e-4)).error,
    "certify, a minimum": lambda: (
        ik.certify(
            ik.argmin(lambda z, x: (z - x).square().sum() + z.exp().sum(), torch.zeros(3, dtype=D), (X,), rtol=1e-4)
        ).error
    ),
    "degeneracy": lambda: ik.diagnostics.degeneracy(_constrained()).condition,
    "stability": lambda: (
        ik.diagnostics.stability(
            ik.steady_state(lambda z, x: x - z - z**3, torch.zeros(3, dtype=D), (X,))
        ).eigenvalues.real
    ),
    "analyse": lambda: torch.tensor(_two()[0].analyse(_two()[1], (X,)).joint_radius),
    "spectral radius": lambda: _at_rest(spectral_radius),
    "condition number": lambda: _at_rest(condition_number),
    "penalty": lambda: _at_rest(jacobian_penalty, exact=True),
    "scaled to a radius": _radius,
    "conformance": lambda: torch.tensor(ik.testing.check_solver("newton", raise_on_failure=False).passed),
    **{f"cone, {c}": lambda c=c: _norm(c) for c in ("second order", "semidefinite", "exponential", "power")},
}


@pytest.mark.parametrize("off", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_gives_what_it_gives_outside(name: str, off: Any) -> None:
    torch.manual_seed(1)
    want = FUNCTIONS[name]()
    torch.manual_seed(1)
    with off():
        found = FUNCTIONS[name]()
    assert torch.isfinite(want.double()).all()
    torch.testing.assert_close(found, want.detach(), rtol=1e-9, atol=1e-12)
