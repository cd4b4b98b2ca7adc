"""Anderson acceleration of a fixed-point iteration."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import above, at_least, between, check_options, not_negative, optional
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.costs import dropping_pays, gains, is_cheap, steps_needed
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.differences import NOTHING, empty, raised, remember, slices_of
from implicitkit.solver.method import Method
from implicitkit.solver.steps.restarts import maybe_any, return_to_best, stranded, watch

_PERIOD = 3  # mix in every third step
_WIDE = 64  # unknowns from which on the samples of a batch decide together whether mixing pays
_LITTLE = 0.75  # what a mixing leaves of a residual, or more, where plain steps are as good ...
_FAST = 0.8  # ... as long as three of them leave so much at most, ...
_THIRD = (
    1 / 3
)  # ... and gain so much of what the three before gained, whose mixing may cost as much as two of them, ...
_MOST = 0.75  # ... for so many of the samples at work
_SWIFT = 0.35  # what plain steps leave of a residual, two in the mean, before there is anything to mix ...
_SLOWER = 1.2  # ... while the second leaves so much more than the first, at most
_FEW, _FEWEST = 10, 8  # unknowns below which a few differences span them, and are mixed in any case (of a cheap map)
_SOME = 0.1  # of the samples: while so many will not be done after one more step of a cheap map, it takes two
_THRICE = 3.0  # times what half of the samples need: so many steps are made, at most, for the slowest one
_TWO = 100.0  # times the tolerance: what two plain steps of a cheap map hardly lower to it
_TIMES = 3  # so often three steps are made, at most, before somebody looks
_NEAR, _HALF = 2.0, 0.5  # times the tolerance: what residuals of so many are not to fall below in steps not looked at


@register_solver("anderson", solves="fixed_point")
@dataclass(frozen=True)
class Anderson(Method):
    r"""Type-II Anderson acceleration, coefficients per sample, mixing in every ``period``-th step.

    With residuals ``r_k = f(z_k) - z_k``, the plain (mixed) points ``w_k = z_k + damping r_k`` and the last ``m``
    differences ``dR``, ``dW`` of both as columns,

        gamma = argmin |r_k - dR gamma|^2 + ridge |D gamma|^2,    z_{k+1} = w_k - dW gamma,

    ``D = diag |dR_j|`` (Anderson 1965; Walker & Ni 2011, eq. 2.2 and problem 2.3), and ``z_{k+1} = w_k`` in the steps
    between, which fill the memory at the cost of one row (Banerjee, Suryanarayana & Pask 2016, Chem. Phys. Lett. 647,
    31-35; Pratapa, Suryanarayana & Pask 2016, J. Comput. Phys. 306, 43-54).  The normal equations are kept as an
    ``m x m`` Gram matrix that gains one row for each step; the ridge is relative to its diagonal, since an absolute one
    would turn the method into averaging once residuals are small.

    Plain steps take the place of mixing where it gains little (unless ``period`` is given):

    - From 10 unknowns on, while plain steps from the first one on leave an eighth of the residual, two together.  Mixing
      would save a third of the evaluations as a rule (half of them where one eigenvalue stands out), and costs as much as a
      small map.  Below 64 unknowns each sample decides for itself.  From 64 on all samples do the same, and only if the
      second step gains as much as the first: else real eigenvalues are likely, for which combinations do better
      (``|J r|^2 = |r| |J^2 r|`` where the spectrum fills a disk evenly).
    - From 64 unknowns on, where a mixing leaves more than three quarters of the residual of three quarters of the samples,
      for as long as three plain steps take a fifth of it away, and gain a third of what the three before them gained: no
      combination does much better on a spectrum that fills a disk.  This is decided for the whole batch, so a sample may
      take another way beside others than alone; with ``period=3`` it takes its own.
    - Of a cheap map, whose evaluation and plain step cost no more than mixing adds to a step
      (:mod:`~implicitkit.solver.costs`), from 64 unknowns on, for as long as plain steps leave no more than
      0.8 of the residual of three quarters of the samples at work, and gain a quarter at least of what they gained at first:
      less would mean that a few eigenvalues lie apart, which the memory of the last steps then knows best.  Of 8 and 9
      unknowns they go on as they do of 10 to 63 of any map.

    Restarts (:mod:`~implicitkit.solver.steps.restarts`): a sample that does badly forgets its memory and takes a plain step
    from its best point, so that where that step contracts the method is not worse than Picard for long.  From then on it
    mixes in every step, as maps need that do not contract.  A sample for which a restart was in vain keeps its last
    difference and goes on from where it is.

    Looks: a look at the residual costs as much as a small map.  From 64 unknowns on the plain steps between two mixings are
    made without one while, at the rate of the last steps, half of the samples (where rows are not dropped, or of a cheap
    map: the slowest) will not be near their tolerance after them, and nobody watches (a trace, a callback).  Of a cheap map
    up to seven are, as far as the slowest sample is expected to need them, and half of the others a third as many; none
    where the last step left a fifth more than the one before.  Of 12 to 63 unknowns, every third step mixed, that is so of
    one sample alone, whose residual is measured in each of them: it goes its way as it would beside others.

    Memory: one array ``(batch, memory, 2 n)``, allocated once.  One evaluation a step.

    Args:
        memory: ``m``, at least 1; of fewer unknowns, as many as they are. damping: of the plain steps, in (0, 2).
        period: mix in every so many steps; 1: in all of them, the method as Walker & Ni have it.  ``None``: 3, but 1 below
            8 and 2 below 12 unknowns, which a few differences span.
        ridge: relative regularisation; ``None``: ``10 m eps`` of the dtype.
        restart: forget the memory every so many steps; ``None``: never.
        safeguard: growth of the residual at which a sample restarts, greater than 1; ``inf`` switches it off.
        patience: steps without a new best residual after which a sample restarts.

    Raises:
        ValueError: an option out of range.
    """

    memory: int = 8
    damping: float = 1.0
    period: int | None = None
    ridge: float | None = None
    restart: int | None = None
    safeguard: float = 4.0
    patience: int = 50
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(
            self,
            memory=at_least(1),
            damping=between(0, 2),
            period=optional(at_least(1)),
            ridge=optional(not_negative()),
            restart=optional(at_least(2)),
            safeguard=above(1),
            patience=at_least(2),
        )

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        cheap = self.period is None and is_cheap(f, _mixed_every(z))
        swift = self.period is None and (z.shape[1] >= _FEW or (z.shape[1] >= _FEWEST and cheap))
        f.weighs = swift and (cheap or z.shape[1] >= _WIDE)
        return {
            **(NOTHING if swift else empty(z, self._rows(z))),
            "last": None,  # r and w of the step before
            "mark": None,  # |r| when plain steps last began
            "since": 0,  # steps since the memory of all was last empty
            "new": 0,  # rows of the history that the Gram matrix does not know yet
            "eager": None,  # samples that mix in every step
            "path": () if swift else None,  # while all take plain steps from the first one on: the last of them
            "cheap": cheap and z.shape[1] >= _WIDE,
            "pace": None,  # of a cheap map: the logarithm of what each of the first two steps left
            "swift": None,  # samples that still do, when others do not, and |r| of the step before
            "plain": None,  # while all take plain steps only: |r| at the last look, and the steps since then
            "guard": {},
        }

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        k, m = state["since"], self._rows(z)
        r, mixed = self._plain(f, z)
        if state["plain"] is not None:
            state = state | {"mark": state["plain"][0], "plain": _still_plain(f, *state["plain"])}
            if state["plain"] is not None:
                return self._onwards(f, mixed, state), state
            k, state = 0, state | empty(z, m)
        path, swift = state["path"], state["swift"]
        if path is not None:
            found = self._cheaply(f, (r, mixed), state) if state["cheap"] else None
            if found is not None:
                return found
            swift = None if state["cheap"] else _swift(f, path, k)
            if not state["cheap"] and (swift is None or bool(swift.all()) or bool((swift | ~f.active).all())):
                return mixed, state | {"path": (*path, (r, mixed, f.norm))[-max(m, 2) :], "since": k + 1}
            state = state | _recalled(path, m, k)
        elif swift is not None:
            swift = swift[0] & (f.norm <= _SWIFT**2 * swift[1])
        swift = swift if swift is not None and z.shape[1] < _WIDE and maybe_any(swift) else None
        if self.restart is not None and k >= self.restart:
            k = 0
        if k > 0:
            remember(state, (k - 1) % m, (r, mixed), state["last"])
        forget, guard = watch(f, state["guard"], self.safeguard, self.patience)
        eager, new = state["eager"], state["new"] + 1 if k > 0 else 0
        if forget is not None:
            wiped = forget.unsqueeze(1).repeat(1, m)
            wiped[:, (k - 1) % m] &= ~stranded(forget, state["guard"], guard)  # which learn from their last step
            for name in ("dR", "dW"):
                state[name].masked_fill_(wiped.unsqueeze(2), 0)
            state["gram"].masked_fill_(forget.view(-1, 1, 1), 0)
            eager = forget if eager is None else eager | forget
        before = state["last"]
        state = state | {"since": k + 1, "last": (r, mixed), "new": new, "eager": eager, "guard": guard}
        state["swift"] = None if swift is None else (swift, _size(before, f))
        due = k % (self.period or _mixed_every(z)) == 0
        if k == 0:
            return self._onwards(f, return_to_best(f, mixed, guard), state), state
        if not due and eager is None:
            return self._onwards(f, return_to_best(f, mixed, guard), state, k % _PERIOD), state
        slots = [(k - 1 - i) % m for i in range(min(new, k, m))]
        state["new"] = 0
        gamma, rhs = self._coefficients(state, r, min(k, m), slots)
        dW = state["dW"] if k >= m else state["dW"].narrow(1, 0, k)
        may = self.period is None and eager is None and k > _PERIOD and z.shape[1] >= _WIDE
        if may and _gains_little(f, torch.bmm(rhs, gamma).flatten(), before):
            share = (f.norm / state["mark"]).pow_(_THIRD).clamp_max_(_FAST)
            state |= {"plain": (f.norm, 0, share), "last": None, **NOTHING}
        if gamma.dtype != z.dtype:
            gamma = gamma.to(z.dtype)
        if not due and eager is not None:
            gamma = gamma.masked_fill(~eager.view(-1, 1, 1), 0)
        if swift is not None:
            gamma = gamma.masked_fill(swift.view(-1, 1, 1), 0)
        z_next = torch.baddbmm(mixed.unsqueeze(1), gamma.mT, dW, alpha=-1).squeeze(1)
        z_next = return_to_best(f, z_next, guard)
        return (self._onwards(f, z_next, state) if due and eager is None else z_next), state

    def _rows(self, z: Tensor) -> int:
        """Differences that are kept: more than the unknowns span say nothing new."""
        return min(self.memory, z.shape[1])

    def _plain(self, f: Evaluations, z: Tensor) -> tuple[Tensor, Tensor]:
        """``r`` and ``w`` at ``z``."""
        r = f.residual(z)
        return r, f(z) if self.damping == 1.0 else z.add(r, alpha=self.damping)

    def _cheaply(
        self, f: Evaluations, here: tuple[Tensor, Tensor], state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]] | None:
        """The next of the plain steps that a cheap map takes from the first one on, or the next three, while samples are far
        from done; ``None`` where they gain too little.  The first two are made at once, unless they might be enough."""
        path, gain = state["path"], None
        if len(path) > 1:
            steps, before = next((j, p[2]) for j, p in enumerate(reversed(path), 1) if j > 1 and p[2] is not None)
            enough, gain, pace = gains(f, before, steps, state["pace"])
            if not _most(f, enough):
                return None
            state = state | {"pace": pace}
        path, z, kept = (*path, (*here, f.norm)), here[1], max(self.memory, _PERIOD + 1)
        room = min(f.ahead - 1, kept - 2)
        if gain is None:
            unseen = int(room > 0 and _most(f, f.norm > _TWO * f.tolerance))
        else:
            unseen = _cheaply_unseen(f, gain, room) if room > 0 and _is_steady(f, state["path"]) else 0
        for _ in range(unseen):
            here = self._plain(f, z)
            path, z = (*path, (*here, _size(here, f) if gain is None else None)), here[1]
            f.taken += 1
        return z, state | {"path": path[-kept:], "since": state["since"] + f.taken}

    def _onwards(self, f: Evaluations, z: Tensor, state: dict[str, Any], done: int = 0) -> Tensor:
        """The next point to look at, which is ``z`` or lies some plain steps behind it (:func:`_unseen`), of which ``done``
        have been made since the last mixing; changes ``state``."""
        mark = state["mark"]
        if not done:
            state["mark"] = f.norm
        since = state["plain"][1] if state["plain"] is not None else 0
        few = z.shape[1] < _WIDE
        seen = few and (len(z) > 1 or _mixed_every(z) < _PERIOD)
        if self.period is not None or mark is None or since or seen or f.ahead < _PERIOD:
            return z
        plain, before = state["plain"] is not None, f.norm
        steps = _PERIOD * _unseen(f, mark, plain) - done
        for j in range(1, steps):
            here = self._plain(f, z)
            if few or j % _PERIOD == 0:
                now = _size(here, f)
                if not _goes_on(f, now, before, few, state["plain"][2] if plain else _FAST):  # here it is looked at
                    steps = j
                    break
                before = now
            if not plain:
                k = state["since"]
                remember(state, (k - 1) % self._rows(z), here, state["last"])
                state.update(since=k + 1, last=here, new=state["new"] + 1)
            z = here[1]
        if steps > 0:
            state["plain"] = (before, _PERIOD - 1, state["plain"][2]) if plain else None
            guard = state["guard"]
            state["guard"] = guard | {"step": int(guard.get("step") or 0) + steps - 1}
            f.taken = steps
        return z

    def _coefficients(self, state: dict[str, Any], r: Tensor, held: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        """``gamma``, shape ``(batch, held, 1)``, and ``r^T dR``, ``(batch, 1, held)``, whose product is what it lowers
        ``|r|^2`` by; brings the rows ``slots`` of the Gram matrix up to date, on its diagonal and below, which is all that a
        factorisation reads."""
        gram, dR, pieces = state["gram"], state["dR"], slices_of(slots)
        dR = dR if held == dR.shape[1] else dR.narrow(1, 0, held)
        dRT, memory = dR.mT, gram.shape[1]
        rhs = torch.bmm(r.unsqueeze(1), dRT)
        if rhs.dtype != gram.dtype:
            rhs = rhs.to(gram.dtype)
        if held < memory:
            gram = gram[:, :held, :held]
        for piece in pieces:  # of the history as it lies: to join r to its rows copies them
            gram[:, piece] = rows = torch.bmm(dR[:, piece], dRT)
            if piece.stop < held:
                gram[:, piece.stop :, piece] = rows[:, :, piece.stop :].mT
        factor, info = torch.linalg.cholesky_ex(raised(gram, memory, self.ridge))
        gamma = torch.cholesky_solve(rhs.mT, factor)
        if maybe_any(info):
            gamma = gamma.masked_fill(info.ne(0).view(-1, 1, 1), 0)  # not positive definite: the plain step
        return gamma, rhs


def _mixed_every(z: Tensor) -> int:
    """Steps from one mixing to the next, unless it is said: a few differences span few unknowns."""
    return min(_PERIOD, max(1, z.shape[1] // 4))


def _size(step: tuple[Tensor, Tensor], f: Evaluations) -> Tensor:
    """``|r|`` of a step, as the driver measures it."""
    return torch.linalg.vector_norm(step[0], dim=1, dtype=f.norm.dtype)


def _largest(f: Evaluations, numbers: Tensor) -> float:
    """The largest of the samples at work."""
    return float((numbers if f.at_work == f.batch else torch.where(f.active, numbers, 0)).amax())


def _most(f: Evaluations, which: Tensor, share: float = _MOST) -> bool:
    """Are these most of the samples at work?"""
    which = which if f.at_work == f.batch else which & f.active
    return int(torch.count_nonzero(which)) >= share * f.at_work


Path = tuple[tuple[Tensor, Tensor, Any], ...]  # r, w and |r| of some steps (None: of one not looked at)


def _swift(f: Evaluations, path: Path, count: int) -> Tensor | None:
    """Where ``count`` plain steps, and only plain steps so far, lower the residual fast, ``(batch,)``, and for most samples
    of many unknowns as fast as at first; ``None`` before the second."""
    if len(path) < 2:
        return None
    last, before = path[-1][0], path[-1][2]
    fast = f.norm <= _SWIFT**2 * path[-2][2]
    if count != 2 or last.shape[1] < _WIDE or _most(f, f.norm * path[0][2] <= _SLOWER * before.square()):
        return fast
    return torch.zeros_like(fast)


def _goes_on(f: Evaluations, now: Tensor, before: Tensor, few: bool, share: Tensor | float) -> bool:
    """Is the next plain step made without a look, too, where three leave a ``share`` at most?  One of ``few`` unknowns goes
    its way as it would beside others."""
    if few:
        return _NEAR * float(f.tolerance) < float(now) <= float(before)
    return _most(f, now <= share * before)


def _is_steady(f: Evaluations, path: Path) -> bool:
    """Has the last plain step not left much more of most residuals than the one before?  An eigenvalue beyond one shows so,
    before residuals grow."""
    (*_, earlier), (*_, before) = path[-2:]
    return earlier is None or before is None or _most(f, f.norm * earlier <= _SLOWER * before.square())


def _gains_little(f: Evaluations, fall: Tensor, before: tuple[Tensor, Tensor]) -> bool:
    """Is a mixing that lowers ``|r|^2`` by ``fall`` ``(batch,)`` worth little, while plain steps are as good as the last one
    was, ``before`` which there were ``r`` and ``w``, for most samples?  The second is asked where the first is so."""
    little = fall <= (1 - _LITTLE**2) * f.norm.square()
    return _most(f, little) and _most(f, little & (f.norm <= _FAST ** (1 / _PERIOD) * _size(before, f)))


def _recalled(path: Path, memory: int, count: int) -> dict[str, Any]:
    """What the state would be if the last of ``count`` steps, a path, had been remembered."""
    r, mixed, _ = path[-1]
    state = empty(r, memory)
    for j, (old, new) in enumerate(itertools.pairwise(path), count - len(path)):
        remember(state, j % memory, new[:2], old[:2])
    seen = path[: max(1, len(path) - (count - 1) % _PERIOD)]
    mark = next((size for *_, size in reversed(seen) if size is not None), None)
    kept = {"last": (r, mixed), "mark": mark, "since": count, "new": len(path) - 1, "path": None}
    return {**state, **kept, "guard": {"step": count}}


def _unseen(f: Evaluations, mark: Tensor, plain: bool) -> int:
    """How many times three steps are made until the next look.  ``mark``: the residuals when plain steps last began, three
    steps ago.

    Once, if by what these have lost since then half of the samples will not be near the tolerance; where rows are not
    dropped, if the slowest will not: the whole batch is evaluated for that one, and others only come nearer.  Where nothing
    is mixed either, up to three times: half as often as that one still needs it, or once.
    """
    dropping = dropping_pays(f, _HALF)
    if not plain or dropping:
        far = (f.norm.square() > _NEAR * f.tolerance * mark).logical_and_(f.norm < mark)
        if dropping or _most(f, far, _HALF):
            return int(not dropping or _most(f, far, _HALF))
        now, then = (_largest(f, norm / f.tolerance) for norm in (f.norm, mark))
        return int(now < then and now * now > _NEAR * then)
    needed = (f.tolerance / f.norm).log_().div_((f.norm / mark).log_())
    slowest = _largest(f, needed.nan_to_num_(0, 0, 0))
    return int(min(slowest / 2 if slowest > 2 else max(0, slowest), _TIMES, f.ahead // _PERIOD))


def _cheaply_unseen(f: Evaluations, gain: Tensor, room: int) -> int:
    """How many more plain steps of a cheap map are made until the next look, at the rate of the last ones (``gain``).

    Two or one, while half of the samples, or some, will not be near the tolerance after them.  As many as the slowest sample
    needs, but no more than three times what half of the samples at work need, where rows are not dropped and there is
    ``room`` for that: the whole batch is evaluated for that one, others only come nearer, and a look costs more than a step.
    """
    if not dropping_pays(f, _HALF):
        needed = steps_needed(f, gain)
        slowest = _largest(f, needed.nan_to_num(0, 0, 0))
        if slowest <= room:
            half = float(torch.where(f.active, needed, torch.nan).nanmedian())
            return max(0, int(min(slowest, _THRICE * half)))
    needed = steps_needed(f, gain, _NEAR)
    return min(2 if _most(f, needed > 3, _HALF) else int(_most(f, needed > 1, _SOME)), room)


def _still_plain(f: Evaluations, before: Tensor, since: int, share: Tensor) -> tuple[Tensor, int, Tensor] | None:
    """The residual at the last look, the steps since then, and the ``share`` of it that three may leave; ``None`` where
    plain steps no longer lower it so fast."""
    if since + 1 < _PERIOD:
        return before, since + 1, share
    return (f.norm, 0, share) if _most(f, f.norm <= share * before) else None
