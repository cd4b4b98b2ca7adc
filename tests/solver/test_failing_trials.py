"""Functions that raise outside their domain, as ``torch.linalg`` does, where others return NaN: a trial point is no end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.failing_matrices import failing_as_nan
from implicitkit.lifting.fewer_rows import _near
from implicitkit.solver.claims_that_wait import Point
from implicitkit.solver.coming_back import come_back
from implicitkit.solver.evaluating.failing_trials import Outside
from implicitkit.solver.steps.spectral_trust_region import SpectralStep

D = torch.float64
DATA = torch.tensor([[2.0, 0.8, 0.3], [0.8, 1.5, -0.4], [0.3, -0.4, 1.0]], dtype=D)
ROWS, COLUMNS = torch.tril_indices(3, 3, device="cpu")


def symmetric(z):
    """The matrix of six numbers."""
    lower = z.new_zeros(*z.shape[:-1], 3, 3)
    lower[..., ROWS, COLUMNS] = z
    return lower + lower.mT - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1))


def precision(z, s):
    """``tr(S X) - log det X``, with its minimum at ``X = S^{-1}``: of positive definite matrices."""
    X = symmetric(z)
    logdet = 2 * torch.linalg.cholesky(X).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return (s[..., None, None] * DATA * X).sum((-2, -1)) - logdet


def closed_form(s):
    return torch.linalg.inv(s[..., None, None] * DATA)[..., ROWS, COLUMNS]


def start(*batch, size=0.05):
    return symmetric_start(size).expand(*batch, 6).clone()


def symmetric_start(size):
    return (size * torch.eye(3, dtype=D))[ROWS, COLUMNS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ["auto", "bfgs", "lbfgs", "newton_cg", "nonlinear_cg"])
@pytest.mark.parametrize("size", [0.05, 1.0, 3.0])
def test_covariance_by_cholesky(solver, size):
    s = torch.tensor(1.3, dtype=D)
    solve = lambda s: ik.argmin(precision, start(size=size), (s,), solver=solver, max_steps=500).value  # noqa: E731
    torch.testing.assert_close(solve(s), closed_form(s), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(torch.func.jacrev(solve)(s), torch.func.jacrev(closed_form)(s), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_dims", [None, 0])
def test_one_sample_fails_by_itself(in_dims):
    """In a batch the whole call raises, of whichever sample it is."""
    s = torch.tensor([0.2, 1.3, 40.0], dtype=D)
    found = ik.argmin(precision, start(3, size=1.0), (s,), batch_dims=1, in_dims=in_dims).value
    torch.testing.assert_close(found, closed_form(s), rtol=1e-7, atol=1e-9)
    mapped = torch.vmap(lambda s: ik.argmin(precision, start(size=1.0), (s,)).value)(s)
    torch.testing.assert_close(mapped, closed_form(s), rtol=1e-7, atol=1e-9)


def test_a_covariance_of_given_trace():
    """With the trace given: ``X = (S + y I)^{-1}``, ``y`` such that it has that trace."""
    trace = lambda z, s: z[..., [0, 2, 5]].sum(-1) - 3.0  # noqa: E731
    s = torch.tensor(1.3, dtype=D)
    solution = ik.argmin(precision, start(size=3.0), (s,), constraints=[ik.Equality(trace)])
    multiplier = solution.multipliers[0]
    wanted = torch.linalg.inv(s * DATA + multiplier * torch.eye(3, dtype=D))[ROWS, COLUMNS]
    torch.testing.assert_close(solution.value, wanted, rtol=1e-7, atol=1e-7)


def test_a_root_whose_first_step_leaves_the_definite_matrices():
    """``inv(X) = S`` from where Newton's first step leaves the definite matrices."""

    def residual(z, s):
        return (torch.cholesky_inverse(torch.linalg.cholesky(symmetric(z))) - s * DATA)[ROWS, COLUMNS]

    s = torch.tensor(1.3, dtype=D)
    found = ik.root(residual, start(size=3.0), (s,)).value
    torch.testing.assert_close(found, closed_form(s), rtol=1e-7, atol=1e-7)


