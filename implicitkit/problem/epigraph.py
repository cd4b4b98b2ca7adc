r"""A minimisation with kinks as one that has none, over the epigraphs of what is kinked.

Where a value ``k(u(z))`` with a kink (:mod:`implicitkit.problem.kinked_operations`) is replaced by an unknown ``t`` with
``k(u) <= t``, the program is smooth: ``u <= t`` of the largest of several numbers, ``u <= t, 0 <= t`` of a relu.  It is a
relaxation: every point of the original program with ``t = k(u)`` is one of it, with the same objective.  So a minimum of
it at which nothing is gained by ``t > k(u)`` is one of the original program; where all is convex, and rises with each
``t``, every minimum is.  A length is smoothed, ``sqrt(|u|^2 + eps^2)``: its epigraph has no multipliers at its tip.

Sources: Boyd & Vandenberghe (2004), *Convex Optimization*, sections 3.2.3 and 4.1.3; Grant, Boyd & Ye (2006), "Disciplined
convex programming", whose rules of signs :func:`rises` asks of numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded, trees
from implicitkit.foundation.pytrees import tensors_in
from implicitkit.problem.argmin import Argmin, box, tree_gradient
from implicitkit.problem.constraints import Equality, Inequality
from implicitkit.problem.kinked_operations import Kind, Kinked, Side, gaps, is_near, value

_SIDES = ("greater", "lesser", "neither")
_ROUNDED = 3e-2  # of the largest length: how far tips are rounded off
Function = Callable[..., Any]


class Site(NamedTuple):
    """An operation with a kink: what it is, ``None`` where that does not depend on ``z``, and the shape of what it is of.
    Of a ``torch.where`` what it takes of two, ``(*batch, ...)``: no kink by itself."""

    kind: Kind | Side | None
    shape: tuple[int, ...]

    @property
    def counts(self) -> bool:
        """Is it a kink that depends on ``z``?"""
        return self.kind is not None and self.kind not in _SIDES


Sites = tuple[tuple[Site, ...], ...]
"""Those of each function, in the order in which it meets them."""


class Seen(Kinked):
    """Collects the operations with a kink that a function of ``z`` meets.

    Attributes:
        sites: what they are. batch: the first dimensions of all that depends on ``z``. near: is any near its kink, as far as
            that can be told? gaps: how far each is from it.
    """

    def __init__(self, z: Any, batch: tuple[int, ...], batch_dims: int | None = None) -> None:
        super().__init__(anywhere=batch_dims is not None)
        self.sites, self.gaps = list[Site](), list[Tensor]()
        self._inside = batch_dims is not None
        self.near, self.batch_dims = False, batch_dims or len(batch)
        self._depends = False  # does the operation that is looked at?
        self.batch, self._made = batch, {id(t): t for t in tensors_in(z)}  # kept alive, so that ids stay their own

    def take(self, kind: Kind, u: Tensor) -> Tensor:
        depends = (self._depends or self._inside) and tuple(u.shape[: len(self.batch)]) == self.batch
        self.sites.append(Site(kind if depends else None, tuple(u.shape)))
        self.near = self.near or compat.is_wrapped(u) or is_near(kind, u, self.batch_dims)
        self.gaps.append(gaps(kind, u))
        return value(kind, u)

    def side(self, condition: Tensor, a: Tensor, b: Tensor) -> Side:
        known = self._inside or id(condition) in self._made  # inside transforms it goes by another name
        known = known and tuple(condition.shape[: len(self.batch)]) == self.batch
        found = taken(condition, a, b) if known else "neither"
        self.sites.append(Site(found, tuple(condition.shape)))
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._depends = any(id(t) in self._made for t in tensors_in((args, kwargs or {})))
        out = super().__torch_function__(func, types, args, kwargs)
        if self._depends:
            self._made.update((id(t), t) for t in tensors_in(out))
        return out


class Replacing(Kinked):
    """What is ``known`` of each site, in order, in the place of its value.

    Raises:
        RuntimeError: the function meets others than these.
    """

    def __init__(self, sites: Sequence[Site], known: Sequence[Any]) -> None:
        super().__init__()
        self._sites, self._known = iter(sites), iter(known)

    def take(self, kind: Kind, u: Tensor) -> Tensor:
        site = next(self._sites, None)
        if site is None or tuple(u.shape) != site.shape or site.kind not in (None, kind):
            raise RuntimeError("a function with kinks goes other ways at other points")
        return value(kind, u) if site.kind is None else self.of(kind, u, next(self._known))

    def side(self, condition: Tensor, a: Tensor, b: Tensor) -> Side:
        site = next(self._sites, None)
        if site is None or tuple(condition.shape) != site.shape or site.kind not in _SIDES:
            raise RuntimeError("a function with kinks goes other ways at other points")
        return site.kind  # type: ignore[return-value]

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        """What is to be used for ``kind`` of ``u``."""
        raise NotImplementedError


def taken(condition: Tensor, a: Tensor, b: Tensor) -> Side:
    """What ``torch.where`` takes here, of all numbers of all samples; ``"neither"`` of two that are equal."""
    found = torch.where(condition, a, b)
    for side, other in (("greater", found - torch.minimum(a, b)), ("lesser", torch.maximum(a, b) - found)):
        best = torch.maximum(a, b) if side == "greater" else torch.minimum(a, b)
        if bool(compat.physical(found == best).all()) and bool(compat.physical(other > 0).any()):
            return side  # type: ignore[return-value]
    return "neither"


class _Raised(Replacing):
    """Unknowns in the place of values, in units of their own; ``gaps``: what must not be positive, in these."""

    def __init__(self, sites: Sequence[Site], known: Sequence[Any], scales: Scales, number: int) -> None:
        super().__init__(sites, tuple(zip(known, scales.units[number], scales.tips[number], strict=True)))
        self.gaps: list[Tensor] = []

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        t, unit, tip = known
        v = u / per_sample(unit, u)
        if isinstance(kind, int):  # the least k s + sum p with p >= v - s, p >= 0
            p, s = t[..., :-1], t[..., -1:]
            self.gaps += [v - s - p, -p]
            t = kind * s.squeeze(-1) + p.sum(-1)
        elif kind == "length":
            t = (v.square().sum(-1, keepdim=True) + per_sample(tip / unit, v) ** 2).sqrt().squeeze(-1)
        elif kind == "relu":
            self.gaps += [v - t, -t]
        else:
            self.gaps.append(v - t.unsqueeze(-1))
        return per_sample(unit, t) * t


class _Pushed(Replacing):
    """Values that are moved by something of their own."""

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        return value(kind, u) + known


class Reading(Replacing):
    """Collects ``us``, what the sites are of; ``derived``: with their graphs."""

    def __init__(self, sites: Sequence[Site], derived: bool = False) -> None:
        super().__init__(sites, (None,) * len(sites))
        self.us: list[tuple[Kind, Tensor]] = []
        self._derived = derived

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        self.us.append((kind, u if self._derived else u.detach()))
        return value(kind, u)


class Scales(NamedTuple):
    """What the numbers of each sample are measured in, of the batch's shape each: for each function and each of its sites
    ``units`` of the values, ``sizes`` of what they are of, and ``tips``, how far lengths are rounded off."""

    units: tuple[tuple[Tensor, ...], ...]
    sizes: tuple[tuple[Tensor, ...], ...]
    tips: tuple[tuple[Tensor, ...], ...]


class Above(NamedTuple):
    """The user's ``z``, and for each function the unknowns of its sites."""

    z: Any
    raised: Any


