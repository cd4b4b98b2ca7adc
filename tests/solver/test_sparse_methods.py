"""Newton-like methods of many unknowns: sparse where there is a pattern, never dense above the size that is stated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors import ordering, sparse_blocks
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.banded import SymmetricBand
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.linear.price import Price
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.minimise import newton_cg
from implicitkit.solver.steps import factored, sparse_trust_region
from implicitkit.solver.steps.sparse_trust_region import sparse_step
from implicitkit.sparsity.compression import known_entries

D = torch.float64
LEVENBERG = get_solver("trust_region", subproblem="levenberg_marquardt")
METHODS = {
    "newton": "newton",
    "chord": "chord",
    "dogleg": "trust_region",
    "Levenberg-Marquardt": LEVENBERG,
    "pseudo_transient": "pseudo_transient",
}


def bratu(u: Tensor, k: Tensor) -> Tensor:
    """``-u'' = k exp(u)``; along its flow it is stable."""
    h2 = (u.shape[-1] + 1.0) ** 2
    ends = torch.nn.functional.pad(u, (1, 1))
    return h2 * (2 * u - ends[..., 2:] - ends[..., :-2]) - k * torch.exp(u)


def coupled(z: Tensor, x: Tensor) -> Tensor:
    """No pattern: every equation sees every unknown."""
    return 2 * z + torch.sin(z) + z.mean(-1, keepdim=True) - x


def refuse(*_: Any) -> Any:
    raise AssertionError("a dense Jacobian is formed")


@pytest.mark.parametrize("method", METHODS)
def test_the_sparse_path_forms_nothing_dense(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 unknowns: the solution and the derivative by a dense linear solver, without a dense matrix in the solve."""
    n = 2000
    k = torch.linspace(0.5, 1.5, n, dtype=D)
    want = ik.root(bratu, torch.zeros(n, dtype=D), (k,), solver="newton").value
    monkeypatch.setattr(Operator, "dense", refuse)
    monkeypatch.setattr(Evaluations, "jacobian", refuse)
    s = ik.root(bratu, torch.zeros(n, dtype=D), (k,), solver=METHODS[method])
    assert bool(s.converged), s
    torch.testing.assert_close(s.value, want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_beyond_the_dense_size_products_do(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pattern no matrix is formed above the limit."""
    n = 300
    for module in (factored, ik.solver.root.pseudo_transient):
        monkeypatch.setattr(module, "DENSE" if module is factored else "_DENSE", 200)
    monkeypatch.setattr(factored.jacobian_at, "__defaults__", (200,))
    monkeypatch.setattr("implicitkit.solver.steps.normal_equations._DENSE", 200)
    monkeypatch.setattr(Operator, "dense", refuse)
    x = torch.linspace(-2, 2, n, dtype=D)
    s = ik.root(coupled, torch.zeros(n, dtype=D), (x,), solver=METHODS[method])
    assert bool(s.converged), s
    assert float(coupled(s.value, x).abs().max()) < 1e-6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [40, 200])
def test_samples_do_not_see_each_other(method: str, n: int) -> None:
    """A batch of easy and hard samples has the points and steps of each alone."""
    k = torch.stack([torch.full((n,), c, dtype=D) for c in (0.1, 3.4, 1.0, 2.9)])

    def run(k: Tensor) -> Any:
        return ik.root(bratu, torch.zeros(len(k), n, dtype=D), (k,), batch_dims=1, in_dims=0, solver=METHODS[method])

    together, alone = run(k), [run(row[None]) for row in k]
    assert bool(together.converged.all())
    torch.testing.assert_close(together.value, torch.cat([s.value for s in alone]), rtol=1e-9, atol=1e-9)
    assert together.steps.tolist() == [int(s.steps) for s in alone]


def test_both_paths_of_the_levenberg_marquardt_step_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal equations with a secant for the length, and singular values with Moré's iteration: the same step, to the tenth
    that its length may differ by."""
    n = 30
    x = torch.linspace(-3, 3, n, dtype=D)
    seen: dict[str, Tensor] = {}

    def first_step(name: str) -> None:
        def callback(step: int, z: Tensor, norm: Tensor) -> None:
            seen.setdefault(name, z.clone())

        solver = get_solver("trust_region", subproblem="levenberg_marquardt", radius=0.5)
        ik.root(
            coupled, torch.ones(n, dtype=D), (x,), solver=solver, max_steps=1, callback=callback, on_failure="ignore"
        )

    first_step("singular values")
    for module in (ik.solver.root.trust_region, factored):
        monkeypatch.setattr(module, "SMALLEST", 10)
    first_step("normal equations")
    one, other = seen["singular values"] - 1, seen["normal equations"] - 1
    assert float(one.norm()) > 0.1
    cosine = float((one * other).sum() / (one.norm() * other.norm()))
    assert cosine > 0.99
    assert float(other.norm() / one.norm()) == pytest.approx(1, abs=0.15)


def test_shifted_blocks() -> None:
    """``a I + b A``, with a pattern that has no diagonal, and of the transposed."""
    from implicitkit.sparsity.compression import coloured

    generator = torch.Generator().manual_seed(0)
    n = 40
    pattern = torch.diag(torch.ones(n - 1), 1) + torch.diag(torch.ones(n - 2), -2)
    ready = coloured(pattern.numpy())
    assert ready is not None
    values = torch.randn(2, ready.pattern.nnz, generator=generator, dtype=D).numpy()
    A = torch.stack([torch.from_numpy(ready.matrix(v).toarray()) for v in values])
    a, b = torch.tensor([0.5, 2.0], dtype=D), torch.tensor([-1.0, 3.0], dtype=D)
    want = a[:, None, None] * torch.eye(n, dtype=D) + b[:, None, None] * A
    blocks = sparse_blocks.SparseBlocks(ready, values)
    rhs = torch.randn(2, n, generator=generator, dtype=D)
    torch.testing.assert_close(blocks.shifted(a, b).solve(rhs), torch.linalg.solve(want, rhs))
    torch.testing.assert_close(blocks.T.shifted(a, b).solve(rhs), torch.linalg.solve(want.mT, rhs))
    torch.testing.assert_close(blocks.columns, A.norm(dim=1))
    torch.testing.assert_close(blocks.T.columns, A.norm(dim=2))


def test_a_singular_jacobian_gives_the_least_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and singular, of many unknowns: the least-squares step, and chord, newton and trust_region still arrive."""
    n = 140

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.cat([z[:1] - z[1:2] + z.sum() * 0, (z[1:-1] + z.sum()) - x[1:-1], (z[:1] - z[1:2]) * 2])

    x = torch.linspace(0, 1, n, dtype=D)
    for method in ("newton", "chord", "trust_region"):
        s = ik.root(f, torch.full((n,), 0.3, dtype=D), (x,), solver=method)
        assert bool(s.converged), (method, s)
        assert float(f(s.value, x).norm()) < 1e-8


@pytest.mark.parametrize("radius", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("definite", [True, False])
@pytest.mark.parametrize("form", ["band", "square", "general"])
def test_steps_by_sparse_factors_minimise_the_model_in_the_region(
    monkeypatch: pytest.MonkeyPatch, form: str, definite: bool, radius: float
) -> None:
    """``(H + mu I) p = -g`` with ``mu >= 0`` and that matrix positive semidefinite; on the boundary unless ``mu = 0``.  Of a
    chain in any numbering, a narrow band, and of few unknowns no general factors are made.  From the shift that was
    found one factorisation does, and a few in a smaller region."""
    narrow = form == "band"
    monkeypatch.setattr(sparse_trust_region, "_DENSE", 512 if form == "square" else 0)
    n, rng = 150, np.random.default_rng(0)
    places = rng.permutation(n)
    off = rng.standard_normal(n - 1)
    H = sp.diags([off, rng.uniform(4, 6, n) if definite else rng.standard_normal(n), off], [-1, 0, 1]).tolil()
    if not narrow:
        pairs = rng.integers(0, n, (2, 2 * n))
        H[pairs[0], pairs[1]] = H[pairs[1], pairs[0]] = 0.1
        H.setdiag(H.diagonal() + definite)
    H = sp.csr_matrix(H)[places][:, places]
    H.sort_indices()
    general, superlu = [0], ordering.superlu
    monkeypatch.setattr(ordering, "superlu", lambda *a, **k: (general.__setitem__(0, 1), superlu(*a, **k))[1])
    g = rng.standard_normal(n)
    blocks = SparseBlocks(known_entries(sp.csr_matrix(H.astype(bool))), H.data[None])
    done = torch.tensor([False])
    none, within = torch.zeros(1, dtype=D), torch.tensor([radius], dtype=D)
    p, promised, shift, made, factors = sparse_step(blocks, torch.from_numpy(g)[None], within, done, none)
    again = sparse_step(blocks, torch.from_numpy(g)[None], within, done, shift)
    assert again.made == (1 if shift > 0 else made) and torch.equal(again.shift, shift)
    assert sparse_step(blocks, torch.from_numpy(g)[None], within / 4, done, shift).made <= 3
    p, length = p[0].numpy(), float(torch.linalg.vector_norm(p))
    assert general[0] == (form == "general")
    mu = -(g + H @ p) @ p / (p @ p)
    assert np.abs(H @ p + mu * p + g).max() < 1e-6 * np.abs(g).max()
    assert mu > -1e-8 and np.linalg.eigvalsh(H.toarray()).min() + mu > -1e-8
    if narrow and definite:
        assert np.abs(H @ SymmetricBand(analyse(H)).cholesky(H.data).solve(g) - g).max() < 1e-12
    assert length < 1.11 * radius and (length > 0.6 * radius or abs(mu) < 1e-8)
    assert made == 1 if definite and abs(mu) < 1e-8 else made <= (4 if radius < 1e3 else 16)
    assert float(shift) == pytest.approx(mu, abs=1e-6 * max(1.0, abs(mu))) or (definite and shift == 0)
    assert float(promised) == pytest.approx(-(g @ p) - 0.5 * p @ (H @ p)) and float(promised) > 0
    assert (factors is not None) == (shift == 0)
    if factors is not None:
        two = torch.from_numpy(np.stack([g, H @ g], 1))[None]
        assert np.abs(H @ factors.T.solve(two)[0].numpy() - two[0].numpy()).max() < 1e-12


@pytest.mark.parametrize("radius", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("several", [1, 40])
def test_steps_leave_a_slope_that_does_not_see_the_lowest_curvature(several: int, radius: float) -> None:
    """The hard case: no shift makes the step long enough, and what is missing goes along the lowest eigenvector.  Within a
    fifth of the best decrease, and by few factorisations (30); from the shift that was found by one."""
    n, rng = 200, np.random.default_rng(0)
    curvatures = np.r_[-5.0 - 1e-3 * np.arange(several), rng.uniform(-4, 6, n - several)]
    g = np.r_[np.zeros(several), rng.standard_normal(n - several)]
    blocks = SparseBlocks(known_entries(sp.identity(n, dtype=bool, format="csr")), curvatures[None])
    given = torch.from_numpy(g)[None], torch.tensor([radius], dtype=D), torch.tensor([False])
    p, promised, shift, made, factors = sparse_step(blocks, *given, torch.zeros(1, dtype=D))
    length = float(torch.linalg.vector_norm(p))
    assert made <= 10 and factors is None and radius / 1.5 < length < 1.11 * radius
    mu = -curvatures.min() if np.linalg.norm(g / (curvatures - curvatures.min() + 1e-9)) < radius else None
    best = 0.5 * (g @ (g / (curvatures + mu + 1e-9)) + mu * radius**2) if mu else 0.0
    assert float(promised) >= 0.8 * best
    assert float(promised) == pytest.approx(
        float(-p @ torch.from_numpy(g) - 0.5 * p.square() @ torch.from_numpy(curvatures))
    )
    again = sparse_step(blocks, *given, shift)
    assert again.made == 1 and float(again.promised) >= 0.8 * best


def test_a_compressed_chain_straightens_out() -> None:
    """Stiff links, too long for the straight line that they begin on: 164 steps, and 276 where those by products that end at
    the boundary of the region go on for as long as each is cheap."""
    n = 1000
    x = torch.linspace(0, 1, n + 2, dtype=D)[1:-1]
    ends = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=D)

    def energy(p: Tensor, weight: Tensor) -> Tensor:
        q = torch.cat([ends[:1], p, ends[1:]])
        return 5e3 * (q.diff(dim=0).norm(dim=1) - 1.2 / (n + 1)).square().sum() + weight * p[:, 1].sum()

    weight = torch.tensor(9.81 / n, dtype=D)
    s = ik.argmin(energy, torch.stack([x, 0 * x], 1), (weight,))
    assert s.solver == "auto (newton_cg)" and int(s.steps) < 220
    assert float(energy(s.value, weight)) == pytest.approx(-2.5802805912, abs=1e-9)


def test_along_a_valley_the_next_shift_is_looked_for_near_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step that is shifted counts as one to the boundary: where the model is good the region grows."""
    given: list[Tensor] = []
    radii: list[float] = []
    found: list[Tensor] = [torch.zeros(1, dtype=D)]

    def step(*arguments: Any) -> Any:
        given.append(arguments[4])
        radii.append(float(arguments[2]))
        made = sparse_step(*arguments)
        found.append(made.shift)
        return made._replace(p=0.7 * made.p) if made.shift > 0 else made

    def valley(z: Tensor, x: Tensor) -> Tensor:
        return (100 * (0.5 * (z.roll(1, -1) + z.roll(-1, -1)) - z * z) ** 2 + (x - z) ** 2).sum(-1)

    monkeypatch.setattr(sparse_trust_region, "sparse_step", step)
    x = torch.linspace(0.5, 1.5, 130, dtype=D)
    ik.argmin(valley, 0 * x, (x,), solver="newton_cg", max_steps=15, on_failure="ignore")
    assert len(given) >= 15 and float(max(found)) > 0
    assert any(b > a for a, b in itertools.pairwise(radii))
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=False))


