r"""Steps of Newton's method for minimisation in a trust region, by factors of sparse Hessians, sample by sample.

    minimise  g'p + p'Hp / 2   within  |p| <= r:      p = -(H + \mu I)^{-1} g,   \mu >= 0,   \mu (r - |p|) = 0,

with ``\mu`` so large that ``H + \mu I`` is positive definite, which the signs of the pivots say, or, of a narrow band and of
no more than some hundred unknowns, Cholesky's method.  ``\mu`` comes from Newton's method for ``1 / |p| = 1 / r`` (Moré &
Sorensen 1983, SIAM J. Sci. Stat. Comput. 4(3); Nocedal & Wright 2006, algorithm 4.3), between the last that was too small
and the last that was not, a factorisation each, until ``|p|`` is between two thirds and 1.1 of ``r``.  It begins at that of
the step before, which along a valley is near, and where circles of Gershgorin allow it; at zero while ``H`` is definite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.banded import SymmetricBand, SymmetricSquare
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.sparsity.same_pattern import with_entries

_TRIALS = 30
_DENSE = 512  # unknowns up to which a dense matrix has its factors sooner than a sparse one has
_SHORT, _LONG = 2 / 3, 1.1  # lengths, by the radius, that are near enough to it
_FIRST = 1e-3  # the first shift of a matrix that is not definite, by its largest entry, where nothing bounds it
_FURTHER = 4.0  # times a shift that is too small, at most
_SHORT_STEPS = 2  # to the boundary that are too short, before one along that direction is made of them
_FAILED = 3  # shifts that are too small, before one that is known not to be
_NEARLY = (
    0.19  # of a model's decrease that a step to the boundary along its weakest direction may miss: (1 - 0.1)^2 are left
)


class SparseStep(NamedTuple):
    """The minimisers ``p`` ``(batch, n)`` of models within their balls, what these ``promised``, ``(batch,)``, and the
    ``shift`` of each, ``(batch,)``, zero where the matrix is definite itself; ``made``: factorisations of all samples;
    ``factors``: the matrices with factors, where every step is a whole one of Newton's."""

    p: Tensor
    promised: Tensor
    shift: Tensor
    made: float
    factors: SparseBlocks | None = None


