"""Functions that raise outside their domain, as ``torch.linalg`` does, where others return NaN: a trial point is no end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.outside import Outside

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


def test_constrained():
    """With the trace given: ``X = (S + y I)^{-1}``, ``y`` such that it has that trace."""
    trace = lambda z, s: z[..., [0, 2, 5]].sum(-1) - 3.0  # noqa: E731
    s = torch.tensor(1.3, dtype=D)
    solution = ik.argmin(precision, start(size=3.0), (s,), constraints=[ik.Equality(trace)])
    multiplier = solution.multipliers[0]
    wanted = torch.linalg.inv(s * DATA + multiplier * torch.eye(3, dtype=D))[ROWS, COLUMNS]
    torch.testing.assert_close(solution.value, wanted, rtol=1e-7, atol=1e-7)


def test_roots():
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
