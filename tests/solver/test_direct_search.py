"""Searches by values: Nelder-Mead and golden section, on batches, kinks and noise, against SciPy and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.testing import CHECKS, check_solver

F64 = torch.float64
STALLED = int(ik.Status.STALLED)
SEARCHES: dict[str, Any] = {
    "nelder_mead": ("nelder_mead", 1e-6),
    "golden_section": ("golden_section", 1e-10),
    "golden_section, bracket": (ik.GoldenSection(bracket=(-6.0, 6.0)), 1e-10),
}
LONG = {"reports_failure", "never_worse_than_the_start"}  # thousands of steps on what has no minimum


# golden_section by its name is one of test_conformance.py, too
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("bracket" not in name)) for name in SEARCHES]
)
def test_conformance(name: str) -> None:
    solver, accuracy = SEARCHES[name]
    # a given bracket is searched whatever z0 is: after three steps it may have seen points of larger gradient only, and of
    # two minima in it either may be found
    anywhere = {"never_worse_than_the_start", "starts_where_it_is_told"} if "bracket" in name else set()
    left_out = LONG if name == "nelder_mead" else anywhere
    assert check_solver(solver, accuracy=accuracy, checks=[c for c in CHECKS if c not in left_out]).passed


@pytest.mark.slow
def test_nelder_mead_on_what_has_no_minimum() -> None:
    assert check_solver("nelder_mead", accuracy=1e-6, checks=sorted(LONG)).passed


# ------------------------------------------------------------------------------------------------------------ Nelder-Mead
def _rosenbrock(z: Tensor) -> Tensor:
    return (100 * (z[..., 1:] - z[..., :-1] ** 2) ** 2 + (1 - z[..., :-1]) ** 2).sum(-1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_nelder_mead_finds_minima_of_a_batch(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    targets = torch.randn(4, n, generator=generator, dtype=F64)
    objective = lambda z, t: ((z - t) ** 4).sum(-1) + ((z - t) ** 2).sum(-1)  # noqa: E731
    solution = ik.argmin(objective, torch.zeros(4, n, dtype=F64), (targets,), solver="nelder_mead", batch_dims=1)
    torch.testing.assert_close(solution.value, targets, rtol=0, atol=1e-9)


def test_nelder_mead_takes_about_the_steps_of_scipy() -> None:
    z0 = torch.tensor([-1.2, 1.0], dtype=F64)
    values = []

    def counted(x: Any) -> float:
        values.append(float(_rosenbrock(torch.from_numpy(x))))
        return values[-1]

    options = {"adaptive": True, "xatol": 1e-6, "fatol": 1e-12}
    theirs = scipy.optimize.minimize(counted, z0.numpy(), method="Nelder-Mead", options=options)
    ours = ik.argmin(_rosenbrock, z0, solver="nelder_mead", rtol=1e-5)
    torch.testing.assert_close(ours.value, torch.ones(2, dtype=F64), rtol=0, atol=1e-4)
    assert int(ours.steps) <= 1.2 * theirs.nit


@pytest.mark.parametrize("seed", range(8))
def test_the_first_steps_are_those_of_scipy(seed: int) -> None:
    """Corner by corner, on random waves: reflections, expansions, both contractions and shrinking all occur."""
    generator = torch.Generator().manual_seed(seed)
    waves = 4 * torch.randn(3, 3, generator=generator, dtype=F64)
    z0 = torch.randn(3, generator=generator, dtype=F64)

    def wavy(z: Tensor) -> Tensor:
        return 0.1 * (z**2).sum(-1) + torch.sin(z @ waves).abs().sum(-1)

    theirs: list[Any] = []
    scipy.optimize.minimize(
        lambda x: float(wavy(torch.from_numpy(x))), z0.numpy(), method="Nelder-Mead",
        callback=lambda x: theirs.append(torch.from_numpy(x.copy())), options={"maxiter": 80, "xatol": 0, "fatol": 0},
    )  # fmt: skip
    found = _steps(ik.NelderMead(adaptive=False), wavy, z0, 80)
    torch.testing.assert_close(torch.stack(found[: len(theirs)]), torch.stack(theirs), rtol=0, atol=1e-9)


def _steps(method: Any, objective: Callable[[Tensor], Tensor], z0: Tensor, count: int) -> list[Tensor]:
    """The best corner after each step, from the driver's own trail."""
    points: list[Tensor] = []

    class Watched(type(method)):  # type: ignore[misc]
        def step(self, f: Any, z: Tensor, state: Any) -> Any:
            z_next, state = super().step(f, z, state)
            points.append(z_next[0])
            return z_next, state

    watched = Watched(**{name: getattr(method, name) for name in ("size", "adaptive", "restarts")})
    ik.argmin(objective, z0, solver=watched, max_steps=count, on_failure="ignore", rtol=1e-14, atol=0)
    return points


