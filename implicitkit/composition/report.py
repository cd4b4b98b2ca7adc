"""What a solve by blocks reports beside the usual figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from implicitkit.solver.base import Outcome

__all__ = ["BlockOutcome", "BlockReport"]


@dataclass(frozen=True)
class BlockReport:
    """Figures of a solve by blocks (``solution.blocks``).

    Attributes:
        evaluations: node -> calls of its map, the one call at the start included that every solve makes.
        depth: the longest chain of calls that had to follow one another.
        residual_norm: node -> ``|f_k - z_k|_2`` of each sample, ``(batch,)``; nodes that were not solved have none.
        unsolved: nodes from which the output cannot be reached: left at their start.
    """

    evaluations: dict[str, int]
    depth: int
    residual_norm: dict[str, Tensor]
    unsolved: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Calls of all maps."""
        return sum(self.evaluations.values())

    def __str__(self) -> str:
        width = max(map(len, self.evaluations))
        lines = [f"{self.total} evaluations, depth {self.depth}"]
        for name, count in self.evaluations.items():
            norm = self.residual_norm.get(name)
            state = "not solved" if norm is None else f"residual {norm.max().item():.2e}"
            lines.append(f"  {name:<{width}}  {count:>6} evaluations  {state}")
        return "\n".join(lines)


@dataclass
class BlockOutcome(Outcome):
    """An outcome with its report; ``unsolved`` as there."""

    report: BlockReport | None = None
    unsolved: frozenset[str] = field(default_factory=frozenset)
