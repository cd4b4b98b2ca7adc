r"""A minimisation with kinks as one that has none, over the epigraphs of what is kinked.

Where a value ``k(u(z))`` with a kink (:mod:`implicitkit.problem.kinked_operations`) is replaced by an unknown ``t`` with
``k(u) <= t``, the program is smooth: ``u <= t`` of the largest of several numbers, ``u <= t, 0 <= t`` of a relu.  It is a
relaxation: every point of the original program with ``t = k(u)`` is one of it, with the same objective.  So a minimum of
it at which nothing is gained by ``t > k(u)`` is one of the original program; where all is convex, and rises with each
``t``, every minimum is.  A length is smoothed, ``sqrt(|u|^2 + eps^2) <= t``: the epigraph itself has no multipliers at its
tip.

Sources: Boyd & Vandenberghe (2004), *Convex Optimization*, sections 3.2.3 and 4.1.3; Grant, Boyd & Ye (2006), "Disciplined
convex programming", whose rules of signs :meth:`Relaxation.rises` asks of numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, trees
from implicitkit.foundation.pytrees import tensors_in
from implicitkit.problem.argmin import Argmin, box
from implicitkit.problem.constraints import Equality, Inequality
from implicitkit.problem.kinked_operations import Kind, Kinked, is_near, value

_ROUNDED = 1e-2  # of the largest length: how far tips are rounded off
Function = Callable[..., Any]


class Site(NamedTuple):
    """An operation with a kink: what it is, ``None`` where that does not depend on ``z``, and the shape of what it is of."""

    kind: Kind | None
    shape: tuple[int, ...]


Sites = tuple[tuple[Site, ...], ...]
"""Those of each function, in the order in which it meets them."""


class Seen(Kinked):
    """Collects the operations with a kink that a function of ``z`` meets.

    Attributes:
        sites: what they are. batch: the first dimensions of all that depends on ``z``. near: is any near its kink, as far as
            that can be told?
    """

    def __init__(self, z: Any, batch: tuple[int, ...], batch_dims: int | None = None) -> None:
        super().__init__(anywhere=batch_dims is not None)
        self.sites: list[Site] = []
        self.near, self.batch_dims = False, batch_dims or len(batch)
        self._depends = False  # does the operation that is looked at?
        self.batch, self._made = batch, {id(t): t for t in tensors_in(z)}  # kept alive, so that ids stay their own

    def take(self, kind: Kind, u: Tensor) -> Tensor:
        depends = self._depends and tuple(u.shape[: len(self.batch)]) == self.batch
        self.sites.append(Site(kind if depends else None, tuple(u.shape)))
        self.near = self.near or compat.is_wrapped(u) or is_near(kind, u, self.batch_dims)
        return value(kind, u)

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

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        """What is to be used for ``kind`` of ``u``."""
        raise NotImplementedError


class _Raised(Replacing):
    """Unknowns in the place of values, in units of their own; ``gaps``: what must not be positive, in these; ``tip``: how
    far lengths are rounded off."""

    def __init__(self, sites: Sequence[Site], known: Sequence[Any], units: Sequence[float], tip: float) -> None:
        super().__init__(sites, tuple(zip(known, units, strict=True)))
        self.gaps: list[Tensor] = []
        self.tip = tip

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        t, unit = known
        if kind == "length":
            self.gaps.append((u.square().sum(-1) + self.tip**2).sqrt() / unit - t)
        elif kind == "relu":
            self.gaps += [u / unit - t, -t]
        else:
            self.gaps.append(u / unit - t.unsqueeze(-1))
        return unit * t


class Reading(Replacing):
    """Collects ``us``, what the sites are of."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites, (None,) * len(sites))
        self.us: list[tuple[Kind, Tensor]] = []

    def of(self, kind: Kind, u: Tensor, known: Any) -> Tensor:
        self.us.append((kind, u.detach()))
        return value(kind, u)


