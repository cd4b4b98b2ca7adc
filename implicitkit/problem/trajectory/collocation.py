r"""A trajectory as a root: collocation at Radau's points.

On a step from ``t_n`` to ``t_n + h`` the trajectory is a polynomial of degree ``s`` that meets the differential equation at
``s`` points ``t_n + c_i h``; with the values ``Y_i`` there as unknowns,

    Y_i = y_n + h sum_j a_ij f(t_n + c_j h, Y_j),    i = 1..s,        y_{n+1} = Y_s.

The ``c_i`` are Radau's (right): ``c_s = 1``, order ``2 s - 1``, L-stable, so that stiff equations are met as well as others
(Hairer & Wanner 1996, *Solving Ordinary Differential Equations II*, section IV.5).  All steps together are one system whose
Jacobian is block bidiagonal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat, recording
from implicitkit.foundation.autocast import cast_as_now, casts, full_precision, under
from implicitkit.foundation.trees import Layout
from implicitkit.problem.base import Problem
from implicitkit.problem.kind import Kind
from implicitkit.problem.trajectory.kinks import Bends
from implicitkit.problem.trajectory.running_sums import RunningSums

if TYPE_CHECKING:
    from implicitkit.system import System

INITIAL_VALUE = Kind("initial_value", ("root", "least_squares", "minimise"), like_state=True, solver="newton")

_ENTRIES = 1 << 24  # of full blocks, up to which their pattern is said; else it is looked for


def radau(stages: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``A (s, s)`` and ``c (s,)`` of Radau IIA: ``c`` are the roots of ``d^{s-1}/dx^{s-1} x^{s-1} (x-1)^s``, and
    ``sum_j a_ij c_j^k = c_i^{k+1} / (k+1)`` for ``k < s``."""
    A, c = _coefficients(stages)
    return torch.tensor(A, dtype=dtype, device=device), torch.tensor(c, dtype=dtype, device=device)


@functools.lru_cache(maxsize=8)
def _coefficients(s: int) -> tuple[list[list[float]], list[float]]:
    """:func:`radau` as numbers, by NumPy: tensors made inside a transform belong to it, and cannot be kept."""
    polynomial = [
        (-1) ** (s - k) * math.comb(s, k) * math.factorial(k + s - 1) / math.factorial(k) for k in range(s + 1)
    ]
    c = np.sort(np.roots(polynomial[::-1]).real)
    c[-1] = 1.0
    powers = np.arange(s)
    A = np.linalg.solve((c[:, None] ** powers).T, (c[:, None] ** (powers + 1) / (powers + 1)).T).T
    return A.tolist(), c.tolist()


@dataclass(frozen=True, eq=False)
class Mesh:
    """The steps: fractions ``begin`` and ``end`` ``(N,)`` of the interval ``number`` between two of the times asked for;
    ``last``: the step in which each of these intervals ends; ``stiff``: an implicit method has chosen them.

    Fractions are constants, so that the steps move with the times.
    """

    number: Tensor
    begin: Tensor
    end: Tensor
    last: Tensor
    stiff: bool = False

    @staticmethod
    def even(intervals: int, steps: int, dtype: torch.dtype, device: torch.device) -> Mesh:
        """``steps`` equal steps in every interval."""
        edges = torch.arange(steps + 1, dtype=dtype, device=device) / steps
        number = torch.arange(intervals, device=device).repeat_interleave(steps)
        begin, end = edges[:-1].repeat(intervals), edges[1:].repeat(intervals)
        return Mesh(number, begin, end, torch.arange(1, intervals + 1, device=device) * steps - 1)

    @staticmethod
    def of(t: Tensor, edges: Tensor, stiff: bool) -> Mesh:
        """The steps of an integrator through the times ``t``."""
        sign = 1 if float(t[-1] - t[0]) > 0 else -1
        number = (sign * t[None, 1:] <= sign * edges[:-1, None]).sum(1)
        first, length = t[number], t[number + 1] - t[number]
        last = torch.bincount(number, minlength=len(t) - 1).cumsum(0) - 1
        return Mesh(number, (edges[:-1] - first) / length, (edges[1:] - first) / length, last, stiff)


