r"""Fixed points to which the map leads, where acceleration has come to another one.

Acceleration solves ``z = f(z)`` and does not care whether the iteration ``z <- f(z)`` would stay there: a Riccati equation
has the fixed point that a control engineer means, to which the iteration converges, and others that it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, part
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.fixed_point.picard import Picard
from implicitkit.solver.fixed_point.repelling import leads_away, stretches
from implicitkit.solver.method import Method
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.scales import in_working_precision

__all__ = ["PATH", "PATH_STEPS", "Attracting", "outward"]

#: The map's own path, for as long as its residual falls, or rises: neither says that it goes round in circles.
PATH, PATH_STEPS = Impatient(Picard(), window=32, horizon=500.0, reach=1e6, follow=True), 1000

_DOUBT = 1e-3  # by which a Ritz value exceeds one before anybody looks
_POWERS = (1, 2, 4)  # of the projected Jacobian, whose norms tell that it contracts
_SQUARINGS = 10  # of the projected Jacobian: its spectral radius by |H^1024|^(1/1024)


@dataclass(frozen=True)
class Attracting(Solver):
    r"""An acceleration, and where it ends in a fixed point that repels, the plain iteration from the start instead.

    The differences that the method remembers, ``J dZ = dW`` to first order, give Ritz values of ``J = df/dz`` for nothing
    (:func:`outward`).  Where one exceeds one in modulus, products with ``J`` at the point, by differences, from the Ritz
    vector on, say whether ``J`` does stretch; and where it does, ``z <- f(z)`` from ``z_0`` has the last word: what that
    converges to attracts.  A map that has no fixed point of this kind within reach keeps the first one,
    which is a solution like any other; of one that is affine on the way that is known without going it
    (:mod:`~implicitkit.solver.fixed_point.repelling`).

    Source: Ritz values, Saad (2011), *Numerical Methods for Large Eigenvalue Problems*, section 4.3; that a fixed point
    attracts where the spectral radius of ``J`` is below one, Ostrowski (1960).

    Args:
        method: keeps the differences that it remembers (``Outcome.kept["history"]``), or what
            they say (``"outward"``).
        patience: steps that it may take.

    Raises:
        ValueError: ``patience`` below 1. TypeError: not an iterative method.
    """

    method: Any
    patience: int = 500
    solves: ClassVar[str] = "fixed_point"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's own."""
        return str(self.method.name)

    def __post_init__(self) -> None:
        check_options(self, method=part("method", Method), patience=at_least(1))

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        granted = self.patience if options.max_steps is None else min(self.patience, options.max_steps)
        outcome = self.method.run(f, z0, replace(options, max_steps=granted))
        history, direction = (outcome.kept.pop(name, None) for name in ("history", "outward"))
        if history is not None:
            direction = outward(history)
        if direction is None or outcome.halted:
            return outcome
        doubtful = (outcome.status == int(Status.CONVERGED)) & (direction != 0).any(1)
        if bool(doubtful.any()):
            f.evaluations, f.sample_evaluations = outcome.evaluations, outcome.sample_evaluations
            repels, v = stretches(f, outcome.z, doubtful, direction)
            repels = repels & ~leads_away(f, z0, outcome.z, repels, v) if bool(repels.any()) else repels
            if bool(repels.any()):
                _iterate(f, z0, options, outcome, repels, self.name)
            outcome.evaluations, outcome.sample_evaluations = f.evaluations, f.sample_evaluations
        return outcome


def _iterate(f: Evaluations, z0: Tensor, options: Options, outcome: Outcome, which: Tensor, name: str) -> None:
    """The plain iteration for some samples; its fixed points take the place of theirs, which the method ``name`` found."""
    later = options.after(outcome.taken, outcome.shown)
    left = PATH_STEPS if later.max_steps is None else min(later.max_steps, PATH_STEPS)
    if left < 1:
        return
    samples, system, theta = subset(f, which, whole=options.watched)
    start = torch.where(which.unsqueeze(1), z0, outcome.z).index_select(0, samples)
    size = None if options.start_norm is None else options.start_norm.index_select(0, samples)
    part = Evaluations(system, theta, "fixed_point")
    found = PATH.run(part, start, replace(later, max_steps=left, start_norm=size))
    outcome.trace = outcome.trace + found.trace[1:]
    f.evaluations += found.evaluations
    f.sample_evaluations += found.sample_evaluations
    mine, shown = which.index_select(0, samples), outcome.shown + found.shown
    outcome.steps = outcome.steps.index_add(0, samples[mine], found.steps[mine])
    outcome.shown = shown
    outcome.obey(found.status)
    better = mine & (found.status == int(Status.CONVERGED))
    index = samples[better]
    if len(index):
        own = (outcome.status == int(Status.CONVERGED)).index_fill(0, index, False)
        outcome.solver = f"{name}, {PATH.name}" if bool(own.any()) else PATH.name
    outcome.z = outcome.z.index_copy(0, index, found.z[better])
    outcome.residual_norm = outcome.residual_norm.index_copy(0, index, found.residual_norm[better])
    if outcome.tolerance is not None and found.tolerance is not None:
        outcome.tolerance = outcome.tolerance.index_copy(0, index, found.tolerance[better])


