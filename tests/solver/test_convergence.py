"""What is called converged is a solution, whoever says so and wherever the solve began; what is right is not refused.

Every system of ``convergence_table`` from seven starts over twelve orders of magnitude (the samples of one solve) by every
named solver in float32 and float64, at default tolerances; ``convergence_audit`` has the oracle.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

sys.path.insert(0, str(Path(__file__).parents[1] / "tables"))
from convergence_audit import DTYPES, Verdict, audit, right, wrong_and_refused
from convergence_exceptions import EXCEPTIONS, ROUNDED
from convergence_table import FACTORS, claims

from implicitkit.solver.verdict.last_step import fell_steeply

F64 = torch.float64
TABLE = {claim.name: claim for claim in claims()}
PAIRS = [(claim, solver, dtype) for claim in TABLE.values() for solver in claim.solvers for dtype in DTYPES]


def _check(verdicts: list[Verdict]) -> None:
    """No wrong claim and no refused solution but those excepted by name; no exception that is not needed."""
    bad = {v.key: v for v in verdicts if v.wrong or v.refused}
    asked = {v.key for v in verdicts}
    wrong = [v.text for key, v in bad.items() if v.wrong and key not in EXCEPTIONS]
    refused = [v.text for key, v in bad.items() if v.refused and key not in EXCEPTIONS]
    stale = [key for key in EXCEPTIONS if key in asked and key not in bad and key not in ROUNDED]
    assert not wrong, f"{len(wrong)} of {len(verdicts)} verdicts claim what is no solution:\n" + "\n".join(wrong[:20])
    assert not refused, f"{len(refused)} of {len(verdicts)} verdicts refuse a solution:\n" + "\n".join(refused[:20])
    assert not stale, f"exceptions that are no longer needed: {stale}"


def test_there_are_over_a_hundred_systems() -> None:
    assert len(TABLE) >= 150 and max(FACTORS) / min(FACTORS) >= 1e12


@pytest.mark.parametrize("kind", sorted({claim.kind for claim in TABLE.values()}))
def test_no_claim_is_wrong_and_no_solution_refused(kind: str) -> None:
    """A seeded slice: small systems, each with some solver."""
    slow = ("df_sane", "integrate", "gradient_descent", "gauss_newton")
    pairs = [
        p for p in PAIRS if p[0].kind == kind and p[0].start.numel() <= 3 and "scipy" not in p[1] and p[1] not in slow
    ]
    drawn = random.Random(11).sample(pairs, 10 if kind == "root" else 4)
    _check([v for claim, solver, dtype in drawn for v in audit(claim, (solver,), (dtype,))])


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_no_claim_is_wrong_and_no_solution_refused_anywhere(name: str) -> None:
    _check(audit(TABLE[name]))


def test_exceptions_are_of_systems_that_there_are() -> None:
    everything = {(c.name, d, s, factor) for c, s, d in PAIRS for factor in FACTORS}
    assert set(EXCEPTIONS) <= everything and all(EXCEPTIONS.values())


def test_the_audit_notices_a_wrong_claim_and_a_refused_solution() -> None:
    """A root at infinity that is claimed, and a root that is not; by the oracle alone."""
    sure = Verdict("e^-z, at infinity", "float64", "auto", 1.0, "CONVERGED", False, False, True, "claimed")
    shy = Verdict("cos z = z", "float64", "auto", 1.0, "STALLED", True, True, True, "refused")
    for verdict, word in ((sure, "claim what is no solution"), (shy, "refuse a solution")):
        with pytest.raises(AssertionError, match=word):
            _check([verdict])
    for name, at, good in (
        ("cos z = z", 0.7390851332151607, True),
        ("cos z = z", 0.739, False),
        ("1/z, at infinity", 1e9, False),
    ):
        found, _ = right(TABLE[name], torch.tensor([[at]], dtype=F64), torch.tensor([2e-16], dtype=F64))
        assert bool(found) is good, (name, at)


_SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("economy 2", "Powell singular", "Bard")]


@pytest.mark.parametrize("name", ["cos", "z^2 = 2", *_SLOWER])
def test_the_samples_of_one_solve_end_as_they_do_alone(name: str) -> None:
    """Which is why all starts of a system may be the samples of one solve."""
    solver = TABLE[name].solvers[2]
    together = audit(TABLE[name], (solver,), ("float64",))
    alone = [v for factor in FACTORS for v in audit(TABLE[name], (solver,), ("float64",), (factor,))]
    assert [(v.factor, v.status, v.right) for v in together] == [(v.factor, v.status, v.right) for v in alone]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "solver", "factor"),
    [
        ("economy 5", "newton", 1e2),
        ("erfc z, at infinity", "newton", 1.0),
        ("unknown of 1e-12", "broyden", 1e2),
        ("tridiagonal50", "scipy.root.hybr", 1e6),
        ("Meyer", "gauss_newton", 1e4),
        ("Meyer", "levenberg_marquardt", 1.0),
        ("Rosenbrock fit", "levenberg_marquardt", 1e2),
        ("sine at a maximum", "newton", 1e6),
        ("homogeneous of degree zero", "newton", 1e4),
        ("Box in three", "newton", 1e4),
        ("flat valley", "newton", 1e6),
        ("Kowalik-Osborne", "levenberg_marquardt", 1e-2),
    ],
)
def test_far_out_in_low_precision(name: str, solver: str, factor: float) -> None:
    """Points that were claimed, and solutions that a test against that refused at first."""
    wrong, refused = wrong_and_refused(audit(TABLE[name], (solver,), ("float32",), (factor,)))
    assert not wrong and not refused


# ---------------------------------------------------------------------------------------------------- one by one, by name


def _status(solution: ik.Solution) -> ik.Status:
    return ik.Status(int(solution.status.max()))


@pytest.mark.parametrize(
    "solver",
    [
        "auto",
        "newton",
        "trust_region",
        "broyden",
        "scipy.root.hybr",
        "bisection",
        "chandrupatla",
        "scipy.root_scalar.brentq",
    ],
)
@pytest.mark.parametrize("start", [3.0, 30.0])
def test_the_start_and_the_name_of_the_solver_do_not_matter(solver: str, start: float) -> None:
    """exp(z) = 2, whose residual is 1e13 at the start: z was 5.0 by newton, -18 by brentq, and "converged"."""
    x = torch.tensor([2.0], dtype=F64, requires_grad=True)
    s = ik.root(lambda z, x: torch.exp(z) - x, torch.tensor([start], dtype=F64), (x,), solver=solver)
    assert s.value.item() == pytest.approx(math.log(2), abs=1e-9)
    assert torch.autograd.grad(s.value.sum(), x)[0].item() == pytest.approx(0.5, abs=1e-8)


def test_a_user_solver_is_judged_by_the_same_rule() -> None:
    residual = lambda z, x: torch.exp(z) - x  # noqa: E731

    @ik.implicit(ik.Root(residual), on_failure="raise")
    def lazy(z0: Tensor, x: Tensor) -> Tensor:
        return torch.full_like(z0, 3.69)

    with pytest.raises(ik.ConvergenceError):
        lazy(torch.tensor([20.0], dtype=F64), torch.tensor([2.0], dtype=F64))


@pytest.mark.parametrize("solver", ["chord", "user"])
def test_nan_is_no_solution_whatever_the_function_makes_of_it(solver: str) -> None:
    """``sign(NaN)`` is 0, where a singular Jacobian leads the chord method."""
    problem, start = ik.Root(lambda z: torch.sign(z - 1)), torch.tensor([3.0], dtype=F64)
    if solver == "chord":
        s = ik.solve(problem, start, solver=solver, on_failure="ignore")
        assert not bool(s.converged) and bool(s.value.isfinite().all())
        return
    with pytest.raises(ik.ConvergenceError, match="returned NaN"):
        ik.implicit(problem)(lambda z0: torch.nan * z0)(start)


@pytest.mark.parametrize("solver", ["broyden", "df_sane"])
def test_where_every_value_is_as_large_there_are_no_thousands_of_evaluations(solver: str) -> None:
    s = ik.root(lambda z: torch.where(z > 1, 1.0, -1.0), torch.tensor([3.0]), solver=solver, on_failure="ignore")
    assert ik.Status(int(s.status)).name == "STALLED"
    assert s.evaluations < 4000


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_no_fixed_point_at_infinity(start: float, dtype: torch.dtype) -> None:
    """z + 1 had one at -4.5e15, sqrt(z^2 + 1) at 136,150."""
    for f in (lambda z: z + 1, lambda z: torch.sqrt(z * z + 1)):
        s = ik.fixed_point(f, torch.full((2,), start, dtype=dtype), on_failure="ignore")
        assert not bool(s.converged), s


@pytest.mark.parametrize("factor", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("solver", ["newton", "chord"])
def test_rounding_in_one_equation_makes_no_ray_of_zeros_unsolvable(solver: str, factor: float) -> None:
    """What is left of it, 6e-17 of its terms, is not in the range of a singular ``J``."""
    claim = TABLE["homogeneous of degree zero"]
    wrong, refused = wrong_and_refused(audit(claim, (solver,), ("float64",), (factor,)))
    assert not wrong and not refused


def test_roots_at_infinity_have_diverged_and_the_message_says_how_far() -> None:
    with pytest.raises(ik.ConvergenceError, match=r"diverged.*\|z\| = .*certify"):
        ik.root(lambda z: torch.exp(-z), torch.ones(1, dtype=F64), solver="newton")


def _economies(batch: int) -> tuple[Tensor, Tensor]:
    """Tastes and endowments of CES exchange economies, five people and four goods."""
    g = torch.Generator().manual_seed(0)
    a = torch.rand(batch, 5, 4, generator=g, dtype=F64) + 0.1
    return a, torch.rand(batch, 5, 4, generator=g, dtype=F64) * 3


def _excess(logp: Tensor, a: Tensor, sigma: Tensor, W: Tensor) -> Tensor:
    """Excess demand for all goods but one, in log prices: it also vanishes as these go to infinity."""
    p = torch.cat([logp.exp(), torch.ones_like(logp[..., :1])], -1)[..., None, :]
    num = a**sigma * p ** (-sigma)
    return (num * (W * p).sum(-1, keepdim=True) / (num * p).sum(-1, keepdim=True) - W).sum(-2)[..., :-1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["trust_region", "scipy.root.hybr", "newton"])
def test_economies_with_prices_at_infinity(solver: str) -> None:
    """34 of 256 economies "converged" with log prices up to 249, and spoilt what all have in common: d/d sigma of the
    sum was nan, or 2.9e6."""
    (a, W), sigma = _economies(64), torch.tensor(0.3, dtype=F64, requires_grad=True)
    z0 = torch.zeros(64, 3, dtype=F64)
    options: dict[str, Any] = {"solver": solver, "batch_dims": 1, "in_dims": (0, None, 0)}
    s = ik.root(_excess, z0, (a, sigma, W), on_failure="ignore", **options)
    far = s.value.abs().amax(1) > 20
    assert bool(far.any()) and not bool((far & s.converged).any())
    assert bool((s.status[far] == int(ik.Status.DIVERGED)).any())
    assert int(s.converged.sum()) >= 48
    # the sum over all of them has the derivative of those that have a solution, alone and to any order
    good = s.converged
    alone = ik.root(_excess, s.value[good].detach(), (a[good], sigma, W[good]), **options)
    for values in (s.value, alone.value):
        (first,) = torch.autograd.grad(values.sum(), sigma, create_graph=True)
        (second,) = torch.autograd.grad(first, sigma)
        found = torch.stack([first.detach(), second])
        if values is s.value:
            mixed = found
    torch.testing.assert_close(mixed, found, rtol=1e-6, atol=0)
    _, tangent = torch.func.jvp(
        lambda t: ik.root(_excess, z0, (a, t, W), on_failure="ignore", **options).value,
        (sigma.detach(),),
        (sigma.new_ones(()),),
    )
    assert float(tangent[~good].abs().max()) == 0
    torch.testing.assert_close(tangent.sum(), found[0], rtol=1e-6, atol=0)


def test_a_failed_sample_keeps_a_derivative_only_if_its_linear_system_is_solved() -> None:
    """Under "ignore" and "warn": stopped short of a solution there still is one; where J is singular there is none."""
    x = torch.tensor([2.0, -2.0], dtype=F64, requires_grad=True)  # z^2 = -2: stalls at z = 0, where J = 0
    shared = torch.tensor(1.0, dtype=F64, requires_grad=True)
    s = ik.root(lambda z, x, t: z**2 - t * x, torch.tensor([1.0, 0.0], dtype=F64), (x, shared), solver="newton",
                batch_dims=1, in_dims=(0, None), on_failure="ignore")  # fmt: skip
    assert s.converged.tolist() == [True, False]
    gx, gt = torch.autograd.grad(s.value.sum(), (x, shared))
    torch.testing.assert_close(gx, torch.tensor([0.125**0.5, 0.0], dtype=F64))
    assert float(gt) == pytest.approx(0.5**0.5)
    y = torch.tensor(2.0, dtype=F64, requires_grad=True)
    short = ik.root(lambda z, y: z**2 - y, y.new_ones(1), (y,), solver="newton", max_steps=1, on_failure="ignore")
    assert not bool(short.converged)
    (gy,) = torch.autograd.grad(short.value.sum(), y)
    assert float(gy) == pytest.approx(1 / (2 * short.value.item()))


def test_every_node_of_a_composition_holds() -> None:
    """By the joint norm the last of 32 nodes was still at its start, and "converged"."""
    g = torch.Generator().manual_seed(0)
    k, x = 32, torch.randn(8, generator=g, dtype=F64)
    node = ik.FixedPoint(lambda z, i: torch.tanh(0.4 * z + 0.3 * i))
    chain = ik.compose({f"n{j}": (node, f"n{j - 1}" if j else "x") for j in range(k)}, output=f"n{k - 1}")
    for solver in ("auto", "picard", "scipy.root.krylov"):
        s = ik.solve(
            chain, {f"n{j}": torch.zeros(8, dtype=F64) for j in range(k)}, (x,), rtol=1e-8, atol=1e-14, solver=solver
        )
        y = x
        for _ in range(k):
            y = ik.solve(node, torch.zeros(8, dtype=F64), (y,), rtol=1e-8).value
        torch.testing.assert_close(s.value[f"n{k - 1}"], y, rtol=1e-3, atol=0)


@pytest.mark.parametrize("solver", ["auto", "lbfgs", "newton", "gradient_descent", "scipy.minimize.BFGS"])
def test_a_maximum_is_left_again(solver: str) -> None:
    """argmin started at a maximum returned it after no step."""
    s = ik.argmin(lambda z: torch.cos(z).sum(), torch.zeros(2, dtype=F64), solver=solver, on_failure="ignore")
    assert torch.cos(s.value).sum().item() == pytest.approx(-2) or _status(s) is ik.Status.SADDLE, s
    if solver != "newton":
        assert bool(s.converged), s


def test_a_saddle_on_an_axis_of_symmetry_is_left() -> None:
    f = lambda z: z[0] ** 4 / 4 - z[0] ** 2 / 2 + z[1] ** 2 / 2  # noqa: E731
    s = ik.argmin(f, torch.tensor([0.0, 1.0], dtype=F64), solver="lbfgs")
    torch.testing.assert_close(s.value.abs(), torch.tensor([1.0, 0.0], dtype=F64), rtol=1e-7, atol=1e-7)


def test_a_user_solver_that_returns_a_maximum_is_told_so() -> None:
    @ik.implicit(ik.Argmin(lambda z: torch.cos(z).sum()), on_failure="raise")
    def lazy(z0: Tensor) -> Tensor:
        return torch.zeros_like(z0)

    with pytest.raises(ik.ConvergenceError, match="saddle"):
        lazy(torch.ones(2, dtype=F64))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["auto", "lbfgs", "bfgs", "gradient_descent", "newton_cg", "scipy.minimize.BFGS"])
def test_what_has_no_minimum_is_unbounded(solver: str) -> None:
    with pytest.raises(ik.ConvergenceError, match="unbounded"):
        ik.argmin(lambda z: z.sum(), torch.ones(3, dtype=F64), solver=solver, max_steps=400)


def test_a_start_far_from_the_minimum_is_not_unbounded() -> None:
    """The way there is ten million units long."""
    found = ik.argmin(
        lambda z: torch.sqrt(1 + ((z - 1e7) / 1e3) ** 2).sum(), torch.zeros(40, dtype=F64), solver="lbfgs"
    )
    torch.testing.assert_close(found.value, torch.full((40,), 1e7, dtype=F64), rtol=1e-5, atol=0)


_INFLECTIONS = {
    "z^3": (lambda z: z**3, ik.Status.UNBOUNDED),
    "z^3 + 1": (lambda z: z**3 + 1, ik.Status.UNBOUNDED),
    "z - sin z": (lambda z: z - torch.sin(z), ik.Status.UNBOUNDED),
    "z^3 + 2 w^2": (lambda z: z[:1] ** 3 + 2 * (z[1:] - 0.3).square().sum(), ik.Status.UNBOUNDED),
    "z^3 + z^4": (lambda z: z**3 + z**4, -0.75),
    "z^4": (lambda z: z**4, 0.0),
    "|z|^3": (lambda z: z.abs() ** 3, 0.0),
    "a narrow well": (lambda z: z**3 + 0.05 * z**2, 0.0),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("unknowns", [1, 2])
@pytest.mark.parametrize("solver", ["auto", "bfgs", "newton_cg"])
@pytest.mark.parametrize("name", _INFLECTIONS)
def test_an_inflection_is_left_again(name: str, solver: str, unknowns: int, dtype: torch.dtype) -> None:
    """Minimisers come to it from above, where all is flat, and stop before they are there."""
    f, end = _INFLECTIONS[name]
    s = ik.argmin(lambda z: f(z).sum(), torch.ones(unknowns, dtype=dtype), solver=solver, on_failure="ignore")
    if isinstance(end, ik.Status):
        assert s.status in (end, ik.Status.SADDLE), s
    else:
        assert bool(s.converged), s
        torch.testing.assert_close(s.value, torch.full_like(s.value, end), rtol=0, atol=0.05)


_ALL_FLAT: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...], float]] = {
    # slope and curvature vanish in every direction: (objective, start, its least value)
    "a monkey's saddle": (lambda z: z[0] ** 3 - 3 * z[0] * z[1] ** 2 + (z**4).sum(), (0.0, 0.0), -0.52734375),
    "the same, from its side": (lambda z: z[0] ** 3 - 3 * z[0] * z[1] ** 2 + (z**4).sum(), (1.0, 0.0), -0.52734375),
    "down across": (lambda z: (z[0] - z[1]) ** 3 + (z**4).sum(), (0.0, 0.0), -54.0),
    "a product": (lambda z: z.prod() + (z**4).sum(), (0.0, 0.0, 0.0), -1 / 256),
    "of fourth order": (lambda z: z[0] ** 4 - z[1] ** 4 + z[1] ** 6, (1.0, 0.0), -4 / 27),
    "a minimum": (lambda z: (z**4).sum(), (0.0, 0.0), 0.0),
}


@pytest.mark.parametrize("solver", ["lbfgs", "newton_cg"])
@pytest.mark.parametrize("name", _ALL_FLAT)
def test_a_saddle_without_curvature_is_left(name: str, solver: str) -> None:
    f, start, least = _ALL_FLAT[name]
    s = ik.argmin(f, torch.tensor(start, dtype=F64), solver=solver)
    torch.testing.assert_close(f(s.value), torch.tensor(least, dtype=F64), rtol=1e-6, atol=1e-12)


def test_the_bottom_of_a_narrow_well_is_no_inflection() -> None:
    """``z^3 + z^2 / 100``: 0.01 to the left it is lower than there, but the curvature vanishes far from the slope."""
    s = ik.argmin(lambda z: (z**3 + 0.01 * z**2).sum(), torch.zeros(1, dtype=F64))
    assert bool(s.converged) and s.value == 0


@pytest.mark.parametrize("start", [10.0, 1e2, 1e6])
@pytest.mark.parametrize("solver", ["auto", "lbfgs", "gradient_descent"])
def test_far_out_a_gradient_may_vanish_by_rounding(solver: str, start: float) -> None:
    s = ik.argmin(
        lambda z: (z - torch.sin(z)).sum(), torch.tensor([start], dtype=F64), solver=solver, on_failure="ignore"
    )
    assert not bool(s.converged), s


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("low", "end"), [(-1.0, -1.0), (0.0, 0.0)])
def test_an_inflection_within_bounds(low: float, end: float, dtype: torch.dtype) -> None:
    s = ik.argmin(lambda z: (z**3).sum(), torch.ones(2, dtype=dtype), bounds=(low, 2.0))
    torch.testing.assert_close(s.value, torch.full_like(s.value, end), rtol=0, atol=0.01)


def test_a_kink_is_given_up_early() -> None:
    g = torch.Generator().manual_seed(0)
    A, b = torch.randn(60, 20, generator=g, dtype=F64), torch.randn(60, generator=g, dtype=F64)
    f = lambda z: torch.relu(A @ z - b).sum() + 0.5 * z.square().sum()  # noqa: E731
    s = ik.argmin(f, torch.zeros(20, dtype=F64), solver=ik.LBFGS(memory=10), on_failure="ignore")
    # the objective falls by a thousandth in hundreds of steps: how many there are hangs on rounding
    assert _status(s) is ik.Status.STALLED and int(s.steps) <= 1000, s
    assert float(f(s.value)) < 17.74, "what a stop after 451 steps leaves, and not what the steps since have gained"


def test_meyer_is_solved_from_every_start_it_is_claimed_from() -> None:
    """It was claimed at a Newton decrement of 100."""
    claim = TABLE["Meyer"]
    best = 87.9458
    for factor in (1.0, 1e2):
        z0 = factor * claim.start
        s = ik.least_squares(claim.function, z0, solver="levenberg_marquardt", on_failure="ignore")
        if bool(s.converged):
            assert claim.function(s.value).square().sum().item() == pytest.approx(best, rel=1e-4)


# --------------------------------------------------------------------------------------- what must not change the verdict
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e8])
def test_units_of_the_residual(unit: float) -> None:
    """Purely relative tolerances: F in other units gives the same point."""
    f = lambda z, u: u * torch.stack([torch.exp(z[0]) - 2, z[1] ** 3 + z[0] - 5])  # noqa: E731
    z0 = torch.tensor([8.0, 4.0], dtype=F64)
    values = [
        ik.root(f, z0, (torch.tensor(u, dtype=F64),), solver="newton", rtol=1e-9, atol=0.0).value for u in (1.0, unit)
    ]
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=0)


def test_solutions_at_zero_and_rounding_in_big_terms() -> None:
    for f in (
        lambda z: 1e6 * ((z - 1) ** 2 - 1), lambda z: torch.sin(z), lambda z: 1e8 * torch.expm1(z), lambda z: z**3
    ):  # fmt: skip
        for solver in ("newton", "broyden", "trust_region", "scipy.root.hybr"):
            s = ik.root(f, torch.full((1,), 0.3, dtype=F64), solver=solver)
            assert abs(s.value.item()) <= 1e-3, solver


def test_a_fit_of_as_many_residuals_as_unknowns_that_do_not_vanish() -> None:
    """Freudenstein and Roth's other minimum: where residuals are left, their Jacobian is singular."""
    s = audit(TABLE["Freudenstein-Roth fit"], ("levenberg_marquardt",), ("float64",), (1.0,))[0]
    assert s.status == "CONVERGED" and "11.4128" in s.text


