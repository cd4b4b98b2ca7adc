"""Starts at which the function has a value, but no finite derivative: ``sqrt``, a norm or a power at zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.root.idle_unknowns import Awakened
from implicitkit.solver.root.trust_region import TrustRegion

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
def test_equations_are_solved_from_a_start_without_slope(name, kind):
    function, n = EQUATIONS[name]
    found = getattr(ik, kind)(function, torch.zeros(n, dtype=D))
    assert function(found.value).abs().max() < 1e-6
    assert found.evaluations < 80, found


@pytest.mark.parametrize("solver", ["newton", "newton_krylov", "levenberg_marquardt", "trust_region", "chord"])
def test_methods_asked_for_by_name_leave_it_too(solver):
    assert away(ik.root(away, ZERO, solver=solver).value).abs().max() < 1e-6


OBJECTIVES = {
    "fourth": (lambda z: torch.sqrt(z * z).sum() + ((z - 3) ** 4).sum(), 3 - 0.25 ** (1 / 3)),
    "norm": (lambda z: torch.sqrt((z * z).sum()) + ((z - 1) ** 2).sum(), 1 - 1 / (2 * 3**0.5)),
    "power": (lambda z: ((z.abs() + 0 * z) ** 0.5 * z).sum() - z.sum(), 4 / 9),
    "modulus": (lambda z: torch.sqrt(z * z).sum() + ((z - 3) ** 2).sum(), 2.5),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_minima_are_found_from_a_start_without_slope(name):
    objective, value = OBJECTIVES[name]
    torch.testing.assert_close(ik.argmin(objective, ZERO).value, torch.full_like(ZERO, value), rtol=1e-6, atol=0)


def test_a_start_on_a_bound_where_the_slope_is_infinite():
    """The start is the bound itself, and the slope there is infinite."""
    found = ik.argmin(lambda z: (z - torch.sqrt(z)).sum(), ZERO, bounds=(0, None))
    torch.testing.assert_close(found.value, torch.full_like(ZERO, 0.25), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_domain_is_entered_whichever_side_it_lies_on(sign):
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


def test_a_branch_that_spoils_every_derivative_is_named():
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


def test_traces_and_callbacks_go_on_from_the_steps_at_the_start():
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
def test_the_step_limit_is_for_both_runs(name):
    """``max_steps`` is for both runs, and where it ends them the best point is returned, not the start."""
    solve, residual = LIMITED[name]
    for most in (1, 2, 3, 4):
        found = solve(most)
        assert ik.Status(int(found.status)) is ik.Status.MAX_STEPS, (most, found)
        assert int(found.steps) <= most, (most, found)
    assert residual(found.value).norm() < 0.5 * residual(ZERO + 1e-9).norm()
    assert "newton" not in solve(1).solver


@pytest.mark.parametrize("n", [3, 50])
def test_an_objective_without_a_minimum_is_named_from_beside_the_start(n):
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


# ---------------------------------------------------------------------------------------------------------------------
# Unknowns on which nothing depends at the start: multipliers and prices of complementarity problems, ``relu`` of a negative
# number.
F32, F64 = torch.float32, torch.float64


def _wardrop(z: Tensor, demand: Tensor) -> Tensor:
    """Braess' network under the travel times of the Bureau of Public Roads: three paths that are used only if none costs
    less, ``min(f, c(f) - u) = 0``, and all travellers on them."""
    f, u = z[:3], z[3:]
    links = torch.stack([f[0] + f[2], f[1], f[0], f[1] + f[2], f[2]])
    free, capacity = (torch.tensor(v).to(z) for v in ([1.0, 2.0, 2.0, 1.0, 0.25], [2.0, 4.0, 4.0, 2.0, 1.0]))
    t = free * (1 + 0.15 * (links / capacity) ** 4)
    costs = torch.stack([t[0] + t[2], t[1] + t[3], t[0] + t[4] + t[3]])
    return torch.cat([torch.minimum(f, costs - u), f.sum().reshape(1) - demand])


def _spatial_prices(z: Tensor, theta: Tensor) -> Tensor:
    """One good in two places: shipped from one to the other only where the difference of prices pays for it."""
    supply, shipped, price = z[:2], z[2:3], z[3:]
    balance = torch.stack([supply[0] - shipped[0], supply[1] + shipped[0]]) - (theta[:2] - price)
    return torch.cat(
        [torch.minimum(supply, 1 + supply - price), torch.minimum(shipped, price[:1] + 0.5 - price[1:]), balance]
    )


def _rectified(z: Tensor, theta: Tensor) -> Tensor:
    return torch.relu(z) - theta * (1 + 0.1 * torch.relu(z.flip(0)))


_PROBLEMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], list[list[float]], list[float]]] = {
    "Wardrop": (
        _wardrop,
        [5.0],
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -9.0], [0.0, 0.0, 0.0, 0.0]],
        [2.0212865381260947, 2.0212865381260947, 0.9574269237478102, 3.7576117670618094],
    ),
    "spatial prices": (
        _spatial_prices,
        [8.0, 5.0],
        [[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, -5.0, -5.0]],
        [3.5, 2.0, 0.0, 4.5, 3.0],
    ),
    "relu": (_rectified, [1.0, 2.0], [[-1.0, -1.0], [-0.5, 3.0]], [1.2 / 0.98, 2.2 / 0.98]),
}
_ROWS = [(name, k) for name, row in _PROBLEMS.items() for k in range(len(row[2]))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize(("name", "k"), _ROWS)
def test_an_idle_unknown_is_moved(name: str, k: int, dtype: torch.dtype) -> None:
    equations, theta, starts, solution = _PROBLEMS[name]
    t = torch.tensor(theta, dtype=dtype)
    found = ik.root(equations, torch.tensor(starts[k], dtype=dtype), (t,))
    close = 1e-8 if dtype == F64 else 1e-3
    torch.testing.assert_close(found.value, torch.tensor(solution, dtype=dtype), rtol=close, atol=close)
    assert found.evaluations < 300, found.evaluations


def test_its_derivative_is_that_by_a_smooth_form() -> None:
    """Where all paths are used, ``c(f) = u``."""
    start = torch.ones(4, dtype=F64)

    def smooth(z: Tensor, demand: Tensor) -> Tensor:
        low = torch.cat([z[:3], z[3:] + 1e3])  # a price at which min(f, c - u) = c - u
        return torch.cat([_wardrop(low, demand)[:3] + 1e3, _wardrop(z, demand)[3:]])

    demand = torch.tensor([5.0], dtype=F64)
    by_kinks, by_costs = (
        torch.func.jacrev(lambda d, g=g: ik.root(g, start, (d,)).value)(demand) for g in (_wardrop, smooth)
    )
    torch.testing.assert_close(by_kinks, by_costs, rtol=1e-6, atol=1e-8)


def test_what_depends_on_nothing_anywhere_is_refused_soon() -> None:
    found = ik.root(
        lambda z: torch.stack([z[0] ** 2 + 1 + 0 * z[1], z[0] - 1 + 0 * z[1]]),
        torch.ones(2, dtype=F64),
        on_failure="ignore",
    )
    assert not bool(found.converged) and found.evaluations < 2000


@pytest.mark.parametrize("in_dims", [None, (0,)])
def test_the_others_go_the_way_that_they_go_alone(in_dims: tuple[int, ...] | None) -> None:
    """One sample has an idle unknown, one converges at once, and one is solved by a later method."""

    def equations(z: Tensor, t: Tensor) -> Tensor:
        hard = torch.stack([10 * (z[:, 1] - z[:, 0] ** 3), torch.atan(20 * (z[:, 0] - 1)) + 0.1 * (z[:, 1] - 1)], 1)
        idle = torch.relu(z) - 1 - 0.1 * torch.relu(z.flip(1))
        return torch.where(t[:, :1] > 0, hard, idle) + 0 * t

    start = torch.tensor([[-1.0, -1.0], [1.1, 1.2], [-30.0, 5.0]], dtype=F64)
    t = torch.tensor([[-1.0], [1.0], [1.0]], dtype=F64)
    options = {"batch_dims": 1, "in_dims": in_dims, "on_failure": "ignore"}
    together = ik.root(equations, start, (t,), **options)
    for i in range(3):
        alone = ik.root(equations, start[i : i + 1], (t[i : i + 1],), **options)
        torch.testing.assert_close(together.value[i : i + 1], alone.value, rtol=0, atol=0)
        assert int(together.status[i]) == int(alone.status[0])


def test_a_sample_without_idle_unknowns_is_left_to_the_next_method() -> None:
    start = torch.tensor([[-1.0], [0.5]], dtype=F64)
    awakened = Awakened(TrustRegion())
    found = ik.root(lambda z: torch.relu(z) - 1, start, solver=awakened, batch_dims=1, on_failure="ignore")
    assert [int(s) for s in found.status] == [int(ik.Status.CONVERGED), int(ik.Status.STALLED)]
    torch.testing.assert_close(found.value, torch.tensor([[1.0], [0.5]], dtype=F64))
    assert found.steps.tolist()[1] == 0


STEPPED = {
    "round": lambda z, c: (z.round() - c).square().sum(),
    "floor, of residuals": lambda z, c: z.floor() - c,
    "hard decisions": lambda z, c: ((z - 0.1).sign() - c).square().sum(),
}


# torch's derivative of a step is zero, and every start was a minimum
@pytest.mark.parametrize("bounds", [None, (-3.0, 3.0)], ids=["free", "bounds"])
@pytest.mark.parametrize("name", list(STEPPED))
def test_a_function_of_steps_is_no_minimum_wherever_one_starts(name, bounds):
    verb = ik.least_squares if "residuals" in name else ik.argmin
    with pytest.raises(RuntimeError, match=r"gradient is zero wherever it was asked|or steps \(round, sign\)"):
        verb(STEPPED[name], torch.full((2,), 0.2, dtype=torch.float64), (torch.tensor(2.7).double(),), bounds=bounds)


def test_plateaus_and_constants_are_minima_still():
    z0 = torch.full((2,), -1.0, dtype=torch.float64)
    for objective in (lambda z: (z.relu() - 0.7).square().sum(), lambda z: (0 * z).sum(), lambda z: z.square().sum()):
        start = z0 if objective(z0) != 2 else 0 * z0
        assert bool(ik.argmin(objective, start).converged)


def _narrow(z, width=1e-2):
    return 1 - torch.exp(-(z / width).square().sum(-1))


@pytest.mark.parametrize(
    ("verb", "function", "start"),
    [
        (ik.argmin, _narrow, 0.0),  # zero and flat far off, by underflow
        (ik.argmin, lambda z: z.clamp(-1, 1).sum(-1), -5.0),  # flat on both sides
        (ik.least_squares, lambda z: z.round(), 0.2),  # nothing is less than nothing
    ],
    ids=["a narrow well", "a ramp", "no residual"],
)
def test_minima_at_the_start_that_are_flat_far_off_are_minima(verb, function, start):
    z0 = torch.full((2, 2), start, dtype=torch.float64)
    found = verb(function, z0, batch_dims=1)
    assert bool(found.converged.all())
    assert torch.equal(found.value, z0)


def test_residuals_without_a_number_are_named():
    with pytest.raises(ValueError, match="returned no number"):
        ik.least_squares(lambda z: z[:0], torch.ones(2, dtype=torch.float64))
