"""What mutants survived before: the paths and factors that no other test looks at (see ``table.py``)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrices import operator, randn
from torch import Tensor, nn
from torch.func import vmap

import implicitkit as ik
from implicitkit import extend
from implicitkit.diagnostics import degeneracy
from implicitkit.foundation import autodiff, structured
from implicitkit.foundation.operators import minus, preconditioned, shifted
from implicitkit.lifting.reach import reachable_modules
from implicitkit.linear import GMRES, LSMR, LU, BiCGStab
from implicitkit.linear.auto import Auto
from implicitkit.linear.conditions.kkt import KKT
from implicitkit.linear.conditions.saddle import Saddle
from implicitkit.linear.iterative import lsmr
from implicitkit.linear.iterative.neumann import NeumannSeries
from implicitkit.problem.qp_jacobian import QPJacobian
from implicitkit.solver.root.pseudo_transient import PseudoTransient, _implicit_euler
from implicitkit.solver.steps.restarts import watch

D = torch.float64


def assert_near(got: Any, want: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# ------------------------------------------------------------------------------------------- what the walk finds, alone
class _Owner:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def call(self, z: Tensor) -> Any:
        return self.net(z)


def _holding(module: nn.Module) -> dict[str, Callable[..., Any]]:
    def helper(z: Tensor) -> Any:
        return module(z)

    def plain(z: Tensor, net: Any = None) -> Any:
        return net(z)

    def default(z: Tensor, net: Any = module) -> Any:
        return net(z)

    def keyword(z: Tensor, *, net: Any) -> Any:
        return net(z)

    def by_global(z: Tensor) -> Any:
        return HELPER(z)  # type: ignore[name-defined]  # noqa: F821

    def first(net: Any, z: Tensor) -> Any:
        return net(z)

    def with_global(value: Any) -> Callable[..., Any]:
        made = type(by_global)(by_global.__code__, {"HELPER": value})
        return made

    box = {"nets": [module]}
    return {
        "closure": lambda z: module(z),
        "closure_dict": lambda z: box["nets"][0](z),
        "default": default,
        "partial_keyword": functools.partial(keyword, net=module),
        "partial_positional": functools.partial(first, module),
        "partial_of_partial": functools.partial(functools.partial(plain, net=module)),
        "global_module": with_global(module),
        "global_function": with_global(helper),
        "global_partial": with_global(functools.partial(keyword, net=module)),
        "method": _Owner(module).call,
    }


@pytest.mark.parametrize("way", list(_holding(nn.Identity())))
def test_reach_finds_the_module(way: str) -> None:
    module = nn.Linear(2, 2)
    found, _ = reachable_modules(_holding(module)[way])
    assert [id(m) for m in found] == [id(module)], way


# ----------------------------------------------------------------------------------------- products and operators
class _NoRule(torch.autograd.Function):
    """An operation that vmap does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.detach().numpy() * 3) * x.detach() ** 2


