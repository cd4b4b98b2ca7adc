"""Signs and conditions of single steps that no other test told from their opposite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.diagnostics.linear_stability import stability
from implicitkit.solver.root.trust_region import _Dogleg

F64 = torch.float64


class _Matrix:
    """A Jacobian of which ``_Dogleg`` takes four products."""

    def __init__(self, J: Tensor) -> None:
        self.J = J

    def direction(self, f: Any, F: Tensor) -> Tensor:
        return -torch.linalg.solve(self.J, F)

    def adjoint(self, F: Tensor) -> Tensor:
        return (self.J.mT @ F.unsqueeze(2)).squeeze(2)

    def times(self, p: Tensor) -> Tensor:
        return (self.J @ p.unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("seed", range(5))
def test_the_second_leg_of_a_dogleg_ends_on_the_sphere(seed: int) -> None:
    """``|p| = radius`` between Cauchy's point and Newton's (Powell 1970), and ``linear = F + J p / D``."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(4, 3, 3, dtype=F64, generator=generator) + 2 * torch.eye(3, dtype=F64)
    F, D = torch.randn(4, 3, dtype=F64, generator=generator), 0.5 + torch.rand(4, 3, dtype=F64, generator=generator)
    path: Any = _Dogleg(None, _Matrix(J), F, D)  # type: ignore[arg-type]
    turn = path.J_direction  # Cauchy's point: the least |F - t J d / D| along the steepest descent
    assert torch.allclose(path.cauchy_length, (F * turn).sum(1) / turn.square().sum(1), rtol=1e-10)
    for share in (0.1, 0.5, 0.9):
        radius = path.cauchy_length + share * (path.newton_length - path.cauchy_length)
        p, linear = path.step(radius)
        assert torch.allclose(torch.linalg.vector_norm(p, dim=1), radius, rtol=1e-10)
        assert torch.allclose(linear, F + _Matrix(J).times(p / D), rtol=1e-10, atol=1e-12)


def test_df_sane_goes_against_a_residual_that_falls() -> None:
    """``F = 3 - z`` and ``F = (1 - x, y - 2 + x^2)``: the first step is along ``+F``."""
    alone = ik.root(lambda z: 3 - z, torch.tensor(0.0, dtype=F64), solver="df_sane")
    assert int(alone.evaluations) <= 8
    start = torch.tensor([3.0, -1.0], dtype=F64)
    both = ik.root(lambda z: torch.stack([1 - z[0], z[1] - 2 + z[0] ** 2]), start, solver="df_sane")
    assert int(both.evaluations) <= 30


@pytest.mark.parametrize(
    ("f", "bracket", "most"),
    [(lambda z: (z - 1) ** 3, (-3.0, 2.7), 20), (lambda z: z**9 - 1e-3, (-1.0, 2.0), 14)],
    ids=["triple", "ninth power"],
)
def test_chandrupatla_halves_where_its_parabola_is_not_to_be_trusted(
    f: Callable[[Tensor], Tensor], bracket: tuple[float, float], most: int
) -> None:
    """Chandrupatla (1997): interpolated only if ``phi^2 < xi`` and ``(1 - phi)^2 < 1 - xi``."""
    found = ik.root(f, torch.tensor(0.0, dtype=F64), bracket=bracket, solver="chandrupatla")
    assert int(found.evaluations) <= most


def test_a_simplex_at_the_noise_of_its_values_ends_by_the_gradient() -> None:
    """``1e8 + |z - 1|^2`` is flat to 1e-4: the last simplex goes by ``|grad|``."""
    start = torch.tensor([3.0, -2.0], dtype=F64)
    found = ik.argmin(lambda z: 1e8 + (z - 1).square().sum(), start, solver="nelder_mead")
    assert torch.allclose(found.value, torch.ones(2, dtype=F64), atol=1e-8)


def test_a_minimum_of_many_unknowns_is_where_the_gradient_flow_comes_to_rest() -> None:
    """``dz/dt = -grad``: of ``sum_i i z_i^2 / 2`` over 520 unknowns the slowest rate is -1, by Arnoldi."""
    weights = torch.arange(1.0, 521.0, dtype=F64)
    report = stability(ik.Argmin(lambda z: 0.5 * (weights * z.square()).sum()), torch.zeros(520, dtype=F64), count=2)
    assert not report.exact
    assert float(report.growth_rate) == pytest.approx(-1.0, rel=1e-6)
    assert bool(report.stable)
