"""Tools around the DEQ layer: Jacobian figures, bounds, initialisation, correction, monitoring, causality, merging."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import (
    DEQ,
    CausalityWarning,
    Cell,
    Monitor,
    Shine,
    StabilityWarning,
    TensorBoard,
    bound_weights,
    cells,
    condition_number,
    fixed_point_correction,
    free_weights,
    future_leak,
    jacobian_penalty,
    merge,
    per_position,
    scale_to_radius,
    spectral_radius,
    tie_weights,
    weight_norm,
)

F64 = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def linear_cell(J: Tensor) -> Callable[..., Tensor]:
    """z -> J_b z + x: its Jacobian is ``J_b`` for sample b."""
    return lambda z, x: torch.einsum("bij,bj->bi", J, z) + x


def loss(z: Tensor) -> Tensor:
    return (z.sin() + z**2).sum()


# ------------------------------------------------------------------------------------------------------ Jacobian figures
def jacobians(cell: Callable[..., Tensor], z: Tensor, x: Tensor) -> Tensor:
    """Dense, sample by sample, by torch.func."""
    one = lambda z, x: cell(z.unsqueeze(0), x.unsqueeze(0)).squeeze(0)  # noqa: E731
    return torch.func.vmap(torch.func.jacrev(one))(z, x)


def test_the_penalty_of_a_cell_with_fused_attention_has_a_gradient() -> None:
    def penalised(attend: Callable[..., Tensor]) -> Tensor:
        w = torch.full((), 0.7, dtype=F64, requires_grad=True)
        cell = lambda z, x: w * attend(z, z + x, z - x)  # noqa: E731
        z, x = (torch.sin(torch.arange(40, dtype=F64) + k).view(2, 1, 5, 4) for k in range(2))
        return torch.autograd.grad(jacobian_penalty(cell, z, (x,), exact=True), w)[0]

    plain = penalised(lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v)
    torch.testing.assert_close(penalised(torch.nn.functional.scaled_dot_product_attention), plain)


def test_exact_penalty_and_its_gradient() -> None:
    cell = cells.MLP(4, 6, dtype=F64)
    z, x = torch.randn(3, 6, dtype=F64), torch.randn(3, 4, dtype=F64)
    truth = jacobians(cell, z, x).square().sum((1, 2)).mean() / 6
    got = jacobian_penalty(cell, z, (x,), exact=True)
    torch.testing.assert_close(got, truth)
    W = cell.recurrent.weight
    torch.testing.assert_close(torch.autograd.grad(got, W), torch.autograd.grad(truth, W))


@pytest.mark.slow
def test_hutchinson_is_unbiased_and_as_spread_as_theory_says() -> None:
    J = torch.randn(1, 8, 8, dtype=F64)
    z = x = torch.zeros(1, 8, dtype=F64)
    truth = float(J.square().sum() / 8)
    singles = torch.stack([jacobian_penalty(linear_cell(J), z, (x,)) for _ in range(3000)])
    M = (J @ J.mT)[0]
    spread = float((2 * M.square().sum()).sqrt() / 8)  # variance of v^T M v for a normal v
    assert abs(float(singles.mean()) - truth) < 4 * spread / 3000**0.5
    assert abs(float(singles.std()) / spread - 1) < 0.15
    many = torch.stack([jacobian_penalty(linear_cell(J), z, (x,), probes=50) for _ in range(60)])
    assert float(many.std()) < 0.3 * float(singles.std())


def test_penalty_of_a_tuple_state() -> None:
    A = torch.randn(5, 5, dtype=F64)

    def cell(z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        whole = torch.cat(z, 1) @ A
        return whole[:, :2], whole[:, 2:]

    z = (torch.randn(3, 2, dtype=F64), torch.randn(3, 3, dtype=F64))
    torch.testing.assert_close(jacobian_penalty(cell, z, exact=True), A.square().sum() / 5)


def _rotation(angle: float) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=F64)


SPECTRA: dict[str, tuple[Tensor, float]] = {
    "symmetric": (torch.diag(torch.tensor([0.9, -0.5, 0.1], dtype=F64)), 0.9),
    "rotation by a right angle": (0.9 * _rotation(math.pi / 2), 0.9),  # where the Rayleigh quotient says 0
    "rotation by one radian": (0.9 * _rotation(1.0), 0.9),
    "negative": (torch.diag(torch.tensor([-1.3, 0.5], dtype=F64)), 1.3),
    "zero": (torch.zeros(4, 4, dtype=F64), 0.0),
    "nilpotent": (torch.diag(torch.ones(3, dtype=F64), 1), 0.0),
    "defective": (torch.tensor([[0.8, 5.0], [0.0, 0.8]], dtype=F64), 0.8),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_spectral_radius_of_known_matrices(name: str) -> None:
    J, radius = SPECTRA[name]
    n = len(J)
    z = x = torch.zeros(2, n, dtype=F64)
    stack = torch.stack([J, 0.5 * J])
    exact = torch.tensor([radius, 0.5 * radius], dtype=F64)
    tolerance = 1e-3 if name in ("nilpotent", "defective") else 1e-9  # eigenvalues of a defective matrix: eps^(1/n)
    torch.testing.assert_close(spectral_radius(linear_cell(stack), z, (x,)), exact, rtol=tolerance, atol=tolerance)
    power = spectral_radius(linear_cell(stack), z, (x,), method="power", steps=400)
    torch.testing.assert_close(power, exact, rtol=0.02, atol=1e-9)


def test_spectral_radius_and_condition_of_a_cell_against_the_dense_jacobian() -> None:
    cell = cells.MLP(4, 40, 30, scale=1.2, dtype=F64)
    z, x = torch.randn(3, 40, dtype=F64), torch.randn(3, 4, dtype=F64)
    J = jacobians(cell, z, x)
    exact = torch.linalg.eigvals(J).abs().amax(1)
    torch.testing.assert_close(spectral_radius(cell, z, (x,), steps=40), exact, rtol=1e-7, atol=1e-7)
    assert bool((spectral_radius(cell, z, (x,), steps=25) / exact - 1).abs().max() < 0.05)
    condition = torch.linalg.cond(torch.eye(40, dtype=F64) - J)
    torch.testing.assert_close(condition_number(cell, z, (x,), steps=40), condition, rtol=1e-7, atol=1e-7)
    below = condition_number(cell, z, (x,), steps=15)
    assert bool((below <= condition * (1 + 1e-9)).all()) and bool((below > 0.3 * condition).all())


def test_condition_is_a_lower_bound_where_the_krylov_space_is_exhausted() -> None:
    J = torch.diag(torch.tensor([-1.0, -1.0, -1.0, -2.0], dtype=F64)).unsqueeze(0)  # I - J: 2, 2, 2, 3
    z = x = torch.zeros(1, 4, dtype=F64)
    for steps in (2, 3, 4, 30):
        assert float(condition_number(linear_cell(J), z, (x,), steps=steps)) <= 1.5 + 1e-9
    assert float(condition_number(linear_cell(J), z, (x,))) == pytest.approx(1.5)


def test_figures_leave_batch_norm_alone() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.W = nn.BatchNorm1d(6, dtype=F64), nn.Linear(6, 6, dtype=F64)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.norm(self.W(z)) + x)

    cell = Normalised()
    z = x = torch.randn(3, 6, dtype=F64)
    got = jacobian_penalty(cell, z, (x,), exact=True)
    assert cell.training and cell.norm.training and int(cell.norm.num_batches_tracked) == 0
    torch.testing.assert_close(got, jacobians(cell.eval(), z, x).square().sum((1, 2)).mean() / 6)


# ---------------------------------------------------------------------------------------------- bounds and initialisation
NORM_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "spectral": lambda W: torch.linalg.matrix_norm(W, 2),
    "frobenius": torch.linalg.vector_norm,
    "row_sum": lambda W: torch.linalg.matrix_norm(W, math.inf),
    "rows": lambda W: W.norm(dim=1).max(),
}


@pytest.mark.parametrize("norm", NORM_OF)
def test_a_bound_holds_at_every_step_of_training(norm: str) -> None:
    cell = cells.MLP(4, 6, scale=0.5, dtype=F64)
    before = cell.recurrent.weight.detach().clone()
    bound = 0.9 if norm != "row_sum" else 2.0
    bound_weights(cell, bound, norm, weights=cell.recurrent_weights())
    if norm != "frobenius":
        torch.testing.assert_close(cell.recurrent.weight, before, msg="within the bound nothing changes")
    layer = DEQ(cell, rtol=1e-8, on_failure="ignore")
    optimiser = torch.optim.SGD(cell.parameters(), lr=1.0)
    x = torch.randn(16, 4, dtype=F64)
    reached = []
    for _ in range(12):
        (-layer(x).square().sum()).backward()  # pushes the weights up
        optimiser.step()
        optimiser.zero_grad()
        reached.append(NORM_OF[norm](cell.recurrent.weight.detach()).item())
    assert max(reached) <= bound * (1 + 1e-12)
    assert max(reached) == pytest.approx(bound), "the bound was reached, so it was tested"
    free_weights(cell)
    assert NORM_OF[norm](cell.recurrent.weight.detach()).item() == pytest.approx(reached[-1])
    assert isinstance(cell.recurrent.weight, nn.Parameter)


@pytest.mark.parametrize("stride,padding,dilation", [(1, 1, 1), (2, 0, 1), (1, 2, 2)])
def test_the_bound_of_a_convolution_bounds_its_operator(stride: int, padding: int, dilation: int) -> None:
    conv = nn.Conv2d(3, 4, 3, stride=stride, padding=padding, dilation=dilation, bias=False, dtype=F64)
    bound_weights(conv, 0.7)
    J = torch.func.jacrev(conv)(torch.zeros(1, 3, 8, 8, dtype=F64))
    operator = J.flatten(4).flatten(0, 3).detach()
    assert 0.2 < float(torch.linalg.matrix_norm(operator, 2)) <= 0.7


@pytest.mark.parametrize("form", ["spectral", "frobenius", "row_sum", "rows", "weight_norm", "weight_norm within 1"])
@pytest.mark.parametrize("rows", [1, 3], ids=["a row of zeros", "all zeros"])
def test_weights_that_begin_at_zero_can_be_trained(form: str, rows: int) -> None:
    """A norm has no derivative there; the weight has one, if it is within the bound."""
    linear = nn.Linear(2, 3, bias=False, dtype=F64)
    with torch.no_grad():
        linear.weight.clamp_(-0.1, 0.1)[:rows] = 0
    weight = linear.weight.detach().clone()
    if form.startswith("weight_norm"):
        weight_norm(linear, 1.0 if "within" in form else None)
    else:
        bound_weights(linear, 1.0, form)
    torch.testing.assert_close(linear.weight, weight)
    linear.weight.sum().backward()
    gradients = [p.grad for p in linear.parameters() if p.grad is not None]
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert bool((gradients[0][:rows] != 0).all())


def test_weight_norm_keeps_values_and_clips() -> None:
    cell = cells.MLP(4, 6, dtype=F64)
    before = cell.recurrent.weight.detach().clone()
    weight_norm(cell, 2.0)
    torch.testing.assert_close(cell.recurrent.weight, before)
    with torch.no_grad():
        cell.recurrent.parametrizations.weight.original0.mul_(100)
    torch.testing.assert_close(cell.recurrent.weight.norm(dim=1), torch.full((6,), 2.0, dtype=F64))


@pytest.mark.parametrize("radius", [0.5, 0.9, pytest.param(0.97, marks=pytest.mark.slow)])
def test_initialisation_to_a_stated_radius(radius: float) -> None:
    layer = DEQ(cells.MLP(8, 32, 24, scale=0.3, dtype=F64))
    with torch.no_grad():
        layer.cell.injection.weight.mul_(0.1)
    x = torch.randn(16, 8, dtype=F64)
    reached = scale_to_radius(layer, (x,), radius)
    layer(x)
    J = jacobians(layer.cell, layer.solution.value, x)
    measured = torch.linalg.eigvals(J.detach()).abs().amax(1).mean().item()
    assert abs(measured - radius) < 0.02 * radius and abs(reached - measured) < 1e-3
    assert layer.training


@pytest.mark.slow
def test_training_that_diverges_without_safeguards_trains_with_them_and_the_monitor_says_so() -> None:
    """Fit z* to a large target by a linear readout: nothing keeps the weights small but the safeguards."""

    def run(safeguard: str) -> tuple[list[float], list[str], list[float]]:
        torch.manual_seed(1)
        cell = cells.MLP(4, 16, scale=0.95, activation=nn.functional.relu, dtype=F64)
        if safeguard == "bound":
            bound_weights(cell, 0.95, weights=cell.recurrent_weights())
        layer = DEQ(cell, init="zeros", solver="picard", rtol=1e-6, max_steps=150, on_failure="ignore")
        x = torch.randn(32, 4, dtype=F64)
        y = 10 * x.abs().sum(1, keepdim=True)
        readout = nn.Linear(16, 1, dtype=F64)
        optimiser = torch.optim.Adam([*layer.parameters(), *readout.parameters()], lr=0.03)
        losses, alarms = [], []
        with Monitor(layer, krylov=16) as monitor, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(60):
                value = (readout(layer(x)) - y).square().mean()
                penalty = jacobian_penalty(cell, layer.solution.value, (x,)) if safeguard == "penalty" else 0.0 * value
                optimiser.zero_grad()
                (value + 1e4 * penalty).backward()
                optimiser.step()
                losses.append(value.item())
            alarms = [str(w.message) for w in caught if issubclass(w.category, StabilityWarning)]
            converged = [figures["converged"] for _, figures in monitor.history]
        return losses, alarms, converged

    losses, alarms, converged = run("none")
    assert min(converged) == 0.0 and alarms, "it diverges, and the monitor says so"
    first = next(i for i, share in enumerate(converged) if share < 0.5)
    assert losses[first] < 10 * losses[0], "before the loss shows it"
    for safeguard in ("bound", "penalty"):
        losses, _, converged = run(safeguard)
        assert min(converged[-20:]) == 1.0, safeguard
        assert losses[-1] < 0.2 * losses[0], safeguard


# ----------------------------------------------------------------------------------------------------------- correction
def test_states_along_the_way_have_the_one_step_gradient() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.8, dtype=F64), solver="picard", **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    states = layer.states(x, at=(1, 3))
    assert len(states) == 3
    z = torch.zeros(3, 6, dtype=F64)
    for _ in range(3):
        z = layer.cell(z, x).detach()
    want = layer.cell(z, x)
    torch.testing.assert_close(states[1], want)
    W = layer.cell.recurrent.weight
    torch.testing.assert_close(torch.autograd.grad(loss(states[1]), W), torch.autograd.grad(loss(want), W))
    torch.testing.assert_close(states[2], layer(x))
    got = fixed_point_correction(loss, states, gamma=0.5)
    torch.testing.assert_close(got, 0.25 * loss(states[0]) + 0.5 * loss(states[1]) + loss(states[2]))
    seen: list[int] = []
    with layer.using(callback=lambda step, z, norm: seen.append(step)):
        assert len(layer.states(x, at=(2, 100_000))) == 2, "steps that are not taken are left out"
    assert seen, "a callback of the layer's own is called as well"


@pytest.mark.slow
def test_correction_makes_early_iterates_better() -> None:
    def early(gamma: float) -> float:
        torch.manual_seed(0)
        layer = DEQ(bound_weights(cells.MLP(2, 12, scale=0.9, dtype=F64), 0.95), solver="picard", rtol=1e-5)
        readout = nn.Linear(12, 1, dtype=F64)
        x = torch.randn(64, 2, dtype=F64)
        y = (x[:, :1] * x[:, 1:]).tanh()
        optimiser = torch.optim.Adam([*layer.parameters(), *readout.parameters()], lr=0.02)
        criterion = lambda z: (readout(z) - y).square().mean()  # noqa: E731
        for _ in range(80):
            optimiser.zero_grad()
            fixed_point_correction(criterion, layer.states(x, at=(2,)), gamma).backward()
            optimiser.step()
        return criterion(layer.states(x, at=(2,))[0]).item()

    assert early(1.0) < 0.8 * early(0.0)


# ----------------------------------------------------------------------------------------------- the estimate reused
def _angles(scale: float, rtol: float) -> dict[str, float]:
    """Relative error of the gradient with respect to the weights, by rule."""
    torch.manual_seed(2)
    cell = cells.MLP(4, 24, scale=scale, dtype=F64)
    x = torch.randn(6, 4, dtype=F64)
    grads = {}
    for name, rule in {"exact": ik.Implicit(rtol=1e-12), "one_step": "one_step", "shine": Shine()}.items():
        layer = DEQ(cell, solver=ik.Broyden(keep_inverse=True), rule=rule, rtol=rtol, atol=0.0)
        grads[name] = torch.autograd.grad(loss(layer(x)), cell.recurrent.weight)[0]
        if name == "shine":
            assert int(layer.solution.backward.steps.max()) == 3, "products, not a solve"
    exact = grads.pop("exact")
    return {name: ((g - exact).norm() / exact.norm()).item() for name, g in grads.items()}


def test_shine_is_better_than_one_step_and_not_exact() -> None:
    errors = _angles(0.9, 1e-8)
    assert 1e-6 < errors["shine"] < 0.7 * errors["one_step"], errors


def test_shine_needs_an_estimate_and_is_never_worse_than_one_step_by_its_residual() -> None:
    cell = cells.MLP(4, 6, dtype=F64)
    x = torch.randn(3, 4, dtype=F64)
    with pytest.raises(ik.CapabilityError, match="keep_inverse=True"):
        DEQ(cell, rule=Shine())(x)
    assert "shine" in ik.rules()
    layer = DEQ(cell, solver=ik.Broyden(keep_inverse=True), rule="shine", atol=1e9)  # no step: nothing learnt
    got = torch.autograd.grad(loss(layer(x)), cell.recurrent.weight, materialize_grads=True)
    with layer.using(rule="one_step"):
        want = torch.autograd.grad(loss(layer(x)), cell.recurrent.weight, materialize_grads=True)
    torch.testing.assert_close(got, want)


# ------------------------------------------------------------------------------------------------------------ monitoring
class _Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.rows.append((tag, value, step))


def test_monitor_reports_what_happened() -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64), **TIGHT)
    x = torch.randn(20, 4, dtype=F64)
    writer, seen = _Writer(), []

    def sink(call: int, figures: Mapping[str, float]) -> None:
        seen.append((call, dict(figures)))

    with Monitor(layer, TensorBoard(writer), sink, every=2, samples=20, krylov=6) as monitor:
        for _ in range(5):
            loss(layer(x)).backward()
            figures = layer.solution
        layer.eval()
        layer(x)
    layer.train()
    layer(x)
    assert [call for call, _ in seen] == [1, 3, 5] == [call for call, _ in monitor.history]
    last = seen[-1][1]
    assert last["steps_max"] == float(figures.steps.max()) and last["evaluations"] == figures.evaluations
    assert last["converged"] == 1.0 and last["residual"] < 1e-11
    assert last["backward_converged"] == 1.0 and "backward_steps" not in seen[0][1]
    J = jacobians(layer.cell, figures.value, x).detach()
    assert last["spectral_radius"] == pytest.approx(torch.linalg.eigvals(J).abs().max().item(), rel=1e-6)
    assert last["condition"] == pytest.approx(torch.linalg.cond(torch.eye(6, dtype=F64) - J).max().item(), rel=1e-6)
    assert ("deq/steps_max", last["steps_max"], 5) in writer.rows


def test_monitor_sees_calls_for_states_along_the_way() -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64), **TIGHT)
    x = torch.randn(3, 4, dtype=F64)
    with Monitor(layer, krylov=6) as monitor:
        states = layer.states(x, at=(1, 3))
        again = layer(x, at=(1, 3))
    assert [call for call, _ in monitor.history] == [1, 2]
    torch.testing.assert_close(states, again)


def test_monitor_draws_nothing() -> None:
    cell = cells.MLP(4, 6, activation=lambda z: nn.functional.dropout(torch.tanh(z), 0.2), dtype=F64)
    x = torch.randn(20, 4, dtype=F64)
    values = []
    for watched in (False, True):
        torch.manual_seed(0)
        layer = DEQ(copy.deepcopy(cell), **TIGHT)
        monitor = Monitor(layer, samples=3) if watched else None
        values.append([layer(x).detach() for _ in range(3)])
        assert monitor is None or len(monitor.history) == 3
    torch.testing.assert_close(values[0], values[1])


def test_monitor_warns_before_the_equilibrium_is_lost() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=1.1, activation=nn.Identity(), dtype=F64), solver="newton", **TIGHT)
    with Monitor(layer, krylov=6), pytest.warns(StabilityWarning, match=r"spectral radius of the Jacobian is 1\.1"):
        layer(torch.randn(3, 4, dtype=F64))
    with (
        Monitor(layer, krylov=6, radius_limit=2.0, condition_limit=1.0),
        pytest.warns(StabilityWarning, match="condition number of I - J"),
    ):
        layer(torch.randn(3, 4, dtype=F64))


def test_tensorboard_writes_files(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    layer = DEQ(cells.MLP(4, 6, dtype=F64))
    board = TensorBoard(str(tmp_path))
    with Monitor(layer, board):
        layer(torch.randn(3, 4, dtype=F64))
    board.writer.close()
    assert list(tmp_path.glob("events.out.tfevents*"))


# ------------------------------------------------------------------------------------------------------------ causality
class CausalSum(Cell):
    """tanh(W z_t + 0.4 mean_{s<t} V z_s + U x_t)."""

    causal = True

    def __init__(self, features: int = 4, two: bool = False) -> None:
        super().__init__()
        self.W, self.V, self.U = (nn.Linear(features, features, dtype=F64) for _ in range(3))
        with torch.no_grad():
            for layer, norm in ((self.W, 0.5), (self.V, 1.0)):
                layer.weight.mul_(norm / torch.linalg.matrix_norm(layer.weight, 2))
        self.two = two

    def inject(self, x: Tensor) -> tuple[Tensor]:
        return (self.U(x),)

    def update(self, z: Any, injected: Tensor) -> Any:
        y = z[1] if self.two else z
        past = torch.nn.functional.pad(self.V(y).cumsum(1), (0, 0, 1, 0))[:, :-1]
        counts = torch.arange(1, y.shape[1] + 1, dtype=y.dtype).unsqueeze(1)
        new = torch.tanh(self.W(y) + 0.4 * past / counts + injected)
        return (0.3 * torch.sin(z[0]) + new[..., :2], new) if self.two else new

    def state_shape(self, x: Tensor) -> Any:
        return ((*x.shape[1:2], 2), x.shape[1:]) if self.two else x.shape[1:]


ROUGH: dict[str, Any] = {"max_steps": 6, "on_failure": "ignore", "rtol": 1e-14}


@pytest.mark.parametrize("two", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize(
    "solver", ["anderson", "broyden", "picard", "auto", ik.Anderson(memory=2, damping=0.8)], ids=str
)
def test_nothing_leaks_from_the_future_even_before_convergence(solver: Any, two: bool) -> None:
    x = torch.randn(3, 12, 4, dtype=F64)
    layer = DEQ(CausalSum(two=two), solver=solver, **ROUGH)
    assert future_leak(layer, x, 7) == 0.0
    assert future_leak(layer, x, 7, size=10.0) == 0.0


def test_shared_coefficients_leak_until_convergence() -> None:
    x = torch.randn(3, 12, 4, dtype=F64)
    shared = DEQ(CausalSum(), solver=ik.Anderson(period=1), causal=False, **ROUGH)
    rough = future_leak(shared, x, 7)
    assert rough > 1e-6
    with shared.using(max_steps=None, rtol=1e-12):
        assert future_leak(shared, x, 7) < 1e-10 < rough


@pytest.mark.parametrize("two", [False, True], ids=["tensor", "tuple"])
def test_per_position_solves_are_exact_and_differentiable(two: bool) -> None:
    x = torch.randn(3, 12, 16, dtype=F64, requires_grad=True)
    layer = DEQ(CausalSum(16, two=two), **TIGHT)
    with torch.no_grad():
        layer.cell.W.weight.mul_(1.9)
    out = layer(x)
    assert layer.solution.solver == "per_position"
    z = out[1] if two else out
    want = torch.zeros_like(x)
    single = CausalSum(16)
    single.load_state_dict(layer.cell.state_dict())
    for _ in range(200):
        want = single(want, x)
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-10)
    leaves = [x, *layer.cell.parameters()]
    got = torch.autograd.grad(loss(z), leaves)
    exact = torch.autograd.grad(loss(want), [x, *single.parameters()])
    torch.testing.assert_close(got, exact, rtol=1e-7, atol=1e-9)
    evaluations = {}
    for solver in ("picard", "anderson"):
        with layer.using(solver=solver):
            torch.testing.assert_close(layer(x)[1] if two else layer(x), want, rtol=1e-9, atol=1e-10)
        evaluations[solver] = layer.solution.evaluations
    assert evaluations["anderson"] < evaluations["picard"], "it accelerates"


def test_rows_are_dropped_from_a_per_position_solve() -> None:
    x = torch.randn(8, 5, 4, dtype=F64) * torch.logspace(-4, 1.5, 8, dtype=F64).view(-1, 1, 1)
    layer = DEQ(CausalSum(), **TIGHT)
    z = layer(x)
    torch.testing.assert_close(z, layer.cell(z, x), rtol=1e-10, atol=1e-11)
    assert layer.solution.sample_evaluations < 8 * layer.solution.evaluations


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore::implicitkit_deq.CausalityWarning")
@pytest.mark.parametrize(
    "solver", ["anderson", "broyden", "picard", "newton_krylov", ik.Newton(line_search=False)], ids=str
)
def test_no_iterate_leaks(solver: Any) -> None:
    """Whatever the step it ends with: a residual that rises must not send the answer back to an earlier iterate."""
    torch.manual_seed(1)
    x = torch.randn(3, 12, 4, dtype=F64)
    layer = DEQ(CausalSum(), solver=solver, **ROUGH)
    with torch.no_grad():
        layer.cell.W.weight.mul_(4)
    rose = False
    for steps in (1, 2, 3, 5, 9):
        with layer.using(max_steps=steps, trace=True):
            assert future_leak(layer, x, 7, size=3.0) < 1e-13, steps
            norms = torch.stack(list(layer.solution.trace))
            rose = rose or bool((norms[1:] > norms[:-1]).any())
    assert rose, "the test is about residuals that rise"


def test_a_solver_that_mixes_positions_says_what_it_costs() -> None:
    x = torch.randn(2, 5, 4, dtype=F64)
    for solver in ("lbfgs", "newton", ik.Newton(line_search=False)):
        with pytest.warns(CausalityWarning, match="one position after the other, which takes some 5 times"):
            layer = DEQ(CausalSum(), solver=solver, on_failure="ignore", max_steps=3)
            assert future_leak(layer, x, 3) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert future_leak(DEQ(CausalSum(), solver="newton_krylov", **{**ROUGH, "max_steps": 2}), x, 3) == 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("two", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("solver", ["anderson", "broyden", ik.Blocks(), ik.Blocks("broyden")], ids=str)
def test_a_batch_as_one_system_and_a_cell_as_one_block_do_not_leak(solver: Any, two: bool) -> None:
    x = torch.randn(3, 12, 4, dtype=F64)
    for batch_dims in (0, 1):
        layer = DEQ(CausalSum(two=two), solver=solver, batch_dims=batch_dims, **ROUGH)
        assert future_leak(layer, x, 7) == 0.0
        with layer.using(max_steps=None, rtol=1e-12):
            torch.testing.assert_close(layer(x), DEQ(layer.cell, **TIGHT)(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
def test_merged_layers_do_not_leak_by_blocks(mode: str) -> None:
    """Blocks that step when those that they read are solved well enough at all positions would: they go in turn."""
    torch.manual_seed(0)
    x = torch.randn(3, 12, 4, dtype=F64)
    merged = DEQ(CausalSum(), **ROUGH) >> DEQ(CausalSum(), **ROUGH)
    with torch.no_grad():
        for stage in merged.cell.stages.values():
            stage.W.weight.mul_(2)
    for steps in range(1, 12):
        with merged.using(max_steps=steps, solver=ik.Blocks(mode=mode)):
            assert future_leak(merged, x, 7, size=3.0) == 0.0
    merged.causal = False
    with merged.using(max_steps=5, solver=ik.Blocks(mode=mode)):
        assert future_leak(merged, x, 7, size=3.0) > 1e-6


def test_states_without_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="first dimension after the batch"):
        per_position("anderson", (torch.zeros(2, 5, 4), torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="position must be in"):
        future_leak(DEQ(CausalSum()), torch.randn(2, 5, 4, dtype=F64), 5)


# ---------------------------------------------------------------------------------------------------- tying and merging
def network() -> nn.Sequential:
    """The five layers of theorem 3's check: five widths, five activations."""
    return nn.Sequential(
        nn.Linear(6, 9, dtype=F64), nn.Tanh(),
        nn.Linear(9, 5, dtype=F64), nn.ReLU(),
        nn.Sequential(nn.Linear(5, 12, dtype=F64), nn.Sigmoid()),
        nn.Linear(12, 7, bias=False, dtype=F64), nn.SiLU(), nn.LayerNorm(7, dtype=F64),
        nn.Linear(7, 4, dtype=F64),
    )  # fmt: skip


