"""What surrounds the evaluations of a DEQ: what is asked once is not asked in every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import parametrize
from torch.utils._config_module import ConfigModule
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit import system
from implicitkit.foundation import graph, graph_size, tracers, trees
from implicitkit.lifting import refill
from implicitkit.linear import equilibrated, independence
from implicitkit.linear.iterative import cycles
from implicitkit.solver import costs, polyalgorithm
from implicitkit.solver.verdict import judge
from implicitkit_deq import DEQ, cells
from implicitkit_deq.starting.extrapolation import Trend
from implicitkit_deq.starting.warm_start import usable


def test_whether_samples_are_independent_is_asked_once_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    looks = independence._looks
    monkeypatch.setattr(independence, "_looks", lambda batch: asked.append(batch) or looks(batch))
    layer, x = DEQ(cells.MLP(4, 80)), torch.randn(5, 4)
    kept = []  # so that no address is used again
    for _ in range(3):
        z = layer(x)
        kept.append(z)
        z.sum().backward()
    assert asked == [5]
    for wrong in (layer.eval(), DEQ(layer.cell)):  # in another mode; another layer of the same cell is the same map
        wrong(x).sum().backward()
    assert asked == [5, 5]


@pytest.mark.parametrize("name", ["cells.MLP", "module", "dropout", "function", "stack", "buffer"])
def test_what_an_evaluation_costs_is_known_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer does around its cell, as looking at the states of generators, is no work of the cell's."""
    said: list[float | None] = []
    cost_of = costs.cost_of
    monkeypatch.setattr(costs, "cost_of", lambda f: said.append(cost_of(f)) or said[-1])
    inner = nn.Sequential(nn.Linear(80, 80), nn.Dropout(0.1), nn.Tanh())
    layers = {
        "cells.MLP": lambda: DEQ(cells.MLP(80, 80)),
        "module": lambda: DEQ(Tanh(), (80,)),
        "dropout": lambda: DEQ(lambda z, x: 0.1 * inner(z) + x, (80,)),
        "function": lambda: DEQ(lambda z, x: 0.1 * z.tanh() + x, (80,)),
        "stack": lambda: DEQ(cells.MLP(80, 80)) >> DEQ(cells.MLP(80, 80)),
        "buffer": lambda: DEQ(Shifted(), (80,)),
    }
    layer, x = layers[name](), torch.randn(3, 80, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    assert len(said) >= 2 and None not in said, said


@pytest.mark.parametrize(
    "where, name",
    [
        (ik.Implicit, "__post_init__"),  # options of the rule and of the solver are checked once
        (polyalgorithm.Polyalgorithm, "__post_init__"),
        (trees, "_at"),  # a place in a tree is told where it is wanted
        (parametrize, "is_parametrized"),  # which raises an error inside for each module
        (functools, "update_wrapper"),  # a cache made for one question
        (torch.func, "vmap"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2],
)
def test_a_call_does_once_what_is_the_same_in_every_call(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = lambda z, x: torch.cos(0.5 * z.flip(0) + x)  # noqa: E731
    layer, x = DEQ(cells.MLP(40, 40)), torch.randn(3, 40)

    def calls() -> None:
        layer(x).sum().backward()
        for solve in (ik.fixed_point, ik.root):
            solve(f, torch.zeros(3), (torch.ones(3, requires_grad=True),)).value.sum().backward()

    calls()
    asked: list[int] = []
    own = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **named: asked.append(1) or own(*args, **named))
    calls()
    assert not asked


class Tanh(nn.Module):
    """tanh(W z + x)."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(80, 80)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.W(z) + x)


class Shifted(Tanh):
    """Less a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(80))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return super().forward(z, x) - self.shift


class Coupled(nn.Module):
    """Couples its samples in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(3, 3, bias=False)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z = 0.3 * torch.tanh(self.W(z)) + x
        return z + 0.1 * z.mean(0) if self.training else z


def test_a_cell_that_couples_its_samples_in_one_mode_is_refused_there() -> None:
    torch.manual_seed(0)
    x = torch.tensor([1.0, -1.0]).repeat(3).unsqueeze(1) * torch.randn(3)  # all alike: none is dropped before others
    layer = DEQ(Coupled(), (3,)).eval()
    layer(x).sum().backward()
    with pytest.raises(ValueError, match="not independent"):
        layer.train()(x).sum().backward()


@pytest.mark.parametrize(
    "args",
    [
        (((), torch.ones(1)),),
        (torch.ones(1), (torch.zeros(2), (torch.ones(3),))),
        ((torch.ones(1), 2.5), {"a": torch.zeros(2)}),
        ((), None, [torch.ones(1)]),
    ],
    ids=str,
)
def test_arguments_are_filled_as_pytrees_are(args: Any) -> None:
    leaves, spec = trees.tree_flatten(args)
    new = [torch.full_like(t, i) for i, t in enumerate(leaves) if isinstance(t, Tensor)]
    want = iter(new)
    full = trees.tree_unflatten([next(want) if isinstance(t, Tensor) else t for t in leaves], spec)
    got = refill.refilled(args)(new)
    assert str(got) == str(full) and all(
        a is b for a, b in zip(trees.tree_flatten(got)[0], trees.tree_flatten(full)[0], strict=True)
    )


class Passes(TorchDispatchMode):
    """Counts operations whose result is as large as a whole state, views left out."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.count += out.numel() == self.numbers
        return out


def _trend(state: Tensor) -> Callable[[], Any]:
    trend = Trend(careful=True)
    for k in range(6):
        trend.keep((k + 0.1 * k * k) * state)
    return lambda: trend.keep(9.6 * state)


def _system(state: Tensor, asked: int) -> Callable[[], Any]:
    """Of which the first ``asked`` samples ask for something."""
    b = torch.where(torch.arange(len(state)).unsqueeze(1) < asked, state, 0)
    A = ik.linear.Operator(
        lambda v: -v,
        lambda v: -v,
        lambda: -torch.eye(b.shape[1]).expand(len(b), -1, -1),
        batch=len(b),
        size=b.shape[1],
        like=b,
    )
    cycle = lambda task: cycles.Correction(-task.r, torch.ones(len(task.r), dtype=torch.int64))  # noqa: E731
    return lambda: cycles.restarted(cycle, A, b, rtol=1e-3, atol=0.0, max_steps=None, stalled="")


WHOLE: dict[str, tuple[Callable[[Tensor], Callable[[], Any]], int]] = {
    "a finite start": (lambda z: lambda: usable(z, z), 0),
    "what changes lead to": (_trend, 15),
    "a system": (lambda z: _system(z, len(z)), 3),
    "a system, of fewer samples": (lambda z: _system(z, len(z) - 1), 5),
}


@pytest.mark.parametrize("what", WHOLE)
def test_whole_states_are_gone_through_as_seldom_as_can_be(what: str) -> None:
    """By operations whose result is as large as they are: what is chosen by sample takes four times as long as a sum."""
    state = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    make, most = WHOLE[what]
    run = make(state)
    with Passes(state.numel()) as passes:
        run()
    assert passes.count <= most, passes.count


class Operations(TorchDispatchMode):
    """Counts operations, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _spectrum(eigenvalues: list[float], n: int = 80) -> Tensor:
    """A matrix with these eigenvalues, the others within 0.3."""
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g)).Q
    inner = torch.randn(n, n, generator=g)
    inner *= 0.3 / torch.linalg.eigvals(inner).abs().max()
    k = len(eigenvalues)
    inner[:k], inner[:, :k] = 0, 0
    inner[:k, :k] = torch.diag(torch.tensor(eigenvalues))
    return Q @ inner @ Q.mT


def _a_call(eigenvalues: list[float]) -> tuple[Callable[[], Any], Callable[[], float]]:
    W, x = _spectrum(eigenvalues), 0.05 * torch.randn(16, 80, generator=torch.Generator().manual_seed(1))
    cell = nn.Linear(80, 80, bias=False)
    with torch.no_grad():
        cell.weight.copy_(W)
    layer = DEQ(lambda z, x: torch.tanh(cell(z) + x), (80,), rtol=1e-4, rule=ik.Implicit(rtol=1e-4), init="zeros")

    def units() -> float:
        assert layer.solution is not None and layer.solution.backward is not None
        return layer.solution.evaluations + int(layer.solution.backward.steps.max())

    return lambda: layer(x).sum().backward(), units


def _gmres(steps: int) -> tuple[Callable[[], Any], Callable[[], float]]:
    matrix, b = torch.eye(80) + 3 * _spectrum([]), torch.randn(16, 80, generator=torch.Generator().manual_seed(2))
    A = ik.linear.Operator(
        lambda v: v @ matrix.mT, lambda v: v @ matrix, lambda: matrix.expand(16, -1, -1), batch=16, size=80, like=b
    )
    limits = {"rtol": 1e-30, "atol": 0.0, "max_steps": steps}
    return lambda: ik.linear.GMRES().solve(A, b, **limits), lambda: steps


UNITS = torch.arange(1.0, 81).repeat(16, 1)
SMALL: dict[str, tuple[Callable[[], tuple[Callable[[], Any], Callable[[], float]]], float]] = {
    "eigenvalues apart": (lambda: _a_call([0.97, 0.96, 0.95]), 39.0),
    "eigenvalues beyond one": (lambda: _a_call([-1.5, -1.4]), 40.0),
    "gmres": (lambda: _gmres(20), 33.0),
    "like units": (lambda: (lambda: equilibrated._spans(UNITS), lambda: 1), 6.0),
}


@pytest.mark.parametrize("what", SMALL)
def test_small_operations_are_few(what: str) -> None:
    """So many for each evaluation and product, those of the call divided among them."""
    make, most = SMALL[what]
    run, units = make()
    run(), run()
    with Operations() as operations:
        run()
    assert operations.count / units() <= most, (operations.count, units())


@pytest.mark.parametrize(
    "where, name, most",
    [
        (graph_size, "nodes_behind", 1),  # what products cost is seen in one walk, and what of dense rows
        (system, "identity_of", 1),  # what tells the function from others
        (ConfigModule, "patch", 0),  # a class and a variable of a context, at every entry
        (tracers, "_graphs_kept", 2),  # what the compiler is told, once in the call and once in its backward
        (proxy_tensor, "get_proxy_mode", 0),  # nothing is recorded where no mode is at work
        (judge, "falls_on", 0),  # of claims that are small beside the state, not by ``atol`` alone
        (
            graph,
            "_engine_run_backward",
            1,
        ),  # torch's caller of its engine, which asks a logger: for a second derivative
        (graph, "nodes_behind", 2),  # at the lifting, and of products side by side; the rest is seen in the walk above
    ],
    ids=["nodes_behind", "identity_of", "patch", "graphs_kept", "proxy_mode", "falls_on", "logger", "leaves"],
)
def test_a_derivative_asks_once(where: Any, name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the compiler is loaded, as an optimiser loads it."""
    import torch._dynamo

    layer, x, asked, own = DEQ(cells.MLP(40, 80)), torch.randn(3, 40), list[int](), getattr(where, name)
    for _ in range(2):
        layer(x).sum().backward()
    monkeypatch.setattr(where, name, lambda *args, **named: asked.append(1) or own(*args, **named))
    layer(x).sum().backward()
    assert len(asked) <= most, len(asked)


def test_a_setting_of_compiled_functions_may_be_changed_again_from_within() -> None:
    from torch._functorch import config

    before, overridden = config.donated_buffer, config._config["donated_buffer"].user_override.get()
    ends = [tracers._graphs_kept()]
    ends.append(tracers._graphs_kept())
    for end in reversed(ends):
        assert not config.donated_buffer
        end()
    assert config.donated_buffer is before
    assert config._config["donated_buffer"].user_override.get() is overridden  # as if nobody had set it
    with config.patch(donated_buffer=True):
        end = tracers._graphs_kept()
        assert not config.donated_buffer
        end()
        assert config.donated_buffer
