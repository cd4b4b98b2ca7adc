"""Options of solvers by name: each is understood by the solver that gets it, or refused; none is dropped.

Two words mean the same for every solver that has such a thing, under any of their common spellings: how accurate (``eps``,
``tol``) and how long (``max_iter``, ``max_iters``, ``max_steps``).  All other names are those of the solver.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from dataclasses import dataclass
from typing import Any

from implicitkit import extend

_ACCURACY = ("eps", "tol")
_LIMIT = ("max_iter", "max_iters", "max_steps")


@dataclass(frozen=True)
class Words:
    """What a solver calls its accuracy and its limit; does it print; and all names that it has (``None``: it will say)."""

    accuracy: tuple[str, ...] = ()
    limit: str = ""
    prints: bool = True
    names: frozenset[str] | None = None


def _clarabel() -> frozenset[str]:
    import clarabel

    return frozenset(name for name in dir(clarabel.DefaultSettings()) if not name.startswith("_") and name != "default")


def _daqp() -> frozenset[str]:
    import daqp

    data = {"H", "f", "A", "bupper", "blower", "sense", "break_points", "is_avi", "primal_start", "dual_start"}
    return frozenset(inspect.signature(daqp.solve).parameters) - data


_SCS = frozenset(
    [
        "max_iters",
        "eps_abs",
        "eps_rel",
        "eps_infeas",
        "alpha",
        "rho_x",
        "scale",
        "adaptive_scale",
        "normalize",
        "acceleration_lookback",
        "acceleration_interval",
        "time_limit_secs",
        "verbose",
        "write_data_filename",
        "log_csv_filename",
        "use_indirect",
        "mkl",
        "gpu",
        "linear_solver",
    ]
)
_CONIC = {  # of the solvers that are called through cvxpy: the words that differ
    "OSQP": Words(("eps_abs", "eps_rel"), "max_iter"),
    "ECOS": Words(("abstol", "reltol", "feastol"), "max_iters"),
    "CVXOPT": Words(("abstol", "reltol", "feastol"), "max_iters"),
    "PIQP": Words(("eps_abs", "eps_rel"), "max_iter"),
    "PROXQP": Words(("eps_abs", "eps_rel"), "max_iter"),
    "QOCO": Words(("abstol", "reltol"), "max_iters"),
    "CUCLARABEL": Words(("tol_gap_abs", "tol_gap_rel", "tol_feas"), "max_iter"),
}
_SILENT = {  # cvxpylayers' words for its own back end that have nothing to act on here, and why
    "n_jobs_forward": "there is one loop, in one thread",
    "n_jobs_backward": "all systems are solved at once",
    "mode": "there is one derivative, the exact one",
}
_EXACT = ("dense", "lsqr", "lsmr")  # modes of diffcp that compute it


@functools.lru_cache(maxsize=32)
def _words(solver: str) -> Words:
    if solver == "clarabel":
        return Words(("tol_gap_abs", "tol_gap_rel", "tol_feas"), "max_iter", True, _clarabel())
    if solver == "scs":
        return Words(("eps_abs", "eps_rel"), "max_iters", True, _SCS)
    if solver == "daqp":
        return Words(("primal_tol",), "iter_limit", False, _daqp())
    if solver in ("interior_point", "auto"):
        return Words(("tol",), "max_steps", False, frozenset({"tol", "max_steps"}))
    return _CONIC.get(solver, Words())


def translate(solver: str, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The options in the solver's own words, and whether the layer is to print in its place.

    Args:
        solver: ``"auto"``, a solver of ours in lower case, or cvxpy's name of one.
        options: as given; ``None`` is "not given".

    Raises:
        TypeError: names that the solver does not have, or one thing said twice.
        ValueError: a ``mode`` of diffcp that is another derivative; an accuracy or a limit that is no positive number.
    """
    words = _words(solver)
    own: dict[str, Any] = {}
    given = {name: value for name, value in options.items() if value is not None}
    _announce({name: given.pop(name) for name in _SILENT if name in given})
    for name in (*_ACCURACY, *_LIMIT):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"solver_args: {name} must be a positive number, got {value!r}")
    spoken = False if words.prints else bool(given.pop("verbose", False))
    for group, meaning in ((_ACCURACY, words.accuracy), (_LIMIT, (words.limit,) if words.limit else ())):
        said = [name for name in group if name in given and (words.names is None or name not in words.names)]
        said += [name for name in group if name in given and name not in said]
        if len(said) > 1:
            raise TypeError(f"solver_args says the same thing twice: {', '.join(said)}; give one of them")
        if said and meaning:
            own |= dict.fromkeys(meaning, given.pop(said[0]))
        elif said and words.names is None:
            raise TypeError(
                f"solver {solver!r} is called through cvxpy and has no option {said[0]!r}: use its own word"
            )
    unknown = sorted(set(given) - words.names) if words.names is not None else []
    if unknown:
        raise TypeError(_refusal(solver, unknown, words))
    return own | given, spoken


def _refusal(solver: str, unknown: list[str], words: Words) -> str:
    names = ", ".join(unknown)
    if "warm_start" in unknown:
        return "warm_start is no option of a solver but an argument of the call: layer(..., warm_start=True)"
    known = sorted({*(words.names or ()), "eps", "max_iters", "verbose"})
    if solver != "auto":
        close = [match for name in unknown for match in difflib.get_close_matches(name, known, 2)]
        listed = f"did you mean {' or '.join(close)}?" if close else f"it has: {', '.join(known)}"
        return f"solver {solver!r} has no option(s) {names}; {listed}"
    owners = [s.upper() for s in ("clarabel", "scs", "daqp") if _has(s, unknown[0])]
    example = f' (solver="{owners[0]}" has {unknown[0]})' if owners else ""
    return (
        f"option(s) {names} belong to a particular solver: name it with solver={example}, or leave them out; with any "
        "solver there are eps (or tol), max_iters and verbose"
    )


def _has(solver: str, name: str) -> bool:
    try:
        return name in (_words(solver).names or ())
    except ImportError:
        return False


def _announce(silent: dict[str, Any]) -> None:
    """Say what is accepted without an effect."""
    mode = silent.get("mode")
    if mode is not None and mode not in _EXACT:
        raise ValueError(
            f'mode={mode!r} of diffcp is another derivative than the exact one: here degenerate="smooth" gives a derivative '
            "that says something at the vertex of a linear program"
        )
    if silent:
        reasons = "; ".join(f"{name}: {_SILENT[name]}" for name in silent)
        extend.warn(f"solver_args of cvxpylayers without an effect here ({reasons}): leave them out", UserWarning)
