"""Any solver on causal sequences: one position after the other, with all before it held at their solution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import Evaluations, Layout, Options, Outcome, Solver, System


@dataclass(frozen=True)
@ik.extend.options.adopts("inner", "solves")
class InTurn(Solver):
    r"""Solve ``z_t = f_t(z_{<t}, z_t)`` for ``t = 1, 2, ...``, each by the solver ``inner``, with ``z_{<t}`` held.

    A causal system is block triangular, and this is its forward substitution.  What comes later takes no part in it: zero
    leak by construction, whatever ``inner`` does (one norm over all unknowns, a black box, gradients of ``|F|^2``, which
    carry the future into the past).  Each position is a problem of its own for ``inner``, in which the samples of the batch
    are independent as ever; it holds where ``|r_t| <= atol / \sqrt T + rtol |z_t|``, and then
    ``|r| <= atol + rtol |z|`` for the whole sequence.

    The price: an evaluation moves one position, and the cell is evaluated on all of them, so that evaluations are ``T``
    times those of one position.  ``max_steps`` is the limit at each position, ``solution.steps`` the sum over all.  A sample
    has converged if every position has; else its status is that of the first that has not.  The positions after that
    are solved all the same.

    Shapes: as :class:`PerPosition <implicitkit_deq.PerPosition>`.  Units: those of ``inner``.  Source: forward substitution
    (Ortega & Rheinboldt 1970, section 7.4, nonlinear Gauss-Seidel, which ends after one sweep where the system is
    triangular).

    Args:
        inner: a configured solver for fixed points. sizes: unknowns of one position in each leaf of the state.
        positions: their number, over all sequences of a sample. length: positions of one sequence; ``None``: all of them.

    Raises:
        ik.CapabilityError: with a norm of the user's own, which is one of whole sequences; or ``inner`` refuses.
    """

    inner: Any
    sizes: tuple[int, ...]
    positions: int
    length: int | None = None
    name: ClassVar[str] = "in_turn"

    @property
    def max_size(self) -> int | None:  # type: ignore[override]
        """Unknowns of all positions, each of as many as the inner solver takes."""
        return None if self.inner.max_size is None else int(self.inner.max_size) * (self.length or self.positions)

    def run(self, f: Evaluations, z0: Tensor, options: Options, frozen: Tensor | None = None) -> Outcome:
        """Position by position; those ``frozen``, ``(batch, positions)``, stay as they are."""
        if options.norm is not None:
            raise ik.CapabilityError(
                "a causal sequence is judged position by position, by 2-norms: leave norm= out, or pass causal=False"
            )
        start = f.residual(z0)
        none = torch.zeros_like(z0[:, 0], dtype=torch.int64)
        total = Outcome(z0, torch.linalg.vector_norm(start, dim=1), none, none)
        total.tolerance = torch.zeros_like(total.residual_norm)
        own = dataclasses.replace(options, atol=options.atol / self.positions**0.5)
        for t, columns in enumerate(self._columns(z0.device)):
            solved = self._solved(frozen, t, z0)
            if bool(solved.all()):
                continue
            part = _Position(f, total.z, columns, self.inner.solves)
            watched = dataclasses.replace(own, callback=options.callback and _watched(options.callback, total, columns))
            found = self.inner.run(part.evaluations, total.z.index_select(1, columns), watched)
            f.evaluations += found.evaluations
            f.sample_evaluations += found.sample_evaluations
            old = total.z.index_select(1, columns)
            total.z = total.z.index_copy(1, columns, torch.where(solved.unsqueeze(1), old, found.z.to(z0)))
            total.steps = total.steps + torch.where(solved, 0, found.steps)
            open_ = ~solved & (total.status == int(ik.Status.CONVERGED))
            total.status = torch.where(open_, found.status, total.status)
            total.trace += found.trace[1 if total.trace else 0 :]
            total.message = total.message or found.message
            if found.tolerance is not None:
                total.tolerance = torch.hypot(total.tolerance, found.tolerance.to(total.tolerance))
            if bool((found.status == int(ik.Status.STOPPED)).any()):
                break
        total.residual_norm = torch.linalg.vector_norm(f.residual(total.z), dim=1)
        total.evaluations, total.sample_evaluations = f.evaluations, f.sample_evaluations
        return total

    def _solved(self, frozen: Tensor | None, t: int, z0: Tensor) -> Tensor:
        """In which samples all positions of this time are frozen, ``(batch,)``."""
        if frozen is None:
            return torch.zeros(len(z0), dtype=torch.bool, device=z0.device)
        return frozen.view(len(z0), -1, self.length or self.positions)[:, :, t].all(1)

    def _columns(self, device: torch.device) -> list[Tensor]:
        """For each time, which columns of the packed state are those of its positions (of all sequences of a sample)."""
        length, blocks, offset = self.length or self.positions, [], 0
        for size in self.sizes:
            index = torch.arange(offset, offset + self.positions * size, device=device)
            blocks.append(index.view(-1, length, size))
            offset += self.positions * size
        return [torch.cat([block[:, t].flatten() for block in blocks]) for t in range(length)]


class _Position:
    """The equations of some columns of a system, all others held: a fixed point of its own."""

    def __init__(self, f: Evaluations, z: Tensor, columns: Tensor, solves: str) -> None:
        whole = f.system

        def of(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def some(part: Tensor, held: Tensor, *theta: Tensor) -> Tensor:
                return kernel(held.index_copy(1, columns, part), *theta).index_select(1, columns)

            return some

        start = z.index_select(1, columns)
        dims = whole.row_dims if whole.samples_per_row == 1 else None
        system = System(
            ik.FixedPoint(whole.problem.function, jac_sparsity=None),
            Layout(start, 1),
            of(whole.kernel),
            of(whole.live),
            batch=len(z),
            samples_per_row=1,
            row_dims=None if dims is None else (0, *dims),
            lifted=whole.lifted,
        )
        self.evaluations = Evaluations(system, (z, *f.theta), solves)


def _watched(
    callback: Callable[[int, Tensor, Tensor], Any], total: Outcome, columns: Tensor
) -> Callable[[int, Tensor, Tensor], Any]:
    """A callback that sees all positions, and steps counted on; norms are those of the present position."""
    z, taken = total.z, int(total.steps.max()) if len(total.steps) else 0
    return lambda step, part, norm: callback(step + taken, z.index_copy(1, columns, part), norm)
