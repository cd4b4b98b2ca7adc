r"""How large weights grow in training on a steep target: equilibria and networks of equal size.

The target is ``g(x) = x / (x + 2^-d)`` on [0, 1], of slope ``2^d`` at zero, for ``d = 6 .. 20``.  An equilibrium with
weights of at most one fits it to 0.1 for every ``d`` (``steep``: a construction); a feed-forward network does not, unless
its weights grow with ``d``.  Here both are trained from random weights, as equals: the same width, the same points, Adam
with as many steps, each at the rate which is best for it on points held out.  Shown are the largest entry of all trained
weights (biases not counted) and the error beside it, since a model that does not fit need not grow.

What comes out (5 seeds): at ``d = 6`` both learn.  For steeper targets the network fits in part, with weights that grow to
about 8 at ``d = 14``; the equilibrium stays near the best constant, with weights of about one, so that its small norms say
that it has not learned, not that it fits with small weights.  From ``d = 17`` on neither learns in as many steps.  The
construction of ``steep`` exists and is not found from random weights: the source's figure is not reproduced here.

All models of one kind are trained side by side, as one stack: samples are solved one by one and Adam is elementwise, so that
each is trained as it would be alone.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), the figure of
the infinity norm of trained weights against ``d``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import band, figure, table
from torch import Tensor, nn

from implicitkit_deq import DEQ, Cell, Forgive

from .claims import Setting, claim

WIDTH, POINTS = 10, 128  # neurons; points of each model, half of them evenly spaced in log x
RATES = (3e-3, 1e-2, 3e-2)


def points(d: int) -> tuple[Tensor, Tensor]:
    """``x`` and ``g(x)``, each ``(POINTS,)``."""
    half = POINTS // 2
    x = torch.cat([torch.logspace(-d - 4, 0, half, base=2.0), torch.linspace(0, 1, POINTS - half)])
    return x, x / (x + 2.0**-d)


class Stack(Cell):
    """``relu(W z + U x + b)``, a cell for each model; a sample goes with ``which`` of them it belongs to."""

    def __init__(self, models: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(models, WIDTH, WIDTH))
        self.U, self.b = (nn.Parameter(torch.empty(models, WIDTH).uniform_(-1, 1)) for _ in range(2))
        with torch.no_grad():
            for W in self.W:
                nn.init.orthogonal_(W, gain=0.9)

    def inject(self, x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """``U x + b`` of each sample's own model."""
        return self.U[which] * x.unsqueeze(1) + self.b[which], which

    def update(self, z: Tensor, injected: Tensor, which: Tensor) -> Tensor:
        """All samples, in the order of the models, or any of them."""
        if len(z) == len(self.W) * POINTS:
            stacked = (t.view(len(self.W), POINTS, WIDTH) for t in (injected, z))
            return torch.relu(torch.baddbmm(*stacked, self.W.mT)).flatten(0, 1)
        return torch.relu(injected + (self.W[which] @ z.unsqueeze(2)).squeeze(2))


class Models(nn.Module):
    """Equilibria, or networks of two hidden layers with the same weights and one bias vector more."""

    def __init__(self, count: int, equilibrium: bool) -> None:
        super().__init__()
        self.cell = Stack(count)
        self.v, self.c = (
            nn.Parameter(torch.empty(count, WIDTH).uniform_(-1, 1) / WIDTH**0.5),
            nn.Parameter(torch.zeros(count)),
        )
        self.layer = DEQ(self.cell, (WIDTH,), rtol=1e-4, on_failure=Forgive(share=1.0)) if equilibrium else None
        self.second = None if equilibrium else nn.Parameter(torch.zeros(count, WIDTH))
        self.which = torch.arange(count).repeat_interleave(POINTS)

    def forward(self, x: Tensor) -> Tensor:
        """``(count, POINTS)`` outputs for as many inputs."""
        flat = x.flatten()
        if self.layer is not None:
            h = self.layer(flat, self.which, index=torch.arange(len(flat)) if self.training else None)
        else:
            injected, which = self.cell.inject(flat, self.which)
            assert self.second is not None
            h = self.cell.update(torch.relu(injected), self.second[which], which)
        return (h.view(len(self.v), POINTS, WIDTH) @ self.v.unsqueeze(2)).squeeze(2) + self.c.unsqueeze(1)

    def largest(self) -> Tensor:
        """The largest entry of each model's weights, in absolute value."""
        parts = [self.cell.W.flatten(1), self.cell.U, self.v]
        return torch.cat(parts, 1).detach().abs().amax(1)


@dataclass(frozen=True)
class Trained:
    """By ``d`` and seed: root mean square errors on the points that were fitted, and on those held out; the largest entry of
    the weights.  ``solved``: the least share of solved samples that a model had, over all steps."""

    error: Tensor
    held: Tensor
    largest: Tensor
    solved: float
    seconds: float