@pytest.mark.parametrize("target", [(0.0, 0.0), (1e-3, 0.0), (1.0, 1.0), (3.0, 0.0)])
def test_an_arm_with_a_joint_to_spare_reaches_its_own_foot(target: tuple[float, float]) -> None:
    """There the first joint turns nothing, and its column is rounding; but zeros go on along it, back to the origin."""

    def hand(q: Tensor) -> Tensor:
        angles = torch.cumsum(q, 0)
        return torch.stack([torch.cos(angles).sum(), torch.sin(angles).sum()])

    goal, q0 = torch.tensor(target, dtype=F64), torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    solution = ik.least_squares(lambda q: hand(q) - goal, q0)
    assert torch.allclose(hand(solution.value), goal, atol=1e-6) and solution.evaluations < 150


def test_a_step_that_takes_all_residuals_away_is_not_small_because_another_unknown_is_large() -> None:
    """``z_0 s^{z_1}`` at ``z = (5e-18, 99)``: to double ``z_0`` is a step of nothing beside ``z_1``."""
    assert audit(TABLE["power law"], ("levenberg_marquardt",), ("float64",), (100.0,))[0].status != "CONVERGED"


@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1e-4), ("float32", 1e6)])
def test_where_kinks_meet_a_jump_is_no_rounding_error_and_no_scale(dtype: str, factor: float) -> None:
    """``lbfgs`` comes to rest in a corner of the hinges, between two jumps of the gradient."""
    assert audit(TABLE["hinge"], ("lbfgs",), (dtype,), (factor,))[0].status != "CONVERGED"


