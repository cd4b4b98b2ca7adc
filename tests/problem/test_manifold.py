"""Unknowns on manifolds: groups against their definitions, solutions and derivatives against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import implicitkit as ik
from implicitkit.manifold import SE3, SO3, Euclidean, Manifold, Product, UnitQuaternion

F64 = torch.float64
EYE = torch.eye(3, dtype=F64)
IDENTITY = {"so3": EYE, "se3": torch.eye(4, dtype=F64), "quaternion": torch.tensor([1.0, 0, 0, 0], dtype=F64)}
GROUPS: dict[str, Any] = {"so3": SO3(), "se3": SE3(), "quaternion": UnitQuaternion()}
SIZE = {"so3": 3, "se3": 6, "quaternion": 3}
WEIGHTS = torch.arange(9.0, dtype=F64).reshape(3, 3) / 4 - 1


def points(name: str, *batch: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    delta = torch.randn(*batch, SIZE[name], generator=g, dtype=F64)
    return GROUPS[name].retract(IDENTITY[name].expand(*batch, *IDENTITY[name].shape), delta)


def turns(name: str, angle: float) -> Tensor:
    """Tangent vectors whose rotation has this angle."""
    delta = torch.randn(20, SIZE[name], generator=torch.Generator().manual_seed(1), dtype=F64)
    phi = delta[:, -3:]
    return torch.cat([delta[:, :-3], angle * phi / phi.norm(dim=1, keepdim=True)], 1)


# ------------------------------------------------------------------------------------------------------------- the groups
def generator(delta: Tensor) -> Tensor:
    """The matrix of the Lie algebra, ``(3,) -> (3, 3)`` and ``(6,) -> (4, 4)``."""
    x, y, z = delta[-3:]
    o = torch.zeros_like(x)
    K = torch.stack([torch.stack([o, -z, y]), torch.stack([z, o, -x]), torch.stack([-y, x, o])])
    return K if len(delta) == 3 else torch.cat([torch.cat([K, delta[:3, None]], 1), torch.zeros(1, 4, dtype=F64)])


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 0.3, 0.999, 1.001, 2.0, 3.1, 5.0])
@pytest.mark.parametrize("name", ["so3", "se3"])
def test_retractions_are_matrix_exponentials(name: str, angle: float) -> None:
    for delta in turns(name, angle)[:4]:
        found = GROUPS[name].retract(IDENTITY[name], delta)
        torch.testing.assert_close(found, torch.matrix_exp(generator(delta)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("angle", [0.0, 0.3, 2.0])
def test_quaternions_turn_like_matrices(angle: float) -> None:
    v = torch.tensor([0.2, -1.0, 0.5], dtype=F64)
    for phi in turns("quaternion", angle)[:4]:
        w, u = UnitQuaternion().retract(IDENTITY["quaternion"], phi).split([1, 3])
        turned = v + 2 * torch.linalg.cross(u, torch.linalg.cross(u, v) + w * v)
        torch.testing.assert_close(turned, SO3().retract(EYE, phi) @ v)


@pytest.mark.parametrize("angle", [0.0, 1e-8, 1e-3, 0.099, 0.3, 1.5, 3.0, math.pi - 1e-7])
@pytest.mark.parametrize("name", GROUPS)
def test_local_undoes_retract(name: str, angle: float) -> None:
    M, z, delta = GROUPS[name], points(name, 20), turns(name, angle)
    torch.testing.assert_close(M.local(z, M.retract(z, delta)), delta, rtol=1e-9, atol=1e-9)
    assert float(M.distance(M.retract(z, delta)).max()) < 1e-13


@pytest.mark.one_in(2)
@pytest.mark.parametrize("angle", [0.0, 1e-4, 0.5, 2.5])
@pytest.mark.parametrize("name", GROUPS)
def test_both_are_smooth(name: str, angle: float) -> None:
    """The identity has the Jacobian 1 and no second derivative, in every mode; also where the formulas have 0 / 0."""
    M, z, delta = GROUPS[name], points(name), turns(name, angle)[0]
    there_and_back = lambda d: M.local(z, M.retract(z, d))  # noqa: E731
    for first in (jacrev, jacfwd):
        torch.testing.assert_close(first(there_and_back)(delta), torch.eye(SIZE[name], dtype=F64), rtol=0, atol=1e-9)
        for second in (jacrev, jacfwd):
            assert second(first(there_and_back))(delta).abs().max() < 1e-7
    torch.autograd.gradgradcheck(lambda d: M.retract(z, d), (delta.clone().requires_grad_(),))


@pytest.mark.parametrize("name", GROUPS)
def test_projections(name: str) -> None:
    M, z = GROUPS[name], points(name, 5)
    noisy = z + 0.05 * torch.randn(z.shape, dtype=F64)
    if name == "se3":
        noisy[..., 3, :] = z[..., 3, :]
    found = M.project(noisy)
    assert float(M.distance(found).max()) < 1e-12
    torch.testing.assert_close(M.project(z), z)
    assert float((found - noisy).norm()) <= float((z - noisy).norm())
    with pytest.raises(ValueError, match="z0 is not on"):
        M.check(noisy)


def test_the_nearest_rotation_of_what_mirrors_turns_the_least_axis() -> None:
    mirror = torch.diag(torch.tensor([1.0, 0.9, -0.2], dtype=F64))
    turn = SO3().retract(EYE, torch.tensor([0.3, -0.5, 0.2], dtype=F64))
    torch.testing.assert_close(SO3().project(mirror @ turn), turn)


# ------------------------------------------------------------------------------------------------------------ closed forms
def nearest(B: Tensor) -> Tensor:
    """The rotation nearest to ``B``: what Wahba's problem and the chordal mean come down to."""
    U, _, Vh = torch.linalg.svd(B)
    d = torch.linalg.det(U @ Vh)
    return (U * torch.stack([torch.ones_like(d), torch.ones_like(d), d], -1).unsqueeze(-2)) @ Vh


