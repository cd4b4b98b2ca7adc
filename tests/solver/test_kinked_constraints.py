"""Programs with their solution in a kink of an inequality: an l1 ball, a maximum; solved by the branches that meet there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.errors import DegenerateWarning
from implicitkit.lifting import work
from implicitkit.problem import kinked_operations

A = torch.tensor([0.8, -0.6, 0.1, 0.05], dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)


def nearest(a: Tensor, c: Tensor, constraint: Any, **options: Any) -> Any:
    """The point of ``constraint(z) <= c`` nearest to ``a``, from 0.2."""
    return ik.argmin(
        lambda z, a, c: ((z - a) ** 2).sum(),
        torch.full_like(a.detach(), 0.2),
        (a, c),
        constraints=[ik.Inequality(lambda z, a, c: constraint(z) - c)],
        **options,
    )


SETS = {
    "l1 ball": (lambda z: z.abs().sum(), ONE, lambda a, c: c * ik.project.l1_ball()(a / c)),
    "maximum": (lambda z: z.max(), 0.08 * ONE, lambda a, c: a.minimum(c)),
    "linf ball": (lambda z: z.abs().max(), 0.3 * ONE, lambda a, c: a.minimum(c).maximum(-c)),
    "relu": (lambda z: z.relu().sum(), 0.1 * ONE, lambda a, c: torch.stack([a[0] * 0 + c, a[1], 0 * a[2], 0 * a[3]])),
}


@pytest.mark.parametrize("name", SETS)
def test_the_solution_in_a_kink_is_found_and_moves_along_its_edge(name: str) -> None:
    """The value and both derivatives are those of the projection; a fraction of the 4,000 evaluations of before."""
    constraint, c, projection = SETS[name]
    solution = nearest(A, c, constraint)
    assert solution.evaluations < 500
    assert float((solution.value - projection(A, c)).abs().max()) < 1e-9
    found = torch.func.jacrev(lambda a, c: nearest(a, c, constraint).value, (0, 1))(A, c)
    right = torch.func.jacrev(projection, (0, 1))(A, c)
    for one, other in zip(found, right, strict=True):
        assert float((one - other).abs().max()) < 1e-8


CURVED = {
    "l1 + l2": (lambda z: z.abs().sum() + torch.linalg.vector_norm(z), [0.353451390, -0.226662941, 0, 0]),
    "l1 + squares": (lambda z: z.abs().sum() + (z * z).sum(), [0.434953438, -0.291114447, 0, 0]),
}


@pytest.mark.parametrize("name", CURVED)
def test_branches_may_be_curved(name: str) -> None:
    """Planes that bend come to rest in the kink: refused after 4,000 evaluations before."""
    constraint, right = CURVED[name]
    solution = nearest(A, ONE, constraint)
    assert solution.evaluations < 300
    assert float((solution.value - torch.tensor(right, dtype=torch.float64)).abs().max()) < 1e-7
    moved = torch.func.jacrev(lambda a: nearest(a, ONE, constraint).value)(A)
    step = 1e-4 * torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    slope = (nearest(A + step, ONE, constraint).value - nearest(A - step, ONE, constraint).value) / 2e-4
    assert float((moved[:, 0] - slope).abs().max()) < 1e-6


def test_curvature_along_ways_into_branches_is_none_of_the_kink() -> None:
    """Six of ten numbers are zero: gradients behind ways balance the objective at the point itself only."""
    a = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solution = nearest(a, ONE, CURVED["l1 + l2"][0])
    assert solution.evaluations < 500
    z = solution.value
    assert int((z.abs() < 1e-9).sum()) == 6 and abs(float(CURVED["l1 + l2"][0](z)) - 1) < 1e-9


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_a_kink_is_found_in_any_unit(unit: float) -> None:
    """In units of a million and of a millionth; a guard, which more than one part of the search upholds."""
    a = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.full_like(a, 0.2 * unit / 7**0.5)
    constraints = [ik.Inequality(lambda z: (z / unit).abs().sum() - 1)]
    found = ik.argmin(lambda z: ((z - a * unit) ** 2).sum(), start, constraints=constraints)
    assert float((found.value / unit - ik.project.l1_ball()(a)).abs().max()) < 1e-9
    assert found.evaluations < 500


def test_the_multiplier_is_the_price_of_the_level() -> None:
    """One multiplier for the one inequality, the derivative of the least objective by its level."""
    solution = nearest(A, ONE, SETS["l1 ball"][0])
    assert len(solution.multipliers) == 1 and solution.multipliers[0].shape == ()
    assert abs(float(solution.multipliers[0]) - 0.4) < 1e-9


def test_a_batch_in_kinks_is_solved_and_differentiated() -> None:
    """Of samples together, each in a kink of its own; one of them lies within the ball, and has no kink that presses."""

    def solve(a: Tensor) -> Tensor:
        constraints = [ik.Inequality(lambda z: z[0] - 9), ik.Inequality(lambda z: z.abs().sum() - 1)]
        return ik.argmin(lambda z: ((z - a) ** 2).sum(), 0.2 + 0 * a, constraints=constraints).value

    points = torch.stack([A, 1.1 * A, 0.3 * A])
    found, right = torch.func.vmap(solve)(points), ik.project.l1_ball()(points)
    assert float((found - right).abs().max()) < 1e-9
    moved = torch.func.vmap(torch.func.jacrev(solve))(points)
    assert float((moved - torch.func.vmap(torch.func.jacrev(ik.project.l1_ball()))(points)).abs().max()) < 1e-8


def test_the_corner_of_two_sets_of_which_one_is_enough_is_no_kink_to_rest_in() -> None:
    """Of ``min(z_0, z_1) <= 0`` branches are no greatest ones: what is found leaves the corner."""
    solution = ik.argmin(
        lambda z: (z[0] - 1) ** 2 + 2 * (z[1] - 1) ** 2,
        torch.tensor([0.1, 0.2], dtype=torch.float64),
        constraints=[ik.Inequality(lambda z: z.min())],
    )
    assert float(((solution.value - torch.tensor([0.0, 1.0], dtype=torch.float64)).abs()).max()) < 1e-8


def test_steps_by_branches_are_steps_of_the_solve() -> None:
    """They count against ``max_steps``, and where none is left after the first method, nothing is looked for."""
    constraint, c, _ = SETS["l1 ball"]
    whole = nearest(A, c, constraint)
    assert bool(whole.converged)
    for most in (1, 3, int(whole.steps) - 1, int(whole.steps)):
        found = nearest(A, c, constraint, max_steps=most, on_failure="ignore")
        assert int(found.steps) <= most
        assert bool(found.converged) or most < int(whole.steps)


def test_a_callback_counts_on_where_branches_take_over() -> None:
    constraint, c, _ = SETS["l1 ball"]
    seen: list[int] = []
    solution = nearest(A, c, constraint, callback=lambda step, z, norm: seen.append(step))
    assert seen == list(range(1, int(solution.steps) + 1))


def test_branches_are_looked_for_where_steps_within_those_known_lead() -> None:
    """A vertex of the ball, seven of eight unknowns at zero: 16 directions do not meet all branches that hold it."""
    c = torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.8 - 0.9
    c[0] = 3.0
    ball = [ik.Inequality(lambda z: z.abs().sum() - 1)]
    start = torch.full((8,), 0.01, dtype=torch.float64)
    found = ik.argmin(lambda z: (z - c).square().sum(), start, constraints=ball, on_failure="ignore", max_steps=300)
    torch.testing.assert_close(found.value, torch.eye(8, dtype=torch.float64)[0], rtol=0, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# by epigraphs: optimality by one subgradient, which every sample must have
def data(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


B = data(13, 5, seed=1)
SIGNS = data(13, seed=4).sign()
BALL = [ik.Inequality(lambda z, b: z.square().sum() - 0.3)]
KINKED: dict[str, tuple[Any, list[Any], int]] = {  # objective, constraints, and how many numbers are given
    "least absolute deviations": (lambda z, b: (B @ z - b).abs().sum(), [], 13),
    "deviations in a ball": (lambda z, b: (B @ z - b).abs().sum(), BALL, 13),
    "hinge in a ball": (lambda z, b: torch.relu(1 - b.sign() * (B @ z)).sum(), BALL, 13),
    "basis pursuit": (lambda z, b: z.abs().sum(), [ik.Equality(lambda z, b: B[:3] @ z - b)], 3),
    "l1 sphere": (lambda z, b: (z - b).square().sum(), [ik.Equality(lambda z, b: z.abs().sum() - 1)], 5),
    "quantiles with a budget": (
        lambda z, b: torch.maximum(0.7 * (b - B @ z), -0.3 * (b - B @ z)).sum(),
        [ik.Inequality(lambda z, b: torch.linalg.vector_norm(z, ord=1) - 0.5)],
        13,
    ),
    "greatest square": (lambda z, b: (z - b.reshape(3, 5)).square().sum(1).max(), [], 15),
    "nested": (lambda z, b: (z - b).square().sum(), [ik.Inequality(lambda z, b: z.abs().max() - 0.3)], 5),
    "total variation": (
        lambda z, b: (z - b).square().sum(),
        [ik.Inequality(lambda z, b: z.diff().abs().sum() - 0.5)],
        5,
    ),
    "groups": (
        lambda z, b: (z - b).square().sum(),
        [ik.Inequality(lambda z, b: torch.linalg.vector_norm(z[:4].reshape(2, 2), dim=1).sum() - 0.7)],
        5,
    ),
}


KINKED |= {
    "quantiles by where": (
        lambda z, b: torch.where(b - B @ z > 0, 0.7 * (b - B @ z), -0.3 * (b - B @ z)).sum(),
        [],
        13,
    ),
    "mean absolute error": (lambda z, b: torch.nn.functional.l1_loss(B @ z, b), [], 13),
    "leaky": (lambda z, b: torch.nn.functional.leaky_relu(B @ z - b, 0.2).sum() + z.square().sum(), [], 13),
    "hinge with an intercept": (
        lambda z, b: (
            torch.relu(1 - b.sign() * (B[:, :4] @ z[:4] + z[4])).sum() + z[:4].square().sum() * (1 + b[0] ** 2)
        ),
        [],
        13,
    ),
    "worst tenth": (lambda z, b: (B @ z - b).topk(2).values.mean() + z.square().sum(), [], 13),
    "worst tenth in order": (lambda z, b: (B @ z - b).sort().values[-2:].mean() + z.square().sum(), [], 13),
}


def solved(name: str, b: Tensor) -> Tensor:
    objective, constraints, _ = KINKED[name]
    start = torch.full((5,), 0.1, dtype=b.dtype)
    return ik.argmin(objective, start, (b,), constraints=constraints).value


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KINKED)
def test_a_batch_of_kinked_programs_has_the_minima_and_their_derivatives(name: str) -> None:
    """Three samples under ``vmap``: no feasible point nearby is lower, and differences along a way agree."""
    objective, constraints, count = KINKED[name]
    b = torch.stack([data(count, seed=seed) for seed in range(3)])
    one = torch.func.vmap(lambda t: solved(name, t))
    z, way, h = one(b), data(3, count, seed=9), 1e-5

    def violation(z: Tensor, b: Tensor, one_sided: bool) -> float:
        values = [c.values(z, b) for c in constraints if c.one_sided is one_sided]
        return max([float((v if one_sided else v.abs()).max()) for v in values], default=0.0)

    for point, given in zip(z, b, strict=True):
        assert violation(point, given, False) < 1e-8 and violation(point, given, True) < 1e-8
        for d in data(200, 5, seed=3):
            other = point + 1e-3 * d
            if violation(other, given, False) < 1e-12 and violation(other, given, True) <= 0:
                assert float(objective(other, given)) >= float(objective(point, given)) - 1e-9
    _, moved = torch.func.jvp(one, (b,), (way,))
    differences = (one(b + h * way) - one(b - h * way)) / (2 * h)
    torch.testing.assert_close(moved, differences, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("n", "dtype", "most"), [(64, torch.float64, 1e-8), (20, torch.float32, 1e-4)])
def test_many_unknowns_and_single_precision(n: int, dtype: torch.dtype, most: float) -> None:
    a = data(n, seed=0).to(dtype)
    found = nearest(a, torch.ones((), dtype=dtype), SETS["l1 ball"][0])
    assert found.evaluations < 400
    assert float((found.value - ik.project.l1_ball()(a)).abs().max()) < most


@pytest.mark.parametrize("start", [(0.2, 3.0), (3.0, 0.2), (3.0, 4.0)])
def test_a_kink_that_no_epigraph_knows_is_not_passed_over(start: tuple[float, float]) -> None:
    """At zero ``hardtanh(z - 1)`` begins to rise, with a derivative of zero on one side: the objective falls beside it."""

    def objective(z: Tensor) -> Tensor:
        return torch.nn.functional.hardtanh(z - 1).abs().sum() + 0.1 * z.abs().sum()

    z0 = torch.tensor(start, dtype=torch.float64)
    found = ik.argmin(objective, z0, on_failure="ignore")
    around = found.value + 1e-3 * torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
    lower = min(float(objective(z)) for z in around) < float(objective(found.value)) - 1e-5
    assert not (bool(found.converged) and lower)


@pytest.mark.parametrize("side", ["where", "clamp"])
def test_a_loss_that_is_smooth_by_parts_with_kinks_costs_no_more_for_these(side: str) -> None:
    """Huber's loss: its gradient is continuous, whatever operations it is made of."""
    b, d = data(13, seed=3), 0.1

    def loss(r: Tensor) -> Tensor:
        if side == "where":
            return torch.where(r.abs() < d, 0.5 * r.square(), d * (r.abs() - d / 2))
        within = r.clamp(-d, d)
        return 0.5 * within.square() + d * (r - within).abs()

    found = ik.argmin(lambda z: loss(B @ z - b).sum(), torch.zeros(5, dtype=torch.float64))
    plain = ik.argmin(
        lambda z: torch.nn.functional.huber_loss(B @ z, b, delta=d, reduction="sum"),
        torch.zeros(5, dtype=torch.float64),
    )
    torch.testing.assert_close(found.value, plain.value, rtol=1e-6, atol=1e-8)
    assert found.evaluations <= 1.5 * plain.evaluations


