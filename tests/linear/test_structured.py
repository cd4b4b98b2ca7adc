"""Dense Jacobians from cotangents that stay diagonal until they meet a matrix, against ``torch.func.jacrev``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import implicitkit as ik
from implicitkit.foundation import autodiff, graph, structured, structured_rules
from implicitkit.foundation.structured import rows_by_structure

D = torch.float64
N = 130
MOST = 1 << 24
_random = torch.Generator().manual_seed(0)
W, V, M = (torch.randn(N, N, generator=_random, dtype=D) / N**0.5 for _ in range(3))
TALL = torch.randn(3 * N, N, generator=_random, dtype=D) / N**0.5
SMALL = torch.randn(13, 13, generator=_random, dtype=D) / 13**0.5
EACH = torch.randn(3, N, N, generator=_random, dtype=D) / N**0.5
X = torch.randn(3, N, generator=_random, dtype=D)
ORDER = torch.randperm(N, generator=_random)


def like(A: Tensor, z: Tensor) -> Tensor:
    """A constant in the dtype of ``z``, for as many samples where it has some."""
    return A[: len(z)].to(z.dtype) if A is X or A is EACH else A.to(z.dtype)


class Sine(torch.autograd.Function):
    """With a derivative that torch did not derive."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


def sine_through_a_function(z: Tensor) -> Tensor:
    found: Tensor = Sine.apply(z)
    return found


def written(z: Tensor) -> Tensor:
    y = z @ like(W, z)
    y[:, 10:] = z[:, 10:].sin()
    y.mul_(2)
    return y - z


def branches(z: Tensor) -> Tensor:
    return z @ like(W, z) if float(z.detach().sum()) > 1e9 else torch.tanh(z @ like(V, z))


def halves(z: Tensor) -> Tensor:
    a, b = z.split([30, 100], 1)
    return torch.cat([b @ like(W[:100, :30], z), a.sin() @ like(V[:30, :100], z) * b], 1)


def unrolled(z: Tensor) -> Tensor:
    y = z
    for _ in range(5):
        y = torch.tanh(y @ like(W, z)) + y
    return y - z


def hooked(z: Tensor) -> Tensor:
    y = z @ like(W, z)
    if y.requires_grad:
        y.register_hook(lambda g: 2 * g)
    return y + z


def checkpointed(z: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda y: torch.tanh(y @ like(W, y)) - y, z, use_reentrant=False)
    return found


def met_again(z: Tensor) -> Tensor:
    y = torch.tanh(z)
    return y + y.flip(1) * y + y @ like(W, z)


def two_unknown(z: Tensor) -> Tensor:
    u, w = 0.1 * z.cumsum(1), z.cumprod(1)
    return (u.cumsum(1) + w) @ like(W, z) + w - u


def leaky(z: Tensor) -> Tensor:
    return torch.nn.functional.leaky_relu(z @ like(W, z), 0.3)


def stencil(z: Tensor, *steps: int) -> Tensor:
    """Neighbours so many places away."""
    return torch.stack([(k + 2) * z.roll(k, 1) - z.roll(-k, 1) * z for k in steps]).sum(0)


