"""The cvxpy layer: transforms, closed forms, degenerate programs, status, bad input."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import scipy.sparse as sp
import torch
from matrices import randn
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import implicitkit as ik

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConvexLayer, DegenerateError, ProgramError, StructurallyZeroGradientWarning  # noqa: E402
from implicitkit_cvxpy.cones import (  # noqa: E402
    project_exponential,
    project_power,
    project_second_order,
    project_semidefinite,
    svec,
    unsvec,
)

F64 = torch.float64


# ------------------------------------------------------------------------------------------------ the layers under test
@dataclass(frozen=True)
class Case:
    """A layer and arguments for a batch of two; ``shared`` are the positions without a batch dimension."""

    name: str
    make: Callable[[], ConvexLayer]
    args: tuple[Tensor, ...]
    shared: tuple[int, ...] = ()

    def single(self) -> list[Tensor]:
        return [a if i in self.shared else a[0] for i, a in enumerate(self.args)]


def qp() -> ConvexLayer:
    S, q, G, h, x = cp.Parameter((3, 3)), cp.Parameter(3), cp.Parameter((4, 3)), cp.Parameter(4), cp.Variable(3)
    rows = G @ x <= h
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ x) + q @ x), [rows, cp.sum(x) == 1])
    return ConvexLayer(problem, [S, q, G, h], [x, rows.dual_variables[0]])


def socp() -> ConvexLayer:
    c, r, x = cp.Parameter(3), cp.Parameter(nonneg=True), cp.Variable(3)
    return ConvexLayer(cp.Problem(cp.Minimize(c @ x), [cp.norm(x - 1) <= r, x[0] >= 0.5]), [c, r], [x])


def sdp() -> ConvexLayer:
    C, X = cp.Parameter((3, 3), symmetric=True), cp.Variable((3, 3), symmetric=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(X - C)), [X >> 0, cp.trace(X) == 1])
    return ConvexLayer(problem, [C], [X])


def entropy() -> ConvexLayer:
    c, x = cp.Parameter(3), cp.Variable(3)
    return ConvexLayer(cp.Problem(cp.Maximize(c @ x + cp.sum(cp.entr(x))), [cp.sum(x) == 1]), [c], [x])


def geometric() -> ConvexLayer:
    x, y, z = (cp.Variable(pos=True) for _ in range(3))
    a, b, c = cp.Parameter(pos=True), cp.Parameter(pos=True), cp.Parameter()
    problem = cp.Problem(cp.Minimize(1 / (x * y * z)), [a * (x * y + x * z + y * z) <= b, x >= y**c])
    return ConvexLayer(problem, [a, b, c], [x, y, z], gp=True)


def power() -> ConvexLayer:
    c, x = cp.Parameter(2), cp.Variable(3)
    problem = cp.Problem(cp.Minimize(c @ x[:2] - x[2] + 0.5 * cp.sum_squares(x)), [cp.PowCone3D(x[0], x[1], x[2], 0.3)])
    return ConvexLayer(problem, [c], [x])


def symmetric(seed: int) -> Tensor:
    M = randn(2, 3, 3, seed=seed)
    return M + M.mT


CASES = [
    Case(
        "qp",
        qp,
        (randn(2, 3, 3) + 2 * torch.eye(3), randn(2, 3, seed=1), randn(4, 3, seed=2), randn(4, seed=3) ** 2),
        (2, 3),
    ),
    Case("socp", socp, (randn(2, 3, seed=4), torch.tensor([0.7, 1.1], dtype=F64))),
    Case("sdp", sdp, (symmetric(5),)),
    Case("entropy", entropy, (randn(2, 3, seed=6),)),
    Case(
        "gp",
        geometric,
        (torch.tensor([2.0, 1.5], dtype=F64), torch.tensor(1.0, dtype=F64), torch.tensor([0.5, 0.4], dtype=F64)),
        (1,),
    ),
    Case("power", power, (torch.tensor([[0.6, 0.8], [0.3, 0.5]], dtype=F64),)),
]
cases = pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])


def scalar(layer: ConvexLayer) -> Callable[..., Tensor]:
    """A smooth scalar of everything that the layer returns, nonlinear so that second derivatives see the first."""
    return lambda *args: sum(
        (x * x * (1.0 + 0.1 * torch.arange(x.numel(), dtype=F64).reshape(x.shape))).sum() for x in layer(*args)
    )


def assert_near(got: Any, want: Any, tol: float = 1e-7) -> None:
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


# ------------------------------------------------------------------------------------------------------------ transforms
@pytest.mark.one_in(2)
@cases
def test_gradcheck_first_and_second_order(case: Case) -> None:
    """Entry by entry of one sample, along random directions of the batch."""
    layer, args = case.make(), [a.clone().requires_grad_() for a in case.args]
    alone = [a.clone().requires_grad_() for a in case.single()]
    assert gradcheck(layer, alone, atol=1e-6, rtol=1e-4, fast_mode=False)
    assert gradcheck(layer, args, atol=1e-6, rtol=1e-4, fast_mode=True)
    assert gradgradcheck(layer, args, atol=1e-5, rtol=1e-3, fast_mode=True)


@pytest.mark.one_in(2)
@cases
@pytest.mark.parametrize("how", ["autograd", "func"])
def test_what_a_layer_returns_may_be_changed_in_place(case: Case, how: str) -> None:
    layer, where = case.make(), tuple(range(len(case.args)))
    losses = (
        lambda *args: sum(x.add_(1).mul_(2).square().sum() for x in layer(*args)),
        lambda *args: sum(((x + 1) * 2).square().sum() for x in layer(*args)),
    )
    if how == "func":
        assert_near(*(torch.func.grad(f, argnums=where)(*case.args) for f in losses))
    else:
        leaves = [a.clone().requires_grad_() for a in case.args]
        assert_near(*(torch.autograd.grad(f(*leaves), leaves) for f in losses))
        with torch.no_grad():
            wanted = [x.clone() for x in layer(*case.args)]
            for x in layer(*case.args):
                x.fill_(7)
            assert_near(tuple(layer(*case.args, warm_start=True)), tuple(wanted), 1e-6)


@cases
def test_transforms_agree(case: Case) -> None:
    layer, args = case.make(), case.single()
    f, where = scalar(layer), tuple(range(len(args)))
    leaves = [a.clone().requires_grad_() for a in args]
    eager = torch.autograd.grad(f(*leaves), leaves)
    assert_near(torch.func.grad(f, argnums=where)(*args), eager)
    tangents = [randn(*a.shape, seed=9) if case.name != "sdp" else torch.eye(3, dtype=F64) for a in args]
    expected = sum((g * t).sum() for g, t in zip(eager, tangents, strict=True))
    assert_near(torch.func.jvp(f, tuple(args), tuple(tangents))[1], expected)
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(a, t) for a, t in zip(args, tangents, strict=True)))
        assert_near(forward_ad.unpack_dual(out).tangent, expected)
    hessian = torch.func.hessian(f)(*args)
    assert_near(torch.func.jacrev(torch.func.jacrev(f))(*args), hessian)
    assert_near(torch.func.jacfwd(torch.func.jacfwd(f))(*args), hessian)
    assert_near(torch.autograd.functional.hessian(lambda first: f(first, *args[1:]), args[0]), hessian)


@pytest.mark.one_in(2)
@cases
@pytest.mark.parametrize("tracked", [True, False])
def test_a_checkpoint_around_a_layer(tracked: bool, case: Case) -> None:
    layer, f = case.make(), scalar(case.make())
    args = [a.clone().requires_grad_(tracked) for a in case.single()]
    out = checkpoint(f, *args, use_reentrant=False)
    assert_near(out, f(*args))
    if tracked:
        assert_near(torch.autograd.grad(out, args), torch.autograd.grad(scalar(layer)(*args), args))


@cases
def test_vmap_is_the_batch(case: Case) -> None:
    layer = case.make()
    dims = tuple(None if i in case.shared else 0 for i in range(len(case.args)))
    batched = layer(*case.args)
    assert_near(torch.func.vmap(layer, in_dims=dims)(*case.args), batched)
    f, where = scalar(layer), tuple(range(len(case.args)))
    found = torch.func.vmap(torch.func.grad(f, argnums=where), in_dims=dims)(*case.args)
    for i in range(2):
        args = [a if d is None else a[i] for a, d in zip(case.args, dims, strict=True)]
        assert_near(tuple(g[i] for g in found), torch.func.grad(f, argnums=where)(*args))


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch._dynamo looks at it after a graph break
@cases
def test_compile_copy_pickle(case: Case) -> None:
    layer, args = case.make(), case.single()
    expected = layer(*args)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_near(other(*args), expected)
    leaves = [a.clone().requires_grad_() for a in args]
    f = scalar(layer)
    compiled = torch.compile(lambda *a: f(*a) * 2, backend="eager")
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert_near(found, tuple(2 * g for g in torch.autograd.grad(f(*leaves), leaves)))


def test_second_derivative_through_a_layer_is_48() -> None:
    q, x = cp.Parameter(), cp.Variable()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.square(x - q))), [q], [x])

    def loss(t: Tensor) -> Tensor:
        return layer(t * t)[0] ** 2

    t = torch.tensor(2.0, dtype=F64)
    for hessian in (torch.func.hessian(loss)(t), torch.autograd.functional.hessian(loss, t)):
        assert hessian.item() == pytest.approx(48.0, abs=1e-9)
    third = torch.func.grad(torch.func.grad(torch.func.grad(loss)))(t)
    assert third.item() == pytest.approx(24 * 2.0, abs=1e-8)


# ---------------------------------------------------------------------------------------------------------- closed forms
def projection(constraints: Callable[[Any], list[Any]], n: int) -> ConvexLayer:
    p, x = cp.Parameter(n), cp.Variable(n)
    return ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x - p)), constraints(x)), [p], [x])


def simplex(v: Tensor) -> Tensor:
    u = v.sort(descending=True).values
    theta = (u.cumsum(0) - 1) / torch.arange(1, len(v) + 1)
    k = int((u > theta).sum())
    return (v - theta[k - 1]).clamp_min(0)


def ball(v: Tensor) -> Tensor:
    return v / v.norm().clamp_min(1.0)


def halfspace(v: Tensor) -> Tensor:
    a = torch.arange(1.0, len(v) + 1, dtype=F64)
    return v - (a @ v - 1).clamp_min(0) / (a @ a) * a


def half(x: Any) -> list[Any]:
    return [sum((i + 1) * x[i] for i in range(5)) <= 1]


CLOSED = {
    "simplex": (lambda x: [x >= 0, cp.sum(x) == 1], simplex),
    "box": (lambda x: [x >= -0.3, x <= 0.4], lambda v: v.clamp(-0.3, 0.4)),
    "halfspace": (half, halfspace),
    "ball": (lambda x: [cp.norm(x) <= 1], ball),
    "second-order cone": (lambda x: [cp.SOC(x[0], x[1:])], project_second_order),
}


@pytest.mark.parametrize("name", CLOSED)
def test_projections_and_their_jacobians(name: str) -> None:
    constraints, formula = CLOSED[name]
    layer = projection(constraints, 5)
    for seed in range(4):
        v = 2 * randn(5, seed=seed)
        assert_near(layer(v)[0], formula(v), 1e-9)
        assert_near(torch.func.jacrev(layer)(v)[0], torch.func.jacrev(formula)(v), 1e-8)


def test_softmax_is_entropy_maximisation() -> None:
    layer, c = entropy(), randn(3, seed=1)
    assert_near(layer(c)[0], c.softmax(0), 1e-9)
    assert_near(torch.func.jacrev(layer)(c)[0], torch.func.jacrev(lambda c: c.softmax(0))(c), 1e-8)
    assert_near(torch.func.hessian(scalar(layer))(c), torch.func.hessian(scalar(lambda c: (c.softmax(0),)))(c), 1e-6)


def test_ridge_and_equality_qp_with_duals() -> None:
    A, b, x = cp.Parameter((6, 3)), cp.Parameter(6), cp.Variable(3)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b) + 0.5 * cp.sum_squares(x))), [A, b], [x])
    a, y = randn(6, 3), randn(6, seed=1)

    def ridge(a: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.solve(a.mT @ a + 0.5 * torch.eye(3, dtype=F64), a.mT @ y)

    assert_near(layer(a, y)[0], ridge(a, y), 1e-10)
    assert_near(
        torch.func.jacrev(lambda *t: layer(*t)[0], argnums=(0, 1))(a, y),
        torch.func.jacrev(ridge, argnums=(0, 1))(a, y),
        1e-8,
    )
    q, d, z = cp.Parameter(3), cp.Parameter(2), cp.Variable(3)
    C = randn(2, 3, seed=2)
    rows = C.numpy() @ z == d
    layer = ConvexLayer(
        cp.Problem(cp.Minimize(0.5 * cp.sum_squares(z) + q @ z), [rows]), [q, d], [z, rows.dual_variables[0]]
    )

    def kkt(q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        dual = torch.linalg.solve(C @ C.mT, -d - C @ q)
        return -q - C.mT @ dual, dual

    v, w = randn(3, seed=3), randn(2, seed=4)
    assert_near(layer(v, w), kkt(v, w), 1e-10)
    assert_near(torch.func.jacrev(layer, argnums=1)(v, w), torch.func.jacrev(kkt, argnums=1)(v, w), 1e-9)


def test_lasso_soft_threshold() -> None:
    p, lam, x = cp.Parameter(4), cp.Parameter(nonneg=True), cp.Variable(4)
    layer = ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x - p) + lam * cp.norm1(x))), [p, lam], [x])
    v, t = torch.tensor([1.5, -0.2, 0.7, -2.0], dtype=F64), torch.tensor(0.5, dtype=F64)
    soft = lambda v, t: v.sign() * (v.abs() - t).clamp_min(0)  # noqa: E731
    assert_near(layer(v, t)[0], soft(v, t), 1e-9)
    assert_near(
        torch.func.jacrev(lambda *a: layer(*a)[0], argnums=(0, 1))(v, t),
        torch.func.jacrev(soft, argnums=(0, 1))(v, t),
        1e-8,
    )


def test_semidefinite_projection_gives_symmetric_gradients() -> None:
    C, X = cp.Parameter((3, 3), symmetric=True), cp.Variable((3, 3), PSD=True)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(X - C))), [C], [X])
    v = symmetric(7)[0].requires_grad_()
    values, vectors = torch.linalg.eigh(v.detach())
    (x,) = layer(v)
    assert_near(x, (vectors * values.clamp_min(0)) @ vectors.mT, 1e-9)
    (x * randn(3, 3, seed=8)).sum().backward()
    assert_near(v.grad, v.grad.mT, 1e-12)
    assert v.grad[1, 0].abs() > 1e-3


def clamp(C: Tensor) -> Tensor:
    values, U = torch.linalg.eigh((C + C.mT) / 2)
    return U @ torch.diag_embed(values.clamp(0.3, 2.0)) @ U.mT


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
def test_an_unknown_of_the_reduction_that_is_free(transform: Any) -> None:
    """The bound on the least eigenvalue is not active, and cvxpy's unknown for it any number: the derivative was zero, or a
    tenth off, since rounding errors in the projection's derivative were rows in units of their own."""
    C, X = cp.Parameter((3, 3), symmetric=True), cp.Variable((3, 3), symmetric=True)
    bounds = [cp.lambda_max(X) <= 2, cp.lambda_min(X) >= 0.3]
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(X - C)), bounds), [C], [X])
    for seed in range(3):
        L = randn(3, 3, seed=seed)
        given = L @ L.mT + 0.5 * torch.eye(3, dtype=F64)
        assert_near(layer(given)[0], clamp(given), 1e-8)
        assert_near(transform(layer)(given)[0], transform(clamp)(given), 1e-7)