def test_products_are_tried_again_after_dear_steps_by_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a valley that bends end at the boundary, six factorisations each where a few products would do: in a random
    graph of 1,000 unknowns 4.6 s, 1.2 now."""
    allowed: list[float] = []
    monkeypatch.setattr(newton_cg, "steihaug", lambda *given, path: allowed.append(given[-1]) or "products")
    monkeypatch.setattr(newton_cg, "_by_factors", lambda H, g: H.sparse())
    given = (torch.zeros(1, 200), *(torch.zeros(1) for _ in range(3)), 400)
    for made, price, rent, by_products in (
        (0.0, 20.0, 0.0, True),
        (1.0, 60.0, 0.0, False),
        (2.0, 20.0, 0.0, False),
        (3.0, 20.0, 0.0, True),
        (0.0, 20.0, 59.0, True),
        (0.0, 20.0, 60.0, False),  # of steps that ended at the boundary since
    ):
        H: Any = SimpleNamespace(price=lambda price=price: Price(1, price), sparse=lambda: "factors")
        wanted = ("products", None) if by_products else (None, "factors")
        f: Any = SimpleNamespace(remembered=lambda *_: None)
        assert ik.NewtonCG()._begun(f, newton_cg.Model(H, *given), None, made, rent) == wanted
    assert allowed == [20.0, 60.0, 20.0]


def test_minima_with_sparse_hessians_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of double wells, begun beside the maximum of all: a minimum, and its derivative by the factors of the last
    step."""
    n = 200

    def refuse(*_: Any) -> None:
        raise AssertionError("factors are made again")

    monkeypatch.setattr(sparse_blocks, "factors", refuse)
    x = (0.3 * torch.cos(torch.arange(n, dtype=D))).requires_grad_()

    def energy(z: Tensor, x: Tensor) -> Tensor:
        return (0.25 * (z.square() - 1).square() - x * z).sum() + 0.5 * z.diff().square().sum()

    s = ik.argmin(energy, 0.01 * torch.sin(torch.arange(n, dtype=D)), (x,))
    assert s.solver == "auto (newton_cg)" and int(s.steps) < 60
    H = torch.func.hessian(energy)(s.value.detach(), x.detach())
    assert float(torch.linalg.eigvalsh(H)[0]) > 0
    w = torch.sin(torch.arange(n, dtype=D))
    (g,) = torch.autograd.grad((w * s.value).sum(), x)
    torch.testing.assert_close(g, torch.linalg.solve(H, w), rtol=1e-7, atol=1e-8)


