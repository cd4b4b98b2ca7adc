"""``map(z, *args) = z``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.problem.base import Kernel, Problem, require_callable
from implicitkit.problem.kind import FIXED_POINT, Kind
from implicitkit.registry.operations import operation


@dataclass(frozen=True, repr=False)
class FixedPoint(Problem):
    r"""Find ``z`` with ``f(z, \theta) = z``; the residual is ``F = f(z, \theta) - z`` and has the units of ``z``.

    Its Jacobian is ``J - I`` with ``J = df/dz``, and the derivative ``dz/d\theta = (I - J)^{-1} df/d\theta``
    (Bai, Kolter & Koltun 2019, theorem 1).  Convergence: ``|f(z) - z| <= atol + rtol |z|``.  Sums that the map conserves (a
    Markov chain's probability) stay what they are at the start ``z0``, and derivatives keep them, as of a ``SteadyState``.

    Args:
        map: ``f(z, *args)``, a function or ``nn.Module`` returning the structure, shapes and dtypes of ``z``.
        jac_sparsity: the pattern of the map's Jacobian, for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.
        symmetric, positive_definite: what you know of that Jacobian; checked at the first derivative.
        has_aux: the function returns ``(value, aux)``; ``solution.aux`` is ``aux`` at the solution, differentiable.

    Raises:
        TypeError: ``map`` is not callable.
    """

    map: Callable[..., Any]
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    symmetric: bool = field(default=False, kw_only=True)
    positive_definite: bool = field(default=False, kw_only=True)
    has_aux: bool = field(default=False, kw_only=True)
    kind: ClassVar[Kind] = FIXED_POINT
    is_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_callable(self, self.map, "map")
        self._state_structure()

    @property
    def function(self) -> Callable[..., Any]:
        return self._value_of(self.map)

    def __rshift__(self, other: FixedPoint) -> FixedPoint:
        """``self >> other``: the two as one fixed point, the second reading the first's state; see ``ik.compose``."""
        return operation("chain")(self, other)

    def residual(self, z: Any, *args: Any) -> Any:
        return trees.tree_map(lambda new, old: new - old, self.function(z, *args), z)

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        return kernel(z) - z
