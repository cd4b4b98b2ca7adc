"""Minima of published collections (CUTEst; Andrei 2008) that were refused, or searched for at any cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import Options, Outcome
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage

F32, F64 = torch.float32, torch.float64
Objective = Callable[[Tensor], Tensor]


def numbers(z: Tensor) -> Tensor:
    """``1, 2, ..., n``."""
    return torch.arange(1, len(z) + 1, dtype=z.dtype, device=z.device)


def quartc(z: Tensor) -> Tensor:
    return ((z - numbers(z)) ** 4).sum()


def powers(z: Tensor) -> Tensor:
    """Quartic in one half of the unknowns, quadratic in the other."""
    half = len(z) // 2
    return quartc(z[:half]) + ((z - numbers(z))[half:] ** 2).sum()


def chained(z: Tensor) -> Tensor:
    """Quartic, and each unknown beside a neighbour."""
    d = z - numbers(z)
    return (d**4).sum() + (d[1:] ** 2 * d[:-1] ** 2).sum()


def trigonometric(z: Tensor) -> Tensor:
    """Extended trigonometric: residuals of ``n - sum cos``, of which float32 has left no digit at the minimum."""
    r = len(z) - z.cos().sum() + numbers(z) * (1 - z.cos()) - z.sin()
    return (r**2).sum()


def nondquar(z: Tensor) -> Tensor:
    return (z[0] - z[1]) ** 2 + (z[-2] - z[-1]) ** 2 + ((z[:-2] + z[1:-1] + z[-1]) ** 4).sum()


def mccormck(z: Tensor) -> Tensor:
    """Without its bounds: it falls along ``(-1, ..., -1)``, on waves, and steepest descent leads across."""
    a, b = z[:-1], z[1:]
    return (-1.5 * a + 2.5 * b + 1 + (a - b) ** 2 + torch.sin(a + b)).sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", (F32, F64), ids=str)
@pytest.mark.parametrize("n", (6, 12, 30))
@pytest.mark.parametrize("objective", (quartc, powers, chained))
def test_an_unknown_that_begins_where_it_ends(objective: Objective, n: int, dtype: torch.dtype) -> None:
    """``z_2 = 2`` from the beginning, to the last bit: neither row nor column in the Hessian, and no way to infinity."""
    found = ik.argmin(objective, torch.full((n,), 2.0, dtype=dtype))
    assert found.evaluations <= 700, (objective.__name__, found.evaluations)
    torch.testing.assert_close(found.value, numbers(found.value), rtol=0, atol=0.05 if dtype == F32 else 5e-4)


def test_what_underflows_is_not_taken_for_one() -> None:
    """Beside an unknown that has arrived, another one runs away: that is no minimum."""
    for run in (lambda z: (-0.1 * z).exp(), lambda z: 1 / (1 + z**2)):
        with pytest.raises(ik.ConvergenceError, match="diverged"):
            ik.argmin(lambda z, run=run: (z[0] - 7) ** 4 + run(z[1]), torch.tensor([7.0, 1.0], dtype=F64))


@pytest.mark.parametrize(("objective", "n", "most"), ((trigonometric, 300, 2500), (nondquar, 12, 1000)))
def test_noise_is_searched_a_few_times_only(objective: Objective, n: int, most: int) -> None:
    """In float32, where values and slopes agree on no length of a step: search after search used up its trials."""
    start = torch.full((n,), 0.2) if objective is trigonometric else torch.tensor([1.0, -1.0]).repeat(n // 2)
    found = ik.argmin(objective, start, on_failure="ignore")
    assert found.evaluations <= most, (objective.__name__, found.evaluations)
    assert objective(found.value) < 1e-3


@pytest.mark.parametrize("n", (11, 12, 40))
def test_what_falls_forever_on_waves(n: int) -> None:
    with pytest.raises(ik.ConvergenceError, match="unbounded") as caught:
        ik.argmin(mccormck, torch.ones(n, dtype=F64))
    assert caught.value.solution.evaluations <= 2000


class _Says(ik.Solver):
    """Gets no further, says what is left of ``|F|``, and where others should go on."""

    name = "says"
    solves = "minimise"

    def __init__(self, status: ik.Status, onward: float = 0.0) -> None:
        self.status, self.onward = status, onward

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        F = torch.linalg.vector_norm(f(z0), dim=1)
        status = torch.full((len(z0),), int(self.status))
        g = torch.Generator().manual_seed(0)
        onward = z0 + self.onward * (1 + 0.1 * torch.randn(z0.shape[1], generator=g, dtype=z0.dtype))
        return Outcome(z0, F, torch.ones_like(status), status, onward=onward)


def test_two_that_say_that_it_falls_forever_are_believed() -> None:
    """Though neither came to a smaller slope, and one before them stalled."""
    falls = Stage(_Says(ik.Status.UNBOUNDED))
    for more, status in ((1, ik.Status.STALLED), (2, ik.Status.UNBOUNDED)):
        solver = Polyalgorithm((Stage(_Says(ik.Status.STALLED)), *[falls] * more))
        found = ik.argmin(lambda z: z.cosh().sum(), torch.ones(2, dtype=F64), solver=solver, on_failure="ignore")
        assert ik.Status(int(found.status)) is status, more


@pytest.mark.parametrize("last", ("newton_cg", "bfgs"))
def test_no_minimum_where_rounding_is_larger_than_the_slope_at_the_start(last: str) -> None:
    """At 1e20 the gradient is some 1e4, and nothing but rounding errors of what cancels in it."""
    solver = Polyalgorithm((Stage(_Says(ik.Status.STALLED, onward=-1e20)), Stage(last, max_steps=500, scale=None)))
    found = ik.argmin(mccormck, torch.ones(12, dtype=F64), solver=solver, on_failure="ignore")
    assert not bool(found.converged), found


def test_a_long_way_down_is_walked_to_its_end() -> None:
    """What comes to rest far out is not taken for what falls forever."""
    for size in (1e3, 1e6, 1e9):
        found = ik.argmin(
            lambda z, size=size: (size * (1 + (z / size - 1) ** 2).sqrt()).sum(), torch.zeros(3, dtype=F64)
        )
        torch.testing.assert_close(found.value, torch.full((3,), size, dtype=F64), rtol=1e-6, atol=0)


def test_a_long_valley_is_no_way_down_forever() -> None:
    """Four looks at a slope that hardly changes, and ``z`` that does not go far."""
    rosenbrock = lambda z: (100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()  # noqa: E731
    found = ik.argmin(rosenbrock, torch.tensor([-1.2, 1.0], dtype=F64).repeat(30), solver="lbfgs")
    assert int(found.steps) > 200
    torch.testing.assert_close(found.value.abs(), torch.ones(60, dtype=F64), rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("f", "start"),
    [
        (lambda z: (z[1] - z[0] ** 2) * (z[1] - 3 * z[0] ** 2), (0.0, -2.0)),
        (lambda z: (z[0] ** 2 - 1) ** 2 + z[1] ** 2 * (1 - z[0]) - z[2] ** 2 + z[2] ** 4, (1.0, 0.0, 0.707)),
        (lambda z: z[1] ** 2 + 10 * z[2] ** 2 - (z[1] + 3 * z[2]) * z[0] ** 2 + 0.1 * z[0] ** 4, (0.0, 0.1, 0.3)),
    ],
    ids=["Peano", "a cubic beside wells", "two steep directions"],
)
def test_what_falls_along_a_curve_alone_is_no_minimum(f: Callable[[Tensor], Tensor], start: tuple[float, ...]) -> None:
    """Each rises along every straight line through the point that was claimed, where its gradient vanishes."""
    found = ik.argmin(f, torch.tensor(start, dtype=torch.float64), on_failure="ignore", max_steps=100)
    assert not bool(found.converged), found
    rises = ik.argmin(
        lambda z: f(z) + 9 * z[-2:].square().sum().square() + 9 * z[0] ** 4, torch.tensor(start, dtype=torch.float64)
    )
    assert bool(rises.converged)


def test_a_bent_valley_that_rises_either_way_has_its_minimum() -> None:
    """All but flat along the curve ``y = x^2``."""
    found = ik.argmin(
        lambda z: (z[1] - z[0] ** 2) ** 2 + 0.1 * z[0] ** 4, torch.tensor([0.0, -2.0], dtype=torch.float64)
    )
    assert bool(found.converged) and float(found.value.abs().max()) < 1e-2
