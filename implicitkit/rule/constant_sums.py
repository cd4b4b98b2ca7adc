r"""Linear systems ``(J + B) x = b`` of a Jacobian that is singular since a flow conserves sums, ``C J = 0``.

``B`` has the rank of ``C``, and ``J + B`` is full where ``J`` is sparse.  With ``M = L J R`` and its left and right null
spaces ``U`` and ``V`` (:mod:`~implicitkit.rule.null_spaces`), ``L B R = s U Q``, and ``y = R^{-1} x``

    (M + s U Q) y = L b    =>    s Q y = t = U' L b,    M y = L b - U t.

The second system has solutions, since ``U'`` of its right side is zero.  One of them comes from ``M`` with ones added on the
diagonal where ``U`` and ``V`` are largest, ``k`` of them, which is sparse and regular: by ``U' M = 0`` that one is zero
there.  The others differ by ``V c``, and ``c`` follows from ``t``.  Transposed, with ``U`` and ``V`` in each other's place,

    (M' + s Q' U') y = R b    =>    s (Q V)' (U' y) = V' R b,    M' y = R b - Q' (s U' y).

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), section 2.1.4; Businger & Golub (1965), Numer. Math. 7, for
the choice of rows by pivots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.rule.null_spaces import NullSpace

BY_THE_WAY = "what the flow conserves does not tell this state from others beside it: the way there decides"
_OWN_CHANGE = 0.4  # of a derivative, by the change of the Jacobian on the way to the solution
_PIVOT = 0.6  # power of rounding, beside the largest one, that one of a singular matrix in units of its own may reach
_OTHER = 1e-2  # of a vector, by which another one differs
_SWEEPS = 3  # of refinement, by which it is mostly seen that there is none ...
_SLOW = 0.3  # ... while each leaves no more than this of what is off
_REFINED = 2  # times sparse factors are asked, the second one for what the first has left


@dataclass(frozen=True)
class Held:
    """``B`` of every sample, in the place of ``s C^T C``, zero where nothing is conserved.

    Attributes:
        space: the null spaces, zero where nothing is conserved. Q: ``(samples, k, n)``.
        moves: do the sums depend on ``theta``?
        change: ``J(z - d) - J(z)``, ``(samples, n, n)``, where it is more than slight.
    """

    space: NullSpace
    Q: Tensor
    moves: bool = False
    change: Tensor | None = None

    @property
    def samples(self) -> int:
        """How many."""
        return len(self.Q)

    @property
    def which(self) -> Tensor:
        """Which of them keep something, ``(samples,)``."""
        return self.space.dimension > 0

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """``B`` as a product, ``(samples, n, k)`` and ``(samples, k, n)``."""
        U, L, R, size, _ = self.space
        return size * U / L.unsqueeze(2), self.Q / R.unsqueeze(1)

    def product(self, v: Tensor, transposed: bool) -> Tensor:
        """``B v`` or ``B' v`` of every sample, ``(samples, n, m)``."""
        left, right = (t.to(v) for t in self.factors)
        return right.mT @ (left.mT @ v) if transposed else left @ (right @ v)


def is_suspect(A: Operator) -> bool:
    """Is ``A`` singular, or have factors of it pivots that may be rounding, so that it is regular by chance?"""
    A = A.even or A
    if A.singular or not A.size:
        return A.singular
    share = torch.finfo(A.like.dtype).eps ** _PIVOT
    if isinstance(A.exact, DenseBlocks):
        smallest, largest = A.exact.factor.lu.diagonal(dim1=1, dim2=2).abs().aminmax(dim=1)
        return bool((smallest <= share * largest).any())
    if A.formed is None or not A.formed.regular:
        return False
    b = seeded.normal(A.batch, A.size, seed=0x73).to(A.like.dtype)
    added, size = (torch.linalg.vector_norm(v, dim=1) for v in (A.formed.size(A.formed.solve(b)), b))
    return bool((size <= share * added).any())


def is_ambiguous(A: Operator, solve: Callable[[Tensor], Tensor]) -> bool | None:
    """Does ``A y`` of a random ``y`` lead to another vector, where ``solve`` makes Krylov vectors with factors of a matrix
    near ``A``, or in other units?  They converge where ``A`` is singular, too, if the right-hand side allows it, to any of
    the solutions; without either to the one of constant sums, since all vectors are then in the range of ``A``: ``None``, as
    where there are factors of ``A`` itself.  ``solve`` is asked where these factors alone, whose refinement leaves what is
    in a null space as it is, have not come as near to ``y`` in a few products."""
    own = A.even or A
    if own is A and A.known is None and A.near is None and A.preconditioner is None:
        return None
    if own.exact is not None or (own.formed is not None and own.formed.regular):
        return None
    y = seeded.normal(A.batch, A.size, seed=0x73).to(A.like)
    b, size = A.mv(y), torch.linalg.vector_norm(y, dim=1)
    off, left = y, b
    for _ in range(_SWEEPS if own is A and A.known is not None else 0):
        before, off = off, off - A.known.solve(left.unsqueeze(2)).squeeze(2).to(y)
        norm = torch.linalg.vector_norm(off, dim=1)
        if bool((norm <= _OTHER * size).all()):
            return False
        if not bool((norm <= _SLOW * torch.linalg.vector_norm(before, dim=1)).all()):
            break
        left = A.mv(off)
    return bool((torch.linalg.vector_norm(solve(b) - y, dim=1) > _OTHER * size).any())