@pytest.mark.parametrize("solver", ["blocks", "picard", "anderson"])
def test_a_tied_network_computes_the_same(solver: str) -> None:
    net = network()
    layer = tie_weights(net) if solver == "blocks" else tie_weights(net, solver=solver, **TIGHT)
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    y, want = layer(x), net(x)
    tolerance = 1e-10 if solver == "anderson" else 1e-14
    torch.testing.assert_close(y, want, rtol=0, atol=tolerance)
    leaves = [x, *net.parameters()]
    got, exact = torch.autograd.grad(loss(y), leaves), torch.autograd.grad(loss(want), leaves)
    torch.testing.assert_close(got, exact, rtol=100 * tolerance, atol=100 * tolerance)
    assert layer.cell.network is net, "shared, not copied"
    assert {id(p) for p in layer.parameters()} == {id(p) for p in net.parameters()}
    if solver == "picard":
        assert int(layer.solution.steps.max()) == layer.cell.tied.depth == 6, "one application a layer"
        assert float(layer.solution.residual_norm.max()) == 0.0
        z0 = {name: 100 * torch.randn_like(t) for name, t in layer.solution.value.items()}
        torch.testing.assert_close(layer(x, z0=z0), want, rtol=0, atol=1e-13)
        assert int(layer.solution.steps.max()) == 6, "from any start"
    if solver == "blocks":
        assert sum(layer.solution.blocks.evaluations.values()) <= 3 * 6


