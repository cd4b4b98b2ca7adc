"""Trust-region methods for equations: Powell's dogleg, and Levenberg-Marquardt in the form of Moré."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import check_options, one_of, positive
from implicitkit.linear.dense import svd_batched
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.root.newton import newton_direction

__all__ = ["TrustRegion"]

SUBPROBLEMS = ("dogleg", "levenberg_marquardt")


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
      ``lambda`` from the secular equation (Moré 1978, section 5), by one singular value decomposition.

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
        check_options(self, subproblem=one_of(*SUBPROBLEMS), radius=positive())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return {"D": torch.zeros_like(z), "radius": None}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        residual, norm = f(z), f.norm.to(z.dtype)
        J = f.jacobian(z)
        D = torch.ones_like(z)
        if self.scaling:
            D = torch.maximum(state["D"], torch.linalg.vector_norm(J, dim=1).nan_to_num(0, 0, 0))
        scale = torch.where(D > 0, D, 1)
        J = J / scale.unsqueeze(1)
        model = (_Dogleg if self.subproblem == "dogleg" else _Exact)(J, residual)
        length = torch.linalg.vector_norm(scale * z, dim=1)
        radius = state["radius"]
        if radius is None:
            radius = self.radius * torch.where(length > 0, length, 1)
        smallest = torch.finfo(z.dtype).eps * torch.where(length > 0, length, 1)
        z_next, found = z, ~f.active
        while True:
            p, linear = model.step(radius)
            trial = z + p / scale
            trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
            predicted = 1 - (torch.linalg.vector_norm(linear, dim=1) / norm) ** 2
            actual = 1 - (trial_norm / norm) ** 2
            rho = torch.where(predicted > 0, actual / predicted, -1).nan_to_num(-1, -1, -1)
            taken = torch.linalg.vector_norm(p, dim=1)
            accept = ~found & (rho > 1e-4)
            z_next = torch.where(accept.unsqueeze(1), trial, z_next)
            smaller = 0.5 * torch.minimum(radius, taken)
            larger = torch.where(rho > 0.75, torch.maximum(radius, 2 * taken), radius)
            radius = torch.where(found, radius, torch.where(rho < 0.25, smaller, larger))
            found = found | accept
            hopeless = ~found & ~(radius > smallest)
            if bool((found | hopeless).all()):
                break
        f.stuck = hopeless
        return z_next, {"D": D, "radius": radius}


class _Dogleg:
    """Powell's path for ``min |F + J p|`` in a ball, ``J`` ``(batch, n, n)``."""

    def __init__(self, J: Tensor, F: Tensor) -> None:
        self.J, self.F = J, F
        self.newton = newton_direction(J, F)
        self.newton_length = torch.linalg.vector_norm(self.newton, dim=1)
        gradient = _product(J.mT, F)
        steepest = torch.linalg.vector_norm(_product(J, gradient), dim=1)
        length = torch.linalg.vector_norm(gradient, dim=1)
        self.direction = (gradient / length.unsqueeze(1)).nan_to_num(0, 0, 0)
        self.cauchy_length = (length * (length / steepest) ** 2).nan_to_num(torch.inf)

    def step(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` and ``F + J p``."""
        along = torch.minimum(self.cauchy_length, radius)
        cauchy = -along.unsqueeze(1) * self.direction
        leg = self.newton - cauchy
        # |cauchy + tau leg| = radius
        a, b = leg.square().sum(1), (cauchy * leg).sum(1)
        c = (radius**2 - along**2).clamp_min(0)
        tau = (c / (b + (b**2 + a * c).sqrt())).nan_to_num(0, 0, 0).clamp(0, 1)
        p = torch.where((self.newton_length <= radius).unsqueeze(1), self.newton, cauchy + tau.unsqueeze(1) * leg)
        return p, self.F + _product(self.J, p)


class _Exact:
    """The minimiser of ``|F + J p|`` in a ball, from ``J = U diag(s) V^T``."""

    def __init__(self, J: Tensor, F: Tensor) -> None:
        self.J, self.F = J, F
        U, s, self.Vh = svd_batched(J)
        self.b = _product(U.mT, F)
        cut = s.shape[1] * torch.finfo(s.dtype).eps * s[:, :1]
        self.s = torch.where(s > cut, s, 0)

    def step(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` and ``F + J p``; ``|p(lambda)| = radius`` by Newton's method on ``1/radius - 1/|p|``, safeguarded."""
        s, b, target = self.s, self.b, radius
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
        p = -_product(self.Vh.mT, y).nan_to_num(0, 0, 0)
        return p, self.F + _product(self.J, p)


def _product(A: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(A, x.unsqueeze(2)).squeeze(2)