@dataclass(frozen=True)
class Raised:
    """A function of ``(z, *args)`` with unknowns in the place of values with a kink, or (``gaps``) what keeps these above
    the values, as functions of ``(Above, Scales, *args)``; ``number``: which function it is."""

    function: Function
    sites: tuple[Site, ...]
    number: int
    gaps: bool = False

    def __call__(self, state: Above, scales: Scales, *args: Any) -> Any:
        with _Raised(self.sites, state.raised[self.number], scales, self.number) as mode:
            out = self.function(state.z, *args)
        return tuple(mode.gaps) if self.gaps else out


def functions_of(problem: Argmin) -> tuple[Function, ...]:
    """The objective and the values of the constraints."""
    return problem.function, *(c.values for c in problem.constraints)


def sites_of(functions: Sequence[Function], z0: Any, args: Any, batch: tuple[int, ...]) -> Sites:
    """The operations with a kink that each of the functions meets at ``z0``."""
    found = []
    for function in functions:
        with torch.no_grad(), Seen(z0, batch) as seen:
            function(z0, *args)
        found.append(tuple(seen.sites))
    return tuple(found)


def read(
    functions: Sequence[Function], sites: Sites, z: Any, args: Any, derived: bool = False
) -> list[list[tuple[Kind, Tensor]]]:
    """What the sites of each function are of, at ``z``; ``derived``: as functions of it."""
    found = []
    for function, own in zip(functions, sites, strict=True):
        with contextlib.nullcontext() if derived else torch.no_grad(), Reading(own, derived) as reading:
            function(z, *args)
        found.append(reading.us)
    return found