class Above(NamedTuple):
    """The user's ``z``, and for each function the unknowns of its sites."""

    z: Any
    raised: Any


@dataclass(frozen=True)
class Raised:
    """A function of ``(z, *args)`` with unknowns in the place of values with a kink, or (``gaps``) what keeps these above
    the values, as functions of ``(Above, *args)``; ``number``: which function it is."""

    function: Function
    sites: tuple[Site, ...]
    number: int
    units: tuple[float, ...]
    tip: float
    gaps: bool = False

    def __call__(self, state: Above, *args: Any) -> Any:
        with _Raised(self.sites, state.raised[self.number], self.units, self.tip) as mode:
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


def read(functions: Sequence[Function], sites: Sites, z: Any, args: Any) -> list[list[tuple[Kind, Tensor]]]:
    """What the sites of each function are of, at ``z``."""
    found = []
    for function, own in zip(functions, sites, strict=True):
        with torch.no_grad(), Reading(own) as reading:
            function(z, *args)
        found.append(reading.us)
    return found


class Relaxation:
    """The smooth program in the place of ``problem``.

    Attributes:
        problem: over :class:`Above`. sizes: of what each site is of, at ``z0``. start: the point of it that
            belongs to ``z0``. tip: how far lengths are rounded off.
    """

    def __init__(self, problem: Argmin, sites: Sites, z0: Any, args: Any) -> None:
        functions, self.sites = functions_of(problem), sites
        us = read(functions, sites, z0, args)
        self.tip = _ROUNDED * (_size([u for own in us for kind, u in own if kind == "length"]) or 1.0)
        unit = _size(trees.tree_flatten(z0)[0]) or 1.0
        self.sizes = tuple(tuple(_size([u]) or unit for _, u in own) for own in us)
        units = [tuple(size / unit for size in own) for own in self.sizes]  # so that all unknowns have that of z
        self.start = Above(
            z0,
            tuple(
                tuple(value(kind, u / unit) for (kind, u), unit in zip(own, ones, strict=True))
                for own, ones in zip(us, units, strict=True)
            ),
        )
        made = [Raised(f, s, i, units[i], self.tip) for i, (f, s) in enumerate(zip(functions, sites, strict=True))]
        self._falling = [made[0], *(m for m, c in zip(made[1:], problem.constraints, strict=True) if c.one_sided)]
        kept = [
            (Inequality if c.one_sided else Equality)(m) for c, m in zip(problem.constraints, made[1:], strict=True)
        ]
        above = [Inequality(replace(m, gaps=True)) for m in made if any(site.kind is not None for site in m.sites)]
        bounds = None
        if problem.bounds is not None:
            free = trees.tree_map(lambda t: None, self.start.raised)
            spec, found = trees.tree_flatten(z0)[1], box(problem.bounds, z0)
            bounds = tuple(Above(trees.tree_unflatten(list(end), spec), free) for end in (found.lower, found.upper))
        self.problem = Argmin(made[0], (*kept, *above), bounds)

    def rises(self, args: Any) -> bool:
        """Does neither objective nor an inequality fall with a value that it has from a site, at the start?"""
        leaves, spec = trees.tree_flatten(self.start.raised)

        def total(function: Raised, *raised: Tensor) -> Tensor:
            out = function(Above(self.start.z, trees.tree_unflatten(list(raised), spec)), *args)
            return torch.stack([t.sum() for t in trees.tree_flatten(out)[0]]).sum()

        for function in self._falling:
            out, pullback = autodiff.vjp(functools.partial(total, function), *leaves)
            if any(bool((compat.physical(g) < 0).any()) for g in pullback(torch.ones_like(out))):
                return False
        return True


def _size(tensors: list[Tensor]) -> float:
    """The largest number of all samples; 0: there is none."""
    return max((float(compat.physical(t.detach()).abs().max()) for t in tensors), default=0.0)
