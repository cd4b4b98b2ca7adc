"""A word-level language model, 10,000 words: equilibria, the same cells unrolled tied and untied, and an LSTM.

    python examples/deq_language.py --quick
    python examples/deq_language.py

The language (``deq_words/grammar.py``) is written by a grammar with agreement, nesting and Zipf's frequencies, in
which every word tells the state of the writer: the best possible perplexity, 30.25, is known in closed form (29.9 on
the test text; 59.0 is the best prediction from the last word alone, 263.3 from none).  All models have the same
embedding (32 numbers a word) and adaptive softmax, and see the same batches.  Each has the rate, of 0.012, 0.024 and
0.048, and the first sum of the transformer's cell, that are best on a validation text after a quarter of the steps
(the rate of TrellisNets, LSTM and narrow layers is the largest tried).  Equilibria are ``DEQ`` layers of free weights
with their own settings, but that the transformer's solver is Broyden's method, as in the source, and that in
evaluation one window in twenty may be left unsolved (they are counted).  "Agreement": of the verbs that clauses part
from their subjects, those whose right number is thought likelier; 60 % are singular.  "Equal seconds" are those of
the tied layers; means and standard deviations of three seeds, there two.  On one core, 435 CPU seconds in all:

    model                         inside   saved  perplexity   agreement %  steps, CPU s  | equal seconds  agreement %  steps
    DEQ-Transformer               13,728   1.00   80.6 ± 3.2   59.8 ± 0.8   300, 18       | 121.5 ± 3.7    59.9 ± 0.0   83
    Transformer, 8 tied layers    13,728   5.74   84.1 ± 1.9   59.2 ± 1.1   300, 5        | 85.2 ± 0.6     58.9 ± 1.3   300
    Transformer, 8 untied layers  109,824  5.76   78.5 ± 1.4   60.3 ± 3.6   300, 6        | 81.9 ± 0.5     58.5 ± 0.6   255
    Transformer, untied, narrow   14,224   1.34   83.2 ± 3.8   58.4 ± 1.7   300, 3        | 77.6 ± 3.9     59.7 ± 0.2   526
    DEQ-TrellisNet                16,512   0.67   97.5 ± 8.2   59.6 ± 0.5   300, 32       | 194.0 ± 11.8   59.9 ± 0.0   29
    TrellisNet, 8 tied layers     16,512   2.71   96.9 ± 6.1   59.9 ± 0.1   300, 3        | 100.3 ± 2.5    59.9 ± 0.0   300
    TrellisNet, 8 untied layers   132,096  3.05   89.2 ± 2.4   58.6 ± 2.0   300, 4        | 99.2 ± 2.6     59.9 ± 0.1   226
    TrellisNet, untied, narrow    19,168   0.64   82.0 ± 0.8   56.6 ± 1.1   300, 2        | 75.7 ± 0.2     66.1 ± 1.3   448
    LSTM                          13,644   1.15   74.7 ± 1.5   71.7 ± 0.7   300, 1        | 60.0 ± 0.3     75.5 ± 2.8   651

(inside: parameters without embedding and readout; saved: MiB kept for backward in a step.) In training 99.92 % of the
samples or more were solved (36.6 and 100 evaluations a step, 11.3 and 12.2 products backward, all backward solves),
in evaluation all windows of a text but one at most, to a relative residual of 2e-5.

What of the published ordering holds: at equal steps an equilibrium does as well as the same cell unrolled
(DEQ-Transformer is below the tied layers in each of the three seeds, by 3.5 ± 1.6; TrellisNet within the spread), and
as untied layers of as many parameters for the transformer, with 4 to 6 times less saved.  What does not: it is not
below untied layers of more parameters; the narrow untied TrellisNet and the LSTM are better than both equilibria; and
at equal seconds equilibria lose to everything, for a step costs 4 to 10 times as much.  No model but the LSTM, and in
equal seconds somewhat the narrow TrellisNet, knows of agreement through a clause, nor is any below the best prediction
from the last word alone: 115,000 words are enough for the classes of the words, not for the nesting.

The transformer whose first sum is the state, tied and unrolled, is the Universal Transformer (Dehghani et al. 2019);
it is worse here than the one that adds the input (perplexity 199 against 137 on the validation text, each at its best
rate).

Less overfitting?  Fourteen times through 8,205 words (300 steps at half the rate, one seed), perplexity on them and on
new ones:

    DEQ-Transformer               15.8   669      DEQ-TrellisNet                52.9   563      LSTM   16.0   1024
    Transformer, 8 tied layers    17.6   635      TrellisNet, 8 tied layers     49.1   566
    Transformer, 8 untied layers  12.8   730      TrellisNet, 8 untied layers   33.4   594

Untied layers learn more by heart and less of the language, and the LSTM less still; an equilibrium is as its cell
unrolled with tied weights.  Most of it is in the embedding, which all have.  At the full rate DEQ-Transformer ended
after 38 such steps, Broyden's method having found no equilibrium for 5 of 16 samples.

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", section 4.2, tables 2 and 3 (at 10^2 to 10^3 times the size).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import mean, stdev

import torch
from common import band, figure, options, table
from deq_theorems.claims import claim
from deq_words.grammar import WORDS, entropy_rate
from deq_words.models import Entry, entries
from deq_words.published import TABLES
from deq_words.training import BATCH, POSITIONS, Corpus, Run, saved_bytes, train, windows

RATES = (1.2e-2, 2.4e-2, 4.8e-2)
SMALL = 8192  # words of the text that is learnt by heart


@dataclass
class Result:
    """What came of one model: the search, the runs of equal steps and of equal seconds, those on the small text."""

    entry: Entry
    inside: int
    saved: int
    tried: list[Run]
    steps: list[Run] = field(default_factory=list)
    seconds: list[Run] = field(default_factory=list)
    small: list[Run] = field(default_factory=list)

    @property
    def best(self) -> Run:
        """The setting that is best on the validation text."""
        return min(self.tried, key=lambda run: run.perplexity)


def once(entry: Entry, seed: int, rate: float, skip: str, steps: int, corpus: Corpus, valid: bool = False) -> Run:
    """One training from the start."""
    torch.manual_seed(seed)
    run = train(entry.make(skip), Run(seed, rate, skip, steps), corpus, corpus.valid if valid else corpus.test)
    print(
        f"  {entry.name}, seed {seed}, rate {rate:g}, {skip}, {steps} steps: perplexity {run.perplexity:.1f}, "
        f"agreement {run.agreement:.1%}, {run.seconds:.0f} CPU s {run.failure}",
        flush=True,
    )
    return run


def search(entry: Entry, rates: tuple[float, ...], steps: int, corpus: Corpus, seed: int) -> Result:
    """The best rate, and first sum of the cell, by the perplexity of the validation text after fewer steps."""
    tried = [once(entry, seed, rate, skip, steps, corpus, valid=True) for skip in entry.skips for rate in rates]
    best = min(tried, key=lambda run: run.perplexity)
    model = entry.make(best.skip)
    pieces = windows(corpus.numbers()[corpus.train.words], torch.Generator().manual_seed(seed))
    return Result(entry, model.parameters_inside, saved_bytes(model, *pieces), tried)


def compare(chosen: list[Entry], corpus: Corpus, steps: int, seeds: range, rates: tuple[float, ...]) -> list[Result]:
    """Search, then all runs.  Those of equal seconds take as many steps as fit into the CPU seconds of the tied layers of
    the same family (the LSTM: of the transformer's), in at most two seeds."""
    results = [search(entry, rates, max(20, steps // 4), corpus, 1000) for entry in chosen]
    for result in results:
        result.steps = [once(result.entry, seed, result.best.rate, result.best.skip, steps, corpus) for seed in seeds]
    spent = {r.entry.family: mean(run.seconds for run in r.steps) for r in reversed(results) if " tied" in r.entry.name}
    for result in results if len(seeds) > 1 else ():
        own, best = mean(run.seconds for run in result.steps), result.best
        goal = spent.get(result.entry.family, next(iter(spent.values()), own))
        if math.isfinite(goal / own):
            count = max(20, round(steps * goal / own))
            result.seconds = [once(result.entry, s, best.rate, best.skip, count, corpus) for s in seeds[:2]]
    return results


def learn_by_heart(results: list[Result], small: Corpus, steps: int, seeds: range) -> None:
    """The same steps, at half the rate, on a text so small that it comes again and again."""
    for result in results:
        if "narrow" not in result.entry.name:
            best = result.best
            result.small = [once(result.entry, s, best.rate / 2, best.skip, steps, small) for s in seeds]
    shown = [r for r in results if r.small]
    rows = [
        (r.entry.name, f"{r.inside:,}", spread([x.trained for x in r.small]), spread([x.perplexity for x in r.small]))
        for r in shown
    ]
    headings = ("model", "inside", "perplexity, seen", "perplexity, new")
    print(table(f"The same steps on {len(small.train):,} words only, half the rate", headings, rows))


def spread(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def report(results: list[Result], corpus: Corpus, depth: int, title: str) -> None:
    """The tables."""
    rows = []
    for r in results:
        runs, skip = r.steps, r.best.skip if len(r.entry.skips) > 1 else "-"
        kept = [f"{r.inside:,}", f"{r.saved / 2**20:.2f}", f"{r.best.rate:g}", skip]
        for group in (runs, r.seconds):
            kept += [
                spread([run.perplexity for run in group]),
                spread([100 * run.agreement for run in group]),
                f"{mean(run.steps for run in group):.0f}, {mean(run.seconds for run in group):.0f}" if group else "-",
            ]
        rows.append((r.entry.name, *kept))
    headings = ("model", "inside", "saved MiB", "rate", "sum", *("perplexity", "agreement %", "steps, CPU s") * 2)
    print(table(title + ": equal steps, then equal seconds", headings, rows))
    rows = []
    for r in results:
        if r.entry.is_equilibrium:
            runs = [*r.steps, *r.seconds]
            spent = [mean(run.evaluations for run in runs), mean(run.products for run in runs)]
            shares = [f"{min(v):.2%}" for v in zip(*((x.converged, x.backward_converged) for x in runs), strict=True)]
            rows.append(
                (r.entry.name, *spent, *shares, str(max(x.unsolved for x in runs)), max(x.residual for x in runs))
            )
    headings = ("model", "evaluations", "products", "solved", "backward", "test windows unsolved", "largest residual")
    print(table("Means of a training step, and the worst of all runs", headings, rows))
    ours = {r.entry.name: spread([run.perplexity for run in r.steps]) for r in results}
    ours |= {r.entry.name + " memory": f"{r.saved / 2**20:.2f}" for r in results}
    for name, published in TABLES.items():
        rows = []
        for row in published:
            here = row.here.format(depth)
            text = ["-" if v is None else f"{v:g}" for v in (row.parameters, row.inside, row.perplexity, row.memory)]
            rows.append((row.name, *text, here or "-", ours.get(here, "-"), ours.get(here + " memory", "-")))
        print(
            table(
                name,
                (
                    "published",
                    "M parameters",
                    "inside",
                    "perplexity",
                    "GB",
                    "of its kind here",
                    "perplexity",
                    "saved MiB",
                ),
                rows,
            )
        )


def claims(results: list[Result], corpus: Corpus, depth: int) -> None:
    """What must come out."""
    unigram = corpus.test.limit(0)
    for r in results:
        perplexities = [run.perplexity for run in r.steps]
        claim(
            max(perplexities) < 0.6 * unigram,
            f"{r.entry.name}: {max(perplexities):.1f} at most, words alone {unigram:.1f}",
        )
        claim(
            min(perplexities) > corpus.test.oracle,
            f"{r.entry.name}: no better than the writer, {corpus.test.oracle:.1f}",
        )
        if r.entry.is_equilibrium:
            claim(min(run.converged for run in r.steps) > 0.99, f"{r.entry.name}: solved in training")
    named = {r.entry.name: r for r in results}
    for kind in ("Transformer", "TrellisNet"):
        deq = named[f"DEQ-{kind}"]
        tied = next(r for n, r in named.items() if n.startswith(kind) and " tied" in n)
        ratio = mean(run.perplexity for run in deq.steps) / mean(run.perplexity for run in tied.steps)
        claim(ratio < 1.2, f"{deq.entry.name}: {ratio:.3f} times the perplexity of {tied.entry.name} after equal steps")
        claim(tied.saved > 0.45 * depth * deq.saved, f"and {tied.saved / deq.saved:.1f} times less saved for backward")


def draw(results: list[Result], corpus: Corpus, path: object, title: str) -> None:
    """Training loss by steps and by seconds, bands over seeds, and the floors."""
    with figure(path, 2, title=title, size=(7.4, 3.8)) as axes:  # type: ignore[arg-type]
        for axis, family in zip(axes, ("Transformer", "TrellisNet"), strict=True):
            shown = [r for r in results if r.entry.family in (family, "LSTM")]
            for r, style in zip(shown, ("-", "--", "-.", ":", "-"), strict=False):
                curves = [[loss for _, loss in run.curve] for run in r.steps]
                span = max(1, len(curves[0]) // 30)
                smooth = [
                    [math.exp(min(20.0, mean(c[i : i + span]))) for i in range(0, len(c) - span + 1, span)]
                    for c in curves
                ]
                band(axis, [i * span + span / 2 for i in range(len(smooth[0]))], smooth, r.entry.name, linestyle=style)
            for level, name in (
                (corpus.test.oracle, "best possible"),
                (corpus.test.limit(1), "best by the last word"),
                (corpus.test.limit(0), "words alone"),
            ):
                axis.axhline(level, color="0.6", linewidth=0.8)
                axis.annotate(
                    name,
                    (0.99, level),
                    xycoords=("axes fraction", "data"),
                    ha="right",
                    va="bottom",
                    fontsize=7,
                    color="0.35",
                )
            axis.set(
                xlabel="step", ylabel="training perplexity", yscale="log", title=f"{family} and LSTM", ylim=(25, 1500)
            )
            axis.set_yticks([30, 50, 100, 200, 500, 1000], ["30", "50", "100", "200", "500", "1000"])
            axis.minorticks_off()
            axis.legend(fontsize=6.5)


def main(arguments: list[str] | None = None) -> tuple[list[Result], Corpus]:
    """Search, train, compare; returns the results and the texts."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="models whose names begin so")
    chosen = parser.parse_args(arguments)
    steps, width, depth = (chosen.steps, 32, 8) if not chosen.quick else (120, 32, 4)
    corpus = Corpus.written(*((400_000, 10_000) if not chosen.quick else (60_000, 3_000)), chosen.seed)
    rate, length = entropy_rate()
    test = corpus.test
    print(
        f"{WORDS:,} words; best possible {math.exp(rate):.2f} ({test.oracle:.2f} on the test text), by the last word "
        f"{test.limit(1):.1f}, words alone {test.limit(0):.1f}; {length:.1f} words a sentence, as in"
    )
    print("   ", corpus.train.spelled(0, 40))
    models = [e for e in entries(width, depth) if not chosen.only or e.name.startswith(tuple(chosen.only))]
    start = time.process_time()
    seeds = range(chosen.seed, chosen.seed + (1 if chosen.quick else chosen.seeds))
    results = compare(models, corpus, steps, seeds, RATES[1:] if chosen.quick else RATES)
    title = (
        f"{len(corpus.train):,} words, {steps} steps of {BATCH} x {POSITIONS}, {len(seeds)} seed{'s'[: len(seeds) - 1]}"
    )
    report(results, corpus, depth, title)
    if not chosen.quick:
        learn_by_heart(results, Corpus.written(SMALL, 9_000, chosen.seed), steps, seeds[:1])
    print(f"{time.process_time() - start:.0f} CPU seconds")
    draw(results, corpus, chosen.output / "deq_language.png", title)
    if not chosen.only:
        claims(results, corpus, depth)
    return results, corpus


if __name__ == "__main__":
    main()
