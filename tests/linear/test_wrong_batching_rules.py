"""Operations whose derivative ``torch.func.vmap`` maps wrongly, without a word: Jacobians of them are right all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff, graph
from implicitkit.foundation.operators import repeated

POINTS = 6


def _points(z: Tensor) -> Tensor:
    return z.unflatten(-1, (POINTS, 2))


def _distances(z: Tensor) -> Tensor:
    d = torch.cdist(_points(z), _points(z).flip(-1) + 1)
    return torch.cat([d.sum(-1), d.square().mean(-1).cos()], -1)


def _strided(z: Tensor) -> Tensor:
    return torch.as_strided_scatter(z.contiguous(), z[:, ::2].sin(), (len(z), POINTS), (2 * POINTS, 2))


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "distances": _distances,
    "distances in another norm": lambda z: torch.cdist(_points(z), _points(z) * 2 + 1, p=1.0).flatten(1)[
        :, : 2 * POINTS
    ],
    "strided": _strided,
}


def _state() -> Tensor:
    return torch.randn(3, 2 * POINTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _true(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Row by row, by torch."""
    point = z.clone().requires_grad_()
    out = function(point)
    rows = [torch.autograd.grad(o.sum(), point, retain_graph=True)[0] for o in out.unbind(1)]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("name", CASES)
def test_jacobians(name: str) -> None:
    function, z = CASES[name], _state()
    assert torch.allclose(autodiff.jacobian(function, z), _true(function, z), rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("name", CASES)
def test_products_of_several_right_hand_sides(name: str) -> None:
    function, z = CASES[name], _state()
    _, A = autodiff.linearise(function, z)
    v = torch.randn(4, *z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(1))
    found = repeated(A, 4).rmv(v.flatten(0, 1)).view_as(v)
    assert torch.allclose(found, torch.einsum("bij,kbi->kbj", _true(function, z), v), rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("kind", ["fixed_point", "root"])
@pytest.mark.parametrize("linear_solver", ["auto", "lu"])
def test_derivatives_of_solutions(kind: str, linear_solver: str) -> None:
    z0 = _state()
    about = torch.linspace(0, 1, z0.shape[1], dtype=z0.dtype)

    def value(t: Tensor) -> Tensor:
        def moved(z: Tensor, t: Tensor) -> Tensor:
            return 0.1 * t * _distances(z) + about

        function = moved if kind == "fixed_point" else lambda z, t: moved(z, t) - z
        rule = ik.Implicit(linear_solver=linear_solver)
        how = {"batch_dims": 1, "rtol": 1e-12, "atol": 1e-12, "rule": rule}
        return getattr(ik, kind)(function, z0, (t,), **how).value.square().sum()

    t = torch.tensor(0.7, dtype=z0.dtype, requires_grad=True)
    (found,) = torch.autograd.grad(value(t), t)
    with torch.no_grad():
        true = (value(t + 1e-5) - value(t - 1e-5)) / 2e-5
    assert abs(found - true) <= 1e-6 * abs(true), (kind, linear_solver, float(found), float(true))


def test_operations_without_a_rule_and_with_a_right_one() -> None:
    z = _state()
    vectors = torch.eye(3, dtype=z.dtype)

    def looks(v: Tensor) -> Tensor:
        return v * v[0].item()  # which vmap does not allow

    assert torch.equal(graph.each(looks, vectors), vectors * vectors[:, :1])
    calls = []

    def counted(v: Tensor) -> Tensor:
        calls.append(v.ndim)
        return 2 * v

    assert torch.equal(graph.each(counted, vectors), 2 * vectors)
    assert len(calls) == 1
