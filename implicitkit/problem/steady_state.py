"""``dz/dt = rhs(z, *args) = 0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from implicitkit.problem.base import Problem, require_callable
from implicitkit.problem.kind import STEADY_STATE, Kind


@dataclass(frozen=True, repr=False)
class SteadyState(Problem):
    r"""Find a state at rest of ``dz/dt = g(z, \theta)``: ``g(z, \theta) = 0``.

    The sign is part of the problem: solvers that follow the flow in (pseudo-)time need ``+g``.  Convergence: as of a
    root, ``|g(z)| <= atol`` or every ``|g_i| <= atol + rtol S_i`` by the size ``S_i`` of what cancels in it (:func:`solve`);
    in units of ``z`` per unit of time.  A state at rest that the flow leaves again (an eigenvalue of ``dg/dz`` has a
    positive real part; asked of up to 256 unknowns, of more by :func:`stability`) is a solution, and
    ``solution.message`` says what it is.

    Sums that the flow conserves (atoms in a closed vessel, people in an epidemic without births) stay what they are at the
    start ``z0``.  Derivatives keep them, up to 768 unknowns and of sparse systems of any size, and ``z0`` has the derivative
    that they give it; without such sums the start does not matter, and its derivative is zero.  Their coefficients may
    depend on ``theta`` (volumes); second derivatives are then refused.

    Source: Krantz & Parks (2002), theorem 3.3.1, for the derivative, as of a root.

    Args:
        rhs: ``g(z, *args)``, a function or ``nn.Module`` returning the structure, shapes and dtypes of ``z``.
        jac_sparsity: the pattern of the right-hand side's Jacobian, for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.
        symmetric, positive_definite: what you know of that Jacobian; checked at the first derivative.
        has_aux: the function returns ``(value, aux)``; ``solution.aux`` is ``aux`` at the solution, differentiable.

    Raises:
        TypeError: ``rhs`` is not callable.
    """

    rhs: Callable[..., Any]
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    symmetric: bool = field(default=False, kw_only=True)
    positive_definite: bool = field(default=False, kw_only=True)
    has_aux: bool = field(default=False, kw_only=True)
    kind: ClassVar[Kind] = STEADY_STATE

    def __post_init__(self) -> None:
        require_callable(self, self.rhs, "rhs")
        self._state_structure()

    @property
    def function(self) -> Callable[..., Any]:
        return self._value_of(self.rhs)

    def residual(self, z: Any, *args: Any) -> Any:
        return self.function(z, *args)
