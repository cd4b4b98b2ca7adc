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
from implicitkit.problem.epigraph import (
    Function,
    Relaxation,
    Replacing,
    Site,
    Sites,
    functions_of,
    per_sample,
    read,
    size_of,
)
from implicitkit.problem.kinked_operations import Kind, nearest_weights

_STEEP = (
    1e6  # what numbers by their size are multiplied by at most, so that weights of what is off its kink are at an end
)
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
        self.left.append(w - nearest_weights(kind, w + u / per_sample(size, u)))
        return w * u if kind == "relu" else (w * u).sum(-1)


@dataclass(frozen=True)
class Conditions:
    """The equations at the top of this file, as a function of ``(Weighed, given, *args)``, ``given`` the unit of the
    gradient and the size of what each site is of, of the batch's shape."""

    functions: tuple[Function, ...]
    one_sided: tuple[bool, ...]
    bounds: Bounded | None
    sites: Sites

    def __call__(self, state: Weighed, given: tuple[Tensor, Any], *args: Any) -> Weighed:
        slope = self.slope(state, given, args)
        _, values, left = self._lagrangian(state.z, state, given, args)
        slope = trees.tree_map(lambda s: s / per_sample(given[0], s), slope)
        if self.bounds is not None:
            slope = self.bounds.natural(state.z, slope)
        natural = tuple(
            trees.tree_map(lambda m, v: lesser(m, -v, 0.0), y, g) if sided else g
            for sided, y, g in zip(self.one_sided, state.multipliers, values, strict=True)
        )
        return Weighed(slope, natural, left)

    def slope(self, state: Weighed, given: tuple[Tensor, Any], args: Any) -> Any:
        """The gradient of the Lagrangian."""
        return tree_gradient(lambda z: self._lagrangian(z, state, given, args)[0], state.z)

    def _lagrangian(
        self, z: Any, state: Weighed, given: tuple[Tensor, Any], args: Any
    ) -> tuple[Tensor, list[Any], Any]:
        """The sum of the samples' Lagrangians, the values of the constraints, and what is left of the equations of ``w``."""
        outs, left = [], []
        for function, own, w, sizes in zip(self.functions, self.sites, state.weights, given[1], strict=True):
            with _Weighed(own, w, sizes) as mode:
                outs.append(function(z, *args))
            left.append(tuple(mode.left))
        total = outs[0].sum()
        for y, g in zip(trees.tree_flatten(state.multipliers)[0], trees.tree_flatten(tuple(outs[1:]))[0], strict=True):
            total = total + (y * g).sum()
        return total, outs[1:], tuple(left)


def conditions(
    problem: Argmin, relaxation: Relaxation, z: Any, multipliers: tuple[Any, ...], args: Any, batch_dims: int
) -> tuple[Conditions, Weighed, tuple[Tensor, Any]]:
    """The equations, where to begin, and what they are given, at a solution of the relaxation and its multipliers."""
    functions, sites = functions_of(problem), relaxation.sites
    count, weights = len(problem.constraints), []
    pressing, rounded = iter(multipliers[count:]), any(site.kind == "length" for own in sites for site in own)
    scales = relaxation.scales
    for own, sizes, tips in zip(read(functions, sites, z, args), scales.sizes, scales.tips, strict=True):
        forces = iter(next(pressing) if any(kind != "length" for kind, _ in own) else ())
        each = zip(own, sizes, tips, strict=True)
        weights.append(tuple(_weights(kind, u, size, forces, tip, rounded) for (kind, u), size, tip in each))
    gradients = [tree_gradient(lambda t: functions[0](t, *args).sum(), at) for at in (relaxation.start.z, z)]
    slopes = [size_of(trees.tree_flatten(gradient)[0], batch_dims) for gradient in gradients]
    slope = slopes[0].maximum(slopes[1]).detach()  # that of z alone is nothing where the objective has the kink
    bounds = None if problem.bounds is None else box(problem.bounds, z)
    made = Conditions(functions, tuple(c.one_sided for c in problem.constraints), bounds, sites)
    begin = Weighed(z, tuple(multipliers[:count]), tuple(weights))
    return made, begin, (torch.where((slope > 0) & slope.isfinite(), slope, 1), scales.sizes)


def is_smooth(
    made: Conditions, state: Weighed, given: tuple[Tensor, Any], args: Any, step: Any, batch_dims: int
) -> Tensor:
    """Is the Lagrangian of each sample smooth at ``z`` where weights are held, ``(*batch,)``?

    It is where all kinks there are among the sites.  The gradients on both sides of ``z`` differ in proportion to the way
    between them then, ``step`` and a sixteenth of it; beside a kink of which no site knows by as much, however short it is.
    """

    def across(share: float) -> Tensor:
        ends = [trees.tree_map(lambda t, s, side=side: t + side * s, state.z, step) for side in (share, -share)]
        slopes = [made.slope(state._replace(z=z), given, args) for z in ends]
        return size_of(trees.tree_flatten(trees.tree_map(torch.sub, *slopes))[0], batch_dims) / given[0]

    far, near = across(1.0), across(1 / 16)
    return ~((near > _JUMP) & (near > far / 4))


def _weights(kind: Kind, u: Tensor, size: Tensor, forces: Any, tip: Tensor, rounded: bool) -> Tensor:
    """The weights that the multipliers of the relaxation are in proportion to; of a value without a force and, where
    nothing is rounded off, of one that is off its kink, those on the side where it is."""
    if kind == "length":
        return u / (u.square().sum(-1, keepdim=True) + per_sample(tip, u) ** 2).sqrt()
    force = next(forces)
    other = next(forces) if kind == "relu" or isinstance(kind, int) else None
    here, known = size_of([u], size.ndim), torch.finfo(u.dtype).eps ** (2 / 3)
    v = u / per_sample(torch.maximum(here / _STEEP, known * size), u)
    count, below = (kind, v) if isinstance(kind, int) else (1, v)
    if kind != "relu":  # how far it is from where another one takes its place
        edge = v.topk(count + 1, dim=-1).values if count < v.shape[-1] else v.sort(-1, descending=True).values
        below = torch.where(v < edge[..., count - 1 : count], v - edge[..., count - 1 : count], v - edge[..., -1:])
    if not rounded:
        force = torch.where(below < -1, 0, force)
    if kind == "relu" and other is not None:
        total = force + (other if rounded else torch.where(below > 1, 0, other))
    else:
        total = force.sum(-1, keepdim=True)
    most = per_sample(size_of([total], size.ndim), total)
    least = torch.finfo(u.dtype).eps ** 0.5 * most + torch.finfo(u.dtype).tiny
    share = (force.clamp_min(0) + least * nearest_weights(kind, v) / count) / (total.clamp_min(0) + least)
    return nearest_weights(kind, count * share)
