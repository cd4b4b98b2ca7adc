"""A callback's word and a step limit hold for all of a solve, whatever it is made of; and who found it is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.compat import transforms_active
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.factored import chord_steps
from implicitkit.solver.subset import WholeBatch

F64 = torch.float64


def _pass(z: Tensor) -> Tensor:
    """Two minima, and the saddle between them that the start leads to."""
    x, y, w = z.unbind(-1)
    return (x**2 - 1) ** 2 + 0.2 * y * w + 3 * y**2 + y**4 + w**2 + w**4


_START = torch.tensor([0.0, 1.0, 0.5], dtype=F64)
_SOLVERS = ["auto", "lbfgs", "newton_cg", "gradient_descent"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", _SOLVERS)
def test_a_stop_in_every_step(solver: str) -> None:
    """Before the saddle, at it, and on the way down from it."""
    whole = int(ik.argmin(_pass, _START, solver=solver).steps)
    assert whole > 3
    for last in range(1, whole):
        seen: list[int] = []
        found = ik.argmin(
            _pass,
            _START,
            solver=solver,
            on_failure="ignore",
            callback=lambda step, z, norm, seen=seen, last=last: seen.append(step) or step == last,
        )
        assert ik.Status(int(found.status)).name == "STOPPED", (last, found)
        assert seen == list(range(1, last + 1))
        assert float(_pass(found.value)) <= float(_pass(_START))
    # of several stages the point with the least |F| is kept, and that is the saddle
    assert solver == "auto" or float(_pass(found.value)) < 0.9, "on the way down, below the saddle, which is at 1"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", _SOLVERS)
def test_a_limit_of_every_size(solver: str) -> None:
    whole = int(ik.argmin(_pass, _START, solver=solver).steps)
    for most in range(1, whole):
        seen: list[int] = []
        found = ik.argmin(
            _pass,
            _START,
            solver=solver,
            on_failure="ignore",
            max_steps=most,
            callback=lambda step, z, norm, seen=seen: seen.append(step),
        )
        assert len(seen) <= most and int(found.steps) <= most, (most, found)
        assert most == whole - 1 or not bool(found.converged), "in the last step a point may be taken as it is"
    if solver != "auto":  # of several stages the point with the least |F| is kept, and that is the saddle
        assert ik.Status(int(found.status)).name != "SADDLE" and float(_pass(found.value)) < 0.9


@pytest.mark.parametrize("n", [2, 40, 200])
def test_a_limit_where_a_method_hands_over(n: int) -> None:
    """Newton's steps on a convex objective give this one up at once, and the limit leaves none to those that go on."""
    wells = lambda z: (z.square() - 1).square().sum()  # noqa: E731
    found = ik.argmin(wells, torch.full((n,), 0.1, dtype=F64), max_steps=1, on_failure="ignore")
    assert ik.Status(int(found.status)).name == "MAX_STEPS" and int(found.steps) <= 1


def test_a_stop_is_for_the_whole_batch() -> None:
    """The second sample is at its minimum when the first is still on its way from the saddle."""
    start = torch.stack([_START, ik.argmin(_pass, torch.tensor([1.0, 0, 0], dtype=F64)).value])
    found = ik.argmin(
        _pass, start, batch_dims=1, solver="lbfgs", on_failure="ignore", callback=lambda step, z, norm: step == 3
    )
    assert [ik.Status(int(s)).name for s in found.status] == ["STOPPED", "CONVERGED"]


def test_who_found_it() -> None:
    """Anderson's steps come to a fixed point that repels, and the plain iteration to the one that is returned."""

    def magnet(m: Tensor, field: Tensor) -> Tensor:
        return torch.tanh(0.3 * m.sum(-1, keepdim=True).expand_as(m) + field)

    fields = torch.tensor([[0.01], [5.0]], dtype=F64)
    alone = [ik.fixed_point(magnet, torch.zeros(10, dtype=F64), field).solver for field in fields]
    assert alone == ["auto (picard)", "auto (anderson)"]
    both = ik.fixed_point(magnet, torch.zeros(2, 10, dtype=F64), fields, batch_dims=1)
    assert both.solver == "auto (anderson, picard)"