@pytest.mark.parametrize(("solver", "factor"), [("bisection", 1e4), ("df_sane", 1e4)])
def test_residuals_that_are_small_by_their_units_only_are_no_solutions(solver: str, factor: float) -> None:
    """``1e-7 (z^3 - 8)`` in float32 is 8e-7 wherever ``z`` is small, below what a far start allows."""
    assert not audit(TABLE["1e-7 (z^3 - 8)"], (solver,), ("float32",), (factor,))[0].wrong


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1e-6), ("float32", 1e4)])
def test_a_fit_of_a_constant_by_parameters_at_infinity_is_none(dtype: str, factor: float) -> None:
    """``z_0 exp(z_1 / (t + z_2))`` is all but constant for large ``z_2``, and its mean stationary but to rounding."""
    verdicts = audit(TABLE["Meyer"], ("auto", "levenberg_marquardt"), (dtype,), (factor,))
    assert not any(verdict.wrong for verdict in verdicts)


def test_a_point_beside_zero_where_rounding_is_all_there_is() -> None:
    """``1 - exp(-z)`` is 0 there, or one unit in the last place of 1."""
    s = ik.root(lambda z: z - 5 * (1 - torch.exp(-z)), torch.tensor([-4.6312e-17], dtype=F64), solver="newton")
    assert bool(s.converged) and int(s.steps) == 0 and int(s.evaluations) < 25


