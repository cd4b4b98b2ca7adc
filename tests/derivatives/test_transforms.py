"""The transform matrix: problem kind x solver kind x transform, each against an independent oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems_table import CASES, N, inputs, oracle, ours
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import implicitkit as ik

Solve = Callable[[Tensor, Tensor, Tensor], Tensor]


def _scalar(solve: Solve, z0: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    weights = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    return lambda W, b: (weights * solve(z0, W, b) ** 2).sum() + solve(z0, W, b).sin().sum()


def _leaf(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def backward(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    _scalar(solve, z0)(W, b).backward()
    return W.grad, b.grad


def double_backward(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    gW, gb = torch.autograd.grad(_scalar(solve, z0)(W, b), (W, b), create_graph=True)
    return torch.autograd.grad((gW**2).sum() + (gb**3).sum(), (W, b))


def triple_backward(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    (b,) = _leaf(b)
    value = _scalar(solve, z0)(W, b)
    for _ in range(3):
        (g,) = torch.autograd.grad(value, b, create_graph=True)
        value = (g**2).sum()
    return g.detach()


def retain_graph(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    value = _scalar(solve, z0)(W, b)
    first = torch.autograd.grad(value, (W, b), retain_graph=True)
    second = torch.autograd.grad(value, (W, b))
    return *first, *second


def two_losses(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    z = solve(z0, W, b)
    z.sum().backward(retain_graph=True)
    (z**3).sum().backward()
    return W.grad, b.grad


def func_grad(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return grad(_scalar(solve, z0), (0, 1))(W, b)


def func_vjp(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    out, pullback = vjp(lambda W, b: solve(z0, W, b), W, b)
    return out, *pullback(torch.arange(1.0, N + 1, dtype=torch.float64))


def func_jvp(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jvp(lambda W, b: solve(z0, W, b), (W, b), (W.flip(0), b.flip(0)))


def func_jvp_one(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jvp(lambda b: solve(z0, W, b), (b,), (b.flip(0),))


def func_jacrev(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jacrev(lambda W, b: solve(z0, W, b), (0, 1))(W, b)


def func_jacfwd(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jacfwd(lambda W, b: solve(z0, W, b), (0, 1))(W, b)


def func_hessian(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return hessian(_scalar(solve, z0), (0, 1))(W, b)


def jacrev_jacrev(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jacrev(jacrev(lambda b: solve(z0, W, b)))(b)


def jacrev_jacfwd(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jacrev(jacfwd(lambda b: solve(z0, W, b)))(b)


def jacfwd_jacfwd(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jacfwd(jacfwd(lambda b: solve(z0, W, b)))(b)


def jacfwd_thrice(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jacfwd(jacfwd(jacfwd(lambda b: solve(z0, W, b)[0])))(b)


def grad_thrice(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    f = lambda t: solve(z0, W, b * t).sum()  # noqa: E731
    return grad(grad(grad(f)))(torch.tensor(1.1, dtype=torch.float64))


def dual_level(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    with forward_ad.dual_level():
        z = solve(z0, forward_ad.make_dual(W, W.flip(1)), forward_ad.make_dual(b, b.flip(0)))
        return tuple(forward_ad.unpack_dual(z))


def forward_over_reverse(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    (b,) = _leaf(b)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(b, b.detach().flip(0))
        (g,) = torch.autograd.grad(_scalar(solve, z0)(W, dual), b, create_graph=True)
        return tuple(t.detach() for t in forward_ad.unpack_dual(g))


def _stack(*tensors: Tensor) -> list[Tensor]:
    return [torch.stack([t, 0.5 * t, t.flip(0)]) for t in tensors]


def vmap_args(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(lambda W, b: solve(z0, W, b))(*_stack(W, b))


def vmap_one(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(lambda b: solve(z0, W, b), in_dims=1)(_stack(b)[0].mT.contiguous())


def vmap_inits(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(lambda z: solve(z, W, b))(torch.linspace(-0.1, 0.1, 2 * N, dtype=torch.float64).view(2, N))


def vmap_both(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    inits = torch.linspace(-0.1, 0.1, 3 * N, dtype=torch.float64).view(3, N)
    return vmap(lambda z, b: solve(z, W, b))(inits, _stack(b)[0])


def vmap_nested(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(lambda W: vmap(lambda b: solve(z0, W, b))(_stack(b)[0]))(_stack(W)[0])


def vmap_grad(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(grad(_scalar(solve, z0), (0, 1)))(*_stack(W, b))


def grad_vmap(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return grad(lambda W, b: vmap(lambda b: _scalar(solve, z0)(W, b))(b).sum(), (0, 1))(W, _stack(b)[0])


def vmap_hessian(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(hessian(lambda b: _scalar(solve, z0)(W, b)))(_stack(b)[0])


def vmap_jvp(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(lambda b: jvp(lambda b: solve(z0, W, b), (b,), (b,)))(_stack(b)[0])


def backward_of_vmap(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, torch.stack([b, -b]))
    vmap(lambda b: solve(z0, W, b))(b).pow(2).sum().backward()
    return W.grad, b.grad


def grads_batched(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    eye = torch.eye(N, dtype=torch.float64)
    return torch.autograd.grad(solve(z0, W, b), (W, b), eye, is_grads_batched=True)


def grads_batched_again(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    eye = torch.eye(N, dtype=torch.float64)
    rows = torch.autograd.grad(solve(z0, W, b), (W, b), eye, is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(sum(r.pow(2).sum() for r in rows), (W, b))


def jacobian_vectorized(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return torch.autograd.functional.jacobian(lambda b: solve(z0, W, b), b, vectorize=True)


def closure_backward(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    closed = _closed(solve, W)
    (g,) = torch.autograd.grad(closed(z0, b).pow(2).sum(), W, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), b)
    return g.detach(), h


def closure_outer_grad(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return grad(lambda W: _closed(solve, W)(z0, b).pow(2).sum())(W)


def closure_outer_hessian(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return hessian(lambda t: _closed(solve, W * t)(z0, b * t).pow(2).sum())(torch.tensor(0.9, dtype=torch.float64))


def closure_outer_jvp(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return jvp(lambda W: _closed(solve, W)(z0, b), (W,), (W.flip(1),))


def closure_outer_vmap(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(lambda W: _closed(solve, W)(z0, b))(_stack(W)[0])


def closure_vmap_grad(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return vmap(grad(lambda W: _closed(solve, W)(z0, b).pow(2).sum()))(_stack(W)[0])


def closure_mixed_levels(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    # W belongs to the grad level, b to the vmap level inside it, the scale to another grad level inside that
    def outer(W: Tensor) -> Tensor:
        inner = lambda b: grad(lambda s: _closed(solve, W * s)(z0, b).sum())(torch.tensor(1.0, dtype=torch.float64))  # noqa: E731
        return vmap(inner)(_stack(b)[0]).sum()

    return grad(outer)(W)


def _closed(solve: Solve, W: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    closed = getattr(solve, "closed", None)
    return closed(W) if closed else lambda z0, b: solve(z0, W, b)


def no_grad(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    with torch.no_grad():
        z = solve(z0, W, b)
        assert not z.requires_grad
        return z, grad(_scalar(solve, z0))(W, b).detach()


def checkpoint(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    results = []
    for reentrant in (False, True):
        W_, b_ = _leaf(W, b)
        z = torch.utils.checkpoint.checkpoint(lambda W, b: solve(z0, W, b), W_, b_, use_reentrant=reentrant)
        z.pow(2).sum().backward()
        results += [W_.grad, b_.grad]
    return tuple(results)


def _checkpoint_by_hand(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    W, b = _leaf(W, b)
    solve(z0, W, b).pow(2).sum().backward()
    return W.grad, b.grad, W.grad, b.grad


def _vmap_hessian_by_hand(solve: Solve, z0: Tensor, W: Tensor, b: Tensor) -> Any:
    return torch.stack([jacrev(jacrev(lambda b: _scalar(solve, z0)(W, b)))(b) for b in _stack(b)[0]])


# what torch's own operations cannot do for the oracle: torch.func under saved-tensor hooks (refused), and
# vmap(hessian) of torch.linalg.solve (wrong in 2.13: 1e81)
BY_HAND = {checkpoint: _checkpoint_by_hand, vmap_hessian: _vmap_hessian_by_hand}
TRANSFORMS = [
    backward, double_backward, triple_backward, retain_graph, two_losses, func_grad, func_vjp, func_jvp, func_jvp_one,
    func_jacrev, func_jacfwd, func_hessian, jacrev_jacrev, jacrev_jacfwd, jacfwd_jacfwd, jacfwd_thrice, grad_thrice,
    dual_level, forward_over_reverse, vmap_args, vmap_one, vmap_inits, vmap_both, vmap_nested, vmap_grad, grad_vmap,
    vmap_hessian, vmap_jvp, backward_of_vmap, grads_batched, grads_batched_again, jacobian_vectorized, closure_backward,
    closure_outer_grad, closure_outer_hessian, closure_outer_jvp, closure_outer_vmap, closure_vmap_grad,
    closure_mixed_levels, no_grad, checkpoint,
]  # fmt: skip
ROWS = [(kind, solver) for kind, case in CASES.items() for solver in case.solvers]
# Every transform of every kind with its first solver.  A solver that is another kind's first, or that of most kinds, has a
# third of them, another third with each kind: every transform of every solver comes.  Of the kinds whose equation is another
# kind's, or a gradient, two thirds are slow.
SHARED = ("newton", "newton_krylov")
WHOLE = ("root", "fixed_point", "argmin")
MATRIX = [
    pytest.param(
        kind,
        solver,
        transform,
        id=f"{kind}-{solver}-{transform.__name__}",
        marks=() if kind in WHOLE or (t + k) % 3 == 0 else pytest.mark.slow,
    )
    for k, (kind, case) in enumerate(CASES.items())
    for solver in case.solvers
    for t, transform in enumerate(TRANSFORMS)
    if solver == case.solvers[0] or solver not in SHARED or (t + k) % 3 == 0
]


def _with_closure(kind: str, solver: str) -> Solve:
    """Our solve, and a variant in which ``W`` reaches the function through its closure only."""
    import implicitkit as ik

    case = CASES[kind]
    solve = ours(case, solver)

    def closed(W: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda z0, b: (
            ik.solve(
                case.make(lambda z, b: case.function(z, W, b)), z0, (b,), solver=solver, rtol=1e-13, atol=1e-13
            ).value
        )

    solve.closed = closed  # type: ignore[attr-defined]
    return solve


@functools.cache
def _wanted(residual: Callable[..., Tensor], transform: Callable[..., Any]) -> Any:
    """Once for every solver of the same equation."""
    case = next(case for case in CASES.values() if case.residual is residual)
    return BY_HAND.get(transform, transform)(oracle(case), *inputs())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "solver", "transform"), MATRIX)
def test_matches_oracle(kind: str, solver: str, transform: Callable[..., Any]) -> None:
    got = transform(_with_closure(kind, solver), *inputs())
    want = _wanted(CASES[kind].residual, transform)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "solver"), ROWS, ids=lambda x: str(x))
def test_gradcheck(kind: str, solver: str) -> None:
    z0, W, b = inputs()
    solve = ours(CASES[kind], solver)
    near = solve(z0, W, b).detach()  # of hundreds of solves most are of inputs that are moved by 1e-6
    f = lambda W, b: solve(near, W, b)  # noqa: E731
    arguments = tuple(_leaf(W, b))
    # along random directions: entry by entry both orders are in the matrix above
    options = {"nondet_tol": 1e-9, "fast_mode": True}
    assert torch.autograd.gradcheck(f, arguments, check_forward_ad=True, check_batched_grad=True, **options)
    assert torch.autograd.gradgradcheck(f, arguments, check_fwd_over_rev=True, check_rev_over_rev=True, **options)


@pytest.mark.parametrize(("kind", "solver"), ROWS, ids=lambda x: str(x))
def test_inference_mode(kind: str, solver: str) -> None:
    with torch.inference_mode():
        z0, W, b = inputs()
        z = ours(CASES[kind], solver)(z0, W, b)
    torch.testing.assert_close(z, oracle(CASES[kind])(*inputs()), rtol=1e-9, atol=1e-10)


class _Cell(torch.nn.Module):
    def __init__(self, W: Tensor, b: Tensor) -> None:
        super().__init__()
        self.W, self.b = torch.nn.Parameter(W.clone()), torch.nn.Parameter(b.clone())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.4 * z @ self.W.mT + self.b + x)


class _Layer(torch.nn.Module):
    def __init__(self, cell: _Cell, unrolled: bool) -> None:
        super().__init__()
        self.cell, self.unrolled = cell, unrolled

    def forward(self, x: Tensor) -> Tensor:
        import implicitkit as ik

        z = torch.zeros_like(x)
        if self.unrolled:
            for _ in range(200):
                z = self.cell(z, x)
            return z
        return ik.fixed_point(lambda z, x: self.cell(z, x), z, (x,), rtol=1e-13, atol=1e-13).value


def _layers() -> tuple[_Layer, _Layer, Tensor]:
    _, W, b = inputs()
    cell = _Cell(W, b)
    x = torch.linspace(-1, 1, 4 * N, dtype=torch.float64).view(4, N)
    return _Layer(cell, False), _Layer(cell, True), x


def test_per_sample_gradients_of_module_parameters() -> None:
    results = []
    for layer in _layers()[:2]:
        x = _layers()[2]
        parameters = {k: v.detach() for k, v in layer.named_parameters()}
        loss = lambda p, x, layer=layer: functional_call(layer, p, (x,)).pow(2).sum()  # noqa: E731
        results.append(vmap(grad(loss), in_dims=(None, 0))(parameters, x))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)


def test_ensemble_through_stack_module_state() -> None:
    import copy

    implicit, unrolled, x = _layers()
    results = []
    for layer in (implicit, unrolled):
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.cell.W.mul_(0.5)
        parameters, buffers = torch.func.stack_module_state([layer, other])
        call = lambda p, b, x, layer=layer: functional_call(layer, (p, b), (x,))  # noqa: E731
        value = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
        results.append((value, *torch.autograd.grad(value.pow(2).sum(), list(parameters.values()))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)


def test_module_backward_and_hooks() -> None:
    implicit, unrolled, x = _layers()
    seen = []
    for layer in (implicit, unrolled):
        layer.zero_grad()
        handle = layer.cell.W.register_hook(lambda g: seen.append(g.clone()))
        layer(x).pow(2).sum().backward()
        handle.remove()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-8, atol=1e-10)


def test_batched_gradients_inside_transforms_are_refused() -> None:
    """What torch records of a batch of ``is_grads_batched`` below a level of its own is lost: no derivative may come."""
    x = torch.tensor([0.5, 1.0], dtype=torch.float64)

    def batched(x: Tensor, keep: bool) -> Tensor:
        z = ik.root(lambda z, x: z**3 + z - x, torch.zeros_like(x), (x,)).value
        return torch.autograd.grad(z, x, torch.eye(2, dtype=x.dtype), is_grads_batched=True, create_graph=keep)[0]

    for keep in (False, True):
        with pytest.raises(ik.CapabilityError, match=r"torch\.func\.jacrev"):
            torch.func.jacrev(lambda x, keep=keep: batched(x, keep))(x)
        with pytest.raises(ik.CapabilityError, match=r"torch\.func\.jacrev"):
            torch.func.vmap(torch.func.jacrev(lambda x, keep=keep: batched(x, keep)))(torch.stack([x, 2 * x]))
