r"""Has a minimisation stalled in a kink?

At a minimum of ``|z - a|_1``, or of a maximum, no gradient vanishes, but a convex combination of those nearby does (Clarke):
``0`` lies in the hull of gradients at points drawn about it, of which each is far from zero.  Burke, Lewis & Overton (2005),
"A robust gradient sampling algorithm for nonsmooth, nonconvex optimization", SIAM J. Optim. 15, 751-779.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.problem.kinked_spectra import beside_kinks
from implicitkit.solution import Status
from implicitkit.solver.base import Outcome
from implicitkit.solver.evaluations import Evaluations

KINK = (
    "The objective stops falling in a kink (of |z|, relu, a maximum): gradients all around that point have a mean of zero, "
    "and none vanishes. State the term as prox= (ik.prox.l1 for a |z|, ik.prox.nuclear for a sum of singular values) or by "
    "constraints=, a program with eigenvalues as an implicitkit_cvxpy.ConvexLayer, or smooth it"
)
SPECTRA = (
    "The search ends, twice, beside a kink, where singular values or eigenvalues that count differently coincide, or one "
    "vanishes: no gradient vanishes there. State a sum of singular values as prox=ik.prox.nuclear(...), a program with "
    "eigenvalues as an implicitkit_cvxpy.ConvexLayer, or smooth it"
)
_TWICE, _BRIEF = 2, 60  # methods that end beside such a kink, and steps of the next one after the first
_FEW = 32  # unknowns, at most
_PAIRS = 24  # of opposite directions, at most; else two more than twice as many as unknowns
_RADII = (1e-6, 1e-4)  # of 1 + max |z|
_WIDER, _JUMPS = 10.0, 3.0  # times as far gradients differ by no more than so many times as much: they jump
_LARGE = 1e-4  # of the gradient at the start, such a jump
_HULL, _SWEEPS = 0.05, 300  # of the largest gradient: the shortest mean; and steps to find it
_FARTHER, _LIKE = 16.0, 0.1  # times as far, and back, a jump is the same but for this
_ASKED = 2  # times that a sample is looked at: where the next method ends may be nearer
_SHARE, _OFF = 1e-6, 0.1  # of the gradient at the start and so far off, a jump that is no rounding
_ROUNDING = 10.0  # units of it, by which the objective may be lower nearby


class Kinks:
    """Samples of a minimisation in several stages that have stalled in a kink, ``(batch,)``: what they are is looked for
    twice at most.  They are no solutions, not even where autograd says zero in the kink itself: how a minimum moves with it
    is not what derivatives there say."""

    def __init__(self, like: Tensor) -> None:
        self.found, self._asked = torch.zeros_like(like), torch.zeros_like(like).long()
        self._beside = torch.zeros_like(like).long()  # how many methods in a row have ended beside one of a spectrum
        self._point: Tensor | None = None
        self._norm: Tensor | None = None

    def look(
        self, f: Evaluations, found: Outcome, samples: Tensor, open_: Tensor, start_norm: Tensor, total: Outcome
    ) -> None:
        """After a stage for some samples.  What is found counts its evaluations in ``total``."""
        steep = ~(found.residual_norm < _LARGE * start_norm)  # of a gradient that vanishes nothing jumps
        z = found.z if found.left is None else found.left
        if f.system.lifted.spectral and bool(steep.any()):
            ended = (found.status != int(Status.CONVERGED)) & (found.status != int(Status.STOPPED)) & steep
            beside = ended & beside_spectra(f, found.z)
            self._beside = self._beside.index_put((samples,), torch.where(beside, self._beside[samples] + 1, 0))
            self._keep(f, found.z, samples, beside & (self._beside[samples] >= _TWICE), total)
            steep = steep & ~beside
        stalled = (found.status == int(Status.STALLED)) | (found.status == int(Status.DIVERGED))
        asked = stalled & steep & (open_ & (self._asked < _ASKED)).index_select(0, samples)
        if bool(asked.any()):
            self._asked = self._asked.index_put((samples,), self._asked[samples] + asked)
            kink = torch.zeros_like(asked)
            with suppress(Exception):  # beside a point whose domain ends there
                kink = in_a_kink(f, z, asked, start_norm)
            self._keep(f, z, samples, kink, total)
        total.evaluations, total.sample_evaluations = f.evaluations, f.sample_evaluations

    def limit(self, samples: Tensor) -> int | None:
        """How many steps the next method may take for these; ``None``: as many as it does."""
        return _BRIEF if bool((self._beside[samples] > 0).all()) else None

    def _keep(self, f: Evaluations, z: Tensor, samples: Tensor, kink: Tensor, total: Outcome) -> None:
        """These have a kink at ``z``."""
        if bool(kink.any()):
            where, norm = samples[kink], torch.linalg.vector_norm(f.beside("minimise")(z), dim=1)
            self._point = (total.z if self._point is None else self._point).index_copy(0, where, z[kink])
            old = total.residual_norm if self._norm is None else self._norm
            self._norm = old.index_copy(0, where, norm.to(old)[kink])
            self.found = self.found.index_fill(0, where, True)

    def close(self, total: Outcome) -> None:
        """What no other stage has solved has stalled there."""
        open_ = self.found & (total.status != int(Status.CONVERGED)) & (total.status != int(Status.STOPPED))
        if self._point is not None and self._norm is not None and bool(open_.any()):
            total.z = torch.where(open_.unsqueeze(1), self._point, total.z)
            total.residual_norm = torch.where(open_, self._norm, total.residual_norm)
            total.status, total.message = torch.where(open_, int(Status.STALLED), total.status), KINK
            if bool((self._beside[open_] >= _TWICE).all()):
                total.message = SPECTRA


def beside_spectra(f: Evaluations, z: Tensor) -> Tensor:
    """Samples beside a kink where eigenvalues or singular values coincide, ``(batch,)``.  Two evaluations."""
    f.evaluations += 2
    f.sample_evaluations += 2 * len(z)
    found = None
    with suppress(Exception):  # of compiled functions, whose operations nobody sees, or beside the end of a domain
        found = None if f.system.lifted.compiled else beside_kinks(lambda: f.kernel(z), len(z))
    return torch.zeros_like(z[:, 0], dtype=torch.bool) if found is None else found


def in_a_kink(f: Evaluations, z: Tensor, which: Tensor, start_norm: Tensor) -> Tensor:
    """Which of the samples that have stalled are minima in a kink, ``(batch,)``: the objective is no lower around ``z``,
    gradients jump there, and ``0`` is a mean of them.  Up to 200 evaluations."""
    found = torch.zeros_like(which)
    if z.shape[1] > _FEW or z.dtype not in (torch.float32, torch.float64):
        return found
    probe = f.beside("minimise")
    ways = torch.nn.functional.normalize(
        seeded.normal(min(2 * z.shape[1] + 2, _PAIRS), z.shape[1], seed=0).to(z), dim=1
    )
    level = probe.value(z)
    noise = _ROUNDING * torch.finfo(z.dtype).eps * level.abs()
    for share in _RADII:
        open_ = which & ~found
        if not bool(open_.any()):
            break
        radius = share * (1 + z.abs().amax(1, keepdim=True))
        lowest, slopes = level, []
        for way in ways:
            for side in (radius, -radius):
                there = z + side * way
                lowest = torch.minimum(lowest, probe.value(there))
                slopes.append(probe(there))
        G = torch.stack(slopes, 1)
        size = torch.linalg.vector_norm(G, dim=2)
        far = [probe(z + s * _WIDER * radius * ways[0]) for s in (1, -1)]
        spread, wide = (torch.linalg.vector_norm(a - b, dim=1) for a, b in ((G[:, 0], G[:, 1]), far))
        largest = torch.linalg.vector_norm(G[:, ::2] - G[:, 1::2], dim=2).amax(1)
        jumps = (largest >= _LARGE * start_norm) & (wide <= _JUMPS * spread.maximum(0.1 * largest))
        least = size.amax(1)
        level_ = (lowest >= level - noise - 1e-2 * radius.squeeze(1) * least) & torch.isfinite(least) & (least > 0)
        open_ = open_ & jumps & level_
        if bool(open_.any()):
            found = found | (
                open_ & (_shortest(G / least.clamp_min(torch.finfo(z.dtype).tiny)[:, None, None]) <= _HULL)
            )
    return found


def jumps_at(f: Evaluations, z: Tensor, g: Tensor, which: Tensor, steep: Tensor) -> tuple[Tensor, Tensor]:
    r"""Where the gradient jumps in ``z`` itself, whatever autograd says there (zero, of ``|z|`` at zero), ``(batch,)``, and
    the direction ``q`` along which it was looked at, ``(batch, n)``.

    ``j(t) = g(z + t q) - g(z) - t H q``, of which ``H q`` is a derivative, is of second order in ``t`` where the gradient
    is smooth, however steep; beside a kink it is a jump, as large at ``16 t`` as at ``t`` and at ``t / 16``.

    Args:
        f: of the gradient. z, g: a point and the gradient there, ``(batch, n)``. which: the samples in question. steep:
            ``|g|`` at the start, of which rounding errors are no part that counts.
    """
    q = torch.nn.functional.normalize(seeded.normal(z.shape[1], seed=0).to(z), dim=0).expand_as(z)
    size, norm = z.abs().amax(1, keepdim=True), lambda t: torch.linalg.vector_norm(t, dim=1)
    size, none = torch.where(size > 0, size, 1), torch.zeros_like(which)
    h = torch.finfo(z.dtype).eps ** 0.5 * size
    if z.dtype not in (torch.float32, torch.float64):
        return none, q
    try:
        Hq = f.linearize(z).mv(q)
    except Exception:  # the gradient is not to be differentiated, and no derivative will be
        return none, q
    least = torch.maximum(steep.nan_to_num(), norm(Hq) * size.squeeze(1)) * _SHARE
    found = none
    for side in (1.0, -1.0):
        jump = lambda t: f(z + t * q) - g - t * Hq  # noqa: E731
        near, same = jump(side * h), which & ~found
        same = same & (norm(near) > least)  # false for NaN
        for scale in (_FARTHER, 1 / _FARTHER):
            if bool(same.any()):
                same = same & (norm(jump(scale * side * h) - near) <= _LIKE * norm(near))
        if bool(same.any()):
            far = norm(f(z + side * _OFF * size * q) - g)
            same = same & (norm(near) > _SHARE * far)
        found = found | same
    return found, q


def _shortest(G: Tensor) -> Tensor:
    """The least ``|sum_k l_k g_k|`` with ``l >= 0`` and ``sum l = 1``, ``(batch,)``: accelerated projected gradient (Beck &
    Teboulle 2009)."""
    A = torch.nan_to_num(G @ G.mT)
    step = 1 / torch.linalg.matrix_norm(A).clamp_min(1e-30)[:, None]
    shares = torch.full_like(A[:, 0], 1 / A.shape[1])
    ahead, theta = shares, 1.0
    rank = torch.arange(1, A.shape[1] + 1, dtype=A.dtype, device=A.device)
    for _ in range(_SWEEPS):
        v = ahead - step * (A @ ahead.unsqueeze(2)).squeeze(2)
        ordered = v.sort(1, descending=True)[0]
        cut = (ordered.cumsum(1) - 1) / rank
        cut = cut.gather(1, (ordered > cut).sum(1, keepdim=True) - 1)
        new, after = (v - cut).clamp_min(0), 0.5 * (1 + (1 + 4 * theta * theta) ** 0.5)
        ahead, shares, theta = new + (theta - 1) / after * (new - shares), new, after
    return torch.linalg.vector_norm((shares.unsqueeze(1) @ G).squeeze(1), dim=1)
