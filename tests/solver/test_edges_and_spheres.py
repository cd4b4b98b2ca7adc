"""Minima over spheres and few entries of a simplex, and over sets at whose edge the objective has no value."""

import pytest
import torch
from torch.func import jacrev, jvp

import implicitkit as ik
from implicitkit.solver.constrained.out_of_domain import OUT_OF_DOMAIN

WIDE = torch.tensor([[3.0, 1, 0, 0.5], [1, 2.5, 0.3, 0], [0, 0.3, 4, 1], [0.5, 0, 1, 5]], dtype=torch.float64)
FAR = torch.tensor([[201.0, 1], [1, 401]], dtype=torch.float64)


def _projector(A, scale, start):
    z = ik.argmin(lambda z, A: scale * (z @ A @ z), start, (A,), project=ik.project.l2_sphere()).value
    return z[:, None] * z


# from (0, 0, 1), a maximum, and beside a saddle; the map of a long slope leads past the centre
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("start", [[0.0, 0, 1], [0, 1, 1e-9]])
def test_a_rayleigh_quotient_on_the_sphere_has_its_least_eigenvector(scale, start):
    A = torch.diag(torch.tensor([1.0, 2, 3], dtype=torch.float64))
    start = torch.tensor(start, dtype=torch.float64)
    change = torch.tensor([[0.2, 0.3, -0.4], [0.3, 0.1, 0.5], [-0.4, 0.5, 0.3]], dtype=torch.float64)
    P, dP = jvp(lambda A: _projector(A, scale, start), (A,), (change,))
    e = torch.eye(3, dtype=torch.float64)
    along = sum(e[k] * change[0, k] / (1 - A[k, k]) for k in (1, 2))
    torch.testing.assert_close(P, torch.outer(e[0], e[0]), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(dP, torch.outer(along, e[0]) + torch.outer(e[0], along), rtol=1e-7, atol=1e-7)


SETS = {
    "sphere": (ik.project.l2_sphere(2.0), [1.0, -2, 0.5], [-2 / 5.25**0.5, 4 / 5.25**0.5, -1 / 5.25**0.5], 0.0),
    "diamond": (ik.project.l1_sphere(), [0.5, -1, 0.3], [-17 / 60, 32 / 60, -11 / 60], 1.0),
    "few": (ik.project.sparse_simplex(2), [-1.0, -0.2, -0.6], [0.6, 0, 0.4], 1.0),
}


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("name", list(SETS))
def test_minima_on_sets_that_are_not_convex_are_known_by_any_slope(name, scale):
    project, c, exact, curvature = SETS[name]
    c = torch.tensor(c, dtype=torch.float64)
    z0 = torch.full((3,), 1 / 3, dtype=torch.float64)
    objective = lambda z, c: scale * ((z * c).sum() + curvature * z.square().sum())  # noqa: E731
    z = ik.argmin(objective, z0, (c,), project=project).value
    torch.testing.assert_close(z, torch.tensor(exact, dtype=torch.float64), rtol=1e-7, atol=1e-7)


def _likelihood(Z, S, log_det):
    return (Z @ S).trace() - log_det(Z)


LOG_DETS = {"logdet": torch.logdet, "slogdet": lambda Z: torch.linalg.slogdet(Z)[1]}


# of a singular matrix rounding leaves a determinant of 1e-17 or of -1e-17: the first two were claimed near 0, the last was
# refused
@pytest.mark.parametrize(("name", "S"), [("logdet", 100 * WIDE), ("slogdet", WIDE @ WIDE), ("slogdet", FAR)])
def test_a_precision_matrix_is_found_inside_the_cone(name, S):
    objective = lambda Z, S: _likelihood(Z, S, LOG_DETS[name])  # noqa: E731
    z0 = torch.eye(len(S), dtype=torch.float64)
    found, inverse = ik.argmin(objective, z0, (S,), project=ik.project.psd_cone()), torch.linalg.inv(S)
    torch.testing.assert_close(found.value, inverse, rtol=1e-7, atol=1e-9)
    assert found.evaluations < 800


def test_no_minimum_is_claimed_where_the_objective_has_no_value():
    objective = lambda Z: _likelihood(Z, FAR, LOG_DETS["slogdet"])  # noqa: E731
    with pytest.raises(ik.ConvergenceError) as refused:
        ik.argmin(objective, torch.eye(2).double(), project=ik.project.psd_cone(), solver="newton")
    assert OUT_OF_DOMAIN in str(refused.value)


# from far out the first step leads to the tip of the cone, and was claimed there: in the set but for rounding, value NaN
@pytest.mark.slow
def test_no_minimum_is_claimed_at_the_tip_of_a_cone():
    R = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = 1e4 * R.T @ R / 20
    objective = lambda Z: _likelihood(Z, S, torch.logdet)  # noqa: E731
    far = 100 * torch.eye(4).double()
    found = ik.argmin(objective, far, project=ik.project.psd_cone(), on_failure="ignore")
    assert not bool(found.converged) or torch.allclose(found.value, torch.linalg.inv(S))


# at |z| = 1 the objective is infinite, but 1 - |z|^2 is 1e-16 by rounding: those points were claimed
@pytest.mark.parametrize("c", [[297.0, 100, -198], [295, 101, -200]])
def test_a_barrier_at_the_surface_of_a_ball_is_no_minimum(c):
    c = torch.tensor(c, dtype=torch.float64)
    objective = lambda z, c: (c * z).sum() - (1 - z.square().sum()).log()  # noqa: E731
    z = ik.argmin(objective, torch.zeros(3).double(), (c,), project=ik.project.l2_ball()).value
    steep = c.norm()
    torch.testing.assert_close(z, c / steep * (1 - (1 + steep**2).sqrt()) / steep, rtol=1e-8, atol=1e-8)


def test_shares_that_are_far_apart_have_derivatives():
    counts = torch.tensor([1e-3, 1e3], dtype=torch.float64)
    objective = lambda p, counts: -(counts * p.log()).sum()  # noqa: E731
    solve = lambda c: ik.argmin(objective, torch.full((2,), 0.5).double(), (c,), project=ik.project.simplex()).value  # noqa: E731
    share = jacrev(lambda c: c / c.sum())
    torch.testing.assert_close(jacrev(solve)(counts), share(counts), rtol=1e-7, atol=0)
