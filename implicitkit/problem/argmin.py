"""``z`` minimises ``objective(z, *args)``, with or without constraints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, trees
from implicitkit.foundation.arrays import from_arrays, from_numbers
from implicitkit.foundation.clamping import check_order, held
from implicitkit.foundation.options import check_call
from implicitkit.foundation.trees import Layout
from implicitkit.foundation.wording import kind_of
from implicitkit.problem import constrained as program
from implicitkit.problem.base import Kernel, Problem, Restated, deeper, require_callable
from implicitkit.problem.chart import check_manifold, on_chart
from implicitkit.problem.complementarity import check_degenerate
from implicitkit.problem.constraints import Constraint
from implicitkit.problem.kind import ARGMIN, Kind
from implicitkit.problem.natural_map import compares, ends_of, natural_of
from implicitkit.problem.scaling import Rescaled, divided, units_of_start
from implicitkit.problem.unit_of_objective import cost_of, in_the_users_units


@dataclass(frozen=True, repr=False)
class Argmin(Problem):
    r"""Find a minimiser of ``f(z, \theta)``, a scalar (one scalar per sample with ``batch_dims``).

    Without constraints the residual is the gradient, ``F = df/dz``; its Jacobian is the Hessian, and
    ``dz/d\theta = -(d^2f/dz^2)^{-1} d^2f/dz d\theta`` where the Hessian is regular.

    With constraints, bounds, a set or a proximal term, it is the KKT system in natural-map form over ``z`` and the
    multipliers (:mod:`implicitkit.problem.constrained`); ``solution.multipliers`` has one entry for each constraint, of the
    shape of its values and differentiable like the value.  Under strict complementarity and with linearly independent
    active constraints ``z`` and the multipliers are differentiable functions of ``\theta``.

    Unknowns with units of their own (1e-12 beside 1e9) are measured in those of the start, where the gradient there bears
    them out (:func:`~implicitkit.problem.scaling.units_of_start`); ``atol`` and ``residual_norm`` are then in these units.

    Source: Nocedal & Wright (2006), theorems 2.4 and 12.6; Fiacco (1983), theorem 3.2.2, for the derivative.

    Args:
        objective: ``f(z, *args)``, a function or ``nn.Module`` returning a real tensor of the batch's shape.
        constraints: ``ik.Equality(h)`` and ``ik.Inequality(g)`` (``h = 0``, ``g <= 0``).
        bounds: ``(lower, upper)``, each a number, a tensor, a pytree like ``z``, or ``None``; infinite where there is none.
        prox: ``prox(v, step)`` of a term ``phi`` that is added to the objective (``ik.prox``).
        project: ``project(v)`` on a set that ``z`` must lie in (``ik.project``).  One of bounds, prox and project.
        degenerate: what the derivative is where the conditions above fail.  ``"lstsq"``: that of least norm;
            ``"raise"``: an error where the linear system is singular (at a kink where it is regular, as with one weakly
            active constraint, both give the derivative of one side); ``"smooth"``: inequalities are relaxed to
            ``lam g = -1e-3``, which moves the solution by as much and makes it smooth everywhere.
        jac_sparsity: the pattern of the objective's Hessian (without constraints), for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.
        manifold: what ``z`` lies on, if it is no vector: ``ik.manifold.SO3()``, or manifolds in a tree
            (:mod:`implicitkit.manifold`); not beside constraints, bounds, prox or project.
        has_aux: the function returns ``(value, aux)``; ``solution.aux`` is ``aux`` at the solution, differentiable.

    Raises:
        TypeError: something is not callable, or a constraint is neither ``Equality`` nor ``Inequality``.
        ValueError: two of bounds, prox and project; malformed bounds; an unknown policy.
    """

    objective: Callable[..., Any]
    constraints: Any = ()
    bounds: Any = None
    prox: Callable[..., Any] | None = None
    project: Callable[..., Any] | None = None
    degenerate: str = "lstsq"
    manifold: Any = field(default=None, kw_only=True)
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    has_aux: bool = field(default=False, kw_only=True)
    kind: ClassVar[Kind] = ARGMIN

    def __post_init__(self) -> None:
        require_callable(self, self.objective, "objective")
        self._what_is_said()
        object.__setattr__(self, "bounds", as_bounds(self.bounds))
        given = self.constraints
        constraints = tuple(given or ()) if isinstance(given, (list, tuple)) or given is None else (given,)
        for number, constraint in enumerate(constraints):
            if not isinstance(constraint, Constraint):
                raise TypeError(
                    f"constraints[{number}] is {kind_of(constraint)}: wrap the function in ik.Equality (h = 0) or "
                    "ik.Inequality (g <= 0; SciPy's 'ineq' has the other sign)"
                )
        object.__setattr__(self, "constraints", constraints)
        given = [n for n in ("bounds", "prox", "project") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} cannot be combined: one set or proximal term a problem; state the others as "
                "constraints=[ik.Inequality(...)]"
            )
        if hasattr(self.prox, "project") and not hasattr(self.prox, "apply"):
            raise ValueError(
                f"prox= takes the proximal map of a term, prox(z, step), and {type(self.prox).__name__} is a projection on "
                "a set: pass it as project="
            )
        for name in ("prox", "project"):
            if getattr(self, name) is not None:
                require_callable(self, getattr(self, name), name)
                check_call("prox(z, step)" if name == "prox" else "project(z)", getattr(self, name))
        if getattr(self.project, "of_a_term", False):
            raise ValueError(
                f"project= takes a projection on a set, and {type(self.project).__name__} is the proximal map of a term: "
                "pass it as prox="
            )
        if getattr(self.project, "euclidean", True) is False:
            raise ValueError(
                f"project= takes a Euclidean projection, and {type(self.project).__name__} is one in the Kullback-Leibler "
                "divergence: the minimum over its set would not be a fixed point of it; use the Euclidean one"
            )
        check_manifold(self, "constraints", "bounds", "prox", "project")
        check_degenerate(self.degenerate)
        if self.degenerate == "smooth" and not any(c.one_sided for c in constraints):
            raise ValueError(
                "degenerate='smooth' relaxes inequality constraints, and there is none; state bounds as ik.Inequality"
            )

    @property
    def function(self) -> Callable[..., Any]:
        return self._value_of(self.objective)

    @property
    def constrained(self) -> bool:
        """Is there anything beside the objective?"""
        return bool(self.constraints) or not (self.bounds is None and self.prox is None and self.project is None)

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated | None:
        if self.manifold is not None and z0 is not None:
            return on_chart(self, "objective", z0, args, batch_dims)
        if z0 is not None and ends_of(self.project) is not None:
            return replace(self, project=None, bounds=self._ends(z0)).restate(z0, args, batch_dims)
        prox = self._proximal(z0)
        if z0 is not None and self.prox is None and self.project is None:
            units = units_of_start(self.function, z0, args, Layout(z0, batch_dims))
            if units is not None:
                return self._rescaled(units, z0, args, batch_dims)
        if not self.constrained:
            return None
        restated, state = program.start(self.function, self.constraints, prox, self.degenerate, z0, args, batch_dims)
        count, cost = len(self.constraints), None
        if self.degenerate != "smooth" and (count or compares(prox) or restated.layout.dtype is torch.float32):
            cost = cost_of(self.function, prox, z0, args, restated.layout, both=not count)
        if cost is None:
            return Restated(restated, state, args, lambda s: (s.z, s.multipliers if count else None), batch_dims)

        def split(s: program.State, c: Tensor) -> tuple[Any, Any]:
            return s.z, in_the_users_units(s.multipliers, c) if count else None

        return Restated(replace(restated, costed=True), state, (cost, *args), split, batch_dims, lead=1)

    def _rescaled(self, s: Any, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        """The problem for ``z / s``."""
        bounds = None
        if self.bounds is not None:
            bounds = tuple(divided(from_numbers(bound, z0), s) for bound in self.bounds)
        constraints = tuple(replace(c, function=Rescaled(c.function)) for c in self.constraints)
        scaled = replace(self, objective=Rescaled(self.objective), constraints=constraints, bounds=bounds)
        start = trees.tree_map(torch.div, z0, s)
        return deeper(scaled, start, args, batch_dims, s, lambda y, s: trees.tree_map(torch.mul, y, s))

    def _ends(self, z0: Any) -> tuple[Any, Any]:
        """The bounds that the set is made of, each a pytree like ``z0``.

        Raises:
            TypeError, ValueError: the set does not fit ``z0``.
        """
        self.project(trees.tree_map(compat.plain_sample, z0))  # type: ignore[misc]
        leaves, spec = trees.tree_flatten(z0)
        pairs = [ends_of(self.project)(leaf) for leaf in leaves]  # type: ignore[misc]
        lower, upper = (trees.tree_unflatten(list(ends), spec) for ends in zip(*pairs, strict=True))
        return lower, upper

    def _proximal(self, z0: Any) -> Callable[..., Any] | None:
        """The proximal map of whatever set or term there is."""
        if self.prox is not None:
            return self.prox
        if self.project is not None:
            return (Separately if natural_of(self.project) else Projected)(self.project)
        return None if self.bounds is None else box(self.bounds, z0)

    def residual(self, z: Any, *args: Any) -> Any:
        return tree_gradient(lambda t: self.function(t, *args).sum(), z)

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        return autodiff.gradient(kernel, z)[1]

    def flat_objective(self, kernel: Kernel, z: Tensor) -> Tensor:
        return kernel(z)


@dataclass(frozen=True)
class Projected:
    """A projection as a proximal map: the step does not matter."""

    project: Callable[..., Any]

    @property
    def by_program(self) -> bool:
        """Does the set say so (:class:`~implicitkit.project.Projection`)?"""
        return bool(getattr(self.project, "by_program", False))

    def __call__(self, z: Any, step: Tensor) -> Any:
        return self.project(z)


@dataclass(frozen=True)
class Separately(Projected):
    """One that has its natural map in a form without cancellation."""

    def natural(self, z: Any, slope: Any) -> Any:
        return self.project.natural(z, slope)  # type: ignore[attr-defined]

    @property
    def compares(self) -> bool:
        """Does it measure slopes against unknowns?"""
        return compares(self.project)


@dataclass(frozen=True)
class Bounded:
    """The projection on ``lower <= z <= upper``, leaf by leaf."""

    lower: tuple[Any, ...]
    upper: tuple[Any, ...]
    of_bounds: ClassVar[bool] = True

    def batched(self, layout: Layout) -> bool:
        """Does a bound hold numbers of its own for each sample?"""
        return any(
            isinstance(bound, Tensor) and bound.ndim > len(event) and bound.shape[: bound.ndim - len(event)].numel() > 1
            for bounds in (self.lower, self.upper)
            for bound, event in zip(bounds, layout.events, strict=True)
        )

    def check(self) -> None:
        """Raise where no number lies between the bounds."""
        for lower, upper in zip(self.lower, self.upper, strict=True):
            check_order("bounds", lower, upper)

    def __call__(self, z: Any, step: Tensor) -> Any:
        leaves, spec = trees.tree_flatten(z)
        clipped = []
        for leaf, lower, upper in zip(leaves, self.lower, self.upper, strict=True):
            if lower is not None:
                leaf = leaf.clamp_min(lower) if not isinstance(lower, Tensor) else leaf.maximum(lower.to(leaf))
            if upper is not None:
                leaf = leaf.clamp_max(upper) if not isinstance(upper, Tensor) else leaf.minimum(upper.to(leaf))
            clipped.append(leaf)
        return trees.tree_unflatten(clipped, spec)

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)``, where nothing cancels: ``slope``, but at least ``z - upper`` and at most ``z - lower``."""
        leaves, spec = trees.tree_flatten(z)
        slopes = trees.tree_flatten(slope)[0]
        return trees.tree_unflatten(
            [
                held(g, *(None if b is None else leaf - (b.to(leaf) if isinstance(b, Tensor) else b) for b in ends))
                for leaf, g, *ends in zip(leaves, slopes, self.upper, self.lower, strict=True)
            ],
            spec,
        )


