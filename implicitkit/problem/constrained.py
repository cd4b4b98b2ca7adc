r"""A constrained minimisation over its point and its multipliers: the form in which ``Argmin`` with constraints is solved.

    minimise  f(z)   subject to   h(z) = 0,   g(z) <= 0,   z in a set C (or plus a function phi with a known prox)

With the Lagrangian ``L = f + y'h + lam'g``, the optimality conditions as equations in natural-map form are

    z - prox(z - dL/dz) = 0,      h(z) = 0,      lam - max(lam + g(z), 0) = 0

where ``prox`` is the proximal map of ``phi`` (the projection on ``C``; the identity if there is neither: then the first
equation is ``dL/dz = 0``).  Unlike the product form ``lam_i g_i = 0`` the natural map is regular where a constraint is
weakly active on one side only, and at any point whose active set is right it is the system of that active set, so that
its derivative does not inherit the tolerance of the solver.

Relaxed (``degenerate="smooth"``): ``max(v, 0)`` becomes ``(v + sqrt(v^2 + 4 kappa)) / 2``, whose solutions have
``lam_i g_i = -kappa``: the point of the central path, smooth in all data.

Sources: Facchinei & Pang (2003), *Finite-Dimensional Variational Inequalities and Complementarity Problems*, sections
1.3 and 1.5.2 (KKT and natural maps); Chen & Mangasarian (1996), Comput. Optim. Appl. 5 (smoothing); Parikh & Boyd (2014),
"Proximal algorithms", section 4.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, recording, trees
from implicitkit.foundation.clamping import held
from implicitkit.foundation.failing_matrices import attempted
from implicitkit.foundation.numbers import real_parts
from implicitkit.foundation.trees import Layout
from implicitkit.foundation.wording import kind_of, of_the_objective
from implicitkit.linear.conditions.kkt import KKT
from implicitkit.problem.base import Kernel, Problem
from implicitkit.problem.complementarity import KAPPA, lesser
from implicitkit.problem.constraint_qualification import NO_MULTIPLIERS, lacks_multipliers
from implicitkit.problem.constraints import Constraint
from implicitkit.problem.kind import CONSTRAINED, Kind
from implicitkit.problem.natural_map import natural_of
from implicitkit.system import System

_NEARLY = 1e-3  # of 1 + |z|: a violation that may be on its way to zero ...
_FAR = 100.0  # ... of a |z| that is larger no more: it runs away


Pullback = Callable[[Tensor], tuple[Tensor, ...]]
Made = tuple[Tensor, Pullback]


class State(NamedTuple):
    """All unknowns: the user's, and one pytree of multipliers for each constraint."""

    z: Any
    multipliers: tuple[Any, ...]


class Query(NamedTuple):
    """Asks for ``prox(z, step)`` instead of objective and constraints."""

    z: Any
    step: Tensor


class Natural(NamedTuple):
    """Asks for ``z - prox(z - slope, 1)`` of a set that has it in a form in which neither swallows the other's digits."""

    z: Any
    slope: Any


class Probe(NamedTuple):
    """Asks for everything at once."""

    state: State
    query: Query


