"""What builders of models do with a layer besides calling it: each with its value and every gradient against a loop."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import implicitkit as ik
from implicitkit_deq import DEQ, Cell, Pretraining, compat
from implicitkit_deq.held import generators

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "rule": ik.Implicit(rtol=1e-12)}


class Half(nn.Module):
    """``tanh(W z / 2 + U x)``: a contraction wherever ``|W| <= 1``."""

    def __init__(self, inputs: int = 3, width: int = 5) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(width, width, dtype=D), nn.Linear(inputs, width, dtype=D)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.W(z) + self.U(x))


def unrolled(cell: Callable[..., Tensor], x: Tensor, width: int = 5, steps: int = 150) -> Tensor:
    z = torch.zeros(len(x), width, dtype=D)
    for _ in range(steps):
        z = cell(z, x)
    return z


def gradients(z: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(z.square().sum(), list(module.parameters()))


# --------------------------------------------------------------------------- reparametrisations that are hooks before a call
def pruned(module: nn.Linear) -> nn.Module:
    prune.l1_unstructured(module, "weight", amount=0.4)
    return prune.random_unstructured(module, "bias", amount=0.4)


# what sets the weight, and the method of the hook that computes it
HOOKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight_norm": (nn.utils.weight_norm, "compute_weight"),
    "spectral_norm": (nn.utils.spectral_norm, "compute_weight"),
    "prune": (pruned, "apply_mask"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", HOOKED)
def test_a_weight_that_a_hook_sets_is_computed_once_a_call(name: str) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(Half(), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    hook_up, method = HOOKED[name]
    hook_up(layer.cell.W)
    hooks = list(layer.cell.W._forward_pre_hooks.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):  # spectral normalisation takes a step of the power method a call
            layer(x)
    assert list(layer.cell.W._forward_pre_hooks.values()) == hooks  # they are back
    exact = unrolled(layer.eval().cell, x)
    wanted = gradients(exact, layer)
    if name == "spectral_norm":
        norm = torch.linalg.matrix_norm(layer.cell.W.weight.detach(), 2)
        assert float(norm) == pytest.approx(1.0, abs=1e-2)

    calls = 0

    def counted(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return of(*args, **kwargs)

        return compute

    for hook in hooks:
        setattr(hook, method, counted(getattr(hook, method)))
    z = layer(x)
    found = gradients(z, layer)
    assert layer.solution is not None and layer.solution.evaluations > 5
    assert calls == len(hooks)
    torch.testing.assert_close(z, exact, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_layers_in_a_row_hold_the_weights_of_both() -> None:
    torch.manual_seed(0)
    first, second, x = DEQ(Half(), (5,), **TIGHT), DEQ(Half(5), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    nn.utils.spectral_norm(first.cell.W)
    nn.utils.weight_norm(second.cell.W)
    both = first >> second
    before = first.cell.W.weight_u.clone()
    both(x)
    assert not torch.equal(first.cell.W.weight_u, before)
    both.eval()
    exact = unrolled(second.cell, unrolled(first.cell, x))
    torch.testing.assert_close(gradients(both(x), both), gradients(exact, both), rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------------------------ states with names
class Named(nn.Module):
    """Two states with names, returned in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.c = nn.Linear(3, 3, dtype=D), nn.Linear(3, 3, dtype=D)

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(0.5 * self.h(z["h"]) + x)
        return {"c": torch.tanh(0.3 * z["c"] + self.c(z["h"])), "h": h}


