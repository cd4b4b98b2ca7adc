"""The generic way: solved and differentiated by implicitkit's rule, to any order and under any transform.

A program is solved in the user's units first, and then, where its numbers ask for it, in units near the solution.

:func:`~implicitkit_cvxpy.polish.finish` alone says what is solved: a second judge would now and then find nothing there,
and a sample that is called solved would have a derivative of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit_cvxpy.backends import Backend, Data, Status
from implicitkit_cvxpy.equilibration import balanced
from implicitkit_cvxpy.kkt import ConeKKT
from implicitkit_cvxpy.polish import Told, finish
from implicitkit_cvxpy.program import ConeProgram, one_batch
from implicitkit_cvxpy.scaled_residual import LOST, UNEVEN, roughness
from implicitkit_cvxpy.units import Units

_LIMIT = 4  # rounds in units near the last solution


class _Round(NamedTuple):
    """All samples solved once: the programs ``data`` in ``units`` (``None``: the user's) have the solution ``z``, which is
    ``w`` in the user's units; ``told`` has it plain."""

    data: Data
    units: Units | None
    z: Tensor
    w: Tensor
    converged: Tensor
    told: Told


@dataclass(frozen=True)
class Rounds:
    """How the programs of one call are solved.

    Args:
        problem: the optimality conditions. rule: the linear solver of derivatives. backend: finds a point.
    """

    problem: ConeProgram
    rule: ConeKKT
    backend: Backend

    def __call__(
        self, data: Data, flags: Tensor, start: Tensor | None = None, known: Told | None = None
    ) -> tuple[Tensor, Tensor, Told]:
        """Solve, from ``start`` if there is one.

        Args:
            data, flags: the programs, at any level of transforms, and positive where a sample's are invalid.
            known: what :func:`~implicitkit_cvxpy.polish.finish` has found in the user's units.

        Returns:
            ``w (batch, n + m)``, differentiable; which samples converged, ``(batch,)``; and what is told of all samples of
            all transforms, on plain tensors in the user's units.
        """
        origin = torch.zeros(len(flags), data.q.shape[1] + data.b.shape[1], dtype=torch.float64, device=flags.device)
        now = first = self._round(data, flags, None, origin, start, known)
        before = torch.full_like(data.q[:, 0].detach(), LOST)
        for _ in range(_LIMIT):
            if not bool(now.told.uneven.any()):
                break
            rough = self._rough(now)
            gained = rough < before
            # units near the solution; where those have gained nothing units of the data, from which it goes on as at first
            units = self._nearer(data, now.w, ~gained)
            units = units.only(rough > UNEVEN, now.units or Units.users(self.problem.dual, data))
            before = torch.where(gained, rough, torch.inf)
            near = torch.where((rough <= LOST).unsqueeze(1), units.of(now.w.detach()), 0)
            now = self._round(units.apply(data), flags, units, near)
        return now.w, now.converged, now.told._replace(data=first.told.data, wrong=first.told.wrong)

    def _rough(self, now: _Round) -> Tensor:
        """The roughness of each sample, ``(batch,)``, whatever transforms surround the call."""

        def ask(*parts: Tensor) -> Tensor:
            lead = parts[1].shape[:-1]
            *matrices, z = (t.flatten(0, len(lead) - 1) for t in parts[:5])
            units = [t.flatten(0, len(lead) - 1) for t in parts[5:]]
            given = Units.of_tensors(self.problem.dual, *units) if units else None
            return roughness(self.problem, _with(now.data, matrices), z, given).reshape(lead)

        found: Tensor = extend.constants(ask, *now.data[:4], now.z, *(now.units.tensors if now.units else ()))
        return found

    def _nearer(self, data: Data, w: Tensor, lost: Tensor) -> Units:
        """Units near the solution, or where ``w`` is ``lost`` ``(batch,)``, those of the data."""
        dual = self.problem.dual

        def ask(*parts: Tensor) -> tuple[Tensor, ...]:
            lead = parts[1].shape[:-1]
            *matrices, z, nowhere = (t.flatten(0, len(lead) - 1) for t in parts)
            given = _with(data, matrices)
            if given.sparse:
                return tuple(t.unflatten(0, lead) for t in Units.of_rows(dual, given).tensors)
            units = Units.users(dual, given).nearer(given, z)
            nowhere = nowhere | (z == 0).all(1)
            if bool(nowhere.any()):
                units = balanced(dual, given).only(nowhere, units)
            return tuple(t.unflatten(0, lead) for t in units.tensors)

        return Units.of_tensors(dual, *extend.constants(ask, *data[:4], w, lost))

    def _round(
        self,
        data: Data,
        flags: Tensor,
        units: Units | None,
        near: Tensor,
        start: Tensor | None = None,
        known: Told | None = None,
    ) -> _Round:
        """Solve the programs as they are in these units; tried first is ``start``, or what is not zero of ``near``, which is
        in these units."""
        given = () if units is None else units.tensors

        def find(z0: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Told]:
            matrices, wrong, measures = parts[:4], parts[4], parts[5:]
            inside = Units.of_tensors(self.problem.dual, *measures) if measures else None
            programs, first = _with(data, matrices), start if inside is None else z0
            told = known or finish(self.problem, self.backend, programs, wrong, first, inside)
            z = told.w
            return z, told._replace(w=z if inside is None else inside.back(z))

        solver = _Finish(find, 5 + len(given), [])
        solution = ik.solve(
            self.problem,
            near,
            (*data[:4], flags, *given),
            solver=solver,
            rule=ik.Implicit(linear_solver=self.rule),
            batch_dims=1,
            on_failure="ignore",
        )
        if isinstance(solver.told[0], Exception):
            raise solver.told[0]
        z = solution.value
        w = z if units is None else units.back(z)
        return _Round(data, units, z, w, solution.converged, solver.told[0])


@dataclass(frozen=True, eq=False)
class _Finish(extend.Solver):
    """``find`` as a solver whose word is taken, of a start and the first ``count`` tensors of the problem (behind them are
    those that cones keep); ``told`` gets what it says beside the point, or the error that it raised, which is for when the
    levels of ``torch.func`` are closed."""

    find: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Told]]
    count: int
    told: list[Any]
    name: ClassVar[str] = "cone program"
    solves: ClassVar[str] = "root"
    general: ClassVar[bool] = True

    def run(self, f: extend.Evaluations, z0: Tensor, options: extend.Options) -> extend.Outcome:
        """Solve all samples of all transforms at once."""
        try:
            z, told = self.find(z0, one_batch(f.system, f.theta[: self.count]))
        except Exception as error:
            self.told.append(error)
            status = torch.full_like(z0[:, 0], int(Status.NONFINITE), dtype=torch.int64)
            return extend.Outcome(z0, torch.full_like(z0[:, 0], torch.inf), torch.zeros_like(status), status)
        self.told.append(told)
        nowhere = (told.status != int(Status.CONVERGED)) & (z == 0).all(1)  # no point, no derivative
        return extend.Outcome(z, told.norm, told.steps, torch.where(nowhere, int(Status.NONFINITE), told.status))


def _with(data: Data, matrices: Sequence[Tensor]) -> Data:
    P, q, A, b = matrices
    return data._replace(P=P, q=q, A=A, b=b)
