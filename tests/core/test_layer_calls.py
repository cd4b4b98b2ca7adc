"""``@ik.implicit``: arguments by name, and what a solver says beside its solution."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vmap

import implicitkit as ik

F64 = torch.float64
A, B = torch.tensor([2.0, 3.0], dtype=F64), torch.tensor([5.0, 7.0], dtype=F64)
ONES = torch.ones(2, dtype=F64)


@ik.implicit(ik.Root(lambda z, a, b: z**2 - a * b**3))
def power(z0: Tensor, a: Tensor, b: Any = 2.0, *, passes: int = 1) -> Tensor:
    """``sqrt(a b^3)``, which tells ``a`` from ``b``."""
    return (a * b**3).sqrt() + 0 * (passes - 1)


CALLS = {
    "by position": lambda a, b: power(ONES, a, b),
    "the last by name": lambda a, b: power(ONES, a, b=b),
    "all by name, in another order": lambda a, b: power(b=b, z0=ONES, a=a),
    "with an option of the solver": lambda a, b: power(ONES, b=b, a=a, passes=3),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_name(name: str) -> None:
    call = CALLS[name]
    torch.testing.assert_close(call(A, B), (A * B**3).sqrt())
    expected = torch.diag(0.5 * (B**3 / A).sqrt()), torch.diag(1.5 * (A * B).sqrt())
    for jacobian in (jacrev, jacfwd):
        torch.testing.assert_close(jacobian(call, (0, 1))(A, B), expected)
    rows = torch.stack([A, 2 * A, 3 * A])
    torch.testing.assert_close(vmap(lambda a: call(a, B))(rows), (rows * B**3).sqrt())


def test_a_default_in_between_reaches_the_problem() -> None:
    @ik.implicit(ik.Root(lambda z, a, b, c: z**2 - a * b**3 * c))
    def power(z0: Tensor, a: Tensor, b: float = 2.0, c: Any = 1.0) -> Tensor:
        return (a * b**3 * c).sqrt()

    torch.testing.assert_close(power(ONES, A, c=B), (8 * A * B).sqrt())


def test_a_solver_that_takes_anything_follows_the_problem() -> None:
    @ik.implicit(ik.Root(lambda z, a, b: z**2 - a * b**3))
    def power(z0: Tensor, **given: Tensor) -> Tensor:
        return (given["a"] * given["b"] ** 3).sqrt()

    torch.testing.assert_close(power(ONES, b=B, a=A), (A * B**3).sqrt())
    torch.testing.assert_close(jacrev(lambda b: power(ONES, b=b, a=A))(B), torch.diag(1.5 * (A * B).sqrt()))
    with pytest.raises(TypeError, match="called with c by name, where the problem's function takes a, b"):
        power(ONES, c=B)


REFUSED = {
    "an unknown name": (
        lambda: power(ONES, A, d=B),
        r"power: got an unexpected keyword argument 'd'; its signature is",
    ),
    "nothing": (lambda: power(), r"missing a required argument: 'z0'"),
    "a tensor as an option": (
        lambda: power(ONES, A, passes=B),
        r"keyword-only parameter 'passes'.*derivative would be lost",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_do_not_fit(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        call()


# --------------------------------------------------------------------------------------------------- what the solver says
@ik.implicit(ik.Root(lambda z, a: z**2 - a), has_aux=True)
def counted(z0: Tensor, a: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return a.sqrt(), {"steps": 3, "start": a - 1, "word": "done", "array": np.arange(2.0)}


def test_what_a_solver_says_is_passed_on() -> None:
    z, info = counted(ONES, A.clone().requires_grad_())
    assert info["steps"] == 3 and info["word"] == "done" and not info["start"].requires_grad
    torch.testing.assert_close(z.detach(), A.sqrt())
    assert counted.solve(ONES, A).aux["word"] == "done"


def test_what_a_solver_says_has_derivative_zero() -> None:
    both = lambda a: (counted(ONES, a)[0], counted(ONES, a)[1]["start"])  # noqa: E731
    for jacobian in (jacrev, jacfwd):
        dz, dinfo = jacobian(both)(A)
        torch.testing.assert_close(dz, torch.diag(0.5 / A.sqrt()))
        assert torch.equal(dinfo, torch.zeros(2, 2, dtype=F64))
    second = hessian(lambda a: both(a)[0].sum() + both(a)[1].sum())(A)
    torch.testing.assert_close(second, torch.diag(-0.25 * A**-1.5))


def test_under_vmap_what_is_said_has_the_batch_in_front() -> None:
    rows = torch.rand(4, 3, 2, dtype=F64) + 1

    def one(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, info = counted(ONES, a)
        return info["steps"], info["start"], info["array"]

    steps, start, array = vmap(vmap(one))(rows)
    assert steps.shape == (4, 3) and array.shape == (4, 3, 2)
    assert torch.equal(start, rows - 1)
    assert torch.equal(vmap(vmap(one), in_dims=1, out_dims=1)(rows)[1], rows - 1)
    _, info = vmap(lambda a: (counted.solve(ONES, a).value, counted.solve(ONES, a).steps))(rows[0])
    assert info.shape == (3,)


def test_words_of_several_calls_are_a_list() -> None:
    heard = []

    def one(a: Tensor) -> Tensor:
        z, info = counted(ONES, a)
        heard.append(info["word"])
        return z

    vmap(one)(torch.ones(3, 2, dtype=F64))
    assert heard == [["done"] * 3]


def test_a_pair_is_a_pair() -> None:
    lone = ik.implicit(ik.Root(lambda z, a: z**2 - a), has_aux=True)(lambda z0, a: a.sqrt())
    with pytest.raises(TypeError, match=r"must return a pair \(z, info\); it returned Tensor"):
        lone(ONES, A)
    with pytest.raises(ValueError, match=re.escape("solution.aux can be one of them only")):
        ik.implicit(ik.Root(lambda z, a: (z**2 - a, z), has_aux=True), has_aux=True)


MISTAKES: dict[str, Any] = {
    "a missing key": (KeyError, lambda z0, a: {}["weights"]),
    "a missing name": (NameError, lambda z0, a: not_defined),  # noqa: F821
    "a missing attribute": (AttributeError, lambda z0, a: z0.nothing),
    "a wrong type": (TypeError, lambda z0, a: len(3)),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("on_failure", ["raise", "warn", "nan"])
def test_a_mistake_in_the_solver_surfaces(name: str, on_failure: str) -> None:
    error, solver = MISTAKES[name]
    with pytest.raises(error):
        ik.implicit(ik.Root(lambda z, a: z**2 - a), on_failure=on_failure)(solver)(ONES, A)


@pytest.mark.parametrize("error", [ArithmeticError, IndexError, ValueError, RuntimeError])
def test_what_a_solver_could_not_find_is_a_failure_to_converge(error: type[Exception]) -> None:
    def solver(z0: Tensor, a: Tensor) -> Tensor:
        raise error("overflow on the way")

    with pytest.raises(ik.ConvergenceError, match="overflow on the way"):
        ik.implicit(ik.Root(lambda z, a: z**2 - a))(solver)(ONES, A)


def test_a_black_box_with_a_mistake_surfaces() -> None:
    def find(f: Any, z0: Tensor, **_: Any) -> Any:
        return {}["weights"]

    with pytest.raises(KeyError, match="weights"):
        ik.root(lambda z: z**2 - 2, torch.ones(2), solver=ik.extend.BlackBox(find))


def test_a_result_in_place_of_its_point_is_named() -> None:
    @ik.implicit(ik.Root(lambda z, a: z**2 - a))
    def solver(z0: Tensor, a: Tensor) -> Any:
        return scipy.optimize.root(lambda z: z**2 - a.numpy(), z0.numpy())

    with pytest.raises(
        TypeError, match=r"solver returned an OptimizeResult: a solver returns the point itself, its \.x"
    ):
        solver(ONES, A)
