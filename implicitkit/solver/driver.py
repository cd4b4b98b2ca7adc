"""The one loop that runs every iterative method, and the one that calls black boxes.

Per sample: convergence is judged by the norm of the problem's residual at the very point that is returned; a sample
that has converged, or whose residual is no longer finite, is frozen, and once a fifth of the rows in work have nothing
left to do they are dropped from all later evaluations (where the system allows it).  The best iterate is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicitkit import trees
from implicitkit.solution import Status
from implicitkit.solver.base import BlackBox, Direct, Found, Method, Strategy
from implicitkit.solver.black_box import PlainFunction
from implicitkit.solver.evaluations import Function
from implicitkit.trees import Layout

__all__ = ["Options", "Outcome", "find", "iterate"]

_DROP = 0.8  # rows are dropped when no more than this share of them is still at work


@dataclass(frozen=True)
class Options:
    """How a solve is run: tolerances (``|F| <= atol + rtol * scale``), limits, what is watched.

    ``start_norm``: ``|F|`` ``(batch,)`` where the whole solve began, if that is not where this solver does.
    """

    rtol: float
    atol: float
    max_steps: int | None = None
    trace: bool = False
    callback: Callable[[int, Tensor, Tensor], Any] | None = None  # (step, packed z, residual norms)
    start_norm: Tensor | None = None


@dataclass
class Outcome:
    """What came of a solve, one entry a sample: ``z (batch, n)``, the rest ``(batch,)``."""

    z: Tensor
    residual_norm: Tensor
    steps: Tensor
    status: Tensor
    evaluations: int = 0
    sample_evaluations: int = 0
    trace: list[Tensor] = field(default_factory=list)
    message: str = ""
    solver: str = ""  # which solver finished, where several took part
    kept: dict[str, Tensor] = field(default_factory=dict)  # what the method keeps of its final state

    @property
    def all_converged(self) -> bool:
        """Did every sample converge?"""
        return not bool((self.status != int(Status.CONVERGED)).any())


def find(solver: Any, f: Function, z0: Tensor, options: Options) -> Outcome:
    """Run any solver."""
    if isinstance(solver, Method):
        return iterate(solver, f, z0, options)
    if isinstance(solver, Strategy):
        return solver.run(f, z0, options)
    if isinstance(solver, Direct):
        return call_direct(solver, f, z0, options)
    return call_black_box(solver, f, z0, options)


class _Judge:
    """Says of each sample whether ``|F| <= atol + rtol * scale``: scale is ``|z|`` for fixed points, else ``|F(z0)|``."""

    def __init__(self, f: Function, options: Options) -> None:
        self.rtol, self.atol = options.rtol, options.atol
        self.relative_to_state = f.problem.kind == "fixed_point"
        self.start_norm = options.start_norm
        self.bound: Tensor | None = None

    def norm(self, residual: Tensor) -> Tensor:
        if residual.dtype in (torch.float16, torch.bfloat16):
            residual = residual.float()
        return torch.linalg.vector_norm(residual, dim=1)

    def tolerance(self, z: Tensor, norm: Tensor) -> Tensor:
        if self.relative_to_state:
            bound = self.norm(z).mul_(self.rtol)
            return bound.add_(self.atol) if self.atol else bound
        if self.bound is None:
            norm = norm if self.start_norm is None else self.start_norm
            self.bound = torch.where(torch.isfinite(norm), norm * self.rtol, 0).add_(self.atol)
        return self.bound

    def select(self, samples: Tensor) -> None:
        if self.bound is not None:
            self.bound = self.bound.index_select(0, samples)


def iterate(method: Method, f: Function, z0: Tensor, options: Options) -> Outcome:
    """``z <- method.step(z)`` until every sample has ended."""
    max_steps = options.max_steps or method.default_max_steps
    batch, judge, z = z0.shape[0], _Judge(f, options), z0
    everything: _Full | None = None  # results in full length, once rows have been dropped
    alive = at_work = batch
    best = z0
    norm = judge.norm(f.residual(z))
    best_norm = torch.full_like(norm, math.inf)
    active = torch.ones(batch, dtype=torch.bool, device=z.device)
    steps = torch.zeros(batch, dtype=torch.int64, device=z.device)
    status = torch.full_like(steps, int(Status.MAX_STEPS))
    state = method.init(f, z)
    traces: list[Tensor] = []
    watched = options.trace or options.callback is not None
    step = 0
    stuck: Tensor | None = None
    while True:
        tolerance = judge.tolerance(z, norm)
        running = (norm > tolerance).logical_and_(norm < math.inf)  # false for NaN
        if at_work < alive:
            running.logical_and_(active)
        if stuck is not None:
            running.logical_and_(~stuck)
        # false for NaN, and for frozen samples, whose norm does not change
        improved = norm < best_norm if method.keeps_best else (norm < math.inf).logical_and_(active)
        left, better = _count(running, improved)
        if left < at_work:
            done = norm <= tolerance
            if better < at_work:  # a sample that has converged is returned where it did
                improved.logical_or_(done.logical_and(active))
                better = _count(improved)[0]
            ended = active.logical_xor(running)
            steps.masked_fill_(ended, step)
            status.masked_fill_(ended, int(Status.CONVERGED))
            if _count(done)[0] < alive - left:
                failed = ended.logical_and_(~done)
                status.masked_fill_(failed, int(Status.NONFINITE))
                if stuck is not None:
                    status.masked_fill_(failed & (norm < math.inf), int(Status.STALLED))
        if better == at_work:  # frozen samples stand at their best
            best, best_norm = z, norm
        elif better:
            best = torch.where(improved.unsqueeze(1), z, best)
            best_norm = torch.where(improved, norm, best_norm)
        active, at_work = running, left
        if watched:
            full_norm = norm if everything is None else everything.merge(norm, "norm")
            if options.trace:
                traces.append(full_norm)
            if options.callback is not None and step > 0:
                full_z = best if everything is None else everything.merge(best, "z")
                if options.callback(step, full_z, full_norm) is True and left:
                    status = torch.where(active, int(Status.STOPPED), status)
                    break
        if left == 0 or step == max_steps:
            break
        if left < alive and f.system.can_select:
            rows = active.view(-1, f.system.samples_per_row).any(1)
            keep = rows.nonzero().squeeze(1)
            if len(keep) <= _DROP * len(rows):
                samples = rows.repeat_interleave(f.system.samples_per_row).nonzero().squeeze(1)
                everything = everything or _Full(batch)
                everything.store(z=best, norm=best_norm, steps=steps, status=status, **_named(method.keep(state)))
                everything.narrow(samples)
                f.residual(z)
                f = f.select(keep, samples)
                judge.select(samples)
                state = method.select(state, samples)
                z, norm, tolerance, best, best_norm, active, steps, status = (
                    f.selected(),
                    *(t.index_select(0, samples) for t in (norm, tolerance, best, best_norm, active, steps, status)),
                )
                alive = len(samples)
        f.active, f.norm, f.tolerance, f.stuck = active, norm, tolerance, None
        f.best, f.best_norm = best, best_norm
        z_next, state = method.step(f, z, state)
        stuck = f.stuck
        z = z_next if left == alive else torch.where(active.unsqueeze(1), z_next, best)
        step += 1
        norm = judge.norm(f.residual(z))
    if left:
        steps = torch.where(active, step, steps)
    kept = method.keep(state)
    if everything is not None:
        everything.store(z=best, norm=best_norm, steps=steps, status=status, **_named(kept))
        kept = {name: everything.values[f"kept {name}"] for name in kept}
        best, best_norm, steps, status = (everything.values[k] for k in ("z", "norm", "steps", "status"))
    best_norm = torch.where(torch.isinf(best_norm), torch.nan, best_norm)
    return Outcome(best, best_norm, steps, status, f.evaluations, f.sample_evaluations, traces, kept=kept)


def _named(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"kept {name}": value for name, value in kept.items()}


def _count(*masks: Tensor) -> list[int]:
    """How many entries hold in each mask, with one synchronisation on a device that needs one."""
    if masks[0].device.type == "cpu":
        return [int(torch.count_nonzero(mask)) for mask in masks]
    return torch.stack(masks).sum(1).tolist()


class _Full:
    """Results of all samples while only some are in work."""

    def __init__(self, batch: int) -> None:
        self.values: dict[str, Tensor] = {}
        self.index: Tensor | None = None  # which samples are in work; None: all

    def store(self, **values: Tensor) -> None:
        for name, value in values.items():
            if self.index is None:
                self.values[name] = value.clone()
            else:
                self.values[name].index_copy_(0, self.index, value)

    def narrow(self, samples: Tensor) -> None:
        self.index = samples if self.index is None else self.index.index_select(0, samples)

    def merge(self, value: Tensor, name: str) -> Tensor:
        assert self.index is not None
        return self.values[name].index_copy(0, self.index, value)


# --------------------------------------------------------------------------------------------------------- black boxes
def call_black_box(solver: BlackBox, f: Function, z0: Tensor, options: Options) -> Outcome:
    """Call a black box on plain tensors, then judge what it returned by evaluating the residual."""
    max_steps = options.max_steps or solver.default_max_steps
    judge = _Judge(f, options)
    start = judge.norm(f.residual(z0))
    bound = judge.tolerance(z0, start)
    message = ""
    z, steps = z0, torch.zeros(z0.shape[0], dtype=torch.int64, device=z0.device)
    # A fixed point's tolerance is relative to the solution, which is not known yet: aim at what is known, judge, and
    # aim again from there if it was too loose.
    for attempt in range(3 if judge.relative_to_state else 1):
        target = judge.tolerance(z + f.residual(z) if judge.relative_to_state else z, start) if attempt == 0 else bound
        z, taken, message = _ask(solver, f, z, target, options, max_steps)
        steps = steps + taken
        norm = judge.norm(f.residual(z))
        bound = judge.tolerance(z, start)
        converged = norm <= bound
        if not bool((~converged & (norm <= target)).any()):
            break
    return _verdict(judge, f, z0, z, start, steps, max_steps, options, message)


def call_direct(solver: Direct, f: Function, z0: Tensor, options: Options) -> Outcome:
    """Call a user's solver on his own pytrees, once per user-level call in the batch, then judge."""
    layout, judge = f.system.layout, _Judge(f, options)
    start = judge.norm(f.residual(z0))
    judge.tolerance(z0, start)
    points, message = [], ""
    for part, args in f.system.user_calls(z0, f.theta):
        try:
            # clones: the solver may write into what it is given
            found = solver.function(*trees.tree_map(_own, (layout.unpack(part), *args)))
        except Exception as error:
            message = f"{solver.name} raised {type(error).__name__}: {error}"
            points.append(part)
            continue
        points.append(layout.pack(_like(found, part, layout, solver.name)).to(part))
    z = torch.cat(points)
    steps = torch.zeros(z0.shape[0], dtype=torch.int64, device=z0.device)
    return _verdict(judge, f, z0, z, start, steps, 1, options, message)


