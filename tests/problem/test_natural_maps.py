"""Optimality conditions of bounds and separable terms where a slope is smaller than an ulp of the unknown.

``z - prox(z - slope)`` is zero there for every ``z``, and whatever point was reached first counted as the solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.trees import Layout
from implicitkit.problem.unit_of_objective import cost_of
from implicitkit.sets.base import Projection

THETA = (3.0, 2.0, -1.0, 0.25)


def clipped(theta):
    return theta.clamp(0.0, 2.5)


def shrunk(theta):
    return theta.sign() * (theta.abs() - 0.5).clamp_min(0)


#: name -> (options in the units of z and f, solution in units of one; the term is of one unit of f a unit of z).
TERMS = {
    "bounds": (lambda u, f: {"bounds": (0.0, 2.5 * u)}, clipped),
    "lower bounds, tensors": (
        lambda u, f: {"bounds": (torch.zeros(4, device="cpu"), None)},
        lambda t: t.clamp_min(0.0),
    ),
    "box": (lambda u, f: {"project": ik.project.box(0.0, 2.5 * u)}, clipped),
    "nonnegative numbers": (lambda u, f: {"project": ik.project.nonnegative()}, lambda t: t.clamp_min(0)),
    "ball of the largest": (
        lambda u, f: {"project": ik.project.linf_ball(1.25 * u, 1.25 * u * torch.ones(4, device="cpu"))},
        clipped,
    ),
    "l1": (lambda u, f: {"prox": ik.prox.l1(0.5 * f / u)}, shrunk),
    "ridge": (lambda u, f: {"prox": ik.prox.ridge(f / u**2)}, lambda t: t / 2),
    "elastic net": (lambda u, f: {"prox": ik.prox.elastic_net(0.5 * f / u, f / u**2)}, lambda t: shrunk(t) / 2),
    "nonnegative": (lambda u, f: {"prox": ik.prox.nonnegative(0.5 * f / u)}, lambda t: (t - 0.5).clamp_min(0)),
    "nonnegative ridge": (lambda u, f: {"prox": ik.prox.nonnegative_ridge(f / u**2)}, lambda t: t.clamp_min(0) / 2),
}
UNITS = [(1.0, 1e-12, torch.float64), (1e6, 1e-6, torch.float64), (1e3, 1e-3, torch.float32)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("unit, factor, dtype", UNITS)
@pytest.mark.parametrize("name", TERMS)
def test_a_slope_below_an_ulp(name, unit, factor, dtype):
    """``factor |z / unit - theta|^2 / 2`` and the term: value and Jacobian by the closed form."""
    options, solution = TERMS[name]
    theta = torch.tensor(THETA, dtype=dtype)

    def solve(theta):
        start = torch.full((4,), unit, dtype=dtype)
        objective = lambda z, theta: factor / 2 * (z / unit - theta).square().sum()  # noqa: E731
        return ik.argmin(objective, start, (theta,), **options(unit, factor)).value / unit

    close = {"rtol": 1e-7, "atol": 1e-7} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(solve(theta), solution(theta), **close)
    torch.testing.assert_close(torch.func.jacrev(solve)(theta), torch.func.jacrev(solution)(theta), **close)


@pytest.mark.parametrize("unit, factor", [(1.0, 1e-9), (1e6, 1e-3)])
def test_bounded_fits(unit, factor):
    """The same of residuals, whose square is smaller still."""
    theta = torch.tensor(THETA, dtype=torch.float64)
    fit = lambda t: ik.least_squares(  # noqa: E731
        lambda z, t: factor * (z / unit - t), torch.full((4,), unit).double(), (t,), bounds=(0.0, 2.5 * unit)
    )
    torch.testing.assert_close(fit(theta).value / unit, clipped(theta), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", TERMS)
def test_the_same_map(name):
    """``natural`` is ``z - prox(z - slope)`` where nothing is lost, in value and derivative."""
    generator = torch.Generator().manual_seed(5)
    z, g = (3 * torch.randn(200, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    (which,) = TERMS[name][0](1.0, 0.6).values()  # weights other than one
    if isinstance(which, tuple):
        which = ik.project.box(*which)
    image = which if isinstance(which, Projection) else lambda v: which(v, 1.0)
    wanted = lambda z, g: z - image(z - g)  # noqa: E731
    torch.testing.assert_close(which.natural(z, g), wanted(z, g))
    for i in (0, 1):
        slopes = [torch.func.jacrev(f, i)(z[:20], g[:20]) for f in (which.natural, wanted)]
        torch.testing.assert_close(*slopes)


NAN = torch.tensor((1.0, float("nan")), dtype=torch.float64, device="cpu")
UNKNOWN = {
    "box": lambda b: {"project": ik.project.box(0.0, b)},
    "box from below": lambda b: {"project": ik.project.box(b, None)},
    "l1": lambda b: {"prox": ik.prox.l1(b)},
    "elastic net": lambda b: {"prox": ik.prox.elastic_net(b, 1.0)},
    "nonnegative": lambda b: {"prox": ik.prox.nonnegative(b)},
    "l1 ball": lambda b: {"project": ik.project.l1_ball(b[0])},
    "l2 ball": lambda b: {"project": ik.project.l2_ball(b[0])},
    "bounds, under vmap": lambda b: {"bounds": (0.0, b)},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_bound_or_weight_that_is_no_number(name):
    """It is no bound that is not there: the solve fails, for its sample alone."""
    start = torch.zeros(1, dtype=torch.float64, device="cpu")

    def solve(b):
        objective = lambda z: (z - 3).square().sum() / 2  # noqa: E731
        found = ik.argmin(objective, start, on_failure="ignore", **UNKNOWN[name](b))
        return found.converged

    assert torch.vmap(solve)(NAN.unsqueeze(1)).tolist() == [True, False]


class Doubled(ik.prox.l1):
    def apply(self, v, t):
        return super().apply(v, 2 * t)


class Halved(ik.project.box):
    def project(self, v):
        return super().project(2 * v) / 2


@pytest.mark.parametrize(
    "options, value", [({"prox": Doubled(1.0)}, 1.0), ({"project": Halved(0.0, 1.0)}, 0.5)], ids=["prox", "project"]
)
def test_a_map_that_a_subclass_has_changed(options, value):
    """The natural map of the base says nothing of it."""
    start = torch.zeros(1, dtype=torch.float64, device="cpu")
    found = ik.argmin(lambda z: (z - 3).square().sum() / 2, start, **options)
    torch.testing.assert_close(found.value, torch.full_like(start, value))


# ---------------------------------------------------------------------------------------------------------------------
# ``c`` by which an objective is multiplied, where its curvature along the slope is known: ``1 / curvature``.
DOUBLE = torch.float64
ONES = torch.ones(4, dtype=DOUBLE)
B = torch.tensor([1.0, 0.7, -0.3, 0.9], dtype=DOUBLE)
EPS = torch.finfo(DOUBLE).eps
Objective = Callable[[Tensor], Tensor]


def bent(z: Tensor, at: float) -> Tensor:
    return 0.5 * (z - at).square().sum()


# name -> objective, start, curvature there (None: slopes are no smaller than unknowns, and ``c`` is one)
CASES: dict[str, tuple[Objective, Tensor, float | None]] = {
    "a slope of 1e-6": (lambda z: 1e-6 * bent(z, 3.0), ONES, 1e-6),
    "a slope of 1e-6 at a minimum of curvature one": (lambda z: bent(z, 1 + 1e-6), ONES, None),
    "a curvature that ends": (lambda z: 1e-9 * torch.cosh(z - 3).log().sum(), ONES, 1e-9 / math.cosh(2) ** 2),
    "a curvature that is seen far out": (lambda z: 1e-9 * ((B * z).sum() + 1e-12 * bent(z, 1)), ONES, 1e-21),
    "a curvature that is seen nearby only": (
        lambda z: 1e-9 * ((B * z).sum() + 2e-8 * (bent(z, 10) + 750 * (z - 10).pow(4).sum())), 10 * ONES, 2e-17,
    ),
    "a slope with noise of some units": (
        lambda z: 1e-9 * ((B * z - 30 * EPS / 1e9 * torch.cos(1e9 * z)).sum() + 1e-12 * bent(z, 1)), ONES, 1e-21,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_unit_is_one_over_the_curvature(name: str) -> None:
    objective, z0, curvature = CASES[name]
    c = cost_of(objective, None, z0, (), Layout(z0, 0))
    if curvature is None:
        assert c is None
    else:
        assert c is not None and abs(math.log2(float(c) * curvature)) < 0.6
        assert math.log2(float(c)).is_integer()  # nothing is rounded


def test_it_stays_a_number_of_float32() -> None:
    z0 = ONES.float()
    c = cost_of(lambda z: 1e-30 * bent(z, 3.0), None, z0, (), Layout(z0, 0))
    assert c is not None and float(c) == 2.0**60


@pytest.mark.parametrize("name", ["nonnegative", "ball"])
@pytest.mark.parametrize("span", [1e4, 1e6])
def test_unknowns_in_units_far_apart(name, span):
    """In float32 a step by the slope was rounded away beside a large unknown: 0.008 was claimed for 2.3."""
    unit = 1 / torch.logspace(0, math.log10(span), 6)
    theta = torch.tensor([2.3, -0.4, -0.3, 0.8, -1.6, -2.1])
    centre = 5 * unit
    which = ik.project.nonnegative() if name == "nonnegative" else ik.project.linf_ball(5.0, centre)
    wanted = theta.clamp_min(0) if name == "nonnegative" else theta.clamp(5 - 5 / unit, 5 + 5 / unit)
    found = ik.argmin(lambda z: (z / unit - theta).square().sum() / 2, torch.zeros(6), project=which)
    torch.testing.assert_close(found.value / unit, wanted, rtol=1e-3, atol=1e-3)