@pytest.mark.parametrize("options", [{}, {"solver": "newton"}, {"init": "last"}, {"init": "learned"}], ids=str)
def test_the_names_of_a_state_may_come_in_any_order(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(Named(), {"h": (3,), "c": (3,)}, **options, **TIGHT), torch.randn(4, 3, dtype=D)
    exact: Any = {k: torch.zeros(4, 3, dtype=D) for k in ("h", "c")}
    for _ in range(100):
        exact = layer.cell(exact, x)
    for _ in range(2):
        z = layer(x)
        assert list(z) == ["h", "c"]
        for name in z:
            torch.testing.assert_close(z[name], exact[name], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(
                torch.autograd.grad(z[name].sum(), layer.cell.h.weight, retain_graph=True),
                torch.autograd.grad(exact[name].sum(), layer.cell.h.weight, retain_graph=True),
            )
    layer(x, z0={k: exact[k].detach() for k in ("c", "h")})
    assert layer.solution is not None and layer.solution.evaluations == 1  # it is there


# ----------------------------------------------------------------------------------------- arguments that the samples share
class Shared(Cell):
    """A cell that does not say that its second argument is one for all samples."""

    def __init__(self, use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.W, self.U, self.use = nn.Linear(5, 5, dtype=D), nn.Linear(3, 5, dtype=D), use
        self.evaluations = 0

    def state_shape(self, x: Tensor, _: Tensor) -> tuple[int, ...]:
        return (5,)

    def inject(self, x: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return self.U(x), A

    def update(self, z: Tensor, i: Tensor, A: Tensor) -> Tensor:
        self.evaluations += 1
        return torch.tanh(self.use(0.5 * self.W(z), i, A))


# name: what the cell makes of its argument, and whether that is one row a sample
SHARED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "a number of it": (lambda y, i, A: y * A.mean() + i, False),
    "a matrix": (lambda y, i, A: y @ A + i, False),
    "one row": (lambda y, i, A: y + i + A[0], False),
    "a row each": (lambda y, i, A: y * A + i, True),
}


@pytest.mark.parametrize("trained", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", SHARED)
def test_an_argument_of_as_many_rows_as_the_batch_is_not_cut_where_it_is_shared(name: str, trained: bool) -> None:
    torch.manual_seed(0)
    use, apart = SHARED[name]
    cell = Shared(use)
    layer, x = DEQ(cell, **TIGHT).train(trained), torch.randn(5, 3, dtype=D)
    x[:3] *= 30  # these converge at once
    A = torch.linspace(0.3, 1.0, 25, dtype=D).view(5, 5).flip(0).contiguous() / (5 if name == "a matrix" else 1)
    z = layer(x, A)
    exact = unrolled(lambda z, x: cell(z, x, A), x)
    torch.testing.assert_close(z, exact, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradients(z, layer), gradients(exact, layer), rtol=1e-8, atol=1e-10)
    solution = layer.solution
    assert solution is not None
    assert (solution.sample_evaluations < 5 * solution.evaluations) == apart  # rows are dropped where that is right

    before = cell.evaluations
    layer(x[:4] if apart else x, A[:4] if apart else A)
    assert layer.solution is not None and cell.evaluations - before == layer.solution.evaluations  # it is asked once


# ----------------------------------------------------------------------------------------------------- frozen, and not
def test_a_generator_is_trained_through_a_layer_that_is_frozen_for_the_while() -> None:
    torch.manual_seed(0)
    maker, judge, x = DEQ(Half(), (5,), **TIGHT), DEQ(Half(5), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    judge.requires_grad_(False)
    value = judge(maker(x)).square().sum()
    judge.requires_grad_()
    value.backward()
    exact = gradients(unrolled(judge.cell, unrolled(maker.cell, x)), maker)
    torch.testing.assert_close([p.grad for p in maker.parameters()], list(exact), rtol=1e-8, atol=1e-10)
    assert all(p.grad is None for p in judge.parameters())


# ------------------------------------------------------------------------------------------------- masks of mapped samples
class Dropped(Half):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.W(nn.functional.dropout(z, 0.5, self.training)) + self.U(x))


def test_an_ensemble_draws_one_mask_for_all_its_members() -> None:
    torch.manual_seed(0)
    layers, x = [DEQ(Dropped(), (5,), **TIGHT) for _ in range(3)], torch.randn(4, 3, dtype=D)
    parameters, _ = torch.func.stack_module_state(layers)
    x[:2] *= 30  # these converge at once, and are dropped in none of the members
    for seed in range(4):
        torch.manual_seed(seed)
        found = torch.func.vmap(lambda p: functional_call(layers[0], p, (x,)), randomness="same")(parameters)
        torch.manual_seed(seed)
        mask = nn.functional.dropout(torch.ones(4, 5, dtype=D), 0.5)
        for z, layer in zip(found, layers, strict=True):
            cell = layer.cell
            exact = unrolled(lambda z, x, c=cell, m=mask: torch.tanh(0.5 * c.W(z * m) + c.U(x)), x)
            torch.testing.assert_close(z, exact, rtol=1e-9, atol=1e-11)


def test_a_mask_for_each_mapped_sample_is_refused_with_what_to_do_and_one_for_all_is_taken() -> None:
    torch.manual_seed(0)
    layer, x = DEQ(Dropped(), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    mapped = lambda how: torch.func.vmap(lambda x: layer(x[None])[0], randomness=how)(x)  # noqa: E731
    with pytest.raises(ik.CapabilityError, match=r'Dropped draws random numbers.*randomness="same"'):
        mapped("different")
    torch.manual_seed(1)
    found = mapped("same")
    torch.manual_seed(1)
    mask = nn.functional.dropout(torch.ones(1, 5, dtype=D), 0.5)
    exact = unrolled(lambda z, x: torch.tanh(0.5 * layer.cell.W(z * mask) + layer.cell.U(x)), x)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)

    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        z: Tensor = functional_call(layer, p, (x[None],))
        return z.square().sum()

    with pytest.raises(ik.CapabilityError, match=r'Dropped draws random numbers.*randomness="same"'):
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
    torch.manual_seed(1)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")(parameters, x)
    wanted = [torch.autograd.grad(row.square().sum(), list(layer.parameters()), retain_graph=True) for row in exact]
    torch.testing.assert_close(list(per_sample.values()), [torch.stack(g) for g in zip(*wanted, strict=True)])

    drawn = lambda x: ik.fixed_point(lambda z: 0.5 * torch.cos(z) * torch.rand(2) + x, torch.zeros(2)).value  # noqa: E731
    with pytest.raises(ik.CapturedTensorError, match='randomness="different"'), pytest.warns(ik.ImpureFunctionWarning):
        torch.func.vmap(drawn, randomness="different")(torch.ones(3, 2))


# ------------------------------------------------------------------------------------- draws that torch knows nothing of
class Sometimes(Half):
    """Is left out, or disturbed, as a number says that is drawn somewhere."""

    def __init__(self, draw: Callable[[], float], inputs: int = 3) -> None:
        super().__init__(inputs)
        self.draw = draw

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        drawn = self.draw()
        if not self.training:
            return super().forward(z, x)
        return super().forward(z, x) + drawn if drawn > 0.3 else z  # where it is left out, every point is one


DRAWS: dict[str, Callable[[], float]] = {
    "Python": random.random,
    "NumPy": np.random.random,
    "NumPy's pairs": lambda: abs(np.random.randn()),
    "both, and torch": lambda: random.random() + np.random.rand() * float(torch.rand(())),
}
HOW_OF_DRAWS: dict[str, Callable[[Sometimes], DEQ]] = {
    "module": lambda cell: DEQ(cell, (5,), **TIGHT),
    "function": lambda cell: DEQ(lambda z, x: cell(z, x), (5,), **TIGHT),
    "stack": lambda cell: DEQ(cell, (5,), **TIGHT) >> DEQ(Half(5), (5,), **TIGHT),
}


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize(
    ("name", "how"),
    [("Python", "module"), ("NumPy", "function"), ("NumPy's pairs", "stack"), ("both, and torch", "function")],
)
def test_numbers_of_pythons_and_numpys_generators_are_drawn_once_a_call(name: str, how: str) -> None:
    torch.manual_seed(0)
    cell, x = Sometimes(DRAWS[name]), torch.randn(4, 3, dtype=D)
    layer = HOW_OF_DRAWS[how](cell)
    drawn = []
    for seed in range(7):
        _seed(seed)
        z: Tensor = layer(x)
        after = random.random(), np.random.random(), float(torch.rand(()))
        _seed(seed)
        drawn.append(cell.draw())
        if seed:  # a first call finds out, and draws twice
            assert after == (random.random(), np.random.random(), float(torch.rand(())))
        if not seed or drawn[-1] <= 0.3:
            continue
        found = torch.autograd.grad(z.sum(), cell.U.weight)[0]
        exact = unrolled(lambda z, x: Half.forward(cell, z, x) + drawn[-1], x, steps=60)
        if how == "stack":
            exact = unrolled(layer.cell.maps()["layer2"][0], exact, steps=60)
        torch.testing.assert_close(z, exact, rtol=1e-8, atol=1e-10)
        wanted = torch.autograd.grad(exact.sum(), cell.U.weight)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert sum(d > 0.3 for d in drawn[1:]) >= 2


def test_generators_that_nobody_draws_from_are_not_read_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = DEQ(Half(), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    monkeypatch.setattr(generators, "states", lambda: pytest.fail("they were"))
    layer(x).sum().backward()
    held = compat.numbers_of_numpy()
    assert held == compat.numbers_of_numpy()
    np.random.random()
    assert held != compat.numbers_of_numpy()


# ------------------------------------------------------------------------------------------------ after the equilibrium
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.5, inplace=True),
    "residual": lambda z: z.add_(1),
    "one entry": lambda z: z.index_fill_(1, torch.tensor([0]), 3.0),
}
KINDS_OF_LAYER: dict[str, Callable[[], DEQ]] = {
    "layer": lambda: DEQ(Half(), (5,), **TIGHT),
    "merged": lambda: DEQ(Half(), (5,), **TIGHT) >> DEQ(Half(5), (5,), **TIGHT),
    "unrolled": lambda: DEQ(Half(), (5,), pretraining=Pretraining(1, 3)),
}


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("kind", KINDS_OF_LAYER)
@pytest.mark.parametrize("name", AFTER)
def test_an_output_may_be_changed_in_place(name: str, kind: str, tracked: bool) -> None:
    torch.manual_seed(0)
    layer, x = KINDS_OF_LAYER[kind](), torch.randn(4, 3, dtype=D)
    twin = copy.deepcopy(layer)
    with torch.set_grad_enabled(tracked):
        z, plain = layer(x), twin(x)
        torch.manual_seed(1)
        out = AFTER[name](z)
        torch.manual_seed(1)
        wanted = AFTER[name](plain.clone())
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-10)
    if tracked:
        torch.testing.assert_close(gradients(out, layer), gradients(wanted, twin), rtol=1e-7, atol=1e-9)
    if kind != "unrolled":  # what is kept of the call is the equilibrium
        torch.testing.assert_close(layer.solution.value, twin.solution.value)


class Masked(Half):
    """With dropout on the state."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(z, 0.3, self.training), x)


class Deaf(Half):
    """Without a word from the input."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return super().forward(z, torch.zeros_like(x))


@pytest.mark.parametrize("cell", [Half, Masked, Deaf], ids=lambda cell: cell.__name__)
@pytest.mark.filterwarnings("ignore::implicitkit_deq.inputs.IgnoredInputWarning")
def test_a_checkpoint_around_the_first_call(cell: type[nn.Module]) -> None:
    """What a layer asks its cell once only leaves nothing that the call which is computed again would miss."""
    torch.manual_seed(0)
    layer, x = DEQ(cell(), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    torch.manual_seed(1)
    found = gradients(checkpoint(layer, x, use_reentrant=False), layer)
    torch.manual_seed(1)
    torch.testing.assert_close(found, gradients(layer(x), layer), rtol=1e-7, atol=1e-9)


def test_jacobians_of_a_layer_with_dropout_are_had_in_the_ways_that_are_named_where_torch_refuses() -> None:
    torch.manual_seed(0)
    layer, x = DEQ(Masked(), (5,), **TIGHT), torch.randn(2, 3, dtype=D)
    loss = lambda x: layer(x).square().sum()  # noqa: E731
    vectorised = lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True)  # noqa: E731
    for transform, f in ((torch.func.jacrev, layer), (torch.func.hessian, loss), (vectorised, layer)):
        with pytest.raises(RuntimeError, match=r"Masked draws random numbers.*layer\.eval\(\).*functional\.jacobian"):
            transform(f, x) if transform is vectorised else transform(f)(x)

    def seeded(compute: Callable[[], Any]) -> Any:
        torch.manual_seed(1)
        return compute()

    def by_hand() -> Tensor:
        out, pull = torch.func.vjp(layer, x)
        basis = torch.eye(out.numel(), dtype=D).view(-1, *out.shape)
        return torch.func.vmap(pull, randomness="same")(basis)[0].view(*out.shape, *x.shape)

    wanted = seeded(lambda: torch.autograd.functional.jacobian(layer, x))
    same = {"randomness": "same"}
    for found in (seeded(by_hand), seeded(lambda: torch.func.jacfwd(layer, **same)(x))):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    found = seeded(lambda: torch.func.jacfwd(torch.func.grad(loss), **same)(x))
    torch.testing.assert_close(found, seeded(lambda: torch.autograd.functional.hessian(loss, x)), rtol=1e-7, atol=1e-9)


MIXED: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(6, 2, dtype=D),
    "recurrent": lambda: nn.GRU(6, 6, dtype=D),
}


@pytest.mark.parametrize("options", [{"in_dims": 0}, {}], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_layers_that_put_the_batch_second_are_named_where_samples_mix(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    inner, x = MIXED[name](), torch.randn(3, 5, 6, dtype=D)
    call = (lambda y: inner(y, y, y)[0]) if name == "attention" else (lambda y: inner(y)[0])
    layer = DEQ(lambda z, x: 0.5 * call(z + x) + x, (5, 6), **options)
    with pytest.raises(ValueError, match=r"batch_first=True.*batch_dims=0"):
        layer(x).sum().backward()


# ---------------------------------------------------------------------------------- what a cell shows besides its value
class Keeping(Half):
    """Keeps a tensor of every evaluation, for the loss or a plot, in one of the ways in which it is done."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.noise = how, nn.Dropout(0.3 if how == "drawn" else 0.0)
        self.norm = nn.BatchNorm1d(5, dtype=D) if how == "normed" else nn.Identity()
        if how == "buffer":
            self.register_buffer("kept", None)
        else:
            self.kept: Any = {}
        if how == "hook":
            self.W.register_forward_hook(self.see)

    def see(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.keep(out)

    def keep(self, out: Tensor) -> None:
        self.kept = {"out": out.square()} if self.how == "dict" else out.square()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out = super().forward(self.noise(self.norm(z)), x)
        if self.how != "hook":
            self.keep(out)
        return out

    def extra(self) -> Tensor:
        return self.kept["out"] if self.how == "dict" else self.kept


class Sized:
    """What nobody may ask whether it is empty, as an array of NumPy's, or a scripted module."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("held", [torch.ones(2).numpy(), Sized()], ids=lambda held: type(held).__name__)
def test_what_a_cell_holds_besides_tensors_is_not_asked_whether_it_is_empty(held: Any) -> None:
    layer = DEQ(Half(), (5,))
    layer.cell.held = held
    assert layer(torch.randn(4, 3, dtype=D)).isfinite().all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["attribute", "dict", "buffer", "hook", "drawn", "normed"])
def test_what_a_cell_keeps_is_of_the_equilibrium_with_its_derivative(how: str, training: bool) -> None:
    torch.manual_seed(0)
    layer, x = DEQ(Keeping(how), (5,), **TIGHT).train(training), torch.randn(4, 3, dtype=D)
    with torch.no_grad():  # what an earlier call left is not taken for that of this one
        layer(3 - x)
    cell = copy.deepcopy(layer.cell)
    if how == "normed":
        cell.norm.eval()
    torch.manual_seed(1)
    z, extra = layer(x), layer.cell.extra()
    wanted = torch.zeros(4, 5, dtype=D)
    for _ in range(100):
        torch.manual_seed(1)
        wanted = cell(wanted, x)
    torch.testing.assert_close(extra, cell.extra(), rtol=1e-9, atol=1e-10)
    found, exact = (gradients(a.sum() + b.sum(), m) for a, b, m in ((z, extra, layer), (wanted, cell.extra(), cell)))
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-9)
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(layer)).module[0]  # a deep copy, after a call
    assert not averaged.cell.extra().requires_grad and torch.equal(averaged.cell.extra(), layer.cell.extra())
    if how == "normed":
        assert layer.cell.norm.num_batches_tracked == 2 * training


