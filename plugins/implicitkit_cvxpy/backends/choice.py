"""Which solver: by name, or the one that fits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp

import implicitkit as ik
from implicitkit_cvxpy.backends import batched, clarabel, daqp, generic, scs
from implicitkit_cvxpy.backends.base import Data, Found, Status
from implicitkit_cvxpy.cones.form import Cones

__all__ = ["Backend", "resolve"]

_OWN: dict[str, Callable[[Data, dict[str, Any]], Found]] = {
    "clarabel": clarabel.solve,
    "scs": scs.solve,
    "daqp": daqp.solve,
    "interior_point": batched.solve,
}
_POLYHEDRAL = ("daqp", "interior_point")
_EXTRA = {"clarabel": "implicitkit[cvxpy]", "scs": "implicitkit[cvxpy]", "daqp": "daqp"}
# What cvxpylayers' documentation passes on to its own back end, in the words of the solvers here.
_FOREIGN = {
    "clarabel": {"eps": "tol_gap_abs", "max_iters": "max_iter"},
    "scs": {"eps": "eps_abs"},
    "daqp": {"eps": "primal_tol", "max_iters": "iter_limit"},
    "interior_point": {"eps": "tol", "max_iters": "max_steps"},
}
_MEANINGLESS = ("mode", "n_jobs_forward", "n_jobs_backward", "acceleration_lookback", "use_indirect")


@dataclass(frozen=True)
class Backend:
    """A solver for programs of one form: ``backend(data) -> Found``.

    Args:
        name: ``"auto"``, a name of ours (lower case), or cvxpy's name of any solver it has installed.
        cones: of the programs. quadratic: may ``P`` be other than zero? curved: may it be definite?
        options: passed to the solver.

    ``"auto"`` takes, for quadratic programs, DAQP if it is installed and they are small and strictly convex, else the
    batched interior-point method; Clarabel for everything else and for whatever those did not solve.
    """

    name: str
    cones: Cones
    quadratic: bool
    curved: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, data: Data) -> Found:
        options = dict(self.options)
        if self.name == "auto":
            return self._auto(data)
        if self.name in _OWN:
            return _OWN[self.name](data, options)
        return generic.solve(data, options, self.name)

    def _auto(self, data: Data) -> Found:
        if not self.cones.polyhedral:
            return clarabel.solve(data, {})
        found = daqp.solve(data, {}) if self._small(data) else batched.solve(data, {})
        doubtful = (found.status != int(Status.CONVERGED)).nonzero().squeeze(1)
        if not len(doubtful):
            return found
        again = clarabel.solve(data.rows(doubtful), {})
        # a certificate of either is taken; a number beats none
        return Found(*(old.index_copy(0, doubtful, new.to(old)) for old, new in zip(found, again, strict=True)))

    def _small(self, data: Data) -> bool:
        small = data.q.shape[1] + data.b.shape[1] <= 500 and data.q.device.type == "cpu"
        return self.curved and small and _installed("daqp")


@functools.lru_cache(maxsize=64)
def _installed(name: str) -> bool:
    if name == "interior_point":
        return True
    if name in _OWN:
        return importlib.util.find_spec(name) is not None
    return name in cp.installed_solvers()


def _cone_names(cones: Cones) -> str:
    present = {
        "second-order": cones.soc,
        "semidefinite": cones.psd,
        "exponential": cones.exp,
        "power": cones.power,
    }
    return ", ".join(name for name, value in present.items() if value) or "linear"


def resolve(solver: Any, options: dict[str, Any], cones: Cones, quadratic: bool, curved: bool, n: int) -> Backend:
    """The solver asked for, checked.

    Raises:
        ValueError: nobody knows a solver of that name. ImportError: it is not installed; the message says how.
        CapabilityError: it cannot take these cones. TypeError: an option that it does not have.
    """
    options = dict(options)
    foreign = options.pop("solve_method", None)
    if foreign is not None and solver in (None, "auto", "DIFFCP"):
        solver = foreign
    if solver is None or solver == "DIFFCP":
        solver = "auto"
    if not isinstance(solver, str):
        raise TypeError(f'solver must be a name such as "auto", "CLARABEL" or cp.SCS, got {type(solver).__name__}')
    name = solver.lower() if solver.lower() in (*_OWN, "auto") else solver.upper()
    known = {*(k.upper() for k in _OWN), "AUTO", *_cvxpy_names()}
    if name.upper() not in known:
        raise ValueError(f"unknown solver {solver!r}; known: {', '.join(sorted(known))}")
    if name not in ("auto",) and not _installed(name):
        extra = _EXTRA.get(name, f"cvxpy[{name}]")
        raise ImportError(f"solver {solver!r} is not installed: pip install '{extra}'")
    if name in _POLYHEDRAL and not cones.polyhedral:
        raise ik.CapabilityError(
            f"solver {solver!r} solves linear and quadratic programs only, and this program has {_cone_names(cones)} cones: "
            'use solver="CLARABEL" (the default) or cp.SCS'
        )
    if name == "daqp" and not quadratic:
        raise ik.CapabilityError(
            "solver 'daqp' needs a strictly convex quadratic objective, and this one is linear: use "
            'solver="interior_point" or "CLARABEL"'
        )
    if name not in _OWN and name != "auto":
        try:
            generic.check(name, n, cones, quadratic)
        except cp.error.SolverError as error:
            why = str(error).rstrip(".")
            form = f"{_cone_names(cones)} cones{', quadratic objective' if quadratic else ''}"
            raise ik.CapabilityError(
                f'solver {solver!r} cannot solve this program ({form}): {why}. Use solver="CLARABEL" (the default)'
            ) from error
    for key in _MEANINGLESS:
        options.pop(key, None)
    words = _FOREIGN.get(name, {})
    options = {words.get(key, key): value for key, value in options.items() if value is not None}
    if name == "auto":
        if unknown := set(options) - {"eps", "max_iters", "verbose"}:
            raise TypeError(
                f"option(s) {', '.join(sorted(unknown))} belong to a particular solver: name it with solver=, "
                "or leave the options out"
            )
        options = {}  # the solution is polished whatever the tolerance
    return Backend(name, cones, quadratic, curved, tuple(sorted(options.items())))


@functools.lru_cache(maxsize=1)
def _cvxpy_names() -> frozenset[str]:
    from cvxpy.settings import (
        CLARABEL,
        CVXOPT,
        ECOS,
        GLOP,
        GLPK,
        GUROBI,
        HIGHS,
        MOSEK,
        OSQP,
        PDLP,
        PIQP,
        PROXQP,
        SCIPY,
        SCS,
        XPRESS,
    )

    names = (CLARABEL, CVXOPT, ECOS, GLOP, GLPK, GUROBI, HIGHS, MOSEK, OSQP, PDLP, PIQP, PROXQP, SCIPY, SCS, XPRESS)
    return frozenset({*names, *cp.installed_solvers()})
