r"""Sawtooths of ``2^m`` pieces, learned from random weights: equilibria against networks, and what a step of each costs.

The target is the tent map applied ``m`` times, ``T^m`` on [0, 1], which an equilibrium of ``m`` neurons represents exactly
(``regions``: a construction).  Here nothing is constructed: equilibria of ten neurons, with ``W`` free and with ``W`` held
strictly lower triangular as in the construction, and ReLU networks of as many parameters, of as many layers as the
equilibrium has neurons, and wide ones are trained on the same points for as many steps, each at the rate which is best for
it on points held out.  Operations are counted in training (``torch.utils.flop_counter``), solver and backward solve with
them; so are the bytes that are kept for the backward pass, and the evaluations.

What comes out (1000 steps, 6 seeds, medians of the error over the variance): two pieces are learned by all.  Of four the
equilibrium misses 0.57 and the network of its size (2 x 10) 0.29, of eight 0.78 and 0.97, and the spread of either is as
large as the difference.  Networks of 1,021 parameters learn eight in half of their seeds (10 x 10: 0.17, 2 x 30: 0.08), and
nobody learns 32 (0.98 and more).  Held strictly lower triangular, as in the construction, the equilibrium does no better.
A step of it costs 6,400 to 15,700 operations a point (10 to 44 evaluations, and a backward solve of 3,460), one of the
2 x 10 network 700, of the 10 x 10 network 5,500; it keeps 172 bytes a point, they 84 and 404.  From other starts, ``W = 0``
among them, and by gradient descent the equilibrium does worse on four pieces than by Adam from ``|W|_2 = 0.9``.  That an
equilibrium of ten neurons learns what it can represent, and cheaper than networks do, is not reproduced here.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), the figures of
the sawtooths and the table of operations per iteration.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
from common import PAGE, band, figure, table
from torch import Tensor

from . import stacks
from .claims import Setting, claim
from .stacks import Kind, Trained

KINDS = {
    "equilibrium": Kind(0),
    "equilibrium, W lower triangular": Kind(0, lower=True),
    "network, 2 x 10": Kind(2),
    "network, 10 x 10": Kind(10),
    "network, 2 x 30": Kind(2, 30),
    "network, 1 x 100": Kind(1, 100),
}
RATES = (3e-3, 1e-2, 3e-2)


def target(m: int, points: int) -> tuple[Tensor, Tensor]:
    """``x (1, points, 1)``, the middles of as many cells of [0, 1], and ``T^m(x)``, ``(1, points)``."""
    x = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    y = x
    for _ in range(m):
        y = 2 * y - 4 * (y - 0.5).clamp_min(0)
    return x.view(1, points, 1).float(), y.view(1, points).float()


def compare(setting: Setting, powers: tuple[int, ...]) -> tuple[dict[str, Trained], dict[tuple[str, int], Any]]:
    """Every kind on every sawtooth, and what a step of its models costs by kind and ``m``: operations of a point forward and
    backward, bytes of a point, evaluations."""
    points, seeds, steps, rates = (80, 2, 60, RATES[1:2]) if setting.quick else (160, 6, 1000, RATES)
    x, y = (torch.cat(t) for t in zip(*(target(m, points) for m in powers), strict=True))
    found, prices, rows = dict[str, Trained](), dict[tuple[str, int], Any](), []
    for name, kind in KINDS.items():
        one = found[name] = stacks.at_best_rate(kind, x, y, steps, rates, seeds, setting.seed)
        for k, m in enumerate(powers):
            errors = sorted((one.error[k] / y[k].var(correction=0)).tolist())
            cost, evaluations = stacks.price(one.models, k * seeds, x[k : k + 1], y[k : k + 1])
            prices[name, m] = cost.forward / points, cost.backward / points, cost.saved / points, evaluations
            spread = f"{statistics.median(errors):.3f} ({errors[0]:.3f} to {errors[-1]:.3f})"
            solved = f"{float(one.solved[k].min()):.4f}" if kind.layers == 0 else "-"
            told = evaluations if kind.layers == 0 else "-"
            prices_told = [round(v) for v in prices[name, m][:3]]
            size = one.models.size()
            rows.append((name, f"2^{m}", size, f"{one.rates[k]:g}", spread, solved, *prices_told, told, one.seconds))
    headings = (
        "model", "pieces", "parameters", "rate", "mse / variance", "solved", "FLOPs forward", "backward", "bytes saved",
        "evaluations", "seconds",
    )  # fmt: skip
    title = f"Sawtooths from random weights: {steps} steps of Adam, {seeds} seeds (median, least, largest); costs of a point"
    print(table(title, headings, rows))
    return found, prices


def beginnings(setting: Setting) -> dict[str, list[float]]:
    """Errors over variance of equilibria on four pieces, by optimiser and by the norm that ``W`` starts from."""
    points, seeds, steps = (80, 2, 60) if setting.quick else (160, 6, 1000)
    x, y = target(2, points)
    cases = {
        "Adam, |W| = 0.9": (0.9, torch.optim.Adam, RATES),
        "Adam, |W| = 0.3": (0.3, torch.optim.Adam, RATES),
        "Adam, W = 0": (0.0, torch.optim.Adam, RATES),
        "descent, |W| = 0.9": (0.9, torch.optim.SGD, (0.03, 0.1, 0.3)),
        "momentum, |W| = 0.9": (0.9, functools.partial(torch.optim.SGD, momentum=0.9), (0.01, 0.03, 0.1)),
    }
    found, rows = dict[str, list[float]](), []
    for name, (gain, optimiser, rates) in cases.items():
        tried = rates[-2:-1] if setting.quick else rates
        kind = Kind(0, gain=gain)
        one = stacks.at_best_rate(kind, x, y, steps, tried, seeds, setting.seed, optimiser=optimiser)
        errors = found[name] = sorted((one.error[0] / y.var(correction=0)).tolist())
        rows.append(
            (name, f"{one.rates[0]:g}", statistics.median(errors), errors[0], errors[-1], float(one.solved.min()))
        )
    headings = ("optimiser, start", "rate", "median mse / variance", "least", "largest", "solved")
    print(table(f"Equilibria on 2^2 pieces, {steps} steps, {seeds} seeds", headings, rows))
    return found


def run(setting: Setting) -> dict[str, Any]:
    """Errors and costs by kind and number of pieces; optimisers and starts."""
    powers = (1, 2) if setting.quick else (1, 2, 3, 5)
    found, prices = compare(setting, powers)
    starts = beginnings(setting)
    points = found["equilibrium"].models.which.numel() // found["equilibrium"].error.numel()
    variance = torch.stack([target(m, points)[1].var(correction=0) for m in powers]).unsqueeze(1)
    shares = {name: one.error / variance for name, one in found.items()}
    middle = {name: dict(zip(powers, share.median(1).values.tolist(), strict=True)) for name, share in shares.items()}
    dear = {m: sum(prices["equilibrium", m][:2]) / sum(prices["network, 2 x 10", m][:2]) for m in powers}
    told = ", ".join(f"{ratio:.0f} (2^{m})" for m, ratio in dear.items())
    claim(
        min(dear.values()) > 3,
        f"a step of the equilibrium is dearer than that of the network of its size: {told} times",
    )
    claim(
        all(price[3] > 3 for (name, _), price in prices.items() if name.startswith("equilibrium")),
        "for it evaluates its cell several times",
    )
    if not setting.quick:
        claim(all(one[1] < 0.05 for one in middle.values()), "two pieces are learned by all, in the median")
        deep, equal = middle["network, 10 x 10"][3], middle["equilibrium"][3]
        claim(deep < 0.5 < equal, f"eight by the deep network ({deep:.3f}), not by the equilibrium ({equal:.3f})")
        claim(min(one[5] for one in middle.values()) > 0.8, "and 32 by none")
    draw(setting, powers, shares, prices)
    return {"shares": shares, "prices": prices, "starts": starts}


def draw(
    setting: Setting, powers: tuple[int, ...], shares: dict[str, Tensor], prices: dict[tuple[str, int], Any]
) -> None:
    """Errors against pieces, and against what a step costs at the last number of pieces that somebody learns."""
    last = powers[-1] if setting.quick else 3
    with figure(setting.output / "deq_theory_sawtooth.png", 2, size=(PAGE, 3.0)) as (left, right):
        for (name, share), marker in zip(shares.items(), "osD^vP", strict=True):
            style = "-" if name.startswith("equilibrium") else "--"
            band(left, powers, share.T.tolist(), name, (0.25, 0.75), marker=marker, linestyle=style)
            errors = share[powers.index(last)].clamp_min(1e-4)
            operations = sum(prices[name, last][:2])
            right.plot([operations] * len(errors), errors, marker, color=left.lines[-1].get_color(), alpha=0.7)
        left.set_xticks(powers, [f"$2^{m}$" for m in powers])
        left.set(xlabel="pieces of the sawtooth", ylabel="mean squared error / variance", title="Median and quartiles")
        title = f"{2**last} pieces, a mark a seed (below 1e-4: drawn there)"
        right.set(xscale="log", yscale="log", xlabel="operations of a training step, a point", title=title)
        costs = (500, 1000, 2000, 5000, 10_000, 20_000)
        right.set_xticks(costs, [f"{c:,}" for c in costs])
        right.tick_params(axis="x", which="minor", labelbottom=False)
        left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
