"""Projections onto cones, batched, in plain torch operations, differentiable off their kinks; one file a cone."""

from implicitkit_cvxpy.cones.automorphism import Automorphism
from implicitkit_cvxpy.cones.exponential import project_exponential
from implicitkit_cvxpy.cones.form import Cones
from implicitkit_cvxpy.cones.power import project_power
from implicitkit_cvxpy.cones.product import DualCone
from implicitkit_cvxpy.cones.second_order import project_second_order
from implicitkit_cvxpy.cones.semidefinite import project_semidefinite, svec, unsvec

__all__ = [
    "Automorphism",
    "Cones",
    "DualCone",
    "project_exponential",
    "project_power",
    "project_second_order",
    "project_semidefinite",
    "svec",
    "unsvec",
]
