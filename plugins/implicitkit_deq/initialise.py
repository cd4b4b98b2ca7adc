"""Starting a DEQ where its Jacobian has a stated spectral radius: the start decides whether training gets anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.jacobian import spectral_radius
from implicitkit_deq.layer import DEQ

_WEIGHTS = options.optional(options.instance("parameters, as in [layer.weight]", list, tuple, Iterator))


def scale_to_radius(
    layer: DEQ,
    inputs: tuple[Any, ...],
    radius: float = 0.9,
    *,
    weights: Iterable[Tensor] | None = None,
    tolerance: float = 0.01,
    max_trials: int = 40,
) -> float:
    r"""Scale weights by one common factor until the spectral radius of ``J`` at the equilibrium is ``radius``.

    The radius is the mean over the samples of ``inputs``.  The factor is found by bisection of its logarithm: at each trial
    the layer is solved, and a trial without an equilibrium counts as too large.

    It solves ``mean \rho(J(s W)) = radius`` for the factor ``s``; ``J`` is ``n x n``, one a sample.  ``radius`` is
    dimensionless.  Source: this library; the radius by :func:`spectral_radius` (Arnoldi 1951).

    Args:
        layer: changed in place. inputs: a typical batch, as a tuple. radius: positive.
        weights: what to scale; ``None``: ``cell.recurrent_weights()``.
        tolerance: relative, of the radius reached. max_trials: solves allowed.

    Returns:
        The radius reached.

    Raises:
        ValueError: ``radius`` or the weights do not fit.
        ik.ConvergenceError: no factor was found; the weights are as before.
    """
    options.check_arguments(
        "scale_to_radius",
        layer=(options.instance("a DEQ", DEQ), layer),
        inputs=(options.instance("a tuple, as in (x,)", tuple), inputs),
        radius=(options.positive(), radius),
        tolerance=(options.positive(), tolerance),
        max_trials=(options.at_least(1), max_trials),
    )
    weights = _weights(layer, weights)
    start = [w.detach().clone() for w in weights]

    @torch.no_grad()
    def measure(factor: float) -> float:
        for w, w0 in zip(weights, start, strict=True):
            w.copy_(factor * w0)
        with layer.using(on_failure="ignore"):
            layer(*inputs)
        solution = layer.solution
        assert solution is not None
        if not bool(solution.converged.all()):
            return float("inf")
        return float(spectral_radius(layer.cell, solution.value, inputs).mean())

    training = layer.training
    layer.eval()
    try:
        low, high, factor = 0.0, float("inf"), 1.0
        for _ in range(max_trials):
            reached = measure(factor)
            if abs(reached - radius) <= tolerance * radius:
                return reached
            low, high = (factor, high) if reached < radius else (low, factor)
            factor = 2 * low if high == float("inf") else high / 2 if low == 0.0 else (low * high) ** 0.5
    finally:
        layer.train(training)
    with torch.no_grad():
        for w, w0 in zip(weights, start, strict=True):
            w.copy_(w0)
    raise ik.ConvergenceError(
        f"no factor in {low:.3g} .. {high:.3g} gives the Jacobian a spectral radius of {radius} (within {tolerance:.0%}) at "
        "an equilibrium: a cell that saturates cannot reach every radius, and a solver not every equilibrium; try another "
        "solver, a smaller radius or more of the weights"
    )


def _weights(layer: DEQ, given: Iterable[Tensor] | None) -> list[Tensor]:
    """What to scale: leaves of the graph."""
    options.check_arguments("scale_to_radius", weights=(_WEIGHTS, given))
    if given is None:
        given = layer.cell.recurrent_weights() if isinstance(layer.cell, Cell) else []
    weights = list(given)
    for w in weights:
        options.check_arguments("scale_to_radius", weights=(options.tensor(), w))
    if not weights:
        raise ValueError("which weights multiply the state? The cell does not say (recurrent_weights): pass weights=")
    if not all(w.is_leaf for w in weights):
        raise ValueError(
            "a weight is computed from others: scale before bound_weights or weight_norm, or free_weights first"
        )
    return weights
