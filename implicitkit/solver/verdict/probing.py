r"""Has a residual that is small at a point a zero near it, or is it on its way to infinity?

By evaluating ``F`` beside ``z`` (:mod:`~implicitkit.solver.verdict.scales`), and by the Newton correction where that
cannot tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.autodiff import lacks_second_derivative
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.dense import lstsq_batched, solve_batched
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.crossings import crosses, in_units, is_lower, moved_by_rounding, runs_down, without
from implicitkit.solver.verdict.families import in_a_family
from implicitkit.solver.verdict.fits import DENSE, as_fit, explains, is_small, well_fitted
from implicitkit.solver.verdict.lengths import has_no_length, stays
from implicitkit.solver.verdict.limiting_fits import has_a_limit
from implicitkit.solver.verdict.scales import (
    FLOOR,
    NOISE,
    change,
    directions,
    doubling,
    grows,
    in_working_precision,
    is_held,
    is_rounding,
    rounding,
    uneven,
)
from implicitkit.solver.verdict.together import fade_together
from implicitkit.solver.verdict.underflow import has_underflowed

_MOVE = 1e-2  # by which z moves in the test for infinity
_SOUND = 1e-3  # a Newton correction this small beside z is that of a point near a solution
_SOUND_LOW, _SOUND_EPS = 5e-3, 8  # ... in lower precisions, or so many eps if that is more
_BESIDE = 0.03  # of z: how far around the point of a line that is nearest to the origin F is looked at
_SHORT = 0.01  # ... and what is left of the way there if that is the origin: a ray of zeros need not reach it
_FALLS = 0.1  # ... and so is a larger one that takes the residual down to this
_MORE = 30.0  # times a change of F: what J may say that it is
LEFT = 0.347  # what a step leaves of F at most: of a zero of order 9; of exp(-z^p), below 2e-5, 0.35 to 1 / e
_SURE = 1e-2  # what a step leaves of F where nothing more need be asked
_ALONG, _CORRECTIONS = 1e-2, 8  # of the way along a curve of zeros, and evaluations to come back to it
_ACROSS = (2, 3)  # Newton steps that lead across a zero
BEHIND = (4, 16, 64)  # steps beyond which F is as large again behind such a zero ...
_HALF = 0.5  # of a map's residual: what a correction by products leaves at most (one by factors: _SURE), ...
_DRIFTS = 1e-5  # ... where that is so much of its changes, which waves alone may make, ...
_ROUNDED = 8.0  # ... and not so many eps of z
_MANY = 10  # directions along which many equations are looked at
_STEPS = 20  # ... and products beyond ...
_PRODUCTS = 200  # ... and at most, where these were not enough


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
        which = which & ~is_held(f, z)
        if not bool(which.any()):
            return which
        # z + 1 = z where z is so large that rounding says so
        unit = 2 * f.eps * in_working_precision(z)
        F = torch.where(F.abs() > unit.abs(), F, unit)
    loose = has_no_length(f, z, F, which)
    lost = loose & stays(f, z, F, loose)
    which = which & ~lost
    away = which & _leads_away(f, z, F, which, loose) if bool(which.any()) else which
    if z.shape[1] > DENSE and not f.kind.iteration:
        away = away | fade_together(f, z, F, which & ~away, last, LEFT)
    return lost | (away & ~in_a_family(f, z, away))


def _leads_away(f: Evaluations, z: Tensor, F: Tensor, which: Tensor, loose: Tensor) -> Tensor:
    """:func:`runs_away`, by changes of ``F`` beside ``z`` and by corrections; of samples that are ``loose`` none is trusted
    that does not take ``F`` down."""
    fit = as_fit(f, z)
    if fit is not None and bool((well_fitted(*fit, z, F, which) & ~loose | ~which).all()):
        return torch.zeros_like(which)
    scale = _size(f, z, F, z, which.unsqueeze(1).expand_as(F), careful=z.shape[1] > DENSE)
    still = which.unsqueeze(1) & (F == 0) & (scale > 0)
    flat = (F == 0) & (scale == 0)
    asked = z.shape[1] > DENSE and bool(((still | flat) & which.unsqueeze(1)).any())
    seen = doubling(f, z, F, f.eps**0.25 * uneven(z)[1]) if asked else None
    if bool(still.any()):  # zero to the last bit: of what is left of F around z, is anything more than rounding?
        scale = torch.where(still & ~grows(f, z, F, still, seen), 0, scale)
    sound = (F.abs() <= _SOUND * scale).all(1) & ~loose
    flat = (F == 0) & (scale == 0)
    vanished, off = flat.all(1), torch.zeros_like(flat)
    if bool((flat.any(1) & which).any()):
        underflowed, ends = has_underflowed(f, z, flat, seen)
        plateau, vanished = vanished & ends, underflowed | (vanished & ~ends)
        which = which & ~plateau
        off = flat & ends.unsqueeze(1) if f.kind.minimisation else off
    open_ = which & ~vanished & (z.shape[1] <= DENSE or ~sound)
    if not bool(open_.any()):
        return which & (vanished | ~sound)
    if fit is not None:
        orthogonal, explained = explains(*fit, in_working_precision(z))
        near = _by_factors(f, *fit, z, F, scale, off, loose) & explained
        # J is singular wherever residuals are left that are no more than the unknowns
        if bool((open_ & ~near & orthogonal).any()):
            H = in_working_precision(f.linearize(z).dense())
            few = fit[1].shape[1] <= z.shape[1]
            near = near | (orthogonal & _by_factors(f, H, F, z, F, scale, off, loose, lines=few))
        return which & (vanished | ~near | has_a_limit(f, *fit, z, open_ & near))
    try:
        A = f.linearize(z)
    except RuntimeError as error:
        if not lacks_second_derivative(error):
            raise
        return which & (vanished | ~sound)
    if z.shape[1] <= DENSE:
        J = in_working_precision(A.dense())
        off = off | _apart(J, (F == 0) & (scale > 0))
        near, known = _by_factors(f, J, F, z, F, scale, off, loose), (J != 0).flatten(1).any(1) | (F == 0).all(1)
    else:
        d, known = _by_products(A, z, F, None if f.kind.iteration else scale, open_)
        near = _near_a_zero(f, z, F, d, scale, scale, loose)
    near = near & _moves_as_said(f, A, z, F, scale)
    # a function that autograd cannot see through has no derivative to tell from
    return which & (vanished | ~torch.where(known, near, sound))


def _by_factors(
    f: Evaluations,
    J: Tensor,
    r: Tensor,
    z: Tensor,
    F: Tensor,
    scale: Tensor,
    off: Tensor,
    loose: Tensor,
    lines: bool = True,
) -> Tensor:
    """Where the correction ``J d = -r`` (in the sense of least squares) says that a zero of ``F`` is near, ``(batch,)``.

    Equations are scaled to equal size and unknowns by their own (those of a fit, whose equations have weights, to equal
    columns of ``J``).  Where ``J`` then is singular but to half the digits (a fit: to rounding), the correction may also be
    that of lower rank, but the zeros (or fits as good) must go on along its null space to the point nearest to the
    origin: a line of them, no way to infinity. Without ``lines`` a singular ``J`` is refused; a square one is not,
    whatever its condition, where the correction is small and determined (:mod:`~implicitkit.solver.verdict.crossings`).
    Unknowns that are ``off``, on which an objective does not depend where it is, stay as they are.
    """
    norm = lambda t: torch.linalg.vector_norm(in_working_precision(t), dim=1)  # noqa: E731
    point, square, eps = in_working_precision(z), r is F, torch.finfo(F.dtype).eps
    unit = torch.maximum(point.abs(), FLOOR * point.abs().amax(1, keepdim=True))
    finite = torch.isfinite(J).flatten(1).all(1) & torch.isfinite(r).all(1)
    matrix, unit, rows = in_units(torch.where(finite[:, None, None], J, 0), point, unit, square)
    b = torch.where(finite[:, None], -r / rows, 0)
    if bool(off.any()):
        matrix, b = without(matrix, b, off)
    d, regular, _ = solve_batched(matrix, b) if square else lstsq_batched(matrix, b)
    # what is added up in each equation, where a change of z along some direction may cancel
    terms = torch.maximum(scale, rows * matrix.abs().sum(2)) if square else scale
    near = regular & _near_a_zero(f, z, F, unit * d, scale, terms, loose)
    small = regular & is_small(unit * d, z, f.eps)
    determined = lambda: is_small(moved_by_rounding(matrix, unit, point), z, f.eps)  # noqa: E731
    if square and bool((near & small).all() and determined().all()):
        return finite  # no null space, and no line, has anything to add
    rcond = eps**0.5 if square else None
    low = lstsq_batched(matrix, b, rcond=rcond)[0]
    along = lstsq_batched(matrix, (matrix @ (point / unit).unsqueeze(2)).squeeze(2), rcond=rcond)[0]
    ray = torch.linalg.vector_norm(along, dim=1) <= eps**0.25 * torch.linalg.vector_norm(point / unit, dim=1)
    back = along + low + torch.where(ray, _SHORT, 0).unsqueeze(1) * (point / unit - along)
    if f.kind.returns_program:  # multipliers that constraints leave open may stay as they are
        back[:, f.problem.size :] = (point / unit + low)[:, f.problem.size :]
    origin = (unit * back).to(z.dtype)
    full = torch.linalg.vector_norm(along - point / unit, dim=1) <= eps**0.25 * torch.linalg.vector_norm(along, dim=1)
    if square:
        line = ~(regular & full)  # of full rank the corrections are the same, and say all there is to say
        if bool(line.any()):
            there, beside = in_working_precision(f.residual(origin)), unit * back.abs().clamp_min(_BESIDE)
            size = torch.minimum(scale, _size(f, origin, there, beside, line.unsqueeze(1) & (scale > 0)))
            straight = (there.abs() <= 3 * eps**0.5 * size).all(1)
            line = _goes_on(f, z, (matrix, unit, rows), low + _ALONG * (along - point / unit), scale, line, straight)
        # a valley that goes down is no line of minima, however little of F is left in it
        line = line & ~is_lower(f, z, origin, line & ~full) if f.kind.minimisation else line
        units = 2 * eps * point.abs() / rows if f.kind.iteration else None
        solvable = _solves(matrix, low, b, point / unit, units)
    else:
        there = in_working_precision(f.problem.flat_residuals(f.kernel, origin).detach())
        line, solvable = norm(there) <= 1.01 * norm(r) + eps**0.5 * rows.squeeze(1), finite
    line = line if lines else line & full
    open_, sure = small & ~(full | line), full | line
    if square and bool(open_.any()):
        known = determined()
        known = known | crosses(f, z, matrix, unit, rows, _SOUND_LOW) if bool((open_ & ~known).any()) else known
        sure = sure | (open_ & known)
    near = (near & sure) | (solvable & line & _near_a_zero(f, z, F, unit * low, scale, terms, loose))
    if square:  # a zero to the last bit where F is not zero all around: one of high multiplicity, say
        near = near | ((F == 0) & (scale > 0)).all(1)
    if f.kind.minimisation and square:
        near = near & ~runs_down(f, z, J, near & finite)
    return finite & near


def _solves(matrix: Tensor, low: Tensor, b: Tensor, point: Tensor, units: Tensor | None) -> Tensor:
    """Where a correction of ``low`` rank solves ``matrix d = b`` but for a half, and for rounding of itself and of what
    ``b`` is made of, ``(batch,)``: of a matrix whose rank is cut at the root of eps it is wrong by more.

    ``units``: of a number that a map hands on as it is, ``(batch, n)``: no correction changes its equation."""
    eps = torch.finfo(matrix.dtype).eps
    left = ((matrix @ low.unsqueeze(2)).squeeze(2) - b).abs()
    rounded = eps * (low.abs().amax(1, keepdim=True) + (matrix * point.unsqueeze(1)).abs().sum(2))
    rounded = rounded + 4 * eps**0.5 * torch.maximum(low.abs(), b.abs()).amax(1, keepdim=True)
    return (left <= 0.5 * b.abs() + (rounded if units is None else rounded + units)).all(1)


def _goes_on(
    f: Evaluations, z: Tensor, matrix: tuple[Tensor, ...], ahead: Tensor, scale: Tensor, which: Tensor, straight: Tensor
) -> Tensor:
    """Where zeros go on along a line, which is ``straight`` or a curve, ``(batch,)``: from a step ``ahead``, on a tangent
    towards the origin, corrections of lower rank come back to where next to nothing is left of ``F``.

    On the way to infinity ``F`` is larger there, and its changes beside ``z``, ``scale``, are no larger than itself.
    Curves are looked for of steady states, whose flow may conserve amounts, and in double precision: with fewer digits
    nothing tells a curve from a nearly singular matrix.

    Args: ``matrix, unit, rows`` of :func:`_by_factors`, in whose units is ``ahead`` ``(batch, n)``.
    """
    bent, eps = which & ~straight, f.eps
    flow = f.kind.equation and f.kind.flow > 0
    if z.dtype != torch.float64 or not flow or not bool(bent.any()):
        return which & straight
    bent = bent & (NOISE * rounding(f, z, bent) <= eps**0.75 * scale).all(1)
    M, unit, rows = matrix
    back = torch.zeros_like(bent)
    for _ in range(_CORRECTIONS if bool(bent.any()) else 0):
        there = f.residual(z + unit * ahead)
        back = (there.abs() <= eps**0.75 * scale).all(1)
        if bool((back | ~bent).all()):
            break
        ahead = ahead + lstsq_batched(M, -there.nan_to_num() / rows, rcond=eps**0.5)[0]
    return which & (straight | (bent & back))


def _apart(J: Tensor, zero: Tensor) -> Tensor:
    """Unknowns at a zero of high multiplicity of their own, ``(batch, n)``: of the equations that are ``zero`` to the last
    bit, and are not all around, those with neither row nor column in ``J`` (``(z_i - a_i)^3`` at ``a_i``)."""
    return zero & ~(J != 0).any(2) & ~(J != 0).any(1)


def _by_products(A: Operator, z: Tensor, F: Tensor, scale: Tensor | None, which: Tensor) -> tuple[Tensor, Tensor]:
    """The correction ``J d = -F`` to a tenth, ``(batch, n)``, and where it was found, ``(batch,)``; of the samples ``which``
    by more products where few do not: where positions hand on from one to the next, it takes as many as there are.

    Each equation is divided by its change beside ``z``, its ``scale`` (or by what is left of it, if that is more), and
    ``z_j`` counts in units of itself: else what is left of equations that vanish is nothing beside the others.  Those of a
    map (``None``) have one unit.
    """
    A.near, b, unit = (
        None,
        -F.to(A.like.dtype),
        torch.ones_like(A.like),
    )  # near: far from the inverse of a stiff equation
    if scale is not None:
        unit = torch.maximum(z.abs(), FLOOR * z.abs().amax(1, keepdim=True)).to(A.like.dtype)
        size = torch.maximum(scale, F.abs())
        rows = torch.where(size > 0, 1 / size, 0).nan_to_num(posinf=0.0).to(A.like.dtype)
        b, A = rows * b, _scaled(A, rows, unit)
    found = GMRES().solve(A, b, rtol=0.1, atol=0.0, max_steps=_STEPS)
    left = which & ~found.converged
    if not bool(left.any()):
        return unit * found.x, found.converged
    later = GMRES().solve(A, torch.where(left.unsqueeze(1), b, 0), rtol=0.1, atol=0.0, max_steps=_PRODUCTS)
    return unit * torch.where(left.unsqueeze(1), later.x, found.x), torch.where(left, later.converged, found.converged)


def _scaled(A: Operator, rows: Tensor, columns: Tensor) -> Operator:
    """``diag(rows) A diag(columns)``."""
    return A.derived(
        lambda v: rows * A.mv(columns * v),
        lambda w: columns * A.rmv(rows * w),
        lambda: rows.unsqueeze(2) * A.dense() * columns.unsqueeze(1),
    )


def _moves_as_said(f: Evaluations, A: Operator, z: Tensor, F: Tensor, scale: Tensor) -> Tensor:
    """Where no ``F_i`` changes by far less than ``J w`` says, along two directions ``w``, ``(batch,)``.

    Derivatives may underflow or overflow before the function does: that of ``p^-0.3`` at ``p = e^573`` is a denormal
    number, and a derivative that should be zero is not.  Where the changes over a hundredth of the way (``scale``) are
    less than ``J`` says, shorter ways are tried: on one of them a steep step (``tanh(1e9 (z - 5))``) is as ``J`` says, or
    it is a jump, as large over two units in the last place as over more.
    """
    ways, eps = directions(z, most=2), f.eps
    said = [in_working_precision(A.mv(w)).abs() for w in ways]
    doubtful = torch.stack(said).amax(0) > _MORE * scale
    for w, product in zip(ways, said, strict=True):
        if not bool(doubtful.any()):
            break
        far, near, last = (_both(f, z, F, w, h) for h in (eps**0.5, eps**0.75, 2 * eps))
        step = 2 * eps * last
        steep = (step >= eps**0.5 * scale) & ((product <= _MORE * last) | (step >= 0.5 * eps**0.5 * far))
        refuted = doubtful & (product > _MORE * torch.maximum(far, near)) & ~steep
        if bool(refuted.any()):
            return ~refuted.any(1)
    return torch.ones_like(doubtful[:, 0])


def _both(f: Evaluations, z: Tensor, F: Tensor, w: Tensor, h: float) -> Tensor:
    """The larger change of each ``F_i`` to both sides of ``z``, over ``h w``, divided by ``h``, ``(batch, n)``."""
    return torch.maximum(change(f, z, F, w, h), change(f, z, F, w, -h))


def _size(f: Evaluations, z: Tensor, F: Tensor, w: Tensor, rows: Tensor, careful: bool = False) -> Tensor:
    """By how much each ``F_i`` changes when ``z`` moves by a hundredth of ``|w|``, to and fro, times a hundred.

    Along two directions, and on until every equation of ``rows`` has changed, beside what the others have or by far more
    than it is, or if ``careful`` until their samples can be trusted; along ten at most: two terms that cancel at ``z`` do so
    along half of them, and a second difference of what lies on a line is zero, or rounding, along a quarter.
    """
    size, which = torch.zeros_like(F), rows.any(1)
    for count, direction in enumerate(directions(w.to(z.dtype), most=_MANY), start=1):
        there, back = (change(f, z, F, direction, sign * _MOVE) for sign in (1.0, -1.0))
        size = torch.maximum(size, torch.minimum(there, back))
        if careful:
            enough = bool((((F.abs() <= _SOUND * size).all(1) & (size > 0).any(1)) | ~which).all())
        else:
            least = torch.finfo(F.dtype).eps ** 0.5 * size.amax(1, keepdim=True)
            moved = (size > least) | ((F.abs() <= _SOUND * size) & (size > 0))
            enough = count > 1 and bool((moved | ~rows).all())
        if enough:
            break
    return size


def _near_a_zero(
    f: Evaluations, z: Tensor, F: Tensor, d: Tensor, scale: Tensor, terms: Tensor, loose: Tensor
) -> Tensor:
    """Where the correction ``d`` is small beside ``z``, or takes the residual down (each ``F_i`` relative to its change
    when ``z`` moves); ``(batch,)``.  ``terms``: of what size each ``F_i`` is the sum."""
    largest = z.abs().amax(1, keepdim=True)
    small = is_small(d, z, f.eps)
    weight = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    norm = lambda t: torch.linalg.vector_norm(in_working_precision(t) / weight, dim=1)  # noqa: E731
    behind = in_working_precision(f.residual(z + torch.nan_to_num(d).to(z.dtype)))
    before, after = norm(F), norm(behind)
    # a gradient goes down as the square of its residuals, of which exp(-z) leaves 1 / e
    falls = _FALLS * LEFT if f.kind.of_residuals else _FALLS
    outwards = ((z + d).abs() > z.abs()).any(1)

    def across(open_: Tensor) -> Tensor:  # a zero: F is as large again behind it, or it lies towards the origin
        if not bool((open_ & outwards).any()):
            return open_
        found = ~outwards
        for k in (*_ACROSS, *BEHIND):
            found = found | (norm(f.residual(z + k * torch.nan_to_num(d).to(z.dtype))) >= before)
            if bool((found | ~open_).all()):
                break
        return open_ & found

    if not f.kind.iteration:
        # erfc(24) = 1e-252 has a small correction, but it leaves a third; and far out a hundredth can be a period (but
        # where F is far below its changes, a zero is near: on the way to infinity it is 1e-8 of them and more)
        standing = (F.abs() > f.eps**0.6 * terms).any(1) & (not f.kind.of_residuals)
        standing = small & (loose | standing) & ~(after <= _SURE * before)
        odd = standing & ~(across(standing) & (after <= LEFT * before))
        small = small & (~odd | is_rounding(f, z, F, odd))
    if f.kind.iteration:  # a map that drifts, z + 2 + sin(z), has small corrections everywhere, which leave all of F
        eps, share = f.eps, _SURE if z.shape[1] <= DENSE else _HALF
        gone = after <= torch.where(loose, min(share, LEFT), share) * before
        gone = gone | (behind.abs() <= _ROUNDED * eps * largest).all(1)
        drifts = small & (loose | (F.abs() > _DRIFTS * scale).any(1)) & ~gone
        drifts = drifts & (F.abs() <= eps**0.5 * largest).all(1)  # else it is the tolerance's
        # waves that are shorter than the steps of the test look like rounding
        tiny = (F.abs() <= eps**0.75 * largest).all(1)
        small = small & (~drifts | (tiny & is_rounding(f, z, F, drifts & tiny)))
    return small | across(~small & (after <= falls * before) & (d.abs() <= 0.5 * largest).all(1))