def test_layers_in_a_row_show_each_its_own() -> None:
    torch.manual_seed(0)
    first, second = DEQ(Keeping("attribute"), (5,), **TIGHT), DEQ(Half(5), (5,), **TIGHT)
    merged, x = first >> second, torch.randn(4, 3, dtype=D)
    found = gradients(merged(x).sum() + first.cell.kept.sum(), merged)
    wanted = gradients(second(first(x)).sum() + first.cell.kept.sum(), merged)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


class Counting(Half):
    """Counts its evaluations."""

    calls = 0

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(z, x)


def seen(cell: Any) -> None:
    cell.W.register_forward_hook(lambda *_: None)


# what is done to a cell, and how many evaluations that costs beside those of the solve
DONE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "nothing": (lambda cell: None, 0),
    "weight_norm": (lambda cell: nn.utils.weight_norm(cell.W), 0),
    "prune": (lambda cell: pruned(cell.W), 0),
    "parametrised": (lambda cell: nn.utils.parametrizations.weight_norm(cell.W), 0),
    "BatchNorm": (lambda cell: cell.add_module("norm", nn.BatchNorm1d(5)), 1),
    "hook": (seen, 1),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", DONE)
def test_a_cell_that_shows_nothing_is_evaluated_no_oftener(name: str) -> None:
    layer, x = DEQ(Counting(), (5,), **TIGHT), torch.randn(4, 3, dtype=D)
    DONE[name][0](layer.cell)
    layer(x)
    layer.cell.calls = 0
    layer(x)
    assert layer.cell.calls == layer.solution.evaluations + DONE[name][1]


