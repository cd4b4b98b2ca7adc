"""``@ik.implicit`` of a constrained minimisation: the solver knows nothing of multipliers, which follow from its point."""

import numpy as np
import pytest
import scipy.optimize
import torch

import implicitkit as ik

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
