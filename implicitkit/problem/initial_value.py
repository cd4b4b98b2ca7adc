"""``dy/dt = rhs(t, y, *args)`` from ``y0``: a trajectory, or a state at an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording
from implicitkit.foundation.autocast import HALF, full_precision
from implicitkit.foundation.errors import CapabilityError, ConvergenceError, ConvergenceWarning, warn
from implicitkit.foundation.options import at_least, between, check_call, check_options, optional
from implicitkit.foundation.trees import Layout, tree_map
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.problem.base import Problem, Restated, require_callable
from implicitkit.problem.collocation import INITIAL_VALUE, Collocation, Mesh, evaluate, radau, slope_of, times
from implicitkit.problem.explicit import TooManySteps, follow
from implicitkit.problem.integration import Followed, first_crossing, get_integrator, hermite
from implicitkit.problem.kind import Kind

_GROWN = 1e6  # times its own size and that of its first change: beyond, given steps have made a start of no use
_APART = 1e-2  # of its size, by which the trajectory of the integrator may differ from that of the equations
Slope = Callable[..., Tensor]
FEWEST = 16  # numbers of a state from which it is looked where its right-hand side has entries


@dataclass(frozen=True, repr=False, eq=False)
class InitialValue(Problem):
    r"""Find the trajectory of ``dy/dt = f(t, y, \theta)`` that begins at ``y(t_0) = y_0``, at the times ``t``.

        path = ik.solve(ik.InitialValue(rhs, t), y0, (theta,)).value     # (len(t), ...), the first entry is y0

    An integrator finds steps and a trajectory near the solution; the trajectory is then the root of the equations of
    collocation at Radau's points (:mod:`~implicitkit.problem.collocation`, order ``2 stages - 1``, stiff or not;
    Hairer & Wanner, *Solving Ordinary Differential Equations II*, 2nd ed. 1996, section IV.5), one
    system whose Jacobian is block bidiagonal, solved by a few sparse Newton steps.  Its derivative is that of any root:
    exact for the discrete trajectory, in ``\theta``, in the initial state (the ``z0`` of the solve, which here *is* an
    argument), in the times and in whatever ``f`` captures, of every order, whichever integrator it was.  The steps are
    constants.  States in half precision are followed in single precision, under autocast.

    With an ``event`` the end is unknown: it is the first time at which ``event(t, y, *args)``, one number, changes its sign,
    ``t = (t_0, latest)``, and the solution's value is ``{"time": T, "state": y(T)}``, both differentiable:
    ``dT = -(g_\theta + g_y y_\theta) / (g_t + g_y f)`` follows from the same equations.
    The event is looked at in 256 points or more along the way: two changes between two of them are not seen.

    Memory: the values at all points, and a few dozen times that in the solve and its derivative, which are matrix-free
    (:mod:`~implicitkit.problem.running_sums`) unless the equation is stiff, or its time long beside ``1 / |df/dy|``; then
    factors of a sparse matrix of ``stages n`` unknowns a step and sample, and where ``df/dy`` has no pattern of ``(stages
    n)^2`` numbers: for states of up to some hundred.  An adjoint that integrates backwards needs less and is less exact.

    Args:
        rhs: ``f(t, y, *args)``: ``t`` one number, ``y`` like ``y0``, the batch in front where there is one; mapped over
            points by ``torch.vmap``.
        t: two or more times, increasing or decreasing.  The steps are chosen by what they meet: where ``rhs`` is switched on
            for a short while, put a time at the switch, or nothing may see it.
        event: ``g(t, y, *args)``, one number; for a solve without ``batch_dims``.
        steps: equal steps between any two times; ``None``: those of the integrator.  All samples take the same steps.
        accuracy: relative tolerance of the integrator, for its steps; ``None``: 1e-6, in single precision 1e-4.
        stages: points a step, 1 to 7.
        integrator: ``"auto"``, which begins with ``"dormand_prince"`` and takes ``"scipy.Radau"`` where the equation turns
            out to be stiff; one of these or another of SciPy's methods, or a function
            (:mod:`~implicitkit.problem.integration`).

    Warns:
        ConvergenceWarning: the trajectory is not determined to two digits (chaos over a long time).

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
    stages: int = field(default=3, kw_only=True)
    integrator: Any = field(default="auto", kw_only=True)
    kind: ClassVar[Kind] = INITIAL_VALUE
    under_autocast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_callable(self, self.rhs, "rhs", "rhs(t, y, *args)")
        if self.event is not None:
            require_callable(self, self.event, "event")
        check_options(self, steps=optional(at_least(1)), accuracy=optional(between(0, 1)), stages=at_least(1))
        if self.stages > 7:
            raise ValueError(f"stages can be 7 at most (order 13), got {self.stages}")
        get_integrator(self.integrator)
        if not isinstance(self.t, Tensor):
            object.__setattr__(self, "t", _times(self.t))
        if self.t.ndim != 1 or len(self.t) < 2:
            raise ValueError(f"t must hold two times or more, in one dimension; its shape is {tuple(self.t.shape)}")
        if self.event is not None and len(self.t) != 2:
            raise ValueError(f"with an event t is (begin, latest end), got {len(self.t)} times")

    @property
    def function(self) -> Callable[..., Any]:
        return self.rhs

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
        t = self.t.to(layout.device, layout.dtype)
        y0 = layout.pack(z0)
        try:
            slope = self._slope(layout, args, constant=True)
            with torch.no_grad(), recording.unrecorded(), full_precision(layout.device.type):
                mesh, start, lost = self._begin(layout, slope, t, y0, args)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            times = "under torch.vmap its times (with an event, its end) cannot be mapped over without steps=, or "
            raise CapabilityError(
                f"InitialValue: {times if compat.transforms_active() else ''}rhs cannot be mapped over points of time: "
                f"torch.where(t < 1, a, b) for if t < 1, and t itself for float(t). torch says: {error}"
            ) from error
        batch = tuple(layout.batch_shape)
        problem = Collocation(
            self.rhs, mesh, layout, self.stages, self.event, lost, self._coupling(layout, t, y0, args)
        )

        def split(state: Any, packed: Tensor) -> tuple[Any, None]:
            if self.event is not None:
                Y, end = state
                found = {"time": end, "state": layout.unpack(Y[..., -1, -1, :].reshape(-1, layout.size))}
                return (found if digits is None else tree_map(lambda leaf: leaf.to(digits), found)), None
            later = state[..., mesh.last, -1, :]
            if not (self.steps or callable(self.integrator)):
                with recording.unrecorded():
                    _compare(start[..., mesh.last, -1, :], later.detach())
            found = _unpacked(layout, z0, packed, later)
            return (found if digits is None else tree_map(lambda leaf: leaf.to(digits), found)), None

        packed = y0.reshape(*batch, layout.size)
        return Restated(problem, start, (packed, t, *args), split, batch_dims, lead=1, shared=1)

    def _begin(
        self, layout: Layout, slope: Slope, t: Tensor, y0: Tensor, args: tuple[Any, ...]
    ) -> tuple[Mesh, Any, str]:
        """The steps, a start near the solution, and what the integrator met where there is none and the start is NaN."""
        t, y0 = t.detach(), y0.detach()
        end, lost = None, ""
        if self.event is not None:
            found, lost = self._path(slope, t, y0)
            edges, states = found.edges, found.states
            reached = int(torch.isfinite(states).flatten(1).all(1).sum()) if lost else len(states)
            end, missed = t[1] * torch.nan, lost
            if reached > 1:  # what comes after the event need not exist
                end, missed = self._crossing(layout, slope, edges[:reached], states[:reached], args)
            lost = missed and (lost or missed)
            t = t if lost else torch.stack((t[0], end))
        if not lost:
            found, lost = self._path(slope, t, y0)
            edges, states = found.edges, found.states
        mesh = Mesh.even(len(t) - 1, self.steps, t.dtype, t.device) if self.steps else _mesh(t, edges, found.stiff)
        if len(states) == len(mesh.begin) + 1:
            values = self._between(layout, slope, found).movedim(2, 0)
        else:  # no event
            values = y0.new_full((len(y0), len(mesh.begin), self.stages, layout.size), torch.nan)
        Y = values.reshape(*layout.batch_shape, *values.shape[1:])
        return mesh, Y if end is None else (Y, end), lost

    def _between(self, layout: Layout, slope: Slope, found: Followed) -> Tensor:
        """The states at the points of all steps, ``(N, s, batch, n)``: the integrator's own, or those of cubics."""
        edges, c = found.edges, radau(self.stages, layout.dtype, layout.device)[1]
        if found.states_at is None:
            return hermite(edges, found.states, self._slopes(layout, slope, edges, found.states), c)
        at = edges[:-1, None] + edges.diff()[:, None] * c
        return found.states_at(at.flatten()).unflatten(0, at.shape)

    def _slope(self, layout: Layout, args: tuple[Any, ...], constant: bool = False) -> Slope:
        slope = slope_of(self.rhs, layout, constant)
        return lambda now, y, **batch: slope(now, y, *args, **batch)

    def _path(self, slope: Slope, t: Tensor, y0: Tensor) -> tuple[Followed, str]:
        """The edges of the steps, the states there, and why some of them are NaN."""
        if self.steps:
            mesh = Mesh.even(len(t) - 1, self.steps, t.dtype, t.device)
            edges = torch.cat((times(mesh, t, t.new_zeros(1))[1][:, 0], t[-1:]))
            states = follow(slope, edges, y0)
            bound = torch.maximum(y0.abs(), ((t[-1] - t[0]) * slope(t[0], y0)).abs()).amax(1, keepdim=True)
            sane = (states.abs() <= _GROWN * bound).all(0).all(1, keepdim=True)  # no explicit steps for what is stiff
            return Followed(edges, torch.where(sane, states, y0)), ""
        _check_order(t)
        if not len(y0):  # no sample asks for steps
            return Followed(t, y0.expand(len(t), *y0.shape)), ""
        default = 1e-6 if t.dtype == torch.float64 else 1e-4
        try:
            found = Followed(*get_integrator(self.integrator)(slope, t, y0, self.accuracy or default))
        except ConvergenceError as error:
            edges, states, left = t[:1], y0.unsqueeze(0), t[1:]
            if self.event is not None and isinstance(error, TooManySteps):  # it may have come before
                edges, states = error.path
            states = torch.cat((states, y0.new_full((len(left), *y0.shape), torch.nan)))
            why = f"The integrator {self.integrator!r} found no trajectory: {error}."
            return Followed(torch.cat((edges, left)), states), why
        return found, _end_of(found.edges, found.states)

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

    def _crossing(
        self, layout: Layout, slope: Slope, edges: Tensor, states: Tensor, args: tuple[Any, ...]
    ) -> tuple[Tensor, str]:
        """The time of the first change of sign of the event, nearly; NaN where there is none, and why."""
        assert self.event is not None
        event = self.event
        at = first_crossing(
            lambda t, y: event(t, layout.unpack(y), *args), edges, states, self._slopes(layout, slope, edges, states)
        )
        good = at.found & at.passes
        time = torch.where(good, at.time, torch.nan)  # a solve from NaN fails
        if compat.batches_in_front(good)[1] or bool(good):
            return time, ""
        if bool(at.found):
            return time, (
                f"The event changes its sign at t = {float(at.time):.6g}, but does not pass through zero there: it jumps, "
                "or has a pole. Give one that is continuous (y - c, not sign(y - c))."
            )
        return time, (
            f"The event does not change its sign between t = {float(edges[0]):.6g} and {float(edges[-1]):.6g}, wherever it "
            f"was looked at: it is {float(at.begin):.3g} and {float(at.end):.3g} there."
        )


