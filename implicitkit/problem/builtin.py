"""The built-in problems, registered with the rule and the linear solver that fit each."""

from implicitkit.problem.argmin import Argmin
from implicitkit.problem.catalogue import register_problem
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.problem.root import Root
from implicitkit.problem.steady_state import SteadyState
from implicitkit.problem.trajectory.initial_value import InitialValue

register_problem(Root, name="root", rule="implicit", linear_solver="gmres")
register_problem(FixedPoint, name="fixed_point", rule="implicit", linear_solver="gmres")
register_problem(Argmin, name="argmin", rule="implicit", linear_solver="cg")
register_problem(LeastSquares, name="least_squares", rule="implicit", linear_solver="cg")
register_problem(SteadyState, name="steady_state", rule="implicit", linear_solver="gmres")
register_problem(ConstrainedMinimisation, name="constrained", rule="implicit", linear_solver="kkt")
register_problem(QuadraticProgram, name="quadratic_program", rule="implicit", linear_solver="kkt")
register_problem(InitialValue, name="initial_value", rule="implicit", linear_solver="auto")