# ------------------------------------------------------------------------ normalised layers in and beside checkpoints
class Normed(Half):
    """With the normalisation ``norm`` of the state."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return super().forward(0.3 * self.norm(z), x)


def normed(norm: Callable[[int], nn.Module], **settings: Any) -> DEQ:
    torch.manual_seed(0)
    return DEQ(Normed(norm).double(), (5,), **TIGHT, **settings)


def around(layer: DEQ, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def in_a_row(layer: DEQ, x: Tensor) -> Tensor:
    return checkpoint(layer >> DEQ(Half(5), (5,), **TIGHT), x, use_reentrant=True)


@pytest.mark.parametrize("use", [around, in_a_row], ids=lambda use: use.__name__)
def test_what_a_reentrant_checkpoint_would_compute_with_other_statistics_is_refused(
    use: Callable[[DEQ, Tensor], Tensor],
) -> None:
    layer, x = normed(nn.BatchNorm1d), torch.randn(4, 3, dtype=D, requires_grad=True)
    z = use(layer, x)
    with pytest.raises(ik.CapabilityError, match=r"(Normed|Wrapped) has BatchNorm.*use_reentrant=True"):
        z.sum().backward()


class Instance(nn.InstanceNorm1d):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z.unsqueeze(1)).squeeze(1)


HARMLESS: dict[str, Callable[[], DEQ]] = {  # the second call solves the equation of the first
    "eval": lambda: normed(nn.BatchNorm1d).eval(),
    "no momentum": lambda: normed(lambda n: nn.BatchNorm1d(n, momentum=0.0)),
    "no statistics": lambda: normed(lambda n: nn.BatchNorm1d(n, track_running_stats=False), batch_dims=0),
    "of the batch": lambda: normed(nn.BatchNorm1d, batch_dims=0),
    "of each sample": lambda: normed(lambda n: Instance(1, track_running_stats=True)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_reentrant_checkpoint_around_statistics_that_do_not_matter(name: str) -> None:
    x = torch.randn(4, 3, dtype=D)
    found, wanted = [], []
    for run, into in ((around, found), (lambda layer, x: layer(x), wanted)):
        layer = HARMLESS[name]()
        run(layer, x.requires_grad_()).square().sum().backward()
        into += [x.grad, *(p.grad for p in layer.parameters())]
        x = x.detach().clone()
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def before(run: Callable[..., Tensor], layer: DEQ, x: Tensor) -> Tensor:
    """The checkpoint's own backward runs on into the solve before it, whose function is evaluated there."""
    z = solved(layer, x)
    return run(lambda x: x.sum() * z, x)


