"""Every derivative in every mode on the sparse path: the same numbers as on the dense one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import implicitkit as ik
from implicitkit.linear.factors import sparse

D = torch.float64
N = 150  # above the size from which patterns are looked for
LINE = torch.linspace(0.5, 1.5, N, dtype=D)


def tridiagonal(z: Tensor, p: Tensor) -> Tensor:
    """Banded, nonlinear; ``p``: (3,)."""
    ends = torch.nn.functional.pad(z, (1, 1))
    return p[0] * (2 * z - 0.7 * ends[2:] - 0.9 * ends[:-2]) + p[1] * z**3 - p[2] * LINE


def arrow(z: Tensor, p: Tensor) -> Tensor:
    """A dense row and a dense column beside a diagonal; too wide for a band."""
    first = (z**2).mean() + p[0] * z[:1] - 1
    rest = p[1] * z[1:] + 0.1 * z[1:] ** 3 - p[2] * LINE[1:] * torch.cos(z[0])
    return torch.cat([first, rest])


def energy(z: Tensor, p: Tensor) -> Tensor:
    """Its Hessian is banded."""
    return (p[0] * (z[1:] - z[:-1]) ** 2).sum() + (p[1] * z**4 / 4 + z**2 / 2 - p[2] * LINE * z).sum()


def residuals(z: Tensor, p: Tensor) -> dict[str, Tensor]:
    return {"links": p[0] * (z[1:] ** 2 - z[:-1]), "data": p[1] * z - p[2] * LINE}


def fixed_point(z: Tensor, p: Tensor) -> Tensor:
    return torch.tanh(0.3 * p[0] * z.roll(1) - 0.2 * p[1] * z.roll(-2) ** 2 + p[2] * LINE)


PROBLEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "root": (ik.Root(tridiagonal), {}),
    "root, arrow": (ik.Root(arrow), {}),
    "argmin": (ik.Argmin(energy), {}),
    "least_squares": (ik.LeastSquares(residuals), {}),
    "steady_state": (ik.SteadyState(lambda z, p: -tridiagonal(z, p)), {}),
    "fixed_point": (ik.FixedPoint(fixed_point), {"rule": ik.Implicit(linear_solver="sparse_lu")}),
}
P = torch.tensor([1.1, 0.7, 0.9], dtype=D)
V = torch.tensor([0.3, -1.0, 0.5], dtype=D)
W = torch.sin(torch.arange(N, dtype=D))


def solution(name: str, linear: str | None = None) -> Callable[[Tensor], Tensor]:
    problem, options = PROBLEMS[name]
    if linear is not None:
        options = {"rule": ik.Implicit(linear_solver=linear)}
    tight: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12, "on_failure": "warn"}
    return lambda p: ik.solve(problem, 0.5 * torch.ones(N, dtype=D), (p,), **(tight | options)).value


def loss(z: Tensor) -> Tensor:
    return (W * z + z**3).sum()


def backward(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    return torch.autograd.grad(loss(f(p)), p)[0]


def double_backward(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(f(p)), p, create_graph=True)
    return torch.autograd.grad((V * g).sum(), p)[0]


def triple_backward(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(f(p)), p, create_graph=True)
    (h,) = torch.autograd.grad((V * g).sum(), p, create_graph=True)
    return torch.autograd.grad((V * h).sum(), p)[0]


def is_grads_batched(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    return torch.autograd.grad(f(p), p, torch.stack([W, W**2]), is_grads_batched=True)[0]


def dual_level(f: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        out = f(torch.autograd.forward_ad.make_dual(P, V))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def some(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Ten of the unknowns, for modes that differentiate each of them by itself."""
    return lambda p: f(p)[:: N // 10]


MODES: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "backward": backward,
    "double backward": double_backward,
    "triple backward": triple_backward,
    "is_grads_batched": is_grads_batched,
    "forward AD": dual_level,
    "grad": lambda f: grad(lambda p: loss(f(p)))(P),
    "vjp": lambda f: vjp(f, P)[1](W)[0],
    "jvp": lambda f: jvp(f, (P,), (V,))[1],
    "jacrev": lambda f: jacrev(f)(P),
    "jacfwd": lambda f: jacfwd(f)(P),
    "hessian": lambda f: hessian(lambda p: loss(f(p)))(P),
    "jacrev of jacrev": lambda f: jacrev(jacrev(some(f)))(P),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(some(f)))(P),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(some(f)))(P),
    "jvp of jvp": lambda f: jvp(lambda p: jvp(f, (p,), (V,))[1], (P,), (V,))[1],
    "grad of jvp": lambda f: grad(lambda p: loss(jvp(f, (p,), (V,))[1]))(P),
    "vmap": lambda f: vmap(f)(torch.stack([P, P + 0.1])),
    "vmap of grad": lambda f: vmap(grad(lambda p: loss(f(p))))(torch.stack([P, P + 0.1])),
    "vmap of jacrev": lambda f: vmap(jacrev(some(f)))(torch.stack([P, P + 0.1])),
    "grad of vmap": lambda f: grad(lambda q: vmap(lambda p: loss(f(p)))(q).sum())(torch.stack([P, P + 0.1])),
    "jacrev of vmap of jvp": lambda f: jacrev(lambda q: vmap(lambda p: jvp(f, (p,), (V,))[1].sum())(q))(
        torch.stack([P, P + 0.1])
    ),
    "vmap of cotangents": lambda f: vmap(vjp(f, P)[1])(torch.stack([W, W**2, W**3]))[0],
    "hessian of vmapped cotangents": lambda f: jacrev(lambda p: vmap(vjp(f, p)[1])(torch.stack([W, W**2]))[0])(P),
}