def _own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _like(found: Any, part: Tensor, layout: Layout, name: str) -> Any:
    """What a user's solver returned, as a tree of tensors like ``z0``."""
    if isinstance(found, Found):
        found = found.z
    template, spec = trees.tree_flatten(layout.unpack(part))
    leaves = trees.tree_flatten(found)[0]
    if len(leaves) != len(template):
        raise ValueError(f"{name} returned {len(leaves)} tensor(s), but z0 has {len(template)}")
    converted = [
        torch.as_tensor(x, dtype=t.dtype, device=t.device).detach() for x, t in zip(leaves, template, strict=True)
    ]
    for x, t in zip(converted, template, strict=True):
        if x.shape != t.shape:
            raise ValueError(f"{name} returned shape {tuple(x.shape)} where z0 has {tuple(t.shape)}")
    return trees.tree_unflatten(converted, spec)


def _verdict(
    judge: _Judge,
    f: Function,
    z0: Tensor,
    z: Tensor,
    start: Tensor,
    steps: Tensor,
    max_steps: int,
    options: Options,
    message: str,
) -> Outcome:
    """What a black box returned, judged by its residual; never anything worse than the start."""
    norm = judge.norm(f.residual(z))
    converged = norm <= judge.tolerance(z, start)
    worse = ~converged & ~(norm <= start) & torch.isfinite(start)
    z = torch.where(worse.unsqueeze(1), z0, z)
    norm = torch.where(worse, start, norm)
    status = torch.where(converged, int(Status.CONVERGED), int(Status.STALLED))
    status = torch.where(~converged & (steps >= max_steps) & (steps > 0), int(Status.MAX_STEPS), status)
    status = torch.where(torch.isfinite(norm), status, int(Status.NONFINITE))
    return Outcome(
        z, norm, steps, status, f.evaluations, f.sample_evaluations, [start, norm] if options.trace else [], message
    )


