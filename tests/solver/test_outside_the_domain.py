"""Accelerated steps that lead out of the domain of the map, where the iteration itself never goes."""

import pytest
import torch

import implicitkit as ik
from implicitkit.lifting.fewer_rows import _near

D = torch.float64


def growth(k, saved):
    """Capital a head in Solow's model of growth: a power, of which a negative number has none."""
    return (0.9 * k + saved * k**0.33) / 1.02


def steady(saved):
    return (saved / 0.12) ** (1 / 0.67)


MAPS = {
    "growth": (lambda z: growth(z, 0.25), 0.1, steady(0.25)),
    "growth from far": (lambda z: growth(z, 0.25), 1e-6, steady(0.25)),
    "root": (lambda z: 0.7 * z + 0.3 * torch.sqrt(z), 1e-3, 1.0),
    "logarithm": (lambda z: z * (1 - 0.1 * torch.log(z)), 0.01, 1.0),
}


@pytest.mark.parametrize(
    "name, solver",
    [*((name, "auto") for name in MAPS), *(("growth", s) for s in ("anderson", "aitken", "broyden", "relay"))],
)
@pytest.mark.parametrize("n", [1, 5])
def test_comes_back(name, n, solver):
    step, start, value = MAPS[name]
    found = ik.fixed_point(step, torch.full((n,), start, dtype=D), solver=solver)
    torch.testing.assert_close(found.value, torch.full((n,), value, dtype=D), rtol=1e-7, atol=0)


def test_each_sample_by_itself():
    """Beside a sample without a solution in the domain, and one that needs no help."""
    saved = torch.tensor([[0.25], [torch.nan], [0.25]], dtype=D)
    start = torch.tensor([[0.1], [0.1], [3.0]], dtype=D)
    found = ik.fixed_point(growth, start, saved, batch_dims=1, solver="anderson", on_failure="ignore")
    assert found.converged.tolist() == [True, False, True]
    torch.testing.assert_close(found.value[::2], torch.full((2, 1), steady(0.25), dtype=D), rtol=1e-7, atol=0)
    alone = ik.fixed_point(growth, start[2:], saved[2:], batch_dims=1, solver="anderson")
    assert int(found.steps[2]) == int(alone.steps[0])  # nothing is done to it


@pytest.mark.parametrize("in_dims", [None, 0])
def test_in_the_first_step_after_samples_are_dropped(in_dims):
    """What is NaN there is no sign that the remaining samples have other values; derivatives by the closed form."""
    saved = torch.tensor([[0.25], [0.3], [0.2]], dtype=D, requires_grad=True)
    start = torch.tensor([[0.1], [3.0], [1e-6]], dtype=D)
    found = ik.fixed_point(growth, start, saved, batch_dims=1, in_dims=in_dims).value
    (slope,) = torch.autograd.grad(found.sum(), saved)
    torch.testing.assert_close(found, steady(saved), rtol=1e-7, atol=0)
    torch.testing.assert_close(slope, (steady(saved) / (0.67 * saved)).detach(), rtol=1e-7, atol=0)


def test_infinite_values_do_not_hide_others():
    """Values of some samples are those of the whole batch: as near as the largest finite one says."""
    inf, nan = torch.inf, torch.nan
    for one, other, same in (
        ([1.0, inf], [2.0, inf], False),
        ([1.0, nan], [2.0, nan], False),
        ([1.0, inf], [1.0, inf], True),
        ([1.0, nan], [1.0, nan], True),
        ([1.0, nan], [1.0, 1.0], False),
        ([inf, nan], [inf, nan], True),
    ):
        assert _near(torch.tensor(one), torch.tensor(other)) is same, (one, other)


def test_a_map_that_leaves_its_domain_is_said_to():
    """The iteration itself leads out: nothing is tried again and again."""
    with pytest.raises(ik.ConvergenceError, match="nonfinite") as caught:
        ik.fixed_point(lambda z: torch.sqrt(z) - 2, torch.ones(3, dtype=D), solver="anderson")
    assert caught.value.solution.evaluations < 10


def test_soon():
    """Accelerated all the same: the iteration alone takes 267 evaluations."""
    found = ik.fixed_point(lambda z: growth(z, 0.25), torch.tensor(0.1, dtype=D))
    assert found.evaluations < 60, found
