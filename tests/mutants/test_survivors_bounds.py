"""What mutants survived before: certificates, stability, sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import randn
from torch import Tensor

import implicitkit as ik
from implicitkit.diagnostics import stability

D = torch.float64


def assert_near(got: Any, want: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def number(x: float) -> Tensor:
    return torch.tensor([x], dtype=D)


def at(problem: ik.Problem, z: Tensor, *args: Tensor, **options: Any) -> ik.Solution:
    """The solution ``z``, whatever its residual."""
    layer = ik.implicit(problem, on_failure="ignore", **options)(lambda z0, *a: z)
    return layer.solve(z, *args)  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------- certificates
PARABOLA = ik.Root(lambda z, x: z * z - x)


@pytest.mark.parametrize("x", [0.55, 0.7, 0.99])
def test_certificate_of_a_parabola_by_its_formulas(x: float) -> None:
    """At ``z = 1``: ``beta = 1/2``, ``K = 2``, doubled; ``eta = (1 - x) / 2``, so ``h = 1 - x``."""
    certificate = ik.certify(at(PARABOLA, number(1.0), number(x)))
    h, eta = 1 - x, (1 - x) / 2
    error = 2 * eta / (1 + (1 - 2 * h) ** 0.5)
    epsilon = 0.5 * 4 * error
    assert_near(float(certificate.curvature), 4.0, rtol=1e-4)
    assert_near(float(certificate.error), error, rtol=1e-4)
    assert_near(float(certificate.derivative_error), epsilon / (1 - epsilon) if epsilon < 1 else torch.inf, rtol=1e-3)
    assert bool(certificate.holds) and float(certificate.error) >= 1 - x**0.5


@pytest.mark.parametrize("x", [0.45, 0.1, -2.0])
def test_certificate_does_not_hold_above_one_half(x: float) -> None:
    certificate = ik.certify(at(PARABOLA, number(1.0), number(x)))
    assert not bool(certificate.holds) and float(certificate.error) == torch.inf


def test_certificate_of_a_large_system_sees_its_spectrum() -> None:
    """300 unknowns: norms by power iteration, which one step would miss by half."""
    d = torch.ones(300, dtype=D)
    d[0], d[1] = 40.0, 0.02
    s = ik.root(lambda z, x: d * z - x, torch.zeros(300, dtype=D), (torch.ones(300, dtype=D),), solver="newton_krylov")
    certificate = ik.certify(s)
    assert 0.9 * 2000 < float(certificate.condition) <= 2000 * 1.001
    assert 0.9 * 50 < float(certificate.inverse_norm) <= 50 * 1.001


def test_backward_error_bounds_what_a_loose_backward_leaves() -> None:
    n = 12
    A, g = torch.diag(torch.logspace(0, -2, n, dtype=D)) + 0.01 * randn(n, n), randn(n, seed=1)
    x = randn(n, seed=2).requires_grad_()
    rule = ik.Implicit(linear_solver="gmres", rtol=3e-2)
    s = ik.root(lambda z, x: A @ z - x, torch.zeros(n, dtype=D), (x,), rule=rule)
    (u,) = torch.autograd.grad(s.value, x, g)
    wrong = torch.linalg.vector_norm(u - torch.linalg.solve(A.mT, g))
    certificate = ik.certify(s)
    assert s.backward is not None and certificate.backward_error is not None
    residual = torch.linalg.vector_norm(g - A.mT @ u)
    assert float(residual) > 1e-3  # loose indeed
    assert float(wrong) <= float(certificate.backward_error) * (1 + 1e-9)
    assert_near(float(certificate.backward_error), float(residual / torch.linalg.svdvals(A)[-1]), rtol=1e-6)


def test_contraction_bound_is_close_on_a_linear_map() -> None:
    """``z = 0.9 z + x``: the Banach bound is the error itself."""
    s = at(ik.FixedPoint(lambda z, x: 0.9 * z + x), number(9.0), number(1.0))
    certificate = ik.certify(s)
    assert certificate.lipschitz is not None
    assert_near(float(certificate.lipschitz), 0.9, rtol=1e-6)
    assert_near(float(certificate.error), 1.0, rtol=1e-3)


# ----------------------------------------------------------------------------------------------------------- stability
@pytest.mark.parametrize(
    ("rate", "verdict"), [(-1e-3, "stable"), (-1e-13, "neutral"), (1e-13, "neutral"), (1e-3, "unstable")], ids=str
)
def test_stability_is_not_told_within_its_margin(rate: float, verdict: str) -> None:
    A = torch.diag(torch.tensor([rate, -1.0], dtype=D))
    report = stability(ik.SteadyState(lambda z: A @ z), torch.zeros(2, dtype=D))
    assert (bool(report.stable), bool(report.unstable)) == (verdict == "stable", verdict == "unstable")


# ---------------------------------------------------------------------------------------------------------------- sets
def test_second_order_cone_at_its_apex_is_the_identity() -> None:
    P = ik.project.second_order_cone()
    assert_near(torch.func.jacrev(P)(torch.zeros(3, dtype=D)), torch.eye(3, dtype=D))


@pytest.mark.parametrize("rank", [0, 1])
def test_psd_cone_has_finite_derivatives_at_low_rank(rank: int) -> None:
    v = torch.tensor([1.0, 2.0, 2.0], dtype=D)
    X = torch.outer(v, v) * rank
    J = torch.func.jacrev(ik.project.psd_cone())(X)
    assert bool(J.isfinite().all())
    if rank:  # along the cone's own ray the projection is the identity
        assert_near(torch.einsum("ijkl,kl->ij", J, X), X, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", ["transport", "birkhoff"])
def test_transport_plans_meet_both_margins_and_are_nearest(kind: str) -> None:
    n, m = (2, 3) if kind == "transport" else (3, 3)
    rows, columns = torch.full((n,), float(m), dtype=D), torch.full((m,), float(n), dtype=D)
    if kind == "birkhoff":
        rows = columns = torch.ones(3, dtype=D)
    P = ik.project.transport(rows, columns) if kind == "transport" else ik.project.birkhoff()
    v = 2 * randn(n, m, seed=3)
    x = P(v)
    assert_near(x.sum(1), rows, rtol=1e-7, atol=1e-8)
    assert_near(x.sum(0), columns, rtol=1e-7, atol=1e-8)
    assert float(x.min()) >= -1e-8
    for seed in range(20):  # (v - x)'(y - x) <= 0 for every other plan y
        y = P(3 * randn(n, m, seed=seed + 50))
        assert float(((v - x) * (y - x)).sum()) <= 1e-6
