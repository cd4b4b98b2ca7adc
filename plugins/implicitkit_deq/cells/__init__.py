"""Cells: the maps whose equilibrium a :class:`~implicitkit_deq.DEQ` is.  One file a cell, all of one small protocol."""

from implicitkit_deq.cells.base import Cell
from implicitkit_deq.cells.convolution import ConvBlock
from implicitkit_deq.cells.graph import Graph, normalised_adjacency
from implicitkit_deq.cells.mlp import MLP
from implicitkit_deq.cells.monotone import Monotone
from implicitkit_deq.cells.multiscale import Multiscale
from implicitkit_deq.cells.stacked import Composed, Stacked, Wrapped
from implicitkit_deq.cells.tied import Tied
from implicitkit_deq.cells.transformer import Transformer
from implicitkit_deq.cells.trellis import TrellisNet

__all__ = [
    "MLP",
    "Cell",
    "Composed",
    "ConvBlock",
    "Graph",
    "Monotone",
    "Multiscale",
    "Stacked",
    "Tied",
    "Transformer",
    "TrellisNet",
    "Wrapped",
    "normalised_adjacency",
]
