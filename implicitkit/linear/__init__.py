"""How is ``A u = b`` solved?  One file per method; each registers itself under its name."""

from __future__ import annotations

from implicitkit.foundation.estimate import InverseEstimate
from implicitkit.foundation.operators import BlockStructure, Operator
from implicitkit.linear.auto import Auto
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.bicgstab import BiCGStab
from implicitkit.linear.blocks import BlockSubstitution
from implicitkit.linear.broyden import BroydenLinear
from implicitkit.linear.cg import CG
from implicitkit.linear.cholmod import Cholmod
from implicitkit.linear.dense import Factor, cholesky_batched, factor_batched, lstsq_batched, solve_batched
from implicitkit.linear.gmres import GMRES
from implicitkit.linear.lsmr import LSMR
from implicitkit.linear.lu import LU
from implicitkit.linear.neumann import DampedSeries, NeumannSeries, Richardson
from implicitkit.linear.pardiso import Pardiso
from implicitkit.linear.sparse import SparseLU
from implicitkit.linear.stale import Stale
from implicitkit.linear.traces import Estimate, log_determinant, trace

__all__ = [
    "CG",
    "GMRES",
    "LSMR",
    "LU",
    "Auto",
    "BiCGStab",
    "BlockStructure",
    "BlockSubstitution",
    "BroydenLinear",
    "Cholmod",
    "DampedSeries",
    "Estimate",
    "Factor",
    "InverseEstimate",
    "LinearSolution",
    "LinearSolver",
    "NeumannSeries",
    "Operator",
    "Pardiso",
    "Richardson",
    "SparseLU",
    "Stale",
    "cholesky_batched",
    "factor_batched",
    "log_determinant",
    "lstsq_batched",
    "solve_batched",
    "trace",
]
