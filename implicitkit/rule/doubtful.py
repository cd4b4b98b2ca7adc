r"""Is a derivative determined, as far as the solution is known?

At a double root (``z^2 = c`` at ``c = 0``) or the minimum of ``z^4`` the Jacobian ``A`` is singular.  A solver comes to a
point beside it, at a distance of the square root of its tolerance or more, where ``A`` is regular, and of no meaning: it is
its own change on the way to the solution.  Newton's correction ``d = A(z)^{-1} F(z)`` leads that way, and the derivative
``x = A(z)^{-1} b`` would change by

    e = x - A(z)^{-1} A(z - d) x,    |e| >= 0.4 |x|        (of a root of order m, 1 - (1 - 1/m)^{m-1}: a half and more)

whatever the units of equations and unknowns (in reverse mode with the transposed ``A``).  A derivative that does not meet
the singular part has ``e = 0``.

That is asked only where the linear system makes so much of its right-hand side that ``|x| |F| / |b|``, which bounds ``d``
where unknowns are of like size, is more than a regular solution is off by: ``max(0.03 sqrt(rtol), 10 rtol) |z|``.  Then it
costs two linear solves and a product.

Where solutions are not isolated (an eigenvector's phase) ``A`` is singular at each of them, and regular by rounding alone:
nothing need change on the way.  Rounding makes an error of the size ``eps s`` in ``A x``, ``s_i^2 = \sum_j (A_ij x_j)^2``,
the mean square of ``A`` times ``x`` with random weights, whatever the units.  Where that is a twentieth of ``b``, ``x`` is
made of rounding.  It is asked, by one product, where ``|x| >= 1e8 |b|``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, seeded
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.solution import Record, Status

__all__ = ["warn_if_singular"]

_ASKED, _LOOSE = 0.03, 10.0  # times the root of rtol, and rtol: relative errors of a solution that are asked about
_STEEP, _ROUNDED = 1e8, 0.05  # |x| / |b| that is looked at, and the part of b that rounding may make
_FEW = 65_536  # numbers that are copied rather than looked at in three calls
_OWN_CHANGE = 0.4  # of a derivative on the way to the solution: from here on it is not determined


def warn_if_singular(
    record: Record,
    rtol: float,
    A: Operator,
    b: Tensor,
    x: Tensor,
    transposed: bool,
    solve: Callable[[Operator, Tensor], LinearSolution],
) -> None:
    """Warn where ``x = A^{-1} b``, or ``A^{-T} b``, is a derivative that the equations do not determine.

    Args:
        record: of the solve. rtol: of the solve. A: the Jacobian at ``z``, or its transposed. b, x: right-hand sides, one
            or several for each sample, ``(k * batch, n)``, and what came out. solve: the linear solver.
    """
    outcome, system = record.outcome, record.system
    z = outcome.z
    if system is None or system.problem.kind.returns_program or len(b) % len(z) or not len(z):
        return
    rtol = max(rtol, torch.finfo(z.dtype).eps ** (2 / 3))
    size = max(_ASKED * rtol**0.5, _LOOSE * rtol)
    times, residual = len(b) // len(z), outcome.residual_norm
    if times == 1 and x.numel() < _FEW:  # one call, where calls are what it costs
        gained, of, at = torch.linalg.vector_norm(torch.stack((x, b, z.to(x.dtype))), dim=2)
    else:
        gained, of, at = (torch.linalg.vector_norm(t, dim=1) for t in (x, b, z.to(x.dtype)))
        residual, at = residual.repeat(times), at.repeat(times)
    asked, steep = gained * residual > (size * of) * at, gained > _STEEP * of
    if not bool((asked | steep).any()):
        return
    found = outcome.status == int(Status.CONVERGED)
    asked, steep = (t.view(-1, len(z)).any(0) & found for t in (asked, steep))
    singular = steep & _rounding(A, b, x).view(-1, len(z)).any(0) if bool(steep.any()) else torch.zeros_like(steep)
    asked = asked & ~singular
    if bool(asked.any()):
        singular = singular | (asked & _undetermined(record, A, b, x, transposed, solve))
    if bool(singular.any()):
        warn(_said(singular, z), ConvergenceWarning)


def _rounding(A: Operator, b: Tensor, x: Tensor) -> Tensor:
    """Which ``x`` are made of rounding, one for each right-hand side."""
    weights = seeded.normal(1, A.size, seed=0x51).to(x)
    parts = [A.mv(part * weights) for part in torch.nan_to_num(x).split(A.batch)]
    noise = torch.finfo(x.dtype).eps * torch.linalg.vector_norm(torch.cat(parts), dim=1)
    return noise > _ROUNDED * torch.linalg.vector_norm(b, dim=1)


def _undetermined(
    record: Record,
    A: Operator,
    b: Tensor,
    x: Tensor,
    transposed: bool,
    solve: Callable[[Operator, Tensor], LinearSolution],
) -> Tensor:
    """Samples one of whose derivatives changes as much as it is on the way to the solution, ``(batch,)``."""
    z, times = record.outcome.z, len(b) // len(record.outcome.z)
    residual = lambda y: record.system.residual(y, *record.theta)  # noqa: E731
    with torch.no_grad():
        r = residual(z).repeat(A.batch // len(z), 1)  # below vmap A has a block for every direction
        d = solve(A.T if transposed else A, r).x[: len(z)]
        there = (z - d).detach()
        if transposed:
            _, pullback = autodiff.vjp(residual, there)
            product = lambda v: pullback(v)[0]  # noqa: E731
        else:
            product = lambda v: autodiff.jvp(residual, (there,), (v,))  # noqa: E731
        image = torch.cat([product(v) for v in x.split(len(z))])
        changed = solve(A, image)
        large = torch.linalg.vector_norm(x - changed.x, dim=1) >= _OWN_CHANGE * torch.linalg.vector_norm(x, dim=1)
    return (changed.converged & large & (x != 0).any(1)).view(times, len(z)).any(0)


def _said(singular: Tensor, z: Tensor) -> str:
    which = singular.nonzero().flatten().tolist()
    sample = which[0]
    size = float(torch.linalg.vector_norm(z[sample].double()))
    where = (
        f"in {len(which)} of {len(z)} samples (sample {sample}: |z| = {size:.3g})"
        if len(z) > 1
        else f"at |z| = {size:.3g}"
    )
    return (
        f"the Jacobian of the equations is singular {where}, as far as the solution is known: a double or otherwise "
        "singular solution, known to a root of the tolerance only, where the derivative is infinite, or not determined by "
        "the equations to first order. The finite numbers that come out may mean nothing; ik.certify(solution) tells how "
        "far a solution can be. State the problem so that its solution is simple (the other side of a fold, f / f', more "
        "than the square of an equation)"
    )
