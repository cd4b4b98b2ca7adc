"""The word of somebody else's linear solver: what it returned is looked at, and its claim is judged by a product with ``A``.

``|A x - b|_2 <= atol + rtol |b|_2`` is what a linear solver says of the samples it calls converged.  Those of this package
have it from products with ``A`` themselves; that of a plugin may be wrong (a transposed matrix, a forgotten sign), and a
derivative would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator, repeated
from implicitkit.foundation.wording import in_a_solver, kind_of
from implicitkit.linear.base import LinearSolution, LinearSolver

_REFUTED = "it calls converged what a product with the matrix does not bear out"
_SLACK = 10.0  # times the tolerance: norms that are kept up to date drift


def answer(solver: LinearSolver, A: Operator, b: Tensor, options: dict[str, Any]) -> LinearSolution:
    """What ``solver`` finds for one or several right-hand sides of each block, ``b (k * batch, n)``, where it claims no more
    than a product bears out.

    Raises:
        TypeError: it returned no :class:`LinearSolution` of tensors with one entry a sample, ``x`` shaped as ``b``.
    """
    ours = not solver.exact or solver.checks_itself
    given = b if ours else b.clone()  # a solver may work in place
    if len(b) == A.batch:
        found = in_a_solver(solver.solve, A, given, **options)
    else:
        found = in_a_solver(solver.solve_many, A, given.unflatten(0, (-1, A.batch)), **options)
    if ours:
        return found
    check_answer(solver, found, b)
    many = A if len(b) == A.batch else repeated(A, len(b) // A.batch)
    x = found.x.to(b)
    norm = torch.linalg.vector_norm(many.mv(x) - b, dim=1)
    size = torch.linalg.vector_norm(b, dim=1)
    refuted = found.converged & ~(norm <= _SLACK * (options["atol"] + options["rtol"] * size))
    if not bool(refuted.any()):
        return found._replace(x=x)
    coarse = f", in {found.x.dtype} for a system in {b.dtype}" if found.x.dtype != b.dtype else ""
    return LinearSolution(x, norm, found.steps, found.converged & ~refuted, _REFUTED + coarse)


def check_answer(solver: LinearSolver, found: Any, b: Tensor) -> None:
    """Raise ``TypeError`` unless ``found`` is a :class:`LinearSolution` of tensors with one entry a sample, ``x`` shaped as
    ``b``."""
    wanted = (tuple(b.shape), *[(len(b),)] * 3)
    parts = found[:4] if isinstance(found, LinearSolution) else ()
    got = tuple(tuple(t.shape) if isinstance(t, Tensor) else kind_of(t) for t in parts)
    if got != wanted:
        raise TypeError(
            f"linear solver {solver.name or type(solver).__name__!r} must return ik.extend.LinearSolution(x, residual_norm, "
            f"steps, converged, reason), tensors of shapes {', '.join(map(str, wanted))}; it returned "
            f"{', '.join(map(str, got)) or kind_of(found)}"
        )
    if found.converged.dtype != torch.bool:
        raise TypeError(
            f"linear solver {solver.name or type(solver).__name__!r} must say in torch.bool what has converged; it returned "
            f"{found.converged.dtype}"
        )
