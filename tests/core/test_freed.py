"""What a solve made is freed when the last name for it goes, not when the garbage is next collected: arguments, factors and
states can be most of a device's memory, and Python does not count them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, vmap

import implicitkit as ik
from implicitkit_deq import DEQ, cells

D = torch.float64
torch.manual_seed(0)
X, W, LAYER = torch.randn(4, 3, dtype=D), 0.2 * torch.randn(3, 3, dtype=D), nn.Linear(3, 3, dtype=D)
CELL = lambda z, x: torch.tanh(0.4 * LAYER(z) + x)  # noqa: E731
FIRST, SECOND = (DEQ(cells.MLP(3, 5, dtype=D), rtol=1e-6), DEQ(cells.MLP(5, 4, dtype=D), rtol=1e-6))
BOTH = FIRST >> SECOND


def argument(*shape: int) -> Tensor:
    return torch.linspace(0.1, 1.0, torch.Size(shape).numel(), dtype=D).view(shape).requires_grad_()


def fixed_point(x: Tensor) -> Tensor:
    return ik.fixed_point(CELL, torch.zeros_like(x), (x,), batch_dims=1, rtol=1e-8).value


def chain(z: Tensor, k: Tensor) -> Tensor:
    wide = nn.functional.pad(z, (1, 1))
    return 4 * z - wide[2:] - wide[:-2] - k * torch.exp(-z)


def sparse_root(k: Tensor) -> Tensor:
    return ik.root(chain, torch.zeros(400, dtype=D), (k,)).value


def quartic(z: Tensor, x: Tensor) -> Tensor:
    return (z - x).pow(4).sum() + z @ z


def fit() -> Tensor:
    residuals = lambda p, m: torch.cat([p[1:] - p[:-1] - m, p[:1], 0.01 * p**2])  # noqa: E731
    return ik.least_squares(residuals, torch.zeros(300, dtype=D), (argument(299),)).value


def failing() -> None:
    with pytest.raises(ik.ConvergenceError):
        ik.fixed_point(lambda z: z + 1, torch.zeros(2, dtype=D), max_steps=20)


def program() -> Tensor:
    eye = torch.eye(3, dtype=D)
    return ik.solve(ik.QuadraticProgram(eye, argument(3), G=eye, h=torch.ones(3, dtype=D))).value


def by_components() -> None:
    with BOTH.using(solver=ik.Blocks("anderson")):
        BOTH(argument(4, 3)).sum().backward()


def minimum(**options: Any) -> Tensor:
    return ik.argmin(quartic, torch.full((3,), 0.3, dtype=D), (argument(3),), **options).value


CASES: dict[str, Callable[[], Any]] = {
    "fixed point": lambda: fixed_point(argument(4, 3)),
    "fixed point, backward": lambda: fixed_point(argument(4, 3)).sum().backward(),
    "fixed point, twice": lambda: grad(lambda x: grad(lambda x: fixed_point(x).sum())(x).sum())(X),
    "jacrev": lambda: jacrev(fixed_point)(X),
    "hessian": lambda: hessian(lambda x: fixed_point(x).sum())(X),
    "vmap of grad": lambda: vmap(grad(lambda x: fixed_point(x[None]).sum()))(X),
    "unroll": lambda: (
        ik.fixed_point(CELL, torch.zeros_like(X), (argument(4, 3),), rule="unroll").value.sum().backward()
    ),
    "root": lambda: ik.root(lambda z, x: z**3 + z - x, torch.zeros_like(X), (argument(4, 3),)).value.sum().backward(),
    "sparse root": lambda: sparse_root(argument(400)).sum().backward(),
    "sparse root, vmap": lambda: vmap(sparse_root)(argument(2, 400)),
    "fit": lambda: fit().sum().backward(),
    "minimum": lambda: minimum().sum().backward(),
    "minimum within bounds": lambda: minimum(bounds=(0.0, 0.5)).sum().backward(),
    "minimum under a constraint": lambda: (
        minimum(constraints=[ik.Inequality(lambda z, x: z.sum() - 1)]).sum().backward()
    ),
    "quadratic program": lambda: program().sum().backward(),
    "certificate": lambda: ik.certify(ik.fixed_point(CELL, torch.zeros_like(X), (X,), batch_dims=1)),
    "failure": failing,
    "DEQ": lambda: FIRST(argument(4, 3)).sum().backward(),
    "DEQ of two": lambda: BOTH(argument(4, 3)).sum().backward(),
    "two by components": by_components,
}


def tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("name", CASES)
def test_no_tensor_waits_for_the_collector(name: str) -> None:
    run = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.freeze()  # what other tests left is neither counted nor searched
        run(), run()  # whatever is kept for the next call is kept now
        gc.collect()
        gc.disable()
        try:
            before = tensors()
            run()
            left = tensors() - before
        finally:
            gc.enable()
            gc.unfreeze()
    assert left <= 0