# ---------------------------------------------------------------------------------------------------------------------
# Results of all samples while fewer and fewer of them are in work: against a list that is kept by hand.
@pytest.mark.parametrize("seed", range(8))
def test_every_sample_has_what_was_last_known_of_it(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    batch = 9
    whole, at_work = WholeBatch(batch), torch.arange(batch)
    known, kept = torch.zeros(batch, 2), torch.zeros(batch)
    for _ in range(4):
        value = torch.randn(len(at_work), 2, generator=g)
        whole.store(z=value)
        known[at_work] = value
        ended = torch.randperm(len(at_work), generator=g)[: len(at_work) // 3].sort().values
        mark = torch.randn(len(ended), generator=g)
        whole.store_some(ended, {"mark": mark})
        kept[at_work[ended]] = mark
        torch.testing.assert_close(whole.values["z"], known, rtol=0, atol=0)
        torch.testing.assert_close(whole.values["kept mark"], kept, rtol=0, atol=0)
        left = torch.ones(len(at_work), dtype=torch.bool).index_fill(0, ended, False).nonzero().squeeze(1)
        whole.narrow(left)
        at_work = at_work[left]
    now = torch.randn(len(at_work), 2, generator=g)
    known[at_work] = now
    torch.testing.assert_close(whole.merge(now, "z"), known, rtol=0, atol=0)


def test_what_comes_later_is_zero_of_samples_that_had_ended() -> None:
    whole = WholeBatch(3)
    whole.store(a=torch.ones(3))
    whole.narrow(torch.tensor([2, 0]))
    whole.store(b=torch.tensor([5.0, 7.0]))
    assert whole.values["b"].tolist() == [7.0, 0.0, 5.0]


# ---------------------------------------------------------------------------------------------------------------------
# A point at which a step has been looked for is not evaluated a second time, whatever became of the trials.
D = torch.float64
_N = 160


def _valleys(z: Tensor) -> Tensor:
    return torch.cat([3 * (z[1:] - z[:-1] ** 2), 1 - z])


def _rosenbrock(z: Tensor) -> Tensor:
    return torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])


#: verb, solver, function, unknowns, start, and how often a point on the way is evaluated: once more to linearise there
_CASES: dict[str, tuple[Callable[..., ik.Solution], str, Callable[[Tensor], Tensor], int, float, int]] = {
    "parts of a step": (ik.least_squares, "levenberg_marquardt", _valleys, _N, -0.5, 1),
    "dogleg": (ik.least_squares, "dogleg", _valleys, _N, -0.5, 1),
    "products": (ik.least_squares, "newton_cg", _valleys, _N, -0.5, 2),
    "trust region": (ik.root, "trust_region", _rosenbrock, 2, -1.2, 2),
    "df_sane": (ik.root, "df_sane", _rosenbrock, 2, -1.2, 1),
}
_LOOKED_AT = 3  # points that are looked at once more: the first, the last, and the best


@pytest.mark.parametrize("name", list(_CASES))
def test_no_point_is_evaluated_twice_in_its_steps(name: str) -> None:
    verb, solver, function, n, start, most = _CASES[name]
    seen: Counter[bytes] = Counter()

    def counted(z: Tensor) -> Tensor:
        if not transforms_active():
            seen[z.detach().numpy().tobytes()] += 1
        return function(z)

    verb(counted, torch.full((n,), start, dtype=D), solver=solver, on_failure="ignore", max_steps=8)
    assert len(seen) >= 8
    assert all(count <= most for _, count in seen.most_common()[_LOOKED_AT:]), seen.values()


@pytest.mark.parametrize(("far", "evaluations"), [(1e6, 1), (1.0, 0)])
def test_steps_with_old_factors_in_vain_cost_one_evaluation(far: float, evaluations: int) -> None:
    """The point that they have not led away from is as well known as before; a step that is longer than the last one (here
    ``far``) is not tried."""

    class Far:
        """Factors of quite another matrix."""

        def solve(self, b: Tensor) -> Tensor:
            return -100 * b

        def size(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    seen = []

    class Once(ik.Method):
        solves = "root"

        def init(self, f: Evaluations, z: Tensor) -> None:
            return None

        def step(self, f: Evaluations, z: Tensor, state: None) -> tuple[Tensor, None]:
            f(z)
            before = f.evaluations
            assert chord_steps(f, Far(), z, 10 * f.norm, z + far) is z
            f(z)
            seen.append(f.evaluations - before)
            return z - f(z), state

    ik.root(lambda z: 0.5 * z - 1, torch.zeros(3, dtype=D), solver=Once(), max_steps=4, on_failure="ignore")
    assert seen and set(seen) == {evaluations}
