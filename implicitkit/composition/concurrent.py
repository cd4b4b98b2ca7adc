"""Blocks that step at once, each with its own memory, upstream frozen when solved, downstream gated.

In every round each block that has something to do is evaluated once, all at the states at which the round began, so
that the evaluations of a round may run in parallel; then all step.  A sample of a block is solved when its residual is
small **and** the blocks it reads are final, at the very states it was evaluated with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from implicitkit.composition.nodes import Nodes
from implicitkit.composition.stepper import ComponentStepper
from implicitkit.solution import Status
from implicitkit.solver.base import Options


def run(
    steppers: Sequence[ComponentStepper],
    parts: Nodes,
    states: dict[str, Tensor],
    theta: Sequence[Tensor],
    options: Options,
    gate: float,
    trace: list[Tensor],
) -> int:
    """Run blocks, in topological order, until all samples of all have ended; returns the depth.

    Args:
        states: where every node stands; updated. theta: the tensors of the joint system.
        gate: a sample of a block waits while a block it reads has a relative residual above this, or above this times
            its own: to go on would be to follow what still moves.
        trace: gets the norm of all residuals after each round.
    """
    at = {name: stepper for stepper in steppers for name in stepper.block.nodes}
    parents = {id(s): list(dict.fromkeys(at[p] for p in s.block.parents)) for s in steppers}
    seen: dict[int, tuple[Tensor, ...]] = {}  # what a block last read
    depth = rounds = 0
    while any(bool(s.running.any()) for s in steppers):
        movers: list[tuple[ComponentStepper, Tensor]] = []
        longest = 0
        for stepper in steppers:
            if not bool(stepper.running.any()):
                continue
            above = parents[id(stepper)]
            ready, final = _ready(stepper, above, gate)
            if not bool(ready.any()):
                continue
            read = tuple(states[p] for p in stepper.block.parents)
            changed = id(stepper) in seen and any(a is not b for a, b in zip(read, seen[id(stepper)], strict=True))
            first = id(stepper) not in seen
            seen[id(stepper)] = read
            before = stepper.depth
            stepper.evaluate(stepper.block.theta(states, theta) if changed or (first and above) else None)
            stepper.settle(final)
            longest = max(longest, stepper.depth - before)
            movers.append((stepper, ready))
        _step(movers, states)
        depth += longest
        rounds += 1
        norm = torch.stack([torch.linalg.vector_norm(s.norm, dim=1) for s in steppers])
        norm = torch.where(norm < torch.inf, norm, 0).square().sum(0).sqrt()
        trace.append(norm)
        if options.callback is not None and options.callback(rounds, parts.join(states), norm) is True:
            for s in steppers:
                s.status = torch.where(s.running, int(Status.STOPPED), s.status)
    return depth


def _ready(stepper: ComponentStepper, above: Sequence[ComponentStepper], gate: float) -> tuple[Tensor, Tensor]:
    """Which samples of a block have something to do, and of which what it reads is final, ``(batch,)`` each."""
    ready = stepper.running
    final = torch.ones_like(ready)
    for s in above:
        final = final & ~s.running
        relative = s.relative
        ready = ready & (~s.running | ((relative <= gate) & (relative <= gate * stepper.relative)))
    # what is solved for the time being waits for what it reads to become final
    return ready & (final | ~stepper.satisfied), final


def _step(movers: Sequence[tuple[ComponentStepper, Tensor]], states: dict[str, Tensor]) -> None:
    """One step of each block that was evaluated, for the samples that are not solved; then all are seen where they are."""
    for stepper, ready in movers:
        moving = ready & stepper.running & ~stepper.satisfied
        # a method would remember what is not finite: the block waits for what such samples read
        if bool(moving.any()) and not bool(stepper.lost.any()):
            stepper.advance(moving)
    for stepper, _ in movers:
        if stepper.moved:
            stepper.block.scatter(stepper.z, states)
            stepper.moved = False
