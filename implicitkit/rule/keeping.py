"""What of a start remains (:mod:`implicitkit.rule.conserved`), as a function at every level of ``torch.func``.

It is known of the plain tensors of a solve: under ``vmap`` of all that this has made of one.  So products with ``B`` are a
``Function`` whose ``vmap`` rule makes the rows that the solve had.  ``B`` is constant, and where it is not second
derivatives are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, tracers
from implicitkit.rule.constant_sums import Held

Slope = Callable[..., Tensor]  # of a state and parameters


class Kept(compat.Function):
    """``B v``, ``B' v`` (``what`` is ``"back"``), or ``w`` as often as there are rows of ``v`` (``"way"``)."""

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    def forward(request: Any, what: str, z: Tensor, v: Tensor, *theta: Tensor) -> Tensor:
        held: Held = request.held
        times = len(v) // held.samples
        if what == "way":
            return torch.zeros_like(v) if held.way is None else held.way.to(v).repeat(times, 1)
        columns = v.detach().view(times, held.samples, -1).permute(1, 2, 0)
        return held.product(columns, what == "back").permute(2, 0, 1).reshape(v.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.request, ctx.what, z, _, *theta = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, z, *theta)
        ctx.save_for_forward(output, z, *theta)

    @staticmethod
    @tracers.opaque_to_compile
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        _, z, *theta = compat.unwrap_dead_wrappers(ctx.saved_tensors)
        if g is None or ctx.what == "way":
            return (None,) * (4 + len(theta))
        back = product(ctx.request, "to" if ctx.what == "back" else "back", z, g, theta)
        return (None, None, None, back, *[None] * len(theta))

    @staticmethod
    @tracers.opaque_to_compile
    def jvp(ctx: Any, _request: Any, _what: Any, _dz: Any, dv: Tensor | None, *_theta: Any) -> Tensor:
        with compat.forward_ad_enabled(ctx.saved_tensors) as (out, z, *theta):
            if dv is None or ctx.what == "way":
                return torch.zeros_like(out)
            return product(ctx.request, ctx.what, z, dv, theta)

    @staticmethod
    @tracers.opaque_to_compile
    def vmap(info: Any, in_dims: Any, request: Any, what: str, z: Tensor, v: Tensor, *theta: Tensor) -> Any:
        return in_rows(Kept, info.batch_size, in_dims, request, what, z, v, *theta)


def in_rows(solve: Any, batch: int, in_dims: Any, request: Any, how: Any, z: Tensor, b: Tensor, *theta: Tensor) -> Any:
    """A ``vmap`` rule of what acts on right-hand sides of every block, the blocks running fastest."""
    (_, _, z_dim, b_dim, *dims) = in_dims
    n, b = request.system.size, front(b, b_dim, batch)
    if z_dim is None and all(d is None for d in dims):  # more right-hand sides of the same blocks
        x = solve.apply(request, how, z, b.reshape(-1, n), *theta)
        return x.unflatten(0, (batch, -1)), 0
    # several right-hand sides a block: they stay in front, the blocks running fastest
    columns = b.unflatten(1, (-1, request.system.batch)).transpose(0, 1)
    flat_z = front(z, z_dim, batch).reshape(-1, n)
    x = solve.apply(request.batched(dims, batch), how, flat_z, columns.reshape(-1, n), *theta)
    return x.reshape(columns.shape).transpose(0, 1).flatten(1, 2), 0


def front(t: Tensor, dim: int | None, batch: int) -> Tensor:
    """``t`` with the dimension of a ``vmap`` in front, or as often as that is long."""
    return t.expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)


def of_rows(function: Any, request: Any, how: Any, z: Tensor, b: Tensor, theta: Sequence[Tensor]) -> Tensor:
    """A ``Function`` that acts on rows ``b``.  A batch of ``is_grads_batched=True`` becomes rows first: no control flow is
    allowed on it, and what a ``Function`` records of it is lost, since torch looks for its graph in the plain tensor."""
    if not compat.is_legacy_batched(b):
        return function.apply(request, how, z, b, *theta)

    def rows(plain: Tensor) -> Tensor:
        return function.apply(request, how, z, plain.reshape(-1, plain.shape[-1]), *theta).view(plain.shape)

    return compat.below_legacy_batch(rows, b)


def product(request: Any, what: str, z: Tensor, v: Tensor, theta: Sequence[Tensor]) -> Tensor:
    """:class:`Kept` on rows ``v``."""
    return of_rows(Kept, request, what, z, v, theta)


def pushed(
    request: Any, F: Slope, z: Tensor, theta: Sequence[Tensor], own: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    r"""``(J_\theta d\theta) w``, of ``F`` of a state and of parameters ``own``; zero where no sum depends on them."""
    if not own or request.held.way is None:
        return torch.zeros_like(z)
    return autodiff.jvp(_along(request, F, z, theta), list(own), list(tangents))


def pulled(
    request: Any, F: Slope, z: Tensor, theta: Sequence[Tensor], own: Sequence[Tensor], u: Tensor
) -> Sequence[Tensor | None]:
    """The gradient of ``u' B J w`` by each of ``own``."""
    if not own or request.held.way is None:
        return [None] * len(own)
    found: Sequence[Tensor] = autodiff.vjp(_along(request, F, z, theta), *own)[1](product(request, "back", z, u, theta))
    return found


def _along(request: Any, F: Slope, z: Tensor, theta: Sequence[Tensor]) -> Callable[..., Tensor]:
    """``J w`` as a function of parameters."""
    w = product(request, "way", z, z, theta)
    return lambda *own: autodiff.jvp(lambda y: F(y, *own), (z,), (w,))
