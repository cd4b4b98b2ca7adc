r"""Does autograd see all that the function does with ``z``?

Where a part of it is out of sight (``z.detach()``, ``z.item()``, ``z.numpy()``, ``torch.no_grad()``, a Function with a wrong
``backward``), the Jacobian ``A`` is another function's, and so is the derivative of the solution, while the solution itself
is right.  Along one random direction ``v``, of the size of ``z``, ``F`` changes by

    D = (F(z + h v) - F(z - h v)) / (2 h),    off by at most    K = |F(z + h v) - 2 F(z) + F(z - h v)| / h

up to a few times that, ``K`` being what curvature, kinks and rounding make of it; equations in which it is as large as ``D``
say nothing.  Of the others ``w = D``, and ``w'D = (A'w)'v`` must hold, a product that compiled functions have, too.  Where
more than 3 % are left it is asked again with ``4 h``, whose ``D`` must be the same, and with the noise of each equation
added, ``K + sigma / h`` (and its mean over the equations), as fourth differences at seven points ``16 h`` apart have it,
``sigma^2 = mean (Delta^4 F)^2 4!^2 / 8!``: what is computed in half precision, under autocast say, is flat between jumps,
and either may look like a slope; and so is ``1 - exp(-z)`` beside a ``z`` of 1e-16, so that at last ``v`` is made longer:
where ``D`` is then known to a half or better, and explained, nothing is said.

Of a minimisation ``F`` is the gradient that autograd has, and consistent with itself; there the change of the objective
beside the solution must be that gradient's, too, and so must those of constraints: else the solution itself is another.
What is given as a set or a term is asked by itself: where its part in ``A`` is lost, ``A v`` may be right by chance (the
nearest point of a set, whose ``z - P(z - g)`` changes as ``z`` does), and the derivative zero.

Numbers that the function makes of tensors (``a.item()``, ``float(a)``, ``torch.tensor([a, 1.0])``), by which it may depend
on ``\theta``, are asked about by themselves (:mod:`~implicitkit.rule.detached_numbers`), if its first evaluation made some.

What is wrong may lie across ``D``, as one wrong row or column of ``A`` does: so is it asked with two ``w`` of random signs,
``E (w'e)^2 = |e|^2``.  What one direction does not show another may: each time that it is asked there is another ``v``.

It costs two evaluations and three products (five evaluations of an objective; a dozen more before anything is said), at the
first derivative of a function and at some later ones (:mod:`~implicitkit.rule.when_to_ask`).

Source: Dennis & Schnabel, *Numerical Methods for Unconstrained Optimization and Nonlinear Equations* (SIAM 1996), section
5.4, for ``h``; Moré & Wild, "Estimating computational noise" (SIAM J. Sci. Comput. 33, 2011), section 2, for ``sigma``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded
from implicitkit.foundation.errors import CapturedTensorError, ImpureFunctionWarning, warn
from implicitkit.foundation.operators import Operator
from implicitkit.rule.changed_function import refuse_hidden
from implicitkit.rule.detached_numbers import by_numbers
from implicitkit.rule.when_to_ask import Memory
from implicitkit.solution import Record
from implicitkit.solver.evaluations import Evaluations
from implicitkit.system import System

_STEP = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative to z
_WIDER, _APART = 4.0, 16.0
_TIMES_K = 10.0  # what is explained
_PART, _SAME = 0.03, 0.1  # of D: what is too much, and how far two quotients may differ
_DECIDED = 0.5  # of D, what may be unknown of it where a longer v is to explain it
_SIGNS = 2  # directions w, beside D
_TERM = "set or term that is given as project= or prox="
_asked = Memory()


def warn_if_hidden(
    record: Record,
    system: System,
    z: Tensor,
    theta: Sequence[Tensor],
    out: Tensor,
    A: Operator,
    identity: tuple[Hashable, ...] | None,
) -> None:
    """Warn, at the first derivative of this function and at some later ones, where ``A v`` is not how ``F`` changes along
    ``v``.

    Args:
        record: of the solve. z: ``(batch, n)``. theta: plain tensors. out: ``F(z)``. A: the Jacobian there, as autograd has
            it. identity: what tells the function from others, if that is known (:attr:`System.identity`).

    Raises:
        CapturedTensorError: autograd sees no ``z`` in a map that changes with it.
    """
    if z.dtype not in _STEP or system.lifted.random or not z.numel():
        return
    identity = system.identity if identity is None else identity
    function = identity, (*system.setting(theta), z.shape[1], z.dtype)
    number = _asked.number(*function)
    if number is None:
        return
    with torch.no_grad(), compat.own_graphs():
        if _compare(record, system, z.detach(), theta, out.detach(), A, number):
            _asked.said(*function)


def _compare(
    record: Record, system: System, z: Tensor, theta: Sequence[Tensor], F: Tensor, A: Operator, number: int
) -> bool:
    """Warn, and say so, with the ``number``-th directions."""
    h = _STEP[z.dtype]
    size = torch.linalg.vector_norm(z, dim=1, keepdim=True) / z.shape[1] ** 0.5
    size = z.abs() + 0.1 * torch.where(size > 0, size, 1)
    v = size * seeded.normal(*z.shape, seed=_seed(number)).to(z)

    def along(w: Tensor) -> Tensor:
        g = A.rmv(w)
        if A.fixed_point and torch.equal(g, -w):  # no z in the map at all?
            refuse_hidden(record)
        return (g * v).sum(1)

    kind, part = system.problem.kind, _PART * system.problem.share_of_function
    if kind.returns_program:
        live = lambda y: system.live(y, *theta)  # noqa: E731
        told = _compare_program(live, z + 0.1 * v, v, h) or _compare_term(system.problem, live, z, v, h)
    else:
        told = _warned(_Change(lambda y: system.residual(y, *theta), z, F, v, along, number), h, "residual", part)
    if system.lifted.numbers and not told:
        told = _compare_numbers(system, z, theta, F, h, number)
    if kind.minimisation and not kind.returns_program and not told:
        told = _compare_objective(Evaluations(system, theta, "minimise"), z + 0.1 * v, v, h)
    return told


def _compare_objective(f: Evaluations, z: Tensor, v: Tensor, h: float) -> bool:
    """Warn, and say so, where an objective does not change along ``v`` as its gradient ``f`` says."""
    slope = (_tried(f, z, z) * v).sum(1)
    value = lambda y: f.value(y).unsqueeze(1)  # noqa: E731
    at = _tried(value, z, slope.unsqueeze(1))
    return _warned(_Change(value, z, at, v, lambda w: w[:, 0] * slope), h, "objective")


def _compare_numbers(system: System, z: Tensor, theta: Sequence[Tensor], F: Tensor, h: float, number: int) -> bool:
    """Warn where ``F`` changes along a direction of the tensors that the function may have made numbers of
    (:func:`by_numbers`)."""
    ways = {i: _way(theta[i], seed=_seed(number) + 1 + i) for i in system.lifted.numbers}

    def residual(s: float) -> Tensor:
        return system.residual(z, *(t + s * ways[i] if i in ways else t for i, t in enumerate(theta)))

    found, whole = by_numbers(residual, F, h)
    if bool(found.any()):
        sample = int(found.nonzero()[0])
        where = f" of sample {sample}" if len(F) > 1 else ""
        changes = f"{float(found[sample]):.3g} of {float(whole[sample]):.3g} by which the residual{where} changes"
        warn(_NUMBERS.format(changes=changes) + _ONCE, ImpureFunctionWarning)
    return bool(found.any())


def _seed(number: int) -> int:
    """The seed of the ``number``-th directions."""
    return 0x5E + 0x1000 * number


def _way(t: Tensor, seed: int) -> Tensor:
    """A random change of the size of the real or complex ``t``."""
    weights = seeded.normal(2, *t.shape, seed=seed)
    return (t.abs() + 0.1) * (torch.complex(*weights) if t.is_complex() else weights[0]).to(t)


def _compare_program(values: Callable[[Tensor], Tensor], z: Tensor, v: Tensor, h: float) -> bool:
    """Warn where an objective and its constraints, ``(batch, 1 + m)``, do not change along ``v`` as autograd says; the
    conditions of optimality have derivatives of their own."""
    try:
        F, pullback = autodiff.vjp(values, z)
    except Exception:  # as in _tried
        return False
    along = lambda w: (pullback(w)[0] * v).sum(1)  # noqa: E731
    return _warned(_Change(values, z, F.detach(), v, along), h, "objective, with the constraints,")


def _compare_term(program: Any, kernel: Callable[[Tensor], Tensor], z: Tensor, v: Tensor, h: float) -> bool:
    """Warn where a set or term does not change along ``v`` as autograd says, beside ``z - dL/dz``, whose image ``z`` is.

    Raises:
        CapturedTensorError: autograd sees no ``z`` in it, so that the derivative of the solution would be zero.
    """
    if program.prox is None or getattr(program.prox, "of_bounds", False):
        return False
    n = program.size
    term = lambda y: program.proximal(kernel, y, 1.0)  # noqa: E731
    try:
        z, v = (z - program.flat_saddle(kernel, z) + 0.1 * v)[:, :n], v[:, :n]
        P, pullback = autodiff.vjp(term, z)
        lost = not bool(pullback(v)[0].any())
    except Exception:  # as in _tried
        return False
    change = _Change(term, z, P.detach(), v, lambda w: (pullback(w)[0] * v).sum(1))
    if lost and bool(change.unexplained(h)[0].any()):
        raise CapturedTensorError(
            "what is given as project= or prox= changes with z, but autograd sees no z in it (z.detach(), z.data, "
            "z.numpy(), torch.no_grad()?): the derivative of the solution would be zero. Write it in torch's operations; "
            "the solver is never differentiated"
        )
    return _warned(change, h, _TERM)


def _tried(function: Callable[[Tensor], Tensor], z: Tensor, like: Tensor) -> Tensor:
    """The function at a point that nobody but this module asks for; NaN where it raises: it may be outside its domain."""
    try:
        return function(z)
    except Exception:
        return torch.full_like(like, torch.nan)


class _Change(NamedTuple):
    """How a ``function`` that is ``F`` at ``z`` changes along ``v``, and what autograd says of that, ``along(w) =
    (A'w)'v``."""

    function: Callable[[Tensor], Tensor]
    z: Tensor
    F: Tensor
    v: Tensor
    along: Callable[[Tensor], Tensor]
    number: int = 0

    def noise(self, h: float) -> Tensor:
        """The standard deviation of the rounding of each equation, with the mean over the equations added, ``(batch,
        m)``."""
        values = torch.stack([_tried(self.function, self.z + k * h * self.v, self.F) for k in range(-3, 4)])
        sigma = (values.diff(n=4, dim=0).square().mean(0) / 70).sqrt()
        return sigma + sigma.nan_to_num(0, 0, 0).mean(1, keepdim=True)

    def widened(self) -> _Change:
        """This change along a ``v`` of the root of eps, where that is longer: beside 1e-16 ``1 - exp(-z)`` is flat."""
        longest = self.v.abs().amax(1, keepdim=True)
        times = (torch.finfo(self.v.dtype).eps ** 0.5 / longest).nan_to_num(1, 1, 1).clamp_min(1)
        return self._replace(v=times * self.v, along=lambda w: times.squeeze(1) * self.along(w))

    def _differences(self, h: float, noise: Tensor | float) -> tuple[Tensor, Tensor]:
        """``D`` and ``K``, zero in the equations that ``K`` does not decide."""
        eps = torch.finfo(self.z.dtype).eps
        there, back = (_tried(self.function, self.z + step * self.v, self.F) for step in (h, -h))
        D = (there - back) / (2 * h)
        bent = (there - 2 * self.F + back).abs()
        K = _TIMES_K * (bent + noise + eps * (there.abs() + back.abs())) / h
        open_ = torch.isfinite(K) & (D.abs() > K)
        return torch.where(open_, D, 0), torch.where(open_, K, 0)

    def unexplained(self, h: float, noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """``D`` in the equations that ``K`` does not decide, ``(batch, m)``; and how large ``A v`` is along it, and which
        part of the larger of the two is left unexplained, ``(batch,)``."""
        D, K = self._differences(h, noise)
        norm = torch.linalg.vector_norm(D, dim=1, keepdim=True)
        w = D / norm.clamp_min(torch.finfo(D.dtype).tiny)
        found, said = (w * D).sum(1), self.along(w)
        wrong = (found - said).abs() - (w.abs() * K).sum(1)
        largest = torch.maximum(found.abs(), said.abs())
        for k in range(_SIGNS if D.shape[1] > 1 else 0):
            sign = torch.where(D != 0, seeded.signs(*D.shape, seed=_seed(self.number) - 1 - k).to(D), 0)
            apart = ((sign * D).sum(1) - self.along(sign)).abs() - torch.linalg.vector_norm(K, dim=1)
            wrong = torch.maximum(wrong, apart)
        return D, said, torch.where(largest > 0, wrong / largest, 0)


def _warned(change: _Change, h: float, name: str, part: float = _PART) -> bool:
    """Warn, and say so, where a function does not change as autograd has it; ``part``: which of its change is too much."""
    norm = lambda t: torch.linalg.vector_norm(t, dim=1)  # noqa: E731
    for known in (False, True):
        noise = change.noise(_APART * h) if known else 0.0
        D, said, left = change.unexplained(h, noise)
        if not bool((left > part).any()):
            return False
        again, _, still = change.unexplained(_WIDER * h, noise)
        hidden = (left > part) & (still > part) & (norm(D - again) <= _SAME * norm(D))
        if not bool(hidden.any()):
            return False
    wide, _, left = change.widened().unexplained(h)
    hidden = hidden & ~((left <= part) & (left > -_DECIDED) & (norm(wide) > 0))  # else it is too long to say anything
    if not bool(hidden.any()):
        return False
    sample = int(hidden.nonzero()[0])
    where = f" of sample {sample}" if len(D) > 1 else ""
    found, seen = float(norm(D)[sample]), float(said[sample])
    changes = f"the {name}{where} changes by {found:.3g}, and by {seen:.3g} as autograd has it"
    found_right = name in ("residual", _TERM)
    right = "The solution is right, its" if found_right else "The solution is that of what autograd sees; its"
    warn(_SAID.format(changes=changes, right=right) + _ONCE, ImpureFunctionWarning)
    return True


_SAID = (
    "along a random direction {changes}: a part of the function is out of autograd's sight (z.detach(), z.item(), float(z), "
    "z.numpy(), torch.no_grad(), rounding with a gradient of its own, an autograd.Function with another backward), or is "
    "not smooth. {right} derivative is that of what autograd sees. Give the function z as it is; the solver is never "
    "differentiated. "
)
_NUMBERS = (
    "the function makes numbers of tensors (a.item(), float(a), a.tolist(), torch.tensor([a, 1.0])), or calls what torch "
    "has no derivative of (torch.special.bessel_j0), and autograd does not "
    "see that it depends on them: along a random direction of its arguments, and of what it captures, these account for "
    "{changes}. The solution is right, its derivative lacks that part. Compute with the tensors themselves, "
    "torch.stack([a, one]); what is meant as a constant, give as a number. "
)
_ONCE = 'This is said once for each function, and not under on_failure="ignore"'