def test_a_tied_network_with_dropout_and_convolutions() -> None:
    net = nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1, dtype=F64), nn.Dropout(0.5), nn.Flatten(), nn.Linear(24, 5, dtype=F64), nn.ReLU()
    )
    layer = tie_weights(net)
    x = torch.randn(4, 2, 8, dtype=F64)
    torch.manual_seed(3)
    want = net(x)
    torch.manual_seed(3)
    first = layer(x)
    assert first.shape == want.shape and not torch.equal(first, layer(x)), "another draw"
    layer.eval()
    torch.testing.assert_close(layer(x), net(x), rtol=0, atol=1e-14)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), layer(x))
    assert twin.cell.network[0].weight is next(iter(twin.cell.tied.gamma.functions.values())).parts[0].weight


@pytest.mark.parametrize("solver", ["blocks", "picard"])
def test_a_tied_network_with_batch_norm_is_the_network_in_training_too(solver: str) -> None:
    net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 5), nn.BatchNorm1d(5)).double()
    same = copy.deepcopy(net)
    tied = tie_weights(net) if solver == "blocks" else tie_weights(net, solver=solver)
    for _ in range(2):
        x = torch.randn(4, 6, dtype=F64, requires_grad=True)
        z, want = tied(x), same(x)
        torch.testing.assert_close(z, want, rtol=1e-12, atol=1e-14)
        got = torch.autograd.grad(loss(z), [x, *net.parameters()])
        exact = torch.autograd.grad(loss(want), [x, *same.parameters()])
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(list(net.buffers()), list(same.buffers()))
    torch.testing.assert_close(tied.eval()(x), same.eval()(x), rtol=1e-12, atol=1e-14)


