"""``DIVERGED`` is for what runs away: not for what rounding leaves of a solution far out, nor for parts that are off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import implicitkit as ik
from implicitkit.solver.verdict import condition, newton_correction

F32, F64 = torch.float32, torch.float64
_STARTS = {"least_squares": ik.least_squares, "argmin": ik.argmin}


def _chain(n: int, seed: int, discount: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Transitions, rewards, and the value of each state to all digits."""
    generator = torch.Generator().manual_seed(seed)
    P, r = (torch.rand(shape, generator=generator, dtype=F64) for shape in ((n, n), (n,)))
    P = (P / P.sum(1, keepdim=True)).to(F32).to(F64)
    r = r.to(F32).to(F64)
    return P.to(F32), r.to(F32), torch.linalg.solve(torch.eye(n, dtype=F64) - discount * P, r)


@pytest.mark.parametrize(
    ("n", "discount", "verb"),
    [(n, discount, verb) for n in (2, 5, 20, 64) for discount in (0.9998, 0.9999, 0.99995) for verb in ("map", "root")],
)
def test_a_discount_that_leaves_three_digits(n: int, discount: float, verb: str) -> None:
    """``V = r + g P V`` in float32: ``|V|`` is 1e4, and ``1 / (1 - g)`` units of rounding are a thousandth of it."""
    P, r, exact = _chain(n, n, discount)
    if verb == "map":
        found = ik.fixed_point(lambda v: r + discount * P @ v, torch.zeros(n), on_failure="ignore")
    else:
        found = ik.root(lambda v: r + discount * P @ v - v, torch.zeros(n), on_failure="ignore")
    assert ik.Status(int(found.status)).name == "CONVERGED"
    assert found.evaluations < 700
    torch.testing.assert_close(found.value.to(F64), exact, rtol=4e-7 / (1 - discount), atol=0.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in ("sqrt(z^2 + 1)", "z + exp(-z)", "z + z / (1 + |z|)") for k in ("map", "root")]
)
def test_what_does_run_away_in_company_of_what_does_not(name: str, kind: str, dtype: torch.dtype) -> None:
    """Beside the value of two states, a residual that vanishes at infinity only."""
    P, r, _ = _chain(2, 0, 0.999)
    P, r = P.to(dtype), r.to(dtype)
    away = {
        "sqrt(z^2 + 1)": lambda z: torch.sqrt(z * z + 1),
        "z + exp(-z)": lambda z: z + torch.exp(-z),
        "z + z / (1 + |z|)": lambda z: z + z / (1 + z.abs()) - 1,
    }[name]

    def both(z: torch.Tensor) -> torch.Tensor:
        return torch.cat([r + 0.999 * P @ z[:2], away(z[2:])])

    start = torch.full((3,), 2.0, dtype=dtype)
    if kind == "map":
        found = ik.fixed_point(both, start, on_failure="ignore")
    else:
        found = ik.root(lambda z: both(z) - z, start, on_failure="ignore")
    assert int(found.status) != int(ik.Status.CONVERGED)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("n", [1, 3, 300])
