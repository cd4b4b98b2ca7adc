r"""Geodesic acceleration: a step of Levenberg and Marquardt's that follows the bend of a valley.

The residuals ``r(z)`` of a fit are a surface, and a step ``p``, ``(R'R + \mu D^2) p = -R'r``, sets out along a geodesic of
it.  To second order that goes on as ``z + p + a / 2`` with the acceleration

    (R'R + \mu D^2) a = -R' r_pp,    r_pp = d^2/dt^2 r(z + t p) at t = 0,

from the factors of the step and one more evaluation, ``r_pp = (2 / h) ((r(z + h p) - r(z)) / h - R p)``, to first order in
``h = 1/10`` (1/2 in single precision, where rounding is divided by ``h^2``): it is a correction that need not be exact.
Where the fit has directions along which it hardly changes, as sums of exponentials have, valleys are long, narrow and bent,
and straight steps have to be short; these need a third to a tenth as many.  Only a correction is meant: where
``2 |D a| > alpha |D p|``, ``alpha = 3/4``, the series says nothing, and the step stays as it is.

What following the bend gains of ``|r|^2 / 2`` is ``(|R a|^2 + \mu |D a|^2) / 8``.  Where that is less than a hundredth of
what the step promises, as along valleys that are straight and in the end, the next ones go without: 1, 4, 16, ... of them as
long as that is so; and the first eight do, since easy fits are at their ends by then.

Source: Transtrum & Sethna, *Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares minimization*
(2012), arXiv:1201.5885, sections 3 and 4, equations (8) to (15).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

_AHEAD, _FURTHER = 0.1, 0.5  # of the step, where the residuals are looked at for their second derivative along it
_MOST = 0.75  # of the step, what twice its correction may come to
_SLIGHT = 0.01  # of what a step promises: a gain that is not worth an evaluation
_MORE = 4  # times as many straight steps, if the next correction is slight, too
_LONG = 8  # steps after which a valley is a long one


class Bends(NamedTuple):
    """How many steps of each sample go straight from here, and how many did the last time, ``(batch,)`` each."""

    rest: Tensor
    pause: Tensor

    @classmethod
    def ahead(cls, z: Tensor) -> Bends:
        """Before the first step from ``z``, ``(batch, n)``."""
        none = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        return cls(none + _LONG, none)


class Model(Protocol):
    """The linear model of a step: ``r``, the residuals ``(batch, m)``."""

    r: Tensor

    def along(self, p: Tensor) -> Tensor:
        """``R p``, ``(batch, m)``."""

    def answer(self, mu: Tensor, b: Tensor) -> Tensor:
        """``x`` with ``(R'R + mu D^2) x = -R'b``; ``mu`` of shape ``(batch,)``, ``b`` of ``(batch, m)``."""


class Bend:
    """The bends of one step's trials.

    Args:
        f: the problem's. z: where the step begins, ``(batch, n)``. D: the scales of the unknowns, ``(batch, n)``. model: the
            step's; ``None`` where all go straight. bends: what is known of the samples.
    """

    def __init__(self, f: Evaluations, z: Tensor, D: Tensor, model: Model | None, bends: Bends) -> None:
        self.f, self.z, self.D, self.model, self.bends = f, z, D, model, bends
        self.asked = f.active & (bends.rest <= 0) & (model is not None)
        self.some = bool(self.asked.any())
        self.gain = torch.zeros_like(f.active, dtype=z.dtype)  # as a share of what the step promises

    def of(self, p: Tensor, mu: Tensor, promised: Tensor, open_: Tensor) -> Tensor:
        """``p + a / 2`` for the samples ``open_`` that are asked, or ``p``, ``(batch, n)``; ``promised``: by the model."""
        if not self.some or self.model is None:
            return p
        h = _AHEAD if p.dtype == torch.float64 else _FURTHER
        f, model, r = self.f, self.model, self.model.r
        ahead = f.problem.flat_residuals(f.kernel, torch.add(self.z, p, alpha=h)).detach().to(r)
        curvature = (2 / h) * ((ahead - r) / h - model.along(p).to(r))
        a = model.answer(mu, curvature.nan_to_num(torch.inf, torch.inf, torch.inf)).to(p)
        size = torch.linalg.vector_norm(self.D * a, dim=1)
        gain = (model.along(a).square().sum(1).to(p) + mu * size.square()) / 8
        self.gain = torch.where(open_, (gain / promised).to(p), self.gain)
        small = self.asked & open_ & (2 * size <= _MOST * torch.linalg.vector_norm(self.D * p, dim=1))
        return torch.where(small.unsqueeze(1), p + 0.5 * a, p)  # not where it is not finite

    def after(self) -> Bends:
        """What is known once the step is taken."""
        pause = torch.where(self.gain < _SLIGHT, (_MORE * self.bends.pause).clamp_min(1), 0)
        pause = torch.where(self.asked, pause, self.bends.pause)
        return Bends(torch.where(self.asked, pause, self.bends.rest - 1), pause)
