r"""One primitive carries every derivative.

Let ``F(z, \theta) = 0`` define ``z(\theta)``, with ``A = dF/dz``.  By the implicit function theorem

    tangent:    \dot z = -A^{-1} (dF/d\theta) \dot\theta
    cotangent:  \bar\theta = -(dF/d\theta)^T u,   A^T u = \bar z

:class:`_Root` is the map ``(z0, \theta) -> z`` with these two rules.  The linear solve in them is :class:`_LinSolve`,
``x = A^{-1} b`` or ``A^{-T} b`` as a function of ``(z, b, \theta)``, which is the same primitive once more (its residual
is ``A x - b``):

    tangent:    \dot x = A^{-1} (\dot b - \dot A x)
    cotangent:  \bar b = w with A^T w = \bar x,   (\bar z, \bar\theta) = -d<w, A x>

so that derivatives of every order and in every mode come out of two rules, and the solver is never differentiated.

Both take explicit tensors only and see plain ones in ``forward``: whatever the stack of transforms, torch peels one
level at a time, and the ``vmap`` rule is the same primitive on the system with one batch dimension more.  So a solver
may use ``.item()``, loops, NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from implicitkit import autodiff, compat
from implicitkit.errors import ConvergenceError, ConvergenceWarning, warn
from implicitkit.lifting.lifted import check_leaves
from implicitkit.linear import LinearSolver
from implicitkit.linear.base import LinearSolution, Operator
from implicitkit.linear.dense import factor_batched
from implicitkit.solution import LinearReport, Record, Status
from implicitkit.solver import driver
from implicitkit.solver.evaluations import Function as SolverFunction
from implicitkit.system import System, full_precision

__all__ = ["Call", "root"]


class Call:
    """Everything about a solve that is not a tensor: opaque to autograd and to the transforms."""

    def __init__(
        self,
        system: System,
        solver: Any,
        options: driver.Options,
        linear_solver: LinearSolver,
        linear_options: dict[str, Any],
        on_failure: str,
        record: Record,
        first: Tensor | None = None,
    ) -> None:
        self.system, self.solver, self.options = system, solver, options
        self.linear_solver, self.linear_options = linear_solver, linear_options
        self.on_failure, self.record, self.first = on_failure, record, first
        self.batchable = compat.transforms_active()  # the figures of the solve must be a tensor of the caller's level

    def batched(self, dims: Sequence[int | None], batch: int) -> Call:
        call = Call(
            self.system.batched(dims, batch),
            self.solver,
            self.options,
            self.linear_solver,
            self.linear_options,
            self.on_failure,
            self.record,
        )
        call.batchable = True
        return call

    # ------------------------------------------------------------------------------------------------------- forward
    def find(self, z0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Run the solver on plain tensors: ``z (batch, n)``, and under transforms also ``(batch, 3)``: residual norm,
        steps and status, as a tensor that the levels can batch."""
        with torch.no_grad(), full_precision(z0.device.type):
            solves = self.solver.solves
            f = SolverFunction(self.system, theta, "root" if solves == "direct" else solves)
            if self.first is not None:
                f.prime(z0, self.first)
                self.first = None
            outcome = driver.find(self.solver, f, z0, self.options)
            self.record.outcome, self.record.system, self.record.theta = outcome, self.system, tuple(theta)
            z = outcome.z.clone()  # a solver may return what the map returned, and that may be anyone's
            if self.on_failure == "nan" and not outcome.all_converged:  # finite, so that a derivative of zero is zero
                z = torch.where((outcome.status == int(Status.CONVERGED)).unsqueeze(1), z, z0)
            if not self.batchable:
                return z, None
            kind = torch.float32 if z0.device.type == "mps" else torch.float64
            return z, torch.stack([t.to(kind) for t in (outcome.residual_norm, outcome.steps, outcome.status)], 1)

    # -------------------------------------------------------------------------------------------------- linear solves
    def solve_linear(self, A: Operator, b: Tensor, transposed: bool) -> Tensor:
        """``A x = b`` on plain tensors, reported, and judged by the failure policy."""
        with full_precision(b.device.type):
            answer = self.linear_solver.solve(A, b, **self.linear_options)
        layout = self.system.layout
        lead = (len(b) // layout.batch,) if len(b) != layout.batch else ()
        self.record.linear.append(
            LinearReport(
                layout.unpack_batch(answer.converged, lead),
                layout.unpack_batch(answer.residual_norm, lead),
                layout.unpack_batch(answer.steps, lead),
                transposed,
            )
        )
        del self.record.linear[:-8]  # the last few are enough
        if self.on_failure == "nan":
            return self._or_nan(answer, b)
        if self.on_failure != "ignore" and not bool(answer.converged.all()):
            self._linear_failure(answer, b, transposed)
        return answer.x

    def _or_nan(self, answer: LinearSolution, b: Tensor) -> Tensor:
        """NaN where the linear solve failed; zero for samples that ask for nothing or have no solution: they disturb no
        other."""
        status = self.record.outcome.status
        nothing = (b == 0).all(1)
        if len(status) == len(b):
            nothing |= status != int(Status.CONVERGED)
        x = torch.where(answer.converged.unsqueeze(1), answer.x, torch.nan)
        return torch.where(nothing.unsqueeze(1), 0, x)

    def _linear_failure(self, answer: LinearSolution, b: Tensor, transposed: bool) -> None:
        failed = (~answer.converged).nonzero().squeeze(1)
        norms = answer.residual_norm[failed]
        order = torch.argsort(torch.nan_to_num(norms, nan=torch.inf), descending=True)[:5]
        worst, worst_norms = failed[order].tolist(), norms[order].tolist()
        where = "backward (reverse mode)" if transposed else "forward-mode derivative"
        name = getattr(self.linear_solver, "name", "") or type(self.linear_solver).__name__
        text = (
            f"the linear solve of the {where} did not converge: {name}, {len(failed)} of {len(answer.converged)} samples; "
            f"worst: "
            + ", ".join(f"sample {i}: residual {r:.3g}" for i, r in zip(worst, worst_norms, strict=True))
            + (f". {answer.reason}" if answer.reason else "")
        )
        if not bool(torch.isfinite(b).all()):
            text += ". The incoming derivative itself has NaN or Inf"
        text += (
            '. A singular Jacobian has the minimum-norm answer with rule=ik.Implicit(linear_solver="lsmr"); otherwise try '
            'another linear_solver=, raise its max_steps= or rtol=, or accept it with on_failure="warn" or "ignore"'
        )
        if self.on_failure == "warn":
            warn(text, ConvergenceWarning)
            return
        raise ConvergenceError(text, None, tuple(worst), tuple(worst_norms))

    def linearise(self, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        """The residual at ``z``, as a plain tensor, with its graph, and ``A`` there."""
        out, A = self.system.problem.linearise(self.system, z.detach(), theta)
        if A.structure is None:
            check_leaves(self.system.lifted, out, theta, z)
        else:
            A.structure.unsolved = getattr(self.record.outcome, "unsolved", frozenset())
        return out, A


def root(call: Call, z0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """``(z, stats)``: the solution as a differentiable function of ``theta`` (and, with derivative zero, of ``z0``)."""
    if (
        not compat.transforms_active()
        and not compat.has_forward_level()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (z0, *theta)))
    ):
        return call.find(z0.detach(), [t.detach() for t in theta])
    return _Root.apply(call, z0, *theta)


class _Root(Function):
    @staticmethod
    @compat.opaque_to_compile
    def forward(call: Call, z0: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor | None]:
        return call.find(z0.detach(), [t.detach() for t in theta])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        ctx.call, _, *theta = inputs
        z, stats = output
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z, *theta)
        ctx.save_for_forward(z, *theta)

    @staticmethod
    @compat.opaque_to_compile
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        z, *theta = ctx.saved_tensors  # read once: non-reentrant checkpointing allows no more
        call, needed = ctx.call, [i for i in range(len(theta)) if ctx.needs_input_grad[2 + i]]
        grads: list[Tensor | None] = [None] * len(theta)
        if g is not None and needed:
            if compat.transforms_active() or torch.is_grad_enabled() or compat.is_legacy_batched(g):
                u = _LinSolve.apply(call, True, z, g, *theta)
                found: Sequence[Tensor | None] = _pull_theta(call, z, theta, needed, -u)
            else:
                found = _first_order(call, z, theta, needed, g)
            for i, value in zip(needed, found, strict=True):
                grads[i] = value
        # the start does not matter, and says so
        start = torch.zeros_like(z) if ctx.needs_input_grad[1] else None
        return (None, start, *grads)

    @staticmethod
    @compat.opaque_to_compile
    def jvp(ctx: Any, _call: Any, _z0: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        call = ctx.call
        with compat.forward_ad_enabled(ctx.saved_tensors) as (z, *theta):
            moving = [i for i, t in enumerate(tangents) if t is not None]
            if not moving:
                return torch.zeros_like(z), None
            b = autodiff.jvp(
                _theta_only(call, z, theta, moving),
                [theta[i] for i in moving],
                [tangents[i] for i in moving],  # type: ignore[misc]
            )
            return _LinSolve.apply(call, False, z, -b, *theta), None

    @staticmethod
    @compat.opaque_to_compile
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, z0: Tensor, *theta: Tensor) -> Any:
        batch, (_, z_dim, *dims) = info.batch_size, in_dims
        flat = _front(z0, z_dim, batch).reshape(-1, call.system.size)
        z, stats = _Root.apply(call.batched(dims, batch), flat, *theta)
        return (z.unflatten(0, (batch, -1)), stats.unflatten(0, (batch, -1))), (0, 0)


