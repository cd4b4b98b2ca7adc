"""One sample of a batch whose matrix has no factors, where ``torch.linalg`` raises for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.failing_matrices import failing_as_nan

D = torch.float64
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


def test_on_the_way() -> None:
    """Where the matrix fails at a trial point only, and at no cost in evaluations for finding which."""
    f = lambda z, t: torch.linalg.cholesky((z**3 + z - t)[..., None] + 2).squeeze(-1) - 2**0.5  # noqa: E731
    t = torch.tensor([[0.5], [30.0], [-0.4]], dtype=D)
    found = ik.root(f, torch.full((3, 1), 4.0, dtype=D), (t,), batch_dims=1)
    torch.testing.assert_close(found.value**3 + found.value, t, rtol=1e-8, atol=1e-9)


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
