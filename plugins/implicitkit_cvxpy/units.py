r"""Programs with curved cones in units of their own: each unknown, each cone and the objective.

Rows of a curved cone are not to be scaled one by one, and ``y - s`` has no digits of ``y`` where ``s`` is ten orders larger
(``log x`` of a budget of a million has the rows ``(t, 1, x)`` and the multiplier ``1 / x``).  With positive ``D`` and ``t``
and an automorphism ``T`` of ``K`` (:mod:`implicitkit_cvxpy.cones.automorphism`)

    P' = t D P D,    q' = t D q,    A' = T A D,    b' = T b          x = D x',    y = T'y' / t

is the same program.  ``T`` makes multiplier and slack of each linear row and each cone of the same size (the scaling of
Nesterov & Todd, 1997, but for directions), and what is added up in the parts of a cone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit_cvxpy.backends import Data
from implicitkit_cvxpy.cones import Automorphism, DualCone
from implicitkit_cvxpy.cones.automorphism import power_of_two, terms
from implicitkit_cvxpy.storage import Entries

_LEAST = 1e-8  # of the largest slack in units, at which one is measured whose multiplier is zero
_NOTHING = 1e-12  # of the least number given, or of one: what is smaller is zero


class Units(NamedTuple):
    """The units of a batch of programs: ``D`` ``(batch, n)``, ``t`` ``(batch, 1)``, and ``T``; what is less than ``least``
    ``(batch, 1)`` in the user's units is nothing."""

    columns: Tensor
    objective: Tensor
    least: Tensor
    turn: Automorphism

    @classmethod
    def users(cls, dual: DualCone, data: Data) -> Units:
        """The units in which the programs were given."""
        q, b = data.q.detach(), data.b.detach()
        one = torch.ones_like(q[:, :1])
        least = torch.cat([torch.where(b != 0, b.abs(), 1), one], 1).amin(1, keepdim=True)
        return cls(torch.ones_like(q), one, _NOTHING * least, Automorphism.identity(dual, b))

    def nearer(self, data: Data, w: Tensor) -> Units:
        """Units of programs in these, in which what is added up at ``w = (x, y)``, near the solution, is of the size one."""
        dual = self.turn.dual
        P, q, A, b = (t.detach() for t in data[:4])
        x, y = w.detach().tensor_split((q.shape[1],), 1)
        least = self.least * self.turn.rows
        turn = Automorphism.near(dual, A, b, x, y, least)
        A, b, y = turn.times(A), turn.times(b), turn.contragredient(y)
        size, force = by_cone(dual, torch.maximum(terms(A, b, x), least * turn.rows)), by_cone(dual, y.abs())
        work = (size * force).amax(1, keepdim=True)
        t = torch.where(work > 0, 1 / work, 1)
        rows = (torch.maximum(t * force * size, work.new_full((), _LEAST**2)).sqrt() / size).nan_to_num(1, 1, 1)
        rows = power_of_two(torch.where(size > 0, rows, 1))
        t = power_of_two(t)
        held = (rows.unsqueeze(2) * A).abs().amax(1)
        held = torch.maximum(held, (t * P.diagonal(dim1=1, dim2=2).abs()).sqrt())
        columns = power_of_two(torch.where(held > 0, 1 / held, 1))
        return Units(columns, t, self.least, turn._replace(rows=rows * turn.rows))

    @classmethod
    def of_rows(cls, dual: DualCone, data: Data) -> Units:
        """The units in which the linear rows of sparse programs are of the size one; all else stays as it is."""
        users, linear = cls.users(dual, data), dual.cones.linear
        size = row_sizes(data)
        rows = power_of_two(torch.where(size > 0, 1 / size, 1))
        rows = torch.cat([rows[:, :linear], users.turn.rows[:, linear:]], 1)
        return users._replace(turn=users.turn._replace(rows=rows))

    @classmethod
    def of_tensors(cls, dual: DualCone, columns: Tensor, objective: Tensor, least: Tensor, *turn: Tensor) -> Units:
        """The units that have these :attr:`tensors`."""
        return cls(columns, objective, least, Automorphism(dual, *turn))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that these units consist of, each ``(batch, ...)``."""
        return self.columns, self.objective, self.least, *self.turn[1:]

    @property
    def spread(self) -> Tensor:
        """How many powers of two they are from those of which they are units, ``(batch,)``."""
        return torch.cat([self.columns, self.turn.rows], 1).log2().abs().amax(1)

    def same(self, others: Units) -> Tensor:
        """For which samples are the ``others`` these same units, ``(batch,)``?"""
        pairs = zip(self.tensors, others.tensors, strict=True)
        return torch.stack([(a == b).flatten(1).all(1) for a, b in pairs]).all(0)

    def only(self, which: Tensor, others: Units) -> Units:
        """These units for the samples ``which``, ``(batch,)``; the ``others`` keep theirs."""
        which = which.unsqueeze(1)
        mixed = (torch.where(which, a, b) for a, b in zip(self.tensors, others.tensors, strict=True))
        return Units.of_tensors(self.turn.dual, *mixed)

    def apply(self, data: Data) -> Data:
        """The programs in these units; differentiable, units being constants."""
        P, q, A, b = data[:4]
        D, t = self.columns, self.objective
        if isinstance(data.A_held, Entries):  # of which only linear rows have units
            return data._replace(A=self.turn.rows.index_select(1, data.A_held.on(A).at_row) * A, b=self.turn.times(b))
        P = t.unsqueeze(2) * D.unsqueeze(2) * P * D.unsqueeze(1)
        return data._replace(P=P, q=t * D * q, A=self.turn.times(A) * D.unsqueeze(1), b=self.turn.times(b))

    def of(self, w: Tensor) -> Tensor:
        """``w`` in these units."""
        x, y = w.tensor_split((self.columns.shape[1],), 1)
        return torch.cat([x / self.columns, self.objective * self.turn.contragredient(y)], 1)

    def back(self, w: Tensor) -> Tensor:
        """``w`` of which the units are these, in the user's."""
        x, y = w.tensor_split((self.columns.shape[1],), 1)
        return torch.cat([self.columns * x, self.turn.transposed(y) / self.objective], 1)


def by_cone(dual: DualCone, sizes: Tensor) -> Tensor:
    """The largest of each cone, in each of its rows, ``(batch, m)``."""
    parts = [sizes[:, : dual.cones.linear]]
    for group in dual.groups:
        part = dual.part(sizes, group)
        parts.append(part.amax(2, keepdim=True).expand_as(part).flatten(1))
    return torch.cat(parts, 1)


def row_sizes(data: Data) -> Tensor:
    """The largest entry of each row of ``A``, ``(batch, m)``."""
    size, none = data.A.detach().abs(), torch.zeros_like(data.b)
    if isinstance(data.A_held, Entries):
        row = data.A_held.on(size).at_row.expand_as(size)
        return none.scatter_reduce(1, row, size, "amax")
    return size.amax(2) if size.shape[2] else none
