"""Projections against closed forms, other libraries and their own definition, with Jacobians and second derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.isotonic import isotonic_regression
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vmap

import implicitkit as ik

N = 6


def _points(seed: int, *shape: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A_ROW = torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
G = _points(7, 4, N)
INSIDE = _points(8, N) * 0.1
VECTOR_SETS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # name: (projection, how far a point is from feasible)
    "box": (ik.project.box(-0.5, 0.7), lambda x: (x.abs() - 0.7).clamp_min(0) * (x > 0) + (-0.5 - x).clamp_min(0)),
    "simplex": (ik.project.simplex(), lambda x: (x.sum(-1) - 1).abs() + (-x).clamp_min(0).sum(-1)),
    "simplex radius": (ik.project.simplex(2.5), lambda x: (x.sum(-1) - 2.5).abs() + (-x).clamp_min(0).sum(-1)),
    "box_section": (
        ik.project.box_section(-0.5, 0.7, 0.4),
        lambda x: (x.sum(-1) - 0.4).abs() + (x - 0.7).clamp_min(0).sum(-1) + (-0.5 - x).clamp_min(0).sum(-1),
    ),
    "l1_ball": (ik.project.l1_ball(1.3), lambda x: (x.abs().sum(-1) - 1.3).clamp_min(0)),
    "l2_ball": (ik.project.l2_ball(0.8), lambda x: (x.norm(dim=-1) - 0.8).clamp_min(0)),
    "linf_ball": (ik.project.linf_ball(0.6), lambda x: (x.abs().amax(-1) - 0.6).clamp_min(0)),
    "halfspace": (ik.project.halfspace(A_ROW, -0.5), lambda x: (x @ A_ROW + 0.5).clamp_min(0)),
    "hyperplane": (ik.project.hyperplane(A_ROW, 1.0), lambda x: (x @ A_ROW - 1).abs()),
    "affine": (ik.project.affine(G[:2], torch.ones(2, dtype=torch.float64)), lambda x: (x @ G[:2].T - 1).abs().sum(-1)),
    "polyhedron": (
        ik.project.polyhedron(G=G, h=G @ INSIDE + 0.1),
        lambda x: (x @ G.T - G @ INSIDE - 0.1).clamp_min(0).sum(-1),
    ),
    "nonnegative": (ik.project.nonnegative(), lambda x: (-x).clamp_min(0).sum(-1)),
    "second_order_cone": (ik.project.second_order_cone(), lambda x: (x[..., 1:].norm(dim=-1) - x[..., 0]).clamp_min(0)),
    "monotone": (ik.project.monotone(), lambda x: (x[..., :-1] - x[..., 1:]).clamp_min(0).sum(-1)),
    "decreasing": (ik.project.monotone(decreasing=True), lambda x: (x[..., 1:] - x[..., :-1]).clamp_min(0).sum(-1)),
}
MATRIX_SETS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "psd_cone": (ik.project.psd_cone(), lambda X: (-torch.linalg.eigvalsh(X)).clamp_min(0).sum(-1)),
    "birkhoff": (
        ik.project.birkhoff(),
        lambda X: (X.sum(-1) - 1).abs().sum(-1) + (X.sum(-2) - 1).abs().sum(-1) + (-X).clamp_min(0).sum((-1, -2)),
    ),
    "transport": (
        ik.project.transport(
            torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
        ),
        lambda X: (X.sum(-1) - torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)).abs().sum(-1),
    ),
}
ALL = {name: (f, v, _points(1, 5, N)) for name, (f, v) in VECTOR_SETS.items()} | {
    name: (f, v, _points(2, 4, 3, 3)) for name, (f, v) in MATRIX_SETS.items()
}


@pytest.mark.parametrize("name", ALL)
def test_projection_is_feasible_idempotent_and_nearest(name: str) -> None:
    """Variational inequality ``<v - Pv, x - Pv> <= 0`` for feasible ``x``, which characterises the projection."""
    project, violation, v = ALL[name]
    v = 0.5 * (v + v.mT) if name == "psd_cone" else v
    p = project(v)
    assert float(violation(p).abs().max()) < 1e-9
    torch.testing.assert_close(project(p), p, rtol=0, atol=1e-9)
    for seed in range(5):
        other = project(_points(10 + seed, *v.shape))
        inner = ((v - p) * (other - p)).flatten(1).sum(1)
        assert float(inner.max()) < 1e-8


@pytest.mark.parametrize("name", ALL)
def test_projection_is_the_same_for_a_sample_alone(name: str) -> None:
    project, _, v = ALL[name]
    torch.testing.assert_close(project(v), torch.stack([project(x) for x in v]), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(vmap(project)(v), project(v), rtol=1e-10, atol=1e-11)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ALL)
def test_derivatives(name: str) -> None:
    project, _, v = ALL[name]
    x = v[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(project, (x,), atol=1e-5)
    assert torch.autograd.gradgradcheck(project, (x,), atol=1e-4)
    torch.testing.assert_close(jacfwd(project)(v[0]), jacrev(project)(v[0]), rtol=1e-8, atol=1e-9)
    loss = lambda t: (project(t) ** 3).sum()  # noqa: E731
    assert bool(torch.isfinite(vmap(hessian(loss))(v)).all())


@pytest.mark.parametrize("seed", range(40))
def test_box_section_against_a_quadratic_program(seed: int) -> None:
    """Weights of any signs and zero, bounds that are missing, totals at the edge of what the box allows."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(N, generator=generator, dtype=torch.float64)  # noqa: E731
    v, w, low, high = 2 * draw(), draw(), -draw().abs(), draw().abs()
    w[seed % N] = 0 if seed % 3 == 0 else w[seed % N]
    low[0], high[1] = (-torch.inf, torch.inf) if seed % 2 else (low[0], high[1])
    share = 0.0 if seed % 5 == 0 else torch.rand(N, generator=generator, dtype=torch.float64)
    first, last = torch.where(low.isinf(), high - 1, low), torch.where(high.isinf(), low + 1, high)
    total = (w * (first + share * (last - first))).sum()
    found = ik.project.box_section(low, high, total, w)(v)
    eye = torch.eye(N, dtype=torch.float64)
    G = torch.cat([-eye[low.isfinite()], eye[high.isfinite()]])
    h = torch.cat([-low[low.isfinite()], high[high.isfinite()]])
    program = ik.QuadraticProgram(eye, -v, w[None], total[None], G, h)
    torch.testing.assert_close(found, ik.solve(program).value, rtol=0, atol=1e-7)
    assert float((w * found).sum() - total) == pytest.approx(0, abs=1e-13)


