"""How other packages say that a solve has ended, in the words of :class:`~implicitkit.Status`: one table a package.

"Almost solved" is inaccurate: whether it is good enough is for the residual to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from implicitkit.solution import Status

CLARABEL_ENDS: Mapping[str, Status] = {
    "Solved": Status.CONVERGED,
    "AlmostSolved": Status.INACCURATE,
    "PrimalInfeasible": Status.INFEASIBLE,
    "AlmostPrimalInfeasible": Status.INFEASIBLE,
    "DualInfeasible": Status.UNBOUNDED,
    "AlmostDualInfeasible": Status.UNBOUNDED,
    "MaxIterations": Status.MAX_STEPS,
    "MaxTime": Status.MAX_STEPS,
    "NumericalError": Status.STALLED,
    "InsufficientProgress": Status.STALLED,
}
"""By the text of ``solution.status``."""

DAQP_ENDS: Mapping[int, Status] = {
    1: Status.CONVERGED,
    2: Status.INACCURATE,
    -1: Status.INFEASIBLE,
    -2: Status.STALLED,
    -3: Status.UNBOUNDED,
    -4: Status.MAX_STEPS,
    -5: Status.NONCONVEX,
}
"""By the exit flag: solved, solved with soft constraints, infeasible, cycling, unbounded, too many steps, not convex."""

SCS_ENDS: Mapping[int, Status] = {
    1: Status.CONVERGED,
    2: Status.INACCURATE,
    -1: Status.UNBOUNDED,
    -2: Status.INFEASIBLE,
    -6: Status.UNBOUNDED,
    -7: Status.INFEASIBLE,
}
"""By ``info["status_val"]``."""
