r"""How many features a trained model uses: heatmaps of a diagonal equilibrium, a ReLU equilibrium and a ReLU network.

On ``{+-1}^20`` three models with 20 features each learn the same functions from the points that have ``x_k = +1``:

    diagonal equilibrium   z = w * z + x,             y = 1^T z + c    features x_i / (1 - w_i)
    ReLU equilibrium       z = relu(W z + U x + b),   y = v^T z + c    features v_i z_i
    ReLU network           two hidden layers,         y = v^T h + c    features v_i h_i

A feature's weight is its mean absolute share in the output.  Density is read in two ways: how many features weigh more
than a twentieth of the heaviest, and the effective number ``(sum a_i)^2 / sum a_i^2`` of the weights ``a``, which has no
threshold. Both are shown before training, too: what a start has is not what training learns.  Linear functions of all
and of two features and a product are learned, each model at the rate that is best for it on points held out.

What comes out (400 steps, 5 seeds, medians of the effective number of 20): the diagonal equilibrium is dense, 16 to 17,
where the function has two features, too: it begins with equal weights, and cannot reach zero (its error there is still 0.8
of the variance).  The ReLU equilibrium is not: it begins denser than the network (9.8 against 8.7) and ends sparser (6.8,
8.5 and 9.4 on the three functions against 11.4, 10.1 and 11.2).  Both fit to 2e-3 and better.  What is published holds for
the diagonal model here, and not for the ReLU one.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), the
heatmaps of feature density, where equilibria are denser than networks; the measures are ours.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import figure, table
from torch import Tensor, nn

from implicitkit_deq import DEQ, Cell, Forgive, ForgivenWarning, cells

from .claims import Setting, claim
from .gotu import RATES, K, best_rate, halves, train

FEATURES = 20
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all features": lambda x: 1 + 0.5 * x.sum(1) + 0.5 * x[:, K],
    "two features": lambda x: x[:, 0] + x[:, 1],
    "a product": lambda x: x[:, 0] * x[:, 3] + x[:, 1],
}


class Scaling(Cell):
    """``w * z + x``, ``w = 0`` at first: every feature weighs the same."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features))

    def inject(self, x: Tensor) -> tuple[Tensor]:
        return (x,)

    def update(self, z: Tensor, x: Tensor) -> Tensor:
        return self.w * z + x


class Diagonal(nn.Module):
    """The diagonal equilibrium, read out by ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DEQ(Scaling(FEATURES), (FEATURES,), solver="newton", rtol=1e-5, on_failure=Forgive(share=1.0))
        self.c = nn.Parameter(torch.zeros(1))

    def shares(self, x: Tensor) -> Tensor:
        """``(batch, 20)``: what each feature adds to the output."""
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.shares(x).sum(1, keepdim=True) + self.c


class Equilibrium(nn.Module):
    """``relu(W z + U x + b)``, read out linearly."""

    def __init__(self) -> None:
        super().__init__()
        cell = cells.MLP(FEATURES, FEATURES, activation=torch.relu)
        self.layer = DEQ(cell, rtol=1e-4, on_failure=Forgive(share=1.0), evaluation={"on_failure": Forgive(share=1.0)})
        self.read = nn.Linear(FEATURES, 1)

    def shares(self, x: Tensor) -> Tensor:
        """As above."""
        return self.layer(x) * self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.shares(x).sum(1, keepdim=True) + self.read.bias


class Network(nn.Module):
    """Two hidden layers, 20 parameters more than the equilibrium of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES), nn.ReLU())
        self.read = nn.Linear(FEATURES, 1)

    def shares(self, x: Tensor) -> Tensor:
        """As above, of the second layer."""
        return self.hidden(x) * self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.shares(x).sum(1, keepdim=True) + self.read.bias


MODELS: dict[str, Callable[[], Any]] = {
    "diagonal equilibrium": Diagonal,
    "ReLU equilibrium": Equilibrium,
    "ReLU network": Network,
}