Function = Callable[[Tensor], Tensor]
FEWER: dict[str, Function] = {  # than N products
    "a matrix and a cube": lambda z: z @ like(W, z) + 0.1 * z**3,
    "a cell": lambda z: torch.tanh(torch.nn.functional.linear(z, like(W, z)) + like(X, z)) - z,
    "with a bias": lambda z: torch.nn.functional.linear(z.sin(), like(W, z), like(X, z)[0]),
    "from the left": lambda z: (like(W, z) @ z.T).T + z,
    "einsum": lambda z: torch.einsum("ij,bj->bi", like(W, z), z) * z,
    "einsum of each": lambda z: torch.einsum("bij,bj->bi", like(EACH, z), z.cos()) - z,
    "matrices of their own": lambda z: (like(EACH, z) @ z.unsqueeze(2)).squeeze(2) + z,
    "baddbmm": lambda z: torch.baddbmm(z.unsqueeze(2), like(EACH, z), z.sin().unsqueeze(2), beta=0.5, alpha=2)[..., 0],
    "addmm": lambda z: torch.addmm(z, z.sin(), like(W, z), beta=0.5, alpha=-2.0),
    "vmap": lambda z: torch.vmap(lambda y: torch.tanh(like(W, y) @ y) - y)(z),
    "vmap of addmv": lambda z: torch.vmap(lambda y: torch.addmv(y, like(W, y), y.sin(), beta=2, alpha=0.5))(z),
    "row by row": lambda z: torch.stack([torch.tanh(like(W, y) @ y) - y for y in z]),
    "addmv row by row": lambda z: torch.stack([torch.addmv(y, like(W, y), y.sin(), beta=2, alpha=0.5) for y in z]),
    "kernel row by row": lambda z: torch.stack(
        [torch.exp(-((y.unsqueeze(1) - y) ** 2)) @ x + y for y, x in zip(z, like(X, z), strict=True)]
    ),
    "nested vmap": lambda z: torch.vmap(lambda y: like(W, y) @ torch.vmap(torch.sin)(y))(z),
    "jvp inside": lambda z: z + torch.func.jvp(lambda y: torch.tanh(y @ like(W, y)), (z,), (like(X, z),))[1],
    "a gate": lambda z: torch.sigmoid(z @ like(W, z)) * torch.tanh(z @ like(V, z)) - z,
    "twice": lambda z: z.sin() @ like(W, z) + z * z + (z @ like(W, z)) * z,
    "two layers": lambda z: torch.tanh(z @ like(TALL.T, z)) @ like(TALL, z) - z,
    "unrolled": unrolled,
    "two layers row by row": lambda z: torch.stack([like(V, y) @ torch.sigmoid(like(W, y) @ y) for y in z]),
    "two layers from the left": lambda z: (like(V, z) @ torch.sigmoid(like(W, z) @ z.T)).T + z,
    "two layers of addmm": lambda z: torch.addmm(
        z, torch.addmm(z, z, like(V, z), beta=0.3, alpha=2), like(W, z), beta=3, alpha=0.5
    ),
    "two layers of each": lambda z: torch.einsum(
        "bij,bj->bi", like(EACH, z), (like(EACH, z) @ z[..., None])[..., 0].exp()
    ),
    "a shared number": lambda z: (z @ like(W, z) * z.mean(1, keepdim=True)) @ like(V, z) + z,
    "a shared number before": lambda z: torch.tanh((z * z[:, :1] + z) @ like(V, z)),
    "a kernel of a layer": lambda z: torch.logsumexp(like(W, z) + torch.tanh(z @ like(V, z)).unsqueeze(1), 2),
    "a layer in another precision": lambda z: (z.to(D) @ W).tanh().to(z.dtype) @ like(V, z),
    "residual block": lambda z: torch.relu(z + torch.nn.functional.gelu(z @ like(W, z))) - 0.5 * z,
    "leaky": leaky,
    "two that are not known": two_unknown,
    "met again": met_again,
    "maxima of pairs": lambda z: torch.cat([z.view(-1, 65, 2).max(2).values, (z @ like(W, z))[:, :65]], 1),
    "a mean": lambda z: z @ like(W, z) + z.mean(1, keepdim=True) * z,
    "a norm": lambda z: z @ like(W, z) - z / z.norm(dim=1, keepdim=True),
    "pairs": lambda z: (like(W, z) * torch.sin(z.unsqueeze(1) - z.unsqueeze(2))).sum(2),
    "mean of pairs": lambda z: (like(W, z) * z.unsqueeze(1)).mean(2) + z,
    "kernel": lambda z: (torch.exp(-((z.unsqueeze(2) - z.unsqueeze(1)) ** 2)) @ like(X, z).unsqueeze(2)).squeeze(2) + z,
    "kernel of itself": lambda z: (torch.exp(-((z.unsqueeze(2) - z.unsqueeze(1)) ** 2)) @ z.unsqueeze(2)).squeeze(2),
    "logsumexp": lambda z: torch.logsumexp(like(W, z) + z.unsqueeze(1), 2) - z,
    "logsumexp kept": lambda z: torch.logsumexp(like(W, z) + z.unsqueeze(1), -1, keepdim=True).squeeze(2) - z,
    "halves": halves,
    "reversed": lambda z: z.flip(1) @ like(W, z) + z.roll(3, 1),
    "stack": lambda z: torch.stack(((z @ like(W, z))[:, :65], z[:, 65:].sin()), 2).reshape(z.shape),
    "unbind": lambda z: torch.stack([a * z[:, 0] for a in (z @ like(W, z)).unbind(1)], 1),
    "a grid": lambda z: (
        (z.view(-1, 10, 13) @ like(SMALL, z) + z.view(-1, 10, 13).transpose(1, 2).reshape(-1, 10, 13)).sin().flatten(1)
    ),
    "padded": lambda z: torch.nn.functional.pad((z @ like(W, z))[:, 1:-1], (1, 1)) + z,
    "where": lambda z: torch.where(z > 0, z @ like(W, z), z.sin()),
    "clamped": lambda z: (z @ like(W, z)).clamp(-0.4, 0.5) - z,
    "branches": branches,
    "checkpoint": checkpointed,
    "in another precision": lambda z: (z.to(D) @ W).to(z.dtype) - z,
    "conv beside a matrix": lambda z: (
        z @ like(W, z) + torch.nn.functional.conv1d(z.unsqueeze(1), like(SMALL[:1, :3], z)[None], padding=1)[:, 0]
    ),
    "cumsum beside a matrix": lambda z: z.cumsum(1) + z @ like(W, z),
    "unknown before": lambda z: torch.tanh(z.cumsum(1) @ like(W, z)),
    "custom function before": lambda z: sine_through_a_function(z) @ like(W, z),
    "index before": lambda z: z[:, ORDER] @ like(W, z),
    "samples in one row": lambda z: (z.reshape(1, -1) @ torch.block_diag(*[like(W, z)] * len(z))).view_as(z),
    "a stencil": lambda z: stencil(z.sin(), 1, 2) * z + z**3,
    "a stencil of a layer": lambda z: stencil(torch.tanh(z @ like(W, z)), 1) - z,
    "a stencil by parts": lambda z: torch.cat([(p := z.sin())[:, 1:] - p[:, :-1], p[:, :1] * p[:, 1:2]], 1),
    "pointwise": lambda z: torch.tanh(3 * z) - z,
    "of nothing much": lambda z: z[:, :1] * like(X, z) + z,
}
AS_MANY: dict[str, Function] = {  # something else comes first, or the check says no
    "a wide stencil": lambda z: stencil(z.sin(), *range(1, 40)),
    "cumsum": lambda z: (z @ like(W, z)).cumsum(1) - z,
    "softmax": lambda z: torch.softmax(z @ like(W, z), 1) - z,
    "layer norm": lambda z: torch.nn.functional.layer_norm(z @ like(W, z), (N,)) - z,
    "conv": lambda z: torch.nn.functional.conv1d(z.unsqueeze(1), like(SMALL[:1, :3], z)[None], padding=1)[:, 0] - z,
    "index": lambda z: (z @ like(W, z))[:, ORDER],
    "in place": written,
    "custom function": lambda z: sine_through_a_function(z @ like(W, z)),
    "hooked": hooked,
    "complex numbers": lambda z: torch.view_as_real(torch.view_as_complex(z.view(-1, 65, 2)) ** 2).flatten(1),
    "in less precision": lambda z: (z.half() @ W.half()).to(z.dtype) - z,
    "fft": lambda z: torch.fft.rfft(z @ like(W, z), n=258).abs(),
    "not finite": lambda z: (z @ like(W, z)) / (z - z),
}
FUNCTIONS = FEWER | AS_MANY
PLAIN = [
    hooked,
    checkpointed,
    written,
    FEWER["custom function before"],
    AS_MANY["custom function"],
]  # not for torch.func


