r"""Which model of a robust loss a least-squares method steps by (:mod:`implicitkit.problem.robust`).

    m(p) = |r|^2 / 2 + g'p + \sum_i k_i (R p)_i^2 / 2,        g = R'r,      k_i = k(r_i; \theta)

``\theta`` (the share of reweighted least squares) begins at 1, and a tenth of it is tried after a step that was taken at
once and kept three quarters of its promise; after one that was refused at first, or kept less than a quarter, it is ten
times that.  It stays above 1e-4: so much of an outlier's own direction is left that the model is definite where no other
residual is.  In terms of ``\sqrt{k_i} R_i`` and ``r_i / \sqrt{k_i}`` it is a sum of squares like any other.

Once it is that small, methods that can bear negative ``k_i`` take the loss's own, ``\theta = 0``: of losses that are not
convex outliers have much of it, and steps without it end in a linear convergence, of a rate near one where outliers are
many (:func:`curvature`, :func:`root`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from implicitkit.linear.factors.dense import cholesky_batched
from implicitkit.solver.evaluations import Evaluations

_LEAST = 1e-4
_TIMES = 10.0  # by which the share changes
_KEPT, _POOR = 0.75, 0.25  # of the promise of a step


def weights(f: Evaluations, z: Tensor, share: Tensor) -> Tensor | None:
    r"""``\sqrt{k}`` at ``z``, ``(batch, m)``; ``None`` where all are one."""
    k = f.problem.flat_curvature(f.residuals(z), share)
    return None if k is None else k.sqrt().nan_to_num(1, 1, 1).clamp_min(torch.finfo(k.dtype).eps)


def curvature(f: Evaluations, z: Tensor, share: Tensor) -> Tensor | None:
    r"""``k`` at ``z``, ``(batch, m)``, of any sign in samples whose ``\theta`` has come down; ``None`` where all are one."""
    k = f.problem.flat_curvature(f.residuals(z), torch.where(share > _LEAST, share, 0))
    return None if k is None else k.nan_to_num(1, 1, 1)


def root(R: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``S`` and ``s`` with ``S'S = R' diag(k) R`` and ``S's = g``, rows of zeros below, of the shapes ``(batch, m, n)`` and
    ``(batch, m)``, and which samples have one: those where that is definite.

    Args:
        R: ``(batch, m, n)``. k: ``(batch, m)``. g: ``(batch, n)``.
    """
    below = R.shape[1] - R.shape[2]
    if below < 0:
        return R, R[:, :, 0], torch.zeros(len(R), dtype=torch.bool, device=R.device)
    L, ok = cholesky_batched(R.mT @ (R * k.unsqueeze(2)))
    s = torch.linalg.solve_triangular(L, g.unsqueeze(2).to(L), upper=False).squeeze(2)
    return pad(L.mT, (0, 0, 0, below)).to(R), pad(s, (0, below)).to(R), ok


def next_share(share: Tensor, ratio: Tensor, at_once: Tensor) -> Tensor:
    """The share for the next step, ``(batch,)``.

    Args:
        ratio: what the last step kept of its promise. at_once: was it the first that was tried?
    """
    less = torch.where(ratio > _KEPT, share / _TIMES, share)
    return torch.where(~at_once | (ratio < _POOR), share * _TIMES, less).clamp(_LEAST, 1)