@dataclass(frozen=True)
class Density:
    """Features above a twentieth of the heaviest, and their effective number, before and after training; mean squared error
    over the function's variance; the absolute shares of the features on some inputs, heaviest first, ``(20, inputs)``."""

    above: int
    effective: float
    above_first: int
    effective_first: float
    error: float
    heat: Tensor = field(repr=False)


def measured(model: Any, x: Tensor) -> tuple[int, float, Tensor]:
    """Features above a twentieth of the heaviest, their effective number, and their shares, heaviest first."""
    with torch.no_grad():
        shares = model.shares(x).abs()
    weights = shares.mean(0)
    order = weights.argsort(descending=True)
    effective = float(weights.sum().square() / weights.square().sum().clamp_min(1e-30))
    return int((weights > 0.05 * weights.max()).sum()), effective, shares[:, order].T


def trained(setting: Setting) -> dict[tuple[str, str], list[Density]]:
    """By function and model, a seed each."""
    seeds, steps, points, rates = (1, 40, 64, RATES[1:2]) if setting.quick else (5, 400, 256, RATES[1:])
    seen, unseen = halves(FEATURES, points)
    found: dict[tuple[str, str], list[Density]] = {}
    for name, function in FUNCTIONS.items():
        variance = float(function(seen).var())
        for label, make in MODELS.items():
            rate = best_rate(make, function, steps, rates, seen)
            runs = found[name, label] = []
            for seed in range(setting.seed, setting.seed + seeds):
                torch.manual_seed(seed)
                model = make()
                above_first, effective_first, _ = measured(model.eval(), seen)
                error = train(model.train(), function, rate, steps, seen, unseen).seen / variance
                above, effective, heat = measured(model, seen)
                runs.append(Density(above, effective, above_first, effective_first, error, heat[:, :40]))
    return found


def run(setting: Setting) -> dict[str, Any]:
    """Densities, and heatmaps of the first seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)
        found = trained(setting)

    def told(values: list[float]) -> str:
        return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

    rows = [
        (
            name,
            label,
            max(r.error for r in runs),
            told([r.above_first for r in runs]),
            told([r.above for r in runs]),
            told([r.effective_first for r in runs]),
            told([r.effective for r in runs]),
        )
        for (name, label), runs in found.items()
    ]
    headings = (
        "function of",
        "model",
        "worst mse / variance",
        "> 1/20, at first",
        "trained",
        "effective, at first",
        "trained",
    )
    seeds = len(next(iter(found.values())))
    print(table(f"Features in use, of {FEATURES}; {seeds} seeds: median, least, largest", headings, rows))
    middle = {key: statistics.median(r.effective for r in runs) for key, runs in found.items()}
    if not setting.quick:
        for name in FUNCTIONS:
            diagonal, equilibrium, network = (middle[name, label] for label in MODELS)
            claim(diagonal > 15, f"{name}: the diagonal equilibrium is dense ({diagonal:.1f} of {FEATURES}),")
            claim(
                equilibrium < network,
                f"the ReLU equilibrium sparser ({equilibrium:.1f}) than the network ({network:.1f})",
            )
        fitted = [r.error for (_, label), runs in found.items() if label != "diagonal equilibrium" for r in runs]
        claim(max(fitted) < 0.01, f"both ReLU models fit all three functions (worst {max(fitted):.1e} of the variance)")
    with figure(setting.output / "deq_theory_density.png", 3, rows=len(FUNCTIONS)) as axes:
        for row, name in zip(axes, FUNCTIONS, strict=True):
            for axis, label in zip(row, MODELS, strict=True):
                one = found[name, label][0]
                image = axis.imshow((one.heat / one.heat.max()).numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto")
                axis.set(xticks=[], yticks=(0, 9, 19), yticklabels=(1, 10, 20))
                axis.set_title(f"{label}\n{one.above} of {FEATURES} above 1/20")
            row[0].set_ylabel(f"{name}\nfeature, heaviest first")
            row[0].figure.colorbar(image, ax=row[-1], label="share of the largest")
        for axis in axes[-1]:
            axis.set_xlabel("40 inputs")
    return {"densities": found}
