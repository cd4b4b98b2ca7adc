"""Trust-region methods for equations: Powell's dogleg, and Levenberg-Marquardt in the form of Moré."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import check_options, flag, one_of, positive
from implicitkit.linear.factors.dense import mv, svd_batched
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.factored import Jacobian, at_rounding, jacobian_at, leave
from implicitkit.solver.steps.normal_equations import NormalEquations, normal_equations_of
from implicitkit.solver.steps.paths import way_to_boundary
from implicitkit.solver.steps.region import taken_where
from implicitkit.sparsity.patterns import SMALLEST

SUBPROBLEMS = ("dogleg", "levenberg_marquardt")
_SECANTS = 8  # for the length of a step by normal equations, a factorisation each
_NEAR = 0.1  # that the length of a step may differ from the radius, relative


@register_solver("trust_region", solves="root")
@dataclass(frozen=True)
class TrustRegion(Method):
    r"""Minimise the model ``|F + J p|`` within ``|D p| <= radius``, sample by sample.

    ``D`` is diagonal, the largest norm so far of each column of ``J``, which makes the method independent of the units of
    the unknowns (Moré 1978, section 6).  A step is taken when ``rho``, the reduction of ``|F|^2`` over the one the model
    promised, exceeds ``1e-4``; below 1/4 the radius is halved, above 3/4 doubled (Nocedal & Wright 2006, algorithm 11.5).
    One Jacobian serves until a step is accepted, and the radius is cut within one step of the driver.

    - ``subproblem="dogleg"``: the path from the origin by the minimiser along the gradient to the Newton point
      (Powell 1970; MINPACK's ``hybrj``).  One LU factorisation.
    - ``subproblem="levenberg_marquardt"``: the minimiser itself, ``p = -(J^T J + lambda D^2)^{-1} J^T F`` with
      ``lambda`` from the secular equation (Moré 1978, section 5), by one singular value decomposition; from 128 unknowns
      on by factors of ``J^T J + lambda D^2``, one for each ``lambda``.

    From 128 unknowns on, a Jacobian with a sparsity pattern (``jac_sparsity``) is factored sparse; above 4,096 one without a
    pattern is not formed: systems are solved by GMRES, or by LSMR on the normal equations, and ``D = I``.

    A sample whose radius has shrunk to rounding, at a stationary point of ``|F|``, is given up.

    Args:
        subproblem: which of the two. radius: the first radius, times ``|D z|`` (or alone where that is zero).
        scaling: ``False`` takes ``D = I``.

    Raises:
        ValueError: an option out of range.
    """

    subproblem: str = "dogleg"
    radius: float = 100.0
    scaling: bool = True
    default_max_steps: ClassVar[int] = 200

    def __post_init__(self) -> None:
        check_options(self, subproblem=one_of(*SUBPROBLEMS), radius=positive(), scaling=flag())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return {"D": torch.zeros_like(z), "radius": None}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        residual, norm = f(z), f.norm.to(z.dtype)
        J = jacobian_at(f, z)
        settled = at_rounding(f, J.blocks, z)
        D = torch.ones_like(z)
        if self.scaling:
            D = torch.maximum(state["D"], J.columns.to(z))
        scale = torch.where(D > 0, D, 1)
        model = self._model(f, J, residual, scale)
        length = torch.linalg.vector_norm(scale * z, dim=1)
        radius = state["radius"]
        if radius is None:
            radius = self.radius * torch.where(length > 0, length, 1)
        smallest = torch.finfo(z.dtype).eps * torch.where(length > 0, length, 1)
        z_next, found = z, ~f.active | settled
        while True:
            p, linear = model.step(radius)
            trial = taken_where(~found, z + p / scale, z_next)
            trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
            predicted = 1 - (torch.linalg.vector_norm(linear, dim=1) / norm) ** 2
            actual = 1 - (trial_norm / norm) ** 2
            rho = torch.where(predicted > 0, actual / predicted, -1).nan_to_num(-1, -1, -1)
            taken = torch.linalg.vector_norm(p, dim=1)
            accept = ~found & (rho > 1e-4)
            z_next = taken_where(accept, trial, z_next)
            smaller = 0.5 * torch.minimum(radius, taken)
            larger = torch.where(rho > 0.75, torch.maximum(radius, 2 * taken), radius)
            radius = torch.where(found, radius, torch.where(rho < 0.25, smaller, larger))
            found = found | accept
            hopeless = ~found & ~(radius > smallest)
            if bool((found | hopeless).all()):
                break
        f.stuck = hopeless
        leave(f, settled)
        return z_next, {"D": D, "radius": radius}

    def _model(self, f: Evaluations, J: Jacobian, F: Tensor, D: Tensor) -> _Dogleg | _Exact | _Shifted:
        if self.subproblem == "dogleg":
            return _Dogleg(f, J, F, D)
        if J.dense is not None and F.shape[1] < SMALLEST:
            return _Exact(J.dense, F, D)
        return _Shifted(f, J, F, D)


class _Dogleg:
    """Powell's path for ``min |F + J p / D|`` in a ball, from four products with the Jacobian."""

    def __init__(self, f: Evaluations, J: Jacobian, F: Tensor, D: Tensor) -> None:
        self.F = F
        newton = J.direction(f, F)
        self.newton = D * newton
        self.newton_length = torch.linalg.vector_norm(self.newton, dim=1)
        gradient = J.adjoint(F) / D
        length = torch.linalg.vector_norm(gradient, dim=1)
        self.direction = (gradient / length.unsqueeze(1)).nan_to_num(0, 0, 0)
        self.J_direction, self.J_newton = J.times(self.direction / D), J.times(newton)
        steepest = torch.linalg.vector_norm(self.J_direction, dim=1)
        self.cauchy_length = (length / steepest.square()).nan_to_num(torch.inf)

    def step(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` and ``F + J p / D``."""
        along = torch.minimum(self.cauchy_length, radius)
        cauchy = -along.unsqueeze(1) * self.direction
        leg = self.newton - cauchy
        tau = way_to_boundary(cauchy, leg, radius).nan_to_num(0, 0, 0).clamp(0, 1)
        tau = torch.where(self.newton_length <= radius, 1, tau).unsqueeze(1)
        p = torch.where(tau < 1, cauchy + tau * leg, self.newton)
        linear = self.F + tau * self.J_newton - ((1 - tau) * along.unsqueeze(1)).nan_to_num(0, 0, 0) * self.J_direction
        return p, linear


class _Exact:
    """The minimiser of ``|F + J p / D|`` in a ball, from ``J D^-1 = U diag(s) V^T``."""

    def __init__(self, J: Tensor, F: Tensor, D: Tensor) -> None:
        self.J, self.F = J / D.unsqueeze(1), F
        U, s, self.Vh = svd_batched(self.J)  # of half precision in float32
        self.b = mv(U.mT, F.to(U))
        cut = s.shape[1] * torch.finfo(s.dtype).eps * s[:, :1]
        self.s = torch.where(s > cut, s, 0)

    def step(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` and ``F + J p / D``; ``|p(lambda)| = radius`` by Newton's method on ``1/radius - 1/|p|``, safeguarded."""
        s, b, target = self.s, self.b, radius.to(self.s)
        sb = s * b
        y = torch.where(s > 0, b / torch.where(s > 0, s, 1), 0)  # lambda = 0
        free = torch.linalg.vector_norm(y, dim=1) <= target
        low, high = torch.zeros_like(target), torch.linalg.vector_norm(sb, dim=1) / target
        lam = 1e-3 * high
        for _ in range(30):
            shifted = s.square() + lam.unsqueeze(1)
            q = sb / shifted
            length = torch.linalg.vector_norm(q, dim=1)
            if bool((free | ((length - target).abs() <= 0.01 * target) | ~torch.isfinite(length)).all()):
                break
            low, high = torch.where(length > target, lam, low), torch.where(length > target, high, lam)
            slope = (q.square() / shifted).sum(1) / length.square()
            step = lam + (length - target) / (target * slope)
            inside = (step > low) & (step < high)
            lam = torch.where(inside, step, torch.maximum((low * high).sqrt(), 1e-3 * high))
        y = torch.where(free.unsqueeze(1), y, sb / (s.square() + lam.unsqueeze(1)))
        p = -mv(self.Vh.mT, y).nan_to_num(0, 0, 0).to(self.F)
        return p, self.F + mv(self.J, p)


class _Shifted:
    """The minimiser of :class:`_Exact` for many unknowns: the Newton step where it lies in the ball, else normal equations
    ``N + lambda I``, ``N = D^-1 J'J D^-1``, with ``lambda`` by the secant on ``1/radius - 1/|p|``, safeguarded."""

    def __init__(self, f: Evaluations, J: Jacobian, F: Tensor, D: Tensor) -> None:
        self.J, self.F, self.D = J, F, D
        newton = J.direction(f, F)
        self.newton = D * newton
        self.length = torch.linalg.vector_norm(self.newton, dim=1)
        self.left = torch.linalg.vector_norm(F + J.times(newton), dim=1)  # all of |F|, where a block is singular
        self.gradient = J.adjoint(F)
        self.normal: NormalEquations | None = None

    def step(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` and ``F + J p / D``."""
        free = (self.length <= radius) & (self.left <= 0.5 * torch.linalg.vector_norm(self.F, dim=1))
        p = self.newton
        if not bool(free.all()):
            p = torch.where(free.unsqueeze(1), p, self._constrained(radius, free))
        return p, self.F + self.J.times(p / self.D)

    def _constrained(self, radius: Tensor, free: Tensor) -> Tensor:
        if self.normal is None:
            self.normal = normal_equations_of(self.J, self.F)
            self.normal.scale(self.D)
        g = self.gradient
        slope = torch.linalg.vector_norm(g / self.D, dim=1)
        low, high = torch.zeros_like(radius), slope / radius
        lam, old = 0.1 * high, None
        for _ in range(_SECANTS):
            p = (self.D * self.normal.solve(lam, g)).nan_to_num(0, 0, 0)
            length = torch.linalg.vector_norm(p, dim=1)
            if bool((free | ((length - radius).abs() <= _NEAR * radius)).all()):
                break
            low, high = torch.where(length > radius, lam, low), torch.where(length > radius, high, lam)
            now = 1 / length - 1 / radius
            last_lam, last = (high, 1 / (slope / high) - 1 / radius) if old is None else old
            step = lam - now * (lam - last_lam) / (now - last)
            old = (lam, now)
            inside = (step > low) & (step < high)
            lam = torch.where(inside, step, torch.maximum((low * high).sqrt(), 1e-3 * high))
        shorter = (radius / length.clamp_min(torch.finfo(p.dtype).tiny)).clamp(max=1).unsqueeze(1)
        return p * shorter
