"""Causal means causal: what comes later changes nothing, not even when a solve stops, at any tolerance, with any solver."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ, CausalityWarning, Cell, InTurn, PerPosition, cells, future_leak
from implicitkit_deq.causal.causality import per_position

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::implicitkit_deq.CausalityWarning")
SOLVERS: dict[str, Any] = {
    "default": "relay",
    "auto": "auto",
    "picard": "picard",
    "damped": ik.Picard(damping=0.7),
    "anderson": "anderson",
    "broyden": "broyden",
    "newton_krylov": "newton_krylov",
    "newton": "newton",
    "blocks": ik.Blocks("picard"),
    "blocks of newton_krylov": ik.Blocks("newton_krylov"),
}


class Running(cells.Cell):
    """A user's cell, declared causal, with a state of two leaves: a running mean feeds a layer without smoothness."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.W, self.V, self.U = (torch.nn.Linear(4, 4, dtype=F64) for _ in range(3))

    def update(self, z: Any, x: Tensor) -> Any:
        mean, y = z
        past = torch.nn.functional.pad(y, (0, 0, 1, 0))[:, :-1].cumsum(1)
        counts = torch.arange(1, y.shape[1] + 1, dtype=y.dtype).unsqueeze(1)
        return 0.3 * mean + past / counts, torch.relu(self.W(y) + 0.5 * self.V(mean) + self.U(x))

    def state_shape(self, x: Tensor) -> Any:
        return tuple(x.shape[1:]), tuple(x.shape[1:])

    def output(self, z: Any) -> Any:
        return z[1]


CELLS: dict[str, Callable[[], cells.Cell]] = {
    "transformer": lambda: cells.Transformer(4, 8, 2, scale=0.5, dtype=F64),
    "trellis": lambda: cells.TrellisNet(4, 6, scale=1.2, dtype=F64),
    "a user's": Running,
}
SMALL: dict[str, Callable[[], cells.Cell]] = {
    "transformer": lambda: cells.Transformer(4, 4, 2, scale=0.5, dtype=F64),
    "trellis": lambda: cells.TrellisNet(4, 2, scale=1.2, dtype=F64),
    "a user's": Running,
}