def test_box_sections_that_are_known() -> None:
    v = _points(13, 5, N)
    torch.testing.assert_close(ik.project.box_section(0.0, torch.inf, 1.3)(v), ik.project.simplex(1.3)(v))
    plane = ik.project.hyperplane(A_ROW, 0.7)
    torch.testing.assert_close(ik.project.box_section(-torch.inf, torch.inf, 0.7, A_ROW)(v), plane(v))


def _supports(n: int, k: int) -> list[list[int]]:
    return [list(s) for size in range(1, k + 1) for s in itertools.combinations(range(n), size)]


@pytest.mark.parametrize("seed", range(5))
def test_sets_that_are_not_convex_against_brute_force(seed: int) -> None:
    """The nearest of the projections onto every face: all supports, all signs."""
    v = _points(20 + seed, 4)
    candidates = []
    for support in _supports(4, 2):
        x = torch.zeros(4, dtype=torch.float64)
        x[support] = ik.project.simplex(1.3)(v[support])
        candidates.append(x)
    best = min(candidates, key=lambda x: float((x - v).norm()))
    torch.testing.assert_close(ik.project.sparse_simplex(2, 1.3)(v), best)
    for radius in (0.3, 9.0):
        signs = [torch.tensor(s, dtype=torch.float64) for s in itertools.product((1.0, -1.0), repeat=4)]
        best = min((s * ik.project.simplex(radius)(s * v) for s in signs), key=lambda x: float((x - v).norm()))
        torch.testing.assert_close(ik.project.l1_sphere(radius)(v), best)
        torch.testing.assert_close(ik.project.l2_sphere(radius)(v), v * radius / v.norm())


