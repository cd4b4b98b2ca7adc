r"""Causal cells: keeping the future out of the past.

A causal cell computes position ``t`` of its state from positions ``<= t`` of state and input; so does its equilibrium, and
so does every Picard iterate.  What a solver returns at a tolerance does not, for three reasons.  Coefficients and step
lengths are chosen for the whole sequence, so that every position moves by numbers that depend on all of them.  The iterate
with the smallest residual of the whole sequence is a choice that looks ahead.  And so is the moment at which the whole
sequence is good enough: even Picard's iteration stops elsewhere when the future changes.  Until convergence, a language
model then sees the words that it is to predict.

With every solver the output at a position is, bit by bit, the same number whatever comes after it in its sequence:

- methods on values of the map (Picard, Anderson, Aitken, Steffensen, Broyden) decide all three position by position
  (:class:`PerPosition`);
- Newton's method with Krylov vectors fits their coefficients prefix by prefix
  (:class:`~implicitkit_deq.causal.prefix_newton.PrefixNewton`), at the price of the same method on the whole sequence;
- any other solver is given one position after the other, those before it held (:class:`InTurn`), at many times the price.

The derivative of a past output by a future input is zero at any tolerance of the backward, and of forward mode: the
Jacobian is block triangular, so that every product, and whatever is combined of them, stays in the past.  Where a derivative
is not zero, an iterative linear solver is as exact as its tolerance says, for the whole sequence together.

One thing is left, and it is no leak: samples that are done are dropped from the batch, and what a matrix product rounds to
may depend on how many rows it has.  A sequence whose *neighbours in the batch* change can so change by rounding, which an
iteration that has not converged may amplify; ``in_dims=None`` keeps all rows, and the same holds bit by bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import options
from implicitkit_deq.causal.in_turn import InTurn
from implicitkit_deq.causal.positions import PerPosition
from implicitkit_deq.causal.prefix_newton import PrefixNewton

__all__ = ["CausalityWarning", "InTurn", "PerPosition", "future_leak", "per_position"]

_FEW = 1024  # unknowns a sample up to which positions are solved in turn, as the last resort


class CausalityWarning(UserWarning):
    """A causal layer solves one position after the other with the solver it was given: many times the evaluations."""


def per_position(solver: Any, state: Any, batch_dims: int = 1, composed: bool = True) -> Any:
    """The solver for a causal cell: one in which no position knows what comes later.

    It solves ``z_t = f_t(z_{<= t})`` for all ``t``.  Units: the solver's own.  Source: this library.

    Args:
        solver: a name or a configured object; ``"auto"`` and ``"relay"``: the plain iteration, which follows a front that
            runs from the first position to the last as no acceleration does, then, for sequences on which it gets nowhere,
            Broyden, Newton's method with Krylov vectors, damped iteration, and up to 1024 unknowns a sample the relay
            itself, position after position.
        state: every leaf ``(batch, positions, ...)``.
        batch_dims: of the solve; 0: all samples are one system, whose positions are those of each of them.
        composed: is a state by names that of a composition, whose nodes ``ik.Blocks`` solves one after the other?

    Raises:
        ValueError: the leaves disagree on the number of positions.

    With a :class:`CausalityWarning` where that takes many times the evaluations.
    """
    if type(batch_dims) is not int or batch_dims not in (0, 1):
        raise ValueError(f"per_position: batch_dims must be 1 or 0 (all samples are one system), got {batch_dims!r}")
    options.check_arguments("per_position", composed=(options.flag(), composed))
    if isinstance(solver, ik.Blocks):
        return _blocks(solver, state, batch_dims, composed)
    leaves = ik.extend.trees.tree_flatten(state)[0]
    for leaf in leaves:
        options.check_arguments("per_position", state=(options.instance("tensors", Tensor), leaf))
    counts = {t.shape[1] if t.ndim > 1 else 0 for t in leaves}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "a causal state has its positions in the first dimension after the batch of every leaf; the shapes are "
            f"{', '.join(str(tuple(t.shape)) for t in leaves)}"
        )
    length = counts.pop()
    positions = length * (1 if batch_dims else len(leaves[0]))
    sizes = tuple((2 if t.is_complex() else 1) * math.prod(t.shape[2:]) for t in leaves)

    # Anderson mixes in every step: what one position does must not decide when the numbers of another are formed
    def alone(method: Any, and_then: PerPosition | InTurn | None = None) -> PerPosition:
        if isinstance(method, ik.Anderson) and method.period is None:
            method = dataclasses.replace(method, period=1)
        return PerPosition(method, sizes, positions, length, and_then)

    one_sequence = positions == length
    if (isinstance(solver, str) and solver in ("auto", "relay")) or solver == ik.Relay():
        last = InTurn(ik.Relay(), sizes, positions, length) if positions * sum(sizes) <= _FEW else None
        damped = alone(ik.Picard(damping=0.5), last)
        newton = alone(PrefixNewton(length), damped) if one_sequence else damped
        return alone(ik.Picard(), alone(ik.Broyden(), newton))
    method = ik.extend.get_solver(solver)
    if isinstance(method, PerPosition | InTurn):
        return method
    if isinstance(method, ik.Method) and (method.solves == "fixed_point" or isinstance(method, ik.Broyden)):
        return alone(method)
    in_turn = InTurn(method, sizes, positions, length)
    prefixes = PrefixNewton.like(method, length) if isinstance(method, ik.NewtonKrylov) and one_sequence else None
    if prefixes is not None:
        return alone(prefixes, in_turn)
    _tell(method, length)
    return in_turn


def _tell(method: Any, length: int) -> None:
    """What it costs that a solver is given one position after the other."""
    name = getattr(method, "name", "") or type(method).__name__
    ik.extend.warn(
        f"solver {name!r} chooses its steps over all positions at once, which would let the future leak into the past: it "
        f"solves a causal layer one position after the other, which takes some {length} times the evaluations of one. "
        '"relay", "picard", "anderson", "broyden" and "newton_krylov" solve all at once and leak nothing',
        CausalityWarning,
    )


def _blocks(solver: ik.Blocks, state: Any, batch_dims: int, composed: bool) -> ik.Blocks:
    """Each node's solver for its own state, one node after the other: in concurrent mode a block would step when those that
    it reads are solved well enough at all positions."""
    if not (composed and isinstance(state, Mapping)):  # no composition: one block
        if not isinstance(solver.inner, Mapping):
            return dataclasses.replace(solver, inner=per_position(solver.inner, state, batch_dims))
        return solver  # refuses the names
    inner = {n: solver.inner.get(n, "anderson") if isinstance(solver.inner, Mapping) else solver.inner for n in state}
    inner = {n: per_position(s, state[n], batch_dims) for n, s in inner.items()}
    return dataclasses.replace(solver, mode="sequential", inner=inner)


def future_leak(layer: Callable[..., Any], x: Tensor, position: int, *more: Any, size: float = 1.0) -> float:
    """How much of the future reaches the past: the largest change of the output at positions ``< position`` when the input
    at positions ``>= position`` changes.  Zero for a causal map, and for a :class:`DEQ` of a causal cell.

    Units: those of the output.  Source: this library.

    Args:
        layer: ``(x, *more) -> (batch, positions, ...)``. x: ``(batch, positions, ...)``, floating point.
        position: where the future begins. size: standard deviation of the change of the input.

    Raises:
        ValueError: ``position`` outside the sequence.
    """
    options.check_arguments(
        "future_leak",
        layer=(options.function("layer(x, *more)"), layer),
        x=(options.instance("a floating-point tensor (batch, positions, ...)", Tensor), x),
        position=(options.at_least(1), position),
        size=(options.positive(), size),
    )
    if not x.is_floating_point() or x.ndim < 2:
        raise ValueError(f"x must be floating point, (batch, positions, ...); got {x.dtype}, shape {tuple(x.shape)}")
    if position >= x.shape[1]:
        raise ValueError(f"position must be in 1..{x.shape[1] - 1}, got {position}")
    other = x.clone()
    other[:, position:] += size * torch.randn_like(other[:, position:])
    with torch.no_grad():
        before, after = layer(x, *more), layer(other, *more)
    pairs = zip(ik.extend.trees.tree_flatten(before)[0], ik.extend.trees.tree_flatten(after)[0], strict=True)
    return max(float((a[:, :position] - b[:, :position]).abs().max()) for a, b in pairs)
