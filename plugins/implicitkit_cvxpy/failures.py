"""What is said, and raised, when programs of a call were not solved."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import cvxpy as cp
import numpy as np
from torch import Tensor

from implicitkit import Status
from implicitkit_cvxpy.parameters import Declared
from implicitkit_cvxpy.report import ConeSolution, ProgramError

_MEANING = {
    Status.INFEASIBLE: "infeasible, no point satisfies the constraints",
    Status.UNBOUNDED: "unbounded, the objective falls without limit on the constraints",
    Status.INACCURATE: "inaccurate, the solver stopped short of its tolerance (loosen it, try another solver=, or, where "
    "numbers are many orders apart, count in units in which they are of the size one; or there is no solution: 1 / x has an "
    "infimum and no minimum)",
    Status.MAX_STEPS: "iteration limit reached",
    Status.STALLED: "the solver failed numerically",
    Status.NONCONVEX: "not convex, the quadratic part has a negative eigenvalue",
    Status.NONFINITE: "invalid data, NaN or Inf or a violated declaration",
}


def program_error(message: str, report: ConeSolution, samples: tuple[int, ...]) -> ProgramError:
    """A :class:`ProgramError` that ``except cvxpy.SolverError`` catches too, and ``except diffcp.SolverError`` where diffcp
    has been imported (nobody can name its class otherwise): code written for cvxpylayers goes on working."""
    theirs = getattr(sys.modules.get("diffcp"), "SolverError", None)
    error: ProgramError = _caught_as(theirs)(message, report, samples)
    return error


@functools.lru_cache(maxsize=8)
def _caught_as(theirs: type[Exception] | None) -> Any:
    bases = (ProgramError, cp.error.SolverError, *((theirs,) if theirs else ()))
    return type("ProgramError", bases, {"__module__": ProgramError.__module__, "__doc__": ProgramError.__doc__})


def explain(
    report: ConeSolution, wrong: Tensor, lead: tuple[int, ...], declared: Sequence[Declared]
) -> tuple[str, bool]:
    """What went wrong where, and whether a declared property is the cause.

    Args:
        report: of the call. wrong: flags ``(batch, 2 k)``, not finite and declaration violated, for each parameter.
        lead: the batch shape. declared: what is known of the parameters.
    """
    bad = (~report.converged).nonzero().squeeze(1).tolist()
    nonfinite, violated = wrong.tensor_split(2, 1)
    if bool((violated > 0).any()) and not bool((nonfinite > 0).any()):
        i, k = (int(v) for v in (violated > 0).nonzero()[0])
        return f"{_name(i, lead)}: {declared[k].complaint} (by {float(violated[i, k]):.3g})", True
    kinds: dict[str, list[int]] = {}
    for i in bad:
        kinds.setdefault(_MEANING.get(Status(int(report.status[i])), "not solved"), []).append(i)
    listed = "; ".join(f"{meaning}: {_listed(those, lead)}" for meaning, those in kinds.items())
    total = len(report.status)
    count = f"{len(bad)} of {total} programs were not solved by {report.solver}: " if total > 1 else ""
    hint = ' on_failure="nan" lets the other samples through.' if total > len(bad) else ""
    culprits = [d.name for d, bad in zip(declared, (nonfinite > 0).any(0), strict=True) if bad]
    hint = f" NaN or Inf in parameter(s) {', '.join(culprits)}.{hint}" if culprits else hint
    return f"{count}{listed}.{hint}", False


def names(which: Tensor, lead: tuple[int, ...]) -> str:
    """What the programs that are flagged, ``(batch,)``, are called in a batch of shape ``lead``."""
    return _listed(which.nonzero().squeeze(1).tolist(), lead)


def _listed(those: Sequence[int], lead: tuple[int, ...]) -> str:
    return ", ".join(_name(i, lead) for i in those[:6]) + (", ..." if len(those) > 6 else "")


def _name(i: int, lead: tuple[int, ...]) -> str:
    index = np.unravel_index(i, lead) if lead else ()
    return "the program" if not lead else f"sample {index[0] if len(index) == 1 else tuple(map(int, index))}"
