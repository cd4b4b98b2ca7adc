"""Derivatives that were once zero, stale or lost without a word: each is right now, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp

import implicitkit as ik

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=D, requires_grad=True)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=D)


# --------------------------------------------------------------------------------- the function of the solve, and of then
class Masked(nn.Module):
    """A dropout mask kept as an attribute, as weight-drop layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=D)
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=D))
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=D)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.lin(z) * self.mask + self.scale * x)


class Owner:
    """A bound method with a constant of its own, that can be written to."""

    def __init__(self) -> None:
        self.factors = np.array([0.5])

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(float(self.factors[0]) * z + x)


def _constant(x: Tensor) -> list[Tensor]:
    c = torch.tensor(0.8, dtype=D)
    z = ik.fixed_point(lambda z, x: torch.tanh(c * z + x), zeros(1), (x,)).value
    c.fill_(0.1)
    return [z]


def _buffer(x: Tensor) -> list[Tensor]:
    m = Masked()
    z = ik.fixed_point(m, zeros(4), (x.expand(4),)).value
    m.scale.mul_(0.99)
    return [z]


def _array(x: Tensor) -> list[Tensor]:
    owner = Owner()
    z = ik.root(lambda z, x: owner.step(z, x) - z, zeros(1), (x,), solver="newton").value
    owner.factors[0] = 0.4
    return [z]


def _argmin(x: Tensor) -> list[Tensor]:
    shift = torch.tensor(1.0, dtype=D)
    z = ik.argmin(lambda z, x: ((z - shift * x) ** 2).sum(), zeros(1), (x,)).value
    shift += 1.0
    return [z]


def _least_squares(x: Tensor) -> list[Tensor]:
    shift = torch.tensor(1.0, dtype=D)
    z = ik.least_squares(lambda z, x: z**2 + z - shift * x, zeros(1), (x,)).value
    shift += 1.0
    return [z]


def _bounded(x: Tensor) -> list[Tensor]:
    shift = torch.tensor(1.0, dtype=D)
    objective = lambda z, x: ((z - shift * x) ** 2).sum()  # noqa: E731
    z = ik.argmin(objective, zeros(2), (x,), bounds=(-1.0, 1.0)).value
    shift += 1.0
    return [z]


def _composed(x: Tensor) -> list[Tensor]:
    k = torch.tensor(0.3, dtype=D)
    first = ik.FixedPoint(lambda u, x: torch.tanh(k * u + x))
    second = ik.FixedPoint(lambda v, u: torch.tanh(0.2 * v + u))
    joint = first >> second
    z = ik.solve(joint, {n: zeros(1) for n in joint.graph}, (x,)).value
    k += 0.2
    return [joint.output(z)]


STALE = {
    "constant written to": (_constant, "tensor 'c' was written to.*, a buffer or a"),
    "registered buffer": (_buffer, "buffer 'scale' was written to"),
    "array written to": (_array, "no longer the one that was solved"),
    "argmin": (_argmin, "no longer the one that was solved"),
    "least squares": (_least_squares, "no longer the one that was solved"),
    "bounds": (_bounded, "no longer the one that was solved"),
    "composition": (_composed, "no longer the one that was solved"),
}


@pytest.mark.parametrize("name", STALE)
def test_function_changed_before_its_derivative(name: str) -> None:
    make, message = STALE[name]
    x = leaf(0.3)
    total = sum(out.sum() for out in make(x))
    with pytest.raises(ik.ChangedFunctionError, match=message):
        total.backward()


@pytest.mark.parametrize("name", ["registered buffer", "argmin"])
def test_function_changed_before_its_second_derivative(name: str) -> None:
    make, _ = STALE[name]
    x = leaf(0.3)
    with pytest.raises(ik.ChangedFunctionError):
        torch.autograd.grad(sum(out.sum() for out in make(x)), x, create_graph=True)


def test_function_changed_inside_transforms() -> None:
    def stale(x: Tensor) -> Tensor:
        owner = Owner()
        out = ik.fixed_point(owner.step, zeros(1), (x,)).value.sum()
        owner.factors[0] = 0.8
        return out

    x = torch.tensor([0.3], dtype=D)
    for transform in (lambda: grad(stale)(x), lambda: torch.func.vmap(grad(stale))(torch.stack([x, 2 * x]))):
        with pytest.raises(ik.ChangedFunctionError):
            transform()


