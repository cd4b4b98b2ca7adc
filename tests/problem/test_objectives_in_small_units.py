"""Minimisation over sets of vectors, with terms of them and under constraints, where slopes are below an ulp of ``z``.

There ``z - P(z - slope)`` is zero for every point of the set, and the first one counted as the solution.
"""

from __future__ import annotations

import pytest
import torch

import implicitkit as ik

DOUBLE = torch.float64
THETA = (3.0, 2.4, -1.0, 0.25)
ONES = torch.ones(4, dtype=DOUBLE, device="cpu")


def a_set(make):
    """Options in units of ``z`` and ``f``, and the solution in units of one, of a projection ``make(unit)``."""
    return lambda u, f: {"project": make(u)}, lambda t: make(1.0)(t)


def a_term(make):
    """The same of a term with half a unit of ``f`` a unit of ``z`` as its weight."""
    return lambda u, f: {"prox": make(0.5 * f / u)}, lambda t: make(0.5)(t, 1.0)


def below(u, f):
    return {"constraints": [ik.Inequality(lambda z, *_: z.sum() - u)]}


CASES = {
    "simplex": a_set(ik.project.simplex),
    "simplex, by a function": a_set(lambda u: lambda v: ik.project.simplex(u)(v)),
    "l2 ball": a_set(ik.project.l2_ball),
    "l1 ball": a_set(ik.project.l1_ball),
    "hyperplane": a_set(lambda u: ik.project.hyperplane(ONES, u)),
    "halfspace": a_set(lambda u: ik.project.halfspace(ONES, u)),
    "cone": a_set(lambda u: ik.project.second_order_cone()),
    "group lasso": a_term(lambda w: ik.prox.group_lasso(2, w)),
    "l2": a_term(ik.prox.l2),
    "total variation": a_term(ik.prox.total_variation),
    "inequality": (below, ik.project.halfspace(ONES, 1.0)),
    "inequality and bounds": (lambda u, f: below(u, f) | {"bounds": (0.0, None)}, ik.project.simplex()),
    "inequality and l1": (lambda u, f: below(u, f) | {"prox": ik.prox.l1(0.5 * f / u)}, None),
}
UNITS = [(1.0, 1e-12, "ones"), (1e6, 1e-6, "ones"), (1e6, 1e-6, "zeros"), (1.0, 1e-12, "tiny")]


