"""Starts at which the function has a value, but no finite derivative: ``sqrt``, a norm or a power at zero."""

import pytest
import torch

import implicitkit as ik

D = torch.float64
ZERO = torch.zeros(3, dtype=D)


def network(x):
    """Flows in four pipes and heads at three nodes, by the law of Hazen and Williams, ``h = r q |q|^0.852``."""
    q, h = x[..., :4], x[..., 4:]
    drops = torch.stack([10 - h[..., 0], h[..., 0] - h[..., 1], h[..., 0] - h[..., 2], h[..., 1] - h[..., 2]], -1)
    loads = [q[..., 0] - q[..., 1] - q[..., 2], q[..., 1] - q[..., 3] - 0.3, q[..., 2] + q[..., 3] - 0.2]
    resistance = torch.arange(1, 5, dtype=x.dtype)
    return torch.cat([drops - resistance * q * q.abs() ** 0.852, torch.stack(loads, -1)], -1)


def away(z):
    return torch.sqrt(z) + z - 2


def norms(z):
    return torch.sqrt(z * z) + 2 * z - 3


def coupled(z):
    return torch.sqrt(z.square().sum(-1, keepdim=True)) + z - torch.arange(1, 4, dtype=z.dtype)


EQUATIONS = {"network": (network, 7), "sqrt": (away, 3), "modulus": (norms, 3), "norm": (coupled, 3)}