def times(mesh: Mesh, t: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The steps ``h (N,)``, and the times ``t_n + c_i h`` ``(N, s)``."""
    first = t[mesh.number]
    length = t[mesh.number + 1] - first
    h = (mesh.end - mesh.begin) * length
    return h, (first + mesh.begin * length)[:, None] + h[:, None] * c


def starts(y0: Tensor, Y: Tensor) -> Tensor:
    """The state at the begin of every step, ``(*batch, N, n)``, of the values at the points ``(*batch, N, s, n)``."""
    return torch.cat((y0.unsqueeze(-2), Y[..., :-1, -1, :]), -2)


def unasked() -> Any:
    """A context for values of which nobody asks where they come from: no mode of a solve around this one looks at each
    operation.  Not inside transforms of ``torch.func``, whose tensors are followed through all that is made of them."""
    followed = compat.transforms_active() or compat.has_forward_level()
    return contextlib.nullcontext() if followed else compat.unwatched()


@contextlib.contextmanager
def values_only(device: str) -> Iterator[None]:
    """Inside, values are found of which nobody takes a derivative (:func:`unasked`), in full precision: by torch's own
    functions, whatever their derivatives are."""
    with compat.underived(), recording.unrecorded(), full_precision(device), unasked(), compat.unwatched("derives"):
        yield


def slope_of(rhs: Callable[..., Any], layout: Layout) -> Callable[..., Tensor]:
    """``rhs`` of packed states, ``(t, y, *args) -> dy/dt``, checked; ``rows``: of a batch of which some were dropped.

    It is cast as autocast says now, when this is made, whatever surrounds a call.
    """
    device = layout.device.type
    called, cast = under(cast_as_now(device), rhs), casts(device)

    def slope(t: Tensor, y: Tensor, *args: Any, rows: int | None = None) -> Tensor:
        given = layout.unpack(y)
        out = called(t, given, *args)
        if not (layout.bare and _is_like(out, given)):
            layout.check(out, "rhs(t, y, ...)", cast=cast, rows=rows)
        return layout.pack(out)

    return slope


def _is_like(out: Any, given: Tensor) -> bool:
    """Is it a tensor of the same shape, precision and device?  Then nothing else need be asked."""
    return (
        isinstance(out, Tensor)
        and out.shape == given.shape
        and out.dtype == given.dtype
        and out.layout == given.layout
        and out.device == given.device
    )


def evaluate(slope: Callable[..., Tensor], at: Tensor, Y: Tensor, args: tuple[Any, ...] = ()) -> Tensor:
    """:func:`slope_of` a right-hand side at points ``at (P,)``, with packed states ``Y (*batch, P, n)``: mapped over the
    points."""
    dim = Y.ndim - 2

    def one(t: Tensor, y: Tensor) -> Tensor:
        return slope(t, y.reshape(-1, y.shape[-1]), *args, rows=y.shape[0] if dim else None).reshape(y.shape)

    return torch.func.vmap(one, in_dims=(0, dim), out_dims=dim)(at, Y)


@dataclass(frozen=True, repr=False, eq=False)
class Collocation(Problem):
    """The equations of all steps, and of an event: what :class:`~implicitkit.InitialValue` is solved as.

    The state is ``Y (*batch, N, s, n)``; with an event the pair of it and the time of the event.  Arguments: the packed
    initial state ``(*batch, n)``, the times, then those of the right-hand side.  ``coupling``: the pattern ``(n, n)`` of
    ``df/dy``, a SciPy matrix, if it has one.  ``linked``: a step's equations look at nothing of its own state but what they
    say, and at all of the state before it.
    """

    rhs: Callable[..., Any]
    mesh: Mesh
    layout: Layout
    stages: int
    event: Callable[..., Any] | None = None
    no_start: str = ""
    coupling: Any = field(default=None, compare=False)
    bends: Bends | None = field(default=None, compare=False)
    orders: float = field(default=math.inf, compare=False)
    beyond: str = field(default="", compare=False)
    kind: ClassVar[Kind] = INITIAL_VALUE
    linked: ClassVar[bool] = False
    share_of_function: ClassVar[float] = 0.01  # one step's, beside the states at its ends
    identified_by: ClassVar[tuple[str, ...]] = ("rhs", "event", "stages")  # the steps of the next solve may be others

    @property
    def title(self) -> str:
        return "InitialValue"

    @functools.cached_property
    def jac_sparsity(self) -> Any:
        """The pattern of all steps, coloured (:mod:`~implicitkit.linear.steps_pattern`); ``None`` where that is of no
        use."""
        import scipy.sparse as sp

        steps, n, s = len(self.mesh.number), self.layout.size, self.stages
        if self.coupling is None and steps * s * s * n * n > _ENTRIES:
            return "auto"
        coupling = sp.csr_matrix(np.ones((n, n), dtype=bool)) if self.coupling is None else self.coupling
        from implicitkit.linear.steps_pattern import coloured_steps

        return coloured_steps(coupling, steps, s, self.event is not None, self.linked)

    def explain(self, system: System, z: Tensor, theta: Sequence[Tensor], failed: Tensor) -> str:
        return (
            "The trajectory may depend on its start so strongly (a chaotic equation over a long time) that the equations of "
            "all its steps are not met from one that is only near: ask for a shorter time, or a smaller accuracy=."
        )

    @property
    def wants_factors(self) -> bool:
        """On the steps of an implicit method no explicit one would do, and running sums are one."""
        return self.mesh.stiff

    @property
    def near_inverse(self) -> RunningSums | None:
        if self.mesh.stiff:
            return None
        return RunningSums(len(self.mesh.number), self.stages, self.layout.size)

    def residual(self, z: Any, *args: Any) -> Any:
        y0, t, rest = args[0], args[1], args[2:]
        Y, end = z if self.event is not None else (z, None)
        if end is not None:
            t = torch.stack((t[0], end))
        slope = slope_of(self.rhs, self.layout)
        with full_precision(self.layout.device.type):
            out = self.defects(slope, Y, y0, t, rest)
            if self.bends is not None:
                out = self._bent(self.bends, out, slope, Y, y0, t, rest)
        if self.event is None:
            return out
        return out, self.event(end, self.layout.unpack(Y[..., -1, -1, :].reshape(-1, Y.shape[-1])), *rest)

    def _bent(self, bends: Bends, out: Tensor, slope: Callable[..., Tensor], Y: Tensor, *more: Any) -> Tensor:
        """The equations, with what kinks have in second derivatives."""
        y0, t, rest = more
        step = bends.step
        h, at = times(self.mesh, t, t.new_zeros(1))
        begin = at[step, 0]
        states = torch.cat((starts(y0, Y)[..., step, :], Y[..., step, -1, :]), -2)
        before, behind = evaluate(slope, torch.cat((begin, begin + h[step])), states, rest).chunk(2, -2)
        last = torch.zeros_like(out[..., -1, :]).index_add(out.ndim - 3, step, bends.of(before, behind))
        return torch.cat((out[..., :-1, :], (out[..., -1, :] - last).unsqueeze(-2)), -2)

    def defects(self, slope: Callable[..., Tensor], Y: Tensor, y0: Tensor, t: Tensor, rest: tuple[Any, ...]) -> Tensor:
        """What is left of the equations of all steps, ``(*batch, N, s, n)``."""
        A, c = radau(self.stages, self.layout.dtype, self.layout.device)
        h, at = times(self.mesh, t, c)
        slopes = evaluate(slope, at.flatten(), Y.flatten(-3, -2), rest).reshape(Y.shape)
        return Y - starts(y0, Y).unsqueeze(-2) - h[:, None, None] * (A @ slopes)