def test_an_eigenpair_has_the_derivative_of_perturbation_theory() -> None:
    """``(A - l) u = 0, |u|^2 = 1``: ``dl = u'dA u``, ``du = -(A - l)^+ dA u`` for ``A`` with the diagonal ``2 + v``."""
    n = 300
    v = torch.linspace(0, 0.1, n, dtype=torch.float64, requires_grad=True)
    off = -torch.ones(n - 1, dtype=torch.float64)

    def conditions(z: Tensor, v: Tensor) -> Tensor:
        u, value = z[:-1], z[-1]
        U = torch.nn.functional.pad(u, (1, 1))
        return torch.cat([(2 + v - value) * u - U[2:] - U[:-2], (u.square().sum() - 1)[None]])

    A = (torch.diag(2 + v) + torch.diag(off, 1) + torch.diag(off, -1)).detach()
    values, vectors = torch.linalg.eigh(A)
    start = torch.cat([vectors[:, 3], values[3:4]]) * 1.001
    z = ik.root(conditions, start, (v,)).value
    u, value = z.detach()[:-1], z.detach()[-1]
    torch.testing.assert_close(value, values[3])
    weights = torch.cos(torch.arange(n + 1, dtype=torch.float64))
    (found,) = torch.autograd.grad(weights @ z, v)
    inverse = torch.linalg.pinv(A - value * torch.eye(n, dtype=torch.float64), rtol=1e-9)
    expected = weights[-1] * u**2 - (inverse @ weights[:-1]) * u
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps over grids as fixed-point maps: Newton's method with sparse factors goes on where acceleration is slow.
M = 40
H2 = (M + 1.0) ** 2


