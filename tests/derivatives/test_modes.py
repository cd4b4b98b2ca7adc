"""Derivatives of a solve while a mode of PyTorch is on: inference mode, a forward-mode level, saved-tensor hooks, batched
gradients, gradients switched off.  The oracle is the closed form under the same mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import implicitkit as ik

D = torch.float64
ONE = torch.ones(2, dtype=D)
W = torch.tensor([0.9, 1.1], dtype=D)
X = torch.tensor([1.2, 0.8], dtype=D)


def closed(w: Tensor, x: Tensor = X) -> Tensor:
    return x / w**2


def _energy(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    return (0.5 * z**2 * w**2 - x * z).sum()


# name: (verb, function of (z, w, x) with the solution x / w^2, options)
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], dict[str, Any]]] = {
    "root": (ik.root, lambda z, w, x: x - z * w**2, {}),
    "newton": (ik.root, lambda z, w, x: x - z * w**2, {"solver": "newton"}),
    "fixed_point": (ik.fixed_point, lambda z, w, x: z + 0.3 * (x - z * w**2), {}),
    "argmin": (ik.argmin, _energy, {}),
    "bounds": (ik.argmin, _energy, {"bounds": (-5.0, 5.0)}),
    "least_squares": (ik.least_squares, lambda z, w, x: z * w - x / w, {}),
    "steady_state": (ik.steady_state, lambda z, w, x: x - z * w**2, {}),
}
HELD = ("args", "captured")


def solved(kind: str, held: str, x: Tensor = X) -> Callable[[Tensor], Tensor]:
    verb, f, options = KINDS[kind]

    def solve(w: Tensor) -> Tensor:
        if held == "args":
            return verb(lambda z, w: f(z, w, x), ONE, (w,), **options).value
        return verb(lambda z: f(z, w, x), ONE, **options).value

    return solve


def assert_near(got: Any, want: Any, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def along(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    return jvp(f, (w,), (torch.ones_like(w),))[1]


def under_dual(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(w, torch.ones_like(w))))
        return torch.zeros_like(primal) if tangent is None else tangent


def plain(f: Callable[[Tensor], Tensor], w: Tensor, create_graph: bool = False) -> Tensor:
    leaf = w if w.requires_grad else w.detach().clone().requires_grad_()
    return torch.autograd.grad(f(leaf).sum(), leaf, create_graph=create_graph)[0]


# ------------------------------------------------------------------------------------------------------------ inference mode
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "grad": lambda f: grad(lambda w: f(w).sum())(W),
    "vjp": lambda f: vjp(f, W)[1](ONE)[0],
    "jvp": lambda f: along(f, W),
    "jacrev": lambda f: jacrev(f)(W),
    "jacfwd": lambda f: jacfwd(f)(W),
    "hessian": lambda f: hessian(lambda w: f(w).sum())(W),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f))(W),
    "vmap of grad": lambda f: vmap(grad(lambda w: f(w).sum()))(torch.stack([W, 1.1 * W])),
    "dual": lambda f: under_dual(f, W),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_in_inference_mode(transform: str, kind: str, held: str) -> None:
    with torch.inference_mode():
        got, want = TRANSFORMS[transform](solved(kind, held)), TRANSFORMS[transform](closed)
        assert_near(got, want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["root", "newton", "fixed_point", "steady_state"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_of_what_uses_tensors_made_in_inference_mode(transform: str, kind: str) -> None:
    """They carry no tangent.  (An objective is differentiated inside, and autograd can save none of them, as it says.)"""
    with torch.inference_mode():
        x = X.clone()

        def f(w: Tensor) -> Tensor:
            def function(z: Tensor, w: Tensor) -> Tensor:
                return KINDS[kind][1](z, w, x)

            return KINDS[kind][0](function, ONE, (w,), **KINDS[kind][2]).value

        assert_near(TRANSFORMS[transform](f), TRANSFORMS[transform](closed))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", [*TRANSFORMS, "backward", "twice"])
def test_tensors_made_in_inference_mode_are_constants_outside_of_it(transform: str, kind: str, held: str) -> None:
    """Features of an encoder, say, which autograd may not save: the start, what is captured, and an argument."""
    with torch.inference_mode():
        x, start = X.clone(), ONE.clone()
    verb, function, options = KINDS[kind]

    def f(w: Tensor) -> Tensor:
        if held == "args":
            return verb(function, start, (w, x), **options).value
        return verb(lambda z: function(z, w, x), start, **options).value

    if transform in TRANSFORMS:
        assert_near(TRANSFORMS[transform](f), TRANSFORMS[transform](closed))
        return
    leaf = W.clone().requires_grad_()
    slope = plain(f, leaf, create_graph=transform == "twice")
    assert_near(slope, -2 * X / W**3)
    if transform == "twice":
        assert_near(torch.autograd.grad(slope.sum(), leaf)[0], 6 * X / W**4)


def test_a_buffer_made_in_inference_mode_is_not_updated(recwarn: pytest.WarningsRecorder) -> None:
    """torch counts the copying of one as a write."""
    holder = nn.Module()
    with torch.inference_mode():
        holder.register_buffer("x", X.clone())
    leaf = W.clone().requires_grad_()
    value = ik.root(lambda z: holder.x - z * leaf**2, ONE).value
    assert not [str(w.message) for w in recwarn]
    value.sum().backward()
    assert_near(leaf.grad, -2 * X / W**3)


def test_what_the_function_makes_in_inference_mode_is_no_constant() -> None:
    """Of ``z``: it is missed where the derivative is looked at."""
    leaf = W.clone().requires_grad_()

    def function(z: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden = torch.cos(z)
        return 0.2 * hidden * z + leaf - z

    value = ik.root(function, ONE, solver="broyden").value
    with pytest.warns(ik.ImpureFunctionWarning, match="out of autograd's sight"):
        value.sum().backward()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_inference_mode_in_a_transform(transform: str, kind: str) -> None:
    """The mode cuts the derivative, as it does for any function."""

    def within(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def function(w: Tensor) -> Tensor:
            with torch.inference_mode():
                return f(w)

        return function

    assert_near(TRANSFORMS[transform](within(solved(kind, "args"))), TRANSFORMS[transform](within(closed)))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_in_inference_mode(kind: str) -> None:
    leaf = W.clone().requires_grad_()
    value = solved(kind, "captured")(leaf).sum()
    with torch.inference_mode():
        value.backward()
    assert_near(leaf.grad, -2 * X / W**3)


# ------------------------------------------------------------------------------------------------------- forward-mode levels
BELOW: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "vjp": lambda f, w: vjp(f, w)[1](ONE)[0],
    "grad": lambda f, w: grad(lambda w: f(w).sum())(w),
    "autograd": plain,
    "autograd, create_graph": lambda f, w: plain(f, w, create_graph=True),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("below", BELOW)
def test_reverse_mode_in_a_forward_level_has_a_tangent(below: str, kind: str, held: str) -> None:
    solve, x = solved(kind, held), X.clone().requires_grad_()
    if below.startswith("autograd"):  # the leaf is x, the tangent that of w
        verb, f, options = KINDS[kind]

        def of_w(w: Tensor) -> Tensor:
            if held == "args":
                return BELOW[below](lambda x: verb(f, ONE, (w, x), **options).value, x)
            return BELOW[below](lambda x: verb(lambda z: f(z, w, x), ONE, **options).value, x)

        assert_near(under_dual(of_w, W), -2 / W**3)
    else:
        assert_near(under_dual(lambda w: BELOW[below](solve, w), W), 6 * X / W**4)


# -------------------------------------------------------------------------------------------------------- batched gradients
@pytest.mark.one_in(2)
@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", KINDS)
def test_batched_gradients_of_a_tangent(kind: str, held: str, vectorize: bool) -> None:
    solve = solved(kind, held)
    for forward in (along, under_dual):
        got = jacobian(lambda w, forward=forward: forward(solve, w), W, vectorize=vectorize)
        assert_near(got, torch.diag(6 * X / W**4))


def test_batched_gradients_in_a_forward_level_are_refused_where_torch_cannot() -> None:
    solve = lambda x, w: ik.root(lambda z, w, x: x - z * w**2, ONE, (w, x)).value  # noqa: E731
    with pytest.raises(ik.CapabilityError, match="jacrev"):
        under_dual(lambda w: jacobian(lambda x: solve(x, w), X, vectorize=True), W)
    with pytest.raises(ik.CapabilityError, match="jacrev"):
        under_dual(lambda w: jacobian(lambda x: jacrev(solve)(x, w), X, vectorize=True), W)
    assert_near(under_dual(lambda w: jacrev(lambda x: solve(x, w))(X), W), torch.diag(-2 / W**3))


# ------------------------------------------------------------------------------------------------------------- gradients off
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pullback_with_gradients_off(kind: str, off: Callable[[], Any]) -> None:
    with off():
        _, pullback = vjp(solved(kind, "args"), W)
        assert_near(pullback(ONE)[0], -2 * X / W**3)


# -------------------------------------------------------------------------------------------------------- saved-tensor hooks
@pytest.mark.parametrize("tracked", [True, False])
def test_a_checkpoint_around_a_solve_computes_it_once_more_and_no_oftener(tracked: bool) -> None:
    tally = itertools.count()  # which is not among what tells one function from another, as a number would be

    def f(z: Tensor, w: Tensor) -> Tensor:
        next(tally)
        return torch.exp(z) * w - X

    def solve(w: Tensor) -> Tensor:
        return ik.root(f, 3 * ONE, (w,), solver="newton").value

    w = W.clone().requires_grad_(tracked)
    alone = solve(w)
    if tracked:  # at the first derivative of a function it is compared with differences
        torch.autograd.grad(alone.sum(), w)
    start = next(tally)
    alone = solve(w)
    between = next(tally)
    once = between - start - 1
    out = checkpoint(solve, w, use_reentrant=False)
    assert next(tally) - between - 1 == once  # without a derivative there is nothing to compute again
    assert_near(out, alone)
    if tracked:
        assert_near(torch.autograd.grad(out.sum(), w)[0], -1 / W)
        assert next(tally) - between - 2 <= 2 * once + 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "dual"])
def test_forward_mode_in_a_checkpoint(transform: str, kind: str) -> None:
    """The backward of the tangent, through the checkpoint."""

    def tangent(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
        found = {"jvp": lambda: along(f, w), "jacfwd": lambda: jacfwd(f)(w).sum(1), "dual": lambda: under_dual(f, w)}
        return found[transform]()

    leaf = W.clone().requires_grad_()
    out = checkpoint(lambda w: tangent(solved(kind, "args"), w), leaf, use_reentrant=False)
    assert_near(out.detach(), -2 * X / W**3)
    assert_near(torch.autograd.grad(out.sum(), leaf)[0], 6 * X / W**4)


# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpoints inside a function: what they compute once more in a backward is what was computed at first.
N = 4
G = torch.Generator().manual_seed(0)
INPUTS = torch.randn(2, N, dtype=D, generator=G)
CAPTURED = (0.3 * torch.randn(N, dtype=D, generator=G)).requires_grad_()
EXACT = {"batch_dims": 1, "rtol": 1e-12, "atol": 1e-12}


class Scales(nn.Module):
    """Saves as many numbers as it has parameters: one shape, so that torch may take one of them for another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(0.5 * torch.randn(2, N, dtype=D, generator=G))
        self.b = nn.Parameter(0.5 * torch.randn(2, N, dtype=D, generator=G))

    def forward(self, y: Tensor) -> Tensor:
        return 0.4 * torch.sin(self.a * torch.tanh(self.b * y) * y)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N, dtype=D)

    def forward(self, y: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.norm(y))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scales": Scales(),
    "a norm of a module": Normed(),
    "a norm": lambda y: torch.tanh(0.3 * F.layer_norm(y, (N,))),
    "one in another": lambda y: 0.5 * kept(PARTS["a norm of a module"])(y),
    "a captured tensor": lambda y: torch.tanh(CAPTURED * y),
    "a captured tensor in a norm": lambda y: torch.tanh(0.3 * F.layer_norm(y, (N,), CAPTURED)),
}
SOLVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "fixed point": lambda part, x: ik.fixed_point(lambda z, x: part(z + x), torch.zeros_like(x), x, **EXACT),
    "unrolled": lambda part, x: ik.fixed_point(
        lambda z, x: part(z + x), torch.zeros_like(x), x, rule="unroll", batch_dims=1
    ),
    "root": lambda part, x: ik.root(lambda z, x: z - part(z + x) + 0.1 * z**3, torch.zeros_like(x), x, **EXACT),
    "argmin": lambda part, x: ik.argmin(
        lambda z, x: (z - x).square().sum(1) + 0.1 * part(z).square().sum(1), torch.zeros_like(x), x, batch_dims=1
    ),
}


