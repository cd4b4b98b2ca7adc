r"""Robust losses for least squares: ``f_s^2 \sum_i \rho((r_i / f_s)^2) / 2`` in place of ``\sum_i r_i^2 / 2``.

With ``w(s) = \rho(s) / s`` the residuals ``\tilde r = r \sqrt{w((r / f_s)^2)}`` have the robust sum as half their own
squared norm, so that every least-squares method, Gauss-Newton included, minimises it as it is, and the derivative of the
solution is that of the robust objective.

==============  =============================  ==========================================
loss            ``\rho(s)``                    ``w(s)``, without cancellation
==============  =============================  ==========================================
``linear``      ``s``                          1
``soft_l1``     ``2 (\sqrt{1 + s} - 1)``       ``2 / (1 + \sqrt{1 + s})``
``huber``       ``s``, ``2 \sqrt s - 1``       1 for ``s <= 1``, ``(2 \sqrt s - 1) / s``
``cauchy``      ``\log(1 + s)``                ``\log(1 + s) / s``
``arctan``      ``\arctan s``                  ``\arctan(s) / s``
==============  =============================  ==========================================

The models of the methods (:meth:`Robust.curvature`).  Gauss and Newton's ``\tilde R^T \tilde R`` is a poor one: an outlier
has the weight ``f_s / (2 |r|)`` in it under ``huber``, half of what leads to its minimum, so that from far off steps are
twice too long, and near the solution, where it has no curvature at all, too short.  Two others have the gradient, too:

    \rho'(s)                        that of reweighted least squares: it lies above the loss, and steps from far off lower it
    \rho'(s) + 2 s \rho''(s)        the second derivative of the loss: it is zero and less for outliers, exact in the end

The larger of the second and ``\theta`` times the first is taken, with ``\theta`` from 1 down while steps keep their promise;
in the end, ``\theta = 0``, the second, whatever its sign.

Source: Triggs, McLauchlan, Hartley & Fitzgibbon (2000), "Bundle adjustment", sections 3.3 and
4.3 (the second model); Holland & Welsch (1977), Comm. Statist. A6 (the first); the losses and their names are those of
``scipy.optimize.least_squares``.  Which of the two, by ``\theta``: this library's, measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, trees
from implicitkit.foundation.numbers import real_parts
from implicitkit.foundation.wording import kind_of
from implicitkit.problem.wrapping import Around

_SMALL = 1e-4  # below which w is taken from its series


def _linear(s: Tensor) -> Tensor:
    return torch.ones_like(s)


def _soft_l1(s: Tensor) -> Tensor:
    return 2 / (1 + torch.sqrt(1 + s))


def _huber(s: Tensor) -> Tensor:
    outside = torch.where(s > 1, s, 1)
    return torch.where(s > 1, (2 * torch.sqrt(outside) - 1) / outside, 1)


def _cauchy(s: Tensor) -> Tensor:
    away = torch.where(s > _SMALL, s, 1)
    series = 1 - s * (1 / 2 - s * (1 / 3 - s * (1 / 4 - s / 5)))
    return torch.where(s > _SMALL, torch.log1p(away) / away, series)


def _arctan(s: Tensor) -> Tensor:
    away = torch.where(s > _SMALL, s, 1)
    t = s.square()
    return torch.where(s > _SMALL, torch.atan(away) / away, 1 - t * (1 / 3 - t / 5))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": _linear,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}
"""``w(s) = rho(s) / s`` of each loss by name."""


def _huber_curvature(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(q > 1, 0, 1).to(q), torch.where(q > 1, 2 * q / (q + 1), 1)


def _soft_l1_curvature(q: Tensor) -> tuple[Tensor, Tensor]:
    u = 1 + q / 2
    over = 2 / (u + 1)
    return over / u, over * u


def _cauchy_curvature(q: Tensor) -> tuple[Tensor, Tensor]:
    over = torch.where(q > _SMALL, q / torch.expm1(q.clamp_min(_SMALL)), 1 - q / 2)
    return (1 - torch.expm1(q)) * over, torch.exp(q) * over


def _arctan_curvature(q: Tensor) -> tuple[Tensor, Tensor]:
    double = torch.sin(2 * q).clamp_min(torch.finfo(q.dtype).eps)
    over = torch.where(q > _SMALL, 2 * q / double, 1)
    return (1 - 4 * torch.sin(q).square()) * over, over


CURVATURES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "huber": _huber_curvature,
    "soft_l1": _soft_l1_curvature,
    "cauchy": _cauchy_curvature,
    "arctan": _arctan_curvature,
}
r"""``\rho' + 2 s \rho''`` and ``\rho'``, over ``s \rho'^2 / \rho``, Gauss and Newton's, by ``\rho``."""


class Robust(Around):
    """The residuals of which half the squared norm is the robust loss.

    Args:
        function: the residuals. loss: a name in :data:`LOSSES`, or ``rho(s)``, elementwise, with ``rho(0) = 0`` and a
            positive slope. scale: ``f_s``, a positive number or a tensor that broadcasts against the residuals.
    """

    identified_by = ("function", "loss", "scale")

    def __init__(self, function: Callable[..., Any], loss: str | Callable[[Tensor], Tensor], scale: Any) -> None:
        super().__init__(function)
        self.loss, self.scale = loss, scale

    def __call__(self, z: Any, *args: Any) -> Any:
        return trees.tree_map(self._transformed, self.function(z, *args))

    @property
    def is_modelled(self) -> bool:
        """Is the loss one of ours, and are all residuals of one scale, which is a number here?"""
        scale = self.scale
        several = isinstance(scale, Tensor) and (scale.numel() != 1 or compat.is_wrapped(scale))
        return not several and isinstance(self.loss, str) and self.loss in CURVATURES

    def curvature(self, r: Tensor, share: Tensor) -> Tensor | None:
        r"""``k``, ``(batch, m)``, so that ``sum_i k_i (\tilde R p)_i^2 / 2`` is the quadratic term of a model with the share
        ``\theta`` ``(batch,)`` (see the top of this file), positive where ``\theta`` is; ``None``, Gauss and Newton's, of a
        stranger's loss, and where the residuals have several scales.

        Args:
            r: the transformed residuals, ``(batch, m)``.
        """
        if not self.is_modelled:
            return None
        assert isinstance(self.loss, str)
        rho = (r / float(self.scale)).square()
        second, first = CURVATURES[self.loss](rho)
        share = share.to(r).unsqueeze(1)
        return torch.where(share > 0, torch.maximum(second, share * first), second)

    def _transformed(self, r: Any) -> Any:
        if not isinstance(r, Tensor):
            return r
        s = real_parts(r / self.scale).square()
        r = real_parts(r)
        if isinstance(self.loss, str):
            return r * LOSSES[self.loss](s).sqrt()
        away = torch.where(s > 0, s, 1)  # of a stranger's rho the slope at zero is taken from next to it
        near = torch.full_like(s, torch.finfo(s.dtype).eps ** 0.5)
        weight = torch.where(s > 0, self._rho(away) / away, self._rho(near) / near)
        return r * weight.sqrt()

    def _rho(self, s: Tensor) -> Tensor:
        """What a stranger's loss says of squared residuals, one number each."""
        assert not isinstance(self.loss, str)
        rho = self.loss(s)
        if not isinstance(rho, Tensor) or rho.shape != s.shape:
            got = f"shape {tuple(rho.shape)}" if isinstance(rho, Tensor) else kind_of(rho)
            raise ValueError(
                f"loss must return rho of each squared residual, shape {tuple(s.shape)}, in torch's operations; it returned "
                f"{got} (SciPy's three rows: the first of them is rho, torch finds the derivatives)"
            )
        return rho