# ---------------------------------------------------------------------------------------------------------------------
# by epigraphs: units, sides, exact fits, costs
def test_every_operation_that_is_known_for_its_kinks_is_looked_for() -> None:
    assert set(kinked_operations._RULES) == work.KINKED


@pytest.mark.parametrize("least", [1e-6, 1.0])
@pytest.mark.parametrize("lengths", [False, True])
def test_samples_in_units_of_their_own_do_not_spoil_each_other(least: float, lengths: bool) -> None:
    """A millionth beside ten thousand: kinks, and what rounds them off, are measured sample by sample."""
    units = torch.tensor([least, 1.0, 1e4], dtype=torch.float64)
    b = data(3, 13, seed=5) * units[:, None]

    def one(b: Tensor, unit: Tensor) -> Tensor:
        def objective(z: Tensor) -> Tensor:
            if lengths:
                return (B @ z - b).square().sum() / unit + 2 * torch.linalg.vector_norm(
                    z[:4].reshape(2, 2), dim=1
                ).sum()
            return (B @ z - b).abs().sum() + 0.1 * z.square().sum() / unit

        return ik.argmin(objective, torch.zeros(5, dtype=torch.float64)).value

    found = torch.func.vmap(one)(b, units) / units[:, None]
    alone = torch.func.vmap(one)(b / units[:, None], torch.ones_like(units))
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-8)


