r"""Derivatives of a state at rest of a flow that conserves sums.

A closed vessel keeps its atoms, a Markov chain its probability, an epidemic without births its people: there are rows ``C``
with ``C F(z, \theta) = 0`` for every ``z``.  States at rest come in families, of which the start names one,

    C z(\theta, z_0) = C z_0,

and ``J = dF/dz`` is singular, ``C J = 0``.  With orthonormal rows and any ``s > 0``,

    (J + s C^T C) dz = -F_\theta d\theta + s C^T C dz_0

has the solution that keeps ``C dz = C dz_0``: multiplied by ``C`` it is ``s C dz = s C dz_0``, and then ``J dz = -F_\theta
d\theta`` remains.  The matrix is regular where no other state beside ``z`` has these sums, ``null(J)`` and ``null(C)``
having nothing in common but zero; ``(J + s C^T C)^{-1}`` is then the group inverse of ``J`` on what ``F_\theta`` spans.
Since ``C`` is constant the rules for derivatives of every order stay what they are, with this matrix in the place of ``J``.

Volumes, stoichiometric numbers and the chances of a chain to end here or there make ``C`` depend on ``\theta``.  Then ``C(z
- z_0) = 0`` gives ``C dz = C dz_0 - dC (z - z_0)``.  With ``J w = z - z_0``, which has a solution, and from ``C J = 0``, so
that ``dC J = -C J_\theta d\theta`` (``C F_z = 0`` for every ``z``),

    (J + s C^T C) dz = -F_\theta d\theta + s C^T C (dz_0 + (J_\theta d\theta) w)

Of second order this is not so, and these are refused.

``C`` spans the left null space of ``J``, of samples of which it is seen that

- ``C F = 0`` at points elsewhere, ``z`` changed by up to a third of each unknown and of the mean one, or of the start's;
- the solver has kept ``C z``, as steps along ``F`` and combinations of them do: of an equation ``F = 0`` that is no flow, or
  of a solver that goes other ways, the start means nothing.

Rates may be 1e6 beside 1e-7, and what is slow is not conserved: with diagonal ``L`` and ``R`` that make rows and columns of
``L J R`` of one size, rows ``U`` span its left null space, ``C = U L``.  In the place of ``s C^T C`` stands

    B = L^{-1} U^T Q R^{-1},    Q the orthonormal rows nearest to U L R.

Where more is left than the sums tell (whoever an epidemic spares: ``F = 0`` wherever none is infected) the state that the
flow comes to depends on all of the way, and ``J`` is singular beside ``C``, too.  Of what dies out something is left, as
little as 1e-70, which makes it regular, and every ``dz`` that comes of it means nothing.  With Newton's correction ``d``
such a ``dz`` would change by all of itself,

    |e| >= 0.4 |dz| in units R,    (J + B) e = (J(z - d) - J(z)) dz,

as at a double root (:mod:`implicitkit.rule.determinacy`): it is refused.

A change of ``\theta`` that breaks a sum (one entry of a stochastic matrix) leaves no state at rest, and what comes out along
it means nothing: that is said where there is such a parameter.

Source: Meyer (1975), SIAM Review 17(3), 443-464, for the group inverse of a Markov chain; Reder (1988), J. theor. Biol.
135(2), 175-201, for metabolic networks; Ruiz (2001), RAL-TR-2001-034, for rows and columns of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, graph, seeded
from implicitkit.foundation.errors import DegenerateWarning, warn
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.solution import Record

LARGEST = 512  # unknowns of which singular values are taken
_NUMBERS = 1 << 24  # in all matrices, at most
_POINTS = 3  # at which F is to keep the sums
_PASSES = 4  # for rows and columns of one size
_ROUNDED, _NEARLY = 20.0, 10.0  # units of rounding; times what F leaves at rest, beside what it is elsewhere
_AWAY = 0.3  # of each unknown, and of the mean one: how far away they are, at most
_SLIGHT, _OWN_CHANGE = (
    1e-3,
    0.4,
)  # of a column: changes of the Jacobian on the way to the solution; of a derivative by them
BY_THE_WAY = "what the flow conserves does not tell this state from others beside it: the way there decides"
_SAID = (
    "sums that the flow conserves are not conserved where a parameter changes by itself: the derivative holds for changes "
    "of the parameters that keep them (a matrix whose rows still add up to one). If those are made outside of the "
    "function, nothing is wrong; to be told nothing, make them inside of it"
)


@dataclass(frozen=True)
class Held:
    """``B`` of every sample, in the place of ``s C^T C``, zero where nothing is conserved.

    Attributes:
        B: ``(samples, n, n)``. L, R: diagonals, ``(samples, n)``. U: the null space, in columns, the others zero.
        way: ``w``, ``J w = z - z_0``, ``(samples, n)``, where the sums depend on ``theta``.
        change: ``J(z - d) - J(z)``, ``(samples, n, n)``, where it is more than slight.
    """

    B: Tensor
    L: Tensor
    R: Tensor
    U: Tensor
    way: Tensor | None = None
    change: Tensor | None = None


def hold(record: Record, J: Operator, tolerance: float, quietly: bool) -> None:
    """Sums that the solve of ``record`` has kept become known of it (:func:`sums`); not ``quietly``: parameters that break
    them are said."""
    z, start = record.outcome.z, record.start
    held = sums(J, record, z, start, tolerance)
    if held is not None:
        moves, broken = _depend(record, held, record.theta)
        matrix = J.dense()[: len(z)].detach().to(held.B)
        if moves:
            way, _ = _solved(matrix + held.B, held.L, held.R, (z - start).to(held.B).unsqueeze(2))
            held = replace(held, way=way.squeeze(2).nan_to_num(0, 0, 0))
        held = replace(held, change=_change(record, held, matrix, z))
        if broken and not quietly:
            warn(_SAID, DegenerateWarning)
    record.held = held
    if held is None:
        record.start = None  # nobody asks again


def sums(J: Operator, record: Record, z: Tensor, start: Tensor, tolerance: float) -> Held | None:
    """What every sample keeps; ``None`` where nothing is conserved.

    Args:
        J: ``dF/dz``, whose first blocks are those of the samples. record: of the solve. z: the solution, ``(samples, n)``.
        start: where the solve began. tolerance: of what adds up in a sum, by which the solver may have changed it.
    """
    samples, n = z.shape
    if start.shape != z.shape or n > LARGEST or J.batch * n * n > _NUMBERS:
        return None
    matrix, eps = J.dense()[:samples].detach(), torch.finfo(z.dtype).eps
    finite = torch.isfinite(matrix).flatten(1).all(1)
    size = torch.maximum(z.abs(), start.abs())
    units = torch.maximum(size, eps**0.5 * _size(z, start))
    matrix, L, R = _even(torch.where(finite[:, None, None], matrix, 0), units.to(matrix))
    left, values, _ = torch.linalg.svd(matrix)
    null = (values <= eps**0.75 * values[:, :1]) & (values[:, :1] > 0) & finite.unsqueeze(1)
    if not bool(null.any()):
        return None
    U = torch.where(null.unsqueeze(1), left, 0)
    off, terms = _added(U * L.unsqueeze(2), z - start), _added((U * L.unsqueeze(2)).abs(), size)
    kept = null.any(1) & (off.abs() <= max(tolerance, eps**0.4) * terms).all(1)
    size = _size(z, start)
    with torch.no_grad():
        for k in range(_POINTS if bool(kept.any()) else 0):
            try:
                F = L * record.system.residual(_elsewhere(z, size, k), *record.theta)
            except Exception:  # a function may refuse points elsewhere
                return None
            off, terms = _added(U, F), _added(U.abs(), F.abs())
            rounding = _ROUNDED * eps * torch.linalg.vector_norm(F, dim=1, keepdim=True)
            kept = kept & (off.abs() <= eps**0.5 * terms + rounding).all(1)  # not of NaN
    if not bool(kept.any()):
        return None
    rows = U.mT * (L * R).unsqueeze(1)
    length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    P, S, Q = torch.linalg.svd(rows / torch.where(length > 0, length, 1), full_matrices=False)
    alive = eps**0.75 * S[:, :1] < S
    kept = kept & (alive.sum(1) == null.sum(1))
    Q = P @ torch.where(alive.unsqueeze(2), Q, 0)
    B = (values[:, :1, None] * U) @ Q / L.unsqueeze(2) / R.unsqueeze(1)
    U = U * kept[:, None, None]
    return Held(torch.where(kept[:, None, None], B, 0), L, R, U) if bool(kept.any()) else None


def _change(record: Record, held: Held, matrix: Tensor, z: Tensor) -> Tensor | None:
    """``J(z - d) - J(z)``, zero of samples that hold nothing; ``None`` where it is slight."""
    residual = lambda y: record.system.residual(y, *record.theta)  # noqa: E731
    with torch.no_grad():
        F = residual(z).to(held.B).unsqueeze(2)
    d = _solved(matrix + held.B, held.L, held.R, F)[0].squeeze(2).to(z)
    change = autodiff.jacobian(residual, z - d).detach().to(matrix) - matrix
    change = torch.where(held.U.flatten(1).any(1)[:, None, None], change, 0).nan_to_num(0, 0, 0)
    each, size = (held.L.unsqueeze(2) * M.abs() for M in (change, matrix))
    slight = each <= _SLIGHT * size.amax(1, keepdim=True)
    return None if bool(slight.all()) else change


def _added(C: Tensor, v: Tensor) -> Tensor:
    """``C' v``."""
    return (C.mT @ v.to(C).unsqueeze(2)).squeeze(2)


