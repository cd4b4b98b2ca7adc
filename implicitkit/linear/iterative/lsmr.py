r"""LSMR: minimum-norm least squares, for singular or inconsistent blocks.

Minimises ``|A x - b|`` and, among the minimisers, ``|x|``: MINRES on ``A^T A x = A^T b``, by the bidiagonalisation

    beta u <- A v - alpha u,    alpha v <- A^T u - beta v.

Source: Fong & Saunders (2011), "LSMR: an iterative algorithm for sparse least-squares problems", SIAM J. Sci. Comput.
33(5), sections 2.1-2.8 and 5 (the estimate of ``|r|``), stopping rules (S1) and (S2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.iterative.cycles import column, default_steps, in_working_precision, norms, tolerance
from implicitkit.linear.iterative.dropping import Fewer, narrowed

_INCONSISTENT = (
    "the system of a derivative is singular and has no solution: what is asked for changes along a direction in which the "
    "solution is not determined. linear solver 'lsmr' answers in the sense of least squares, as if nothing moved in that "
    "direction (parallel transport); a derivative of the solution it is not"
)


@register_linear_solver("lsmr")
@dataclass(frozen=True)
class LSMR(LinearSolver):
    """LSMR, each sample with its own scalars; two products (``A`` and ``A^T``) a step, five vectors of memory.

    A sample has converged when ``|A x - b| <= atol + rtol |b|`` or, for an inconsistent system, where that cannot be,
    when ``x`` solves the normal equations: ``|A^T r| <= rtol |A| |r|`` with ``r = b - A x`` and ``|A|`` the Frobenius
    norm as the bidiagonalisation estimates it.  So a singular block is *converged* at its minimum-norm solution (with a
    ``doubt``, which is warned of, where the system is inconsistent);
    singular values below ``rtol |A|`` count as zero.  Both tests are made on the true residual, and a sample whose
    recurrences have drifted starts again from there, at most ``restarts`` times.

    Default ``max_steps``: four times that of the other methods, since the condition number is squared.

    Source: Fong & Saunders (2011), SIAM J. Sci. Comput. 33.
    """

    has_units: ClassVar[bool] = True
    restarts: int = 5

    def __post_init__(self) -> None:
        check_options(self, restarts=at_least(0))

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        limit = 4 * default_steps(A.size) if max_steps is None else max_steps
        normal_rtol = max(rtol, 10 * torch.finfo(b.dtype).eps)
        target = tolerance(b, rtol, atol)
        x, r, norm = b.new_zeros(len(b), A.size), b, norms(b)  # A may have more rows than columns
        gradient = torch.full_like(norm, torch.inf)
        steps = torch.zeros(b.shape[0], dtype=torch.int64, device=b.device)
        converged = norm <= target
        live = ~converged & (norm < torch.inf)
        matrix_norm = torch.zeros_like(norm)
        for _ in range(self.restarts + 1):
            live = live & (steps + 2 < limit)
            if not bool(live.any()):
                break
            start = r.where(column(live), r.new_zeros(()))
            dx, used, scale = _bidiagonalise(A, start, target, normal_rtol, live, limit - steps)
            steps = steps + used
            trial = x + dx
            trial_r = b - A.mv(trial)
            trial_norm = norms(trial_r)
            trial_gradient = norms(A.rmv(trial_r))
            sound = live & (trial_norm <= norm * (1 + normal_rtol)) & (trial_gradient <= gradient)
            halved = (trial_norm <= 0.5 * norm) | (trial_gradient <= 0.5 * gradient)
            x, r = torch.where(column(sound), trial, x), torch.where(column(sound), trial_r, r)
            norm = torch.where(sound, trial_norm, norm)
            gradient = torch.where(sound, trial_gradient, gradient)
            matrix_norm = torch.maximum(matrix_norm, scale.where(live, scale.new_zeros(())))
            done = (norm <= target) | (gradient <= normal_rtol * matrix_norm * norm)
            converged = converged | (live & done)
            live = live & sound & halved & ~done
        reason = ""
        if not bool(converged.all()):
            finite = bool((norm.isfinite() & ((gradient < torch.inf) | converged | (limit < 3))).all())
            reason = f"not converged after {limit} products with the matrix and its transpose"
            if not finite:
                reason = "the matrix or the right-hand side is not finite"
            elif bool((~converged & (steps + 2 < limit)).any()):
                reason = "stagnated: the tolerance is below what rounding allows"
        least_squares_only = converged & (norm > target)
        return LinearSolution(
            x, norm, steps, converged, reason, _INCONSISTENT if bool(least_squares_only.any()) else ""
        )


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x / |x|`` (zero for zero) and ``|x|``, per sample."""
    length = norms(x)
    return x / column(length.clamp_min(torch.finfo(x.dtype).tiny)), length