class Relaxation:
    """The smooth program in the place of ``problem``.

    Attributes:
        problem: over :class:`Above`, of ``(Above, *args)``. args: its arguments, :class:`Scales` and the user's. start: the
            point of it that belongs to ``z0``. unit, reach: of ``z``, and how far from a minimum
            of it one of ``problem`` may be, of the batch's shape.
    """

    def __init__(self, problem: Argmin, sites: Sites, z0: Any, args: Any, batch_dims: int) -> None:
        functions, self.sites = functions_of(problem), sites
        us = read(functions, sites, z0, args)
        self.unit, self.reach, self.scales = _scales(functions, sites, us, z0, args, batch_dims)
        self.args = (self.scales, *args)
        self.start = Above(
            z0,
            tuple(
                tuple(_raised(kind, u / per_sample(unit, u)) for (kind, u), unit in zip(own, ones, strict=True))
                for own, ones in zip(us, self.scales.units, strict=True)
            ),
        )
        made = [Raised(f, s, i) for i, (f, s) in enumerate(zip(functions, sites, strict=True))]
        kept = [
            (Inequality if c.one_sided else Equality)(m) for c, m in zip(problem.constraints, made[1:], strict=True)
        ]
        above = [Inequality(replace(m, gaps=True)) for m in made if any(map(_has_gap, m.sites))]
        bounds = None
        if problem.bounds is not None:
            free = trees.tree_map(lambda t: None, self.start.raised)
            spec, found = trees.tree_flatten(z0)[1], box(problem.bounds, z0)
            bounds = tuple(Above(trees.tree_unflatten(list(end), spec), free) for end in (found.lower, found.upper))
        self.problem = Argmin(made[0], (*kept, *above), bounds)


def rises(problem: Argmin, sites: Sites, z0: Any, args: Any, batch_dims: int) -> Tensor:
    """Where neither objective nor an inequality falls with a value that it has from a site, at ``z0``, of the batch's
    shape."""
    found = torch.ones_like(size_of(trees.tree_flatten(z0)[0], batch_dims), dtype=torch.bool)
    sided = (True, *(c.one_sided for c in problem.constraints))
    for function, own, values, falls in zip(*_values(problem, sites, z0, args), sided, strict=True):
        for g in _pull(function, own, z0, args, [torch.zeros_like(v) for v in values]) if falls else ():
            found = found & ~(g < 0).reshape((*found.shape, -1)).any(-1)
    return found


def pruned(problem: Argmin, sites: Sites, z0: Any, args: Any) -> Sites:
    """The sites without those sums of the largest that nothing depends on, where values are and beside that: of all numbers
    in order few may be used.  What is left out keeps its value, kink and all."""
    found = []
    for function, own, values in zip(*_values(problem, sites, z0, args), strict=True):
        pulls = [_pull(function, own, z0, args, [share * v for v in values]) for share in (0.0, 0.25)]
        used = iter([any(bool(compat.physical(g != 0).any()) for g in both) for both in zip(*pulls, strict=True)])
        idle = [site.counts and not next(used) and isinstance(site.kind, int) for site in own]
        found.append(tuple(Site(None, s.shape) if out else s for s, out in zip(own, idle, strict=True)))
    return tuple(found)


def _values(problem: Argmin, sites: Sites, z0: Any, args: Any) -> tuple[Any, Sites, list[list[Tensor]]]:
    """The functions, their sites, and what these give at ``z0``."""
    functions = functions_of(problem)
    us = read(functions, sites, z0, args)
    return functions, sites, [[value(kind, u) for kind, u in own] for own in us]