class _LinSolve(Function):
    """``x = A^{-1} b`` (``A^{-T} b`` if transposed), ``A = dF/dz(z, theta)``."""

    @staticmethod
    @compat.opaque_to_compile
    def forward(call: Call, transposed: bool, z: Tensor, b: Tensor, *theta: Tensor) -> Tensor:
        _, A = call.linearise(z.detach(), [t.detach() for t in theta])
        if compat.is_legacy_batched(b):  # no control flow on b: invert once, multiply
            inverse = _inverse(call, A, transposed)
            return (inverse @ b.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            return call.solve_linear(A.T if transposed else A, b.detach(), transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call, ctx.transposed, z, _, *theta = inputs
        ctx.save_for_backward(output, z, *theta)
        ctx.save_for_forward(output, z, *theta)

    @staticmethod
    @compat.opaque_to_compile
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, z, *theta = ctx.saved_tensors
        call, transposed = ctx.call, ctx.transposed
        w = _LinSolve.apply(call, not transposed, z, g, *theta)
        p, q = (x, w) if transposed else (w, x)  # d<w, A x> = d<A^T p, q>
        needed = [i for i in range(len(theta)) if ctx.needs_input_grad[4 + i]]
        grads: list[Tensor | None] = [None] * len(theta)
        z_grad = None
        if ctx.needs_input_grad[2] or needed:

            def transposed_product(y: Tensor, *moving: Tensor) -> Tensor:
                full = _replace(theta, needed, moving)
                return autodiff.vjp(lambda v: call.system.residual(v, *full), y)[1](p)[0]

            _, pullback = autodiff.vjp(transposed_product, z, *(theta[i] for i in needed))
            z_grad, *found = pullback(-q)
            for i, value in zip(needed, found, strict=True):
                grads[i] = value
        return (None, None, z_grad, w, *grads)

    @staticmethod
    @compat.opaque_to_compile
    def jvp(
        ctx: Any, _call: Any, _transposed: Any, dz: Tensor | None, db: Tensor | None, *dtheta: Tensor | None
    ) -> Tensor:
        call, transposed = ctx.call, ctx.transposed
        with compat.forward_ad_enabled(ctx.saved_tensors) as (x, z, *theta):
            rhs = torch.zeros_like(x) if db is None else db
            moving = [i for i, t in enumerate(dtheta) if t is not None]
            tangents = [torch.zeros_like(z) if dz is None else dz, *(dtheta[i] for i in moving)]

            def product(y: Tensor, *changed: Tensor) -> Tensor:  # A(y) x, or its transpose
                full = _replace(theta, moving, changed)
                residual = lambda v: call.system.residual(v, *full)  # noqa: E731
                return autodiff.vjp(residual, y)[1](x)[0] if transposed else autodiff.jvp(residual, (y,), (x,))

            change = autodiff.jvp(product, (z, *(theta[i] for i in moving)), tangents)  # type: ignore[arg-type]
            return _LinSolve.apply(call, transposed, z, rhs - change, *theta)

    @staticmethod
    @compat.opaque_to_compile
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, transposed: bool, z: Tensor, b: Tensor, *theta: Tensor
    ) -> Any:
        batch, (_, _, z_dim, b_dim, *dims) = info.batch_size, in_dims
        n = call.system.size
        flat_z, flat_b = (_front(t, d, batch).reshape(-1, n) for t, d in ((z, z_dim), (b, b_dim)))
        x = _LinSolve.apply(call.batched(dims, batch), transposed, flat_z, flat_b, *theta)
        return x.unflatten(0, (batch, -1)), 0


# ------------------------------------------------------------------------------------------------------------- details
def _first_order(
    call: Call, z: Tensor, theta: Sequence[Tensor], needed: Sequence[int], g: Tensor
) -> Sequence[Tensor | None]:
    """The everyday backward: one evaluation whose graph serves the linear solve and the pullback to theta."""
    known = call.system.problem.first_order(call.system, z, theta)
    if known is not None:
        A, pull = known
        return pull(-call.solve_linear(A.T, g, True), needed)
    leaves = [t.detach().requires_grad_() if i in needed else t.detach() for i, t in enumerate(theta)]
    out, A = call.linearise(z, leaves)
    u = call.solve_linear(A.T, g, True)
    if A.structure is not None:
        found = A.structure.pull(u)
        return [found[i] for i in needed]
    wanted = [leaves[i] for i in needed]
    if not out.requires_grad:
        return [None] * len(needed)
    return torch.autograd.grad(out, wanted, -u, allow_unused=True)


def _pull_theta(call: Call, z: Tensor, theta: Sequence[Tensor], needed: Sequence[int], w: Tensor) -> Sequence[Tensor]:
    """``(dF/d theta)^T w`` for the tensors needed, differentiable."""
    return autodiff.vjp(_theta_only(call, z, theta, needed), *(theta[i] for i in needed))[1](w)


def _theta_only(call: Call, z: Tensor, theta: Sequence[Tensor], moving: Sequence[int]) -> Any:
    return lambda *changed: call.system.residual(z, *_replace(theta, moving, changed))


def _replace(theta: Sequence[Tensor], where: Sequence[int], by: Sequence[Tensor]) -> list[Tensor]:
    full = list(theta)
    for i, t in zip(where, by, strict=True):
        full[i] = t
    return full


def _front(t: Tensor, dim: int | None, batch: int) -> Tensor:
    return t.expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)


def _inverse(call: Call, A: Operator, transposed: bool) -> Tensor:
    """All blocks inverted, for right-hand sides that allow no control flow (``is_grads_batched=True``)."""
    if A.batch * A.size * A.size > 1 << 26:
        raise RuntimeError(
            f"batched gradients (is_grads_batched=True, vectorize=True) need the dense inverse, and {A.batch} blocks of "
            f"size {A.size} are too large for it: use torch.func.jacrev, or a loop"
        )
    with torch.no_grad():
        factors = factor_batched(A.dense())
        if call.on_failure == "raise" and not bool(factors.ok.all()):
            raise ConvergenceError(
                "the linear solve of the backward (reverse mode) did not converge: the Jacobian is singular"
            )
        eye = torch.eye(A.size, dtype=A.like.dtype, device=A.like.device).expand(A.batch, -1, -1)
        return factors.solve(eye, transpose=transposed)
