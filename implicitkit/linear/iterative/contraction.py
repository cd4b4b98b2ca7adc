r"""Linear systems of fixed-point maps, ``A = J - I``: by GMRES, or by the plain series where that costs less.

The Neumann series needs a product with ``J`` a step and nothing else; GMRES needs fewer products, and orthogonalises each.
Where the spectrum of ``J`` fills a disk around zero no polynomial is much smaller on it than the power that the series uses,
and GMRES has little to win; where a few eigenvalues lie apart it wins a lot.  Which of the two it is, the first Krylov
vectors tell without any further product: with ``A V_k = V_{k+1} H`` and the residual ``r_0 = beta v_1``, the series leaves

    r_m = J^m r_0 = beta V_{m+1} y_m,    y_0 = e_1,    y_{m+1} = y_m + H y_m,

so that ``|y_m|`` is its residual after ``m`` steps, beside that of GMRES.

Source: the identity is this library's use of Arnoldi's relation (Saad 2003, section 6.3); that powers are optimal on a disk:
Saad (2003), section 6.11.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.iterative.cycles import (
    Correction,
    Task,
    column,
    default_steps,
    in_working_precision,
    norms,
    restarted,
)
from implicitkit.linear.iterative.dropping import Fewer, narrowed
from implicitkit.linear.iterative.gmres import PATIENCE, STALLED, arnoldi, vectors
from implicitkit.linear.price import CALL, cost_of_product

_LOOK = 6  # Krylov vectors after which the two are compared ...
_LATER = 3  # ... by what they gained since this one
_MOST = 0.75  # of the samples still at work: the series must cost less for so many of them
_NODES = 5  # in the graph of a product, where there is none to look at
# what is added to what a product costs: by the series, calls and three passes; by GMRES, calls and two over the basis
_SUM_CALLS, _SUMMED, _SUM_CACHED, _SUM_TIMES = 0.92, 0.1, 4.1e4, 3.1
_CALLS_MORE, _ORTHOGONALISED, _CACHED, _BEYOND = 9.7, 0.026, 3.8e5, 1.05
_MADE = 140.0  # vectors more, against which as much is done to make one
_SWIFT = 0.35  # a product that leaves no more than this of any residual is swift
_SLOWER = 1.2  # if the second product leaves so many times what the first left, or more, polynomials may do better ...
_START = 24.0  # ... but a cycle of GMRES costs so many calls beside its products
_CHEAP = 2.0  # windows are tried where a product of GMRES costs so many times one of the series, ...
_HALF = 0.5  # ... and the residuals of so many samples fall
_TRIED = 4.0  # a trial of GMRES follows a window where the series still takes so many times what it costs
_MARGIN = 0.9  # of the target, so that drift seldom costs another cycle
_EVERY = 2  # products between two looks
_WINDOW, _SLOW = 8, 0.7  # products, and the share of a residual that they may leave for the series to go on ...
_HALFWAY = 4  # ... and so many of them tell its rate
_FADES = 0.25  # of the gain of the first products: a window that gains less shows eigenvalues that lie apart
_LOST = 0.5  # of a residual, that GMRES must leave after a series that has enlarged it, for both to be kept
_AHEAD = 1  # windows in which the last samples must end, or GMRES finishes them


@dataclass(frozen=True)
class Contraction(LinearSolver):
    """The series, or GMRES from the residual that the series has reached.

    *Swift*: while every product leaves little more than a third of every residual, the series goes on.  It does not begin
    where the second product leaves more of most residuals than the first did, so that powers do worse than other
    polynomials, unless GMRES would cost more by what polynomials of degree two leave.

    *Windows of eight products*: where a product of GMRES costs at least twice one of the series (three times and more where
    products are a few operations, hardly more where they are dear), and the residuals of half of the samples fall.  After a
    window the series hands a sample to GMRES if its residual falls too slowly, or a quarter as fast as at first; likewise
    the last quarter of the samples, if they need eight products more; and all of them, once more than one in four go: every
    product is one of the whole batch, and powers have left of these residuals what lies along a few eigenvectors, which
    GMRES finds quickly.  So a window that was taken in vain costs GMRES hardly a product more than it needs alone.

    *A trial*: elsewhere, and where the series would go on for so long that a trial costs no more than a quarter of that, six
    steps of GMRES.  By the products that each would take, the series goes on if it costs less for three quarters of the
    samples that are left; else GMRES does.

    Every answer is judged by its true residual.  One product a step, and one look at the host (in windows: at every second
    product).  Memory: that of GMRES, and three vectors a sample.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)

    @in_working_precision
    def solve(
        self, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        restart, begun, asked, plain = vectors(b), False, False, False

        def cycle(task: Task) -> Correction:
            nonlocal begun, asked, plain
            most = int(task.budget.max()) if begun else default_steps(A.size) if max_steps is None else max_steps
            columns = min(restart, A.size, most)
            known: tuple[Tensor, ...] = ()
            if not begun:
                begun = True
                found, known = _by_powers(A, task, most, restart)
                if found is not None:
                    return found
            if plain:
                plain = False
                return _series(A, task, most, columns)
            if asked:
                return arnoldi(A, task, columns)

            def look(Ht: Tensor, u: Tensor, done: Tensor) -> bool:
                nonlocal plain
                open_ = task.live & ~done
                dearer = functools.partial(_dearer, A, task.r, restart)
                plain = not _some(~_pays(Ht, u, task, dearer), open_)
                return plain

            asked = True
            return arnoldi(A, task, columns, ((_LOOK,), look), known)

        patience = max(2, PATIENCE // restart)
        return restarted(cycle, A, b, rtol=rtol, atol=atol, max_steps=max_steps, stalled=STALLED, patience=patience)


def _some(which: Tensor, open_: Tensor, share: float = 1 - _MOST, left: int | None = None) -> bool:
    """Are these more than a quarter of the samples at work (or another share)?  ``left``: how many these are, if known."""
    left = int(torch.count_nonzero(open_)) if left is None else left
    return int(torch.count_nonzero(which & open_)) > share * left


def _product(A: Operator, r: Tensor) -> float:
    """What one costs."""
    numbers = r.numel()
    nodes, through, _ = A.graph() or (_NODES, _NODES * numbers, 0)
    return cost_of_product(numbers, nodes, through, min(max(A.weight - A.size, 0), A.size))


def _dearer(A: Operator, r: Tensor, restart: int, products: Tensor | float) -> Any:
    """What a product of GMRES costs, times one of the series, ``(batch,)`` or a number: it orthogonalises, against half of
    the vectors of its basis on average, which has one for each of the ``products`` that are needed."""
    numbers, product = r.numel(), _product(A, r)
    passes = _ORTHOGONALISED * numbers * (1 + _BEYOND * min(numbers / _CACHED, 1.0))
    held = products.clamp_max(restart) if isinstance(products, Tensor) else min(products, restart)
    krylov = product + _CALLS_MORE * CALL + passes * (_MADE + 0.5 * held)
    return krylov / (product + _SUM_CALLS * CALL + _SUMMED * numbers * (1 + min(numbers / _SUM_CACHED, _SUM_TIMES)))


Dearer = Callable[[Tensor], Tensor]


def _pays(Ht: Tensor, u: Tensor, task: Task, dearer: Dearer) -> Tensor:
    """For which samples would the series cost less than GMRES, ``(batch,)``?

    ``Ht``: ``(batch, k, k + 1)``, the transpose of ``H``; ``u``: ``(batch, k + 1)``, of which ``1 / |u_{0..j}|`` is the
    residual of GMRES.  That falls faster and faster: of ``n`` dimensions ``j`` vectors leave a share of ``1 - j / n``,
    in squares, so that beside its rate it gains about ``j^2 / (4 n)``.
    """
    k, size = Ht.shape[1], task.r.shape[1]
    y = torch.zeros_like(u).unsqueeze(1)
    y[:, 0, 0] = 1
    lengths = []
    for _ in range(k):
        y = torch.baddbmm(y, y[:, :, :k], Ht)
        lengths.append(torch.linalg.vector_norm(y, dim=2).squeeze(1))
    least = u.square().cumsum(1).rsqrt()
    here = (least[:, k] * task.norm / task.target).log()  # still to go, in logarithms
    series = (lengths[_LATER - 1] / lengths[k - 1]).log() / (k - _LATER)  # what a step gains
    krylov = (least[:, _LATER] / least[:, k]).log() / (k - _LATER)
    enough = here <= series * (task.budget - k)
    few = 2 * size * ((krylov.square() + here / size).sqrt() - krylov)  # of GMRES: krylov j + j^2 / (4 size) = here
    cheaper = here <= dearer(few + k) * few * series
    return cheaper & (here > k * krylov) & enough  # false for NaN


def _by_powers(A: Operator, task: Task, limit: int, restart: int) -> tuple[Correction | None, tuple[Tensor, ...]]:
    """What the series finds, if its first two products say that it costs less than GMRES: while it is fast, or as long as
    it gains; ``None`` where they say that polynomials do better, and those products.  ``limit``: the largest ``budget``."""
    r, norm, target, live, _ = task
    known: tuple[Tensor, ...] = (A.mv(r),)
    v = known[0] + r
    length = norms(v)
    first, swift = length / norm, _is_swift(length, norm, live)
    if limit < 2:
        return None, known
    open_ = (length > _MARGIN * target).logical_and_(live)
    left = int(torch.count_nonzero(open_))
    if swift and not left:
        return Correction(-r, live.long()), known
    known = (*known, A.mv(v))
    after = known[1] + v
    length, before = norms(after), length
    second = length / before
    dearer = functools.partial(_dearer, A, r, restart)
    if swift and _is_swift(length, before, open_):
        slower = (second > _SLOWER * first).logical_and_(open_)
        if _some(slower, open_, left=left) and _some(~_shorter(A, task, known, first, second, dearer), open_):
            return None, known
        return _swiftly(A, task, v, after, before, open_, limit), known
    ratio = dearer(_LOOK)
    if ratio < _CHEAP or _some(~(second < 1), open_, _HALF, left):
        return None, known
    columns, most = min(restart, A.size, limit), _TRIED * _LOOK * (ratio - 1)
    return _series(A, task, limit, columns, known, (first * second).log() / 2, most), known


def _is_swift(length: Tensor, before: Tensor, open_: Tensor) -> bool:
    """Has a product left little of every residual?"""
    fast = length <= _SWIFT * before
    return bool(fast.all()) or bool(fast.logical_or_(~open_).all())


def _swiftly(
    A: Operator, task: Task, v: Tensor, after: Tensor, before: Tensor, open_: Tensor, limit: int
) -> Correction:
    """The series from its second product on, while it is fast: ``v = J r``, ``after = J v``, ``before = |v|``."""
    target, fewer, total, steps = task.target, Fewer(A), task.r, task.live.long()
    v = torch.where(column(open_), v, 0)
    for k in range(2, limit + 1):
        length = norms(after)
        steps.add_(open_)
        if not _is_swift(length, before, open_):
            total, steps = fewer.whole((total + torch.where(column(length < before), v, 0), steps))
            return Correction(-total, steps)
        total, open_ = total + v, (length > _MARGIN * target).logical_and_(open_)
        left = int(torch.count_nonzero(open_))
        if not left:
            break
        v, before = after if left == len(after) else torch.where(column(open_), after, 0), length
        index = fewer.drop(open_, left, lambda: (total, steps)) if k > 2 else None  # noqa: B023
        if index is not None:
            total, steps, v, before, open_, target = narrowed(index, total, steps, v, before, open_, target)
        after = fewer.A.stepped(v)
    total, steps = fewer.whole((total, steps))
    return Correction(-total, steps)


def _shorter(
    A: Operator, task: Task, known: tuple[Tensor, ...], first: Tensor, second: Tensor, dearer: Dearer
) -> Tensor:
    """For which samples does the series cost less than GMRES from ``r`` on, by two products, ``(batch,)``?

    ``first`` and ``second``: what they leave of a residual.  Powers go on between ``second`` and ``second^2 / first``, as
    their geometric mean: of eigenvalues that fill a disk both are its radius, of those on an interval 0.77 and 1.04 times
    the largest.  GMRES goes on as it begins, with ``|r + x A r + y A (r + A r)|``, least in ``x`` and ``y``: of a disk that
    is ``|J^2 r|``, of an interval two thirds.
    """
    v = known[0] / column(norms(known[0]))
    left = task.r - v * (v * task.r).sum(1, keepdim=True)
    w = known[1] - v * (v * known[1]).sum(1, keepdim=True)
    w = w / column(norms(w))
    left = left - w * (w * left).sum(1, keepdim=True)
    here = (task.norm / task.target).log()  # to go, in logarithms
    rate = second * (second / first).sqrt()
    powers = (here + (first * second).log()) / -rate.log()
    krylov = 2 * here / (task.norm / norms(left)).log()
    more = _START * CALL / _product(A, task.r) - len(known)
    # false for NaN: the space is exhausted
    return (rate < 1) & (powers <= dearer(krylov) * krylov + more)


def _series(
    A: Operator,
    task: Task,
    limit: int,
    columns: int,
    known: tuple[Tensor, ...] = (),
    pace: Tensor | None = None,
    most: float = math.inf,
) -> Correction:
    """``dx = -(r + J r + J^2 r + ...)``, which leaves ``J^{m + 1} r``; of samples that this is too slow for, GMRES solves
    for what is left.

    ``limit``: the largest ``budget``; ``known``: the first products; ``pace``: the logarithm of what each of them left,
    ``(batch,)``; ``most``: so many may be needed after a window, at the rate of its second half, of three quarters of the
    samples; else the series ends.
    """
    r, norm, target, live, budget = task
    aim, before, latest, left = _MARGIN * target, norm, norm, int(torch.count_nonzero(live))
    few, fewer = (1 - _MOST) * left, Fewer(A)
    dx, rest, v, open_ = -r, torch.zeros_like(r), r, live
    steps, slow, spent, handed = torch.zeros_like(budget), torch.zeros_like(live), budget, 0
    for k in range(1, limit + 1):
        if k > 1:
            dx.sub_(v)
        v = known[k - 1] + v if k <= len(known) else fewer.A.stepped(v)
        if k % _EVERY:  # one product too many costs less than a look at each
            continue
        length = norms(v)
        going = (length > aim).logical_and_(open_)  # false for NaN
        count = int(torch.count_nonzero(going))
        if k % _WINDOW == 0:
            crawls = going & _crawls(length, before, latest, aim, pace, left <= few)
            slower, before = int(torch.count_nonzero(crawls)), length
            if slower > (1 - _MOST) * count:  # GMRES multiplies all for them, and the others need no more of it
                crawls, slower = going, count
            if slower:
                slow, rest = slow | crawls, torch.where(column(crawls), v, rest)
                going, count, handed = going & ~crawls, count - slower, handed + slower
            if count and most < math.inf and _some(_more(length, latest, aim) > most, going, left=count):
                steps, open_ = torch.where(open_, k, steps), torch.zeros_like(open_)
                break
        latest = length if k % _HALFWAY == 0 else latest
        if count < left:  # what has ended is zero from here on, and adds nothing
            steps = torch.where(open_ & ~going, k, steps)
            v, open_, left = torch.where(column(going), v, 0), going, count
        if not left:
            break
        index = fewer.drop(open_, left, lambda: (dx, rest, slow, steps))  # noqa: B023
        if index is not None:
            dx, rest, slow, steps, v = narrowed(index, dx, rest, slow, steps, v)
            open_, before, latest, aim, spent = narrowed(index, open_, before, latest, aim, spent)
            pace = None if pace is None else pace.index_select(0, index)
    dx, rest, slow, steps = fewer.whole((dx, rest, slow, torch.where(open_, spent, steps)))
    if not handed:
        return Correction(dx, steps)
    size = norms(rest)
    after = arnoldi(A, Task(rest, size, target, slow, budget - steps), columns)
    dx, steps = dx + torch.where(column(slow), after.dx, 0), steps + torch.where(slow, after.steps, 0)
    grown = slow & (size > norm)
    lost = grown & ~(norms(r - A.mv(dx)) <= _LOST * norm) if bool(grown.any()) else grown
    if not bool(lost.any()):
        return Correction(dx, steps)
    alone = arnoldi(A, Task(torch.where(column(lost), r, 0), norm, target, lost, budget - steps), columns)
    return Correction(torch.where(column(lost), alone.dx, dx), steps + torch.where(lost, alone.steps, 0))


def _more(length: Tensor, latest: Tensor, aim: Tensor) -> Tensor:
    """Products that the series still takes, at the rate since ``latest``, ``(batch,)``."""
    return _HALFWAY * (aim / length).log() / (length / latest).log()


def _crawls(length: Tensor, before: Tensor, latest: Tensor, aim: Tensor, pace: Tensor | None, last: bool) -> Tensor:
    """For which samples has a window of products left too much of the residual, ``(batch,)``?  What it left along a few
    eigenvectors is quicker done by GMRES.

    ``before`` and ``latest``: residuals a window ago, and half of one. ``pace``: the logarithm of what each of the
    first two products left: where one gains a quarter of that by now, a few eigenvalues lie apart. ``last``: few samples
    are left.
    """
    crawls = ~(length <= _SLOW * before)
    if not last and pace is None:
        return crawls
    left = length / latest
    late = length * left ** (_AHEAD * _WINDOW / _HALFWAY) > aim
    return crawls | (late if last or pace is None else late & (left.log() > _FADES * _HALFWAY * pace))
