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


# ---------------------------------------------------------------------------------------------------------------------
# ``@ik.implicit`` of a constrained minimisation: the solver knows nothing of multipliers, which follow from its point.
D = torch.float64
SUM = lambda z, t: z.sum() - 1.0  # noqa: E731
FIRST = lambda z, t: torch.stack([z[0] - 0.9 * t[0], -z[2] - 5.0, z[1] ** 2 + z[2] ** 2 - 0.25])  # noqa: E731


def objective(z, t):
    return (z - t).square().sum() + 0.1 * (z**4).sum() + z[0] * z[1] / 2


#: name -> (options of Argmin, the same for SciPy as (equalities, inequalities g <= 0), bounds).
PROGRAMS = {
    "equality": ({"constraints": [ik.Equality(SUM)]}, ([SUM], []), None),
    "inequality": ({"constraints": [ik.Inequality(SUM)]}, ([], [SUM]), None),
    "some active": ({"constraints": [ik.Inequality(FIRST)]}, ([], [FIRST]), None),
    "both": ({"constraints": [ik.Equality(SUM), ik.Inequality(FIRST)]}, ([SUM], [FIRST]), None),
    "bounds": ({"bounds": (0.0, 0.8)}, ([], []), (0.0, 0.8)),
    "bounds beside": ({"bounds": (0.0, 0.8), "constraints": [ik.Equality(SUM)]}, ([SUM], []), (0.0, 0.8)),
}
T = torch.tensor([1.2, 0.7, -0.4], dtype=D)


def layer(name):
    options, (equal, below), bounds = PROGRAMS[name]

    @ik.implicit(ik.Argmin(objective, **options))
    def by_scipy(z0, t):
        number = lambda g, s: lambda z: s * np.atleast_1d(g(torch.from_numpy(z), t).numpy())  # noqa: E731
        found = scipy.optimize.minimize(
            lambda z: float(objective(torch.from_numpy(z), t)),
            z0.numpy(),
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
            bounds=None if bounds is None else [bounds] * 3,
            constraints=[{"type": "eq", "fun": number(g, 1)} for g in equal]
            + [{"type": "ineq", "fun": number(g, -1)} for g in below],
        )
        return found.x

    return by_scipy


@pytest.mark.parametrize("name", PROGRAMS)
def test_value_multipliers_and_derivatives(name):
    solve, start = layer(name), torch.full((3,), 0.3, dtype=D)
    ours = lambda t: ik.argmin(objective, start, (t,), **PROGRAMS[name][0])  # noqa: E731
    close = {"rtol": 1e-4, "atol": 1e-5}
    found, wanted = solve.solve(start, T), ours(T)
    torch.testing.assert_close(found.value, wanted.value, **close)
    torch.testing.assert_close(found.multipliers, wanted.multipliers, **close)
    slopes = [torch.func.jacrev(f)(T) for f in (lambda t: solve(start, t), lambda t: ours(t).value)]
    torch.testing.assert_close(*slopes, **close)
    batch = torch.stack([T, 1.1 * T])
    torch.testing.assert_close(torch.vmap(solve, (None, 0))(start, batch)[0], wanted.value, **close)


def test_a_point_that_is_none_is_refused():
    """Feasible, and no minimum: no multipliers make it one."""
    liar = ik.implicit(ik.Argmin(objective, constraints=[ik.Equality(SUM)]))(lambda z0, t: z0 * 0 + 1 / 3)
    with pytest.raises(ik.ConvergenceError):
        liar(torch.zeros(3, dtype=D), T)


POINT = torch.tensor([0.3, 0.9, -0.5, 0.2], dtype=D, device="cpu")
SQUARES = lambda z, c: (z - c).square().sum() / 2  # noqa: E731
ONE = ik.Equality(lambda z, c: z.sum() - 1)
#: name -> (options of Argmin, the solution by a closed form or a solver of ours).
OTHERS = {
    "units": (
        {"constraints": [ik.Equality(lambda z, c: 1e6 * (z.sum() - 1)), ik.Inequality(lambda z, c: -1e-6 * z)]},
        ik.project.simplex(),
    ),
    "box": ({"constraints": [ONE], "project": ik.project.box(0.0, 5.0)}, ik.project.simplex()),
    "term": ({"constraints": [ONE], "prox": ik.prox.l1(0.1)}, None),
    "ball": ({"constraints": [ik.Equality(lambda z, c: z.sum() - 0.1)], "project": ik.project.l2_ball(0.5)}, None),
    "far beside a bound": (
        {"constraints": [ik.Equality(lambda z, c: z[1] - 0.25)], "bounds": (0.0, None)},
        lambda c: torch.cat([c[:1], 0.25 + 0 * c[:1], c[2:].clamp_min(0)]),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_multipliers_beside_sets_and_in_any_unit(name):
    options, closed = OTHERS[name]
    start, c = torch.zeros_like(POINT), POINT * (1e6 if name.startswith("far") else 1)
    problem = ik.Argmin(SQUARES, **options)
    wanted = closed or (lambda c: ik.solve(problem, start, (c,)).value)
    layer = ik.implicit(problem)(lambda z0, c: wanted(c))
    torch.testing.assert_close(layer(start, c), wanted(c))
    slopes = [torch.func.jacrev(f)(c) for f in (lambda c: layer(start, c), wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)
