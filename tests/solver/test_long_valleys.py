"""Minimisation along valleys in which the gradient rises and falls, and down slopes without an end."""

import pytest
import torch

import implicitkit as ik

D = torch.float64


def chained_rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@pytest.mark.parametrize(
    "n, most", [(50, 600), (100, 900), (200, 1800), pytest.param(2000, 18000, marks=pytest.mark.slow)]
)
def test_chained_rosenbrock(n, most):
    """From -1.2 everywhere each unknown in turn comes out of its bend; scipy's L-BFGS-B takes 328, 615, 1203 and 11572
    evaluations."""
    found = ik.argmin(chained_rosenbrock, torch.full((n,), -1.2, dtype=D))
    torch.testing.assert_close(found.value, torch.ones(n, dtype=D), rtol=0, atol=1e-7)
    assert found.evaluations <= most, found


ENDLESS = {
    "linear": lambda x: x.sum(),
    "cubic": lambda x: (x**3 - 3 * x).sum(),
    "logarithm": lambda x: -torch.log1p(x * x).sum(),
    "saddle": lambda x: (x[1:] * x[:-1]).sum() + 0.1 * (x[::2] ** 2).sum(),
}


@pytest.mark.parametrize("n", [2, 20, 100, 400])
@pytest.mark.parametrize("name", ENDLESS)
def test_no_end(name, n):
    """That there is no minimum is found out soon, and said."""
    with pytest.raises(ik.ConvergenceError, match=r"unbounded|diverged") as caught:
        ik.argmin(ENDLESS[name], torch.full((n,), -2.0, dtype=D) - 0.01 * torch.arange(n, dtype=D) / n)
    most = 600 if name in ("linear", "cubic") else 1200  # two methods, one after the other
    assert caught.value.solution.evaluations < most, caught.value.solution


def test_samples_beside_one_without_an_end():
    """A sample that falls forever is given up, and the others go on."""
    slope = torch.tensor([[1.0], [0.0], [0.0]], dtype=D)

    def objective(x, slope):
        steep = 10 * slope * x
        return torch.where(slope > 0, steep, (x - 3) ** 2).sum(-1)

    found = ik.argmin(objective, torch.zeros(3, 2, dtype=D), slope, batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [False, True, True]
    torch.testing.assert_close(found.value[1:], torch.full((2, 2), 3.0, dtype=D), rtol=1e-6, atol=0)
