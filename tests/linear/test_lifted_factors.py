"""Factors of programs whose Hessian is sparse but for a few shared numbers, as those of their optimality conditions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions import kkt
from implicitkit.linear.conditions.lifted_saddle import LiftedFactors, LiftedMatrix
from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle
from implicitkit.linear.factors.arrowhead import ArrowheadFactors

F64 = torch.float64

#: Unknowns, rows, shared numbers, and the signs of these.
SIZES = {
    "one": (7, 1, 1, (1,)),
    "indefinite": (9, 2, 3, (1, -1, 1)),
    "no rows": (6, 0, 2, (1, 1)),
    "none": (5, 2, 0, ()),
}


def _both(name: str) -> tuple[sp.csc_matrix, np.ndarray, int, int, int]:
    """The matrix of the second form, and that of the first."""
    n, m, k, signs = SIZES[name]
    rng = np.random.default_rng(n)
    A, J, V, S = np.diag(2 + rng.random(n)), rng.normal(size=(m, n)), 0.3 * rng.normal(size=(k, n)), np.diag(signs)
    S = S.reshape(k, k).astype(float)
    zero = lambda *shape: np.zeros(shape)  # noqa: E731
    second = np.block(
        [
            [A, zero(n, k), J.T, -V.T],
            [zero(k, n), S, zero(k, m), np.eye(k)],
            [J, zero(m, k), zero(m, m), zero(m, k)],
            [-V, np.eye(k), zero(k, m), zero(k, k)],
        ]
    )
    first = np.block([[A + V.T @ S @ V, J.T], [J, zero(m, m)]])
    K = sp.csc_matrix(second + np.diag(np.full(len(second), 1.0)))  # its whole diagonal is there
    K.setdiag(second.diagonal())
    return K, first, n, m, k


@pytest.mark.parametrize("name", SIZES)
def test_products(name: str) -> None:
    K, first, n, m, _ = _both(name)
    x = np.random.default_rng(1).normal(size=n + m)
    matrix = LiftedMatrix(K, n, m)
    assert np.allclose(matrix @ x, first @ x, rtol=0, atol=1e-13), name
    assert (abs(matrix) @ np.abs(x) >= np.abs(first) @ np.abs(x) - 1e-13).all(), name


@pytest.mark.parametrize("name", SIZES)
def test_solutions(name: str) -> None:
    K, first, n, m, k = _both(name)
    b = np.random.default_rng(2).normal(size=n + m)
    factors = LiftedFactors(SparseSaddle(K, n + k), n, m, k)
    assert factors.regular, name
    assert np.allclose(factors.once(b), np.linalg.solve(first, b), rtol=0, atol=1e-12), name


def test_the_derivative_of_a_portfolio_takes_the_factors_of_its_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long only, with a budget and a factor model: ``min z'(D + F F') z / 2 - r'z``; by the system of the active set."""
    monkeypatch.delattr(kkt, "GMRES")
    n, k = 400, 12
    rng = torch.Generator(device="cpu").manual_seed(0)
    F = torch.randn(n, k, generator=rng, dtype=F64, device="cpu") / k**0.5
    d = 0.1 + torch.rand(n, generator=rng, dtype=F64, device="cpu")
    r = 0.1 * torch.randn(n, generator=rng, dtype=F64, device="cpu")
    c = torch.cos(torch.arange(n, dtype=F64, device="cpu"))
    wanted = r.clone().requires_grad_()

    def risk(z: Tensor, r: Tensor) -> Tensor:
        return 0.5 * (d * z * z).sum() + 0.5 * (F.T @ z).square().sum() - r @ z

    s = ik.argmin(
        risk,
        torch.full((n,), 1 / n, dtype=F64, device="cpu"),
        (wanted,),
        constraints=ik.Equality(lambda z, r: z.sum() - 1),
        bounds=(0.0, None),
    )
    (found,) = torch.autograd.grad((c * s.value).sum(), wanted)
    held = s.value.detach() > 0
    size = int(held.sum()) + 1
    K = torch.ones(size, size, dtype=F64, device="cpu")
    K[:-1, :-1], K[-1, -1] = torch.diag(d[held]) + F[held] @ F[held].T, 0
    right = torch.cat([c[held], torch.zeros(1, dtype=F64, device="cpu")])
    assert 10 < size < n
    assert torch.allclose(found[held], torch.linalg.solve(K, right)[:-1], rtol=0, atol=1e-12)
    assert bool((found[~held] == 0).all())


# ---------------------------------------------------------------------------------------------------------------------
# Symmetric arrowhead matrices by their Schur complement: solutions, inertia, and where sparse factors are to take over.
#: Unknowns, full rows, signs of the first entries of the diagonal, the corner, and is it for the Schur complement?
MATRICES = {
    "convex": (40, 3, (), 0.0, True),
    "one row": (9, 1, (), 0.0, True),
    "with a corner": (40, 3, (), -0.5, True),
    "an entry below zero": (40, 3, (-1,), 0.0, True),
    "a corner above zero": (40, 3, (), 1e3, False),
    "all entries below zero": (12, 2, (-1,) * 12, 0.0, False),
    "an entry of next to nothing": (40, 3, (1e-9,), 0.0, True),
    "more of them than rows": (40, 3, (1e-7,) * 4, 0.0, False),
    "as many rows as unknowns": (4, 4, (), 0.0, False),
}


def _matrix(name: str, full: float = 1.0) -> tuple[sp.csc_matrix, int]:
    """Scaled to rows of size one; its whole diagonal is there."""
    n, m, first, corner, _ = MATRICES[name]
    rng = np.random.default_rng(n + m)
    d, C = rng.uniform(0.5, 1.5, n), rng.normal(size=(m, n)) * (rng.random((m, n)) < full) / n
    d[: len(first)] *= first
    dense = np.block([[np.diag(d), C.T], [C, np.diag(np.full(m, corner))]])
    there = (dense != 0) | np.eye(n + m, dtype=bool)
    K = sp.csc_matrix(there.astype(float))
    K.data = dense[K.indices, np.repeat(np.arange(n + m), np.diff(K.indptr))]
    return K, n


@pytest.mark.parametrize("name", MATRICES)
def test_solutions_and_inertia_are_those_of_the_matrix(name: str) -> None:
    K, n = _matrix(name)
    b = np.random.default_rng(0).normal(size=K.shape[0])
    saddle = SparseSaddle(K, n, scale=np.ones(K.shape[0]))
    assert isinstance(saddle.lu, ArrowheadFactors) is MATRICES[name][-1], name
    once = saddle.once(b)
    assert np.abs(K @ once - b).max() < 1e-12 * (1 + np.abs(once).max()), name
    x, left = saddle.solve(b)
    assert left < 1e-14, name
    assert np.abs(K @ x - b).max() < 1e-12 * (1 + np.abs(x).max()), name
    assert saddle.negative == int((np.linalg.eigvalsh(K.toarray()) < 0).sum()), name


PATTERNS = {"full rows": (1.0, False, True), "sparse rows": (0.2, False, False), "no diagonal": (1.0, True, False)}


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_an_arrowhead(name: str) -> None:
    full, more, wanted = PATTERNS[name]
    K, n = _matrix("convex", full)
    if more:
        beside = sp.csc_matrix(([0.1, 0.1], ([0, 1], [1, 0])), shape=K.shape)
        K = sp.csc_matrix(K + beside + sp.diags_array(np.where(K.diagonal() == 0, 1e-300, 0.0)))
    assert (Layout(K).arrowhead(n) is not None) is wanted