def _neighbours(u: Tensor) -> Tensor:
    U = pad(u, (1, 1, 1, 1))
    return U[2:, 1:-1] + U[:-2, 1:-1] + U[1:-1, 2:] + U[1:-1, :-2]


def _jacobi(u: Tensor, b: Tensor) -> Tensor:
    return (_neighbours(u) + b / H2 - 0.1 * u**3 / H2) / 4


_RED = (torch.arange(M)[:, None] + torch.arange(M)) % 2 == 0


def _red_black(u: Tensor, b: Tensor) -> Tensor:
    u = torch.where(_RED, _jacobi(u, b), u)
    return torch.where(_RED, u, _jacobi(u, b))


def _damped(u: Tensor, b: Tensor) -> Tensor:
    return u / 3 + 2 / 3 * _jacobi(u, b)


SWEEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Jacobi": _jacobi, "red-black": _red_black, "damped": _damped}


@pytest.mark.parametrize("name", SWEEPS)
def test_slow_sweeps_are_left_for_factors(name: str) -> None:
    b = torch.linspace(1, 3, M * M, dtype=D).view(M, M).requires_grad_()
    solution = ik.fixed_point(SWEEPS[name], torch.zeros(M, M, dtype=D), (b,))
    assert solution.solver == "auto (newton)" and int(solution.steps) <= 60
    weights = torch.cos(torch.arange(M * M, dtype=D)).view(M, M)
    (slope,) = torch.autograd.grad((weights * solution.value).sum(), b)
    assert int(solution.backward.steps) <= 4
    line = H2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(M, M))
    L, u, load = sp.csc_matrix(sp.kronsum(line, line)), np.zeros(M * M), b.detach().numpy().reshape(-1)
    for _ in range(10):
        lu = sla.splu(sp.csc_matrix(L + sp.diags(0.3 * u**2)))
        u = u - lu.solve(L @ u + 0.1 * u**3 - load)
    np.testing.assert_allclose(solution.value.detach().numpy().reshape(-1), u, rtol=0, atol=1e-9 * np.abs(u).max())
    adjoint = lu.solve(weights.numpy().reshape(-1))
    np.testing.assert_allclose(slope.numpy().reshape(-1), adjoint, rtol=0, atol=1e-8 * np.abs(adjoint).max())


