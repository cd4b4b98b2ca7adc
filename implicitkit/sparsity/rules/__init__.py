"""How each operation passes on what its arguments depend on: one file a family."""

from implicitkit.sparsity.rules import (
    contractions,
    losses,
    mixing,
    moves,
    pointwise,
    products,
    resampling,
    scatter,
    windows,
)
from implicitkit.sparsity.tracing import Rule

__all__ = ["RULES"]

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **moves.RULES,
    **mixing.RULES,
    **scatter.RULES,
    **products.RULES,
    **contractions.RULES,
    **windows.RULES,
    **resampling.RULES,
    **losses.RULES,
}
