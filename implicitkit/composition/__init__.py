"""Many fixed points as one: any graph of maps, solved and differentiated by its structure."""

from implicitkit.composition.blocks import Blocks
from implicitkit.composition.joint import Joint, chain, compose
from implicitkit.composition.report import BlockReport
from implicitkit.composition.tied import Tied, tie
from implicitkit.diagnostics.composition import Analysis, Cost, analyse

__all__ = ["Analysis", "BlockReport", "Blocks", "Cost", "Joint", "Tied", "analyse", "chain", "compose", "tie"]