def _ask(
    solver: BlackBox, f: Function, z0: Tensor, target: Tensor, options: Options, max_steps: int
) -> tuple[Tensor, Tensor, str]:
    """One call (or one call a sample) with the target as an absolute tolerance where it is relative to the state."""
    absolute = f.problem.kind == "fixed_point" or options.start_norm is not None

    def tolerances(sample: slice) -> dict[str, float]:
        if absolute:
            return {"rtol": 0.0, "atol": float(target[sample].min())}
        return {"rtol": options.rtol, "atol": options.atol}

    batch = z0.shape[0]
    message = ""
    steps = torch.zeros(batch, dtype=torch.int64, device=z0.device)
    if solver.batch == "native":
        found = _guarded(solver, PlainFunction(f, z0), z0, **tolerances(slice(None)), max_steps=max_steps)
        z, steps, message = _accept(found, z0), steps + found.steps, found.message
    elif solver.batch == "joint" or batch == 1:
        one_system = PlainFunction(f, z0, joint=True)
        found = _guarded(solver, one_system, z0.reshape(-1), **tolerances(slice(None)), max_steps=max_steps)
        z, steps, message = _accept(found, z0), steps + found.steps, found.message
    else:
        z = z0.clone()
        for i in range(batch):
            with _one_sample(f, z, i) as one:
                found = _guarded(solver, one, z0[i], **tolerances(slice(i, i + 1)), max_steps=max_steps)
            z[i] = _accept(found, z0[i])
            steps[i] = found.steps
            message = found.message or message
    return z, steps, message


