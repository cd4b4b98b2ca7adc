"""Anderson's method on maps whose evaluation costs less than mixing: plain steps as long as they gain, and few looks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrices import with_eigenvalues
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import linearise
from implicitkit.lifting.work import Tally, Work
from implicitkit.linear import GMRES
from implicitkit.linear.iterative.contraction import Contraction
from implicitkit.solver import costs
from implicitkit.solver.fixed_point import anderson

D = torch.float64
SAMPLES, N = 4, 80
_spectrum = functools.partial(with_eigenvalues, N)


def _dear(out: Tensor) -> Tensor:
    for _ in range(100):
        out = out.view_as(out)
    return out


class _Counted:
    """Solves, counted in mixings and looks."""

    def __init__(self, A: Tensor, monkeypatch: pytest.MonkeyPatch, dear: bool = False) -> None:
        self.A, self.c, self.dear = A, torch.ones(SAMPLES, N, dtype=D), dear
        self.mixings = self.looks = 0
        coefficients, step = ik.Anderson._coefficients, ik.Anderson.step

        def mixing(*given: Any) -> Any:
            self.mixings += 1
            return coefficients(*given)

        def look(*given: Any) -> Any:
            self.looks += 1
            return step(*given)

        monkeypatch.setattr(ik.Anderson, "_coefficients", mixing)
        monkeypatch.setattr(ik.Anderson, "step", look)

    def map(self, dear: bool) -> Callable[[Tensor], Tensor]:
        def step(z: Tensor) -> Tensor:
            out = (self.A @ z.unsqueeze(2)).squeeze(2) + self.c
            return _dear(out) if dear else out

        return step

    def solve(self, solver: Any = "anderson", **options: Any) -> ik.Solution:
        self.mixings = self.looks = 0
        found = ik.fixed_point(self.map(self.dear), 0 * self.c, batch_dims=1, solver=solver, **options)
        exact = torch.linalg.solve(torch.eye(N, dtype=D) - self.A, self.c)
        assert bool(found.converged.all())
        torch.testing.assert_close(found.value, exact, rtol=0, atol=1e-6)
        return found


@pytest.mark.parametrize("dear", [False, True], ids=["cheap", "dear"])
def test_a_disk_is_walked_without_mixing_where_evaluations_are_cheap(
    dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No least squares, at most one evaluation more than the plain iteration, and a look at every second point at most;
    where evaluations are dear, some mixing."""
    run = _Counted(torch.stack([_spectrum(0.6, [], seed) for seed in range(SAMPLES)]), monkeypatch, dear)
    for rtol in (1e-7, 5e-8, 2e-8):
        found = run.solve(rtol=rtol)
        mixings, looks = run.mixings, run.looks
        plain = run.solve("picard", rtol=rtol)
        assert (mixings == 0) != dear
        assert dear or (found.evaluations <= plain.evaluations + 1 and looks <= found.evaluations / 2)