def test_at_the_start_the_error_is_the_users():
    with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
        ik.argmin(precision, start(size=-1.0), (torch.tensor(1.0, dtype=D),))


def test_which_samples_fail():
    """Exactly these, whichever they are, in ``2 log2(n)`` evaluations for one; values of the others are their own."""
    calls = 0

    def kernel(z):
        nonlocal calls
        calls += 1
        return torch.linalg.cholesky(z.reshape(-1, 1, 1)).reshape(-1, 1)

    good = torch.full((32, 1), 4.0, dtype=D)
    for bad in ((), (0,), (31,), (7,), (3, 4, 30), tuple(range(32))):
        outside = Outside()
        torch.testing.assert_close(outside.evaluate(kernel, good), good.sqrt())
        z = good.index_fill(0, torch.tensor(bad, dtype=torch.int64, device="cpu"), -1.0)
        calls = 0
        out = outside.evaluate(kernel, z)
        assert out.isnan().flatten().nonzero().flatten().tolist() == list(bad), bad
        assert bool((out[z > 0] == 2).all()), bad
        assert len(bad) != 1 or calls <= 13, (bad, calls)
        small = outside.select(torch.tensor([5, 6], device="cpu"))
        assert small.evaluate(kernel, z[:2] * 0 - 1).isnan().all()
    with pytest.raises(torch.linalg.LinAlgError):
        Outside().evaluate(kernel, -good)


class _LinAlgError(ValueError):
    """NumPy's is one, too."""


_LinAlgError.__name__ = "LinAlgError"


@pytest.mark.parametrize(
    ("error", "outside"),
    [
        (ZeroDivisionError("division by zero"), True),
        (OverflowError("math range error"), True),
        (FloatingPointError("overflow encountered in exp"), True),
        (ValueError("math domain error"), True),
        (_LinAlgError("Matrix is not positive definite"), True),
        (ValueError("expected 3 columns"), False),
        (ZeroDivisionError("no rows left"), False),
        (KeyError("weight"), False),
        (RuntimeError("shapes differ"), False),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else str(x),
)
def test_errors_that_mean_no_value_here(error: Exception, outside: bool) -> None:
    """A step of Newton's method from 3 leads below zero."""

    def f(z: torch.Tensor) -> torch.Tensor:
        if bool((z <= 0).any()):
            raise error
        return z.log() + 2

    start = torch.tensor([3.0], dtype=torch.float64)
    if outside:
        assert ik.root(f, start).value.item() == pytest.approx(torch.tensor(-2.0, dtype=torch.float64).exp().item())
        with pytest.raises(type(error)):
            ik.root(f, -start)
    else:
        with pytest.raises(type(error)):
            ik.root(f, start)


# ---------------------------------------------------------------------------------------------------------------------
# A solve inside the function that has no solution at some trial point: that is no place to be, and no reason to stop.
F64 = torch.float64


def root_of(x: Tensor, **options: int) -> Tensor:
    """``u^2 = x``, of which a negative ``x`` has none."""
    return ik.root(lambda u, x: u**2 - x, torch.ones_like(x), (x,), solver="newton", max_steps=20, **options).value


def test_a_line_search_comes_back() -> None:
    """``min (u - 0.1)^2`` over ``x`` with ``u^2 = x``: the first steps lead to negative ``x``."""
    found = ik.argmin(lambda x: 100 * (root_of(x) - 0.1).square().sum(), torch.tensor([0.5, 2.0], dtype=F64))
    torch.testing.assert_close(found.value, torch.full((2,), 0.01, dtype=F64), rtol=1e-5, atol=0)


def test_newton_comes_back_and_the_derivative_is_right() -> None:
    c = torch.tensor([0.3], dtype=F64, requires_grad=True)
    found = ik.root(lambda x, c: torch.atan(20 * (root_of(x) - c)), torch.tensor([0.7], dtype=F64), (c,)).value
    torch.testing.assert_close(found, c.detach() ** 2, rtol=1e-8, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), c)[0], 2 * c.detach(), rtol=1e-6, atol=0)


