"""``ik.certify``: its bounds hold where the exact error is known, and are not vacuous."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.testing import known_problems

LOOSE = {"rtol": 1e-3, "atol": 1e-5}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 4, 40, 300], ids=lambda n: f"n={n}")
@pytest.mark.parametrize(
    ("kind", "solver"),
    [
        ("fixed_point", "picard"),
        ("fixed_point", "anderson"),
        ("root", "newton"),
        ("argmin", "lbfgs"),
        ("least_squares", "lbfgs"),
    ],
)
def test_error_bound_holds_and_is_close(kind: str, solver: str, size: int) -> None:
    for known in known_problems(kind, batch=3, size=size):
        solution = ik.solve(known.problem, known.z0, (known.theta,), solver=solver, batch_dims=1, **LOOSE)
        certificate = ik.certify(solution)
        error = (solution.value - known.solution).norm(dim=1)
        assert bool(certificate.holds.all()), f"{known.name}: {certificate}"
        assert bool((error <= certificate.error * (1 + 1e-9) + 1e-12).all()), f"{known.name}: {error}, {certificate}"
        assert bool((certificate.error <= 20 * error + 1e-9).all()), f"{known.name}: vacuous: {error}, {certificate}"
        assert torch.allclose(certificate.residual_norm, solution.residual_norm, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", ["fixed_point", "root"])
def test_derivative_bound_holds(kind: str) -> None:
    known = known_problems(kind, batch=3, size=4)[1]
    w = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

    def adjoint(z: Tensor) -> Tensor:
        J = torch.func.vmap(torch.func.jacrev(lambda y, t: known.residual(y[None], t[None])[0]))(z, known.theta)
        return torch.linalg.solve(J.mT, w.unsqueeze(2)).squeeze(2)

    solution = ik.solve(known.problem, known.z0, (known.theta,), solver="auto", batch_dims=1, rtol=1e-2, atol=1e-2)
    exact, found = adjoint(known.solution), adjoint(solution.value)
    relative = (found - exact).norm(dim=1) / found.norm(dim=1)
    bound = ik.certify(solution).derivative_error
    assert bool((relative <= bound).all()) and bool((bound < 1).all()) and float(relative.max()) > 1e-9


def test_fixed_point_reports_the_contraction() -> None:
    A = torch.diag(torch.tensor([0.9, 0.5], dtype=torch.float64))
    b = torch.ones(2, dtype=torch.float64)
    solution = ik.fixed_point(lambda z: A @ z + b, torch.zeros_like(b), solver="picard", rtol=1e-3, atol=0.0)
    certificate = ik.certify(solution)
    assert certificate.lipschitz is not None
    assert float(certificate.lipschitz) == pytest.approx(0.9)
    assert float(certificate.inverse_norm) == pytest.approx(10)
    assert float(certificate.condition) == pytest.approx(5)
    assert float(certificate.curvature) == pytest.approx(0, abs=1e-6)
    # both bounds are available; for a linear map Newton-Kantorovich's is exact
    assert float(certificate.error) == pytest.approx(float((solution.value - b / (1 - A.diagonal())).norm()), rel=1e-6)


def test_nothing_is_certified_where_nothing_can_be() -> None:
    def f(z: Tensor) -> Tensor:
        return z**2 + 1e-4  # no real root

    solution = ik.root(f, torch.tensor([0.3], dtype=torch.float64), max_steps=8, on_failure="ignore", solver="newton")
    certificate = ik.certify(solution)
    assert not bool(certificate.holds) and float(certificate.error) == torch.inf and "0 of 1" in str(certificate)


def test_nan_sample_is_nan_and_alone() -> None:
    t = torch.tensor([[2.0], [torch.nan], [3.0]], dtype=torch.float64)
    solution = ik.root(lambda z, t: z**3 + z - t, torch.zeros_like(t), (t,), batch_dims=1, on_failure="ignore")
    certificate = ik.certify(solution)
    assert certificate.holds.tolist() == [True, False, True]
    assert torch.isnan(certificate.error).tolist() == [False, True, False]


def test_backward_error_and_vmap() -> None:
    def value(t: Tensor) -> Any:
        return ik.root(lambda z, t: z**3 + z - t, torch.zeros_like(t), (t,))

    t = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    solution = value(t)
    assert ik.certify(solution).backward_error is None
    solution.value.sum().backward()
    backward = ik.certify(solution).backward_error
    assert backward is not None and float(backward) < 1e-12

    found = []

    def inner(t: Tensor) -> Tensor:
        found.append(value(t))
        return found[-1].value

    torch.func.vmap(inner)(torch.rand(5, 2, dtype=torch.float64))
    assert ik.certify(found[0]).error.shape == (5,)


def test_what_cannot_be_certified_is_refused() -> None:
    with pytest.raises(TypeError, match="needs the Solution"):
        ik.certify(torch.ones(2))  # type: ignore[arg-type]

    def inner(t: Tensor) -> Tensor:
        return ik.certify(ik.root(lambda z, t: z**3 + z - t, torch.zeros_like(t), (t,))).error

    with pytest.raises(RuntimeError, match="not inside a transform"):
        torch.func.vmap(inner)(torch.ones(3, 2, dtype=torch.float64))


def test_a_copied_solution_has_forgotten_its_problem() -> None:
    solution = ik.root(lambda z: z**3 - 8, torch.ones(1, dtype=torch.float64))
    for copied in (copy.deepcopy(solution), pickle.loads(pickle.dumps(solution))):
        assert torch.equal(copied.value, solution.value) and bool(copied.converged)
        with pytest.raises(ValueError, match="does not carry its problem"):
            ik.certify(copied)
