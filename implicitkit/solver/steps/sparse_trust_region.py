r"""Steps of Newton's method for minimisation in a trust region, by factors of sparse Hessians, sample by sample.

    minimise  g'p + p'Hp / 2   within  |p| <= r:      p = -(H + \mu I)^{-1} g,   \mu >= 0,   \mu (r - |p|) = 0,

with ``\mu`` so large that ``H + \mu I`` is positive definite, which the signs of the pivots say, or of a narrow band
Cholesky's method.  ``\mu`` comes from Newton's method for ``1 / |p| = 1 / r`` (Moré & Sorensen 1983, SIAM J. Sci. Stat.
Comput. 4(3); Nocedal & Wright 2006, algorithm 4.3), between the last that was too small and the last that was not, a
factorisation each, until ``|p|`` is between two thirds and 1.1 of ``r``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.banded import SymmetricBand
from implicitkit.linear.factors.sparse_blocks import SparseBlocks

_TRIALS = 30
_SHORT, _LONG = 2 / 3, 1.1  # lengths, by the radius, that are near enough to it
_FIRST = 1e-3  # the first shift of a matrix that is not definite, by its largest entry


def sparse_step(blocks: Any, g: Tensor, radius: Tensor, done: Tensor) -> tuple[Tensor, Tensor, float]:
    """``p`` ``(batch, n)`` and the decrease of the model, ``(batch,)``, zero for the samples that are ``done``, and where no
    shift makes the matrix definite; and how many factorisations of all samples that took.

    Args:
        blocks: the Hessians, :class:`SparseBlocks`, or with a border that has its own eigenvalues.
        g: gradients. radius: ``(batch,)``.
    """
    one, none = (torch.full((len(g),), x, dtype=torch.float64, device="cpu") for x in (1.0, 0.0))
    shifted = blocks.shifted(none, one)
    whole: SparseBlocks = shifted.extended
    slopes = array(g)
    p, promised, made = np.zeros(slopes.shape), np.zeros(len(g)), 0
    for i, values in enumerate(whole.values):
        if bool(done[i]) or not (np.isfinite(values).all() and np.isfinite(slopes[i]).all()):
            continue
        H = sp.csc_matrix(whole.ready.matrix(values).T)  # by rows and by columns it is the same
        narrow = blocks.extended.ready.analysed(analyse).band is not None and not blocks.border
        layout = whole.ready.analysed(_band_layout if narrow else _layout)
        negative = int((shifted.signs[i] > 0).sum()) if blocks.border else 0
        (x, factorisations), n = _one(H, slopes[i], float(radius[i]), layout, negative), slopes.shape[1]
        p[i], made = x[:n], made + factorisations
        promised[i] = -slopes[i] @ p[i] - 0.5 * p[i] @ (H @ x)[:n]
    return torch.from_numpy(p).to(g), torch.from_numpy(promised).to(g), made / len(g)


def _layout(pattern: sp.csr_matrix) -> Layout:
    return Layout(sp.csc_matrix(pattern.T))  # of a symmetric matrix, with its whole diagonal


def _band_layout(pattern: sp.csr_matrix) -> Layout:
    """The :func:`_layout` of a band, whose diagonal makes it no wider."""
    return Layout(sp.csc_matrix(pattern.T), SymmetricBand(analyse(pattern)))


def _one(H: sp.csc_matrix, g: np.ndarray, radius: float, layout: Layout, negative: int) -> tuple[np.ndarray, int]:
    """``p``, and behind it the numbers of a border, and how many factorisations that took; ``negative``: eigenvalues of
    ``H`` below zero that are the border's."""
    n, border = len(g), np.zeros(H.shape[0] - len(g))
    largest = float(np.abs(H.data).max(initial=0.0)) or 1.0
    shift, least, most, p, rhs, made = 0.0, 0.0, np.inf, np.zeros(H.shape[0]), np.r_[-g, border], 0
    while made < _TRIALS:
        made += 1
        K = H.copy()
        K.data[layout.diagonal[:n]] += shift
        saddle = SparseSaddle(K, n, layout=layout)
        if saddle.negative != negative:
            least = shift
            shift = max(4 * shift, _FIRST * largest) if most == np.inf else 0.5 * (least + most)
            continue
        most = shift
        p = saddle.solve(rhs)[0]
        length = float(np.linalg.norm(p[:n]))
        if length <= _LONG * radius and (length >= _SHORT * radius or shift == 0):
            break
        rate = float(p[:n] @ saddle.solve(np.r_[p[:n], border])[0][:n])
        if not rate > 0:
            break
        following = shift + length**2 / rate * (length - radius) / radius
        shift = max(following, 0.5 * (least + shift) if least else 0.0)
    length = float(np.linalg.norm(p[:n]))
    return (p if length <= _LONG * radius or not length > 0 else p * (radius / length)), made
