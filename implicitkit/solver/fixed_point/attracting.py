r"""Fixed points to which the map leads, where acceleration has come to another one.

Acceleration solves ``z = f(z)`` and does not care whether the iteration ``z <- f(z)`` would stay there: a Riccati equation
has the fixed point that a control engineer means, to which the iteration converges, and others that it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import adopts, at_least, check_options, part
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver, account
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.fixed_point.picard import Picard
from implicitkit.solver.method import Method
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.differences import in_working_precision

#: The map's own path, for as long as its residual falls, or rises: neither says that it goes round in circles.
PATH, PATH_STEPS = Impatient(Picard(), window=32, horizon=500.0, reach=1e6, follow=True), 1000

_DOUBT = 1e-3  # by which a Ritz value exceeds one before anybody looks
_POWERS = (1, 2, 4)  # of the projected Jacobian, whose norms tell that it contracts
_SQUARINGS = 10  # of the projected Jacobian: its spectral radius by |H^1024|^(1/1024)
_PRODUCTS = 9  # with the Jacobian at the point, after which a map that contracts is known as a rule ...
_MOST = 64  # ... and at most: what is not normal stretches for some steps before it contracts
_LAST = 16  # of these, which must show the growth
_GROWS = 1.01  # in each of them
_ALIGNED = 1e-7  # by which the cosine of a direction and its image may be less than one: an eigenvector
_NEARLY = 1e-3  # likewise, for no other direction to be asked
_AFFINE = 0.1  # of the change from the fixed point, by which it may be another one than a straight line says
_EIGHTFOLD = 8  # ways, each eight times as long as the one before: 1e6 of them all


@dataclass(frozen=True)
@adopts("method", "name")
class Attracting(Solver):
    r"""An acceleration, and where it ends in a fixed point that repels, the plain iteration from the start instead.

    The differences that the method remembers, ``J dZ = dW`` to first order, give Ritz values of ``J = df/dz`` for nothing
    (:func:`outward`).  Where one exceeds one in modulus, products with ``J`` at the point, by differences, from the Ritz
    vector on, say whether ``J`` does stretch; where Newton's steps have ended and none does, from ``z - z_0`` on.  Where it
    does, ``z <- f(z)`` from ``z_0`` has the last word: what that converges to attracts.  A map that has no fixed point of
    this kind within reach keeps the first one, which is a solution like any other; of one that is affine on the way that is
    known without going it (:func:`leads_away`).

    Source: Ritz values, Saad (2011), *Numerical Methods for Large Eigenvalue Problems*, section 4.3; that a fixed point
    attracts where the spectral radius of ``J`` is below one, Ostrowski (1960).

    Args:
        method: keeps the differences that it remembers (``Outcome.kept["history"]``), or what
            they say (``"outward"``), and which samples it has brought home by Newton's steps (``"newton"``), if any.
        patience: steps that it may take.

    Raises:
        ValueError: ``patience`` below 1. TypeError: not an iterative method.
    """

    method: Any
    patience: int = 500
    solves: ClassVar[str] = "fixed_point"

    def __post_init__(self) -> None:
        check_options(self, method=part("method", Method), patience=at_least(1))

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        granted = self.patience if options.max_steps is None else min(self.patience, options.max_steps)
        outcome = self.method.run(f, z0, replace(options, max_steps=granted))
        history, direction, newton = (outcome.kept.pop(name, None) for name in ("history", "outward", "newton"))
        if history is not None:
            direction = outward(history)
        if newton is not None:
            direction = self._of_newton(z0, outcome, newton, direction)
        if direction is None or outcome.halted:
            return outcome
        doubtful = (outcome.status == int(Status.CONVERGED)) & (direction != 0).any(1)
        if bool(doubtful.any()):
            f.evaluations, f.sample_evaluations = outcome.evaluations, outcome.sample_evaluations
            repels, v = stretches(f, outcome.z, doubtful, direction)
            repels = repels & ~leads_away(f, z0, outcome.z, repels, v) if bool(repels.any()) else repels
            if bool(repels.any()):
                _iterate(f, z0, options, outcome, repels, outcome.solver or self.name)
            outcome.evaluations, outcome.sample_evaluations = f.evaluations, f.sample_evaluations
        return outcome

    def _of_newton(self, z0: Tensor, outcome: Outcome, newton: Tensor, direction: Tensor | None) -> Tensor:
        """Directions to ask about: of samples that Newton's steps have brought home the way they have come, where
        differences, which are from farther off, say nothing.  Tells the outcome who has solved what."""
        solved = outcome.status == int(Status.CONVERGED)
        newton = newton & solved
        if bool(newton.any()):
            outcome.solver = "newton" if bool((newton | ~solved).all()) else f"{self.name}, newton"
        way = torch.where(newton.unsqueeze(1), outcome.z - z0, 0)
        size = torch.linalg.vector_norm(way, dim=1, keepdim=True)
        way = way / torch.where(size > 0, size, 1)
        return way if direction is None else torch.where((direction == 0).all(1, keepdim=True), way, direction)


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
    account(f, found)
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
    """The ``samples`` whose ``|H^k|^(1/k)`` exceeds one for ``k`` of 1, 2 and 4, or is not finite."""
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


def stretches(f: Evaluations, z: Tensor, which: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Where products with ``J = df/dz`` at ``z``, from ``direction`` on, grow in the end, of some samples, ``(batch,)``; and
    the last of them, of length one, ``(batch, n)``.

    ``J v = (f(z + h v) - f(z)) / h`` with ``h = sqrt(eps) |z|``, one evaluation each: a map that is not differentiated,
    whose steps are NumPy's or hidden from autograd, is asked like any other.  Of an eigenvector one product says all.
    Else nine say whether growth may be there at all, and 64 whether it lasts: ``|J^k|`` of a matrix that is not normal may
    grow for some ``n`` steps although its spectral radius is below one (Trefethen & Embree 2005, *Spectra and
    Pseudospectra*, chapter 16).
    """
    samples, system, theta = subset(f, which)
    probe = f.beside("fixed_point", system, theta)
    z, v = z.index_select(0, samples), in_working_precision(direction.index_select(0, samples))
    w, sizes = in_working_precision(probe(z)), []
    size = torch.linalg.vector_norm(in_working_precision(z), dim=1, keepdim=True)
    h = torch.finfo(z.dtype).eps ** 0.5 * torch.where(size > 0, size, 1)
    open_ = which.index_select(0, samples)
    grows, final = torch.zeros_like(open_), v
    least = torch.log(v.new_tensor(_GROWS))
    for k in range(1, _MOST + 1):
        before, v = v, (in_working_precision(probe((z + h * v).to(z))) - w) / h
        size = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        sizes.append(size.log())
        v = v / torch.where(size > 0, size, 1)
        final = torch.where(open_.unsqueeze(1), v, final)
        settled = ((v * before).sum(1).abs() >= 1 - _ALIGNED) & (k > 1)
        now = open_ & settled & (sizes[-1].squeeze(1) > least)
        if k >= _PRODUCTS:
            late = torch.cat(sizes[_PRODUCTS // 3 : _PRODUCTS] if k == _PRODUCTS else sizes[-_LAST:], 1).mean(1)
            now = now | (open_ & (late > least) & (k == _MOST))
            open_ = open_ & (late > least)  # false for NaN
        grows, open_ = grows | now, open_ & ~now & ~(settled & (k >= _PRODUCTS))
        if not bool(open_.any()):
            break
    found = torch.zeros_like(which).index_copy(0, samples, grows)
    return which & found, torch.zeros_like(direction).index_copy(0, samples, final.to(direction))


def leads_away(f: Evaluations, z0: Tensor, z: Tensor, which: Tensor, v: Tensor) -> Tensor:
    r"""Where the map is all but affine on the way of the iteration from ``z_0``, and leads away along ``v`` from the fixed
    point ``z``, which it stretches, ``(batch,)``: there is nothing for the iteration to come to.

    Of an affine map ``f(z + d) - z = J d``.  That is asked of ``d = z_0 - z``, with ``J d`` by a difference close by, and
    of ``d = +-8^j |z_0 - z| v`` and along ``J v``, up to a million times as far.  On these rays then ``|f(z + d) - z - d|``
    grows as ``|d|``, and no other fixed point is near; what the map does beside them in the end, where ``v`` has taken
    over, it does not ask.
    """
    samples, system, theta = subset(f, which)
    probe = f.beside("fixed_point", system, theta)
    start, z = (t.index_select(0, samples) for t in (z0, z))
    point, v = in_working_precision(z), in_working_precision(v.index_select(0, samples))
    w = in_working_precision(probe(z))
    d = in_working_precision(start) - point
    length, size = (torch.linalg.vector_norm(t, dim=1, keepdim=True) for t in (d, point))
    small = torch.finfo(z.dtype).eps ** 0.5 * torch.where(size > 0, size, 1)
    found = which.index_select(0, samples) & (length > 0).squeeze(1)

    def moved(by: Tensor) -> Tensor:
        return in_working_precision(probe((point + by).to(z))) - w

    def alike(there: Tensor, said: Tensor) -> Tensor:  # false for NaN
        norm = torch.linalg.vector_norm
        return norm(there - said, dim=1) <= _AFFINE * torch.minimum(norm(said, dim=1), norm(there, dim=1))

    unit = d / torch.where(length > 0, length, 1)
    found = found & alike(moved(d), length * moved(small * unit) / small)
    image = moved(small * v) / small
    along = image / torch.linalg.vector_norm(image, dim=1, keepdim=True)
    ways = [(v, image)]
    if not bool((~found | ((along * v).sum(1).abs() >= 1 - _NEARLY)).all()):
        ways.append((along, moved(small * along) / small))
    for way, said in ways:
        for sign in (1, -1):
            for j in range(_EIGHTFOLD):
                if not bool(found.any()):
                    break
                far = sign * length * 8.0**j
                there = moved(far * way)
                leaves = torch.linalg.vector_norm(there - far * way, dim=1)
                least = (1 - _AFFINE) * torch.linalg.vector_norm(far * (said - way), dim=1)
                found = found & alike(there, far * said) & (leaves >= least)
    return which & torch.zeros_like(which).index_copy(0, samples, found)