def test_each_sample_by_itself() -> None:
    """Beside one that leads there, the others are solved as they are alone."""
    c = torch.tensor([[0.3], [0.6], [0.31]], dtype=F64)
    found = ik.root(
        lambda x, c: torch.atan(20 * (root_of(x, batch_dims=1) - c)),
        torch.tensor([[0.7], [0.4], [0.09]], dtype=F64),
        (c,),
        batch_dims=1,
    )
    torch.testing.assert_close(found.value, c**2, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_a_look_far_out_keeps_its_failure_to_itself() -> None:
    """A penalty of ``e^l``, best at infinity: asked whether it falls forever, the objective is tried at 1e12."""
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(20, 3, generator=g, dtype=F64), torch.randn(20, generator=g, dtype=F64)

    def outer(log: Tensor) -> Tensor:
        ridge = lambda w, log: (X @ w - y).square().mean() + log.exp() * w.square().sum()  # noqa: E731
        return ik.argmin(ridge, torch.zeros(3, dtype=F64), (log,), solver="newton").value.square().sum()

    with pytest.raises(ik.ConvergenceError, match="diverged"):
        ik.argmin(outer, torch.tensor(-1.0, dtype=F64))


def test_where_nothing_else_is_left_it_is_said() -> None:
    with pytest.raises(ik.ConvergenceError, match="a solve inside the function failed where it was tried"):
        ik.fixed_point(lambda x: root_of(x) - 0.5, torch.tensor([0.3], dtype=F64), solver="picard")


def test_at_the_start_the_error_is_its_own() -> None:
    with pytest.raises(ik.ConvergenceError) as caught:
        ik.root(lambda x: root_of(x) - 0.1, torch.tensor([-1.0], dtype=F64))
    assert "inside the function" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# One sample of a batch whose matrix has no factors, where ``torch.linalg`` raises for the whole batch.
T = torch.tensor([0.3, 5.0, 0.7], dtype=D)
KEEP = [0, 2]
ONE = torch.eye(2, dtype=D)


def _symmetric(t: Tensor) -> Tensor:
    """Definite where ``|t| < sqrt(2)``."""
    one = torch.ones_like(t)
    return torch.stack([torch.stack([2 * one, t], -1), torch.stack([t, one], -1)], -2)


def _singular(t: Tensor) -> Tensor:
    """Zero where ``t > 1``."""
    return _symmetric(t) * (t < 1)[..., None, None]


def _times(A: Tensor, z: Tensor) -> Tensor:
    return (A @ z.unsqueeze(-1)).squeeze(-1)


_MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cholesky": lambda z, t: _times(torch.linalg.cholesky(_symmetric(t)), z),
    "solve a vector": lambda z, t: torch.linalg.solve(_singular(t), z),
    "solve a matrix": lambda z, t: torch.linalg.solve(_singular(t), z.unsqueeze(-1)).squeeze(-1),
    "inv": lambda z, t: _times(torch.linalg.inv(_singular(t)), z),
    "inverse": lambda z, t: _times(_singular(t).inverse(), z),
    "svd": lambda z, t: _times(torch.linalg.svd(_symmetric(t / (t < 1))).Vh.abs(), z),
    "distribution": lambda z, t: _times(
        torch.distributions.MultivariateNormal(
            torch.zeros(2, dtype=D), _symmetric(t) + 0 * ONE, validate_args=False
        ).scale_tril,
        z,
    ),
}


def _batched(name: str, t: Tensor, **o: Any) -> Tensor:
    f = lambda z, t: 0.1 * torch.tanh(_MAPS[name](z, t)) + 0.2  # noqa: E731
    return ik.fixed_point(f, torch.zeros(len(t), 2, dtype=D), (t,), batch_dims=1, **o).value


def _dropped(name: str, t: Tensor, **o: Any) -> Tensor:
    return _batched(name, t, in_dims=0, **o)


def _mapped(name: str, t: Tensor, **o: Any) -> Tensor:
    f = lambda z, t: 0.1 * torch.tanh(_MAPS[name](z, t)) + 0.2  # noqa: E731
    return torch.vmap(lambda t: ik.fixed_point(f, torch.zeros(2, dtype=D), (t,), **o).value)(t)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solve", [_batched, _dropped, _mapped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", _MAPS)