g = torch.Generator().manual_seed(3)
A = torch.randn(8, 3, generator=g, dtype=F64)
B = A @ points("so3", seed=5).mT + 0.1 * torch.randn(8, 3, generator=g, dtype=F64)


def wahba(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Vectors ``a`` turned onto ``b`` (Wahba 1965)."""
    residuals = lambda R, a, b: a @ R.mT - b  # noqa: E731
    value: Tensor = ik.least_squares(residuals, EYE, (a, b), manifold=SO3(), rtol=1e-13, **options).value
    return value


def wahba_by_svd(a: Tensor, b: Tensor) -> Tensor:
    return nearest(b.mT @ a)


@pytest.mark.parametrize("solver", ["auto", "levenberg_marquardt", "gauss_newton", "dogleg", "newton_cg", "bfgs"])
def test_wahba(solver: str) -> None:
    torch.testing.assert_close(wahba(A, B, solver=solver), wahba_by_svd(A, B), rtol=0, atol=1e-9)


def test_wahba_has_its_derivatives() -> None:
    for jacobian in (jacrev, jacfwd):
        found, expected = jacobian(wahba, (0, 1))(A, B), jacobian(wahba_by_svd, (0, 1))(A, B)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    R = wahba(A, B)
    moved = torch.einsum("ji,jk...->ik...", R, jacrev(wahba, 1)(A, B))  # R^T dR is skew: tangent to the group
    torch.testing.assert_close(moved, -moved.transpose(0, 1), rtol=0, atol=1e-10)
    inside = jacrev(lambda b: SO3().local(R, wahba(A, b)))(B)  # in the tangent space: the axial vector of R^T dR
    axial = torch.stack([moved[2, 1], moved[0, 2], moved[1, 0]])
    torch.testing.assert_close(inside, axial, rtol=0, atol=1e-10)


def test_second_derivatives_in_every_mode() -> None:
    """Against differences of gradients: torch's own second derivative of the singular value decomposition is wrong."""
    v, h = torch.randn(8, 3, generator=torch.Generator().manual_seed(7), dtype=F64), 1e-4
    value = lambda t: (wahba(A, B + t * v) * WEIGHTS).sum()  # noqa: E731
    closed = lambda t: (wahba_by_svd(A, B + t * v) * WEIGHTS).sum()  # noqa: E731
    zero = torch.zeros((), dtype=F64)
    expected = (grad(closed)(zero + h) - grad(closed)(zero - h)) / (2 * h)
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            torch.testing.assert_close(outer(inner(value))(zero), expected, rtol=1e-5, atol=1e-6)


def test_batches() -> None:
    rows = torch.stack([B, B @ points("so3", seed=8), 0.5 * B])
    expected = wahba_by_svd(A, rows)
    torch.testing.assert_close(vmap(lambda b: wahba(A, b))(rows), expected)
    torch.testing.assert_close(
        vmap(jacrev(lambda b: wahba(A, b)))(rows), vmap(jacrev(lambda b: wahba_by_svd(A, b)))(rows), rtol=0, atol=1e-9
    )
    seen: list[Tensor] = []
    s = ik.least_squares(
        lambda R, b: A @ R.mT - b, EYE.repeat(3, 1, 1), (rows,), manifold=SO3(), batch_dims=1, in_dims=(0,), trace=True,
        callback=lambda step, z, norm: seen.append(z),
    )  # fmt: skip
    torch.testing.assert_close(s.value, expected)
    assert s.converged.shape == (3,) and int(s.steps.min()) > 0 and s.trace is not None
    assert seen[0].shape == (3, 3, 3) and float(SO3().distance(seen[0]).max()) < 1e-12
    torch.testing.assert_close(seen[-1], expected, rtol=1e-6, atol=1e-6)


def test_the_same_rotation_as_a_quaternion() -> None:
    def turn(q: Tensor, v: Tensor) -> Tensor:
        w, u = q[:1], q[1:].expand_as(v)
        return v + 2 * torch.linalg.cross(u, torch.linalg.cross(u, v) + w * v)

    def solve(b: Tensor) -> Tensor:
        start = IDENTITY["quaternion"]
        q = ik.least_squares(lambda q, b: turn(q, A) - b, start, (b,), manifold=UnitQuaternion(), rtol=1e-13).value
        return turn(q, EYE).mT

    torch.testing.assert_close(solve(B), wahba_by_svd(A, B))
    torch.testing.assert_close(jacrev(solve)(B), jacrev(lambda b: wahba_by_svd(A, b))(B), rtol=0, atol=1e-9)


def test_rotation_averaging_by_argmin() -> None:
    rotations = SO3().retract(EYE.expand(6, 3, 3), 0.4 * torch.randn(6, 3, dtype=F64))

    def mean(w: Tensor) -> Tensor:
        objective = lambda R, w: (w * (R - rotations).square().sum((1, 2))).sum()  # noqa: E731
        value: Tensor = ik.argmin(objective, EYE, (w,), manifold=SO3(), rtol=1e-13).value
        return value

    w = torch.linspace(0.5, 1.5, 6, dtype=F64)
    chordal = lambda w: nearest((w[:, None, None] * rotations).sum(0))  # noqa: E731
    torch.testing.assert_close(mean(w), chordal(w), rtol=0, atol=1e-9)
    torch.testing.assert_close(jacfwd(mean)(w), jacfwd(chordal)(w), rtol=0, atol=1e-8)


def test_karcher_mean_by_local_priors() -> None:
    """At the geodesic mean the logarithms add up to nothing (Karcher 1977)."""
    M, rotations = SO3(), SO3().retract(EYE.expand(6, 3, 3), 0.5 * torch.randn(6, 3, dtype=F64))
    R = ik.least_squares(lambda R: M.local(R, rotations), EYE, manifold=M).value
    assert M.local(R, rotations).sum(0).norm() < 1e-7


# ---------------------------------------------------------------------------------------------------------- rigid motions
POINTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(11), dtype=F64)