def box(bounds: Any, z0: Any) -> Bounded:
    """The projection on bounds, as a proximal map.

    Raises:
        ValueError: the lower one is above the upper one somewhere, or they do not fit ``z0``.
    """
    bounded = Bounded(*(_like(bound, z0, name) for bound, name in zip(bounds, ("lower", "upper"), strict=True)))
    bounded.check()
    return bounded


def as_bounds(bounds: Any) -> Any:
    """``(lower, upper)`` with arrays as tensors; of SciPy's ``Bounds`` its two ends.

    Raises:
        ValueError: not two of them.
    """
    ends = from_arrays((bounds.lb, bounds.ub) if hasattr(bounds, "lb") and hasattr(bounds, "ub") else bounds)
    if ends is not None and (not isinstance(ends, (tuple, list)) or len(ends) != 2):
        raise ValueError(
            "bounds must be a pair (lower, upper), each a number, a tensor like z or None; SciPy's list of pairs is "
            f"bounds=torch.tensor(pairs).unbind(1); got {kind_of(ends)}"
        )
    return ends


def _like(bound: Any, z0: Any, name: str) -> tuple[Any, ...]:
    """One bound for each leaf of ``z``."""
    leaves, spec = trees.tree_flatten(z0)
    if any(leaf.is_complex() for leaf in leaves if isinstance(leaf, Tensor)):
        raise ValueError("bounds need real unknowns; z0 has complex leaves")
    if bound is None or isinstance(bound, (int, float)):
        return (bound,) * len(leaves)
    with contextlib.suppress(ValueError):  # another structure, as is said below
        bound = trees.in_order(bound, z0)
    bounds, bound_spec = trees.tree_flatten(bound)
    if isinstance(bound, Tensor):
        bounds = bounds * len(leaves)
    elif bound_spec != spec:
        raise ValueError(
            f"the {name} bound is a pytree of another structure than z0; give one like z0, a number, a tensor or None (of "
            "SciPy's list of pairs: bounds=torch.tensor(pairs).unbind(1))"
        )
    for b, leaf in zip(bounds, leaves, strict=True):
        if not isinstance(b, (Tensor, int, float)) and b is not None:
            raise TypeError(f"the {name} bound holds {kind_of(b)}; give numbers, tensors or None")
        if isinstance(b, Tensor) and not _fits(b.shape, leaf.shape):
            raise ValueError(
                f"the {name} bound has shape {tuple(b.shape)}, which does not fit z0's {tuple(leaf.shape)}"
            )
    return tuple(bounds)


def _fits(shape: torch.Size, target: torch.Size) -> bool:
    """Does a tensor of this shape broadcast to the target?"""
    tail = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(s in (1, t) for s, t in zip(shape, tail, strict=True))


def tree_gradient(function: Callable[[Any], Tensor], z: Any) -> Any:
    """Gradient of a scalar function of a pytree, as a pytree (PyTorch's convention for complex leaves)."""
    leaves, spec = trees.tree_flatten(z)
    out, pullback = autodiff.vjp(lambda *ls: function(trees.tree_unflatten(list(ls), spec)), *leaves)
    return trees.tree_unflatten(list(pullback(out.new_ones(()))), spec)
