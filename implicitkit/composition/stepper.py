"""One block in work: its method, its samples, and what is known of its residual at the point where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from implicitkit.composition.nodes import Component
from implicitkit.solution import Status
from implicitkit.solver.base import Options
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.verdict.judge import Judge
from implicitkit.solver.verdict.last_step import by_the_last_step

RUNNING = -1  # the status of a sample still in work


class ComponentStepper:
    """Advances one block by steps of its own method, each node judged by its own residual.

    Node ``k`` of a sample is solved when ``|f_k - z_k| <= atol + rtol |z_k|``.  A block that is swept (Gauss-Seidel) is
    stepped on the residual of the sweep; once that is small, the maps themselves are evaluated at the point, and the sample
    goes on, with a smaller goal for the sweep, if they are not.

    Attributes:
        z: the states ``(batch, n)``. norm: of each node's residual at ``z``, ``(batch, nodes)``; of the sweep until the
            maps themselves have been evaluated. tolerance: what it must come down to.
        status: ``RUNNING`` or a :class:`~implicitkit.Status`, ``(batch,)``. steps: ``(batch,)``.
        evaluations: calls of each node. depth: calls that followed one another.
    """

    def __init__(
        self, block: Component, method: Method, z: Tensor, theta: Sequence[Tensor], options: Options, confirm: bool
    ) -> None:
        self.block, self.method, self.options, self.confirm = block, method, options, confirm
        self.f = Evaluations(block.system, theta, method.solves)
        self.z = self.start = self.best = z
        batch = z.shape[0]
        self.limit = options.max_steps or method.default_max_steps
        self.status = torch.full((batch,), RUNNING, dtype=torch.int64, device=z.device)
        self.steps = torch.zeros_like(self.status)
        self.candidate = torch.zeros_like(self.status, dtype=torch.bool)  # solved as far as the sweep can tell
        self.margin = torch.ones(batch, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        self.best_norm = torch.full_like(self.margin, torch.inf)
        self.norm = torch.full((batch, len(block.nodes)), torch.inf, dtype=self.margin.dtype, device=z.device)
        self.tolerance = torch.zeros_like(self.norm)
        self.judge = Judge(self.f, options)
        self._floor: float | Tensor | None = None  # what is small whatever the states' size
        self._last: tuple[Tensor, Tensor] | None = None  # z and F a step ago
        self._steep = torch.zeros_like(self.candidate)  # what the last step says of samples that are done
        self._best_nodes = self.norm  # of each node at the best point
        self.extra = dict.fromkeys(block.nodes, 0)  # calls to confirm
        self.depth = 0
        self.taken = 0
        self.moved = False  # has z changed since somebody cleared this?
        self._counted = 0
        self._state: object = None
        self._begun = False

    # ------------------------------------------------------------------------------------------------------- what is so
    @property
    def running(self) -> Tensor:
        """Samples still in work, ``(batch,)``."""
        return self.status == RUNNING

    @property
    def evaluations(self) -> dict[str, int]:
        """Calls of each node's map."""
        return {name: self.f.evaluations + extra for name, extra in self.extra.items()}

    @property
    def sample_evaluations(self) -> int:
        """Calls of all nodes' maps, each times the samples it was for."""
        return self.f.sample_evaluations * self.block.cost + sum(self.extra.values()) * self.block.system.batch

    @property
    def relative(self) -> Tensor:
        """The largest ``|f_k - z_k| / |z_k|`` over the nodes, ``(batch,)``: infinite until known, and for zero states."""
        return (self.norm / self._lengths(self.z)).nan_to_num(nan=torch.inf).amax(1)

    @property
    def lost(self) -> Tensor:
        """Samples in work that have no residual, ``(batch,)``: those whose surroundings may still give them one."""
        return self.running & ~(_norm(self.norm) < torch.inf)

    @property
    def satisfied(self) -> Tensor:
        """Would the samples be solved if nothing they read changed any more?"""
        return (self.norm <= self.tolerance * self.margin.unsqueeze(1)).all(1)

    # ------------------------------------------------------------------------------------------------------- what is done
    def evaluate(self, theta: Sequence[Tensor] | None = None) -> None:
        """Evaluate at ``z``; ``theta``: what the block reads has changed."""
        if theta is not None:
            self.f.theta = tuple(theta)
            self.z = self.z.view_as(self.z)  # the function remembers points by identity
        residual = self.f.residual(self.z)
        self.depth += self.block.depth * (self.f.evaluations - self._counted)
        self._counted = self.f.evaluations
        self._judge(residual)

    def settle(self, final: Tensor | bool = True) -> None:
        """Say which samples are done, those whose surroundings are ``final`` ``(batch,)``."""
        total = _norm(self.norm)
        finite = total < torch.inf
        running = self.running
        passed = running & self.satisfied & final
        if self.confirm and len(self.block.nodes) > 1:
            self.candidate = passed
            if bool(passed.any()) and (self.taken >= self.limit or not bool((running & ~passed & finite).any())):
                self._confirm(passed)
        else:
            self.status = torch.where(passed, int(Status.CONVERGED), self.status)
        self._look_back(running & (self.status == int(Status.CONVERGED)))
        self.status = torch.where(running & ~finite & final, int(Status.NONFINITE), self.status)
        still = self.running & final if final is not True else self.running
        improved = total < self.best_norm if self.method.keeps_best else finite
        better = still & improved | passed
        self.best = torch.where(better.unsqueeze(1), self.z, self.best)
        self.best_norm = torch.where(better, total.to(self.best_norm.dtype), self.best_norm)
        self._best_nodes = torch.where(better.unsqueeze(1), self.norm, self._best_nodes)
        if self.taken >= self.limit:
            self.status = torch.where(self.running, int(Status.MAX_STEPS), self.status)
        failed = running & ~self.running & (self.status != int(Status.CONVERGED))
        if bool(failed.any()):
            known = self.best_norm < torch.inf
            point = torch.where(known.unsqueeze(1), self.best, torch.where(finite.unsqueeze(1), self.z, self.start))
            self.z = torch.where(failed.unsqueeze(1), point, self.z)
            self.norm = torch.where((failed & known).unsqueeze(1), self._best_nodes, self.norm)
            self.moved = True

    def advance(self, moving: Tensor) -> None:
        """One step of the samples ``moving`` ``(batch,)`` from where they were evaluated."""
        self._tell(moving)
        f = self.f
        if not self._begun:
            self._state, self._begun = self.method.init(f, self.z), True
        self._last = self.z, f.residual(self.z)
        z_next, self._state = self.method.step(f, self.z, self._state)
        moving = moving & ~self.candidate
        if f.stuck is not None:
            self.status = torch.where(moving & f.stuck, int(Status.STALLED), self.status)
        self.z = torch.where(moving.unsqueeze(1), z_next, self.z)
        self.steps = self.steps + moving
        self.taken += 1
        self.moved = True

    def review(self) -> None:
        """Say which of the samples that are done have run away: how small a residual is shows no solution there."""
        self.status = self.judge.review(self.z, _norm(self.norm), self.status, self._steep)

    # -------------------------------------------------------------------------------------------------------- details
    def _look_back(self, claims: Tensor) -> None:
        if self._last is not None and bool(claims.any()) and self.judge.asks_for_strides():
            point, before = self._last
            said = by_the_last_step(True, self.z, self.f.residual(self.z), point, before, claims)
            self._steep = torch.where(claims, said, self._steep)

    def _tell(self, moving: Tensor) -> None:
        """What a method may ask of its function before a step."""
        f = self.f
        f.active, f.norm, f.tolerance, f.stuck = moving, _norm(self.norm).to(self.z.dtype), self._bound(), None
        f.at_work = int(moving.count_nonzero())
        known = self.best_norm < torch.inf
        f.best = torch.where(known.unsqueeze(1), self.best, self.z)
        f.best_norm = torch.where(known, self.best_norm.to(f.norm.dtype), f.norm)

    def _judge(self, residual: Tensor) -> None:
        self.norm, lengths = self._lengths(residual), self._lengths(self.z)
        if self._floor is None:
            self.judge.tolerance(self.z, _norm(self.norm))
            floor = self.judge.floor
            self._floor = floor.unsqueeze(1) if isinstance(floor, Tensor) else floor
        self.tolerance = self._floor + self.options.rtol * lengths

    def _lengths(self, z: Tensor) -> Tensor:
        """The 2-norm of each node's part, ``(batch, nodes)``."""
        parts = z.split(self.block.sizes, 1)
        z_dtype = torch.float32 if z.dtype in (torch.float16, torch.bfloat16) else z.dtype
        return torch.stack([torch.linalg.vector_norm(p, dim=1, dtype=z_dtype) for p in parts], 1)

    def _bound(self) -> Tensor:
        return _norm(self.tolerance).to(self.z.dtype)

    def _confirm(self, passed: Tensor) -> None:
        """Evaluate the maps themselves: all but the first, which the sweep has evaluated at this very point."""
        block, f = self.block, self.f
        rest = block.nodes[1:]
        kernel = block.parts.kernel(rest, block.nodes + block.parents, live=True)
        outer = len(block.parents)
        read = [t.reshape(-1, block.parts.sizes[p]) for t, p in zip(f.theta[:outer], block.parents, strict=True)]
        own = self.z.split(block.sizes, 1)
        values = kernel((*own, *read), f.theta[outer:])
        for name in rest:
            self.extra[name] += 1
        self.depth += 1
        residual = torch.cat([v - z for v, z in zip(values, own[1:], strict=True)], 1)
        swept, goal = self.norm, self.tolerance
        self._judge(torch.cat([f.residual(self.z)[:, : block.sizes[0]], residual], 1))
        good = (self.norm <= self.tolerance).all(1)
        self.status = torch.where(passed & good, int(Status.CONVERGED), self.status)
        again = passed & ~good
        self.candidate = torch.zeros_like(passed)
        if bool(again.any()):
            excess = (self.norm / self.tolerance.clamp_min(torch.finfo(self.norm.dtype).tiny)).amax(1)
            reached = (swept / goal.clamp_min(torch.finfo(goal.dtype).tiny)).amax(1)
            self.margin = torch.where(again, 0.5 * reached / excess, self.margin)


def _norm(lengths: Tensor) -> Tensor:
    return torch.linalg.vector_norm(lengths, dim=1)
