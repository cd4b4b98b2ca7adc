"""Any cvxpy problem as a PyTorch layer, differentiable to every order and under every transform.

    from implicitkit_cvxpy import ConvexLayer

    layer = ConvexLayer(problem, parameters=[A, b], variables=[x])
    x_star, = layer(A_tensor, b_tensor)

Importing the package does not import cvxpy; :class:`ConvexLayer` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from implicitkit_cvxpy.kkt import ConeKKT, DegenerateError
from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.report import ConeSolution, ProgramError, StructurallyZeroGradientWarning

if TYPE_CHECKING:
    from implicitkit_cvxpy.layer import ConvexLayer

__all__ = [
    "ConeKKT",
    "ConeProgram",
    "ConeSolution",
    "ConvexLayer",
    "DegenerateError",
    "ProgramError",
    "StructurallyZeroGradientWarning",
]


def __getattr__(name: str) -> Any:
    if name != "ConvexLayer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from implicitkit_cvxpy.layer import ConvexLayer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cvxpy":
            raise
        raise ImportError("ConvexLayer needs cvxpy: pip install 'implicitkit[cvxpy]'") from error
    return ConvexLayer