class _OfMinima:
    """Factors of definite matrices, as :class:`~implicitkit.linear.factors.sparse_factors.SparseFactor` has them.

    Args:
        saddles: of each sample.
    """

    reason = ""

    def __init__(self, saddles: list[SparseSaddle]) -> None:
        self._saddles, self.ok = saddles, torch.ones(len(saddles), dtype=torch.bool, device="cpu")

    def solve(self, b: Tensor, transpose: bool = False) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``."""
        rhs = array(b)
        x = np.stack([saddle.once(some) for saddle, some in zip(self._saddles, rhs, strict=True)])
        return torch.from_numpy(x).to(b)


def sparse_step(blocks: Any, g: Tensor, radius: Tensor, done: Tensor, shift: Tensor) -> SparseStep:
    """``p`` and ``promised`` are zero for the samples that are ``done``, and where no shift makes the matrix definite.

    Args:
        blocks: the Hessians, :class:`SparseBlocks`, or with a border that has its own eigenvalues.
        g: gradients. radius: ``(batch,)``. shift: near which each one's is looked for, ``(batch,)``.
    """
    one, none = (torch.full((len(g),), x, dtype=torch.float64, device="cpu") for x in (1.0, 0.0))
    shifted = blocks.shifted(none, one)
    whole: SparseBlocks = shifted.extended
    slopes, shifts = array(g), array(shift).copy()
    p, promised, made, n = np.zeros(slopes.shape), np.zeros(len(g)), 0, slopes.shape[1]
    plain: list[SparseSaddle] = []
    for i, values in enumerate(whole.values):
        if bool(done[i]) or not (np.isfinite(values).all() and np.isfinite(slopes[i]).all()):
            continue
        H = with_entries(whole.ready.analysed(_by_columns), values)
        narrow = blocks.extended.ready.analysed(analyse).band is not None and not blocks.border
        layout = whole.ready.analysed(_band_layout if narrow else _layout)
        if layout.band is None and not blocks.border and (n <= _DENSE or layout.ordering.fills(n)):
            layout.band = SymmetricSquare(layout.rows, layout.columns, n)
        negative = int((shifted.signs[i] > 0).sum()) if blocks.border else 0
        x, shifts[i], last, factorisations = _one(H, slopes[i], float(radius[i]), layout, negative, float(shifts[i]))
        plain += [] if last is None else [last]
        p[i], made = x[:n], made + factorisations
        promised[i] = -slopes[i] @ p[i] - 0.5 * p[i] @ (H @ x)[:n]
    step, decrease, shift = (torch.from_numpy(v).to(g) for v in (p, promised, shifts))
    whole_steps = len(plain) == len(g) and not blocks.border
    factors = SparseBlocks(*blocks.found).solved_by(_OfMinima(plain)) if whole_steps else None
    return SparseStep(step, decrease, shift, made / len(g), factors)


def _by_columns(pattern: sp.csr_matrix) -> sp.csc_matrix:
    return sp.csc_matrix(pattern.T)  # by rows and by columns a symmetric matrix is the same


def _layout(pattern: sp.csr_matrix) -> Layout:
    return Layout(_by_columns(pattern))  # with its whole diagonal


def _band_layout(pattern: sp.csr_matrix) -> Layout:
    """The :func:`_layout` of a band, whose diagonal makes it no wider."""
    return Layout(_by_columns(pattern), SymmetricBand(analyse(pattern)))


def _bounds(H: sp.csc_matrix, g: np.ndarray, radius: float, diagonal: np.ndarray) -> tuple[float, float]:
    """Between what the shift lies, by the circles of Gershgorin (Conn, Gould & Toint 2000, *Trust-region methods*, section
    7.3.8): below the first the matrix has a negative entry on its diagonal or the step is too long, from the second on it is
    definite and the step is none too long."""
    middle = H.data[diagonal]
    beside = np.add.reduceat(np.abs(H.data), H.indptr[:-1]) - np.abs(middle)
    slope = float(np.linalg.norm(g)) / radius
    return max(0.0, -float(middle.min()), slope - float((middle + beside).max())), slope + float(
        (beside - middle).max()
    )


def _between(least: float, most: float) -> float:
    """The geometric mean, of no less than a share of the larger."""
    return float(np.sqrt(max(least, _FIRST * most) * most))


def _one(
    H: sp.csc_matrix, g: np.ndarray, radius: float, layout: Layout, negative: int, shift: float
) -> tuple[np.ndarray, float, SparseSaddle | None, int]:
    """``p``, and behind it the numbers of a border, the shift, or zero where ``H`` has been seen to be definite, its factors
    where the step is a whole one of Newton's, and how many factorisations that took; ``negative``: those of its eigenvalues
    below zero that are the border's.

    In the hard case, where ``g`` does not see the lowest eigenvalue, no shift makes the step long enough: along its
    eigenvector ``u`` it then goes to the boundary, where that misses little of the decrease, ``tau^2 u'Ku <= 0.19 (p'Kp +
    shift r^2)`` (Moré & Sorensen 1983, lemma 3.4).  Else ``u`` says where the pole of ``|p|`` is, and what is near it.
    """
    n, border = len(g), np.zeros(H.shape[0] - len(g))
    largest = float(np.abs(H.data).max(initial=0.0)) or 1.0
    p, rhs, made, failed, short = np.zeros(H.shape[0]), np.r_[-g, border], 0, 0, 0
    u = np.zeros(0)
    least, most = (0.0, np.inf) if border.size else _bounds(H, g, radius, layout.diagonal)
    begun = shift = min(max(shift, least), max(most, 0.0))
    bare = least == 0  # may it be definite as it is?
    while made < _TRIALS:
        made += 1
        K = with_entries(H, H.data.copy())
        K.data[layout.diagonal[:n]] += shift
        saddle = layout.saddle(K, n)
        if saddle.negative != negative:
            failed += 1
            least, most, bare = shift, most if shift < most else np.inf, False
            further = max(_FURTHER * shift, _FIRST * largest) if shift or most == np.inf else np.inf
            sure = failed >= _FAILED and not short and most < np.inf
            shift = most if sure else min(further, _between(least, most))
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
        if length < radius and not bare:
            short += 1
            u, lowest = _lowest(saddle, n, border, u)
            rest = p + _to_boundary(p[:n], u[:n], radius) * u
            tau = float((rest - p)[:n] @ u[:n])
            if (short > _SHORT_STEPS or made == 1) and tau**2 * lowest <= _NEARLY * (
                shift * radius**2 - float(g @ p[:n])
            ):
                p = rest
                break
            least = max(least, shift - lowest)
            part = abs(float(g @ u[:n]))
            others = max(length**2 - (part / lowest) ** 2, 0.0)
            pole = shift - lowest + part / np.sqrt(max(radius**2 - others, 0.1 * radius**2))
            following = following if following > least else pole
        shift = max(following, 0.0) if bare or following > least else _between(least, shift)
    length = float(np.linalg.norm(p[:n]))
    p = p if length <= _LONG * radius or not length > 0 else p * (radius / length)
    definite = saddle if shift == most == 0 and saddle.regular else None  # not by rounding alone
    return p, 0.0 if bare and begun == 0 else shift, definite, made


def _lowest(saddle: SparseSaddle, n: int, border: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, float]:
    """Near the eigenvector of the least eigenvalue of a definite matrix, of length one, and ``u'Ku``, no less than that: by
    two inverse iterations, from one that is ``near`` if there is any, else from random numbers."""
    b = near[:n] if near.size else np.random.default_rng(0).standard_normal(n)
    for _ in range(2):
        b /= np.linalg.norm(b)
        x = saddle.solve(np.r_[b, border])[0]
        square, curvature = float(x[:n] @ x[:n]), float(x[:n] @ b)
        b = x[:n]
    return x / np.sqrt(square), curvature / square


def _to_boundary(p: np.ndarray, u: np.ndarray, radius: float) -> float:
    """The ``tau`` of least size with ``|p + tau u| = radius``, of a ``p`` inside and a ``u`` of length one."""
    along = float(p @ u)
    root = np.sqrt(along**2 + radius**2 - float(p @ p))
    return float(root - along if along > 0 else -root - along)
