"""The only module that knows how cvxpy works inside.

cvxpy's public functions solve one program; a layer needs the map from parameters to program data, and that lives in
classes whose attributes move between minor releases.  Everything of that kind is read here, once, into plain arrays
(:class:`CanonicalProgram`); ``tests/plugins/cvxpy/test_cvxpy_contract.py`` holds each assumption, and :data:`TESTED` is the
range of releases it was held for.
"""

from __future__ import annotations

import types
import warnings
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import scipy.sparse as sp
from cvxpy.utilities import scopes

from implicitkit_cvxpy.cones.form import Cones

TESTED = ("1.9", "1.10")
"""Releases ``>= TESTED[0]`` and ``< TESTED[1]`` are known to fit."""

Array = Any


@dataclass(frozen=True)
class Entry:
    """One block of the parameter vector: ``log`` of it if asked, of these entries (row-major) of the user's parameter."""

    parameter: int
    index: Array
    log: bool


@dataclass(frozen=True)
class Recovery:
    """How a variable is read off: ``coefficient * vector[index]``, row-major, of ``x`` or (``dual``) of ``y``; entries with
    index -1 are zero; ``exp``: the exponential of it (geometric programs)."""

    shape: tuple[int, ...]
    index: Array
    coefficient: Array
    dual: bool
    exp: bool


@dataclass(frozen=True)
class CanonicalProgram:
    """``minimise x'Px/2 + q'x subject to b - A x in K``, each datum a sparse matrix times ``(parameters, 1)``.

    ``P`` ``(n * n, k + 1)`` and ``A`` ``(m * n, k + 1)``, row-major, ``q`` ``(n, k + 1)``, ``b`` ``(m, k + 1)``: COO arrays.
    ``auxiliary``: columns of ``x`` that cvxpy introduced.
    """

    n: int
    cones: Cones
    P: sp.coo_array
    q: sp.coo_array
    A: sp.coo_array
    b: sp.coo_array
    entries: tuple[Entry, ...]
    variables: tuple[Recovery, ...]
    auxiliary: Array


