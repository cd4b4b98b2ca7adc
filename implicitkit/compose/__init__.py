"""Many fixed points as one: any graph of maps, solved and differentiated by its structure."""

from implicitkit.compose.joint import Joint, chain, compose

__all__ = ["Joint", "chain", "compose"]
