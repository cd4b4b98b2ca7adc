"""Newton's method with Krylov vectors on causal sequences: every position has the fit of the prefix that it ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik

_RIDGE = 1e-13  # of normal equations in float64 with unit diagonal


@dataclass(frozen=True)
class PrefixNewton(ik.Method):
    r"""``z <- z + d`` with ``(I - J) d = f(z) - z`` solved inexactly, so that ``d_t`` knows nothing of later positions.

    ``J`` is block lower triangular.  So the first ``t`` blocks of ``J v`` are those of the prefix, ``J_{\le t} v_{\le t}``,
    and the Krylov vectors ``k_j = J^j r`` of the whole sequence, cut off after ``t``, are those of the prefix: the same
    products serve all of them.  Position ``t`` takes its own block ``d_t = \sum_j c_{t,j} k_{j,t}`` of the solution of
    least residual for the prefix (GMRES's):

        c_t = argmin | r_{\le t} - \sum_j c_j (k_j - k_{j+1})_{\le t} |,

    whose normal equations are sums over positions, cumulated.  Its coefficients are settled by the first number of vectors
    with which that residual, and those of all shorter prefixes, is at most ``forcing`` times ``|r_{\le t}|``.
    Powers are not orthogonal: the sums are taken in float64, and Newton's next step, from the true residual, mends what
    they lose.

    Full steps.  One evaluation and one linearisation a step, and a product a vector.

    Shapes: rows are positions, ``(samples * length, n / length)``.  Source: Saad & Schultz (1986) for the least residual;
    the fits by prefix are this library's.

    Args:
        length: positions of a sequence. forcing: in (0, 1). vectors: Krylov vectors a step, at most.
    """

    length: int
    forcing: float = 0.03
    vectors: int = 12
    name: ClassVar[str] = "newton_krylov"
    solves: ClassVar[str] = "root"
    default_max_steps: ClassVar[int] = 200

    @classmethod
    def like(cls, method: ik.NewtonKrylov, length: int) -> PrefixNewton | None:
        """``method`` by prefixes: no larger ``forcing``, and no more vectors, than it allows.  ``None`` where it says
        something of what is not done here: how steps are halved, or a preconditioner."""
        own = dataclasses.replace(
            ik.NewtonKrylov(), forcing=method.forcing, restart=method.restart, inner_steps=method.inner_steps
        )
        most = cls(length)
        forcing = min(most.forcing, method.forcing)
        vectors = min(most.vectors, method.restart, method.inner_steps)
        return cls(length, forcing, vectors) if method == own else None

    def step(self, f: Any, rows: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step of the positions ``f.moving``."""
        products = f.products(rows)
        # f(z) - z; positions that do not move have met the tolerance
        r = torch.where(f.moving.unsqueeze(1), f.residual(rows).nan_to_num(0.0, 0.0, 0.0), 0)
        shape = (-1, self.length, r.shape[1])
        goal = self.forcing * r.double().square().view(shape).sum(2).cumsum(1).sqrt()
        vectors, d = [r], torch.zeros_like(r)
        images: list[Tensor] = []
        open_ = f.moving.view(-1, self.length)
        while len(images) < self.vectors and bool(open_.any()):
            vectors.append(vectors[-1] + products(vectors[-1]))  # J v, of a residual whose Jacobian is J - I
            images.append(vectors[-2] - vectors[-1])
            c, left = _fits(
                torch.stack(images, 1).double().view(*shape[:2], len(images), shape[2]), r.double().view(shape)
            )
            found = (torch.stack(vectors[:-1], 2) @ c.reshape(-1, len(images), 1).to(r)).squeeze(2)
            d = torch.where(open_.reshape(-1, 1), found, d)
            open_ = open_ & ~(left <= goal).cummin(1).values
        return rows + d, state


def _fits(Y: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """For every prefix the coefficients of least residual, and its norm.

    Args:
        Y: images ``(batch, length, m, d)``. r: ``(batch, length, d)``.

    Returns:
        ``(batch, length, m)``, ``(batch, length)``.
    """
    G = (Y @ Y.mT).cumsum(1)
    g = (Y @ r.unsqueeze(3)).squeeze(3).cumsum(1)
    scale = G.diagonal(dim1=2, dim2=3).sqrt()
    scale = torch.where(scale > 0, scale, 1)
    eye = torch.eye(G.shape[2], dtype=G.dtype, device=G.device)
    G, g = G / (scale.unsqueeze(3) * scale.unsqueeze(2)) + _RIDGE * eye, g / scale
    c = torch.linalg.solve_ex(G, g)[0].nan_to_num(0.0, 0.0, 0.0)
    size = r.square().sum(2).cumsum(1)
    return c / scale, (size - (c * g).sum(2)).clamp_min(0).sqrt()
