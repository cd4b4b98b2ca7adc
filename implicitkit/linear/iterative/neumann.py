r"""The Neumann series, whole or truncated: products with ``J`` and nothing else.

For ``A = J - I`` the system ``A u = b`` reads ``u = J u - b``, so that

    u = -(I + J + J^2 + ...) b,    u <- u + (A u - b).

Source: the truncated series: Lorraine, Vicol & Duvenaud (2020), arXiv 1911.02590, section 4.1; one term (``terms=0``):
Fung et al. (2022), "JFB: Jacobian-free backpropagation", arXiv 2103.12803, theorem 3.1; the damped series: Geng et
al. (2021), "On training implicit models", arXiv 2111.05177 (the phantom gradient, Neumann form).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import above, at_least, between, check_options, optional, positive
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.iterative.cycles import column, in_working_precision, norms, tolerance
from implicitkit.linear.iterative.dropping import Fewer, narrowed


@register_linear_solver("neumann")
@dataclass(frozen=True)
class NeumannSeries(LinearSolver):
    """The Neumann series, summed until the residual meets the tolerance or, with ``terms``, cut after ``J^terms``.

    Converges exactly when the spectral radius of ``J`` is below 1; growth of the residual by ``divergence`` stops a
    sample and is reported, with its best iterate.  Default ``max_steps``: 1000.

    Source: Lorraine, Vicol & Duvenaud (2020), eq. 8.

    Args:
        terms: ``None``, or ``k`` for ``u = -sum_{i=0..k} J^i b``: ``k`` products, an approximation that is never judged
            (``exact`` is then False, and every finite sample counts as converged).  ``terms=0`` is ``u = -b``.
        divergence: the factor.

    Raises:
        ValueError: ``terms < 0``.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)
    terms: int | None = None
    divergence: float = 1e6

    def __post_init__(self) -> None:
        check_options(self, terms=optional(at_least(0)), divergence=above(1))
        object.__setattr__(self, "exact", self.terms is None)

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        if self.terms is not None:
            return _truncated(A, b, products=self.terms, damping=1.0)
        limit = 1000 if max_steps is None else max_steps
        aim, start = tolerance(b, rtol, atol), norms(b)
        target = aim
        best, best_norm, u = torch.zeros_like(b), start, 0 - b
        steps = torch.zeros(b.shape[0], dtype=torch.int64, device=b.device)
        live = (start > target) & (start < torch.inf)
        diverged = torch.zeros_like(live)
        working = int(torch.count_nonzero(live))
        fewer, finite = Fewer(A), start.isfinite()
        for _ in range(limit):
            if not working:
                break
            index = fewer.drop(live, working, lambda: (best, best_norm, steps, diverged))  # noqa: B023
            if index is not None:
                u, b, best, best_norm, start = narrowed(index, u, b, best, best_norm, start)
                target, steps, diverged, live = narrowed(index, target, steps, diverged, live)
            r = fewer.A.mv(u) - b
            norm = norms(r)
            steps = steps + live
            better = live & (norm < best_norm)
            diverged = diverged | (live & ~(norm <= self.divergence * start))
            live = live & (norm > target) & ~diverged
            improved, working = int(torch.count_nonzero(better)), int(torch.count_nonzero(live))
            if improved == len(b):
                best, best_norm = u, norm
            elif improved:
                best, best_norm = torch.where(column(better), u, best), torch.where(better, norm, best_norm)
            u = u + r if working == len(b) else torch.where(column(live), u + r, u)
        best, best_norm, steps, diverged = fewer.whole((best, best_norm, steps, diverged))
        converged = best_norm <= aim
        reason = ""
        if not bool(converged.all()):
            reason = f"the series has not converged after {limit} products"
            if bool(diverged.any()):
                reason = 'the series diverges (the spectral radius of J is not below 1); use linear_solver="gmres"'
            if not bool(finite.all()):
                reason = "the right-hand side is not finite"
        return LinearSolution(best, best_norm, steps, converged, reason)


@register_linear_solver("damped_series")
@dataclass(frozen=True)
class DampedSeries(LinearSolver):
    r"""The phantom gradient's series, an approximation that is never judged; ``steps - 1`` products.

    ``u = -damping * sum_{i=0..steps-1} ((1 - damping) I + damping J)^i b``: what backpropagation through ``steps``
    damped iterations ``z <- (1 - damping) z + damping f(z)`` at the solution gives.  ``damping=1`` is
    ``NeumannSeries(terms=steps-1)``; ``steps -> inf`` is exact.

    Source: Geng et al. (2021), arXiv 2111.05177, eq. 7.

    Args:
        steps: number of terms, at least 1. damping: in (0, 1].

    Raises:
        ValueError: an option out of range.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)
    exact: ClassVar[bool] = False
    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, steps=at_least(1), damping=between(0, 1, closed=True))

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        return _truncated(A, b, products=self.steps - 1, damping=self.damping)


@register_linear_solver("richardson")
@dataclass(frozen=True)
class Richardson(LinearSolver):
    r"""A truncated series for symmetric positive definite systems, an approximation that is never judged by its residual.

    ``u = step * sum_{i=0..terms} (I - step A)^i b``: ``terms`` products; gradient descent on ``u^T A u / 2 - b^T u`` from
    zero (Richardson 1911).  ``terms -> inf`` is exact for ``step < 2 / |A|``; the error in an eigenvector of eigenvalue
    ``a`` is ``(1 - step a)^{terms + 1}`` of its part.

    Args:
        terms: products with ``A``, 0 or more. step: positive; ``None``: ``1 / |A|`` of every sample, from eight more
            products (the power method).

    Raises:
        ValueError: an option out of range.

    A sample whose residual the series enlarges is reported: the step is too long, or ``A`` not positive definite.
    """

    needs: ClassVar[tuple[str, ...]] = ("symmetric",)
    exact: ClassVar[bool] = False
    terms: int = 10
    step: float | None = None

    def __post_init__(self) -> None:
        check_options(self, terms=at_least(0), step=optional(positive()))

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        step = torch.full_like(b[:, :1], self.step) if self.step is not None else 1 / _largest(A, b)
        answer = _truncated(A, b, products=self.terms, damping=-step)
        sound = answer.converged & (answer.residual_norm <= (1 + 1e-3) * norms(b))
        reason = answer.reason
        if not bool(sound.all()) and not reason:
            reason = "the series grows: step is longer than 2 / |A|, or A is not positive definite"
        return answer._replace(converged=sound, reason=reason)


_SWEEPS = 8  # of the power method: the step may be twice too long


def _largest(A: Operator, b: Tensor) -> Tensor:
    """The largest eigenvalue in size, about, ``(batch, 1)``."""
    v = seeded.normal(b.shape[1], seed=0).to(b).expand_as(b)
    size = column(norms(v))
    for _ in range(_SWEEPS):
        v = A.mv(v / size)
        size = column(norms(v)).clamp_min(torch.finfo(v.dtype).tiny)
    return size.to(b)


def _truncated(A: Operator, b: Tensor, *, products: int, damping: float | Tensor) -> LinearSolution:
    """``u <- u + damping (A u - b)``, ``products`` times from ``u = -damping b``; one more product for the residual."""
    u = 0 - damping * b
    for _ in range(products):
        u = u + damping * (A.mv(u) - b)
    norm = norms(A.mv(u) - b)
    sound = norms(u).isfinite()
    steps = torch.full((b.shape[0],), products, dtype=torch.int64, device=b.device)
    return LinearSolution(u, norm, steps, sound, "" if bool(sound.all()) else "the series is not finite")