#: constraints that are not active near ``(7, 8, 9)``, whose unknowns in the reduction are any numbers, and large
IDLE: dict[str, Callable[[Any], Any]] = {
    "norm": lambda x: cp.norm(x) <= 100,
    "exponentials": lambda x: cp.sum(cp.exp(x / 10)) <= 100,
    "geometric mean": lambda x: cp.geo_mean(x) >= 0.1,
    "log_sum_exp": lambda x: cp.log_sum_exp(x) <= 50,
    "powers": lambda x: cp.sum(cp.power(x, 4)) <= 1e6,
}


@pytest.mark.parametrize("name", IDLE)
def test_idle_constraints_leave_derivatives_as_they_are(name: str) -> None:
    """Under transforms they were zero: the solution was taken for one at infinity, by another judge than the layer."""
    point = torch.tensor([7.0, 8.0, 9.0], dtype=F64)
    layer = projection(lambda x: [IDLE[name](x)], 3)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert_near(transform(layer)(point)[0], torch.eye(3, dtype=F64), 1e-9)


@pytest.mark.parametrize("h", [1e-5, 1e-6, -1e-6])
def test_a_point_near_a_kink_is_solved_with_more_digits(h: float) -> None:
    """Slacks of 6e-7 beside multipliers of 3e-5: which of them are zero was not told, and the program refused."""
    c, x = cp.Parameter(3), cp.Variable(3)
    distance = cp.sum(cp.kl_div(x, [0.3, 0.3, 0.6])) + cp.norm_inf(x - c)
    layer = ConvexLayer(cp.Problem(cp.Minimize(distance), [cp.sum(x) == 1]), [c], [x])
    point = torch.tensor([0.2 + h, 0.3 + 0.2 * h, 0.5 - 0.3 * h], dtype=F64)
    assert_near(layer(point)[0], point - (point.sum() - 1) / 3, 1e-12)
    assert_near(torch.func.jacrev(layer)(point)[0], torch.eye(3, dtype=F64) - 1 / 3, 1e-9)