UNCHANGED: dict[str, Callable[[Tensor], ik.Solution]] = {
    "loose tolerance": lambda x: ik.fixed_point(lambda z, x: torch.tanh(0.5 * z + x), zeros(1), (x,), rtol=1e-2),
    "not converged": lambda x: ik.fixed_point(
        lambda z, x: torch.tanh(0.9 * z + x), zeros(1), (x,), max_steps=2, solver="picard", on_failure="ignore"),
    "exact zero": lambda x: ik.root(lambda z, x: z - x, zeros(1), (x,), solver="newton"),
    "solution zero": lambda x: ik.root(lambda z, x: z - 0 * x, torch.ones(1, dtype=D), (x,), solver="newton"),
    "dropped rows": lambda x: ik.fixed_point(
        lambda z, x: torch.tanh(torch.linspace(0.0, 0.9, 8, dtype=D)[: len(z), None] * 0 + 0.9 * z + x), zeros(8, 3),
        (x * torch.linspace(-1, 1, 24, dtype=D).reshape(8, 3),), batch_dims=1, in_dims=(0,)),
    "failed samples as nan": lambda x: ik.root(
        lambda z, x: z**2 - x * torch.tensor([1.0, -1.0], dtype=D).unsqueeze(1), torch.ones(2, 1, dtype=D), (x,),
        batch_dims=1, solver="newton", on_failure="nan", max_steps=30),
    "one step rule": lambda x: ik.fixed_point(lambda z, x: torch.tanh(0.5 * z + x), zeros(1), (x,), rule="one_step"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_function_that_has_not_changed_is_not_accused(name: str) -> None:
    x = leaf(0.3)
    solution = UNCHANGED[name](x)
    torch.where(torch.isfinite(solution.value), solution.value, 0).sum().backward()
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_change(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    W = torch.randn(64, 64, generator=g) / 16
    x = torch.randn(5, 64, generator=g).to(dtype).requires_grad_()
    cell = lambda z, x: torch.tanh(z @ W.to(z.dtype) + x)  # noqa: E731
    fine = x.detach().double().requires_grad_()
    z = torch.zeros_like(fine)
    for _ in range(60):  # the loop in double precision: |W| is about 1/2
        z = cell(z, fine)
    (want,) = torch.autograd.grad(z.sum(), fine)
    for in_dims, cast in ((None, False), ((0,), False), (None, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            z = ik.fixed_point(cell, torch.zeros_like(x), (x,), batch_dims=1, solver="anderson", in_dims=in_dims).value
        (got,) = torch.autograd.grad(z.float().sum(), x)
        most = 3e-2 if cast or dtype != torch.float32 else 1e-3
        assert (got.double() - want).norm() <= most * want.norm(), (in_dims, cast)


# ------------------------------------------------------------------------------------------------------ branches on values
def _two_weights() -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    first, second = leaf(0.3), leaf(0.5)

    def inner(u: Tensor, y: Tensor) -> Tensor:
        return torch.tanh((first if bool((u.abs() <= 0.2).all()) else second) * u + y)

    return first, second, inner


def _branch_in_composition(transform: str) -> Any:
    _, _, inner = _two_weights()
    both = ik.FixedPoint(inner) >> ik.FixedPoint(lambda z, y: torch.tanh(0.3 * z + y))
    z0 = {"inner": zeros(1), "map": zeros(1)}
    return ik.solve(both, z0, (torch.tensor([0.5], dtype=D),)).value["map"].sum().backward()


def _branch_in_nested(transform: str) -> Any:
    _, _, inner = _two_weights()
    x = torch.tensor([0.5], dtype=D)
    nest = lambda z, x: 0.5 * torch.tanh(z + ik.fixed_point(inner, zeros(1), (x,)).value)  # noqa: E731
    return ik.fixed_point(nest, zeros(1), (x,)).value.sum().backward()


def _of_shape(select: Callable[[Tensor], int]) -> Callable[[str], Any]:
    def run(transform: str) -> Any:
        x = torch.tensor([0.5], dtype=D)

        def solve(w: Tensor) -> Tensor:
            f = lambda z, x: torch.tanh((0.3 if select(z) == 0 else w) * z + x)  # noqa: E731
            return ik.fixed_point(f, zeros(1), (x,)).value.sum()

        w = torch.tensor(0.5, dtype=D)
        if transform == "grad":
            return grad(solve)(w)
        if transform == "jvp":
            return jvp(solve, (w,), (w,))
        return solve(w.requires_grad_()).backward()

    return run


BRANCHES: dict[str, Callable[[str], Any]] = {
    "nonzero": _of_shape(lambda z: (z.abs() > 0.2).nonzero().shape[0]),
    "mask": _of_shape(lambda z: len(z[z.abs() > 0.2])),
    "masked_select": _of_shape(lambda z: z.masked_select(z.abs() > 0.2).numel()),
    "argwhere": _of_shape(lambda z: len(torch.argwhere(z.abs() > 0.2))),
    "where": _of_shape(lambda z: len(torch.where(z.abs() > 0.2)[0])),
    "unique": _of_shape(lambda z: len(torch.unique((z.abs() > 0.2).long())) - 1 + int(z.abs().max() > 0.2)),
    "round and index": _of_shape(lambda z: [0, 1][(z.abs() > 0.2).long().squeeze()]),
}


@pytest.mark.parametrize("transform", ["backward", "grad", "jvp"])
@pytest.mark.parametrize("name", BRANCHES)
def test_shapes_that_depend_on_values(name: str, transform: str) -> None:
    with pytest.raises(ik.CapturedTensorError, match="branches on values"):
        BRANCHES[name](transform)


@pytest.mark.parametrize("run", [_branch_in_composition, _branch_in_nested], ids=["composition", "nested"])
def test_branches_on_values_inside(run: Callable[[str], Any]) -> None:
    with pytest.raises(ik.CapturedTensorError, match="branches on values"):
        run("backward")


# -------------------------------------------------------------------------------------------- kept from the first evaluation
class Cached(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.w = nn.Parameter(2 * torch.eye(3, dtype=D))
        self.where, self.cache, self.store = where, None, {}

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if self.where == "attribute":
            if self.cache is None:
                self.cache = self.w / self.w.norm()
            kept = self.cache
        elif self.where == "dict":
            kept = self.store.setdefault("w", self.w / self.w.norm()) if "w" not in self.store else self.store["w"]
        else:
            kept = self.w / self.w.norm()
        return torch.tanh(0.5 * z @ kept.T + x)


def _cached_in_closure(W: Tensor, x: Tensor) -> Callable[..., Tensor]:
    kept: list[Tensor] = []

    def cell(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
        if not kept:
            kept.append(W / W.norm())
        return torch.tanh(0.5 * z @ kept[0].T + x)

    return cell


@pytest.mark.parametrize("where", ["attribute", "dict"])
@pytest.mark.parametrize("transform", ["backward", "grad", "hessian"])
def test_a_cache_filled_by_the_first_evaluation(where: str, transform: str) -> None:
    m, x = Cached(where), torch.ones(3, dtype=D)
    with pytest.raises(ik.CapturedTensorError, match=r"keeps a tensor from one evaluation to the next"):
        if transform == "backward":
            ik.fixed_point(m, zeros(3), (x,)).value.sum().backward()
        else:
            f = lambda w: ik.fixed_point(  # noqa: E731
                lambda z: torch.func.functional_call(m, {"w": w}, (z, x)), zeros(3)).value.sum()  # fmt: skip
            (grad if transform == "grad" else torch.func.hessian)(f)(m.w.detach())


@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_a_cache_in_a_closure(transform: str) -> None:
    W, x = 2 * torch.eye(3, dtype=D), torch.ones(3, dtype=D)
    solve = lambda W: ik.fixed_point(_cached_in_closure(W, x), zeros(3), (W, x)).value.sum()  # noqa: E731
    with pytest.raises(ik.CapturedTensorError, match="Compute it anew in every call"):
        grad(solve)(W) if transform == "grad" else solve(W.requires_grad_()).backward()


def test_what_is_kept_of_constants_is_no_loss() -> None:
    """Masks and tables made at the first call depend on nothing differentiable."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.table = nn.Parameter(torch.full((3,), 0.3, dtype=D)), None

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.cos(torch.arange(3, dtype=z.dtype))
            return torch.tanh(self.w * z * self.table + x)

    m, x = Rotary(), torch.ones(3, dtype=D)
    solve = lambda w: ik.fixed_point(  # noqa: E731
        lambda z: torch.func.functional_call(m, {"w": w}, (z, x)), zeros(3), **TIGHT).value.sum()  # fmt: skip
    ik.fixed_point(m, zeros(3), (x,), **TIGHT).value.sum().backward()
    m.table = None
    torch.testing.assert_close(m.w.grad, grad(solve)(m.w.detach()))
    want = m.w.detach().clone().requires_grad_()
    z, table = zeros(3), torch.cos(torch.arange(3, dtype=D))
    for _ in range(200):
        z = torch.tanh(want * z * table + x)
    torch.testing.assert_close(m.w.grad, torch.autograd.grad(z.sum(), want)[0], rtol=1e-8, atol=1e-10)


# ----------------------------------------------------------------------------------------------- tracking switched off
def _no_grad_map(z: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return 0.5 * torch.tanh(z) + x


OFF: dict[str, Callable[[Tensor], Tensor]] = {
    "decorator": lambda x: ik.fixed_point(torch.no_grad()(lambda z, x: 0.5 * torch.tanh(z) + x), zeros(3), (x,)).value,
    "context": lambda x: ik.fixed_point(_no_grad_map, zeros(3), (x,)).value,
    "inference mode": lambda x: ik.fixed_point(
        torch.inference_mode()(lambda z, x: (0.5 * torch.tanh(z) + x)), zeros(3), (x,)).value,
    "root": lambda x: ik.root(torch.no_grad()(lambda z, x: z**3 + z - x), zeros(3), (x,), solver="df_sane").value,
    "detached": lambda x: ik.fixed_point(lambda z, x: (0.5 * torch.tanh(z) + x).detach(), zeros(3), (x,)).value,
    "numpy": lambda x: ik.fixed_point(
        lambda z, x: torch.from_numpy(0.5 * z.detach().numpy() + x.detach().numpy()), zeros(3), (x,)).value,
    "node": lambda x: ik.solve(
        ik.FixedPoint(_no_grad_map) >> ik.FixedPoint(lambda v, u: 0.3 * torch.sin(v) + u),
        {"_no_grad_map": zeros(3), "map": zeros(3)}, (x,)).value["map"],
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_a_function_that_tracks_nothing(name: str) -> None:
    x = torch.ones(3, dtype=D, requires_grad=True)
    with pytest.raises(ik.CapturedTensorError, match=r"no_grad .*detaches"):
        OFF[name](x).sum().backward()


def test_an_argument_that_does_not_matter_has_derivative_zero() -> None:
    x, y = leaf(0.3), leaf(0.4)
    for f, solver in ((lambda z, x, y: torch.cos(z) * y, "picard"), (lambda z, x, y: y.sin(), "picard")):
        z = ik.fixed_point(f, zeros(1), (x, y), solver=solver).value
        gx, gy = torch.autograd.grad(z.sum(), (x, y))
        assert gx.item() == 0
        assert gy.item() != 0
    fixed = torch.tensor([0.4], dtype=D)
    z = ik.fixed_point(lambda z, x, y: y.sin(), zeros(1), (x, fixed)).value
    assert torch.autograd.grad(z.sum(), x)[0].item() == 0
    z = ik.root(lambda z, p: z**2 - p["a"], torch.ones(1, dtype=D), ({"a": y, "b": x},)).value
    z.sum().backward()
    assert x.grad.item() == 0
    assert jacrev(lambda x: ik.root(lambda z, x: z**3 - 2, torch.ones(1, dtype=D), (x,)).value)(x.detach()).item() == 0


def test_an_unused_parameter_has_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.full((2,), 0.3, dtype=D)), nn.Parameter(zeros(2))

        def forward(self, z: Tensor) -> Tensor:
            return torch.cos(self.used * z)

    m = Two()
    ik.fixed_point(m, zeros(2)).value.sum().backward()
    assert m.used.grad is not None
    assert m.unused.grad is None


@pytest.mark.parametrize("taken", [None, 12])
def test_unrolling_from_a_solution_is_not_silently_zero(taken: int | None) -> None:
    """No step is taken from there; ``dz/dw = cos z / (1 + w sin z)`` of ``z = w cos z``."""
    w, at = torch.tensor([0.5], dtype=D, requires_grad=True), torch.tensor([0.45018361129487355], dtype=D)
    rule = ik.Unroll(steps=taken)
    if taken is None:
        with pytest.warns(ik.ConvergenceWarning, match=r"no step to differentiate: .* rule=ik.Unroll\(steps=20\)"):
            ik.fixed_point(lambda z, w: w * z.cos(), at, (w,), rule=rule, rtol=1e-6)
        with torch.no_grad():  # nobody asks
            ik.fixed_point(lambda z, w: w * z.cos(), at, (w,), rule=rule, rtol=1e-6)
        return
    z = ik.fixed_point(lambda z, w: w * z.cos(), at, (w,), rule=rule, rtol=1e-6).value
    (slope,) = torch.autograd.grad(z.sum(), w)
    torch.testing.assert_close(slope, at.cos() / (1 + 0.5 * at.sin()), rtol=1e-6, atol=0)
