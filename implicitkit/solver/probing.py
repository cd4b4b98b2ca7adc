r"""What a residual is made of near a point: the size of what cancels, what rounding leaves, and whether it has a zero near.

Every question is answered by evaluating ``F`` beside ``z``, along ``w_k = s_k (|z| + c max |z|)`` for a few sign vectors
``s_k``: of a scale one digit is enough, and a difference of ``F`` asks less of the user's function than its derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.dense import lstsq_batched
from implicitkit.solver.evaluations import Evaluations

__all__ = ["in_working_precision", "rounding", "row_scales", "runs_away"]

_FLOOR = 1e-3  # components this much smaller than the largest count as if they were so large
_MOVE = 1e-2  # by which z moves in the test for infinity
_SOUND = 1e-3  # a Newton correction this small beside z is that of a point near a solution
_FALLS = 0.1  # ... and so is a larger one that takes the residual down to this
_DENSE_NUMBERS = 1 << 24


def in_working_precision(t: Tensor) -> Tensor:
    """float16 and bfloat16 as float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def row_scales(f: Evaluations, z: Tensor, which: Tensor, good: float | Tensor, atol: float, careful: bool) -> Tensor:
    """The size of what cancels in each ``F_i`` near ``z``, ``max_k |(J w_k)_i|``, ``(batch, n)``.

    Stops as soon as ``|F_i| <= atol + good scale_i`` for all samples ``which``: one evaluation then.  A ``careful`` one
    looks to both sides along ``w_k`` and takes the smaller change: of a jump only one side sees anything.
    """
    F = in_working_precision(f.residual(z))
    scale, h = torch.zeros_like(F), torch.finfo(z.dtype).eps ** 0.5
    for direction in _directions(z):
        size = _change(f, z, F, direction, h)
        if careful:
            size = torch.minimum(size, _change(f, z, F, direction, -h))
        scale = torch.maximum(scale, size)
        if bool(((F.abs() <= atol + good * scale).all(1) | ~which).all()):
            break
    return scale


def rounding(f: Evaluations, z: Tensor) -> Tensor:
    """What rounding leaves of each ``F_i``, ``(batch, n)``: how far ``F`` is from its linear model two units in the last
    place away (of ``z``; of 1 where ``z`` vanishes beside it).  Zero where ``F_i`` is too large for that: a jump is no
    rounding error."""
    F = in_working_precision(f.residual(z))
    eps = torch.finfo(z.dtype).eps
    h = eps**0.5
    noise, scale = torch.zeros_like(F), torch.zeros_like(F)
    for direction in _directions(z, least=1.0)[:2]:
        slope, back = ((in_working_precision(f.residual(z + s * direction)) - F) / s for s in (h, -h))
        change = in_working_precision(f.residual(z + 2 * eps * direction)) - F
        noise = torch.maximum(noise, torch.nan_to_num((change - 2 * eps * slope).abs(), nan=0.0, posinf=0.0))
        scale = torch.maximum(scale, torch.nan_to_num(torch.minimum(slope.abs(), back.abs()), nan=0.0))
    return torch.where(F.abs() <= h * scale, noise, 0)


def runs_away(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    r"""Where ``F`` is small only because ``z`` is large (``exp(-z)``, ``sqrt(z^2 + 1) - z``), ``(batch,)``.

    Near a zero every ``F_i`` is far smaller than its change when ``z`` moves by a hundredth, to and fro.  Where one is
    not, the Newton correction ``J d = -F`` decides: it must exist and be small beside ``z``, or take the residual down, as
    it does near a zero and never on the way to infinity (``exp(-z - 1) = exp(-z) / e``).  Where its matrix would be too
    large the first comparison is made in the norm over all equations.
    """
    F = in_working_precision(f.residual(z))
    if f.kind.iteration:  # z + 1 = z where z is so large that rounding says so
        unit = 2 * torch.finfo(z.dtype).eps * in_working_precision(z)
        F = torch.where(F.abs() > unit.abs(), F, unit)
    scale = torch.zeros_like(F)
    for direction in _directions(z)[:2]:
        there, back = (_change(f, z, F, direction, sign * _MOVE) for sign in (1.0, -1.0))
        scale = torch.maximum(scale, torch.minimum(there, back))
    vanished = ((F == 0) & (scale == 0)).all(1)  # underflow, or a function that is zero everywhere
    far = which & (vanished | ~(F.abs() <= _SOUND * scale).all(1))
    if not bool(far.any()):
        return far
    if z.shape[0] * z.shape[1] ** 2 > _DENSE_NUMBERS:
        return far & ~(torch.linalg.vector_norm(F, dim=1) <= _SOUND * torch.linalg.vector_norm(scale, dim=1))
    return far & (vanished | ~_near_a_zero(f, z, F))


def _near_a_zero(f: Evaluations, z: Tensor, F: Tensor) -> Tensor:
    """Where the Newton correction exists and is small beside ``z``, or takes the residual down; ``(batch,)``."""
    J = in_working_precision(f.jacobian(z))
    sizes = J.abs().amax(2)
    sizes = torch.where(sizes > 0, sizes, 1)
    finite = torch.isfinite(J).flatten(1).all(1) & torch.isfinite(F).all(1)
    A = torch.where(finite[:, None, None], J / sizes.unsqueeze(2), 0)
    b = torch.where(finite[:, None], -F / sizes, 0)
    d = lstsq_batched(A, b)[0]
    left = ((A @ d.unsqueeze(2)).squeeze(2) - b).abs()
    largest = z.abs().amax(1, keepdim=True)
    slack = torch.finfo(b.dtype).eps * d.abs().amax(1, keepdim=True)
    solvable = finite & (left <= 0.5 * b.abs() + slack).all(1)
    small = (d.abs() <= _SOUND * torch.maximum(z.abs(), 0.1 * largest)).all(1)
    after = in_working_precision(f.residual(z + d.to(z.dtype))) / sizes
    falls = torch.linalg.vector_norm(after, dim=1) <= _FALLS * torch.linalg.vector_norm(b, dim=1)
    return solvable & (small | (falls & (d.abs() <= 0.5 * largest).all(1)))


def _change(f: Evaluations, z: Tensor, F: Tensor, direction: Tensor, h: float) -> Tensor:
    """``|F(z + h w) - F(z)| / |h|``, ``(batch, n)``; zero where that is not finite."""
    change = in_working_precision(f.residual(z + h * direction)) - F
    return torch.nan_to_num(change.abs() / abs(h), nan=0.0, posinf=0.0)


def _directions(z: Tensor, least: float = 0.0) -> list[Tensor]:
    """``s_k (|z| + c max |z|)``, ``(batch, n)`` each: along ``z``, and with other signs; of size ``least`` where ``z``
    vanishes beside that."""
    n = z.shape[1]
    size = z.abs() + _FLOOR * z.abs().amax(1, keepdim=True)
    if least:
        tiny = size.amax(1, keepdim=True) < torch.finfo(z.dtype).eps ** 0.5 * least
        size = torch.where(tiny, least, size)
    own = torch.where(z < 0, -size, size)
    if n == 1:
        return [own, -own]
    if n == 2:
        flips = torch.tensor([[1, -1], [-1, 1]])
    else:
        flips = torch.randint(0, 2, (2, n), generator=torch.Generator().manual_seed(n)).mul(2).sub(1)
    return [own, *(own * flip.to(own) for flip in flips)]
