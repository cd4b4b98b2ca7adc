r"""Why a quadratic program with sparse matrices has no solution, as a proof that anybody can check.

Infeasible: the least violation of the rows,

    minimise  |Az - b|^2 / 2 + |(Gz - h)_+|^2 / 2,

is reached, whatever the data; where it is not zero, ``y = Az - b`` and ``lam = (Gz - h)_+`` are Farkas's multipliers:
``A'y + G'lam = 0``, ``lam >= 0``, ``b'y + h'lam = -|y|^2 - |lam|^2 < 0``.

Unbounded: ``-q`` projected on the cone of directions that cost nothing and leave no row,

    minimise  |d + q|^2 / 2   subject to   Pd = 0,  Ad = 0,  Gd <= 0,

is a ray along which the objective falls, ``q'd = -|d|^2``, or zero, and then there is none (Moreau's decomposition).

Both are programs of the same kind that have a solution.  What they find is checked before it is said.

Source: Boyd & Vandenberghe (2004), *Convex Optimization*, section 5.8; Moreau (1962), C. R. Acad. Sci. 255; Banjac, Goulart,
Stellato & Boyd (2019), J. Optim. Theory Appl. 183, for what counts as a proof in numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from implicitkit.solution import Status

_PROOF = 1e-7  # what a proof leaves of what it must meet, relative to how far it proves
_FAR = 1e-6  # of the size of the right-hand sides, or of q: less is rounding
_STIFF = 1e9  # over the largest entry of P: what Pd = 0 is worth ...
_PASSES = 3  # ... so often in turn
_FLAT = 1e-12  # what that leaves of Pd: a little curvature is no ray
_NAMED = 4  # rows that are named


class Proof(NamedTuple):
    """``status``: infeasible or unbounded. z: a ray, or the point of least violation. y, lam: Farkas's multipliers of the
    rows of ``A`` and ``G``, or zero. said: a sentence."""

    status: Status
    z: np.ndarray
    y: np.ndarray
    lam: np.ndarray
    said: str


Solve = Callable[..., "np.ndarray | None"]
"""``(P, q, A, b, G, h) -> z``, of a program of this kind."""


def prove(
    P: Any, q: np.ndarray, A: Any, b: np.ndarray, G: Any, h: np.ndarray, solve: Solve, name: Callable[[int], str]
) -> Proof | None:
    """A proof that ``min z'Pz/2 + q'z, Az = b, Gz <= h`` has no solution; ``None`` where none is found.

    Args:
        P, A, G: sparse. q, b, h: finite. solve: solves programs that have a solution. name: of a row, those of ``G`` after
            those of ``A``.
    """
    return _infeasible(len(q), A, b, G, h, solve, name) or _unbounded(P, q, A, G, solve)


def _infeasible(
    n: int, A: Any, b: np.ndarray, G: Any, h: np.ndarray, solve: Solve, name: Callable[[int], str]
) -> Proof | None:
    p, m = len(b), len(h)
    if not p + m:
        return None
    rows = sp.csr_matrix(sp.vstack([A, G]))
    unit = np.sqrt(np.asarray(rows.multiply(rows).sum(1)).reshape(-1))
    unit = np.where(unit > 0, unit, 1.0)
    rows, ends = sp.diags_array(1 / unit) @ rows, np.concatenate([b, h]) / unit
    weights = sp.diags_array(np.concatenate([np.zeros(n), np.ones(p + m)]))
    slack = sp.csr_matrix(sp.hstack([rows, -sp.identity(p + m)]))
    found = solve(sp.csr_matrix(weights), np.zeros(n + p + m), slack[:p], ends[:p], slack[p:], ends[p:])
    if found is None:
        return None
    z = found[:n]
    multipliers = rows @ z - ends
    multipliers[p:] = np.maximum(multipliers[p:], 0.0)
    size = np.abs(multipliers).max(initial=0.0)
    support = float(ends @ multipliers)
    left = np.abs(rows.T @ multipliers).max(initial=0.0)
    if not size > _FAR * (1 + np.abs(ends).max(initial=0.0)) or not left * size <= _PROOF * -support:
        return None
    multipliers = multipliers / unit / size
    y, lam = multipliers[:p], multipliers[p:]
    said = (
        f"Its conditions {_named(multipliers, name)} contradict each other: added up with the multipliers of this solution "
        "(solution.multipliers), their left sides vanish for every z and their right sides do not"
    )
    return Proof(Status.INFEASIBLE, z, y, lam, said)


def _unbounded(P: Any, q: np.ndarray, A: Any, G: Any, solve: Solve) -> Proof | None:
    n, size = len(q), np.abs(q).max(initial=0.0)
    if not size:
        return None
    largest = np.abs(P.data).max(initial=0.0)
    H = sp.csr_matrix(sp.identity(n) + (_STIFF / largest * P if largest else 0 * P))
    d = -q / size
    for _ in range(_PASSES if largest else 1):
        found = solve(H, -d, A, np.zeros(A.shape[0]), G, np.zeros(G.shape[0]))
        if found is None or not np.abs(found).max(initial=0.0) > _FAR:
            return None
        d = found / np.abs(found).max()
    slope = float(q @ d) / size
    if not slope < -_FAR or np.abs(P @ d).max(initial=0.0) > _FLAT * largest:
        return None
    if max(_relative(A, d).max(initial=0.0), _relative(G, d, signed=True).max(initial=0.0)) > _PROOF * -slope:
        return None
    said = (
        "From any feasible z the objective falls along solution.value, which is a direction here, without end; it moves "
        f"most in z[{int(np.abs(d).argmax())}]"
    )
    return Proof(Status.UNBOUNDED, d, np.zeros(A.shape[0]), np.zeros(G.shape[0]), said)


def _relative(rows: Any, d: np.ndarray, signed: bool = False) -> np.ndarray:
    """``C d`` in units of the largest entry of each row."""
    if not rows.shape[0]:
        return np.zeros(0)
    size = abs(rows).max(1).toarray().reshape(-1)
    value = rows @ d / np.where(size > 0, size, 1.0)
    return np.asarray(value if signed else np.abs(value))


def _named(multipliers: np.ndarray, name: Callable[[int], str]) -> str:
    """The rows that weigh most: ``A[3], G[0] and 17 others``."""
    weight = np.abs(multipliers)
    order = [int(i) for i in np.argsort(-weight, kind="stable") if weight[i] > 1e-6 * weight.max()]
    more = f" and {len(order) - _NAMED} others" if len(order) > _NAMED else ""
    return ", ".join(map(name, order[:_NAMED])) + more
