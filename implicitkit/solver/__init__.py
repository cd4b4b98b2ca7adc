"""How a point is found: one file a method."""

from implicitkit.solver.base import BlackBox, Direct, Found, Method, Strategy
from implicitkit.solver.fixed_point.aitken import Aitken, Steffensen
from implicitkit.solver.fixed_point.anderson import Anderson
from implicitkit.solver.fixed_point.picard import Picard
from implicitkit.solver.least_squares.gauss_newton import GaussNewton
from implicitkit.solver.least_squares.levenberg_marquardt import LevenbergMarquardt
from implicitkit.solver.minimise.bfgs import BFGS
from implicitkit.solver.minimise.gradient_descent import GradientDescent
from implicitkit.solver.minimise.lbfgs import LBFGS
from implicitkit.solver.minimise.newton_cg import NewtonCG
from implicitkit.solver.minimise.torch_optim import TorchOptim
from implicitkit.solver.root.bisection import Bisection
from implicitkit.solver.root.broyden import Broyden
from implicitkit.solver.root.chandrupatla import Chandrupatla
from implicitkit.solver.root.chord import Chord
from implicitkit.solver.root.df_sane import DFSANE
from implicitkit.solver.root.newton import Newton
from implicitkit.solver.root.newton_krylov import NewtonKrylov
from implicitkit.solver.root.pseudo_transient import PseudoTransient
from implicitkit.solver.root.trust_region import TrustRegion

__all__ = [
    "BFGS",
    "DFSANE",
    "LBFGS",
    "Aitken",
    "Anderson",
    "Bisection",
    "BlackBox",
    "Broyden",
    "Chandrupatla",
    "Chord",
    "Direct",
    "Found",
    "GaussNewton",
    "GradientDescent",
    "LevenbergMarquardt",
    "Method",
    "Newton",
    "NewtonCG",
    "NewtonKrylov",
    "Picard",
    "PseudoTransient",
    "Steffensen",
    "Strategy",
    "TorchOptim",
    "TrustRegion",
]