def test_planted_solutions_of_quadratic_programs() -> None:
    """Random QPs built around a KKT point: the gradient is that of the active-set system, to 1e-8 and better."""
    n, m, active = 20, 20, 5
    S, q, G, h, x = cp.Parameter((n, n)), cp.Parameter(n), cp.Parameter((m, n)), cp.Parameter(m), cp.Variable(n)
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ x) + q @ x), [G @ x <= h])
    s, g = randn(4, n, n) / n**0.5 + torch.eye(n), randn(4, m, n, seed=1) / n**0.5
    x0, lam = randn(4, n, seed=2), torch.zeros(4, m, dtype=F64)
    lam[:, :active] = randn(4, active, seed=3).abs() + 0.1
    slack = randn(4, m, seed=4).abs() + 0.1
    slack[:, :active] = 0
    hh = (g @ x0.unsqueeze(2)).squeeze(2) + slack
    P = s.mT @ s
    qq = -(P @ x0.unsqueeze(2) + g.mT @ lam.unsqueeze(2)).squeeze(2)

    def exact(s: Tensor, q: Tensor, g: Tensor, h: Tensor) -> Tensor:
        C, zero = g[:, :active], torch.zeros(4, active, active, dtype=F64)
        K = torch.cat([torch.cat([s.mT @ s, C.mT], 2), torch.cat([C, zero], 2)], 1)
        return torch.stack(
            [torch.linalg.solve(k, r) for k, r in zip(K, torch.cat([-q, h[:, :active]], 1), strict=True)]
        )[:, :n]

    weight = randn(4, n, seed=5)
    for solver in (None, "interior_point", "CLARABEL", "daqp"):
        args = [t.clone().requires_grad_() for t in (s, qq, g, hh)]
        (found,) = ConvexLayer(problem, [S, q, G, h], [x], solver=solver)(*args)
        assert_near(found, x0, 1e-9)
        grads = torch.autograd.grad((found * weight).sum(), args)
        wanted = torch.autograd.grad((exact(*args) * weight).sum(), args)
        for a, b in zip(grads, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-8 * b.abs().max(), solver


# -------------------------------------------------------------------------------------------------- projections onto cones
CONES = {
    "second-order": (project_second_order, 4),
    "semidefinite": (project_semidefinite, 6),
    "exponential": (project_exponential, 3),
    "power": (lambda v: project_power(v, torch.tensor(0.3, dtype=F64)), 3),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONES)
def test_cone_projections(name: str) -> None:
    """Moreau's decomposition, idempotence, no neighbour's NaN, and derivatives of three orders in two modes."""
    project, n = CONES[name]
    v = 2 * randn(60, n, seed=1)
    w = project(v)
    assert_near(project(w), w, 1e-12)
    assert_near(project(torch.cat([v[:9], torch.full_like(v[:1], torch.nan)]))[:9], w[:9], 1e-14)
    assert ((v - w) * w).sum(1).abs().max() < 1e-12, "v - Pi(v) is orthogonal to Pi(v)"
    # (v - w) in the polar cone: <v - w, u> <= 0 for members u of the cone
    assert ((v - w) @ project(2 * randn(60, n, seed=2)).mT).max() < 1e-10
    few = v[:6].clone().requires_grad_()
    assert gradcheck(project, few) and gradgradcheck(project, few)
    reverse = torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(project)))(v[0])
    assert_near(torch.func.jacfwd(torch.func.jacfwd(torch.func.jacfwd(project)))(v[0]), reverse, 1e-9)


