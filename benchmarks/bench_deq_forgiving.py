"""Does forgiving samples cost loss?  The trainings of bench_deq_training.py with and without, the same seeds in pairs.

    python benchmarks/bench_deq_forgiving.py --cell "LayerNorm(ReLU)" --rate 0.01 --seeds 10       # a few minutes

``Forgive(every=30)``, the default, beside ``every=1``, under which the whole relay is asked in every call, and beside the
DEQ with bounded weights, warm, as in that table.  Losses spread over decades between seeds and hardly within one, so that
what is compared is their ratio, seed by seed: the mean of its decimal logarithm, and the standard error of that mean.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Sequence

import torch
from bench_deq_training import CELLS, Runs, by_pairs, train

from implicitkit_deq import ForgivenWarning


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The mean of ``log10(above / below)`` and its standard error."""
    return "{:+.2f} +- {:.2f}".format(*by_pairs(above, below))


def said(what: str, runs: Runs) -> str:
    """What came of one kind of training."""
    last = runs.last()
    return (
        f"{what}: median loss {statistics.median(last):.1e}, forgiven {100 * (1 - runs.solved):.1f} %, raised "
        f"{int(runs.raised.sum())} of {len(last)}, {runs.evaluations:.0f} evaluations and {runs.milliseconds:.1f} ms a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", default="LayerNorm(ReLU)", choices=list(CELLS))
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--start", default="warm", choices=["warm", "cold"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ForgivenWarning)
    run = lambda warm, **how: train(options.cell, range(options.seeds), options.rate, options.steps, warm=warm, **how)  # noqa: E731
    warm = options.start == "warm"
    print(
        f"{options.cell}, rate {options.rate:g}, {options.start}, {options.seeds} seeds, {options.steps} steps",
        flush=True,
    )
    found = {}
    for what, runs in (
        ("every=30", lambda: run(warm)),
        ("bounded", lambda: run(True, bounded=True)),
        ("every=1", lambda: run(warm, every=1)),
    ):
        found[what] = runs()
        print(said(what, found[what]), flush=True)
    last = {what: runs.last() for what, runs in found.items()}
    print(f"log10 of the ratio every=30 / every=1: {ratio(last['every=30'], last['every=1'])}")
    print(f"log10 of the ratio every=30 / bounded: {ratio(last['every=30'], last['bounded'])}")
    print(f"log10 of the ratio every=1 / bounded: {ratio(last['every=1'], last['bounded'])}")


if __name__ == "__main__":
    main()