def test_a_start_at_the_solution_needs_no_step() -> None:
    """The test is relative to the scale near z, not to the residual at the start, which here is rounding itself."""
    f = lambda z: 1e8 * (z**2 - 2)  # noqa: E731
    s = ik.root(f, torch.tensor([2.0], dtype=F64).sqrt(), solver="newton", rtol=1e-10, atol=0.0)
    assert bool(s.converged)


def test_samples_are_judged_one_by_one() -> None:
    z0 = torch.tensor([[0.5], [30.0], [300.0]], dtype=F64)
    s = ik.root(lambda z: torch.exp(z) - 2, z0, solver="newton", batch_dims=1, max_steps=400)
    torch.testing.assert_close(s.value, torch.full_like(z0, math.log(2)))


def test_the_claim_costs_nothing_where_the_residual_is_below_atol() -> None:
    calls = []

    def f(z: Tensor) -> Tensor:
        calls.append(z)
        return z**2 - 2

    s = ik.root(f, torch.ones(1, dtype=F64), solver="newton", rtol=0.0, atol=1e-9)
    plain = int(s.steps) + 2
    assert s.evaluations == plain


SOUND_FAR_OUT = {
    "at the spacing of numbers": (lambda z, c: z**2 - c, [1e3, 1282.0, 1e6, 7e8, 0.3]),
    "beside large terms": (lambda z, c: 342 * (z / 100) ** 4 - c * (1 + 1e-3 * z), [150.0, 342.0, 900.0]),
}


