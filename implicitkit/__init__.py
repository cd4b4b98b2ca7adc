"""Layers defined by equations: state what must hold, let any solver find it, get exact derivatives of the solution."""

from implicitkit import autodiff, callbacks, interop, linear, project, prox, relax, testing, trees
from implicitkit.compat import has_forward_level, opaque_to_compile, transforms_active
from implicitkit.composition import Blocks, compose, tie
from implicitkit.diagnostics import Certificate, Stability, certify
from implicitkit.errors import (
    CapabilityError,
    CapturedTensorError,
    ConvergenceError,
    ConvergenceWarning,
    ImpureFunctionWarning,
    UnknownNameError,
)
from implicitkit.layer import implicit
from implicitkit.lifting.reach import modules_held
from implicitkit.linear import LinearSolution, LinearSolver, Operator
from implicitkit.problem import Argmin, FixedPoint, LeastSquares, Problem, Root, SteadyState
from implicitkit.problem.constraints import Equality, Inequality
from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.registry.table import (
    get_solver,
    linear_solvers,
    plugins,
    problems,
    register_linear_solver,
    register_problem,
    register_rule,
    register_solver,
    rules,
    solvers,
)
from implicitkit.rule import Implicit, Neumann, OneStep, Phantom, Rule, Unroll
from implicitkit.solution import Solution, Status
from implicitkit.solver import LBFGS, Anderson, BlackBox, Found, GradientDescent, Method, Newton, Picard
from implicitkit.solver.auto import Polyalgorithm, Stage
from implicitkit.solver.base import Strategy
from implicitkit.solver.constrained.augmented_lagrangian import AugmentedLagrangian
from implicitkit.solver.constrained.block_coordinate_descent import BlockCoordinateDescent
from implicitkit.solver.constrained.mirror_descent import MirrorDescent
from implicitkit.solver.constrained.proximal_gradient import ProximalGradient
from implicitkit.solver.constrained.sqp import SQP
from implicitkit.solver.fixed_point.aitken import Aitken, Steffensen
from implicitkit.solver.fixed_point.continuation import Continuation
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.fixed_point.relay import Relay
from implicitkit.solver.least_squares.gauss_newton import GaussNewton
from implicitkit.solver.least_squares.levenberg_marquardt import LevenbergMarquardt
from implicitkit.solver.minimise.bfgs import BFGS
from implicitkit.solver.minimise.newton_cg import NewtonCG
from implicitkit.solver.minimise.torch_optim import TorchOptim
from implicitkit.solver.qp.builtin import AutoQP, InteriorPoint
from implicitkit.solver.qp.plain import solve_qp
from implicitkit.solver.root.bisection import Bisection
from implicitkit.solver.root.broyden import Broyden
from implicitkit.solver.root.chandrupatla import Chandrupatla
from implicitkit.solver.root.chord import Chord
from implicitkit.solver.root.df_sane import DFSANE
from implicitkit.solver.root.newton_krylov import NewtonKrylov
from implicitkit.solver.root.pseudo_transient import PseudoTransient
from implicitkit.solver.root.trust_region import TrustRegion
from implicitkit.solving import argmin, fixed_point, least_squares, root, solve, steady_state

__version__ = "0.1.0"

__all__ = [
    "BFGS",
    "DFSANE",
    "LBFGS",
    "SQP",
    "Aitken",
    "Anderson",
    "Argmin",
    "AugmentedLagrangian",
    "AutoQP",
    "Bisection",
    "BlackBox",
    "BlockCoordinateDescent",
    "Blocks",
    "Broyden",
    "CapabilityError",
    "CapturedTensorError",
    "Certificate",
    "Chandrupatla",
    "Chord",
    "Continuation",
    "ConvergenceError",
    "ConvergenceWarning",
    "Equality",
    "FixedPoint",
    "Found",
    "GaussNewton",
    "GradientDescent",
    "Impatient",
    "Implicit",
    "ImpureFunctionWarning",
    "Inequality",
    "InteriorPoint",
    "LeastSquares",
    "LevenbergMarquardt",
    "LinearSolution",
    "LinearSolver",
    "Method",
    "MirrorDescent",
    "Neumann",
    "Newton",
    "NewtonCG",
    "NewtonKrylov",
    "OneStep",
    "Operator",
    "Phantom",
    "Picard",
    "Polyalgorithm",
    "Problem",
    "ProximalGradient",
    "PseudoTransient",
    "QuadraticProgram",
    "Relay",
    "Root",
    "Rule",
    "Solution",
    "Stability",
    "Stage",
    "Status",
    "SteadyState",
    "Steffensen",
    "Strategy",
    "TorchOptim",
    "TrustRegion",
    "UnknownNameError",
    "Unroll",
    "argmin",
    "autodiff",
    "callbacks",
    "certify",
    "compose",
    "fixed_point",
    "get_solver",
    "has_forward_level",
    "implicit",
    "interop",
    "least_squares",
    "linear",
    "linear_solvers",
    "modules_held",
    "opaque_to_compile",
    "plugins",
    "problems",
    "project",
    "prox",
    "register_linear_solver",
    "register_problem",
    "register_rule",
    "register_solver",
    "relax",
    "root",
    "rules",
    "solve",
    "solve_qp",
    "solvers",
    "steady_state",
    "testing",
    "tie",
    "transforms_active",
    "trees",
]