def test_the_matrices_of_theorem_3() -> None:
    net = nn.Sequential(nn.Linear(6, 9, dtype=F64), nn.Tanh(), nn.Linear(9, 5, dtype=F64), nn.Linear(5, 4, dtype=F64))
    W_z, W_x, b = (t.detach() for t in tie_weights(net).cell.tied.matrices()[:3])
    assert W_z.shape == (18, 18) and W_x.shape == (18, 6)
    assert float(torch.linalg.matrix_power(W_z, 3).abs().max()) == 0.0
    assert float(torch.linalg.matrix_power(W_z, 2).abs().max()) > 0.0
    x = torch.randn(2, 6, dtype=F64)
    z = torch.randn(2, 18, dtype=F64)
    for _ in range(3):
        z = z @ W_z.mT + x @ W_x.mT + b
        z = torch.cat([z[:, :9].tanh(), z[:, 9:]], 1)
    torch.testing.assert_close(z[:, -4:], net(x).detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "bad,message",
    [(lambda: nn.Linear(3, 3), "takes an nn.Sequential"), (lambda: nn.Sequential(), "at least one layer")],
)
def test_what_cannot_be_tied(bad: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tie_weights(bad())


def two_layers() -> tuple[DEQ, DEQ]:
    first = DEQ(cells.MLP(4, 6, scale=0.7, dtype=F64), rule=ik.Implicit(rtol=1e-12), **TIGHT)
    weights = cells.MLP(6, 3, scale=0.8, dtype=F64)
    return first, DEQ(lambda z, y: weights(z, y), (3,), **TIGHT)


def test_layers_are_nodes_of_a_composition() -> None:
    first, second = two_layers()
    joint = ik.compose({"first": (first, "x"), "second": (second, "first")}, output="second")
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    start = {"first": torch.zeros(5, 6, dtype=F64), "second": torch.zeros(5, 3, dtype=F64)}
    z = ik.solve(joint, start, (x,), batch_dims=1, rtol=1e-12).value["second"]
    want = second(first(x))
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-11)
    leaves = [x, *first.parameters()]
    torch.testing.assert_close(torch.autograd.grad(loss(z), leaves), torch.autograd.grad(loss(want), leaves))

    class Halved(cells.MLP):
        def output(self, z: Tensor) -> Tensor:
            return 0.5 * z

    with pytest.raises(TypeError, match=r"Halved returns output\(z\)"):
        ik.compose({"a": (DEQ(Halved(4, 6, scale=0.7)), "x")}, output="a")