def _end_of(edges: Tensor, states: Tensor) -> str:
    """Up to where trajectories could be followed, of those that could not be to the end."""
    finite = compat.batches_in_front(torch.isfinite(states).all(-1))[0]
    finite = finite.movedim(-2, 0).flatten(1)  # (N + 1, samples)
    lost = ~finite[-1]
    if not bool(lost.any()):
        return ""
    reached = edges[finite[:, lost].sum(0).clamp_min(1) - 1]
    where = ", ".join(f"{float(at):.6g}" for at in reached[:4]) + (", ..." if len(reached) > 4 else "")
    why = "the solution ends there, or rhs is not finite or not smooth"
    return f"The trajectory could be followed to t = {where} only: {why}."


def _compare(followed: Tensor, found: Tensor) -> None:
    """Warn where the trajectory of an integrator, and that of the equations on its steps, have little in common."""
    if compat.batches_in_front(found)[1] or compat.batches_in_front(followed)[1] or not found.numel():
        return
    size = torch.maximum(followed.abs(), found.abs()).amax(-2, keepdim=True)
    apart = ((found - followed).abs() / size.amax(-1, keepdim=True)).nan_to_num(0).amax((-2, -1))
    worst = float(apart.max())
    if worst > _APART:
        warn(
            f"InitialValue: two methods whose steps are as accurate as accuracy= says give trajectories that differ by "
            f"{worst:.1g} of their size: small errors grow that much (a chaotic equation over a long time, or one without a "
            "continuous solution), or the steps are long for so few stages. The derivative is that of this trajectory, and "
            "as uncertain. Ask for a shorter time, a smaller accuracy= or more stages=",
            ConvergenceWarning,
        )