def test_spheres_at_their_centre() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(ik.project.l2_sphere(2.0)(zero), torch.tensor([2.0, 0, 0], dtype=torch.float64))
    assert bool(jacrev(ik.project.l2_sphere(2.0))(zero).isfinite().all())
    torch.testing.assert_close(ik.project.l1_sphere(3.0)(zero), torch.ones(3, dtype=torch.float64))


def _scaled(v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Sinkhorn & Knopp (1967), plain and long."""
    K, right = v.exp(), torch.ones_like(columns)
    for _ in range(200):
        left = rows / (K @ right)
        right = columns / (K.mT @ left)
    return left[:, None] * K * right


def test_couplings_against_long_scaling() -> None:
    """Values and Hessians in every mode; a batch of marginals; a cost so large that scaling alone takes ages."""
    rows = torch.tensor([0.3, 0.7], dtype=torch.float64)
    columns = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    v = _points(14, 3, 2, 3)
    couple = ik.project.kl_transport(rows, columns)
    torch.testing.assert_close(couple(v), torch.stack([_scaled(x, rows, columns) for x in v]))
    scored = lambda function: lambda x, r: (function(x, r, columns) ** 3).sum()  # noqa: E731
    found = hessian(scored(lambda x, r, c: ik.project.kl_transport(r, c)(x)), argnums=(0, 1))
    inside = torch.tensor([0.1, -0.1], dtype=torch.float64)  # along which the totals agree

    def along(function: Callable[..., Tensor], t: Tensor) -> Tensor:
        return scored(function)(v[0], rows + t * inside)

    zero = torch.zeros((), dtype=torch.float64)
    slope = jacfwd(jacrev(lambda t: along(lambda x, r, c: _couple_any(x, r, c), t)))(zero)
    torch.testing.assert_close(slope, jacrev(jacrev(lambda t: along(_scaled, t)))(zero), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        found(v[0], rows)[0][0], hessian(lambda x: scored(_scaled)(x, rows))(v[0]), rtol=1e-7, atol=1e-9
    )
    sharp = ik.project.kl_transport(rows, columns)(1000 * v[0])
    torch.testing.assert_close(sharp.sum(0), columns, rtol=0, atol=1e-12)
    many = torch.tensor([[0.3, 0.7], [0.6, 0.4]], dtype=torch.float64)
    together = ik.project.kl_transport(many, columns)(v[:2])
    torch.testing.assert_close(together[1], _scaled(v[1], many[1], columns))


def _couple_any(v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return ik.project.kl_transport(rows, columns)(v)


def test_jacobian_of_the_simplex() -> None:
    """``I_S - 1 1' / |S|`` on the support ``S``."""
    v = _points(3, N)
    support = (ik.project.simplex()(v) > 0).double()
    expected = torch.diag(support) - torch.outer(support, support) / support.sum()
    torch.testing.assert_close(jacrev(ik.project.simplex())(v), expected)


@pytest.mark.parametrize(("t", "expected"), [(2.0, "inside"), (-2.0, "polar"), (0.25, "side")])
def test_jacobian_of_the_second_order_cone(t: float, expected: str) -> None:
    """Fukushima, Luo & Tseng (2001): identity, zero, or ``[[1, u'], [u, (1 + t/|x|) I - t/|x| u u']] / 2``."""
    x = torch.tensor([0.6, -0.3, 0.2], dtype=torch.float64)
    J = jacrev(ik.project.second_order_cone())(torch.cat([torch.tensor([t], dtype=torch.float64), x]))
    norm = x.norm()
    u = x / norm
    side = 0.5 * torch.cat(
        [
            torch.cat([torch.ones(1, 1, dtype=torch.float64), u[None]], 1),
            torch.cat(
                [u[:, None], (1 + t / norm) * torch.eye(3, dtype=torch.float64) - t / norm * torch.outer(u, u)], 1
            ),
        ]
    )
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(J, {"inside": eye, "polar": 0 * eye, "side": side}[expected])


@pytest.mark.parametrize("point", [torch.zeros(4), torch.tensor([1.0, 0, 0, 0]), torch.tensor([-1.0, 0, 0, 0])])
def test_second_order_cone_at_its_axis_has_a_finite_derivative(point: Tensor) -> None:
    J = jacrev(ik.project.second_order_cone())(point.double())
    assert bool(torch.isfinite(J).all())


def test_psd_derivative_with_repeated_eigenvalues() -> None:
    """At ``diag(1, 1, -1)`` eigenvectors have no derivative, the projection has: Malick & Sendov (2006)."""
    X = torch.diag(torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64))
    H = _points(4, 3, 3)
    H = 0.5 * (H + H.mT)
    weights = torch.tensor([[1, 1, 0.5], [1, 1, 0.5], [0.5, 0.5, 0]], dtype=torch.float64)
    derivative = torch.func.jvp(ik.project.psd_cone(), (X,), (H,))[1]
    torch.testing.assert_close(derivative, weights * H)
    assert bool(torch.isfinite(hessian(lambda Y: (ik.project.psd_cone()(Y) ** 3).sum())(X)).all())