def test_what_rounding_leaves_at_infinity_is_no_zero(n: int, dtype: torch.dtype) -> None:
    """``sqrt(z^2 + 1) - z`` and its slope end as rounding errors, and a step that doubles ``z`` takes one to zero as the
    other says."""
    equations = lambda z: torch.cat([z[: n // 2] - 1, torch.sqrt(z[n // 2 :] ** 2 + 1) - z[n // 2 :]])  # noqa: E731
    found = ik.root(equations, torch.full((n,), 2.0, dtype=dtype), solver="newton", on_failure="ignore")
    assert ik.Status(int(found.status)).name == "DIVERGED"


@pytest.mark.parametrize("name", ["log(1 + e^z) - z", "atan(z) - pi / 2"])
def test_a_fit_most_of_whose_residuals_vanish_at_infinity(name: str) -> None:
    """Beside what is left of another, which is met, their slopes are nothing."""
    fades = {
        "log(1 + e^z) - z": lambda z: torch.log1p(z.exp()) - z,
        "atan(z) - pi / 2": lambda z: z.atan() - torch.pi / 2,
    }
    residuals = lambda z: torch.cat([z[:1] - 1, fades[name](z[1:])])  # noqa: E731
    found = ik.least_squares(residuals, torch.full((100,), 2.0, dtype=F64), on_failure="ignore")
    assert ik.Status(int(found.status)).name == "DIVERGED"


def test_few_unknowns_far_out_are_judged_by_the_last_step() -> None:
    """One evaluation more than near the origin, at most."""
    theta = torch.linspace(1, 2, 4, dtype=F64)
    near, far = (
        ik.root(lambda z, at=at: torch.sinh((z - at) / 2) - theta, torch.full((4,), at, dtype=F64)).evaluations
        for at in (0.0, 300.0)
    )
    assert far <= near + 1


@pytest.mark.parametrize(("n", "dtype"), [(1, F32), (3, F32), (3, F64)])
def test_the_bottom_of_a_bowl_is_looked_at_once(n: int, dtype: torch.dtype) -> None:
    """A slope that is zero to the last bit is asked how it changes for the curvature only: four evaluations in all."""
    bottom = torch.arange(1, n + 1).to(dtype)
    start = torch.full((n,), 0.0 if n == 1 else 1.0, dtype=dtype)
    assert ik.argmin(lambda z: ((z - bottom) ** 2).sum(), start).evaluations <= 4


@pytest.mark.parametrize(("behind", "near"), [("fades", False), ("rises", True)])
def test_what_a_long_step_outwards_leaves_little_of_is_a_zero_if_there_is_more_behind(behind: str, near: bool) -> None:
    """A step from 10 to 13 leaves a twentieth of ``exp(-z)``, and nothing of ``13 - z``."""
    z, d = torch.full((1, 1), 10.0, dtype=F64), torch.full((1, 1), 3.0, dtype=F64)
    function = {"fades": lambda z: torch.exp(-z), "rises": lambda z: 13 - z}[behind]
    kind = SimpleNamespace(iteration=False, of_residuals=False)
    f: Any = SimpleNamespace(eps=torch.finfo(F64).eps, residual=function, kind=kind)
    at = newton_correction.Look(f, z, function(z), function(z), torch.zeros(1, dtype=torch.bool))
    assert bool(newton_correction.near_a_zero(at, d, function(z))) is near


_FADES = {
    "exp(a - z), one": (1, 1e6, lambda x: torch.exp(-x), F64),
    "log(1 + exp(a - z))": (3, 1e6, torch.nn.functional.softplus, F64),
    "log(1 + exp(a - z)), single": (3, -1e4, torch.nn.functional.softplus, F32),
    "1 / (1 + (z - a)^2), single": (3, 1e6, lambda x: 1 / (1 + x * x), F32),
    "exp((a - z) / 30)": (1, 1e8, lambda x: torch.exp(-x / 30), F64),
}


@pytest.mark.parametrize("name", _FADES)
def test_few_unknowns_that_run_away_do_so_far_from_the_origin(name: str) -> None:
    """Where every step is short beside ``z``: it leaves a third of the residual even so."""
    n, a, fades, dtype = _FADES[name]
    side = -1 if "log" in name else 1
    start = a + 0.06 + torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=F64)
    found = ik.root(lambda z: fades(side * (z - a)), start.to(dtype), solver="newton", on_failure="ignore")
    assert ik.Status(int(found.status)).name == "DIVERGED"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ["auto", "anderson", "relay", "broyden"])
@pytest.mark.parametrize(("size", "length"), [(0.1, 1.0), (1.0, 1.0), (1.0, 100.0)])
def test_a_map_that_drifts_in_waves_comes_to_rest_nowhere(size: float, length: float, solver: str) -> None:
    """Where ``z`` is 1e11 a residual of two is little of it, and ``F'`` says that a zero is near."""
    found = ik.fixed_point(
        lambda z: z + 2 + size * torch.cos(z / length),
        torch.zeros(4, 3, dtype=F64),
        solver=solver,
        batch_dims=1,
        on_failure="ignore",
    )
    assert not bool(found.converged.any())


@pytest.mark.parametrize("solver", ["auto", "anderson", "broyden", "blocks"])
def test_nor_does_one_where_a_correction_happens_to_take_half_of_the_residual(solver: str) -> None:
    """Of one unknown the phase at which a method stands is chance; 4 to 6 of these starts were said to have converged."""
    problem, starts = ik.FixedPoint(lambda z: z + 2 + torch.sin(z)), torch.linspace(-3, 3, 40, dtype=F64).unsqueeze(1)
    if solver == "blocks":
        joint = ik.compose({"f": (lambda z, x: z + 2 + torch.sin(z) + x, "x")}, output="f")
        zero = torch.zeros(40, 1, dtype=F64)
        found = ik.solve(joint, {"f": starts}, (zero,), solver=ik.Blocks(), batch_dims=1, on_failure="ignore")
    else:
        found = ik.solve(problem, starts, solver=solver, batch_dims=1, on_failure="ignore")
    assert not bool(found.converged.any())


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("verb", list(_STARTS))
@pytest.mark.parametrize(("off", "weight"), [(-30.0, 1.0), (-30.0, -1.0), (-1e6, 1.0)])
def test_a_unit_that_is_off(off: float, weight: float, verb: str, dtype: torch.dtype) -> None:
    """``z_0 relu(x + z_1)`` with ``z_1`` far below all ``-x``: the straight line beside it is what is fitted."""
    x = torch.linspace(-1, 1, 50, dtype=dtype)
    y = torch.sin(3 * x) + 0.5

    def residuals(z: torch.Tensor) -> torch.Tensor:
        return z[0] * torch.relu(x + z[1]) + z[2] * x + z[3] - y

    start = torch.tensor([weight, off, 0, 0], dtype=dtype)
    if verb == "argmin":
        found = ik.argmin(lambda z: residuals(z).square().mean(), start)
    else:
        found = ik.least_squares(residuals, start)
    slope = (x @ y) / (x @ x)
    torch.testing.assert_close(found.value, torch.stack([start[0], start[1], slope, y.mean()]), rtol=1e-4, atol=1e-4)
    assert found.evaluations < 150


@pytest.mark.parametrize("verb", list(_STARTS))
def test_a_unit_that_runs_away_beside_one_that_is_off(verb: str) -> None:
    x = torch.linspace(0, 1, 20, dtype=F64)

    def residuals(z: torch.Tensor) -> torch.Tensor:
        return torch.cat([z[0] * torch.relu(x + z[1]) + z[2] * x - x, torch.exp(-z[3:])])

    start = torch.tensor([1.0, -30, 0, 1], dtype=F64)
    if verb == "argmin":
        found = ik.argmin(lambda z: residuals(z).square().sum(), start, on_failure="ignore")
    else:
        found = ik.least_squares(residuals, start, on_failure="ignore")
    assert ik.Status(int(found.status)).name == "DIVERGED"


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_what_is_off_is_judged_sample_by_sample(batch: int) -> None:
    """``log cosh(z - 1)`` that ends in a plateau: one sample is there whole, the next by one unknown; each ends as it does
    alone, in batches of as many samples as unknowns and of others."""
    starts = torch.tensor([[2e4, 1e4], [2e4, 0.5], [0.5, 2.0]], dtype=F64).repeat(3, 1)[:batch]

    def objective(z: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.cosh((z - 1).clamp(-300, 300))).sum(-1)

    together = ik.argmin(objective, starts, batch_dims=1, on_failure="ignore")
    alone = [ik.argmin(objective, z, on_failure="ignore") for z in starts]
    assert together.status.tolist() == [int(one.status) for one in alone]
    names = [ik.Status(int(status)).name for status in together.status]
    assert names == (["SADDLE", "CONVERGED", "CONVERGED"] * 3)[:batch]
    torch.testing.assert_close(together.value, torch.stack([one.value for one in alone]))


# -------------------------------------------------------------------------------- solutions in families, on straight lines
@pytest.mark.parametrize("n", [12, 15, 20, 30, 60])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_chain_of_resistors_without_a_ground(n: int, uneven: bool) -> None:
    """Voltages are known up to a constant, and lie on a line: its second differences are zero along many directions."""
    leads = torch.ones(n - 1, dtype=F64) + (0.3 * torch.arange(n - 1, dtype=F64).sin() if uneven else 0)
    matrix = torch.diag(leads, 1)
    matrix = torch.diag((matrix + matrix.T).sum(1)) - matrix - matrix.T
    current = torch.zeros(n, dtype=F64)
    current[0], current[-1] = 2.0, -2.0
    found = ik.root(lambda v: matrix @ v - current, torch.zeros(n, dtype=F64))
    assert found.evaluations < 150
    torch.testing.assert_close(found.value[:-1] - found.value[1:], 2.0 / leads, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(("n", "seed"), [(65, 0), (65, 2), (100, 1), (300, 0), (1500, 0)])
@pytest.mark.parametrize("bends", [0.0, 1.0])
def test_a_minimum_of_many_unknowns_at_zero(n: int, seed: int, bends: float) -> None:
    """``|z|^2 + |Dz|^2 + z^4``: what is left of ``z`` has no size, and a rough correction leads small ones of
    many unknowns outwards."""
    start = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    found = ik.argmin(lambda z: (z * z + bends * z**4).sum() + (z[1:] - z[:-1]).square().sum(), start)
    assert found.value.abs().max() < 1e-10
    assert found.evaluations < 60


@pytest.mark.parametrize("n", [65, 300])
def test_one_of_many_unknowns_runs_away_near_the_origin(n: int) -> None:
    """``exp(-100 z_0) = 0`` beside zeros at zero."""
    start = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = ik.root(lambda z: torch.cat([torch.exp(-100 * z[:1]), z[1:] + z[1:] ** 3]), start, on_failure="ignore")
    assert int(found.status) != int(ik.Status.CONVERGED)


# ---------------------------------------------------------------------------------------------------------------------
# Residuals that are zero only because a number on the way there has overflowed: no solution.
#: name -> residual without a zero, whose ``z^2`` or ``exp(z)`` is infinite far out
OVERFLOW = {
    "(1 + z^2)^-0.05": lambda z: (1 + z * z) ** -0.05,
    "1 / log(log(z^2 + 20))": lambda z: 1 / torch.log(torch.log(z * z + 20)),
    "exp(z)^-0.01": lambda z: torch.exp(z) ** -0.01,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OVERFLOW)
def test_a_zero_that_is_an_overflow(name, dtype):
    """At a point where it is zero to the last bit, beside samples that have a root, one of them a plateau's."""
    far = {"exp(z)^-0.01": 2000.0}.get(name, torch.finfo(dtype).max ** 0.6)
    z0 = torch.tensor([[far], [far], [1.0], [7.0]], dtype=dtype)
    kind = torch.tensor([[0], [0], [1], [2]], device="cpu")

    def residual(z, kind):
        cut = torch.relu(6.0 - z)  # zero from there on, as it says
        return torch.where(kind == 0, OVERFLOW[name](z), torch.where(kind == 1, z**3 - 2, cut))

    found = ik.root(residual, z0, (kind,), batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinities_that_are_meant(dtype):
    """A mask's are there on both sides of a jump, which is a plateau then."""
    mask = torch.tensor([0.0, -torch.inf], dtype=dtype)

    def residual(z):
        share = torch.softmax(torch.stack([z[0], z[0]]) + mask, 0)[0]
        return torch.where(z > 6, 0.0, share * (z + 1) ** 2)

    found = ik.root(residual, torch.full((1,), 7.0, dtype=dtype))
    assert found.value.item() == 7.0


# ---------------------------------------------------------------------------------------------------------------------
# Maps without a fixed point whose residual vanishes on the way out, near enough to look like one: never ``CONVERGED``.
MAPS = {
    "z + exp(-z^2)": lambda z: z + torch.exp(-z * z),
    "z + erfc(z)": lambda z: z + torch.erfc(z),
    "z + 1 - tanh(z)": lambda z: z + 1 - torch.tanh(z),
    "z - exp(-z^2)": lambda z: z - torch.exp(-z * z),
}


@pytest.mark.one_in(2)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("solver", ["auto", "picard", "anderson", "trust_region"])
@pytest.mark.parametrize("shift", [10.0, 100.0, 1000.0, 10000.0])
def test_far_out_in_half_precision(shift, solver, dtype):
    """``z / 2 + shift``: rounding leaves some ``eps |z|`` of the residual, and the correction is as large."""
    found = ik.fixed_point(lambda z: 0.5 * z + shift, torch.zeros(4, dtype=dtype), solver=solver)
    torch.testing.assert_close(found.value, torch.full((4,), 2 * shift, dtype=dtype), rtol=5e-2, atol=0.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "step", [lambda z: z + 1, lambda z: z + 1 / z, lambda z: (z * z + 1).sqrt(), lambda z: 1.01 * z + 1]
)
def test_what_runs_away_in_half_precision(step, dtype):
    for start in (9.0, 100.0):
        found = ik.fixed_point(step, torch.full((3,), start, dtype=dtype), on_failure="ignore")
        assert not bool(found.converged)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_stage_measures_half_precision_alike(dtype):
    """Stages in turn, where none finds a zero: their figures go into one tensor."""
    for f in (lambda z: z * z + 1, lambda z: z.exp(), lambda z: torch.stack([z[0] - z[1], z[0] - z[1] + 1])):
        s = ik.root(f, torch.tensor([0.5, 30.0], dtype=dtype), on_failure="ignore")
        assert s.residual_norm.dtype == dtype and not bool(s.converged)


_A = torch.linspace(-2, 2, 64).reshape(8, 8).mul(7).sin()
_LINEAR = {
    "root": lambda x: ik.root(lambda z: z + 0.1 * (_A @ z) - x, torch.zeros(8)),
    "fixed point": lambda x: ik.fixed_point(lambda z: 0.1 * (_A @ z) + x, torch.zeros(8)),
    "minimum": lambda x: ik.argmin(lambda z: (0.1 * (_A @ z) - x).square().sum() + z.square().sum(), torch.zeros(8)),
    "fit": lambda x: ik.least_squares(lambda z: torch.cat([0.1 * (_A @ z) - x, z]), torch.zeros(8)),
    "steady state": lambda x: ik.steady_state(lambda z: x - z - 0.1 * (_A @ z), torch.zeros(8)),
    "trajectory": lambda x: ik.solve(ik.InitialValue(lambda t, y: -y - 0.1 * (_A @ y), (0.0, 1.0)), x),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", _LINEAR)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_under_autocast_is_no_way_to_infinity(name, dtype):
    """A state in single precision, and equations in half: what is left of them is rounding of half precision."""
    for i, size in enumerate((1.0, 10.0)):
        x = size * torch.linspace(1, 3 + i, 8).cos()
        exact = _LINEAR[name](x).value
        with torch.autocast("cpu", dtype=dtype):
            found = _LINEAR[name](x)
        assert float((found.value - exact).norm() / exact.norm()) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("solver", ["auto", "newton", "anderson"])
def test_what_runs_away_under_autocast(solver):
    eye = torch.eye(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for f in (
            lambda z: (eye @ z) + 1,
            lambda z: z + torch.exp(-(eye @ z)),
            lambda z: (eye @ z.square() + 1).sqrt(),
        ):
            assert not ik.fixed_point(f, torch.full((3,), 9.0), solver=solver, on_failure="ignore").converged
        if solver != "anderson":
            flat = lambda z: torch.exp(-(eye @ z))  # noqa: E731
            assert not ik.root(flat, torch.full((3,), 9.0), solver=solver, on_failure="ignore").converged


@pytest.mark.parametrize("n", [1, 3])
def test_a_correction_that_is_known_needs_no_null_space(n, monkeypatch):
    """Far out, where Newton's correction is small and rounding leaves it alone, nothing is decomposed."""
    c = torch.linspace(1000, 2000, n, dtype=F64)
    for module in (newton_correction, condition):
        monkeypatch.setattr(
            module, "lstsq_batched", lambda *given, **options: pytest.fail("a null space was looked for")
        )
    found = ik.root(lambda z: z**3 + z + 0.1 * z.flip(-1) - c, torch.ones(n, dtype=F64))
    assert float(found.value.min()) > 5


@pytest.mark.parametrize("scale", (1.0, 1e3))
def test_what_is_left_of_a_residual_before_it_underflows_is_no_root(scale: float) -> None:
    """A unit in the last place of one, 1.1e-16, at ``19.04 / scale``; behind it nothing, where a correction leads."""
    start = torch.linspace(-30, 30, 61, dtype=torch.float64).unsqueeze(1) / scale
    found = ik.root(lambda z: 1 - torch.tanh(scale * z), start, batch_dims=1, on_failure="ignore")
    assert not bool(found.converged.any()), found.value[found.converged]
    again = ik.root(lambda z: 1 - torch.tanh(scale * z - 1) - 1e-16, 5 + 0 * start[:1], on_failure="ignore")
    assert not bool(again.converged.any())


_LINES = {
    "decay": (lambda x, y, v: y, 10.0, 1.0, 0.0),
    "Bratu": (lambda x, y, v: -torch.exp(y), 1.0, 0.0, 0.0),
    "boundary layer": (lambda x, y, v: 50 * v, 1.0, 0.0, 1.0),
    "small": (lambda x, y, v: y, 1.0, 1e-6, 0.0),
}


@pytest.mark.parametrize(("name", "n"), [(name, n) for name in _LINES for n in (10, 60)] + [("boundary layer", 1000)])
def test_boundary_values_in_single_precision(name: str, n: int) -> None:
    """``y' = v``, ``v' = g`` by the trapezoidal rule: a boundary value of zero is met to rounding, ``|z_i| = 8e-15``, while
    ``|F|`` cannot come down any further; and what the differences of large slopes leave does not hide ``y(L) = 1``."""
    g, length, left, right = _LINES[name]
    found = {}
    for dtype in (F32, F64):
        x, h = torch.linspace(0, length, n + 1, dtype=dtype), length / n

        def equations(z: torch.Tensor, x: torch.Tensor = x, h: float = h) -> torch.Tensor:
            y, v = z
            steps = [torch.diff(u) / h - (q[1:] + q[:-1]) / 2 for u, q in ((y, v), (v, g(x, y, v)))]
            return torch.cat([y[:1] - left, *steps, y[-1:] - right]).reshape(2, n + 1)

        start = torch.linspace(left, right, n + 1, dtype=dtype)
        found[dtype] = ik.root(equations, torch.stack([start, torch.full_like(start, (right - left) / length)])).value
    off = (found[F32].double() - found[F64]).abs().amax(1) / found[F64].abs().amax(1)
    assert bool((off < 1e-3).all())


@pytest.mark.parametrize("share", [0.0, 0.03, 0.06])
def test_a_boundary_layer_whose_terms_cancel(share: float) -> None:
    """Falkner & Skan's equation in single precision: where ``g = 1``, ``(g_{i+1} - g_i) / h`` cancels along most directions,
    and one of 200 such equations seemed to be all that was left of a zero at infinity."""
    n, h = 200, 8 / 200

    def equations(z: torch.Tensor) -> torch.Tensor:
        f, g, s = z
        curved = -(1 + share) * (f * s + 0.2 * (1 - g**2))
        steps = [torch.diff(u) / h - (q[1:] + q[:-1]) / 2 for u, q in ((f, g), (g, s), (s, curved))]
        return torch.cat([f[:1], g[:1], g[-1:] - 1, *steps]).reshape(3, n + 1)

    start = [torch.linspace(a, b, n + 1, dtype=F64) for a, b in ((0, 7), (0, 1), (0.4, 0))]
    exact, rounded = (ik.root(equations, torch.stack(start).to(dtype)).value for dtype in (F64, F32))
    assert float((rounded.double() - exact).abs().max()) < 1e-4
