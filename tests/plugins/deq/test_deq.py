"""The DEQ layer: states, starts, settings, gradients, frozen maps, copies, transforms, precision, processes, bad input."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import implicitkit as ik
from implicitkit_deq import DEQ, Cell, Pretraining, Settings, cells, jacobian_penalty

F64 = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


# ------------------------------------------------------------------------------------------------------ cells for tests
class Plain(nn.Module):
    """tanh(W z + U x + b), |W|_2 = 0.6, without a declared injection."""

    def __init__(self, features: int = 6, in_features: int = 4, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.W = nn.Linear(features, features, dtype=dtype)
        self.U = nn.Linear(in_features, features, dtype=dtype)
        with torch.no_grad():
            self.W.weight.mul_(0.6 / torch.linalg.matrix_norm(self.W.weight, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


class Pair(nn.Module):
    """An LSTM-like state (h, c)."""

    def __init__(self, features: int = 5, in_features: int = 4) -> None:
        super().__init__()
        self.W = nn.Linear(features, 2 * features, dtype=F64)
        self.U = nn.Linear(in_features, 2 * features, dtype=F64)
        with torch.no_grad():
            self.W.weight.mul_(0.5 / torch.linalg.matrix_norm(self.W.weight, 2))

    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, c = z
        i, g = (self.W(h) + self.U(x)).chunk(2, -1)
        c = 0.5 * torch.sigmoid(i) * c + torch.tanh(g)
        return 0.5 * torch.tanh(c), c


class Pyramid(Cell):
    """A two-resolution state in a dict, coupled both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv1d(2, 2, 3, padding=1, dtype=F64), nn.Conv1d(3, 3, 3, padding=1, dtype=F64)
        self.down, self.up = nn.Conv1d(2, 3, 2, stride=2, dtype=F64), nn.Conv1d(3, 2, 1, dtype=F64)
        self.U = nn.Conv1d(1, 2, 1, dtype=F64)

    def inject(self, x: Tensor) -> tuple[Tensor]:
        return (self.U(x),)

    def update(self, z: dict[str, Tensor], injected: Tensor) -> dict[str, Tensor]:
        a, b = z["fine"], z["coarse"]
        up = torch.repeat_interleave(self.up(b), 2, -1)
        return {
            "fine": 0.4 * torch.tanh(self.fine(a) + up + injected),
            "coarse": 0.4 * torch.tanh(self.coarse(b) + self.down(a)),
        }

    def state_shape(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        return {"fine": (2, x.shape[-1]), "coarse": (3, x.shape[-1] // 2)}


CELLS: dict[str, Callable[[], tuple[nn.Module, Any, tuple[int, ...]]]] = {
    "plain": lambda: (Plain(), (6,), (3, 4)),
    "mlp": lambda: (cells.MLP(4, 6, scale=0.6, dtype=F64), None, (3, 4)),
    "mlp_hidden": lambda: (cells.MLP(4, 6, 9, scale=0.6, dtype=F64), None, (3, 4)),
    "mlp_sequence": lambda: (cells.MLP(4, 6, scale=0.6, dtype=F64), None, (3, 5, 4)),
    "pair": lambda: (Pair(), ((5,), (5,)), (3, 4)),
    "pyramid": lambda: (Pyramid(), None, (3, 1, 8)),
    "gru": lambda: (_Swap(nn.GRUCell(4, 6, dtype=F64)), (6,), (3, 4)),
}


class _Swap(nn.Module):
    """A torch recurrent cell, which takes (x, h), damped: a GRU's own update gate can keep everything."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.7 * self.cell(x, z)


def leaves(state: Any) -> list[Tensor]:
    return ik.extend.trees.tree_flatten(state)[0]


def loss(state: Any) -> Tensor:
    return sum((leaf.sin() + leaf**2).sum() for leaf in leaves(state))  # type: ignore[return-value]


def unrolled(layer: DEQ, *inputs: Tensor, steps: int = 400) -> Any:
    shapes = layer.cell.state_shape(*inputs) if layer.state is None else layer.state
    from implicitkit_deq.starting.start import zeros

    z = zeros(shapes, len(inputs[0]), inputs[0].dtype, inputs[0].device)
    for _ in range(steps):
        z = layer.cell(z, *inputs)
    return z


def gradients(out: Any, layer: nn.Module, *inputs: Tensor) -> list[Tensor]:
    wanted = [p for p in [*layer.parameters(), *inputs] if p.requires_grad]
    return list(torch.autograd.grad(loss(out), wanted, materialize_grads=True))


# ------------------------------------------------------------------------------------------- value, every gradient
@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["anderson", "picard", "newton", "auto"])
@pytest.mark.parametrize("name", CELLS)
def test_value_and_every_gradient_are_the_unrolled_limit(name: str, solver: str) -> None:
    cell, state, shape = CELLS[name]()
    layer = DEQ(cell, state, solver=solver, rule=ik.Implicit(rtol=1e-12), **TIGHT)
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    z, want = layer(x), unrolled(layer, x)
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-10)
    got, exact = gradients(z, layer, x), gradients(want, layer, x)
    assert all(bool(g.abs().max() > 0) for g in exact)
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-9)
    assert bool(layer.solution.converged.all())
    assert layer.solution.backward is not None and bool(layer.solution.backward.converged.all())


@pytest.mark.parametrize("rule", ["implicit", "one_step", "phantom", "neumann"])
def test_every_rule(rule: str) -> None:
    cell = cells.MLP(4, 6, scale=0.3, dtype=F64)
    layer = DEQ(cell, rule=rule, **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    got, exact = gradients(layer(x), layer, x), gradients(unrolled(layer, x), layer, x)
    flat = [torch.cat([g.flatten() for g in grads]) for grads in (got, exact)]
    error = float((flat[0] - flat[1]).norm() / flat[1].norm())
    assert error < {"implicit": 1e-9, "neumann": 1e-4, "phantom": 0.2, "one_step": 0.5}[rule]
    if rule != "implicit":
        assert error > 1e-9, "an approximate rule is not the exact one in disguise"


def test_a_function_is_a_cell_too_and_its_captured_weights_have_gradients() -> None:
    W = (0.1 * torch.randn(4, 4, dtype=F64)).requires_grad_()
    layer = DEQ(lambda z, x: torch.tanh(z @ W + x), (4,), **TIGHT)
    x = torch.randn(3, 4, dtype=F64)
    want = x * 0
    for _ in range(200):
        want = torch.tanh(want @ W + x)
    torch.testing.assert_close(
        torch.autograd.grad(loss(layer(x)), W), torch.autograd.grad(loss(want), W), rtol=1e-8, atol=1e-10
    )


def test_double_backward_and_func_transforms() -> None:
    layer = DEQ(cells.MLP(3, 4, scale=0.6, dtype=F64), **TIGHT)
    x = torch.randn(2, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x), (x,))
    params = {k: v.detach() for k, v in layer.named_parameters()}

    def value(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss(torch.func.functional_call(layer, params, (x,)))

    got = torch.func.grad(value)(params, x.detach())
    exact = torch.autograd.grad(loss(unrolled(layer, x)), list(layer.parameters()))
    torch.testing.assert_close(list(got.values()), list(exact), rtol=1e-8, atol=1e-10)
    per_sample = torch.func.vmap(torch.func.grad(value), (None, 0))(params, x.detach().unsqueeze(1))
    torch.testing.assert_close([g.sum(0) for g in per_sample.values()], list(exact), rtol=1e-8, atol=1e-10)


def test_several_inputs_and_shared_ones() -> None:
    def cell(z: Tensor, x: Tensor, adjacency: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z @ adjacency + x)

    layer = DEQ(cell, (4,), in_dims=(0, None), **TIGHT)
    x, adjacency = torch.randn(6, 4, dtype=F64), torch.rand(4, 4, dtype=F64)
    x[0] *= 100  # saturated: converges long before the others, and is dropped
    z = layer(x, adjacency)
    torch.testing.assert_close(z, cell(z, x, adjacency), rtol=1e-10, atol=1e-10)
    assert layer.solution.sample_evaluations < 6 * layer.solution.evaluations


# ------------------------------------------------------------------------------------------------- within one call
class _Counting(cells.MLP):
    injections = 0

    def inject(self, x: Tensor) -> tuple[Tensor]:
        self.injections += 1
        return super().inject(x)


def test_the_injection_is_computed_once_a_call() -> None:
    cell = _Counting(4, 6, dtype=F64)
    layer = DEQ(cell, **TIGHT)
    z = layer(torch.randn(3, 4, dtype=F64))
    assert layer.solution.evaluations > 5
    loss(z).backward()
    assert cell.injections == 1
    assert cell.injection.weight.grad is not None and cell.injection.weight.grad.abs().sum() > 0


def test_saved_bytes_do_not_depend_on_the_steps() -> None:
    saved = []
    for rtol in (1e-2, 1e-6, 1e-12):
        torch.manual_seed(0)
        layer = DEQ(cells.MLP(16, 16, scale=0.9, dtype=F64), solver="picard", rtol=rtol, atol=0.0)
        x = torch.randn(4, 16, dtype=F64)
        count = [0]

        def pack(t: Tensor, count: list[int] = count) -> Tensor:
            count[0] += t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x)
        saved.append((int(layer.solution.steps.max()), count[0]))
    steps, bytes_saved = zip(*saved, strict=True)
    assert steps[2] > 5 * steps[0]
    assert len(set(bytes_saved)) == 1, saved


class _Noisy(nn.Module):
    """Dropout by module, by function, and plain noise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.dropout = Plain(), kind, nn.Dropout(0.4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z = self.inner(z, x)
        if not self.training:
            return z
        return {
            "module": lambda: self.dropout(z),
            "function": lambda: nn.functional.dropout(z, 0.4),
            "noise": lambda: z + 0.1 * torch.randn_like(z),
        }[self.kind]()


@pytest.mark.parametrize("kind", ["module", "function", "noise"])
def test_random_numbers_are_drawn_once_a_call(kind: str) -> None:
    layer = DEQ(_Noisy(kind), (6,), **TIGHT)
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(7)
        z = layer(x)
        after = torch.get_rng_state()
        again = layer(x)
    assert bool(layer.solution.converged.all())
    assert float((z - again).detach().abs().max()) > 1e-3, "another call, another draw"
    torch.manual_seed(7)
    state = torch.get_rng_state()
    layer.cell(torch.zeros(5, 6, dtype=F64), x)
    assert torch.equal(torch.get_rng_state(), after), "a call draws what one evaluation draws"

    want = torch.zeros(5, 6, dtype=F64)
    for _ in range(200):
        torch.set_rng_state(state)
        want = layer.cell(want, x)
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(z, layer, x), gradients(want, layer, x), rtol=1e-7, atol=1e-9)


def test_converged_samples_are_dropped_unless_something_is_drawn() -> None:
    x = torch.randn(8, 4, dtype=F64) * torch.logspace(-3, 2, 8, dtype=F64).unsqueeze(1)
    layer = DEQ(_Noisy("module"), (6,), **TIGHT)
    layer(x)
    assert layer.solution.sample_evaluations == 8 * layer.solution.evaluations
    layer.eval()
    layer(x)
    assert layer.solution.sample_evaluations < 8 * layer.solution.evaluations


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Plain(), nn.BatchNorm1d(6, dtype=F64)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.norm(self.inner(z, x)))


def test_batch_norm_statistics_are_held_and_updated_once() -> None:
    layer = DEQ(_Normalised(), (6,), **TIGHT)
    norm, reference = layer.cell.norm, copy.deepcopy(layer.cell)
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = layer(x)
    assert int(norm.num_batches_tracked) == 1
    reference.eval()  # the statistics from before the call
    want = torch.zeros(5, 6, dtype=F64)
    for _ in range(200):
        want = reference(want, x)
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-10)
    exact = torch.autograd.grad(loss(want), [*reference.parameters(), x])
    torch.testing.assert_close(gradients(z, layer, x), list(exact), rtol=1e-7, atol=1e-9)
    features = reference.inner(z, x).detach()  # seen by the norm at the equilibrium
    torch.testing.assert_close(norm.running_mean, 0.1 * features.mean(0), rtol=1e-8, atol=1e-10)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    layer.eval()
    layer(x)
    torch.testing.assert_close(dict(norm.state_dict()), before)


@pytest.mark.parametrize("first", ["train", "eval"])
def test_the_mode_may_change_between_a_call_and_its_backward(first: str) -> None:
    layer, x = DEQ(_Normalised(), (6,), init="zeros", **TIGHT), torch.randn(5, 4, dtype=F64, requires_grad=True)
    layer.cell.norm.running_mean += 0.3
    state, other = copy.deepcopy(layer.state_dict()), {"train": layer.eval, "eval": layer.train}[first]
    found = []
    for between in (getattr(layer, first), other):
        layer.load_state_dict(state)
        getattr(layer, first)()
        z = layer(x)
        between()
        found.append(gradients(z, layer, x))
        assert {m.training for m in layer.modules()} == {layer.training}
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_instance_norm_statistics_are_updated_once() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = Plain(), nn.InstanceNorm1d(2, track_running_stats=True, dtype=F64)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.4 * torch.tanh(self.norm(self.inner(z, x).view(-1, 2, 3)).flatten(1))

    layer = DEQ(Cell(), (6,), **TIGHT)
    norm, reference = layer.cell.norm, copy.deepcopy(layer.cell)
    x = torch.randn(5, 4, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = layer(x)
    torch.testing.assert_close(reference(z, x), z, rtol=1e-9, atol=1e-10)  # each sample by its own statistics
    features = reference.inner(z, x).detach().view(-1, 2, 3)
    torch.testing.assert_close(norm.running_mean, 0.1 * features.mean((0, 2)), rtol=1e-8, atol=1e-10)
    jacobian_penalty(layer.cell, z.detach(), (x,))
    torch.testing.assert_close(norm.running_mean, 0.1 * features.mean((0, 2)), rtol=1e-8, atol=1e-10)


class Averaging(nn.Module):
    """A cell less a moving average of its states, which it writes into its buffer or puts there anew; at zero states, where
    solves begin, it writes what is there."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.inner, self.anew = Plain(), anew
        self.register_buffer("mean", torch.zeros(6, dtype=F64))
        self.counter = nn.Module()  # one that moves by itself
        self.counter.register_buffer("times", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out = self.inner(z, x) - self.mean
        if self.training:
            self.counter.times += 1
            if self.anew:
                self.mean = torch.lerp(self.mean, z.detach().mean(0), 0.1)
            else:
                self.mean.lerp_(z.detach().mean(0), 0.1)
        return out


@pytest.mark.parametrize("how", [{}, {"batch_dims": 0}, {"pretraining": Pretraining(1, 300)}], ids=repr)
@pytest.mark.parametrize("anew", [True, False])
def test_buffers_that_a_cell_writes_are_held_and_written_once(anew: bool, how: dict[str, Any]) -> None:
    """They stayed what they were for ever, with a warning, or samples were said to depend on each other."""
    layer, x = DEQ(Averaging(anew), (6,), **how, **TIGHT), torch.randn(5, 4, dtype=F64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (1, 2):
            reference = copy.deepcopy(layer.cell).eval()
            z = layer(x)
            want = unrolled(DEQ(reference, (6,)), x, steps=300)
            exact = torch.autograd.grad(loss(want), [*reference.parameters(), x])
            torch.testing.assert_close(gradients(z, layer, x), list(exact), rtol=1e-7, atol=1e-9)
            jacobian_penalty(layer.cell, z.detach(), (x,))
            assert int(layer.cell.counter.times) == call
            torch.testing.assert_close(layer.cell.mean, torch.lerp(reference.mean, want.mean(0), 0.1))
    with pytest.warns(ik.ImpureFunctionWarning, match="Averaging writes to its buffers .*(mean, times|times, mean)"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    assert int(layer.cell.counter.times) == 2
    with torch.inference_mode():
        layer(x)
    assert int(layer.cell.counter.times) == 3
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ik.CapabilityError, match="Averaging writes to its buffers"):
        again.sum().backward()


def test_batch_norm_in_training_refuses_vmap_and_in_evaluation_does_not() -> None:
    layer = DEQ(_Normalised(), (6,), **TIGHT)
    batches = torch.randn(2, 3, 4, dtype=F64)
    with pytest.raises(ik.CapabilityError, match=r"statistics under torch\.vmap"):
        torch.func.vmap(layer)(batches)
    layer.eval()
    want = torch.stack([layer(x) for x in batches])
    torch.testing.assert_close(torch.func.vmap(layer)(batches), want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("counted", [True, False])
def test_batch_norm_on_batch_statistics_is_a_joint_system(counted: bool) -> None:
    layer = DEQ(_Normalised(), (6,), batch_dims=0, **TIGHT)
    if not counted:  # as in old checkpoints; what is written fused torch does not count either
        layer.cell.norm.num_batches_tracked = None
    reference = copy.deepcopy(layer.cell)
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    z = layer(x)
    want = torch.zeros(5, 6, dtype=F64)
    for _ in range(300):
        want = reference(want, x)
    torch.testing.assert_close(z, want, rtol=1e-8, atol=1e-9)
    exact = torch.autograd.grad(loss(want), [*reference.parameters(), x])
    torch.testing.assert_close(gradients(z, layer, x), list(exact), rtol=1e-6, atol=1e-8)
    assert not counted or int(layer.cell.norm.num_batches_tracked) == 1
    features = reference.inner(want, x).detach()
    torch.testing.assert_close(layer.cell.norm.running_mean, 0.1 * features.mean(0))


class _Counted(nn.Module):
    calls = 0

    def forward(self, W: Tensor) -> Tensor:
        _Counted.calls += 1
        return 0.6 * W / torch.linalg.matrix_norm(W, 2)


def test_reparametrised_weights_are_computed_once_a_call() -> None:
    cell = cells.MLP(4, 6, dtype=F64)
    nn.utils.parametrize.register_parametrization(cell.recurrent, "weight", _Counted())
    layer = DEQ(cell, **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    exact = gradients(unrolled(layer, x, steps=100), layer, x)
    _Counted.calls = 0
    z = layer(x)
    got = gradients(z, layer, x)
    assert layer.solution.evaluations > 5 and _Counted.calls == 1
    torch.testing.assert_close(got, exact, rtol=1e-7, atol=1e-9)


def test_torch_spectral_norm_takes_one_power_step_a_call() -> None:
    cell = cells.MLP(4, 6, dtype=F64)
    parametrizations.spectral_norm(cell.recurrent)
    other = copy.deepcopy(cell)
    layer = DEQ(lambda z, x: 0.9 * cell(z, x), (6,), **TIGHT)  # a plain function: nothing is hoisted, the core holds it
    with pytest.warns(ik.ImpureFunctionWarning):
        layer(torch.randn(3, 4, dtype=F64))

    class Damped(cells.MLP):
        def update(self, z: Tensor, injected: Tensor) -> Tensor:
            return 0.9 * super().update(z, injected)

    damped = Damped(4, 6, dtype=F64)
    damped.recurrent = other.recurrent
    layer = DEQ(damped, **TIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vector = other.recurrent.parametrizations.weight[0]._u.clone()
        layer(torch.randn(3, 4, dtype=F64))
    assert not torch.equal(vector, other.recurrent.parametrizations.weight[0]._u)
    assert bool(layer.solution.converged.all())


# --------------------------------------------------------------------------------------------------------------- starts
def test_the_start_does_not_matter_and_may_be_anything() -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 4, dtype=F64)
    cell = cells.MLP(4, 6, scale=0.7, dtype=F64)
    hyper = nn.Linear(4, 6, dtype=F64)
    reference = DEQ(cell, **TIGHT)(x)
    for init in ("zeros", "learned", "last", hyper, lambda x: torch.ones(len(x), 6, dtype=F64)):
        layer = DEQ(cell, (6,), init=init, **TIGHT)
        torch.testing.assert_close(layer(x), reference, rtol=1e-9, atol=1e-10)
    z0 = torch.randn(3, 6, dtype=F64, requires_grad=True)
    z = DEQ(cell, **TIGHT)(x, z0=z0)
    torch.testing.assert_close(z, reference, rtol=1e-9, atol=1e-10)
    (g,) = torch.autograd.grad(z.sum(), z0, allow_unused=True)
    assert g is None or float(g.abs().max()) == 0.0


EMPTY: dict[str, tuple[Callable[[], DEQ], tuple[int, ...], tuple[int, ...]]] = {
    "defaults": (lambda: DEQ(cells.MLP(4, 6)), (4,), (6,)),
    "evaluation": (lambda: DEQ(cells.MLP(4, 6)).eval(), (4,), (6,)),
    "a rule of terms": (lambda: DEQ(cells.MLP(4, 6), rule=ik.Neumann(3)), (4,), (6,)),
    "a loop": (lambda: DEQ(cells.MLP(4, 6), rule=ik.Unroll(steps=3)), (4,), (6,)),
    "a trace": (lambda: DEQ(cells.MLP(4, 6), trace=True), (4,), (6,)),
    "causal": (lambda: DEQ(cells.TrellisNet(4, 6)), (5, 4), (5, 6)),
    "images": (lambda: DEQ(cells.ConvBlock(3, 8)), (3, 5, 5), (8, 5, 5)),
    "one after another": (lambda: DEQ(cells.MLP(4, 5)) >> DEQ(cells.MLP(5, 6)), (4,), (6,)),
}


STEPS: dict[str, dict[str, Any]] = {
    "by the rule": {"rule": ik.Unroll(steps=3)},
    "by tolerances of zero": {"rule": ik.Unroll(), "rtol": 0.0, "atol": 0.0, "max_steps": 3},
}


@pytest.mark.parametrize("row", STEPS)
def test_steps_that_are_asked_for_are_forgiven_nothing(row: str) -> None:
    layer, x = DEQ(cells.MLP(4, 6, dtype=F64), solver="picard", **STEPS[row]), torch.randn(5, 4, dtype=F64)
    weight, z = layer.cell.injection.weight, torch.zeros(5, 6, dtype=F64)
    for _ in range(3):
        z = layer.cell(z, x)
    found = layer(x)
    assert layer.solution.truncated and not layer.solution.converged.any()
    torch.testing.assert_close(found, z)
    torch.testing.assert_close(torch.autograd.grad(loss(found), weight), torch.autograd.grad(loss(z), weight))


def test_steps_that_are_asked_for_and_are_not_finite_are_a_failure() -> None:
    def solve(**options: Any) -> ik.Solution:
        return ik.fixed_point(
            lambda z, x: z.exp().exp() + x, torch.ones(2), (torch.ones(2),), solver="picard", **options
        )

    with pytest.raises(ik.ConvergenceError):
        solve(rule=ik.Unroll(steps=5))
    assert bool(solve(rule=ik.Unroll(steps=5), on_failure="nan").value.isnan().all())


def test_an_exact_derivative_has_no_value_where_steps_are_all_that_was_asked_for() -> None:
    """Under ``"nan"``: where the rule is that of solutions, the start stood in the place of what is none."""
    x = torch.full((3,), 0.3, dtype=F64)
    options: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "max_steps": 3, "on_failure": "nan"}
    found = ik.fixed_point(lambda z, x: torch.tanh(0.9 * z + x), torch.zeros_like(x), (x,), solver="picard", **options)
    assert bool(found.value.isnan().all())


@pytest.mark.parametrize("row", EMPTY)
def test_an_empty_batch_has_an_empty_equilibrium(row: str) -> None:
    make, one, state = EMPTY[row]
    layer, x = make(), torch.zeros(0, *one, requires_grad=True)
    z = layer(x)
    assert z.shape == (0, *state)
    assert layer.solution.converged.shape == (0,)
    z.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for name, weight in layer.named_parameters():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().max()) == 0, name


def test_an_empty_batch_leaves_the_last_equilibrium() -> None:
    layer, x = DEQ(cells.MLP(4, 6), init="last"), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    nobody = torch.zeros(0, dtype=torch.int64)
    for index, none in ((None, None), (torch.arange(3), nobody)):
        layer(x, index=index)
        assert int(layer.solution.steps.max()) > 0 or index is not None
        layer(x[:0], index=none)
        layer(x, index=index)
        assert int(layer.solution.steps.max()) == 0


def test_warm_start_from_the_last_frame() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.9, dtype=F64), init="last", solver="picard", rtol=1e-10, atol=0.0)
    x = torch.randn(3, 4, dtype=F64)
    layer(x)
    cold = int(layer.solution.steps.max())
    layer(x + 1e-6)
    warm = int(layer.solution.steps.max())
    assert warm < 0.6 * cold
    layer(torch.randn(5, 4, dtype=F64))  # another batch size: from zero again
    assert layer.solution.value.shape == (5, 6)
    assert "last" not in str(layer.state_dict())


def test_what_torch_vmap_leaves_behind() -> None:
    """A call under vmap disturbs no later one, and its figures can be read when vmap has ended."""
    cell = cells.MLP(4, 6, scale=0.7, dtype=F64)
    layer = DEQ(cell, init="last", **TIGHT)
    x = torch.randn(3, 4, dtype=F64)
    layer(x)
    batches = torch.randn(2, 3, 4, dtype=F64)
    z = torch.func.vmap(layer)(batches)
    torch.testing.assert_close(z, torch.stack([DEQ(cell, **TIGHT)(x) for x in batches]), rtol=1e-9, atol=1e-10)
    assert layer.solution.steps.shape == layer.solution.residual_norm.shape == (2, 3)
    assert bool(layer.solution.converged.all())
    torch.testing.assert_close(layer(x), DEQ(cell, **TIGHT)(x), rtol=1e-9, atol=1e-10)
    assert int(layer.solution.steps.max()) <= 1, "still warm from the call before vmap"
    torch.func.grad(lambda x: layer(x).sum())(x)
    layer(x)
    assert int(layer.solution.steps.max()) <= 1


def test_states_inside_transforms() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.7, dtype=F64), **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return sum(z.square().sum() for z in layer.states(x, at=(1, 3)))  # type: ignore[return-value]

    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(x), x)[0], rtol=1e-9, atol=1e-10)
    with pytest.raises(ik.CapabilityError, match=r"does not work under torch\.vmap"):
        torch.func.vmap(torch.func.grad(loss))(torch.randn(2, 3, 4, dtype=F64))


def test_warm_start_forgets_samples_that_are_not_finite() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.7, dtype=F64), init="last", on_failure="ignore", **TIGHT)
    x = torch.randn(3, 4, dtype=F64)
    bad = x.clone()
    bad[1] = torch.nan
    layer(bad)
    assert layer.solution.converged.tolist() == [True, False, True]
    layer.init.state[1] = torch.nan
    layer(x)
    assert bool(layer.solution.converged.all())


@pytest.mark.parametrize("kind", ["learned", "module"])
def test_a_learned_start_saves_steps(kind: str) -> None:
    cell = cells.MLP(4, 6, scale=0.9, dtype=F64)
    init = "learned" if kind == "learned" else nn.Linear(4, 6, dtype=F64)
    layer = DEQ(cell, (6,), init=init, solver="picard", rtol=1e-6, atol=0.0)
    x = 2.0 + 0.05 * torch.randn(16, 4, dtype=F64)
    layer(x)
    first = float(layer.solution.steps.double().mean())
    start = list(layer.init.parameters())
    optimiser = torch.optim.Adam(start, lr=0.1)
    with pytest.raises(RuntimeError, match="no start to train"):
        DEQ(cell).start_loss()
    losses = []
    for _ in range(60):
        layer(x)
        value = layer.start_loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.item())
    assert losses[-1] < 0.02 * losses[0]
    assert float(layer.solution.steps.double().mean()) < 0.8 * first
    assert cell.recurrent.weight.grad is None


# ------------------------------------------------------------------------------------------------------------- settings
def test_evaluate_tighter_than_trained() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.9, dtype=F64), rtol=1e-3, atol=0.0, evaluation={"rtol": 1e-10})
    x = torch.randn(3, 4, dtype=F64)
    rough, figures = layer(x), layer.solution
    layer.eval()
    fine = layer(x)
    assert bool((layer.solution.steps > figures.steps).all())
    assert float(layer.solution.residual_norm.max()) < 1e-8 < float(figures.residual_norm.max())
    assert 1e-9 < float((rough - fine).detach().abs().max()) < 1e-2
    assert fine.requires_grad, "eval() is no obstacle to derivatives"
    with layer.using(solver=ik.Picard(damping=0.9), rtol=1e-6):
        layer(x)
    assert layer.solution.solver == "picard" and layer.settings.solver == "relay"


def test_unrolled_pretraining_then_implicit() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.6, dtype=F64), pretraining=Pretraining(calls=2, steps=3), **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    want = torch.zeros(3, 6, dtype=F64)
    for _ in range(3):
        want = layer.cell(want, x)
    z = layer(x)
    torch.testing.assert_close(z, want)
    torch.testing.assert_close(gradients(z, layer, x), gradients(want, layer, x))
    assert layer.solution is None
    layer.eval()
    layer(x)
    assert layer.solution is not None, "evaluation is always implicit"
    layer.train()
    resumed = DEQ(cells.MLP(4, 6, dtype=F64), pretraining=Pretraining(calls=2, steps=3), **TIGHT)
    resumed.load_state_dict(layer.state_dict())
    for each in (layer, resumed):
        each(x)
        assert each.solution is None, "second call"
        each(x)
        assert each.solution is not None, "third call"


def test_a_checkpoint_of_the_first_phase_is_one_for_layers_without_and_the_other_way_round() -> None:
    """Names that a layer without a first phase does not know ended a strict load, and a phase set later the first call."""
    phase, x = Pretraining(calls=3, steps=2), torch.randn(2, 4)
    first, plain = DEQ(cells.MLP(4, 6), pretraining=phase), DEQ(cells.MLP(4, 6))
    for _ in range(2):
        first(x)
    before = plain.state_dict()
    plain.load_state_dict(first.state_dict())
    assert int(plain.state_dict()["calls"]) == 2, "what is not used is kept"
    plain(x)
    assert plain.solution is not None and int(plain.calls) == 2
    first.load_state_dict(before)
    assert int(first.calls) == 2
    later = DEQ(cells.MLP(4, 6))
    for layer in (plain, later):
        layer.pretraining = phase
        while int(layer.state_dict().get("calls", 0)) < phase.calls:
            layer(x)
            assert layer.solution is None
        layer(x)
        assert layer.solution is not None


def test_layers_of_varied_depth() -> None:
    chosen = Pretraining(calls=400, steps=2, deepest=5)
    depths = [chosen.depth(call) for call in range(400)]
    assert sorted(set(depths)) == [2, 3, 4, 5] and min(depths.count(d) for d in set(depths)) > 60  # 100 +- 9
    repeated = sum(a == b for a, b in itertools.pairwise(depths))
    assert 60 < repeated < 140, "one draw says something of the next"
    assert [Pretraining(400, 3).depth(call) for call in range(3)] == [3, 3, 3]
    layer = DEQ(cells.MLP(4, 6, scale=0.6, dtype=F64), pretraining=chosen, **TIGHT)
    x = torch.randn(3, 4, dtype=F64)
    for call in range(6):
        torch.manual_seed(call)  # of which the number does not depend
        want = torch.zeros(3, 6, dtype=F64)
        for _ in range(depths[call]):
            want = layer.cell(want, x)
        torch.testing.assert_close(layer(x), want)
    layer.pretraining = None
    layer(x)
    assert layer.solution is not None, "handed over"


def test_callback_and_trace_reach_the_solve() -> None:
    seen: list[int] = []
    layer = DEQ(cells.MLP(4, 6, dtype=F64), trace=True, callback=lambda step, z, norm: seen.append(step))
    layer(torch.randn(3, 4, dtype=F64))
    assert layer.solution.trace.shape == (len(seen) + 1, 3)
    assert seen == list(range(1, len(seen) + 1))


def test_a_failure_is_loud_and_leaves_its_figures() -> None:
    cell = cells.MLP(4, 6, scale=3.0, activation=nn.Identity(), dtype=F64)
    layer = DEQ(cell, solver="picard", max_steps=20)
    x = torch.randn(3, 4, dtype=F64)
    with pytest.raises(ik.ConvergenceError, match="3 of 3 samples did not converge"):
        layer(x)
    assert not bool(layer.solution.converged.any())
    with pytest.warns(ik.ConvergenceWarning), layer.using(on_failure="warn"):
        layer(x)
    with layer.using(on_failure="ignore"):
        layer(x)


# ------------------------------------------------------------------------------------------------------- copies, memory
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("init", ["last", "learned"])
def test_save_load_pickle_deepcopy(init: str) -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64), (6,), init=init, evaluation={"rtol": 1e-8})
    x = torch.randn(3, 4, dtype=F64)
    z = layer(x)
    loss(z).backward()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = {
        "deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(buffer, weights_only=False),
        "state_dict": DEQ(cells.MLP(4, 6, dtype=F64), (6,), init=init, evaluation={"rtol": 1e-8}),
    }
    twins["state_dict"].load_state_dict(layer.state_dict())
    for name, twin in twins.items():
        torch.testing.assert_close(twin(x), z, rtol=1e-8, atol=1e-9, msg=name)
        assert twin.eval_settings == layer.eval_settings, name
    assert layer.solution is not None, "copies leave the original alone"


def test_the_layer_does_not_keep_its_graph() -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64))
    layer(torch.randn(3, 4, dtype=F64, requires_grad=True))
    assert layer.solution.value.grad_fn is None


# ------------------------------------------------------------------------------------------- dtypes, autocast, compile
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, F64, torch.complex64, torch.complex128]
)
def test_dtypes(dtype: torch.dtype) -> None:
    cell = Plain(dtype=dtype if dtype.is_complex else torch.float32)
    cell = cell if dtype.is_complex else cell.to(dtype)
    with torch.no_grad():
        cell.W.weight.mul_(0.5)  # a complex tanh is steeper than 1
    layer = DEQ(cell, (6,), solver="picard")
    x = torch.randn(3, 4, dtype=dtype)
    z = layer(x)
    assert z.dtype == dtype and z.device == x.device
    assert bool(layer.solution.converged.all())
    torch.view_as_real(z).sum().backward() if dtype.is_complex else z.float().sum().backward()
    grad = cell.W.weight.grad
    assert grad is not None and grad.dtype == dtype and bool(torch.isfinite(grad.abs()).all())


def test_token_inputs_take_the_dtype_of_the_weights() -> None:
    class Embedded(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Embedding(7, 4, dtype=F64), cells.MLP(4, 6, dtype=F64)

        def inject(self, tokens: Tensor) -> tuple[Tensor]:
            return self.inner.inject(self.table(tokens))

        def update(self, z: Tensor, injected: Tensor) -> Tensor:
            return self.inner.update(z, injected)

    layer = DEQ(Embedded(), lambda tokens: (tokens.shape[1], 6))
    z = layer(torch.randint(7, (2, 5)))
    assert z.shape == (2, 5, 6) and z.dtype == F64


def test_autocast_keeps_the_solve_in_float32() -> None:
    layer = DEQ(cells.MLP(16, 16, scale=0.5))
    x = torch.randn(8, 16, requires_grad=True)
    seen: list[torch.dtype] = []
    layer.train_settings = layer.train_settings.changed({"callback": lambda step, z, norm: seen.append(z.dtype)})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.nn.functional.linear(x, torch.eye(16))
        assert half.dtype == torch.bfloat16
        z = layer(half)
    loss(z).backward()
    assert z.dtype == torch.float32 and set(seen) == {torch.float32}
    (exact,) = torch.autograd.grad(loss(unrolled(layer, x)), x)
    assert float((x.grad - exact).norm() / exact.norm()) < 0.05


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("what", ["cell", "layer"])
def test_compile(what: str) -> None:
    cell = cells.MLP(4, 6, scale=0.6, dtype=F64)
    plain = DEQ(cell, **TIGHT)
    compiled = (
        DEQ(torch.compile(cell, backend="aot_eager"), (6,), in_dims=None, **TIGHT)
        if what == "cell"
        else torch.compile(plain, backend="aot_eager")
    )
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    exact = gradients(plain(x), cell, x)
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled(x), cell, x), exact, rtol=1e-8, atol=1e-10)
    torch._dynamo.reset()


DDP = """
import os, sys, torch, torch.distributed as dist
from implicitkit_deq import DEQ, cells

def gradients(model, x):
    model.zero_grad()
    model(x).pow(2).sum(1).mean().backward()
    return [p.grad.clone() for p in model.parameters()]

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
layer = DEQ(cells.MLP(4, 6, dtype=torch.float64), rtol=1e-12, atol=1e-12)
x = torch.randn(6, 4, dtype=torch.float64)
alone = gradients(layer, x)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
parallel = torch.nn.parallel.DistributedDataParallel(layer)
for _ in range(2):
    torch.testing.assert_close(gradients(parallel, x[rank * 3 : rank * 3 + 3]), alone, rtol=1e-9, atol=1e-11)
dist.barrier()
del parallel
dist.destroy_process_group()
print("gradients equal on rank", rank, flush=True)
os._exit(0)  # at the end of the interpreter threads of gloo may be joined too late, and abort
"""


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DDP]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        out = process.communicate(timeout=300)[0].decode()
        assert process.returncode == 0 and f"gradients equal on rank {rank}" in out, out


# -------------------------------------------------------------------------------------------------------------- bad input
def _bad(f: Callable[[Tensor, Tensor], Any], state: Any = (6,)) -> Callable[[], Any]:
    return lambda: DEQ(f, state)(torch.randn(3, 6))


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a cell that returns a pair": (
        lambda: DEQ(lambda z, x: (z, x), (4,))(torch.zeros(2, 4)),
        TypeError,
        r"got \(\(2, 4\), \(2, 4\)\), z is \(2, 4\)$",
    ),
    "a Cell with forward alone": (
        lambda: DEQ(_Forward(), (4,))(torch.zeros(2, 4)),
        NotImplementedError,
        "must define update.*a plain nn.Module",
    ),
    "cell is no callable": (lambda: DEQ(3, (4,)), TypeError, "cell must be callable"),
    "no state": (lambda: DEQ(Plain()), TypeError, "state is missing"),
    "cell without state_shape": (lambda: _StateLess()(torch.randn(3, 4)), TypeError, "state_shape"),
    "state is a number": (lambda: DEQ(Plain(), 6), TypeError, r"write \(6,\)"),
    "state with a zero": (lambda: DEQ(Plain(), (0,)), ValueError, "empty shape"),
    "state is a dict of numbers": (lambda: DEQ(Plain(), {"h": 3}), TypeError, r"write \(3,\)"),
    "state is an empty dict": (lambda: DEQ(Plain(), {}), ValueError, "no leaf"),
    "another shape": (_bad(lambda z, x: z[:, :5]), ValueError, r"returned shape \(3, 5\), but z has shape \(3, 6\)"),
    "another structure": (_bad(lambda z, x: (z, z)), TypeError, "another structure"),
    "another dtype": (_bad(lambda z, x: z.double()), TypeError, "dtype torch.float64"),
    "not a tensor": (_bad(lambda z, x: 1.0), TypeError, "float"),
    "a cell of one argument": (
        _bad(nn.Linear(6, 6)),
        TypeError,
        r"a cell is called as cell\(z, x, \.\.\.\).*2 positional.*\+ x\)",
    ),
    "a cell of the parts of its state": (
        lambda: DEQ(lambda a, b, x: (b, a), ((6,), (6,)))(torch.zeros(3, 6)),
        TypeError,
        r"z is one argument, a tuple: DEQ\(lambda z, \*inputs: f\(\*z, \*inputs\), state\)",
    ),
    "one step number": (lambda: DEQ(Plain(), (6,)).states(torch.zeros(3, 4), at=3), ValueError, r"\(2, 4, 8\), got 3$"),
    "half a step number": (lambda: DEQ(Plain(), (6,))(torch.zeros(3, 4), at=(2.5,)), ValueError, r"got \(2\.5,\)$"),
    "a list": (lambda: DEQ(Plain(), (6,))([1.0, 2.0]), TypeError, "at least one tensor.*got list.*as_tensor"),
    "no input": (lambda: DEQ(Plain(), (6,))(), TypeError, "at least one tensor"),
    "scalar input": (lambda: DEQ(Plain(), (6,))(torch.tensor(1.0)), ValueError, "leading dimension must be the batch"),
    "z0 of another batch": (
        lambda: DEQ(Plain(dtype=torch.float32), (6,))(torch.zeros(3, 4), z0=torch.zeros(2, 6)),
        ValueError,
        r"\(2, 6\) where the state has \(3, 6\)",
    ),
    "z0 of another structure": (
        lambda: DEQ(Plain(), (6,))(torch.zeros(3, 4), z0=(torch.zeros(3, 6),)),
        TypeError,
        "another structure",
    ),
    "z0 that is no tensor": (
        lambda: DEQ(Plain(), (6,))(torch.zeros(3, 4), z0=1.0),
        TypeError,
        "z0 must hold tensors.*got float",
    ),
    "z0 of another dtype": (
        lambda: DEQ(Plain(), (6,))(torch.zeros(3, 4, dtype=F64), z0=torch.zeros(3, 6)),
        TypeError,
        "float32",
    ),
    "init unknown": (lambda: DEQ(Plain(), (6,), init="ones"), ValueError, "init must be one of"),
    "init learned without shape": (lambda: DEQ(cells.MLP(4, 6), init="learned"), ValueError, "fixed shape"),
    "init of another shape": (
        lambda: DEQ(Plain(dtype=torch.float32), (6,), init=lambda x: torch.zeros(3, 5))(torch.zeros(3, 4)),
        ValueError,
        "what init returned",
    ),
    "a typo in evaluation": (lambda: DEQ(Plain(), (6,), evaluation={"rtoll": 1e-3}), TypeError, "Did you mean 'rtol'"),
    "a typo in using": (lambda: DEQ(Plain(), (6,)).using(sover="picard").__enter__(), TypeError, "'solver'"),
    "a typo in the constructor": (lambda: DEQ(Plain(), (6,), tol=1e-3), TypeError, "tol"),
    "an unknown solver": (lambda: DEQ(Plain(), (6,), solver="andersen"), Exception, "anderson"),
    "a solver for something else": (
        lambda: DEQ(Plain(), (6,), solver="brentq")(torch.zeros(3, 4, dtype=F64)),
        Exception,
        "unknown|brentq",
    ),
    "negative tolerance": (lambda: Settings(rtol=-1.0), ValueError, "negative"),
    "text for a tolerance": (lambda: Settings(rtol="1e-3"), TypeError, "rtol must be a number or None, got '1e-3'"),
    "half a step": (lambda: Settings(max_steps=2.5), TypeError, r"max_steps must be an integer or None, got 2\.5"),
    "no steps": (lambda: Settings(max_steps=0), ValueError, "max_steps"),
    "unknown policy": (lambda: Settings(on_failure="shrug"), ValueError, "on_failure"),
    "batch_dims": (lambda: DEQ(Plain(), (6,), batch_dims=2), ValueError, "batch_dims"),
    "integer dtype": (lambda: DEQ(Plain(), (6,), dtype=torch.int64), ValueError, "floating point"),
    "in_dims of another length": (
        lambda: DEQ(Plain(), (6,), in_dims=(0, 0))(torch.zeros(3, 4, dtype=F64)),
        ValueError,
        "in_dims has 2 entries",
    ),
    "inject returns no tuple": (lambda: DEQ(_NoTuple())(torch.zeros(3, 4)), TypeError, "must return a tuple"),
    "pretraining without calls": (lambda: Pretraining(0, 3), ValueError, "calls must be at least 1"),
    "deepest of no layer": (lambda: Pretraining(1, 1, 0), ValueError, "deepest must be at least 1"),
    "deepest below steps": (lambda: Pretraining(1, 3, 2), ValueError, r"deepest \(2\) must be at least steps \(3\)"),
    "mlp sizes": (lambda: cells.MLP(4, 0), ValueError, "features must be at least 1"),
    "mlp scale": (lambda: cells.MLP(4, 4, scale=0.0), ValueError, "scale must be positive"),
}


class _NoTuple(cells.MLP):
    def __init__(self) -> None:
        super().__init__(4, 6)

    def inject(self, x: Tensor) -> Any:
        return self.injection(x)


class _Forward(Cell):
    def forward(self, z: Tensor, *inputs: Tensor) -> Tensor:
        return z + inputs[0]


class _StateLess(Cell):
    def update(self, z: Tensor, x: Tensor) -> Tensor:
        return z

    def __call__(self, *args: Any) -> Any:
        return DEQ(self)(*args) if len(args) == 1 else super().__call__(*args)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_clearly(name: str) -> None:
    f, error, message = BAD[name]
    with pytest.raises(error, match=message):
        f()


def test_one_bad_sample_does_not_spoil_its_batch() -> None:
    layer = DEQ(cells.MLP(4, 6, scale=0.7, dtype=F64), on_failure="ignore", **TIGHT)
    x = torch.randn(4, 4, dtype=F64)
    good = layer(x)
    x[2] = torch.nan
    z = layer(x.requires_grad_())
    keep = [0, 1, 3]
    torch.testing.assert_close(z[keep], good[keep], rtol=1e-10, atol=1e-11)
    assert layer.solution.converged.tolist() == [True, True, False, True]
    (g,) = torch.autograd.grad(z[keep].sum(), x)
    assert bool(torch.isfinite(g[keep]).all()) and float(g[keep].abs().max()) > 0


# ------------------------------------------------------------------------------------------- layers inside other things
def test_no_grad_and_inference_mode() -> None:
    layer = DEQ(_Normalised(), (6,), init="last", **TIGHT).eval()
    x = torch.randn(3, 4, dtype=F64)
    z = layer(x).detach()
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), z, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(layer(x), layer), gradients(unrolled(layer, x), layer), rtol=1e-7, atol=1e-9)


def test_what_is_remembered_in_inference_mode_serves_outside_of_it() -> None:
    layer = DEQ(cells.MLP(4, 6, dtype=F64), **TIGHT)
    x, index = torch.randn(3, 4, dtype=F64), torch.tensor([4, 0, 2])
    with torch.inference_mode():
        layer(x, index=index)
    z = layer(x, index=index)
    assert layer.solution is not None and int(layer.solution.steps.max()) <= 1
    torch.testing.assert_close(gradients(z, layer), gradients(unrolled(layer, x), layer), rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_a_tolerance_below_what_the_precision_of_the_cell_allows_is_named() -> None:
    torch.manual_seed(0)
    layer = DEQ(cells.MLP(4, 16), rtol=1e-6).eval()
    x = torch.randn(100, 4)  # some of which have no fixed point in single precision: of few samples all may have one
    said = "autocast .*bfloat16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(ik.ConvergenceError, match=said):
        layer(x)
    layer(x)
    said = r"computes in torch\.float32, .* in torch\.float64"
    with torch.no_grad(), layer.using(rtol=1e-12), pytest.raises(ik.ConvergenceError, match=said):
        layer(x)
    with (
        torch.no_grad(),
        layer.using(rtol=1e-3, max_steps=2, solver="picard"),
        pytest.raises(ik.ConvergenceError) as told,
    ):
        layer(x)
    assert "computes in" not in str(told.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_backward_under_autocast_is_solved_in_full_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(4, 16), rtol=1e-3), torch.randn(5, 4)
    want = gradients(layer(x), layer)
    with torch.autocast("cpu", dtype):
        z = layer(x)
    got = gradients(z.float(), layer)
    assert layer.solution is not None and layer.solution.backward is not None
    assert bool(layer.solution.backward.converged.all())
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm()) < 0.05 * float(b.norm()) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "state"])
def test_half_precision_is_solved_by_default_to_its_rounding(dtype: torch.dtype, cast: bool) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(cells.MLP(8, 64)), torch.randn(32, 8)
    exact = copy.deepcopy(layer).double()
    want = gradients(exact(x.double()), exact)
    half, data = (layer, x) if cast else (layer.to(dtype), x.to(dtype))
    with torch.autocast("cpu", dtype, enabled=cast):
        z = half(data)
    got = gradients(z.float(), half)
    assert half.solution is not None and half.solution.backward is not None
    assert bool(half.solution.converged.all()) and bool(half.solution.backward.converged.all())
    assert int(half.solution.backward.steps.max()) <= 32  # not 60 products for digits that they do not have
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b).norm()) < 4 * torch.finfo(dtype).eps * float(b.norm())


def test_activation_checkpointing_around_a_layer() -> None:
    layer = DEQ(_Noisy("module"), (6,), **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    torch.manual_seed(1)
    want = gradients(layer(x), layer, x)
    torch.manual_seed(1)
    z = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(gradients(z, layer, x), want, rtol=1e-9, atol=1e-11)


def test_a_layer_inside_the_cell_of_another() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = DEQ(cells.MLP(6, 6, scale=0.5, dtype=F64), **TIGHT)
            self.U = nn.Linear(4, 6, dtype=F64)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * self.inner(z + self.U(x))

    layer = DEQ(Outer(), (6,), **TIGHT)
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)

    def flat(z: Tensor, x: Tensor) -> Tensor:  # both iterations unrolled
        u = torch.zeros_like(z)
        for _ in range(60):
            u = layer.cell.inner.cell(u, z + layer.cell.U(x))
        return 0.5 * u

    want = torch.zeros(3, 6, dtype=F64)
    for _ in range(60):
        want = flat(want, x)
    z = layer(x)
    torch.testing.assert_close(z, want, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(z, layer, x), gradients(want, layer, x), rtol=1e-6, atol=1e-9)


def test_threads_share_a_layer() -> None:
    cell = cells.MLP(4, 6, dtype=F64)
    nn.utils.parametrize.register_parametrization(cell.recurrent, "weight", _Counted())
    layer = DEQ(cell, **TIGHT)
    xs = [torch.randn(3, 4, dtype=F64) for _ in range(3)]
    exact = [gradients(unrolled(layer, x, steps=100), layer) for x in xs]
    failures: list[str] = []
    weights = list(layer.parameters())  # read before: during an evaluation the modules hold stand-ins

    def work(i: int) -> None:
        for _ in range(6):
            try:
                got = list(torch.autograd.grad(loss(layer(xs[i])), weights))
                torch.testing.assert_close(got, exact[i], rtol=1e-7, atol=1e-9)
            except Exception as error:
                failures.append(f"thread {i}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
