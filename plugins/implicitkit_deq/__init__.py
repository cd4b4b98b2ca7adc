"""Deep equilibrium models on implicitkit: layers whose output is the fixed point of a cell.

from implicitkit_deq import DEQ, cells
layer = DEQ(cells.MLP(in_features=32, features=64))
z = layer(x)
"""

from implicitkit_deq import cells
from implicitkit_deq.causality import CausalityWarning, PerPosition, future_leak, per_position
from implicitkit_deq.cells import Cell
from implicitkit_deq.layer import DEQ
from implicitkit_deq.settings import Pretraining, Settings

__all__ = [
    "DEQ",
    "CausalityWarning",
    "Cell",
    "PerPosition",
    "Pretraining",
    "Settings",
    "cells",
    "future_leak",
    "per_position",
]
