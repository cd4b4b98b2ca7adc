"""What a mutant is, and all of them."""

from __future__ import annotations

from . import core, linear, methods, plugins, rooms, searches, sets, verdicts
from .row import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *core.MUTANTS,
    *linear.MUTANTS,
    *methods.MUTANTS,
    *sets.MUTANTS,
    *searches.MUTANTS,
    *plugins.MUTANTS,
    *verdicts.MUTANTS,
    *rooms.MUTANTS,
)
