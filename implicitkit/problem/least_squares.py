"""``z`` minimises half the squared norm of ``residuals(z, *args)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, trees
from implicitkit.foundation.arrays import from_numbers
from implicitkit.foundation.numbers import real_parts
from implicitkit.foundation.options import check_options, each, function, one_of, positive
from implicitkit.foundation.trees import Layout
from implicitkit.problem.argmin import as_bounds, box, tree_gradient
from implicitkit.problem.base import Kernel, Problem, Restated, deeper, require_callable
from implicitkit.problem.bounded_least_squares import BoundedLeastSquares
from implicitkit.problem.chart import check_manifold, on_chart
from implicitkit.problem.constrained import start
from implicitkit.problem.kind import LEAST_SQUARES, Kind
from implicitkit.problem.robust import LOSSES, Robust
from implicitkit.problem.scaling import Rescaled, check_scales, divided, scales, units_of_start
from implicitkit.problem.unit_of_objective import cost_of
from implicitkit.problem.wrapping import Around


@dataclass(frozen=True, repr=False)
class LeastSquares(Problem):
    r"""Find a minimiser of ``|r(z, \theta)|^2 / 2``.

    The residual is the full gradient ``F = R^T r`` with ``R = dr/dz``, and its Jacobian the full Hessian
    ``R^T R + sum_i r_i d^2 r_i/dz^2``: the Gauss-Newton shortcut ``R^T R`` may serve a solver, never the derivative
    (it is wrong wherever the residual at the solution is not zero).

    With bounds the residual is the natural map ``z - P(z - R^T r)``, ``P`` the projection on them, as for
    :class:`~implicitkit.Argmin`; the solver is Levenberg-Marquardt on the unknowns that no bound holds, with robust losses
    as well, sparse where the residuals have a pattern.  Unknowns and residuals that are far from one are measured in units
    of their own (:func:`~implicitkit.problem.scaling.units_of_start`, :mod:`implicitkit.problem.unit_of_objective`);
    ``atol`` and ``residual_norm`` are then in these units.

    Source: Nocedal & Wright (2006), chapter 10.

    Args:
        residuals: ``r(z, *args)``, a function or ``nn.Module`` returning any pytree of tensors; with
            ``batch_dims``, each leaf has the batch's shape in front.  Real and imaginary parts of complex numbers are
            residuals of their own.
        jac_sparsity: the pattern of the Jacobian of the residuals, ``(m, n)``, for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.

        bounds: ``(lower, upper)``, as in :class:`~implicitkit.Argmin`; also lists of numbers, where ``z`` is one tensor.
        loss: ``"linear"``, ``"huber"``, ``"soft_l1"``, ``"cauchy"``, ``"arctan"``, or ``rho(s)`` of squared residuals,
            elementwise: then ``f_scale^2 sum rho((r / f_scale)^2) / 2`` is minimised (:mod:`implicitkit.problem.robust`).
        f_scale: where a residual begins to count as an outlier: a positive number, or a tensor that broadcasts.
        x_scale: in what units the unknowns are measured: ``"jac"``, those in which the columns of the Jacobian have length
            one, of methods that have a trust region for it (the others refuse it); ``"auto"``: the same where the method
            can; or positive numbers, a tensor or a tree that broadcasts against ``z``: the problem is solved for
            ``z / x_scale`` (:mod:`implicitkit.problem.scaling`).  The derivative does not depend on it.
        manifold: what ``z`` lies on, if it is no vector: ``ik.manifold.SO3()``, or manifolds in a tree
            (:mod:`implicitkit.manifold`); ``jac_sparsity`` and ``x_scale`` are then of the tangent vectors.
        has_aux: the function returns ``(value, aux)``; ``solution.aux`` is ``aux`` at the solution, differentiable.

    Raises:
        TypeError: ``residuals`` is not callable.
    """

    residuals: Callable[..., Any]
    bounds: Any = None
    loss: Any = "linear"
    f_scale: Any = 1.0
    x_scale: Any = field(default="auto", kw_only=True)
    manifold: Any = field(default=None, kw_only=True)
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    has_aux: bool = field(default=False, kw_only=True)
    kind: ClassVar[Kind] = LEAST_SQUARES

    def __post_init__(self) -> None:
        require_callable(self, self.residuals, "residuals")
        self._what_is_said()
        object.__setattr__(self, "bounds", as_bounds(self.bounds))
        if callable(self.loss):
            check_options(self, loss=function("loss(squares)"))
        else:
            check_options(self, loss=one_of(*LOSSES))
        check_options(self, f_scale=each(positive()))
        check_manifold(self, "bounds")
        if isinstance(self.x_scale, str):
            check_options(self, x_scale=one_of("auto", "jac"))
        elif self.manifold is None:
            check_scales(self.x_scale)

    @property
    def function(self) -> Callable[..., Any]:
        function = self._value_of(self.residuals)
        return function if self.loss == "linear" else Robust(function, self.loss, self.f_scale)

    @property
    def loss_is_modelled(self) -> bool:
        """Do methods see the curvature of the loss?"""
        return self.loss == "linear" or Robust(self.residuals, self.loss, self.f_scale).is_modelled

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated | None:
        if self.bounds is not None and any(isinstance(bound, (list, tuple)) for bound in self.bounds):
            bounds = tuple(from_numbers(bound, z0) for bound in self.bounds)
            if any(new is not old for new, old in zip(bounds, self.bounds, strict=True)):
                return replace(self, bounds=bounds).restate(z0, args, batch_dims)
        if self.manifold is not None and z0 is not None:
            return on_chart(self, "residuals", z0, args, batch_dims)
        own_units = isinstance(self.x_scale, (str, float)) and self.x_scale in ("auto", "jac", 1.0)
        if not own_units and z0 is not None:
            return self._rescaled(z0, args, batch_dims)
        if self.bounds is None:
            return None
        return self._bounded(z0, args, batch_dims)

    def _bounded(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        """Within bounds: unknowns and residuals in units in which the natural map compares like with like, as those of
        :class:`~implicitkit.Argmin` are."""
        objective = HalfSquaredNorm(self.function, batch_dims)
        auto = isinstance(self.x_scale, str) and self.x_scale == "auto"
        units = units_of_start(objective, z0, args, Layout(z0, batch_dims)) if auto else None
        if units is not None:
            return replace(self, x_scale=units)._rescaled(z0, args, batch_dims)
        program, state = start(objective, (), box(self.bounds, z0), "lstsq", z0, args, batch_dims)
        bounded = BoundedLeastSquares.of(program, self.function, x_scale=self.x_scale, jac_sparsity=self.jac_sparsity)
        cost = cost_of(objective, bounded.prox, z0, args, bounded.layout, both=True)
        if cost is None:
            return Restated(bounded, state, args, lambda s: (s.z, None), batch_dims)
        cost = torch.exp2(2 * (torch.log2(cost) / 2).round())  # whose root is exact
        split = lambda s, c: (s.z, None)  # noqa: E731
        return Restated(replace(bounded, costed=True), state, (cost, *args), split, batch_dims, lead=1)

    def _rescaled(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        """The problem for ``z / x_scale``."""
        Layout(z0, batch_dims)  # refuses what cannot be an unknown
        s = scales(self.x_scale, z0)
        bounds = None if self.bounds is None else tuple(divided(bound, s) for bound in self.bounds)
        scaled = replace(self, residuals=Rescaled(self.residuals), bounds=bounds, x_scale=1.0)
        start = trees.tree_map(torch.div, z0, s)
        return deeper(scaled, start, args, batch_dims, s, lambda y, s: trees.tree_map(torch.mul, y, s))

    def pattern_of(self, what: str) -> Any:
        return self.jac_sparsity if what == "residuals" else "auto"

    def residual(self, z: Any, *args: Any) -> Any:
        def half_squared_norm(z: Any) -> Any:
            return sum(0.5 * real_parts(r).square().sum() for r in trees.tree_flatten(self.function(z, *args))[0])

        return tree_gradient(half_squared_norm, z)

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        r, pullback = autodiff.vjp(kernel, z)
        return pullback(r)[0]

    def flat_residuals(self, kernel: Kernel, z: Tensor) -> Tensor:
        return kernel(z)

    def flat_curvature(self, r: Tensor, share: Tensor) -> Tensor | None:
        return None if self.loss == "linear" else Robust(self.residuals, self.loss, self.f_scale).curvature(r, share)


class HalfSquaredNorm(Around):
    """``(z, *args) -> |r|^2 / 2``, one number a sample."""

    def __init__(self, residuals: Callable[..., Any], batch_dims: int) -> None:
        super().__init__(residuals)
        self.batch_dims = batch_dims

    def __call__(self, z: Any, *args: Any) -> Tensor:
        leaves = [real_parts(leaf) for leaf in trees.tree_flatten(self.function(z, *args))[0]]
        parts = [leaf.square().reshape(*leaf.shape[: self.batch_dims], -1).sum(-1) for leaf in leaves]
        total: Tensor = 0.5 * sum(parts[1:], parts[0])
        return total