@pytest.mark.parametrize("chunk", [1 << 24, 40], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("few", [0, 1 << 16], ids=["many numbers", "few numbers"])
@pytest.mark.parametrize(("n", "m"), [(2, 9), (3, 3), (7, 4), (6, 13)], ids=str)
def test_jacobian_by_rows_and_by_columns(n: int, m: int, few: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_CHUNK", chunk)
    monkeypatch.setattr(autodiff, "_FEW_NUMBERS", few)
    M = randn(m, n)
    z = randn(3, n, seed=1)
    got = autodiff.jacobian(lambda y: torch.sin(y @ M.mT) * y.sum(1, keepdim=True), z)
    want = torch.stack([torch.func.jacrev(lambda y: torch.sin(M @ y) * y.sum())(row) for row in z])
    assert_near(got, want)


def test_jacobian_of_an_operation_without_a_batching_rule() -> None:
    z = randn(2, 6)
    assert_near(autodiff.jacobian(_NoRule.apply, z), torch.diag_embed(3 * z**2))


def test_operators_are_combined_as_their_matrices() -> None:
    M, N, v = randn(3, 4, 4), randn(3, 4, 4, seed=1), randn(3, 4, seed=2)
    a, b = torch.tensor([1.0, -2.0, 0.5], dtype=D), torch.tensor([0.3, 1.0, -1.0], dtype=D)
    eye = torch.eye(4, dtype=D)
    rows = [
        (shifted(operator(M), a, b), a[:, None, None] * eye + b[:, None, None] * M),
        (minus(operator(M), operator(N)), M - N),
        (operator(M).T, M.mT),
    ]
    for A, matrix in rows:
        assert_near(A.dense(), matrix)
        assert_near(A.mv(v), torch.einsum("bij,bj->bi", matrix, v))
        assert_near(A.rmv(v), torch.einsum("bij,bi->bj", matrix, v))
    right = preconditioned(operator(M), lambda v: torch.einsum("bij,bj->bi", N, v))
    assert_near(right.mv(v), torch.einsum("bij,bj->bi", M @ N, v))


# ---------------------------------------------------------------------------------------------------- linear solvers
def _symmetric(values: Tensor, seed: int = 3) -> Tensor:
    Q = torch.linalg.qr(randn(len(values), len(values), seed=seed))[0]
    return (Q * values) @ Q.mT


LIMITS: dict[str, Any] = {"rtol": 1e-9, "atol": 0.0, "max_steps": None}


def test_linear_auto_goes_on_with_gmres_where_cg_cannot() -> None:
    n = 100
    definite, indefinite = torch.linspace(1, 4, n, dtype=D), torch.linspace(1, 4, n, dtype=D)
    indefinite[:5] *= -1
    singular = torch.linspace(-1, 4, n, dtype=D).clamp_min(0)
    M = torch.stack([_symmetric(definite), _symmetric(indefinite), _symmetric(singular)])
    b = randn(3, n)
    found = Auto().solve(operator(M, symmetric=True), b, **LIMITS)
    residual = torch.linalg.vector_norm(b - torch.einsum("bij,bj->bi", M, found.x), dim=1)
    assert found.converged.tolist() == [True, True, False]  # the third is not solvable
    assert_near(found.residual_norm[:2], residual[:2], rtol=1e-3, atol=1e-9)
    assert bool((residual[:2] <= 1e-9 * torch.linalg.vector_norm(b[:2], dim=1)).all())


def test_linear_auto_takes_gmres_where_the_matrix_is_not_symmetric() -> None:
    n = 80
    M = (torch.eye(n, dtype=D) * 3 + randn(n, n) / n**0.5).unsqueeze(0)
    b = randn(1, n, seed=1)
    found = Auto().solve(operator(M), b, **LIMITS)
    assert bool(found.converged.all())
    assert_near(found.x, torch.linalg.solve(M, b), rtol=1e-6, atol=1e-7)


def test_linear_bicgstab_returns_its_best_iterate() -> None:
    """Its residuals have peaks; what is returned after ``k`` products is never worse than after fewer."""
    n = 40
    M = (torch.eye(n, dtype=D) + 1.2 * randn(n, n, seed=4) / n**0.5).unsqueeze(0)
    b = randn(1, n, seed=5)
    norms = []
    for k in range(4, 60, 2):
        found = BiCGStab().solve(operator(M), b, rtol=1e-13, atol=0.0, max_steps=k)
        norms.append(float(torch.linalg.vector_norm(b - torch.einsum("bij,bj->bi", M, found.x))))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(norms)), norms


def test_linear_gmres_keeps_its_basis_orthogonal() -> None:
    """Eigenvalues over eight orders: one cycle of ``n`` steps ends at rounding only with an orthogonal basis."""
    n = 40
    M = (torch.linalg.qr(randn(n, n, seed=6))[0] * torch.logspace(0, -8, n, dtype=D)).unsqueeze(0)
    M = M @ torch.linalg.qr(randn(n, n, seed=7))[0]
    x = randn(1, n, seed=8)
    b = torch.einsum("bij,bj->bi", M, x)
    found = GMRES(restart=n).solve(operator(M), b, rtol=1e-11, atol=0.0, max_steps=n)
    assert bool(found.converged.all()), float(found.residual_norm)


def test_linear_gmres_exhausts_small_krylov_spaces() -> None:
    """Minimal polynomials of degree one and two beside a full one, asked for more than rounding allows."""
    n = 12
    half = torch.diag(torch.tensor([1.0, 3.0], dtype=D).repeat(n // 2))
    M = torch.stack([2 * torch.eye(n, dtype=D), half, torch.eye(n, dtype=D) * 3 + randn(n, n) / 4])
    b = randn(3, n, seed=1)
    found = GMRES().solve(operator(M), b, rtol=1e-18, atol=0.0, max_steps=None)
    assert_near(found.x, torch.linalg.solve(M, b.unsqueeze(2)).squeeze(2), rtol=1e-10, atol=1e-11)


def test_linear_gmres_drops_a_direction_that_is_rounding() -> None:
    """A singular block whose right side lies in the range but for rounding: the answer stays of its size."""
    M = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=D)).unsqueeze(0)
    b = torch.tensor([[1.0, 1.0, 1.0, 1e-17]], dtype=D)
    found = GMRES().solve(operator(M), b, rtol=1e-14, atol=0.0, max_steps=None)
    assert_near(found.x[:, :3], torch.tensor([[1.0, 0.5, 1 / 3]], dtype=D), rtol=1e-10, atol=1e-12)
    assert float(found.x.abs().max()) < 2


def test_linear_lsmr_says_no_larger_norm_the_longer_it_goes_on() -> None:
    """``|A|`` by the bidiagonal matrix, which has ``n`` rows: what rounding adds made it 5.7 times as large, and claims as
    much looser."""
    n, size = 30, torch.logspace(0, -1.5, 30, dtype=D)
    M = (torch.linalg.qr(randn(n, n, seed=6))[0] * size @ torch.linalg.qr(randn(n, n, seed=7))[0]).unsqueeze(0)
    left, all_of = torch.zeros(1, dtype=D), torch.ones(1, dtype=torch.bool)
    _, _, norm = lsmr._bidiagonalise(operator(M), randn(1, n, seed=8), left, 1e-17, all_of, torch.tensor([1000]))
    assert 0.9 < float(norm / torch.linalg.matrix_norm(M[0])) < 1.5


def test_linear_lsmr_claims_no_least_squares_solution_that_is_none() -> None:
    """Inconsistent and cut off anywhere: converged only where ``|A'r| <= rtol |A| |r|``."""
    n = 30
    values = torch.cat([torch.logspace(0, -1.5, n - 3, dtype=D), torch.zeros(3, dtype=D)])
    M = (torch.linalg.qr(randn(n, n, seed=6))[0] * values @ torch.linalg.qr(randn(n, n, seed=7))[0]).unsqueeze(0)
    b = randn(1, n, seed=8)
    claims = []
    for k in range(6, 240, 6):
        found = LSMR().solve(operator(M), b, rtol=1e-8, atol=0.0, max_steps=k)
        r = b - torch.einsum("bij,bj->bi", M, found.x)
        gradient = torch.linalg.vector_norm(torch.einsum("bij,bi->bj", M, r))
        claims.append(bool(found.converged))
        assert not claims[-1] or float(gradient) <= 1e-8 * float(torch.linalg.matrix_norm(M[0]) * r.norm()), k
    assert claims[-1] and not claims[0]


def test_linear_kkt_takes_small_singular_values_for_what_they_are() -> None:
    M = torch.diag(torch.tensor([1.0, 1e-4, 0.0], dtype=D)).unsqueeze(0)
    b = torch.tensor([[1.0, 1.0, 0.0]], dtype=D)
    found = KKT().solve(operator(M), b, **LIMITS)
    assert_near(found.x, torch.tensor([[1.0, 1e4, 0.0]], dtype=D))
    assert bool(found.converged.all())


def test_linear_kkt_takes_rows_of_rounding_errors_for_none() -> None:
    """In units of its own, such a row asked for another solution than the others."""
    M = torch.tensor([[[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1e-17, 2e-17, 0.0]]], dtype=D)
    b = torch.tensor([[1.0, 1.0, 0.0]], dtype=D)
    assert_near(KKT().solve(operator(M), b, **LIMITS).x, torch.tensor([[1 / 3, 1 / 3, 0.0]], dtype=D))


def test_linear_kkt_of_a_large_row_beside_a_hessian_of_one() -> None:
    """All rows and columns are of like size, and half of the singular values counted as zero."""
    d = 1e12 * torch.tensor([1.0, 2.0, 0.5], dtype=D)
    M, b = torch.block_diag(2 * torch.eye(3, dtype=D), torch.zeros(1, 1, dtype=D)), torch.eye(4, dtype=D)[1:2]
    M[3, :3] = M[:3, 3] = d
    across = torch.eye(3, dtype=D) - torch.outer(d, d) / (d @ d)
    assert_near(KKT().solve(operator(M.unsqueeze(0)), b, **LIMITS).x[:, :3], across[1:2] / 2)


def test_linear_kkt_without_a_matrix() -> None:
    """Above ``dense_size``: GMRES for regular samples, LSMR for singular ones."""
    n = 10
    regular = torch.eye(n, dtype=D) * 3 + randn(n, n) / 3
    singular = torch.diag(torch.linspace(0, 1, n, dtype=D))
    M = torch.stack([regular, singular])
    b = randn(2, n, seed=1)
    b[1, 0] = 1.0  # outside the range: the answer in the sense of least squares is wanted
    found = KKT(dense_size=4).solve(operator(M), b, **LIMITS)
    assert_near(found.x[0], torch.linalg.solve(regular, b[0]), rtol=1e-6, atol=1e-8)
    assert_near(found.x[1], torch.linalg.pinv(singular) @ b[1], rtol=1e-6, atol=1e-7)
    unsolved = KKT(degenerate="raise", dense_size=4).solve(operator(M), b, **LIMITS)
    assert unsolved.converged.tolist() == [True, False]


def test_linear_lu_refines() -> None:
    """Rows of very different size: the first solution misses the tolerance, the refined one meets it."""
    n = 30
    scale = torch.logspace(0, -7, n, dtype=D)
    M = (scale[:, None] * randn(n, n, seed=14)).unsqueeze(0)
    b = torch.einsum("bij,bj->bi", M, randn(1, n, seed=2))
    plain = torch.linalg.vector_norm(b - torch.einsum("bij,bj->bi", M, torch.linalg.solve(M, b)))
    target = 0.5 * float(plain / torch.linalg.vector_norm(b))
    found = LU().solve(operator(M), b, rtol=target, atol=0.0, max_steps=None)
    assert float(found.residual_norm) < float(plain)
    assert int(found.steps) == 2


# -------------------------------------------------------------------------------------- the Jacobian of a program
@pytest.mark.parametrize("kappa", [0.0, 1e-2], ids=["kinked", "smooth"])
@pytest.mark.parametrize("names", ["P q G h", "P q A b G h", "P q G lower", "P q A b G h lower"])
def test_qp_jacobian_inverts_what_it_multiplies(names: str, kappa: float) -> None:
    n, p, m, batch = 4, 1, 3, 2
    root = randn(batch, n, n)
    parts = {
        "P": root @ root.mT + torch.eye(n, dtype=D),
        "q": randn(batch, n, seed=1),
        "A": randn(batch, p, n, seed=2),
        "b": randn(batch, p, seed=3),
        "G": randn(batch, m, n, seed=4),
        "h": randn(batch, m, seed=5).abs(),
        "lower": -randn(batch, m, seed=6).abs() - 1,
    }
    part = {name: parts[name] for name in names.split()}
    size = n + (p if "A" in part else 0) + m
    J = QPJacobian.of(part, randn(batch, size, seed=7), kappa)
    M, w = J.dense(), randn(batch, size, seed=8)
    assert_near(J.mv(w), torch.einsum("bij,bj->bi", M, w))
    assert_near(J.rmv(w), torch.einsum("bij,bi->bj", M, w))
    assert_near(J.inverse(w)[0], torch.linalg.solve(M, w.unsqueeze(2)).squeeze(2), rtol=1e-6, atol=1e-7)
    assert_near(J.transposed_inverse(w)[0], torch.linalg.solve(M.mT, w.unsqueeze(2)).squeeze(2), rtol=1e-6, atol=1e-7)
    T = J.operator().T
    assert_near(T.solve(w)[0], J.transposed_inverse(w)[0])
    assert_near(T.mv(w), J.rmv(w))


def test_qp_jacobian_of_a_saddle_with_a_diagonal() -> None:
    n, r = 4, 3
    root, C, e = randn(1, n, n), randn(1, r, n, seed=1), torch.tensor([[0.0, 0.5, torch.inf]], dtype=D)
    P = root @ root.mT + torch.eye(n, dtype=D)
    a, c = randn(1, n, seed=2), randn(1, r, seed=3)
    x, v, norm = Saddle(P, C, e).solve(a, c)
    K = torch.cat([torch.cat([P[0], C[0, :2].mT], 1), torch.cat([C[0, :2], -torch.diag(e[0, :2])], 1)], 0)
    want = torch.linalg.solve(K, torch.cat([a[0], c[0, :2]]))
    assert_near(torch.cat([x[0], v[0, :2]]), want, rtol=1e-8, atol=1e-9)
    assert float(v[0, 2]) == 0 and float(norm) < 1e-9


def test_qp_of_a_matrix_that_is_not_symmetric() -> None:
    """Only the symmetric part counts, in the value and in every derivative: ``d/dP`` is symmetric."""
    P = (torch.tensor([[2.0, 1.5], [-0.5, 3.0]], dtype=D)).requires_grad_()
    q, G, h = torch.tensor([-1.0, -2.0], dtype=D), torch.eye(2, dtype=D), torch.tensor([0.2, 9.0], dtype=D)
    z = ik.solve(ik.QuadraticProgram(P, q, G=G, h=h)).value
    S = (0.5 * (P + P.mT)).detach().requires_grad_()
    w = torch.stack([h[0], -(q[1] + S[0, 1] * h[0]) / S[1, 1]])
    assert_near(z, w.detach())
    (got,), (want,) = torch.autograd.grad(z.sum(), P), torch.autograd.grad(w.sum(), S)
    assert_near(got, 0.5 * (want + want.mT), rtol=1e-7)
    assert_near(torch.func.jacfwd(lambda P: ik.solve(ik.QuadraticProgram(P, q, G=G, h=h)).value.sum())(P.detach()), got)


# ------------------------------------------------------------------------------------- degeneracy, steps, messages
def _program(gap: float, lower: bool) -> ik.Solution:
    """``min |z|^2 / 2 - t z`` with ``z_1`` at its bound by ``gap``, ``z_2`` free."""
    side = -1.0 if lower else 1.0
    q = -torch.tensor([side * (1 + gap), 0.2], dtype=D)
    bound = torch.tensor([side, 5 * side], dtype=D)
    return ik.solve(
        ik.QuadraticProgram(torch.eye(2, dtype=D), q, G=torch.eye(2, dtype=D), **{"lower" if lower else "h": bound})
    )


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize(("gap", "active", "weak"), [(0.5, 1, 0), (1e-9, 0, 1), (-0.5, 0, 0)], ids=str)
def test_degeneracy_counts_active_and_weakly_active_rows(gap: float, active: int, weak: int, lower: bool) -> None:
    report = degeneracy(_program(gap, lower))
    assert (int(report.active), int(report.weakly_active)) == (active, weak)


def test_degeneracy_has_the_rank_of_dependent_rows() -> None:
    P, G, h = torch.eye(2, dtype=D), torch.ones(2, 2, dtype=D), torch.ones(2, dtype=D)
    report = degeneracy(ik.solve(ik.QuadraticProgram(P, torch.tensor([-3.0, -3.0], dtype=D), G=G, h=h)))
    assert int(report.rank) == 3 and report.size == 4 and not bool(report.regular)


def test_stagnating_samples_are_told_to_forget() -> None:
    """At every check, a sample whose best residual has not fallen since the last one."""
    state: Any = {}
    best = torch.tensor([1.0, 1.0], dtype=D)
    for step in range(1, 9):
        best = torch.tensor([1.0, 0.5**step], dtype=D)
        f: Any = SimpleNamespace(norm=best.clone(), best_norm=best)
        forget, state = watch(f, state, 10.0, 4)
        if step == 8:
            assert forget is not None and forget.tolist() == [True, False]
        else:
            assert forget is None or not bool(forget.any())


def test_samples_that_failed_are_named_worst_first() -> None:
    shift = torch.tensor([[0.1], [10.0], [1.0]], dtype=D)
    with pytest.raises(ik.ConvergenceError) as caught:
        ik.root(
            lambda z, s: z * z + s, torch.ones(3, 1, dtype=D), (shift,), batch_dims=1, solver="newton", max_steps=30
        )
    assert caught.value.samples == (1, 2, 0)
    assert list(caught.value.residual_norms) == sorted(caught.value.residual_norms, reverse=True)


@pytest.mark.parametrize("solver", ["anderson", "newton", "broyden", "picard"])
def test_samples_are_dropped_whatever_dimension_carries_them(solver: str) -> None:
    """``in_dims`` other than 0: values and gradients are those of the samples alone, and samples are dropped."""
    slope = torch.tensor([0.9, 0.1, 0.0, 0.5], dtype=D)
    x = randn(2, 4).requires_grad_()  # the batch is the second dimension
    calls: list[int] = []

    def map(z: Tensor, x: Tensor, k: Tensor) -> Tensor:
        calls.append(len(z))
        return torch.tanh(k.unsqueeze(1) * z + x.mT)

    s = ik.fixed_point(map, torch.zeros(4, 2, dtype=D), (x, slope), batch_dims=1, in_dims=(1, 0), solver=solver)
    (got,) = torch.autograd.grad(s.value.square().sum(), x)
    for i, k in enumerate(slope):
        row = x[:, i].detach().requires_grad_()
        alone = ik.fixed_point(lambda z, x, k: torch.tanh(k * z + x), torch.zeros(2, dtype=D), (row, k), solver=solver)
        assert_near(s.value[i], alone.value, rtol=1e-7, atol=1e-8)
        assert_near(got[:, i], torch.autograd.grad(alone.value.square().sum(), row)[0], rtol=1e-6, atol=1e-7)
    assert min(calls) < 4


# ---------------------------------------------------------------------------------------------------------------------
# Tests that notice mutants which others let live: starts, units of a norm, first terms, signs.
def _operator(matrix: Tensor) -> extend.Operator:
    def mv(v: Tensor) -> Tensor:
        return (matrix @ v.unsqueeze(2)).squeeze(2)

    def rmv(v: Tensor) -> Tensor:
        return (matrix.mT @ v.unsqueeze(2)).squeeze(2)

    return extend.Operator(mv, rmv, lambda: matrix, batch=matrix.shape[0], size=matrix.shape[1], like=matrix[:, 0])


def test_the_series_begins_with_its_first_term() -> None:
    """``J = 0``: the first term is the sum."""
    b = torch.randn(2, 3, dtype=D, generator=torch.Generator().manual_seed(0))
    answer = NeumannSeries().solve(
        _operator(-torch.eye(3, dtype=D).expand(2, 3, 3)), b, rtol=1e-12, atol=0, max_steps=9
    )
    assert torch.equal(answer.x, -b)
    assert answer.steps.tolist() == [1, 1]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_implicit_euler_by_products_is_that_by_factors(sign: float) -> None:
    """``(I / delta - s J) p = F``."""
    g = torch.Generator().manual_seed(0)
    matrix, F = torch.randn(2, 4, 4, dtype=D, generator=g), torch.randn(2, 4, dtype=D, generator=g)
    inverse, s = torch.tensor([8.0, 9.0], dtype=D), torch.tensor([sign, sign], dtype=D)
    f: Any = SimpleNamespace(active=torch.tensor([True, True]))
    J: Any = SimpleNamespace(A=_operator(matrix), dense=None, sparse=None)
    p = _implicit_euler(f, J, inverse, s)(F)
    left = torch.diag_embed(inverse[:, None].expand_as(F)) - sign * matrix
    torch.testing.assert_close(p, torch.linalg.solve(left, F), rtol=1e-2, atol=1e-3)


def test_a_residual_beyond_the_safeguard_forgets() -> None:
    f: Any = SimpleNamespace(norm=torch.tensor([10.0, 2.0]), best_norm=torch.tensor([1.0, 1.0]))
    forget, _ = watch(f, {"step": 1}, safeguard=5.0, patience=100)
    assert forget is not None
    assert forget.tolist() == [True, False]


def test_starts_of_a_batch_are_those_of_its_samples() -> None:
    """Two roots, told apart by the start, whose samples are the middle dimension."""
    start = torch.tensor([[1.0, -2.0, 3.0], [-1.5, 0.5, -0.7]], dtype=D).unsqueeze(2)  # (rows, samples, n)

    def root(z0: Tensor) -> Tensor:
        return ik.root(lambda z: z**2 - 1, z0, solver="newton", batch_dims=1).value

    torch.testing.assert_close(vmap(root, in_dims=1, out_dims=1)(start), start.sign())


@pytest.mark.parametrize("norm", ["max", lambda z: 100 * z.abs().sum(-1)])
def test_methods_compare_in_2_norms_whatever_the_norm(norm: Any) -> None:
    """Units of the tolerance and of the best residual follow the method's own norm."""
    seen: list[tuple[float, float, float]] = []

    class Watching(ik.Method):
        solves = "root"

        def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
            r = f.residual(z)
            seen.append((float(f.norm / r.norm()), float(f.tolerance / f.norm), float(f.best_norm / f.norm)))
            return z - 0.5 * r, state

    c = torch.tensor([1.0, 2.0, 3.0], dtype=D)
    solution = ik.root(lambda z: z - c, torch.zeros(3, dtype=D), solver=Watching(), norm=norm, rtol=0.0, atol=1e-3)
    values = {"max": lambda r: float(r.abs().max())}.get(
        norm if isinstance(norm, str) else "", lambda r: float(norm(r))
    )
    assert bool(solution.converged)
    for k, (same, ratio, best) in enumerate(seen):
        r = 0.5**k * c
        assert same == pytest.approx(1)
        assert ratio == pytest.approx(1e-3 / values(r))
        assert best == pytest.approx(1)


@pytest.mark.parametrize(
    ("verb", "function"),
    [
        (ik.root, lambda z: z - 1),
        (ik.root, lambda z: 1 - z),
        (ik.steady_state, lambda z: 1 - z),
        (ik.argmin, lambda z: (z - 1).square().sum()),
        (ik.fixed_point, lambda z: 0.5 * z),
    ],
    ids=["rising", "falling", "rest", "minimum", "map"],
)
def test_the_flow_of_pseudo_time_leads_to_the_solution(verb: Any, function: Any) -> None:
    """One small step, whatever the sign of ``F``; away from it the best point would be the start."""
    z0 = torch.full((2,), 3.0, dtype=D)
    solver = PseudoTransient(step_size=1e-3)
    solution = verb(function, z0, solver=solver, max_steps=1, on_failure="ignore")
    assert bool((solution.value < 3).all()) and bool((solution.value > 2.9).all())