@dataclass(frozen=True)
class ConstrainedMinimisation(Problem):
    """A minimum under constraints, as a root of its optimality conditions; made by :class:`~implicitkit.Argmin`.

    The equations are at the top of this file.

    The kernel gives ``(batch, 1 + m)`` for a packed state ``(batch, size + m)``: the objective and the ``m`` constraint
    values; for a matrix of one column more, whose last column is a step ``t``, ``prox(z, t)``, ``(batch, size)``; and for
    one of two states and two columns more, ``z - prox(z - g)``, ``g`` in the place of the second.

    Attributes:
        prox: ``(z, step) -> z`` or ``None``. size: real numbers in ``z``, a sample. one_sided: for each of the ``m``
            constraint values, is it ``g <= 0``?  A byte each, 0 or 1: what walks over all that a function holds need not
            walk over these.
        costed: the first of the arguments is ``c``, what objective and ``phi`` are multiplied by
            (:mod:`implicitkit.problem.unit_of_objective`), of the batch's shape.
    """

    objective: Callable[..., Any]
    constraints: tuple[Constraint, ...]
    prox: Callable[..., Any] | None
    layout: Layout = field(compare=False)
    one_sided: bytes
    degenerate: str = "lstsq"
    costed: bool = False
    kind: ClassVar[Kind] = CONSTRAINED
    title: ClassVar[str] = "Argmin"

    @property
    def size(self) -> int:
        """Real numbers in ``z``, a sample."""
        return self.layout.size

    @property
    def function(self) -> Callable[..., Any]:
        return self.evaluate

    @property
    def hidden(self) -> int:
        """How many arguments come before the user's."""
        return int(self.costed)

    @property
    def has_natural(self) -> bool:
        """Is there a natural map without cancellation, of this multiple of the term?"""
        return natural_of(self.prox) is not None and not (self.costed and getattr(self.prox, "of_a_term", False))

    @property
    def linear_solver(self) -> Any:
        return KKT("raise" if self.degenerate == "raise" else "lstsq")

    def __repr__(self) -> str:
        name = getattr(self.objective, "__qualname__", type(self.objective).__name__)
        return f"Argmin({name}, {len(self.constraints)} constraints)"

    def explain(self, system: System, z: Tensor, theta: Sequence[Tensor], failed: Tensor) -> str:
        if not self.one_sided:
            return ""
        worst = float(self._violation(system, z, theta)[failed].max())
        if worst <= _NEARLY * (1 + min(float(z[failed, : self.size].abs().max()), _FAR)):
            with torch.no_grad():
                lacking = lacks_multipliers(lambda w: system.kernel(w, *theta), z, self.size)
            if bool(lacking[failed].all()):
                return NO_MULTIPLIERS
        if not bool(self.violates(system, z, theta)[failed].any()):
            return (
                "The constraints hold there: the objective may fall without end (state what keeps z back), or hardly at all "
                "(loosen rtol= / atol=, raise max_steps=)."
            )
        return (
            f"The constraints are violated there by up to {worst:.3g}: perhaps no z meets all of them. Look at them alone, "
            "with an objective that is zero; if that finds a point, start there, or raise max_steps=."
        )

    def violates(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Which samples violate their constraints by more than rounding, ``(batch,)``."""
        size = z[:, : self.size].abs().amax(1)
        return self._violation(system, z, theta) > torch.finfo(z.dtype).eps ** 0.5 * (1 + size)

    def _violation(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            values = system.kernel(z, *theta)[:, 1:]
        found = torch.where(self.sides(z), values.clamp_min(0), values.abs()).nan_to_num(torch.inf)
        return torch.cat((found, found.new_zeros(len(z), 1)), 1).amax(1)

    def drops_rows(self) -> bool:
        return not getattr(self.prox, "batched", lambda _: False)(self.layout)

    # ---- what is lifted
    def evaluate(self, state: Any, *args: Any) -> Any:
        if isinstance(state, Query):
            assert self.prox is not None
            image = self.prox(state.z, state.step * args[0] if self.costed else state.step)
            rows = len(trees.tree_flatten(state.z)[0][0]) if self.layout.batch_dims else None
            image = self.layout.check(image, "prox (or project)", rows=rows)
            return trees.tree_map(real_parts, image)
        if isinstance(state, Natural):
            return natural_of(self.prox)(state.z, state.slope)  # type: ignore[misc]
        if isinstance(state, Probe):
            return self.evaluate(state.state, *args), self.evaluate(state.query, *args)
        own = args[self.hidden :]
        value = self.objective(state.z, *own)
        batch = tuple(self.layout.batch_shape)
        if not isinstance(value, Tensor) or value.ndim != len(batch):
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise ValueError(of_the_objective("Argmin's objective", batch, got))
        if self.costed:
            value = value * args[0]
        return value, tuple(c.values(state.z, *own) for c in self.constraints)

    def probe(self, z0: Any) -> Any:
        if self.prox is None:
            return z0
        leaf = trees.tree_flatten(z0.z)[0][0]
        step = torch.ones(leaf.shape[: self.layout.batch_dims], dtype=self.layout.dtype, device=leaf.device)
        return Probe(z0, Query(z0.z, step))

    def unpack(self, layout: Layout, matrix: Tensor) -> Any:
        size = layout.size
        if matrix.shape[1] == size:
            return layout.unpack(matrix)
        if matrix.shape[1] > size + 2:
            return Natural(layout.unpack(matrix[:, :size]).z, layout.unpack(matrix[:, size : 2 * size]).z)
        state, step = matrix[:, :-1], matrix[:, -1]
        shape = (matrix.shape[0] // layout.samples_per_row, *layout.inner) if layout.batch_dims else ()
        return Query(layout.unpack(state).z, step.reshape(shape))

    # ---- on packed states
    def values(self, kernel: Kernel, w: Tensor) -> tuple[Tensor, Tensor]:
        """Objective ``(batch,)`` and constraints ``(batch, m)``."""
        out = kernel(w)
        return out[:, 0], out[:, 1:]

    def proximal(self, kernel: Kernel, z: Tensor, step: Tensor | float) -> Tensor:
        """``prox(z, step)`` for ``z`` ``(batch, size)`` and steps ``(batch,)``; ``z`` itself if there is no set."""
        if self.prox is None:
            return z
        if (ends := self.ends(z.dtype)) is not None:
            z = z if ends[0] is None else z.clamp_min(ends[0])
            return z if ends[1] is None else z.clamp_max(ends[1])
        step = torch.as_tensor(step, dtype=z.dtype, device=z.device).expand(z.shape[0]).unsqueeze(1)
        return kernel(torch.cat([z, z.new_zeros(z.shape[0], len(self.one_sided)), step], 1))

    def limits(self, kernel: Kernel, z: Tensor) -> tuple[Tensor, Tensor] | None:
        """``lower`` and ``upper``, ``(batch, size)``, infinite where there is none; ``None`` where the set is another than
        bounds."""
        if not getattr(self.prox, "of_bounds", False):
            return None
        far = torch.full_like(z, torch.finfo(z.dtype).max / 4)
        ends = []
        for beyond, given in ((-far, self.prox.lower), (far, self.prox.upper)):  # type: ignore[union-attr]
            end = beyond if all(b is None for b in given) else self.proximal(kernel, beyond, 1.0)
            ends.append(torch.where(end == beyond, beyond.sign() * torch.inf, end))
        return ends[0], ends[1]

    def ends(self, dtype: torch.dtype) -> tuple[float | None, float | None] | None:
        """The bounds, where each is one number of that ``dtype`` for all unknowns, or ``None``, so that nobody need evaluate
        what the user gave to know them; else ``None``."""
        if not getattr(self.prox, "of_bounds", False):
            return None
        ends = []
        for given in (self.prox.lower, self.prox.upper):  # type: ignore[union-attr]
            end = given[0]
            number = end is None or (isinstance(end, (int, float)) and abs(end) <= torch.finfo(dtype).max)
            if not number or any(other != end for other in given[1:]):
                return None
            ends.append(end)
        return ends[0], ends[1]

    def sides(self, like: Tensor) -> Tensor:
        """Which constraint values are one-sided, ``(m,)`` bool."""
        if not self.one_sided:
            return torch.zeros(0, dtype=torch.bool, device=like.device)
        return torch.frombuffer(bytearray(self.one_sided), dtype=torch.bool).to(like.device)

    def flat_stationarity(self, kernel: Kernel, z: Tensor) -> Tensor:
        """``dL/dz``, ``(batch, n)``, at multipliers of one: its Jacobian has the entries that the Hessian of the Lagrangian
        can have at any."""
        return self.flat_saddle(kernel, torch.cat([z, z.new_ones(len(z), len(self.one_sided))], 1))[:, : self.size]

    def flat_saddle(self, kernel: Kernel, w: Tensor, made: Made | None = None) -> Tensor:
        """``(dL/dz, h, g)``, ``(batch, n + m)``: its Jacobian is the symmetric ``[[d^2 L/dz^2, J'], [J, 0]]``.  ``made``:
        what ``autodiff.vjp`` of the kernel has given at ``w``."""
        n = self.size
        out, pullback = made or autodiff.vjp(kernel, w)
        found = self.saddle_of(w, out, pullback)
        # as at a first point: no multipliers
        if not compat.transforms_active() and not recording.holds(found[:, :n].any()):
            autodiff.refuse_hidden(lambda y: kernel(torch.cat([y, w[:, n:]], 1))[:, 0], w[:, :n].detach(), out[:, 0])
        return found

    def saddle_of(self, w: Tensor, out: Tensor, pullback: Pullback) -> Tensor:
        """:meth:`flat_saddle` from what ``autodiff.vjp`` of the kernel has given, without a look at it."""
        slope = pullback(torch.cat([torch.ones_like(out[:, :1]), w[:, self.size :]], 1))[0][:, : self.size]
        return torch.cat([slope, out[:, 1:]], 1)

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        return self.conditions(kernel, z, self.flat_saddle(kernel, z))

    def conditions(
        self, kernel: Kernel, z: Tensor, saddle: Tensor, limits: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The residual from :meth:`flat_saddle`: what holds at an optimum.  ``limits``: where they are known."""
        n = self.size
        slope, multipliers, values = saddle[:, :n], z[:, n:], saddle[:, n:]
        if limits is not None:
            slope = held(slope, z[:, :n] - limits[1], z[:, :n] - limits[0])
        elif (ends := self.ends(z.dtype)) is not None:
            low, high = (None if end is None else z[:, :n] - end for end in reversed(ends))
            slope = held(slope, low, high)
        elif self.has_natural:
            slope = kernel(torch.cat([z, slope, z.new_zeros(len(z), len(self.one_sided) + 2)], 1))
        elif self.prox is not None:
            slope = z[:, :n] - self.proximal(kernel, z[:, :n] - slope, 1.0)
        if not self.one_sided:
            return slope
        if not any(self.one_sided):
            return torch.cat([slope, values], 1)
        kappa = KAPPA if self.degenerate == "smooth" else 0.0
        natural = lesser(multipliers, -values, kappa)
        return torch.cat([slope, torch.where(self.sides(z), natural, values)], 1)


def start(
    objective: Callable[..., Any],
    constraints: tuple[Constraint, ...],
    prox: Callable[..., Any] | None,
    degenerate: str,
    z0: Any,
    args: tuple[Any, ...],
    batch_dims: int,
) -> tuple[ConstrainedMinimisation, State]:
    """The program, and the state it starts from: multipliers of the constraints' shapes, all zero."""
    layout = Layout(z0, batch_dims)
    if constraints and layout.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(f"constraints= needs float32 or float64, and z0 has {layout.dtype}: convert z0 and args")
    multipliers, one_sided = [], bytearray()
    for number, constraint in enumerate(constraints):
        with torch.no_grad():
            at = trees.tree_map(_plain, (z0, *args))
            values, _ = attempted(functools.partial(constraint.values, *at), layout.batch)
        leaves, spec = trees.tree_flatten(values)
        name = f"constraint {number} ({type(constraint).__name__})"
        batch = tuple(layout.batch_shape)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name} returned {kind_of(leaf)}, not a tensor{trees.hint_of_no_tensor(leaf)}")
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(
                    f"{name} returned {leaf.dtype}: return its values (h or g), not a comparison or a count"
                )
            if leaf.is_complex():
                raise TypeError(f"{name} returned complex numbers: return their real view (torch.view_as_real)")
            if tuple(leaf.shape[:batch_dims]) != batch:
                raise ValueError(
                    f"{name} must return tensors whose first dimensions are the batch {batch}; it returned shape "
                    f"{tuple(leaf.shape)}"
                )
            one_sided += bytes([constraint.one_sided]) * math.prod(leaf.shape[batch_dims:])
        zeros = [torch.zeros(leaf.shape, dtype=layout.dtype, device=layout.device) for leaf in leaves]
        multipliers.append(trees.tree_unflatten(zeros, spec))
    program = ConstrainedMinimisation(objective, constraints, prox, layout, bytes(one_sided), degenerate)
    return program, State(z0, tuple(multipliers))


def _plain(x: Any) -> Any:
    return compat.plain_sample(x) if isinstance(x, Tensor) else x