def test_what_contracts_stays_with_acceleration(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks for a pattern."""

    def never(self: Evaluations, z: Tensor) -> float:
        raise AssertionError

    monkeypatch.setattr(Evaluations, "price_of_sparse", never)
    maps = (lambda u, b: torch.tanh(0.15 * _neighbours(u) + b), lambda u, b: 0.1 * _neighbours(u) + b)
    for contracting in maps:
        solution = ik.fixed_point(contracting, torch.zeros(M, M, dtype=D), (torch.ones(M, M, dtype=D),))
        assert solution.solver == "auto (anderson)" and bool(solution.converged)


def test_without_a_pattern_acceleration_is_left_for_dense_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=D))
    A = Q @ torch.diag(torch.linspace(0, 0.99, 200, dtype=D)) @ Q.T
    solution = ik.fixed_point(lambda z, b: A @ z + b, torch.zeros(200, dtype=D), (torch.ones(200, dtype=D),))
    assert solution.solver == "auto (newton)" and solution.evaluations <= 40
    torch.testing.assert_close(
        solution.value, torch.linalg.solve(torch.eye(200, dtype=D) - A, torch.ones(200, dtype=D))
    )


def test_factors_that_cost_much_are_not_bought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluations, "price_of_sparse", lambda self, z: 1e4)
    solution = ik.fixed_point(_jacobi, torch.zeros(M, M, dtype=D), (torch.ones(M, M, dtype=D),))
    assert solution.solver == "auto (anderson)" and int(solution.steps) > 100


def test_where_newton_fails_acceleration_goes_on() -> None:
    """On a ring the mean is nowhere in the equations: the Jacobian is singular."""
    b = torch.sin(2 * torch.pi * torch.arange(400, dtype=D) / 400)
    start = torch.ones(400, dtype=D)

    def sweep(u: Tensor, b: Tensor) -> Tensor:
        return u / 3 + (u.roll(1) + u.roll(-1) + b / 20) / 3

    solution = ik.fixed_point(sweep, start, (b,))
    assert bool(solution.converged)
    exact = 1 + b / 40 / (1 - np.cos(2 * np.pi / 400))
    torch.testing.assert_close(solution.value, exact, rtol=1e-5, atol=1e-5)


def test_samples_of_a_batch() -> None:
    b = torch.stack([torch.full((M, M), float(k), dtype=D) for k in (1, 2, 3)])
    field = lambda u, b: torch.stack([_jacobi(x, y) for x, y in zip(u, b, strict=True)])  # noqa: E731
    solution = ik.fixed_point(field, torch.zeros(3, M, M, dtype=D), (b,), batch_dims=1)
    assert solution.solver == "auto (newton)" and bool(solution.converged.all())
    torch.testing.assert_close(field(solution.value, b), solution.value, rtol=1e-8, atol=1e-10)
