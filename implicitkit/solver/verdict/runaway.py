r"""Is ``F`` small only because ``z`` is large: is the point on its way to infinity, where no solution is attained?

By evaluating ``F`` beside ``z`` (:mod:`~implicitkit.solver.verdict.differences`), and by the Newton correction
(:mod:`~implicitkit.solver.verdict.newton_correction`) where that cannot tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.autodiff import lacks_second_derivative
from implicitkit.foundation.operators import Operator
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.along_the_ray import has_a_limit, has_no_length, is_led_back, is_rounding_all_along
from implicitkit.solver.verdict.curve_of_minima import on_a_curve_of_minima
from implicitkit.solver.verdict.differences import (
    SOUND,
    both_changes,
    directions,
    doubling,
    in_working_precision,
    own_units,
    size_nearby,
    uneven,
)
from implicitkit.solver.verdict.newton_correction import DENSE, LEFT, Look, by_factors, by_products, near_a_zero
from implicitkit.solver.verdict.rounding_level import exceeds_rounding
from implicitkit.solver.verdict.runaway_together import fade_together
from implicitkit.solver.verdict.stationary_fit import as_fit, explains, well_fitted
from implicitkit.solver.verdict.underflow import has_underflowed

_WAYS = 4  # products that tell of what size an equation's terms are
_MORE = 30.0  # times a change of F: what J may say that it is


def runs_away(f: Evaluations, z: Tensor, which: Tensor, *last: Tensor) -> Tensor:
    r"""Where ``F`` is small only because ``z`` is large (``exp(-z)``, ``sqrt(z^2 + 1) - z``), ``(batch,)``.

    Near a zero the Newton correction ``J d = -F`` exists and is small beside ``z``, or takes the residual down, which it
    never does on the way to infinity (``exp(-z - 1) = exp(-z) / e``).  By factors up to 64 unknowns.  Beyond, a point is
    trusted whose every ``F_i`` is far smaller than its change when ``z`` moves by a hundredth, to and fro; where one is
    not, a few steps of GMRES decide.  A map that leads back from further out, whatever its tolerance, leads nowhere: what
    ends in a normalisation or a bounded activation does (two evaluations).  Nor do minima along a curve.  ``last``: the
    points a step ago, and ``F`` there, if they are known.
    """
    F = in_working_precision(f.residual(z))
    if f.kind.iteration:
        which = which & ~is_led_back(f, z)
        if not bool(which.any()):
            return which
        # z + 1 = z where z is so large that rounding says so
        unit = 2 * f.eps * in_working_precision(z)
        F = torch.where(F.abs() > unit.abs(), F, unit)
    # a. along the ray from the origin, b. to e. beside z and by corrections, f. many together, g. minima on a curve
    loose = has_no_length(f, z, F, which)
    lost = loose & is_rounding_all_along(f, z, F, loose)
    which = which & ~lost
    away = which & _leads_away(f, z, F, which, loose) if bool(which.any()) else which
    if z.shape[1] > DENSE and not f.kind.iteration:
        away = away | fade_together(f, z, F, which & ~away, last, LEFT)
    return lost | (away & ~on_a_curve_of_minima(f, z, away))


def _leads_away(f: Evaluations, z: Tensor, F: Tensor, which: Tensor, loose: Tensor) -> Tensor:
    """:func:`runs_away`, by changes of ``F`` beside ``z`` and by corrections; of samples that are ``loose`` none is trusted
    that does not take ``F`` down."""
    fit = as_fit(f, z)
    if fit is not None and bool((well_fitted(*fit, z, F, which) & ~loose | ~which).all()):
        return torch.zeros_like(which)
    scale = size_nearby(f, z, F, z, which.unsqueeze(1).expand_as(F), careful=z.shape[1] > DENSE)
    still = which.unsqueeze(1) & (F == 0) & (scale > 0)
    flat = (F == 0) & (scale == 0)
    asked = z.shape[1] > DENSE and bool(((still | flat) & which.unsqueeze(1)).any())
    seen = doubling(f, z, F, f.eps**0.25 * uneven(z)[1]) if asked else None
    if bool(still.any()):  # zero to the last bit: of what is left of F around z, is anything more than rounding?
        scale = torch.where(still & ~exceeds_rounding(f, z, F, still, seen), 0, scale)
    sound = (F.abs() <= SOUND * scale).all(1) & ~loose
    flat = (F == 0) & (scale == 0)
    vanished, off = flat.all(1), torch.zeros_like(flat)
    if bool((flat.any(1) & which).any()):
        underflowed, ends = has_underflowed(f, z, flat, seen)
        plateau, vanished = vanished & ends, underflowed | (vanished & ~ends)
        which = which & ~plateau
        off = flat & ends.unsqueeze(1) if f.kind.minimisation else off
    at, open_ = Look(f, z, F, scale, loose), which & ~vanished & (z.shape[1] <= DENSE or ~sound)
    if not bool(open_.any()):
        return which & (vanished | ~sound)
    if fit is not None:
        orthogonal, explained = explains(*fit, in_working_precision(z))
        near = by_factors(at, *fit, off) & explained
        # J is singular wherever residuals are left that are no more than the unknowns
        few = fit[1].shape[1] <= z.shape[1]
        along = explained if few else orthogonal
        if bool((open_ & ~near & along).any()):
            H = in_working_precision(f.linearize(z).dense())
            near = near | (along & by_factors(at, H, F, off, lines=few))
        return which & (vanished | ~near | has_a_limit(f, *fit, z, open_ & near))
    try:
        A = f.linearize(z)
        J = in_working_precision(A.dense()) if z.shape[1] <= DENSE else None
        d, known = (F, which) if J is not None else by_products(A, z, F, None if f.kind.iteration else scale, open_)
    except RuntimeError as error:
        if not lacks_second_derivative(error):
            raise
        return which & (vanished | ~sound)
    if J is not None:
        off = off | _apart(J, (F == 0) & (scale > 0))
        near, known = by_factors(at, J, F, off), (J != 0).flatten(1).any(1) | (F == 0).all(1)
    else:
        near = near_a_zero(at, d, torch.maximum(scale, _terms(A, z)))
    near = near & _moves_as_said(at, A)
    # a function that autograd cannot see through has no derivative to tell from
    return which & (vanished | ~torch.where(known, near, sound))


def _terms(A: Operator, z: Tensor) -> Tensor:
    """The size of what each ``F_i`` adds up, ``(batch, n)``: ``J w`` along some ``w`` of the size of ``z``, by products.
    Along ``z``, or with other signs, changes of neighbours may cancel to the last bit."""
    ways = own_units(z) * seeded.normal(_WAYS, 1, z.shape[1], seed=1).to(z)
    return torch.stack([in_working_precision(A.mv(w)).abs() for w in ways]).amax(0)


def _moves_as_said(at: Look, A: Operator) -> Tensor:
    """Where no ``F_i`` changes by far less than ``J w`` says, along two directions ``w``, ``(batch,)``.

    Derivatives may underflow or overflow before the function does: that of ``p^-0.3`` at ``p = e^573`` is a denormal
    number, and a derivative that should be zero is not.  Where the changes over a hundredth of the way (``scale``) are
    less than ``J`` says, shorter ways are tried: on one of them a steep step (``tanh(1e9 (z - 5))``) is as ``J`` says, or
    it is a jump, as large over two units in the last place as over more.
    """
    f, z, F, scale, _ = at
    ways, eps = directions(z, most=2), f.eps
    said = [in_working_precision(A.mv(w)).abs() for w in ways]
    doubtful = torch.stack(said).amax(0) > _MORE * scale
    for w, product in zip(ways, said, strict=True):
        if not bool(doubtful.any()):
            break
        far, near, last = (both_changes(f, z, F, w, h) for h in (eps**0.5, eps**0.75, 2 * eps))
        step = 2 * eps * last
        steep = (step >= eps**0.5 * scale) & ((product <= _MORE * last) | (step >= 0.5 * eps**0.5 * far))
        refuted = doubtful & (product > _MORE * torch.maximum(far, near)) & ~steep
        if bool(refuted.any()):
            return ~refuted.any(1)
    return torch.ones_like(doubtful[:, 0])


def _apart(J: Tensor, zero: Tensor) -> Tensor:
    """Unknowns at a zero of high multiplicity of their own, ``(batch, n)``: of the equations that are ``zero`` to the last
    bit, and are not all around, those with neither row nor column in ``J`` (``(z_i - a_i)^3`` at ``a_i``)."""
    return zero & ~(J != 0).any(2) & ~(J != 0).any(1)
