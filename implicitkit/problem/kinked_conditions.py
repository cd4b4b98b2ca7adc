r"""How a minimum in kinks moves: the conditions there as smooth equations.

A value with a kink is ``k(u) = max_w w'u`` over weights ``w`` in a convex set ``W``, and its gradients by ``u``, on one side
or the mean of several (Clarke), are the ``w`` that attain it: those with ``w = P(w + u)``, ``P`` the projection on ``W``.
With these for unknowns, and ``w'u`` in the place of ``k(u)``,

    dL/dz (z, lam, w) = 0,      w = P(w + u),      lam = max(lam + g, 0),      h = 0

are the conditions of Karush, Kuhn and Tucker.  At a kink ``u`` is held where it is, and ``w`` moves; elsewhere ``w`` is
held: the equations are regular where the solution moves along a smooth edge (partial smoothness), as those of the natural
map are of an active set.

Sources: Rockafellar & Wets (1998), *Variational Analysis*, example 11.36; Clarke (1983), *Optimization and Nonsmooth
Analysis*, section 6.1; Lewis (2002), "Active sets, nonsmoothness, and sensitivity", SIAM J. Optim. 13, 702-725.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.problem.argmin import Argmin, Bounded, box, tree_gradient
from implicitkit.problem.complementarity import lesser
from implicitkit.problem.epigraph import Function, Relaxation, Replacing, Site, Sites, functions_of, read
from implicitkit.problem.kinked_operations import Kind, nearest_weights

_STEEP = 1e6  # what the largest number is multiplied by, so that weights of what is off its kink are at an end


class Weighed(NamedTuple):
    """All unknowns: the user's, multipliers for each constraint, and for each function the weights of its sites."""

    z: Any
    multipliers: tuple[Any, ...]
    weights: Any


class _Weighed(Replacing):
    """``w'u`` in the place of values; ``left``: what is left of the equations for each ``w``, with ``u`` in ``units``."""

    def __init__(self, sites: Sequence[Site], weights: Any, units: Any) -> None:
        super().__init__(sites, tuple(zip(weights, units, strict=True)))
        self.left: list[Tensor] = []

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        w, unit = known
        self.left.append(w - nearest_weights(kind, w + u / unit))
        return w * u if kind == "relu" else (w * u).sum(-1)


@dataclass(frozen=True)
class Conditions:
    """The equations at the top of this file, as a function of ``(Weighed, units, *args)``; ``units``: of the gradient, and
    of what each site is of."""

    functions: tuple[Function, ...]
    one_sided: tuple[bool, ...]
    bounds: Bounded | None
    sites: Sites

    def __call__(self, state: Weighed, units: Any, *args: Any) -> Weighed:
        slope = tree_gradient(lambda z: self._lagrangian(z, state, units, args)[0], state.z)
        _, values, left = self._lagrangian(state.z, state, units, args)
        unit = units[0]
        slope = trees.tree_map(lambda s: s / unit.reshape((*unit.shape, *(1,) * (s.ndim - unit.ndim))), slope)
        if self.bounds is not None:
            slope = self.bounds.natural(state.z, slope)
        natural = tuple(
            trees.tree_map(lambda m, v: lesser(m, -v, 0.0), y, g) if sided else g
            for sided, y, g in zip(self.one_sided, state.multipliers, values, strict=True)
        )
        return Weighed(slope, natural, left)

    def _lagrangian(self, z: Any, state: Weighed, units: Any, args: Any) -> tuple[Tensor, list[Any], Any]:
        """The sum of the samples' Lagrangians, the values of the constraints, and what is left of the equations of ``w``."""
        outs, left = [], []
        for function, own, w, unit in zip(self.functions, self.sites, state.weights, units[1], strict=True):
            with _Weighed(own, w, unit) as mode:
                outs.append(function(z, *args))
            left.append(tuple(mode.left))
        total = outs[0].sum()
        for y, g in zip(trees.tree_flatten(state.multipliers)[0], trees.tree_flatten(tuple(outs[1:]))[0], strict=True):
            total = total + (y * g).sum()
        return total, outs[1:], tuple(left)


def conditions(
    problem: Argmin, relaxation: Relaxation, z: Any, multipliers: tuple[Any, ...], args: Any, batch_dims: int
) -> tuple[Conditions, Weighed, Any]:
    """The equations, where to begin, and their units, at a solution of the relaxation and its multipliers."""
    functions, sites = functions_of(problem), relaxation.sites
    count, weights, units = len(problem.constraints), [], []
    pressing = iter(multipliers[count:])
    for own in read(functions, sites, z, args):
        forces = iter(next(pressing) if own else ())
        weights.append(tuple(_weights(kind, u, forces, relaxation.tip) for kind, u in own))
        units.append(tuple(_unit(u, batch_dims) for _, u in own))
    made = Conditions(functions, tuple(c.one_sided for c in problem.constraints), None, sites)
    begin = Weighed(z, tuple(multipliers[:count]), tuple(weights))
    without = begin._replace(multipliers=trees.tree_map(torch.zeros_like, begin.multipliers))
    one = torch.ones_like(_largest(z, batch_dims))
    slope = _largest(made(without, (one, tuple(units)), *args).z, batch_dims).detach()
    if problem.bounds is not None:
        made = replace(made, bounds=box(problem.bounds, z))
    return made, begin, (torch.where(slope > 0, slope, 1), tuple(units))


def _largest(tree: Any, batch_dims: int) -> Tensor:
    """The largest number of each sample."""
    sizes = [t.abs().reshape((*t.shape[:batch_dims], -1)).amax(-1) for t in trees.tree_flatten(tree)[0]]
    return torch.stack(sizes).amax(0)


def _unit(u: Tensor, batch_dims: int) -> Tensor:
    """The largest number of each sample, or 1 of zeros, to broadcast against ``u``."""
    size = _largest(u, batch_dims)
    return torch.where(size > 0, size, 1).reshape((*size.shape, *(1,) * (u.ndim - batch_dims)))


def _weights(kind: Kind, u: Tensor, forces: Any, tip: float) -> Tensor:
    """The weights that the multipliers of the relaxation are in proportion to, or of a value without a force those on the
    side of the kink where it is."""
    if kind == "length":
        next(forces)
        return u / (u.square().sum(-1, keepdim=True) + tip**2).sqrt()
    force = next(forces)
    if kind == "relu":
        total = force + next(forces)
    else:
        total = force.sum(-1, keepdim=True) / int(kind)
        _ = next(forces) if kind != 1 else None
    size = u.abs().amax() + torch.finfo(u.dtype).tiny
    side = nearest_weights(kind, u * (_STEEP / size))
    least = torch.finfo(u.dtype).eps ** 0.5 * total.abs().amax() + torch.finfo(u.dtype).tiny
    return nearest_weights(kind, (force + least * side) / (total.clamp_min(0) + least))
