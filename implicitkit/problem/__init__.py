"""What must hold at the solution: one file a problem kind."""

from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.constrained import Program
from implicitkit.problem.constraints import Constraint, Equality, Inequality
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.quadratic_program import QPConditions, QuadraticProgram
from implicitkit.problem.root import Root
from implicitkit.problem.steady_state import SteadyState
from implicitkit.registry.table import register_problem

register_problem(Root, name="root", rule="implicit", linear_solver="gmres")
register_problem(FixedPoint, name="fixed_point", rule="implicit", linear_solver="gmres")
register_problem(Argmin, name="argmin", rule="implicit", linear_solver="cg")
register_problem(LeastSquares, name="least_squares", rule="implicit", linear_solver="cg")
register_problem(SteadyState, name="steady_state", rule="implicit", linear_solver="gmres")
register_problem(Program, name="constrained", rule="implicit", linear_solver="kkt")
register_problem(QuadraticProgram, name="quadratic_program", rule="implicit", linear_solver="kkt")

__all__ = [
    "Argmin",
    "Constraint",
    "Equality",
    "FixedPoint",
    "Inequality",
    "LeastSquares",
    "Problem",
    "Program",
    "QPConditions",
    "QuadraticProgram",
    "Root",
    "SteadyState",
]
