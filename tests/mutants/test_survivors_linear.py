"""What mutants survived before: linear algebra that is seldom reached, each by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.linear import GMRES, BlockSubstitution
from implicitkit.linear.factors.ordering import Ordering
from implicitkit.linear.iterative.neumann import NeumannSeries
from implicitkit.problem.qp_jacobian import QPJacobian
from implicitkit.problem.quadratic_program import QPConditions
from implicitkit.problem.sparse_conditions import Places, sparse_jacobian
from implicitkit.sets.spectral import positive_part
from implicitkit.solver.least_squares.levenberg_marquardt import _Singular
from implicitkit.solver.minimise.newton_cg import steihaug
from implicitkit.solver.root import trust_region
from implicitkit.solver.steps.paths import Path
from implicitkit.sparsity.colouring import _greedy

D = torch.float64


def _operator(M: Tensor, structure: Any = None) -> Operator:
    """Of one matrix ``(n, n)``, or those of a batch."""
    blocks = M if M.ndim == 3 else M.unsqueeze(0)
    return Operator(
        lambda v: (blocks @ v.unsqueeze(2)).squeeze(2),
        lambda w: (blocks.mT @ w.unsqueeze(2)).squeeze(2),
        lambda: blocks,
        batch=len(blocks),
        size=blocks.shape[1],
        like=blocks[:, 0],
        structure=structure,
    )


def test_linear_products_of_a_function_whose_gradient_is_a_constant() -> None:
    """The gradient of ``sign`` is zero whatever it is multiplied by: no graph leads through it."""
    z, v = torch.tensor([[0.5, -2.0]], dtype=D), torch.ones(1, 2, dtype=D)
    mv, rmv = autodiff.products(*autodiff.recorded(torch.sign, z))
    assert torch.equal(mv(v), torch.zeros_like(v)) and torch.equal(rmv(v), torch.zeros_like(v))


def test_gmres_ends_where_its_space_does() -> None:
    """``A b = 0``: the space of ``b`` has one dimension, whatever the size of ``A``."""
    A = torch.diag(torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=D))
    answer = GMRES().solve(_operator(A), torch.eye(4, dtype=D)[:1], rtol=1e-6, atol=0.0, max_steps=None)
    assert answer.steps.tolist() == [1]
    assert torch.equal(answer.x, torch.zeros(1, 4, dtype=D)) and not bool(answer.converged)


def test_gmres_takes_no_step_along_rounding() -> None:
    """``x_1 = 1`` and ``0 x_2 = 1``: in the plane of ``b`` and ``A b`` nothing says what ``x_2`` is, and it is not 1e15."""
    A, b = torch.diag(torch.tensor([1.0, 0.0], dtype=D)), torch.ones(1, 2, dtype=D)
    answer = GMRES().solve(_operator(A), b, rtol=1e-6, atol=0.0, max_steps=None)
    assert float(answer.x[0, 0]) == pytest.approx(1)
    assert float(answer.x[0, 1].abs()) < 10
    assert float(answer.residual_norm) == pytest.approx(1) and not bool(answer.converged)


def test_linear_order_of_another_pattern_with_as_many_entries_in_each_column() -> None:
    """Unknowns in pairs, (0, 1) and (2, 3), then (0, 2) and (1, 3)."""
    ordering, b = Ordering(), np.arange(1.0, 5.0)
    for pairs in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]):
        A = 4 * np.eye(4)
        for i, j in pairs:
            A[i, j], A[j, i] = 1 + i, 2 + j
        solved = ordering.factor(sp.csc_matrix(A), 0.1).solve(b)
        np.testing.assert_allclose(A @ solved, b, rtol=1e-13)


class _Pair:
    """``[[A, 0], [C, B]]`` by its blocks."""

    unsolved: frozenset[str] = frozenset()

    def __init__(self, A: Tensor, B: Tensor, C: Tensor) -> None:
        self.blocks, self.C, self.n = (A, B), C, len(A)

    def __len__(self) -> int:
        return 2

    def name(self, i: int) -> str:
        return "AB"[i]

    def solved(self, i: int) -> bool:
        return True

    def explicit(self, i: int) -> bool:
        return False

    def take(self, i: int, b: Tensor) -> Tensor:
        return b[:, self.n :] if i else b[:, : self.n]

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)

    def diagonal(self, i: int) -> Operator:
        return _operator(self.blocks[i])

    def couple(self, i: int, x: Tensor) -> dict[int, Tensor]:
        return {} if i else {1: x @ self.C.mT}

    def whole(self) -> Tensor:
        A, B = self.blocks
        return torch.cat([torch.cat([A, torch.zeros_like(self.C.mT)], 1), torch.cat([self.C, B], 1)])


def test_linear_blocks_report_the_residual_of_the_whole() -> None:
    """One step for each of two blocks leaves a residual in both, ``|b - M x|^2 = |r_1|^2 + |r_2|^2``."""
    pair = _Pair(
        torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=D),
        torch.tensor([[1.0, 0.5], [-0.5, 3.0]], dtype=D),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D),
    )
    M, b = pair.whole(), torch.tensor([[1.0, 2.0, 2.0, 1.0]], dtype=D)
    answer = BlockSubstitution(GMRES()).solve(_operator(M, pair), b, rtol=1e-9, atol=0.0, max_steps=1)
    left = b - answer.x @ M.mT
    assert float(left[:, :2].norm()) > 0.1 and float(left[:, 2:].norm()) > 0.1
    assert float(answer.residual_norm) == pytest.approx(float(left.norm()), rel=1e-12)
    assert answer.steps.tolist() == [2] and not bool(answer.converged)


def test_gradient_of_the_positive_part_where_factors_do_not_commute() -> None:
    """Divided differences of ``max(t, 0)`` at 2 and -1: ``(2 - 0) / (2 + 1)`` (Daleckii & Krein)."""
    X = torch.diag(torch.tensor([2.0, -1.0], dtype=D)).requires_grad_()
    G = torch.tensor([[3.0, 1.0], [1.0, 5.0]], dtype=D)
    (got,) = torch.autograd.grad(positive_part(X), X, G)
    torch.testing.assert_close(got, torch.tensor([[3.0, 2 / 3], [2 / 3, 0.0]], dtype=D), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_coloured_as_one_after_the_other_would_be(seed: int) -> None:
    """Whole waves of columns at once, each column when all before it have their colours: no colour more than by turns."""
    pattern = sp.random(90, 60, density=0.05, random_state=seed, format="csr").astype(bool)
    near = (pattern.T.astype(int) @ pattern.astype(int)).toarray() > 0
    np.fill_diagonal(near, False)
    order = np.lexsort((np.random.default_rng(0).permutation(60), -near.sum(1)))
    colours = np.full(60, -1)
    for column in order:
        colours[column] = next(c for c in range(60) if c not in colours[near[column]])
    np.testing.assert_array_equal(_greedy(pattern), colours)


# ---------------------------------------------------------------------------------------------------------------------
# What a step's own model says, against the definition: minimisers in a ball, the decrease they promise, secant pairs.
F64 = torch.float64


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("definite", [True, False], ids=["definite", "indefinite"])
@pytest.mark.parametrize("radius", [0.1, 1.0, 100.0])
def test_steihaug_says_how_far_its_model_falls(radius: float, definite: bool) -> None:
    """``-(g'p + p'Hp / 2)``; where the curvature is negative it goes to the boundary (Nocedal & Wright 2006, alg. 7.2)."""
    A = normal(4, 6, 6, seed=0)
    H = A @ A.mT + torch.eye(6, dtype=F64) if definite else -A @ A.mT - torch.eye(6, dtype=F64)
    g, sizes = normal(4, 6, seed=1), torch.full((4,), radius, dtype=F64)
    product = _operator(H)
    p, fall = steihaug(product, g, sizes, torch.zeros(4, dtype=F64), torch.zeros(4, dtype=torch.bool), 2)
    model = (g * p).sum(1) + 0.5 * (p * (H @ p.unsqueeze(2)).squeeze(2)).sum(1)
    torch.testing.assert_close(fall, -model, rtol=1e-10, atol=1e-12)
    assert bool((fall > 0).all())
    if not definite:
        torch.testing.assert_close(torch.linalg.vector_norm(p, dim=1), sizes)


@pytest.mark.parametrize("definite", [True, False], ids=["definite", "indefinite"])
def test_a_path_that_is_cut_is_the_one_that_is_walked(definite: bool) -> None:
    """For smaller radii, of each sample another; one needs no step.  Too many numbers are not kept."""
    A = normal(4, 6, 6, seed=0)
    H = A @ A.mT + (0.1 if definite else -4) * torch.eye(6, dtype=F64)
    g, nobody = normal(4, 6, seed=1), torch.tensor([False, False, False, True])
    product = _operator(H)
    path, target = Path(g), torch.zeros(4, dtype=F64)
    assert path.cut(target + 1) is None
    p, _ = steihaug(product, g, target + 5, target, nobody, 5, path=path)
    for part in (1.0, 0.9, 0.3, 0.01):
        radius = part * torch.linalg.vector_norm(p, dim=1) + 1e-9
        want, found = steihaug(product, g, radius, target, nobody, 5), path.cut(radius)
        assert found is not None
        torch.testing.assert_close(found[0], want[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[1], want[1], rtol=1e-9, atol=1e-12)
    many = torch.zeros(1, 1 << 24, dtype=torch.int8)
    path.add(many, many)
    assert path.cut(target + 1) is None


@pytest.mark.parametrize("mu", [0.0, 1e-2, 10.0])
def test_levenberg_marquardt_says_how_far_its_model_falls(mu: float) -> None:
    """``(|r|^2 - |R p + r|^2) / 2``."""
    model: Any = object.__new__(_Singular)
    model.R, model.r = normal(3, 8, 5, seed=2), normal(3, 8, seed=3)
    D = 0.5 + normal(3, 5, seed=4).abs()
    model.scale(D)
    p, fall = model.step(torch.full((3,), mu, dtype=F64), torch.empty(0), *torch.ones(2, 3, dtype=torch.bool))
    left = model.r + (model.R @ p.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(fall, 0.5 * (model.r.square().sum(1) - left.square().sum(1)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_minimiser_in_a_ball_is_found_in_a_few_newton_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``(J'J + lam I) p = -J'F`` with ``|p| = radius`` to a hundredth (More 1978); by bisection it would take ten steps."""
    J, F = normal(3, 5, 5, seed=seed), normal(3, 5, seed=seed + 10)
    model = trust_region._Exact(J, F, torch.ones(3, 5, dtype=F64))
    newton = torch.linalg.vector_norm(torch.linalg.solve(J, F), dim=1)
    norms, count = torch.linalg.vector_norm, []
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *a, **k: count.append(1) or norms(*a, **k))
    for share in (1e-3, 1e-2, 0.3):
        count.clear()
        p, linear = model.step(share * newton)
        assert torch.allclose(norms(p, dim=1), share * newton, rtol=0.011)
        assert torch.allclose(linear, F + (J @ p.unsqueeze(2)).squeeze(2), rtol=1e-10, atol=1e-12)
        assert len(count) <= 8, (share, len(count))


