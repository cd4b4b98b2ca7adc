"""Methods on sequences that do everything position by position, so that nothing looks ahead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import Evaluations, Options, Outcome
from implicitkit_deq.causal.in_turn import InTurn

_WINDOW, _HORIZON = 12, 100.0  # as those of ik.extend.Impatient


@dataclass(frozen=True)
@ik.extend.options.adopts("method", "solves", "default_max_steps")
class PerPosition(ik.Method):
    r"""A method on the positions of sequences, none of which knows of later ones: not by coefficients, not by when it stops.

    - Each position is a sample of its own when coefficients and step lengths are chosen.
    - A position is *frozen* at the first iterate at which it, and all before it, meet
      ``|r_t| <= atol / \sqrt T + rtol |z_t|`` (where nobody gave ``atol``, of each position's own units:
      :meth:`Options.floor`); a sequence is done when its last position is frozen.  (Then
      ``|r| <= atol + rtol |z|`` for the whole of it.)  Stopping a sequence as a whole would let later positions decide how
      well earlier ones are solved.
    - ``and_then``: another method, for sequences that get nowhere: the residual of whose first position that is not frozen
      does not fall (:class:`ik.extend.Impatient`).  It starts from the last iterates.
    - The last iterates are returned, not those with the smallest residual of the whole sequence.

    A sequence whose map is not finite at its first position that is not frozen ends there.

    So the output at a position is the same number whatever comes after it, at any tolerance.  The derivative remains that of
    the whole sequence.

    Source: this library; the methods name their own.

    Args:
        method: one that uses nothing but values of the map (Anderson, Broyden), or products that it knows to be those of
            whole sequences.
        sizes: unknowns of one position in each leaf of the state. positions: their number, over all sequences of a sample.
        length: positions of one sequence; ``None``: all of them.
        and_then: another of these.

    A method that asks for more than values of the map, Jacobians above all, whose blocks are not those of positions, is
    given one position after the other (:class:`InTurn`).
    """

    method: Any
    sizes: tuple[int, ...]
    positions: int
    length: int | None = None
    and_then: PerPosition | InTurn | None = None
    options: Options | None = None  # whose tolerances: set when it runs, as is
    begun: Tensor | None = None  # which positions are solved at the start
    name: ClassVar[str] = "per_position"
    keeps_best: ClassVar[bool] = False

    def run(self, f: Evaluations, z0: Tensor, options: Options, frozen: Tensor | None = None) -> Outcome:
        """The driver's loop, which this method stops; then, where sequences are left, that of the next one.

        ``frozen``: positions that another has solved, ``(batch, positions)``; they stay as they are.
        """
        mine = dataclasses.replace(self, options=options, begun=frozen)
        silent = _Silent(**vars(options) | {"rtol": 0.0, "atol": 0.0, "norm": None})
        try:
            total = super(PerPosition, mine).run(f, z0, silent)
        except _OfTheWhole:
            return InTurn(self.method, self.sizes, self.positions, self.length).run(f, z0, options, frozen)
        lost = total.kept["lost"] & (total.status == int(ik.Status.STALLED))
        total.status = torch.where(lost, int(ik.Status.NONFINITE), total.status)
        total.residual_norm = torch.where(lost, torch.nan, total.residual_norm)
        total.tolerance = total.kept["asked"]
        member, taken = self.and_then, int(total.steps.max())
        left = None if options.max_steps is None else options.max_steps - taken
        stopped = total.status == int(ik.Status.STOPPED)
        ended = (total.status == int(ik.Status.CONVERGED)) | stopped
        if member is not None and not bool(ended.all()) and (left is None or left > 0):
            part = Evaluations(f.system, f.theta, member.solves)
            part.evaluations, part.sample_evaluations = total.evaluations, total.sample_evaluations
            later = options.callback and _later(options.callback, taken)
            solved = total.kept["frozen"] | ended.unsqueeze(1)
            start = self._start(total.z, z0, solved) if isinstance(member, InTurn) else total.z
            found = member.run(part, start, dataclasses.replace(options, max_steps=left, callback=later), solved)
            found.steps = torch.where(ended, total.steps, total.steps + found.steps)
            found.status = torch.where(stopped, total.status, found.status)
            found.trace = total.trace + found.trace[1:]
            total = found
        f.evaluations, f.sample_evaluations = total.evaluations, total.sample_evaluations
        return total

    def _start(self, z: Tensor, z0: Tensor, solved: Tensor) -> Tensor:
        """``z`` where positions are solved, else ``z0``."""
        masks = [solved.repeat_interleave(size, 1) for size in self.sizes]
        return torch.where(torch.cat(masks, 1), z, z0)

    def keep(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Which positions are solved, ``(batch, positions)``, whether the map is not finite at the first that is not, and
        what the residual of the whole sequence must come down to."""
        frozen = state["frozen"].view(-1, self.positions)
        asked = torch.linalg.vector_norm(state["asked"].view_as(frozen), dim=1)
        return {"frozen": frozen, "lost": state["lost"].view(len(frozen), -1).any(1), "asked": asked}

    def init(self, f: Any, z: Tensor) -> dict[str, Any]:
        """The method's state over all positions, and the best that each position has seen."""
        view = _Positions(self, f)
        rows = view.split(z)
        sequences = len(rows) // (self.length or self.positions)
        return {
            "inner": self.method.init(view, rows),
            "best": rows,
            "best_norm": None,
            "floor": None,
            "asked": rows.new_zeros(len(rows)),  # tolerances
            "frozen": torch.zeros(len(rows), dtype=torch.bool, device=z.device)
            if self.begun is None
            else self.begun.flatten(),
            "front": torch.full((sequences,), -1, dtype=torch.int64, device=z.device),
            "front_best": rows.new_zeros(sequences),  # smallest residual at the front since it is there
            "front_before": rows.new_zeros(sequences),  # the same a window ago
            "lost": torch.zeros(sequences, dtype=torch.bool, device=z.device),
            "waited": torch.zeros(sequences, dtype=torch.int64, device=z.device),
        }

    def step(self, f: Any, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """One step of the method, at each position that is not frozen."""
        view = _Positions(self, f)
        rows = view.enter(z, state["best"], state["best_norm"])
        changed: dict[str, Any] = {"best": view.best, "best_norm": view.best_norm}
        frozen = state["frozen"]
        if self.options is not None:
            changed |= self._look(f, view, rows, state)
            frozen = changed["frozen"]
            if bool(frozen.all()):
                return z, state | changed
        view.moving = ~frozen
        moved, inner = self.method.step(view, rows, state["inner"])
        # a position that overflows, which stays where it was best, must not reach others as 0 * NaN
        moved = torch.where(torch.isfinite(moved).all(1, keepdim=True), moved, view.best)
        moved = torch.where(frozen.unsqueeze(1), rows, moved)
        return view.join(moved), state | changed | {"inner": inner}

    def _look(self, f: Any, view: _Positions, rows: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Which positions are frozen, and which samples are done, or given up (``f.stuck``)."""
        assert self.options is not None
        length, size = self.length or self.positions, torch.linalg.vector_norm(rows, dim=1)
        floor = state["floor"]
        if floor is None:  # at the start; a number where atol was given
            floor = self.options.floor(size + view.norm)
            floor = torch.as_tensor(floor, dtype=size.dtype, device=size.device).expand_as(size)
        tolerance = view.tolerance = floor / self.positions**0.5 + self.options.rtol * size
        met = view.norm <= tolerance
        finite = math.isfinite(float(torch.dot(view.norm, tolerance)))
        if not finite:  # where |z| overflows nothing holds
            met.logical_and_(tolerance < math.inf)
        met.logical_or_(state["frozen"])
        prefix = met.view(-1, length).cummin(1).values
        frozen = prefix.flatten()
        done = frozen.view(f.batch, -1).all(1)
        f.at_rounding = done
        f.stuck = done
        changed = {"frozen": frozen, "floor": floor, "asked": tolerance}
        if self.and_then is None and finite:
            return changed
        # ---- does the first position that is not frozen get anywhere?
        front = prefix.sum(1).clamp_max(length - 1)
        at = torch.arange(len(front), device=rows.device) * length + front
        norm, goal = view.norm[at], tolerance[at]
        if not finite:
            changed["lost"] = state["lost"] | self._first(f, front, ~torch.isfinite(norm))
            f.stuck = done | changed["lost"].view(f.batch, -1).any(1)
        if self.and_then is None:
            return changed
        here = front == state["front"]
        best = torch.where(here, torch.minimum(state["front_best"], norm), norm)
        waited = torch.where(here, state["waited"] + 1, 0)
        due = waited % _WINDOW == 0
        falls = (best / state["front_before"]).log() <= (goal / best).log() * (_WINDOW / _HORIZON)
        given_up = due & here & ~falls & ~prefix.all(1)
        f.stuck = f.stuck | self._first(f, front, given_up).view(f.batch, -1).any(1)
        before = torch.where(due | ~here, best, state["front_before"])
        return changed | {"front": front, "front_best": best, "front_before": before, "waited": waited}

    def _first(self, f: Any, front: Tensor, which: Tensor) -> Tensor:
        """Where several sequences are in one system, those of ``which`` whose ``front`` is the first in time."""
        if len(front) == f.batch:
            return which
        times = front.view(f.batch, -1)
        return which & (times == times.amin(1, keepdim=True)).flatten()

    def select(self, state: dict[str, Any], index: Tensor) -> dict[str, Any]:
        """The state of all positions of these samples."""

        def groups(count: int) -> Tensor:
            return (index.unsqueeze(1) * count + torch.arange(count, device=index.device)).flatten()

        rows, sequences = groups(self.positions), groups(self.positions // (self.length or self.positions))
        of_rows = ("best", "best_norm", "floor", "asked", "frozen")
        kept = {
            name: None if value is None else value.index_select(0, rows if name in of_rows else sequences)
            for name, value in state.items()
            if name != "inner"
        }
        return kept | {"inner": self.method.select(state["inner"], rows)}


class _Silent(Options):
    """Options of a loop that the method stops: a position at which the map is not finite ends no sequence by itself, as it
    would end those before it too."""

    def size(self, rows: Tensor) -> Tensor:
        """Any number above zero in place of one that is not finite."""
        return super().size(rows).nan_to_num(nan=1.0, posinf=1.0)


def _later(callback: Callable[[int, Tensor, Tensor], Any], taken: int) -> Callable[[int, Tensor, Tensor], Any]:
    return lambda step, z, norm: callback(step + taken, z, norm)


class _Positions:
    """``f`` on ``(batch * positions, n / positions)``, as the method inside sees it.

    ``norm``, ``best`` and ``best_norm`` are those of each position, so that safeguards do not look into the future either.
    """

    norm: Tensor
    tolerance: Tensor
    moving: Tensor  # which positions a step moves
    best: Tensor
    best_norm: Tensor
    stuck: Tensor | None = None  # when to end is not for the method to say: what it writes here is not read
    at_rounding: Tensor | None = None
    remark = ""

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

    def products(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """Products with the Jacobian of the residual at ``rows``."""
        A, of_map = self.f.linearize(self.join(rows)), self.f.of_map  # then of the map, whose residual is f(z) - z
        return lambda v: self.split(A.mv(self.join(v))) - (v if of_map else 0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self.f, name):
            raise _OfTheWhole(f"f.{name} is of whole sequences")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class _OfTheWhole(Exception):
    """A method has asked for what cannot be said of positions one by one."""
