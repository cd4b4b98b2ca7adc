"""``residual(z, *args) = 0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from implicitkit.problem.base import Problem, require_callable
from implicitkit.problem.kind import ROOT, Kind

__all__ = ["Root"]


@dataclass(frozen=True, repr=False)
class Root(Problem):
    r"""Find ``z`` with ``F(z, \theta) = 0``, one equation per unknown.

    Implicit function theorem: where ``dF/dz`` is regular, ``dz/d\theta = -(dF/dz)^{-1} dF/d\theta``
    (Krantz & Parks, *The Implicit Function Theorem*, 2002, theorem 3.3.1).

    Args:
        equation: ``residual(z, *args)``, a function or ``nn.Module`` returning the structure, shapes and dtypes of ``z``.
        jac_sparsity: the pattern of the residual's Jacobian, for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.
        symmetric, positive_definite: what you know of that Jacobian; checked at the first derivative.
        has_aux: the function returns ``(value, aux)``; ``solution.aux`` is ``aux`` at the solution, differentiable.

    Raises:
        TypeError: ``residual`` is not callable.
    """

    equation: Callable[..., Any]
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    symmetric: bool = field(default=False, kw_only=True)
    positive_definite: bool = field(default=False, kw_only=True)
    has_aux: bool = field(default=False, kw_only=True)
    kind: ClassVar[Kind] = ROOT

    def __post_init__(self) -> None:
        require_callable(self, self.equation, "residual")
        self._state_structure()

    @property
    def function(self) -> Callable[..., Any]:
        return self._value_of(self.equation)

    def residual(self, z: Any, *args: Any) -> Any:
        return self.function(z, *args)
