"""``z`` minimises half the squared norm of ``residuals(z, *args)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from implicitkit import autodiff
from implicitkit.problem.argmin import tree_gradient
from implicitkit.problem.base import Kernel, Problem, half_squared_norm, require_callable
from implicitkit.problem.kind import LEAST_SQUARES, Kind

__all__ = ["LeastSquares"]


@dataclass(frozen=True, repr=False)
class LeastSquares(Problem):
    r"""Find a minimiser of ``|r(z, \theta)|^2 / 2``.

    The residual is the full gradient ``F = R^T r`` with ``R = dr/dz``, and its Jacobian the full Hessian
    ``R^T R + sum_i r_i d^2 r_i/dz^2``: the Gauss-Newton shortcut ``R^T R`` may serve a solver, never the derivative
    (it is wrong wherever the residual at the solution is not zero).

    Args:
        residuals: ``r(z, *args)``, a function or ``nn.Module`` returning any pytree of real tensors; with
            ``batch_dims``, each leaf has the batch's shape in front.
        jac_sparsity: the pattern of the Jacobian of the residuals, ``(m, n)``, for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.

    Raises:
        TypeError: ``residuals`` is not callable.
    """

    residuals: Callable[..., Any]
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    kind: ClassVar[Kind] = LEAST_SQUARES

    def __post_init__(self) -> None:
        require_callable(self, self.residuals, "residuals")

    @property
    def function(self) -> Callable[..., Any]:
        return self.residuals

    def pattern_of(self, what: str) -> Any:
        return self.jac_sparsity if what == "residuals" else "auto"

    def residual(self, z: Any, *args: Any) -> Any:
        return tree_gradient(lambda t: half_squared_norm(self.residuals(t, *args)), z)

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        r, pullback = autodiff.vjp(kernel, z)
        return pullback(r)[0]

    def flat_residuals(self, kernel: Kernel, z: Tensor) -> Tensor:
        return kernel(z)