def _exponential_rays(rho: Tensor, _: float) -> list[list[Tensor]]:
    e, one = rho.exp(), torch.ones_like(rho)
    return [[rho, one, e], [e, (1 - rho) * e, -one]]


def _power_rays(tau: Tensor, alpha: float) -> list[list[Tensor]]:
    x, y, one = ((1 - alpha) * tau).exp(), (-alpha * tau).exp(), torch.ones_like(tau)
    return [[x, y, one], [-alpha / x, (alpha - 1) / y, one]]


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("alpha", [None, 1e-6, 0.001, 0.3, 0.5, 0.999])
def test_projections_of_extreme_points(alpha: float | None, dtype: torch.dtype) -> None:
    """``a p + c d``, with the ray ``p`` of the cone and that of its polar, projects to ``a p``, whatever ``c / a`` and the
    unit; the derivative is symmetric, takes the point to its projection, and has eigenvalues between 0 and 1."""
    p, d = (_power_rays if alpha else _exponential_rays)(torch.linspace(-90, 90, 41, dtype=F64), alpha or 0.0)
    p, d = (torch.stack(ray, -1) / torch.stack(ray, -1).norm(dim=-1, keepdim=True) for ray in (p, d))
    ratio = torch.logspace(-12, 12, 9, dtype=F64)[:, None, None]
    planted, out = p * ratio.clamp_max(1), p * ratio.clamp_max(1) + d / ratio.clamp_min(1)
    exponent = torch.tensor(alpha or 0.5, dtype=F64)
    for unit in (1e-12, 1.0, 1e12):
        v = (out * unit).to(dtype).reshape(-1, 3).requires_grad_()
        w = project_power(v, exponent) if alpha else project_exponential(v)
        eps = 16 * torch.finfo(dtype).eps
        assert_near(w.double() / unit, planted.reshape(-1, 3), eps)
        D = torch.stack([torch.autograd.grad(w[:, i].sum(), v, retain_graph=True)[0] for i in range(3)], 1).double()
        assert_near((D @ v.double()[..., None])[..., 0] / unit, planted.reshape(-1, 3), eps)
        assert_near(D, D.mT, 1e-7)
        values = torch.linalg.eigvalsh((D + D.mT) / 2)
        assert values.min() > -1e-7 and values.max() < 1 + 1e-7


@pytest.mark.parametrize(("alpha", "slope"), [(0.3, 1.0), (0.5, 0.5), (0.7, 0.0)])
def test_derivative_of_the_power_projections_at_z_zero(alpha: float, slope: float) -> None:
    """Hien (2015): at ``(x, y, 0)``, ``x < 0 < y``, the derivative of the third entry is 1, ``y / (y - 2 x)`` or 0."""
    for order in ([0, 1, 2], [1, 0, 2]):
        exponent = torch.tensor(alpha if order[0] == 0 else 1 - alpha, dtype=F64)
        D = torch.func.jacrev(lambda v, a=exponent: project_power(v, a))(
            torch.tensor([-1.0, 2.0, 0.0], dtype=F64)[order]
        )
        assert_near(D, torch.diag(torch.tensor([0.0, 1.0, slope], dtype=F64)[order]), 1e-15)


def test_triangles_are_an_isometry() -> None:
    X = symmetric(3)
    assert_near(unsvec(svec(X)), X, 1e-14)
    assert_near(svec(X).norm(dim=1), X.flatten(1).norm(dim=1), 1e-14)


# --------------------------------------------------------------------------------------------------------- calling it
def test_batches_shared_parameters_and_empty_batches() -> None:
    layer = qp()
    s, q, g, h = CASES[0].args
    wide = [s.expand(3, 2, 3, 3).clone(), q.expand(3, 2, 3).clone(), g, h.clone().requires_grad_()]
    x, lam = layer(*wide)
    assert x.shape == (3, 2, 3) and lam.shape == (3, 2, 4)
    assert_near(x[1], layer(s, q, g, h)[0], 1e-12)
    x.sum().backward()
    one = h.clone().requires_grad_()
    layer(s, q, g, one)[0].sum().backward()
    assert_near(wide[3].grad, 3 * one.grad, 1e-9)  # summed over the batch, not averaged
    empty = layer(s[:0].requires_grad_(), q[:0], g, h)
    assert [t.shape for t in empty] == [(0, 3), (0, 4)]
    empty[0].sum().backward()


@pytest.mark.parametrize("store", [Tensor.to_sparse, Tensor.to_sparse_csr, lambda t: sp.csr_array(t.detach().numpy())])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_matrices_are_parameters(store: Any) -> None:
    A, x, rows = cp.Parameter((3, 2)), cp.Variable(2), randn(3, 2).requires_grad_()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(A @ x - 1) + cp.norm1(x))), [A], [x])
    dense, found = layer(rows)[0], layer(store(rows))[0]
    assert_near(found, dense, 1e-12)
    if found.requires_grad:
        assert_near(*(torch.autograd.grad(v.sum(), rows)[0] for v in (found, dense)), 1e-12)


def test_dtype_follows_the_parameters() -> None:
    layer, args = qp(), [a.float() for a in CASES[0].args]
    x, _ = layer(*args)
    assert x.dtype == torch.float32
    assert_near(x.double(), layer(*CASES[0].args)[0], 1e-5)


def test_warm_start_gives_the_same_and_spares_the_solver() -> None:
    layer, args = entropy(), [randn(3, seed=6)]
    layer(*args)
    assert int(layer.solution.steps.max()) > 0
    nearby = [args[0] + 0.01]
    (warm,) = layer(*nearby, warm_start=True)
    assert int(layer.solution.steps.max()) == 0, "a Newton step from the last solution was enough"
    assert_near(warm, layer(*nearby)[0], 1e-9)