@contextlib.contextmanager
def _one_sample(f: Function, z: Tensor, i: int) -> Iterator[PlainFunction]:
    """``f`` of sample ``i`` alone: on its own rows where the system allows it, else inside the whole batch."""
    per_row = f.system.samples_per_row
    row, inside = divmod(i, per_row)
    if not f.system.can_select:
        yield PlainFunction(f, z.clone(), slot=i)
        return
    system, theta = f.system.select(torch.tensor([row], device=z.device), f.theta)
    part = Function(system, theta, f.solves)
    try:
        yield PlainFunction(part, z[row * per_row : (row + 1) * per_row].clone(), slot=inside)
    finally:
        f.evaluations += part.evaluations
        f.sample_evaluations += part.sample_evaluations


def _guarded(solver: BlackBox, f: PlainFunction, z0: Tensor, **keywords: Any) -> Found:
    """Call the black box; an exception of its own is a failure to converge, one of the user's function surfaces."""
    try:
        return solver(f, z0.detach().clone(), **keywords)
    except Exception as error:
        if f.error is not None:
            raise f.error from None
        return Found(z0, message=f"{solver.name or 'the solver'} raised {type(error).__name__}: {error}")


def _accept(found: Found, z0: Tensor) -> Tensor:
    """The point found, as a tensor like ``z0``."""
    z = found.z if isinstance(found.z, Tensor) else torch.as_tensor(found.z, dtype=z0.dtype)
    if z.numel() != z0.numel():
        raise ValueError(
            f"the solver returned a point of shape {tuple(z.shape)} for a start of shape {tuple(z0.shape)}"
        )
    return z.detach().to(dtype=z0.dtype, device=z0.device).reshape(z0.shape)
