"""Objectives whose domain ends at the edge of the set: entropies on the simplex, ``-log det`` on the cone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vmap

import implicitkit as ik
from implicitkit.solver.constrained.proximal_newton import ProximalNewton

F64 = torch.float64
ENTROPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "p log p": lambda p: (p * p.log()).sum(-1),
    "xlogy": lambda p: torch.xlogy(p, p).sum(-1),
    "entr": lambda p: -torch.special.entr(p).sum(-1),
}


def _costs(scale: float, *shape: int) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=F64)


def _shares(c: Tensor, entropy: str = "xlogy", **options: object) -> ik.Solution:
    start = torch.full_like(c, 1 / c.shape[-1])
    f = ENTROPIES[entropy]
    return ik.argmin(lambda p, c: f(p) + (c * p).sum(-1), start, (c,), project=ik.project.simplex(), **options)


@pytest.mark.parametrize("entropy", ENTROPIES)
def test_entropies_on_the_simplex(entropy: str) -> None:
    """``softmax(-c)`` with shares of 1e-5, and of 1e-29."""
    for scale in (5.0, 30.0):
        c = _costs(scale, 10)
        found = _shares(c, entropy)
        assert found.evaluations <= 180, found
        torch.testing.assert_close(found.value, torch.softmax(-c, 0), rtol=1e-9, atol=0)


def test_derivatives_of_shares() -> None:
    c, w = _costs(5.0, 6), _costs(1.0, 6)
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(
            transform(lambda c: _shares(c).value)(c), transform(lambda c: torch.softmax(-c, 0))(c)
        )
    torch.testing.assert_close(
        hessian(lambda c: (w * _shares(c).value).sum())(c), hessian(lambda c: (w * torch.softmax(-c, 0)).sum())(c)
    )


def test_shares_of_many_samples() -> None:
    """Some easy, some not, one of NaN, by ``batch_dims`` and by ``vmap``."""
    c = torch.stack([_costs(s, 6) for s in (1.0, 20.0, 1.0)])
    torch.testing.assert_close(vmap(lambda c: _shares(c).value)(c), torch.softmax(-c, -1), rtol=1e-9, atol=0)
    c[2, 0] = torch.nan
    found = _shares(c, batch_dims=1, on_failure="nan")
    assert found.converged.tolist() == [True, True, False]
    torch.testing.assert_close(found.value[:2], torch.softmax(-c[:2], -1), rtol=1e-9, atol=0)


def _covariance(spread: float) -> Tensor:
    S = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    d = torch.logspace(-spread, spread, 5, dtype=F64)
    return (S @ S.T / 5 + 0.1 * torch.eye(5, dtype=F64)) * d[:, None] * d


@pytest.mark.parametrize(("spread", "start"), [(0, 1.0), (0, 1e5), (0, 1e8), (0, 1e-5), (3, 1.0), (3, 1e3)])
def test_log_det_on_the_cone(spread: float, start: float) -> None:
    """``Z = C^{-1}``, of a condition number of 1e13 as well, from far away."""
    C, Z0 = _covariance(spread), start * torch.eye(5, dtype=F64)
    found = ik.argmin(lambda Z, C: -torch.logdet(Z) + (C * Z).sum(), Z0, (C,), project=ik.project.psd_cone())
    assert found.evaluations <= 500, found
    torch.testing.assert_close(C @ found.value, torch.eye(5, dtype=F64), rtol=0, atol=1e-2 if spread else 1e-8)


def test_a_gap_inside_the_cone_is_the_slope() -> None:
    """``z - P(z - g)`` of a large ``z`` has digits of a small ``g``; at its edge it is what it was."""
    cone, z = ik.project.psd_cone(), _covariance(0)
    z = 0.5 * (z + z.mT)
    g = 1e-9 * z.flip(0, 1)
    assert torch.equal(cone.natural(1e6 * z, g), g)
    z = torch.linalg.matrix_power(z, 2) - z  # some eigenvalues of either sign, and no symmetry in the slope
    g = _costs(1.0, 5, 5)
    torch.testing.assert_close(cone.natural(z, g), z - cone(z - g))
    torch.testing.assert_close(jacrev(cone.natural, (0, 1))(z, g), jacrev(lambda z, g: z - cone(z - g), (0, 1))(z, g))


def test_a_singular_matrix_of_the_objective_is_a_failing_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient steps go on without Newton's."""

    def singular(*_: object) -> None:
        raise torch.linalg.LinAlgError("the input matrix is singular")

    monkeypatch.setattr("implicitkit.solver.constrained.proximal_newton._tried", singular)
    c = _costs(0.3, 6)
    found = ik.argmin(
        lambda p: 0.5 * (p + c).square().sum(),
        torch.zeros_like(c),
        project=ik.project.simplex(),
        solver=ProximalNewton(),
    )
    torch.testing.assert_close(found.value, ik.project.simplex()(-c))
