"""What must hold at the solution: one file a problem kind."""

from implicitkit.problems.argmin import Argmin
from implicitkit.problems.base import Problem
from implicitkit.problems.constraints import Constraint, Equality, Inequality
from implicitkit.problems.fixed_point import FixedPoint
from implicitkit.problems.least_squares import LeastSquares
from implicitkit.problems.program import Program
from implicitkit.problems.quadratic_program import QPConditions, QuadraticProgram
from implicitkit.problems.root import Root
from implicitkit.problems.steady_state import SteadyState
from implicitkit.registry import register_problem

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
