"""What the words of a solve say to a solver: tolerances, limits, norms, callbacks, checked and in the solver's own terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import recording
from implicitkit.foundation.autocast import default_tolerance
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import check_call, is_integer
from implicitkit.foundation.trees import Layout
from implicitkit.foundation.wording import kind_of
from implicitkit.problem.base import Problem, Restated
from implicitkit.solution import Record, Status
from implicitkit.solver.base import Options
from implicitkit.solver.norms import matrix_norm


def options_of(
    problem: Problem,
    layout: Layout,
    restated: Restated | None,
    rtol: float | None,
    atol: float | None,
    max_steps: int | None,
    trace: bool,
    callback: Any,
    norm: Any,
    in_chart: bool = False,
    lifts: bool = False,
) -> Options:
    """The options of a solve, checked; ``in_chart``: of one in a chart of a manifold; ``lifts``: where it meets kinks, it is
    to be left to their epigraphs.

    Raises:
        TypeError, ValueError: one is of the wrong type or out of range.
    """
    default = default_tolerance(layout.dtype, layout.device.type, problem.kind.iteration)
    rtol = default if rtol is None else _number("rtol", rtol)
    # in a chart z has no units, and ends at zero, and each begins where the last has ended
    fixed = atol is not None or in_chart
    atol = default if atol is None else _number("atol", atol)
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {tolerance}")
    if max_steps is not None and not (is_integer(max_steps) and max_steps >= 0):
        raise ValueError(f"max_steps must be an integer >= 0 (or None for the solver's default), got {max_steps!r}")
    max_steps = max_steps if max_steps is None else int(max_steps)
    if not isinstance(trace, bool):
        raise TypeError(f"trace must be True or False, got {trace!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable as callback(step, z, residual_norm), got {type(callback).__name__}")
    if callback is not None:
        check_call("callback(step, z, residual_norm)", callback)
    if callable(norm) and (restated is not None or problem.pieces(layout) is not None):
        raise CapabilityError(
            "norm= is a function of something like z, and this problem is judged by more than that (multipliers, or one "
            "node of a composition after another): use 'l2' or 'max'"
        )
    on_trees = callback and _on_trees(callback, layout, restated)
    judged: dict[str, Any] = {"norm": matrix_norm(norm, layout), "atol_is_default": not fixed}
    return Options(rtol, atol, max_steps, trace, on_trees, **judged, lifts=lifts)


@recording.unrecorded()
def asked_for(record: Record, options: Options) -> bool:
    """Is it no failure that some samples have not converged: so many steps were asked for, and nothing else?"""
    ends, status = (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED), record.outcome.status
    if record.truncated:
        return not bool((status == int(Status.NONFINITE)).any())
    return options.rtol == options.atol == 0 and all(Status(int(s)) in ends for s in status.unique())


def _number(name: str, value: Any) -> float:
    """A tolerance as a plain number."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"{name} must be one number for all samples, got a tensor of shape {tuple(value.shape)}")
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r} ({kind_of(value)})")
    return float(value)


def _on_trees(
    callback: Callable[[int, Any, Tensor], Any], layout: Layout, restated: Restated | None
) -> Callable[[int, Tensor, Tensor], Any]:
    """The user's callback, given the state as he knows it (under vmap with the batch in front)."""

    def call(step: int, z: Tensor, norm: Tensor) -> Any:  # copies: what the callback writes into is its own
        z, norm = z.clone(), norm.clone()
        calls = len(z) // layout.batch
        if calls == 1:
            state = layout.unpack(z)
        else:
            state = torch.func.vmap(layout.unpack)(z.reshape(calls, layout.batch, layout.size))
        value = state if restated is None else restated.plain_parts(state, calls)[0]
        return _asks_to_stop(callback(step, value, layout.unpack_batch(norm)))

    return call


def _asks_to_stop(answer: Any) -> bool:
    """Has a callback returned ``True``, as Python, NumPy or torch writes it (``residual_norm.max() < 1e-3``)?  What else one
    returns (a count, a list) is no answer.

    Raises:
        TypeError: the truth of several samples: the solve has one end.
    """
    if not hasattr(answer, "dtype") or str(answer.dtype).rpartition(".")[2] != "bool":
        return answer is True
    if math.prod(answer.shape) != 1:
        raise TypeError(
            f"callback returned {math.prod(answer.shape)} truth values, of shape {tuple(answer.shape)}; it returns True to "
            "stop the solve, of all samples: (residual_norm < 1e-3).all()"
        )
    return bool(answer)
