"""Samples that are coupled, although ``batch_dims`` says that they are not, are refused where a derivative is formed."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

torch.manual_seed(0)
BATCH, N = 6, 3
LINEAR = torch.nn.Linear(N, N).double()
NORM = torch.nn.BatchNorm1d(N).double()
ATTENTION = torch.nn.MultiheadAttention(N, 1, batch_first=True).double()
CONVOLUTION = torch.nn.Conv1d(1, 1, 3, padding=1).double()

COUPLED: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "mean": (ik.root, lambda z, x: z + 0.5 * z.mean(0) - x),
    "mean taken off": (ik.fixed_point, lambda z, x: 0.3 * (z - z.mean(0)) + x),
    "norm of the batch": (ik.fixed_point, lambda z, x: 0.3 * z / (1 + z.norm()) + x),
    "next sample": (ik.fixed_point, lambda z, x: 0.3 * z.roll(1, 0) + x),
    "batch normalisation": (ik.fixed_point, lambda z, x: 0.3 * torch.tanh(NORM(LINEAR(z))) + x),
    "softmax over the batch": (ik.root, lambda z, x: z + 0.1 * z.softmax(0) - x),
    "objective": (ik.argmin, lambda z, x: (z - x).square().sum(1) + 3e-4 * z.mean(0).square().sum()),
    "residuals": (ik.least_squares, lambda z, x: z + 0.5 * z.mean(0) - x),
}
INDEPENDENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda z, x: 0.3 * torch.tanh(LINEAR(z)) + x,
    "layer normalisation": lambda z, x: 0.3 * torch.nn.functional.layer_norm(z, (N,)) + x,
    "attention in a sample": lambda z, x: (
        0.1 * ATTENTION(*[z.unsqueeze(1).expand(-1, 4, -1)] * 3)[0].mean(1) + 0.1 * z + x
    ),
    "convolution": lambda z, x: 0.2 * torch.tanh(CONVOLUTION(z.unsqueeze(1)).squeeze(1)) + x,
    "the input is coupled": lambda z, x: 0.3 * z + x - x.mean(0),
    "no dependence on z": lambda z, x: x + 0 * z,
    "transform": lambda z, x: 0.2 * torch.fft.rfft(z).real.sum(1, keepdim=True) * torch.ones(N) + x,
}


def data() -> Tensor:
    return torch.randn(BATCH, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def training() -> Any:
    NORM.train()
    yield
    NORM.train()


@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_are_refused(name: str) -> None:
    verb, f = COUPLED[name]
    solution = verb(f, torch.zeros_like(data()), (data().requires_grad_(),), batch_dims=1)
    with pytest.raises(ValueError, match=r"not independent.*unknowns of sample \d.*batch_dims=0"):
        solution.value.sum().backward()
    with pytest.raises(ValueError, match="not independent"):
        torch.func.jvp(
            lambda x: verb(f, torch.zeros_like(x), (x,), batch_dims=1).value, (data(),), (torch.ones_like(data()),)
        )


WITHIN: dict[str, dict[str, Any]] = {
    "objective": {},
    "bounds": {"bounds": (-1.0, 1.0)},
    "constraints": {"constraints": [ik.Inequality(lambda z, x: z - 1)]},
    "prox": {"prox": ik.prox.l1(0.1)},
    "set": {"project": ik.project.l2_ball(1.0)},
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
@pytest.mark.parametrize("name", [*COUPLED, *(f"objective in {name}" for name in WITHIN)])
@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad, torch.vmap])
def test_a_search_that_fails_among_coupled_samples_says_so(name: str, transform: Callable[..., Any]) -> None:
    verb, f = COUPLED[name.split(" in ")[0]]
    options = WITHIN.get(name.split(" in ")[-1], {})
    f = f if name in COUPLED else lambda z, x: (z - x).square().sum(1) + 10 * z.mean(0).square().sum()
    if transform is torch.vmap and name == "batch normalisation":
        f = lambda z, x: 0.3 * torch.nn.functional.batch_norm(z, None, None, training=True) + x  # noqa: E731
    x = data().expand(2, BATCH, N) if transform is torch.vmap else data()
    solve = lambda x: verb(f, x.cos(), (x,), batch_dims=1, max_steps=0, **options).value.sum()  # noqa: E731
    with pytest.raises(ik.ConvergenceError, match=r"The samples of the batch are not independent.*batch_dims=0"):
        transform(solve)(x)


def test_a_search_that_ends_far_away_is_looked_at_nearer_to_zero() -> None:
    f = lambda z, x: z**3 + z.mean(0) - x  # noqa: E731
    with pytest.raises(ik.ConvergenceError, match="The samples of the batch are not independent"):
        ik.root(f, torch.full_like(data(), 1e9), (data(),), batch_dims=1, max_steps=0)


def _coupled(given: int, taken: int) -> Callable[[Tensor, Tensor], Tensor]:
    """One sample depends on one other."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        into = (torch.arange(len(z)) == taken).to(z).unsqueeze(1)
        return 0.3 * z + 0.2 * into * z[given] + x

    return f


