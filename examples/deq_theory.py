"""The theory of deep equilibrium models in numbers, each claim asserted: a runnable proof.

python examples/deq_theory.py --quick
python examples/deq_theory.py --only gradient steep
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from common import options
from deq_theorems.claims import Setting

# file in deq_theorems/ -> what it shows
THEOREMS = {
    "gradient": "Theorem 1: the gradient does not depend on the solver, its error is that of the equilibrium",
    "one_layer": "Theorems 2 and 3: stacked equilibria are one equilibrium, a deep network is one tied layer",
    "regions": "A ReLU equilibrium of width m with 2^m linear regions, found in m steps",
    "sawtooth": "Sawtooths learned from random weights: equilibria and networks, operations and memory beside errors",
    "steep": "A steep target by a flat model: bisection, Newton, Picard, Anderson, Broyden on one model",
    "trained_norms": "How large weights grow in training on a steep target: equilibria and networks of equal size",
    "perturbation": "Lemma 2: how far fixed points move, and what a residual certifies",
    "bias": "The implicit bias of the diagonal linear equilibrium",
    "structures": "What the structure of a cell makes of the bias: residual, gated, full and attention cells",
    "generalisation": "Which interpolant the linear equilibrium takes, and how it generalises",
    "density": "How many features a trained model uses: heatmaps of two equilibria and a network",
    "gotu": "Generalisation on the unseen: where an equilibrium wins and where it loses",
    "conditioning": "Well-posedness and conditioning",
    "traces": "Traces and log-determinants of a Jacobian from its products",
    "audio": "An audio-like signal: equilibrium against networks of equal size and of equal operations",
    "frequency": "How error grows with the frequency of a tone",
}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run all (or the chosen) theorems; returns their numbers by name."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(THEOREMS), help="these only")
    chosen = parser.parse_args(arguments)
    setting = Setting(chosen.quick, chosen.seed, chosen.output)
    results = {}
    for name, what in THEOREMS.items():
        if chosen.only and name not in chosen.only:
            continue
        print(f"\n=== {what}")
        start = time.perf_counter()
        results[name] = importlib.import_module(f"deq_theorems.{name}").run(setting)
        print(f"({name}: {time.perf_counter() - start:.1f} s)")
    return results


if __name__ == "__main__":
    main()
