r"""Restarted GMRES: the least residual over the Krylov space, for general blocks.

Arnoldi builds an orthonormal basis ``V`` of ``span{r, A r, A^2 r, ...}`` with ``A V_k = V_{k+1} H`` (``H`` Hessenberg,
``(k+1, k)``), and ``dx = V_k y`` with ``y = argmin |beta e_1 - H y|``.

No Givens rotations are chained, which would cost many small operations a step.  ``H`` has a one-dimensional left null
space, spanned by ``u`` with

    u_0 = 1,    u_{j+1} = -(sum_{i<=j} u_i h_ij) / h_{j+1,j},

and the least residual is ``beta / |u|``: that is the whole test of a step.  At the end of a cycle the same ``u`` gives
the orthogonal factor of ``H = Q R`` in closed form, with ``s_j = |u_{0..j}|``,

    Q_ij = u_i u_{j+1} / (s_j s_{j+1})  (i <= j),    Q_{j+1,j} = -s_j / s_{j+1},

whose columns are orthonormal whatever the rounding in ``u``.

Source: Saad & Schultz (1986), SIAM J. Sci. Stat. Comput. 7(3), algorithm 4; Saad, *Iterative Methods for Sparse Linear
Systems* (2nd ed., SIAM 2003), algorithm 6.11; the null vector: Ayachour (2003), J. Comput. Appl. Math. 159(2);
Gram-Schmidt done twice where a vector keeps less than a tenth of its length: Daniel, Gragg, Kaufman & Stewart (1976), Math.
Comp. 30; Giraud, Langou, Rozloznik & van den Eshof (2005), Numer. Math. 101.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options, optional
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.iterative.cycles import (
    Correction,
    Task,
    column,
    in_working_precision,
    norms,
    restarted,
    right_preconditioned,
)
from implicitkit.linear.iterative.dropping import Fewer
from implicitkit.linear.iterative.preconditioners import PreconditionedSolver

_RESTART, _FEWEST = 50, 12  # vectors of a basis, by default
_NUMBERS = 1 << 24  # in it
_KEPT = 0.1  # share of a vector's length that must be left after one Gram-Schmidt pass, ...
_TAKEN = (1 / _KEPT**2 - 1) ** 0.5  # ... which then has taken so many times what is left

#: Products, and two restarts, in which the residual must be halved, unless those that are left are enough.
PATIENCE = 60
STALLED = (
    "stagnated: the tolerance is below what rounding allows or the matrix is singular (then "
    'linear_solver="lsmr" gives the minimum-norm solution), or the residual falls too slowly for max_steps'
)
Look = tuple[Collection[int], Callable[[Tensor, Tensor, Tensor], bool]]


@register_linear_solver("gmres")
@dataclass(frozen=True)
class GMRES(PreconditionedSolver):
    """GMRES(restart), each sample with its own stop; one product and one look at the host a step.

    A sample uses the columns of the basis up to its own convergence or breakdown, so its answer does not depend on its
    neighbours.  ``rtol`` may also be a tensor ``(batch,)``.  Memory: ``(restart + 1) * batch * n``.

    Source: Saad & Schultz (1986), algorithm 4; Saad (2003), algorithm 6.11.

    Args:
        restart: dimension of the Krylov space before a restart, at least 1; ``None``: 50, and fewer for big states, so that
            the basis holds no more than 2^24 numbers (128 MB in double precision), but 12 at least.
        preconditioner: ``"jacobi"``, ``"block_jacobi"``, ``"ilu"``, ``"amg"`` (:class:`PreconditionedSolver`).

    Raises:
        ValueError: ``restart < 1``, or an unknown preconditioner.
    """

    restart: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, restart=optional(at_least(1)))

    @in_working_precision
    @right_preconditioned
    def solve(
        self, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        restart = self.restart or vectors(b)

        def cycle(task: Task) -> Correction:
            return arnoldi(A, task, min(restart, A.size, int(task.budget.max())))

        return restarted(
            cycle,
            A,
            b,
            rtol=rtol,
            atol=atol,
            max_steps=max_steps,
            stalled=STALLED,
            patience=max(2, PATIENCE // restart),
        )


def vectors(b: Tensor) -> int:
    """How many a basis holds, by default."""
    return min(_RESTART, max(_FEWEST, _NUMBERS // max(1, b.numel())))


def arnoldi(
    A: Operator,
    task: Task,
    columns: int,
    look: Look | None = None,
    known: tuple[Tensor, ...] = (),
    beyond: bool = False,
) -> Correction:
    """One cycle of at most ``columns`` steps from the residual ``r`` of the task; ``known``: ``A r``, ``A (r + A r)``, as
    far as they are.

    ``look``: numbers of steps after which it is asked whether to end here, with the columns of ``H`` so far ``(batch, k,
    k + 1)``, ``u`` ``(batch, k + 1)`` and which samples have converged.  (Those that are left out of the products by then,
    where that pays, have a matrix of zeros there: :class:`Fewer`.)

    ``beyond``: samples that have come to their target take what the products made for others show, down to the root of eps.
    """
    space, fewer = _Space(task, columns, beyond), Fewer(A)
    for j in range(columns):
        going = space.step(fewer.A, known)
        left = int(torch.count_nonzero(going))
        if not left:
            break
        if look is not None and j + 1 in look[0]:
            known_so_far = (_transposed(space.H), 0.0), (space.u.squeeze(1), 1.0), (~going.flatten(), True)
            if look[1](*(fewer.spread(t, rest) for t, rest in known_so_far)):
                break
        if len(known) <= j + 1 < columns:
            index = fewer.drop(going, left, space.answer, space.ahead)
            if index is not None:
                space.narrow(index)
    return Correction(*fewer.whole(space.answer()))


class _Space:
    """The Krylov space of every sample, and what a step knows of the least residual in it.

    Vectors are rows (``w V^T``, ``c V``): batched products with a row are about eight times faster on the CPU than with a
    column.  ``basis[j]`` is the j-th vector of every sample, ``V`` its view ``(batch, columns + 1, n)``; what else a step
    adds is kept as it comes: every write into a part of a tensor is three operations, as many as make the number.  Numbers
    of a sample are ``(batch, 1, 1)``, and rows of them ``(batch, 1, j + 1)``, as these products return them: to change a
    shape is an operation, too.
    """

    def __init__(self, task: Task, columns: int, beyond: bool) -> None:
        r, norm, target, live, budget = task
        batch, n = r.shape
        info = torch.finfo(r.dtype)
        self.basis = r.new_empty(columns + 1, batch, n)
        self.V = self.basis.transpose(0, 1)
        self.H: list[tuple[Tensor, Tensor]] = []  # columns, (batch, 1, j + 1), and the length below each
        ratio = norm / (0.9 * target).clamp_min(info.tiny)  # a margin, so that drift seldom costs another cycle
        self.limit = torch.where(live, (ratio * ratio).nan_to_num(), ratio.new_zeros(())).view(-1, 1, 1)
        self.first = column(norm.where(live, norm.new_ones(())))
        self.v = torch.div(r, self.first, out=self.basis[0])
        self.u = self.size = r.new_ones(batch, 1, 1)
        self.null = self.floor = r.new_zeros(batch, 1, 1)
        self.norm, self.live, self.budget = norm, live, budget
        self.least = 1 / info.eps if beyond else 0.0  # what the square of a residual may be divided by for nothing

    def step(self, A: Operator, known: tuple[Tensor, ...]) -> Tensor:
        """One product, one vector and one column more; which samples have not converged, ``(batch, 1, 1)``."""
        H, j = self.H, len(self.H)
        w = A.mv(self.v) if j >= len(known) else _again(known[: j + 1], self.first, H)
        if j == 0:
            info = torch.finfo(w.dtype)
            self.floor = (norms(w) * info.eps).clamp_min_(info.tiny).view(-1, 1, 1)
        Vj, product = self.V[:, : j + 1], w.unsqueeze(1)
        VjT = Vj.mT
        h = torch.bmm(product, VjT)
        w = torch.baddbmm(product, h, Vj, alpha=-1)
        length = torch.linalg.vector_norm(w, dim=2, keepdim=True)
        if _cancelled(length, h):
            again = torch.bmm(w, VjT)
            w = torch.baddbmm(w, again, Vj, alpha=-1)
            h.add_(again)
            length = torch.linalg.vector_norm(w, dim=2, keepdim=True)
        length, u, self.v = torch.maximum(length, self.floor), self.u, self.basis[j + 1]
        torch.div(w, length, out=self.v.unsqueeze(1))
        H.append((h, length))
        entry = torch.addcdiv(self.null, torch.mul(u, h).sum(2, keepdim=True), length, value=-1)
        self.u, self.size = torch.cat((u, entry), 2), torch.addcmul(self.size, entry, entry)
        return self.size < self.limit

    def ahead(self) -> float:
        """The products that the slowest sample still takes, if each takes away as much of its residual as those so far.

        ``size`` is what the square of a residual has been divided by, ``limit`` what it shall be divided by.
        """
        needed = (self.limit / self.size).log_().div_(self.size.log()).mul_(len(self.H))
        return float(needed.nan_to_num_(0, torch.inf, 0).amax())

    def answer(self) -> tuple[Tensor, Tensor]:
        """The correction ``(batch, n)`` and the products that each sample used."""
        limit = torch.where(self.limit > 0, self.limit.clamp_min(self.least), 0) if self.least else self.limit
        limit, floor, u = limit.squeeze(1), self.floor.squeeze(1), self.u.squeeze(1)
        y, used = _least_squares(_transposed(self.H), u, self.norm, limit, floor, self.live, self.budget)
        return torch.bmm(y.unsqueeze(1), self.V[:, : len(self.H)]).squeeze(1), used

    def narrow(self, index: Tensor) -> None:
        """Go on with these samples only."""
        made = len(self.H) + 1
        basis = self.basis.new_empty(len(self.basis), len(index), self.basis.shape[2])
        torch.index_select(self.basis[:made], 1, index, out=basis[:made])
        self.basis, self.V, self.v = basis, basis.transpose(0, 1), basis[made - 1]
        self.H = [(h.index_select(0, index), below.index_select(0, index)) for h, below in self.H]
        for name in ("limit", "first", "u", "size", "null", "floor", "norm", "live", "budget"):
            setattr(self, name, getattr(self, name).index_select(0, index))


def _transposed(H: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``H^T``, ``(batch, k, k + 1)``, of its columns as far as they are not zero."""
    k, length = len(H), H[0][1]
    entries = torch.cat((torch.zeros_like(length), *itertools.chain.from_iterable(H)), 2)
    return entries.index_select(2, _places(k, entries.device)).view(-1, k, k + 1)


