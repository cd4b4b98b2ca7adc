"""What a user of JAXopt relies on, and its result here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

import implicitkit as ik

F64 = torch.float64
G = torch.Generator().manual_seed(1)
A = torch.randn(12, 4, generator=G, dtype=F64)
Y = torch.randn(12, generator=G, dtype=F64)
W0 = torch.zeros(4, dtype=F64)
EYE = torch.eye(4, dtype=F64)


def ridge(w: Tensor, lam: Tensor) -> Tensor:
    return 0.5 * (A @ w - Y).square().sum() + 0.5 * lam * w.square().sum()


def ridge_exact(lam: Tensor) -> Tensor:
    return torch.linalg.inv(A.mT @ A + lam * EYE) @ (A.mT @ Y)


@pytest.mark.parametrize(
    "solver", ["lbfgs", "bfgs", "nonlinear_cg", "newton_cg", "gradient_descent", "scipy.minimize.BFGS"]
)
def test_ridge_has_its_solution_and_both_jacobians(solver: str) -> None:
    lam = torch.tensor(2.0, dtype=F64)
    solve = lambda lam: ik.argmin(ridge, W0, (lam,), solver=solver, rtol=1e-10).value  # noqa: E731
    torch.testing.assert_close(solve(lam), ridge_exact(lam), rtol=1e-7, atol=1e-8)
    for jacobian in (jacrev, jacfwd):
        torch.testing.assert_close(jacobian(solve)(lam), jacobian(ridge_exact)(lam), rtol=1e-5, atol=1e-7)


def test_lasso_meets_its_conditions() -> None:
    lam = 3.0
    w = ik.argmin(lambda w: 0.5 * (A @ w - Y).square().sum(), W0, prox=ik.prox.l1(lam)).value
    g = A.mT @ (A @ w - Y)
    on = w != 0
    torch.testing.assert_close(g[on], -lam * w[on].sign(), rtol=1e-6, atol=1e-7)
    assert bool((g[~on].abs() <= lam + 1e-7).all()) and bool(on.any())


def test_nonnegative_least_squares_by_a_projection() -> None:
    w = ik.argmin(lambda w: 0.5 * (A @ w - Y).square().sum(), W0, project=ik.project.nonnegative()).value
    g = A.mT @ (A @ w - Y)
    assert bool((w >= 0).all()) and bool((g >= -1e-7).all()) and float((w * g).abs().max()) < 1e-7


PROJECTIONS: dict[str, tuple[Any, list[float], list[float]]] = {
    "simplex": (ik.project.simplex(), [1.0, 0.5, -1.0], [0.75, 0.25, 0.0]),
    "l1 ball": (ik.project.l1_ball(1.0), [2.0, -1.0, 0.0], [1.0, 0.0, 0.0]),
    "l2 sphere": (ik.project.l2_sphere(1.0), [3.0, 0.0, 4.0], [0.6, 0.0, 0.8]),
    "box section": (ik.project.box_section(0.0, 1.0, total=1.0), [1.0, 0.5, -1.0], [0.75, 0.25, 0.0]),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections(name: str) -> None:
    project, v, expected = PROJECTIONS[name]
    torch.testing.assert_close(
        project(torch.tensor(v, dtype=F64)), torch.tensor(expected, dtype=F64), rtol=1e-8, atol=1e-9
    )


def test_custom_root_by_name_with_more_to_say() -> None:
    @ik.implicit(ik.Argmin(ridge), has_aux=True)
    def closed(w0: Tensor, lam: Tensor) -> tuple[Tensor, dict[str, int]]:
        return ridge_exact(lam), {"iterations": 1}

    lam = torch.tensor(2.0, dtype=F64)
    assert closed(W0, lam=lam)[1] == {"iterations": 1}
    torch.testing.assert_close(jacrev(lambda x: closed(W0, lam=x)[0])(lam), jacrev(ridge_exact)(lam))


def test_brackets() -> None:
    c = torch.tensor([1.0, 8.0, 27.0], dtype=F64)
    z = ik.root(lambda z, c: z**3 - c, args=(c,), bracket=(torch.zeros(3, dtype=F64), 4.0), batch_dims=1).value
    torch.testing.assert_close(z, torch.tensor([1.0, 2.0, 3.0], dtype=F64))
