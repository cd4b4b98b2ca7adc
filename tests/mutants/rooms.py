"""Mutants of rooms of their own: threads, fits, relaxations, options, patterns of Jacobians, manifolds, trajectories."""

from __future__ import annotations

from .row import mutants

THREADS = "tests/core/test_threads.py"

MUTANTS = [
    *mutants(
        "implicitkit/lifting/overlay.py",
        THREADS,
        ("if not everywhere and type", "if False and type"),
        ("if key not in self._replaced:\n            self._under[key] = value", "if False:\n            pass"),
        (
            "return super().get(key, default) if self._mine() else self._under.get(key, default)",
            "return super().get(key, default)",
        ),
        ("attributes[kind] = overlay.end()", "attributes[kind] = overlay"),
        ("        return dict, (self._view(),)", "        return dict, (dict(super().items()),)"),
    ),
    *mutants(
        "implicitkit/lifting/lifted.py",
        THREADS,
        ("len(self.slots), self.compiled)", "len(self.slots), True)"),
        ("len(self.slots), self.compiled))\n            if", "len(self.slots), False))\n            if"),
    ),
    *mutants(
        "plugins/implicitkit_deq/hoist.py",
        "tests/plugins/deq/test_deq_threads.py",
        ("everywhere=any(compiled for *_, compiled in where)", "everywhere=True"),
    ),
]