def test_psd_derivatives_in_float32_where_float64_is_the_default() -> None:
    """torch's tangent of ``0.5 * w`` is then one of float64: ``|P(w C)|^2 = w^2 l^2`` has the derivatives 2 w l^2, 2 l^2."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        w, eigenvalues = torch.tensor(1.3, dtype=torch.float32), torch.tensor([4.0, -2.0], dtype=torch.float32)

        def f(w: Tensor) -> Tensor:
            half = torch.stack([0.5 * w, 0.5 * w])
            return (ik.project.psd_cone()(torch.diag_embed(half * eigenvalues)) ** 2).sum()

        first, second = torch.func.jvp(f, (w,), (torch.ones_like(w),))[1], hessian(f)(w)
        torch.testing.assert_close(torch.stack([first, second]).double(), torch.tensor([2 * 1.3 * 4.0, 8.0]))
    finally:
        torch.set_default_dtype(before)


def test_psd_second_derivatives_from_batched_gradients() -> None:
    X = _points(9, 3, 3).requires_grad_()
    value, eye = ik.project.psd_cone()(X).flatten(), torch.eye(9, dtype=torch.float64)
    (J,) = torch.autograd.grad(value, X, eye, is_grads_batched=True, create_graph=True)
    one = torch.stack([torch.autograd.grad(value, X, e, create_graph=True)[0] for e in eye])
    found, want = (torch.autograd.grad(j.pow(3).sum(), X, retain_graph=True)[0] for j in (J, one))
    torch.testing.assert_close(found, want)


def test_monotone_against_scikit_learn() -> None:
    v = _points(5, 20, 30)
    expected = np.stack([isotonic_regression(row) for row in v.numpy()])
    torch.testing.assert_close(ik.project.monotone()(v), torch.from_numpy(expected))


def test_l1_ball_against_scipy() -> None:
    v = _points(6, N)
    found = scipy.optimize.minimize(
        lambda x: ((x[:N] - x[N:] - v.numpy()) ** 2).sum(),
        np.zeros(2 * N),
        bounds=[(0, None)] * (2 * N),
        constraints={"type": "ineq", "fun": lambda x: 1.3 - x.sum()},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    torch.testing.assert_close(
        ik.project.l1_ball(1.3)(v), torch.from_numpy(found.x[:N] - found.x[N:]), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_simplex_of_large_entries(dtype: torch.dtype) -> None:
    """The projection does not change when a number is added to all entries, whatever is left of ``radius`` beside them."""
    large = 16 / torch.finfo(dtype).eps
    for make, expected in ((ik.project.simplex, [0.5, 0.5, 0.0]), (ik.project.l1_ball, [0.5, 0.5, 0.0])):
        found = make()(torch.tensor([large, large, 3.0], dtype=dtype))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype))


@pytest.mark.parametrize(
    "name",
    [
        "simplex",
        "l1_ball",
        "l2_ball",
        "l1_sphere",
        "l2_sphere",
        "kl_simplex",
        "second_order_cone",
        "monotone",
        "psd_cone",
    ],
)
def test_nan_stays_nan_in_its_sample(name: str) -> None:
    set_ = getattr(ik.project, name)()
    v = _points(12, 3, 4, 4)
    v[1] = torch.nan
    out = set_(v)
    assert out[1].isnan().any(), "a sample of NaN came back as numbers"
    torch.testing.assert_close(out[[0, 2]], set_(v[[0, 2]]))


@pytest.mark.parametrize("name", ["halfspace", "hyperplane", "affine", "polyhedron"])
def test_a_set_in_double_precision_takes_points_in_single(name: str) -> None:
    project, v = VECTOR_SETS[name][0], _points(3, N)
    found = project(v.float())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), project(v.float().double()), rtol=1e-5, atol=1e-5)


def test_a_radius_is_differentiated() -> None:
    v = _points(9, 3, N)
    radius = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    for name in ("simplex", "l1_ball", "l2_ball", "linf_ball", "l1_sphere", "l2_sphere", "kl_simplex"):
        assert torch.autograd.gradcheck(lambda r, s=name: getattr(ik.project, s)(r)(v), (radius,)), name


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ik.project.simplex(-1.0), ValueError, "positive"),
        (lambda: ik.project.l2_ball(0), ValueError, "positive"),
        (lambda: ik.project.box(), ValueError, "lower, upper"),
        (lambda: ik.project.box(1.0, 0.0), ValueError, "above"),
        (lambda: ik.project.polyhedron(), ValueError, "A and b"),
        (lambda: ik.project.simplex()(torch.arange(3)), TypeError, "floating-point"),
        (lambda: ik.project.simplex()(3.0), TypeError, "float"),
        (lambda: ik.project.box_section(1.0, 0.0), ValueError, "above"),
        (lambda: ik.project.box_section(None, 0.0), TypeError, "lower must be"),
        (lambda: ik.project.box_section(0.0, 1.0, 4.0)(torch.zeros(3)), ValueError, "between 0 and 3"),
        (lambda: ik.project.sparse_simplex(0), ValueError, "max_nonzero"),
        (lambda: ik.project.l1_sphere(-1.0), ValueError, "positive"),
        (lambda: ik.project.kl_birkhoff()(torch.zeros(2, 3)), ValueError, "square"),
        (lambda: ik.project.kl_transport(torch.ones(2), torch.ones(3))(torch.zeros(2, 3)), ValueError, "totals agree"),
        (lambda: ik.project.kl_transport(torch.ones(2), torch.ones(3))(torch.zeros(3, 3)), ValueError, "row sums"),
        (lambda: ik.Argmin(torch.sum, project=ik.project.kl_simplex()), ValueError, "Euclidean projection"),
        (lambda: ik.project.psd_cone()(torch.zeros(2, 3)), ValueError, "square"),
        (lambda: ik.project.birkhoff()(torch.zeros(2, 3)), ValueError, "square"),
        (
            lambda: ik.project.transport(torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 0.5]))(torch.zeros(2, 2)),
            ValueError,
            "must not be negative, the smallest is -1",
        ),
        (lambda: ik.project.transport(torch.ones(2), torch.ones(3))(torch.zeros(2, 3)), ValueError, "totals agree"),
        (
            lambda: torch.vmap(lambda r: ik.project.transport(r, torch.ones(2))(torch.zeros(2, 2)))(
                torch.ones(3, 2) * 2
            ),
            ValueError,
            "totals agree",
        ),
        (lambda: ik.project.transport(torch.ones(2), torch.ones(3))(torch.zeros(3, 3)), ValueError, "row sums"),
    ],
)
def test_bad_input(make: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 30.0), (torch.float16, 1e-4), (torch.float32, 1e25), (torch.float64, 1e-200)]
)
def test_squares_neither_overflow_nor_vanish(dtype: torch.dtype, size: float) -> None:
    """The squares of 4,000 numbers near 30 add up to more than half precision holds, and that of 1e-4 is zero there."""
    exact, a = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    length, v, a = exact.norm(), (size * exact).to(dtype), size * a.abs()
    cone = ik.project.second_order_cone()
    for found, wanted in (
        (ik.project.l2_ball(float(size * length / 8))(v), exact / 8),
        (ik.project.l2_sphere(float(size * length / 8))(v), exact / 8),
        (ik.prox.l2(float(size * length / 8))(v), exact * 7 / 8),
        (ik.project.hyperplane(a.to(dtype))(v), ik.project.hyperplane(a / size)(exact)),
        (ik.project.halfspace(-a.to(dtype))(v), ik.project.halfspace(-a / size)(exact)),
        (cone(v), cone(exact)),
    ):
        error = (found.double() / size - wanted).norm() / length
        assert float(error) < 4 * max(torch.finfo(dtype).eps, torch.finfo(dtype).tiny / size)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 4e3), (torch.float32, 1e25), (torch.float64, 1e200)])
def test_the_slope_of_a_ball_far_outside(dtype: torch.dtype, size: float) -> None:
    """``(I - n n') r / |v|``, whose second part is lost where ``r / |v|^2`` vanishes."""
    v = torch.tensor([3.0, 4.0], dtype=torch.float64)
    slope = torch.func.jacrev(ik.project.l2_ball(1.0))((size * v / 5).to(dtype)).double() * size
    n = v / 5
    torch.testing.assert_close(slope, torch.eye(2, dtype=torch.float64) - n.outer(n), rtol=0.01, atol=0.01)


def test_a_normal_of_zeros_asks_nothing() -> None:
    a = torch.stack([A_ROW, torch.zeros(N, dtype=torch.float64)]).requires_grad_()
    v = _points(0, 2, N)
    for project, b in ((ik.project.halfspace, torch.tensor([0.1, 2.0])), (ik.project.hyperplane, torch.zeros(2))):
        x = project(a, b.double())(v)
        torch.testing.assert_close(x[0], project(A_ROW, b[0].double())(v[0]))
        assert torch.equal(x[1], v[1])
        assert not bool(torch.autograd.grad(x.sum(), a)[0][1].any())
    for project, b in ((ik.project.halfspace, -1.0), (ik.project.hyperplane, 0.5)):
        mapped = vmap(lambda a, project=project, b=b: project(a, b)(v[0]))
        with pytest.raises(ValueError, match=r"1 of 2 sets are empty: the normal a is zero, and 0 <?= -?\d"):
            mapped(a)


@pytest.mark.parametrize("part", [ik.project.monotone(), ik.project.l2_ball(), ik.prox.l1(0.1)], ids=str)
def test_shapes_on_the_meta_device(part: Callable[[Tensor], Tensor]) -> None:
    assert part(torch.zeros(2, 3, device="meta")).shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "ends"),
    [
        (lambda r: ik.project.nonnegative(), lambda r: (0, None)),
        (lambda r: ik.project.box(-r, 0.1 + r), lambda r: (-r, 0.1 + r)),
        (lambda r: ik.project.linf_ball(r), lambda r: (-r, r)),
        (lambda r: ik.project.linf_ball(r, 0.2 * INSIDE), lambda r: (0.2 * INSIDE - r, 0.2 * INSIDE + r)),
    ],
    ids=["nonnegative", "box", "linf_ball", "linf_ball about a centre"],
)
def test_a_set_of_bounds_is_taken_for_bounds(
    make: Callable[[Tensor], object], ends: Callable[[Tensor], object]
) -> None:
    """An ill-conditioned quadratic takes as many evaluations, and has the derivatives, that it has within the bounds."""
    r, curvature = torch.tensor(0.3, dtype=torch.float64), torch.logspace(0, 5, N, dtype=torch.float64)
    Q = torch.linalg.qr(_points(9, N, N)).Q

    def solve(r: Tensor, **given: object) -> ik.Solution:
        return ik.argmin(lambda z, r: 0.5 * (curvature * (Q @ z).square()).sum() - r * z.sum(), INSIDE, (r,), **given)

    sets, bounds = (
        lambda r: solve(r, project=make(r)).value.square().sum(),
        lambda r: solve(r, bounds=ends(r)).value.square().sum(),
    )
    assert solve(r, project=make(r)).evaluations == solve(r, bounds=ends(r)).evaluations
    torch.testing.assert_close(jacrev(hessian(sets))(r), jacrev(hessian(bounds))(r))


