"""How a point is found: one file a method."""

from implicitkit.solvers.anderson import Anderson
from implicitkit.solvers.base import BlackBox, Direct, Found, Method, Strategy
from implicitkit.solvers.chord import Chord
from implicitkit.solvers.df_sane import DFSANE
from implicitkit.solvers.gradient_descent import GradientDescent
from implicitkit.solvers.lbfgs import LBFGS
from implicitkit.solvers.newton import Newton
from implicitkit.solvers.newton_krylov import NewtonKrylov
from implicitkit.solvers.picard import Picard
from implicitkit.solvers.trust_region import TrustRegion

__all__ = [
    "DFSANE",
    "LBFGS",
    "Anderson",
    "BlackBox",
    "Chord",
    "Direct",
    "Found",
    "GradientDescent",
    "Method",
    "Newton",
    "NewtonKrylov",
    "Picard",
    "Strategy",
    "TrustRegion",
]
