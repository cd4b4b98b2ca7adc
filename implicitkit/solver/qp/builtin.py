"""The built-in solvers of quadratic programs, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from implicitkit.foundation.options import at_least, check_options
from implicitkit.problem.qp_data import QPData
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.qp import external
from implicitkit.solver.qp.base import QPSolver
from implicitkit.solver.qp.bounds import bounds_first
from implicitkit.solver.qp.interior_point import interior_point
from implicitkit.solver.qp.polish import QPPoint

_ACTIVE_SET_ENTRIES = 1_500_000  # of the rows, up to which changing them one by one is faster than ten factorisations


@register_solver("interior_point", solves="quadratic_program")
@dataclass(frozen=True)
class InteriorPoint(QPSolver):
    """Batched primal-dual interior point with a polish on the active set: all samples at once, on the CPU or a GPU.

    Any convex program, linear ones too; tells infeasible and unbounded ones.  One Cholesky factor of ``n x n`` and one
    product ``G'WG`` a step and a sample; about ten steps.  Of sparse matrices: sparse factors of the whole system, one
    sample after another, and active sets (:mod:`implicitkit.solver.qp.sparse_run`).

    It solves the optimality conditions ``Pz + q + A'y + G'lam = 0``, ``Az = b``, ``Gz + s = h``, ``lam_i s_i = mu``,
    for ``mu -> 0``.  Source: Mehrotra (1992), SIAM J. Optim. 2; Nocedal & Wright (2006), section 16.6.
    """

    takes_sparse: ClassVar[bool] = True

    def find(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        return interior_point(data, tol=tol, max_steps=max_steps)


@register_solver("qp", solves="quadratic_program")
@dataclass(frozen=True)
class AutoQP(QPSolver):
    """DAQP for small programs on the CPU, the interior point for others; many bounds by sets that change as a whole.

    DAQP is used where it is installed, and what it does not solve is left to the interior point.  Where all inequalities
    are bounds, of 150 unknowns and more on the CPU, first sets of active bounds that change many at a time
    (:mod:`implicitkit.solver.qp.bounds`): a portfolio of 1,000 holdings of which 17 are not zero takes seven
    factorisations, of few unknowns but for the first, where DAQP changes 984 bounds.

    It minimises ``z'Pz/2 + q'z`` subject to ``Az = b``, ``Gz <= h``.  Source: Goldfarb & Idnani (1983) for the active
    set as in DAQP (Arnström, Bemporad & Axehill 2022); :class:`InteriorPoint` for the rest.

    Args:
        active_set_size: unknowns up to which the active-set method is tried, and 1.5 million entries of ``A`` and ``G``.
            Measured with half a row to three for each unknown, a quarter to half of the rows active (all that can be, at
            most), on one core: at 100 unknowns it takes a sixth of the time of the interior point, at 300 a quarter to
            a half, at 600 a third to nine tenths, at 800 and 1,200 with as many rows a half; with twice as many as much.
    """

    active_set_size: int = 1200
    takes_sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, active_set_size=at_least(0))

    def find(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        return bounds_first(data, lambda rest: self._others(rest, tol, max_steps))

    def _others(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        """By DAQP or the interior point."""
        n, rows = data.q.shape[1], data.G.shape[1] + data.A.shape[1]
        small = data.q.device.type == "cpu" and n <= self.active_set_size and n * rows <= _ACTIVE_SET_ENTRIES
        if not (small and data.G.shape[1] and external.installed("daqp")):
            return interior_point(data, tol=tol, max_steps=max_steps)
        point = external.DAQP().find(data, tol, max_steps)
        return point.with_rest(data, lambda rest: interior_point(rest, tol=tol, max_steps=max_steps))