def _bidiagonalise(
    A: Operator, b: Tensor, target: Tensor, normal_rtol: float, live: Tensor, budget: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One run of LSMR from ``x = 0``: ``x`` ``(batch, n)``, products used ``(batch,)``, the estimate of ``|A|``.

    Scalars are named as in the paper, a bar as a suffix ``b`` (``rhob``), a tilde as a suffix ``t``, a dot as ``d``.
    Each is ``(batch,)``.
    """
    tiny = torch.finfo(b.dtype).tiny
    u, beta = _unit(b)
    v, alpha = _unit(A.rmv(u))
    zetab, alphab = alpha * beta, alpha
    one, zero = torch.ones_like(beta), torch.zeros_like(beta)
    rho, rhob, cb, sb, zeta = one, one, one, zero, zero
    h, hb, x = v, torch.zeros_like(v), torch.zeros_like(v)
    betadd, betad, rhod, taut, thetat = beta, zero, one, zero, zero
    square = alpha * alpha
    steps = live.long()
    live = live & (zetab > 0)  # A^T b = 0: the answer is zero
    # there are no more rows of B than of the matrix: later ones, of vectors that rounding has turned, repeat them
    fewer, rows = Fewer(A), min(b.shape[1], x.shape[1])
    while left := int(torch.count_nonzero(live)):
        index = fewer.drop(live, left, lambda: (x, steps, square))  # noqa: B023
        if index is not None:
            u, v, h, hb, x, steps, square = narrowed(index, u, v, h, hb, x, steps, square)
            alpha, zetab, alphab, rho, rhob, cb, sb, zeta = narrowed(
                index, alpha, zetab, alphab, rho, rhob, cb, sb, zeta
            )
            betadd, betad, rhod, taut, thetat = narrowed(index, betadd, betad, rhod, taut, thetat)
            live, target, budget = narrowed(index, live, target, budget)
        u, beta = _unit(torch.addcmul(fewer.A.mv(v), column(alpha), u, value=-1))
        rows -= 1
        square = torch.where(live, square + beta * beta, square) if rows >= 0 else square
        v, alpha = _unit(torch.addcmul(fewer.A.rmv(u), column(beta), v, value=-1))
        # rotation Q: the bidiagonal B becomes the upper bidiagonal R
        rho_old, rho = rho, torch.hypot(alphab, beta).clamp_min(tiny)
        c, s = alphab / rho, beta / rho
        theta, alphab = s * alpha, c * alpha
        # rotation Q bar: R^T becomes R bar
        rhob_old, zeta_old, thetab = rhob, zeta, sb * rho
        rhob = torch.hypot(cb * rho, theta).clamp_min(tiny)
        cb, sb = cb * rho / rhob, theta / rhob
        zeta, zetab = cb * zetab, -sb * zetab
        # the iterate
        hb = torch.addcmul(h, column(thetab * rho / (rho_old * rhob_old)), hb, value=-1)
        x = torch.where(column(live), torch.addcmul(x, column(zeta / (rho * rhob)), hb), x)
        h = torch.addcmul(v, column(theta / rho), h, value=-1)
        # the estimate of |r| (section 5)
        betahat, betadd = c * betadd, -s * betadd
        thetat_old, rhot = thetat, torch.hypot(rhod, thetab).clamp_min(tiny)
        ct, st = rhod / rhot, thetab / rhot
        thetat, rhod = st * rhob, ct * rhob
        betad = ct * betahat - st * betad
        taut = (zeta_old - thetat_old * taut) / rhot
        taud = (zeta - thetat * taut) / rhod
        r_norm = torch.hypot(betad - taud, betadd)
        steps = torch.where(live, steps + 2, steps)
        square_next = square + alpha * alpha if rows > 0 else square
        unsolved = (r_norm > target) & (zetab.abs() > normal_rtol * square.sqrt() * r_norm)
        live = live & unsolved & (steps + 1 < budget)
        square = torch.where(live, square_next, square)
    x, steps, square = fewer.whole((x, steps, square))
    return x, steps, square.sqrt()