def carry(T: Tensor, x: Tensor) -> Tensor:
    return x @ T[..., :3, :3].mT + T[..., None, :3, 3]


def register(y: Tensor, prior: Tensor, weight: Any = 0.0, **options: Any) -> Tensor:
    residuals = lambda T, y, P: (carry(T, POINTS) - y, weight * SE3().local(P, T))  # noqa: E731
    value: Tensor = ik.least_squares(residuals, prior.detach(), (y, prior), manifold=SE3(), rtol=1e-12, **options).value
    return value


def test_registration() -> None:
    T = points("se3", seed=21)
    y = carry(T, POINTS) + 0.05 * torch.randn(12, 3, dtype=F64)
    found = register(y, torch.eye(4, dtype=F64))
    R = nearest((y - y.mean(0)).mT @ (POINTS - POINTS.mean(0)))  # Arun, Huang & Blostein (1987)
    torch.testing.assert_close(found[:3, :3], R)
    torch.testing.assert_close(found[:3, 3], y.mean(0) - R @ POINTS.mean(0))
    assert torch.equal(found[3], IDENTITY["se3"][3])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", ["linear", pytest.param("huber", marks=pytest.mark.slow), "cauchy"])
def test_robust_losses_and_priors_by_differences(loss: str) -> None:
    T = points("se3", seed=22)
    y = carry(T, POINTS) + 0.05 * torch.randn(12, 3, dtype=F64)
    y[0] += 3.0  # an outlier
    solve = lambda y, P: register(y, P, weight=0.05, loss=loss, f_scale=0.1)  # noqa: E731
    prior = SE3().retract(T, torch.full((6,), 0.2, dtype=F64))
    step = torch.randn(12, 3, dtype=F64)
    h = 1e-5
    expected = (solve(y + h * step, prior) - solve(y - h * step, prior)) / (2 * h)
    torch.testing.assert_close(jvp(lambda y: solve(y, prior), (y,), (step,))[1], expected, rtol=1e-5, atol=1e-7)
    cotangent = torch.randn(4, 4, dtype=F64)
    slope = grad(lambda y: (solve(y, prior) * cotangent).sum())(y)
    torch.testing.assert_close((slope * step).sum(), (expected * cotangent).sum(), rtol=1e-5, atol=1e-7)
    off = SE3().local(T, solve(y, prior)).norm()
    assert off > 0.2 if loss == "linear" else off < 0.1


