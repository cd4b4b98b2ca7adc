"""Which solver: by name, or the one that fits."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cvxpy as cp

import implicitkit as ik
from implicitkit_cvxpy.backends import clarabel, generic, scs
from implicitkit_cvxpy.backends import quadratic as programs
from implicitkit_cvxpy.backends.base import Data, Found, Status
from implicitkit_cvxpy.backends.options import translate
from implicitkit_cvxpy.cones.form import Cones

_OWN: dict[str, Callable[[Data, dict[str, Any]], Found]] = {
    "clarabel": clarabel.solve,
    "scs": scs.solve,
    "daqp": functools.partial(programs.solve, solver="daqp"),
    "interior_point": functools.partial(programs.solve, solver="interior_point"),
}
_CVXPY = (
    "CLARABEL", "CUCLARABEL", "CUOPT", "CVXOPT", "ECOS", "GLOP", "GLPK", "GUROBI", "HIGHS", "MOREAU", "MOSEK", "MPAX",
    "OSQP", "PDLP", "PIQP", "PROXQP", "QOCO", "SCIPY", "SCS", "XPRESS",
)  # fmt: skip
_CLOSE = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas", "tol_infeas_abs", "tol_infeas_rel"), 1e-14)
_POLYHEDRAL = ("daqp", "interior_point")
_INSTALL = {
    "clarabel": "pip install 'implicitkit[cvxpy]'",
    "scs": "pip install 'implicitkit[cvxpy]'",
    "daqp": "pip install daqp",
    "CUCLARABEL": "it is written in Julia and needs a CUDA GPU: pip install juliacall cupy, and CuClarabel in Julia",
    "CUOPT": "it needs a CUDA GPU: pip install cuopt-cu12",
    "MPAX": "it runs in JAX, on the CPU or a GPU: pip install mpax",
    "MOREAU": "it is given out by its makers on request",
}


@dataclass(frozen=True)
class Backend:
    """A solver for programs of one form: ``backend(data) -> Found``.

    Args:
        name: ``"auto"``, a name of ours (lower case), or cvxpy's name of any solver it has installed.
        cones: of the programs. quadratic: may ``P`` be other than zero?
        options: passed to the solver, in its own words. verbose: the layer prints, as the solver cannot.

    ``"auto"`` takes, for quadratic programs, what ``ik.QuadraticProgram`` takes (the active-set method where they are small
    and DAQP is installed, else the batched interior-point method); Clarabel for everything else, sparse programs too, and
    for whatever those did not solve.
    """

    name: str
    cones: Cones
    quadratic: bool
    options: tuple[tuple[str, Any], ...] = ()
    verbose: bool = False

    def __call__(self, data: Data) -> Found:
        options = dict(self.options)
        if self.name == "auto":
            return self._auto(data, options)
        if self.name in _OWN:
            return _OWN[self.name](data, options)
        return generic.solve(data, options, self.name)

    def closely(self) -> Backend:
        """This solver asked for as much as rounding allows, where that is Clarabel and nobody asked for less: it stops where
        it gets no further."""
        given = dict(self.options)
        if self.name not in ("auto", "clarabel") or {"tol", *_CLOSE} & set(given):
            return self
        return replace(self, name="clarabel", options=(*translate("clarabel", given)[0].items(), *_CLOSE.items()))

    def _auto(self, data: Data, options: dict[str, Any]) -> Found:
        conic, _ = translate("clarabel", options)
        if data.sparse or not self.cones.polyhedral:
            return clarabel.solve(data, conic)
        found = programs.solve(data, options, "qp")
        doubtful = (found.status != int(Status.CONVERGED)).nonzero().squeeze(1)
        if not len(doubtful):
            return found
        again = clarabel.solve(data.rows(doubtful), conic)
        # a certificate of either is taken; a number beats none
        return Found(*(old.index_copy(0, doubtful, new.to(old)) for old, new in zip(found, again, strict=True)))


def takes_dense(solver: Any, options: dict[str, Any]) -> bool:
    """Does the solver that was asked for take dense matrices only?"""
    asked = solver if solver not in (None, "auto", "DIFFCP") else options.get("solve_method")
    return isinstance(asked, str) and asked.lower() in _POLYHEDRAL


@functools.lru_cache(maxsize=64)
def _installed(name: str) -> bool:
    if name == "interior_point":
        return True
    if name in _OWN:
        return importlib.util.find_spec(name) is not None
    return name in cp.installed_solvers()


def _cone_names(cones: Cones) -> str:
    present = {"second-order": cones.soc, "semidefinite": cones.psd, "exponential": cones.exp, "power": cones.power}
    return ", ".join(name for name, value in present.items() if value) or "linear"


def resolve(solver: Any, options: dict[str, Any], cones: Cones, quadratic: bool, n: int) -> Backend:
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
        close = difflib.get_close_matches(str(solver).upper(), sorted(known), 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown solver {solver!r}{meant}; known: {', '.join(sorted(known))}")
    if name not in ("auto",) and not _installed(name):
        how = _INSTALL.get(name, f"pip install 'cvxpy[{name}]'")
        gpu = name in ("CUCLARABEL", "CUOPT", "MPAX", "MOREAU")
        other = '. solver="interior_point" runs on a GPU without it, for quadratic programs' if gpu else ""
        raise ImportError(f"solver {solver!r} is not installed: {how}{other}")
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
    translated, spoken = translate(name, options)
    return Backend(name, cones, quadratic, tuple(sorted(translated.items())), spoken)


@functools.lru_cache(maxsize=1)
def _cvxpy_names() -> frozenset[str]:
    """Continuous solvers that cvxpy has a name for, installed or not."""
    from cvxpy import settings

    return frozenset({*(n for n in _CVXPY if getattr(settings, n, n) == n), *cp.installed_solvers()})