def inside(run: Callable[..., Tensor], layer: DEQ, x: Tensor) -> Tensor:
    """A solve leaves the statistics where they are."""
    return run(lambda x: solved(layer, x), x)


def solved(layer: DEQ, x: Tensor) -> Tensor:
    return ik.fixed_point(lambda z, x: 0.1 * layer(z[:, :3] + x), torch.zeros(4, 5, dtype=D), (x,), rtol=1e-10).value


@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
@pytest.mark.parametrize("use", [before, inside], ids=lambda use: use.__name__)
def test_a_solve_over_a_normalised_layer_and_a_reentrant_checkpoint(use: Callable[..., Tensor]) -> None:
    def of(run: Callable[..., Tensor]) -> list[Any]:
        layer, x = normed(nn.BatchNorm1d), torch.ones(4, 3, dtype=D).requires_grad_()
        use(run, layer, x).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    wanted = of(lambda f, x: f(x))
    assert float(wanted[1].norm()) > 1e-3
    torch.testing.assert_close(of(lambda f, x: checkpoint(f, x, use_reentrant=True)), wanted, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------------------------------- what autograd does not see of a cell
class Partly(Half):
    """A cell with a part that is detached, or made of a number."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.tensor(0.3, dtype=D))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        scale = self.scale.item() if self.part == "number" else self.scale
        z_seen = z.detach() if self.part == "detached" else z
        return super().forward(z, x) + scale * torch.sin(z_seen)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("part", "words"), [("detached", "z.detach()"), ("number", "makes numbers"), ("none", "")])
def test_a_part_of_a_cell_that_autograd_does_not_see_is_said(part: str, words: str, training: bool) -> None:
    class Cell(Partly):
        """Of its own, since each cell is asked about once."""

    torch.manual_seed(0)
    for _ in range(20):  # other cells, of which the first sixteen would do for functions of one code
        DEQ(Half(), (5,), **TIGHT)(torch.randn(4, 3, dtype=D)).sum().backward()
    layer, x = DEQ(Cell(part), (5,), **TIGHT).train(training), torch.randn(4, 3, dtype=D)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x).sum().backward()
    said = [str(w.message) for w in told if issubclass(w.category, ik.ImpureFunctionWarning)]
    assert len(said) == bool(words) and all(words in text for text in said)


class WithNames(nn.Module):
    """Inputs with names: of these ``scale`` may be given by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(4, 4)

    def forward(
        self, z: Tensor, x: Tensor, mask: Tensor | None = None, shift: float = 0.0, *, scale: float = 1.0
    ) -> Tensor:
        moved = torch.tanh(0.5 * self.W(z) + x + shift)
        return moved if mask is None else moved.masked_fill(mask, 0)


def test_inputs_may_be_given_by_the_names_of_the_cell() -> None:
    torch.manual_seed(0)
    layer, x, mask = DEQ(WithNames(), (4,)), torch.randn(6, 4), torch.rand(6, 4) < 0.3
    for named, positions in (
        ({"mask": mask}, (x, mask)),
        ({"mask": None}, (x,)),
        ({"shift": 0.5}, (x, None, 0.5)),
        ({"shift": 0.5, "mask": mask}, (x, mask, 0.5)),
    ):
        found, wanted = [], []
        for results, call in ((found, lambda n=named: layer(x, **n)), (wanted, lambda p=positions: layer(*p))):
            layer.zero_grad()
            z = call()
            z.square().sum().backward()
            results += [z.detach(), layer.cell.W.weight.grad]
        assert all(map(torch.equal, found, wanted)), named
    torch.testing.assert_close(layer(x=x, mask=mask), layer(x, mask))


class Injecting(Cell):
    """A cell of the library's kind, whose inputs have their names in ``inject``."""

    def inject(self, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor]:
        return (x if shift is None else x + shift,)

    def update(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.cos(0.5 * z) + injected


class Updating(Cell):
    """One that injects nothing, and so has them in ``update``."""

    def update(self, z: Tensor, x: Tensor, shift: Tensor) -> Tensor:
        return torch.cos(0.5 * z) + x + shift


@pytest.mark.parametrize("cell", [Injecting, Updating])
def test_inputs_of_a_cell_have_the_names_of_its_parts(cell: type[Cell]) -> None:
    layer, x, shift = DEQ(cell(), (4,)), torch.rand(6, 4), torch.rand(6, 4)
    for named in (layer(x, shift=shift), layer(shift=shift, x=x)):
        assert torch.equal(named, layer(x, shift))
    with pytest.raises(TypeError, match=r"of its cell after z, \w+\(.*'shifts'"):
        layer(x, shift, shifts=shift)


@pytest.mark.parametrize(
    ("cell", "named", "words"),
    [
        (WithNames(), {"masks": None}, r"unexpected keyword argument 'masks'. Give them by position"),
        (WithNames(), {"scale": 2.0}, "scale cannot be given by position"),
        (WithNames(), {"x": 0}, "multiple values for argument 'x'"),
        (nn.GRUCell(4, 4), {"mask": None}, r"layer\(x, ..., mask=\): inputs of the layer are those of its cell"),
        (lambda z, *inputs: z, {"mask": None}, "unexpected keyword argument 'mask'"),
        (lambda z, x, **more: z, {"mask": None}, "mask cannot be given by position"),
        (lambda z, x, index: z, {"index": torch.arange(3)}, r"index= is the layer's own.*layer\(x, index\)"),
    ],
    ids=["unknown", "by name only", "twice", "a module of torch", "a function", "any name", "of the layer"],
)
def test_names_that_the_cell_has_not_are_refused_with_what_to_do(cell: Any, named: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        DEQ(cell, (4,))(torch.randn(3, 4), **named)


@pytest.mark.parametrize("first", [False, True], ids=["batch second", "batch first"])
def test_a_layer_that_takes_the_batch_as_its_second_dimension_is_named(first: bool) -> None:
    """A state that was thought of as the layer's: time, batch, width."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 4, batch_first=first)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * self.layer(z + x)[0]

    with pytest.raises(RuntimeError, match="they do not fit it") as caught:
        DEQ(Recurrent(), (5, 4))(torch.randn(5, 3, 4))
    assert ("GRU without batch_first=True takes as the second dimension" in str(caught.value)) == (not first)


def test_operations_of_a_first_forward_are_counted() -> None:
    """Samples alike, as somebody counts them: the layer then asks by a derivative whether it uses its inputs."""
    counts = []
    for x in (torch.ones(4, 3, dtype=D), torch.ones(4, 3, dtype=D, requires_grad=True)):
        layer = DEQ(Half(), state=(5,), solver="picard", max_steps=3, on_failure="ignore")
        with FlopCounterMode(display=False) as counter:
            layer(x)
        counts.append(counter.get_total_flops())
    assert counts[0] >= 3 * 2 * 4 * 5 * 5 and counts[1] >= counts[0]


# --------------------------------------------------------------------------------------------- parts in another precision
def _in_half(z: Tensor, x: Tensor, W: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(z @ W + x).float()


COARSE: dict[str, tuple[Callable[..., Tensor], torch.dtype, str]] = {
    "autocast within": (_in_half, torch.float32, "half precision .*put autocast around the solve"),
    "single within": (
        lambda z, x, W: torch.tanh(z.float() @ W.float() + x.float()).to(z),
        D,
        "single precision .*convert the rest",
    ),
    "no fixed point": (lambda z, x, W: z + 1 + (z - x).square(), torch.float32, "did not converge"),
}


@pytest.mark.parametrize("name", COARSE)
def test_a_part_in_a_lower_precision_is_told_where_a_solve_ends_short_of_its_tolerance(name: str) -> None:
    f, dtype, said = COARSE[name]
    torch.manual_seed(0)
    W, x = 0.6 * nn.init.orthogonal_(torch.empty(6, 6)).to(dtype), torch.randn(48, 6, dtype=dtype)
    with pytest.raises(ik.ConvergenceError, match=said) as failed:
        DEQ(lambda z, x: f(z, x, W), (6,), solver="anderson", max_steps=80).eval()(x)
    assert ("half precision" in str(failed.value)) == (name == "autocast within")
