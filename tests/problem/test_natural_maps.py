"""Optimality conditions of bounds and separable terms where a slope is smaller than an ulp of the unknown.

``z - prox(z - slope)`` is zero there for every ``z``, and whatever point was reached first counted as the solution.
"""

import pytest
import torch

import implicitkit as ik

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
    "l1": (lambda u, f: {"prox": ik.prox.l1(0.5 * f / u)}, shrunk),
    "ridge": (lambda u, f: {"prox": ik.prox.ridge(f / u**2)}, lambda t: t / 2),
    "elastic net": (lambda u, f: {"prox": ik.prox.elastic_net(0.5 * f / u, f / u**2)}, lambda t: shrunk(t) / 2),
    "nonnegative": (lambda u, f: {"prox": ik.prox.nonnegative(0.5 * f / u)}, lambda t: (t - 0.5).clamp_min(0)),
    "nonnegative ridge": (lambda u, f: {"prox": ik.prox.nonnegative_ridge(f / u**2)}, lambda t: t.clamp_min(0) / 2),
}
UNITS = [(1.0, 1e-12, torch.float64), (1e6, 1e-6, torch.float64), (1e3, 1e-3, torch.float32)]


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
    image = which if isinstance(which, ik.project.box) else lambda v: which(v, 1.0)
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
