r"""Derivatives of a state at rest of a flow that conserves sums.

A closed vessel keeps its atoms, a Markov chain its probability, an epidemic without births its people: there are rows ``C``
with ``C F(z, \theta) = 0`` for every ``z``.  States at rest come in families, of which the start names one,

    C z(\theta, z_0) = C z_0,

and ``J = dF/dz`` is singular, ``C J = 0``.  With orthonormal rows and any ``s > 0``,

    (J + s C^T C) dz = -F_\theta d\theta + s C^T C dz_0

has the solution that keeps ``C dz = C dz_0``: multiplied by ``C`` it is ``s C dz = s C dz_0``, and then ``J dz = -F_\theta
d\theta`` remains.  The matrix is regular where no other state beside ``z`` has these sums, ``null(J)`` and ``null(C)``
having nothing in common but zero; ``(J + s C^T C)^{-1}`` is then the group inverse of ``J`` on what ``F_\theta`` spans.
Since ``C`` is constant the rules for derivatives of every order stay what they are, with this matrix in the place of ``J``.

``C`` spans the left null space of ``J``, of samples of which it is seen that

- ``C F = 0`` at points elsewhere, ``z`` changed by up to a third of each unknown and of the mean one, or of the start's;
- the solver has kept ``C z``, as steps along ``F`` and combinations of them do: of an equation ``F = 0`` that is no flow, or
  of a solver that goes other ways, the start means nothing.

A change of ``\theta`` that breaks a sum (one entry of a stochastic matrix) leaves no state at rest, and what comes out along
it means nothing: that is said where there is such a parameter.

Source: Meyer (1975), SIAM Review 17(3), 443-464, for the group inverse of a Markov chain; Reder (1988), J. theor. Biol.
135(2), 175-201, for metabolic networks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from implicitkit.foundation import graph, seeded
from implicitkit.foundation.errors import DegenerateWarning, warn
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.solution import Record

LARGEST = 512  # unknowns of which singular values are taken
_NUMBERS = 1 << 24  # in all matrices, at most
_POINTS = 3  # at which F is to keep the sums
_AWAY = 0.3  # of each unknown, and of the mean one: how far away they are, at most
_SAID = (
    "sums that the flow conserves are not conserved where a parameter changes by itself: the derivative holds for changes "
    "of the parameters that keep them (a matrix whose rows still add up to one). If those are made outside of the "
    "function, nothing is wrong; to be told nothing, make them inside of it"
)


def hold(record: Record, J: Operator, tolerance: float, quietly: bool) -> None:
    """Sums that the solve of ``record`` has kept become known of it (:func:`sums`); not ``quietly``: parameters that break
    them are said."""
    record.held = sums(J, record, record.outcome.z, record.start, tolerance)
    if record.held is None:
        record.start = None  # nobody asks again
    elif not quietly:
        warn_if_broken(record, record.held, record.theta)


def sums(J: Operator, record: Record, z: Tensor, start: Tensor, tolerance: float) -> Tensor | None:
    """``s C^T C`` of every sample, ``(samples, n, n)``, zero where nothing is conserved; ``None`` where nothing is.

    Args:
        J: ``dF/dz``, whose first blocks are those of the samples. record: of the solve. z: the solution, ``(samples, n)``.
        start: where the solve began. tolerance: of ``|z|``, by which the solver may have changed a sum.
    """
    samples, n = z.shape
    if start.shape != z.shape or n > LARGEST or J.batch * n * n > _NUMBERS:
        return None
    matrix, eps = J.dense()[:samples].detach(), torch.finfo(z.dtype).eps
    finite = torch.isfinite(matrix).flatten(1).all(1)
    left, values, _ = torch.linalg.svd(torch.where(finite[:, None, None], matrix, 0))
    null = (values <= eps**0.75 * values[:, :1]) & (values[:, :1] > 0) & finite.unsqueeze(1)
    if not bool(null.any()):
        return None
    C = torch.where(null.unsqueeze(1), left, 0)
    kept = null.any(1) & _nothing_of(C, start - z, torch.linalg.vector_norm(z, dim=1), max(tolerance, eps**0.5))
    size = torch.maximum(z.abs().mean(1, keepdim=True), start.abs().mean(1, keepdim=True))
    size = torch.where(size > eps**0.5, size, 1)  # at zero itself everything is conserved
    with torch.no_grad():
        for k in range(_POINTS if bool(kept.any()) else 0):
            own, mean = (seeded.uniform(n, seed=0x51 + 2 * k + i).to(z) for i in (0, 1))
            there = z + _AWAY * ((2 * own - 1) * z + mean * size)
            F = record.system.residual(there, *record.theta)
            kept = kept & _nothing_of(C, F, torch.linalg.vector_norm(F, dim=1), eps**0.5)
    return (values[:, :1, None] * C) @ C.mT * kept[:, None, None] if bool(kept.any()) else None


def _nothing_of(C: Tensor, v: Tensor, size: Tensor, share: float) -> Tensor:
    """Where no more than a share of ``size`` is left of ``C v``, ``(samples,)``; not of NaN."""
    return torch.linalg.vector_norm((C.mT @ v.unsqueeze(2)).squeeze(2), dim=1) <= share * size


def is_suspect(A: Operator) -> bool:
    """Do dense factors of ``A`` have a pivot that may be rounding, so that it is regular by chance?"""
    if not isinstance(A.exact, DenseBlocks) or not A.size:
        return False
    smallest, largest = A.exact.factor.lu.diagonal(dim1=1, dim2=2).abs().aminmax(dim=1)
    return bool((smallest <= torch.finfo(smallest.dtype).eps ** 0.75 * largest).any())


def at_constant_sums(A: Operator, b: Tensor, found: LinearSolution, held: Tensor) -> LinearSolution:
    """``found``, and where sums are ``held`` (:func:`sums`) the ``x`` with ``(A + s C^T C) x = b``.

    Args:
        A: ``J`` of every sample, or its transpose. b: right-hand sides, the blocks running fastest, ``(k batch, n)``.
    """
    asked = torch.isfinite(b).all(1) & held.flatten(1).any(1).repeat(len(b) // len(held))
    matrix = A.dense().detach()
    matrix = matrix + held.to(matrix).repeat(A.batch // len(held), 1, 1)  # of itself the transpose
    columns = b.to(matrix).view(-1, A.batch, b.shape[1]).permute(1, 2, 0)
    x, failed = torch.linalg.solve_ex(matrix, columns)
    left = torch.linalg.vector_norm((matrix @ x - columns).permute(2, 0, 1).reshape(b.shape), dim=1)
    x = x.permute(2, 0, 1).reshape(b.shape).to(b)
    fine = (failed == 0).repeat(len(b) // A.batch) & x.isfinite().all(1)
    taken = asked & fine & (left <= torch.finfo(b.dtype).eps ** 0.5 * torch.linalg.vector_norm(b, dim=1))
    x = torch.where(taken.unsqueeze(1), x, found.x)
    norm = torch.where(taken, left.to(found.residual_norm), found.residual_norm)
    return found._replace(x=x, residual_norm=norm, converged=found.converged | taken)


def warn_if_broken(record: Record, held: Tensor, theta: Sequence[Tensor]) -> None:
    """A :class:`DegenerateWarning` where changes of a parameter break the sums that are ``held``."""
    leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in theta]
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        return
    z = record.outcome.z
    v = seeded.normal(z.shape[1], seed=0x61).to(z).expand_as(z)
    v = (held @ v.unsqueeze(2)).squeeze(2)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    with torch.enable_grad():
        out = record.system.residual(z, *leaves)
    if not out.requires_grad:
        return
    others = seeded.normal(z.shape[1], seed=0x62).to(z).expand_as(z)
    along = graph.pulled(out, wanted, v, retain_graph=True)
    usual = graph.pulled(out, wanted, others, retain_graph=False)
    eps = torch.finfo(z.dtype).eps ** 0.5
    if any(
        a is not None and u is not None and bool((a.abs() > eps * u.abs().amax()).any())
        for a, u in zip(along, usual, strict=True)
        if u is not None and u.numel()
    ):
        warn(_SAID, DegenerateWarning)
