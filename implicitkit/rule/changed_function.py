"""Is the function that a derivative evaluates still the one that was solved?

A derivative by the implicit function theorem evaluates the user's function again, at the solution, after the solve.  If
something that the function uses besides its tensors has changed by then (a buffer or a constant that was written to, a mask
drawn anew; not what names are bound to, ``late_binding.py``), that is the derivative of another function, which this point
does not solve.  The residual there says so: it must still be what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.errors import CapturedTensorError, ChangedFunctionError
from implicitkit.foundation.operators import Operator
from implicitkit.lifting.lifted import Lifted, check_leaves
from implicitkit.lifting.watch import Cuts
from implicitkit.solution import Record
from implicitkit.solver.base import Options, Outcome
from implicitkit.system import System

_CURE = (
    "Take the derivative before the change, bind a new tensor to the name instead of writing into this one, or pass it as "
    "an argument: ik.solve(problem, z0, (x, k))"
)
_ROUNDED = 64.0  # units in the last place of the largest number: what putting a point into its set moves it by
_FACTOR = 10.0  # how many times what was asked for, or reached, the residual may be: sums are taken in another order


def refuse_changed(
    lifted: Lifted, outcome: Outcome, options: Options, out: Tensor, A: Operator, z: Tensor, samples: Tensor | None
) -> None:
    r"""Raise unless ``F(z)``, evaluated for a derivative, is what it was when ``z`` was found.

    Equal norms pass at once.  Otherwise ``|F| <= 10 max(|F| recorded, atol + rtol * scale)`` passes, with the scale
    ``max(|A z|, |z|)`` of the residual near ``z`` (``|z|`` where the iteration is ``z <- f(z)``) and ``rtol`` no finer than
    rounding: the saved point then solves the present function as well as it was asked to solve the first.  So does one that
    rounding of its largest numbers tells from it (points are put into their set by that), whatever that means to small ones.

    Args:
        out: ``F(z)``, ``(batch, n)``. A: its Jacobian. samples: which to judge, ``None``: all.

    Raises:
        ChangedFunctionError: it is another function.
    """
    now = options.size(out.detach())
    recorded = outcome.residual_norm
    if now.dtype == recorded.dtype and torch.equal(now, recorded):
        return
    if lifted.random or getattr(outcome, "unsolved", None):
        return
    recorded = recorded.to(now)
    if recorded.shape != now.shape:  # under transforms, many directions at once
        recorded, samples = recorded.nan_to_num(0.0).max().expand_as(now), None
    judged = torch.isfinite(recorded)
    if samples is not None:
        judged &= samples
    if bool((now[judged] <= _FACTOR * recorded[judged]).all()):
        return
    norm = lambda t: options.size(t.detach().to(now.dtype))  # noqa: E731
    with torch.no_grad():
        scale = norm(A.mv(z.detach()))
    scale = torch.maximum(scale, norm(z)) if A.fixed_point else scale
    eps = torch.finfo(z.dtype).eps
    accepted = options.atol + max(options.rtol, 32 * eps) * scale
    if bool((judged & ~(now <= _FACTOR * accepted)).any()):
        largest = z.detach().abs().amax(1, keepdim=True)
        signs = seeded.signs(1, z.shape[1], seed=0).to(z)
        with torch.no_grad():
            accepted = torch.maximum(accepted, norm(A.mv(_ROUNDED * eps * largest * signs)))
    bad = judged & ~(now <= _FACTOR * torch.maximum(recorded, accepted))
    if bool(bad.any()):
        worst = int(torch.where(bad, now.nan_to_num(torch.inf), -1.0).argmax())
        raise ChangedFunctionError(_changed(float(recorded[worst]), float(now[worst]), worst, len(now), lifted))


def refuse_other_tensors(
    lifted: Lifted, out: Tensor, known: Sequence[Tensor], z: Tensor, nodes: Sequence[Any] | None = None
) -> None:
    """Raise if ``F(z)``, evaluated for a derivative, depends on more than ``z`` and the tensors that are ``known``;
    ``nodes``: of the graph of ``out``, where they are known.

    Raises:
        ChangedFunctionError: since the solve a name was bound to another tensor. CapturedTensorError: the function branches.
    """
    try:
        check_leaves(out, known, z, nodes)
    except CapturedTensorError as error:
        if found := _changes(lifted):
            raise ChangedFunctionError(
                "the function is no longer the one that was solved: for the derivative it uses a tensor that requires grad "
                f"and that it did not use then. Changed since the solve: {'; '.join(found)}. {_CURE}"
            ) from error
        raise


def refuse_cut(system: System, z: Tensor, theta: Any) -> None:
    """Raise if nothing that the function returns is tracked because tracking was switched off inside it.

    Raises:
        CapturedTensorError: under ``no_grad`` or behind ``detach`` no derivative can be seen.
    """
    point = z.detach().requires_grad_()
    with torch.enable_grad(), Cuts() as cuts:
        system.kernel(point, *theta)
    if cuts.seen:
        raise CapturedTensorError(
            "the function's output depends neither on z nor on its arguments as far as autograd can see: it is evaluated "
            "under torch.no_grad (or inference_mode), or detaches what it is given, so that its derivative would be lost. "
            "Take the decorator or the context away; the solver switches tracking off where it does not need it"
        )


def refuse_hidden(record: Record) -> None:
    """Raise if a map of which autograd says ``J = 0`` changes with ``z`` all the same.

    Raises:
        CapturedTensorError: ``z`` is detached inside the function, so that the derivative of the solution would be that of
            one application of the map.
    """
    system, z, theta = record.system, record.outcome.z, record.theta
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        here = system.live(point, *theta)
        if here.requires_grad and torch.autograd.grad(here.sum(), point, allow_unused=True)[0] is not None:
            return
    with torch.no_grad():
        here, there = (system.live(y, *theta) for y in (z, torch.where(z != 0, 1.25 * z, 0.25)))
    if bool(((here != there) & torch.isfinite(there)).any()):
        raise CapturedTensorError(
            "the function changes with z, but autograd sees no z in it (z.detach(), z.data, torch.no_grad()?): the "
            "derivative would be that of one application of the function, not of its fixed point. Give it z as it is; the "
            'solver is never differentiated. For the derivative of one application there is rule="one_step"'
        )


def _changes(lifted: Lifted) -> list[str]:
    """What the function uses that is not as it was when it was lifted, in words (as far as it was noted)."""
    return lifted.bindings.changes() if lifted.bindings is not None else []


def _changed(recorded: float, now: float, sample: int, batch: int, lifted: Lifted) -> str:
    where = f" (sample {sample})" if batch > 1 else ""
    found = _changes(lifted)
    return (
        f"the function is no longer the one that was solved: its residual at the solution was {recorded:.3g}, and now, for "
        f"the derivative, it is {now:.3g}{where}. "
        + (f"Changed since the solve: {'; '.join(found)}. " if found else "")
        + "Something that it uses changed between the solve and this derivative (a tensor that was written to, a buffer or "
        f"a mask), or it draws numbers anew at every call. {_CURE}"
    )
