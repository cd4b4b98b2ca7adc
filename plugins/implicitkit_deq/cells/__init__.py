"""Cells: the maps whose equilibrium a :class:`~implicitkit_deq.DEQ` is.  One file a cell, all of one small protocol."""

from implicitkit_deq.cells.base import Cell
from implicitkit_deq.cells.mlp import MLP

__all__ = ["MLP", "Cell"]
