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

Source: Triggs, McLauchlan, Hartley & Fitzgibbon (2000), "Bundle adjustment", section 3.3; the losses and their names are
those of ``scipy.optimize.least_squares``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.wording import kind_of

__all__ = ["LOSSES", "Robust"]

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


class Robust:
    """The residuals of which half the squared norm is the robust loss.

    Args:
        function: the residuals. loss: a name in :data:`LOSSES`, or ``rho(s)``, elementwise, with ``rho(0) = 0`` and a
            positive slope. scale: ``f_s``, a positive number or a tensor that broadcasts against the residuals.
    """

    identified_by = ("function", "loss", "scale")

    def __init__(self, function: Callable[..., Any], loss: str | Callable[[Tensor], Tensor], scale: Any) -> None:
        self.function, self.loss, self.scale = function, loss, scale
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, z: Any, *args: Any) -> Any:
        return trees.tree_map(self._transformed, self.function(z, *args))

    def _transformed(self, r: Any) -> Any:
        if not isinstance(r, Tensor):
            return r
        s = (r / self.scale).square()
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
