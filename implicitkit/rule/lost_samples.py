r"""What a derivative evaluates in the place of samples that have none: numbers of one that was solved.

A sample that is lost (its data are NaN, or it has overflowed) has the cotangent ``u_i = 0``, and adds nothing to the
derivative ``-sum_i (dF_i/d\theta)^T u_i`` of what the whole batch shares.  But where ``F_i`` is NaN its derivative is NaN as
well, and so is ``0 * NaN``.  So the function is evaluated at

    z_i <- z_j,   \theta_i <- \theta_j   for lost i, with j a sample that was solved

which changes no other sample, since samples are independent, and no derivative, since ``u_i = 0``.  ``\theta_i`` is what of
the tensors belongs to sample ``i`` alone: slices of what ``torch.vmap`` maps over, rows that ``in_dims`` names; else what
leaves all other samples finite when it is made NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.foundation import compat, recording
from implicitkit.lifting.reach import named_tensors
from implicitkit.linear.base import LinearSolution
from implicitkit.solution import Record, Status
from implicitkit.system import System

_EXPLAINED = 0.5  # share of a right-hand side that may be left of a sample that failed, before its derivative is zero
_NOWHERE = (Status.DIVERGED, Status.UNBOUNDED, Status.NONFINITE)


def is_lost(status: Tensor, norm: Tensor, on_failure: str) -> Tensor:
    """Which samples have derivative zero, by how they ended and by ``|F|``: under ``"nan"`` all that failed, else those near
    no solution, and those whose residual is no number."""
    failed = status != int(Status.CONVERGED)
    if on_failure == "nan":
        return failed
    lost = failed & ~torch.isfinite(norm)
    for nowhere in _NOWHERE:
        lost = lost | (status == int(nowhere))
    return lost


def status_of(record: Record, rows: int) -> Tensor:
    """How the solve of the sample behind each of ``rows`` right-hand sides ended."""
    status: Tensor = record.outcome.status
    return status.repeat(rows // len(status)) if rows % len(status) == 0 else status.new_zeros(rows)


def lost_rows(record: Record, on_failure: str, rows: int) -> Tensor | None:
    """Right-hand sides of samples whose ``z`` is near no solution, ``(rows, 1)``; ``None`` where all have converged.

    Where a failure does not raise and ``z`` has run away or overflowed, there is no derivative, and the sample adds nothing
    to that of what the whole batch shares.
    """
    if on_failure not in ("warn", "ignore") or record.outcome.all_converged:
        return None
    norm = record.outcome.residual_norm
    norm = norm.repeat(rows // len(norm)) if rows % len(norm) == 0 else norm.new_zeros(rows)
    return is_lost(status_of(record, rows), norm, on_failure).unsqueeze(1)


def without_lost(
    system: System, record: Record, on_failure: str, z: Tensor, theta: Sequence[Tensor], figures: Tensor | None
) -> tuple[Tensor, list[Tensor]] | None:
    """``z`` and ``theta`` with a solved sample in the place of the lost ones; ``None`` where no sample has a derivative.

    Args:
        system: of which ``z (batch, n)`` and ``theta`` are, at any level of transforms.
        figures: ``|F|``, steps and status of each sample at that level, ``(batch, 3)``; ``None``: those of the record.
    """
    outcome = record.outcome
    lost_of = lambda t: is_lost(t[:, 2], t[:, 0], on_failure)  # noqa: E731
    plain = is_lost(outcome.status, outcome.residual_norm, on_failure)
    if record.system is None or not recording.holds(plain.any()):
        return z, list(theta)
    if recording.holds(plain.all()):
        return None
    if record.stand_in is None:
        with compat.at_level_of(outcome.z), recording.unrecorded():
            record.stand_in = _StandIn(record, plain)
    lost = plain if figures is None else lost_of(figures)
    stand_in: _StandIn = record.stand_in
    return stand_in.instead(system, z, theta, lost)


class _StandIn:
    """A sample that was solved, with its own part of the tensors.

    Attributes:
        z: its state, ``(n,)``. own: its part of each tensor; ``None`` of what samples share. dims: where the rows of samples
            begin in a tensor of the innermost system; ``None`` where a slice of ``torch.vmap`` is one sample's.
    """

    def __init__(self, record: Record, lost: Tensor) -> None:
        system, theta, z = record.system, record.theta, record.outcome.z
        solved = record.outcome.status == int(Status.CONVERGED)
        chosen = int((solved if bool(solved.any()) else ~lost).nonzero()[0])
        origin = system.origin
        self.batch_shape = tuple(origin.layout.batch_shape)
        self.z = z[chosen].detach()
        parts, row = _slices(system, theta, chosen)
        self.dims: list[int | None] = [None] * len(theta)
        self.own: list[Tensor | None] = [None] * len(theta)
        if not self.batch_shape:
            self.own = [p.detach() if _is_mapped(system, k) else None for k, p in enumerate(parts)]
            return
        self.dims = list(origin.row_dims or self._likely(origin.lifted.theta))
        for k, d in enumerate(self.dims):
            if d is not None:
                self.own[k] = self._part(parts[k], d, row)
        if origin.row_dims is None:
            self._keep_what_leaves_no_trace(system, z, theta, lost, row)

    def _part(self, t: Tensor, d: int, row: int) -> Tensor:
        """What belongs to one sample of a tensor."""
        return t.detach().flatten(d, d + len(self.batch_shape) - 1).select(d, row)

    def instead(self, system: System, z: Tensor, theta: Sequence[Tensor], lost: Tensor) -> tuple[Tensor, list[Tensor]]:
        """``z`` and ``theta`` of a system with this one in the place of the lost samples."""
        new = [
            t if o is None else self._placed(system, k, t, lost, o)
            for k, (t, o) in enumerate(zip(theta, self.own, strict=True))
        ]
        return torch.where(lost.unsqueeze(1), self.z, z), new

    def _placed(self, system: System, k: int, t: Tensor, lost: Tensor, own: Tensor) -> Tensor:
        """Tensor ``k`` of a system, ``t``, with ``own`` in the place of the lost samples' parts: of what several batches
        share where the sample is lost in all of them."""
        parent = system.parent
        if parent is None:
            d = self.dims[k]
            return torch.where(lost.squeeze(0), own, t) if d is None else self._in_rows(t, d, lost, own)
        lost, dim = lost.view(-1, parent.batch), system.dims[k]
        if dim is None:
            return self._placed(parent, k, t, lost.all(0), own)
        inner = lambda t, lost: self._placed(parent, k, t, lost, own)  # noqa: E731
        return torch.func.vmap(inner, in_dims=(dim, 0), out_dims=dim)(t, lost)

    def _in_rows(self, t: Tensor, d: int, lost: Tensor, own: Tensor) -> Tensor:
        b = self.batch_shape
        row = own.reshape(*own.shape[:d], *(1,) * len(b), *own.shape[d:])
        return torch.where(lost.reshape(*b, *(1,) * (t.ndim - d - len(b))), row, t)

    def _likely(self, theta: Sequence[Tensor]) -> list[int | None]:
        """Tensors that begin with the dimensions of the batch, parameters apart."""
        b = self.batch_shape
        return [0 if tuple(t.shape[: len(b)]) == b and not isinstance(t, nn.Parameter) else None for t in theta]

    def _keep_what_leaves_no_trace(
        self, system: System, z: Tensor, theta: Sequence[Tensor], lost: Tensor, row: int
    ) -> None:
        """Only such tensors whose rows, made NaN, leave all other samples finite, and replaced, where they were.
        What the function captures and autograd does not track is no tensor of the system: stand-ins of it are looked up."""
        lifted, others = system.origin.lifted, ~lost
        everywhere = lost.view(-1, system.origin.batch).all(0)
        held = [
            t for _, t in named_tensors(lifted.function) if not compat.tracked(t) and id(t) not in self._ids(lifted)
        ]
        held = [t for t, d in zip(held, self._likely(held), strict=True) if d == 0 and t.is_floating_point()]
        own, captured = list(self.own), [self._part(t, 0, row) for t in held]

        def residual(z: Tensor, theta: Sequence[Tensor]) -> Tensor:
            with compat.untracked(), compat.own_graphs():
                found: Tensor = system.residual(z, *theta)
                return found.detach()[others]

        def put(chosen: Sequence[int], mark: bool) -> Tensor:
            """The residual of the others with these in the place of the lost ones, or NaN."""
            made = [
                torch.full_like(o, torch.nan) if mark and o is not None and o.is_floating_point() else o
                for o in (*own, *captured)
            ]
            self.own = [made[k] if k in chosen else None for k in range(len(own))]
            lifted.constants = {
                id(t): self._in_rows(t, 0, everywhere, o)
                for k, (t, o) in enumerate(zip(held, made[len(own) :], strict=True), len(own))
                if k in chosen and o is not None
            }
            return residual(*self.instead(system, z, theta, lost))

        before = residual(z, theta)
        likely = [k for k, o in enumerate((*own, *captured)) if o is not None]

        def stay(chosen: Sequence[int]) -> bool:
            """Are the others finite beside NaN, and beside a stand-in where they were, to the last bit?"""
            finite = bool(torch.isfinite(put(chosen, True)).all())
            return finite and (lifted.random or torch.equal(put(chosen, False), before))

        keep = likely if stay(likely) else [k for k in likely if stay([k])]
        if not (torch.equal(put(keep, False), before) or lifted.random):
            put([], False)

    def _ids(self, lifted: Any) -> set[int]:
        """The identities of the tensors that are explicit."""
        return {id(t) for t in (*lifted.theta, *lifted.captured)}


def _is_mapped(system: System, k: int) -> bool:
    """Does ``torch.vmap`` map over a tensor at any level?"""
    return system.parent is not None and (system.dims[k] is not None or _is_mapped(system.parent, k))


def _slices(system: System, theta: Sequence[Tensor], sample: int) -> tuple[list[Tensor], int]:
    """The tensors of the innermost system that a sample of the whole belongs to, and which of its samples that is."""
    tensors: list[Any] = list(theta)
    while system.parent is not None:
        which, sample = divmod(sample, system.parent.batch)
        tensors = [t if d is None else t.select(d, which) for t, d in zip(tensors, system.dims, strict=True)]
        system = system.parent
    return tensors, sample


def without_derivative(answer: LinearSolution, b: Tensor, lost: Tensor, status: Tensor) -> LinearSolution:
    """Zero for the ``lost`` samples ``(rows, 1)``, and for those that failed (``status``) and whose linear solve explains
    less than half of ``b``."""
    failed = status != int(Status.CONVERGED)
    explained = answer.residual_norm <= _EXPLAINED * torch.linalg.vector_norm(b, dim=1)  # false for NaN
    zero = lost.squeeze(1) | (failed & ~(explained & torch.isfinite(answer.x).all(1)))
    return answer._replace(x=torch.where(zero.unsqueeze(1), 0, answer.x), converged=answer.converged | zero)


def or_nan(answer: LinearSolution, b: Tensor, status: Tensor) -> Tensor:
    """NaN where the linear solve failed; zero for samples that ask for nothing or have no solution: they disturb no
    other."""
    nothing = (b == 0).all(1) | (status != int(Status.CONVERGED))
    x = torch.where(answer.converged.unsqueeze(1), answer.x, torch.nan)
    return torch.where(nothing.unsqueeze(1), 0, x)
