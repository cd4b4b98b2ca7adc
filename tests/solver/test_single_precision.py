"""Single precision, with all defaults: what ends at rounding ends soon, and small units are no rounding errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import implicitkit as ik


def _wave(n):
    return 0.5 + 0.5 * torch.sin(1.7 * torch.arange(n, dtype=torch.float64)).square()


def _radiating_rod(u, ends):
    full = torch.cat([ends[:1], u, ends[1:2]])
    return 50 * (len(u) + 1) ** 2 * (full[2:] - 2 * full[1:-1] + full[:-2]) - 5.67e-8 * (u**4 - ends[2] ** 4)


def _beam(w, p):
    h, full = p[0] / (len(w) + 1), torch.cat([-w[:1], w.new_zeros(1), w, w.new_zeros(1), -w[-1:]])
    return p[1] * (full[4:] - 4 * full[3:-1] + 6 * full[2:-2] - 4 * full[1:-3] + full[:-4]) / h**4 - p[2]


def _cascade(c, p):
    flow = _wave(len(c)).to(c) * (torch.cat([p[:1], c[:-1]]) - c)
    return flow - 1e7 * p[1] * c**2 / (1 + 1e9 * c)


def _springs(x, p):
    full = torch.cat([x.new_zeros(1), x, p[:1]])
    length = full[1:] - full[:-1] - 1 / (len(x) + 1)
    stiffness = 1e5 * _wave(len(x) + 1).to(x)
    return (0.5 * stiffness * length**2 + 2.5e6 * length**4).sum() - p[1] * x.sum() / (len(x) + 1)


_ROUNDING = {  # verb, equations, where it begins, parameters, evaluations
    "rod": (ik.root, _radiating_rod, torch.full((45,), 400.0), [300.0, 500.0, 290.0], 60),
    "krylov": (
        partial(ik.root, solver="newton_krylov"),
        _radiating_rod,
        torch.full((30,), 400.0),
        [300.0, 500.0, 290.0],
        100,
    ),
    "beam": (ik.root, _beam, torch.zeros(20), [5.0, 2e6, -1e3], 60),
    "nanomoles": (ik.steady_state, _cascade, torch.full((20,), 1e-9), [2e-9, 0.02], 90),
    "springs": (ik.argmin, _springs, torch.linspace(0, 1, 27)[1:-1], [1.001, 1.0], 40),
}


@pytest.mark.parametrize("name", _ROUNDING)
def test_what_ends_at_rounding_ends_soon(name):
    """Steps were halved 30 times each, followed by Newton's at 1e10 times the first time step, or left to other methods."""
    verb, equations, z0, p, evaluations = _ROUNDING[name]
    solution = verb(equations, z0, (torch.tensor(p),))
    exact = verb(equations, z0.double(), (torch.tensor(p, dtype=torch.float64),))
    assert bool(solution.converged) and solution.evaluations <= evaluations
    torch.testing.assert_close(solution.value.double(), exact.value, rtol=3e-4, atol=0)


def _ligand(x, p):
    return p[0] - x - (p[1:] * x / (torch.tensor([2e-10, 1e-9, 7e-9]).to(x) + x)).sum()


def _complexes(z, p):
    free, bound = z[0], z[1:]
    k = torch.tensor([2.1105602e-8, 8.2046797e-9, 3.1809101e-9, 2.0121212e-10, 9.7185202e-10]).to(z)
    return torch.cat([(free + bound.sum() - p[0]).reshape(1), free * (p[1:] - bound) - k * bound])


@pytest.mark.parametrize("start", [0.0, 1e-9, 1e-6])
def test_an_unknown_near_zero_in_small_units_is_solved_for(start):
    """Nanomoles a litre: that ``F`` bends over 1e-7 was taken for rounding of numbers like one, and the start for a
    solution."""
    p = torch.tensor([9e-9, 2e-9, 1e-9, 4e-9])
    solution = ik.root(_ligand, torch.full((1,), start), (p,))
    exact = ik.root(_ligand, torch.full((1,), 1e-9, dtype=torch.float64), (p.double(),))
    torch.testing.assert_close(solution.value.double(), exact.value, rtol=1e-3, atol=0)
    assert int(solution.steps) > 0 and (solution.evaluations <= 28 or not start)


