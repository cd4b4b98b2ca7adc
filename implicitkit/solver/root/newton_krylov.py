"""Newton's method without a matrix: GMRES on exact Jacobian-vector products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, between, check_options
from implicitkit.linear import GMRES
from implicitkit.linear.iterative.preconditioners import check_preconditioner, preconditioner
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.forcing import after_step, forcing_term
from implicitkit.solver.steps.newton_damping import damped_step

_TIGHT = 1e-4  # forcing of full steps


@register_solver("newton_krylov", solves="root")
@dataclass(frozen=True)
class NewtonKrylov(Method):
    r"""Inexact Newton: ``|F + J d| <= eta_k |F|`` by GMRES with exact products ``J v``, then halving of the step.

    The forcing term is that of Eisenstat & Walker (1996), choice 2 with its safeguard, per sample:

        eta_k = 0.9 (|F_k| / |F_{k-1}|)^2,   at least 0.9 eta_{k-1}^2 where that is above 0.1,   at most ``forcing``,

    and never smaller than the last step needs: ``tolerance / (c |F_k|)``, ``c = 2`` (Kelley 2003, eq. 3.20), or where
    equations are judged one by one ``4 \sqrt{2 \log N}``, of ``N`` in all, if that is more (in double precision).  The
    preconditioner acts from the right, ``J M^{-1} u = -F``, ``d = M^{-1} u``, so that ``eta`` refers to the true residual.
    Samples that have hardly lowered ``|F|`` for ``patience`` steps in a row go over to full steps with ``eta = 1e-4``, like
    ``newton``.

    Memory ``O(restart * batch * n)``.  One evaluation a step and one double-backward product an inner iteration.

    Args:
        forcing: the largest ``eta``, in (0, 1), and the first.
        restart: Krylov vectors kept. inner_steps: products a Newton step may take.
        halvings: of a step, at most. patience: weak steps in a row before full ones.
        preconditioner: ``(z, v) -> M(z)^{-1} v``, both ``(batch, n)``, linear in ``v``; ``"jacobi"``, ``"block_jacobi"``,
            ``"ilu"``, ``"amg"``; a factorisation with ``solve(b, trans)``; or :class:`ik.linear.Stale()
            <implicitkit.linear.Stale>`.  ``None`` is the identity.

    Raises:
        ValueError: an option out of range. TypeError: ``preconditioner`` is none of these.
    """

    forcing: float = 0.9
    restart: int = 100
    inner_steps: int = 500
    halvings: int = 20
    patience: int = 4
    preconditioner: Any = None
    default_max_steps: ClassVar[int] = 200

    def __post_init__(self) -> None:
        least, count = at_least(1), at_least(0)
        check_options(self, forcing=between(0, 1), restart=least, inner_steps=least, halvings=count, patience=count)
        check_preconditioner(self.preconditioner)

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return {"eta": None, "norm": None, "weak": None}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        residual, norm = f(z), f.norm
        eta = self._forcing_term(f, state)
        A = f.linearize(z)
        rhs = torch.where(f.active.unsqueeze(1), -residual, 0)
        if self.preconditioner is not None:
            A.preconditioner = preconditioner(self.preconditioner, A, z)
        d = GMRES(restart=self.restart).solve(A, rhs, rtol=eta, atol=0.0, max_steps=self.inner_steps).x
        z_next, t, weak = damped_step(f, z, d, norm.to(z.dtype), state["weak"], self.halvings, self.patience)
        return z_next, after_step(eta, t, norm) | {"weak": weak}

    def _forcing_term(self, f: Evaluations, state: Any) -> Tensor:
        eta = forcing_term(f, state, self.forcing)
        if state["weak"] is not None:
            eta = torch.where(state["weak"] > self.patience, _TIGHT, eta)
        return eta.nan_to_num(nan=self.forcing).clamp(torch.finfo(eta.dtype).eps, self.forcing)