def test_merged_layers_equal_one_after_the_other() -> None:
    first, second = two_layers()
    merged = first >> second
    assert isinstance(merged, DEQ)
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    z, want = merged(x), second(first(x))
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-11)
    leaves = [x, *first.parameters()]
    got, exact = (torch.autograd.grad(loss(v), leaves) for v in (z, want))
    torch.testing.assert_close(got, exact, rtol=1e-7, atol=1e-9)
    assert all(float(g.abs().max()) > 0 for g in exact)
    joint = merged.solution.value
    torch.testing.assert_close(joint["layer1"], first(x).detach(), rtol=1e-9, atol=1e-11)
    names = ("layer1", "layer2")

    def gamma(w: Tensor, x: Tensor) -> Tensor:
        out = merged.cell(dict(zip(names, w.split([6, 3], 1), strict=True)), x)
        return torch.cat([out[name] for name in names], 1)

    J = jacobians(gamma, torch.cat([joint[name] for name in names], 1), x.detach())
    assert J[:, :6, 6:].abs().max().item() == 0.0, "block lower triangular"
    radii = torch.maximum(
        spectral_radius(first.cell, joint["layer1"], (x,)),
        spectral_radius(second.cell, joint["layer2"], (joint["layer1"],)),
    )
    torch.testing.assert_close(spectral_radius(merged.cell, joint, (x,)), radii, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "solver", ["anderson", "newton", ik.Blocks(mode="concurrent")], ids=["anderson", "newton", "concurrent"]
)
def test_merged_layers_by_any_solver(solver: Any) -> None:
    first, second = two_layers()
    merged = first >> second
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    want = second(first(x))
    with merged.using(solver=solver, rule="auto"):
        z = merged(x)
    torch.testing.assert_close(z, want, rtol=1e-8, atol=1e-10)
    leaves = [x, *first.parameters()]
    got, exact = (torch.autograd.grad(loss(v), leaves) for v in (z, want))
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-8)


