r"""How large weights grow in training on a steep target: equilibria and networks of equal size.

The target is ``g(x) = x_1 / (x_1 + 2^-d)``, of slope ``2^d`` at zero, for ``d = 6 .. 20``: on [0, 1], and on ``[0, 1]^d``,
where the other inputs have no influence on it and a model must learn that.  An equilibrium with weights of at most one fits
it to 0.1 for every ``d`` (``steep``: a construction); a feed-forward network does not, unless its weights grow with ``d``.
Here both are trained from random weights, as equals: the same width, the same points, Adam with as many steps, each at the
rate which is best for it on points held out.  Shown are the largest entry of all trained weights (biases not counted) and
the error beside it, since a model that does not fit need not grow.

What comes out (5 seeds, medians).  Of one input both learn at ``d = 6``.  Then the network's weights grow, from 5.6 to 12 at
``d = 14``, and it fits in part (0.16; the best constant 0.27); the equilibrium's stay at 2 to 3, and it does not fit (0.24),
so that its small norms say that it has not learned.  From ``d = 17`` on neither learns in as many steps.  Of ``d`` inputs,
on the 128 points that they are fitted to, the equilibrium is as near as the network at ``d = 14`` (0.15, 0.16), with smaller
weights (1.2 and 1.8), and less near at 17 and 20; weights of both fall with ``d``, as the other inputs are what they fit by.
Weights of networks that grow with ``d`` beside weights of equilibria that do not, and fit, are not reproduced.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), the figure of
the infinity norm of trained weights against ``d``.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import band, figure, table
from torch import Tensor

from . import stacks
from .claims import Setting, claim
from .stacks import Kind, Trained

WIDTH, POINTS = 10, 128  # neurons; points of each model, half of them evenly spaced in log x
RATES = (3e-3, 1e-2, 3e-2)
KINDS = {"equilibrium": Kind(0, WIDTH), "network": Kind(2, WIDTH)}


def points(d: int, inputs: int) -> tuple[Tensor, Tensor]:
    """``x (1, POINTS, inputs)``, the first spaced evenly and others at random, and ``g(x)``, ``(1, POINTS)``."""
    half = POINTS // 2
    first = torch.cat([torch.logspace(-d - 4, 0, half, base=2.0), torch.linspace(0, 1, POINTS - half)])
    others = torch.rand(POINTS, inputs - 1, generator=torch.Generator().manual_seed(d))
    return torch.cat([first.unsqueeze(1), others], 1).unsqueeze(0), (first / (first + 2.0**-d)).unsqueeze(0)


def trained(setting: Setting, kind: Kind, sizes: tuple[int, ...], many: bool) -> Trained:
    """Models of one kind for every ``d``, of one input or of ``d``."""
    seeds, steps, rates = (2, 150, RATES[1:2]) if setting.quick else (5, 1000, RATES)
    if not many:
        x, y = (torch.cat(t) for t in zip(*(points(d, 1) for d in sizes), strict=True))
        return stacks.at_best_rate(kind, x, y, steps, rates, seeds, setting.seed)
    each = [stacks.at_best_rate(kind, *points(d, d), steps, rates, seeds, setting.seed) for d in sizes]
    parts = {what: torch.cat([getattr(one, what) for one in each]) for what in ("error", "held", "largest", "solved")}
    chosen = tuple(one.rates[0] for one in each)
    return Trained(**parts, rates=chosen, models=each[0].models, seconds=sum(one.seconds for one in each))


def run(setting: Setting) -> dict[str, Any]:
    """Norms and errors by ``d``, seeds as spread."""
    sizes = (6, 14) if setting.quick else (6, 8, 11, 14, 17, 20)
    constant = torch.stack([points(d, 1)[1].std(correction=0) for d in sizes])
    found, rows = dict[tuple[str, str], Trained](), []
    for inputs in ("one input", "d inputs"):
        for name, kind in KINDS.items():
            one = found[inputs, name] = trained(setting, kind, sizes, inputs == "d inputs")
            for k, d in enumerate(sizes):
                norms, errors = one.largest[k].tolist(), one.error[k].sqrt().tolist()
                spread = f"{statistics.median(norms):.2f} ({min(norms):.2f} to {max(norms):.2f})"
                fit = f"{statistics.median(errors):.3f} ({min(errors):.3f} to {max(errors):.3f})"
                solved = f"{float(one.solved[k].min()):.4f}" if kind.layers == 0 else "-"
                rows.append((inputs, name, d, f"{one.rates[k]:g}", spread, fit, float(constant[k]), solved))
    headings = ("inputs", "model", "d", "rate", "largest weight", "root mean square error", "of a constant", "solved")
    seeds = next(iter(found.values())).error.shape[1]
    print(table(f"Trained on x_1 / (x_1 + 2^-d), {seeds} seeds: median, least, largest", headings, rows))
    share = {key: one.error.sqrt().median(1).values / constant for key, one in found.items()}
    norms = {key: one.largest.median(1).values for key, one in found.items()}
    if not setting.quick:
        judged(share, norms, sizes)
    draw(setting, sizes, found)
    return {
        "largest": {key: one.largest for key, one in found.items()},
        "errors": {key: one.error.sqrt() for key, one in found.items()},
        "solved": min(float(one.solved.min()) for one in found.values()),
        "rates": {key: one.rates for key, one in found.items()},
        "share": share,
        "norms": norms,
    }


def judged(share: dict[tuple[str, str], Tensor], norms: dict[tuple[str, str], Tensor], sizes: tuple[int, ...]) -> None:
    """What must hold of the medians."""
    one, many, at = (
        (("one input", "equilibrium"), ("one input", "network")),
        ("d inputs", "equilibrium"),
        sizes.index(14),
    )
    claim(all(float(share[key][0]) < 0.5 for key in one), "one input, d = 6: both at less than half a constant's error")
    claim(
        float(norms[one[1]][at]) > 3 * float(norms[one[0]][at]),
        "at d = 14 the network's weights have grown thrice as large",
    )
    claim(float(share[one[0]][at]) > 0.8, "but the equilibrium, whose weights are small, does not fit there")
    other = ("d inputs", "network")
    claim(float(norms[many][at]) < float(norms[other][at]), "14 inputs: the equilibrium's weights are smaller,")
    claim(float(share[many][at]) < 1.25 * float(share[other][at]), "and its error on its points is no larger")


def draw(setting: Setting, sizes: tuple[int, ...], found: dict[tuple[str, str], Trained]) -> None:
    """Weights and errors against ``d``: medians and quartiles."""
    with figure(setting.output / "deq_theory_trained_norms.png", 2, 2) as axes:
        for (inputs, name), one in found.items():
            above, below = axes[:, 0 if inputs == "one input" else 1]
            style: dict[str, Any] = {
                "marker": "os"[list(KINDS).index(name)],
                "linestyle": "-" if name == "equilibrium" else "--",
            }
            band(above, sizes, one.largest.T.tolist(), name, (0.25, 0.75), **style)
            band(below, sizes, one.error.sqrt().T.tolist(), name, (0.25, 0.75), **style)
        for above, inputs in zip(axes[0], ("one input", "d inputs"), strict=True):
            above.axhline(1.0, color="0.5", linestyle=":", label="constructed equilibrium, error 0.1")
            above.set(
                xlabel="d", ylabel="largest weight, absolute", title=f"Weights after training, {inputs}", ylim=(0, None)
            )
        for below in axes[1]:
            below.set(
                xlabel="d",
                ylabel="root mean square error",
                yscale="log",
                ylim=(0.01, 0.4),
                title="and how well they fit",
            )
        axes[0, 1].legend(loc="lower left")
