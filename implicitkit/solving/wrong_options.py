"""What is said of an option that a solve does not have: where it belongs; of no problem, and of no samples under vmap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.wording import nearest
from implicitkit.problem.base import Problem
from implicitkit.rule.catalogue import rules_with
from implicitkit.solver.catalogue import solvers_with

_OF_PROBLEMS = "the problem"
_ELSEWHERE = {
    "bracket": "ik.root", "constraints": "ik.argmin", "prox": "ik.argmin", "project": "ik.argmin",
    "bounds": "ik.argmin and ik.least_squares", "manifold": "ik.argmin and ik.least_squares", "loss": "ik.least_squares",
    "f_scale": "ik.least_squares", "x_scale": "ik.least_squares", "jac_sparsity": _OF_PROBLEMS, "has_aux": _OF_PROBLEMS,
    "symmetric": _OF_PROBLEMS, "positive_definite": _OF_PROBLEMS,
}  # fmt: skip


def refuse_empty_vmap() -> None:
    """Raise under a ``torch.vmap`` without samples.

    Raises:
        CapabilityError: torch cannot multiply numbers there, nor can a solve.
    """
    if compat.transforms_active() and compat.empty_batch():
        raise CapabilityError(
            "a solve under torch.vmap over an empty batch, where torch's own operations fail too (2 * x of numbers): return "
            "early where the batch is empty, or let the solve carry it (batch_dims=1), which takes an empty one"
        )


def refuse_option(name: str, solve: Callable[..., Any]) -> NoReturn:
    """Raise for the option ``name``: it may be one of another verb or of a part, or misspelt."""
    known = [n for n, p in inspect.signature(solve).parameters.items() if p.kind is not p.VAR_KEYWORD]
    hint = _whose(name)
    near = nearest(name, [*known, *_ELSEWHERE])
    if not hint and near:
        hint = f" Did you mean {near!r}?" + (_whose(near) if near in _ELSEWHERE else "")
    raise TypeError(
        f"solve got an unexpected keyword argument {name!r}.{hint} Options: {', '.join(known[3:])}; options of a "
        "solver or a rule go to it: solver=ik.Anderson(memory=8)"
    )


def refuse_problem(problem: Any) -> NoReturn:
    """Raise for what stands in the place of a problem."""
    if isinstance(problem, type) and issubclass(problem, Problem):
        got = f"the class {problem.__name__}: create an instance first"
    else:
        got = type(problem).__name__ + ("; wrap the function in one" if callable(problem) else "")
    raise TypeError(f"problem must be a Problem such as ik.Root(f) or ik.FixedPoint(f), got {got}")


def _whose(name: str) -> str:
    """A sentence on what has an option of this name; empty: nothing."""
    if name in _ELSEWHERE:
        return f" It is an option of {_ELSEWHERE[name]}."
    for keyword, owners in (("solver", solvers_with(name)), ("rule", rules_with(name))):
        if owners:
            written = next(iter(owners.values()))
            return f" It is an option of {', '.join([*owners][:5])}: {keyword}={written}({name}=...)."
    return ""
