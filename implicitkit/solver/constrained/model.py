"""What solvers of programs see at a point: objective, constraints, their slopes, the proximal map, the bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat
from implicitkit.foundation.errors import CapabilityError
from implicitkit.linear.factors.dense import mv
from implicitkit.linear.factors.sparse_form import confirmed, confirmed_bordered
from implicitkit.problem.argmin import Bounded
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.solver.evaluations import Evaluations

_SAME = 1e3  # units of rounding that products with matrices which are the same may differ by
_EVEN = 1e9  # times the least of a vector's entries, its largest one
_LOST = 1e3  # units of rounding of the objective below which differences of it say nothing
DENSE = 2048  # unknowns and multipliers up to which dense matrices are formed
SPARSE = 256  # unknowns and multipliers from which sparse matrices are worth the loop over samples


class _LastRows:
    """The Jacobian of the constraints that was last found with a pattern of the Hessian; ``pattern``: not looked at."""

    def __init__(self, pattern: object) -> None:
        self.J: Tensor | None = None


def _makes(J: Tensor, v: Tensor, product: Tensor) -> bool:
    """Is ``J v`` this product, up to rounding, and no entry of ``v`` ``(batch, n)``, random ones, so small that it hides a
    column?"""
    if J.shape[:2] != product.shape or J.shape[2] != v.shape[1] or J.dtype != product.dtype or J.device != v.device:
        return False
    size = v.abs()
    rounding = _SAME * torch.finfo(J.dtype).eps * mv(J.abs(), size)
    even = size.amax(1, keepdim=True) <= _EVEN * size.amin(1, keepdim=True)
    return bool(((mv(J, v) - product).abs() <= rounding).logical_and_(even).all())


class First(NamedTuple):
    """Objective ``(batch,)``, its gradient ``(batch, n)`` and constraint values ``(batch, m)``."""

    value: Tensor
    slope: Tensor
    constraints: Tensor


class Local(NamedTuple):
    """First order at a point: objective ``(batch,)``, its gradient ``(batch, n)``, constraint values ``(batch, m)`` and
    their Jacobian ``(batch, m, n)``."""

    value: Tensor
    slope: Tensor
    constraints: Tensor
    jacobian: Tensor


class Model:
    """A program by its parts, on packed states ``w = (z, multipliers)``.

    Attributes:
        size: ``n``. count: ``m``, constraint values. one_sided: which of them are ``g <= 0``, ``(m,)``.
    """

    def __init__(self, f: Evaluations) -> None:
        problem: Any = f.problem
        if not isinstance(problem, ConstrainedMinimisation):
            raise CapabilityError(f"this solver is for constrained minimisation, not for {type(problem).__name__}")
        self.f, self.problem = f, problem
        self.size, self.count = problem.size, len(problem.one_sided)
        self.one_sided = problem.sides(torch.empty(0, device=f.system.layout.device))

    def split(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """``z`` and multipliers."""
        return w[:, : self.size], w[:, self.size :]

    def join(self, z: Tensor, multipliers: Tensor | None = None) -> Tensor:
        """The packed state; multipliers zero if not given."""
        return torch.cat([z, z.new_zeros(len(z), self.count) if multipliers is None else multipliers], 1)

    def values(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Objective and constraints."""
        if self.f.fits is not None:
            return self.f.fits.at(z).value, z[:, :0]
        return self.problem.values(self.f.kernel, self.join(z))

    def decrease(self, z: Tensor, value: Tensor, g: Tensor, trial: Tensor) -> Tensor:
        """How much the objective falls from ``z``, where it is ``value`` with gradient ``g``, to ``trial``, ``(batch,)``;
        where rounding hides it, by the trapezoidal rule on the gradients at both ends; ``-inf`` where the trial is not
        finite."""
        new = self.values(trial)[0]
        difference, s = value - new, trial - z
        lost = (difference.abs() <= _LOST * torch.finfo(value.dtype).eps * value.abs()) & self.f.active
        if bool(lost.any()):
            difference = torch.where(lost, -0.5 * ((g + self.slope(trial)[2]) * s).sum(1), difference)
        return torch.where(torch.isfinite(new), difference, -torch.inf)

    def slope(self, z: Tensor, weights: Any = None, w: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Objective, constraints and the gradient of ``f + weights(c)'c`` with the weights held.

        Args:
            z: ``(batch, n)``. weights: ``(batch, m) -> (batch, m)``, from the constraint values; ``None``: zero. w: as in
                :meth:`local`.
        """
        if self.f.fits is not None:
            here = self.f.fits.at(z)
            return here.value, z[:, :0], here.slope
        known = None if w is None else self.f.made(w)
        out, pullback = known or autodiff.vjp(self.f.kernel, self.join(z))
        out = out.detach()
        value, constraints = out[:, 0], out[:, 1:]
        held = torch.zeros_like(constraints) if weights is None else weights(constraints)
        gradient = pullback(torch.cat([torch.ones_like(out[:, :1]), held], 1))[0][:, : self.size]
        return value, constraints, gradient.detach()

    def first(self, z: Tensor) -> First:
        """Objective, its gradient and the constraints, from one evaluation."""
        value, constraints, slope = self.slope(z)
        return First(value, slope, constraints)

    def is_sparse(self, w: Tensor) -> bool:
        """Has the matrix of :meth:`saddle`, or of :meth:`low_rank`, a sparsity pattern, and is it large enough to be worth
        it?"""
        return w.shape[1] >= SPARSE and self.f.is_sparse(w)

    def affordable(self, w: Tensor, solver: str) -> None:
        """Raise where dense matrices are too large.

        Raises:
            CapabilityError: above 2,048 unknowns and multipliers.
        """
        if w.shape[1] > DENSE:
            raise CapabilityError(
                f"{solver} forms dense matrices of at most {DENSE} unknowns and multipliers a sample where Hessian and "
                f"constraints have no sparsity pattern; these are {w.shape[1]}. Use solver='augmented_lagrangian', or "
                "'auto'; if they are independent problems, pass batch_dims="
            )

    def saddle(self, w: Tensor) -> tuple[Tensor, Any, Any] | None:
        """``(dL/dz, constraints)``, ``(batch, n + m)``, and its derivative ``[[d^2 L/dz^2, J'], [J, 0]]``, ``J`` that of the
        constraints, from a few products: a pattern and the entries of every sample, ``(batch, nnz)``; ``None`` where the
        pattern does not hold."""
        out, A = self.f.saddle(w)
        found = confirmed(self.f.system.sparsity("saddle"), self._saddle, w, A.rmv, A.rmv)
        return None if found is None else (out, *found)

    def low_rank(self, w: Tensor) -> tuple[Tensor, Any, Any, Tensor] | None:
        """What :meth:`saddle` returns, where the Hessian of the Lagrangian is sparse but for a few numbers that all unknowns
        share: its pattern, its entries, and ``J`` ``(batch, m, n)`` by as many products; or none, where it is that of the
        last time, as the one that has confirmed the entries shows."""
        n = self.size
        out, A = self.f.saddle(w)
        shown: list[tuple[Tensor, Tensor]] = []  # what ``J`` makes of vectors, but for those side by side

        def product(v: Tensor) -> Tensor:
            moved = A.rmv(self.join(v))
            if not compat.transforms_active():
                shown.append((v, moved[:, n:]))
            return moved[:, :n]

        stationarity = lambda z: self.problem.flat_stationarity(self.f.kernel, z)  # noqa: E731
        found = confirmed_bordered(self.f.system.sparsity("hessian"), stationarity, w[:, :n], product, product)
        if found is None:
            return None
        last: _LastRows = found[0].analysed(_LastRows)
        J = last.J
        if J is None or not shown or not _makes(J, *shown[-1]):
            rows = torch.zeros_like(w).repeat(self.count, 1, 1)
            for i in range(self.count):
                rows[i, :, n + i] = 1
            J = torch.stack([A.rmv(row)[:, :n] for row in rows], 1) if self.count else w.new_zeros(len(w), 0, n)
            last.J = J = J.detach()
        return out, *found, J

    def _saddle(self, w: Tensor) -> Tensor:
        return self.problem.flat_saddle(self.f.kernel, w)

    def local(self, z: Tensor, w: Tensor | None = None) -> Local:
        """Everything of first order, from ``m + 1`` products and one evaluation; or none, where ``w``, which ``z`` is a part
        of, is the last point and its graph is there."""
        if self.f.fits is not None:
            value, none, slope = self.slope(z)
            return Local(value, slope, none, z.new_zeros(len(z), 0, self.size))
        known = None if w is None else self.f.made(w)
        out, pullback = known or autodiff.vjp(self.f.kernel, self.join(z))
        J = autodiff.matrix(lambda e: pullback(e)[0], out.shape[1], out)[:, :, : self.size].detach()
        out = out.detach()
        return Local(out[:, 0], J[:, 0], out[:, 1:], J[:, 1:])

    def hessian(self, z: Tensor, multipliers: Tensor, w: Tensor | None = None) -> Tensor:
        """``d^2 L/dz^2`` at ``z``, ``(batch, n, n)``; ``w``: as in :meth:`local`."""
        weights = torch.cat([torch.ones_like(multipliers[:, :1].expand(len(z), 1)) if self.count else z.new_ones(len(z), 1),
                             multipliers], 1)  # fmt: skip
        first = None if w is None or compat.transforms_active() else self.f.first(w)
        if first is not None:
            leaf, (_, pullback) = first
            with torch.enable_grad():
                slope = pullback(weights)[0][:, : self.size]
            rmv = autodiff.products(slope, leaf)[1]
            same = autodiff.one_for_all(lambda v: rmv(v)[:, : self.size], self.size, z)
            return autodiff.jacobian_of(slope, leaf)[:, :, : self.size] if same is None else same

        def gradient(y: Tensor) -> Tensor:
            return autodiff.vjp(lambda x: self.f.kernel(self.join(x, multipliers)), y)[1](weights)[0]

        return autodiff.linearise(gradient, z, symmetric=True)[1].dense()

    def proximal(self, z: Tensor, step: Tensor | float) -> Tensor:
        """``prox(z, step)``, or ``z`` where there is no set."""
        return self.problem.proximal(self.f.uncounted, z, step)

    def bounds(self, z: Tensor) -> tuple[Tensor, Tensor] | None:
        """``lower`` and ``upper`` ``(batch, n)``; ``None`` without bounds.

        Raises:
            CapabilityError: the set is another than bounds.
        """
        if self.problem.prox is None:
            return None
        if not isinstance(self.problem.prox, Bounded):
            raise CapabilityError(
                "this solver takes constraints and bounds, but not prox= or project=: use solver='augmented_lagrangian', "
                "or 'proximal_gradient' where there is nothing else"
            )
        return self.f.limits(z)

    def inside(self, z: Tensor) -> Tensor:
        """The point within the bounds that is nearest to ``z``; ``z`` itself without bounds."""
        bounds = self.bounds(z)
        return z if bounds is None else z.maximum(bounds[0]).minimum(bounds[1])

    def violation(self, constraints: Tensor) -> Tensor:
        """What is violated of each constraint, nonnegative, ``(batch, m)``."""
        return torch.where(self.one_sided, constraints.clamp_min(0), constraints.abs())