def _elsewhere(z: Tensor, size: Tensor, k: int) -> Tensor:
    own, mean = (seeded.uniform(z.shape[1], seed=0x51 + 2 * k + i).to(z) for i in (0, 1))
    return z + _AWAY * ((2 * own - 1) * z + mean * size)


def _even(matrix: Tensor, units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``L J R``, ``L`` and ``R``, the largest of every row and column near one; rows of rounding are zero, and so are
    columns of which no row would see more than rounding, were all unknowns as large as they are, or were."""
    size = matrix.abs() * units.unsqueeze(1)
    most = size.amax(2, keepdim=True)
    seen = (size / torch.where(most > 0, most, 1)).amax(1, keepdim=True)
    matrix = torch.where(seen > _ROUNDED * torch.finfo(size.dtype).eps, matrix, 0)
    size = matrix.abs()
    most, each = size.amax((1, 2)), size.amax(2)
    matrix = torch.where((each > _ROUNDED * torch.finfo(size.dtype).eps * most.unsqueeze(1)).unsqueeze(2), matrix, 0)
    size = matrix.abs()
    L, R = torch.ones_like(each), torch.ones_like(each)
    for _ in range(_PASSES):
        of_rows = (L.unsqueeze(2) * size * R.unsqueeze(1)).amax(2)
        L = L / torch.where(of_rows > 0, of_rows, 1).sqrt()
        of_columns = (L.unsqueeze(2) * size * R.unsqueeze(1)).amax(1)
        R = R / torch.where(of_columns > 0, of_columns, 1).sqrt()
    L = torch.where(of_rows > 0, L, torch.where(of_rows > 0, L, torch.inf).amin(1, keepdim=True)).nan_to_num(1, 1, 1)
    R = torch.where(of_columns > 0, R, torch.where(of_columns > 0, R, 0).amax(1, keepdim=True))
    R = torch.where(R > 0, R, 1)
    return L.unsqueeze(2) * matrix * R.unsqueeze(1), L, R


def is_suspect(A: Operator) -> bool:
    """Do dense factors of ``A`` have a pivot that may be rounding, so that it is regular by chance?"""
    if not isinstance(A.exact, DenseBlocks) or not A.size:
        return False
    smallest, largest = A.exact.factor.lu.diagonal(dim1=1, dim2=2).abs().aminmax(dim=1)
    return bool((smallest <= torch.finfo(smallest.dtype).eps ** 0.75 * largest).any())


def at_constant_sums(A: Operator, b: Tensor, found: LinearSolution, held: Held, transposed: bool) -> LinearSolution:
    """``found``, and where sums are ``held`` the ``x`` with ``(A + B) x = b``, unless the way decides.

    Args:
        A: ``J`` of every sample or, ``transposed``, its transpose. b: right-hand sides, the blocks running fastest,
            ``(k batch, n)``.
    """
    asked = torch.isfinite(b).all(1) & held.B.flatten(1).any(1).repeat(len(b) // len(held.B))
    matrix, many = A.dense().detach(), A.batch // len(held.B)
    matrix = matrix + (held.B.mT if transposed else held.B).to(matrix).repeat(many, 1, 1)
    left, right = (t.to(matrix).repeat(many, 1) for t in ((held.R, held.L) if transposed else (held.L, held.R)))
    columns = b.to(matrix).view(-1, A.batch, b.shape[1]).permute(1, 2, 0)
    x, good = _solved(matrix, left, right, columns)
    off = torch.linalg.vector_norm((matrix @ x - columns).permute(2, 0, 1).reshape(b.shape), dim=1)
    by_the_way = torch.zeros_like(asked)
    if held.change is not None:
        change = (held.change.mT if transposed else held.change).to(matrix).repeat(many, 1, 1)
        e, size = _solved(matrix, left, right, change @ x)[0] / right.unsqueeze(2), x / right.unsqueeze(2)
        e, size = (torch.linalg.vector_norm(v, dim=1).T.reshape(len(b)) for v in (e, size))
        by_the_way = asked & (size > 0) & ~(e < _OWN_CHANGE * size)
    x, good = x.permute(2, 0, 1).reshape(b.shape).to(b), good.T.reshape(len(b))
    taken = asked & good & x.isfinite().all(1)
    x = torch.where(taken.unsqueeze(1), x, found.x)
    norm = torch.where(taken, off.to(found.residual_norm), found.residual_norm)
    if bool(by_the_way.any()):
        found = found._replace(reason=BY_THE_WAY)
    return found._replace(x=x, residual_norm=norm, converged=(found.converged | taken) & ~by_the_way)


def _solved(matrix: Tensor, left: Tensor, right: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``(batch, n, k)`` with ``matrix x = b``, by ``left matrix right``, and where it is that, ``(batch, k)``."""
    even, b = left.unsqueeze(2) * matrix * right.unsqueeze(1), left.unsqueeze(2) * b
    y, failed = torch.linalg.solve_ex(even, b)
    off, size = (torch.linalg.vector_norm(v, dim=1) for v in (even @ y - b, b))
    return right.unsqueeze(2) * y, (failed == 0).unsqueeze(1) & (off <= torch.finfo(b.dtype).eps ** 0.5 * size)


def _depend(record: Record, held: Held, theta: Sequence[Tensor]) -> tuple[bool, bool]:
    r"""Do changes of a parameter change the sums, and do they break them?  With ``C(\theta) F = 0`` everywhere ``C F_\theta
    = -C_\theta F``, which is zero at rest and elsewhere is not."""
    leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in theta]
    wanted = [t for t in leaves if t.requires_grad]
    z, eps = record.outcome.z, torch.finfo(record.outcome.z.dtype).eps
    has = held.U.flatten(1).any(1, keepdim=True)
    random, others = (seeded.normal(z.shape[1], seed=0x61 + i).to(z).expand_as(z) for i in (0, 1))
    random, others = held.L * _added(held.U.mT, random).to(z), held.L * others * has

    def pulled(there: Tensor) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None], float]:
        """``C F_\\theta`` and the usual size of ``F_\\theta``, for one combination of rows; and the size of ``F``."""
        with torch.enable_grad():
            out = record.system.residual(torch.where(has, there, z), *leaves)
        if not out.requires_grad:
            return [], [], 0.0
        along = graph.pulled(out, wanted, random, retain_graph=True)
        usual = graph.pulled(out, wanted, others, retain_graph=False)
        return along, usual, float((held.L * has * out.detach()).abs().amax())

    moves = broken = False
    rest, usual, small = pulled(z) if wanted else ([], [], 0.0)
    for k in range(_POINTS if rest else 0):
        along, sizes, far = pulled(_elsewhere(z, _size(z, record.start), k))
        for a, size, b, least in zip(along, sizes, rest, usual, strict=True):
            if a is None or size is None or not a.numel():
                continue
            moves = moves or not bool((a.abs() <= eps**0.5 * size.abs() + _ROUNDED * eps * size.abs().amax()).all())
            if b is not None and least is not None:
                limit = eps**0.5 * least.abs().amax() + _NEARLY * small / max(far, 1e-300) * a.abs().amax()
                broken = broken or bool((b.abs() > limit).any())
    return moves, broken


def _size(z: Tensor, start: Tensor) -> Tensor:
    """The size of the mean unknown, ``(samples, 1)``."""
    size = torch.maximum(z.abs().mean(1, keepdim=True), start.abs().mean(1, keepdim=True))
    return torch.where(size > torch.finfo(z.dtype).eps ** 0.5, size, 1)  # at zero itself everything is conserved