# every mode with the first problem, and with half of the others: every second mode of each, of which again every second one
# is slow
ROWS = [
    pytest.param(n, m, marks=pytest.mark.slow if i and (i + j) % 4 == 3 else ())
    for i, n in enumerate(PROBLEMS)
    for j, m in enumerate(MODES)
    if not i or (i + j) % 2
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "mode"), ROWS)
def test_the_sparse_path_is_the_dense_one(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    inner = sparse.solve_with
    for module in (sparse, ik.linear.auto):
        monkeypatch.setattr(module, "solve_with", lambda *a, **k: used.append(1) or inner(*a, **k))
    got = MODES[mode](solution(name))
    if mode not in ("vmap", "is_grads_batched"):
        assert used, "the sparse path was not taken"
    want = MODES[mode](solution(name, "lu"))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8 * float(want.detach().abs().max()))


@pytest.mark.parametrize("name", ["root", "argmin"])
def test_gradcheck_of_both_orders(name: str) -> None:
    p = P.clone().requires_grad_()
    f = lambda p: solution(name)(p)[::30]  # noqa: E731
    assert torch.autograd.gradcheck(f, (p,), rtol=1e-4, atol=1e-6)
    assert torch.autograd.gradgradcheck(f, (p,), rtol=1e-4, atol=1e-6, fast_mode=True)


def test_one_factorisation_serves_every_right_hand_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """``jacrev`` of 150 unknowns, after a solve that left its factors: none anew, or one."""
    from implicitkit.linear.factors import sparse_blocks

    count = []
    inner = sparse_blocks.SparseFactor
    monkeypatch.setattr(sparse_blocks, "SparseFactor", lambda *a, **more: count.append(1) or inner(*a, **more))
    steps = ik.root(tridiagonal, torch.ones(N, dtype=D), (P,), rtol=1e-12, atol=1e-12).steps
    forward = len(count)
    assert 1 <= forward <= int(steps)
    count.clear()
    jacrev(solution("root"))(P)
    assert len(count) <= int(steps) + 2


def test_modules_and_captured_tensors_on_the_sparse_path() -> None:
    module = torch.nn.Conv1d(1, 1, 3, padding=1, dtype=D)
    scale = torch.tensor(2.0, dtype=D, requires_grad=True)
    torch.manual_seed(0)
    torch.nn.init.normal_(module.weight, std=0.2)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return scale * z + torch.tanh(module(z[None])[0]) - x

    x = LINE.clone().requires_grad_()

    def run(linear: str) -> tuple[Tensor, ...]:
        z = ik.root(f, torch.zeros(N, dtype=D), (x,), rule=ik.Implicit(linear_solver=linear), rtol=1e-12).value
        return torch.autograd.grad(loss(z), (x, scale, module.weight, module.bias))

    for got, want in zip(run("auto"), run("lu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_batches_share_a_pattern() -> None:
    x = torch.linspace(0.5, 2, 8 * N, dtype=D).view(8, N).requires_grad_()

    def f(z: Tensor, x: Tensor) -> Tensor:
        ends = torch.nn.functional.pad(z, (1, 1))
        return 3 * z + z**3 - ends[:, 2:] - ends[:, :-2] - x

    s = ik.root(f, torch.zeros(8, N, dtype=D), (x,), batch_dims=1, rtol=1e-12)
    (g,) = torch.autograd.grad(loss(s.value), x)
    t = ik.root(f, torch.zeros(8, N, dtype=D), (x,), batch_dims=1, rtol=1e-12, rule=ik.Implicit(linear_solver="lu"))
    torch.testing.assert_close(g, torch.autograd.grad(loss(t.value), x)[0], rtol=1e-8, atol=1e-10)


def test_a_wrong_pattern_says_so_and_is_not_used() -> None:
    p = P.clone().requires_grad_()
    problem = ik.Root(tridiagonal, jac_sparsity=(0, 1))
    with pytest.warns(ik.SparsityWarning, match="jac_sparsity is wrong"):
        s = ik.solve(problem, torch.ones(N, dtype=D), (p,), rtol=1e-12)
    (g,) = torch.autograd.grad(loss(s.value), p)
    torch.testing.assert_close(g, backward(solution("root", "lu")), rtol=1e-7, atol=1e-9)


def test_a_pattern_that_changes_with_values_is_noticed() -> None:
    """Which neighbour an unknown sees depends on a number that leaves torch."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        shift = 1 if float(z.detach().sum()) > 10 else 40
        return 2 * z + 0.3 * torch.sin(z.roll(shift)) - x

    x = LINE.clone().requires_grad_()
    s = ik.root(f, torch.zeros(N, dtype=D), (x,), rtol=1e-12)
    (g,) = torch.autograd.grad(loss(s.value), x)
    z = s.value.detach()
    J = torch.autograd.functional.jacobian(lambda y: f(y, x.detach()), z)
    torch.testing.assert_close(g, torch.linalg.solve(J.T, W + 3 * z**2), rtol=1e-8, atol=1e-10)
