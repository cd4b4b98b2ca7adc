"""``dz/dt = rhs(z, *args) = 0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from implicitkit.problem.base import Problem, require_callable
from implicitkit.problem.kind import STEADY_STATE, Kind

__all__ = ["SteadyState"]


@dataclass(frozen=True, repr=False)
class SteadyState(Problem):
    r"""Find a state at rest of ``dz/dt = g(z, \theta)``: ``g(z, \theta) = 0``.

    The sign is part of the problem: solvers that follow the flow in (pseudo-)time need ``+g``.  Convergence:
    ``|g(z)| <= atol + rtol |g(z0)|``, in units of ``z`` per unit of time.

    Args:
        rhs: ``g(z, *args)``, a function or ``nn.Module`` returning the structure, shapes and dtypes of ``z``.

    Raises:
        TypeError: ``rhs`` is not callable.
    """

    rhs: Callable[..., Any]
    kind: ClassVar[Kind] = STEADY_STATE

    def __post_init__(self) -> None:
        require_callable(self, self.rhs, "rhs")

    @property
    def function(self) -> Callable[..., Any]:
        return self.rhs

    def residual(self, z: Any, *args: Any) -> Any:
        return self.rhs(z, *args)
