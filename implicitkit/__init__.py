"""Layers defined by equations: state what must hold, let any solver find it, get exact derivatives of the solution."""

from implicitkit import autodiff, callbacks, interop, linear, project, prox, testing, trees
from implicitkit.compat import has_forward_level, opaque_to_compile, transforms_active
from implicitkit.compose import Blocks, compose, tie
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
from implicitkit.lifting import modules_held
from implicitkit.linear import LinearSolution, LinearSolver, Operator
from implicitkit.problems import Argmin, FixedPoint, LeastSquares, Problem, Root, SteadyState
from implicitkit.problems.constraints import Equality, Inequality
from implicitkit.problems.quadratic_program import QuadraticProgram
from implicitkit.registry import (
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
from implicitkit.rules import Implicit, Neumann, OneStep, Phantom, Rule, Unroll
from implicitkit.solution import Solution, Status
from implicitkit.solve import argmin, fixed_point, least_squares, root, solve, steady_state
from implicitkit.solvers import LBFGS, Anderson, BlackBox, Found, GradientDescent, Method, Newton, Picard
from implicitkit.solvers.aitken import Aitken, Steffensen
from implicitkit.solvers.auto import Polyalgorithm, Stage
from implicitkit.solvers.base import Strategy
from implicitkit.solvers.bfgs import BFGS
from implicitkit.solvers.bisection import Bisection
from implicitkit.solvers.broyden import Broyden
from implicitkit.solvers.chandrupatla import Chandrupatla
from implicitkit.solvers.chord import Chord
from implicitkit.solvers.constrained.augmented_lagrangian import AugmentedLagrangian
from implicitkit.solvers.constrained.block_coordinate_descent import BlockCoordinateDescent
from implicitkit.solvers.constrained.mirror_descent import MirrorDescent
from implicitkit.solvers.constrained.proximal_gradient import ProximalGradient
from implicitkit.solvers.constrained.sqp import SQP
from implicitkit.solvers.df_sane import DFSANE
from implicitkit.solvers.gauss_newton import GaussNewton
from implicitkit.solvers.levenberg_marquardt import LevenbergMarquardt
from implicitkit.solvers.newton_cg import NewtonCG
from implicitkit.solvers.newton_krylov import NewtonKrylov
from implicitkit.solvers.pseudo_transient import PseudoTransient
from implicitkit.solvers.qp.builtin import AutoQP, InteriorPoint
from implicitkit.solvers.qp.interior_point import solve_qp
from implicitkit.solvers.torch_optim import TorchOptim
from implicitkit.solvers.trust_region import TrustRegion

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
    "ConvergenceError",
    "ConvergenceWarning",
    "Equality",
    "FixedPoint",
    "Found",
    "GaussNewton",
    "GradientDescent",
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
