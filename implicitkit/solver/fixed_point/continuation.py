"""Continuation in the strength of the map: from a point where the answer is known to the fixed point, along a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.options import at_least, check_options, optional, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

_STRAIGHT = 3  # failures in a row before a turn is looked for
_FAR = 1e6  # |z| beyond which, in units of the start, the path leads to infinity
_CORRECTIONS = 6  # Newton steps back to the path before the step along it counts as too long


@register_solver("continuation", solves="fixed_point", max_size=2048)
@dataclass(frozen=True)
class Continuation(Method):
    r"""Follows ``H(z, t) = z - (1 - t) z_0 - t f(z) = 0`` from ``z_0`` at ``t = 0`` to a fixed point at ``t = 1``.

    The path may turn back in ``t``; it is followed by its length, not by ``t``.  Where ``f`` is smooth and maps a bounded
    convex set into itself, it leads from almost every ``z_0`` to a fixed point (Chow, Mallet-Paret & Yorke 1978, Math. Comp.
    32, theorem 2.1), whatever the Jacobian there: no contraction is needed.  So this is the method for the few samples on
    which everything faster fails.

    Each step is either a prediction along the tangent ``\tau``, ``DH \tau = 0``, of a point on the path, or a Newton
    correction orthogonal to it of a point off the path,

        [ I - t J   z_0 - f(z) ] [ dz ]     [ -H ]
        [      (W \tau)^T      ] [ dt ]  =  [  0 ],     W = diag(1 / n, ..., 1 / n, 1),

    with dense Jacobians (one evaluation and ``n`` products a step).  The tangent's sign is that of the determinant of this
    matrix, which keeps the direction through turning points (Allgower & Georg 2003, section 2.1).  Lengths adapt: a point
    that 6 corrections do not bring back is given up for one half as far along, three or fewer make the next step twice as
    long.  At a kink the path of a piecewise smooth map may turn back by more than a right angle, and no shorter step along
    the old tangent finds it: after 3 failures in a row, a sign that is reversed at the predicted point means that, and the
    path is taken up along the tangent there.  The last piece is Newton's method at ``t = 1``.

    Memory: ``batch (n + 1)^2`` numbers, a few times.

    Args:
        length: of the first step along the path, in the norm of ``W``. shortest: below which a sample is given up.
        loose: ``|H| <= loose (1 + |z|)`` is on the path.
        stray: a prediction is given up, too, when corrections lead further away from it than ``stray`` times its length:
            to another piece of the path, or another path.  Smaller is surer and slower.
        scatter: begin the path elsewhere: at the given point plus a random vector, of the size of ``z`` and ``f(z) - z``
            there, drawn with this seed, the same for all samples; ``None``: at the point itself.

    Raises:
        ValueError: an option out of range.
    """

    length: float = 0.5
    shortest: float = 1e-6
    loose: float = 1e-3
    stray: float = 1.0
    scatter: int | None = None
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(
            self,
            length=positive(),
            shortest=positive(),
            loose=positive(),
            stray=positive(),
            scatter=optional(at_least(0)),
        )

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Tensor]:
        batch, n = z.shape
        t = z.new_zeros(batch)
        start = z
        if self.scatter is not None:  # the first correction, at t = 0, leads there
            size = torch.maximum(*(torch.linalg.vector_norm(v, dim=1, keepdim=True) for v in (z, f.residual(z))))
            start = z + size * n**-0.5 * seeded.normal(n, seed=self.scatter).to(z)
        forward = torch.cat([z.new_zeros(batch, n), z.new_ones(batch, 1)], 1)
        never = torch.zeros(batch, dtype=torch.int64, device=z.device)
        return {
            "start": start,
            "on": torch.cat([start, t.unsqueeze(1)], 1),  # the last point (z, t) on the path
            "tangent": forward,  # there
            "t": t,
            "border": forward,  # what corrections are orthogonal to
            "length": torch.full_like(t, self.length),
            "ahead": torch.cat([start, t.unsqueeze(1)], 1),  # what was predicted
            "tries": never,  # corrections since the prediction
            "failures": never,  # predictions in a row that were given up
            "landing": torch.zeros(batch, dtype=torch.bool, device=z.device),
        }

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        n, t, tries, landing, length = z.shape[1], state["t"], state["tries"], state["landing"], state["length"]
        here = torch.cat([z, t.unsqueeze(1)], 1)
        H, correction, local, reverses = self._solve(f, z, state)
        usable = torch.isfinite(correction).all(1) & torch.isfinite(local).all(1)
        small = 1 + torch.linalg.vector_norm(z, dim=1)
        strayed = ~landing & (_size(here - state["ahead"]) > self.stray * length)
        on = usable & ~landing & ~strayed & (torch.linalg.vector_norm(H, dim=1) <= self.loose * small)
        lost = ~on & (~usable | strayed | (tries >= _CORRECTIONS))
        leave = on | lost
        # a kink that turns the path by more than a right angle: go on along the tangent behind it
        kink = ~leave & ~landing & reverses & (tries == 0) & (state["failures"] >= _STRAIGHT)

        base = _where(on, here, state["on"])
        tangent = _where(on, local, state["tangent"])
        length = torch.where(on & (tries <= 3), 2 * length, torch.where(lost, 0.5 * length, length))
        reach = (1 - base[:, n]) / tangent[:, n]  # not beyond t = 1: land there
        lands = ((reach.abs() <= length) & ((reach > 0) | (base[:, n] > 1))) & ~(lost & landing)
        length = torch.where(lost & landing, torch.minimum(length, 0.5 * reach.abs()), length)
        ahead = base + torch.where(lands, reach, length).unsqueeze(1) * tangent
        ahead[:, n] = torch.where(lands, 1.0, ahead[:, n])
        there = _where(leave, ahead, _where(kink, here + 2 * length.unsqueeze(1) * local, here + correction))
        landing = torch.where(leave, lands, landing)
        border = _where(leave, tangent, _where(kink, local, state["border"]))
        f.stuck = (length < self.shortest) | (small > _FAR * (1 + torch.linalg.vector_norm(state["start"], dim=1)))
        return there[:, :n], {
            "start": state["start"],
            "on": base,
            "tangent": tangent,
            "t": there[:, n].clone(),
            "border": _where(landing, _unit_of_t(border), border),
            "length": length,
            "ahead": _where(leave | kink, there, state["ahead"]),
            "tries": torch.where(leave, 0, tries + 1),
            "failures": torch.where(on, 0, state["failures"] + lost.long()),
            "landing": landing,
        }

    @staticmethod
    def _solve(f: Evaluations, z: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``H``, the correction, the tangent as it would be here, and whether that points back along the border."""
        t, border = state["t"], state["border"]
        fz, J = f(z), f.jacobian(z)
        H = z - torch.lerp(state["start"], fz, t.unsqueeze(1))
        matrix = _bordered(J, t, state["start"] - fz, _weighted(border))
        rhs = torch.cat([-H, torch.zeros_like(t).unsqueeze(1)], 1)
        both = torch.stack([rhs, _unit_of_t(border)], 2)
        if torch.finfo(z.dtype).bits < 32:  # no LAPACK in half precision
            matrix, both = matrix.float(), both.float()
        both, info = torch.linalg.solve_ex(matrix, both)
        correction, along = both.to(z.dtype).unbind(2)
        sign = torch.where(info == 0, torch.linalg.slogdet(matrix).sign, torch.nan).to(z.dtype)
        return H, correction, (sign / _size(along)).unsqueeze(1) * along, sign < 0


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(mask.unsqueeze(1), a, b)


def _weighted(v: Tensor) -> Tensor:
    """``W v``: states count by their mean square, ``t`` by its square."""
    n = v.shape[1] - 1
    return torch.cat([v[:, :n] / n, v[:, n:]], 1)


def _unit_of_t(v: Tensor) -> Tensor:
    """The unit vector of ``t``, once a sample."""
    unit = torch.zeros_like(v)
    unit[:, -1] = 1
    return unit


def _bordered(J: Tensor, t: Tensor, by_t: Tensor, row: Tensor) -> Tensor:
    """``[[I - t J, dH/dt], [row]]``, ``(batch, n + 1, n + 1)``."""
    n = J.shape[1]
    matrix = J.new_empty(len(J), n + 1, n + 1)
    matrix[:, :n, :n] = torch.eye(n, dtype=J.dtype, device=J.device) - t.view(-1, 1, 1) * J
    matrix[:, :n, n] = by_t
    matrix[:, n] = row
    return matrix


def _size(v: Tensor) -> Tensor:
    """``(v^T W v)^(1/2)``, ``(batch,)``."""
    return (_weighted(v) * v).sum(1).sqrt()