def test_a_set_of_bounds_with_a_map_of_its_own_is_none() -> None:
    class AtLeastOne(ik.project.nonnegative):
        def project(self, v: Tensor) -> Tensor:
            return v.clamp_min(1.0)

    assert ik.argmin(lambda z: z.square().sum(), INSIDE, project=AtLeastOne()).value.tolist() == [1.0] * N

    class Halved(ik.project.linf_ball):
        def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
            return v.maximum(-radius / 2).minimum(radius / 2)

    assert ik.argmin(lambda z: -z.sum(), INSIDE, project=Halved(1.0)).value.tolist() == [0.5] * N


def tensor(*numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


THIRDS, EVEN, ONE = tensor(0.2, 0.3, 0.5), tensor(0.3, 0.3, 0.4), tensor(1.0)
SUMS = torch.cat([torch.eye(3).repeat_interleave(3, 1), torch.eye(3).repeat(1, 3)]).double()
#: name -> (set, A and b of ``A z = b, z >= 0``, the point's shape, a seed that has failed).
BY_PROGRAM = {
    "birkhoff": (ik.project.birkhoff(), SUMS, ONE.expand(6), (3, 3), 1),
    "transport": (ik.project.transport(THIRDS, EVEN), SUMS, torch.cat([THIRDS, EVEN]), (3, 3), 0),
    "polyhedron": (
        ik.project.polyhedron(ONE.expand(1, 4), ONE, -torch.eye(4).double(), 0 * ONE.expand(4)),
        ONE.expand(1, 4),
        ONE,
        (4,),
        2,
    ),
}


@pytest.mark.parametrize("name", BY_PROGRAM)
def test_rounding_of_a_program_is_no_slope(name):
    """A point on the edge, which the program knows to ``eps max |v|``, was refused after some 2,400 evaluations."""
    which, A, b, shape, seed = BY_PROGRAM[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 3)
    w = torch.arange(1.0, x.numel() + 1).to(x).view(shape) ** 2
    found = ik.argmin(lambda z: 0.5 * (w * (z - x) ** 2).sum(), which(x), project=which, callback=lambda k, *_: k > 60)
    w, x = w.flatten(), x.flatten()
    wanted = ik.solve(ik.QuadraticProgram(w.diag(), -w * x, A, b, -torch.eye(len(x)).to(x), torch.zeros_like(x))).value
    torch.testing.assert_close(found.value.flatten(), wanted, rtol=1e-9, atol=1e-9)
    assert found.evaluations < 120