class Chord(ik.Method):
    """A user's method with Jacobians: one for the whole solve."""

    solves = "root"

    def init(self, f: Any, z: Tensor) -> Tensor:
        return f.jacobian(z)

    def step(self, f: Any, z: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return z - torch.linalg.solve(state, f(z)), state


class Mixing(Chord):
    """A user's method for fixed points that wants Jacobians too."""

    solves = "fixed_point"

    def step(self, f: Any, z: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.eye(z.shape[1], dtype=z.dtype)
        return z + torch.linalg.solve(eye - state, f(z) - z), state


def _every_solver() -> dict[str, Any]:
    """Whatever may solve a fixed point of several unknowns, by name; configured ones; those of a user."""
    bounded = ("scipy.slsqp", "scipy.trust_constr")  # of constrained minimisation only, as they say themselves
    made = {name: ik.extend.get_solver(name) for name in ik.solvers() if name not in bounded}
    serving = {n: n for n, s in made.items() if ik.extend.serves(s.solves, "fixed_point") and s.max_size != 1}
    return serving | {
        "Newton, full steps": ik.Newton(line_search=False),
        "NewtonKrylov, configured": ik.NewtonKrylov(forcing=0.5, restart=5),
        "NewtonKrylov, preconditioned": ik.NewtonKrylov(preconditioner="jacobi"),
        "Anderson, configured": ik.Anderson(memory=2, damping=0.8),
        "Impatient": ik.extend.Impatient(ik.Anderson()),
        "Relay, shortened": ik.Relay().brief(),
        "Polyalgorithm": ik.extend.Polyalgorithm((ik.extend.Stage("chord"), ik.extend.Stage("trust_region"))),
        "a user's method": Chord(),
        "a user's method for fixed points": Mixing(),
        "a user's black box": ik.extend.BlackBox(_search, "search", "root"),
        "a user's black box of a batch": ik.extend.BlackBox(_search, "search", "root", "native"),
        "a user's black box of all": ik.extend.BlackBox(_search, "search", "root", "joint"),
    }


def _search(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Tensor:
    """Steps of a length that is chosen for all unknowns together."""
    z = z0
    for _ in range(max_steps):
        residual = f.residual(z)
        size = float(residual.norm())
        if size <= atol + rtol * float(z.norm()):
            break
        z = z + residual * (1 - 0.1 * size / (1 + size))
    return z


EVERY = _every_solver()
DEAR = tuple(
    n
    for n in EVERY
    if n.rpartition(".")[2].lower().replace("-", "_") in ("nelder_mead", "powell", "cobyqa", "integrate")
)
# the dear ones take few steps, whatever the tolerance, and SciPy's are called in one way.  Each solver comes once, each cell
# with each tolerance several times; the others are slow tests.
AT_TOLERANCES = [
    pytest.param(n, rtol, name, marks=() if quick else pytest.mark.slow, id=f"{n}-{rtol}-{name}")
    for i, n in enumerate(EVERY)
    for j, rtol in enumerate((1e-1, 1e-2, 1e-3))
    for k, name in enumerate(SMALL)
    if rtol == 1e-2 or n not in DEAR
    for quick in [(i + j + k) % 3 == 0 and j == (1 if n in DEAR or n.startswith("scipy.") else i // 3 % 3)]
]
MAY_FAIL = (*DEAR, "scipy.minimize.dogleg")  # few steps, for time; no positive definite Hessian


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("solver", "rtol", "name"), AT_TOLERANCES)
def test_no_solver_leaks(solver: str, rtol: float, name: str) -> None:
    """Bit by bit: with ``causal=False`` most of these leak 1e-4 to 1e-1."""
    torch.manual_seed(0)
    layer = DEQ(SMALL[name](), rtol=rtol, atol=0.0, solver=EVERY[solver], on_failure="ignore")
    steps = (
        2 if solver == "scipy.minimize.Powell" else 8 if solver in DEAR else 200
    )  # each of those goes along all unknowns
    layer.train_settings = layer.train_settings.changed({"max_steps": steps})
    x = torch.randn(2, 3, 4, dtype=F64)
    assert future_leak(layer, x, 2, size=2.0) <= 1e-12
    layer(x)
    solution = layer.solution
    assert solution is not None and (bool(solution.converged.all()) or solver in MAY_FAIL)
    z = ik.extend.Layout(solution.value, 1).pack(solution.value)
    f = layer.cell.update(solution.value, *layer.cell.inject(x))
    residual = torch.linalg.vector_norm(ik.extend.Layout(f, 1).pack(f) - z, dim=1)
    assert bool((residual <= (1 + 1e-9) * rtol * torch.linalg.vector_norm(z, dim=1))[solution.converged].all())


def _whole_sequence_leak(cell: cells.Cell, x: Tensor, rtol: float) -> float:
    layer = DEQ(cell, rtol=rtol, atol=0.0, solver="picard", causal=False, on_failure="ignore")
    return max(future_leak(layer, x, 10, size=2.0) for _ in range(4))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_no_leak_at_any_tolerance(name: str, solver: str) -> None:
    """With the whole sequence deciding when to stop, the same layers leak 1e-4 to 1e-1.  Each solver has each tolerance."""
    rtol = (1e-1, 1e-2, 1e-3)[(list(SOLVERS).index(solver) + list(CELLS).index(name)) % 3]
    torch.manual_seed(0)
    layer = DEQ(CELLS[name](), rtol=rtol, atol=0.0, solver=SOLVERS[solver], on_failure="raise")
    x = torch.randn(2, 20, 4, dtype=F64)
    assert max(future_leak(layer, x, 10, size=2.0) for _ in range(2)) < 1e-12
    assert layer.solution is not None and bool(layer.solution.converged.all())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ["relay", "newton_krylov", "trust_region", "lbfgs", "scipy.root.hybr"])
@pytest.mark.parametrize("name", CELLS)
def test_values_and_derivatives_are_those_of_the_whole_sequence(name: str, solver: str) -> None:
    torch.manual_seed(0)
    cell = CELLS[name]()
    found = []
    for causal in (True, False):
        x = torch.linspace(-1, 1, 48, dtype=F64).reshape(2, 6, 4).sin().requires_grad_()
        layer = DEQ(cell, rtol=1e-11, atol=1e-12, solver=solver if causal else "anderson", causal=causal)
        z = layer(x)
        found.append((z, *torch.autograd.grad(z.square().sum(), [x, *cell.parameters()])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("linear", ["auto", "gmres", "bicgstab", "neumann", "lu"])
@pytest.mark.parametrize("rtol", [1e-1, 1e-3])
@pytest.mark.parametrize("name", CELLS)
def test_the_past_has_no_derivative_by_the_future(name: str, rtol: float, linear: str) -> None:
    """At any tolerance of the backward: ``J^T`` is block upper triangular, and so is every product that a method takes."""
    torch.manual_seed(0)
    rule = "auto" if linear == "auto" else ik.Implicit(linear_solver=linear, rtol=rtol)
    layer = DEQ(CELLS[name](), rtol=rtol, atol=0.0, rule=rule, on_failure="ignore")
    x = torch.randn(2, 8, 4, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[:, :5].sin().sum(), x)
    grad = grad.detach()
    assert float(grad[:, 5:].abs().max()) <= 1e-14 < 1e-3 < float(grad[:, :5].abs().max())
    ahead = torch.zeros_like(x)
    ahead[:, 5:] = 1.0
    _, moved = torch.func.jvp(layer, (x.detach(),), (ahead,))
    moved = moved.detach()
    assert float(moved[:, :5].abs().max()) <= 1e-14 < 1e-3 < float(moved[:, 5:].abs().max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["relay", "picard", "anderson", "broyden", "newton_krylov", "trust_region"])
def test_a_sequence_that_does_not_contract_leaks_nothing_of_its_own_future(solver: str) -> None:
    """Where rounding decides; ``in_dims=None`` keeps what neighbours in the batch do out of that too."""
    torch.manual_seed(2)
    cell = cells.Transformer(4, 16, 2, scale=2.0, dtype=F64)
    x, other = torch.randn(3, 16, 4, dtype=F64), torch.randn(3, 16, 4, dtype=F64)
    other[:, :8] = x[:, :8]
    how: dict[str, Any] = {"rtol": 1e-4, "atol": 0.0, "solver": solver, "on_failure": "ignore"}
    how["max_steps"] = 4 if solver in ("trust_region", "newton_krylov") else 20  # each of those is dear
    layer = DEQ(cell, **how)
    alone = torch.cat([x[:1], other[1:2], x[2:]])
    with torch.no_grad():
        assert torch.equal(layer(x)[1, :8], layer(alone)[1, :8])
        whole = DEQ(cell, **how, in_dims=None)
        assert torch.equal(whole(x)[:, :8], whole(other)[:, :8])


class Growing(cells.Cell):
    """z_t = a_t z_t + 0.3 z_{t-1} + x_t, in the past a contraction: the plain iteration overflows where a_t is large."""

    causal = True

    def update(self, z: Tensor, x: Tensor) -> Tensor:
        past = torch.nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return torch.where(x > 3, 1e60 * (z + 1), 0.5 * z) + 0.3 * past + x

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[1:])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("future", [5.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("solver", ["relay", "picard", "newton_krylov", "newton"])
def test_a_future_that_overflows_ends_nothing_before_it(solver: str, future: float) -> None:
    x = torch.randn(2, 9, 3, dtype=F64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    other = x.clone()
    other[:, 6:] = future
    layer = DEQ(Growing(), rtol=1e-6, atol=0.0, solver=solver, on_failure="ignore", max_steps=100)
    with torch.no_grad():
        z = layer(x)
        assert layer.solution is not None and bool(layer.solution.converged.all())
        assert torch.equal(z[:, :6], layer(other)[:, :6])
    assert not bool(layer.solution.converged.any())
    if math.isnan(future) and solver == "picard":
        assert set(layer.solution.status.tolist()) == {int(ik.Status.NONFINITE)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "start", [{}, {"init": "last"}, {"index": torch.tensor([4, 1])}], ids=["again", "last", "index"]
)
@pytest.mark.parametrize("solver", ["relay", "newton_krylov"])
def test_training_with_warm_starts_leaks_nothing(solver: str, start: dict[str, Any]) -> None:
    """Five steps of an optimiser whose loss is of the past, in two worlds that differ in the future only."""
    x = torch.randn(2, 8, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 5:] += 2.0
    outputs: list[list[Tensor]] = []
    for data in (x, other):
        torch.manual_seed(0)
        settings = {"init": start["init"]} if "init" in start else {}
        layer = DEQ(CELLS["transformer"](), rtol=1e-2, solver=solver, evaluation={"rtol": 1e-1}, **settings)
        optimiser = torch.optim.Adam(layer.parameters(), 1e-2)
        outputs.append([])
        for _ in range(5):
            z = layer(data, index=start.get("index"))[:, :5]
            optimiser.zero_grad()
            z.square().sum().backward()
            optimiser.step()
            outputs[-1].append(z.detach())
        outputs[-1].append(layer.eval()(data)[:, :5].detach())
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_forgiven_future_changes_no_past() -> None:
    """A sample without solution has its iterates as value, and where it ran away its start: by position."""
    x = torch.randn(4, 9, 3, dtype=F64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    other = x.clone()
    other[0, 6:] = 5.0
    layer = DEQ(Growing(), rtol=1e-6, solver="picard")
    z = layer(x)
    with pytest.warns(UserWarning, match="1 of 4 samples"):
        forgiven = layer(other)
    assert torch.equal(z[:, :6], forgiven[:, :6]) and torch.equal(z[1:], forgiven[1:])
    assert float(forgiven.abs().max()) < 1e4


@pytest.mark.parametrize("solver", ["relay", "newton_krylov", "trust_region"])
def test_stacked_layers_and_a_batch_as_one_system_leak_nothing(solver: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, dtype=F64)
    first, second = CELLS["transformer"](), cells.TrellisNet(8, 4, scale=1.2, dtype=F64)
    settings: dict[str, Any] = {"rtol": 1e-2, "atol": 0.0, "solver": solver, "on_failure": "ignore"}
    for layer in (DEQ(first, **settings) >> DEQ(second, **settings), DEQ(first, batch_dims=0, **settings)):
        assert future_leak(layer, x, 3, size=2.0) <= 1e-12
        tight = layer(x)
        with layer.using(rtol=1e-11):
            torch.testing.assert_close(tight, layer(x), rtol=0.2, atol=0.1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["transformer", "trellis"])
def test_newton_with_krylov_vectors_costs_what_it_costs_on_the_whole_sequence(name: str) -> None:
    torch.manual_seed(0)
    cell = CELLS[name]()
    x, evaluations = torch.randn(3, 24, 4, dtype=F64), {}
    for causal in (True, False):
        layer = DEQ(cell, rtol=1e-4, atol=0.0, solver="newton_krylov", causal=causal)
        layer(x)
        assert layer.solution is not None
        evaluations[causal] = layer.solution.evaluations
    assert evaluations[True] <= 1.5 * evaluations[False]
    turn = DEQ(cell, rtol=1e-4, atol=0.0, solver=ik.NewtonKrylov(preconditioner="jacobi"))
    turn(x)
    assert turn.solution is not None and turn.solution.evaluations > 10 * evaluations[True]


def test_stopping_as_a_whole_does_leak() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 4, dtype=F64)
    assert max(_whole_sequence_leak(CELLS[name](), x, rtol) for name in CELLS for rtol in (1e-1, 1e-2)) > 1e-3


@pytest.mark.parametrize("solver", ["default", "anderson", "broyden"])
@pytest.mark.parametrize(("rtol", "atol"), [(1e-2, 0.0), (0.0, 1e-3), (1e-3, 1e-4)])
def test_positions_that_all_hold_make_a_sequence_that_holds(solver: str, rtol: float, atol: float) -> None:
    torch.manual_seed(1)
    layer = DEQ(CELLS["transformer"](), rtol=rtol, atol=atol, solver=SOLVERS[solver])
    layer(torch.randn(3, 15, 4, dtype=F64))
    assert layer.solution is not None
    size = torch.linalg.vector_norm(layer.solution.value.flatten(1), dim=1)
    assert bool((layer.solution.residual_norm <= atol + rtol * size).all())


def test_a_front_costs_no_more_evaluations_than_it_has_positions() -> None:
    """Gates that remember without loss: position t is exact once t - 1 is, and by no acceleration before."""
    torch.manual_seed(0)
    x = torch.randn(4, 30, 4, dtype=F64)
    cell = cells.TrellisNet(4, 6, scale=0.5, dtype=F64)
    evaluations = {}
    for solver in ("relay", "anderson"):
        layer = DEQ(cell, rtol=1e-3, atol=0.0, solver=solver)
        layer(x)
        assert layer.solution is not None
        evaluations[solver] = layer.solution.evaluations
    assert evaluations["relay"] <= 31 and 2 * evaluations["relay"] < evaluations["anderson"]


class Swing(cells.Cell):
    """z_t = -1.5 tanh(1.3 z_t) + 0.2 z_{t-1} + x_t: slope below -1, so that the plain iteration has no chance."""

    causal = True

    def update(self, z: Tensor, x: Tensor) -> Tensor:
        past = torch.nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return -1.5 * torch.tanh(1.3 * z) + 0.2 * past + x

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[1:])


def test_a_sequence_that_gets_nowhere_is_handed_on_and_still_nothing_leaks() -> None:
    torch.manual_seed(0)
    layer = DEQ(Swing(), rtol=1e-6, atol=0.0)
    x = 0.3 * torch.randn(3, 12, 2, dtype=F64)
    z = layer(x)
    assert layer.solution is not None and int(layer.solution.steps.max()) < 200
    torch.testing.assert_close(z, layer.cell(z, x), rtol=1e-5, atol=1e-6)
    assert max(future_leak(layer, x, 6) for _ in range(4)) < 1e-12
    with pytest.raises(ik.ConvergenceError):
        DEQ(Swing(), rtol=1e-6, atol=0.0, solver="picard", max_steps=300)(x)


def test_steps_of_all_stages_are_limited_together_and_traced() -> None:
    layer = DEQ(Swing(), rtol=1e-12, atol=0.0, max_steps=20, trace=True, on_failure="ignore")
    seen: list[int] = []
    with layer.using(callback=lambda step, z, norm: seen.append(step)):
        layer(0.3 * torch.randn(2, 5, 2, dtype=F64))
    assert layer.solution is not None and layer.solution.trace is not None
    assert int(layer.solution.steps.max()) == 20 == seen[-1] and seen == sorted(set(seen))
    assert len(layer.solution.trace) == 21
    with layer.using(callback=lambda step, z, norm: step >= 3):
        layer(0.3 * torch.randn(2, 5, 2, dtype=F64))
    assert set(layer.solution.status.tolist()) == {int(ik.Status.STOPPED)}


def test_the_object_of_the_default_and_its_name_are_the_same() -> None:
    x = torch.randn(2, 6, 4, dtype=F64)
    cell = CELLS["transformer"]()
    named, made = DEQ(cell, solver="relay"), DEQ(cell, solver=ik.Relay())
    assert torch.equal(named(x), made(x))
    direct = PerPosition(ik.Picard(), (8,), 6, 6)
    torch.testing.assert_close(DEQ(cell, solver=direct)(x), named(x), rtol=1e-9, atol=1e-10)


class Scaled(Swing):
    """z_t = t (0.5 tanh(z_t / t) + 0.2 z_{t-1} / t) + x_t, the same in units of any size t."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit

    def update(self, z: Tensor, x: Tensor) -> Tensor:
        past = torch.nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return 0.5 * self.unit * torch.tanh(z / self.unit) + 0.2 * past + x


def test_positions_are_solved_alike_in_all_units() -> None:
    torch.manual_seed(0)
    x = 0.3 * torch.randn(2, 7, 3, dtype=F64)
    x[:, 4:] *= 1e-3  # positions have sizes of their own
    expected = DEQ(Scaled(1.0), rtol=1e-12, atol=0.0)(x)
    for unit in (1e-12, 1e-6, 1.0, 1e9):
        found = DEQ(Scaled(unit))(unit * x) / unit
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9, msg=lambda m, u=unit: f"units of {u}: {m}")


def test_positions_are_solved_where_the_layer_is_whatever_the_default_device() -> None:
    x = torch.linspace(-1, 1, 42, dtype=F64).reshape(2, 7, 3)
    expected = DEQ(Scaled(1.0), rtol=1e-9, atol=1e-12)(x)
    with torch.device("meta"):
        found = DEQ(Scaled(1.0), rtol=1e-9, atol=1e-12)(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", "newton_krylov", "relay"])
def test_what_was_missed_is_said(solver: str) -> None:
    torch.manual_seed(0)
    layer = DEQ(
        cells.Transformer(4, 8, 2, scale=6.0, dtype=F64), rtol=1e-4, atol=0.0, max_steps=4, solver=solver
    ).eval()
    with pytest.raises(ik.ConvergenceError) as failed:
        layer(torch.randn(2, 6, 4, dtype=F64))
    said = [float(part.split()[0]) for part in str(failed.value).split("> tolerance ")[1:]]
    assert len(said) == 2 and all(1e-4 < tolerance < 1e-2 for tolerance in said)  # 1e-4 times states of 7 to 30


def test_in_turn_one_position_that_fails_is_not_made_good_by_the_next() -> None:
    slopes = torch.tensor([[0.5, 0.3], [1.5, 0.3], [0.5, 0.3]], dtype=F64)  # by sample and position: one runs away

    def f(z: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(z[:, :1]), torch.tanh(z[:, :1])], 1)
        return slopes.unsqueeze(2) * z + 0.1 * before + 1

    solver = InTurn(ik.Picard(), sizes=(1,), positions=2)
    how = {"batch_dims": 1, "in_dims": 0, "rtol": 1e-10, "max_steps": 60, "on_failure": "ignore", "solver": solver}
    solution = ik.fixed_point(f, torch.zeros(3, 2, 1, dtype=F64), (slopes,), **how)
    assert solution.converged.tolist() == [True, False, True]
    exact = torch.tensor([2.0, (1 + 0.1 * math.tanh(2.0)) / 0.7], dtype=F64)
    torch.testing.assert_close(solution.value[[0, 2], :, 0], exact.expand(2, 2), rtol=1e-8, atol=0.0)


def test_what_is_configured_of_newtons_method_is_kept_by_prefixes() -> None:
    """A smaller forcing term and fewer vectors hold; what prefixes know nothing of has every position solved in turn."""
    state = torch.zeros(2, 6, 3)
    tight = per_position(ik.NewtonKrylov(forcing=1e-3, restart=4), state).method
    assert (tight.forcing, tight.vectors) == (1e-3, 4)
    default = per_position("newton_krylov", state).method
    assert per_position(ik.NewtonKrylov(forcing=0.5, inner_steps=50), state).method == default
    for other in (ik.NewtonKrylov(halvings=2), ik.NewtonKrylov(patience=1), ik.NewtonKrylov(preconditioner="jacobi")):
        with pytest.warns(CausalityWarning):
            assert isinstance(per_position(other, state), InTurn)
    x = torch.randn(2, 8, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    steps = []
    for vectors in (1, 12):
        layer = DEQ(CELLS["transformer"](), rtol=1e-8, solver=ik.NewtonKrylov(restart=vectors)).eval()
        layer(x)
        steps.append(int(layer.solution.steps.max()))
    assert steps[0] > steps[1]


class _Pair(Cell):
    """Two leaves by name, which are no composition: each position of one reads the other's before it."""

    causal = True

    def inject(self, x: Tensor) -> tuple[Tensor]:
        return (x,)

    def update(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        before = torch.cat([torch.zeros_like(z["a"][:, :1]), z["a"][:, :-1]], 1)
        return {"a": torch.tanh(0.5 * z["b"] + x), "b": 0.5 * before}

    def state_shape(self, x: Tensor) -> Any:
        return {"a": tuple(x.shape[1:]), "b": tuple(x.shape[1:])}


def test_blocks_of_a_state_by_names_that_is_no_composition_is_one_block() -> None:
    x = torch.randn(2, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = DEQ(_Pair(), rtol=1e-10, atol=0.0, solver=ik.Blocks("picard"))(x)
    a = torch.zeros(2, 4, dtype=F64)
    for t in range(6):
        a = torch.tanh(0.25 * a + x[:, t])
        torch.testing.assert_close(found["a"][:, t], a, rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="not a composition"):
        DEQ(_Pair(), solver=ik.Blocks({"a": "picard", "b": "picard"}))(x)


# ------------------------------------------------------------------------------------------------ said to be causal, and not
def _fourier(z: Tensor) -> Tensor:
    """A causal convolution by Fourier transforms: what comes later changes the rounding of what comes before."""
    kernel = torch.fft.rfft(0.7 ** torch.arange(z.shape[1]), 2 * z.shape[1])
    return torch.fft.irfft(torch.fft.rfft(z, 2 * z.shape[1], 1) * kernel.unsqueeze(1), 2 * z.shape[1], 1)[
        :, : z.shape[1]
    ]


def _attended(z: Tensor, masked: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(z, z, z, is_causal=masked)


MAPS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "attention": (lambda z: _attended(z, False), False),
    "masked attention": (lambda z: _attended(z, True), True),
    "a mean": (lambda z: z.mean(1, keepdim=True).expand_as(z), False),
    "one position ahead": (lambda z: z.roll(-1, 1), False),
    "the last two": (lambda z: torch.cat([z[:, :-2], z[:, -2:].flip(1)], 1), False),
    "an even function": (lambda z: torch.cat([z[:, :1], z[:, 2:].square(), z[:, 1:2]], 1), False),
    "a gate that zero shuts": (lambda z: z * z.flip(1), False),
    "a sum": (lambda z: z.cumsum(1) / 7, True),
    "Fourier": (_fourier, True),
    "dropout": (lambda z: torch.nn.functional.dropout(z, 0.5), True),
}


@pytest.mark.parametrize("batch_dims", [1, 0])
@pytest.mark.parametrize("name", MAPS)
def test_a_cell_that_is_not_causal_is_refused_where_it_is_said_to_be(name: str, batch_dims: int) -> None:
    f, causal = MAPS[name]
    calls: list[int] = []

    def cell(z: Any, x: Tensor) -> Any:
        calls.append(len(x))
        return {"a": 0.2 * f(z["a"]) + x, "b": 0.5 * z["a"]}

    torch.manual_seed(0)
    layer = DEQ(cell, {"a": (7, 4), "b": (7, 4)}, causal=True, batch_dims=batch_dims)
    x = 0.2 * torch.randn(8, 7, 4)
    if not causal:
        with pytest.raises(
            ValueError, match=r"said to be causal, and is not: position \d of its value .* from position \d"
        ):
            layer(x)
        assert len(calls) <= (2 if batch_dims else 5)
        layer.causal = False
    z = layer(x)
    torch.testing.assert_close(z["b"], 0.5 * z["a"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ahead", [0.0, 1e-6])
def test_a_part_in_single_precision_is_no_future_that_leaks(ahead: float) -> None:
    def cell(z: Tensor, x: Tensor) -> Tensor:
        return 0.2 * _fourier(z.float()).double() + ahead * z.mean(1, keepdim=True) + x

    layer = DEQ(cell, (7, 4), causal=True, rtol=1e-5)
    x = torch.linspace(0, 1, 8 * 7 * 4, dtype=F64).view(8, 7, 4)
    with pytest.raises(ValueError, match="said to be causal") if ahead else contextlib.nullcontext():
        layer(x)


def test_a_cell_is_asked_once_whether_it_is_causal() -> None:
    calls: list[int] = []
    layer = DEQ(lambda z, x: calls.append(1) or 0.3 * z.cumsum(1) / 5 + x, (5, 2), causal=True, init="zeros").eval()
    counts = []
    for length in (1, 5, 5):  # nothing comes later than the only position
        layer.state = (length, 2)
        calls.clear()
        layer(torch.ones(4, length, 2))
        counts.append(len(calls) - layer.solution.evaluations)  # type: ignore[union-attr]
    assert counts[1:] == [2, 0]


def test_whether_samples_read_each_other_is_no_matter_of_causality() -> None:
    layer = DEQ(lambda z, x: 0.3 * z.mean(0, keepdim=True).cumsum(1) + x, (5, 2), causal=True, batch_dims=0)
    x = torch.ones(3, 5, 2, dtype=F64)
    torch.testing.assert_close(layer(x), layer.cell(layer(x), x), rtol=1e-4, atol=1e-5)
