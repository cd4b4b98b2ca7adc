"""How a point is found: one file a method."""

from implicitkit.solvers.aitken import Aitken, Steffensen
from implicitkit.solvers.anderson import Anderson
from implicitkit.solvers.base import BlackBox, Direct, Found, Method, Strategy
from implicitkit.solvers.bfgs import BFGS
from implicitkit.solvers.bisection import Bisection
from implicitkit.solvers.broyden import Broyden
from implicitkit.solvers.chandrupatla import Chandrupatla
from implicitkit.solvers.chord import Chord
from implicitkit.solvers.df_sane import DFSANE
from implicitkit.solvers.gauss_newton import GaussNewton
from implicitkit.solvers.gradient_descent import GradientDescent
from implicitkit.solvers.lbfgs import LBFGS
from implicitkit.solvers.levenberg_marquardt import LevenbergMarquardt
from implicitkit.solvers.newton import Newton
from implicitkit.solvers.newton_cg import NewtonCG
from implicitkit.solvers.newton_krylov import NewtonKrylov
from implicitkit.solvers.picard import Picard
from implicitkit.solvers.pseudo_transient import PseudoTransient
from implicitkit.solvers.torch_optim import TorchOptim
from implicitkit.solvers.trust_region import TrustRegion

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