def kept(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda y: checkpoint(part, y, use_reentrant=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("solve", SOLVES)
def test_derivatives_through_checkpoints_are_those_without(solve: str, name: str) -> None:
    part = PARTS[name]
    weights = [CAPTURED, *(p for f in PARTS.values() if isinstance(f, nn.Module) for p in f.parameters())]

    def derivatives(function: Callable[[Tensor], Tensor], order: int) -> tuple[Tensor | None, ...]:
        x = INPUTS.clone().requires_grad_()
        found: Any = (SOLVES[solve](function, x).value,)
        for k in range(order):
            total = sum(t.square().sum() for t in found if t is not None)
            found = torch.autograd.grad(total, [x, *weights], create_graph=k < order - 1, allow_unused=True)
        return tuple(found)

    for order in (1,) if solve == "unrolled" else (1, 2):
        for one, other in zip(derivatives(kept(part), order), derivatives(part, order), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=lambda m: f"order {order}: {m}")  # noqa: B023


def test_third_derivatives_of_a_norm_in_a_checkpoint() -> None:
    def third(part: Callable[[Tensor], Tensor]) -> Tensor:
        x = found = INPUTS.clone().requires_grad_()
        found = SOLVES["fixed point"](part, x).value.square().sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        return found.detach()

    torch.testing.assert_close(third(kept(PARTS["a norm"])), third(PARTS["a norm"]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("solve", ["root", "argmin"])
def test_solvers_that_differentiate_without_gradients(solve: str, mode: Any) -> None:
    with mode():
        found = SOLVES[solve](kept(PARTS["a norm of a module"]), INPUTS).value
        expected = SOLVES[solve](PARTS["a norm of a module"], INPUTS).value
    assert torch.equal(found, expected)