@pytest.mark.parametrize("solver", ["CLARABEL", "SCS", "OSQP", "interior_point", "daqp", "auto"])
def test_solvers_agree_on_a_quadratic_program(solver: str) -> None:
    if solver.upper() in ("OSQP", "SCS") and solver not in cp.installed_solvers():
        pytest.skip(f"{solver} is not installed")
    S, q, x = cp.Parameter((3, 3)), cp.Parameter(3), cp.Variable(3)
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ x) + q @ x), [x >= 0, cp.sum(x) == 1])
    args = [a.clone().requires_grad_() for a in CASES[0].args[:2]]
    expected = ConvexLayer(problem, [S, q], [x])(*args)[0]
    found = ConvexLayer(problem, [S, q], [x], solver=solver)(*args)[0]
    assert_near(found, expected, 1e-8)
    assert_near(
        torch.autograd.grad(found.square().sum(), args), torch.autograd.grad(expected.square().sum(), args), 1e-7
    )


@pytest.mark.parametrize("case", CASES[1:], ids=[c.name for c in CASES[1:]])
def test_scs_agrees_on_every_cone(case: Case) -> None:
    layer = case.make()
    other = case.make()
    other._solver = "SCS"
    other._backend = other._resolve({})
    assert_near(other(*case.args), layer(*case.args), 1e-6)


ATOMS: dict[str, Callable[[Any, Any], tuple[Any, list[Any]]]] = {
    "huber": lambda x, p: (cp.sum(cp.huber(x - p)), [cp.sum(x) == 1]),
    "max": lambda x, p: (cp.max(x - p) + 0.1 * cp.sum_squares(x), [x >= -1]),
    "log_sum_exp": lambda x, p: (cp.log_sum_exp(x) + cp.sum_squares(x - p), []),
    "kl_div": lambda x, p: (cp.sum(cp.kl_div(x, cp.Constant([1, 2, 3]))) - p @ x, [x <= 4]),
    "geo_mean": lambda x, p: (-cp.geo_mean(x) + 0.5 * cp.sum_squares(x - p), []),
    "pnorm": lambda x, p: (cp.pnorm(x - p, 3) + cp.sum_squares(x), [cp.sum(x) == 1]),
    "quad_over_lin": lambda x, p: (cp.quad_over_lin(x - p, 1 + x[0]), [x[0] >= 0]),
    "lambda_max": lambda x, p: (cp.lambda_max(cp.diag(x) + 0.3) + cp.sum_squares(x - p), []),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("atom", ATOMS)
def test_atoms_of_cvxpy_to_second_order(atom: str) -> None:
    x, p = cp.Variable(3), cp.Parameter(3)
    objective, constraints = ATOMS[atom](x, p)
    layer = ConvexLayer(cp.Problem(cp.Minimize(objective), constraints), [p], [x])
    value = torch.tensor([0.9, 0.3, -0.2], dtype=F64, requires_grad=True)
    assert gradcheck(layer, value, atol=1e-5, rtol=1e-4)
    assert gradgradcheck(layer, value, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_quadratic_form_of_a_parameter() -> None:
    """``quad_form(x, P)`` in the objective: ``x = P^{-1} 1 / (1' P^{-1} 1)``."""
    P, x = cp.Parameter((3, 3), PSD=True), cp.Variable(3)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.quad_form(x, P)), [cp.sum(x) == 1]), [P], [x])
    M = randn(3, 3, seed=11)
    value = M @ M.mT + torch.eye(3)

    def exact(P: Tensor) -> Tensor:
        z = torch.linalg.solve((P + P.mT) / 2, torch.ones(3, dtype=F64))
        return z / z.sum()

    assert_near(layer(value)[0], exact(value), 1e-9)
    assert_near(torch.func.jacrev(layer)(value)[0], torch.func.jacrev(exact)(value), 1e-8)


def test_a_problem_without_parameters() -> None:
    x = cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - 1)), [x <= 0.5]), [], [x])
    assert_near(layer()[0].to(F64), torch.tensor([0.5, 0.5], dtype=F64), 1e-6)


def test_gradients_of_a_batch_of_cotangents() -> None:
    layer, c = entropy(), randn(3, seed=1).requires_grad_()
    (x,) = layer(c)
    (rows,) = torch.autograd.grad(x, c, torch.eye(3, dtype=F64), is_grads_batched=True, retain_graph=True)
    assert_near(rows, torch.func.jacrev(lambda c: c.softmax(0))(c.detach()), 1e-8)
    (again,) = torch.autograd.grad(x.sum() + x[0], c)
    assert_near(again, rows.sum(0) + rows[0], 1e-8)


@pytest.mark.parametrize("solver", [None, "SCS", "CLARABEL", "OSQP", "daqp", "interior_point"])
def test_a_program_without_constraints(solver: Any) -> None:
    """Least squares, one sample and a batch, by every solver: the normal equations; and no minimum is said."""
    A, b, x = cp.Parameter((5, 2)), cp.Parameter(5), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b))), [A, b], [x], solver=solver)
    M, t = randn(3, 5, 2), randn(5, seed=1)
    assert_near(layer(M, t)[0], torch.linalg.lstsq(M, t.expand(3, 5)[..., None]).solution[..., 0], 1e-9)
    assert_near(layer(M[0], t)[0], torch.linalg.lstsq(M[0], t[:, None]).solution[:, 0], 1e-9)
    if solver != "daqp":
        c = cp.Parameter(2)
        falls = ConvexLayer(cp.Problem(cp.Minimize(cp.square(x[0]) + c @ x)), [c], [x], solver=solver)
        with pytest.raises(ProgramError, match="unbounded"):
            falls(torch.ones(2, dtype=F64))


# ------------------------------------------------------------------------------------------------------------ degenerate
def test_linear_program_vertex() -> None:
    c, b, x = cp.Parameter(2, name="c"), cp.Parameter(2, name="b"), cp.Variable(2)
    problem = cp.Problem(cp.Minimize(c @ x), [x >= b])
    cost, bound = (
        torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True),
        torch.tensor([0.3, -0.4], dtype=F64, requires_grad=True),
    )
    layer = ConvexLayer(problem, [c, b], [x])
    with pytest.warns(StructurallyZeroGradientWarning, match=r"gradient with respect to c is zero.*vertex.*smooth"):
        (found,) = layer(cost, bound)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = layer(cost, bound)  # said once
    assert_near(found, bound)
    grads = torch.autograd.grad((found * torch.tensor([1.0, 3.0])).sum(), (cost, bound))
    assert_near(grads, (torch.zeros(2, dtype=F64), torch.tensor([1.0, 3.0], dtype=F64)), 1e-9)