@pytest.mark.parametrize("batch", [2, 3, 4, 5, 6])
def test_no_sample_that_depends_on_one_other_is_missed(batch: int) -> None:
    for given in range(batch):
        for taken in (i for i in range(batch) if i != given):
            x = torch.rand(batch, 2, dtype=torch.float64).requires_grad_()
            solution = ik.fixed_point(_coupled(given, taken), torch.zeros_like(x), (x,), batch_dims=1)
            with pytest.raises(ValueError, match=f"not independent.*unknowns of sample {given} "):
                solution.value.sum().backward()


def test_of_many_samples_each_is_asked_for_in_two_products_of_four() -> None:
    from implicitkit.linear.independence import _looks

    looks = _looks(30)
    assert looks.shape == (4, 30) and bool((looks.sum(0) == 2).all())
    alike = (looks.T[:, None] == looks.T).all(2).sum() - 30  # pairs of samples that no product tells apart
    assert int(alike) < 30 * 29 / 6


def test_as_one_system_they_are_right() -> None:
    verb, f = COUPLED["mean"]
    found = torch.func.jacrev(lambda x: verb(f, torch.zeros_like(x), (x,)).value)(data())
    want = torch.linalg.inv(torch.eye(BATCH, dtype=torch.float64) + 0.5 / BATCH)
    torch.testing.assert_close(found[:, 0, :, 0], want)


def test_batch_normalisation_that_has_learnt_is_taken() -> None:
    verb, f = COUPLED["batch normalisation"]
    NORM.eval()
    x = data().requires_grad_()
    verb(f, torch.zeros_like(x), (x,), batch_dims=1).value.sum().backward()
    NORM.train()
    with pytest.warns(ik.ImpureFunctionWarning):
        solution = verb(f, torch.zeros_like(x), (x,), batch_dims=1)
    with pytest.raises(ValueError, match="not independent"):
        solution.value.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_samples_are_taken(name: str, dtype: torch.dtype) -> None:
    f = INDEPENDENT[name]
    if dtype.is_complex and name not in ("the input is coupled", "no dependence on z"):
        pytest.skip("of real numbers")
    x = data().to(dtype).requires_grad_()
    g = f if dtype != torch.float32 else (lambda z, x: f(z.double(), x.double()).float())
    solution = ik.fixed_point(g, torch.zeros_like(x), (x,), batch_dims=1)
    (grad,) = torch.autograd.grad(solution.value.real.sum(), x)
    assert bool(torch.isfinite(torch.view_as_real(grad) if dtype.is_complex else grad).all())


def test_a_sample_that_failed_couples_nothing() -> None:
    x = torch.tensor([[1.0], [float("nan")], [4.0]], dtype=torch.float64, requires_grad=True)
    solution = ik.root(lambda z, x: z**2 - x, torch.ones_like(x), (x,), batch_dims=1, on_failure="nan")
    solution.value.nansum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.5], [0.0], [0.25]], dtype=torch.float64))


def test_certify_asks_too() -> None:
    verb, f = COUPLED["mean"]
    solution = verb(f, torch.zeros_like(data()), (data(),), batch_dims=1)
    with pytest.raises(ValueError, match="not independent"):
        ik.certify(solution)


def test_a_function_is_asked_once() -> None:
    calls = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(LINEAR(z)) + x

    from implicitkit.linear import independence

    looks = independence._looks
    independence._looks = lambda batch: calls.append(batch) or looks(batch)  # type: ignore[assignment, func-returns-value]
    try:
        for _ in range(3):
            x = data().requires_grad_()
            ik.fixed_point(f, torch.zeros_like(x), (x,), batch_dims=1).value.sum().backward()
    finally:
        independence._looks = looks
    assert calls == [BATCH]


