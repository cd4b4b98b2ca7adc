"""Deep equilibrium models on implicitkit: layers whose output is the fixed point of a cell.

    from implicitkit_deq import DEQ, cells

    layer = DEQ(cells.MLP(in_features=32, features=64))
    z = layer(x)                # (batch, 64), differentiable

The folder ``cells`` has the maps, ``starting`` where a search begins, ``held`` what stays the same during one, ``causal``
what sequences need; the other modules are tools around the layer, one each.
"""

from implicitkit_deq import cells
from implicitkit_deq.causal.causality import CausalityWarning, InTurn, PerPosition, future_leak, per_position
from implicitkit_deq.cells import Cell
from implicitkit_deq.checkpoints import load_torchdeq
from implicitkit_deq.correction import fixed_point_correction
from implicitkit_deq.initialise import scale_to_radius
from implicitkit_deq.inputs import IgnoredInputWarning
from implicitkit_deq.jacobian import condition_number, jacobian_penalty, spectral_radius
from implicitkit_deq.joined import merge, tie_weights
from implicitkit_deq.layer import DEQ
from implicitkit_deq.monitor import Monitor, StabilityWarning, TensorBoard
from implicitkit_deq.normalise import WeightBound, bound_weights, free_weights, weight_norm
from implicitkit_deq.pretraining import Pretraining
from implicitkit_deq.settings import Settings
from implicitkit_deq.shine import Shine
from implicitkit_deq.unsolved_samples import Forgive, ForgivenWarning

__all__ = [
    "DEQ",
    "CausalityWarning",
    "Cell",
    "Forgive",
    "ForgivenWarning",
    "IgnoredInputWarning",
    "InTurn",
    "Monitor",
    "PerPosition",
    "Pretraining",
    "Settings",
    "Shine",
    "StabilityWarning",
    "TensorBoard",
    "WeightBound",
    "bound_weights",
    "cells",
    "condition_number",
    "fixed_point_correction",
    "free_weights",
    "future_leak",
    "jacobian_penalty",
    "load_torchdeq",
    "merge",
    "per_position",
    "scale_to_radius",
    "spectral_radius",
    "tie_weights",
    "weight_norm",
]