def tested_version(version: str = cp.__version__) -> bool:
    """Is this release of cvxpy one that the contract tests were run with?"""

    def key(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    return key(TESTED[0]) <= key(version) < key(TESTED[1])


def is_dpp(thing: Any, gp: bool = False) -> bool:
    """Is a problem, or an expression, DPP, with ``quad_form(x, P)`` of a parameter ``P`` allowed where programs allow it?"""
    if isinstance(thing, cp.Problem):
        return bool(thing.is_dpp("dgp") if gp else thing.is_dpp(quad_form_dpp="qp"))  # type: ignore[call-arg]
    with scopes.quad_form_dpp_scope():
        return bool(thing.is_dgp(dpp=True) if gp else thing.is_dcp(dpp=True))


def affine_in_parameters(expression: Any) -> bool:
    """Is an expression without variables an affine function of its parameters?"""
    with scopes.dpp_scope():
        return bool(expression.is_affine())


def canonicalise(
    problem: cp.Problem, parameters: list[Any], variables: list[Any], gp: bool = False
) -> CanonicalProgram:
    """Reduce a DPP problem once, for all values of its parameters.

    What is reduced is a problem of our own, of the same objective and constraints: cvxpy keeps the reduction in the problem
    and would update it by parameter values, of which there are none.  The user's problem, its cache, and the values of
    variables and parameters are not touched.
    """
    if not tested_version():
        warnings.warn(
            f"implicitkit_cvxpy was tested with cvxpy >= {TESTED[0]}, < {TESTED[1]}; this is {cp.__version__}. If a layer "
            "fails to build, install a tested release",
            RuntimeWarning,
            stacklevel=3,
        )
    with scopes.quad_form_dpp_scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cvxpy thinks of solve times and deprecated spellings
        own = cp.Problem(problem.objective, problem.constraints)
        data, chain, inverse = own.get_problem_data("CLARABEL", gp=gp, canon_backend="COO", solver_opts={})
    program = data["param_prob"]
    if program.dir_cones or program.lower_bounds is not None or program.upper_bounds is not None:
        raise NotImplementedError("this release of cvxpy hands bounds or direct cones to the solver; see TESTED")
    dims, n = program.cone_dims, int(program.x.size)
    if tuple(dims.pnd):
        raise NotImplementedError(
            "power cones of more than three variables (cp.PowConeND) are not supported: write the constraint with "
            "cp.PowCone3D or cp.geo_mean"
        )
    cones = Cones(
        int(dims.zero),
        int(dims.nonneg),
        tuple(map(int, dims.soc)),
        tuple(map(int, dims.psd)),
        int(dims.exp),
        tuple(map(float, dims.p3d)),
    )
    m, width = cones.size, int(program.q.shape[1])
    A, b = _constraints(program.A, m, n, width)
    q = sp.coo_array(program.q)
    keep = q.row < n  # the last row is the constant of the objective
    q = sp.coo_array((q.data[keep], (q.row[keep], q.col[keep])), shape=(n, width))
    P = sp.coo_array((n * n, width)) if program.P is None else sp.coo_array(program.P)
    mapping = {key: ids[-1] for key, ids in chain.compose_var_id_map().items()}
    owned = np.zeros(n, dtype=bool)
    for variable in problem.variables():
        start = program.var_id_to_col.get(mapping.get(variable.id, variable.id))
        if start is not None:
            owned[start : start + _reduced_size(variable)] = True
    primal = {v.id for v in problem.variables()}
    recovered = tuple(
        _primal(v, program.var_id_to_col, mapping, gp) if v.id in primal else _dual(v, problem, chain, inverse, m, n)
        for v in variables
    )
    entries = _entries(program, chain, parameters)
    return CanonicalProgram(n, cones, P, q, A, b, entries, recovered, ~owned)


# ------------------------------------------------------------------------------------------------------------- details
def _constraints(tensor: Any, m: int, n: int, width: int) -> tuple[sp.coo_array, sp.coo_array]:
    """cvxpy keeps ``[A | b]`` column by column, with ``A x + b in K``; here ``b - A x in K``, row by row."""
    if tensor is None or m == 0:
        return sp.coo_array((0, width)), sp.coo_array((0, width))
    coo = sp.coo_array(tensor)
    where = coo.row.astype(np.int64)
    column, row = np.divmod(where, m)
    inside = column < n
    A = sp.coo_array((-coo.data[inside], ((row * n + column)[inside], coo.col[inside])), shape=(m * n, width))
    b = sp.coo_array((coo.data[~inside], (row[~inside], coo.col[~inside])), shape=(m, width))
    return A, b


def _triangular(leaf: Any) -> bool:
    return any(leaf.attributes.get(name) for name in ("symmetric", "PSD", "NSD", "hermitian")) and leaf.ndim == 2


def _reduced_size(leaf: Any) -> int:
    if _triangular(leaf):
        return leaf.shape[0] * (leaf.shape[0] + 1) // 2
    if leaf.attributes.get("diag"):
        return int(leaf.shape[0])
    return (
        len(leaf.sparse_idx[0]) if leaf.attributes.get("sparsity") is not None and leaf.sparse_idx else int(leaf.size)
    )


def _stored(leaf: Any) -> Array:
    """Row-major positions, in the full array, of the entries that cvxpy keeps, in its order."""
    if _triangular(leaf):
        rows, columns = np.triu_indices(leaf.shape[0])
        return rows * leaf.shape[0] + columns
    if leaf.attributes.get("diag"):
        return np.arange(leaf.shape[0]) * (leaf.shape[0] + 1)
    if leaf.attributes.get("sparsity") is not None and leaf.sparse_idx:
        return np.ravel_multi_index(leaf.sparse_idx, leaf.shape)
    return np.arange(leaf.size).reshape(leaf.shape).ravel(order="F")


def _primal(variable: Any, columns: dict[int, int], mapping: dict[int, int], gp: bool) -> Recovery:
    start = columns.get(mapping.get(variable.id, variable.id))
    if start is None:
        raise ValueError(f"variable {variable.name()} does not appear in the reduced problem: nothing depends on it")
    stored = _stored(variable)
    index = np.full(variable.size, -1, dtype=np.int64)
    index[stored] = start + np.arange(len(stored))
    if _triangular(variable):
        square = index.reshape(variable.shape)
        index = np.where(square >= 0, square, square.T).ravel()
    return Recovery(tuple(variable.shape), index, np.ones(variable.size), False, gp)


def _dual(variable: Any, problem: Any, chain: Any, inverse: Any, m: int, n: int) -> Recovery:
    """Duals are scaled selections of ``y``; two probes through cvxpy's own way back show of which entries."""
    owner = next(c for c in problem.constraints if any(d.id == variable.id for d in c.dual_variables))
    position = next(i for i, d in enumerate(owner.dual_variables) if d.id == variable.id)
    kept = [d.value for d in owner.dual_variables]
    first = np.arange(1.0, m + 1)
    values = []
    for probe in (first, first * first):
        fake = types.SimpleNamespace(
            status="Solved", x=np.zeros(n), z=probe, s=np.zeros(m), obj_val=0.0, solve_time=0.0, iterations=0
        )
        owner.save_dual_value(chain.invert(fake, inverse).dual_vars[owner.id])
        values.append(np.asarray(owner.dual_variables[position].value, dtype=float).reshape(variable.shape).ravel())
    for dual, value in zip(owner.dual_variables, kept, strict=True):
        dual.save_value(value)
    place = np.rint(values[1] / values[0])
    coefficient = values[0] / place
    if not np.allclose(values[1], coefficient * place**2) or place.min() < 1 or place.max() > m:
        raise NotImplementedError(f"the dual of {owner} is not a selection of the solver's multipliers")
    return Recovery(tuple(variable.shape), place.astype(np.int64) - 1, coefficient, True, False)


def _entries(program: Any, chain: Any, parameters: list[Any]) -> tuple[Entry, ...]:
    """Which part of which user parameter fills the parameter vector, in the order of its columns."""
    source: dict[int, tuple[int, bool]] = {p.id: (i, False) for i, p in enumerate(parameters)}
    for reduction in chain.reductions:
        renamed = getattr(reduction, "param_id_map", None) or {}
        log = type(reduction).__name__ == "Dgp2Dcp"
        for old, new in renamed.items():
            if old in source:
                source[new[-1]] = (source[old][0], log or source[old][1])
    entries = []
    for key, _ in sorted(program.param_id_to_col.items(), key=lambda item: item[1]):
        if key == -1:  # the constant, last
            continue
        position, log = source[key]
        stored = _stored(parameters[position])
        if len(stored) != program.param_id_to_size[key]:
            stored = np.arange(parameters[position].size).reshape(parameters[position].shape).ravel(order="F")
        entries.append(Entry(position, stored, log))
    return tuple(entries)
