r"""Linear systems of a derivative as functions at every level of ``torch.func``.

:class:`LinSolve` is ``x = K^{-1} b``, or ``K^{-T} b``, as a function of ``(z, b, \theta)``, with the Jacobian ``A = dF/dz``
for ``K``, or ``A + B`` where a flow conserves sums (:mod:`implicitkit.rule.conserved`):

    tangent:    \dot x = K^{-1} (\dot b - \dot K x)
    cotangent:  \bar b = w with K^T w = \bar x,   (\bar z, \bar\theta) = -d<w, K x>

:class:`Kept` is ``B v``, or ``B^T v``.  ``B = U Q`` is constant, and ``\dot K = \dot A``, unless the sums depend on
``\theta``.  Then the rows ``Q`` go on spanning the left null space of ``A``, and ``Q U`` may stay as it is: from ``Q A = 0``

    \dot Q A + Q \dot A = 0,    \dot Q U = 0    =>    \dot Q K = -Q \dot A,    \dot B = -B \dot A K^{-1}

so that ``\dot K = \dot A - B \dot A K^{-1}``, for derivatives of every order.  (Nothing of it changes along ``\dot z``: the
rows are those at every ``z``.)

Sums are known of the plain tensors of a solve: under ``vmap`` of all that this has made of one.  So both have ``vmap`` rules
that make the rows that the solve had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, graph, recording, tracers
from implicitkit.rule.orders import next_order
from implicitkit.rule.refusals import refuse_batched_below, refuse_batched_tangents


class LinSolve(compat.Function):
    """``x = K^{-1} b`` (``K^{-T} b`` if transposed).

    ``b`` may have ``k`` times the rows of ``z``: ``k`` right-hand sides of every block, the blocks running fastest.
    """

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    def forward(request: Any, transposed: bool, z: Tensor, b: Tensor, *theta: Tensor) -> Tensor:
        refuse_batched_below(b)
        later = recording.recorded(lambda b: LinSolve.apply(request, transposed, z, b, *theta), [b], b, (z, *theta))
        if later is not None:
            return later
        with recording.unrecorded():
            if not request.factors_once:
                request, z = _for_rows(request, z, theta, len(b))
            _, A = request.linearise(z.detach(), [t.detach() for t in theta])
            A = A.T if transposed else A
            with torch.no_grad():
                return request.solve_linear(A, b.detach(), transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    @recording.refusing()
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, z, *theta = compat.unwrap_dead_wrappers(ctx.saved_tensors)
        request, transposed = ctx.request, ctx.how
        if g is None:
            return (None,) * (4 + len(theta))
        refuse_batched_tangents(g, x, z, *theta)
        request = next_order(request) if graph.leads_to(z) else request
        w = solved(request.for_reverse() if transposed else request, not transposed, z, g, theta)
        p, q = (x, w) if transposed else (w, x)  # d<w, K x> = d<K^T p, q>
        pairs = [(p, q)]
        if _moves(request) and any(ctx.needs_input_grad[4:]):
            pairs.append((-kept(request, "back", z, p, theta), solved(request, False, z, q, theta)))
        return (None, None, *_pulled(ctx, z, theta, pairs, w, not transposed and compat.is_legacy_batched(g)))

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    @recording.refusing()
    def jvp(
        ctx: Any, _request: Any, _transposed: Any, dz: Tensor | None, db: Tensor | None, *dtheta: Tensor | None
    ) -> Tensor:
        request, transposed = next_order(ctx.request), ctx.how
        with compat.forward_ad_enabled(ctx.saved_tensors) as (x, z, *theta):
            along = _Along(request, z, theta, dz, dtheta)
            change = along(x, transposed)
            if _moves(request):
                change = change + along.of_kept(x, transposed)
            return solved(request, transposed, z, as_primal(db, x) - change, theta)

    @staticmethod
    @tracers.opaque_to_compile
    def vmap(
        info: Any, in_dims: tuple[Any, ...], request: Any, transposed: bool, z: Tensor, b: Tensor, *theta: Tensor
    ) -> Any:
        refuse_batched_below(b)
        return _in_rows(LinSolve, info.batch_size, in_dims, request, transposed, z, b, *theta)


class Kept(compat.Function):
    """``B v`` or, where ``what`` is ``"back"``, ``B^T v``; of rows as :class:`LinSolve`."""

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    def forward(request: Any, what: str, z: Tensor, v: Tensor, *theta: Tensor) -> Tensor:
        held = request.held
        columns = v.detach().view(len(v) // held.samples, held.samples, -1).permute(1, 2, 0)
        out: Tensor = held.product(columns, what == "back").permute(2, 0, 1).reshape(v.shape)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    @tracers.opaque_to_compile
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        out, z, v, *theta = compat.unwrap_dead_wrappers(ctx.saved_tensors)
        request, back = ctx.request, ctx.how == "back"
        if g is None:
            return (None,) * (4 + len(theta))
        own, pairs = kept(request, "to" if back else "back", z, g, theta), []
        if _moves(request) and any(ctx.needs_input_grad[4:]):  # -d<g, B A K^{-1} v>, -d<v, B A K^{-1} g>
            pairs = [(out if back else own, solved(request, False, z, g if back else v, theta))]
        return (None, None, *_pulled(ctx, z, theta, pairs, own, not back and compat.is_legacy_batched(g)))

    @staticmethod
    @tracers.opaque_to_compile
    def jvp(
        ctx: Any, _request: Any, _what: Any, dz: Tensor | None, dv: Tensor | None, *dtheta: Tensor | None
    ) -> Tensor:
        request, back = ctx.request, ctx.how == "back"
        with compat.forward_ad_enabled(ctx.saved_tensors) as (out, z, v, *theta):
            change = torch.zeros_like(out) if dv is None else kept(request, ctx.how, z, as_primal(dv, v), theta)
            if not _moves(request):
                return change
            return change + _Along(request, z, theta, dz, dtheta).of_kept(v, back)

    @staticmethod
    @tracers.opaque_to_compile
    def vmap(info: Any, in_dims: Any, request: Any, what: str, z: Tensor, v: Tensor, *theta: Tensor) -> Any:
        return _in_rows(Kept, info.batch_size, in_dims, request, what, z, v, *theta)


def solved(request: Any, transposed: bool, z: Tensor, b: Tensor, theta: Sequence[Tensor]) -> Tensor:
    """:class:`LinSolve` on rows ``b``."""
    return _of_rows(LinSolve, request, transposed, z, b, theta)


def kept(request: Any, what: str, z: Tensor, v: Tensor, theta: Sequence[Tensor]) -> Tensor:
    """:class:`Kept` on rows ``v``."""
    return _of_rows(Kept, request, what, z, v, theta)


def as_primal(tangent: Tensor | None, primal: Tensor) -> Tensor:
    """The tangent in the precision of its primal, zero for none: torch makes some of float64 where levels are nested."""
    return torch.zeros_like(primal) if tangent is None else tangent.to(primal.dtype)


def replaced(theta: Sequence[Tensor], where: Sequence[int], by: Sequence[Tensor]) -> list[Tensor]:
    """``theta``, with others at some places."""
    full = list(theta)
    for i, t in zip(where, by, strict=True):
        full[i] = t
    return full


def front(t: Tensor, dim: int | None, batch: int) -> Tensor:
    """``t`` with the dimension of a ``vmap`` in front, or as often as that is long."""
    return t.expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.request, ctx.how, z, v, *theta = inputs
    saved = (output, z, *theta) if isinstance(ctx.how, bool) else (output, z, v, *theta)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _moves(request: Any) -> bool:
    """Do sums depend on parameters?"""
    return request.held is not None and request.held.moves


class _Along:
    r"""``\dot A v``, or ``\dot A^T v``, along tangents of ``z`` and of ``\theta``."""

    def __init__(
        self, request: Any, z: Tensor, theta: Sequence[Tensor], dz: Tensor | None, dtheta: Sequence[Tensor | None]
    ) -> None:
        self.request, self.z, self.theta = request, z, theta
        self.moving = [i for i, t in enumerate(dtheta) if t is not None]
        self.tangents = [as_primal(dz, z), *(as_primal(dtheta[i], theta[i]) for i in self.moving)]

    def __call__(self, v: Tensor, transposed: bool) -> Tensor:
        def product(y: Tensor, *changed: Tensor) -> Tensor:
            residual, y = _for_each(self.request, y, replaced(self.theta, self.moving, changed), len(v))
            return autodiff.vjp(residual, y)[1](v)[0] if transposed else autodiff.jvp(residual, (y,), (v,))

        return autodiff.jvp(product, (self.z, *(self.theta[i] for i in self.moving)), self.tangents)

    def of_kept(self, v: Tensor, transposed: bool) -> Tensor:
        r"""``\dot B v = -B \dot A K^{-1} v``, or ``\dot B^T v = -K^{-T} \dot A^T B^T v``."""
        at = self.request, self.z, self.theta
        if transposed:
            changed = self(kept(at[0], "back", at[1], v, at[2]), True)
            return -solved(at[0], True, at[1], changed, at[2])
        changed = self(solved(at[0], False, at[1], v, at[2]), False)
        return -kept(at[0], "to", at[1], changed, at[2])


def _pulled(
    ctx: Any, z: Tensor, theta: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]], own: Tensor, batched: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of ``-sum <p, A q>`` of these pairs by ``z`` and ``theta``, as far as they are needed, and between them
    that of the right-hand side, ``own``.

    ``batched`` by ``autograd.grad(is_grads_batched=True)``: ``p`` may be a cotangent only, nothing would record it.
    """
    request, needed = ctx.request, [i for i in range(len(theta)) if ctx.needs_input_grad[4 + i]]
    grads: list[Tensor | None] = [None] * (1 + len(theta))
    for p, q in pairs if ctx.needs_input_grad[2] or needed else ():

        def product(y: Tensor, *moving: Tensor) -> Tensor:  # A q, or A^T p
            residual, y = _for_each(request, y, replaced(theta, needed, moving), len(p))  # noqa: B023
            return autodiff.jvp(residual, (y,), (q,)) if batched else autodiff.vjp(residual, y)[1](p)[0]  # noqa: B023

        _, pullback = autodiff.vjp(product, z, *(theta[i] for i in needed))
        for i, value in zip((0, *(1 + i for i in needed)), pullback(-p if batched else -q), strict=True):
            before = grads[i]
            grads[i] = value if before is None else before + value
    return (grads[0], own, *grads[1:])