def test_merging_costs_what_the_layers_cost_and_no_block_hides_behind_a_larger_one() -> None:
    first = DEQ(cells.MLP(4, 6, scale=0.6, dtype=F64), rtol=1e-8, atol=0.0)
    small = cells.MLP(6, 3, scale=0.9, dtype=F64)
    second = DEQ(lambda z, y: 1e-6 * small(1e6 * z, y), (3,), rtol=1e-8, atol=0.0)
    x = torch.randn(5, 4, dtype=F64)
    second(first(x))
    separate = first.solution.evaluations + second.solution.evaluations
    merged = first >> second
    z = merged(x)
    residual = (second.cell(z, merged.solution.value["layer1"]) - z).norm(dim=1) / z.norm(dim=1)
    assert float(residual.detach().max()) < 1e-7
    spent = sum(merged.solution.blocks.evaluations.values())
    assert spent <= 1.2 * separate + 2


def test_merged_layers_draw_their_own_masks() -> None:
    def noisy() -> cells.MLP:
        return cells.MLP(6, 6, scale=0.4, activation=lambda z: nn.functional.dropout(torch.tanh(z), 0.5), dtype=F64)

    merged = DEQ(noisy(), **TIGHT) >> DEQ(noisy(), **TIGHT)
    x = 1 + torch.rand(4, 6, dtype=F64)
    torch.manual_seed(5)
    z = merged(x)
    masks = [merged.solution.value[name] == 0 for name in ("layer1", "layer2")]
    assert not torch.equal(*masks) and all(0 < int(m.sum()) < m.numel() for m in masks)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    merged.cell(merged.solution.value, x)
    assert torch.equal(torch.get_rng_state(), after), "a call draws what one evaluation draws"
    again = merged(x)
    assert not torch.equal(z, again)


