r"""Does a flow leave the state at rest that a solver of equations has found?

Newton's steps solve ``g(z) = 0`` and do not care whether ``dz/dt = g(z)`` would come to ``z``: logistic growth rests at
zero, too.  Such a state is a solution, and rarely the one that is meant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.base import account
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.probing import DENSE
from implicitkit.solver.verdict.scales import in_working_precision

__all__ = ["said_of_flow"]


def said_of_flow(f: Evaluations, z: Tensor, which: Tensor) -> str:
    r"""A sentence, if disturbances of one of the states ``which`` ``(batch,)`` grow: an eigenvalue of ``s dF/dz`` has a
    positive real part, beyond ``sqrt(eps) |dF/dz|``.  Empty where there are more than 64 unknowns, or no derivative.

    Source: linear stability, Strogatz (1994), *Nonlinear Dynamics and Chaos*, section 2.4 and 5.2.
    """
    if z.shape[1] > DENSE or not bool(which.any()):
        return ""
    probe = Evaluations(f.system, f.theta, "root")
    try:
        J = f.kind.flow * in_working_precision(probe.linearize(z).dense())
    except Exception:  # the function is not to be differentiated, and no derivative was asked for
        return ""
    account(f, probe)
    usable = which & torch.isfinite(J).flatten(1).all(1)
    J = torch.where(usable[:, None, None], J, 0)
    growth = torch.linalg.eigvals(J).real.amax(1)
    leaves = usable & (growth > torch.finfo(z.dtype).eps ** 0.5 * torch.linalg.matrix_norm(J))
    count, fastest = int(leaves.sum()), float(growth.max())
    if not count:
        return ""
    states = "this state" if len(z) == 1 else f"{count} of {len(z)} states found"
    return (
        f"The flow leaves {states}: a disturbance grows by e in {1 / fastest:.3g} units of time. solver='auto' and "
        "'pseudo_transient' follow the flow; ik.stability(solution) says more"
    )
