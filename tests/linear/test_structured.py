"""Dense Jacobians from cotangents that stay diagonal until they meet a matrix, against ``torch.func.jacrev``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import implicitkit as ik
from implicitkit.foundation import autodiff, structured, structured_rules
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
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


def sine_through_a_function(z: Tensor) -> Tensor:
    found: Tensor = Sine.apply(z)  # type: ignore[no-untyped-call]
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


def leaky(z: Tensor) -> Tensor:
    return torch.nn.functional.leaky_relu(z @ like(W, z), 0.3)


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
    "nested vmap": lambda z: torch.vmap(lambda y: like(W, y) @ torch.vmap(torch.sin)(y))(z),
    "jvp inside": lambda z: z + torch.func.jvp(lambda y: torch.tanh(y @ like(W, y)), (z,), (like(X, z),))[1],
    "a gate": lambda z: torch.sigmoid(z @ like(W, z)) * torch.tanh(z @ like(V, z)) - z,
    "twice": lambda z: z.sin() @ like(W, z) + z * z + (z @ like(W, z)) * z,
    "two layers": lambda z: torch.tanh(z @ like(TALL.T, z)) @ like(TALL, z) - z,
    "unrolled": unrolled,
    "residual block": lambda z: torch.relu(z + torch.nn.functional.gelu(z @ like(W, z))) - 0.5 * z,
    "leaky": leaky,
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
    "pointwise": lambda z: torch.tanh(3 * z) - z,
    "of nothing much": lambda z: z[:, :1] * like(X, z) + z,
}
AS_MANY: dict[str, Function] = {  # something else comes first, or the check says no
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