def point_of(batch: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, N, generator=generator, dtype=D).to(dtype)


def by_torch(f: Function, z: Tensor) -> Tensor:
    """The blocks of ``jacrev``, sample by sample: samples do not depend on each other."""
    whole = torch.autograd.functional.jacobian(f, z) if f in PLAIN else torch.func.jacrev(f)(z)
    return torch.stack([whole[b, :, b] for b in range(len(z))])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, batch: int, dtype: torch.dtype) -> None:
    f, z = FUNCTIONS[name], point_of(batch, dtype)
    wanted = by_torch(f, z)
    out, A = autodiff.linearise(f, z)
    (point,) = _leaves(out)
    found = rows_by_structure(out, point, MOST)
    assert (found is None) == (name in AS_MANY)
    J = A.dense()
    tolerance = 1e-3 if name == "in less precision" else 2e-5 if dtype == torch.float32 else 1e-13
    for matrix in [J] if found is None else [J, found]:
        assert matrix.shape == wanted.shape and matrix.dtype == dtype and not matrix.requires_grad
        torch.testing.assert_close(
            matrix, wanted, rtol=tolerance, atol=tolerance * float(wanted.nan_to_num().abs().max()), equal_nan=True
        )


def _leaves(out: Tensor) -> list[Tensor]:
    seen, open_ = set(), [out.grad_fn]
    found = []
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        open_ += [after for after, _ in node.next_functions]
    return found


