r"""Inequalities with a kink, by the smooth functions that meet in it.

Near a point ``z*`` the values ``g(z)`` of an l1 ball, or of a maximum, are the greatest of several smooth functions, its
branches.  Where all of them are active the solution lies on the edge (the corner) where they agree, and moves along it:

    minimise  f(z)   subject to   g_0(z) <= 0,   g_k(z) - g_0(z) = 0,   k = 1, 2, ...

with those whose gradients differ from that of ``g_0`` independently.  The multiplier of ``g_0 <= 0`` is that of the
inequality.  A branch is what its values further along a short way ``s`` into it say, by a parabola through three of them,

    g_k(z) = 3 g(z + s) - 3 g(z + 2 s) + g(z + 3 s)  + O(|s|^3),

a function of ``z`` and all arguments like any other, to be differentiated to every order.

Source: Lewis (2002), "Active sets, nonsmoothness, and sensitivity", SIAM J. Optim. 13, 702-725 (partly smooth functions);
Griewank & Walther (2016), "First- and second-order optimality conditions for piecewise smooth objective functions".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.problem.constraints import Constraint, Equality, Inequality

_PARABOLA = ((1.0, 3.0), (2.0, -3.0), (3.0, 1.0))  # multiples of the way, and weights


class Branches(NamedTuple):
    """Where inequalities have a kink, and the branches that meet there.

    Attributes:
        ways: pytrees like ``z``, short ways into branches; the first is that of ``g_0``. picks: pairs of a way and a
            constraint value by its number, of which the branches are independent.
    """

    ways: tuple[Any, ...]
    picks: tuple[tuple[int, int], ...]

    def of(self, constraints: tuple[Constraint, ...]) -> tuple[Constraint, ...]:
        """The smooth constraints in the place of these, as many, and one more: that all branches agree."""
        first = tuple(Inequality(Branch(c, self.ways[0])) if c.one_sided else c for c in constraints)
        return (*first, Equality(Agreement(constraints, self)))


@dataclass(frozen=True)
class Branch:
    """One branch of a constraint's values, as a function of ``(z, *args)``: along ``way``, a pytree like ``z``."""

    constraint: Constraint
    way: Any

    def __call__(self, z: Any, *args: Any) -> Any:
        found: Any = None
        for multiple, weight in _PARABOLA:
            there = trees.tree_map(lambda a, s, m=multiple: a + m * s, z, self.way)
            part = trees.tree_map(lambda v, w=weight: w * v, self.constraint.values(there, *args))
            found = part if found is None else trees.tree_map(torch.add, found, part)
        return found


@dataclass(frozen=True)
class Agreement:
    """What branches are above the first one, ``g_k - g_0``, a number for each pick, as a function of ``(z, *args)``."""

    constraints: tuple[Constraint, ...]
    branches: Branches

    def __call__(self, z: Any, *args: Any) -> Tensor:
        ways, picks = self.branches
        needed = {number: _flat(self.constraints, ways[number], z, args) for number in {0} | {k for k, _ in picks}}
        return torch.stack([needed[k][row] - needed[0][row] for k, row in picks])


def _flat(constraints: tuple[Constraint, ...], way: Any, z: Any, args: tuple[Any, ...]) -> Tensor:
    """One branch of all values, ``(m,)``."""
    made: list[Callable[..., Any]] = [Branch(c, way) for c in constraints]
    return torch.cat([leaf.reshape(-1) for branch in made for leaf in trees.tree_flatten(branch(z, *args))[0]])