def test_a_trust_region_never_takes_a_step_uphill() -> None:
    """Newton's method diverges from 3 for ``atan``; a step is taken by what it gains beside what its model promised."""
    for subproblem in ("dogleg", "levenberg_marquardt"):
        solver = ik.TrustRegion(subproblem=subproblem, radius=100.0)
        s = ik.root(torch.atan, torch.tensor([3.0], dtype=F64), solver=solver, trace=True)
        norms = torch.stack(list(s.trace)).flatten() if not isinstance(s.trace, Tensor) else s.trace.flatten()
        assert bool((norms[1:] < norms[:-1]).all()), norms


def bfgs_matrix(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``H <- (I - s y'/s'y) H (I - y s'/s'y) + s s'/s'y`` for each pair in turn, from ``s'y / y'y`` of the last."""
    n = len(pairs[-1][0])
    s, y = pairs[-1]
    H = (s @ y) / (y @ y) * torch.eye(n, dtype=F64)
    for s, y in pairs:
        V = torch.eye(n, dtype=F64) - torch.outer(y, s) / (s @ y)
        H = V.T @ H @ V + torch.outer(s, s) / (s @ y)
    return H


def test_lbfgs_is_bfgs_of_its_last_pairs() -> None:
    """Of three samples: one with a pair that is skipped, one that forgets; older pairs are overwritten."""
    method, n, skipped, forgotten = ik.LBFGS(memory=3), 6, 2, 3
    A = torch.diag(torch.linspace(1, 9, n, dtype=F64)) + 0.1
    memory = method.blank(torch.zeros(3, n, dtype=F64))
    known = list[list[tuple[Tensor, Tensor]]]([[], [], []])
    for k in range(7):
        s = normal(3, n, seed=k)
        y = s @ A + 0.3 * s**3
        good = torch.tensor([True, k != skipped, True])
        y = torch.where(good.unsqueeze(1), y, torch.nan)
        memory = method.learn(memory, s, y, (s * y).sum(1), good)
        if k == forgotten:
            memory = method.forget(memory, torch.tensor([False, False, True]))
            known[2] = []
        g = normal(3, n, seed=100 + k)
        direction = method.direction(g, memory)
        for i in range(3):
            pair = (s[i], y[i]) if bool(good[i]) else None  # it takes the place of another all the same
            known[i] = [*known[i], pair][-3:] if k != forgotten or i != 2 else []  # type: ignore[list-item]
            pairs = [p for p in known[i] if p is not None]
            want = -(bfgs_matrix(pairs) @ g[i]) if pairs else -g[i]
            torch.testing.assert_close(direction[i], want, rtol=1e-9, atol=1e-12, msg=f"sample {i} after pair {k}")


def test_nesterov_gains_momentum() -> None:
    """The bound on its steps goes with the root of the condition, 100 here (Nesterov 1983)."""
    w = torch.logspace(0, 2, 10, dtype=F64)
    f = lambda z: 0.5 * (w * z * z).sum() - z.sum()  # noqa: E731
    steps = [
        int(ik.argmin(f, torch.zeros(10, dtype=F64), solver=ik.GradientDescent(0.01, nesterov=fast), rtol=1e-6).steps)
        for fast in (False, True)
    ]
    assert 3 * steps[1] < steps[0], steps


def test_sqp_sees_the_curvature_of_its_constraints() -> None:
    """On a sphere: quadratic convergence by the Hessian of the Lagrangian, linear by that of the objective alone."""
    goal = torch.tensor([2.0, 1.0, 0.5], dtype=F64)
    f = lambda z: (z - goal).square().sum() + z[0] ** 3  # noqa: E731
    sphere = ik.Equality(lambda z: z.square().sum() - 1)
    start = torch.tensor([0.1, 0.9, 0.3], dtype=F64)
    s = ik.argmin(f, start, constraints=sphere, solver="sqp", rtol=1e-12, atol=1e-12)
    assert int(s.steps) <= 8


@pytest.mark.parametrize("ball", ["l1_ball", "l2_ball", "linf_ball"])
def test_a_ball_that_is_not_at_the_origin(ball: str) -> None:
    centre, v = torch.tensor([1.0, -2.0, 0.5], dtype=F64), torch.tensor([4.0, 1.0, 0.0], dtype=F64)
    make = getattr(ik.project, ball)
    torch.testing.assert_close(make(0.7, centre=centre)(v), centre + make(0.7)(v - centre))
    torch.testing.assert_close(make(0.7, centre=centre)(centre), centre)


# ------------------------------------------------------------------- the conditions of a quadratic program, by their blocks
N, P_ROWS, M_ROWS = 4, 1, 3


def _program(two_sided: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Two programs at points where some rows are beyond ``h``, some below ``lower``; ``P`` is not symmetric."""
    part = {
        "P": normal(2, N, N, seed=20), "q": normal(2, N, seed=21), "A": normal(2, P_ROWS, N, seed=22),
        "b": normal(2, P_ROWS, seed=23), "G": normal(2, M_ROWS, N, seed=24),
    }  # fmt: skip
    w = normal(2, N + P_ROWS + M_ROWS, seed=25)
    v = w[:, N + P_ROWS :] + (part["G"] @ w[:, :N].unsqueeze(2)).squeeze(2)
    part["lower"] = v + torch.tensor([0.5, -0.5, -1.0], dtype=F64)  # below it: the first row
    if two_sided:
        part["h"] = v + torch.tensor([1.0, -0.2, 0.3], dtype=F64)  # beyond it: the second
    return part, w


def _natural_map(part: dict[str, Tensor], w: Tensor) -> Tensor:
    """``(P z + q + A'y + G'lam, A z - b, lam - (v - h)_+ + (lower - v)_+)``, ``v = lam + G z``."""
    z, y, lam = w.split([N, P_ROWS, M_ROWS], 1)
    times = lambda M, x: (M @ x.unsqueeze(2)).squeeze(2)  # noqa: E731
    v = lam + times(part["G"], z)
    symmetric = 0.5 * (part["P"] + part["P"].mT)
    slope = times(symmetric, z) + part["q"] + times(part["A"].mT, y) + times(part["G"].mT, lam)
    held = (part["lower"] - v).clamp_min(0) - ((v - part["h"]).clamp_min(0) if "h" in part else 0)
    return torch.cat([slope, times(part["A"], z) - part["b"], lam + held], 1)


def _jacobian(part: dict[str, Tensor], w: Tensor) -> Tensor:
    full = torch.func.jacrev(lambda w: _natural_map(part, w).sum(0))(w)
    return full.movedim(1, 0)


@pytest.mark.parametrize("two_sided", [False, True], ids=["lower", "two sides"])
def test_the_blocks_of_a_quadratic_program(two_sided: bool) -> None:
    part, w = _program(two_sided)
    J = QPJacobian.of(part, w, 0.0)
    x = normal(*w.shape, seed=26)
    torch.testing.assert_close(J.mv(x), (_jacobian(part, w) @ x.unsqueeze(2)).squeeze(2))
    torch.testing.assert_close(J.rmv(x), (_jacobian(part, w).mT @ x.unsqueeze(2)).squeeze(2))
    names = list(part)
    leaves = {name: t.clone().requires_grad_() for name, t in part.items()}
    want = torch.autograd.grad(_natural_map(leaves, w), list(leaves.values()), x)
    found = J.pull(tuple(w.split([N, P_ROWS, M_ROWS], 1)), x, set(names))
    for name, expected in zip(names, want, strict=True):
        torch.testing.assert_close(found[name], expected, msg=name)


@pytest.mark.parametrize("two_sided", [False, True], ids=["lower", "two sides"])
def test_the_entries_of_a_sparse_quadratic_program(two_sided: bool) -> None:
    part, w = _program(two_sided)
    places, entries = {}, dict(part)
    for name in ("P", "A", "G"):
        rows, columns = part[name].shape[1:]
        i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        keep = (i + 2 * j) % 4 != 1  # not symmetric either
        part[name] = part[name] * keep
        places[name] = Places(i[keep], j[keep], (rows, columns))
        entries[name] = part[name][:, keep]
    J = sparse_jacobian(entries, places, w, 0.0)
    torch.testing.assert_close(J.dense(), _jacobian(part, w))


def test_a_quadratic_program_as_data_is_symmetric() -> None:
    part, _ = _program(True)
    conditions: Any = object.__new__(QPConditions)
    data = conditions.one_sided(part)
    torch.testing.assert_close(data.P, 0.5 * (part["P"] + part["P"].mT))
    torch.testing.assert_close(data.G, torch.cat([part["G"], -part["G"]], 1))
    torch.testing.assert_close(data.h, torch.cat([part["h"], -part["lower"]], 1))


def test_a_series_that_is_cut_short_has_not_converged() -> None:
    J = 0.9 * torch.linalg.qr(normal(1, 8, 8, seed=27))[0]
    b = normal(1, 8, seed=28)
    A = _dense_operator(J - torch.eye(8, dtype=F64))
    short = NeumannSeries().solve(A, b, rtol=1e-8, atol=0.0, max_steps=20)
    assert not bool(short.converged)
    long = NeumannSeries().solve(A, b, rtol=1e-8, atol=0.0, max_steps=400)
    assert bool(long.converged)
    torch.testing.assert_close(long.x, torch.linalg.solve(J - torch.eye(8, dtype=F64), b), rtol=1e-6, atol=1e-7)


def _dense_operator(M: Tensor) -> Operator:
    return Operator(
        lambda v: (M @ v.unsqueeze(2)).squeeze(2),
        lambda w: (M.mT @ w.unsqueeze(2)).squeeze(2),
        lambda: M,
        batch=len(M),
        size=M.shape[1],
        like=M[:, :, 0],
        fixed_point=True,
    )