def _pull(function: Function, sites: Sequence[Site], z0: Any, args: Any, moved: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative of all that a function gives by the values of its sites, where these are ``moved``."""
    if not moved:
        return ()

    def total(*pushes: Tensor) -> Tensor:
        with _Pushed(sites, pushes):
            out = function(z0, *args)
        return torch.stack([t.sum() for t in trees.tree_flatten(out)[0]]).sum()

    out, pullback = autodiff.vjp(total, *moved)
    return pullback(torch.ones_like(out))


def _has_gap(site: Site) -> bool:
    return site.counts and site.kind != "length"


def _raised(kind: Kind, u: Tensor) -> Tensor:
    """The unknowns in the place of a value, where they belong to it."""
    if kind == "length":
        return u[..., :0]
    if not isinstance(kind, int):
        return value(kind, u)
    least = u.topk(kind, dim=-1).values[..., -1:]
    return torch.cat([(u - least).clamp_min(0), least], -1)


def per_sample(size: Tensor, like: Tensor) -> Tensor:
    """A number of each sample, to be multiplied with numbers ``like`` these."""
    return size.reshape((*size.shape, *(1,) * (like.ndim - size.ndim)))


def _scales(
    functions: Sequence[Function], sites: Sites, us: Any, z0: Any, args: Any, batch_dims: int
) -> tuple[Tensor, Tensor, Scales]:
    """The unit of ``z``, how far a minimum may be from that of what is rounded off, and the units of all sites, so that
    unknowns in their place have that of ``z``.

    It is ``|z0|``; where that is zero ``|u| / |u' d|``, how far it is to where what a site is of is zero, along some ``d``,
    of the nearest; where all are zero, ``|df| / |d^2f d|``, how far it is to where the objective is flat.  Of what a site is
    of, where that is zero, the size is that of ``u' d``.
    """
    leaves, spec = trees.tree_flatten(z0)
    ways = [seeded.normal(t.shape[batch_dims:].numel(), seed=2).to(t) for t in leaves]
    ways = [way.reshape(t.shape[batch_dims:]).expand_as(t) for way, t in zip(ways, leaves, strict=True)]
    counts = [len(own) for own in us]
    here = [size_of([u], batch_dims) for own in us for _, u in own]
    unit = size_of(leaves, batch_dims)

    def along(function: Callable[..., Tensor]) -> Tensor:
        """The derivative of something ``(*batch, k)`` along the ways; zero where there is none."""
        one = lambda *moved: function(trees.tree_unflatten(list(moved), spec))  # noqa: E731
        try:
            return autodiff.jvp(one, leaves, ways).detach()
        except RuntimeError:
            return unit.unsqueeze(-1) * 0

    def of_sites(z: Any) -> Tensor:
        found = read(functions, sites, z, args, derived=True)
        return torch.cat([rows_of(u, batch_dims) for own in found for _, u in own], -1)

    def slope(z: Any) -> Tensor:
        out = trees.tree_flatten(tree_gradient(lambda t: functions[0](t, *args).sum(), z))[0]
        return torch.cat([rows_of(g, batch_dims) for g in out], -1)

    changes = along(of_sites)
    lengths = [rows_of(u, batch_dims).shape[-1] for own in us for _, u in own]
    rates = [r.abs().amax(-1) for r in changes.expand((*unit.shape, sum(lengths))).split(lengths, -1)]
    far = [torch.where(_counts(u) & _counts(r), u / r, torch.inf) for u, r in zip(here, rates, strict=True)]
    nearest = torch.stack(far).amin(0)
    unit = torch.where(_counts(unit), unit, nearest)
    if not bool(compat.physical(_counts(unit)).all()):
        flat = slope(z0).detach().abs().amax(-1) / along(slope).abs().amax(-1)
        unit = torch.where(_counts(unit), unit, flat)
    unit = torch.where(_counts(unit), unit, 1)
    beside = [torch.where(_counts(r), r, 1) * unit for r in rates]
    sizes = [torch.where(_counts(u), u, other) for u, other in zip(here, beside, strict=True)]
    kinds = [kind for own in us for kind, _ in own]
    rounded = [size for size, kind in zip(sizes, kinds, strict=True) if kind == "length"]
    tip = _ROUNDED * torch.stack(rounded or [torch.ones_like(unit)]).amax(0)
    moved = [tip / r for r, kind in zip(rates, kinds, strict=True) if kind == "length"]
    reach = torch.stack([_ROUNDED * unit, *(torch.where(_counts(m), m, 0) for m in moved)]).amax(0)

    def by_function(made: list[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        rest = iter(made)
        return tuple(tuple(next(rest) for _ in range(count)) for count in counts)

    return (
        unit,
        reach,
        Scales(by_function([size / unit for size in sizes]), by_function(sizes), by_function([tip] * len(sizes))),
    )


def size_of(tensors: Sequence[Tensor], batch_dims: int) -> Tensor:
    """The largest number of each sample."""
    return torch.stack([rows_of(t.detach().abs(), batch_dims).amax(-1) for t in tensors]).amax(0)


def rows_of(t: Tensor, batch_dims: int) -> Tensor:
    """The numbers of each sample in a row, of which there may be one, without a dimension of its own."""
    return t.reshape((*t.shape[:batch_dims], -1))


def _counts(size: Tensor) -> Tensor:
    """Is it a size: neither zero nor infinite, nor NaN?"""
    return (size > 0) & size.isfinite()
