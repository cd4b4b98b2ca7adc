r"""Steps of Newton's method for minimisation in a trust region, by dense Hessians of few unknowns, all samples at once.

    minimise  g'p + p'Hp / 2   within  |p| <= r:      p = -(H + \mu I)^{-1} g,   \mu >= 0,   \mu (r - |p|) = 0,

Where ``H`` is positive definite and the Newton step ends inside, that is it, by Cholesky's factors.  Else with ``H = Q
diag(\lambda) Q'`` and ``c = Q'g``, once for all radii of a step, ``|p|^2 = \sum c_i^2 / (\lambda_i + \mu)^2``, and ``\mu``
comes from Newton's method for ``1 / |p| = 1 / r`` (Moré & Sorensen 1983, SIAM J. Sci. Stat. Comput. 4(3); Nocedal & Wright
2006, section 4.3).  It begins at the largest ``\mu`` at which one summand alone is that long, from where it goes up,
and ever more slowly.  Where no ``\mu > -\lambda_1`` makes the step as long as ``r`` (the hard case, where ``c_1 = 0``) a
multiple of the first eigenvector is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.dense import mv
from implicitkit.linear.price import eigenvalues, price_of_dense_like
from implicitkit.solver.steps.convex_model import by_factors

_TRIALS = 12  # lengths that are computed for a step at most
_NEAR = 0.02  # of the radius, by which a step may be longer before it is cut
_WEAK = 0.1  # of the largest slope, what waits where curvature may be rounding errors
_MOST = 1 << 24  # numbers in the Hessians of a batch


def price_of_spectrum(H: Operator) -> float:
    """What a step costs at most, in products of conjugate gradients: the matrices, and their eigenvalues."""
    price = price_of_dense_like(H, conjugate=True)
    if H.batch * H.size**2 > _MOST:
        return torch.inf
    return price.factors + eigenvalues(H.batch, H.size)


class SpectralStep:
    """The steps from one point, for whatever radii.

    Args:
        H: the Hessians. g: gradients, ``(batch, n)``.

    Attributes:
        factors: of all Hessians, where they are positive definite (:class:`HessianFactors`), else ``None``.
    """

    def __init__(self, H: Operator, g: Tensor) -> None:
        self.H, self.g = H.dense(), g
        self.newton, convex, self.factors = by_factors(self.H, g)
        self.length = torch.linalg.vector_norm(self.newton, dim=1).where(convex, torch.inf)
        self._spectrum: tuple[Tensor, Tensor, Tensor] | None = None

    def within(self, radius: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""``p`` ``(batch, n)``, the decrease of the model, and ``\mu``, ``(batch,)`` both, zero where ``p`` ends inside;
        of samples that are ``done``, anything."""
        inside = done | (self.length <= radius)
        promised = -0.5 * (self.g * self.newton).sum(1)
        if bool(inside.all()):
            return torch.where(done.unsqueeze(1), 0, self.newton), promised, torch.zeros_like(radius)
        values, vectors, c = self._decomposed()
        part, mu = _within(values, c, radius.to(c))
        p, mu = -mv(vectors, part).to(self.g), mu.to(self.g)
        by_model = (part * (c - 0.5 * values * part)).sum(1).to(self.g)
        sound = torch.isfinite(p).all(1) & torch.isfinite(by_model)
        p, by_model = torch.where(sound.unsqueeze(1), p, 0), torch.where(sound, by_model, 0)
        return (
            torch.where(inside.unsqueeze(1), torch.where(done.unsqueeze(1), 0, self.newton), p),
            torch.where(inside, promised, by_model),
            torch.where(inside, 0, mu),
        )

    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        r"""``\lambda``, ``Q`` and ``c``.  Where the curvature along an eigenvector is below the root of rounding beside the
        largest it may be errors, and lead to the boundary: no step is taken along it, until other slopes are no longer ten
        times its own.  Where a second derivative is not finite, though the slope is, the model is flat."""
        if self._spectrum is None:
            H = self.H if self.H.dtype in (torch.float32, torch.float64) else self.H.float()
            finite = torch.isfinite(H).flatten(1).all(1)[:, None, None]
            values, vectors = torch.linalg.eigh(torch.where(finite, 0.5 * (H + H.mT), torch.nan_to_num(H * 0)))
            c = mv(vectors.mT, self.g.to(H.dtype))
            least, flat = (
                share * x.abs().amax(1, keepdim=True)
                for x, share in ((values, torch.finfo(H.dtype).eps ** 0.5), (c, _WEAK))
            )
            still = (values.abs() <= least) & (c.abs() <= flat)
            values, c = torch.where(still, least, values), torch.where(still, 0, c)
            self._spectrum = values, vectors, c
        return self._spectrum


def _within(values: Tensor, c: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    r"""``-Q'p`` and ``\mu``: ``values`` ``\lambda`` in ascending order, ``(batch, n)``.

    ``\lambda + \mu`` is the way from the least one below zero, and how much ``\mu`` is beyond that: rounding would hide
    the second, where the slope along the first eigenvector is small."""
    tiny = torch.finfo(c.dtype).tiny
    least = (-values.amin(1)).clamp_min(0)
    gaps = values + least.unsqueeze(1)
    beyond = (c.abs() / radius.unsqueeze(1) - gaps).amax(1).clamp_min(0)
    for _ in range(_TRIALS):
        below = (gaps + beyond.unsqueeze(1)).clamp_min(tiny)
        part = torch.where(c == 0, 0, c / below)
        square = part.square()
        length = square.sum(1).sqrt()
        far = length - radius
        if bool((far <= _NEAR * radius).all()):
            break
        beyond = beyond + torch.where(far > 0, far / radius * length.square() / (square / below).sum(1), 0)
    cut = torch.where(length > radius, radius / length, 1)
    part = cut.unsqueeze(1) * part
    mu = least + beyond
    hard = (length < radius) & (values[:, 0] + mu <= tiny + 1e-3 * mu.abs()) & (mu > 0)
    if bool(hard.any()):
        rest = (radius.square() - part[:, 1:].square().sum(1)).clamp_min(0).sqrt()
        first = torch.where(c[:, 0] < 0, -rest, rest)
        part = torch.cat([torch.where(hard, first, part[:, 0]).unsqueeze(1), part[:, 1:]], 1)
    return part, mu
