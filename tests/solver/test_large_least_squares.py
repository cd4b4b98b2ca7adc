"""Least squares of many unknowns: sparse and dense normal equations against the singular value decomposition."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear import auto as auto_linear
from implicitkit.linear.factors import ordering, sparse_normal
from implicitkit.linear.factors.gram import Gram
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.linear.factors.sparse_factors import SparseFactor
from implicitkit.solver.auto import stages
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.least_squares import dogleg, gauss_newton, levenberg_marquardt
from implicitkit.solver.steps import normal_equations
from implicitkit.solver.verdict import backward_error, curvature, judge
from implicitkit.sparsity import detection

D = torch.float64


def pose_graph(n: int) -> tuple[Any, Tensor, Tensor]:
    """Poses on two turns of a circle, seen from their neighbours and from the turn below."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.linspace(0, 4 * math.pi, n, dtype=D)
    true = torch.stack([5 * angle.cos(), 5 * angle.sin(), angle + math.pi / 2], -1)
    i = torch.cat([torch.arange(n - 1), torch.arange(n - n // 2)])
    j = torch.cat([torch.arange(1, n), torch.arange(n // 2, n)])

    def between(a: Tensor, b: Tensor) -> Tensor:
        c, s, d = a[:, 2].cos(), a[:, 2].sin(), b - a
        return torch.stack([c * d[:, 0] + s * d[:, 1], -s * d[:, 0] + c * d[:, 1], d[:, 2]], -1)

    measured = between(true[i], true[j]) + 0.05 * torch.randn(len(i), 3, generator=generator, dtype=D)
    start = true + 0.1 * torch.randn(n, 3, generator=generator, dtype=D)
    return lambda p, m: {"edges": between(p[i], p[j]) - m, "prior": 100 * p[0]}, start, measured


def curve(n: int) -> tuple[Any, Tensor, Tensor]:
    """No pattern: every residual sees every unknown."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(n + 20, n, generator=generator, dtype=D) / n**0.5
    return (
        lambda z, y: torch.tanh(A @ z) + 0.3 * A @ z - y,
        torch.zeros(n, dtype=D),
        torch.sin(torch.arange(n + 20, dtype=D)),
    )


def refuse(*_: Any) -> Any:
    raise AssertionError("a dense matrix is formed")


CASES = {"pose graph": pose_graph(46), "dense": curve(140)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["gauss_newton", "levenberg_marquardt", "dogleg", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_normal_equations_find_what_singular_values_find(
    name: str, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    residuals, start, data = CASES[name]
    data = data.clone().requires_grad_()

    def run(**options: Any) -> tuple[Tensor, Tensor]:
        s = ik.least_squares(residuals, start, (data,), rtol=1e-12, atol=1e-10, **options)
        weights = torch.cos(torch.arange(start.numel(), dtype=D)).view(start.shape)
        return s.value.detach(), torch.autograd.grad((weights * s.value).sum(), data)[0]

    z, g = run(solver=solver)
    for module in (gauss_newton, levenberg_marquardt, dogleg):
        monkeypatch.setattr(module, "SMALLEST", 10**9)
    z_dense, g_dense = run(solver="levenberg_marquardt", rule=ik.Implicit(linear_solver="lu"))
    # the smallest eigenvalue of the pose graph's Hessian is 1e-2, its gradient at the start 1e4
    torch.testing.assert_close(z, z_dense, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(g, g_dense, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "solver"),
    [
        pytest.param("pose graph", "levenberg_marquardt", marks=pytest.mark.slow),
        *(("dense", name) for name in ("gauss_newton", "levenberg_marquardt", "dogleg", "auto")),
    ],
)
def test_products_alone_do_where_a_matrix_would_be_too_large(
    name: str, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pattern and above the size of dense matrices: steps by LSMR, to the same point."""
    residuals, start, data = CASES[name]
    want = ik.least_squares(residuals, start, (data,), rtol=1e-12, atol=1e-10, solver="levenberg_marquardt").value
    monkeypatch.setattr(normal_equations, "_DENSE", 100)
    monkeypatch.setattr(Evaluations, "residuals_sparse", lambda *_: None)
    monkeypatch.setattr(Evaluations, "residuals_jacobian", refuse)
    s = ik.least_squares(residuals, start, (data,), rtol=1e-9, atol=1e-8, solver=solver, jac_sparsity=None)
    assert bool(s.converged) and (solver != "auto" or s.solver == "auto (levenberg_marquardt)")
    torch.testing.assert_close(s.value, want, rtol=1e-4, atol=1e-4)  # an eigenvalue of 1e-2 below others of 1e4


def test_norms_of_columns_from_products() -> None:
    """Within the spread of eight random signs, whatever the units of the unknowns."""
    generator = torch.Generator().manual_seed(3)
    units = torch.logspace(-6, 6, 150, dtype=D)
    R = torch.randn(200, 150, generator=generator, dtype=D) * units
    r = torch.ones(1, 200, dtype=D)
    model = normal_equations._Products(lambda v: v @ R.T, lambda w: w @ R, r, torch.zeros(1, 150, dtype=D))
    ratio = model.columns[0] / R.norm(dim=0)
    assert float(ratio.min()) > 0.2 and float(ratio.max()) < 2.5
    model.scale(model.columns)
    exact = torch.linalg.eigvalsh((R / model.D[0]).T @ (R / model.D[0]))[-1]
    assert 0.4 * float(exact) < float(model.largest()) <= 1.001 * float(exact)
    mu, g = torch.tensor([1e-2], dtype=D), r @ R
    p, S = model.solve(mu, g), torch.diag(model.D[0] ** 2)
    left = (p @ (R.T @ R + 1e-2 * S) + g) / model.D
    assert float(left.norm()) < 0.3 * float((g / model.D).norm())


def test_auto_has_no_cliff() -> None:
    """The same first method from few unknowns to many."""
    for size in (10, 511, 513, 1025, 10**6):
        assert stages("least_squares", 1, size)[0].make().name == "levenberg_marquardt"


def test_a_rank_deficient_jacobian_does_not_stop_gauss_newton() -> None:
    """Unknowns that no residual sees stay where they are."""

    def residuals(z: Tensor, y: Tensor) -> Tensor:
        return z[:150] ** 3 + z[:150] - y

    start = torch.linspace(-1, 1, 200, dtype=D)
    for solver in ("gauss_newton", "levenberg_marquardt"):
        s = ik.least_squares(residuals, start, (torch.ones(150, dtype=D),), solver=solver)
        assert bool(s.converged)
        torch.testing.assert_close(s.value[:150] ** 3 + s.value[:150], torch.ones(150, dtype=D), rtol=1e-7, atol=1e-7)
        assert torch.equal(s.value[150:], start[150:])


@pytest.mark.slow
def test_a_pattern_of_the_residuals_may_be_given() -> None:
    n = 150
    y = torch.linspace(0, 1, n - 1, dtype=D)
    f = lambda z, y: torch.cat([z[1:] - z[:-1] ** 2 - y, 0.1 * z])  # noqa: E731
    band = torch.zeros(2 * n - 1, n)
    band[torch.arange(n - 1), torch.arange(n - 1)] = 1
    band[torch.arange(n - 1), torch.arange(1, n)] = 1
    band[torch.arange(n - 1, 2 * n - 1), torch.arange(n)] = 1
    s = ik.least_squares(f, torch.zeros(n, dtype=D), (y,), jac_sparsity=band.to_sparse_coo(), rtol=1e-11)
    t = ik.least_squares(f, torch.zeros(n, dtype=D), (y,), jac_sparsity=None, rtol=1e-11)
    torch.testing.assert_close(s.value, t.value, rtol=1e-7, atol=1e-8)
    with pytest.raises(ValueError, match=r"jac_sparsity has shape \(3, 3\)"):
        ik.least_squares(f, torch.zeros(n, dtype=D), (y,), jac_sparsity=torch.eye(3))


def test_questions_of_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that is refused while steps converge fast is not asked about rounding, and whether a point runs away is asked
    where factors do not tell, once."""
    asked: list[str] = []
    for module, name in ((backward_error, "rounding"), (judge, "runs_away")):
        question = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, question=question, name=name: (asked.append(name), question(*a))[1]
        )
    f, start, measured = pose_graph(60)
    for expected in ([], ["runs_away"]):
        s = ik.least_squares(lambda p, m: {k: 1e3 * r for k, r in f(p, m).items()}, start, (measured,))
        assert bool(s.converged) and asked == expected
        monkeypatch.setattr(judge, "zero_is_near", lambda f, known, z, *_: torch.zeros(len(z), dtype=torch.bool))


def test_a_hessian_like_its_normal_equations_is_looked_at_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lanczos", "inflected"):
        monkeypatch.setattr(curvature, name, refuse)
    f, start, measured = pose_graph(60)
    assert bool(ik.least_squares(f, start, (measured,)).converged)


@pytest.mark.parametrize("x_scale", ["jac", 1.0])
def test_a_saddle_is_left_where_the_normal_equations_are_regular(x_scale: Any) -> None:
    """``(z^2 + (2 - z^2)^2) / 2`` has a maximum at 0, where ``R'R = 1`` and the Hessian is -3."""

    def residuals(z: Tensor, y: Tensor) -> Tensor:
        first = z[..., :1]
        return torch.cat([first, 2 - first.square(), z[..., 1:] - y, 0.3 * z[..., 1:].diff().sin()], -1)

    y, z0 = torch.linspace(0, 2, 199, dtype=D).expand(3, -1), torch.zeros(3, 200, dtype=D)
    z0[1, 0] = 1.0
    s = ik.least_squares(residuals, z0, (y,), batch_dims=1, x_scale=x_scale)
    torch.testing.assert_close(s.value[:, 0].abs(), torch.full((3,), 1.5**0.5, dtype=D), rtol=1e-9, atol=0)


def test_what_is_like_a_matrix_and_what_is_not() -> None:
    """Eigenvalues of ``N^-1 H`` that are all one, about one, and one of 200 that is not."""
    n = 200
    units = torch.logspace(-3, 3, n, dtype=D).expand(4, -1)
    share = 1 + 0.1 * torch.linspace(-1, 1, n, dtype=D).repeat(4, 1)
    share[0] = 1.0
    share[2, 70], share[3, 70] = -0.2, 3.0

    class Diagonal:
        def __init__(self) -> None:
            self.units, self.looked = units, None

        def solve(self, b: Tensor) -> Tensor:
            return b / units**2

    asked: list[Tensor] = []
    product = lambda q: asked.append(q) or share * units**2 * q  # noqa: E731
    like = curvature._away(product, Diagonal(), torch.ones(4, n, dtype=D), 3) <= curvature._LIKE
    assert like.tolist() == [True, True, False, False]
    assert len(asked) == 3 and all(bool((q.norm(dim=1) - 1 < 1e-12).all()) for q in asked)
    share[:] = 1.0
    asked.clear()
    away, N, z = curvature._away, Diagonal(), torch.ones(4, n, dtype=D)
    assert bool((away(product, N, z, 3) <= 1e-6).all()) and bool((away(product, N, z, 12) <= 1e-6).all())
    assert len(asked) == 1  # of no others there is nothing to ask, and of that point all is known


def test_factors_of_a_fit_serve_further_steps_and_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer factorisations than Gauss and Newton's steps, and none of the Hessian, which is refined with them."""
    residuals, start, data = pose_graph(60)
    data = data.clone().requires_grad_()
    weights = torch.cos(torch.arange(start.numel(), dtype=D)).view(start.shape)

    def run() -> tuple[Tensor, Tensor, int]:
        s = ik.least_squares(residuals, start, (data,))
        g = torch.autograd.grad((weights * s.value).sum(), data)[0]
        return s.value.detach(), g, int(s.steps)

    z, g, steps = run()
    with monkeypatch.context() as each_anew:
        each_anew.setattr(normal_equations, "chord_steps", lambda f, factors, z, before, start: z)
        assert run()[2] >= steps + 2
    monkeypatch.setattr(auto_linear, "_COLOURS", 0)
    monkeypatch.setattr(SparseFactor, "__init__", refuse)
    again = run()
    torch.testing.assert_close(again[0], z, rtol=0, atol=1e-9)
    torch.testing.assert_close(again[1], g, rtol=1e-8, atol=1e-10)


def test_factors_of_a_point_before_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take as much memory as all the rest: one set of them at a time."""
    residuals, start, data = pose_graph(60)
    kept: list[Any] = []
    alive: list[int] = []
    plain = sparse_normal.NormalFactors.__init__

    def watched(self: Any, *given: Any) -> None:
        plain(self, *given)
        kept.append(weakref.ref(self))
        alive.append(sum(ref() is not None for ref in kept))

    monkeypatch.setattr(sparse_normal.NormalFactors, "__init__", watched)
    s = ik.least_squares(residuals, start, (data,), solver="gauss_newton")
    assert bool(s.converged) and len(alive) >= 2 and max(alive) == 1


def test_what_rounding_leaves_is_bounded_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    f, start, measured = pose_graph(60)
    ik.least_squares(f, start, (measured,))  # finds the pattern; that later ones know it shows in the last bits
    sizes: list[tuple[float, float]] = []
    size = sparse_normal.NormalFactors.size

    def watched(self: Any, x: Tensor) -> Tensor:
        found = size(self, x)
        sizes.append((float(self.most(x)), float(found.norm())))
        return found

    monkeypatch.setattr(sparse_normal.NormalFactors, "size", watched)
    s = ik.least_squares(f, start, (measured,))
    few = len(sizes)
    monkeypatch.setattr(sparse_normal.NormalFactors, "most", lambda self, x: torch.full((len(x),), torch.inf))
    again = ik.least_squares(f, start, (measured,))
    torch.testing.assert_close(again.value, s.value, rtol=0, atol=0)
    assert len(sizes) > 2 * few
    monkeypatch.undo()
    N = Gram(sp.csc_matrix(np.array([[2.0, -1.0], [-1.0, 3.0]])), np.array([[0.5, 4.0]]), np.ones(1))
    factors = sparse_normal.NormalFactors([None], [N], np.array([[0.1, 10.0]]), np.zeros(1))
    x = torch.tensor([[5.0, 0.2]], dtype=D)
    assert float(factors.most(x)) >= float(factors.size(x).norm()) >= 0.1 * float(factors.most(x))


def test_factors_that_the_derivative_does_without_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has its own; and one that would have used them looks for others."""
    residuals, start, data = pose_graph(60)
    data = data.clone().requires_grad_()
    kept: list[Any] = []
    plain, factor, alive = sparse_normal.NormalFactors.__init__, SparseFactor.__init__, []

    def watched(self: Any, *given: Any) -> None:
        plain(self, *given)
        kept.append(weakref.ref(self.lus[0]) if hasattr(self.lus[0], "order") else weakref.ref(self))

    def counted(self: Any, *given: Any) -> None:
        alive.append(sum(ref() is not None for ref in kept))
        factor(self, *given)

    monkeypatch.setattr(sparse_normal.NormalFactors, "__init__", watched)
    s = ik.least_squares(residuals, start, (data,))
    monkeypatch.setattr(SparseFactor, "__init__", counted)
    monkeypatch.setattr(SparseBlocks, "regular", property(lambda _: False))  # nothing is kept of the derivative's
    assert sum(ref() is not None for ref in kept) == 1
    (g,) = torch.autograd.grad(s.value.sum(), data, retain_graph=True)
    assert alive == [0]
    monkeypatch.setattr(auto_linear, "_COLOURS", 0)
    (again,) = torch.autograd.grad(s.value.sum(), data)
    torch.testing.assert_close(again, g, rtol=1e-8, atol=1e-10)


def test_an_order_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second matrix of a pattern is renumbered as the first was, and its factors solve as they stand; another pattern
    gets an order of its own."""
    generator = np.random.default_rng(0)
    orders = []

    def counted(A: Any, **options: Any) -> Any:
        orders.append(options["permc_spec"])
        return splu(A, **options)

    splu = ordering.sla.splu
    monkeypatch.setattr(ordering.sla, "splu", counted)
    n, kept = 60, ordering.Ordering()
    arrow = sp.diags([1.0, 1.0, 1.0], [-1, 0, 1], shape=(n, n)).tolil()
    arrow[0], arrow[:, 0] = 1.0, 1.0
    chain = sp.diags([1.0, 1.0, 1.0], [-7, 0, 7], shape=(n, n))
    for pattern in (arrow, arrow, chain, chain):
        A = sp.csc_matrix(pattern)
        A.data = generator.standard_normal(A.nnz)
        A = (A + 9 * sp.identity(n)).tocsc()
        A.sort_indices()
        lu, b = kept.factor(A, 0.01), generator.standard_normal((n, 2))
        np.testing.assert_allclose(lu.solve(b), np.linalg.solve(A.toarray(), b), atol=1e-12)
        np.testing.assert_allclose(lu.solve(b, "T"), np.linalg.solve(A.toarray().T, b), atol=1e-12)
    assert orders == ["MMD_AT_PLUS_A", "NATURAL", "MMD_AT_PLUS_A", "NATURAL"]


def test_a_first_step_that_breaks_its_promise_is_damped() -> None:
    """Residuals whose Gauss-Newton step from the start leads far out: it is refused, and the fit found all the same."""
    target = torch.linspace(0.5, 1.5, 150, dtype=D)
    s = ik.least_squares(lambda z, t: torch.atan(z - t), target + 6, (target,), solver="levenberg_marquardt")
    assert bool(s.converged)
    torch.testing.assert_close(s.value, target, rtol=0, atol=1e-8)


def counted_factors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every damping that factors are made for, from here on."""
    from implicitkit.linear.factors import sparse_normal

    made: list[int] = []
    for cls in (sparse_normal.SparseNormal, normal_equations._Dense):
        solve = cls.solve
        monkeypatch.setattr(cls, "solve", lambda *given, solve=solve: (made.append(0), solve(*given))[1])
    return made


@pytest.mark.parametrize("structure", ["chain", "dense"])
def test_a_step_that_is_refused_is_shortened_before_it_is_damped(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full Gauss-Newton steps of a cubic overshoot: an eighth of one costs an evaluation, more damping costs factors (18 of
    them were made for the chain, and 7 steps)."""
    n = 200
    W = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=D) / n**0.5
    N = (lambda z: z.roll(1, -1) + z.roll(-1, -1)) if structure == "chain" else (lambda z: z @ W.T)
    f = lambda z, x: torch.cat([2.1 * z + z**3 - N(z) - x, 0.1 * z], -1)  # noqa: E731
    z0, x = torch.zeros(2, n, dtype=D), torch.linspace(0.5, 1.5, n, dtype=D).expand(2, n)
    x = torch.stack([x[0], 0.01 * x[1]])  # whose steps are taken as they are
    made = counted_factors(monkeypatch)
    s = ik.least_squares(f, z0, (x,), batch_dims=1, in_dims=0, solver="levenberg_marquardt")
    assert bool(s.converged.all()) and len(made) <= 5, len(made)
    alone = ik.least_squares(f, z0[1:], (x[1:],), batch_dims=1, solver="gauss_newton")
    torch.testing.assert_close(s.value[1:], alone.value, rtol=1e-7, atol=1e-9)


def test_a_step_that_was_shortened_is_followed_by_a_more_damped_one() -> None:
    """The bent valley of a chain of Rosenbrock's functions: full steps overshoot all along it, and each that is tried costs
    four evaluations.  (985 of them, where damping stays as it is after a shortened step.)"""
    f = lambda z: torch.cat([10 * (z[1:] - z[:-1] ** 2), 1 - z[:-1]])  # noqa: E731
    s = ik.least_squares(f, torch.full((200,), -1.2, dtype=D), solver="levenberg_marquardt")
    assert bool(s.converged) and s.evaluations < 400, s.evaluations
    torch.testing.assert_close(s.value, torch.ones(200, dtype=D), rtol=0, atol=1e-6)


@pytest.mark.parametrize("condition", [3.0, 1e5])
def test_products_are_tried_before_a_matrix_without_a_pattern(
    condition: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 unknowns: where few products will do the Jacobian is never formed; where they will not, LSMR is given up once and
    for all."""
    f, y = _curved(condition, 800)
    formed, tried = list[int](), list[bool]()
    jacobian, lsmr = Evaluations.residuals_jacobian, normal_equations.LSMR.solve
    monkeypatch.setattr(Evaluations, "residuals_jacobian", lambda f, z: (formed.append(0), jacobian(f, z))[1])

    def watched(self: Any, *given: Any, **options: Any) -> Any:
        found = lsmr(self, *given, **options)
        tried.append(bool(found.converged.all()))
        return found

    monkeypatch.setattr(normal_equations.LSMR, "solve", watched)
    s = ik.least_squares(f, torch.zeros(800, dtype=D), (y,), solver="levenberg_marquardt")
    assert bool(s.converged)
    if condition < 10:
        assert not formed and all(tried)
    else:
        assert formed and tried.count(False) == 1 and not tried[-1]


def _curved(condition: float, n: int = 130) -> tuple[Any, Tensor]:
    """A fit without a pattern, of this condition at the origin."""
    g = torch.Generator().manual_seed(2)
    U, V = (torch.linalg.qr(torch.randn(n + k, n, generator=g, dtype=D)).Q for k in (10, 0))
    A = U @ torch.diag(torch.logspace(0, -math.log10(condition), n, dtype=D)) @ V.mT
    return lambda z, y: A @ z + 0.1 * (A @ z) ** 3 - y, A @ torch.randn(n, generator=g, dtype=D)


class _Seen(Exception):
    pass


def _inside(condition: float, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``check(evaluations, z, free, gradient)`` within a solve; two thirds of the unknowns are free."""
    z, free = torch.linspace(-1, 1, 130, dtype=D).unsqueeze(0), torch.arange(130).unsqueeze(0) % 3 > 0

    def step(_: Any, f: Evaluations, *__: Any) -> Any:
        check(f, z, free, torch.where(free, f(z), 0))
        raise _Seen

    residuals, y = _curved(condition)
    with monkeypatch.context() as patched:
        patched.setattr(normal_equations, "_FRUGAL", 130)
        patched.setattr(levenberg_marquardt.LevenbergMarquardt, "step", step)
        with pytest.raises(_Seen):
            ik.least_squares(residuals, z[0], (y,), solver="levenberg_marquardt")


def test_a_matrix_takes_over_where_products_have_not_been_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the very same point, in the same units and for the same unknowns; and at all others, at once."""

    def check(f: Evaluations, z: Tensor, free: Tensor, g: Tensor) -> None:
        steps = []
        for name in ("_Frugal", "_Dense"):
            model = normal_equations.normal_equations(f, z, free)
            assert type(model).__name__ == name
            model.scale(torch.linspace(1, 2, 130, dtype=D).unsqueeze(0))
            steps.append(model.solve(torch.tensor([1e-9], dtype=D), g))
            assert not f.frugal and model.factors is None  # of some unknowns only
        assert bool((steps[0] == 0)[~free].all() and (steps[0] != 0)[free].all())
        torch.testing.assert_close(steps[0], steps[1], rtol=1e-6, atol=1e-9)
        f.frugal = True
        whole = normal_equations.normal_equations(f, z)
        whole.solve(torch.tensor([1e-9], dtype=D), f(z))
        assert not f.frugal and whole.factors is not None  # for further steps, and the derivative

    _inside(1e5, check, monkeypatch)


def test_a_step_by_products_is_that_of_the_damped_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a tenth of the gradient, with the damping, in the units and for the unknowns that are asked for."""

    def check(f: Evaluations, z: Tensor, free: Tensor, g: Tensor) -> None:
        model = normal_equations.normal_equations(f, z, free)
        model.scale(torch.full_like(z, 2.0))
        p = model.solve(torch.tensor([0.3], dtype=D), g)
        assert f.frugal and bool((p == 0)[~free].all())
        R = f.residuals_jacobian(z)[0] * free
        assert float((p @ R.T @ R + 4 * 0.3 * p + g).norm()) < 0.15 * float(g.norm())
        assert float((p @ R.T @ R + g).norm()) > 0.3 * float(g.norm())

    _inside(2.0, check, monkeypatch)


@pytest.mark.parametrize(("batch", "singular"), [(1, True), (64, False)])
def test_a_batch_of_small_fits_takes_no_singular_values(
    batch: int, singular: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four of 40 unknowns, whose singular values cost more than all the rest; the fits are the same."""
    residuals, data = _curved(10.0, 40)
    rows = data * torch.linspace(0.5, 1.5, batch, dtype=D).unsqueeze(1)
    decomposed: list[int] = []
    svd = levenberg_marquardt.svd_batched
    monkeypatch.setattr(levenberg_marquardt, "svd_batched", lambda A: (decomposed.append(len(A)), svd(A))[1])
    f = lambda z, y: torch.func.vmap(residuals)(z, y)  # noqa: E731
    start = torch.zeros(batch, 40, dtype=D)
    s = ik.least_squares(f, start, (rows,), batch_dims=1, rtol=1e-11, solver="levenberg_marquardt")
    assert bool(s.converged.all()) and bool(decomposed) == singular
    alone = ik.least_squares(residuals, torch.zeros(40, dtype=D), (rows[-1],), rtol=1e-11)
    torch.testing.assert_close(s.value[-1], alone.value, rtol=0, atol=1e-8)


def test_the_largest_eigenvalue_is_looked_for_once_where_it_takes_products(monkeypatch: pytest.MonkeyPatch) -> None:
    residuals, y = _curved(2.0)
    found: list[int] = []
    largest = normal_equations.largest_eigenvalue
    monkeypatch.setattr(normal_equations, "_FRUGAL", 130)
    monkeypatch.setattr(normal_equations, "_SHARE", 1.0)
    monkeypatch.setattr(normal_equations, "largest_eigenvalue", lambda *a: (found.append(1), largest(*a))[1])
    s = ik.least_squares(residuals, torch.zeros(130, dtype=D), (y,), solver="levenberg_marquardt")
    assert bool(s.converged) and int(s.steps) > 2 and len(found) == 1


@pytest.mark.parametrize(("batch", "bend", "looked"), [(1, 0.0, 1), (5, 0.0, 1), (1, 3e-4, 2)])
def test_linear_fits_are_known_for_what_they_are_by_the_factors_of_their_step(
    batch: int, bend: float, looked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient changes along it as ``R'R`` says, each entry to a millionth; without that whether it runs away was asked
    by eight (four, of five samples) evaluations more.  Two more asked again what one difference of gradients had told of the
    Hessian, and the derivative factored it anew, or looked for its pattern to know what that costs: where residuals are
    ``bend`` from linear, which takes more products with old factors, it does that."""
    monkeypatch.setattr(SparseFactor, "__init__", refuse)
    patterns, detect = [], detection.detect
    monkeypatch.setattr(detection, "detect", lambda *a, **k: (patterns.append(1), detect(*a, **k))[1])
    y = torch.sin(torch.arange(600 * batch, dtype=D) * 0.37).view(batch, 600)
    y[:, ::3] = 0
    fit = lambda z, y: torch.cat([z + bend * z**2 - y, 3 * (z[:, 1:] - z[:, :-1])], 1)  # noqa: E731
    y.requires_grad_()
    found = ik.least_squares(fit, torch.zeros(batch, 600, dtype=D), (y,), batch_dims=1)
    assert int(found.evaluations) <= 6 + 20 * bool(bend)
    (g,) = torch.autograd.grad(found.value.square().sum() / 2, y)
    assert len(patterns) == looked
    y = y.detach()
    L = np.eye(600) + 9 * np.diff(np.eye(600), axis=0).T @ np.diff(np.eye(600), axis=0)
    z = np.linalg.solve(L, y.numpy().T)
    np.testing.assert_allclose(found.value.detach().numpy(), z.T, atol=1e-12 + 4 * bend)
    np.testing.assert_allclose(g.numpy(), np.linalg.solve(L, z).T, atol=1e-12 + 8 * bend)


@pytest.mark.parametrize("sparse", [False, True])
def test_factors_of_a_fit_tell_what_its_gradient_changes_by(sparse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    R = torch.randn(2, 9, 6, generator=generator, dtype=D)
    R[:, :, ::2] *= 1e3
    x, D_ = torch.randn(2, 6, generator=generator, dtype=D), torch.linalg.vector_norm(R, dim=1)
    normal: Any = normal_equations._Dense(R)
    if sparse:
        from implicitkit.sparsity.compression import known_entries

        ready = known_entries(sp.csr_matrix(np.ones((9, 6), dtype=bool)))
        normal = sparse_normal.SparseNormal(ready, R.flatten(1).numpy(), x)
    normal.scale(D_)
    normal.solve(torch.full((2,), 0.3, dtype=D), x)
    expected = torch.einsum("bmi,bmj,bj->bi", R, R, x)
    torch.testing.assert_close(normal.factors.moved(x), expected, rtol=1e-12, atol=1e-9)
