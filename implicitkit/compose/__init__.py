"""Many fixed points as one: any graph of maps, solved and differentiated by its structure."""

from implicitkit.compose.analysis import Analysis, Cost, analyse
from implicitkit.compose.blocks import Blocks
from implicitkit.compose.joint import Joint, chain, compose
from implicitkit.compose.report import BlockReport
from implicitkit.compose.tie import Tied, tie

__all__ = ["Analysis", "BlockReport", "Blocks", "Cost", "Joint", "Tied", "analyse", "chain", "compose", "tie"]
