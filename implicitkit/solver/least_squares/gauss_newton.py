"""The Gauss-Newton method for least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.factors.dense import lstsq_batched
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.line_search import backtrack
from implicitkit.solver.steps.normal_equations import NormalEquations, normal_equations, with_old_factors
from implicitkit.sparsity.patterns import SMALLEST

_DAMPING = 1e2  # units of rounding of the largest eigenvalue, so that a singular matrix has a small solution


@register_solver("gauss_newton", solves="least_squares")
@dataclass(frozen=True)
class GaussNewton(Method):
    r"""``z <- z + t p``, ``p`` the minimiser of ``|R p + r|`` (of least norm), ``R = dr/dz`` of shape ``(m, n)``.

    Nocedal & Wright (2006, section 10.3), with Armijo backtracking, sample by sample.  Quadratic convergence where ``r``
    vanishes at the solution, else linear at a rate that grows with ``|r|`` and the curvature of ``r``: beyond 1 it does not
    converge without the line search.  The derivative of the solution always uses the full Hessian.

    One evaluation, one Jacobian and one singular value decomposition ``O(m n^2)`` a step; from 128 unknowns on, a Cholesky
    factorisation of ``R'R``, sparse where ``R`` has a sparsity pattern (``jac_sparsity``), which serves further steps while
    the gradient falls to a fifth; above 2,048 without a pattern LSMR, from products with ``R`` and ``R'``.  A sample whose
    objective no step down to ``2^-halvings`` lowers is given up.

    Args:
        halvings: how often a step may be halved.

    Raises:
        ValueError: negative ``halvings``.
    """

    halvings: int = 40
    default_max_steps: ClassVar[int] = 500

    def __post_init__(self) -> None:
        check_options(self, halvings=at_least(0))

    def step(self, f: Evaluations, z: Tensor, state: object) -> tuple[Tensor, object]:
        few = z.shape[1] < SMALLEST
        if few:
            p = lstsq_batched(f.residuals_jacobian(z), -f.residuals(z))[0]
        else:
            normal = normal_equations(f, z)
            p = gauss_newton_step(normal, f(z))
        search = backtrack(f, z, torch.where(torch.isfinite(p), p, 0), self.halvings)
        f.stuck = f.active & ~search.found
        return search.z if few else with_old_factors(f, normal, search.z, z), state


def gauss_newton_step(normal: NormalEquations, g: Tensor) -> Tensor:
    """``p`` with ``R'R p = -g``, damped by rounding, so that a singular matrix has a small solution; measured from now on in
    units of the columns."""
    size = torch.where(normal.columns > 0, normal.columns, 1)
    normal.scale(size)
    p = normal.solve(_DAMPING * torch.finfo(g.dtype).eps * normal.largest(), g)
    return p if bool(torch.isfinite(p).all()) else torch.where(torch.isfinite(p), p, -g / size.square())
