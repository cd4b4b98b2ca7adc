"""The exact rule: the implicit function theorem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import at_least, check_options, not_negative, optional, part
from implicitkit.linear import LinearSolver
from implicitkit.linear.catalogue import get_linear_solver
from implicitkit.linear.iterative.preconditioners import check_preconditioner
from implicitkit.problem.catalogue import get_problem_entry
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import register_rule
from implicitkit.rule.request import Request


@register_rule("implicit")
@dataclass(frozen=True)
class Implicit(Rule):
    r"""``dz/d\theta = -(dF/dz)^{-1} dF/d\theta`` at the solution, exact in every mode and at every order.

    One linear solve a derivative; memory is that of the solution and of ``theta``, whatever the solver did.

    Source: Krantz & Parks, *The Implicit Function Theorem* (2002), theorem 3.3.1.

    Args:
        linear_solver: a registered name or a configured object (``ik.linear.GMRES(restart=30)``).  ``"auto"``: LU,
            dense where that is cheap and sparse where the Jacobian has a pattern, else CG for symmetric Jacobians and GMRES
            (see :class:`implicitkit.linear.Auto`).
        preconditioner: for ``auto``, ``gmres``, ``bicgstab`` and ``cg``: ``"jacobi"``, ``"block_jacobi"``, ``"ilu"``,
            ``"amg"`` (:mod:`~implicitkit.linear.iterative.preconditioners`); a callable ``(z, v) -> M(z)^{-1} v`` of
            ``(batch, n)`` matrices, linear in ``v``, or a pair of such, the second for the transposed (without it, by
            differentiation); a factorisation with ``solve(b, trans)``; or :class:`ik.linear.Stale()
            <implicitkit.linear.Stale>`.  The derivative does not depend on it.
        rtol, atol: of the linear solve, per sample ``|A u - b| <= atol + rtol |b|``; the defaults follow the dtype
            (``eps^(2/3)``, of fixed points in half precision ``2 eps``; ``atol`` 0).
        max_steps: products with the Jacobian allowed; ``None`` is the linear solver's own default.

    Raises (when a derivative is taken):
        ConvergenceError: the linear solve failed, under ``on_failure="raise"``.
    """

    linear_solver: Any = "auto"
    rtol: float | None = None
    atol: float = 0.0
    max_steps: int | None = None
    preconditioner: Any = None

    def __post_init__(self) -> None:
        check_options(self, linear_solver=part("linear solver", LinearSolver))
        check_options(self, rtol=optional(not_negative()), atol=not_negative(), max_steps=optional(at_least(1)))
        check_preconditioner(self.preconditioner)
        if isinstance(self.linear_solver, str) and self.linear_solver != "auto":
            get_linear_solver(self.linear_solver)  # refuses an unknown name here, not at the first derivative

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        problem = request.system.problem
        choice = self.linear_solver
        if isinstance(choice, str) and choice == "auto":
            choice = problem.linear_solver
        if choice is None:
            entry = get_problem_entry(problem)
            choice = "auto" if entry.linear_solver in ("gmres", "cg") else entry.linear_solver
        solver = get_linear_solver(choice)
        lacking = [
            need
            for need in solver.needs
            if not {"symmetric": problem.symmetric, "fixed_point": problem.kind.iteration}.get(need, True)
        ]
        if lacking:
            raise CapabilityError(
                f"linear solver {solver.name!r} needs a {' and '.join(lacking).replace('_', ' ')} system, and the Jacobian "
                f"of {type(problem).__name__} is not known to be one: "
                + ("say symmetric=True if it is, or " if "symmetric" in lacking else "")
                + "use 'gmres', 'lu', 'bicgstab' or 'lsmr'"
            )
        if self.preconditioner is not None and not solver.preconditions:
            raise CapabilityError(
                f"linear solver {solver.name!r} takes no preconditioner: use 'auto', 'gmres', 'bicgstab' or 'cg'"
            )
        if isinstance(self.preconditioner, str) and self.preconditioner == "ilu" and "symmetric" in solver.needs:
            raise CapabilityError(
                f"linear solver {solver.name!r} needs a symmetric preconditioner, and an incomplete LU is not symmetric: "
                'use "jacobi", "block_jacobi" or "amg", or linear_solver="gmres"'
            )
        request.preconditioner = self.preconditioner
        return request.solve(solver, rtol=self.rtol, atol=self.atol, max_steps=self.max_steps)
