"""A derivative at a double root is infinite or undetermined, and the finite number that comes out is never silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit import ConvergenceWarning

SINGULAR: dict[str, Callable[[Tensor, Tensor], ik.Solution]] = {
    "z^2 = c": lambda one, c: ik.root(lambda z, c: z**2 - c, one, (c,)),
    "z^2 = c by Broyden": lambda one, c: ik.root(lambda z, c: z**2 - c, one, (c,), solver="broyden"),
    "z^2 = c by old factors": lambda one, c: ik.root(lambda z, c: z**2 - c, one, (c,), solver="chord", max_steps=5000),
    "z^2 = c in a trust region": lambda one, c: ik.root(lambda z, c: z**2 - c, one, (c,), solver="trust_region"),
    "(z - 1)^2 = c": lambda one, c: ik.root(lambda z, c: (z - 1) ** 2 - c, 3 * one, (c,)),
    "(z - 1)^2 = c in small units": lambda one, c: ik.root(lambda z, c: 1e-6 * ((z - 1) ** 2 - c), 3 * one, (c,)),
    "(z - 1)^3 = c": lambda one, c: ik.root(lambda z, c: (z - 1) ** 3 - c, 3 * one, (c,)),
    "z^3 = c": lambda one, c: ik.root(lambda z, c: z**3 - c, one, (c,)),
    "(z - 1)^4 = c": lambda one, c: ik.root(lambda z, c: (z - 1) ** 4 - c, 3 * one, (c,)),
    "map with slope one": lambda one, c: ik.fixed_point(lambda z, c: z - z**2 + c, 0.5 * one, (c,)),
    "least squares of z^2 = c": lambda one, c: ik.least_squares(lambda z, c: z**2 - c, one, (c,)),
    "one of three, in other units": lambda one, c: ik.root(
        lambda z, c: torch.cat([1e6 * (z[:1] - 2 - c), z[1:2] ** 2 - c, z[2:] - z[1:2] - 1]),
        torch.cat([one, one, one]),
        (c,),
    ),
}
REGULAR: dict[str, Callable[[Tensor, Tensor], ik.Solution]] = {
    "exponential": lambda one, c: ik.root(lambda z, c: torch.exp(z) - 2 - c, one, (c,)),
    "loose": lambda one, c: ik.root(lambda z, c: torch.exp(z) - 2 - c, one, (c,), rtol=1e-2, atol=1e-2),
    "solution at zero": lambda one, c: ik.root(lambda z, c: torch.sin(z) + z**3 - c, one, (c,)),
    "slow map, loose": lambda one, c: ik.fixed_point(
        lambda z, c: 0.98 * torch.tanh(z) + 0.01 + c, one, (c,), rtol=1e-1, solver="picard"
    ),
    "condition 1e10": lambda one, c: ik.root(
        lambda z, c: torch.stack([z[0] + z[1] - 2 - c[0], z[0] + (1 + 1e-10) * z[1] - 2 - 1e-10]),
        torch.cat([one, 0 * one]),
        (c,),
    ),
    "stiff": lambda one, c: ik.root(
        lambda z, c: torch.stack([1e8 * (z[0] - 1 - c[0]) + z[1] ** 2, z[1] - 1e-8]), torch.cat([one, one]), (c,)
    ),
}


def backward(solve: Callable[[Tensor, Tensor], ik.Solution], dtype: torch.dtype = torch.float64) -> Tensor:
    c = torch.zeros(1, dtype=dtype, requires_grad=True)
    return torch.autograd.grad(solve(torch.ones(1, dtype=dtype), c).value.sum(), c)[0]


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_derivative_at_a_multiple_root_is_never_silent(name: str, dtype: torch.dtype) -> None:
    with pytest.warns(ConvergenceWarning, match=r"singular at \|z\| = .* as far as the solution is known"):
        backward(SINGULAR[name], dtype)


@pytest.mark.parametrize("name", REGULAR)
def test_regular_solutions_are_not_suspected(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(torch.isfinite(backward(REGULAR[name])).all())


def test_flat_minima_are_said_too() -> None:
    def flat(one: Tensor, c: Tensor) -> ik.Solution:
        return ik.argmin(lambda z, c: ((z - 1) ** 4 - c * z).sum(), 3 * one, (c,), solver="gradient_descent")

    with pytest.warns(ConvergenceWarning, match="singular"):
        backward(flat)


def test_only_the_samples_in_question_are_named_in_every_mode() -> None:
    c = torch.tensor([[1.0], [0.0], [4.0]], dtype=torch.float64)

    def solve(c: Tensor) -> Tensor:
        return ik.root(lambda z, c: z**2 - c, torch.ones_like(c), (c,), batch_dims=1).value

    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.warns(ConvergenceWarning, match=r"in 1 of 3 samples \(sample 1: \|z\| = "):
            found = derivative(solve)(c)
        assert float(found[0, 0, 0, 0]) == pytest.approx(0.5) and float(found[2, 0, 2, 0]) == pytest.approx(0.25)


@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd], ids=["jacrev", "jacfwd"])
def test_one_of_many_unknowns_is_found_in_whatever_units_the_others_are(derivative: Callable[..., Any]) -> None:
    """Their derivatives are 1e6 times as large beside what they are of."""
    c, one = torch.zeros(40, dtype=torch.float64), torch.arange(40) == 17
    f = lambda z, c: torch.where(one, z**2, 1e-6 * (z - 1)) - c  # noqa: E731
    solve = lambda c: ik.root(f, torch.ones(40, dtype=torch.float64), (c,)).value  # noqa: E731
    with pytest.warns(ConvergenceWarning, match=r"singular at \|z\| = .* as far as the solution is known"):
        derivative(solve)(c)


def test_a_derivative_that_does_not_meet_the_singular_part_is_not_suspected() -> None:
    def two(one: Tensor, c: Tensor) -> ik.Solution:
        return ik.root(lambda z, c: torch.stack([z[0] - c[0], z[1] ** 2]), torch.cat([one, one]), (c,))

    c = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = two(torch.ones(1, dtype=torch.float64), c).value
        assert float(torch.autograd.grad(z[0], c)[0]) == 1.0


def test_who_ignores_failures_is_not_told() -> None:
    def ignore(one: Tensor, c: Tensor) -> Any:
        return ik.root(lambda z, c: z**2 - c, one, (c,), on_failure="ignore")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(backward(ignore)) > 1e4


@pytest.mark.parametrize(
    ("smallest", "rotated", "singular"), [(5e-16, True, True), (1e-13, True, False), (1e-30, False, False)]
)
def test_a_matrix_that_is_regular_by_rounding_alone_is_singular(smallest: float, rotated: bool, singular: bool) -> None:
    """``Q diag(1, ..., s) P z = x``: factors exist at s = 5e-16; in other units of one unknown nothing is lost."""
    generator = torch.Generator().manual_seed(0)
    Q, P = (torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    if not rotated:
        Q = P = torch.eye(6, dtype=torch.float64)
    A = Q @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, smallest], dtype=torch.float64)) @ P
    ones = torch.ones(6, dtype=torch.float64)
    x = (A @ ones).requires_grad_()
    z = ik.root(lambda z, x: A @ z - x, ones, (x,), rule=ik.Implicit(linear_solver="lu")).value
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.autograd.grad(z[0] + z[5], x)
    assert [str(w.message).partition(" at ")[0] for w in told] == [
        "the Jacobian of the equations is singular"
    ] * singular


UNITS = [(0, 0), (12, 0), (0, 12), (8, 8), (12, 12)]  # powers of ten between the least and a middle one


@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd], ids=["jacrev", "jacfwd"])
@pytest.mark.parametrize(("equations", "unknowns"), UNITS)
def test_units_alone_make_no_matrix_singular(derivative: Callable[..., Any], equations: int, unknowns: int) -> None:
    B, rows, columns = _scaled(equations, unknowns)
    B += 2 * torch.eye(6)
    A = rows[:, None] * B * columns
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        J = derivative(lambda x: ik.root(lambda z, x: A @ z - x, 1 / columns, (x,)).value)(A @ (1 / columns))
    torch.testing.assert_close(columns[:, None] * J * rows, torch.linalg.inv(B), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd], ids=["jacrev", "jacfwd"])
@pytest.mark.parametrize(("equations", "unknowns"), UNITS)
def test_units_hide_no_singular_matrix(derivative: Callable[..., Any], equations: int, unknowns: int) -> None:
    B, rows, columns = _scaled(equations, unknowns)
    Q, _, P = torch.linalg.svd(B)
    A = rows[:, None] * (Q * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 3e-16])) @ P * columns
    how: dict[str, Any] = {"rule": ik.Implicit(linear_solver="lu"), "on_failure": "warn"}
    with pytest.warns(ConvergenceWarning, match="singular"):
        derivative(lambda x: ik.root(lambda z, x: A @ z - x, 1 / columns, (x,), **how).value)(A @ (1 / columns))


def _scaled(equations: int, unknowns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, and units of its rows, in some order, and columns."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(6, generator=generator)
    units = [10 ** (power * torch.linspace(-1, 1, 6, dtype=torch.float64)) for power in (equations, unknowns)]
    return torch.randn(6, 6, dtype=torch.float64, generator=generator), units[0][order], units[1]


@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd], ids=["jacrev", "jacfwd"])
def test_one_double_root_among_many_unknowns_is_said(derivative: Callable[..., Any]) -> None:
    power = torch.where(torch.arange(40) == 23, 2.0, 1.0).double()
    z0 = torch.full((40,), 1.5, dtype=torch.float64)
    solve = lambda c: ik.root(lambda z, c: (z - 1) ** power - c, z0, (c,)).value  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="singular"):
        derivative(solve)(torch.zeros(40, dtype=torch.float64))


def test_many_derivatives_of_an_ill_conditioned_system_are_cleared_by_a_few_weights() -> None:
    """Of 160 right-hand sides with ``|x| / |b|`` of 1e8 none is suspected by four random weights: nothing is solved again
    for single ones, no matrix is factored for the check, and what that solves is not refined."""
    n, generator = 160, torch.Generator().manual_seed(0)
    Q, P = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    A, one = Q @ torch.diag(torch.logspace(0, -8, n, dtype=torch.float64)) @ P, torch.ones(n, dtype=torch.float64)
    solve = lambda x: ik.root(lambda z, x: A @ (z - x) + 1e-9 * z**3, 0 * one, (x,)).value  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        solve(one)
        with Solves(n) as forward:
            solve(one)
        with Solves(n) as whole:
            torch.func.jacrev(solve)(one)
        with Solves(n) as single:
            torch.func.grad(lambda x: solve(x).square().sum())(one)
    assert (whole.factored - forward.factored, whole.columns - forward.columns) == (1, n + 1 + 4)
    assert single.factored == forward.factored
    assert single.columns - forward.columns <= 11 + 2  # what clears it is not refined


class Solves(TorchDispatchMode):
    """Factorisations of matrices of ``n`` rows, and right-hand sides that are solved with their factors."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.factored, self.columns = n, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.factored += name == "linalg_lu_factor_ex" and args[0].shape[-1] == self.n
        self.columns += args[2].shape[-1] if name == "linalg_lu_solve" and args[0].shape[-1] == self.n else 0
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_jacobian_that_is_nan_is_no_singular_one(policy: str) -> None:
    """Eigenvectors of equal eigenvalues have no derivative in torch; what is said is that, not to try other solvers."""
    equal = torch.diag(torch.tensor([1.0, 1.0, 2.0]))

    def density(z: Tensor, c: Tensor) -> Tensor:
        return c * torch.linalg.eigh(equal + 0 * torch.diag(z))[1][0] ** 2

    def derivative() -> Tensor:
        c = torch.ones(1, requires_grad=True)
        found = ik.fixed_point(density, torch.zeros(3), (c,), solver="picard", on_failure=policy)
        return torch.autograd.grad(found.value.sum(), c)[0]

    said = pytest.raises(ik.ConvergenceError) if policy == "raise" else pytest.warns(ConvergenceWarning)
    with said as caught:
        derivative()
    text = str(caught.value if policy == "raise" else caught[0].message)
    assert "Jacobian itself has NaN" in text
    assert "lsmr" not in text and "stagnated" not in text
