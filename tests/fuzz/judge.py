"""Right, refused, wrong, unhelpful or slow."""

from __future__ import annotations

import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .case import Case
from .messy import Mess
from .options import Option

__all__ = ["Verdict", "judge", "limited", "outcome_of_error"]

NAMED = (ik.ConvergenceError, ik.CapabilityError, ik.CapturedTensorError, ik.UnknownNameError)
# relative to the largest entry of the truth; each order of derivative loses about the condition of the problem
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-2, torch.float16: 0.25, torch.bfloat16: 0.5}


class Slow(BaseException):
    """The time of one case is over."""


@dataclass(frozen=True)
class Verdict:
    """``kind``: right, refused, wrong, unhelpful, slow, or none (torch refuses the closed form too)."""

    kind: str
    detail: str = ""
    seconds: float = 0.0


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`Slow` inside after so many seconds of this process's own time."""

    def stop(*_: Any) -> None:
        raise Slow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def judge(trial: Case | Mess | Option, limit: float = 5.0) -> Verdict:
    """Run one and compare it with its truth."""
    if isinstance(trial, Case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                want = trial.want()
            except Exception as error:
                return Verdict("none", _short(error))
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limited(limit):
                kind, detail = _outcome(trial, want) if isinstance(trial, Case) else trial.outcome()
        except Slow:
            kind, detail = "slow", f"longer than {limit} s"
    return Verdict(kind, detail, time.process_time() - begin)


def _outcome(case: Case, want: Tensor) -> tuple[str, str]:
    try:
        got = case.got()
    except Exception as error:
        if _torch_breaks(error, case):
            return "none", _short(error)
        kind, detail = outcome_of_error(error)
        return ("none", detail) if kind == "unhelpful" and _torch_refuses(error, case) else (kind, detail)
    kind, detail = _compare(got, want, case)
    if kind == "wrong" and _torch_is_wrong(got, case):
        return "none", "forward mode is wrong on the closed form"
    return kind, detail


def _torch_breaks(error: Exception, case: Case) -> bool:
    """Is it torch.compile's own assertion where a graph breaks inside ``torch.func.grad``?  Then the closed form, behind
    ``torch.compiler.disable`` as a solve is, or called from behind it as parts are made, must make it too."""

    def is_it(error: Exception) -> bool:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return isinstance(error, AssertionError) and last.endswith("_subclasses/meta_utils.py")

    if not is_it(error) or all(name != "compile" for name, _ in case.levels):
        return False
    for disabled in ("all", "itself"):
        torch.compiler.reset()
        try:
            case.want(disabled=disabled)
        except Exception as other:
            if is_it(other):
                return True
    return False


def _torch_refuses(error: Exception, case: Case) -> bool:
    """Does torch say the same of a closed form whose derivatives all depend on every variable, as those of an equation may?
    (Of ``x * w`` the derivative in ``x`` does not depend on ``x``, and so is neither batched by it nor tracked.)"""
    try:
        case.want(entangled=True)
    except Exception as other:
        return _short(other) == _short(error)
    return False


def _torch_is_wrong(got: Tensor, case: Case) -> bool:
    """Does the solve agree with the closed form once that is differentiated by reverse mode alone?"""
    try:
        return _compare(got, case.want(by_reverse=True), case)[0] == "right"
    except Exception:
        return False


def _compare(got: Tensor, want: Tensor, case: Case) -> tuple[str, str]:
    if got.shape != want.shape:
        return "wrong", f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.is_complex() != want.is_complex():
        return "wrong", f"dtype {got.dtype} instead of {want.dtype}"
    got = got.to(want.dtype)
    scale = max(float(want.abs().max()), 1.0) if want.numel() else 1.0
    error = float((got - want).abs().max()) / scale if want.numel() else 0.0
    tolerance = _TOLERANCE[case.real] * 4 ** max(case.order - 1, 0)
    if error <= tolerance:
        return "right", ""
    zero = "; all zero" if not bool(got.any()) else ""
    return "wrong", f"off by {error:.2g} of {scale:.2g}{zero}"


def outcome_of_error(error: BaseException) -> tuple[str, str]:
    """Refused, if implicitkit itself said so; else unhelpful: the user sees what went wrong inside."""
    if isinstance(error, NAMED):
        return "refused", _short(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename if frames else ""
    own = re.search(r"/(implicitkit|implicitkit_deq|implicitkit_cvxpy)/", last) and "raise" in (frames[-1].line or "")
    if "don't yet support saved tensor hooks" in str(error):  # torch.func inside activation checkpointing
        return "refused", _short(error)
    if own and not isinstance(error, AssertionError):
        return "refused", _short(error)
    where = f" (at {last.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return "unhelpful", _short(error) + where


def _short(error: BaseException) -> str:
    """Type and beginning of the message, without numbers."""
    text = re.sub(r"[-+]?\d[\d.e+-]*", "#", str(error).split("\n")[0])
    return f"{type(error).__name__}: {text[:150]}"
