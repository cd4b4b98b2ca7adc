r"""Is a derivative determined, as far as the solution is known?

At a double root (``z^2 = c`` at ``c = 0``) or the minimum of ``z^4`` the Jacobian ``A`` is singular.  A solver comes to a
point beside it, at a distance of the square root of its tolerance or more, where ``A`` is regular, and of no meaning: it is
its own change on the way to the solution.  Newton's correction ``d = A(z)^{-1} F(z)`` leads that way, and the derivative
``x = A(z)^{-1} b`` would change by

    e = x - A(z)^{-1} A(z - d) x,    |e| >= 0.4 |x|        (of a root of order m, 1 - (1 - 1/m)^{m-1}: a half and more)

whatever the units of equations and unknowns (in reverse mode with the transposed ``A``).  A derivative that does not meet
the singular part has ``e = 0``.

That is asked only where the linear system makes so much of its right-hand side that ``|x| |F| / |b|``, which bounds ``d``
where unknowns are of like size, is more than a regular solution is off by: ``max(0.001 sqrt(rtol), 10 rtol) |z|``, in
largest entries, since the double root may be one unknown of many; or where ``|x| >= |b| / sqrt(eps)``, since the solution
may be known better, and an unknown be small.  Then it costs two linear solves and a product.  Of many right-hand sides of
one matrix few are asked about, those in which ``e`` is largest beside ``x``: random weights ``w`` tell, ``w'e = (w - A(z -
d)^T A^{-T} w)' x``, by as many transposed solves and products as weights.  Where their mean square is below a thousandth of
that of a derivative that is not determined for each of them, none is: four weights show so little of one by chance twice in
a million times.

Where solutions are not isolated (an eigenvector's phase) ``A`` is singular at each of them, and regular by rounding alone:
nothing need change on the way.  Rounding makes an error ``e_i = eps s_i``, ``s_i^2 = \sum_j (A_ij x_j)^2``, in ``A x``; with
random weights ``u, w`` that is ``eps u_i (A (w x))_i`` in the mean square (of four).  Where ``|A^{-1} e| >= 0.05 |x|``,
``x`` is made of rounding: so it is in any units, as both lie along the null vector.  That is asked, by products, where
``|x| >= 1e8 |b|``, and by solves where ``|e| >= 0.01 |b|``, which units alone can make it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, graph, in_parts, seeded
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.solution import Record, Status

_ASKED, _LOOSE = 0.001, 10.0  # times the root of rtol, and rtol: relative errors of a solution that are asked about
_STEEP, _SUSPECT = 1e8, 0.01  # |x| / |b| and |e| / |b| from which on rounding is asked about
_ROUNDED, _DRAWS = 0.05, 4  # the part of x that rounding may make, in the mean square of so many draws
_MOST = 8  # right-hand sides of a sample that are asked about: those whose e is largest beside x
_FEW = 65_536  # numbers that are copied rather than looked at in three calls
_CLEAR = 1e-3  # of that square, what weights may show of every right-hand side that none is asked about
_CLEARLY = 0.25  # of what is asked, by factors as they are
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
    if system is None or system.problem.kind.returns_program or not z.numel() or len(b) % len(z):
        return
    rtol = max(rtol, torch.finfo(z.dtype).eps ** (2 / 3))
    size = max(_ASKED * rtol**0.5, _LOOSE * rtol)
    times, residual = len(b) // len(z), outcome.residual_norm
    if times == 1 and x.numel() < _FEW:  # one call, where calls are what it costs
        gained, of, at = torch.linalg.vector_norm(torch.stack((x, b, z.to(x.dtype))), torch.inf, dim=2)
    else:
        gained, of, at = (in_parts.largest(t) for t in (x, b, z.to(x.dtype)))
        residual, at = residual.repeat(times), at.repeat(times)
    asked, steepest = gained * residual > (size * of) * at, torch.finfo(z.dtype).eps ** -0.5
    if not bool((asked | (gained > min(steepest, _STEEP) * of)).any()):
        return
    steep = gained > _STEEP * of
    if bool(asked.any()):  # the norm of F may be that of many entries
        with torch.no_grad():
            largest = system.residual(z, *record.theta).abs().amax(1).repeat(times)
        asked = gained * largest > (size * of) * at
    asked = asked | (gained > steepest * of)
    if not bool((asked | steep).any()):
        return
    found = outcome.status == int(Status.CONVERGED)
    asked, steep = (t.view(-1, len(z)).any(0) & found for t in (asked, steep))
    singular = (
        steep & _rounding(A, b, x, solve).view(-1, len(z)).any(0) if bool(steep.any()) else torch.zeros_like(steep)
    )
    asked = asked & ~singular
    if bool(asked.any()):
        singular = singular | (asked & _undetermined(record, A, b, x, transposed, solve))
    if bool(singular.any()):
        warn(_said(singular, z), ConvergenceWarning)


def _rounding(A: Operator, b: Tensor, x: Tensor, solve: Callable[[Operator, Tensor], LinearSolution]) -> Tensor:
    """Which ``x`` are made of rounding, one for each right-hand side."""
    draws = seeded.normal(_DRAWS, 2, A.size, seed=0x51).to(x)
    draws[:, 1] *= torch.finfo(x.dtype).eps
    size = lambda t: torch.linalg.vector_norm(t.view(_DRAWS, *x.shape), dim=(0, 2)) / _DRAWS**0.5  # noqa: E731
    with torch.no_grad():
        e = torch.cat([A.mv(part * w) * u for w, u in draws for part in torch.nan_to_num(x).split(A.batch)])
        large = size(e) > _SUSPECT * torch.linalg.vector_norm(b, dim=1)
        if not bool(large.any()):
            return large
        made = solve(A, e)
    few = size(made.x) < _ROUNDED * torch.linalg.vector_norm(x, dim=1)
    return ~(few & made.converged.view(_DRAWS, len(x)).all(0))


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
        J = A.T if transposed else A

        def at(d: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
            """Products with ``A(z - d)`` and with its transposed."""
            with compat.own_graphs():
                again = lambda: autodiff.recorded(residual, z - d, twice=True)  # noqa: E731
                push, pull = autodiff.products(*autodiff.recorded(residual, z - d), again)
            return (pull, push) if transposed else (push, pull)

        if times <= _MOST and _usable(A.known) and not _usable(A.exact):
            image = graph.each(at(_by(J.known, J, r)[: len(z)])[0], x.view(-1, *z.shape)).flatten(0, 1)
            # those of a matrix farther off, which say nothing, do not give x back either
            off = torch.linalg.vector_norm(x - _by(A.known, A, image), dim=1)
            if bool((off < _CLEARLY * _OWN_CHANGE * torch.linalg.vector_norm(x, dim=1)).all()):
                return torch.zeros(len(z), dtype=torch.bool, device=z.device)
        product, back = at(_roughly(J, r, solve).x[: len(z)])
        if A.batch == len(z) and times > _MOST:
            share, x = _changing(A, x.view(times, *z.shape), back, solve)
            if bool((share < _CLEAR * _OWN_CHANGE**2).all()):
                return torch.zeros_like(share, dtype=torch.bool)
            x = x.flatten(0, 1)
        image = graph.each(product, x.view(-1, *z.shape)).flatten(0, 1)
        changed = solve(A, image)
        large = torch.linalg.vector_norm(x - changed.x, dim=1) >= _OWN_CHANGE * torch.linalg.vector_norm(x, dim=1)
    return (changed.converged & large & (x != 0).any(1)).view(-1, len(z)).any(0)


def _changing(
    A: Operator, x: Tensor, back: Callable[[Tensor], Tensor], solve: Callable[[Operator, Tensor], LinearSolution]
) -> tuple[Tensor, Tensor]:
    """The largest square of ``|e| / |x|`` of every sample's ``x``, ``(times, batch, n)``, as random weights tell it,
    ``(batch,)``, infinite where they cannot; and those ``x`` where it is largest, as many for each.  ``back``: products with
    the transposed ``A(z - d)``."""
    w = seeded.normal(_DRAWS, 1, A.size, seed=0x52).to(x).expand(-1, A.batch, -1).flatten(0, 1)
    y = _roughly(A.T, w, solve)
    q = w.view(_DRAWS, A.batch, A.size) - graph.each(back, y.x.view(_DRAWS, A.batch, A.size))
    share = torch.einsum("dbn,tbn->dtb", q, x).square().mean(0) / torch.linalg.vector_norm(x, dim=2).square()
    told = y.converged.view(_DRAWS, A.batch).all(0) & torch.isfinite(q).all(2).all(0)
    share = share.nan_to_num(0.0)  # of a right-hand side of zero
    which = share.topk(_MOST, 0).indices
    return torch.where(told, share.amax(0), torch.inf), x.gather(0, which.unsqueeze(2).expand(-1, -1, A.size))


def _roughly(A: Operator, b: Tensor, solve: Callable[[Operator, Tensor], LinearSolution]) -> LinearSolution:
    """``A x = b`` for right-hand sides ``(k * batch, n)``, where a digit or two are enough: by the factors of ``A`` itself,
    if there are any, as they are, without the passes through the matrix that refine and judge a solution."""
    if not _usable(A.exact):
        return solve(A, b)
    x = _by(A.exact, A, b)
    unknown = torch.full_like(x[:, 0], torch.nan)
    return LinearSolution(x, unknown, torch.ones_like(unknown, dtype=torch.int64), torch.isfinite(x).all(1), "")


def _usable(factors: Any) -> bool:
    """Are there factors of a regular matrix, in full precision?"""
    return factors is not None and not getattr(factors, "rough", False) and not factors.factor.reason


def _by(factors: Any, A: Operator, b: Tensor) -> Tensor:
    """What factors, those of ``A`` or of a matrix nearby, make of right-hand sides ``(k * batch, n)``."""
    x: Tensor = factors.solve(b.unflatten(0, (-1, A.batch)).permute(1, 2, 0))
    return x.permute(2, 0, 1).flatten(0, 1)


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