def test_a_sample_that_is_no_number_does_not_spoil_the_others() -> None:
    a = torch.tensor([[1.0, 2.0, 0.2], [1.0, torch.nan, 2.0], [-3.0, 0.3, 2.0]], dtype=torch.float64)
    found = ik.argmin(
        lambda z, a: (z - a).square().sum(-1) / 2 + 0.5 * z.abs().sum(-1),
        torch.zeros_like(a),
        a,
        batch_dims=1,
        on_failure="ignore",
    )
    assert found.converged.tolist() == [True, False, True]
    soft = torch.nn.functional.softshrink(a[::2], 0.5)
    torch.testing.assert_close(found.value[::2], soft, rtol=0, atol=1e-8)


F = torch.nn.functional
SAME: dict[str, tuple[Any, Any]] = {
    "ranking": (lambda r: F.margin_ranking_loss(r, 0 * r, SIGNS, margin=1.0), lambda r: F.relu(1 - SIGNS * r).mean()),
    "embedding": (
        lambda r: F.hinge_embedding_loss(r, SIGNS),
        lambda r: torch.stack([r[SIGNS > 0].sum(), F.relu(1 - r[SIGNS < 0]).sum()]).sum() / 13,
    ),
    "classes": (
        lambda r: F.multi_margin_loss(r.reshape(13, 1) * torch.eye(3)[0].to(r), 0 * SIGNS.long() + 1),
        lambda r: (F.relu(1 + r) + 1).mean() / 3,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_losses_with_margins_are_known(name: str) -> None:
    """As what they are made of is."""
    found, want = (
        ik.argmin(lambda z, f=f: f(B @ z) + 0.1 * z.square().sum(), torch.zeros(5, dtype=torch.float64))
        for f in SAME[name]
    )
    assert found.evaluations < 400
    torch.testing.assert_close(found.value, want.value, rtol=0, atol=1e-8)


FITS: dict[str, Any] = {
    "absolute": lambda r: r.abs().sum(),
    "greatest": lambda r: r.abs().max(),
    "length": lambda r: torch.linalg.vector_norm(r),
}


@pytest.mark.parametrize("name", FITS)
def test_an_exact_fit_has_no_derivative_and_says_so(name: str) -> None:
    """All residuals are zero, and part as soon as data change."""
    want = torch.tensor([1.0, -2.0, 0.5, 0.3, 2.0], dtype=torch.float64)
    b = (B @ want).requires_grad_()
    start = torch.zeros(5, dtype=torch.float64)
    found = ik.argmin(lambda z, b: FITS[name](B @ z - b), start, (b,))
    torch.testing.assert_close(found.value, want)
    with pytest.warns(DegenerateWarning, match="more kinks meet at this minimum"):
        found.value.sum().backward()
    found = ik.argmin(lambda z, b: FITS[name](B @ z - b), start, (b,), degenerate="raise")
    with pytest.raises(ik.ConvergenceError, match="degenerate"):
        found.value.sum().backward()


def test_what_is_said_twice_has_its_derivative_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    """Three numbers at a tie, in several sums of the largest."""
    b = torch.tensor([1.0, 1.1, 0.9, 3.0, -0.2], dtype=torch.float64, requires_grad=True)
    weights = torch.linspace(2.0, 0.1, 5, dtype=torch.float64)
    z = ik.argmin(
        lambda z, b: (z - b).square().sum() + (weights * z.abs().sort(descending=True).values).sum(),
        torch.full((5,), 0.1, dtype=torch.float64),
        (b,),
    ).value
    (slope,) = torch.autograd.grad(z[0], b)
    tied = (z.abs() - z[0].abs()).abs() < 1e-8
    torch.testing.assert_close(slope, tied.to(z) / tied.sum(), rtol=0, atol=1e-8)
    assert not recwarn.list


def test_where_that_takes_another_side_at_the_minimum_is_not_the_greater_of_two() -> None:
    """At the start it is; further out it is a step down."""
    objective = lambda z: torch.where(z.abs() < 1, z.abs(), 0.5 * z.abs()).sum() + (z - 4).square().sum() / 8  # noqa: E731
    found = ik.argmin(objective, torch.full((2,), 0.5, dtype=torch.float64), on_failure="ignore")
    if bool(found.converged):
        beside = found.value + 1e-3 * torch.randn(
            20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        assert all(objective(z) >= objective(found.value) - 1e-9 for z in beside)


@pytest.mark.parametrize(
    ("name", "most"), [("fused", 260), ("lasso", 260), ("groups", 260), ("worst five of a hundred", 300)]
)
def test_kinks_that_are_met_early_are_not_searched_for_long(name: str, most: int) -> None:
    """Evaluations, where 500 to 1,200 were spent beside them before: 676, 455, 690 and a refusal."""
    X, y = data(60, 30, seed=10), data(60, seed=11)
    groups = lambda z: torch.linalg.vector_norm(z.reshape(6, 5), dim=1).sum()  # noqa: E731
    objective, n = {
        "fused": (lambda z: (z - y.repeat(3)).square().sum() / 2 + 2 * z.diff().abs().sum(), 180),
        "lasso": (lambda z: (X @ z - y).square().sum() / 2 + 4 * z.abs().sum(), 30),
        "groups": (lambda z: (X @ z - y).square().sum() / 2 + 6 * groups(z), 30),
        "worst five of a hundred": (
            lambda z: (data(100, 4, seed=24) @ z).topk(5).values.mean() + (z - 1).square().sum(),
            4,
        ),
    }[name]
    assert ik.argmin(objective, torch.zeros(n, dtype=torch.float64)).evaluations <= most


def test_weights_of_the_largest_are_the_nearest_ones() -> None:
    v = 2 * data(50, 6, seed=0)
    for k in (1, 2, 5):
        w = kinked_operations.nearest_weights(k, v)
        low, high = v.amin(-1, True) - 2, v.amax(-1, True) + 1
        for _ in range(60):
            middle = (low + high) / 2
            many = (v - middle).clamp(0, 1).sum(-1, True) > k
            low, high = torch.where(many, middle, low), torch.where(many, high, middle)
        torch.testing.assert_close(w, (v - low).clamp(0, 1), rtol=0, atol=1e-12)
