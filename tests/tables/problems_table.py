"""Small problems of every kind with an independent, natively differentiable oracle (unrolled Newton on dense Jacobians)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

N = 3


@dataclass(frozen=True)
class Case:
    """A problem kind, its function of ``(z, W, b)`` and its residual written out by hand."""

    make: Callable[[Callable[..., Any]], ik.Problem]
    function: Callable[[Tensor, Tensor, Tensor], Any]
    residual: Callable[[Tensor, Tensor, Tensor], Tensor]
    solvers: tuple[str, ...]


def _map(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(W @ z * 0.4 + b)


def _root(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return z**3 + 2 * z + 0.3 * W @ z - b


def _rhs(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return -torch.sinh(z) - z + 0.3 * W @ z + b


def _objective(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return 0.5 * (z @ z) + 0.25 * (W @ z).square().sum() + 0.25 * (z**4).sum() - b @ z


def _residuals(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return torch.cat([z - b, 0.5 * torch.sin(W @ z) + 0.7, 0.2 * z**2])


def _least_squares_gradient(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    s = W @ z
    return (z - b) + W.mT @ (0.5 * torch.cos(s) * (0.5 * torch.sin(s) + 0.7)) + 0.4 * z * 0.2 * z**2


def _objective_gradient(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return z + 0.5 * W.mT @ (W @ z) + z**3 - b


class Bent(ik.manifold.Manifold):
    """Vectors in a bent chart: ``retract(z, delta) = z + sinh(delta) / 2``."""

    def zero(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)

    def retract(self, z: Tensor, delta: Tensor) -> Tensor:
        return z + 0.5 * torch.sinh(delta)


def _bent(residuals: Callable[..., Any]) -> ik.Problem:
    return ik.LeastSquares(residuals, manifold=Bent())


CASES = {
    "fixed_point": Case(
        ik.FixedPoint, _map, lambda z, W, b: _map(z, W, b) - z, ("picard", "anderson", "newton", "newton_krylov")
    ),
    "root": Case(ik.Root, _root, _root, ("newton", "newton_krylov")),
    "steady_state": Case(ik.SteadyState, _rhs, _rhs, ("newton", "newton_krylov")),
    "argmin": Case(ik.Argmin, _objective, _objective_gradient, ("lbfgs", "newton_krylov")),
    "least_squares": Case(ik.LeastSquares, _residuals, _least_squares_gradient, ("lbfgs", "newton_krylov")),
    "on a manifold": Case(_bent, _residuals, _least_squares_gradient, ("levenberg_marquardt",)),
}


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``z0, W, b`` in float64."""
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(N, N, generator=g, dtype=torch.float64) * 0.6
    b = torch.randn(N, generator=g, dtype=torch.float64)
    return torch.zeros(N, dtype=torch.float64), W, b


def oracle(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Native operations only: 60 applications of a contractive map, or six undamped Newton steps; value and derivatives
    converge together (eleven steps differ by 1e-15 in second derivatives)."""

    def solve(z0: Tensor, W: Tensor, b: Tensor) -> Tensor:
        z = z0
        if case.make is ik.FixedPoint:
            for _ in range(60):
                z = case.function(z, W, b)
            return z
        for _ in range(6):
            J = torch.func.jacrev(case.residual)(z, W, b)
            z = z - torch.linalg.solve(J, case.residual(z, W, b))
        return z

    return solve


def ours(case: Case, solver: str, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same through :func:`ik.solve`."""
    options = {"rtol": 1e-13, "atol": 1e-13, **options}

    def solve(z0: Tensor, W: Tensor, b: Tensor) -> Tensor:
        return ik.solve(case.make(case.function), z0, (W, b), solver=solver, **options).value

    return solve