def outward(history: Tensor) -> Tensor:
    """The direction that ``J`` stretches most by what differences say, of length one, and zero where none is stretched,
    ``(batch, n)``.

    The Ritz problem on the span of ``dZ``, of differences scaled to length one: with ``L L' = dZ dZ' + sqrt(eps)``, which
    leaves out what differences have in common to rounding, ``H = L^-1 (dZ dW') L^-T``.  No eigenvalue is above
    ``|H|``, ``|H^2|^(1/2)`` or ``|H^4|^(1/4)``: most maps that contract are known by these.

    Args:
        history: differences of residuals and of what the map makes of the points, ``(batch, m, 2 n)``; rows of zeros are
            none, and nothing is said of a sample where one is not finite.
    """
    n, dtype = history.shape[2] // 2, history.dtype
    history = in_working_precision(history)
    dW = history[:, :, n:]
    dZ = dW - history[:, :, :n]
    gram, moved = dZ @ dZ.mT, dZ @ dW.mT
    square = gram.diagonal(dim1=1, dim2=2)
    unit = torch.where(square > 0, square.rsqrt(), 0)
    scale = unit.unsqueeze(2) * unit.unsqueeze(1)
    ridge = torch.finfo(dZ.dtype).eps ** 0.5 * torch.eye(dZ.shape[1], dtype=dZ.dtype, device=dZ.device)
    L, failed = torch.linalg.cholesky_ex(gram * scale + ridge)
    half = torch.linalg.solve_triangular(L, moved * scale, upper=False)
    H = torch.linalg.solve_triangular(L, half.mT, upper=False).mT
    found = torch.zeros_like(dZ[:, 0])
    open_ = _exceeding(H, (failed == 0).nonzero().squeeze(1))
    if not len(open_):
        return found.to(dtype)
    radius, power = _radius(H.index_select(0, open_), _SQUARINGS)
    column = power.square().sum(1).argmax(1).view(-1, 1, 1).expand(-1, power.shape[1], 1)
    top = torch.linalg.solve_triangular(L.index_select(0, open_).mT, power.gather(2, column), upper=True)
    v = (dZ.index_select(0, open_).mT @ (unit.index_select(0, open_).unsqueeze(2) * top)).squeeze(2)
    size = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    stretched = (radius > 1 + _DOUBT).unsqueeze(1) & (size > 0) & torch.isfinite(v)
    return found.index_copy(0, open_, torch.where(stretched, v / size, 0)).to(dtype)


def _exceeding(H: Tensor, samples: Tensor) -> Tensor:
    """Those of the ``samples`` whose ``|H^k|^(1/k)`` exceeds one for ``k`` of 1, 2 and 4, or is not finite."""
    power = H if len(samples) == len(H) else H.index_select(0, samples)
    for k in _POWERS:
        above = (~(power.square().sum((1, 2)) <= (1 + _DOUBT) ** (2 * k))).nonzero().squeeze(1)
        samples = samples.index_select(0, above)
        if k == _POWERS[-1] or not len(samples):
            break
        power = power if len(above) == len(power) else power.index_select(0, above)
        power = power @ power
    return samples


def _radius(H: Tensor, squarings: int) -> tuple[Tensor, Tensor]:
    """``|H^k|^(1/k)`` with ``k = 2^squarings``, at least the spectral radius, ``(batch,)``; and ``H^k``, to a factor."""
    logarithm = torch.zeros_like(H[:, 0, 0])
    for k in range(squarings + 1):  # H^(2^k), whose logarithm of scale is shared out
        size = torch.linalg.matrix_norm(H)
        logarithm = logarithm + size.log() / 2**k  # of zero: -inf
        H = H / torch.where(size > 0, size, 1)[:, None, None]
        if k < squarings:
            H = H @ H
    return logarithm.exp(), H
