"""Levenberg-Marquardt for least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import check_options, positive
from implicitkit.linear.factors.dense import mv, svd_batched
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.least_squares.geodesic import Bend, Bends
from implicitkit.solver.method import Method
from implicitkit.solver.steps.factored import BEYOND, at_rounding, leave
from implicitkit.solver.steps.line_search import decrease
from implicitkit.solver.steps.normal_equations import (
    column_scales,
    normal_equations,
    undamped,
    weighted,
    with_old_factors,
)
from implicitkit.solver.steps.region import taken_where
from implicitkit.solver.steps.robust_model import curvature, next_share, root, weights
from implicitkit.solver.verdict.differences import FLOOR
from implicitkit.sparsity.patterns import SMALLEST

_EASE = 1 / 3  # by which mu falls after a good step ...
_FASTER = 1 / 10  # ... or this, its square, and so on, while the model foretells the decrease
_FAITHFUL = 0.9  # of the decrease that was promised
_PARTS = (0.5, 0.25, 0.125)  # of a step by factors that are tried before others are made
_KEPT = 0.25  # of the decrease that the part of a step promises, at least
_FEW, _WORK = 32, 5e6  # unknowns and batch * m * n^2 from which a step is dear, below the size that always is
_LAST = 3  # steps with old singular values at the end
_AT_HAND = 0.1  # of z_j, in roots of eps: a correction that changes nothing
_NEARBY = 1e-2  # of z_j: a correction that may be trusted
_LINEAR = 64.0  # units of rounding, in the residuals of a linear fit
_LEAST = 1e-3  # units of rounding of the largest eigenvalue below which mu is nothing


@register_solver("levenberg_marquardt", solves="least_squares")
@dataclass(frozen=True)
class LevenbergMarquardt(Method):
    r"""``z <- z + p``, ``(R'R + \mu D^2) p = -R'r``, ``R = dr/dz`` of shape ``(m, n)``, sample by sample.

    ``D`` is diagonal, the largest norm so far of each column of ``R``, which makes the method independent of the units of
    the unknowns (Moré 1978, section 6).  With ``rho`` the decrease of ``|r|^2 / 2`` over the one that the linear model
    promised, a step is taken when ``rho > 0`` and ``\mu`` multiplied by ``max(1/3, 1 - (2 rho - 1)^3)``, or else ``\mu`` by
    ``\nu = 2, 4, 8, ...`` (Nielsen 1999; Madsen, Nielsen & Tingleff 2004, algorithm 3.16).  The first one tried is
    Gauss-Newton's, and taken if it keeps its promise to half of the digits, as it does of linear residuals.  Where a step is
    dear, from 128 unknowns on (from 32 where ``batch m n^2`` comes to 5e6), nine tenths of it are enough; of one that is
    refused a half, a quarter and an eighth are tried with the same factors, and ``\mu`` grows whether or not one of them is
    taken.  There it falls by 1/10, 1/100, 1/10000, ... after steps in a row that keep
    their promise: so the last steps are Gauss-Newton's, too.  A step is followed by others with the same factors,
    ``z <- z - (R'R + \mu D^2)^{-1} g(z)``, while the gradient ``g`` falls to a fifth.

    From the ninth step on steps follow the bend of their valley (:mod:`~implicitkit.solver.least_squares.geodesic`), where
    they are not dear and the loss is that of least squares. Where the gradient meets the tolerance though Gauss and Newton's
    correction ``(R'R)^{-1} g`` is more than rounding beside ``z``, as where columns of ``R`` nearly depend on each other, up
    to three more steps go there.

    Under a robust loss ``R'R`` has weights that know its curvature (:mod:`implicitkit.solver.steps.robust_model`).

    One Jacobian and one singular value decomposition of ``R D^-1``, ``O(m n^2)``, serve all trials of a step; where it is
    dear, a Cholesky factorisation of ``R'R + \mu D^2`` a trial, sparse where ``R`` has a sparsity pattern
    (``jac_sparsity``).  Above 2,048 unknowns without a pattern ``R`` is not formed: LSMR finds a step from products with
    ``R`` and ``R'``; so it does above 768 (on a processor) while a twelfth as many steps of it as unknowns are enough.
    A sample whose step has shrunk to rounding is given up.

    Args:
        damping: the first ``\mu``, times the largest squared singular value of ``R D^-1``.

    Raises:
        ValueError: ``damping`` not positive.
    """

    damping: float = 1e-3
    default_max_steps: ClassVar[int] = 1000
    scales: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_options(self, damping=positive())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        nan = z.new_full(z.shape[:1], torch.nan)  # not known yet
        ease = torch.full_like(nan, _FASTER)
        share = torch.ones_like(nan)
        return {
            "D": torch.zeros_like(z),
            "mu": nan,
            "largest": nan,
            "ease": ease,
            "dear": is_dear(f, z),
            "share": share,
            "bends": Bends.ahead(z),
            "last": torch.zeros(len(z), dtype=torch.int64, device=z.device),
        }

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        start = z
        z, state, model, found = self._once(f, z, state)
        if not state["dear"]:
            return self._to_the_end(f, model, z, found, state)
        z, factors = with_old_factors(f, model.equations, z, start), model.equations.factors
        if factors is not None and not bool(found.all()):  # no step serves where all is rounding
            leave(f, ~found & at_rounding(f, factors, start))
        return z, state

    def _to_the_end(self, f: Evaluations, model: _Singular, z: Tensor, which: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Where a step has led, ``z``, and the state.  Samples ``which`` that would end at a distance from the minimum take
        up to three steps more, and those that are on their way go with them: an evaluation is one of all samples."""
        active, stuck = f.active, ~which
        while True:
            z, near, away = _by_old_values(f, model, z, which)
            away = away & (state["last"] < _LAST)
            if not bool(away.any()) or f.taken >= f.ahead:
                break
            f.active = f.active & ~stuck & (away | ~near)
            state = state | {"last": state["last"] + away}
            z, state, model, which = self._once(f, z, state)
            stuck, f.taken = stuck | ~which, f.taken + 1
        f.active, f.stuck = active, stuck
        return z, state

    def _once(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any, Any, Tensor]:
        """A step: the next points, the state after it, its model, and whose step was taken (or not asked for)."""
        g, value = f(z), f.value(z)
        dear = state["dear"]
        model: Any = _Normal(f, z, state["share"]) if dear else _Singular(f, z, g, state["share"])
        direct = dear and model.equations.direct  # by products, less damping takes more of them
        D = column_scales(f, state["D"], model.columns)
        scale = torch.where(D > 0, D, 1)
        by_products = dear and not direct and not bool(torch.isnan(state["largest"]).any())
        largest = state["largest"] if by_products else model.scale(scale)
        if by_products:  # it is a size, which ten products need not find anew
            model.equations.scale(scale)
        first = self.damping * largest.clamp_min(1e-30)
        eps, bold = torch.finfo(z.dtype).eps, torch.isnan(state["mu"])  # nothing is known yet
        little = (eps**0.5 if dear else eps) * largest  # where there are factors, for them to be definite
        at_hand = direct or not dear
        mu = torch.where(bold, torch.minimum(first, little) if at_hand else first, state["mu"])
        bold = bold & at_hand
        bend = Bend(f, z, scale, None if dear or model.weights is not None else model, state["bends"])
        nu, ease = torch.full_like(mu, 2), state["ease"]
        smallest = eps * torch.linalg.vector_norm(z, dim=1).clamp_min(eps)
        z_next, found = z, ~f.active
        at_once, again, kept = None, bold, torch.zeros_like(mu)  # of those that may try twice
        while True:
            p, promised = model.step(mu, g, ~found, bold)
            if direct and bool(model.hidden.any()):
                z_next, linear = _as_linear(model, z, g, p, z_next)
                found, kept = found | linear, torch.where(linear, 1, kept)
            p = torch.where(torch.isfinite(p), p, 0).to(z.dtype)
            trial = taken_where(~found, z + bend.of(p, mu, promised, ~found), z_next)
            rho = (decrease(f, z, value, g, trial) / promised).nan_to_num(-1, -1, -1)
            faithful = rho > _FAITHFUL if dear else (rho - 1).abs() <= eps**0.5
            accept = ~found & torch.where(bold, faithful, rho > 0) & (promised > 0)
            at_once = accept if at_once is None else at_once | (accept & again)
            kept = torch.where(accept, rho, kept)
            z_next = taken_where(accept, trial, z_next)
            open_, taken = ~found, accept
            if direct and bool((open_ & ~accept).any()):
                z_next, shorter = _shorter(f, z, value, g, p, promised, open_ & ~accept, z_next)
                taken = accept | shorter
            easier = mu * (1 - (2 * rho - 1) ** 3).clamp(_EASE, 2)
            harder = torch.where(bold, first, torch.maximum(mu * nu, little) if direct else mu * nu)
            if dear:
                easier = torch.where(faithful, ease * mu, easier)
                ease = torch.where(accept, torch.where(faithful, ease.square(), _FASTER), ease)
            mu = torch.where(open_, torch.where(accept, easier, harder), mu)
            nu = torch.where(accept | bold, 2, 2 * nu)
            found, again, bold = found | taken, bold & (not dear), torch.zeros_like(bold)
            hopeless = ~found & ~((torch.linalg.vector_norm(p, dim=1) > smallest) & (mu < torch.inf))
            if bool((found | hopeless).all()):
                break
        f.stuck = hopeless
        after = state | {
            "D": D,
            "largest": largest,
            "mu": torch.maximum(mu, _LEAST * torch.finfo(mu.dtype).eps * largest),
            "ease": ease.clamp_min(1e-8),
            "share": next_share(state["share"], kept, at_once),
            "bends": bend.after(),
        }
        return z_next, after, model, found


def is_dear(f: Evaluations, z: Tensor) -> bool:
    """Is a step so dear that singular values are not worth it?"""
    n = z.shape[1]
    return n >= SMALLEST or (n >= _FEW and f.residuals(z).numel() * n * n >= _WORK)


def _shorter(
    f: Evaluations, z: Tensor, value: Tensor, g: Tensor, p: Tensor, promised: Tensor, open_: Tensor, z_next: Tensor
) -> tuple[Tensor, Tensor]:
    """Parts of a step that was refused, for the samples ``open_``: the next points, and of which of them a part is one.

    It costs an evaluation where more damping costs factors.  A part that keeps little of its own promise is refused, too.
    """
    slope = -(g * p).sum(1)
    bent, taken = slope - promised, torch.zeros_like(open_)
    open_ = open_ & (promised > 0)
    for part in _PARTS:
        if not bool(open_.any()):
            break
        trial = taken_where(open_, z + part * p, z_next)
        fallen = decrease(f, z, value, g, trial)
        good = open_ & (fallen > _KEPT * (part * slope - part**2 * bent))
        z_next = taken_where(good, trial, z_next)
        taken, open_ = taken | good, open_ & ~good
    return z_next, taken


def _as_linear(model: _Normal, z: Tensor, g: Tensor, p: Tensor, z_next: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``R'R`` does not show the minimum of the model, that from ``R`` itself, which is taken where the residuals are
    linear, as they must be along the step ``p`` of ``R'R``: the next points, and of which samples it is."""
    hidden = model.hidden & model.is_exact(z, torch.where(torch.isfinite(p), p, 0).to(z))
    exact = model.equations.without_squares(model.r, hidden) if bool(hidden.any()) else None
    if exact is None:
        return z_next, torch.zeros_like(hidden)
    trial = taken_where(hidden & torch.isfinite(exact).all(1), z + exact, z_next)
    p = trial - z
    linear = hidden & (model.promised(g, p) > 0) & model.is_exact(z, p)
    return taken_where(linear, trial, z_next), linear


def _by_old_values(f: Evaluations, model: _Singular, z: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where Gauss-Newton steps with old singular values lead, as long as the gradient falls, from samples ``which`` whose
    gradient meets the tolerance before the minimum is at hand; who met the tolerance, and who of them is not at the minimum
    yet, ``(batch,)`` both.

    Where columns of ``R`` nearly depend on each other a gradient is next to nothing at a distance from the minimum.
    """
    g = f(z)
    norm = torch.linalg.vector_norm(g, dim=1)
    near = going = f.active & which & (norm <= f.tolerance)
    away = torch.zeros_like(near)
    for _ in range(_LAST):
        if not bool(going.any()):
            break
        c = model.correction(g)
        size = (c.abs() / (z.abs() + FLOOR * z.abs().amax(1, keepdim=True))).amax(1)
        away = near & (size > _AT_HAND * torch.finfo(z.dtype).eps ** 0.5) & (size <= _NEARBY)
        going = going & away
        if not bool(going.any()):
            break
        trial = torch.where(going.unsqueeze(1), z - c.to(z), z)
        g_trial = f(trial)
        norm_trial = torch.linalg.vector_norm(g_trial, dim=1)
        going = going & (norm_trial < norm)
        z = trial if bool(going.all()) else torch.where(going.unsqueeze(1), trial, z)
        g, norm = torch.where(going.unsqueeze(1), g_trial, g), torch.where(going, norm_trial, norm)
    return z, near, away


class _Singular:
    """The model ``|R p + r|`` in a ball, by the singular values of ``R D^-1``."""

    def __init__(self, f: Evaluations, z: Tensor, g: Tensor, share: Tensor) -> None:
        self.weights = rows = weights(f, z, share)
        R, r = f.residuals_jacobian(z), f.residuals(z)
        self.R, self.r = weighted(R, rows), r if rows is None else r / rows
        k = None if rows is None else curvature(f, z, share)
        if k is not None and bool((k < 0).any()):
            S, s, ok = root(R, k, g)
            self.R, self.r = torch.where(ok.view(-1, 1, 1), S, self.R), taken_where(ok, s, self.r)
        self.columns = torch.linalg.vector_norm(self.R, dim=1)

    def scale(self, D: Tensor) -> Tensor:
        """The largest eigenvalue of ``D^-1 R'R D^-1``."""
        self.D = D
        self.U, self.s, self.Vh = svd_batched(self.R / D.unsqueeze(1))
        return self.s[:, 0].square()

    def step(self, mu: Tensor, g: Tensor, which: Tensor, bold: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` of the samples ``which``, and the reduction of ``|r|^2 / 2`` that the model promises; ``bold``: it is the
        same for those whose ``mu`` is next to nothing."""
        b = mv(self.U.mT, self.r.to(self.U.dtype))
        q = self._damped(mu, b)
        return self._back(q), 0.5 * (q * (self.s * b + mu.unsqueeze(1) * q)).sum(1)

    def answer(self, mu: Tensor, b: Tensor) -> Tensor:
        """``x`` with ``(R'R + mu D^2) x = -R'b``."""
        return self._back(self._damped(mu, mv(self.U.mT, b.to(self.U.dtype))))

    def correction(self, g: Tensor) -> Tensor:
        """``c`` with ``R'R c = g``."""
        return mv(self.Vh.mT, mv(self.Vh, (g / self.D).to(self.s.dtype)) / self.s.square()) / self.D

    def along(self, p: Tensor) -> Tensor:
        """``R p``, ``(batch, m)``."""
        return mv(self.R, p.to(self.R.dtype))

    def _damped(self, mu: Tensor, b: Tensor) -> Tensor:
        """Singular values that are all rounding are none: with next to no damping they would move ``z`` along what ``R``
        does not depend on."""
        s = torch.where(self.s > self.s.shape[1] * torch.finfo(self.s.dtype).eps * self.s[:, :1], self.s, 0)
        return s * b / (s.square() + mu.unsqueeze(1))

    def _back(self, q: Tensor) -> Tensor:
        return -mv(self.Vh.mT, q) / self.D


class _Normal:
    """The model of :class:`_Singular` by ``R'R + mu D^2``: its factors, sparse where ``R`` is, or products."""

    def __init__(self, f: Evaluations, z: Tensor, share: Tensor) -> None:
        rows = weights(f, z, share)
        self.equations = normal_equations(f, z, weights=rows)
        self.residuals = lambda z: f.residuals(z) if rows is None else f.residuals(z) / rows
        self.r = self.residuals(z)
        self.columns, self.tolerance = self.equations.columns, f.tolerance

    def scale(self, D: Tensor) -> Tensor:
        """The largest eigenvalue of ``D^-1 R'R D^-1``."""
        self.D = D
        self.equations.scale(D)
        return self.equations.largest()

    def step(self, mu: Tensor, g: Tensor, which: Tensor, bold: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` of the samples ``which``, and the reduction of ``|r|^2 / 2`` that the model promises; ``bold``: those whose
        ``mu`` is there for the sake of factors alone."""
        p = self.equations.solve(mu, g, which)
        p, self.hidden = undamped(self.equations, p, g, bold & which, BEYOND * self.tolerance)
        return p, self.promised(g, p)

    def is_exact(self, z: Tensor, p: Tensor) -> Tensor:
        """Are the residuals at ``z + p`` what the model says, but for rounding, ``(batch,)``?"""
        off = torch.linalg.vector_norm(self.residuals(z + p) - self.r - self.equations.times(p), dim=1)
        size = torch.linalg.vector_norm(self.r, dim=1) + (self.columns * p.abs()).sum(1)
        return off <= _LINEAR * torch.finfo(z.dtype).eps * size  # false for NaN

    def promised(self, g: Tensor, p: Tensor) -> Tensor:
        """The reduction of ``|r|^2 / 2`` by ``p`` that the model promises, ``(batch,)``."""
        return -(g * p).sum(1) - 0.5 * self.equations.times(p).square().sum(1)
