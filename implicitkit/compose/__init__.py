"""Many fixed points as one: any graph of maps, solved and differentiated by its structure."""

from implicitkit.compose.blocks import Blocks
from implicitkit.compose.joint import Joint, chain, compose
from implicitkit.compose.report import BlockReport

__all__ = ["BlockReport", "Blocks", "Joint", "chain", "compose"]
