"""What the files of this folder share: how large they run, and how they state what must hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """``quick``: small versions. seed: of all random numbers. output: the folder of figures."""

    quick: bool
    seed: int
    output: Path


def claim(holds: bool, statement: str) -> None:
    """Print the statement, which must hold.

    Raises:
        AssertionError: it does not.
    """
    if not holds:
        raise AssertionError(f"this should hold, and does not: {statement}")
    print(f"  holds: {statement}")