@pytest.mark.parametrize("name", SOUND_FAR_OUT)
@pytest.mark.parametrize("solver", ["auto", "newton", "broyden"])
def test_sound_roots_far_out_are_taken(name: str, solver: str) -> None:
    f, values = SOUND_FAR_OUT[name]
    c = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
    assert bool(ik.root(f, c, (c,), solver=solver, batch_dims=1).converged.all())


@pytest.mark.parametrize("size", [10.0, 1e3, 1e6])
@pytest.mark.parametrize("unknowns", [40, 64, 65])
def test_solutions_far_out_of_systems_that_are_singular_to_half_the_digits_of_float32(
    unknowns: int, size: float
) -> None:
    """Columns scaled by the solution have condition 1e4 to 1e5: the correction is determined all the same."""
    for seed in range(3):
        z = size * torch.randn(unknowns, generator=torch.Generator().manual_seed(seed))
        beside = torch.diag(torch.ones(unknowns - 1), 1)
        A = 2.01 * torch.eye(unknowns) - beside - beside.T
        found = ik.root(lambda z, A, b: A @ z - b, torch.zeros(unknowns), (A, A @ z))
        assert float((found.value - z).norm() / z.norm()) < 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ["newton", "broyden", "auto"])
@pytest.mark.parametrize("start", [0.3, 1.0, 20.0, 80.0])
def test_a_chain_that_drifts_to_infinity_has_no_root(solver: str, start: float) -> None:
    """Its rows add up to ``exp(-z_0)``: a Jacobian of condition ``exp(z_0)``, whose correction is determined, and 1."""
    for n in (3, 20):
        found = ik.root(
            lambda z: torch.cat([z[:-1] - z[1:], (z[-1] - z[0] + torch.exp(-z[0])).reshape(1)]),
            start * torch.linspace(1, 1.1, n, dtype=torch.float64),
            solver=solver,
            on_failure="ignore",
        )
        assert found.status != ik.Status.CONVERGED