def test_the_others_are_as_they_are_alone(name: str, solve: Callable[..., Tensor]) -> None:
    """Values, and the derivative by what all share."""
    for policy in ("ignore", "nan"):
        found, wanted = (
            torch.func.jacrev(lambda s, t=t: (v := solve(name, s * t, on_failure=policy), v), has_aux=True)(  # noqa: B023
                torch.ones((), dtype=D)
            )
            for t in (T, T[KEEP])
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[KEEP], theirs, rtol=1e-8, atol=1e-9)
        assert bool(found[1][1].isnan().all()) == (policy == "nan")


@pytest.mark.parametrize("solve", [_batched, _dropped, _mapped], ids=lambda f: f.__name__)
def test_the_message_says_which_sample_and_why(solve: Callable[..., Tensor]) -> None:
    with pytest.raises(ik.ConvergenceError, match=r"1 of 3 samples.*sample 1.*linalg\.cholesky.*positive-definite"):
        solve("cholesky", T)


def test_where_none_has_factors_the_error_is_the_users() -> None:
    for t in (T[1:2], T[[1, 1]]):
        for solve in (_batched, _mapped):
            with pytest.raises(torch.linalg.LinAlgError):
                solve("cholesky", t, on_failure="ignore")


def test_other_errors_are_raised() -> None:
    with pytest.raises(RuntimeError, match="must be batches of square matrices"):
        ik.fixed_point(lambda z: torch.linalg.inv(z.unsqueeze(-1))[..., 0], torch.zeros(3, 2, dtype=D), batch_dims=1)


@pytest.mark.parametrize("name", ["svd", "pinv", "inv", "cholesky", "eigh"])
def test_of_a_vector_the_error_is_torchs(name: str) -> None:
    f = lambda z: z - getattr(torch.linalg, name)(torch.ones(3, dtype=z.dtype))[0]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"at least 2 dimensions|2 or more dimensions"):
        ik.root(f, torch.ones(2, 3, dtype=torch.float64), batch_dims=1)


def test_a_matrix_that_fails_at_a_trial_point_costs_no_evaluation() -> None:
    """Where the matrix fails at a trial point only, and at no cost in evaluations for finding which."""
    f = lambda z, t: torch.linalg.cholesky((z**3 + z - t)[..., None] + 2).squeeze(-1) - 2**0.5  # noqa: E731
    t = torch.tensor([[0.5], [30.0], [-0.4]], dtype=D)
    found = ik.root(f, torch.full((3, 1), 4.0, dtype=D), (t,), batch_dims=1)
    torch.testing.assert_close(found.value**3 + found.value, t, rtol=1e-8, atol=1e-9)


def test_a_function_that_takes_its_state_to_pieces_is_given_another_after_a_failure() -> None:
    def f(z: dict[str, Tensor], b: Tensor) -> dict[str, Tensor]:
        h = z.pop("h")
        lost = (h > 0.6).all(1) & (torch.arange(2) == 1)
        A = torch.where(lost.view(-1, 1, 1), 0.0, torch.eye(2, dtype=D))
        return {"h": 0.5 * h + 0.5 * torch.linalg.solve(A, b)}

    one, options = torch.ones(2, 2, dtype=D), {"batch_dims": 1, "solver": "picard"}
    solution = ik.fixed_point(f, {"h": torch.zeros_like(one)}, (one,), on_failure="ignore", **options)
    assert solution.status.tolist() == [int(ik.Status.CONVERGED), int(ik.Status.NONFINITE)]


def test_a_matrix_that_fails_has_derivative_zero() -> None:
    A = _singular(T).requires_grad_()
    with failing_as_nan():
        out = torch.linalg.inv(A)
    (slope,) = torch.autograd.grad(out.nan_to_num().sum(), A)
    assert bool(out[1].isnan().all()) and bool((slope[1] == 0).all()) and bool((slope[KEEP] != 0).all())


