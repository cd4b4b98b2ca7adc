"""Derivatives against formulas on paper: what the library says must be what calculus says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrices import randn
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}


def assert_close(got: Any, want: Any, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# ---------------------------------------------------------------------------------------------------- ridge regression
M, N = 12, 4
X = randn(M, N, seed=1)


def _ridge_objective(w: Tensor, lam: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (X @ w - y).square().sum() + 0.5 * M * lam * w.square().sum()


def _ridge_residuals(w: Tensor, lam: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return X @ w - y, (M * lam).sqrt() * w


def _ridge_gradient(w: Tensor, lam: Tensor, y: Tensor) -> Tensor:
    return X.mT @ (X @ w - y) + M * lam * w


RIDGE = [
    (ik.Argmin(_ridge_objective), "lbfgs"),
    (ik.Argmin(_ridge_objective), "newton"),
    (ik.LeastSquares(_ridge_residuals), "lbfgs"),
    (ik.LeastSquares(_ridge_residuals), "newton"),
    (ik.Root(_ridge_gradient), "newton"),
    (ik.Root(_ridge_gradient), "scipy.newton_krylov"),
]


@pytest.mark.parametrize(("problem", "solver"), RIDGE, ids=str)
def test_ridge_regression(problem: ik.Problem, solver: str) -> None:
    """w = (X'X + m lam I)^-1 X'y =: H^-1 X'y;  dw/dlam = -m H^-1 w;  dw/dy = H^-1 X';  d2w/dlam2 = 2 m^2 H^-2 w."""
    y, lam = randn(M, seed=2), torch.tensor(0.3, dtype=D)
    H = X.mT @ X + M * lam * torch.eye(N, dtype=D)
    w = torch.linalg.solve(H, X.mT @ y)
    dw_dlam = -M * torch.linalg.solve(H, w)
    dw_dy = torch.linalg.solve(H, X.mT)

    tight = {"rtol": 1e-11, "atol": 1e-11} if solver.startswith("scipy") else TIGHT

    def solve(lam: Tensor, y: Tensor) -> Tensor:
        return ik.solve(problem, torch.zeros(N, dtype=D), (lam, y), solver=solver, **tight).value

    assert_close(solve(lam, y), w)
    for jacobian in (jacrev, jacfwd):
        got_lam, got_y = jacobian(solve, (0, 1))(lam, y)
        assert_close(got_lam, dw_dlam)
        assert_close(got_y, dw_dy)
    assert_close(jacfwd(jacrev(solve))(lam, y), -2 * M * torch.linalg.solve(H, dw_dlam))
    assert_close(vmap(solve, in_dims=(None, 0))(lam, torch.stack([y, 2 * y])), torch.stack([w, 2 * w]))


# --------------------------------------------------------------------------------------------- the linear fixed point
@pytest.mark.parametrize("linear_solver", ["lu", "gmres", "bicgstab", "lsmr", "neumann", "broyden", "auto"])
@pytest.mark.parametrize("solver", ["picard", "anderson", "newton"])
def test_linear_fixed_point(solver: str, linear_solver: str) -> None:
    """z = A z + B x + b: with R = (I - A)^-1, dz/db = R, dz/dx = R B, <g, dz> = <R'g z', dA> = <R'g x', dB>."""
    A, B, x, b, g = randn(4, 4, seed=3), randn(4, 3, seed=4), randn(3, seed=5), randn(4, seed=6), randn(4, seed=7)
    A = 0.6 * A / torch.linalg.matrix_norm(A, 2)
    R = torch.linalg.inv(torch.eye(4, dtype=D) - A)
    leaves = [t.clone().requires_grad_() for t in (A, B, x, b)]
    rule = ik.Implicit(linear_solver=linear_solver, rtol=1e-12)
    solution = ik.fixed_point(
        lambda z, A, B, x, b: A @ z + B @ x + b,
        torch.zeros(4, dtype=D),
        tuple(leaves),
        solver=solver,
        rule=rule,
        **TIGHT,
    )
    z, u = R @ (B @ x + b), R.mT @ g
    assert_close(solution.value, z)
    assert_close(torch.autograd.grad(solution.value, leaves, g), (torch.outer(u, z), torch.outer(u, x), B.mT @ u, u))


def test_linear_fixed_point_second_order() -> None:
    """d2 z / da^2 of z = a A z + b is 2 R A R A z with R = (I - a A)^-1."""
    A, b, a = randn(3, 3, seed=8) * 0.3, randn(3, seed=9), torch.tensor(0.8, dtype=D)
    R = torch.linalg.inv(torch.eye(3, dtype=D) - a * A)
    z = R @ b

    def solve(a: Tensor) -> Tensor:
        return ik.fixed_point(lambda z, a: a * A @ z + b, torch.zeros(3, dtype=D), (a,), **TIGHT).value

    want = 2 * R @ A @ R @ A @ z
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            assert_close(outer(inner(solve))(a), want)


# -------------------------------------------------------------------------------------------------------- x^3 + x = t
CUBIC: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda t: ik.root(lambda x, t: x**3 + x - t, torch.zeros_like(t), (t,), solver="newton", **TIGHT).value,
    "fixed_point": lambda t: (
        ik.fixed_point(lambda x, t: x - 0.2 * (x**3 + x - t), torch.zeros_like(t), (t,), solver="picard", **TIGHT).value
    ),
    "argmin": lambda t: (
        ik.argmin(lambda x, t: x**4 / 4 + x**2 / 2 - t * x, torch.zeros_like(t), (t,), solver="newton", **TIGHT).value
    ),
    "steady_state": lambda t: (
        ik.steady_state(lambda x, t: t - x - x**3, torch.zeros_like(t), (t,), solver="newton", **TIGHT).value
    ),
    "black_box": lambda t: (
        ik.root(
            lambda x, t: x**3 + x - t,
            torch.ones_like(t) * 0.9,
            (t,),
            solver="scipy.newton_krylov",
            rtol=1e-11,
            atol=1e-11,
        ).value
    ),
    "least_squares": lambda t: (
        ik.least_squares(lambda x, t: x**3 + x - t, torch.zeros_like(t), (t,), solver="newton", **TIGHT).value
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CUBIC)
def test_cubic(kind: str) -> None:
    """x(2) = 1; x' = 1/(3x^2 + 1) = 1/4; x'' = -6x x'^3 = -3/32; x''' = -6 x'^4 - 18 x x'^2 x'' = 21/256."""
    solve, t = CUBIC[kind], torch.tensor(2.0, dtype=D)
    want = [1.0, 1 / 4, -3 / 32, 21 / 256]
    assert want[3] == 0.08203125
    f: Callable[[Tensor], Tensor] = solve
    for order, value in enumerate(want):
        assert float(f(t)) == pytest.approx(value, abs=1e-9), f"reverse mode, order {order}"
        f = grad(f)
    f = solve
    for order, value in enumerate(want):
        assert float(f(t)) == pytest.approx(value, abs=1e-9), f"forward mode, order {order}"
        f = jacfwd(f)
    leaf = t.clone().requires_grad_()
    y = solve(leaf)
    for order, value in enumerate(want):
        assert y.item() == pytest.approx(value, abs=1e-9), f"autograd, order {order}"
        if order < 3:
            (y,) = torch.autograd.grad(y, leaf, create_graph=True)
    mixed = grad(jacfwd(grad(solve)))(t)
    assert float(mixed) == pytest.approx(want[3], abs=1e-9)


# ---------------------------------------------------------------------------------------- least squares off the zero
@pytest.mark.parametrize("solver", ["lbfgs", "newton", "gradient_descent"])
def test_least_squares_with_a_residual(solver: str) -> None:
    """r(z) = (z - t, c + z^2/2) with c = 1: g = z - t + z(1 + z^2/2), H = 2 + 3z^2/2, so dz/dt = 1/H.

    Gauss-Newton would say 1/(1 + z^2): at t = 0, where z = 0, that is 1, wrong by a factor of two.
    """

    def solve(t: Tensor) -> Tensor:
        residuals = lambda z, t: {"a": z - t, "b": 1 + z**2 / 2}  # noqa: E731
        return ik.least_squares(residuals, torch.full_like(t, 0.1), (t,), solver=solver, rtol=1e-11, atol=1e-12).value

    for t in (0.0, 0.7, -2.0):
        t_ = torch.tensor(t, dtype=D)
        z = solve(t_)
        assert abs(float(z - t_ + z * (1 + z**2 / 2))) < 1e-9
        exact, gauss_newton = 1 / (2 + 1.5 * z**2), 1 / (1 + z**2)
        assert_close(grad(solve)(t_), exact, rtol=1e-7)
        assert_close(jacfwd(solve)(t_), exact, rtol=1e-7)
        assert_close(grad(grad(solve))(t_), -3 * z * exact**3, rtol=1e-6, atol=1e-9)
        assert float(abs(gauss_newton / exact - 1)) > 0.3
    assert float(grad(solve)(torch.tensor(0.0, dtype=D))) == pytest.approx(0.5, rel=1e-9)


# ----------------------------------------------------------------------------------------------------- argmin, twice
def test_argmin_second_order() -> None:
    """min z'Qz/2 + s/4 sum z^4 - b'z, H = Q + 3 s diag z^2:  dz/db = H^-1 and d(H^-1) = -H^-1 dH H^-1."""
    Q = randn(3, 3, seed=10)
    Q, b, s = Q @ Q.mT + torch.eye(3, dtype=D), randn(3, seed=11), 0.5

    def solve(b: Tensor) -> Tensor:
        objective = lambda z, b: 0.5 * z @ Q @ z + 0.25 * s * (z**4).sum() - b @ z  # noqa: E731
        return ik.argmin(objective, torch.zeros(3, dtype=D), (b,), solver="newton", **TIGHT).value

    z = solve(b)
    inverse = torch.linalg.inv(Q + 3 * s * torch.diag(z**2))
    assert_close(jacrev(solve)(b), inverse)
    # z_{i,jk} = -sum_l H^-1_il 6 s z_l H^-1_lj H^-1_lk
    want = -torch.einsum("il,l,lj,lk->ijk", inverse, 6 * s * z, inverse, inverse)
    assert_close(hessian(solve)(b), want)
    assert_close(jacfwd(jacfwd(solve))(b), want)
    assert_close(jacrev(jacrev(solve))(b), want)


# ------------------------------------------------------------------------------------------- what must not matter
def _tanh_map(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(z @ W.mT + b)


def _tanh_inputs(n: int = 6, batch: int = 3) -> tuple[Tensor, Tensor]:
    W = randn(n, n, seed=12)
    return 0.8 * W / torch.linalg.matrix_norm(W, 2), randn(batch, n, seed=13)


def _gradients(solver: Any, rule: Any, W: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = (W.clone().requires_grad_(), b.clone().requires_grad_())
    z = ik.fixed_point(_tanh_map, torch.zeros_like(b), leaves, solver=solver, rule=rule, batch_dims=1, **options).value
    return torch.autograd.grad((z * torch.linspace(-1, 1, b.shape[1], dtype=b.dtype)).sum() + z.square().sum(), leaves)


def _exact_gradients(W: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The theorem written out: S = diag(1 - z^2), u = (I - W'S)^-1 g; the gradients are S u z' and S u."""
    z = torch.zeros_like(b)
    for _ in range(400):
        z = _tanh_map(z, W, b)
    slope = 1 - z**2
    g = torch.linspace(-1, 1, b.shape[1], dtype=b.dtype) + 2 * z
    J = slope.unsqueeze(2) * W
    u = torch.stack([torch.linalg.solve(torch.eye(len(W), dtype=D) - j.mT, r) for j, r in zip(J, g, strict=True)])
    return torch.einsum("bi,bj->ij", slope * u, z), slope * u


@pytest.mark.parametrize(
    "solver", ["picard", "anderson", "newton", "newton_krylov", "scipy.newton_krylov", "lbfgs", "auto"]
)
def test_gradient_does_not_depend_on_the_solver(solver: str) -> None:
    W, b = _tanh_inputs()
    got = _gradients(solver, ik.Implicit(linear_solver="lu"), W, b, rtol=1e-9, atol=1e-9)
    for g, want in zip(got, _exact_gradients(W, b), strict=True):
        assert float((g - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("linear_solver", ["lu", "gmres", "bicgstab", "lsmr", "neumann", "broyden", "auto"])
def test_gradient_does_not_depend_on_the_linear_solver(linear_solver: str) -> None:
    W, b = _tanh_inputs()
    got = _gradients("newton", ik.Implicit(linear_solver=linear_solver, rtol=1e-11), W, b, **TIGHT)
    assert_close(got, _exact_gradients(W, b), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("linear_solver", ["lu", "cg", "gmres", "bicgstab", "lsmr", "broyden", "auto"])
def test_gradient_of_a_minimum_does_not_depend_on_the_linear_solver(linear_solver: str) -> None:
    Q, b = randn(5, 5, seed=14), randn(5, seed=15).requires_grad_()
    Q = Q @ Q.mT + torch.eye(5, dtype=D)
    rule = ik.Implicit(linear_solver=linear_solver, rtol=1e-12)
    objective = lambda z, b: 0.5 * z @ Q @ z - b @ z  # noqa: E731
    z = ik.argmin(objective, torch.zeros(5, dtype=D), (b,), solver="newton", rule=rule, **TIGHT).value
    g = randn(5, seed=16)
    assert_close(torch.autograd.grad(z, b, g)[0], torch.linalg.solve(Q, g), rtol=1e-8)


# --------------------------------------------------------------------------------------------- approximate rules
def _series(kind: str, steps: int, damping: float, J: Tensor, g: Tensor) -> Tensor:
    """u ~ (I - J')^-1 g, the terms summed one by one."""
    if kind == "phantom":
        P = (1 - damping) * torch.eye(len(J), dtype=D) + damping * J.mT
        return damping * sum(torch.linalg.matrix_power(P, i) @ g for i in range(steps))
    return sum(torch.linalg.matrix_power(J.mT, i) @ g for i in range(steps + 1))  # type: ignore[return-value]


SERIES = [
    (ik.OneStep(), "neumann", 0, 1.0),
    (ik.Neumann(terms=0), "neumann", 0, 1.0),
    (ik.Neumann(terms=3), "neumann", 3, 1.0),
    (ik.Neumann(terms=10), "neumann", 10, 1.0),
    (ik.Phantom(steps=1, damping=1.0), "phantom", 1, 1.0),
    (ik.Phantom(steps=1, damping=0.4), "phantom", 1, 0.4),
    (ik.Phantom(steps=5, damping=0.5), "phantom", 5, 0.5),
    (ik.Phantom(steps=8, damping=0.9), "phantom", 8, 0.9),
]


@pytest.mark.parametrize(("rule", "kind", "steps", "damping"), SERIES, ids=str)
def test_approximate_rules_are_their_series(rule: Any, kind: str, steps: int, damping: float) -> None:
    W, b = _tanh_inputs(batch=1)
    z = ik.fixed_point(_tanh_map, torch.zeros_like(b), (W, b), batch_dims=1, **TIGHT).value[0]
    slope, g = 1 - z**2, torch.linspace(-1, 1, len(z), dtype=D) + 2 * z
    u = _series(kind, steps, damping, torch.diag(slope) @ W, g)
    want = (torch.outer(slope * u, z), (slope * u).unsqueeze(0))
    assert_close(_gradients("newton", rule, W, b, **TIGHT), want)
    # forward mode is the transpose of the same series
    v = randn(6, seed=17)
    f = lambda b: ik.fixed_point(_tanh_map, torch.zeros_like(b), (W, b), batch_dims=1, rule=rule, **TIGHT).value  # noqa: E731
    _, tangent = torch.func.jvp(f, (b,), (v.unsqueeze(0),))
    assert_close((tangent[0] * g).sum(), (slope * u * v).sum())


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("damping", [1.0, 0.6])
def test_phantom_is_backpropagation_through_damped_steps(steps: int, damping: float) -> None:
    W, b = _tanh_inputs()
    star = ik.fixed_point(_tanh_map, torch.zeros_like(b), (W, b), batch_dims=1, **TIGHT).value
    leaves = (W.clone().requires_grad_(), b.clone().requires_grad_())
    z = star
    for _ in range(steps):
        z = (1 - damping) * z + damping * _tanh_map(z, *leaves)
    want = torch.autograd.grad((z * torch.linspace(-1, 1, 6, dtype=D)).sum() + z.square().sum(), leaves)
    assert_close(_gradients("newton", ik.Phantom(steps, damping), W, b, **TIGHT), want)


# --------------------------------------------------------------------------------------------------------------- unroll
@pytest.mark.parametrize("damping", [1.0, 0.7])
def test_unroll_is_the_loop_by_hand(damping: float) -> None:
    W, b = _tanh_inputs()
    z0 = 0.1 * randn(3, 6, seed=18)

    def by_hand(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
        for _ in range(7):
            z = z + damping * (_tanh_map(z, W, b) - z)
        return z.pow(2).sum()

    def ours(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
        solution = ik.fixed_point(
            _tanh_map, z, (W, b), batch_dims=1, solver=ik.Picard(damping), rule=ik.Unroll(steps=7), max_steps=7,
            on_failure="ignore",
        )  # fmt: skip
        return solution.value.pow(2).sum()

    assert_close(ours(z0, W, b), by_hand(z0, W, b))
    assert_close(grad(ours, (0, 1, 2))(z0, W, b), grad(by_hand, (0, 1, 2))(z0, W, b))
    leaves = [t.clone().requires_grad_() for t in (z0, W, b)]
    assert_close(torch.autograd.grad(ours(*leaves), leaves), grad(by_hand, (0, 1, 2))(z0, W, b))
    assert_close(hessian(ours, 2)(z0, W, b), hessian(by_hand, 2)(z0, W, b))


def test_unroll_of_gradient_descent() -> None:
    b = randn(3, seed=19)

    def by_hand(b: Tensor) -> Tensor:
        z = torch.zeros_like(b)
        for _ in range(5):
            z = z - 0.2 * (z + z**3 - b)
        return z.sum()

    def ours(b: Tensor) -> Tensor:
        return ik.argmin(
            lambda z, b: (0.5 * z**2 + 0.25 * z**4 - b * z).sum(), torch.zeros_like(b), (b,),
            solver=ik.GradientDescent(step_size=0.2), rule=ik.Unroll(steps=5), max_steps=5, on_failure="ignore",
        ).value.sum()  # fmt: skip

    assert_close(ours(b), by_hand(b))
    assert_close(grad(ours)(b), grad(by_hand)(b))


def test_unroll_to_convergence_is_the_exact_derivative() -> None:
    W, b = _tanh_inputs()
    assert_close(_gradients("picard", "unroll", W, b, **TIGHT), _exact_gradients(W, b), rtol=1e-7, atol=1e-8)


# -------------------------------------------------------------------------------------------------------------- complex
C = torch.complex128
COMPLEX_MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "holomorphic": lambda z, c: 0.3 * z**2 + c,
    "conjugating": lambda z, c: 0.4 * z.conj() * c + c,
    "modulus": lambda z, c: 0.2 * z * z.abs() + c,
    "real part": lambda z, c: 0.5 * z.real * c + 0.3j * z.imag + c.conj(),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ["picard", "anderson", "newton"])
@pytest.mark.parametrize("name", COMPLEX_MAPS)
def test_complex_gradcheck(name: str, solver: str) -> None:
    c = (0.3 * randn(2, seed=20, dtype=C)).requires_grad_()

    def solve(c: Tensor) -> Tensor:
        return ik.fixed_point(COMPLEX_MAPS[name], torch.zeros_like(c), (c,), solver=solver, **TIGHT).value

    z = solve(c)
    assert_close(z, COMPLEX_MAPS[name](z, c))
    how = {"nondet_tol": 1e-9, "fast_mode": solver != "picard"}  # entry by entry with one solver of each map
    assert torch.autograd.gradcheck(solve, c, check_forward_ad=True, **how)
    assert torch.autograd.gradgradcheck(solve, c, **how)


def test_complex_closed_forms() -> None:
    """Holomorphic z = a z + c: dz/dc = 1/(1 - a), PyTorch's gradient of Re z is its conjugate.

    Not holomorphic, z = a conj(z) + c: z = (c + a conj c)/(1 - |a|^2), so d(Re z) has gradient (1 + a)/(1 - |a|^2).
    """
    a, c = torch.tensor(0.3 + 0.4j, dtype=C), torch.tensor(1.0 - 0.5j, dtype=C)
    zero = torch.zeros((), dtype=C)
    holomorphic = lambda c: ik.fixed_point(lambda z, c: a * z + c, zero, (c,), **TIGHT).value  # noqa: E731
    conjugating = lambda c: ik.fixed_point(lambda z, c: a * z.conj() + c, zero, (c,), **TIGHT).value  # noqa: E731
    assert_close(holomorphic(c), c / (1 - a))
    assert_close(grad(lambda c: holomorphic(c).real)(c), (1 / (1 - a)).conj())
    scale = 1 - a.abs() ** 2
    assert_close(conjugating(c), (c + a * c.conj()) / scale)
    # Re z = Re((1 + conj a) c)/scale has the gradient conj(1 + conj a)/scale
    assert_close(grad(lambda c: conjugating(c).real)(c), (1 + a) / scale)
    _, tangent = torch.func.jvp(conjugating, (c,), (torch.tensor(1j, dtype=C),))
    assert_close(tangent, (1j + a * -1j) / scale)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["complex", "beside reals"])
@pytest.mark.parametrize("outer", ["jacrev", "jacfwd", "vmap of pullbacks"])
@pytest.mark.parametrize("inner", ["grad", "jacrev", "jacfwd"])
def test_complex_mixed_derivatives(inner: str, outer: str, mixed: bool) -> None:
    """z = x / w, differentiated by the real pairs of w and then by those of x, in batched passes too."""
    as_complex, pairs = torch.view_as_complex, torch.view_as_real
    x, w = randn(3, 2, seed=24), 1.5 + 0.2 * randn(3, 2, seed=25)

    def solved(x: Tensor, w: Tensor) -> Tensor:
        if not mixed:
            return ik.root(lambda z, x, w: z * w - x, torch.zeros_like(x), (x, w), **TIGHT).value
        f = lambda z, x, w: {"a": z["a"] - 1, "z": z["z"] * w - z["a"] * x}  # noqa: E731
        return ik.root(f, {"a": torch.zeros(1, dtype=D), "z": torch.zeros_like(x)}, (x, w), **TIGHT).value["z"]

    transforms = {"grad": grad, "jacrev": jacrev, "jacfwd": jacfwd}

    def second(divide: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        size = lambda x, w: (pairs(divide(as_complex(x), as_complex(w))) * torch.tensor([1.3, 0.7])).square().sum()  # noqa: E731
        slope = lambda x: transforms[inner](lambda w: size(x, w))(w)  # noqa: E731
        if outer != "vmap of pullbacks":
            return transforms[outer](slope)(x)
        leaf = x.clone().requires_grad_()
        out = slope(leaf)
        return torch.autograd.grad(out, leaf, torch.eye(6, dtype=D).reshape(6, 3, 2), is_grads_batched=True)[0]

    assert_close(second(solved), second(lambda x, w: x / w).reshape(second(solved).shape))


@pytest.mark.parametrize("name", COMPLEX_MAPS)
def test_many_complex_cotangents_at_once(name: str) -> None:
    """``is_grads_batched`` of a solve, and of its gradient, is one pass after the other."""
    c = (0.3 * randn(2, seed=26, dtype=C)).requires_grad_()
    z = ik.fixed_point(COMPLEX_MAPS[name], torch.zeros_like(c), (c,), **TIGHT).value
    (slope,) = torch.autograd.grad(z.abs().sum(), c, create_graph=True)
    directions = randn(3, 2, seed=27, dtype=C)
    for out in (z, slope):
        one = lambda v, out=out: torch.autograd.grad(out, c, v, retain_graph=True)[0]  # noqa: E731
        found = torch.autograd.grad(out, c, directions, is_grads_batched=True, retain_graph=True)[0]
        assert_close(found, torch.stack([one(v) for v in directions]))


def test_complex_minimum() -> None:
    """min |A z - y|^2 over complex z: the normal equations A^H A z = A^H y, and the derivative of its least value."""
    A, y = randn(5, 3, seed=21, dtype=C), randn(5, seed=22, dtype=C)

    def solve(y: Tensor) -> Tensor:
        objective = lambda z, y: (A @ z - y).abs().square().sum()  # noqa: E731
        return ik.argmin(objective, torch.zeros(3, dtype=C), (y,), solver="newton", **TIGHT).value

    P = torch.linalg.solve(A.mH @ A, A.mH)
    assert_close(solve(y), P @ y)
    g = randn(3, seed=23, dtype=C)
    leaf = y.clone().requires_grad_()
    assert_close(torch.autograd.grad(solve(leaf), leaf, g)[0], P.mH @ g)