@pytest.mark.parametrize(
    ("inner", "outer"), [(0.4, [0.97, 0.96, 0.95]), (0.4, [-1.5, -1.4]), (0.4, [0.99]), (0.1, [0.75])], ids=str
)
def test_eigenvalues_apart_end_the_plain_steps(
    inner: float, outer: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first steps gain shows that a disk is not all, and what they were is remembered: few evaluations more than
    where all are dear.  The last one's would be fast enough, were it not for the first steps."""
    run = _Counted(torch.stack([_spectrum(inner, outer, seed) for seed in range(SAMPLES)]), monkeypatch)
    found = run.solve()
    assert run.mixings
    run.dear = True
    assert found.evaluations <= run.solve().evaluations + 5


@pytest.mark.parametrize("rtol", [1e-4, 1e-6])
def test_an_eigenvalue_beyond_one_is_seen_before_residuals_grow(rtol: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps take down what contracts, the second less than the first: none is taken then without a look."""
    run = _Counted(torch.stack([_spectrum(0.4, [-1.5, -1.4], seed) for seed in range(SAMPLES)]), monkeypatch)
    run.c = torch.randn(SAMPLES, N, generator=torch.Generator().manual_seed(1), dtype=D)
    options: dict[str, Any] = {"batch_dims": 1, "solver": "anderson", "rtol": rtol, "atol": 0.0}
    cheap, dear = (ik.fixed_point(run.map(dear), 0 * run.c, **options).evaluations for dear in (False, True))
    assert cheap <= dear + 1


def test_every_look_is_a_step_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback sees every plain step, and a limit is kept to the step."""
    run = _Counted(torch.stack([_spectrum(0.6, [], seed) for seed in range(SAMPLES)]), monkeypatch)
    seen: list[int] = []
    run.solve(callback=lambda k, z, norm: seen.append(k))
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 20
    for limit in (2, 3, 4, 5):
        step = lambda z: (run.A @ z.unsqueeze(2)).squeeze(2) + run.c  # noqa: E731
        cut = ik.fixed_point(step, 0 * run.c, batch_dims=1, solver="anderson", max_steps=limit, on_failure="ignore")
        assert cut.steps.tolist() == [limit] * SAMPLES and cut.evaluations == limit + 1


def test_rows_of_cheap_maps_are_dropped_where_that_pays() -> None:
    """Half of a small batch is kept on board; of a large one it is not, nor of a dear map."""
    spent = {}
    for rows, size, dear in ((8, 80, False), (8192, 80, False), (8, 80, True)):
        slow = torch.arange(rows) % 2 == 0
        rate = torch.where(slow, 0.7, 0.1).unsqueeze(1)
        c = torch.ones(rows, size)

        def step(z: Tensor, rate: Tensor, c: Tensor, dear: bool = dear) -> Tensor:
            out = rate * torch.sin(z) + c
            return _dear(out) if dear else out

        found = ik.fixed_point(step, 0 * c, (rate, c), batch_dims=1, in_dims=0, rtol=1e-5)
        assert bool(found.converged.all())
        spent[rows, dear] = found.sample_evaluations / rows / found.evaluations
    assert spent[8, False] == 1 and spent[8192, False] < 0.9 and spent[8, True] < 0.9, spent


def test_rows_are_dropped_where_four_evaluations_of_them_cost_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a method that weighs it, by what they cost; by any other one always."""
    rows = ((True, 2e5, 0.5, False), (True, 2e5, 0.2, True), (True, 4e5, 0.5, True), (False, 1e3, 0.5, True))
    for weighs, cost, share, pays in rows:
        monkeypatch.setattr(costs, "cost_of", lambda _, cost=cost: cost)
        assert costs.dropping_pays(SimpleNamespace(weighs=weighs), share) is pays  # type: ignore[arg-type]


def _few_slow_ones(slow: float, W: Tensor) -> ik.Solution:
    """Of 64 samples four scaled by ``slow``, so that the tanh of the others is flat."""
    size = torch.where(torch.arange(64) % 16 == 0, slow, 4.0).unsqueeze(1)
    c = size * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    cell = lambda z, c: torch.tanh(torch.addmm(c, z, W))  # noqa: E731
    return ik.fixed_point(cell, 0 * c, c, batch_dims=1, in_dims=0, rtol=1e-4, atol=0.0, solver="anderson")


def test_a_few_slow_samples_of_a_small_batch_are_gone_on_with_alone() -> None:
    """Where they take many steps more; not where they are nearly done."""
    W = with_eigenvalues(128, 0.3, [0.97, 0.96, 0.95]).float()
    slow, soon = _few_slow_ones(0.05, W), _few_slow_ones(1.0, W)
    assert bool(slow.converged.all()) and bool(soon.converged.all())
    assert slow.evaluations > 15 and slow.sample_evaluations < 0.5 * 64 * slow.evaluations, slow
    assert soon.sample_evaluations == 64 * soon.evaluations, soon


def test_rows_are_dropped_where_the_steps_ahead_cost_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all rows, evaluated and mixed; how many are left is asked only where it matters."""
    rows = (
        (3e4, 64, 0.06, 10.0, True),
        (3e4, 64, 0.06, 3.0, False),
        (3e4, 64, 0.9, 14.0, False),
        (1e6, 256, 0.1, 2.0, True),
        (1e6, 256, 0.1, 0.2, False),
        (1e6, 256, 0.8, 1.5, False),  # what is copied costs more
        (2e3, 4, 0.1, None, False),  # whatever is left
        (3e4, 64, 0.06, math.inf, True),
        (6e3, 8, 0.06, None, False),
    )
    for cost, batch, share, ahead, pays in rows:
        monkeypatch.setattr(costs, "cost_of", lambda _, cost=cost: cost)
        f = SimpleNamespace(weighs=True, batch=batch, size=128 if batch < 256 else 512)

        def asked(ahead: float | None = ahead) -> float:
            assert ahead is not None
            return ahead

        assert costs.dropping_pays(f, share, asked) is pays, (cost, batch, share, ahead)  # type: ignore[arg-type]


class _Watched(ik.Method):
    """Plain steps, with a memory; which numbers of samples it was narrowed to."""

    name, solves = "watched", "fixed_point"

    def __init__(self) -> None:
        self.narrowed: list[int] = []

    def init(self, f: Any, z: Tensor) -> Tensor:
        return z.new_zeros(5, *z.shape).transpose(0, 1)  # a row of all samples after another

    def step(self, f: Any, z: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return f(z), state

    def keep(self, state: Tensor) -> dict[str, Tensor]:
        return {"rows": state[:, 0]}

    def select(self, state: Tensor, index: Tensor) -> Tensor:
        self.narrowed.append(len(index))
        few: Tensor = super().select(state, index)
        assert torch.equal(few, state[index]) and few.stride(0) <= few.stride(1), few.stride()
        return few


def test_rows_that_are_dropped_are_not_copied_and_the_others_stay_as_they_lie() -> None:
    rate = torch.tensor([0.01, 0.01, 0.01, 0.5], dtype=D).unsqueeze(1)
    method, c = _Watched(), torch.ones(4, 3, dtype=D)
    found = ik.fixed_point(lambda z, rate, c: rate * z + c, 0 * c, (rate, c), batch_dims=1, in_dims=0, solver=method)
    assert bool(found.converged.all()) and method.narrowed == [1]


def test_what_a_step_costs_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on one core: one layer, float32; dearer with its size, and with its operations."""
    rows = (((64, 128), 3.5e4, True), ((64, 256), 7.6e4, False), ((256, 512), 9.2e5, False), ((64, 128), None, False))
    for (batch, size), cost, cheap in rows:
        monkeypatch.setattr(costs, "cost_of", lambda _, cost=cost: cost)
        assert costs.is_cheap(SimpleNamespace(batch=batch, size=size)) is cheap  # type: ignore[arg-type]
    monkeypatch.setattr(
        costs, "cost_of", lambda _: 5.9e4
    )  # nine unknowns on a grid: beside mixing in every second step
    said = [costs.is_cheap(SimpleNamespace(batch=64, size=9), period) for period in (1, 2, 3)]  # type: ignore[arg-type]
    assert said == [True, True, False]


def test_what_steps_gain_and_how_many_are_left() -> None:
    """By hand: a step that leaves ``rho`` of a residual needs ``log(2 tolerance / |r|) / log(rho)`` more to twice the
    tolerance; the first gain sets the pace, a quarter of which later ones must keep, and none may leave more than four
    fifths."""
    before, left = torch.ones(5, dtype=D), torch.tensor([0.25, 0.25, 0.5, 0.79, 0.9], dtype=D)
    f: Any = SimpleNamespace(norm=left.square(), tolerance=torch.tensor([0.01, 1.0, 0.02, 0.08, 0.1], dtype=D))
    enough, gain, pace = costs.gains(f, before, 2, None)
    torch.testing.assert_close(gain, left.log())
    torch.testing.assert_close(pace, torch.minimum(left.log() / 4, torch.tensor(0.8, dtype=D).log()))
    assert enough.tolist() == [True, True, True, True, False]
    f.norm = torch.tensor([0.7, 0.75, 0.7, 0.78, 0.78], dtype=D)  # a quarter of the pace: 0.25^(1/4) = 0.71
    enough, gain, kept = costs.gains(f, before, 1, pace)
    torch.testing.assert_close(gain, f.norm.log())
    assert kept is pace and enough.tolist() == [True, False, True, True, True]
    needed = costs.steps_needed(f, torch.full((5,), 0.5, dtype=D).log(), 2.0)
    torch.testing.assert_close(needed, torch.tensor([35.0, 0.375, 17.5, 4.875, 3.9], dtype=D).log2())


@pytest.mark.parametrize(
    ("n", "dear", "mixes"), [(7, False, True), (8, False, False), (9, False, False), (9, True, True)]
)
def test_few_unknowns_of_a_cheap_map_are_not_mixed_while_plain_steps_are_fast(
    n: int, dear: bool, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below eight, where every step mixes, a few differences span them; from there on each step of a map that contracts fast
    is a plain one, if it costs less than mixing in every second adds."""
    run = _Counted(torch.zeros(1), monkeypatch)
    c, rate = torch.ones(8, n, dtype=D), torch.linspace(0.05, 0.25, n, dtype=D)

    def step(z: Tensor) -> Tensor:
        out = rate * torch.sin(z.roll(1, -1)) + c
        return _dear(out) if dear else out

    found = ik.fixed_point(step, 0 * c, batch_dims=1)
    assert bool(found.converged.all()) and (run.mixings > 0) is mixes, run.mixings
    if not mixes:
        plain = ik.fixed_point(step, 0 * c, batch_dims=1, solver="picard")
        assert found.evaluations <= plain.evaluations


@pytest.mark.parametrize(
    ("needs", "room", "drops", "steps"),
    [
        ([1.5, 2.5, 4.5], 6, False, 4),  # as many as the slowest needs, and no more
        ([1.5, 2.5, 4.5], 4, False, 1),  # ... where there is room for them
        ([1.5, 2.5, 4.5], 6, True, 1),  # ... and rows are not dropped: two would take half of them near the tolerance
        ([0.5, 0.9, 5.5], 6, False, 2),  # three times what half of them need
        ([-1.0, -0.5, 5.5], 6, False, 0),  # half are there: somebody looks
        ([9.5, 9.5, 9.5], 6, False, 2),  # far away: two at a time, and it is seen whether they still gain
        ([9.5, 9.5, 9.5], 1, False, 1),
    ],
)
def test_the_last_steps_of_a_cheap_map_are_made_without_a_look(
    needs: list[float], room: int, drops: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, at a rate of a half; a fourth sample, which is done, asks for nothing."""
    monkeypatch.setattr(anderson, "dropping_pays", lambda f, share: drops)
    gain = torch.full((4,), 0.5, dtype=D).log()
    norm = 2.0 ** torch.tensor([*needs, 50.0], dtype=D)
    active = torch.tensor([True, True, True, False])
    f: Any = SimpleNamespace(norm=norm, tolerance=torch.ones(4, dtype=D), active=active, at_work=3, batch=4)
    assert anderson._cheaply_unseen(f, gain, room) == steps


@pytest.mark.parametrize(("off", "first"), [(1.0, 2), (1e-10, 1)])
def test_the_first_two_steps_are_made_at_once_unless_they_may_be_enough(
    off: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    step = ik.Anderson.step

    def look(self: Any, f: Any, z: Tensor, state: Any) -> Any:
        out = step(self, f, z, state)
        taken.append(f.taken)
        return out

    monkeypatch.setattr(ik.Anderson, "step", look)
    c = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=D)
    found = ik.fixed_point(lambda z: 0.1 * z + c, c / 0.9 + off, batch_dims=1, solver="anderson")
    assert bool(found.converged.all()) and taken[0] == first


@pytest.mark.parametrize("memory", [1, 2, 5, 8])
def test_the_last_look_is_remembered_whatever_the_memory(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is that since the last look, which is in a path of few steps too."""
    run = _Counted(torch.stack([_spectrum(0.6, [], seed) for seed in range(SAMPLES)]), monkeypatch)
    run.solve(ik.Anderson(memory=memory), rtol=1e-7)
    assert run.looks


def test_a_disk_takes_few_looks_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a start near the equilibrium: two steps to see the rate, the others at once, and they are enough but for one."""
    A = torch.stack([_spectrum(0.5, [], seed) for seed in range(SAMPLES)])
    run = _Counted(A, monkeypatch)
    exact = torch.linalg.solve(torch.eye(N, dtype=D) - A, run.c)
    noise = torch.randn(SAMPLES, N, generator=torch.Generator().manual_seed(0), dtype=D)
    for off in (2e-2, 5e-2):
        run.looks = 0
        found = ik.fixed_point(
            run.map(False), exact + off * noise, batch_dims=1, solver="anderson", rtol=1e-4, atol=0.0
        )
        assert bool(found.converged.all())
        assert run.looks <= 5 and found.evaluations >= run.looks + 4, (run.looks, found.evaluations)


# ---------------------------------------------------------------------------------------------------------------------
# Maps of few operations that take long: nothing says that they are cheap, and no evaluation more is spent on them.
C = torch.randn(SAMPLES, N, generator=torch.Generator().manual_seed(2), dtype=D)
Q = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(3), dtype=D)).Q
A = (Q * torch.cat([torch.tensor([0.6], dtype=D), torch.linspace(0, 0.2, N - 1, dtype=D)])) @ Q.mT
WIDE = 1e-4 * torch.randn(N, 40_000, generator=torch.Generator().manual_seed(4), dtype=D)


class _Own(torch.autograd.Function):
    """A product that nobody sees into."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, M: Tensor) -> Tensor:
        ctx.save_for_backward(M)
        return torch.from_numpy(z.detach().numpy() @ M.numpy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g @ ctx.saved_tensors[0].mT, None


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "factors": lambda z: torch.linalg.solve(torch.eye(N, dtype=D), (z @ A + C).mT).mT,
    "numpy": lambda z: torch.from_numpy(z.detach().numpy() @ A.numpy()) + C,
    "a wide layer": lambda z: z @ A + 1e-9 * ((z @ WIDE) @ WIDE.mT) + C,
    "somebody's own": lambda z: _Own.apply(z, A) + C,
    "an exponential": lambda z: z @ torch.linalg.matrix_exp(0 * A) @ A + C,
}


@pytest.mark.parametrize("name", MAPS)
def test_no_evaluation_more_than_where_no_map_is_cheap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigenvalue apart, of which plain steps take three times as many."""
    with torch.no_grad():
        spent = []
        for cheap in (costs.is_cheap, lambda _, period: False):
            monkeypatch.setattr(anderson, "is_cheap", cheap)
            found = ik.fixed_point(MAPS[name], 0 * C, batch_dims=1, solver="anderson", rtol=1e-10)
            spent.append(found.evaluations)
            torch.testing.assert_close(found.value, torch.linalg.solve(torch.eye(N, dtype=D) - A, C.mT).mT)
    assert spent[0] == spent[1]


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer": lambda z: z @ A + C,
    "its product by itself": lambda z: torch.addmm(C, z, A),
    "a sum over an index": lambda z: torch.einsum("bj,ji->bi", z, A) + C,
    "a filter": lambda z: 0.2 * torch.conv1d(z.unsqueeze(1), torch.ones(1, 1, 3, dtype=D), padding=1)[:, 0] + C,
    "many given numbers": lambda z: 0.5 * torch.tanh(C * z + C) + C,
}


@pytest.mark.parametrize("name", ALIKE)
def test_maps_whose_operations_tell_what_they_take_are_known_as_cheap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are written."""
    said: list[bool] = []

    def noted(f: Any, period: int) -> bool:
        said.append(costs.is_cheap(f, period))
        return said[-1]

    monkeypatch.setattr(anderson, "is_cheap", noted)
    assert bool(ik.fixed_point(ALIKE[name], 0 * C, batch_dims=1, solver="anderson").converged.all())
    assert said == [True]


def test_a_node_of_a_composition_costs_what_it_costs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what all nodes cost: a node of a long chain would never be cheap."""
    said: list[float | None] = []
    monkeypatch.setattr(anderson, "is_cheap", lambda f, period: bool(said.append(costs.cost_of(f))))
    node = ALIKE["many given numbers"]
    ik.fixed_point(node, 0 * C, batch_dims=1, solver="anderson")
    chain = ik.compose({f"n{i}": (lambda z, _: node(z), f"n{i - 1}" if i else "x") for i in range(9)}, output="n8")
    ik.solve(chain, dict.fromkeys(chain.graph, 0 * C), (C,), solver=ik.Blocks("anderson"), batch_dims=1)
    assert len(said) == 10 and said[1:] == pytest.approx([said[0]] * 9, rel=0.1)


def test_products_with_somebodys_own_operation_are_dear() -> None:
    """One node of a graph, or how long it takes is not known: GMRES is not given up for more of them."""
    M = (Q * torch.linspace(-0.6, 0.6, N, dtype=D)) @ Q.mT
    ways: tuple[tuple[Callable[[Tensor], Tensor], bool], ...] = (
        (lambda z: _Own.apply(z, M) - z, True),
        (lambda z: torch.linalg.solve(torch.eye(N, dtype=D) + 0 * z[0, 0], (z @ M).mT).mT - z, True),
        (lambda z: z @ M - z, False),
    )
    for function, dear in ways:
        _, J = linearise(function, 0 * C, fixed_point=True)
        limits = {"rtol": 1e-10, "atol": 0.0, "max_steps": None}
        found, least = (int(s.solve(J.T, C, **limits).steps.max()) for s in (Contraction(), GMRES()))
        assert (found <= least + 1) == dear, (found, least)


def test_products_of_numbers_are_counted() -> None:
    """As many for each number of a product of matrices as its rows are long."""
    a, b, c = torch.ones(3, 50), torch.ones(50, 2), torch.ones(3, 2)
    for func, args in ((torch.matmul, (a, b)), (torch.addmm, (c, a, b)), (torch.einsum, ("ij,jk->ik", a, b))):
        tally = Tally()
        tally.add(func, args, func(*args))  # type: ignore[operator]
        assert tally.work() == Work(1, 6, 300)
