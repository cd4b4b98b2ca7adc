r"""``z`` minimises ``z'Pz/2 + q'z`` subject to ``Az = b`` and ``lower <= Gz <= h``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.arrays import from_arrays
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.trees import Layout
from implicitkit.linear.conditions.kkt import KKT
from implicitkit.linear.conditions.saddle import StructuredOperator
from implicitkit.linear.factors.dense import mv
from implicitkit.problem.base import Problem, Restated
from implicitkit.problem.complementarity import KAPPA, are_kept, check_degenerate, natural, settled, warn_zero_gradient
from implicitkit.problem.kind import QUADRATIC_PROGRAM, Kind
from implicitkit.problem.qp_data import QPData
from implicitkit.problem.qp_jacobian import QPJacobian
from implicitkit.problem.qp_units import UNEVEN, Units, units_of
from implicitkit.problem.sparse_conditions import MATRICES, Places, as_entries, as_sparse, is_sparse, sparse_jacobian
from implicitkit.system import System

_EVENT = {"P": 2, "q": 1, "A": 2, "b": 1, "G": 2, "h": 1, "lower": 1}  # dimensions of one program's part
_ABSENT = {"h": math.inf, "lower": -math.inf}  # of a constraint that is not there


class Multipliers(NamedTuple):
    """Dual variables of a quadratic program: ``equality`` ``(*batch, p)`` and ``inequality`` ``(*batch, m)``; ``None``
    for a part that is absent.  ``Pz + q + A' equality + G' inequality = 0``; ``inequality`` is positive where ``Gz = h``
    and negative where ``Gz = lower``."""

    equality: Tensor | None
    inequality: Tensor | None


@dataclass(frozen=True, eq=False, repr=False)
class QuadraticProgram(Problem):
    r"""Find the minimiser of a convex quadratic program, and its multipliers:

        minimise  z'Pz/2 + q'z   subject to   Az = b,   lower <= Gz <= h

    ``ik.solve(ik.QuadraticProgram(P, q, A, b, G, h))`` needs neither ``z0`` nor ``batch_dims``: the batch is that of the
    data, each part either carrying it in front or shared (parts broadcast; the derivative of a shared one is the sum over
    the batch).  The residual is the natural map over ``(z, y, lam)``,

        (P + P')z/2 + q + A'y + G'lam = 0,    Az - b = 0,    lam - max(lam + Gz - h, 0) + max(lower - Gz - lam, 0) = 0,

    whose derivative is that of the active set.  It is solved by Cholesky factors of ``n x n`` matrices; if one of ``P``,
    ``A`` and ``G`` is a sparse matrix (torch's or SciPy's, shared by the batch), by sparse factors of the optimality
    conditions.  Derivatives reach the entries of a sparse one, those that are there.

    Source: Boyd & Vandenberghe (2004), section 5.5.3; Amos & Kolter (2017), "OptNet", for the derivative.

    Args:
        P: ``(*batch, n, n)``, positive semidefinite, or ``None`` for a linear program. q: ``(*batch, n)``.
        A, b: ``(*batch, p, n)``, ``(*batch, p)``, or ``None``. G, h: ``(*batch, m, n)``, ``(*batch, m)``, or ``None``;
            ``h`` may hold ``inf``.
        lower: ``(*batch, m)`` or ``None``, for two-sided constraints; may hold ``-inf``.
        degenerate: see :class:`~implicitkit.Argmin`; ``"smooth"`` solves the program with ``lam_i (h - Gz)_i = 1e-3``,
            so that a linear program too has a derivative that says something.  The number has units, those of the
            objective.  It is kept to a hundredth, or to what rounding leaves of ``h - Gz``; where it is not (constraints
            so narrow that 1e-3 is huge beside the objective), the program has not converged.

    Raises:
        TypeError: a part is not a tensor. ValueError: shapes, dtypes or devices do not fit.
    """

    P: Tensor | None
    q: Tensor
    A: Tensor | None = None
    b: Tensor | None = None
    G: Tensor | None = None
    h: Tensor | None = None
    lower: Tensor | None = None
    degenerate: str = "lstsq"
    kind: ClassVar[Kind] = QUADRATIC_PROGRAM

    def __post_init__(self) -> None:
        check_degenerate(self.degenerate)
        parts = self.parts
        given = [t for t in parts.values() if isinstance(t, Tensor)]
        for name in [name for name, t in parts.items() if not isinstance(t, Tensor) or is_sparse(t)]:
            part = parts[name]
            parts[name] = as_sparse(name, part, given) if is_sparse(part) else from_arrays(part, given)
            object.__setattr__(self, name, parts[name])
        for name, t in parts.items():
            if not isinstance(t, Tensor):
                raise TypeError(f"QuadraticProgram's {name} must be a tensor, got {type(t).__name__}")
            if not t.is_floating_point():
                raise TypeError(f"QuadraticProgram's {name} must be real floating point, got {t.dtype}")
        if not isinstance(self.q, Tensor):
            raise TypeError("QuadraticProgram needs q; for a feasibility problem pass zeros")
        if (self.A is None) != (self.b is None):
            raise ValueError("A and b come in pairs: give both, or neither")
        if (self.G is None) != (self.h is None and self.lower is None):
            raise ValueError("G comes with h (G z <= h) or lower (G z >= lower), and they with it")
        self._check_shapes(parts)

    def _check_shapes(self, parts: dict[str, Tensor]) -> None:
        if self.q.ndim == 0:
            raise ValueError("QuadraticProgram's q has shape (); its last dimension must be the number of unknowns")
        n = self.q.shape[-1]
        p, m = (t.shape[-2] if t is not None and t.ndim >= 2 else None for t in (self.A, self.G))
        expected = {"P": (n, n), "q": (n,), "A": (p, n), "b": (p,), "G": (m, n), "h": (m,), "lower": (m,)}
        batches = []
        for name, t in parts.items():
            event = _EVENT[name]
            if t.ndim < event or tuple(t.shape[-event:]) != expected[name]:
                raise ValueError(
                    f"QuadraticProgram's {name} has shape {tuple(t.shape)}; with q of {tuple(self.q.shape)} and the other "
                    f"parts its last dimensions must be {expected[name]}"
                )
            if t.dtype != self.q.dtype or t.device != self.q.device:
                raise ValueError(
                    f"QuadraticProgram's {name} is {t.dtype} on {t.device}, but q is {self.q.dtype} on {self.q.device}"
                )
            batches.append(t.shape[:-event])
        try:
            _broadcast(batches)
        except RuntimeError:
            sizes = ", ".join(f"{name} {tuple(s)}" for name, s in zip(parts, batches, strict=True))
            raise ValueError(f"the batch sizes of the parts disagree: {sizes}") from None

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts that are there, by name."""
        return {name: getattr(self, name) for name in _EVENT if getattr(self, name) is not None}

    @property
    def batch_shape(self) -> torch.Size:
        """The batch of programs."""
        return _broadcast([t.shape[: t.ndim - _EVENT[name]] for name, t in self.parts.items()])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(t.shape)}" for name, t in self.parts.items())
        return f"QuadraticProgram({shapes})"

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        if args:
            raise ValueError("a QuadraticProgram holds its data itself: pass no args")
        batch, q, parts = self.batch_shape, self.q, self.parts
        shape = batch + q.shape[-1:]
        if z0 is None:
            z0 = torch.zeros(shape, dtype=q.dtype, device=q.device)
        elif not isinstance(z0, Tensor) or z0.shape[-1:] != q.shape[-1:] or z0.ndim < len(shape):
            got = tuple(z0.shape) if isinstance(z0, Tensor) else type(z0).__name__
            raise ValueError(f"z0 must be a tensor of shape {tuple(shape)}, or absent; got {got}")
        shape = _broadcast([shape, z0.shape])
        start = {"z": z0.expand(shape)}
        for name, matrix in (("y", self.A), ("lam", self.G)):
            if matrix is not None:
                start[name] = torch.zeros(shape[:-1] + matrix.shape[-2:-1], dtype=q.dtype, device=q.device)
        places = {}
        if any(is_sparse(t) for t in parts.values()):
            for name in [name for name in MATRICES if name in parts]:
                parts[name], places[name] = as_entries(name, parts[name])
        units = units_of(parts, places, 1.0 if self.degenerate == "smooth" else UNEVEN)
        if units is not None:
            units = Units(*(t.to(q.dtype) for t in units))
            parts, start = units.of(parts, places), units.start(start)

        def split(state: dict[str, Tensor]) -> tuple[Tensor, Multipliers]:
            own = state if units is None else units.back(state)
            return own["z"], Multipliers(own.get("y"), own.get("lam"))

        cost = 1.0 if units is None else float(units.cost)
        conditions = QPConditions(tuple(parts), self.degenerate, places, cost)
        return Restated(conditions, start, tuple(parts.values()), split, len(shape) - 1)