def at_constant_sums(A: Operator, b: Tensor, found: LinearSolution, held: Held, transposed: bool) -> LinearSolution:
    """``found``, and where sums are ``held`` the ``x`` with ``(A + B) x = b``, unless the way decides.

    Args:
        A: ``J`` of every sample or, ``transposed``, its transpose. b: right-hand sides, the blocks running fastest,
            ``(k batch, n)``.
    """
    asked = torch.isfinite(b).all(1) & held.which.repeat(len(b) // held.samples)
    x, good, off = solved(A, held, b.view(-1, A.batch, b.shape[1]).permute(1, 2, 0), transposed)
    by_the_way = torch.zeros_like(asked)
    if held.change is not None:
        many, right = A.batch // held.samples, held.space.L if transposed else held.space.R
        change = (held.change.mT if transposed else held.change).to(x).repeat(many, 1, 1)
        scaled = (v / right.repeat(many, 1).unsqueeze(2) for v in (solved(A, held, change @ x, transposed)[0], x))
        e, size = (torch.linalg.vector_norm(v, dim=1).T.reshape(len(b)) for v in scaled)
        by_the_way = asked & (size > 0) & ~(e < _OWN_CHANGE * size)
    x, good, off = x.permute(2, 0, 1).reshape(b.shape).to(b), good.T.reshape(len(b)), off.T.reshape(len(b))
    taken = asked & good & x.isfinite().all(1)
    x = torch.where(taken.unsqueeze(1), x, found.x)
    norm = torch.where(taken, off.to(found.residual_norm), found.residual_norm)
    if bool(by_the_way.any()):
        found = found._replace(reason=BY_THE_WAY)
    return found._replace(x=x, residual_norm=norm, converged=(found.converged | taken) & ~by_the_way)


def unsolved(b: Tensor) -> LinearSolution:
    """What is known of ``A x = b`` where ``A`` is known to be singular."""
    lost, steps = torch.full_like(b[:, 0], torch.nan), torch.zeros(len(b), dtype=torch.int64, device=b.device)
    return LinearSolution(torch.full_like(b, torch.nan), lost, steps, torch.zeros_like(steps, dtype=torch.bool))


def solved(A: Operator, held: Held, b: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` ``(batch, n, m)`` with ``(A + B) x = b``, where it is that, ``(batch, m)``, and what it leaves of ``b`` by norm,
    ``(batch, m)``.  ``A`` may have several blocks for each sample, these running fastest."""
    many = A.batch // held.samples
    here = Held(held.space.repeated(many), held.Q.repeat(many, 1, 1))
    _, L, R, *_ = here.space
    left, right = (R, L) if transposed else (L, R)
    if here.space.V is None:
        matrix = A.dense().detach()
        b, matrix = (
            b.to(matrix),
            matrix + here.product(torch.eye(A.size, dtype=matrix.dtype, device=matrix.device), transposed),
        )
        y, failed = torch.linalg.solve_ex(left.unsqueeze(2) * matrix * right.unsqueeze(1), left.unsqueeze(2) * b)
        x, ok = right.unsqueeze(2) * y, failed == 0
        off = matrix @ x - b
    else:
        blocks: Any = A.sparse()
        b, ok = b.to(L), here.which & (blocks is not None)
        x, off = torch.zeros_like(b), -b
        solve = (
            _by_pins(blocks.T if transposed else blocks, here, transposed) if blocks is not None else torch.zeros_like
        )
        for _ in range(_REFINED if blocks is not None else 0):
            x = x - solve(off)
            off = blocks.product(x) + here.product(x, transposed) - b
    leaves, size = (torch.linalg.vector_norm(left.unsqueeze(2) * v, dim=1) for v in (off, b))
    good = ok.unsqueeze(1) & (leaves <= torch.finfo(A.like.dtype).eps ** 0.5 * size)
    return x, good, torch.linalg.vector_norm(off, dim=1)


def _by_pins(blocks: Any, held: Held, transposed: bool) -> Callable[[Tensor], Tensor]:
    """What solves ``(J + B) x = b``, or ``(J' + B') x = b``, of sparse blocks of ``J``."""
    U, L, R, size, V = held.space
    assert V is not None
    pinned = blocks.shifted(_pins(held.space) / (L * R), torch.ones_like(L[:, 0]))
    L, R = L.unsqueeze(2), R.unsqueeze(2)
    QV = size * held.Q @ V + torch.diag_embed((~U.any(1)).to(U))  # a sample may have fewer sums than others

    def forth(b: Tensor) -> Tensor:
        t = U.mT @ (L * b)
        y = pinned.solve(b - U @ t / L) / R
        return R * (y + V @ torch.linalg.solve(QV, t - size * held.Q @ y))

    def back(b: Tensor) -> Tensor:
        t = torch.linalg.solve(QV.mT, V.mT @ (R * b))
        y = pinned.T.solve(b - size * held.Q.mT @ t / R) / L
        return L * (y + U @ (t - U.mT @ y))

    return back if transposed else forth


def _pins(space: NullSpace) -> Tensor:
    """Ones where rows of ``U`` and ``V``, ``k`` of each, are far from dependent, ``(samples, n)``."""
    U, _, _, _, V = space
    assert V is not None
    pins = torch.zeros_like(U[:, :, 0])
    for pin, count, rows in zip(
        pins,
        space.dimension.tolist(),
        (U * torch.linalg.vector_norm(V, dim=2, keepdim=True)).cpu().numpy(),
        strict=True,
    ):
        if count:
            pin[torch.from_numpy(np.array(scipy.linalg.qr(rows.T, mode="r", pivoting=True)[1][:count]))] = 1
    return pins