def _check_order(t: Tensor) -> None:
    if not bool(torch.isfinite(t).all()):
        raise ValueError(f"t must be finite, got {t.tolist()}: a state at rest is found by ik.steady_state")
    d = t.diff()
    if not bool((d > 0).all() | (d < 0).all()):
        raise ValueError(f"t must be strictly increasing or strictly decreasing, got {t.tolist()}")


def _mesh(t: Tensor, edges: Tensor, stiff: bool) -> Mesh:
    """The steps of an integrator as fractions of the intervals between the times asked for."""
    sign = 1 if float(t[-1] - t[0]) > 0 else -1
    number = (sign * t[None, 1:] <= sign * edges[:-1, None]).sum(1)
    first, length = t[number], t[number + 1] - t[number]
    last = torch.bincount(number, minlength=len(t) - 1).cumsum(0) - 1
    return Mesh(number, (edges[:-1] - first) / length, (edges[1:] - first) / length, last, stiff)


def _unpacked(layout: Layout, z0: Any, y0: Tensor, later: Tensor) -> Any:
    """The states at the times asked for, ``(*batch, T, ...)`` in every leaf."""
    states = torch.cat((y0.unsqueeze(-2), later), -2)
    dims, count = layout.batch_dims, states.shape[-2]
    alike = tree_map(
        lambda leaf: leaf.detach().unsqueeze(dims).expand(*leaf.shape[:dims], count, *leaf.shape[dims:]), z0
    )
    return Layout(alike, dims + 1).unpack(states.reshape(layout.batch * count, layout.size))


def _times(t: Any) -> Tensor:
    """Numbers as a tensor."""
    try:
        return torch.as_tensor(t, dtype=torch.float64, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"t must hold times, a tensor or a list of numbers, got {t!r}") from None
