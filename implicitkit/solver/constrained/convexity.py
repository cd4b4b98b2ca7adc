r"""The positive definite quadratic model that a step of sequential quadratic programming minimises.

With ``H`` the Hessian of the Lagrangian, ``Q`` an orthonormal basis of the gradients of the constraints and bounds that are
expected to hold with equality after the step, ``Z`` one of the directions along them, and ``p`` what the constraints ask of
``Q'd``:

    A = Q'HQ,   C = Z'HQ,   B = Z'HZ  ->  |B|  (the modulus of its eigenvalues),
    H+ = Z|B|Z' + ZCQ' + QC'Z' + Q(A + rho I)Q',      rho > lambda_max(C'|B|^-1 C - A)

``H+`` is positive definite by its Schur complement, and as small as that allows.  The model gets ``rho |Q'd - p|^2 / 2``,
which vanishes with its gradient where the step does what is expected of it: then steps and multipliers are those of ``H``
itself, however indefinite ``H`` is across the constraints (a linear objective under bilinear constraints).  All this in
units of the unknowns, ``D = diag(|z|)``, in which an eigenvalue means something.

Source: Nocedal & Wright 2006, sections 18.2 (reduced Hessians), 17.3 (augmented Lagrangian) and 16.2 (inertia);
Greenstadt (1967), Math. Comp. 21, for the modulus.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import cholesky_batched, mv, svd_batched
from implicitkit.solver.constrained.model import Local, Model
from implicitkit.solver.steps.hessian_factors import HessianFactors

_FLOOR = 1e-8  # of the largest entry: no eigenvalue below
_MODULUS = 1e-6  # of the largest eigenvalue: no modulus below
_SHARE = 1e-9  # of the largest entry, added to rho
_ZERO = 1e-3  # of the largest unknown, or of one: below, an unknown says nothing of its unit
_MET = 1e-6  # of what is added up in it: a linearised constraint that holds with equality


class Curved:
    """The quadratic model at a point, and what it expects of the constraints.

    Args:
        model: the program's parts. z: ``(batch, n)``. at: first order there. bounds: of ``z``.
        multipliers: ``(batch, m)``, those that the Lagrangian curves by: an inequality is expected to hold with equality
            where its own is positive. w: the point with its multipliers, of which the graph may be there.

    Attributes:
        H: the Hessian of the Lagrangian, ``(batch, n, n)``. convex: where that is taken as it is, ``(batch,)``: it is
            positive definite or, of programs that are ``open`` (linear ones), semidefinite.
        factors: those of ``H``, if it is positive definite everywhere.
    """

    def __init__(
        self,
        model: Model,
        z: Tensor,
        multipliers: Tensor,
        at: Local,
        bounds: tuple[Tensor, Tensor] | None,
        w: Tensor | None = None,
    ) -> None:
        self.at, self.z, self.sided = at, z, model.one_sided
        H = model.hessian(z, multipliers, w)
        eye = torch.eye(H.shape[1], dtype=z.dtype, device=z.device)
        self.H = torch.where(H.isfinite().flatten(1).all(1)[:, None, None], H, eye)
        size = self.H.abs().flatten(1).amax(1).clamp_min(1e-8)
        N = self.H - (_FLOOR * size)[:, None, None] * eye
        L, self.convex = cholesky_batched(N)
        self.factors = HessianFactors.dense(N, L) if bool(self.convex.all()) else None
        self.open = torch.zeros_like(self.convex)
        if self.factors is None:
            self.open = ~self.convex & cholesky_batched(self.H + (_FLOOR * size)[:, None, None] * eye)[1]
            self.convex = self.convex | self.open
        self.expected = ~self.sided | (multipliers > 0)
        self.resting = torch.zeros_like(z, dtype=torch.bool)
        if bounds is not None:
            slope = at.slope + (multipliers.unsqueeze(1) @ at.jacobian).squeeze(1)
            self.resting = ((z <= bounds[0]) & (slope > 0)) | ((z >= bounds[1]) & (slope < 0))

    def model(self) -> tuple[Tensor, Tensor]:
        """``H+`` ``(batch, n, n)`` and the gradient of the objective of the quadratic program, ``(batch, n)``."""
        if bool(self.convex.all()):
            return self.H, self.at.slope
        units = _units(self.z)
        rows = torch.cat([self.at.jacobian * self.expected.unsqueeze(2), torch.diag_embed(self.resting.to(self.z))], 1)
        asked = torch.cat([-self.at.constraints * self.expected, torch.zeros_like(self.z)], 1)
        both = units[:, :, None] * units[:, None, :]
        given = both * self.H, rows * units[:, None, :], asked
        modified, pull = _reduced(*(t.nan_to_num(0, 0, 0) for t in given))  # of what is no number nothing is asked
        return (
            torch.where(self.convex[:, None, None], self.H, modified / both),
            torch.where(self.convex.unsqueeze(1), self.at.slope, self.at.slope + pull / units),
        )

    def falls_forever(self, failed: Tensor) -> bool:
        """Has a program that is open no solution, ``(batch,)``?  Then its ``H`` is made definite."""
        lost = self.open & failed
        self.convex, self.open = self.convex & ~lost, self.open & ~lost
        return bool(lost.any())

    def disappointed(self, d: Tensor, failed: Tensor) -> bool:
        """Has a step let down what was expected of it, an inequality or a bound at rest?  Then less is expected."""
        open_ = ~self.convex & ~failed
        left = self.at.constraints + (self.at.jacobian @ d.unsqueeze(2)).squeeze(2)
        way = (self.at.jacobian.abs() @ d.abs().unsqueeze(2)).squeeze(2) + self.at.constraints.abs()
        lax = self.expected & self.sided & (left.abs() > _MET * way) & open_.unsqueeze(1)
        moved = self.resting & (d.abs() > _MET * _units(self.z)) & open_.unsqueeze(1)
        self.expected, self.resting = self.expected & ~lax, self.resting & ~moved
        return bool(lax.any()) or bool(moved.any())

    def draws(self) -> Tensor:
        """Where the model draws a step to an inequality that holds already, ``(batch,)``."""
        return ~self.convex & (self.expected & self.sided & (self.at.constraints < 0)).any(1)

    def let_go(self, which: Tensor) -> None:
        """Expect of these samples no inequality to be met that holds already: without violation ``d = 0`` is as good as the
        model allows then, and the step descends."""
        self.expected = self.expected & ~(which.unsqueeze(1) & self.sided & (self.at.constraints < 0))


def _units(z: Tensor) -> Tensor:
    """What each unknown is measured in, ``(batch, n)``: itself; where it is as good as zero the largest, but no more than
    one; one if all are zero."""
    size, most = z.abs(), z.abs().amax(1, keepdim=True).clamp_max(1)
    return torch.where(size > _ZERO * most, size, torch.where(most > 0, most, 1))


def _reduced(H: Tensor, rows: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """``H+`` and ``-rho Q p``, in the units of ``H``."""
    length = torch.linalg.vector_norm(rows, dim=2)
    length = torch.where(length > 0, length, 1)
    n = H.shape[1]
    rows, asked = rows / length.unsqueeze(2), asked / length
    rows = torch.cat([rows, rows.new_zeros(len(rows), n, n)], 1)  # n singular vectors, however few rows
    asked = torch.cat([asked, asked.new_zeros(len(asked), n)], 1)
    U, sizes, V = svd_batched(rows)  # V: (batch, n, n), rows
    across = (sizes > torch.finfo(H.dtype).eps ** 0.5 * sizes[:, :1].clamp_min(1e-30)).to(H)
    p = across * mv(U.mT, asked) / torch.where(across > 0, sizes, 1)
    along = 1 - across
    K = V @ H @ V.mT  # in the basis of singular vectors
    B = K * along.unsqueeze(1) * along.unsqueeze(2) + torch.diag_embed(across)
    values, vectors = torch.linalg.eigh(B)
    most = K.abs().flatten(1).amax(1, keepdim=True).clamp_min(1e-30)
    modulus = torch.maximum(values.abs(), _MODULUS * most)
    B = (vectors * modulus.unsqueeze(1)) @ vectors.mT * along.unsqueeze(1) * along.unsqueeze(2)
    inverse = (vectors / modulus.unsqueeze(1)) @ vectors.mT * along.unsqueeze(1) * along.unsqueeze(2)
    A = K * across.unsqueeze(1) * across.unsqueeze(2)
    C = K * across.unsqueeze(1) * along.unsqueeze(2)  # rows along, columns across
    least = torch.linalg.eigvalsh(C.mT @ inverse @ C - A)[:, -1:].clamp_min(0)
    rho = 1.1 * least + _SHARE * most
    full = B + C + C.mT + A + torch.diag_embed(rho * across)
    return V.mT @ full @ V, -mv(V.mT, rho * p)