def test_merged_causal_layers_do_not_leak() -> None:
    merged = DEQ(CausalSum(), **ROUGH) >> DEQ(CausalSum(), **ROUGH)
    x = torch.randn(3, 12, 4, dtype=F64)
    assert merged.causal and future_leak(merged, x, 7) == 0.0


def test_merging_is_associative_and_learns_all_parameters() -> None:
    layers = [DEQ(cells.MLP(4, 4, scale=0.5, dtype=F64), **TIGHT) for _ in range(3)]
    a, b, c = layers
    merged, other = (a >> b) >> c, a >> (b >> c)
    assert len(merged.cell.stages) == len(other.cell.stages) == 3
    x = torch.randn(2, 4, dtype=F64)
    torch.testing.assert_close(merged(x), c(b(a(x))), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(merged(x), other(x), rtol=1e-9, atol=1e-11)
    merged(x).sum().backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())
    with pytest.raises(TypeError, match="merges two DEQ layers"):
        merge(a, nn.Linear(4, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differ in batch_dims"):
        _ = a >> DEQ(cells.MLP(4, 4), batch_dims=0)


@pytest.mark.parametrize("order", ["net", "net mlp", "mlp net", "net net", "mlp net mlp"])
def test_tied_networks_merge_with_other_layers(order: str) -> None:
    net = nn.Sequential(nn.Linear(4, 7, dtype=F64), nn.Tanh(), nn.Linear(7, 4, dtype=F64))
    layers = {"net": tie_weights(net, **TIGHT), "mlp": DEQ(cells.MLP(4, 4, scale=0.7, dtype=F64), **TIGHT)}
    plain: dict[str, Callable[[Tensor], Tensor]] = {"net": net, "mlp": layers["mlp"]}
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    merged: Any = None
    want = x
    for name in order.split():
        merged = layers[name] if merged is None else merged >> layers[name]
        want = plain[name](want)
    torch.testing.assert_close(merged(x), want, rtol=1e-9, atol=1e-11)
    got, expected = (torch.autograd.grad(z.square().sum(), [x, *net.parameters()]) for z in (merged(x), want))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def test_a_tied_network_in_training_is_called_as_often_as_the_network() -> None:
    """The shapes of the state are found without drawing masks and without touching statistics."""
    noisy = nn.Sequential(nn.Linear(4, 7, dtype=F64), nn.Dropout(0.5), nn.Linear(7, 4, dtype=F64), nn.Dropout(0.3))
    layer, x = tie_weights(noisy, **TIGHT), torch.randn(5, 4, dtype=F64)
    torch.manual_seed(3)
    z, after = layer(x), torch.rand(())
    torch.manual_seed(3)
    torch.testing.assert_close(z, noisy(x), rtol=0, atol=1e-14)
    assert torch.equal(after, torch.rand(()))
    normed = nn.Sequential(nn.Linear(4, 7, dtype=F64), nn.BatchNorm1d(7, dtype=F64), nn.Linear(7, 4, dtype=F64))
    reference = copy.deepcopy(normed)
    tie_weights(normed, **TIGHT)(x)
    reference(x)
    torch.testing.assert_close(dict(normed.named_buffers()), dict(reference.named_buffers()), rtol=1e-12, atol=1e-14)
    assert all(m.training for m in normed.modules())


def test_merged_layers_keep_their_solvers_of_either_mode_and_their_warm_start() -> None:
    def layer(solver: str, evaluation: str, init: str) -> DEQ:
        cell = cells.MLP(4, 4, scale=0.7, dtype=F64)
        return DEQ(cell, solver=solver, init=init, evaluation={"solver": evaluation}, **TIGHT)

    merged = (
        layer("picard", "newton", "last") >> layer("anderson", "broyden", "last") >> layer("picard", "aitken", "last")
    )
    names = ("layer1", "layer2", "layer3")
    for settings, solvers in (
        (merged.train_settings, ("picard", "anderson", "picard")),
        (merged.eval_settings, ("newton", "broyden", "aitken")),
    ):
        assert settings.solver.inner == dict(zip(names, solvers, strict=True))
    x = torch.randn(3, 4, dtype=F64)
    merged(x)
    merged(x)
    assert int(merged.solution.steps.max()) <= 1
    cold = layer("picard", "newton", "last") >> layer("picard", "newton", "zeros")
    assert cold.init == "zeros"


# ------------------------------------------------------------------------------------------------------------- bad input
Z = torch.zeros(2, 6, dtype=F64)
X = torch.zeros(2, 4, dtype=F64)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "penalty without probes": (lambda: jacobian_penalty(lambda z: z, Z, probes=0), ValueError, "probes"),
    "inputs not a tuple": (lambda: jacobian_penalty(lambda z, x: z, Z, X), TypeError, r"a tuple, as in \(x,\)"),  # type: ignore[arg-type]
    "another shape": (lambda: spectral_radius(lambda z: z[:, :3], Z), ValueError, r"shape \(2, 3\)"),
    "unknown method": (lambda: spectral_radius(lambda z: z, Z, method="qr"), ValueError, "'arnoldi' or 'power'"),
    "too few steps": (lambda: condition_number(lambda z: z, Z, steps=1), ValueError, "at least 2"),
    "no bound": (lambda: bound_weights(nn.Linear(2, 2), 0.0), ValueError, "positive"),
    "unknown norm": (lambda: bound_weights(nn.Linear(2, 2), 1.0, "nuclear"), ValueError, "'spectral', 'frobenius'"),
    "a foreign weight": (lambda: bound_weights(nn.Linear(2, 2), 1.0, weights=[Z]), ValueError, "not a parameter"),
    "nothing to bound": (lambda: bound_weights(nn.LayerNorm(3), 1.0), ValueError, "no weight of two dimensions"),
    "weight norm bound": (lambda: weight_norm(nn.Linear(2, 2), -1.0), ValueError, "positive"),
    "radius": (lambda: scale_to_radius(DEQ(cells.MLP(4, 6)), (X,), 0.0), ValueError, "radius must be positive"),
    "which weights": (lambda: scale_to_radius(DEQ(nn.Bilinear(6, 4, 6), (6,)), (X,)), ValueError, "pass weights="),
    "no states": (lambda: fixed_point_correction(loss, []), ValueError, "no state"),
    "gamma": (lambda: fixed_point_correction(loss, [Z], 2.0), ValueError, "gamma"),
    "steps out of order": (lambda: DEQ(cells.MLP(4, 6, dtype=F64)).states(X, at=(4, 2)), ValueError, "increasing"),
    "monitor every": (lambda: Monitor(DEQ(cells.MLP(4, 6)), every=0), ValueError, "every must be at least 1, got 0"),
    "stack of one": (lambda: cells.Stacked(cells.MLP(4, 6)), ValueError, "two cells or more"),
    "stack of functions": (lambda: cells.Stacked(cells.MLP(4, 6), nn.Linear(6, 6)), TypeError, "Wrapped"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_clearly(name: str) -> None:
    f, error, message = BAD[name]
    with pytest.raises(error, match=message):
        f()


def test_a_radius_that_no_scale_reaches_is_said_and_nothing_changes() -> None:
    layer = DEQ(cells.MLP(4, 6, activation=lambda z: z.clamp(0, 0.1), dtype=F64))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ik.ConvergenceError, match="saturates"):
        scale_to_radius(layer, (100 * torch.ones(2, 4, dtype=F64),), 0.9, max_trials=12)
    torch.testing.assert_close(layer.state_dict(), before)
