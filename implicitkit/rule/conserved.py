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
- z_0) = 0`` gives ``C dz = C dz_0 - dC (z - z_0)``.  With ``(J + s C^T C) w = z - z_0``, so that ``J w = z - z_0``, and from
``C J = 0``, so that ``dC J = -C J_\theta d\theta`` (``C F_z = 0`` for every ``z``),

    (J + s C^T C) dz = -F_\theta d\theta + s C^T C (dz_0 + (J_\theta d\theta) w)

What changes of ``C`` in derivatives of higher order: :mod:`implicitkit.rule.linear_functions`.

``C`` spans the left null space of ``J``, of samples of which it is seen that

- ``C F = 0`` at points elsewhere, ``z`` changed by up to a third of each unknown and of the mean one, or of the start's;
- the solver has kept ``C z``, as steps along ``F`` and combinations of them do: of an equation ``F = 0`` that is no flow, or
  of a solver that goes other ways, the start means nothing.

With ``L`` and ``R`` that make rows and columns of ``L J R`` of one size (:mod:`~implicitkit.rule.null_spaces`), columns
``U`` span its left null space, ``C = U^T L``.  In the place of ``s C^T C`` stands

    B = s L^{-1} U Q R^{-1},    Q the orthonormal rows nearest to U^T L R.

:mod:`~implicitkit.rule.constant_sums` solves with it.

Where more is left than the sums tell (whoever an epidemic spares: ``F = 0`` wherever none is infected) the state that the
flow comes to depends on all of the way, and ``J`` is singular beside ``C``, too.  Of what dies out something is left, as
little as 1e-70, which makes it regular, and every ``dz`` that comes of it means nothing.  With Newton's correction ``d``
such a ``dz`` would change by all of itself,

    |e| >= 0.4 |dz| in units R,    (J + B) e = (J(z - d) - J(z)) dz,

as at a double root (:mod:`implicitkit.rule.determinacy`): it is refused.

A change of ``\theta`` that breaks a sum (one entry of a stochastic matrix) leaves no state at rest, and what comes out along
it means nothing: that is said where there is such a parameter.

Source: Meyer (1975), SIAM Review 17(3), 443-464, for the group inverse of a Markov chain; Reder (1988), J. theor. Biol.
135(2), 175-201, for metabolic networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, graph, seeded
from implicitkit.foundation.errors import DegenerateWarning, warn
from implicitkit.foundation.operators import Operator
from implicitkit.rule.constant_sums import Held, solved
from implicitkit.rule.null_spaces import left_null_space
from implicitkit.solution import Record

_POINTS = 3  # at which F is to keep the sums
_ROUNDED, _NEARLY = 20.0, 10.0  # units of rounding; times what F leaves at rest, beside what it is elsewhere
_AWAY = 0.3  # of each unknown, and of the mean one: how far away they are, at most
_SLIGHT = 1e-3  # of a column: changes of the Jacobian on the way to the solution
_SAID = (
    "sums that the flow conserves are not conserved where a parameter changes by itself: the derivative holds for changes "
    "of the parameters that keep them (a matrix whose rows still add up to one). If those are made outside of the "
    "function, nothing is wrong; to be told nothing, make them inside of it"
)


def hold(record: Record, J: Operator, tolerance: float, quietly: bool) -> None:
    """Sums that the solve of ``record`` has kept become known of it (:func:`sums`); not ``quietly``: parameters that break
    them are said."""
    z, start = record.outcome.z, record.start
    held = sums(J, record, z, start, tolerance)
    if held is not None:
        moves, broken = _depend(record, held, record.theta)
        held = replace(held, moves=moves, change=_change(record, held, J, z))
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
    if start.shape != z.shape:
        return None
    size, eps = torch.maximum(z.abs(), start.abs()), torch.finfo(z.dtype).eps
    space = left_null_space(J, torch.maximum(size, eps**0.5 * _size(z, start)))
    if space is None:
        return None
    U, L, R, *_ = space
    off, terms = _added(U * L.unsqueeze(2), z - start), _added((U * L.unsqueeze(2)).abs(), size)
    kept = (space.dimension > 0) & (off.abs() <= max(tolerance, eps**0.4) * terms).all(1)
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
    kept = (kept & (alive.sum(1) == space.dimension))[:, None, None]
    Q, V = P @ torch.where(alive.unsqueeze(2), Q, 0), None if space.V is None else space.V * kept
    return Held(space._replace(U=U * kept, V=V), Q * kept) if bool(kept.any()) else None


def _change(record: Record, held: Held, J: Operator, z: Tensor) -> Tensor | None:
    """``J(z - d) - J(z)``, zero of samples that hold nothing; ``None`` where it is slight, or not asked: of sparse ones."""
    if held.space.V is not None:
        return None
    residual = lambda y: record.system.residual(y, *record.theta)  # noqa: E731
    with torch.no_grad():
        F = residual(z).unsqueeze(2)
    matrix = J.dense()[: len(z)].detach()
    d = solved(J, held, F.repeat(J.batch // len(z), 1, 1), transposed=False)[0][: len(z)].squeeze(2).to(z)
    change = autodiff.jacobian(residual, z - d).detach().to(matrix) - matrix
    change = torch.where(held.which[:, None, None], change, 0).nan_to_num(0, 0, 0)
    each, size = (held.space.L.unsqueeze(2) * M.abs() for M in (change, matrix))
    return None if bool((each <= _SLIGHT * size.amax(1, keepdim=True)).all()) else change


def _added(C: Tensor, v: Tensor) -> Tensor:
    """``C' v``."""
    return (C.mT @ v.to(C).unsqueeze(2)).squeeze(2)


def _elsewhere(z: Tensor, size: Tensor, k: int) -> Tensor:
    own, mean = (seeded.uniform(z.shape[1], seed=0x51 + 2 * k + i).to(z) for i in (0, 1))
    return z + _AWAY * ((2 * own - 1) * z + mean * size)


def _depend(record: Record, held: Held, theta: Sequence[Tensor]) -> tuple[bool, bool]:
    r"""Do changes of a parameter change the sums, and do they break them?  With ``C(\theta) F = 0`` everywhere ``C F_\theta
    = -C_\theta F``, which is zero at rest and elsewhere is not."""
    leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in theta]
    wanted = [t for t in leaves if t.requires_grad]
    z, eps = record.outcome.z, torch.finfo(record.outcome.z.dtype).eps
    (U, L, *_), has = held.space, held.which.unsqueeze(1)
    random, others = (seeded.normal(n, seed=0x61 + i).to(z) for i, n in enumerate((U.shape[2], z.shape[1])))
    random, others = L.to(z) * _added(U.mT, random.expand(len(z), -1)).to(z), L.to(z) * others * has

    def pulled(there: Tensor) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None], float]:
        """``C F_\\theta`` and the usual size of ``F_\\theta``, for one combination of rows; and the size of ``F``."""
        with torch.enable_grad():
            out = record.system.residual(torch.where(has, there, z), *leaves)
        if not out.requires_grad:
            return [], [], 0.0
        along = graph.pulled(out, wanted, random, retain_graph=True)
        usual = graph.pulled(out, wanted, others, retain_graph=False)
        return along, usual, float((L * has * out.detach()).abs().amax())

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
