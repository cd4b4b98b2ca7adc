"""``z`` minimises ``objective(z, *args)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit import autodiff, trees
from implicitkit.problems.base import Kernel, Problem, require_callable

__all__ = ["Argmin"]


@dataclass(frozen=True, repr=False)
class Argmin(Problem):
    r"""Find a minimiser of ``f(z, \theta)``, a scalar (one scalar per sample with ``batch_dims``).

    The residual is the gradient, ``F = df/dz``; its Jacobian is the Hessian, and
    ``dz/d\theta = -(d^2f/dz^2)^{-1} d^2f/dz d\theta`` where the Hessian is regular.

    Args:
        objective: ``f(z, *args)``, a function or ``nn.Module`` returning a real tensor of the batch's shape.

    Raises:
        TypeError: ``objective`` is not callable.
    """

    objective: Callable[..., Any]
    kind: ClassVar[str] = "argmin"
    output: ClassVar[str] = "scalar"
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_callable(self, self.objective, "objective")

    @property
    def function(self) -> Callable[..., Any]:
        return self.objective

    def residual(self, z: Any, *args: Any) -> Any:
        return tree_gradient(lambda t: self.objective(t, *args).sum(), z)

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        return autodiff.gradient(kernel, z)[1]

    def flat_objective(self, kernel: Kernel, z: Tensor) -> Tensor:
        return kernel(z)


def tree_gradient(function: Callable[[Any], Tensor], z: Any) -> Any:
    """Gradient of a scalar function of a pytree, as a pytree (PyTorch's convention for complex leaves)."""
    leaves, spec = trees.tree_flatten(z)
    out, pullback = autodiff.vjp(lambda *ls: function(trees.tree_unflatten(list(ls), spec)), *leaves)
    return trees.tree_unflatten(list(pullback(out.new_ones(()))), spec)