def posed(name, unit, factor, start):
    options = CASES[name][0](unit, factor)
    z0 = {"ones": unit, "zeros": 0.0, "tiny": 1e-8}[start] * ONES
    objective = lambda z, t: factor / 2 * (z / unit - t).square().sum()  # noqa: E731
    return lambda t: ik.argmin(objective, z0, (t,), **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("unit, factor, start", UNITS)
@pytest.mark.parametrize("name", CASES)
def test_a_slope_below_an_ulp(name, unit, factor, start):
    """``factor |z / unit - theta|^2 / 2`` and the set: value and Jacobian by the closed form, or by units of one."""
    theta = torch.tensor(THETA, dtype=DOUBLE)
    wanted = CASES[name][1] or (lambda t: posed(name, 1.0, 1.0, "ones")(t).value)
    solve = lambda t: posed(name, unit, factor, start)(t).value / unit  # noqa: E731
    torch.testing.assert_close(solve(theta), wanted(theta), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(torch.func.jacrev(solve)(theta), torch.func.jacrev(wanted)(theta), rtol=1e-7, atol=1e-7)


def test_multipliers_are_those_of_the_objective():
    """``lam = factor (sum(theta) - 1) / 4`` of ``sum z <= 1``, and its derivative."""
    theta, factor = torch.tensor(THETA, dtype=DOUBLE), 1e-12
    lam = lambda t: posed("inequality", 1.0, factor, "ones")(t).multipliers[0]  # noqa: E731
    torch.testing.assert_close(lam(theta) / factor, (theta.sum() - 1) / 4, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(torch.func.grad(lambda t: lam(t).sum())(theta) / factor, ONES / 4, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("how", ["batch_dims", "in_dims", "vmap", "vmap of jacrev"])
def test_each_sample_has_units_of_its_own(how):
    """An objective of 1e-12 and one of 1 side by side."""
    factors = torch.tensor((1e-12, 1.0, 1e-7), dtype=DOUBLE)
    theta = torch.tensor((3.0, 2.4, 0.1, 0.25), dtype=DOUBLE)
    value = lambda z, f, t: f * (z.exp() - t * z).sum(-1)  # noqa: E731
    more = {"in_dims": (0, None)} if how == "in_dims" else {}
    ball = ik.project.l2_ball(10.0)  # log(theta) lies inside
    one = lambda f, t: ik.argmin(value, ONES, (f, t), project=ball).value  # noqa: E731
    if how == "vmap of jacrev":
        jacobians = torch.vmap(torch.func.jacrev(one, 1), (0, None))(factors, theta)
        torch.testing.assert_close(jacobians, (1 / theta).diag().expand(3, 4, 4), rtol=1e-7, atol=1e-7)
        return
    if how == "vmap":
        found = torch.vmap(one, (0, None))(factors, theta)
    else:
        found = ik.argmin(value, ONES.expand(3, 4).clone(), (factors, theta), project=ball, batch_dims=1, **more).value
    torch.testing.assert_close(found, theta.log().expand(3, 4), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("factor", [1.0, 1e-12])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_no_curvature(start, factor):
    """``factor b'z`` over a ball: ``-b / |b|``."""
    b = torch.tensor(THETA, dtype=DOUBLE)
    solve = lambda b: ik.argmin(lambda z, b: factor * (b * z).sum(), start * ONES, (b,), project=ik.project.l2_ball())  # noqa: E731
    wanted = lambda b: -b / b.norm()  # noqa: E731
    torch.testing.assert_close(solve(b).value, wanted(b), rtol=1e-9, atol=1e-9)
    slopes = [torch.func.jacrev(f)(b) for f in (lambda b: solve(b).value, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["simplex", "group lasso", "halfspace"])
def test_in_float32(name):
    """From zero, where curvature is first seen far out: nearer it is rounding."""
    options, solution = CASES[name]
    options = options(1e3, 1e-3)
    theta, start = torch.tensor(THETA), torch.zeros(4)
    if name == "halfspace":
        options = {"project": ik.project.halfspace(ONES.float(), 1e3)}
        solution = ik.project.halfspace(ONES.float(), 1.0)
    objective = lambda z, t: 1e-3 / 2 * (z / 1e3 - t).square().sum()  # noqa: E731
    solve = lambda t: ik.argmin(objective, start, (t,), **options).value / 1e3  # noqa: E731
    torch.testing.assert_close(solve(theta), solution(theta), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.func.jacrev(solve)(theta), torch.func.jacrev(solution)(theta), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "point, good", [(ik.project.simplex()(torch.tensor(THETA, dtype=DOUBLE)), True), (ONES / 4, False)]
)
def test_points_by_others(point, good):
    """A solver of one's own gets its arguments alone, and a wrong point of the set is refused."""

    @ik.implicit(ik.Argmin(lambda z, t: 1e-12 / 2 * (z - t).square().sum(), project=ik.project.simplex()))
    def layer(z0, t):
        return point

    theta = torch.tensor(THETA, dtype=DOUBLE)
    if not good:
        with pytest.raises(ik.ConvergenceError):
            layer(ONES, theta)
        return
    wanted = torch.func.jacrev(ik.project.simplex())(theta)
    torch.testing.assert_close(torch.func.jacrev(lambda t: layer(ONES, t))(theta), wanted, rtol=1e-9, atol=1e-9)


def test_points_by_others_where_there_is_no_curvature():
    """``1e-12 b'z`` over a ball, at a point of it that others returned."""
    b = torch.tensor(THETA, dtype=DOUBLE)

    @ik.implicit(ik.Argmin(lambda z, b: 1e-12 * (b * z).sum(), project=ik.project.l2_ball()))
    def layer(z0, b):
        return ONES / 4  # by others

    with pytest.raises(ik.ConvergenceError):
        layer(ONES, b)


@pytest.mark.parametrize("unit", [1.0, 1e-10])
@pytest.mark.parametrize("given", ["set", "constraint"])
@pytest.mark.filterwarnings("ignore::implicitkit.foundation.errors.ImpureFunctionWarning")
def test_what_modules_count_is_not_changed_by_a_solve(unit: float, given: str) -> None:
    """The unit is found by evaluations of the objective, which are none that a module is to learn from."""

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return unit * (z - torch.tensor([0.2, 0.3], dtype=z.dtype)).square().sum()

    counted = Counted()
    stated = (
        {"project": ik.project.simplex()} if given == "set" else {"constraints": [ik.Equality(lambda z: z.sum() - 1)]}
    )
    found = ik.argmin(counted, torch.full((2,), 0.5, dtype=torch.float64), **stated)
    torch.testing.assert_close(found.value, torch.tensor([0.45, 0.55], dtype=torch.float64))
    assert float(counted.calls) == 0


# ---------------------------------------------------------------------------------------------------------------------
# A minimum over a set, in unknowns of units far apart: right, or refused, and never another point.
D = torch.float64


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("exponents", "start", "known"),
    [
        ((0, 0, 0, 0), 1.0, True),
        ((0, 1, 2, 3), 1.0, True),
        ((0, 0, 9, 0), 1.0, False),
        ((0, 0, 0, 9), 0.3, False),
        ((0, 3, 6, 9), 1.0, False),
    ],
    ids=str,
)
def test_right_or_refused(exponents: tuple[int, ...], start: float, known: bool) -> None:
    """``min |y - t|^2 + (sum y)^2 / 100`` over ``y >= 0``, ``y_i = z_i / s_i``: by hand ``y = (0, 0, 0.289, 0.789)``."""
    s = 10.0 ** torch.tensor(exponents, dtype=D)
    t = torch.tensor([-0.7, -0.2, 0.3, 0.8], dtype=D)
    both = torch.linalg.solve(torch.eye(2, dtype=D) + 0.01, t[2:])
    f = lambda z: ((z / s - t) ** 2).sum() + 0.01 * (z / s).sum() ** 2  # noqa: E731
    found = ik.argmin(f, start * s, project=ik.project.nonnegative(), on_failure="ignore")
    right = torch.allclose(found.value / s, torch.cat([0 * both, both]), rtol=0, atol=1e-4)
    assert right or not bool(found.converged), found.value / s
    assert right or not known
    if not right:
        with pytest.raises(ik.ConvergenceError, match="sizes of the unknowns are so far apart"):
            ik.argmin(f, start * s, project=ik.project.nonnegative())


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("project", [ik.project.nonnegative(), ik.project.simplex()], ids=["nonnegative", "simplex"])
def test_small_unknowns_that_are_known_as_was_asked_are_taken(project: object, dtype: torch.dtype) -> None:
    """``min (y - t)' W (y - t)`` is zero: what ``rtol`` leaves of ``y``, 1e-11, may be more than the least ``t``, and
    its square more than ``f``."""
    weight = torch.arange(1, 7).to(dtype)
    for seed in (0, 4, 6, 19):
        t = torch.softmax(6 * torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=D), 0).to(dtype)
        f = lambda z, t: (weight * (z - t) ** 2).sum()  # noqa: E731
        found = ik.argmin(f, torch.full_like(t, 1 / 6), (t,), project=project, on_failure="ignore")
        assert bool(found.converged), (seed, found.value, t)
        torch.testing.assert_close(found.value, t, rtol=0, atol=1000 * torch.finfo(dtype).eps ** 0.8)


def test_a_lower_point_near_a_minimum_at_zero_is_seen() -> None:
    """``|y - t|^2`` again, zero at its minimum, in units 1e10 apart."""
    s, t = torch.tensor([1e10, 1.0, 1.0], dtype=D), torch.tensor([0.3, 0.5, 0.7], dtype=D)
    f = lambda z: (z / s - t).square().sum() + 0.1 * (z / s - t).sum() ** 2  # noqa: E731
    found = ik.argmin(f, s, project=ik.project.nonnegative(), on_failure="ignore")
    assert not bool(found.converged) or torch.allclose(found.value / s, t, rtol=0, atol=1e-4), found.value / s


def test_where_no_unknown_has_a_slope_nothing_is_lower() -> None:
    t = torch.tensor([1.0, 1e-8], dtype=D)
    f = lambda z: (z - t).square().sum()  # noqa: E731
    assert bool(ik.argmin(f, t, project=ik.project.nonnegative()).converged)


SETS = {
    "l1": {"prox": ik.prox.l1(1e6)},
    "simplex": {"project": ik.project.simplex()},
    "box": {"project": ik.project.box(0.0, 1.0)},
    "nonnegative": {"project": ik.project.nonnegative()},
    "bounds": {"bounds": (0.0, 1.0)},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETS)
def test_slopes_that_are_large_beside_the_unknowns(name):
    """Single precision leaves of a slope of 1e7 more than an unknown of one: ``z - P(z - slope)`` is rounding everywhere,
    and solvers took 20,000 steps to find that they had not converged."""
    torch.manual_seed(0)
    X = 1e3 * torch.randn(40, 10, dtype=DOUBLE, device="cpu")
    y = X @ torch.tensor([1.0, -2.0, 3.0, *[0.0] * 7], dtype=DOUBLE) + 100 * torch.randn(40, dtype=DOUBLE)

    def solved(dtype, s=1.0):
        data, target = X.to(dtype), (y * s).to(dtype)
        z0 = torch.full((10,), 0.1, dtype=dtype)
        return ik.argmin(lambda z, b: 0.5 * (data @ z - b).square().sum(), z0, (target,), **SETS[name])

    exact, found = solved(DOUBLE), solved(torch.float32)
    assert torch.allclose(found.value.double(), exact.value, atol=1e-5) and found.evaluations < 100
    s, h = torch.ones((), dtype=DOUBLE, requires_grad=True), 1e-5
    by_s = torch.autograd.functional.jacobian(lambda s: solved(DOUBLE, s).value, s)
    single = torch.autograd.functional.jacobian(lambda s: solved(torch.float32, s).value, s)
    assert torch.allclose(by_s, (solved(DOUBLE, 1 + h).value - solved(DOUBLE, 1 - h).value) / (2 * h), atol=1e-5)
    assert torch.allclose(single.double(), by_s, atol=1e-4)
