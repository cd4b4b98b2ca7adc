r"""Causal cells: keeping the future out of the past.

A causal cell computes position ``t`` of its state from positions ``<= t`` of state and input; so does its equilibrium, and
so does every Picard iterate.  An accelerated iterate does not: Anderson's coefficients are least-squares fits over the
whole sequence, so that every position moves by a number that depends on all of them.  Until convergence, a language model
then sees the words that it is to predict.  With coefficients of their own at each position iterates are causal again.  The
choice of the iterate that is returned must be, too: the one with the smallest residual of the whole sequence is not.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik

__all__ = ["CausalityWarning", "LastIterate", "PerPosition", "future_leak", "per_position"]


class CausalityWarning(UserWarning):
    """Until it has converged, a solve lets later positions of a sequence influence earlier ones."""


@dataclass(frozen=True)
class PerPosition(ik.Method):
    r"""A method that treats every position of a sequence as a sample of its own when it chooses coefficients.

    Convergence, status and the derivative remain those of the whole sequence: only the step is taken per position.  The
    last iterate is returned, not the one with the smallest residual of the whole sequence: that choice would look ahead.

    Args:
        method: one that uses nothing but values of the map (Anderson, Broyden).
        sizes: unknowns of one position in each leaf of the state. positions: their number.

    Raises:
        ik.CapabilityError: the method asks for Jacobians, whose blocks are not those of positions.
    """

    method: Any
    sizes: tuple[int, ...]
    positions: int
    name: ClassVar[str] = "per_position"
    keeps_best: ClassVar[bool] = False

    @property
    def solves(self) -> str:  # type: ignore[override]
        """What the method solves."""
        return self.method.solves

    @property
    def default_max_steps(self) -> int:  # type: ignore[override]
        """The method's own."""
        return self.method.default_max_steps

    def init(self, f: Any, z: Tensor) -> dict[str, Any]:
        """The method's state over all positions, and the best that each position has seen."""
        view = _Positions(self, f)
        rows = view.split(z)
        return {"inner": self.method.init(view, rows), "best": rows, "best_norm": None}

    def step(self, f: Any, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """One step of the method, at each position."""
        view = _Positions(self, f)
        rows = view.enter(z, state["best"], state["best_norm"])
        best, best_norm = view.best, view.best_norm
        rows, inner = self.method.step(view, rows, state["inner"])
        return view.join(rows), {"inner": inner, "best": best, "best_norm": best_norm}

    def select(self, state: dict[str, Any], index: Tensor) -> dict[str, Any]:
        """The state of all positions of these samples."""
        steps = torch.arange(self.positions, device=index.device)
        index = (index.unsqueeze(1) * self.positions + steps).flatten()
        kept = {k: None if state[k] is None else state[k].index_select(0, index) for k in ("best", "best_norm")}
        return {"inner": self.method.select(state["inner"], index), **kept}


@dataclass(frozen=True)
class LastIterate(ik.Method):
    """A method whose steps are causal as they are, and whose last iterate is returned (as by :class:`PerPosition`).

    Args:
        method: such a method: Newton's without line search, whose steps solve block triangular systems.
    """

    method: Any
    keeps_best: ClassVar[bool] = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's own."""
        return str(getattr(self.method, "name", "") or type(self.method).__name__)

    @property
    def solves(self) -> str:  # type: ignore[override]
        """What the method solves."""
        return str(self.method.solves)

    @property
    def default_max_steps(self) -> int:  # type: ignore[override]
        """The method's own."""
        return int(self.method.default_max_steps)

    def init(self, f: Any, z: Tensor) -> Any:
        """The method's own."""
        return self.method.init(f, z)

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The method's own."""
        return self.method.step(f, z, state)

    def select(self, state: Any, index: Tensor) -> Any:
        """The method's own."""
        return self.method.select(state, index)


class _Positions:
    """``f`` on ``(batch * positions, n / positions)``, as the method inside sees it.

    ``norm``, ``best`` and ``best_norm`` are those of each position, so that safeguards do not look into the future either.
    """

    norm: Tensor
    best: Tensor
    best_norm: Tensor

    def __init__(self, shape: PerPosition, f: Any) -> None:
        self.shape, self.f, self.problem, self.kind, self.solves = shape, f, f.problem, f.kind, f.solves
        self.batch, self.size = f.batch * shape.positions, sum(shape.sizes)
        self.active = f.active.repeat_interleave(shape.positions)
        self._rows: Tensor | None = None
        self._z: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    def split(self, z: Tensor) -> Tensor:
        """``(batch, n)`` to ``(batch * positions, n / positions)``."""
        positions, sizes = self.shape.positions, self.shape.sizes
        if len(sizes) == 1:
            return z.reshape(-1, sizes[0])
        parts = z.split([positions * size for size in sizes], 1)
        return torch.cat([p.reshape(-1, size) for p, size in zip(parts, sizes, strict=True)], 1)

    def join(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`split`."""
        positions, sizes = self.shape.positions, self.shape.sizes
        if len(sizes) == 1:
            return rows.reshape(-1, positions * sizes[0])
        parts = rows.split(sizes, 1)
        return torch.cat([p.reshape(-1, positions * size) for p, size in zip(parts, sizes, strict=True)], 1)

    def enter(self, z: Tensor, best: Tensor, best_norm: Tensor | None) -> Tensor:
        """Begin a step at ``z``, where ``f`` is known already; ``best`` as it was before."""
        rows = self.split(z)
        self._z, self._rows, self._kept = z, rows, {}
        self.norm = torch.linalg.vector_norm(self.residual(rows), dim=1)
        better = None if best_norm is None else self.norm < best_norm
        if better is None or (better.device.type == "cpu" and bool(better.all())):
            self.best, self.best_norm = rows, self.norm
        else:
            assert best_norm is not None
            self.best = torch.where(better.unsqueeze(1), rows, best)
            self.best_norm = torch.where(better, self.norm, best_norm)
        return rows

    def _of(self, rows: Tensor, name: str) -> Tensor:
        if rows is not self._rows:
            self._z, self._rows, self._kept = self.join(rows), rows, {}
        if name not in self._kept:
            value = self.f(self._z) if name == "f" else self.f.residual(self._z)
            self._kept[name] = self.split(value)
        return self._kept[name]

    def __call__(self, rows: Tensor) -> Tensor:
        return self._of(rows, "f")

    def residual(self, rows: Tensor) -> Tensor:
        return self._of(rows, "residual")

    def linearize(self, rows: Tensor) -> Any:
        raise ik.CapabilityError(
            f"{type(self.shape.method).__name__} uses Jacobians, which are those of the whole sequence: per position it "
            "cannot be used; ik.Newton(line_search=False) is causal as it is"
        )

    jacobian = linearize


def per_position(solver: Any, state: Any, batch_dims: int = 1) -> Any:
    """The solver for a causal cell: one that does everything per position, and returns the last iterate.

    Args:
        solver: a name or a configured object; ``"auto"`` is Anderson. state: every leaf ``(batch, positions, ...)``.
        batch_dims: of the solve; 0: all samples are one system, whose positions are those of each of them.

    Raises:
        ValueError: the leaves disagree on the number of positions.

    A solver that is neither causal by itself nor can be made so is returned as it is, with a :class:`CausalityWarning`.
    """
    if isinstance(solver, ik.Blocks):
        return _blocks(solver, state, batch_dims)
    leaves = ik.trees.tree_flatten(state)[0]
    counts = {t.shape[1] if t.ndim > 1 else 0 for t in leaves}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "a causal state has its positions in the first dimension after the batch of every leaf; the shapes are "
            f"{', '.join(str(tuple(t.shape)) for t in leaves)}"
        )
    if isinstance(solver, str) and solver in ("auto", "relay"):
        solver = "anderson"
    method = ik.get_solver(solver)
    name = getattr(method, "name", "") or type(method).__name__
    if isinstance(method, (PerPosition, LastIterate)):
        return method
    if name == "newton" and not method.line_search:
        return LastIterate(method)
    if isinstance(method, ik.Method) and (method.solves == "fixed_point" or name == "broyden"):
        positions = counts.pop() * (1 if batch_dims else len(leaves[0]))
        sizes = tuple((2 if t.is_complex() else 1) * t[0, 0].numel() for t in leaves)
        return PerPosition(method, sizes, positions)
    warnings.warn(
        f"solver {name!r} chooses its steps over all positions at once: before convergence the future leaks into the past. "
        'Use "anderson", "broyden" or "picard" (taken per position for a causal cell), ik.Newton(line_search=False), or a '
        "tight tolerance",
        CausalityWarning,
        stacklevel=4,
    )
    return method


def _blocks(solver: ik.Blocks, state: Any, batch_dims: int) -> ik.Blocks:
    """Each node's solver for its own state."""
    if not isinstance(state, Mapping):  # no composition: one block
        if not isinstance(solver.inner, Mapping):
            return dataclasses.replace(solver, inner=per_position(solver.inner, state, batch_dims))
        return solver  # refuses the names
    if solver.mode == "concurrent":
        warnings.warn(
            'ik.Blocks(mode="concurrent") lets a block step when those that it reads are solved well enough at all '
            'positions: before convergence the future leaks into the past. Use mode="sequential", or a tight tolerance',
            CausalityWarning,
            stacklevel=5,
        )
    inner = {n: solver.inner.get(n, "anderson") if isinstance(solver.inner, Mapping) else solver.inner for n in state}
    return dataclasses.replace(solver, inner={n: per_position(s, state[n], batch_dims) for n, s in inner.items()})


def future_leak(layer: Callable[..., Any], x: Tensor, position: int, *more: Any, size: float = 1.0) -> float:
    """How much of the future reaches the past: the largest change of the output at positions ``< position`` when the input
    at positions ``>= position`` changes.

    Zero for a causal map; for an equilibrium solved to a tolerance, at most of its order.

    Args:
        layer: ``(x, *more) -> (batch, positions, ...)``. x: ``(batch, positions, ...)``, floating point.
        position: where the future begins. size: standard deviation of the change of the input.

    Raises:
        ValueError: ``position`` outside the sequence.
    """
    if not 0 < position < x.shape[1]:
        raise ValueError(f"position must be in 1..{x.shape[1] - 1}, got {position}")
    other = x.clone()
    other[:, position:] += size * torch.randn_like(other[:, position:])
    with torch.no_grad():
        before, after = layer(x, *more), layer(other, *more)
    pairs = zip(ik.trees.tree_flatten(before)[0], ik.trees.tree_flatten(after)[0], strict=True)
    return max(float((a[:, :position] - b[:, :position]).abs().max()) for a, b in pairs)
