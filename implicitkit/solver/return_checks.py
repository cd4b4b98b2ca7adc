"""What a solver or a step hands back, looked at before it is used: the culprit is named, not the operation that trips."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.wording import in_a_solver, kind_of
from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.base import Found, Outcome
from implicitkit.solver.qp.polish import QPPoint

_INSIDE = ("x", "value", "root", "params")  # where other libraries' results have their point


def point(found: Any, like: Tensor, name: str) -> Tensor:
    """What the solver ``name`` returned in place of ``like``, in its precision; real where that is and nothing is lost.

    Raises:
        TypeError: it is no tensor, array, number or list of numbers; or complex where ``like`` is real.
    """
    if found is None:
        raise TypeError(f"{name} returned None: a solver returns the solution, like z0")
    inside = next((a for a in _INSIDE if hasattr(found, a)), "")
    if not isinstance(found, Tensor) and inside:  # what another library's solver returns
        raise TypeError(f"{name} returned {kind_of(found)}: a solver returns the point itself, its .{inside}")
    if isinstance(found, Tensor) and found.is_meta:
        raise TypeError(f"{name} returned a tensor on the meta device, which has no numbers in it")
    wrong = f"{name} returned {kind_of(found)}: a solver returns tensors, arrays or numbers, like z0"
    if not isinstance(found, (Tensor, int, float, complex, list, tuple)) and not hasattr(found, "__array__"):
        raise TypeError(wrong)
    more = "what else it knows goes into ik.Found"
    if isinstance(found, tuple) and len(found) > 1 and like.ndim and getattr(found[0], "shape", None) == like.shape:
        raise TypeError(f"{wrong} ({more})")
    kind = None if hasattr(found, "__array__") else torch.complex128
    try:
        z = torch.as_tensor(found, dtype=kind, device=like.device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{wrong} ({more})") from error
    if z.is_complex() and not like.is_complex():
        if int(torch.count_nonzero(z.imag)):
            largest = float(z.imag.abs().max())
            raise TypeError(f"{name} returned complex numbers (imaginary parts up to {largest:.3g}) where z0 is real")
        z = z.real
    return z.to(like)


def outcome(found: Any, z0: Tensor, name: str) -> Outcome:
    """What ``run`` of the solver ``name``, which is somebody else's, returned for ``z0``; where ``z`` or ``|F|`` is not
    finite, nothing has converged.

    Raises:
        TypeError: it is no :class:`Outcome`, or something in it is no tensor with a row for each sample.
    """
    if not isinstance(found, Outcome):
        raise TypeError(f"{name}.run must return an implicitkit.extend.Outcome; it returned {kind_of(found)}")
    for part in ("z", "residual_norm", "steps", "status"):
        value, shape = getattr(found, part), z0.shape if part == "z" else z0.shape[:1]
        if not isinstance(value, Tensor) or value.shape != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise TypeError(
                f"{name}.run must return an Outcome whose {part} is a tensor {tuple(shape)}; it is of {got}"
            )
        if part in ("steps", "status") and (value.dtype == torch.bool or value.is_floating_point()):
            said = "ik.Status numbers, 0 for CONVERGED" if part == "status" else "whole numbers"
            raise TypeError(f"{name}.run must return an Outcome whose {part} are {said}; they are {value.dtype}")
    lost = (found.status == int(Status.CONVERGED)) & ~(found.residual_norm.isfinite() & found.z.isfinite().all(1))
    found.z, found.status = found.z.to(z0), torch.where(lost, int(Status.NONFINITE), found.status)
    return found


def steps_of(found: Found, name: str) -> Any:
    """The steps that a black box says it took: one number, or one a sample.

    Raises:
        ValueError: they are no whole numbers from 0 on.
    """
    try:
        counts = torch.as_tensor(found.steps, device="cpu")
        whole = not counts.is_floating_point() and not counts.is_complex() and not bool((counts < 0).any())
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise ValueError(f"{name} returned Found(steps={found.steps!r}): that is how many it took, a whole number >= 0")
    return found.steps


def stepped(method: Any, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The pair that the step of a method returns, which a tensor of two rows would pass for.

    Raises:
        TypeError: it is no pair, or its first is no tensor like ``z``.
    """
    found, name = in_a_solver(method.step, f, z, state), type(method).__name__
    if not isinstance(found, tuple) or len(found) != 2:
        got = f"a tuple of {len(found)}" if isinstance(found, tuple) else kind_of(found)
        raise TypeError(
            f"{name}.step must return a pair, z and the new state (() where it keeps none); it returned {got}"
        )
    new = found[0]
    if not isinstance(new, Tensor):
        raise TypeError(
            f"{name}.step must return a new z, a tensor like the one it was given; it returned {kind_of(new)}"
        )
    if new.shape != z.shape or new.dtype != z.dtype:
        raise TypeError(
            f"{name}.step must return a new z like the one it was given, {tuple(z.shape)} of {z.dtype}; it returned "
            f"{tuple(new.shape)} of {new.dtype}"
        )
    return found


def kept(found: Any, rows: int, name: str) -> dict[str, Tensor]:
    """What ``Method.keep`` returned of a state of so many samples.

    Raises:
        TypeError: it is no dictionary, or something in it is no tensor with a row for each sample.
    """
    if not isinstance(found, dict):
        raise TypeError(f"{name}.keep must return a dictionary of tensors; it returned {kind_of(found)}")
    for key, value in found.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise TypeError(f"{name}.keep must return tensors with one row a sample, {rows} here: {key!r} is of {what}")
    return found


def programs_point(solver: Any, data: QPData, tol: float, max_steps: int) -> QPPoint:
    """What ``find`` of a solver of quadratic programs returns, in the precision of the programs.

    Raises:
        TypeError: it is no :class:`QPPoint`, or something in it is no tensor with a row for each program.
    """
    found, batch = in_a_solver(solver.find, data, tol, max_steps), len(data.q)
    wanted = (*(tuple(t.shape) for t in (data.q, data.b, data.h)), (batch,), (batch,))
    parts = tuple(found) if isinstance(found, QPPoint) else ()
    got = tuple(tuple(t.shape) if isinstance(t, Tensor) else kind_of(t) for t in parts)
    if got != wanted:
        raise TypeError(
            f"{type(solver).__name__}.find must return ik.extend.QPPoint(z, y, lam, status, steps), tensors of shapes "
            f"{', '.join(map(str, wanted))}; it returned {', '.join(map(str, got)) or kind_of(found)}"
        )
    return QPPoint(*(t.to(data.q) for t in parts[:3]), *parts[3:])
