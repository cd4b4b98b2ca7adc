r"""Does a fixed point repel, and does the iteration from elsewhere then lead to another one, or away from all?"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.scales import in_working_precision

__all__ = ["leads_away", "stretches"]

_PRODUCTS = 9  # with the Jacobian at the point, after which a map that contracts is known as a rule ...
_MOST = 64  # ... and at most: what is not normal stretches for some steps before it contracts
_LAST = 16  # of these, which must show the growth
_GROWS = 1.01  # in each of them
_ALIGNED = 1e-7  # by which the cosine of a direction and its image may be less than one: an eigenvector
_NEARLY = 1e-3  # likewise, for no other direction to be asked
_AFFINE = 0.1  # of the change from the fixed point, by which it may be another one than a straight line says
_EIGHTFOLD = 8  # ways, each eight times as long as the one before: 1e6 of them all


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
    probe = Evaluations(system, theta, "fixed_point")
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
    _account(f, probe)
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
    probe = Evaluations(system, theta, "fixed_point")
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
    _account(f, probe)
    return which & torch.zeros_like(which).index_copy(0, samples, found)


def _account(f: Evaluations, probe: Evaluations) -> None:
    f.evaluations += probe.evaluations
    f.sample_evaluations += probe.sample_evaluations