# ------------------------------------------------------------------------- a function that couples its samples only now
class Mixing:
    """``0.3 cos z + x + c mean(z)``."""

    def __init__(self, c: Any) -> None:
        self.c = c

    def __call__(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.cos(z) + x + self.c * z.mean(0)


class MixingModule(torch.nn.Module):
    def __init__(self, c: float) -> None:
        super().__init__()
        self.mix, self.w = Mixing(c), torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.mix(z, x) * self.w


def _set(mix: Mixing, c: Any) -> Mixing:
    mix.c = c
    return mix


SWITCH = 0.0


def _by_global(c: float) -> Callable[[Tensor, Tensor], Tensor]:
    global SWITCH
    SWITCH = c
    return lambda z, x: 0.3 * torch.cos(z) + x + SWITCH * z.mean(0)


KEPT = Mixing(0.0)
MODULE = MixingModule(0.0)
NOW: dict[str, Callable[[float], Callable[[Tensor, Tensor], Tensor]]] = {
    "another object at the address of one that is gone": Mixing,
    "a module of its own": MixingModule,
    "an attribute": lambda c: _set(KEPT, c),
    "an attribute of what a module holds": lambda c: (_set(MODULE.mix, c), MODULE)[1],
    "an object that is closed over": lambda c: (lambda mix: lambda z, x: mix(z, x))(_set(KEPT, c)),
    "a bound method": lambda c: _set(KEPT, c).__call__,
    "a number that is closed over": lambda c: lambda z, x: 0.3 * torch.cos(z) + x + c * z.mean(0),
    "a tensor that is closed over": lambda c: (lambda t: lambda z, x: 0.3 * torch.cos(z) + x + t * z.mean(0))(
        torch.tensor(c, dtype=torch.float64)
    ),
    "a global": _by_global,
    "a keyword of a partial": lambda c: functools.partial(lambda z, x, c: 0.3 * torch.cos(z) + x + c * z.mean(0), c=c),
    "an attribute of a keyword of a partial": lambda c: functools.partial(
        lambda z, x, mix: mix(z, x), mix=_set(KEPT, c)
    ),
}


@pytest.mark.parametrize("name", NOW)
def test_a_function_that_was_found_in_order_is_asked_again_when_it_is_set_otherwise(name: str) -> None:
    for c in (0.0, 0.25, 0.25):
        x = data().requires_grad_()
        value = ik.fixed_point(NOW[name](c), torch.zeros_like(x), (x,), batch_dims=1).value
        if c:
            with pytest.raises(ValueError, match="not independent"):
                value.sum().backward()
        else:
            value.sum().backward()


def test_keywords_of_a_partial_tell_functions_apart() -> None:
    from implicitkit.sparsity.identity import identity_of

    shifts = [functools.partial(torch.roll, shifts=shift) for shift in (1, 2, 1)]
    first, other, again = map(identity_of, shifts)
    assert first == again != other


def test_what_is_remembered_of_objects_ends_with_them() -> None:
    from implicitkit.sparsity import identity

    before = len(identity._numbered)
    kept = [Mixing(0.0) for _ in range(5)]
    assert len({identity.identity_of(mix) for mix in kept}) == 5 and len(identity._numbered) == before + 5
    assert identity.identity_of(kept[0]) == identity.identity_of(kept[0])
    kept.clear()
    assert len(identity._numbered) == before


# ----------------------------------------------------------------------- what looks like a partial function and is none
class Configured:
    """Has ``func`` and ``args``, as objects of ``functools.partial`` have."""

    def __init__(self) -> None:
        self.func, self.args = torch.cos, argparse.Namespace(gain=0.3)

    def __call__(self, z: Tensor, x: Tensor) -> Tensor:
        return self.args.gain * self.func(z) + x


NO_PARTIALS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "an object with func and args": (ik.fixed_point, Configured()),
    "a gradient by torch.func": (ik.root, torch.func.grad(lambda z, x: (torch.cosh(z - x) + z * z).sum())),
}


@pytest.mark.parametrize("name", NO_PARTIALS)
def test_what_only_looks_like_a_partial_is_asked_like_any_other(name: str) -> None:
    verb, f = NO_PARTIALS[name]
    solve = lambda x: verb(f, torch.zeros_like(x), (x,)).value  # noqa: E731
    each = torch.stack([torch.func.jacrev(solve)(x) for x in data()])
    torch.testing.assert_close(torch.vmap(torch.func.jacrev(solve))(data()), each)
