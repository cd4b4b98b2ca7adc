"""Constrained and composite minimisation: closed forms, standard problems, every solver, every transform."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.linear_model import ElasticNet, Lasso, MultiTaskLasso
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik
from implicitkit.extend import Constraint, get_solver

F64 = torch.float64
N = 5


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


V = _draw(0, 3, N)
MATRIX = _draw(1, 12, N)
Y = _draw(2, 3, 12)
DIRECTIONS = _draw(20, 12, 2)


def distance(z: Tensor, v: Tensor) -> Tensor:
    return 0.5 * ((z - v) ** 2).sum(-1)


def entropy(z: Tensor, v: Tensor) -> Tensor:
    return (z * torch.log(z) - z * v).sum(-1)


def fit(z: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((z @ MATRIX.T - y) ** 2).sum(-1)


SUM_IS_ONE = ik.Equality(lambda z, v: z.sum(-1) - 1)
POSITIVE = ik.Inequality(lambda z, v: -z)
ONE = torch.full((3, N), 1 / N, dtype=F64)
ZERO = torch.zeros(3, N, dtype=F64)
SIMPLEX = ik.project.simplex()

# name: (objective, z0, args, constraints and sets, expected, solvers)
CLOSED: dict[str, tuple[Any, Tensor, tuple[Tensor, ...], dict[str, Any], Tensor, list[str]]] = {
    "softmax by an equality": (
        entropy,
        ONE,
        (V,),
        {"constraints": [SUM_IS_ONE]},
        torch.softmax(V, -1),
        ["auto", "sqp", "filter_interior_point", "augmented_lagrangian", "newton", "scipy.slsqp"],
    ),
    "softmax on the simplex": (entropy, ONE, (V,), {"project": SIMPLEX}, torch.softmax(V, -1), ["mirror_descent"]),
    "simplex by projection": (
        distance,
        ZERO,
        (V,),
        {"project": SIMPLEX},
        SIMPLEX(V),
        ["auto", "proximal_gradient", "projected_gradient", "newton"],
    ),
    "simplex by constraints": (
        distance,
        ZERO,
        (V,),
        {"constraints": [SUM_IS_ONE, POSITIVE]},
        SIMPLEX(V),
        ["auto", "sqp", "filter_interior_point", "augmented_lagrangian", "scipy.slsqp", "scipy.trust_constr"],
    ),
    "simplex by bounds and an equality": (
        distance,
        ZERO,
        (V,),
        {"constraints": SUM_IS_ONE, "bounds": (0, None)},
        SIMPLEX(V),
        ["auto", "sqp", "filter_interior_point", "augmented_lagrangian", "scipy.slsqp", "scipy.trust_constr"],
    ),
    "box": (
        distance,
        ZERO,
        (V,),
        {"bounds": (-0.3, torch.linspace(0.1, 0.5, N, dtype=F64))},
        V.clamp_min(-0.3).minimum(torch.linspace(0.1, 0.5, N, dtype=F64)),
        ["auto", "sqp", "block_coordinate_descent", "scipy.lbfgsb", "scipy.slsqp", "scipy.trust_constr", "newton"],
    ),
    "ball by a constraint": (
        distance,
        ZERO,
        (V,),
        {"constraints": ik.Inequality(lambda z, v: z.square().sum(-1) - 1)},
        ik.project.l2_ball()(V),
        ["auto", "sqp", "filter_interior_point", "augmented_lagrangian", "scipy.slsqp"],
    ),
    "soft thresholding": (
        distance,
        ZERO,
        (V,),
        {"prox": ik.prox.l1(0.4)},
        ik.prox.l1(0.4)(V),
        ["auto", "proximal_gradient", "block_coordinate_descent", "newton"],
    ),
    "ridge": (
        fit,
        ZERO,
        (Y,),
        {"prox": ik.prox.ridge(2.0)},
        torch.linalg.solve(MATRIX.T @ MATRIX + 2 * torch.eye(N, dtype=F64), (Y @ MATRIX).T).T,
        ["auto", "proximal_gradient", "block_coordinate_descent"],
    ),
}
ROWS = [(name, solver) for name, row in CLOSED.items() for solver in row[-1]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "solver"), ROWS)
def test_closed_forms(name: str, solver: str) -> None:
    objective, z0, args, options, expected, _ = CLOSED[name]
    s = ik.argmin(objective, z0, args, batch_dims=1, solver=solver, rtol=1e-9, **options)
    assert s.converged.all()
    torch.testing.assert_close(s.value, expected, rtol=0, atol=1e-7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("l1_ratio", [1.0, 0.5], ids=["lasso", "elastic net"])
@pytest.mark.parametrize("solver", ["auto", "proximal_gradient", "block_coordinate_descent"])
def test_lasso_and_elastic_net_against_scikit_learn(l1_ratio: float, solver: str) -> None:
    alpha, rows = 0.1, len(MATRIX)
    model = (Lasso if l1_ratio == 1 else ElasticNet)(alpha=alpha, fit_intercept=False, tol=1e-12, max_iter=100000)
    if l1_ratio != 1:
        model.set_params(l1_ratio=l1_ratio)
    expected = np.stack([model.fit(MATRIX.numpy(), y.numpy()).coef_ for y in Y])
    prox = ik.prox.elastic_net(rows * alpha * l1_ratio, rows * alpha * (1 - l1_ratio))
    s = ik.argmin(fit, ZERO, (Y,), prox=prox, batch_dims=1, solver=solver)
    torch.testing.assert_close(s.value, torch.from_numpy(expected), rtol=0, atol=1e-7)


def hs71(z: Tensor) -> Tensor:
    return z[0] * z[3] * (z[0] + z[1] + z[2]) + z[2]


STANDARD: dict[str, tuple[Callable[[Tensor], Tensor], list[float], dict[str, Any], float]] = {
    # Hock & Schittkowski (1981): objective, start, constraints, optimal value
    "HS6": (
        lambda z: (1 - z[0]) ** 2,
        [-1.2, 1.0],
        {"constraints": ik.Equality(lambda z: 10 * (z[1] - z[0] ** 2))},
        0.0,
    ),
    "HS7": (
        lambda z: torch.log(1 + z[0] ** 2) - z[1],
        [2.0, 2.0],
        {"constraints": ik.Equality(lambda z: (1 + z[0] ** 2) ** 2 + z[1] ** 2 - 4)},
        -(3**0.5),
    ),
    "HS10": (
        lambda z: z[0] - z[1],
        [-10.0, 10.0],
        {"constraints": ik.Inequality(lambda z: 3 * z[0] ** 2 - 2 * z[0] * z[1] + z[1] ** 2 - 1)},
        -1.0,
    ),
    "HS35": (
        lambda z: (
            9
            - 8 * z[0]
            - 6 * z[1]
            - 4 * z[2]
            + 2 * z[0] ** 2
            + 2 * z[1] ** 2
            + z[2] ** 2
            + 2 * z[0] * z[1]
            + 2 * z[0] * z[2]
        ),
        [0.5, 0.5, 0.5],
        {"constraints": ik.Inequality(lambda z: z[0] + z[1] + 2 * z[2] - 3), "bounds": (0, None)},
        1 / 9,
    ),
    "HS39": (
        lambda z: -z[0],
        [2.0, 2.0, 2.0, 2.0],
        {
            "constraints": ik.Equality(
                lambda z: torch.stack([z[1] - z[0] ** 3 - z[2] ** 2, z[0] ** 2 - z[1] - z[3] ** 2])
            )
        },
        -1.0,
    ),
    "HS43": (
        lambda z: z[0] ** 2 + z[1] ** 2 + 2 * z[2] ** 2 + z[3] ** 2 - 5 * z[0] - 5 * z[1] - 21 * z[2] + 7 * z[3],
        [0.0, 0.0, 0.0, 0.0],
        {
            "constraints": ik.Inequality(
                lambda z: torch.stack(
                    [
                        z.square().sum() + z[0] - z[1] + z[2] - z[3] - 8,
                        z[0] ** 2 + 2 * z[1] ** 2 + z[2] ** 2 + 2 * z[3] ** 2 - z[0] - z[3] - 10,
                        2 * z[0] ** 2 + z[1] ** 2 + z[2] ** 2 + 2 * z[0] - z[1] - z[3] - 5,
                    ]
                )
            )
        },
        -44.0,
    ),
    "HS71": (
        hs71,
        [1.0, 5.0, 5.0, 1.0],
        {
            "constraints": [ik.Inequality(lambda z: 25 - z.prod()), ik.Equality(lambda z: z.square().sum() - 40)],
            "bounds": (1, 5),
        },
        17.0140173,
    ),
    "Rosenbrock in a disk": (
        lambda z: (1 - z[0]) ** 2 + 100 * (z[1] - z[0] ** 2) ** 2,
        [0.0, 0.0],
        {"constraints": ik.Inequality(lambda z: z.square().sum() - 1)},
        0.0456748087,
    ),
    "a line over a circle": (
        lambda z: z.sum(),
        [1.0, 0.3],
        {"constraints": ik.Equality(lambda z: z.square().sum() - 2)},
        -2.0,
    ),
}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_problems(name: str) -> None:
    objective, start, options, best = STANDARD[name]
    s = ik.argmin(objective, torch.tensor(start, dtype=F64), **options)
    assert s.converged
    assert float(objective(s.value)) == pytest.approx(best, abs=1e-6)


def test_multipliers_are_those_of_the_lagrangian() -> None:
    """Stationarity, signs and complementarity, one pytree a constraint."""
    a, b = _draw(3, 2, N), _draw(4, N)
    constraints = [ik.Equality(lambda z, v: {"sum": z.sum(), "pair": a @ z - 0.1}), ik.Inequality(lambda z, v: z - 0.2)]
    s = ik.argmin(distance, torch.zeros(N, dtype=F64), (b,), constraints=constraints)
    y, lam = s.multipliers
    assert set(y) == {"sum", "pair"}
    slope = s.value - b + y["sum"] + a.T @ y["pair"] + lam
    torch.testing.assert_close(slope, torch.zeros(N, dtype=F64), rtol=0, atol=1e-8)
    assert bool((lam >= -1e-10).all()) and float((lam * (s.value - 0.2)).abs().max()) < 1e-8


def test_agrees_with_the_quadratic_program() -> None:
    P = torch.eye(N, dtype=F64) + MATRIX.T @ MATRIX / 10
    q, G, h = _draw(5, N), _draw(6, 4, N), torch.rand(4, generator=torch.Generator().manual_seed(0), dtype=F64)
    program = ik.solve(ik.QuadraticProgram(P, q, G=G, h=h))
    s = ik.argmin(
        lambda z: 0.5 * z @ P @ z + q @ z, torch.zeros(N, dtype=F64), constraints=ik.Inequality(lambda z: G @ z - h)
    )
    torch.testing.assert_close(s.value, program.value, rtol=0, atol=1e-8)
    torch.testing.assert_close(s.multipliers[0], program.multipliers.inequality, rtol=0, atol=1e-8)


# --------------------------------------------------------------------------------------------------------- derivatives
def constrained(p: Tensor) -> Tensor:
    """A nonlinear program; value and multipliers in one vector."""
    s = ik.argmin(
        lambda z, p: ((z - p) ** 2).sum() + z.pow(4).sum() / 4,
        torch.zeros(3, dtype=F64),
        (p,),
        constraints=[ik.Equality(lambda z, p: z.sum() - p[0]), ik.Inequality(lambda z, p: z**2 - p[1])],
        rtol=1e-12,
    )
    return torch.cat([s.value, s.multipliers[0].reshape(1), s.multipliers[1]])


def along(p: Tensor, row: int) -> Tensor:
    """Data that two numbers move."""
    return Y[row] + DIRECTIONS @ p


def lasso(p: Tensor) -> Tensor:
    return ik.argmin(
        lambda z, p: fit(z, along(p, 0)), torch.zeros(N, dtype=F64), (p,), prox=ik.prox.l1(0.5), rtol=1e-13
    ).value


def bounded(p: Tensor) -> Tensor:
    return ik.argmin(
        lambda z, p: fit(z, along(p, 1)) + z.pow(4).sum(),
        torch.zeros(N, dtype=F64),
        (p,),
        bounds=(-0.1, p[0].abs()),
        rtol=1e-13,
    ).value


def on_simplex(p: Tensor) -> Tensor:
    return ik.argmin(
        lambda z, p: 0.3 * fit(z, along(p, 2)), torch.full((N,), 0.2, dtype=F64), (p,), project=SIMPLEX, rtol=1e-13
    ).value


LAYERS = {
    "constrained": (constrained, torch.tensor([0.3, 0.2, 3.0], dtype=F64)),
    "lasso": (lasso, torch.tensor([0.3, -0.2], dtype=F64)),
    "bounded": (bounded, torch.tensor([0.3, -0.2], dtype=F64)),
    "simplex": (on_simplex, torch.tensor([0.3, -0.2], dtype=F64)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYERS)
def test_gradcheck(name: str) -> None:
    layer, p = LAYERS[name]
    p = p.clone().requires_grad_()
    assert torch.autograd.gradcheck(layer, (p,), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, (p,), fast_mode=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYERS)
def test_transforms_agree(name: str) -> None:
    layer, p = LAYERS[name]
    batch = torch.stack([p, 1.01 * p])
    loss = lambda t: (layer(t) ** 2).sum()  # noqa: E731
    J = jacrev(layer)(p)
    torch.testing.assert_close(jacfwd(layer)(p), J, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(vmap(layer)(batch)[0], layer(p), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(vmap(grad(loss))(batch)[1], grad(loss)(batch[1]), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(hessian(loss)(p), jacfwd(grad(loss))(p), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(p), layer(p), rtol=1e-8, atol=1e-9)


def test_weights_sets_modules_and_captured_tensors_are_differentiated() -> None:
    """A learnable lasso weight, a bound, a module inside a constraint, a captured tensor in the objective."""
    weight = torch.tensor(0.5, dtype=F64, requires_grad=True)
    upper = torch.full((N,), 0.1, dtype=F64, requires_grad=True)
    shift = _draw(7, N).requires_grad_()
    module = nn.Linear(N, 1).double()
    zero = torch.zeros(N, dtype=F64)
    checks: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda w: ik.argmin(fit, zero, (Y[0],), prox=ik.prox.l1(w), rtol=1e-13).value, (weight,)),
        (lambda u: ik.argmin(fit, zero, (Y[0],), bounds=(None, u), rtol=1e-13).value, (upper,)),
        (
            lambda s: (
                ik.argmin(
                    lambda z: distance(z, s), zero, constraints=ik.Inequality(lambda z: (z - s).sum() + 1), rtol=1e-13
                ).value
            ),
            (shift,),
        ),
        (
            lambda w: (
                ik.argmin(
                    lambda z: distance(z, V[0]),
                    zero,
                    constraints=ik.Equality(lambda z: torch.func.functional_call(module, {"weight": w}, (z,))),
                    rtol=1e-13,
                ).value
            ),
            (module.weight.detach().clone().requires_grad_(),),
        ),
    ]
    for layer, inputs in checks:
        assert torch.autograd.gradcheck(layer, inputs)
    s = ik.argmin(lambda z: distance(z, V[0]), zero, constraints=ik.Equality(lambda z: module(z)))
    s.value.sum().backward()
    assert module.weight.grad is not None and float(module.weight.grad.abs().max()) > 1e-3


def test_second_order_through_a_layer() -> None:
    def loss(t: Tensor) -> Tensor:
        q = t**2
        x = ik.argmin(lambda z, q: distance(z, q), torch.zeros(1, dtype=F64), (q.reshape(1),), bounds=(0, 100)).value
        return (x**2).sum()

    t = torch.tensor(2.0, dtype=F64)
    assert float(hessian(loss)(t)) == pytest.approx(48.0, abs=1e-7)
    assert float(torch.autograd.functional.hessian(loss, t)) == pytest.approx(48.0, abs=1e-7)


def test_pytrees_and_batches() -> None:
    z0 = {"a": torch.zeros(2, 3, dtype=F64), "b": (torch.zeros(2, 2, 2, dtype=F64),)}
    target = {"a": _draw(8, 2, 3), "b": (_draw(9, 2, 2, 2),)}

    def objective(z: Any, v: Any) -> Tensor:
        return ((z["a"] - v["a"]) ** 2).sum(-1) + ((z["b"][0] - v["b"][0]) ** 2).sum((-1, -2))

    s = ik.argmin(
        objective,
        z0,
        (target,),
        constraints=[ik.Equality(lambda z, v: z["a"].sum(-1)), ik.Inequality(lambda z, v: z["b"][0])],
        batch_dims=1,
    )
    torch.testing.assert_close(s.value["a"], target["a"] - target["a"].mean(-1, keepdim=True), rtol=0, atol=1e-9)
    torch.testing.assert_close(s.value["b"][0], target["b"][0].clamp(max=0), rtol=0, atol=1e-9)
    assert s.multipliers[0].shape == (2,) and s.multipliers[1].shape == (2, 2, 2)


def test_copies_and_pickles() -> None:
    problem = ik.Argmin(distance, constraints=[ik.Equality(_total)], bounds=(0, None))
    for other in (copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        s = ik.solve(other, torch.zeros(N, dtype=F64), (V[0],))
        torch.testing.assert_close(s.value, SIMPLEX(V[0]), rtol=0, atol=1e-9)
    pickle.loads(pickle.dumps(s))


def _total(z: Tensor, v: Tensor) -> Tensor:
    return z.sum() - 1


# ---------------------------------------------------------------------------------------------------- degenerate, bad
def test_degenerate_policies() -> None:
    """The same constraint twice: the multipliers are not unique, the value is."""
    twice = [ik.Equality(lambda z, v: z.sum() - 1), ik.Equality(lambda z, v: z.sum() - 1)]
    f = lambda v, policy: (  # noqa: E731
        ik.argmin(
            distance,
            torch.zeros(N, dtype=F64),
            (v,),
            constraints=twice,
            degenerate=policy,
            solver="augmented_lagrangian",
        ).value
    )
    J = jacrev(lambda v: f(v, "lstsq"))(V[0])
    torch.testing.assert_close(J, torch.eye(N, dtype=F64) - 1 / N, rtol=0, atol=1e-7)
    with pytest.raises(ik.ConvergenceError, match="degenerate"):
        f(V[0].clone().requires_grad_(), "raise").sum().backward()


def test_smooth_relaxes_complementarity() -> None:
    """``min c z, z >= 0`` at ``lam z = 1e-3``."""
    f = lambda c: ik.argmin(  # noqa: E731
        lambda z, c: (c * z).sum() + 0.5 * (z**2).sum(),
        torch.ones(1, dtype=F64),
        (c,),
        constraints=ik.Inequality(lambda z, c: -z),
        degenerate="smooth",
        solver="newton",
    )
    c = torch.tensor([0.5], dtype=F64)
    s = f(c)
    assert float(s.value * s.multipliers[0]) == pytest.approx(1e-3, rel=1e-8)
    expected = (-0.5 + (0.25 + 4e-3) ** 0.5) / 2  # z^2 + c z = kappa
    assert float(s.value) == pytest.approx(expected, rel=1e-9)
    assert float(jacrev(lambda c: f(c).value)(c)) == pytest.approx((-1 + 0.5 / 0.254**0.5) / 2, rel=1e-7)


def test_infeasible_is_not_called_solved() -> None:
    impossible = [ik.Equality(lambda z: z.sum() - 1), ik.Inequality(lambda z: z + 1)]
    with pytest.raises(ik.ConvergenceError):
        ik.argmin(lambda z: z.square().sum(), torch.zeros(2, dtype=F64), constraints=impossible)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_sets_are_taken_and_constraints_refused(dtype: torch.dtype) -> None:
    f = lambda z: (z - 2).square().sum()  # noqa: E731
    solution = ik.argmin(f, torch.zeros(2, dtype=dtype), bounds=(None, 1.0))
    assert solution.value.dtype == dtype and solution.value.tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match=r"constraints= needs float32 or float64, and z0 has torch\.b?float16"):
        ik.argmin(f, torch.zeros(2, dtype=dtype), constraints=ik.Equality(lambda z: z.sum() - 1))


class _HugeMultiplier(ik.Method):
    """Where the constraint has no slope, with a multiplier beside which its value is nothing."""

    solves = "root"

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return torch.tensor([[0.0, 1e26]], dtype=F64), state


def test_a_huge_multiplier_hides_no_violated_constraint() -> None:
    solution = ik.argmin(
        lambda z: 0.5 * z.square().sum(),
        torch.ones(1, dtype=F64),
        constraints=ik.Inequality(lambda z: z.square() + 0.56),
        solver=_HugeMultiplier(),
        max_steps=3,
        on_failure="ignore",
    )
    assert not bool(solution.converged) and float(solution.residual_norm) == pytest.approx(0.56)


def test_one_bad_sample_leaves_the_others() -> None:
    v = V.clone()
    v[1, 0] = torch.nan
    s = ik.argmin(distance, ZERO, (v,), constraints=[SUM_IS_ONE, POSITIVE], batch_dims=1, on_failure="nan")
    assert s.converged.tolist() == [True, False, True]
    torch.testing.assert_close(s.value[[0, 2]], SIMPLEX(V)[[0, 2]], rtol=0, atol=1e-8)
    assert bool(torch.isnan(s.value[1]).all())


def _solve(**options: Any) -> Any:
    return ik.argmin(lambda z: z.square().sum(), torch.zeros(2, dtype=F64), **options)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: _solve(constraints=[lambda z: z]), TypeError, "wrap the function in ik.Equality"),
    (lambda: ik.Equality(3), TypeError, "callable"),
    (lambda: _solve(bounds=(0, 1), prox=ik.prox.l1()), ValueError, "cannot be combined"),
    (lambda: _solve(bounds=0), ValueError, "pair"),
    (lambda: _solve(bounds=(torch.zeros(3, 2), None)), ValueError, "does not fit"),
    (lambda: _solve(bounds=(torch.zeros(7), None)), ValueError, "does not fit"),
    (lambda: _solve(bounds=("a", None)), TypeError, "holds a str"),
    (lambda: _solve(bounds=(1.0, -1.0)), ValueError, "must not be above"),
    (lambda: _solve(bounds=(0.0, torch.tensor(float("nan")))), ValueError, "NaN"),
    (lambda: _solve(prox=1.0), TypeError, "callable prox"),
    (lambda: _solve(bounds=(0, 1), degenerate="x"), ValueError, "degenerate must be"),
    (lambda: _solve(bounds=(0, 1), degenerate="smooth"), ValueError, "relaxes inequality"),
    (lambda: _solve(constraints=[ik.Equality(lambda z: 3.0)]), TypeError, "returned a float"),
    (lambda: _solve(constraints=[ik.Inequality(lambda z: z > 1)]), TypeError, "returned torch.bool.*not a comparison"),
    (
        lambda: ik.argmin(
            lambda z: z["a"].square().sum(),
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            bounds=({"b": 0.0, "c": 0.0}, None),
        ),
        ValueError,
        "another structure",
    ),
    (lambda: _solve(bounds=(0, 1), solver="lbfgs"), ik.CapabilityError, "Solvers that fit"),
    (lambda: _solve(bounds=(0, 1), solver="qp"), ik.CapabilityError, "quadratic_program"),
    (
        lambda: _solve(constraints=[ik.Equality(lambda z: z[0])], solver="proximal_gradient"),
        ik.CapabilityError,
        "no con",
    ),
    (lambda: _solve(prox=ik.prox.l1(), solver="sqp"), ik.CapabilityError, "augmented_lagrangian"),
    (lambda: _solve(bounds=(0, 1), solver="mirror_descent"), ik.CapabilityError, "simplex"),
    (lambda: _solve(prox=ik.prox.total_variation(), solver="block_coordinate_descent"), ik.CapabilityError, "groups"),
    (lambda: _solve(project=lambda z: z[:1]), ValueError, "shape"),
    (lambda: ik.argmin(distance, ZERO, (V,), bounds=(0, 1)), ValueError, "batch_dims"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_logistic_regression_against_scipy() -> None:
    """Ridge-penalised logistic regression within bounds, and its derivative in the penalty by differences."""
    labels = (MATRIX @ _draw(11, N) + 0.3 * _draw(12, 12) > 0).double()

    def loss(z: Tensor, w: Tensor) -> Tensor:
        logits = MATRIX @ z
        return (
            nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") + w * z.square().sum() / 2
        )

    w = torch.tensor(0.7, dtype=F64)
    solve = lambda w: ik.argmin(loss, torch.zeros(N, dtype=F64), (w,), bounds=(-0.8, 0.8)).value  # noqa: E731
    found = scipy.optimize.minimize(
        lambda z: float(loss(torch.from_numpy(z), w)), np.zeros(N), bounds=[(-0.8, 0.8)] * N, options={"ftol": 1e-15}
    )
    torch.testing.assert_close(solve(w), torch.from_numpy(found.x), rtol=0, atol=1e-5)
    step = 1e-5
    torch.testing.assert_close(jacrev(solve)(w), (solve(w + step) - solve(w - step)) / (2 * step), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "solver", ["auto", "sqp", "filter_interior_point", "scipy.lbfgsb", "scipy.slsqp", "scipy.trust_constr"]
)
def test_bounds_that_leave_one_point(solver: str) -> None:
    p = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    low = torch.tensor([0.3, 0.4], dtype=torch.float64)
    s = ik.argmin(
        lambda z, p: (z - p).square().sum(), torch.zeros(2, dtype=torch.float64), (p,), bounds=(low, low), solver=solver
    )
    torch.testing.assert_close(s.value, low)
    torch.testing.assert_close(torch.autograd.grad(s.value.sum(), p)[0], torch.zeros_like(p))


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (
            [ik.Inequality(lambda z: z[:1] + 1), ik.Inequality(lambda z: 1 - z[:1])],
            "violated there by up to .*: perhaps",
        ),
        ([ik.Inequality(lambda z: z[:1] - 1)], "falls without bound, within the constraints .*State what keeps z back"),
    ],
    ids=["infeasible", "unbounded"],
)
def test_what_keeps_a_program_from_a_solution_is_said(constraints: list[ik.Inequality], says: str) -> None:
    start = torch.zeros(2, dtype=torch.float64)
    options: dict[str, Any] = {"constraints": constraints, "max_steps": 8}
    with pytest.raises(ik.ConvergenceError, match=says):
        ik.argmin(lambda z: z.sum(), start, **options)
    with pytest.raises(ik.ConvergenceError, match=says):  # one sample under vmap
        torch.func.vmap(lambda t: ik.argmin(lambda z: (t * z).sum(), start, **options).value)(
            torch.ones_like(start)[None]
        )


# ------------------------------------------------------------------------------ sequential programs to the last digit
def _valley(z: Tensor) -> Tensor:
    return 1e4 * (z[1] - z[0]) ** 2 + (1 - z[0]) ** 2


def _slope_and_bowl(z: Tensor) -> Tensor:
    return z[0] + 1e-3 * (z[1] - 2) ** 2


FAR = 100.0
# name: (objective, start, constraints and sets, solution, multipliers, tolerance)
LAST_DIGIT: dict[str, tuple[Any, list[float], dict[str, Any], list[float], list[list[float]], float]] = {
    "narrow valley, bounds far away": (
        _valley, [0.4, 0.0], {"bounds": (-FAR, FAR)}, [1.0, 1.0], [], 5e-12,
    ),
    "narrow valley, inequalities far away": (
        _valley, [0.4, 0.0], {"constraints": [ik.Inequality(lambda z: z - FAR), ik.Inequality(lambda z: -z - FAR)]},
        [1.0, 1.0], [[0.0, 0.0], [0.0, 0.0]], 5e-12,
    ),
    "one row active, one far away, a flat direction": (
        _slope_and_bowl, [1.0, 5.0], {"constraints": [ik.Inequality(lambda z: -z), ik.Inequality(lambda z: z - 1e4)]},
        [0.0, 2.0], [[1.0, 0.0], [0.0, 0.0]], 1e-12,
    ),
    "an equality and an inactive inequality": (
        lambda z: 0.5 * ((z - 3) ** 2).sum(), [0.0, 0.0],
        {"constraints": [ik.Equality(lambda z: z[:1] - z[1:] - 1), ik.Inequality(lambda z: z - 1e6)]},
        [3.5, 2.5], [[-0.5], [0.0, 0.0]], 1e-14,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAST_DIGIT)
def test_sqp_is_exact_where_constraints_are_inactive(name: str) -> None:
    """Its quadratic programs are solved relative to the step: converged, in few steps, multipliers exactly zero."""
    objective, start, options, expected, multipliers, tolerance = LAST_DIGIT[name]
    s = ik.argmin(objective, torch.tensor(start, dtype=F64), solver="sqp", **options)
    assert bool(s.converged) and int(s.steps) <= 3
    torch.testing.assert_close(s.value, torch.tensor(expected, dtype=F64), rtol=0, atol=tolerance)
    for found, exact in zip(s.multipliers or (), multipliers, strict=True):
        torch.testing.assert_close(found, torch.tensor(exact, dtype=F64), rtol=0, atol=1e-12)
        assert not bool(found[torch.tensor(exact) == 0].any())


# -------------------------------------------------------------------------------------------- classes of constraints
class Within(Constraint):
    """``|c(z, *args)| <= 1``, a class of constraints that this library does not have."""

    one_sided = True

    def values(self, z: Any, *args: Any) -> Any:
        c = self.function(z, *args)
        return torch.cat([c - 1, -c - 1], -1)


def test_a_class_of_constraints_from_elsewhere() -> None:
    p = torch.tensor([3.0, 0.2], dtype=F64)
    solve = lambda p: ik.argmin(distance, torch.zeros_like(p), (p,), constraints=[Within(lambda z, p: z)]).value  # noqa: E731
    torch.testing.assert_close(solve(p), torch.tensor([1.0, 0.2], dtype=F64), rtol=0, atol=1e-9)
    torch.testing.assert_close(jacrev(solve)(p), torch.diag(torch.tensor([0.0, 1.0], dtype=F64)), rtol=0, atol=1e-9)


def test_a_class_of_constraints_that_does_not_say_what_it_means_is_refused() -> None:
    class Mystery(Constraint):
        pass

    for unknown in (Constraint, Mystery):
        with pytest.raises(
            TypeError, match=r"does not say what its values mean: use ik\.Equality .* or ik\.Inequality"
        ):
            unknown(lambda z: z)


# ------------------------------------------------------------------------------------ matrices: simplices, groups in rows
def _rows(z: Tensor, v: Tensor) -> Tensor:
    """The objective of :func:`entropy` over all rows of a matrix, coupled by the mean of the rows."""
    return (z * torch.log(z) - z * v).sum((-2, -1)) + z.mean(-2).square().sum(-1)


TABLES = _draw(30, 2, 4, N)


def test_mirror_descent_on_rows_of_simplices() -> None:
    """A matrix of probability vectors: against the closed form without coupling; with it ``z = softmax(v - mean / 2)``,
    whose mean is found by repetition; values and Jacobians."""
    start = torch.full((2, 4, N), 1 / N, dtype=F64)
    options: dict[str, Any] = {"project": SIMPLEX, "solver": "mirror_descent", "rtol": 1e-11}
    plain = ik.argmin(lambda z, v: (z * torch.log(z) - z * v).sum((-2, -1)), start, (TABLES,), batch_dims=1, **options)
    torch.testing.assert_close(plain.value, TABLES.softmax(-1), rtol=0, atol=1e-8)

    def unrolled(v: Tensor) -> Tensor:
        mean = torch.zeros(N, dtype=F64)
        for _ in range(80):
            mean = (v - mean / 2).softmax(-1).mean(-2)
        return (v - mean / 2).softmax(-1)

    def solve(v: Tensor) -> Tensor:
        return ik.argmin(_rows, start[0], (v,), **options).value

    coupled = ik.argmin(_rows, start, (TABLES,), batch_dims=1, **options)
    for value, v in zip(coupled.value, TABLES, strict=True):
        torch.testing.assert_close(value, unrolled(v), rtol=0, atol=1e-8)
    torch.testing.assert_close(jacrev(solve)(TABLES[0]), jacrev(unrolled)(TABLES[0]), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_mirror_descent_starts_inside_whatever_the_start() -> None:
    start = torch.zeros(2, 4, N, dtype=F64)
    start[0, 0, 0], start[1, 2] = 1.0, -3.0
    s = ik.argmin(
        distance_of_rows, start, (TABLES,), project=ik.project.simplex(2.0), solver="mirror_descent", batch_dims=1
    )
    torch.testing.assert_close(s.value, ik.project.simplex(2.0)(TABLES), rtol=0, atol=1e-5)


def distance_of_rows(z: Tensor, v: Tensor) -> Tensor:
    return 0.5 * (z - v).square().sum((-2, -1))


@pytest.mark.parametrize(
    ("closed", "kind"),
    [
        (ik.prox.l2(0.7), "prox"), (ik.prox.group_lasso((2, 3), 0.5), "prox"), (SIMPLEX, "project"),
        (ik.project.l2_ball(0.6), "project"), (ik.project.l1_ball(0.6), "project"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else x,
)  # fmt: skip
@pytest.mark.parametrize("block_size", [1, 7])
def test_block_coordinate_descent_with_groups(closed: Any, kind: str, block_size: int) -> None:
    """Groups are blocks, never split, whatever ``block_size``."""
    solver = get_solver("block_coordinate_descent", block_size=block_size)
    options: dict[str, Any] = {kind: closed}
    s = ik.argmin(distance_of_rows, torch.zeros(2, 4, N, dtype=F64), (TABLES,), solver=solver, batch_dims=1, **options)
    torch.testing.assert_close(s.value, closed(TABLES), rtol=0, atol=1e-7)


def test_block_coordinate_descent_is_multitask_lasso() -> None:
    """``|X B - Y|^2 / 2 + lam sum_i |B_i|_2``, rows as blocks, against scikit-learn; the Jacobian in ``Y`` against
    differences."""
    targets, weight = _draw(31, 12, 3), 6.0

    def solve(targets: Tensor) -> Tensor:
        return ik.argmin(
            lambda B, targets: 0.5 * (MATRIX @ B - targets).square().sum(), torch.zeros(N, 3, dtype=F64), (targets,),
            prox=ik.prox.l2(weight), solver="block_coordinate_descent", rtol=1e-11,
        ).value  # fmt: skip

    found = solve(targets)
    reference = MultiTaskLasso(weight / 12, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(MATRIX, targets)
    torch.testing.assert_close(found, torch.from_numpy(reference.coef_.T.copy()), rtol=0, atol=1e-7)
    assert 0 < int((found == 0).all(1).sum()) < N
    direction, step = _draw(32, 12, 3), 1e-5
    _, slope = torch.func.jvp(solve, (targets,), (direction,))
    moved = (solve(targets + step * direction) - solve(targets - step * direction)) / (2 * step)
    torch.testing.assert_close(slope, moved, rtol=0, atol=1e-6)


_ABOVE, _ON = ik.Inequality(lambda z: -z - 1), ik.Equality(lambda z: z[..., :1])


@pytest.mark.parametrize("constraints", [[_ABOVE], [_ON], [_ON, _ABOVE]], ids=["above", "on", "both"])
@pytest.mark.parametrize("batch", [0, 1])
def test_an_objective_that_hides_its_point_below_constraints_is_refused(constraints: Any, batch: int) -> None:
    """Its gradient is zero wherever the constraints hold: the start would be the answer."""
    start = torch.zeros((1,) * batch + (2,), dtype=F64)
    for sets in ({"constraints": constraints}, {"bounds": (-9.0, 9.0)}):
        with pytest.raises(RuntimeError, match=r"autograd sees no z.*z\.detach"):
            ik.argmin(lambda z: (z.detach() - 1).square().sum(-1), start, batch_dims=batch, **sets)


@pytest.mark.parametrize("centre", [0.0, 1.0, -1.0])
def test_a_start_that_is_the_least_point_hides_nothing(centre: float) -> None:
    """The slope there is zero to the last digit, and the objective changes with its point all the same."""
    start = torch.full((2,), centre, dtype=F64)
    s = ik.argmin(lambda z: (z - centre).square().sum(), start, constraints=[ik.Inequality(lambda z: -z - 3)])
    torch.testing.assert_close(s.value, start, rtol=0, atol=1e-9)
    flat = ik.argmin(lambda z: torch.relu(z.abs() - 2).sum(), start, constraints=[ik.Inequality(lambda z: -z - 3)])
    assert bool(flat.converged)


@pytest.mark.parametrize("centre", [0.0, 3.0])
def test_a_narrow_well_in_a_plain_hides_nothing(centre: float) -> None:
    """A quarter of the way to anywhere the slope has underflowed, and nearer by there is one."""
    all_sets = {"bounds": (-9.0, 9.0)}, {"constraints": [_ABOVE]}, {"project": ik.project.l2_ball(20.0)}
    for sets in all_sets:
        for width in (1e-2, 1e-4):
            start = centre + torch.tensor([0.1 * width, 0.0], dtype=F64)
            s = ik.argmin(lambda z, width=width: -torch.exp(-((z - centre) / width).square().sum()), start, **sets)
            assert float((s.value - centre).abs().max()) <= 1e-3 * width


def test_most_steps_of_a_small_program_are_one_active_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problem 71 of Hock & Schittkowski: its multipliers say what is active, and nothing is solved from inside."""
    from implicitkit.solver.qp import interior_point as ip

    inside: list[int] = []
    iterate = ip._iterate
    monkeypatch.setattr(ip, "_iterate", lambda *a: inside.append(1) or iterate(*a))  # type: ignore[func-returns-value]
    x0, p = torch.tensor([1.0, 5.0, 5.0, 1.0], dtype=torch.float64), torch.ones((), dtype=torch.float64)
    solution = ik.argmin(
        lambda x, p: p * x[0] * x[3] * (x[0] + x[1] + x[2]) + x[2],
        x0,
        (p,),
        constraints=[ik.Inequality(lambda x, p: 25 - x.prod()), ik.Equality(lambda x, p: x.square().sum() - 40)],
        bounds=(1.0, 5.0),
    )
    wanted = torch.tensor([1.0, 4.74299963, 3.82114998, 1.37940829], dtype=torch.float64)
    torch.testing.assert_close(solution.value, wanted, rtol=1e-7, atol=0)
    assert len(inside) <= 1 < int(solution.steps)
