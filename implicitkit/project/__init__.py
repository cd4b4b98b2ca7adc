"""Projections onto sets, batched and differentiable to every order off their kinks: ``ik.project.simplex()(v)``.

Euclidean ones, and in the Kullback-Leibler divergence those that begin with ``kl_``.

Each name is a configured projection: call it on a tensor (or a pytree: leaf by leaf), or give it to ``ik.argmin(...,
project=)``.  Sets of vectors take the last dimension, sets of matrices the last two; all dimensions before are a batch.
A parameter may be a tensor of the batch's shape, and is differentiated like the point.

Source for the formulas: Parikh & Boyd (2014), "Proximal algorithms", chapter 6, unless the class says another.
"""

from implicitkit.project.couplings import Birkhoff as birkhoff
from implicitkit.project.couplings import KLBirkhoff as kl_birkhoff
from implicitkit.project.couplings import KLTransport as kl_transport
from implicitkit.project.couplings import Transport as transport
from implicitkit.project.linear import Affine as affine
from implicitkit.project.linear import Polyhedron as polyhedron
from implicitkit.sets.balls import L1Ball as l1_ball
from implicitkit.sets.balls import L1Sphere as l1_sphere
from implicitkit.sets.balls import L2Ball as l2_ball
from implicitkit.sets.balls import L2Sphere as l2_sphere
from implicitkit.sets.balls import LinfBall as linf_ball
from implicitkit.sets.base import Projection
from implicitkit.sets.box import Box as box
from implicitkit.sets.cones import Monotone as monotone
from implicitkit.sets.cones import Nonnegative as nonnegative
from implicitkit.sets.cones import SecondOrderCone as second_order_cone
from implicitkit.sets.hyperplanes import BoxSection as box_section
from implicitkit.sets.hyperplanes import Halfspace as halfspace
from implicitkit.sets.hyperplanes import Hyperplane as hyperplane
from implicitkit.sets.simplex import KLSimplex as kl_simplex
from implicitkit.sets.simplex import Simplex
from implicitkit.sets.simplex import SparseSimplex as sparse_simplex
from implicitkit.sets.spectral import PSDCone as psd_cone

simplex = Simplex

__all__ = [
    "Projection",
    "Simplex",
    "affine",
    "birkhoff",
    "box",
    "box_section",
    "halfspace",
    "hyperplane",
    "kl_birkhoff",
    "kl_simplex",
    "kl_transport",
    "l1_ball",
    "l1_sphere",
    "l2_ball",
    "l2_sphere",
    "linf_ball",
    "monotone",
    "nonnegative",
    "polyhedron",
    "psd_cone",
    "second_order_cone",
    "simplex",
    "sparse_simplex",
    "transport",
]
