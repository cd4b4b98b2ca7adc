"""What a problem is: a frozen object that knows one residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from implicitkit import trees

__all__ = ["Problem"]

Kernel = Callable[[Tensor], Tensor]


class Problem:
    """What must hold at the solution.

    A subclass (a frozen dataclass) either holds the user's function or defines :meth:`residual` itself, over pytrees:

        @dataclass(frozen=True)
        class Balance(ik.Problem):                # register it with ik.register_problem(Balance)
            rate: float
            def residual(self, z, inflow):        # zero at the solution
                return inflow - self.rate * z ** 2

    Class attributes:
        kind: which solvers serve it: ``"root"``, ``"fixed_point"``, ``"argmin"``, ``"least_squares"``,
            ``"steady_state"``.
        output: what the function returns: ``"state"`` (like ``z``), ``"scalar"`` (one number a sample) or ``"vector"``
            (any pytree).
        symmetric: the Jacobian of the residual is symmetric.

    The ``flat_*`` methods see the packed matrix ``z`` of shape ``(batch, n)`` and the ``kernel``, the user's function
    on such matrices with everything else bound; the core uses nothing but these.
    """

    kind: ClassVar[str] = "root"
    output: ClassVar[str] = "state"
    symmetric: ClassVar[bool] = False

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function ``(z, *args)``."""
        return self.residual

    def residual(self, z: Any, *args: Any) -> Any:
        """``F(z, *args)``, of the structure of ``z``; zero at the solution."""
        raise NotImplementedError(f"{type(self).__name__} must define residual(z, *args)")

    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        """``F`` on the packed state: ``(batch, n) -> (batch, n)``."""
        return kernel(z)

    def flat_residuals(self, kernel: Kernel, z: Tensor) -> Tensor:
        """The vector ``r`` of which half the squared norm is minimised, ``(batch, m)``: for equations, ``F``."""
        return self.flat_residual(kernel, z)

    def flat_objective(self, kernel: Kernel, z: Tensor) -> Tensor:
        """What a minimiser minimises, ``(batch,)``: for equations, ``|F|^2 / 2``."""
        return 0.5 * self.flat_residuals(kernel, z).square().sum(1)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"{type(self).__name__}({name})"


def require_callable(problem: Problem, function: Any, role: str) -> None:
    """Raise unless ``function`` can be called."""
    if not callable(function):
        raise TypeError(
            f"{type(problem).__name__} needs a callable {role}(z, *args): a function or an nn.Module; "
            f"got {type(function).__name__}"
        )


def half_squared_norm(residuals: Any) -> Any:
    """``|r|^2 / 2`` summed over every leaf."""
    return sum(
        0.5 * (leaf.real.square() + leaf.imag.square() if leaf.is_complex() else leaf.square()).sum()
        for leaf in trees.tree_flatten(residuals)[0]
    )
