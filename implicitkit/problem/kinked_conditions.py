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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.problem.argmin import Argmin, Bounded, box, tree_gradient
from implicitkit.problem.complementarity import lesser
from implicitkit.problem.epigraph import Function, Relaxation, Replacing, Site, Sites, functions_of, read
from implicitkit.problem.kinked_operations import Kind, nearest_weights

_STEEP = 1e6  # what numbers by their size are multiplied by, so that weights of what is off its kink are at an end
_JUMP = 1e-2  # of the gradient, that counts


class Weighed(NamedTuple):
    """All unknowns: the user's, multipliers for each constraint, and for each function the weights of its sites."""

    z: Any
    multipliers: tuple[Any, ...]
    weights: Any


class _Weighed(Replacing):
    """``w'u`` in the place of values; ``left``: what is left of the equations for each ``w``, with ``u`` by its size."""

    def __init__(self, sites: Sequence[Site], weights: Any, sizes: Any) -> None:
        super().__init__(sites, tuple(zip(weights, sizes, strict=True)))
        self.left: list[Tensor] = []

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        w, size = known
        self.left.append(w - nearest_weights(kind, w + u / size))
        return w * u if kind == "relu" else (w * u).sum(-1)


@dataclass(frozen=True)
class Conditions:
    """The equations at the top of this file, as a function of ``(Weighed, unit, *args)``; ``unit``: of the gradient, of the
    batch's shape; ``sizes``: of what each site is of."""

    functions: tuple[Function, ...]
    one_sided: tuple[bool, ...]
    bounds: Bounded | None
    sites: Sites
    sizes: tuple[tuple[float, ...], ...]

    def __call__(self, state: Weighed, unit: Tensor, *args: Any) -> Weighed:
        slope = tree_gradient(lambda z: self._lagrangian(z, state, args)[0], state.z)
        _, values, left = self._lagrangian(state.z, state, args)
        slope = trees.tree_map(lambda s: s / unit.reshape((*unit.shape, *(1,) * (s.ndim - unit.ndim))), slope)
        if self.bounds is not None:
            slope = self.bounds.natural(state.z, slope)
        natural = tuple(
            trees.tree_map(lambda m, v: lesser(m, -v, 0.0), y, g) if sided else g
            for sided, y, g in zip(self.one_sided, state.multipliers, values, strict=True)
        )
        return Weighed(slope, natural, left)

    def _lagrangian(self, z: Any, state: Weighed, args: Any) -> tuple[Tensor, list[Any], Any]:
        """The sum of the samples' Lagrangians, the values of the constraints, and what is left of the equations of ``w``."""
        outs, left = [], []
        for function, own, w, sizes in zip(self.functions, self.sites, state.weights, self.sizes, strict=True):
            with _Weighed(own, w, sizes) as mode:
                outs.append(function(z, *args))
            left.append(tuple(mode.left))
        total = outs[0].sum()
        for y, g in zip(trees.tree_flatten(state.multipliers)[0], trees.tree_flatten(tuple(outs[1:]))[0], strict=True):
            total = total + (y * g).sum()
        return total, outs[1:], tuple(left)


def conditions(
    problem: Argmin, relaxation: Relaxation, z: Any, multipliers: tuple[Any, ...], args: Any, batch_dims: int
) -> tuple[Conditions, Weighed, Tensor]:
    """The equations, where to begin, and the unit of the gradient, at a solution of the relaxation and its multipliers."""
    functions, sites = functions_of(problem), relaxation.sites
    count, weights = len(problem.constraints), []
    pressing = iter(multipliers[count:])
    for own, sizes in zip(read(functions, sites, z, args), relaxation.sizes, strict=True):
        forces = iter(next(pressing) if own else ())
        each = zip(own, sizes, strict=True)
        weights.append(tuple(_weights(kind, u, size, forces, relaxation.tip) for (kind, u), size in each))
    gradients = [tree_gradient(lambda t: functions[0](t, *args).sum(), at) for at in (relaxation.start.z, z)]
    slopes = [_largest(gradient, batch_dims) for gradient in gradients]
    slope = slopes[0].maximum(slopes[1]).detach()  # that of z alone is nothing where the objective has the kink
    bounds = None if problem.bounds is None else box(problem.bounds, z)
    made = Conditions(functions, tuple(c.one_sided for c in problem.constraints), bounds, sites, relaxation.sizes)
    begin = Weighed(z, tuple(multipliers[:count]), tuple(weights))
    return made, begin, torch.where(slope > 0, slope, 1)


def is_smooth(made: Conditions, state: Weighed, unit: Tensor, args: Any, step: Any, batch_dims: int) -> Tensor:
    """Is the Lagrangian of each sample smooth at ``z`` where weights are held, ``(*batch,)``?

    It is where all kinks there are among the sites.  The gradients on both sides of ``z`` differ in proportion to the way
    between them then, ``step`` and a sixteenth of it; beside a kink of which no site knows by as much, however short it is.
    """

    def across(share: float) -> Tensor:
        ends = [trees.tree_map(lambda t, s, side=side: t + side * s, state.z, step) for side in (share, -share)]
        slopes = [tree_gradient(lambda z: made._lagrangian(z, state, args)[0], z) for z in ends]
        return _largest(trees.tree_map(torch.sub, *slopes), batch_dims) / unit

    far, near = across(1.0), across(1 / 16)
    return ~((near > _JUMP) & (near > far / 4))


def _largest(tree: Any, batch_dims: int) -> Tensor:
    """The largest number of each sample."""
    sizes = [t.abs().reshape((*t.shape[:batch_dims], -1)).amax(-1) for t in trees.tree_flatten(tree)[0]]
    return torch.stack(sizes).amax(0)


def _weights(kind: Kind, u: Tensor, size: float, forces: Any, tip: float) -> Tensor:
    """The weights that the multipliers of the relaxation are in proportion to, or of a value without a force those on the
    side of the kink where it is."""
    if kind == "length":
        next(forces)
        return u / (u.square().sum(-1, keepdim=True) + tip**2).sqrt()
    force = next(forces)
    total = force + next(forces) if kind == "relu" else force.sum(-1, keepdim=True)
    side = nearest_weights(kind, u * (_STEEP / size))
    least = torch.finfo(u.dtype).eps ** 0.5 * total.abs().amax() + torch.finfo(u.dtype).tiny
    return nearest_weights(kind, (force + least * side) / (total.clamp_min(0) + least))