def test_policies_at_a_linear_program_with_a_face_of_solutions() -> None:
    """min x1 + x2 subject to x1 + x2 >= p: dx/dp is any split of one; the minimum norm is a half each."""
    p, x = cp.Parameter(), cp.Variable(2)
    problem = cp.Problem(cp.Minimize(cp.sum(x)), [cp.sum(x) >= p])
    value = torch.tensor(1.0, dtype=F64)
    layer, leaf = ConvexLayer(problem, [p], [x]), value.clone().requires_grad_()
    (sum_,) = torch.autograd.grad(layer(leaf)[0].sum(), leaf)  # determined
    assert_near(sum_, torch.ones_like(sum_), 1e-8)
    for derivative in (torch.func.jacrev(layer), lambda p: torch.autograd.grad(layer(p)[0][0], p)):
        with pytest.warns(ik.extend.DegenerateWarning, match="do not determine the derivative.*smooth"):
            found = derivative(leaf)[0]
        assert_near(found, torch.full_like(found, 0.5), 1e-8)
    strict = ConvexLayer(problem, [p], [x], degenerate="raise")
    with pytest.raises(DegenerateError, match=r"sample\(s\) 0 is not differentiable.*lstsq.*smooth"):
        torch.func.jacrev(strict)(value)


def test_samples_of_many_derivatives_are_named_by_their_own_numbers() -> None:
    x, c = cp.Variable(2), cp.Parameter(2)
    program = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x >= 0, x[0] >= 0])  # one twice
    layer = ConvexLayer(program, [c], [x], degenerate="raise")
    values = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [2.0, 2.0]], dtype=F64)
    pull = lambda c: torch.autograd.grad(layer(c.requires_grad_())[0].sum(), c)  # noqa: E731
    for derivative in (torch.func.jacrev(layer), torch.func.jacfwd(layer), torch.vmap(torch.func.jacrev(layer)), pull):
        with pytest.raises(DegenerateError, match=r"sample\(s\) 1 is not") as caught:
            derivative(values.clone())
        assert caught.value.samples == (1,)


def test_smooth_policy_is_the_derivative_of_the_central_path() -> None:
    """min c x on [0, 1]: with mu, c = mu / x - mu / (1 - x) on the central path; the vertex itself has derivative zero."""
    c, x = cp.Parameter(), cp.Variable()
    mu = 1e-3
    layer = ConvexLayer(cp.Problem(cp.Minimize(c * x), [x >= 0, x <= 1]), [c], [x], degenerate="smooth", smoothing=mu)
    v = torch.tensor(0.5, dtype=F64)
    found = layer(v)[0]
    assert_near(mu / found - mu / (1 - found), v, 1e-7)
    slope = -1 / (mu / found**2 + mu / (1 - found) ** 2)
    assert_near(torch.func.grad(lambda c: layer(c)[0])(v), slope, 1e-7)
    assert gradcheck(lambda c: layer(c)[0], (v.clone().requires_grad_(),))


def test_report_of_rank_condition_and_weakly_active_constraints() -> None:
    p, x = cp.Parameter(2), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x - p)), [x >= 0]), [p], [x])
    layer(torch.tensor([[0.0, 1.0], [1.0, -1.0]], dtype=F64))
    report = layer.solution
    assert report.weakly_active.tolist() == [1, 0]
    assert report.rank.tolist() == [4, 4] and (report.condition < 10).all()
    twice = ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x - p)), [x >= 0, 2 * x >= 0]), [p], [x])
    face = ConvexLayer(cp.Problem(cp.Minimize(cp.sum(x)), [cp.sum(x - p) >= 0]), [p], [x])
    face(torch.tensor([1.0, 1.0], dtype=F64))
    assert face.solution.rank.item() == 2 and face.solution.condition.item() == torch.inf  # of 3
    assert_near(
        torch.func.jacrev(twice)(torch.tensor([-1.0, 2.0], dtype=F64))[0],
        torch.diag(torch.tensor([0.0, 1.0], dtype=F64)),
        1e-9,
    )


# ---------------------------------------------------------------------------------------------------- status is data
def interval(on_failure: str = "raise", solver: Any = None) -> ConvexLayer:
    low, scale, x = cp.Parameter(name="low"), cp.Parameter(name="scale"), cp.Variable()
    problem = cp.Problem(cp.Minimize(cp.square(x) + scale * x), [x >= low, x <= 1])
    return ConvexLayer(problem, [low, scale], [x], on_failure=on_failure, solver=solver)


@pytest.mark.parametrize("solver", [None, "CLARABEL", "SCS", "interior_point"])
def test_one_infeasible_program_of_three(solver: Any) -> None:
    low = torch.tensor([0.5, 3.0, -0.5], dtype=F64, requires_grad=True)
    scale = torch.tensor(0.25, dtype=F64, requires_grad=True)
    with pytest.raises(ProgramError, match=r"1 of 3 programs.*infeasible.*sample 1\..*on_failure=\"nan\"") as caught:
        interval(solver=solver)(low, scale)
    assert caught.value.samples == (1,)
    layer = interval("nan", solver)
    (x,) = layer(low, scale)
    assert layer.solution.status.tolist() == [0, int(ik.Status.INFEASIBLE), 0]
    assert x.isnan().tolist() == [False, True, False]
    assert_near(x[[0, 2]], torch.tensor([0.5, -0.125], dtype=F64), 1e-8)
    grads = torch.autograd.grad(x[~x.isnan()].sum(), (low, scale))
    assert_near(grads, (torch.tensor([1.0, 0.0, 0.0], dtype=F64), torch.tensor(-0.5, dtype=F64)), 1e-8)
    with pytest.warns(ik.ConvergenceWarning, match="sample 1"):
        interval("warn", solver)(low, scale)


def test_failures_under_vmap() -> None:
    low, scale = torch.tensor([0.5, 3.0, -0.5], dtype=F64), torch.tensor(0.25, dtype=F64)
    with pytest.raises(ProgramError, match="sample 1"):
        torch.func.vmap(interval(), in_dims=(0, None))(low, scale)
    grads = torch.func.vmap(torch.func.grad(lambda low, s: interval("nan")(low, s)[0]), in_dims=(0, None))(low, scale)
    assert_near(grads[[0, 2]], torch.tensor([1.0, 0.0], dtype=F64), 1e-8)


def test_an_error_of_the_solver_comes_out_of_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(*_: Any) -> Any:
        raise ArithmeticError("of the solver")

    monkeypatch.setattr("implicitkit_cvxpy.rounds.finish", finish)
    with pytest.raises(ArithmeticError, match="of the solver"):
        torch.func.jacrev(lambda low: interval()(low, torch.ones_like(low))[0])(torch.zeros((), dtype=F64))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("on_failure", ["nan", "ignore"])