# ---------------------------------------------------------------------------------------------- what it costs, and checks
def products(f: Function, z: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the rows of the Jacobian of ``f`` are found by products side by side."""
    asked: list[int] = []
    by_products = autodiff.matrix
    monkeypatch.setattr(autodiff, "matrix", lambda *a: asked.append(1) or by_products(*a))  # type: ignore[func-returns-value]
    autodiff.linearise(f, z)[1].dense()
    return len(asked)


@pytest.mark.parametrize("name", ["a cell", "layer norm"])
def test_products_are_spared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z = point_of(3, D)
    assert products(FUNCTIONS[name], z, monkeypatch) == (name in AS_MANY)
    assert products(FUNCTIONS[name], z[:, :], monkeypatch) == (name in AS_MANY)


def test_few_unknowns_are_left_to_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autodiff, "rows_by_structure", lambda *_: pytest.fail("asked"))
    autodiff.linearise(lambda z: z @ W[:64, :64] + z**3, torch.zeros(8, 64, dtype=D))[1].dense()


def wrong_in(what: str) -> Callable[..., Any]:
    """The rule for products with matrices, with one number of one row wrong by a part in a million."""
    right = structured_rules._factor

    def rule(way: Any, edge: Any, A: Tensor, given: Any, turned: bool) -> None:
        A = A.clone()
        if what == "a number":
            A[0, 7, 11] *= 1 + 1e-6
        elif what == "a row":
            A[0, 7] = 0
        elif what == "a small row":
            A[0, 3] *= 1 - 1e-6
        elif what == "a missing number":
            A[0, 3, 5] = 0
        right(way, edge, A, given, turned)

    return rule


@pytest.mark.parametrize("what", ["a number", "a row", "a small row", "a missing number", "nothing"])
def test_a_wrong_rule_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 to 9 are smaller than the others by twelve digits."""
    scales = torch.where(torch.arange(N) < 10, 1e-12, 1.0).to(D)

    def f(z: Tensor) -> Tensor:
        return scales * (z @ W.T + z**3)

    z = point_of(3, D)
    wanted = by_torch(f, z)
    monkeypatch.setattr(structured_rules, "_factor", wrong_in(what))
    out, A = autodiff.linearise(f, z)
    (point,) = _leaves(out)
    assert (rows_by_structure(out, point, MOST) is None) == (what != "nothing")
    torch.testing.assert_close(A.dense(), wanted, rtol=1e-13, atol=1e-25)


@pytest.mark.parametrize("seed", range(4))
def test_what_cancels_in_a_row_is_no_mistake(seed: int) -> None:
    """Where units are dead the derivative of what goes past them is the identity, less another."""
    relu, gelu = torch.nn.functional.relu, torch.nn.functional.gelu
    generator = torch.Generator().manual_seed(seed)
    z, A, B = (torch.randn(k, 200, generator=generator, dtype=D) for k in (16, 200, 200))

    def f(z: Tensor) -> Tensor:
        return relu(z + gelu(relu(z @ A / 14) @ B / 14)) - z

    out, _ = autodiff.linearise(f, z)
    (point,) = _leaves(out)
    found = rows_by_structure(out, point, MOST)
    assert found is not None
    by_products = autodiff.matrix(lambda w: torch.autograd.grad(out, point, w, retain_graph=True)[0], 200, z)
    torch.testing.assert_close(found, by_products, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("f", [lambda z: z @ W + z.roll(1, 0), lambda z: z @ W + z.sum(0)], ids=["roll", "sum"])
def test_samples_that_depend_on_each_other_have_no_blocks(f: Function) -> None:
    out, _ = autodiff.linearise(f, point_of(3, D))
    (point,) = _leaves(out)
    assert rows_by_structure(out, point, MOST) is None


def test_no_more_is_held_than_may_be() -> None:
    wide = torch.randn(N, 40 * N, dtype=D)
    out, _ = autodiff.linearise(lambda z: torch.tanh(z @ wide) @ wide.T, point_of(1, D))
    (point,) = _leaves(out)
    assert rows_by_structure(out, point, MOST) is not None
    assert rows_by_structure(out, point, 39 * N * N) is None


@pytest.mark.parametrize(("most", "left"), [(MOST, False), (20 * N * N, True)])
def test_what_would_take_too_much_is_left_to_autograd(most: int, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(N, 40 * N, dtype=D) / N

    def f(z: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(z @ wide) @ wide.T) @ V

    asked: list[int] = []
    by_autograd = graph.pulled_from
    monkeypatch.setattr(graph, "pulled_from", lambda *a: (asked.append(1), by_autograd(*a))[1])
    out, _ = autodiff.linearise(f, point_of(1, D))
    (point,) = _leaves(out)
    found = rows_by_structure(out, point, most)
    assert found is not None and bool(asked) == left
    torch.testing.assert_close(found, by_torch(f, point.detach()), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("most", [N * N, 3 * N * N, 20 * N * N])
def test_what_is_full_goes_on_in_pieces(most: int) -> None:
    f, z = FEWER["two layers"], point_of(1, D)
    out, _ = autodiff.linearise(f, z)
    (point,) = _leaves(out)
    found = rows_by_structure(out, point, most)
    assert (found is None) == (most < 3 * N * N)  # the wide layer between
    if found is not None:
        torch.testing.assert_close(found, by_torch(f, z), rtol=1e-12, atol=1e-13)


def test_residuals_that_are_more_than_unknowns() -> None:
    z = point_of(3, D)
    f = lambda z: torch.tanh(z @ TALL.T)  # noqa: E731
    found = autodiff.jacobian(lambda z: f(z)[:, : 2 * N], z)
    wanted = torch.func.jacrev(lambda z: f(z)[:, : 2 * N])(z)
    torch.testing.assert_close(found, torch.stack([wanted[b, :, b] for b in range(3)]), rtol=1e-13, atol=1e-13)


def test_what_acts_on_one_row_stays_diagonal() -> None:
    """Sums over what has been expanded, and nothing full."""
    out, _ = autodiff.linearise(lambda z: (torch.sin(z.unsqueeze(2)) * EACH).sum(2), point_of(3, D))
    way = structured._Backwards(out, _leaves(out)[0], MOST)
    with torch.no_grad():
        found = way.run()
    assert found is not None and not way.gained
    wanted = EACH.sum(2) * point_of(3, D).cos()
    torch.testing.assert_close(found.transpose(0, 1), torch.diag_embed(wanted), rtol=1e-12, atol=1e-12)


def test_a_graph_that_is_freed_is_left_to_whoever_asks() -> None:
    out, _ = autodiff.linearise(lambda z: torch.tanh(z @ W), point_of(1, D))
    (point,) = _leaves(out)
    torch.autograd.grad(out.sum(), point)
    assert rows_by_structure(out, point, MOST) is None


# ---------------------------------------------------------------------------------------------------- derivatives of solves
def system(z: Tensor, b: Tensor) -> Tensor:
    return 3 * z + z @ W.T + 0.1 * z**3 - b


def cell(z: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(0.7 * (z @ W.T) + b)


SOLVES: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "root": (ik.root, system, lambda z: torch.diag(3 + 0.3 * z**2) + W),
    "fixed point": (ik.fixed_point, cell, lambda z: torch.diag(1 / (1 - z**2)) - 0.7 * W),  # d b / d z
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SOLVES)
def test_derivatives_of_solves(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``dz/db`` against a closed form, all of it, in reverse and in forward mode; every Jacobian by structure."""
    verb, f, inverse = SOLVES[name]
    asked: list[bool] = []

    def spied(*arguments: Any) -> Tensor | None:
        found = rows_by_structure(*arguments)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(autodiff, "WORTH", 0)
    monkeypatch.setattr(autodiff, "rows_by_structure", spied)
    options = {"solver": "newton", "rule": ik.Implicit(linear_solver="lu"), "batch_dims": 1}
    solve = lambda b: verb(f, torch.zeros_like(b), (b,), **options).value  # noqa: E731
    b = X[:batch]
    z = solve(b)
    assert asked and all(asked)
    wanted = torch.stack([torch.linalg.inv(inverse(row)) for row in z])
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        asked.clear()
        J = jacobian(solve)(b)
        assert asked and all(asked), jacobian
        torch.testing.assert_close(torch.stack([J[k, :, k] for k in range(batch)]), wanted, rtol=1e-9, atol=1e-11)
    leaf = b.clone().requires_grad_()
    asked.clear()
    value = solve(leaf).square().sum()
    (g,) = torch.autograd.grad(value, leaf, create_graph=True)
    torch.testing.assert_close(g, 2 * (z.unsqueeze(1) @ wanted).squeeze(1), rtol=1e-9, atol=1e-10)
    (second,) = torch.autograd.grad(g.sum(), leaf)
    step = 1e-5
    sums = []
    for sign in (1, -1):
        moved = (b + sign * step * torch.ones_like(b)).requires_grad_()
        sums.append(torch.autograd.grad(solve(moved).square().sum(), moved)[0])
    torch.testing.assert_close(second, (sums[0] - sums[1]) / (2 * step), rtol=1e-6, atol=1e-7)
    assert all(asked)


def test_parameters_that_need_derivatives_are_constants() -> None:
    layer = torch.nn.Linear(N, N, dtype=D)
    with torch.no_grad():
        layer.weight.copy_(0.5 * W)
        layer.bias.zero_()
    z = ik.fixed_point(
        lambda z: torch.tanh(layer(z) + X), torch.zeros_like(X), batch_dims=1, rule=ik.Implicit(linear_solver="lu")
    ).value
    z.sum().backward()
    wanted = torch.zeros_like(X)
    for k, row in enumerate(z.detach()):
        slope = torch.diag(1 - row**2)
        wanted[k] = slope @ torch.linalg.solve(
            (torch.eye(N, dtype=D) - slope @ layer.weight.detach()).T, torch.ones(N, dtype=D)
        )
    assert layer.bias.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(layer.bias.grad, wanted.sum(0), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(layer.weight.grad, wanted.T @ z.detach(), rtol=1e-8, atol=1e-9)


def test_hessian_of_a_fit_of_each_sample_takes_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full cotangents go through parts and sums, too, on to the second product with matrices of each sample: side by side,
    autograd would copy these for every row."""

    def slope(z: Tensor) -> Tensor:
        fit = lambda y: torch.cat([(EACH @ y.unsqueeze(2)).squeeze(2) + y**3 - X, 0.1 * y], 1)  # noqa: E731
        return autodiff.gradient(lambda y: 0.5 * fit(y).square().sum(1), z)[1]

    z, called = point_of(3, D), []
    with torch.enable_grad():
        out, point = autodiff.recorded(slope, z)
    want = autodiff.matrix(lambda w: autodiff.products(out, point)[1](w), N, z)
    monkeypatch.setattr(structured.graph, "pulled_from", lambda *_: called.append(1))
    found = rows_by_structure(out, point, MOST)
    assert found is not None and not called
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "each", "asked"), [(30, True, True), (30, False, False), (8, True, False)])
def test_few_columns_of_matrices_of_each_sample(
    n: int, each: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 samples: their own matrices are read for every column, one that they share is not."""
    generator = torch.Generator().manual_seed(2)
    A = torch.randn(64, n, n, generator=generator, dtype=D)
    seen: list[int] = []
    monkeypatch.setattr(autodiff, "rows_by_structure", lambda *_: seen.append(1))
    z = torch.randn(64, n, generator=generator, dtype=D)
    function = (lambda y: torch.einsum("bij,bj->bi", A, y.sin())) if each else (lambda y: y.sin() @ A[0])
    J = autodiff.jacobian(function, z)
    assert bool(seen) is asked
    torch.testing.assert_close(J[3], (A[3] if each else A[0].T) * z[3].cos())
