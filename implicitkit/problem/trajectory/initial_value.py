"""``dy/dt = rhs(t, y, *args)`` from ``y0``: a trajectory, or a state at an event."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording
from implicitkit.foundation.autocast import HALF
from implicitkit.foundation.errors import CapabilityError, ConvergenceError
from implicitkit.foundation.options import at_least, between, check_call, check_options, optional
from implicitkit.foundation.trees import Layout, tree_map
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.base import Problem, Restated, require_callable
from implicitkit.problem.kind import Kind
from implicitkit.problem.trajectory.accuracy_remarks import APART, compare, end_of, is_new
from implicitkit.problem.trajectory.asked_times import as_times, check_order, unpacked
from implicitkit.problem.trajectory.collocation import (
    INITIAL_VALUE,
    Collocation,
    Mesh,
    evaluate,
    radau,
    slope_of,
    times,
    unasked,
    values_only,
)
from implicitkit.problem.trajectory.events import Lookout, first_crossing, time_of
from implicitkit.problem.trajectory.explicit_equations import ExplicitEquations
from implicitkit.problem.trajectory.explicit_steps import Between, Followed, March, TooManySteps, cubic, follow
from implicitkit.problem.trajectory.given_steps import doubt_given
from implicitkit.problem.trajectory.integrators import get_integrator
from implicitkit.problem.trajectory.kinks import Bends, Kinks
from implicitkit.problem.trajectory.sides import Sides
from implicitkit.problem.trajectory.steps_for_derivatives import with_variation
from implicitkit.problem.trajectory.steps_for_parameters import forcing_of, resolved
from implicitkit.problem.trajectory.switches import warn_of_switches

_GROWN = 1e6  # times its own size and that of its first change: beyond, given steps have made a start of no use
_LOOSER, _COMPARED = 30.0, 8  # times the accuracy of one that is compared with it, at so many times and the last
_LOGARITHM = 80.0  # of what errors may grow by: more is as much
Slope = Callable[..., Tensor]
FEWEST = 16  # numbers of a state from which it is looked where its right-hand side has entries


class Start(NamedTuple):
    """What the equations are solved from: the steps; the values at their points, with an event the pair of these and its
    time; why there are none; and what has been followed."""

    mesh: Mesh
    values: Any
    lost: str
    found: Followed
    bends: Bends | None = None
    orders: float = math.inf
    beyond: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class InitialValue(Problem):
    r"""Find the trajectory of ``dy/dt = f(t, y, \theta)`` that begins at ``y(t_0) = y_0``, at the times ``t``.

        path = ik.solve(ik.InitialValue(rhs, t), y0, (theta,)).value     # (len(t), ...), the first entry is y0

    An integrator finds steps and a trajectory; the trajectory is then the root of the equations of all its steps.  Explicit
    steps of order five (:mod:`~implicitkit.problem.trajectory.explicit_equations`) are met by what has been found, with
    nothing left to solve.  Of a stiff equation, be it along what is at rest, or with ``steps`` or ``stages``, they are
    those of collocation at Radau's points (:mod:`~implicitkit.problem.trajectory.collocation`, order ``2 stages - 1``;
    Hairer & Wanner, *Solving Ordinary Differential Equations II*, 2nd ed. 1996, section IV.5), solved by a few sparse
    Newton steps.  In both cases one system whose Jacobian is block bidiagonal, and a derivative like that of any root:
    exact for the discrete trajectory, in ``\theta``, in the initial state (the ``z0`` of the solve, which here *is* an
    argument), in the times and in whatever ``f`` captures, of every order, whichever integrator it was.  The steps are
    constants.  States in half precision are followed in single precision, under autocast.

    With an ``event`` the end is unknown: it is the first time at which ``event(t, y, *args)``, one number, changes its sign,
    ``t = (t_0, latest)``, and the solution's value is ``{"time": T, "state": y(T)}``, both differentiable:
    ``dT = -(g_\theta + g_y y_\theta) / (g_t + g_y f)`` follows from the same equations.
    The trajectory is followed until it is seen.  It is looked at in 8 points of every step or more, and where it turns back
    towards zero between three of them its extreme value is looked for: two changes are missed only where it turns twice or
    more in so short a time, or turns beyond zero by less than the trajectory is accurate.

    Memory: the values at all points, and a few dozen times that in the solve and its derivative, which are matrix-free
    (:mod:`~implicitkit.problem.trajectory.running_sums`) unless the equation is stiff, or its time long beside
    ``1 / |df/dy|``; then factors of a sparse matrix of ``stages n`` unknowns a step and sample, and where ``df/dy`` has no
    pattern of ``(stages n)^2`` numbers: for states of up to some hundred.  An adjoint that integrates backwards needs less
    and is less exact.

    Args:
        rhs: ``f(t, y, *args)``: ``t`` one number, ``y`` like ``y0``, the batch in front where there is one; mapped over
            points by ``torch.vmap``.
        t: two or more times, increasing or decreasing.  The steps are chosen by what they meet: where ``rhs`` is switched on
            for a short while, put a time at the switch, or nothing may see it.  What a parameter at zero forces is looked
            for in 15 points of a step, unless ``rhs`` makes a number of it first, or numbers are in half precision.
        event: ``g(t, y, *args)``, one number; for a solve without ``batch_dims``.
        steps: equal steps between any two times; ``None``: those of the integrator.  All samples take the same steps.
        accuracy: relative tolerance of the integrator, for its steps; ``None``: the ``rtol`` of the solve, if that is given,
            else 1e-6, in single precision 1e-5.
        stages: points of an implicit step, 1 to 7; ``None``: 3 (``scipy.DOP853``: 5), and where explicit steps do these.
        integrator: ``"auto"``, which begins with ``"dormand_prince"`` and takes ``"scipy.Radau"`` where the equation turns
            out to be stiff; one of these or another of SciPy's methods, or a function
            (:mod:`~implicitkit.problem.trajectory.integrators`).

    Warns:
        ConvergenceWarning: the trajectory is not determined to two digits (chaos over a long time), a stiff one has too
            many steps for its derivatives to be followed, or by steps or points that are given they are off by a hundredth;
            ``rhs`` jumps at a time that the state or a parameter moves.  (Second derivatives have what kinks make of them
            (:mod:`~implicitkit.problem.trajectory.kinks`); of ``steps`` that are given, more than 128 kinks and third
            derivatives it is said that they lack it.  Of roots nothing is: ``x.abs()`` is seen, ``(x * x).sqrt()`` is not.)

    Raises:
        TypeError, ValueError: what is given does not fit.
        ConvergenceError (when solved, by ``on_failure``): no trajectory, or no event; only of the samples without.
        CapabilityError (when solved): times that ``torch.vmap`` maps over, without ``steps=``.
    """

    rhs: Callable[..., Any]
    t: Any
    event: Callable[..., Any] | None = None
    steps: int | None = field(default=None, kw_only=True)
    accuracy: float | None = field(default=None, kw_only=True)
    stages: int | None = field(default=None, kw_only=True)
    integrator: Any = field(default="auto", kw_only=True)
    kind: ClassVar[Kind] = INITIAL_VALUE
    under_autocast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_callable(self, self.rhs, "rhs", "rhs(t, y, *args)")
        if self.event is not None:
            require_callable(self, self.event, "event")
        check_options(self, steps=optional(at_least(1)), accuracy=optional(between(0, 1)), stages=optional(at_least(1)))
        if self.stages is not None and self.stages > 7:
            raise ValueError(f"stages can be 7 at most (order 13), got {self.stages}")
        get_integrator(self.integrator)
        if not isinstance(self.t, Tensor):
            object.__setattr__(self, "t", as_times(self.t))
        if self.t.ndim != 1 or len(self.t) < 2:
            raise ValueError(f"t must hold two times or more, in one dimension; its shape is {tuple(self.t.shape)}")
        if self.event is not None and len(self.t) != 2:
            raise ValueError(f"with an event t is (begin, latest end), got {len(self.t)} times")

    @property
    def function(self) -> Callable[..., Any]:
        return self.rhs

    def within(self, rtol: float | None) -> InitialValue:
        asked = self.accuracy is None and isinstance(rtol, float) and 0 < rtol < 1
        return replace(self, accuracy=rtol) if asked else self

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        layout, digits = Layout(z0, batch_dims, "y0"), None
        if layout.dtype in HALF:
            digits, z0 = layout.dtype, tree_map(lambda leaf: leaf.float(), z0)
            layout = Layout(z0, batch_dims, "y0")
        if self.event is not None and batch_dims:
            raise CapabilityError(
                "InitialValue: every sample has its own event time, so their steps differ: use torch.vmap "
                "over a solve without batch_dims, with steps="
            )
        given = "".join(f", argument {i}" for i in range(len(args)))
        check_call(f"rhs(t, y{given})", self.rhs)
        if self.event is not None:
            check_call(f"event(t, y{given})", self.event)
        t, y0 = self.t.to(layout.device, layout.dtype), layout.pack(z0)
        derived = torch.is_grad_enabled() or compat.transforms_active() or compat.has_forward_level()
        try:
            slope, forcing = self._slope(layout, args), None
            if len(y0):
                with recording.unrecorded(), unasked():
                    forcing = forcing_of(self.rhs, layout, t.detach(), y0.detach(), args)
            with values_only(layout.device.type), Sides() as choices:
                evaluate(slope, t[:1], y0.reshape(*layout.batch_shape, 1, layout.size))  # can it be mapped over points?
            coupling = self._coupling(layout, t, y0, args)
            jacobian = JacobianMatrix(self.rhs, known=coupling) if derived else None
            with values_only(layout.device.type):
                follows = forcing is not None or any(compat.tracked(v, batched=False) for v in (y0, t))
                met = choices if follows else Sides()
                begun = self._begin(layout, slope, t, y0, args, forcing, jacobian, met)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            times = "under torch.vmap its times (with an event, its end) cannot be mapped over without steps=, or "
            raise CapabilityError(
                f"InitialValue: {times if compat.transforms_active() else ''}rhs cannot be mapped over points of time: "
                f"torch.where(t < 1, a, b) for if t < 1, and t itself for float(t). torch says: {error}"
            ) from error
        equations = ExplicitEquations if self._keeps(begun.found) else Collocation
        stages = 1 if equations is ExplicitEquations else self.stages or begun.found.stages
        problem = equations(self.rhs, begun.mesh, layout, stages, self.event, begun.lost, coupling, *begun[4:])

        def split(state: Any, packed: Tensor) -> tuple[Any, None]:
            with values_only(layout.device.type):
                now = (y0.detach(), torch.stack((t[0], state[1])).detach() if self.event is not None else t.detach())
                points = (state if self.event is None else state[0]).detach()
                said = self._doubted and self._doubt(begun, points[..., begun.mesh.last, -1, :], slope, *now)
                if self._given and jacobian is not None and len(y0) and not said:
                    points = points.reshape(len(y0), *points.shape[-3:]).movedim(0, 2)
                    f = functools.partial(self._slopes, layout, slope)
                    doubt_given(self.rhs, args, f, begun.mesh, points, *now, self._accurate(t), jacobian)
            if self.event is not None:
                Y, end = state
                found = {"time": end, "state": layout.unpack(Y[..., -1, -1, :].reshape(-1, layout.size))}
            else:
                found = unpacked(layout, z0, packed, state[..., begun.mesh.last, -1, :])
            return (found if digits is None else tree_map(lambda leaf: leaf.to(digits), found)), None

        packed = y0.reshape(*layout.batch_shape, layout.size)
        return Restated(problem, begun.values, (packed, t, *args), split, batch_dims, lead=1, shared=1)

    @property
    def _doubted(self) -> bool:
        """Are the steps our own?"""
        return not (self.steps or callable(self.integrator))

    @property
    def _given(self) -> bool:
        """Are steps the user's own, or their points?"""
        return bool(self.stages) or not self._doubted

    def _accurate(self, t: Tensor) -> float:
        """The relative tolerance of the integrator."""
        return self.accuracy or (1e-6 if t.dtype == torch.float64 else 1e-5)

    def _keeps(self, found: Followed) -> bool:
        """Are the equations those of the steps that were taken?"""
        return found.explicit and self.stages is None

    def _begin(
        self,
        layout: Layout,
        slope: Slope,
        t: Tensor,
        y0: Tensor,
        args: Any,
        forcing: Any,
        jacobian: JacobianMatrix | None,
        met: Sides,
    ) -> Start:
        """The steps, a start near the solution, NaN where there is none; ``met``: the switches that derivatives meet."""
        t, y0, event, end, lookout, accuracy = t.detach(), y0.detach(), self.event, None, None, self._accurate(t)
        if event is not None:
            lookout = Lookout(lambda now, y: event(now, layout.unpack(y), *args))
        found, lost = self._path(slope, t, y0, lookout)
        if lookout is not None:
            end, found, lost = self._to_event(layout, slope, t, found, lost, lookout)
            if not lost:
                t = torch.stack((t[0], end))
            if self.steps and not lost:
                found, lost = self._path(slope, t, y0)
        missed = lost and event is not None
        between = lambda found: self._between(layout, slope, found)  # noqa: E731
        mapped = functools.partial(self._slopes, layout, slope)
        integrate, bends = get_integrator(self.integrator), None

        def followed(found: Followed, t: Tensor, blind: bool) -> Followed:
            """What has been found, by steps that follow derivatives, too."""
            if not (self._given or missed) and len(y0):
                found = with_variation(integrate, slope, mapped, between, t, y0, found, accuracy, jacobian, blind)
            if forcing is not None and self._doubted and not missed:
                stages = None if self._keeps(found) else self.stages or found.stages
                found = resolved(found, slope, forcing, between(found), stages, accuracy)
            return found

        kinks = Kinks(slope, mapped, t, between, lambda t, y0: integrate(slope, t, y0, accuracy))
        meets = met.seen and not lost and len(y0) > 0
        if meets and self.steps:
            kinks.look(found)
        elif meets:
            found, bends = kinks.split(found, followed)
            if lookout is not None and bends is not None:
                found = lookout.nearer(found, slope)
                end, t = found.edges[-1], torch.stack((t[0], found.edges[-1]))
        else:
            found = followed(found, t, met.seen)
        edges, states = found.edges, found.states
        if (met.seen or met.rooted) and not missed and len(y0) and not compat.batches_in_front(edges)[1]:
            warn_of_switches(mapped, t, edges, states, forcing and (lambda t, y: forcing(t, y)[0][..., : layout.size]))
        mesh = Mesh.even(len(t) - 1, self.steps, t.dtype, t.device) if self.steps else Mesh.of(t, edges, found.stiff)
        values = self._at_points(found, between, len(mesh.begin), layout)
        Y = values.reshape(*layout.batch_shape, *values.shape[1:])
        return Start(mesh, Y if end is None else (Y, end), lost, found, bends, kinks.orders, kinks.beyond)

    def _at_points(self, found: Followed, between: Callable[[Followed], Between], count: int, layout: Layout) -> Tensor:
        """The values at the points of so many steps, ``(batch, N, s, n)``; NaN, if there are others: there is no event."""
        edges, states, stages = found.edges, found.states, self.stages or found.stages
        if len(states) != count + 1:
            return states.new_full((states.shape[1], count, stages, layout.size), torch.nan)
        if self._keeps(found):
            return states[1:].unsqueeze(1).movedim(2, 0)
        c = radau(stages, layout.dtype, layout.device)[1]
        step = torch.arange(count, device=edges.device).repeat_interleave(stages)
        return between(found)(step, c.repeat(count)).unflatten(0, (-1, stages)).movedim(2, 0)

    def _to_event(
        self, layout: Layout, slope: Slope, t: Tensor, found: Followed, lost: str, lookout: Lookout
    ) -> tuple[Tensor, Followed, str]:
        """The time of the event, what has been followed to there, and why there is none: then the time is NaN."""
        finite = found
        if lost:  # what comes after the event need not exist
            reached = int(torch.isfinite(found.states).flatten(1).all(1).sum())
            finite = found._replace(edges=found.edges[:reached], states=found.states[:reached])
        if len(finite.edges) < 2:
            return t[1] * torch.nan, found, lost
        between = self._between(layout, slope, finite)
        at = lookout.seen or first_crossing(lookout.event, finite.edges, between)
        end, missed = time_of(at, finite.edges)
        if missed:
            return end, found, lost or missed
        return end, found if self.steps else finite.until(at.place, end, between), ""

    def _between(self, layout: Layout, slope: Slope, found: Followed) -> Between:
        """The states between the edges: the integrator's own, or those of cubics."""
        if found.interpolant is not None:
            return found.interpolant
        return cubic(found.edges, found.states, self._slopes(layout, slope, found.edges, found.states))

    def _doubt(self, begun: Start, later: Tensor, slope: Slope, y0: Tensor, t: Tensor) -> bool:
        """Warn where the trajectory and another, nearly as accurate, have little in common: that of the integrator, where it
        is not the same, or where small errors may have grown enough that of less accurate steps: once for a function."""
        found, accuracy = begun.found, self._accurate(t)
        if not self._keeps(found):
            values = begun.values if self.event is None else begun.values[0]
            return compare(values[..., begun.mesh.last, -1, :], later, 1.0)
        doubtful = self.event is None and accuracy * math.exp(min(found.growth, _LOGARITHM)) > APART
        if not doubtful or not is_new(self.rhs, found.growth, self.accuracy, later):
            return False
        where = torch.arange(len(t) - 1, 0, -max(1, len(t) // _COMPARED), device=t.device).flip(0)
        march = March(slope, torch.cat((t[:1], t[where])), y0, min(_LOOSER * accuracy, APART))
        try:
            march.run()
        except ConvergenceError:
            return False
        edges, states = march.path
        there = states[torch.isin(edges, t[where])].movedim(0, 1)
        return compare(there.reshape(later[..., where - 1, :].shape), later[..., where - 1, :], 1 / _LOOSER)

    def _slope(self, layout: Layout, args: tuple[Any, ...]) -> Slope:
        slope = slope_of(self.rhs, layout)
        return lambda now, y, **batch: slope(now, y, *args, **batch)

    def _path(self, slope: Slope, t: Tensor, y0: Tensor, lookout: Lookout | None = None) -> tuple[Followed, str]:
        """The edges of the steps, the states there, and why some of them are NaN."""
        if self.steps:
            mesh = Mesh.even(len(t) - 1, self.steps, t.dtype, t.device)
            edges = torch.cat((times(mesh, t, t.new_zeros(1))[1][:, 0], t[-1:]))
            states = follow(slope, edges, y0)
            bound = torch.maximum(y0.abs(), ((t[-1] - t[0]) * slope(t[0], y0)).abs()).amax(1, keepdim=True)
            sane = (states.abs() <= _GROWN * bound).all(0).all(1, keepdim=True)  # no explicit steps for what is stiff
            return Followed(edges, torch.where(sane, states, y0)), ""
        check_order(t)
        if not len(y0):  # no sample asks for steps
            return Followed(t, y0.expand(len(t), *y0.shape)), ""
        try:
            found = get_integrator(self.integrator)(slope, t, y0, self._accurate(t), lookout)
        except ConvergenceError as error:
            path, left = Followed(t[:1], y0.unsqueeze(0)), t[1:]
            if lookout is not None and isinstance(error, TooManySteps):  # it may have come before
                path = error.path
            states = torch.cat((path.states, y0.new_full((len(left), *y0.shape), torch.nan)))
            why = f"The integrator {self.integrator!r} found no trajectory: {error}."
            return path._replace(edges=torch.cat((path.edges, left)), states=states), why
        return found, end_of(found.edges, found.states)

    def _coupling(self, layout: Layout, t: Tensor, y0: Tensor, args: tuple[Any, ...]) -> Any:
        """The pattern ``(n, n)`` of ``df/dy``, in compressed rows; ``None`` where it has none."""
        if layout.size < FEWEST or not len(y0):
            return None
        at, z = compat.plain_sample(t)[0], compat.plain_sample(y0)
        matrix, slope = JacobianMatrix(self.rhs, smallest=FEWEST), self._slope(layout, args)
        try:
            return matrix.pattern(lambda y: slope(at, y), z)
        except NotImplementedError:  # inside torch.func.grad and jvp all is wrapped, and shows no memory
            plain = self._slope(
                layout, tree_map(lambda x: compat.plain_sample(x) if isinstance(x, Tensor) else x, args)
            )
        try:
            with compat.at_level_of(z):
                return matrix.pattern(lambda y: plain(at, y), z)
        except RuntimeError:  # rhs captures what belongs to them
            return None

    def _slopes(self, layout: Layout, slope: Slope, edges: Tensor, states: Tensor) -> Tensor:
        """``rhs`` at the edges, ``(N + 1, batch, n)``."""
        there = states.movedim(0, 1).reshape(*layout.batch_shape, *states.shape[::2])
        slopes = evaluate(slope, edges, there)
        return slopes.reshape(states.shape[1], *slopes.shape[-2:]).movedim(1, 0)
