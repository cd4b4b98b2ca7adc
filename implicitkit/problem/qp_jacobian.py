r"""The Jacobian of a quadratic program's natural map, by its blocks.

    [   P    A'     G'   ]
    [   A    0      0    ]          D = diag(d),  d_i the derivative of the clamp: 1 on active rows, 0 on others
    [ -D G   0    I - D  ]

and its inverse, and that of its transpose, by one Cholesky factor of an ``n x n`` matrix (:class:`Saddle`).  A row at the
kink, its constraint and its multiplier both zero, counts as active; where it must, because the program is not determined
without it, the derivative is that of one side at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.linear.conditions.saddle import Saddle, StructuredOperator
from implicitkit.linear.factors.dense import mv
from implicitkit.problem.complementarity import plus_slope
from implicitkit.problem.qp_data import natural_jacobian

_KINK = 1e-9  # of the state, within which a multiplier and its constraint are both zero


@dataclass
class QPJacobian:
    """The Jacobian of the natural map by blocks, and its inverse (and that of its transpose) by one Cholesky factor."""

    P: Tensor
    A: Tensor
    G: Tensor
    above: Tensor  # derivative of the clamp at h
    below: Tensor  # and at lower
    D: Tensor  # their sum
    let_go: Tensor | None = None  # the same with rows at the kink inactive, if there are any
    _saddle: Saddle | None = None

    @staticmethod
    def of(part: dict[str, Tensor], w: Tensor, kappa: float) -> QPJacobian:
        """At the packed state ``w`` of programs with these parts, ``(batch, ...)`` each; absent ones missing."""
        q = part["q"]
        batch, n = q.shape
        P = 0.5 * (part["P"] + part["P"].mT) if "P" in part else q.new_zeros(batch, n, n)
        A = part.get("A", q.new_zeros(batch, 0, n))
        G = part.get("G", q.new_zeros(batch, 0, n))
        z, lam = w[:, :n], w[:, n + A.shape[1] :]
        v = lam + mv(G, z)
        above = below = kinks = torch.zeros_like(v)
        noise = 0.0 if kappa else _KINK * (1 + w.abs().amax(1, keepdim=True))
        for name, sign in (("h", 1.0), ("lower", -1.0)):
            if name not in part:
                continue
            past = sign * (v - part[name])
            slope = plus_slope(past, kappa)
            above, below = (slope, below) if name == "h" else (above, slope)
            kinks = kinks + slope * (past.abs() <= noise)
        D = above + below
        return QPJacobian(P, A, G, above, below, D, D - kinks if not kappa and bool(kinks.any()) else None)

    def pull(self, point: tuple[Tensor, ...], w: Tensor, needed: set[str]) -> dict[str, Tensor]:
        """``(dF/d part)^T w`` for the parts needed, each ``(batch, ...)``."""
        (z, y, lam), (w_z, w_y, w_l) = point, self.split(w)
        held = self.D * w_l
        found: dict[str, Callable[[], Tensor]] = {
            "P": lambda: _symmetric(w_z, z),
            "q": lambda: w_z,
            "A": lambda: _outer(y, w_z) + _outer(w_y, z),
            "b": lambda: -w_y,
            "G": lambda: torch.baddbmm(_outer(lam, w_z), held.unsqueeze(2), z.unsqueeze(1), alpha=-1),
            "h": lambda: self.above * w_l,
            "lower": lambda: self.below * w_l,
        }
        return {name: found[name]() for name in needed}

    @property
    def saddle(self) -> Saddle:
        if self._saddle is None:
            e, C = torch.where(self.D > 0, (1 - self.D) / self.D, torch.inf), self.G
            if self.A.shape[1]:
                e, C = torch.cat([e.new_zeros(self.A.shape[:2]), e], 1), torch.cat([self.A, self.G], 1)
            self._saddle = Saddle(self.P, C, e)
        return self._saddle

    def split(self, w: Tensor) -> tuple[Tensor, ...]:
        """``z``, ``y`` and ``lam`` of a packed state."""
        return w.split([self.P.shape[1], self.A.shape[1], self.G.shape[1]], 1)

    def mv(self, w: Tensor) -> Tensor:
        z, y, lam = self.split(w)
        top = mv(self.P, z) + mv(self.A.mT, y) + mv(self.G.mT, lam)
        return torch.cat([top, mv(self.A, z), lam - self.D * (mv(self.G, z) + lam)], 1)

    def rmv(self, w: Tensor) -> Tensor:
        z, y, lam = self.split(w)
        top = mv(self.P, z) + mv(self.A.mT, y) - mv(self.G.mT, self.D * lam)
        return torch.cat([top, mv(self.A, z), mv(self.G, z) + lam - self.D * lam], 1)

    def inverse(self, r: Tensor) -> tuple[Tensor, Tensor]:
        r_z, r_y, r_l = self.split(r)
        on = self.D > 0
        free = torch.where(on, 0, r_l)
        c = torch.where(on, -r_l / self.D, 0)
        x, v, norm = self.saddle.solve(r_z - mv(self.G.mT, free), torch.cat([r_y, c], 1))
        y, lam = v[:, : self.A.shape[1]], v[:, self.A.shape[1] :]
        return torch.cat([x, y, torch.where(on, lam, free)], 1), norm

    def transposed_inverse(self, g: Tensor) -> tuple[Tensor, Tensor]:
        g_z, g_y, g_l = self.split(g)
        on = self.D > 0
        x, v, norm = self.saddle.solve(g_z, torch.cat([g_y, g_l], 1))
        y, lam = v[:, : self.A.shape[1]], v[:, self.A.shape[1] :]
        # the residual of rows that are half on (the relaxed program) is that of the saddle times D, at most 1
        return torch.cat([x, y, torch.where(on, -lam / self.D, g_l - mv(self.G, x))], 1), norm

    def dense(self) -> Tensor:
        return natural_jacobian(self.P, self.A, self.G, self.D)

    def operator(self) -> StructuredOperator:
        return StructuredOperator(
            self.mv,
            self.rmv,
            self.dense,
            inverse=self.inverse,
            transposed_inverse=self.transposed_inverse,
            batch=self.P.shape[0],
            size=sum(t.shape[1] for t in (self.P, self.A, self.G)),
            like=self.P,
            other=None if self.let_go is None else self._other,
        )

    def _other(self) -> StructuredOperator:
        assert self.let_go is not None
        return QPJacobian(self.P, self.A, self.G, self.above, self.below, self.let_go).operator()


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(2) * b.unsqueeze(1)


def _symmetric(a: Tensor, b: Tensor) -> Tensor:
    product = _outer(0.5 * a, b)
    return product + product.mT
