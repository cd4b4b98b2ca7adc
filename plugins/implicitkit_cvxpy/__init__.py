"""Any cvxpy problem as a PyTorch layer, differentiable to every order and under every transform.

from implicitkit_cvxpy import ConvexLayer

layer = ConvexLayer(problem, parameters=[A, b], variables=[x])
x_star, = layer(A_tensor, b_tensor)
"""

from implicitkit_cvxpy.kkt import ConeKKT, DegenerateError
from implicitkit_cvxpy.layer import ConvexLayer
from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.report import ConeSolution, ProgramError, StructurallyZeroGradientWarning

__all__ = [
    "ConeKKT",
    "ConeProgram",
    "ConeSolution",
    "ConvexLayer",
    "DegenerateError",
    "ProgramError",
    "StructurallyZeroGradientWarning",
]