@pytest.mark.parametrize(("curved", "degenerate"), [(False, "lstsq"), (False, "raise"), (True, "lstsq")])
def test_jacobians_beside_an_infeasible_program(curved: bool, degenerate: str, on_failure: str, transform: Any) -> None:
    c, r, x = cp.Parameter(3), cp.Parameter(), cp.Variable(3)
    rows = [cp.norm(x) <= r] if curved else [cp.sum(x) == 1, x >= -r]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), rows)
    layer = ConvexLayer(problem, [c, r], [x], on_failure=on_failure, degenerate=degenerate)
    points, sizes = randn(4, 3), torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=F64)
    slopes = transform(lambda c, r: layer(c, r)[0])
    found = torch.func.vmap(slopes)(points, sizes)
    for i in (0, 1, 3):
        assert_near(found[i], slopes(points[i], sizes[i]), 1e-9)
    assert not bool(found[2].any())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_data(bad: float) -> None:
    low = torch.tensor([0.5, bad, -0.5], dtype=F64, requires_grad=True)
    scale = torch.tensor(0.25, dtype=F64, requires_grad=True)
    with pytest.raises(ProgramError, match=r"invalid data.*sample 1\. NaN or Inf in parameter\(s\) low"):
        interval()(low, scale)
    (x,) = interval("nan")(low, scale)
    assert x.isnan().tolist() == [False, True, False]
    x[[0, 2]].sum().backward()
    assert scale.grad.isfinite() and low.grad[[0, 2]].isfinite().all()


def test_unbounded() -> None:
    c, x = cp.Parameter(2), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(c @ x), [x >= 0]), [c], [x])
    with pytest.raises(ProgramError, match=r"unbounded, the objective falls without limit.*: the program"):
        layer(torch.tensor([1.0, -1.0], dtype=F64))


def test_iteration_limit() -> None:
    c, x = cp.Parameter(6), cp.Variable(6)
    problem = cp.Problem(cp.Minimize(c @ x), [randn(40, 6).numpy() @ x <= 1, cp.norm(x) <= 5])
    layer = ConvexLayer(problem, [c], [x], solver="CLARABEL", solver_args={"max_iter": 2})
    with pytest.raises(ProgramError, match="iteration limit"):
        layer(torch.ones(6, dtype=F64))


def _logistic() -> tuple[Any, list[Any], list[Any]]:
    X, w = cp.Parameter((5, 2)), cp.Variable(2)
    return cp.Problem(cp.Minimize(cp.sum(cp.logistic(X @ w)) + cp.sum_squares(w))), [X], [w]


def test_logistic_regression_is_stationary_and_its_jacobian_implicit() -> None:
    layer, X = ConvexLayer(*_logistic()), randn(5, 2, seed=3)
    loss = lambda w, X: torch.nn.functional.softplus(X @ w).sum() + (w * w).sum()  # noqa: E731
    (w,) = layer(X)
    assert torch.func.grad(loss)(w, X).abs().max() < 1e-9
    H = torch.func.hessian(loss)(w, X)
    cross = torch.func.jacrev(torch.func.grad(loss), argnums=1)(w, X)
    expected = -torch.linalg.solve(H, cross.flatten(1)).reshape(2, 5, 2)
    assert_near(torch.func.jacrev(layer)(X)[0], expected, 1e-7)


# -------------------------------------------------------------------------------------------------------------- bad input
def _x(n: int = 2) -> Any:
    return cp.Variable(n, name="x")


def non_dpp() -> Any:
    a, b, x = cp.Parameter(name="a"), cp.Parameter(name="b"), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - 1)), [(a * b) * x[0] <= 1]), [a, b], [x])


def non_dpp_kron() -> Any:
    a, x = cp.Parameter((2, 2), name="a"), cp.Variable((2, 1))
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(cp.kron(a, x)))), [a], [x])


def non_dpp_quotient() -> Any:
    a, x = cp.Parameter(2, pos=True, name="a"), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x / (2 * a) - 1))), [a], [x])


def non_dpp_square() -> Any:
    a, x = cp.Parameter(name="a", nonneg=True), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.square(a) * cp.sum_squares(x))), [a], [x])


def quadratic_constraint() -> Any:
    P, x = cp.Parameter((2, 2), PSD=True, name="P"), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum(x)), [cp.quad_form(x, P) <= 1]), [P], [x])


def non_convex() -> Any:
    p, x = cp.Parameter(2, name="p"), _x()
    return ConvexLayer(cp.Problem(cp.Maximize(cp.sum_squares(x - p)), [x <= 1]), [p], [x])


def _plain(**options: Any) -> Any:
    p, x = cp.Parameter(2, name="p"), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - p)), [x >= 0]), [p], [x], **options)


def _socp(**options: Any) -> Any:
    p, x = cp.Parameter(2, name="p"), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(p @ x), [cp.norm(x) <= 1]), [p], [x], **options)


def integer() -> Any:
    p, x = cp.Parameter(2), cp.Variable(2, integer=True, name="count")
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - p))), [p], [x])


def lists(parameters: int, variables: int) -> Any:
    p, extra, x, other = cp.Parameter(2, name="p"), cp.Parameter(name="extra"), _x(), cp.Variable(name="other")
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - p)))
    return ConvexLayer(problem, [[], [p, extra], [p]][parameters], [[x], [other], []][variables])


def signed(attribute: str, value: float) -> Any:
    p, x = cp.Parameter(2, name="p", **{attribute: True}), _x()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - p))), [p], [x])(torch.tensor([1.0, value]))


def unsigned() -> Any:
    c, x = cp.Parameter(2, name="c"), cp.Variable(2)
    return ConvexLayer(cp.Problem(cp.Minimize(c @ cp.abs(x)), [cp.sum(x) == 1]), [c], [x])


def concave_term() -> Any:
    c, x = cp.Parameter(2, name="c"), cp.Variable(2, name="x")
    return ConvexLayer(cp.Problem(cp.Minimize(c @ x - cp.square(x[0])), [cp.sum(x) == 1]), [c], [x])


def off_pattern(**attributes: Any) -> Any:
    D, x = cp.Parameter((2, 2), name="D", **attributes), cp.Variable(2)
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(D @ x - 1))), [D], [x])(torch.ones(2, 2, dtype=F64))


def asymmetric() -> Any:
    C, X = cp.Parameter((2, 2), symmetric=True, name="C"), cp.Variable((2, 2), PSD=True)
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(X - C))), [C], [X])(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))


def indefinite() -> Any:
    P, x = cp.Parameter((2, 2), PSD=True, name="P"), _x()
    problem = cp.Problem(cp.Minimize(cp.quad_form(x, P)), [cp.sum(x) == 1])
    return ConvexLayer(problem, [P], [x])(torch.diag(torch.tensor([1.0, -0.5])))


