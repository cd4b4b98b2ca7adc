"""Maps without a fixed point whose residual vanishes on the way out, near enough to look like one: never ``CONVERGED``."""

import pytest
import torch

import implicitkit as ik

MAPS = {
    "z + exp(-z^2)": lambda z: z + torch.exp(-z * z),
    "z + erfc(z)": lambda z: z + torch.erfc(z),
    "z + 1 - tanh(z)": lambda z: z + 1 - torch.tanh(z),
    "z - exp(-z^2)": lambda z: z - torch.exp(-z * z),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", ["auto", "anderson", "newton", "picard"])
@pytest.mark.parametrize("name", MAPS)
def test_a_residual_that_vanishes_on_the_way_out(name, solver, dtype):
    """Alone, and beside samples that have a fixed point."""
    start = torch.ones(4, 1, dtype=dtype)
    away = torch.tensor((1.0, 1.0, 0.0, 0.0), dtype=dtype).unsqueeze(1)
    both = lambda z, away: torch.where(away > 0, MAPS[name](z), torch.cos(z))  # noqa: E731
    options = {"solver": solver, "on_failure": "ignore", "max_steps": 300}
    together = ik.fixed_point(both, start, (away,), batch_dims=1, in_dims=(0,), **options)
    alone = ik.fixed_point(MAPS[name], start[0], **options)
    if solver != "picard":
        assert together.converged.tolist() == [False, False, True, True]
    else:  # its steps are the residual itself: z has come to rest for all that they tell
        assert together.converged.tolist()[2:] == [True, True]
    assert not alone.converged or solver == "picard"


@pytest.mark.parametrize("rho", [0.0, 0.9, 0.999, 0.99999, -0.9])
@pytest.mark.parametrize("z0", [0.0, 0.1, 3.0])
def test_one_leap_to_a_fixed_point(rho, z0):
    """Affine maps, which a method of secants solves in one step however nearly singular ``1 - J`` is."""
    solve = lambda solver: ik.fixed_point(  # noqa: E731
        lambda z: rho * (z - 5) + 5, torch.full((2,), z0, dtype=torch.float64), solver=solver
    )
    for solver in ("auto", "anderson", "newton"):
        torch.testing.assert_close(solve(solver).value, torch.full((2,), 5.0, dtype=torch.float64), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", ["auto", "anderson", "broyden", "newton"])
@pytest.mark.parametrize("goal", [2.0, 20.0, 2000.0])
def test_numbers_that_a_map_hands_on(goal, solver, dtype):
    """A state that carries its input along, ``(x, z) -> (x, z / 2 + goal / 2)``: a line of fixed points, one of which is
    reached, however far out; its equation ``x - x`` is no more than rounding, which no correction takes away."""
    step = lambda z: torch.stack([z[0], 0.5 * z[1] + 0.5 * goal])  # noqa: E731
    found = ik.fixed_point(step, torch.ones(2, dtype=dtype), solver=solver)
    torch.testing.assert_close(found.value, torch.tensor([1.0, goal], dtype=dtype), rtol=1e-4, atol=0.0)
    assert found.evaluations < 40


@pytest.mark.parametrize("solver", ["anderson", "newton"])
def test_averages_of_neighbours_agree(solver):
    """A consensus: all that agree are fixed points."""
    weights = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    for start in ([1.0, 0.0], [30.0, -2.0]):
        found = ik.fixed_point(lambda z: weights @ z, torch.tensor(start, dtype=torch.float64), solver=solver).value
        assert float(found[0] - found[1]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("solver", ["anderson", "newton"])
def test_a_way_out_beside_numbers_that_are_handed_on(solver):
    """``(x, z) -> (x, z + exp(-z))`` has no fixed point."""
    step = lambda z: torch.stack([z[0], z[1] + torch.exp(-z[1])])  # noqa: E731
    start = torch.tensor([4.0, 5.0], dtype=torch.float64)
    assert not ik.fixed_point(step, start, solver=solver, on_failure="ignore").converged


def test_a_loose_tolerance_asks_for_no_second_look() -> None:
    """A slow map strides to its end, where a residual of a thousandth is all that was asked."""
    c = 0.01 * torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64)
    z0 = torch.ones(3, dtype=torch.float64)
    s = ik.fixed_point(lambda z: 0.99 * z + c * torch.tanh(1 + z), z0, rtol=1e-3, solver="picard")
    assert s.evaluations == int(s.steps) + 1
