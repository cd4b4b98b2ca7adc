"""Problems without a solution: refused in the right words, after a bounded number of evaluations, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.problem.kinked_spectra import beside_kinks
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage

F64 = torch.float64
Z = torch.linspace(0.1, 1, 4, dtype=F64)
ONES = torch.ones(4, dtype=F64)


def _argmin(objective: Callable[[Tensor], Tensor], z0: Tensor = Z, **options: Any) -> Callable[[], ik.Solution]:
    return lambda: ik.argmin(objective, z0, **options)


def _root(residual: Callable[[Tensor], Tensor], z0: Tensor = Z, **options: Any) -> Callable[[], ik.Solution]:
    return lambda: ik.root(residual, z0, **options)


def _map(f: Callable[[Tensor], Tensor], z0: Tensor = Z, **options: Any) -> Callable[[], ik.Solution]:
    return lambda: ik.fixed_point(f, z0, **options)


def _noise(z: Tensor) -> Tensor:
    return (torch.rand_like(z) * z).sum(-1)


SIMPLEX = {"project": ik.project.simplex()}
CUSP = [ik.Inequality(lambda z: z[1] - (1 - z[0]) ** 3)]
SPECTRUM = torch.tensor([[3.0, 0.5, 0.2], [0.5, 2.8, -0.4], [0.2, -0.4, -1.0], [0.3, 0.1, 0.6]], dtype=F64)


def _spectral(value: Callable[[Tensor], Tensor], weight: float, rows: int = 3) -> Callable[[], ik.Solution]:
    """Squares and ``weight`` times a function of eigenvalues or singular values, which coincide or vanish at the minimum."""
    at = SPECTRUM[:rows]
    return _argmin(lambda z: 0.5 * (z - at).square().sum() + weight * value(z), torch.zeros_like(at))


#: the solve, most evaluations, words
ROWS: dict[str, tuple[Callable[[], ik.Solution], int, str]] = {
    "map: z + 1": (_map(lambda z: z + 1), 150, "no fixed point"),
    "map: z + c": (_map(lambda z: z + Z - 0.5), 150, "no fixed point"),
    "map: z + 1, float32": (_map(lambda z: z + 1, Z.float()), 150, "no fixed point"),
    "map: z + 1, a batch": (_map(lambda z: z + 1, torch.zeros(8, 4, dtype=F64), batch_dims=1), 150, "8 of 8"),
    "map: a component drifts": (
        _map(lambda z: torch.cat([0.5 * z[:3] + 1, z[3:] + 0.3])),
        200,
        "no fixed point",
    ),
    "map: sqrt(z^2 + 1)": (_map(lambda z: (z * z + 1).sqrt()), 900, "diverged"),
    "map: noise": (_map(lambda z: 0.5 * z + torch.rand_like(z)), 400, "draws random numbers"),
    "map: noise, by name": (
        _map(lambda z: 0.5 * z + torch.rand_like(z), solver="picard", max_steps=50),
        100,
        "draws random numbers",
    ),
    "root: exp": (_root(torch.exp), 1300, "diverged"),
    "root: a constant": (_root(lambda z: 0 * z + 1), 1300, "stalled"),
    "root: 1 / z": (_root(lambda z: 1 / z), 1800, "diverged"),
    "root: z^2 + 1": (_root(lambda z: z * z + 1), 2000, "stalled"),
    "root: noise": (_root(lambda z: z + torch.rand_like(z)), 1500, "draws random numbers"),
    "minimum: linear": (_argmin(torch.sum), 300, "unbounded"),
    "minimum: -z^2": (_argmin(lambda z: -z.square().sum()), 300, "unbounded"),
    "minimum: exp": (_argmin(lambda z: z.exp().sum()), 450, "diverged"),
    "minimum: nuclear norm": (_spectral(lambda z: torch.linalg.matrix_norm(z, "nuc"), 2.0, 4), 300, "prox.nuclear"),
    "minimum: singular values": (_spectral(lambda z: torch.linalg.svdvals(z).sum(), 2.0, 4), 300, "prox.nuclear"),
    "minimum: spectral norm": (_spectral(lambda z: torch.linalg.matrix_norm(z, 2), 2.0), 300, "ConvexLayer"),
    "minimum: largest eigenvalue": (
        _spectral(lambda z: torch.linalg.eigvalsh(z + z.mT).amax(), 1.0),
        300,
        "ConvexLayer",
    ),
    "minimum: last eigenvalue": (_spectral(lambda z: torch.linalg.eigvalsh(z + z.mT)[-1], 1.0), 300, "ConvexLayer"),
    "minimum: noise": (_argmin(_noise), 400, "draws random numbers"),
    "fit: exp(-z)": (lambda: ik.least_squares(lambda z: (-z).exp(), Z), 400, "diverged"),
    "steady state: 1": (lambda: ik.steady_state(lambda z: 0 * z + 1, Z), 1500, "stalled"),
    "bounds: linear": (_argmin(torch.sum, bounds=(None, 2.0)), 50, "unbounded"),
    "bounds: exp(-z)": (_argmin(lambda z: (-z).exp().sum(), bounds=(0.0, None)), 1000, "diverged"),
    "simplex: noise": (_argmin(_noise, ONES / 4, **SIMPLEX), 1500, "draws random numbers"),
    "simplex: little noise": (_argmin(lambda z: 1e-10 * _noise(z), ONES / 4, **SIMPLEX), 1500, "draws random numbers"),
    "simplex: a kink": (
        _argmin(lambda z: (z - Z).abs().max() + z[0], ONES / 4, **SIMPLEX),
        4500,
        "that of a kink",
    ),
    "constraints: linear": (_argmin(torch.sum, constraints=[ik.Inequality(lambda z: z[0] - 1)]), 600, "unbounded"),
    "constraints: z^2 = -1": (
        _argmin(lambda z: z.square().sum(), constraints=[ik.Equality(lambda z: z.square().sum() + 1)]),
        4500,
        "violated",
    ),
    "constraints: two planes": (
        _argmin(lambda z: z.square().sum(), constraints=[ik.Equality(lambda z: z.sum() - ONES[:2].cumsum(0))]),
        3500,
        "violated",
    ),
    "constraints: a circle and a line apart": (
        _argmin(
            lambda z: z.square().sum(),
            ONES[:2],
            constraints=[ik.Equality(lambda z: torch.stack([z @ z - 1, z[0] + z[1] - 3]))],
        ),
        2900,
        "violated",
    ),
    "constraints: an infimum far out": (
        _argmin(lambda z: torch.exp(-z[0]) + z[1] ** 2, ONES[:2], constraints=[ik.Inequality(lambda z: z[1] - 1)]),
        1200,
        "diverged",
    ),
    "constraints: a barrier that falls": (
        _argmin(
            lambda z: -torch.log(z[0]) - torch.log(z[1]) + z[1],
            ONES[:2],
            constraints=[ik.Inequality(lambda z: z[1] - z[0])],
        ),
        2000,
        "diverged|unbounded",
    ),
    "no multipliers: Hock & Schittkowski 13": (
        _argmin(lambda z: (z[0] - 2) ** 2 + z[1] ** 2, -2 * ONES[:2], constraints=CUSP, bounds=(0.0, None)),
        2500,
        "no multipliers exist",
    ),
    "no multipliers: Hock & Schittkowski 221": (
        _argmin(lambda z: -z[0], ONES[:2] / 4, constraints=CUSP, bounds=(0.0, None)),
        3300,
        "no multipliers exist",
    ),
    "no multipliers: a square, met by rounding": (
        _argmin(
            lambda z: (z - 4 * Z.eq(1)).square().sum(), ONES / 2, constraints=[ik.Equality(lambda z: z.sum().square())]
        ),
        3000,
        "no multipliers exist",
    ),
    "no multipliers: z^2 = 0": (
        _argmin(lambda z: z[0], ONES[:2], constraints=[ik.Equality(lambda z: z.square().sum())]),
        3000,
        "no multipliers exist",
    ),
}

DEAR = (  # of a kind that another row has, or many cheap steps
    "no multipliers: z^2 = 0",
    "simplex: a kink",
    "constraints: a circle and a line apart",
    "constraints: a barrier that falls",
)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in DEAR)) for n in ROWS])
def test_refused_in_bounded_time(name: str) -> None:
    solve, most, words = ROWS[name]
    with torch.random.fork_rng(), pytest.raises(ik.ConvergenceError, match=words) as caught:
        torch.manual_seed(0)
        solve()
    assert caught.value.solution.evaluations <= most, (name, caught.value.solution.evaluations)


def test_coincident_eigenvalues_that_count_alike_are_no_kink() -> None:
    """A logarithm of a determinant is smooth there, and a slow search for its minimum is not given up."""
    one = torch.eye(3, dtype=F64)
    alike = lambda z: -torch.linalg.eigvalsh(z).log().sum()  # noqa: E731
    assert not bool(beside_kinks(lambda: alike(one), 1))
    assert bool(beside_kinks(lambda: torch.linalg.eigvalsh(one)[-1], 1))
    assert not bool(beside_kinks(lambda: torch.linalg.svdvals(SPECTRUM.mT @ SPECTRUM - 0.9 * one).square().sum(), 1))
    assert bool(beside_kinks(lambda: torch.linalg.eigvalsh(0 * one).amax(), 1))
    assert not bool(beside_kinks(lambda: torch.linalg.svdvals(0 * one).square().sum(), 1))
    assert beside_kinks(lambda: one.sum(), 1) is None


@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
def test_draws_that_change_nothing_do_no_harm() -> None:
    def f(z: Tensor) -> Tensor:
        torch.rand(3)
        return 0.5 * z.cos()

    assert bool(ik.fixed_point(f, Z).converged)
    assert bool(ik.root(lambda z: f(z) - z, 30 * Z).converged)


@pytest.mark.slow
def test_the_limits_of_multipliers_are_not_presumed() -> None:
    """Infeasible, or unbounded, is another word."""
    for name in ("constraints: linear", "constraints: z^2 = -1"):
        with pytest.raises(ik.ConvergenceError) as caught:
            ROWS[name][0]()
        assert "multipliers exist" not in str(caught.value), name
    early = {"constraints": [ik.Equality(lambda z: z.sum() - 1)], "max_steps": 1}
    with pytest.raises(ik.ConvergenceError) as caught:
        ik.argmin(lambda z: (z - Z).square().square().sum(), torch.tensor([0.9, 0.1, 0.0, 0.0], dtype=F64), **early)
    assert "multipliers exist" not in str(caught.value)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_large_multipliers_of_a_small_constraint_are_no_sign_of_none(dtype: torch.dtype) -> None:
    """On a circle, ``z = a / |a|``, whatever the unit of the constraint; of a square there is no derivative."""
    a = torch.tensor([3.0, 4.0], dtype=dtype, requires_grad=True)
    circle = ik.Equality(lambda z, a: 1e-6 * (z.square().sum() - 1))
    found = ik.argmin(lambda z, a: (z - a).square().sum(), torch.ones(2, dtype=dtype), (a,), constraints=[circle])
    torch.testing.assert_close(found.value, a / 5)
    assert float(found.multipliers[0].detach()) > 1e6
    torch.testing.assert_close(
        torch.autograd.grad(found.value[0], a)[0], torch.tensor([16.0, -12.0], dtype=dtype) / 125
    )


# ---------------------------------------------------------------------------------------------------------------------
# One bad sample never spoils its batch: of every kind of problem, the others have the values and the derivatives that they
# have alone, to the last digits, and cost no more.
_NAN, _INF = float("nan"), float("inf")
_GOOD = torch.tensor([[0.5, 1.0], [0.8, 0.3]], dtype=F64)


def _start(t: Tensor, n: int, at: float) -> Tensor:
    return torch.full((len(t), n), at, dtype=F64)


def _energy(z: Tensor, t: Tensor) -> Tensor:
    return t[:, 0] * (z**2).sum(1) + torch.cosh(z - t[:, 1:]).sum(1)


_SUM = [ik.Equality(lambda z, t: z.sum(1, keepdim=True) - 1), ik.Inequality(lambda z, t: z - 0.9)]
_PROBLEMS: dict[str, Callable[..., Any]] = {
    "map": lambda t, **o: ik.fixed_point(
        lambda z, t: torch.tanh(t[:, :1] * z + t[:, 1:]), _start(t, 3, 0.0), (t,), **o
    ),
    "affine map": lambda t, **o: ik.fixed_point(lambda z, t: t[:, :1] * z + t[:, 1:], _start(t, 3, 0.0), (t,), **o),
    "root": lambda t, **o: ik.root(lambda z, t: z**3 + t[:, :1] * z - t[:, 1:], _start(t, 2, 1.0), (t,), **o),
    "minimum": lambda t, **o: ik.argmin(_energy, _start(t, 3, 0.0), (t,), **o),
    "quadratic": lambda t, **o: ik.argmin(
        lambda z, t: t[:, 0] * (z**2).sum(1) + (z * t[:, 1:]).sum(1), _start(t, 3, 1.0), (t,), **o
    ),
    "fit": lambda t, **o: ik.least_squares(
        lambda z, t: torch.cat([t[:, :1] * z - 1, torch.exp(-t[:, 1:] * z)], 1), _start(t, 2, 0.0), (t,), **o
    ),
    "steady state": lambda t, **o: ik.steady_state(
        lambda z, t: t[:, :1] * z * (1 - z) + 0.1 * t[:, 1:], _start(t, 2, 0.5), (t,), **o
    ),
    "within bounds": lambda t, **o: ik.argmin(_energy, _start(t, 3, 0.1), (t,), bounds=(0.0, 2.0), **o),
    "constrained": lambda t, **o: ik.argmin(_energy, _start(t, 3, 0.1), (t,), constraints=_SUM, **o),
}
_ROWS = [
    *((name, "NaN", (_NAN, 1.0)) for name in _PROBLEMS),
    *((name, "infinite", (_INF, 1.0)) for name in ("map", "root", "minimum", "fit")),
    *((name, "at its solution", (0.5, 0.0)) for name in ("map", "affine map", "minimum", "constrained")),
    ("map", "singular", (1.0, 0.0)),
    ("map", "far out", (50.0, 1e8)),
    ("map", "repels", (-5.0, 0.3)),
    ("affine map", "repels", (-1.02, 1.0)),
    ("affine map", "overflows", (2.0, 1e300)),
    ("root", "singular", (0.0, 0.0)),
    ("root", "at its solution", (0.0, 1.0)),
    ("minimum", "a saddle", (-3.0, 0.0)),
    ("quadratic", "unbounded", (0.0, 1.0)),
    ("quadratic", "flat", (0.0, 0.0)),
    ("quadratic", "concave", (-1.0, 1.0)),
    ("fit", "runs away", (0.0, 1.0)),
    ("fit", "singular", (0.0, 0.0)),
    ("steady state", "none", (-1.0, -9.0)),
    ("within bounds", "concave", (-9.0, 1.0)),
    ("constrained", "concave", (-9.0, 1.0)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_dims", [None, (0,)], ids=["frozen", "dropped"])
@pytest.mark.parametrize(("name", "kind", "bad"), _ROWS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_others_are_as_they_are_alone(
    name: str, kind: str, bad: tuple[float, float], in_dims: tuple[int, ...] | None
) -> None:
    solve = _PROBLEMS[name]
    options = {"batch_dims": 1, "in_dims": in_dims, "on_failure": "ignore"}
    t = torch.cat([_GOOD[:1], torch.tensor([bad], dtype=F64), _GOOD[1:]]).requires_grad_()
    others = [0, 2]
    found = solve(t, **options)
    (slope,) = torch.autograd.grad(found.value[others].square().sum(), t)
    alone = [solve(t[i : i + 1].detach().clone().requires_grad_(), **options) for i in range(3)]
    for i in others:
        own = t[i : i + 1].detach().clone().requires_grad_()
        value = solve(own, **options).value
        (expected,) = torch.autograd.grad(value.square().sum(), own)
        said = f"{name}, beside one that is {kind}, sample {i}"
        assert int(found.status[i]) == int(ik.Status.CONVERGED), said
        torch.testing.assert_close(found.value[i : i + 1], value, rtol=1e-12, atol=1e-12, msg=said)
        torch.testing.assert_close(slope[i : i + 1], expected, rtol=1e-11, atol=1e-12, msg=said)
    assert torch.equal(found.status[1], alone[1].status[0])
    assert found.evaluations <= 1.5 * sum(s.evaluations for s in alone) + 80
    if in_dims is not None:
        assert found.sample_evaluations <= 2 * sum(s.sample_evaluations for s in alone) + 60


@pytest.mark.parametrize(
    ("constraint", "most"),
    [
        (ik.Inequality(lambda z: torch.stack([z[0], 1 - z[0]])), 800),
    ],
    ids=["half-planes apart"],
)
def test_what_no_point_satisfies_is_not_tried_by_every_method(constraint: Any, most: int) -> None:
    """They are violated least where one method has ended, and no weights of them are less far from there: 2,100."""
    found = ik.argmin(
        lambda z: z.square().sum(), torch.ones(2, dtype=F64), constraints=[constraint], on_failure="ignore"
    )
    assert not bool(found.converged)
    assert found.evaluations <= most


class _Stays(ik.Solver):
    """Gets no further."""

    name = "stays"
    solves = "constrained"

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        status = torch.full((len(z0),), int(ik.Status.STALLED))
        return ik.extend.Outcome(z0, torch.linalg.vector_norm(f.residual(z0), dim=1), torch.ones_like(status), status)


def _peak(z: Tensor) -> Tensor:
    return torch.exp(-50 * (z - 0.5).square()) - 0.5


def _valleys(z: Tensor) -> Tensor:
    return (z.square() - 4).square() * (z.square() + 1) - 0.01


@pytest.mark.parametrize(
    ("constraint", "start", "target"),
    [
        (ik.Equality(_peak), 2.0, 0.0),
        (ik.Equality(_peak), 0.0, 7.0),
        (ik.Inequality(_valleys), 0.0, 7.0),
    ],
    ids=["a slope that z rounds away", "a plateau", "two narrow valleys"],
)
def test_constraints_that_hold_in_a_narrow_place_are_tried_on(constraint: Any, start: float, target: float) -> None:
    z0 = torch.tensor([start], dtype=F64)
    assert bool(ik.argmin(lambda z: (z - target).square().sum(), z0, constraints=[constraint]).converged)


def test_constraints_that_hold_elsewhere_are_tried_on() -> None:
    """``z^3 - 4 z + 3.2`` has a valley above zero at 1.15, and its zero at -2.3: no reason to ask no other method."""
    valley, square = ik.Equality(lambda z: (z[0] ** 2 - 4) * z[0] + 3.2), ik.Equality(lambda z: z[0] ** 2 + 1)
    for constraint, least in ((valley, (4 / 3) ** 0.5), (square, 0.0)):
        start = torch.tensor([least, 1.0], dtype=F64)
        found = ik.argmin(
            lambda z: z.square().sum(),
            start,
            constraints=[constraint],
            solver=Polyalgorithm((Stage(_Stays()), Stage("sqp"))),
            on_failure="ignore",
        )
        assert (int(found.steps) > 1) == (constraint is valley)