def batches() -> Any:
    return interval()(torch.zeros(3), torch.zeros(2))


BAD = [
    (
        "product of parameters",
        non_dpp,
        ValueError,
        r"must be DPP.*constraint 0: .*a \* b.*product of parameters a and b.*new Parameter",
    ),
    (
        "kron of a parameter",
        non_dpp_kron,
        ValueError,
        r"must be DPP.*objective: kron.*no rule for the parameter a there.*a product, A @ x",
    ),
    (
        "quotient by a multiple of a parameter",
        non_dpp_quotient,
        ValueError,
        r"must be DPP.*objective: x / .*no rule for the parameter a there.*or multiply\(a, x\)",
    ),
    (
        "square of a parameter",
        non_dpp_square,
        ValueError,
        r"must be DPP.*objective: .*a, 2.*nonlinear in the parameter a.*in torch",
    ),
    (
        "quad_form in a constraint",
        quadratic_constraint,
        ValueError,
        r"constraint 0: .*(quad_form|QuadForm).*square root.*sum_squares",
    ),
    ("not convex", non_convex, ValueError, r"not convex.*DCP.*objective.*maximise concave"),
    ("a concave term", concave_term, ValueError, r"\(of which -.*x\[0\].* is concave, not convex\)\. Minimise"),
    ("sign unknown", unsigned, ValueError, r"sign of parameter c decides.*nonneg=True"),
    ("outside its bounds", lambda: off_pattern(bounds=[0, 0.5]), ValueError, r"D is declared with bounds=.*outside"),
    ("diagonal, negative", lambda: off_pattern(diag=True, nonpos=True), ValueError, r"declared nonpositive.*diagonal"),
    ("not diagonal", lambda: off_pattern(diag=True), ValueError, r"parameter D is declared diagonal or sparse"),
    (
        "off the pattern",
        lambda: off_pattern(sparsity=([0, 1], [0, 1])),
        ValueError,
        r"D is declared diagonal or sparse",
    ),
    ("gp without gp=True", lambda: _geometric_without_flag(), ValueError, r"not convex.*Set gp=True"),
    ("parameter missing", lambda: lists(0, 0), ValueError, r"parameter\(s\) p of the problem are not in parameters="),
    ("parameter too many", lambda: lists(1, 0), ValueError, r"extra in parameters= do not appear"),
    ("unknown variable", lambda: lists(2, 1), ValueError, r"other in variables= are neither variables"),
    ("no variable", lambda: lists(2, 2), ValueError, r"variables= is empty"),
    ("integer", integer, ValueError, r"count are integer or boolean.*Relax"),
    (
        "number of tensors",
        lambda: _plain()(torch.ones(2), torch.ones(2)),
        ValueError,
        r"takes 1 parameter tensor\(s\) \(p\).*got 2",
    ),
    ("shape", lambda: _plain()(torch.ones(3)), ValueError, r"parameter p has shape \(2,\).*got \(3,\)"),
    ("complex", lambda: _plain()(torch.ones(2, dtype=torch.complex64)), TypeError, r"parameter p got a complex tensor"),
    ("nonneg", lambda: signed("nonneg", -1.0), ValueError, r"parameter p is declared nonnegative.*violates"),
    ("pos", lambda: signed("pos", 0.0), ValueError, r"parameter p is declared positive"),
    ("nonpos", lambda: signed("nonpos", 1.0), ValueError, r"parameter p is declared nonpositive"),
    ("asymmetric", asymmetric, ValueError, r"parameter C is declared symmetric.*not symmetric"),
    ("indefinite", indefinite, ValueError, r"parameter P is declared PSD, and is not symmetric with eigenvalues >= 0"),
    (
        "batch sizes",
        batches,
        ValueError,
        r"batch sizes disagree: parameter low has batch shape \(3,\), parameter scale has \(2,\)",
    ),
    ("solver misspelt", lambda: _plain(solver="clarabell"), ValueError, r"'clarabell' \(did you mean 'CLARABEL'\?\)"),
    ("solver unknown", lambda: _plain(solver="NOSUCH"), ValueError, r"unknown solver 'NOSUCH'; known: .*CLARABEL"),
    (
        "solver not installed",
        lambda: _plain(solver="MOSEK"),
        ImportError,
        r"'MOSEK' is not installed: pip install 'cvxpy\[MOSEK\]'",
    ),
    (
        "cone, ours",
        lambda: _socp(solver="daqp"),
        ik.CapabilityError,
        r"'daqp' solves linear and quadratic.*second-order cones.*CLARABEL",
    ),
    (
        "cone, cvxpy's",
        lambda: _socp(solver="OSQP"),
        ik.CapabilityError,
        r"'OSQP' cannot solve this program \(second-order cones",
    ),
    (
        "solver option",
        lambda: _plain(solver="CLARABEL", solver_args={"epz": 1})(torch.ones(2)),
        TypeError,
        r"solver 'clarabel' has no option\(s\) epz; did you mean eps\?",
    ),
    (
        "option without a solver",
        lambda: _plain(solver_args={"epz": 1}),
        TypeError,
        r"epz belong to a particular solver",
    ),
    (
        "degenerate",
        lambda: _plain(degenerate="maybe"),
        ValueError,
        r"degenerate must be one of 'lstsq', 'raise', 'smooth'",
    ),
    (
        "on_failure",
        lambda: _plain(on_failure="maybe"),
        ValueError,
        r"on_failure must be one of 'raise', 'warn', 'ignore', 'nan'",
    ),
    ("not a problem", lambda: ConvexLayer(None, [], []), TypeError, r"problem must be a cvxpy.Problem"),
]


def _geometric_without_flag() -> Any:
    a, x, y = cp.Parameter(pos=True), cp.Variable(pos=True), cp.Variable(pos=True)
    return ConvexLayer(cp.Problem(cp.Minimize(1 / (x * y)), [a * x * y <= 1, x + y <= 3]), [a], [x])


@pytest.mark.parametrize(("make", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize("where", ["made", "called", "both"])
def test_inference_mode(where: str) -> None:
    """Made in inference mode a layer is differentiated outside it; called there it gives values."""

    def make() -> Any:
        z, p = cp.Variable(2), cp.Parameter(2)
        return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(z - p)), [z >= 0.1]), [p], [z])

    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    with torch.inference_mode(where in ("made", "both")):
        layer = make()
    if where != "made":
        with torch.inference_mode():
            torch.testing.assert_close(layer(x)[0], torch.tensor([1.0, 0.1], dtype=torch.float64), rtol=0, atol=1e-7)
    x.requires_grad_()
    (layer(x)[0] ** 2).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([2.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-6)