@functools.lru_cache(maxsize=128)
def _places(k: int, device: torch.device) -> Tensor:
    """Where the entries of ``H^T`` stand in its columns one after another, behind a zero."""
    j, i = torch.arange(k, device=device).unsqueeze(1), torch.arange(k + 1, device=device)
    return torch.where(i <= j + 1, 1 + j * (j + 3) // 2 + i, 0).flatten()


def _again(known: tuple[Tensor, ...], norm: Tensor, H: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The product with the first, or second, vector of the basis from those of the power series: ``A r / |r|``, or what
    follows from ``h_2 v_2 = A v_1 - h_1 v_1``."""
    if len(known) == 1:
        return known[0] / norm
    h, length = (part.squeeze(1) for part in H[0])
    scale = 1 / (norm * length)
    return torch.addcmul(known[1] * scale, known[0], scale * (1 + h), value=-1)


def _cancelled(length: Tensor, h: Tensor) -> bool:
    """Has Gram-Schmidt taken away ``h`` so much of some vector, and left so little, that rounding shows?  Yes, where asking
    would cost more."""
    if length.device.type != "cpu":
        return True
    return not float((torch.linalg.vector_norm(h, dim=2, keepdim=True) / length).amax()) <= _TAKEN  # NaN: yes


def _broken(lengths: Tensor, square: Tensor, floor: Tensor) -> Tensor | None:
    """The steps at which the space of a sample is exhausted, ``(batch, k)``: the vector that they made has no length.

    ``None`` in the everyday case: no step is, and every ``square``, the last ``|u|^2`` ``(batch,)``, is finite.
    """
    if lengths.device.type == "cpu" and bool((lengths > floor).all(1).logical_and_(square < torch.inf).all()):
        return None
    return lengths <= floor


def _least_squares(
    Ht: Tensor, u: Tensor, beta: Tensor, limit: Tensor, floor: Tensor, live: Tensor, budget: Tensor
) -> tuple[Tensor, Tensor]:
    """``argmin |beta e_1 - H y|`` over each sample's own columns; also how many products it used.

    ``Ht``: ``(batch, k, k + 1)``, the transpose of ``H``; ``u``: ``(batch, k + 1)``;
    the rest ``(batch,)`` (``floor`` and ``limit`` ``(batch, 1)``).
    """
    k = Ht.shape[1]
    squares = (u * u).cumsum(dim=1)
    index = torch.arange(k, device=u.device)
    # before this step the sample had not converged; squares grow, so that what holds of a step held of those before
    use = (squares[:, :k] < limit).logical_and_(index < budget.unsqueeze(1))
    broken = _broken(Ht.diagonal(offset=1, dim1=1, dim2=2), squares[:, k], floor)
    if broken is not None:
        exhausted = broken.cumsum(dim=1) - broken.long() > 0
        use = (use & squares[:, 1:].isfinite() & ~exhausted).cumprod(dim=1).bool()
    steps = torch.where(live, use.sum(dim=1), 0).clamp_min(1)
    norm = squares.sqrt()
    below, above = norm[:, :k], norm[:, 1:]
    # R^T = H^T Q without forming Q: a column of Q weighs a running sum over the rows of H, and the row below it.
    weight, last = u[:, 1:] / (below * above), below / above
    Rt = (Ht[:, :, :k] * u[:, None, :k]).cumsum(dim=2).mul_(weight.unsqueeze(1))
    Rt.addcmul_(Ht[:, :, 1:], last.unsqueeze(1), value=-1)
    if broken is not None:
        pivots = torch.where(use, Rt.diagonal(dim1=1, dim2=2).abs(), 0)
        noise = pivots <= 4 * torch.finfo(u.dtype).eps * pivots.amax(dim=1, keepdim=True)
        use = use & ~(noise & broken)  # a singular block: the last direction is rounding
    Rt.masked_fill_(~use.unsqueeze(2), 0).diagonal(dim1=1, dim2=2).masked_fill_(~use, 1)
    g = torch.where(use, beta.unsqueeze(1) * weight, 0)  # beta Q^T e_1
    return torch.linalg.solve_triangular(Rt.mT, g.unsqueeze(2), upper=True).squeeze(2), steps