# ------------------------------------------------------------------------------------------------------------------ products
def test_products() -> None:
    """Two poses and a landmark: a chain of relative measurements that fit exactly."""
    poses, place = points("se3", 2, seed=31), torch.tensor([0.3, -1.0, 2.0], dtype=F64)
    relative = torch.linalg.inv(poses[0]) @ poses[1]
    seen = torch.stack([torch.linalg.inv(T) @ torch.cat([place, torch.ones(1, dtype=F64)]) for T in poses])[:, :3]
    M = SE3()

    def residuals(z: dict[str, Any], relative: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        T, x = z["poses"], z["landmark"]
        return (
            M.local(poses[0], T[0]),
            M.local(relative, torch.linalg.inv(T[0]) @ T[1]),
            carry(T, seen[:, None])[:, 0] - x,
        )

    z0 = {"poses": torch.eye(4, dtype=F64).repeat(2, 1, 1), "landmark": torch.zeros(3, dtype=F64)}
    manifold = {"landmark": None, "poses": M}
    solve = lambda relative, seen: ik.least_squares(residuals, z0, (relative, seen), manifold=manifold).value  # noqa: E731
    found = solve(relative, seen)
    torch.testing.assert_close(found["poses"], poses, rtol=0, atol=1e-8)
    torch.testing.assert_close(found["landmark"], place, rtol=0, atol=1e-8)
    assert jacrev(lambda s: solve(relative, s)["landmark"])(seen).abs().sum() > 0.1
    whole = Product(manifold)
    torch.testing.assert_close(whole.retract(z0, whole.local(z0, found)), found)


def test_euclidean_is_what_there_was() -> None:
    r = lambda z, b: z**3 + z - b  # noqa: E731
    b = torch.tensor([1.0, 2.0], dtype=F64)
    for manifold in (Euclidean(), Product(None)):
        z = jacrev(lambda b, m=manifold: ik.least_squares(r, torch.zeros(2, dtype=F64), (b,), manifold=m).value)(b)
        torch.testing.assert_close(z, jacrev(lambda b: ik.least_squares(r, torch.zeros(2, dtype=F64), (b,)).value)(b))


# --------------------------------------------------------------------------------------------------------- one of one's own
class Circle(Manifold):
    """Unit vectors of the plane by the projection of a tangent step: no group; a chart is half the circle."""

    def zero(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z[..., :1])

    def retract(self, z: Tensor, delta: Tensor) -> Tensor:
        moved = z + delta * torch.stack([-z[..., 1], z[..., 0]], -1)
        return moved / moved.norm(dim=-1, keepdim=True)

    def distance(self, z: Tensor) -> Tensor:
        return z.norm(dim=-1) - 1


def test_a_manifold_in_one_file() -> None:
    """The nearest point of the circle is ``c / |c|``; from the far side it takes more than one chart."""
    unit = lambda c: c / c.norm()  # noqa: E731
    solve = lambda c: ik.least_squares(lambda z, c: z - c, start, (c,), manifold=Circle()).value  # noqa: E731
    for angle in (0.1, 1.5, 2.9, -2.0):
        c = 2 * torch.tensor([math.cos(angle), math.sin(angle)], dtype=F64)
        start = torch.tensor([1.0, 0.0], dtype=F64)
        torch.testing.assert_close(solve(c), unit(c), rtol=0, atol=1e-9)
        torch.testing.assert_close(jacrev(solve)(c), jacrev(unit)(c), rtol=0, atol=1e-8)
        torch.testing.assert_close(
            hessian(lambda c: solve(c)[0])(c), hessian(lambda c: unit(c)[0])(c), rtol=0, atol=1e-7
        )


class Overturned(Manifold):
    """The line in a chart that turns back: ``retract(z, delta) = z + sin(delta)``, stationary at a quarter turn."""

    def zero(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)

    def retract(self, z: Tensor, delta: Tensor) -> Tensor:
        return z + torch.sin(delta)


@pytest.mark.parametrize("solver", ["levenberg_marquardt", "bfgs", "auto"])
def test_a_stationary_point_of_the_chart_is_no_solution(solver: str) -> None:
    """In the first chart nothing beyond 1 can be reached, and its edge looks stationary: the next charts go on."""
    s = ik.least_squares(lambda z, c: z - c, torch.zeros(1, dtype=F64), (torch.tensor([3.3], dtype=F64),),
                         manifold=Overturned(), solver=solver)  # fmt: skip
    assert s.value.item() == pytest.approx(3.3)


def test_the_steps_of_all_charts_are_limited_together() -> None:
    solve = lambda **options: ik.least_squares(  # noqa: E731
        lambda z, c: z - c, torch.zeros(1, dtype=F64), (torch.tensor([3.3], dtype=F64),),
        manifold=Overturned(), solver="bfgs", on_failure="ignore", **options)  # fmt: skip
    steps = int(solve().steps)
    enough, fewer = solve(max_steps=3 * steps), solve(max_steps=steps - 1)
    assert bool(enough.converged) and int(enough.steps) == steps
    assert not bool(fewer.converged) and int(fewer.steps) < steps


# ------------------------------------------------------------------------------------------------------------- what is said
def test_failures_and_limits() -> None:
    with pytest.raises(ik.ConvergenceError) as error:
        ik.least_squares(lambda R: A @ R.mT - B, EYE, manifold=SO3(), max_steps=1, solver="bfgs")
    assert float(SO3().distance(error.value.solution.value)) < 1e-12 and int(error.value.solution.steps) == 1
    s = ik.least_squares(lambda R, b: A @ R.mT - b, EYE, (B,), manifold=SO3(), max_steps=0, on_failure="ignore")
    assert torch.equal(s.value, EYE) and int(s.steps) == 0
    s = ik.least_squares(lambda R, b: (A @ R.mT - b, 2 * R), EYE, (B,), manifold=SO3(), has_aux=True)
    torch.testing.assert_close(s.aux, 2 * s.value)
    assert float(ik.certify(s).error) < 1e-6


def test_the_start_has_derivative_zero() -> None:
    start = points("so3", seed=40)
    residuals = lambda R: A @ R.mT - B  # noqa: E731
    found = jacrev(lambda R0: ik.least_squares(residuals, R0, manifold=SO3()).value)(start)
    assert torch.equal(found, torch.zeros(3, 3, 3, 3, dtype=F64))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no rotation": (
        lambda: wahba_from(2 * EYE), ValueError, r"z0 is not on SO3: it is off by .*SO3\(\)\.project\(z0\)"),
    "a reflection": (lambda: wahba_from(-EYE), ValueError, "z0 is not on SO3"),
    "another shape": (
        lambda: wahba_from(torch.eye(4)), ValueError, r"points of SO3 are real tensors of shape \(\.\.\., 3, 3\)"),
    "the class itself": (
        lambda: ik.least_squares(lambda R: R, EYE, manifold=SO3), TypeError, r"got type \(the class: call it\)"),
    "another structure": (
        lambda: ik.least_squares(lambda z: z["a"], {"a": EYE}, manifold={"b": SO3()}), ValueError, "has the parts b.*keys"),
    "bounds": (lambda: ik.LeastSquares(lambda R: R, (0, 1), manifold=SO3()), ValueError, "cannot be combined with bounds="),
    "a set": (
        lambda: ik.argmin(lambda R: R.sum(), EYE, manifold=SO3(), project=ik.project.box(0, 1)), ValueError, "with pro"),
}  # fmt: skip


def wahba_from(start: Tensor) -> Any:
    return ik.least_squares(lambda R: A @ R.mT - B, start.to(F64), manifold=SO3())


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
