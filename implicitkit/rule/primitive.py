r"""One primitive carries every derivative.

Let ``F(z, \theta) = 0`` define ``z(\theta)``, with ``A = dF/dz``.  By the implicit function theorem

    tangent:    \dot z = -A^{-1} (dF/d\theta) \dot\theta
    cotangent:  \bar\theta = -(dF/d\theta)^T u,   A^T u = \bar z

:class:`_Root` is the map ``(z0, \theta) -> z`` with these two rules.  The linear solve in them is a function of ``(z, b,
\theta)``, which is the same primitive once more, of the residual ``A x - b`` (:mod:`implicitkit.rule.linear_functions`), so
that derivatives of every order and in every mode come out of two rules, and the solver is never differentiated.

Both take explicit tensors only and see plain ones in ``forward``: whatever the stack of transforms, torch peels one
level at a time, and the ``vmap`` rule is the same primitive on the system with one batch dimension more.  So a solver
may use ``.item()``, loops, NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, graph, recording, tracers
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.sparse_products import as_they_lie
from implicitkit.rule.constant_sums import Held
from implicitkit.rule.linear_functions import as_primal, front, kept, replaced, solved
from implicitkit.rule.refusals import refuse_batched_tangents
from implicitkit.system import System


class ImplicitSolve(Protocol):
    """What the primitive asks of a request (:class:`~implicitkit.rule.request.Request`): opaque to autograd and to the
    transforms, everything about a solve that is not a tensor."""

    system: System
    on_failure: str

    @property
    def factors_once(self) -> bool:
        """Does :meth:`solve_linear` factor a matrix once for all right-hand sides?"""

    def batched(self, dims: Sequence[int | None], batch: int) -> ImplicitSolve:
        """This solve ``batch`` times over."""

    def find(self, z0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The solution of plain tensors, and its figures under transforms."""

    @property
    def incomplete(self) -> bool:
        """Have samples failed, without an error?"""

    def solved(self, z: Tensor, theta: Sequence[Tensor], figures: Tensor | None) -> tuple[Tensor, list[Tensor]] | None:
        """``z`` and ``theta`` without what lost samples would make NaN; ``None`` where no sample has a derivative."""

    def linearise(self, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        """The residual at ``z`` with its graph, and ``A`` there."""

    def solve_linear(self, A: Operator, b: Tensor, transposed: bool) -> Tensor:
        """``A x = b`` on plain tensors."""

    def for_reverse(self) -> ImplicitSolve:
        """This request, where a reverse pass uses what :meth:`solve_linear` finds in forward mode."""

    @property
    def follows(self) -> bool:
        """Does the solution follow a flow or an iteration from the start, of which sums may remain?"""

    @property
    def start(self) -> Tensor | None:
        """Where the solve began, if it does, as a plain tensor."""

    @property
    def held(self) -> Held | None:
        """What of the start remains, if :meth:`solve_linear` has met any: ``A dz = B dz0``."""


def root(request: ImplicitSolve, z0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """``(z, stats)``: the solution as a differentiable function of ``theta`` (and, with derivative zero, of ``z0``)."""
    if (
        not compat.transforms_active()
        and not compat.has_forward_level()
        and not (torch.is_grad_enabled() and (z0.requires_grad or any([t.requires_grad for t in theta])))
    ):
        return request.find(z0.detach(), [t.detach() for t in theta])
    if compat.reverse_inside_forward():
        request = request.for_reverse()
    if request.system.problem.kind.flow > 0:  # derivatives may ask for the start, and it may be written to before
        z0 = z0.clone()
    return _Root.apply(request, z0, *theta)


class _Root(compat.Function):
    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    def forward(request: ImplicitSolve, z0: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor | None]:
        with recording.unrecorded():
            return request.find(z0.detach(), [t.detach() for t in theta])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        ctx.request, z0, *theta = inputs
        z, stats = output
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.figures = stats is not None and ctx.request.incomplete
        ctx.follows = ctx.request.follows and _is_asked_for(z0)
        saved = (z, *theta, *((z0,) if ctx.follows else ()), *((stats,) if ctx.figures else ()))
        ctx.save_for_backward(*saved)
        if compat.has_forward_level():  # which calls jvp at once, or never
            ctx.save_for_forward(*saved)

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    @recording.refusing()
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        # read once: non-reentrant checkpointing allows no more; a pullback may be called after its transform has ended
        z, theta, z0, figures = _saved(ctx, compat.unwrap_dead_wrappers(ctx.saved_tensors))
        request, needed = ctx.request, [i for i in range(len(theta)) if ctx.needs_input_grad[2 + i]]
        grads: list[Tensor | None] = [None] * len(theta)
        starts = ctx.needs_input_grad[1] and g is not None
        start = torch.zeros_like(z) if ctx.needs_input_grad[1] else None
        asked = g is not None and (needed or (starts and request.follows))
        usable = _usable(request, z, theta, figures) if asked else None
        if g is not None and usable is None:
            grads = [torch.zeros_like(t) if i in needed else None for i, t in enumerate(theta)]
        elif g is not None and usable is not None:
            z, theta = usable
            refuse_batched_tangents(g, z, *theta)
            levels = compat.transforms_active() or compat.has_forward_level() or compat.is_legacy_batched(g)
            if levels or torch.is_grad_enabled():
                u = solved(request, True, z, g, theta)
                found: Sequence[Tensor | None] = _pull_theta(request, z, theta, needed, -u) if needed else ()
            else:
                with as_they_lie(request.system.lifted.sparse):
                    u, found = _first_order(request, z, theta, needed, g)
            if (held := request.held) is not None and (starts or (needed and held.moves)):
                back = kept(request, "back", z, u, theta)
                start = back if starts else start
                if needed and held.moves:
                    moved = autodiff.vjp(_along(request, z, z0, theta, needed), *(theta[i] for i in needed))[1](back)
                    found = [m if f is None else f + m for f, m in zip(found, moved, strict=True)]
            given = request.system.lifted.from_args
            for i, value in zip(needed, found, strict=True):
                # an argument that the solution does not depend on has derivative zero; an unused parameter has none
                grads[i] = torch.zeros_like(theta[i]) if value is None and i < given else value
        if graph.is_freed():  # the function may lead to the solution, a circle that no collector sees
            ctx.request = None
        return (None, start, *grads)

    @staticmethod
    @tracers.opaque_to_compile
    @compat.outside_inference
    @recording.refusing()
    def jvp(ctx: Any, _request: Any, dz0: Tensor | None, *tangents: Tensor | None) -> tuple[Tensor, None]:
        request = ctx.request
        with compat.forward_ad_enabled(ctx.saved_tensors) as point:
            z, theta, z0, figures = _saved(ctx, point)
            moving = [i for i, t in enumerate(tangents) if t is not None]
            starts = dz0 is not None and request.follows
            usable = _usable(request, z, theta, figures) if moving or starts else None
            if usable is None:
                return torch.zeros_like(z), None
            z, theta = usable

            def pushed(*tangents: Tensor) -> Tensor:
                dz, start = torch.zeros_like(z), tangents[-1] if len(tangents) > len(moving) else None
                if moving:
                    of, own = _theta_only(request, z, theta, moving), [theta[i] for i in moving]
                    dz = solved(request, False, z, -autodiff.jvp(of, own, tangents[: len(moving)]), theta)
                elif start is not None:
                    solved(request, False, z, start, theta)  # which meets what is held
                if (held := request.held) is None or (start is None and not held.moves):
                    return dz
                more = torch.zeros_like(z) if start is None else start
                if moving and held.moves:
                    own = [theta[i] for i in moving]
                    more = more + autodiff.jvp(_along(request, z, z0, theta, moving), own, tangents[: len(moving)])
                return dz + solved(request, False, z, kept(request, "to", z, more, theta), theta)

            own = [as_primal(tangents[i], theta[i]) for i in moving] + ([] if dz0 is None else [as_primal(dz0, z)])
            later = recording.recorded(pushed, own, z, (z, *theta))
            return pushed(*own) if later is None else later, None

    @staticmethod
    @tracers.opaque_to_compile
    def vmap(info: Any, in_dims: tuple[Any, ...], request: ImplicitSolve, z0: Tensor, *theta: Tensor) -> Any:
        batch, (_, z_dim, *dims) = info.batch_size, in_dims
        flat = front(z0, z_dim, batch).reshape(-1, request.system.size)
        z, stats = _Root.apply(request.batched(dims, batch), flat, *theta)
        return (z.unflatten(0, (batch, -1)), stats.unflatten(0, (batch, -1))), (0, 0)


# ------------------------------------------------------------------------------------------------------------- details
def _is_asked_for(start: Tensor) -> bool:
    """May a derivative ask for what made the start?  Else that of the request is enough."""
    return compat.transforms_active() or compat.has_forward_level() or start.requires_grad


def _saved(ctx: Any, point: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor | None]:
    """What a solve has saved: ``z``, ``theta``, the start if sums of it may remain, and figures if samples have failed."""
    rest = list(point)
    figures = rest.pop() if ctx.figures else None
    start = rest.pop() if ctx.follows else ctx.request.start
    return rest[0], rest[1:], start, figures


def _usable(
    request: ImplicitSolve, z: Tensor, theta: list[Tensor], figures: Tensor | None
) -> tuple[Tensor, list[Tensor]] | None:
    """``z`` and ``theta`` where derivatives are finite; ``None`` where all of them are zero."""
    return request.solved(z, theta, figures) if request.incomplete else (z, theta)


def _first_order(
    request: ImplicitSolve, z: Tensor, theta: Sequence[Tensor], needed: Sequence[int], g: Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The everyday backward: one evaluation whose graph serves the linear solve and the pullback to theta; ``u``, too."""
    z = z.detach()  # out of the wrapper of a transform that has ended, as theta is below
    known = request.system.problem.first_order(request.system, z, theta)
    if known is not None:
        A, pull = known
        u = request.solve_linear(A.T, g, True)
        return u, pull(-u, needed)
    leaves = [compat.ordinary(t.detach()) for t in theta]
    leaves = [t.requires_grad_() if i in needed else t for i, t in enumerate(leaves)]
    out, A = request.linearise(z, leaves)
    u = request.solve_linear(A.T, g, True)
    if A.structure is not None:
        found = A.structure.pull(u)
        return u, [found[i] for i in needed]
    wanted = [leaves[i] for i in needed]
    if not out.requires_grad or not wanted:
        return u, [None] * len(needed)
    return u, graph.pulled(out, wanted, -u, retain_graph=False)


def _pull_theta(
    request: ImplicitSolve, z: Tensor, theta: Sequence[Tensor], needed: Sequence[int], w: Tensor
) -> Sequence[Tensor]:
    """``(dF/d theta)^T w`` for the tensors needed, differentiable."""
    return autodiff.vjp(_slope(request, theta, needed), *(theta[i] for i in needed), beside=(z,))[1](w)


def _theta_only(request: ImplicitSolve, z: Tensor, theta: Sequence[Tensor], moving: Sequence[int]) -> Any:
    request.system.lifted.as_found()
    return lambda *changed: request.system.residual(z, *replaced(theta, moving, changed))


def _slope(request: ImplicitSolve, theta: Sequence[Tensor], moving: Sequence[int]) -> Any:
    request.system.lifted.as_found()
    return lambda y, *changed: request.system.residual(y, *replaced(theta, moving, changed))


def _along(
    request: ImplicitSolve, z: Tensor, start: Tensor | None, theta: Sequence[Tensor], moving: Sequence[int]
) -> Callable[..., Tensor]:
    """``J w`` as a function of parameters that sums depend on, ``K w = z - z_0`` (:mod:`implicitkit.rule.conserved`)."""
    assert start is not None  # it is known as long as sums of it are
    w = solved(request, False, z, z - start, theta)
    F = _slope(request, theta, moving)
    return lambda *own: autodiff.jvp(lambda y: F(y, *own), (z,), (w,))
