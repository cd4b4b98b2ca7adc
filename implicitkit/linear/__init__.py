"""How is ``A u = b`` solved?  One file per method; each registers itself under its name."""

from __future__ import annotations

from implicitkit.foundation.inverse_estimate import InverseEstimate
from implicitkit.foundation.operators import BlockStructure, Operator
from implicitkit.linear.auto import Auto
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.blocks import BlockSubstitution
from implicitkit.linear.factors.dense import Factor, cholesky_batched, factor_batched, lstsq_batched, solve_batched
from implicitkit.linear.factors.external import Cholmod, Pardiso
from implicitkit.linear.factors.lu import LU
from implicitkit.linear.factors.sparse import SparseLU
from implicitkit.linear.factors.stale import Stale
from implicitkit.linear.iterative.bicgstab import BiCGStab
from implicitkit.linear.iterative.broyden import BroydenLinear
from implicitkit.linear.iterative.cg import CG
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.linear.iterative.lsmr import LSMR
from implicitkit.linear.iterative.neumann import DampedSeries, NeumannSeries, Richardson
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