@pytest.mark.parametrize("start", [8.0, 20.0, 26.0])
def test_erfc_has_no_root_although_its_corrections_are_small(start: float) -> None:
    with pytest.raises(ik.ConvergenceError, match="diverged"):
        ik.root(torch.erfc, torch.tensor([start], dtype=torch.float64), solver="newton")


def _exp(exponent: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: torch.exp(-exponent(z))


_NO_ROOT = {
    "exp(-z^4)": (_exp(lambda z: z**4), 1.0, "newton", "float64"),
    "exp(-z^20)": (_exp(lambda z: z**20), 1.0, "auto", "float64"),
    "exp(-z^30)": (_exp(lambda z: z**30), 1.0, "newton", "float64"),
    "exp(-z^30) by steps of 1e-3": (_exp(lambda z: z**30), 1.0, "broyden", "float64"),
    "exp(-z^4), denormal in a bracket": (_exp(lambda z: z**4), 0.01, "scipy.root_scalar.brentq", "float32"),
    "erfc(z^2)": (lambda z: torch.erfc(z**2), 1.0, "auto", "float64"),
    "exp(-1000 z), where it underflows": (_exp(lambda z: 1000 * z), 1.0, "newton", "float64"),
    "1 - tanh(1000 z), where it is rounded away": (lambda z: 1 - torch.tanh(1000 * z), 1.0, "newton", "float32"),
    "exp(-z) (2 + sin(5 z))": (lambda z: torch.exp(-z) * (2 + torch.sin(5 * z)), 1.0, "auto", "float64"),
    "nine, each below atol, and together above": (
        _exp(lambda z: z**4), tuple(0.3 + 0.01 * i for i in range(9)), "auto", "float64",
    ),
    "beside a linear one": (
        lambda z: torch.stack([torch.exp(-(z[0] ** 4) - z[1] ** 2), z[1] - z[0]]), (1.0, 2.0), "auto", "float32",
    ),
    "beside a linear one, from near zero": (
        lambda z: torch.stack([torch.exp(-(z[0] ** 4) - z[1] ** 2), z[1] - z[0]]), (1e-4, 2e-4), "newton", "float32",
    ),
    "beside a linear one, far": (
        lambda z: torch.stack([torch.exp(-(z[0] ** 4) - z[1] ** 2), z[1] - z[0]]), (1e4, 2e4), "newton_krylov", "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _NO_ROOT)
def test_what_vanishes_beyond_every_power_is_no_root(name: str) -> None:
    """The correction of ``exp(-z^p)`` is ``1 / (p z^p)`` of ``z``: as small as that of a root, for large ``p``."""
    f, start, solver, dtype = _NO_ROOT[name]
    z0 = torch.tensor(start, dtype=getattr(torch, dtype))
    assert ik.root(f, z0, solver=solver, on_failure="ignore").status != ik.Status.CONVERGED


@pytest.mark.parametrize(("last", "steep"), [(1e-11, True), (1e-13, False)])
def test_a_zero_is_near_where_every_equation_fell(last: float, steep: bool) -> None:
    """On a step inwards, too, and not by their norm alone."""
    z, point = torch.ones(1, 2), torch.full((1, 2), 2.0)
    F, before = torch.tensor([[1e-9, 1e-12]]), torch.tensor([[1.0, last]])
    assert bool(fell_steeply(z, F, point, before)) is steep


def _hyperbola(z: Tensor) -> Tensor:
    return torch.sqrt(1 + z * z) - z


_ROUNDED_AWAY = {
    "alone": (_hyperbola, 0.5, 1.0),
    "in a unit of its own": (lambda z: _hyperbola(1e8 * z), 5e-9, 1.0),
    "in large units": (lambda z: 1e6 * _hyperbola(z), 30.0, 1.0),
    "beside a linear one": (lambda z: torch.stack([_hyperbola(z[0]), z[1] - 1]), (30.0, 0.0), 1.0),
    "two": (_hyperbola, (30.0, 1.0), 1.0),
    "a hundred": (_hyperbola, tuple(range(1, 101)), 1.0),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("solver", ["auto", "newton", "chord", "broyden"])
@pytest.mark.parametrize("name", _ROUNDED_AWAY)
def test_what_rounding_alone_takes_to_zero_is_no_root(name: str, solver: str, dtype: str) -> None:
    """``sqrt(1 + z^2) - z > 0`` is zero to the last bit from ``1 / sqrt(eps)`` on."""
    f, start, factor = _ROUNDED_AWAY[name]
    z0 = factor * torch.tensor(start, dtype=getattr(torch, dtype))
    assert not bool(ik.root(f, z0, solver=solver, on_failure="ignore").converged.any())


_ZERO_TO_THE_LAST_BIT = {
    "a jump": (lambda z: torch.sign(z - 7), 7.0),
    "steps": (lambda z: torch.round(z) - 100, 100.3),
    "a cubic one": (lambda z: (z - 512) ** 3, 512.0),
    "a plateau": (lambda z: torch.relu(z - 300) - torch.relu(200 - z), 250.0),
    "a kink": (lambda z: (z - 64).abs(), 64.0),
    "two": (lambda z: torch.stack([z[0] - z[1], (z[0] - 64) ** 2]), (64.0, 64.0)),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", _ZERO_TO_THE_LAST_BIT)
def test_what_is_zero_for_other_reasons_is_one(name: str, dtype: str) -> None:
    f, start = _ZERO_TO_THE_LAST_BIT[name]
    z0 = torch.tensor(start, dtype=getattr(torch, dtype))
    assert bool(ik.root(f, z0, solver="newton", on_failure="ignore").converged)


_ROOTS = {
    "order 12": (lambda z: (z - 1) ** 12, 0.7, 1.0, "float64"),
    "order 20": (lambda z: (z + 2) ** 20, -2.3, -2.0, "float64"),
    "order 12, single precision": (lambda z: (z - 1) ** 12, 0.7, 1.0, "float32"),
    "a double one far out": (lambda z: (z / 1000 - 1) ** 2, 900.0, 1000.0, "float64"),
}


@pytest.mark.parametrize("name", _ROOTS)
def test_behind_zeros_of_high_order_the_residual_is_as_large_again(name: str) -> None:
    """A Newton step leaves ``(1 - 1/m)^m`` of such a residual, which is ``1 / e`` in the end, as of ``exp(-z)``."""
    f, start, root, dtype = _ROOTS[name]
    z0 = torch.tensor(start, dtype=getattr(torch, dtype))
    for solver in ("newton", "trust_region", "auto"):
        found = ik.root(f, z0, solver=solver, on_failure="ignore")
        assert found.status == ik.Status.CONVERGED, solver
        assert abs(float(found.value) / root - 1) < 0.3


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plateaus_of_zeros_are_solutions(dtype: torch.dtype, power: int) -> None:
    """They end where ``F`` has a value that belongs to the distance, unlike a function that has underflowed."""
    for start in (0.3, 3.0, 4.5):
        found = ik.root(lambda z: torch.relu(1 - z) ** power, torch.tensor(start, dtype=dtype))
        assert found.status == ik.Status.CONVERGED
        assert float(torch.relu(1 - found.value)) < 1e-2


def test_equations_that_do_not_change_along_the_ray_have_not_underflowed() -> None:
    """In single precision some equations of a column are zero to the last bit where they hold, and stay so along ``z``.  The
    last bit decides from which start the method gets there."""
    verdicts = audit(TABLE["countercurrent50"], ("newton_krylov",), ("float32",), (1e-6, 1e-4, 1e-2))
    assert sum(v.status == "CONVERGED" for v in verdicts) >= 1, [v.text for v in verdicts]


@pytest.mark.parametrize("i", range(5))
def test_an_equation_with_a_derivative_has_not_underflowed(i: int) -> None:
    """``z_i - z_j`` is zero to the last bit, also where signs agree, and ``relu(0.9 - z_k)^8`` ends below rounding."""
    for j in range(5):
        k = next(k for k in range(5) if k not in (i, j))

        def f(z: Tensor, i: int = i, j: int = j, k: int = k) -> Tensor:
            rows = list((z - 1).unbind())
            rows[i] = z[i] - z[j] + torch.relu(0.9 - z[k]) ** 8 if i != j else rows[i]
            return torch.stack(rows)

        start = torch.full((5,), 0.5, dtype=torch.float64)
        assert ik.root(f, start, solver="newton", on_failure="ignore").status == ik.Status.CONVERGED


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", [250.0, 300.0, 500.0])
@pytest.mark.parametrize("size", [1, 3, 200])
def test_factors_of_a_point_far_out_say_nothing_of_rounding_further_in(size: int, start: float) -> None:
    """The next method begins nearer to the origin: beside ``exp(62)``, ``exp(3) - 2`` would be rounding."""
    z0 = torch.linspace(start, start + 1e-3 * (size - 1), size, dtype=F64)
    solution = ik.root(lambda z: torch.exp(z) - 2, z0)
    torch.testing.assert_close(solution.value, torch.full_like(z0, math.log(2)))


@pytest.mark.parametrize(
    ("name", "solver", "dtype", "factor"),
    [
        # the derivative of p^-0.3 at p = e^573 is a denormal number, and says of a flat direction that it is none
        ("economy 4", "auto", "float64", 1e2),
        # zero at the origin too, and where it is not is a small part of the way
        ("z e^-z, also at infinity", "newton", "float32", 1e4),
        ("exp(-z^4), at infinity", "auto", "float32", 1e-6),
        ("exp(-z^20), at infinity", "newton", "float32", 1e-2),
        # a plateau that the objective rises to
        ("log cosh", "gradient_descent", "float64", 1e2),
        # x = 1e-5 beside y = -1e8, where x^2 y is -0.5: what is a unit in the last place of y is none of x
        ("brusselator_oscillating", "newton", "float32", 1e-6),
        ("brusselator_oscillating", "scipy.root.hybr", "float32", 1e-6),
        ("brusselator", "chord", "float32", 1e-6),
    ],
)
def test_points_far_out_that_were_claimed(name: str, solver: str, dtype: str, factor: float) -> None:
    wrong, _ = wrong_and_refused(audit(TABLE[name], (solver,), (dtype,), (factor,)))
    assert not wrong


@pytest.mark.parametrize("solver", ["auto", "lbfgs", "newton_cg"])
def test_a_plateau_that_the_objective_has_climbed_to_is_no_way_to_infinity(solver: str) -> None:
    """``clip(z - 5, -2, 2)^2`` above 7 and ``-exp(-z^2)`` far out are lower on the way there; ``exp(-z)`` is lowest where
    its gradient underflows."""
    clipped = lambda z, climbs: torch.where(climbs > 0, (z - 5).clamp(-2, 2).square(), torch.exp(-z))  # noqa: E731
    climbs = torch.tensor([1.0, 1, 1, 0], dtype=F64)
    start = torch.tensor([7.5, 8, 9, 1000], dtype=F64)
    found = ik.argmin(clipped, start, climbs, batch_dims=1, in_dims=0, solver=solver, on_failure="ignore")
    assert [ik.Status(int(s)).name for s in found.status] == ["SADDLE"] * 3 + ["DIVERGED"]
    well = ik.argmin(lambda z: -torch.exp(-z * z), torch.tensor(100.0, dtype=F64), solver=solver, on_failure="ignore")
    assert int(well.status) == int(ik.Status.SADDLE)


def test_a_plateau_behind_a_bump_is_one_from_far_as_well() -> None:
    """Zero at the origin, and wherever ``|z| >= 1``: what is in between is a hundredth of the way and less."""
    for z0 in (3.0, 100.0, 1e4):
        start = torch.tensor(z0, dtype=torch.float64)
        assert ik.root(lambda z: torch.relu(z) * torch.relu(1 - z), start, solver="newton").converged


@pytest.mark.parametrize("z0", [0.0, 7.0, 1e4])
def test_what_is_zero_everywhere_is_solved_where_it_is(z0: float) -> None:
    """As of a sample that a mask takes out."""
    start = torch.tensor([z0, 7.0], dtype=torch.float64)
    mask = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for solution in (
        ik.root(lambda z, m: m * (z**3 - 8), start, mask, batch_dims=1, in_dims=0),
        ik.argmin(lambda z, m: m * (z - 2) ** 2 + 3, start, mask, batch_dims=1, in_dims=0),
    ):
        assert bool(solution.converged.all()) and solution.value[0] == z0 and (solution.value[1] - 2).abs() < 1e-5


@pytest.mark.parametrize("steepness", [1e3, 1e6, 5e7, 1e9, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_steep_root_far_from_zero_is_one(steepness: float, dtype: torch.dtype) -> None:
    """``F`` changes as ``J`` says on the shortest of ways only, or jumps between neighbouring numbers."""
    start = torch.tensor(50 + 0.3 / steepness, dtype=dtype)
    solution = ik.root(lambda z: torch.tanh(steepness * (z - 50)), start, solver="newton")
    assert solution.converged and (solution.value - 50).abs() <= 100 * torch.finfo(dtype).eps


def test_a_map_that_is_held_has_not_run_away() -> None:
    """Normalised: 128 unknowns of norm 57, some above 20, to 1e-2.  What is left of ``F`` there is no sign of infinity."""
    g = torch.Generator().manual_seed(0)
    W, x = 0.2 * torch.randn(128, 128, generator=g, dtype=F64) / 128**0.5, torch.randn(8, 128, generator=g, dtype=F64)

    def normalised(z: Tensor, x: Tensor) -> Tensor:
        y = torch.relu(torch.tanh(z @ W.mT) + x)
        y = y - y.mean(1, keepdim=True)
        return 5 * y / y.square().mean(1, keepdim=True).sqrt()

    limits = {"rtol": 1e-2, "atol": 0.0, "batch_dims": 1, "in_dims": (0,), "solver": "anderson"}
    found = ik.fixed_point(normalised, torch.zeros_like(x), (x,), **limits)
    assert bool(found.converged.all()) and float(found.value.abs().max()) > 20


@pytest.mark.parametrize(("start", "dtype"), [(1e160, F64), (1e30, torch.float32)])
def test_a_map_that_is_held_claims_nothing_where_the_norm_overflows(start: float, dtype: torch.dtype) -> None:
    """``rtol |z|`` is infinite there, and no residual is more."""
    z0 = torch.full((3,), start, dtype=dtype)
    found = ik.fixed_point(lambda z: 1 + z / 10, z0, solver="picard", on_failure="ignore")
    assert not bool(found.converged) or float((found.value - 10 / 9).abs().max()) < 1e-3


def test_one_component_of_a_map_that_is_held_may_run_away() -> None:
    """Beside 80 that are brought back from anywhere, one at a third of the largest that is not."""
    beside = torch.linspace(15, 30, 80, dtype=F64)
    function = lambda z: torch.cat([torch.sqrt(z[:1] ** 2 + 1), beside + torch.tanh(z[1:])])  # noqa: E731
    z0 = torch.cat([torch.full((1,), 9.0, dtype=F64), beside + 1])
    found = ik.fixed_point(function, z0, solver="picard", rtol=1e-3, on_failure="ignore")
    assert found.status.item() != ik.Status.CONVERGED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", ["auto", "picard", "anderson"])
def test_fixed_points_that_are_small_beside_the_start(solver: str, dtype: torch.dtype) -> None:
    """``z = sin(z) / 2 + c`` from 1: they were taken at ``|F| <= atol``, of 1e-12 without one right digit."""
    c = torch.tensor([[1e-3], [1e-6], [1e-9], [1e-12]], dtype=dtype)
    c = c if dtype is torch.float64 else c.clamp_min(1e-7)
    s = ik.fixed_point(lambda z, c: torch.sin(z) / 2 + c, torch.ones_like(c), (c,), batch_dims=1, solver=solver)
    assert torch.allclose(s.value / (2 * c), torch.ones_like(c), rtol=1e-6 if dtype is torch.float64 else 1e-2)


@pytest.mark.parametrize("solver", ["auto", "anderson"])
def test_a_fixed_point_at_zero_is_not_followed_into_rounding_errors(solver: str) -> None:
    torch.manual_seed(0)
    b = torch.randn(20, dtype=torch.float64)

    def rough(z: torch.Tensor) -> torch.Tensor:
        return 0.9 * ((z + b) - b) + (torch.exp(b) * z - z * torch.exp(b))

    s = ik.fixed_point(rough, torch.ones(20, dtype=torch.float64), solver=solver)
    assert s.evaluations < 20
    exact = ik.fixed_point(lambda z: 0.5 * z, torch.ones(20, dtype=torch.float64), solver=solver)
    assert exact.evaluations < 15


IN_HALF: dict[str, Callable[[Tensor, Tensor], ik.Solution]] = {
    "equations": lambda z0, t: ik.root(
        lambda z, t: z**3 + 2 * z - t + 0.2 * z.roll(1, -1), z0, (t,), solver="df_sane", batch_dims=1
    ),
    "a flow": lambda z0, t: ik.steady_state(lambda z, t: -(z**3) - z + t, z0, (t,), batch_dims=1),
    "a fit": lambda z0, t: ik.least_squares(
        lambda z, t: torch.cat([z**2 + z - t, 0.3 * z.sin() - 0.1], -1), z0, (t,), solver="dogleg", batch_dims=1
    ),
    "a fixed point": lambda z0, t: ik.fixed_point(lambda z, t: 0.7 * torch.tanh(z) + t, z0, (t,), batch_dims=1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", IN_HALF)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_not_asked_by_default_for_what_rounding_leaves(name: str, dtype: torch.dtype) -> None:
    """To 2 eps, as fixed points, equations took 750 evaluations where 50 do, and fits failed."""
    for seed in range(8):
        t = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert IN_HALF[name](torch.zeros_like(t), t).evaluations < 180
