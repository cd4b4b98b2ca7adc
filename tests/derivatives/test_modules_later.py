"""What a module holds, and its mode, may be something else when a derivative is formed than it was in the solve.

``torch.func.functional_call`` has ended by then, and the module holds its own tensors again; ``train()``, ``eval()`` or
``requires_grad_()`` may have been called.  A lazy module has no parameters before the solve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize

import implicitkit as ik

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-13, "atol": 0.0}


class Layer(nn.Module):
    """``z = tanh(s W z + U x + b)``, with a buffer ``s``."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(3, 3, bias=False, dtype=D), nn.Linear(2, 3, dtype=D)
        self.register_buffer("s", torch.tensor(0.4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        z0 = torch.zeros(len(x), 3, dtype=D, device=x.device)
        return ik.fixed_point(lambda z: torch.tanh(self.s * self.W(z) + self.U(x)), z0, **TIGHT).value


def explicit(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same by arguments alone."""
    f = lambda z, W, U, b, s: torch.tanh(s * z @ W.mT + x @ U.mT + b)  # noqa: E731
    args = (p["W.weight"], p["U.weight"], p["U.bias"], p["s"])
    return ik.fixed_point(f, torch.zeros(len(x), 3, dtype=D, device=x.device), args, **TIGHT).value


def by_autograd(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gradient(t: Tensor) -> Tensor:
        t = t.detach().requires_grad_()
        value = f(t)
        (first,) = torch.autograd.grad(value, t, create_graph=True)
        return torch.autograd.grad(first.square().sum(), t)[0]

    return gradient


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": grad,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "grad of grad": lambda f: grad(lambda t: grad(f)(t).square().sum()),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "vmap of grad": lambda f: lambda t: vmap(grad(f))(torch.stack([t, 1.1 * t])),
    "autograd, twice": by_autograd,
}
NAMES = ("W.weight", "U.weight", "U.bias", "s")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tracked", [True, False], ids=["its own are tracked", "its own are not"])
@pytest.mark.parametrize("scale", [1.0, 0.7], ids=["same values", "other values"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_one_tensor_of_functional_call(transform: str, name: str, scale: float, tracked: bool) -> None:
    torch.manual_seed(0)
    layer, x = Layer().requires_grad_(tracked), torch.randn(4, 2, dtype=D)
    given = {k: scale * t.detach() for k, t in layer.state_dict().items()}

    def loss(solved: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: (solved({**given, name: t}) ** 3).sum()

    found = TRANSFORMS[transform](loss(lambda p: functional_call(layer, p, (x,))))(given[name])
    exact = TRANSFORMS[transform](loss(lambda p: explicit(p, x)))(given[name])
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-10)
    assert float(found.abs().max()) > 1e-3
    assert all(p.requires_grad == tracked for p in layer.parameters())  # and holds its own again


def test_the_input_alone_is_differentiated() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 2, dtype=D)
    given = {k: 0.7 * t.detach() for k, t in layer.state_dict().items()}
    found = jacrev(lambda x: functional_call(layer, given, (x,)))(x)
    torch.testing.assert_close(found, jacrev(lambda x: explicit(given, x))(x), rtol=1e-8, atol=1e-10)


def test_frozen_parameters_that_are_bound_anew_before_the_derivative() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 2, dtype=D)
    layer.U.requires_grad_(False)
    was = {k: t.detach().clone() for k, t in layer.state_dict().items()}
    value = layer(x).square().sum()
    layer.U.weight = nn.Parameter(2 * layer.U.weight, requires_grad=False)
    (found,) = torch.autograd.grad(value, layer.W.weight)
    exact = grad(lambda W: explicit({**was, "W.weight": W}, x).square().sum())(was["W.weight"])
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("twice", [False, True], ids=["first order", "second order"])
@pytest.mark.parametrize("now", [True, False], ids=["trained since", "frozen still"])
def test_what_was_frozen_in_the_solve_is_a_constant_of_its_derivative(now: bool, twice: bool) -> None:
    """As a discriminator is, while the generator is trained through it."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 2, dtype=D, requires_grad=True)
    given = {k: t.detach().clone() for k, t in layer.state_dict().items()}

    def gradient(value: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(value, x, create_graph=twice)
        return torch.autograd.grad(first.square().sum(), x)[0] if twice else first

    layer.requires_grad_(False)
    value = layer(x).square().sum()
    layer.requires_grad_(now)
    torch.testing.assert_close(gradient(value), gradient(explicit(given, x).square().sum()), rtol=1e-8, atol=1e-10)
    assert all(p.grad is None and p.requires_grad == now for p in layer.parameters())


def test_a_captured_tensor_that_is_tracked_since_is_named() -> None:
    w, a = torch.tensor([0.3, 0.2], dtype=D), torch.ones(2, dtype=D, requires_grad=True)
    value = ik.fixed_point(lambda z, a: torch.cos(w * z) + a, torch.zeros(2, dtype=D), (a,)).value
    w.requires_grad_()
    with pytest.raises(ik.ChangedFunctionError, match="the tensor 'w' requires grad now"):
        value.sum().backward()


class Mapped(nn.Module):
    """``tanh(0.3 e(W z) + x)`` solved, with a layer ``e`` that has modes."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.W, self.extra = nn.Linear(3, 3, dtype=D), extra

    def forward(self, x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(0.3 * self.extra(self.W(z)) + x)  # noqa: E731
        return ik.fixed_point(f, torch.zeros_like(x), batch_dims=1, **TIGHT).value


def shifted() -> nn.Module:
    """Batch normalisation whose running statistics are not those of a new one."""
    norm = nn.BatchNorm1d(3, dtype=D)
    norm.running_mean += 0.3
    norm.running_var *= 2
    return norm


MODES: dict[str, Callable[[], nn.Module]] = {"dropout": lambda: nn.Dropout(0.5), "batch normalisation": shifted}


@pytest.mark.parametrize("twice", [False, True], ids=["first order", "second order"])
@pytest.mark.parametrize("name", MODES)
def test_the_mode_is_that_of_the_solve(name: str, twice: bool) -> None:
    torch.manual_seed(0)
    module, x = Mapped(MODES[name]()).eval(), torch.randn(4, 3, dtype=D, requires_grad=True)

    def gradient(between: Callable[[], Any]) -> Tensor:
        value = module(x).square().sum()
        between()
        (first,) = torch.autograd.grad(value, x, create_graph=twice)
        between()
        return torch.autograd.grad(first.square().sum(), x)[0] if twice else first

    exact = gradient(module.eval)
    found = gradient(module.train)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    assert module.training and module.extra.training  # as it was told


def by_hand(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
    """:class:`Mapped` with :func:`shifted`, unrolled, in torch's elementary operations."""
    z = torch.zeros_like(x)
    for _ in range(60):
        y = z @ p["W.weight"].mT + p["W.bias"]
        normed = (y - b["extra.running_mean"]) / (b["extra.running_var"] + 1e-5).sqrt()
        z = torch.tanh(0.3 * (normed * p["extra.weight"] + p["extra.bias"]) + x)
    return z


ENSEMBLES: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "grad": lambda f: grad(lambda p, b, x: f(p, b, x).square().sum()),
    "jacfwd": lambda f: jacfwd(f),
    "hessian in the input": lambda f: hessian(lambda p, b, x: f(p, b, x).square().sum(), argnums=2),
    "reverse over reverse": lambda f: grad(lambda p, b, x: grad(lambda x: f(p, b, x).square().sum())(x).square().sum()),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_an_ensemble_with_batched_statistics(name: str) -> None:
    """Running statistics have no derivative, and torch refuses a tracked one: they are batched and nothing else."""
    torch.manual_seed(0)
    modules = [Mapped(shifted()).eval() for _ in range(3)]
    for module in modules:
        module.extra.running_mean += torch.randn(3, dtype=D)
    parameters, buffers = torch.func.stack_module_state(modules)
    parameters, x = {k: t.detach() for k, t in parameters.items()}, torch.randn(2, 3, dtype=D)
    solved = lambda p, b, x: functional_call(modules[0], (p, b), (x,))  # noqa: E731
    found = vmap(ENSEMBLES[name](solved), in_dims=(0, 0, None))(parameters, buffers, x)
    exact = vmap(ENSEMBLES[name](by_hand), in_dims=(0, 0, None))(parameters, buffers, x)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-10)


LAZY: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.LazyLinear(3, dtype=D),
    "with buffers": lambda: nn.Sequential(nn.LazyLinear(3, dtype=D), nn.LazyBatchNorm1d(dtype=D)).eval(),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_is_initialised_by_the_solve(name: str) -> None:
    torch.manual_seed(0)
    module, x = LAZY[name](), torch.randn(4, 3, dtype=D)
    f = lambda z: torch.tanh(0.2 * module(z) + x)  # noqa: E731
    with pytest.raises(ValueError, match="uninitialized"):  # its parameters would end with the transform
        grad(lambda x: ik.fixed_point(f, torch.zeros_like(x), **TIGHT).value.sum())(x)
    value = ik.fixed_point(f, torch.zeros_like(x), batch_dims=1, **TIGHT).value
    gradients = torch.autograd.grad(value.square().sum(), list(module.parameters()))
    unrolled = torch.zeros_like(x)
    for _ in range(100):
        unrolled = f(unrolled)
    exact = torch.autograd.grad(unrolled.square().sum(), list(module.parameters()))
    torch.testing.assert_close(gradients, exact, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------------------------------------------------------------
# Parametrised modules inside ``parametrize.cached()``: a solve neither reads what is kept there nor adds to it.
NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}
ORDERS = ("the solve alone", "the module before", "the module after", "two solves")


def loss(module: nn.Module, x: Tensor, order: str) -> Tensor:
    def solved(x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(0.4 * module(z) + x)  # noqa: E731
        return ik.fixed_point(f, torch.zeros_like(x), batch_dims=1, rtol=1e-12, atol=0.0).value

    before = module(x).sum() if order == "the module before" else 0.0
    z = solved(x)
    after = {"the module after": module, "two solves": solved}.get(order, lambda z: z)(z)
    return after.square().sum() + before


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_without_the_cache(norm: str, order: str, inside: bool) -> None:
    torch.manual_seed(0)
    module, x = NORMS[norm](nn.Linear(3, 3).to(D)), torch.randn(4, 3, dtype=D)
    parameters = list(module.parameters())
    exact = torch.autograd.grad(loss(module, x, order), parameters)
    with parametrize.cached():
        value = loss(module, x, order)
        found = torch.autograd.grad(value, parameters, retain_graph=True) if inside else ()
    found = found or torch.autograd.grad(value, parameters)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_what_was_kept_before_the_solve_is_kept_after_it() -> None:
    torch.manual_seed(0)
    module, x = parametrizations.weight_norm(nn.Linear(3, 3).to(D)), torch.randn(4, 3, dtype=D)
    with parametrize.cached():
        kept = module.weight
        loss(module, x, "the solve alone")
        assert module.weight is kept