def test_what_is_said_beside() -> None:
    f = lambda z, t: (0.1 * torch.tanh(_MAPS["cholesky"](z, t)) + 0.2, torch.linalg.cholesky(_symmetric(t)))  # noqa: E731
    found = ik.fixed_point(f, torch.zeros(3, 2, dtype=D), (T,), batch_dims=1, has_aux=True, on_failure="ignore")
    assert found.aux.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_objectives_and_constraints() -> None:
    """``min tr(X) - log det(A(t) X)``-like: the matrix is in the objective, and in a constraint that is evaluated first."""
    cost = lambda z, t: (z - torch.linalg.cholesky(_symmetric(t))[..., 1, 1:]).square().sum(-1)  # noqa: E731
    z0 = torch.zeros(3, 1, dtype=D)
    wanted = (1 - T[KEEP].square() / 2).sqrt()
    for more in ({}, {"bounds": (0.0, 2.0)}, {"constraints": [ik.Inequality(lambda z, t: z - 3)]}):
        found = ik.argmin(cost, z0, (T,), batch_dims=1, on_failure="ignore", **more)
        torch.testing.assert_close(found.value[KEEP, 0], wanted, rtol=1e-6, atol=1e-6)
    at_most = ik.Inequality(lambda z, t: z - torch.linalg.cholesky(_symmetric(t))[..., 1, 1:])
    found = ik.argmin(
        lambda z, t: -z.sum(-1), z0, (T,), batch_dims=1, constraints=[at_most], on_failure="ignore", max_steps=50
    )
    torch.testing.assert_close(found.value[KEEP, 0], wanted, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Accelerated steps that lead out of the domain of the map, where the iteration itself never goes.
def growth(k, saved):
    """Capital a head in Solow's model of growth: a power, of which a negative number has none."""
    return (0.9 * k + saved * k**0.33) / 1.02


def steady(saved):
    return (saved / 0.12) ** (1 / 0.67)


MAPS = {
    "growth": (lambda z: growth(z, 0.25), 0.1, steady(0.25)),
    "growth from far": (lambda z: growth(z, 0.25), 1e-6, steady(0.25)),
    "root": (lambda z: 0.7 * z + 0.3 * torch.sqrt(z), 1e-3, 1.0),
    "logarithm": (lambda z: z * (1 - 0.1 * torch.log(z)), 0.01, 1.0),
}


@pytest.mark.parametrize(
    "name, solver",
    [*((name, "auto") for name in MAPS), *(("growth", s) for s in ("anderson", "aitken", "broyden", "relay"))],
)
@pytest.mark.parametrize("n", [1, 5])
def test_an_iteration_that_leaves_its_domain_comes_back(name, n, solver):
    step, start, value = MAPS[name]
    found = ik.fixed_point(step, torch.full((n,), start, dtype=D), solver=solver)
    torch.testing.assert_close(found.value, torch.full((n,), value, dtype=D), rtol=1e-7, atol=0)


def test_each_sample_leaves_the_domain_by_itself():
    """Beside a sample without a solution in the domain, and one that needs no help."""
    saved = torch.tensor([[0.25], [torch.nan], [0.25]], dtype=D)
    start = torch.tensor([[0.1], [0.1], [3.0]], dtype=D)
    found = ik.fixed_point(growth, start, saved, batch_dims=1, solver="anderson", on_failure="ignore")
    assert found.converged.tolist() == [True, False, True]
    torch.testing.assert_close(found.value[::2], torch.full((2, 1), steady(0.25), dtype=D), rtol=1e-7, atol=0)
    alone = ik.fixed_point(growth, start[2:], saved[2:], batch_dims=1, solver="anderson")
    assert int(found.steps[2]) == int(alone.steps[0])  # nothing is done to it


@pytest.mark.parametrize("in_dims", [None, 0])
def test_in_the_first_step_after_samples_are_dropped(in_dims):
    """What is NaN there is no sign that the remaining samples have other values; derivatives by the closed form."""
    saved = torch.tensor([[0.25], [0.3], [0.2]], dtype=D, requires_grad=True)
    start = torch.tensor([[0.1], [3.0], [1e-6]], dtype=D)
    found = ik.fixed_point(growth, start, saved, batch_dims=1, in_dims=in_dims).value
    (slope,) = torch.autograd.grad(found.sum(), saved)
    torch.testing.assert_close(found, steady(saved), rtol=1e-7, atol=0)
    torch.testing.assert_close(slope, (steady(saved) / (0.67 * saved)).detach(), rtol=1e-7, atol=0)


def test_infinite_values_do_not_hide_others():
    """Values of some samples are those of the whole batch: as near as the largest finite one says."""
    inf, nan = torch.inf, torch.nan
    for one, other, same in (
        ([1.0, inf], [2.0, inf], False),
        ([1.0, nan], [2.0, nan], False),
        ([1.0, inf], [1.0, inf], True),
        ([1.0, nan], [1.0, nan], True),
        ([1.0, nan], [1.0, 1.0], False),
        ([inf, nan], [inf, nan], True),
    ):
        assert _near(torch.tensor(one), torch.tensor(other)) is same, (one, other)


def test_a_map_that_leaves_its_domain_is_said_to():
    """The iteration itself leads out: nothing is tried again and again."""
    with pytest.raises(ik.ConvergenceError, match="nonfinite") as caught:
        ik.fixed_point(lambda z: torch.sqrt(z) - 2, torch.ones(3, dtype=D), solver="anderson")
    assert caught.value.solution.evaluations < 10


def test_a_map_that_fails_beside_its_path_is_accelerated_all_the_same():
    """Accelerated all the same: the iteration alone takes 267 evaluations."""
    found = ik.fixed_point(lambda z: growth(z, 0.25), torch.tensor(0.1, dtype=D))
    assert found.evaluations < 60, found


@pytest.mark.parametrize("solver", ["auto", "newton_cg", "lbfgs", "bfgs", "gradient_descent"])
def test_a_minimisation_comes_back_from_where_its_slope_has_no_value(solver: str) -> None:
    """``|z - 2|^1.7``, of which Newton steps go beyond the minimum, where the value is lower and the gradient NaN from 2.3
    on, as where ``exp`` overflows in a derivative."""

    def objective(z: Tensor) -> Tensor:
        beyond = torch.where(z > 2.3, 0 * z, 0 * torch.sqrt(2.3 - z))
        return ((z - 2).abs() ** 1.7 + beyond).sum()

    found = ik.argmin(objective, torch.tensor([0.0, 0.3, -0.4], dtype=D), solver=solver).value
    torch.testing.assert_close(found, torch.full((3,), 2.0, dtype=D), rtol=0.0, atol=1e-3)


def test_a_model_without_second_derivatives_is_flat() -> None:
    """Of two samples one has a Hessian of NaN: its step is the steepest one, and the other's is its own."""
    H = torch.stack([torch.full((2, 2), torch.nan), torch.tensor([[1.0, 0.0], [0.0, -2.0]])]).to(D)
    g, radius = torch.tensor([[3.0, 4.0], [0.5, 0.25]], dtype=D), torch.tensor([0.5, 1.0], dtype=D)
    step = SpectralStep(SimpleNamespace(dense=lambda: H), g)
    p, promised, _ = step.within(radius, torch.tensor([False, False]))
    torch.testing.assert_close(p[0], torch.tensor([-0.3, -0.4], dtype=D), rtol=1e-2, atol=0.0)
    torch.testing.assert_close(promised[0], torch.tensor(2.5, dtype=D), rtol=1e-2, atol=0.0)
    assert bool(torch.isfinite(p[1]).all()) and float(promised[1]) > 1.0


def test_a_step_into_a_kink_stays_there() -> None:
    """``sqrt(z^2)`` has a minimum where its gradient is NaN, and finite beside it; the other sample's is NaN beyond 3."""
    slope = lambda z: torch.where(z > 3, torch.nan, z / torch.sqrt(z * z))  # noqa: E731
    f: Any = SimpleNamespace(kind=SimpleNamespace(iteration=False), residual=slope)
    last = Point(torch.ones(2, 1, dtype=D), torch.ones(2, dtype=D), slope(torch.ones(2, 1, dtype=D)))
    z = come_back(f, last, torch.tensor([[0.0], [6.0]], dtype=D), torch.tensor([True, True]))
    torch.testing.assert_close(z, torch.tensor([[0.0], [2.25]], dtype=D), rtol=0.0, atol=0.0)