def train(
    equilibrium: bool, sizes: Sequence[int], seeds: Sequence[int], steps: int, rate: float, hold: bool = False
) -> Trained:
    """Every ``d`` with every seed; ``hold``: every fifth point is held out."""
    x, y = (torch.stack(t).repeat_interleave(len(seeds), 0) for t in zip(*map(points, sizes), strict=True))
    torch.manual_seed(seeds[0])
    models = Models(len(x), equilibrium)
    seen = torch.arange(POINTS) % 5 != 2 if hold else torch.ones(POINTS, dtype=torch.bool)
    optimizer = torch.optim.Adam(models.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    solved, start = torch.zeros(len(x)), time.process_time()
    for _ in range(steps):
        loss = (models(x) - y)[:, seen].square().mean(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        solution = None if models.layer is None else models.layer.solution
        solved += 1.0 if solution is None else solution.converged.view(len(x), POINTS).float().mean(1)
    seconds = time.process_time() - start
    with torch.no_grad():
        squares = (models(x) - y).square()
    shape = len(sizes), len(seeds)
    error, held = (squares[:, which].mean(1).sqrt().view(shape) for which in (seen, ~seen if hold else seen))
    return Trained(error, held, models.largest().view(shape), float(solved.min()) / steps, seconds)


def best_rate(equilibrium: bool, sizes: Sequence[int], steps: int, rates: Sequence[float]) -> float:
    """The rate with the smallest error on points held out, geometric mean over ``d``; a seed that no result uses."""
    if len(rates) == 1:
        return rates[0]
    found = {r: float(train(equilibrium, sizes, [10_000], steps, r, hold=True).held.log().mean()) for r in rates}
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


def run(setting: Setting) -> dict[str, Any]:
    """Norms and errors by ``d``, seeds as spread."""
    sizes = (6, 14) if setting.quick else (6, 8, 11, 14, 17, 20)
    seeds = range(setting.seed, setting.seed + (2 if setting.quick else 5))
    steps, rates = (150, RATES[1:2]) if setting.quick else (1000, RATES)
    found, chosen, rows = dict[str, Trained](), dict[str, float](), []
    for name, equilibrium in (("equilibrium", True), ("network", False)):
        chosen[name] = best_rate(equilibrium, sizes, steps, rates)
        one = found[name] = train(equilibrium, sizes, seeds, steps, chosen[name])
        for d, norms, errors in zip(sizes, one.largest.tolist(), one.error.tolist(), strict=True):
            spread = f"{statistics.median(norms):.2f} ({min(norms):.2f} to {max(norms):.2f})"
            fit = f"{statistics.median(errors):.3f} ({min(errors):.3f} to {max(errors):.3f})"
            rows.append((name, d, f"{chosen[name]:g}", spread, fit, f"{one.solved:.4f}" if equilibrium else "-"))
    headings = ("model", "d", "rate", "largest weight", "root mean square error", "solved")
    print(
        table(f"Trained on x / (x + 2^-d), {steps} steps, {len(seeds)} seeds: median, least, largest", headings, rows)
    )
    constant = torch.stack([points(d)[1].std(correction=0) for d in sizes])
    share = {name: one.error.median(1).values / constant for name, one in found.items()}
    for name, of in share.items():
        told = ", ".join(f"{s:.2f} (d = {d})" for d, s in zip(sizes, of.tolist(), strict=True))
        print(f"  {name}: error over that of the best constant {told}")
    if not setting.quick:
        claim(
            all(float(of[0]) < 0.5 for of in share.values()), "at d = 6 both learn: half the error of the best constant"
        )
        norms = {name: one.largest.median(1).values[sizes.index(14)] for name, one in found.items()}
        claim(
            float(norms["network"]) > 3 * float(norms["equilibrium"]),
            "at d = 14 the network's weights have grown, and the equilibrium's have not",
        )
        claim(
            float(share["equilibrium"][sizes.index(14)]) > 0.8,
            "but the equilibrium does not fit there: its small weights are those of a model that has not learned",
        )

    with figure(setting.output / "deq_theory_trained_norms.png", 2) as (left, right):
        for name, one in found.items():
            band(left, sizes, one.largest.T.tolist(), name, marker="o", markersize=3)
            band(right, sizes, one.error.T.tolist(), name, marker="o", markersize=3)
        left.axhline(1.0, color="0.5", linestyle=":", label="constructed equilibrium, error 0.1")
        left.set(xlabel="d", ylabel="largest weight, absolute", ylim=(0, None), title="Weights after training")
        right.set(xlabel="d", ylabel="root mean square error", yscale="log", title="and how well they fit")
        for axes in (left, right):
            axes.legend()
    return {
        "largest": {name: one.largest for name, one in found.items()},
        "errors": {name: one.error for name, one in found.items()},
        "solved": found["equilibrium"].solved,
        "rates": chosen,
    }
