r"""Trajectories across kinks of their right-hand side: steps that end there, and what second derivatives have of it.

Where ``f`` is ``f^-`` before a surface ``s(t, y, \theta) = 0`` and ``f^+ = f^- + q s`` behind it, each smooth, a step across
it is of order one for derivatives, and a step that begins or ends on it takes those of one side or the other, as rounding
has it.  So two steps end a little before and begin a little behind it, ``t_a`` and ``t_b``, which do not move.  The time of
crossing ``T`` does, and between ``T`` and ``t_b`` the trajectory has ``\int q s dt``: with ``D = f(t_b, y_b) - f(t_a,
y_a)``, ``D_0`` its value and ``D'`` the jump of ``df/dt`` along the trajectory,

    y_b = \Phi(y_a) + (D - D_0)^2 / (2 D'),

number by number: nothing in values and first derivatives, and in second ones ``q s_\theta s_\theta / s'``, whatever the
surface is.  Numbers of ``f`` with two kinks at one time, on surfaces that move apart, lack what is mixed of these.

Source: Hiskens & Pai 2000, IEEE Trans. Circuits Syst. I 47(2), 204-220, for jumps; the next order of the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.problem.trajectory.explicit_steps import Between, Followed, Slope, stages
from implicitkit.problem.trajectory.sides import Sides

_PARTS, _CUT = 4, 32  # of a step; of a part in which a side changes, time and again:
_ROUGH, _FINE = 2, 5  # so often
_MOST = 128  # crossings, of all samples
_NEAR = 1e-9  # of the whole time: one at a time that is asked for
_BEFORE = 0.1, 0.005  # of the room: steps end there, too, since some stages of longer ones would be behind a kink
_GAP = 3.0  # times what a parameter is moved by, relative, for a difference: from a kink to the steps on both its sides
_WIDEST, _LOOSE = 1e-3, 1e-4  # of the room: at most, and to implicit ones, whose states are not known so well
_TRIES = 3  # to find them, each by steps that end where they were found before
_CLOSE = 1e-5  # of the longest step: kinks are one, that are not as far apart
_TURN, _JUMP = 1e-4, 1e-3  # of the largest derivatives, by which they turn at a kink, and of slopes: more is a jump

_SAID = (
    "InitialValue: derivatives of order {} and higher lack how the times move at which the trajectory crosses kinks of rhs "
    "(relu, clamp, abs, what is compared), and may be off by all of their size: {}"
)
_MANY = (
    f"there are more than {_MOST} crossings, those of all samples together. Solve for fewer samples at once or a shorter "
    "time, or make rhs smooth (softplus)"
)
_HIDDEN = (
    "whether an operation of rhs has kinks, and where, cannot be seen. Use relu, abs, maximum, clamp, torch.where, and no "
    "transform of torch.func inside"
)
_CLOSE_BY = "some are too near to one another to be told apart. Make rhs smooth (softplus)"
_SECOND = "of these the second order is known. Make rhs smooth (softplus)"
_GIVEN = "steps= are given, and do not end there. Leave steps= out, or make rhs smooth (softplus)"


class Bends(NamedTuple):
    """The steps across kinks, ``(K,)``, and there ``D_0`` and ``1 / (2 D')``, zero where there is no kink, both
    ``(K, batch, n)``."""

    step: Tensor
    change: Tensor
    weight: Tensor

    def of(self, before: Tensor, behind: Tensor) -> Tensor:
        """What the states behind have beside the step, of slopes ``(*batch, K, n)`` on both sides."""
        change, weight = (v.movedim(0, 1).reshape(before.shape) for v in self[1:])
        return weight * (behind - before - change).square()


class Gaps(NamedTuple):
    """The times ``(K,)`` of kinks, how far before and behind them steps end, and how far it is from each to the next of
    them, or a time asked for, at most a step; and all times at which steps are to end."""

    at: Tensor
    gap: Tensor
    room: Tensor
    ends: Tensor

    def hold(self, times: Tensor) -> bool:
        """Is one of these well inside each, and none near to it outside?"""
        apart, which = (times[:, None] - self.at).abs().min(1)
        inside = apart <= 0.9 * self.gap.abs()[which]
        return len(which[inside].unique()) == len(self.at) and bool(
            (inside | (apart > min(_BEFORE) * self.room[which])).all()
        )


class Kinks:
    """The kinks on the way of a trajectory.

    Args:
        slope: of a time and a state ``(batch, n)``. mapped: of times ``(P,)`` and states ``(P, batch, n)``. asked: times.
        between: the states between the edges of what was found. integrate: a trajectory through times, from a state.

    Attributes:
        hidden: there are switches whose sides nothing shows.
        orders: of derivatives, up to which they have all that kinks make of them. beyond: what is said of higher ones.
    """

    def __init__(
        self,
        slope: Slope,
        mapped: Slope,
        asked: Tensor,
        between: Callable[[Followed], Between],
        integrate: Callable[[Tensor, Tensor], Followed],
    ) -> None:
        self.slope, self.mapped, self.asked, self.states_in, self.integrate = slope, mapped, asked, between, integrate
        self.hidden, self.orders, self.beyond = False, math.inf, ""

    @functools.cached_property
    def onwards(self) -> float:
        """The sign of the steps."""
        return 1.0 if bool(self.asked[-1] > self.asked[0]) else -1.0

    def split(
        self, found: Followed, follow: Callable[[Followed, Tensor, bool], Followed]
    ) -> tuple[Followed, Bends | None]:
        """The trajectory by steps that end at its kinks, and these; as it was, where there are none, or too many.

        Args:
            follow: a trajectory by steps that derivatives are followed by, too, from one that ends steps at such times,
                where it is told whether there may be kinks elsewhere.
        """
        crossed = self.crossed(found, _ROUGH)
        if crossed is None or not len(crossed):
            self._lack(crossed, 1)
            return follow(found, self.asked, self.hidden or crossed is None), None
        for well_known in (not found.explicit, *(True,) * _TRIES):  # steps across kinks do not say well where these are
            gaps = self._gaps(found, crossed)
            known = self._through(found, gaps.ends if well_known else self._ordered(self.asked, gaps.at))
            crossed = None if known is None else self.crossed(known, _FINE)
            if known is None or crossed is None or not len(crossed):
                break
            if well_known and gaps.hold(crossed):
                fine = follow(known, gaps.ends, self.hidden)
                whole = fine.edges[((fine.edges[:, None] - gaps.at).abs() > 0.99 * gaps.gap.abs()).all(1)]
                if len(whole) < len(fine.edges):  # across a kink there is nothing to follow
                    fine = fine.on(whole, self.slope, self.states_in(fine))
                if fine is not known:
                    crossed = self.crossed(fine, _FINE)
                    if crossed is None or not gaps.hold(crossed):
                        self._lack(crossed, 1, _CLOSE_BY)
                        return fine, None
                self._lack(crossed, 2, _SECOND)
                return fine, self._bends(fine, gaps)
        self._lack(crossed, 1, _CLOSE_BY)
        return follow(found, self.asked, True), None

    def look(self, found: Followed) -> None:
        """Whether given steps meet kinks, at times that are not asked for; they may where ``torch.vmap`` maps over times."""
        mapped = compat.batches_in_front(found.edges)[1]
        crossed = (
            None if mapped else self.crossed(found, 0)
        )  # to a part of a step, as which one at a time asked for may be, too
        if crossed is not None and len(crossed):
            far = (crossed[:, None] - self.asked).abs().amin(1) > found.edges.diff().abs().max() / _PARTS
            crossed = crossed if bool(far.any()) else self.crossed(found, _FINE)
        self._lack(crossed, 1, _GIVEN)

    def _lack(self, crossed: Tensor | None, orders: int, why: str = "") -> None:
        """What is said of derivatives beyond these orders, after kinks were ``crossed``, ``None``: many of them."""
        none = crossed is not None and not len(crossed) and orders == 1
        if none and not self.hidden:
            return
        self.orders, why = (
            (1, _HIDDEN) if self.hidden else (orders, _MANY if crossed is None and why != _GIVEN else why)
        )
        self.beyond = _SAID.format(self.orders + 1, why)

    def _gaps(self, found: Followed, times: Tensor) -> Gaps:
        """Gaps of steps, in which these times are."""
        longest = float(found.edges.diff().abs().max())
        begins = torch.cat((times.new_full((1,), torch.inf), times.diff())).abs() > _CLOSE * longest
        first, last = times[begins], times[torch.cat((begins[1:], begins.new_ones(1)))]
        at = (first + last) / 2
        apart = (at[:, None] - torch.cat((at, self.asked))).abs()
        room = torch.where(apart == 0, torch.inf, apart).amin(1).clamp_max(longest)
        eps = torch.finfo(at.dtype).eps
        gap = torch.maximum(
            room * (min(_GAP * eps ** (1 / 3), _WIDEST) if found.explicit else _LOOSE), 100 * eps * at.abs()
        )
        gap = self.onwards * (gap + (last - first).abs() / 2)
        sides = (at - self.onwards * share * room for share in _BEFORE)
        return Gaps(at, gap, room, self._ordered(self.asked, *sides, at - gap, at + gap))

    def _bends(self, split: Followed, gaps: Gaps) -> Bends:
        step = (torch.searchsorted(self.onwards * split.edges, self.onwards * gaps.at) - 1).clamp_min(0)
        ends = torch.cat((step, step + 1))
        t, y, aside = split.edges[ends], split.states[ends], torch.finfo(split.edges.dtype).eps ** (1 / 3) * gaps.room
        h = self.onwards * torch.cat((-aside, aside))
        way = (
            y.unflatten(0, (2, -1)).diff(dim=0) / t.unflatten(0, (2, -1)).diff(dim=0)[..., None, None]
        )  # on both sides
        slopes = self.mapped(t, y)
        away = self.mapped(t + h, y + h[:, None, None] * way.squeeze(0).repeat(2, 1, 1))
        bent = (away - slopes) / h[:, None, None]
        (change, turned), (size, bend) = (
            [side(v.unflatten(0, (2, -1))) for v in (slopes, bent)] for side in (_across, _largest)
        )
        steady = change.abs() <= _JUMP * size + 4 * gaps.gap.abs()[:, None, None] * bend
        kink = (turned.abs() > _TURN * bend) & steady & torch.isfinite(turned)
        return Bends(step, change, torch.where(kink, 0.5 / turned, 0))

    def _through(self, found: Followed, times: Tensor) -> Followed | None:
        """The trajectory by steps that end at these times, too: anew, since steps across kinks are short; ``None`` where it
        is lost by that."""
        if not found.explicit:
            return found.on(self._ordered(found.edges, times), self.slope, self.states_in(found))
        try:
            known = self.integrate(times, found.states[0])
        except ConvergenceError:
            return None
        lost = torch.isfinite(found.states[-1]) & ~torch.isfinite(known.states[-1])
        return None if bool(compat.batches_in_front(lost)[0].any()) else known

    def _sides(self, t: Tensor, y: Tensor) -> Tensor:
        """The sides of all switches, ``(P, C)``."""

        def one(now: Tensor, y: Tensor) -> Tensor:
            with Sides(kept=True) as sides:
                self.slope(now, y)
            self.hidden = self.hidden or sides.hidden
            return torch.cat([y.new_zeros(1, dtype=torch.float32), *sides.made])

        made, batches = compat.batches_in_front(torch.func.vmap(one)(t, y))
        return made.movedim(batches, 0).flatten(1)

    def _stepping(self, found: Followed) -> Between:
        """The states in the steps as steps that end there have them."""
        if not found.explicit:
            return self.states_in(found)
        edges, states = found.edges, found.states
        slopes = self.mapped(edges, states)
        f = lambda t, y: self.mapped(t, y.movedim(1, 0)).movedim(0, 1)  # noqa: E731

        def stepped(step: Tensor, x: Tensor) -> Tensor:
            t, h = edges[step], (edges[step + 1] - edges[step]) * x
            y, first = (v[step].movedim(0, 1) for v in (states, slopes))
            return stages(f, t, y, first, h.unsqueeze(1))[0][-1].movedim(1, 0)

        return stepped

    def crossed(self, found: Followed, rounds: int) -> Tensor | None:
        """The times, in order, at which sides change, but for those asked for; ``None``, if these are too many."""
        edges, states = found.edges, self._stepping(found)

        def at(u: Tensor) -> tuple[Tensor, Tensor]:
            step = u.long().clamp_max(len(edges) - 2)
            x = u - step
            return edges[step] + x * (edges[step + 1] - edges[step]), states(step, x)

        u = torch.arange((len(edges) - 1) * _PARTS + 1, dtype=edges.dtype, device=edges.device) / _PARTS
        cut = torch.linspace(0, 1, _CUT + 1, dtype=u.dtype, device=u.device)
        u = u.unsqueeze(0)
        for _ in range(rounds + 1):
            known = self._sides(*at(u.flatten())).unflatten(0, u.shape)
            changes = (known[:, 1:] != known[:, :-1]).any(2)
            low, high = u[:, :-1][changes], u[:, 1:][changes]
            if not 0 < len(low) <= _MOST:
                return None if len(low) else low
            u = low[:, None] + (high - low)[:, None] * cut
        times = at(((low + high) / 2).unique())[0]
        return times[(times[:, None] - self.asked).abs().amin(1) > _NEAR * (edges[-1] - edges[0]).abs()]

    def _ordered(self, *times: Tensor) -> Tensor:
        every = torch.unique(torch.cat(times))
        return every if self.onwards > 0 else every.flip(0)


def _across(sides: Tensor) -> Tensor:
    return sides.diff(dim=0)[0]


def _largest(sides: Tensor) -> Tensor:
    return sides.abs().amax(0).amax(-1, keepdim=True)
