r"""The everyday call and its first backward, without the machinery that higher orders and transforms need.

The same adjoint equations as the generic rule, for ordinary autograd: with ``J'u = g`` and ``v = D u_y``,

    \bar P = -u_x x',    \bar q = -u_x,    \bar A = v x' - y u_x',    \bar b = -v

followed by the pullback of the affine maps.  A backward that is to be differentiated again, or vectorised, is handed over
to the generic rule, which starts from the solution that is already known; under transforms this module is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit_cvxpy.kkt import ConeKKT
from implicitkit_cvxpy.program import ConeProgram


@dataclass
class Call:
    """One call of a layer.

    Attributes:
        problem, rule: the optimality conditions and the linear solver of derivatives.
        assemble: parameters to ``(P, q, A, b), flags``. find: ``(P, q, A, b), flags -> w``, on plain tensors.
        read: ``w`` to the results. general: parameters and a start to the results, by the generic rule.
    """

    problem: ConeProgram
    rule: ConeKKT
    assemble: Callable[[Sequence[Tensor]], tuple[tuple[Tensor, ...], Tensor]]
    find: Callable[[Sequence[Tensor], Tensor], Tensor]
    read: Callable[[Tensor], tuple[Tensor, ...]]
    general: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, ...]]


def shortcut(call: Call, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a call, differentiable."""
    if torch.is_grad_enabled() and any(v.requires_grad for v in values):
        return _Shortcut.apply(call, *values)
    data, flags = call.assemble(values)
    return call.read(_found(call, data, flags))


def _found(call: Call, data: Sequence[Tensor], flags: Tensor) -> Tensor:
    """The solution ``w``.  The derivatives of cones that are noted on the way are nobody else's, least of all those of a
    checkpoint around the layer."""
    with extend.own_graphs():
        return call.find(data, flags)


class _Shortcut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *values: Tensor) -> tuple[Tensor, ...]:
        needed = ctx.needs_input_grad[1:]
        ctx.leaves = [v.detach().requires_grad_(need) for v, need in zip(values, needed, strict=True)]
        with torch.enable_grad():
            ctx.data, flags = call.assemble(ctx.leaves)
        plain = [t.detach() for t in ctx.data]
        ctx.w = _found(call, plain, flags).requires_grad_()
        with torch.enable_grad():
            ctx.out = call.read(ctx.w)
        ctx.call = call
        ctx.save_for_backward(*values)
        return tuple(t.detach() for t in ctx.out)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            try:
                return (None, *_first_order(ctx, g))
            except ik.ConvergenceError:
                raise
            except RuntimeError:  # a batch of cotangents, at which nothing here may look
                pass
        values, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        with torch.enable_grad():
            out = ctx.call.general(values, ctx.w.detach())
        wanted = [v for v, need in zip(values, needed, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, g, create_graph=torch.is_grad_enabled(), allow_unused=True))
        return (None, *(next(found) if need else None for need in needed))


def _first_order(ctx: Any, g: Sequence[Tensor]) -> list[Tensor | None]:
    call = ctx.call
    (cotangent,) = torch.autograd.grad(ctx.out, ctx.w, g, retain_graph=True)
    P, _, A, b = (t.detach() for t in ctx.data)
    w = ctx.w.detach()
    J, project = call.problem.jacobian(w, P, A, b)
    u = call.rule.derivative(J.T, cotangent)
    n = call.problem.n
    x, y, u_x, v = w[:, :n], w[:, n:], u[:, :n], project(u[:, n:])
    P_held, A_held = call.problem.P_held, call.problem.A_held
    pulled = {
        0: lambda: P_held.outer(u_x, -x),
        1: lambda: -u_x,
        2: lambda: A_held.outer(v, x).sub_(A_held.outer(y, u_x)),
        3: lambda: -v,
    }
    moving = [i for i, t in enumerate(ctx.data) if t.requires_grad]
    wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
    if not moving:
        return [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in ctx.leaves]
    found = torch.autograd.grad(
        [ctx.data[i] for i in moving], wanted, [pulled[i]() for i in moving], retain_graph=True, allow_unused=True
    )
    pairs = iter(found)
    grads: list[Tensor | None] = []
    for leaf in ctx.leaves:
        value = next(pairs) if leaf.requires_grad else None
        grads.append(torch.zeros_like(leaf) if leaf.requires_grad and value is None else value)
    return grads
