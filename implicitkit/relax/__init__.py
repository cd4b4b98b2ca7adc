"""Smooth stand-ins for discrete operations: sorting, ranking, the choice of a best one, and losses that train them.

ik.relax.soft_sort(v, 0.1)                       # sorted values, each a differentiable function of all
ik.relax.soft_rank(v, 0.1)
ik.relax.FenchelYoung(ik.project.simplex())(scores, labels)
ik.relax.Perturbed(cheapest_path, sigma=0.5)(-costs)
"""

from implicitkit.relax.fenchel_young import FenchelYoung
from implicitkit.relax.perturbed import Perturbed
from implicitkit.relax.sorting import soft_rank, soft_sort

__all__ = ["FenchelYoung", "Perturbed", "soft_rank", "soft_sort"]