def _for_each(request: Any, z: Tensor, theta: Sequence[Tensor], rows: int) -> tuple[Any, Tensor]:
    """The residual as a function of the state, and the state, for ``rows`` vectors: as often as there are right-hand
    sides of every block."""
    request, z = _for_rows(request, z, theta, rows)
    request.system.lifted.as_found()
    return lambda v: request.system.residual(v, *theta), z


def _for_rows(request: Any, z: Tensor, theta: Sequence[Tensor], rows: int) -> tuple[Any, Tensor]:
    """The request, and the state, as often as there are right-hand sides of every block; the samples run fastest, as the
    figures of the solve are repeated (:mod:`implicitkit.rule.request`)."""
    times = rows // max(1, len(z))
    return (request.batched([None] * len(theta), times), z.repeat(times, 1)) if times > 1 else (request, z)


def _in_rows(
    function: Any, batch: int, in_dims: Any, request: Any, how: Any, z: Tensor, b: Tensor, *theta: Tensor
) -> Any:
    """A ``vmap`` rule of what acts on right-hand sides of every block, the blocks running fastest."""
    (_, _, z_dim, b_dim, *dims) = in_dims
    n, b = request.system.size, front(b, b_dim, batch)
    if z_dim is None and all(d is None for d in dims):  # more right-hand sides of the same blocks
        x = function.apply(request, how, z, b.reshape(-1, n), *theta)
        return x.unflatten(0, (batch, -1)), 0
    # several right-hand sides a block: they stay in front, the blocks running fastest
    columns = b.unflatten(1, (-1, request.system.batch)).transpose(0, 1)
    flat_z = front(z, z_dim, batch).reshape(-1, n)
    x = function.apply(request.batched(dims, batch), how, flat_z, columns.reshape(-1, n), *theta)
    return x.reshape(columns.shape).transpose(0, 1).flatten(1, 2), 0


def _of_rows(function: Any, request: Any, how: Any, z: Tensor, b: Tensor, theta: Sequence[Tensor]) -> Tensor:
    """A ``Function`` that acts on rows ``b``.  A batch of ``is_grads_batched=True`` becomes rows first: no control flow is
    allowed on it, and what a ``Function`` records of it is lost, since torch looks for its graph in the plain tensor."""
    if not compat.is_legacy_batched(b):
        return function.apply(request, how, z, b, *theta)

    def rows(plain: Tensor) -> Tensor:
        return function.apply(request, how, z, plain.reshape(-1, plain.shape[-1]), *theta).view(plain.shape)

    return compat.below_legacy_batch(rows, b)