@pytest.mark.parametrize("kind", ["root", "least_squares"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name, kind):
    function, n = EQUATIONS[name]
    found = getattr(ik, kind)(function, torch.zeros(n, dtype=D))
    assert function(found.value).abs().max() < 1e-6
    assert found.evaluations < 80, found


@pytest.mark.parametrize("solver", ["newton", "newton_krylov", "levenberg_marquardt", "trust_region", "chord"])
def test_by_name(solver):
    assert away(ik.root(away, ZERO, solver=solver).value).abs().max() < 1e-6


OBJECTIVES = {
    "fourth": (lambda z: torch.sqrt(z * z).sum() + ((z - 3) ** 4).sum(), 3 - 0.25 ** (1 / 3)),
    "norm": (lambda z: torch.sqrt((z * z).sum()) + ((z - 1) ** 2).sum(), 1 - 1 / (2 * 3**0.5)),
    "power": (lambda z: ((z.abs() + 0 * z) ** 0.5 * z).sum() - z.sum(), 4 / 9),
    "modulus": (lambda z: torch.sqrt(z * z).sum() + ((z - 3) ** 2).sum(), 2.5),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_minima(name):
    objective, value = OBJECTIVES[name]
    torch.testing.assert_close(ik.argmin(objective, ZERO).value, torch.full_like(ZERO, value), rtol=1e-6, atol=0)


def test_within_bounds():
    """The start is the bound itself, and the slope there is infinite."""
    found = ik.argmin(lambda z: (z - torch.sqrt(z)).sum(), ZERO, bounds=(0, None))
    torch.testing.assert_close(found.value, torch.full_like(ZERO, 0.25), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_either_side(sign):
    """A domain that begins at the start is entered, whichever side it lies on."""
    found = ik.root(lambda z: torch.sqrt(sign * z) - 2, ZERO)
    torch.testing.assert_close(found.value, torch.full_like(ZERO, 4 * sign), rtol=1e-7, atol=0)


def test_samples_of_a_batch():
    """Only the samples that need it begin elsewhere, beside one that fails for other reasons too."""

    def function(z, level):
        return torch.sqrt(z) + z - level

    level = torch.tensor([[2.0], [2.0], [-5.0], [6.0]], dtype=D)
    start = torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0], [0.0, 9.0]], dtype=D)
    found = ik.root(function, start, level, batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [True, True, False, True]
    torch.testing.assert_close(found.value[:2], torch.ones(2, 2, dtype=D), rtol=1e-8, atol=0)
    torch.testing.assert_close(found.value[3], torch.full((2,), 4.0, dtype=D), rtol=1e-8, atol=0)


def test_nothing_is_asked_where_steps_were_taken():
    """A solve that fails elsewhere costs no look at the start."""
    found = ik.fixed_point(lambda z: 0.9 * z + 1, ZERO, solver="picard", max_steps=5, on_failure="ignore")
    assert found.evaluations == 6


def test_said():
    """A branch that is not taken spoils every derivative, wherever the search begins: that is said."""

    def objective(z):
        return torch.where(z > -5, (z - 1) ** 2, torch.sqrt(-5 - z)).sum()

    with pytest.raises(
        ik.ConvergenceError, match=r"has a value at z0, but no finite derivative there.*torch\.where"
    ) as caught:
        ik.argmin(objective, ZERO)
    assert "The function is not finite" not in str(caught.value)
    with pytest.raises(ik.ConvergenceError, match="The function is not finite at z0: start inside its domain"):
        ik.argmin(lambda z: (z * z.log()).sum(), ZERO)


def test_watched():
    """Steps count on from those at the start, a trace has all of them, and a callback's word is final."""
    seen = []
    found = ik.root(away, ZERO, trace=True, callback=lambda step, z, norm: seen.append(step))
    assert seen == list(range(1, len(seen) + 1)) and len(found.trace) == len(seen) + 1
    stopped = ik.root(away, ZERO, callback=lambda step, z, norm: step >= 3, on_failure="ignore")
    assert ik.Status(int(stopped.status)) is ik.Status.STOPPED
    assert int(stopped.steps) == 3 and (stopped.value > 0).all(), stopped
    nowhere = ik.root(lambda z: torch.sqrt(z) + 1, ZERO, callback=lambda step, z, norm: step >= 4, on_failure="ignore")
    assert ik.Status(int(nowhere.status)) is ik.Status.STOPPED, nowhere


def test_lost_samples_stay():
    """A sample with no derivative anywhere near is returned where it began, whoever is beside it."""

    def function(z, slope):
        inside = torch.where(slope > 0, torch.ones_like(z), -9 - z)
        return torch.where(slope > 0, torch.sqrt(z.abs()) + z - 2, z - 2 + torch.where(z > -9, 0, torch.sqrt(inside)))

    slope = torch.tensor([[1.0], [0.0]], dtype=D)
    found = ik.root(function, torch.zeros(2, 2, dtype=D), slope, batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [True, False]
    assert (found.value[1] == 0).all(), found


LIMITED = {
    "root": (lambda k: ik.root(away, ZERO, max_steps=k, on_failure="ignore"), away),
    "argmin": (
        lambda k: ik.argmin(OBJECTIVES["fourth"][0], ZERO, max_steps=k, on_failure="ignore"),
        lambda z: 4 * (z - 3) ** 3 + torch.sign(z),
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_step_limit(name):
    """``max_steps`` is for both runs, and where it ends them the best point is returned, not the start."""
    solve, residual = LIMITED[name]
    for most in (1, 2, 3, 4):
        found = solve(most)
        assert ik.Status(int(found.status)) is ik.Status.MAX_STEPS, (most, found)
        assert int(found.steps) <= most, (most, found)
    assert residual(found.value).norm() < 0.5 * residual(ZERO + 1e-9).norm()
    assert "newton" not in solve(1).solver


@pytest.mark.parametrize("n", [3, 50])
def test_no_end(n):
    """That the objective has no minimum is found out from beside the start, and said."""
    with pytest.raises(ik.ConvergenceError, match=r"unbounded \(the objective falls"):
        ik.argmin(lambda z: torch.sqrt(z * z).sum() - 3 * z.sum(), torch.zeros(n, dtype=D))


class Cubed(torch.autograd.Function):
    """Something that grows, without a derivative."""

    @staticmethod
    def forward(ctx, z):
        return z**3 + 5 * z + 1


def test_functions_without_a_derivative():
    """What has failed without one is reported as that."""
    with pytest.raises(ik.ConvergenceError, match="picard"):
        ik.fixed_point(Cubed.apply, ZERO, solver="picard")


def test_others_are_not_run_again():
    """A sample that has failed for other reasons is not tried a second time because of its neighbour."""

    def function(z, level):
        return torch.where(level < 0, z * z + 1, torch.sqrt(z.abs() + (level < 0)) + z - level)

    seen = []

    def counted(z, level):
        seen.append(len(z))
        return function(z, level)

    level = torch.tensor([[2.0], [-1.0]], dtype=D)
    start = torch.zeros(2, 2, dtype=D)
    alone = ik.root(function, start[1:], level[1:], batch_dims=1, on_failure="ignore").evaluations
    found = ik.root(counted, start, level, batch_dims=1, in_dims=(0,), on_failure="ignore")
    assert found.converged.tolist() == [True, False]
    assert found.evaluations < 1.2 * alone + 60, (found.evaluations, alone)