@dataclass(frozen=True, repr=False)
class QPConditions(Problem):
    """The natural map of a quadratic program over ``{"z", "y", "lam"}``; the data are the arguments, by ``names``.

    ``places``: where the entries of sparse matrices stand; such an argument is the vector of its entries.  ``cost``: what
    the objective has been multiplied by.
    """

    names: tuple[str, ...]
    degenerate: str = "lstsq"
    places: dict[str, Places] = field(default_factory=dict, compare=False)
    cost: float = 1.0
    kind: ClassVar[Kind] = QUADRATIC_PROGRAM
    closed: ClassVar[bool] = True
    title: ClassVar[str] = "QuadraticProgram"

    def __repr__(self) -> str:
        return f"{self.title}({', '.join(self.names)})"

    @property
    def kappa(self) -> float:
        """Complementarity at the solution: of scaled rows the multiplier is divided by what the slack is multiplied by, and
        all that is left is the scale of the objective."""
        return KAPPA * self.cost if self.degenerate == "smooth" else 0.0

    @property
    def linear_solver(self) -> Any:
        return KKT("raise" if self.degenerate == "raise" else "lstsq")

    def unusable(self, theta: Sequence[Tensor]) -> list[str]:
        """Parts with NaN, or infinite ones where only ``h`` may hold ``inf`` and only ``lower`` ``-inf``."""
        found = []
        for name, t in zip(self.names, theta, strict=True):
            good = torch.isfinite(t) | (t == _ABSENT.get(name, torch.nan))
            if not bool(good.all()):
                found.append(f"{name} ({float(t[~good][0]):g})")
        return found

    def times(self, name: str, matrix: Tensor, x: Tensor) -> Tensor:
        """The product of the part ``name`` with ``x``."""
        if self.places:
            return self.places[name].times(matrix, x)
        return (matrix @ x.unsqueeze(-1)).squeeze(-1)

    def back(self, name: str, matrix: Tensor, x: Tensor) -> Tensor:
        """The product of the transposed of the part ``name`` with ``x``."""
        if self.places:
            return self.places[name].back(matrix, x)
        return (matrix.mT @ x.unsqueeze(-1)).squeeze(-1)

    def residual(self, state: Any, *data: Tensor) -> Any:
        part = dict(zip(self.names, data, strict=True))
        z, q = state["z"], part["q"]
        slope = q.expand_as(z)
        if "P" in part:
            slope = slope + 0.5 * (self.times("P", part["P"], z) + self.back("P", part["P"], z))
        out = {}
        if "y" in state:
            slope = slope + self.back("A", part["A"], state["y"])
            out["y"] = self.times("A", part["A"], z) - part["b"]
        if "lam" in state:
            lam = state["lam"]
            slope = slope + self.back("G", part["G"], lam)
            out["lam"] = natural(lam, lam + self.times("G", part["G"], z), part, self.kappa)
        return {"z": slope, **out}

    def data(self, system: System, theta: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parts of every sample, ``(batch, ...)``; shared ones are expanded, not copied."""
        flat = _flatten(system, theta, [1 if name in self.places else _EVENT[name] for name in self.names])
        return dict(zip(self.names, flat, strict=True))

    def packed_residual(self, part: dict[str, Tensor], w: Tensor) -> Tensor:
        """:meth:`residual` of every sample, on packed states and :meth:`data`."""
        n, p = part["q"].shape[1], part["b"].shape[1] if "b" in part else 0
        z, y, lam = w.split([n, p, w.shape[1] - n - p], 1)
        slope, out, row = part["q"], [], z.unsqueeze(1)
        if "P" in part:
            P = part["P"]
            slope = slope + 0.5 * (torch.bmm(row, P) + torch.bmm(row, P.mT)).squeeze(1)
        if p:
            slope = torch.baddbmm(slope.unsqueeze(1), y.unsqueeze(1), part["A"]).squeeze(1)
            out.append(mv(part["A"], z) - part["b"])
        if "G" in part:
            slope = torch.baddbmm(slope.unsqueeze(1), lam.unsqueeze(1), part["G"]).squeeze(1)
            out.append(natural(lam, lam + mv(part["G"], z), part, self.kappa))
        return torch.cat([slope, *out], 1)

    def one_sided(self, part: dict[str, Tensor]) -> QPData:
        """The programs of :meth:`data` as ``Az = b, Gz <= h``, in float64, nothing absent; ``lower`` as further rows."""
        part = {name: t.to(torch.float64) for name, t in part.items()}
        q = part["q"]
        batch, n = q.shape
        P = 0.5 * (part["P"] + part["P"].mT) if "P" in part else q.new_zeros(batch, n, n)
        G, h = [], []
        if "h" in part:
            G, h = [part["G"]], [part["h"]]
        if "lower" in part:
            G, h = [*G, -part["G"]], [*h, -part["lower"]]
        return QPData(
            P,
            q,
            part.get("A", q.new_zeros(batch, 0, n)),
            part.get("b", q.new_zeros(batch, 0)),
            torch.cat(G, 1) if G else q.new_zeros(batch, 0, n),
            torch.cat(h, 1) if h else q.new_zeros(batch, 0),
        )

    def join(self, z: Tensor, y: Tensor, lam: Tensor) -> Tensor:
        """The packed state for a solution of :meth:`one_sided`."""
        if "h" in self.names and "lower" in self.names:
            above, below = lam.chunk(2, 1)
            lam = above - below
        elif "lower" in self.names:
            lam = -lam
        return torch.cat([z, y, lam], 1)

    def relaxed(self, part: dict[str, Tensor], w: Tensor) -> tuple[Tensor, Tensor]:
        """The packed state with its small multipliers settled, and where ``lam_i s_i = kappa`` is kept, ``(batch,)``
        (:mod:`~implicitkit.problem.complementarity`); of :meth:`data`."""
        if not self.kappa or "G" not in part:
            return w, torch.ones_like(w[:, 0], dtype=torch.bool)
        ends = {name: part[name] for name in _ABSENT if name in part}
        m = next(iter(ends.values())).shape[1]
        z, lam, G = w[:, : part["q"].shape[1]], w[:, w.shape[1] - m :], part["G"].double()
        lam = settled(lam, self.times("G", part["G"], z), ends, self.kappa)
        beside = self.times("G", G.abs(), z.double().abs())
        kept = are_kept(z, lam, lambda x: self.times("G", G, x), beside, ends, self.kappa)
        return torch.cat([w[:, : w.shape[1] - m], lam], 1), kept

    def linearise(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        """The blocks ``[[P, A', G'], [A, 0, 0], [-DG, 0, I - D]]``, ``D`` the derivative of the clamp: 1 on active rows."""
        with torch.enable_grad():
            out = system.residual(z.detach(), *theta)
        with torch.no_grad():
            part = self.data(system, [t.detach() for t in theta])
            if self.places:
                return out, sparse_jacobian(part, self.places, z, self.kappa)
            return out, QPJacobian.of(part, z, self.kappa).operator()

    def first_order(
        self, system: System, z: Tensor, theta: Sequence[Tensor]
    ) -> tuple[StructuredOperator, Callable[[Tensor, Sequence[int]], Sequence[Tensor]]] | None:
        if system.parent is not None or self.places:
            return None
        blocks = QPJacobian.of(self.data(system, [t.detach() for t in theta]), z, self.kappa)
        point = blocks.split(z)

        def pull(w: Tensor, needed: Sequence[int]) -> Sequence[Tensor]:
            if "P" not in self.names and "q" in {self.names[i] for i in needed}:
                _say_if_zero(w, blocks.P.shape[1])
            grads = blocks.pull(point, w, {self.names[i] for i in needed})
            shape = system.layout.batch_shape
            return [
                grads[self.names[i]].reshape(shape + grads[self.names[i]].shape[1:]).sum_to_size(theta[i].shape)
                for i in needed
            ]

        return blocks.operator(), pull


_warned = False


def _say_if_zero(w: Tensor, n: int) -> None:
    """Says once that the derivative of a linear program in its objective is zero at a vertex, whatever the loss."""
    global _warned
    if _warned or bool(w[:, :n].abs().amax() > 1e-12 * w.abs().amax()) or not bool(w.any()):
        return
    _warned = True
    warn_zero_gradient("q")


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size:
    """``torch.broadcast_shapes``, without its cost where all shapes that are not ``()`` are the same."""
    different = {shape for shape in shapes if shape}
    return torch.broadcast_shapes(*different) if len(different) > 1 else next(iter(different), torch.Size())


def _flatten(system: System, theta: Sequence[Tensor], events: Sequence[int]) -> tuple[Tensor, ...]:
    """Each tensor with one row a sample, whatever stack of batches (of the data, of ``torch.vmap``) there is."""
    if system.parent is None:
        layout: Layout = system.layout
        lead = (system.batch // layout.samples_per_row, *layout.inner) if layout.batch_dims else ()

        def rows(t: Tensor, event: int) -> Tensor:
            if len(lead) == t.ndim - event <= 1:  # the everyday call: one batch dimension or none, nothing to broadcast
                if not lead:
                    return t.unsqueeze(0)
                if t.shape[0] == lead[0]:
                    return t
            shape = t.shape[t.ndim - event :]
            return t.expand(*lead, *shape).reshape(system.batch, *shape)

        return tuple(rows(t, event) for t, event in zip(theta, events, strict=True))
    parent = system.parent
    count = system.batch // parent.batch
    if all(d is None for d in system.dims):
        once = _flatten(parent, theta, events)
        return tuple(t.expand(count, *t.shape).flatten(0, 1) for t in once)
    mapped = torch.func.vmap(lambda *ts: _flatten(parent, ts, events), in_dims=tuple(system.dims))
    return tuple(t.flatten(0, 1) for t in mapped(*theta))
