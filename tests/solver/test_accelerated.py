"""Anderson acceleration around methods: fewer steps, the same solutions and derivatives."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.testing import check_solver

F64 = torch.float64
EIGENVALUES = torch.logspace(0, 3, 12, dtype=F64)


def _quadratic(z: Tensor, b: Tensor) -> Tensor:
    return (0.5 * EIGENVALUES * z**2 - b * z).sum(-1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(ik.Accelerated(ik.GradientDescent(step_size=0.05)), marks=pytest.mark.slow),
        ik.Accelerated("picard"),
        ik.Accelerated("levenberg_marquardt"),
    ],
    ids=["gradient descent", "picard", "levenberg_marquardt"],
)
def test_conformance(solver: Any) -> None:
    assert check_solver(solver).passed


def test_far_fewer_steps_than_the_plain_method() -> None:
    z0, b = torch.zeros(3, 12, dtype=F64), torch.arange(1.0, 37.0, dtype=F64).reshape(3, 12).requires_grad_()
    method = ik.GradientDescent(step_size=1e-3)
    fast = ik.argmin(_quadratic, z0, (b,), solver=ik.Accelerated(method, memory=12), batch_dims=1, rtol=1e-8)
    limit = 30 * int(fast.steps.max())
    plain = ik.argmin(
        _quadratic, z0, (b,), solver=method, batch_dims=1, rtol=1e-8, max_steps=limit, on_failure="ignore"
    )
    torch.testing.assert_close(fast.value, (b / EIGENVALUES).detach(), rtol=1e-5, atol=1e-5)
    assert not bool(plain.converged.any()) and int(plain.steps.min()) == limit
    (gradient,) = torch.autograd.grad(fast.value.sum(), b)
    torch.testing.assert_close(gradient, (1 / EIGENVALUES).expand(3, 12))


def test_it_is_anderson_where_the_method_is_the_plain_iteration() -> None:
    matrix = torch.linspace(-0.4, 0.5, 36, dtype=F64).reshape(6, 6)
    options: dict[str, Any] = {"batch_dims": 1, "max_steps": 4, "on_failure": "ignore"}
    x = torch.linspace(-1, 1, 12, dtype=F64).reshape(2, 6)
    ours, theirs = (
        ik.fixed_point(
            lambda z, x: torch.tanh(z @ matrix.mT + x), torch.zeros(2, 6, dtype=F64), (x,), solver=s, **options
        )
        for s in (ik.Accelerated("picard", memory=3), ik.Anderson(memory=3, period=1))
    )
    torch.testing.assert_close(ours.value, theirs.value, rtol=0, atol=1e-13)


def test_it_looks_like_what_it_is_made_of() -> None:
    solver = ik.Accelerated("bisection")
    assert (solver.solves, solver.max_size) == ("root", 1)
    assert "Bisection" in repr(solver)
    assert pickle.loads(pickle.dumps(solver)) == solver != ik.Accelerated("newton")


def test_a_subclass_says_what_it_does_itself() -> None:
    class Short(ik.Accelerated):
        default_max_steps = 7
        solves = property(lambda self: "root")

    short = Short("picard")
    assert (short.solves, short.default_max_steps, short.max_size) == ("root", 7, None)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ik.Accelerated("scipy.root.hybr"), TypeError, "scipy.root.hybr"),
        (lambda: ik.Accelerated("picard", memory=0), ValueError, "memory"),
        (lambda: ik.Accelerated("picart"), ik.UnknownNameError, "picard"),
    ],
)
def test_bad_options(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