def test_equations_in_the_units_of_others_are_solved_as_far():
    """Squares of 1e-9 beside 1e-9: claims were held for small that had come down from their start only."""
    p = torch.tensor([9.0315107e-10, 4.5831672e-9, 4.99464e-9, 4.7543666e-9, 5.5317781e-9, 4.5596707e-9])
    values = [ik.root(_complexes, torch.full_like(p, 1e-9), (p,)).value for p in (p, p.double())]
    torch.testing.assert_close(values[0].double(), values[1], rtol=2e-4, atol=0)


def test_beside_a_zero_unknown_others_keep_their_rounding():
    """Pascals beside an unknown of 1e-8 that begins at zero."""

    def equations(z, p):
        flow = 1e-4 * (p[0] - z[0]) - 1e-3 * torch.tanh(z[0] / 1e5)
        return torch.stack([flow, p[1] - z[1] - p[2] * z[1] / (1e-9 + z[1])])

    z0, p = torch.tensor([1e5, 0.0]), torch.tensor([2e5, 1e-8, 3e-9])
    values = [ik.root(equations, z0.to(p), (p,)).value for p in (p, p.double())]
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-3, atol=0)


def test_a_product_of_rounded_factors_has_the_rounding_of_each():
    """Bars of a metre that give way by millimetres: a unit in the last place of their length is half a newton."""

    def truss(u, p):
        x, y, rest = u[0], u[1], 1.25**0.5
        left, right = ((1 + x) ** 2 + (0.5 + y) ** 2).sqrt(), ((1 - x) ** 2 + (0.5 + y) ** 2).sqrt()
        pull, push = p[0] * (left - rest) / rest, p[0] * (right - rest) / rest
        across = pull * (1 + x) / left - push * (1 - x) / right
        return torch.stack([across - p[1], (pull / left + push / right) * (0.5 + y) - p[2]])

    p = torch.tensor([2e7, 1e3, -5e3])
    solution = ik.root(truss, torch.zeros(2), (p,))
    exact = ik.root(truss, torch.zeros(2, dtype=torch.float64), (p.double(),)).value
    torch.testing.assert_close(solution.value.double(), exact, rtol=0, atol=1e-6)


def _string(u, p):
    full = torch.cat([u.new_zeros(1), u, u.new_zeros(1)])
    return 0.5 * (len(u) + 1) * p[0] * (full[1:] - full[:-1]).square().sum() + p[1] * u.sum() / (len(u) + 1)


@pytest.mark.parametrize("name", ["string", "springs"])
def test_what_is_near_a_bound_is_not_differentiated_as_at_it(name):
    """Slopes of 1e-3 are rounding errors where the curvature is 1e3 to 1e5, and further than the bound is."""
    function, z0, p, bounds = {
        "string": (_string, torch.zeros(1000), [1.0, 8.0], (-0.5, 1.0)),
        "springs": (_springs, torch.linspace(0, 1, 171)[1:-1], [1.001, 1e3], (0.0, 0.9)),
    }[name]
    slopes = []
    for dtype in (torch.float32, torch.float64):
        q = torch.tensor(p, dtype=dtype, requires_grad=True)
        solution = ik.argmin(function, z0.to(dtype), (q,), bounds=bounds)
        assert solution.evaluations <= 100
        weights = torch.cos(torch.arange(len(z0))).to(dtype)
        slopes.append(torch.autograd.grad((solution.value * weights).sum(), q)[0].double())
    torch.testing.assert_close(*slopes, rtol=1e-2, atol=1e-2 * float(slopes[1].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [3e-8, -1e-9, 4e-17])
def test_a_start_next_to_a_solution_at_zero_is_one(start, dtype):
    """Rounding of ``1 - exp(-z)`` is of numbers like one, whatever the units of the start: it is not resolved there."""
    z0 = torch.tensor([start], dtype=dtype)
    for solver in ("auto", "newton"):
        solution = ik.root(lambda z: z - 5 * (1 - torch.exp(-z)), z0, solver=solver)
        assert bool(solution.converged) and abs(float(solution.value)) <= 1e-7


def test_what_units_of_the_curvature_take():
    """Two evaluations, of the slope at the start and beside it: a third one asked of another way."""
    calls = []

    def function(z):
        calls.append(z.dtype)
        return 5 * (z - 0.9).square().sum() + z.prod()

    for dtype in (torch.float32, torch.float64):
        ik.argmin(function, torch.ones(2, dtype=dtype), bounds=(0.0, 2.0))
    assert calls.count(torch.float32) <= calls.count(torch.float64) + 2