def test_nelder_mead_at_a_kink_and_under_noise() -> None:
    target = torch.tensor([[1.0, -2.0]], dtype=F64)
    kinked = lambda z: (z - target).abs().sum(-1)  # noqa: E731
    solution = ik.argmin(kinked, torch.zeros(1, 2, dtype=F64), solver="nelder_mead", batch_dims=1, on_failure="ignore")
    torch.testing.assert_close(solution.value, target, rtol=0, atol=1e-6)

    def noisy(z: Tensor) -> Tensor:  # a deterministic ripple of 1e-4
        return ((z - target) ** 2).sum(-1) + 1e-4 * torch.sin(1e4 * z).sum(-1)

    solution = ik.argmin(noisy, torch.zeros(1, 2, dtype=F64), solver="nelder_mead", batch_dims=1, on_failure="ignore")
    assert float((solution.value - target).abs().max()) < 0.05


# --------------------------------------------------------------------------------------------------------- golden section
def _valley(z: Tensor, t: Tensor) -> Tensor:
    """Minimum at ``t``, of different steepness on both sides."""
    return (torch.exp(z - t) - (z - t)).sum(-1)


@pytest.mark.parametrize("bracket", [None, (-50.0, 40.0), (torch.tensor([-9.0, -8, -7]), torch.tensor([9.0, 8, 7]))])
def test_golden_section_reaches_full_precision(bracket: Any) -> None:
    """Past the square root of rounding that values alone would allow; ``dz/dt = 1``."""
    t = torch.tensor([[0.3], [-2.5], [4.0]], dtype=F64, requires_grad=True)
    solver = ik.GoldenSection(bracket=bracket)
    solution = ik.argmin(_valley, torch.zeros(3, 1, dtype=F64), (t,), solver=solver, batch_dims=1, in_dims=(0,))
    torch.testing.assert_close(solution.value, t.detach(), rtol=0, atol=1e-9)
    assert int(solution.steps.max()) < 90
    (slope,) = torch.autograd.grad(solution.value.sum(), t)
    torch.testing.assert_close(slope, torch.ones_like(slope))


def test_the_bracket_shrinks_by_the_golden_section() -> None:
    """After ``k`` steps the point is within ``0.618^k`` of a minimum without a derivative."""

    def cusp(z: Tensor) -> Tensor:
        return ((z - 0.7123).abs() + 0.5 * (z - 0.7123).abs().sqrt()).sum(-1)

    solver = ik.GoldenSection(bracket=(0.0, 1.0))
    for count in (5, 10, 20, 40):
        solution = ik.argmin(
            cusp, torch.full((1, 1), 9.0, dtype=F64), solver=solver, batch_dims=1, on_failure="ignore", max_steps=count
        )
        assert abs(float(solution.value) - 0.7123) < 1.7 * 0.618034**count


def test_golden_section_gives_up_where_there_is_no_minimum() -> None:
    falling = ik.argmin(
        lambda z: -z.sum(-1), torch.zeros(2, 1, dtype=F64), solver="golden_section", batch_dims=1, on_failure="ignore"
    )
    assert not bool(falling.converged.any())
    at_the_end = ik.argmin(
        lambda z: (z**2).sum(-1), torch.full((1, 1), 5.0, dtype=F64), batch_dims=1, on_failure="ignore",
        solver=ik.GoldenSection(bracket=(1.0, 2.0)),
    )  # fmt: skip
    assert int(at_the_end.status) == STALLED
    assert float(at_the_end.value) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ik.NelderMead(size=0.0), "size"),
        (lambda: ik.NelderMead(restarts=-1), "restarts"),
        (lambda: ik.GoldenSection(width=-1.0), "width"),
        (lambda: ik.GoldenSection(expansions=0), "expansions"),
        (lambda: ik.GoldenSection(bracket=(1.0, 0.0)), "low must be below high"),
        (lambda: ik.GoldenSection(bracket=3.0), "pair"),
        (lambda: ik.GoldenSection(bracket=("0", 1.0)), "low must be a number"),
    ],
)
def test_bad_options(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
