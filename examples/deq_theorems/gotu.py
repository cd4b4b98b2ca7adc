r"""Generalisation on the unseen (GOTU): where an equilibrium model wins, and where it loses.

Functions on ``{+-1}^d`` are learned from the half with ``x_k = +1`` and tested on that with ``x_k = -1``.  A model that is
linear in ``x`` and fits the seen half has ``b + beta_k = s = f^_0 + f^_k``, whatever ``beta_k`` is, and an error of
``4 (f^_k - beta_k)^2`` on the unseen half.  Gradient flow decides ``beta_k``:

    diagonal equilibrium, bias a plain parameter     b - b(0) = (beta_k(0)^{-3} - beta_k^{-3}) / 3
    diagonal equilibrium, bias fed as a coordinate   beta_k = s / 2                   (equal starts)
    diagonal linear net from a small start           beta_k -> 0

so that the equilibrium beats the net if and only if ``0 < beta_k < 2 f^_k``: on some functions, not on others.  The same is
asked of a ReLU equilibrium and a ReLU network of equal size, trained with Adam, on a linear function and on a product, of 8
and of 20 features (of whose half million points 1,024 are seen).

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), section on
GOTU, where the Boolean functions have 20 features; the formulas are derived here, and the two functions are ours.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.integrate
import scipy.optimize
import torch
from common import figure, table
from torch import Tensor, nn

from implicitkit_deq import DEQ, Forgive, cells

from .claims import Setting, claim

D, K = 8, 2
CASES = ((1.0, 1.0), (0.5, 1.5), (0.0, 1.0), (2.0, 1.0), (1.0, 0.3), (1.5, -0.5))  # f^_0, f^_k
MODELS = ("plain bias", "bias fed in", "linear net")


def cube() -> tuple[np.ndarray, np.ndarray]:
    """The seen and the unseen half of ``{+-1}^D``, each ``(2^{D-1}, D)``."""
    points = np.array(list(itertools.product((-1.0, 1.0), repeat=D)))
    return points[points[:, K] > 0], points[points[:, K] < 0]


def flow(model: str, seen: np.ndarray, target: np.ndarray, end: float) -> tuple[np.ndarray, float]:
    """``beta`` and ``b`` of gradient flow on the seen half."""
    X = np.concatenate([seen, np.ones((len(seen), 1))], 1)  # the bias last

    def beta_of(p: np.ndarray) -> np.ndarray:
        if model == "linear net":  # beta = u v from u = v small, signs free by a second pair
            u, v = p[: D + 1], p[D + 1 :]
            return np.append((u**2 - v**2)[:D], u[D])
        # equilibria: p = beta, except for a plain bias
        return p

    def rate(_: float, p: np.ndarray) -> np.ndarray:
        beta = beta_of(p)
        g = X.T @ (X @ beta - target) / len(target)
        if model == "linear net":
            u, v = p[: D + 1], p[D + 1 :]
            change = np.concatenate([-2 * u * g, 2 * v * g])
            change[D], change[-1] = -g[D], 0
            return change
        change = -(beta**4) * g
        if model == "plain bias":
            change[D] = -g[D]
        return change

    if model == "linear net":
        p0 = np.full(2 * (D + 1), 1e-6)
        p0[D] = p0[-1] = 0.0
    else:
        p0 = np.ones(D + 1)
        if model == "plain bias":
            p0[D] = 0.0
    found = scipy.integrate.solve_ivp(rate, (0, end), p0, "LSODA", rtol=1e-9, atol=1e-12)
    beta = beta_of(found.y[:, -1])
    return beta[:D], float(beta[D])


def predicted(model: str, f0: float, fk: float) -> float:
    """The error on the unseen half, by the table at the top of this file."""
    s = f0 + fk
    if model == "linear net":
        return 4 * fk**2
    if model == "bias fed in":
        return (fk - f0) ** 2
    beta = scipy.optimize.brentq(lambda t: (1 - t**-3) / 3 + t - s, 1e-3, 1e3)
    return 4 * (fk - beta) ** 2


def linear_models(quick: bool) -> dict[tuple[float, float], dict[str, float]]:
    """Measured errors for every case and model; the other coefficients are positive, as equilibria need them."""
    seen, unseen = cube()
    errors: dict[tuple[float, float], dict[str, float]] = {}
    rows = []
    for f0, fk in CASES:
        coefficients = np.linspace(0.4, 1.6, D)
        coefficients[K] = fk
        errors[f0, fk] = {}
        for model in MODELS:
            beta, b = flow(model, seen, f0 + seen @ coefficients, 300.0 if quick else 1000.0)
            errors[f0, fk][model] = float(np.mean((unseen @ beta + b - f0 - unseen @ coefficients) ** 2))
            formula = predicted(model, f0, fk)
            rows.append((f"{f0:g}, {fk:g}", model, float(beta[K]), errors[f0, fk][model], formula))
        for model in MODELS[:2]:
            wins = errors[f0, fk][model] < errors[f0, fk]["linear net"]
            rows.append(("", model, "", "wins" if wins else "LOSES", "against the linear net"))
    print(table("GOTU of linear models", ("f^_0, f^_k", "model", "beta_k", "error", "formula"), _plain(rows)))
    return errors


def _plain(rows: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    return [tuple(f"{v:.4g}" if isinstance(v, float) else v for v in row) for row in rows]


class Equilibrium(nn.Module):
    """``relu(W z + U x + b)``, read out linearly."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layer = DEQ(
            cells.MLP(features, width, activation=torch.relu), rtol=1e-4, evaluation={"on_failure": Forgive()}
        )
        self.read = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer(x))


def network(features: int, width: int) -> nn.Module:
    """Two hidden layers, as many parameters as the equilibrium of the same width and 20 more."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


RELU: dict[str, Callable[[int, int], nn.Module]] = {"equilibrium": Equilibrium, "network": network}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "1 + x_k + sum": lambda x: 1 + 0.5 * x.sum(1) + 0.5 * x[:, K],
    "x_0 x_k + x_1": lambda x: x[:, 0] * x[:, K] + x[:, 1],
}
SHORT = {"1 + x_k + sum": "$1 + x_k + \\Sigma$", "x_0 x_k + x_1": "$x_0 x_k + x_1$"}
FEATURES = (D, 20)
RATES = (2e-3, 5e-3, 1.5e-2)


def halves(features: int, points: int) -> tuple[Tensor, Tensor]:
    """Points of the seen and of the unseen half: all, or as many drawn at random where there are more."""
    if 2 ** (features - 1) <= points:
        seen, unseen = cube()
        return torch.from_numpy(seen).float(), torch.from_numpy(unseen).float()
    generator = torch.Generator().manual_seed(features)
    drawn = 1.0 - 2.0 * torch.randint(2, (2, points, features), generator=generator)
    drawn[0, :, K], drawn[1, :, K] = 1.0, -1.0
    return drawn[0], drawn[1]


@dataclass(frozen=True)
class Trained:
    """Mean squared errors of one model on what it was trained on and on what it was not, and the share of the samples of
    all its steps that had an equilibrium."""

    seen: float
    unseen: float
    solved: float


def train(
    model: nn.Module, function: Callable[[Tensor], Tensor], rate: float, steps: int, seen: Tensor, unseen: Tensor
) -> Trained:
    """Adam on all seen points."""
    optimizer, solved = torch.optim.Adam(model.parameters(), lr=rate), 0.0
    for _ in range(steps):
        loss = (model(seen)[:, 0] - function(seen)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        solved += float(model.layer.solution.converged.float().mean()) if isinstance(model, Equilibrium) else 1.0
    model.eval()
    with torch.no_grad():
        errors = [float((model(x)[:, 0] - function(x)).square().mean()) for x in (seen, unseen)]
    return Trained(*errors, solved / steps)


def best_rate(
    make: Callable[[], nn.Module],
    function: Callable[[Tensor], Tensor],
    steps: int,
    rates: tuple[float, ...],
    seen: Tensor,
) -> float:
    """The learning rate with the smallest error on a fifth of the seen half, held out; one seed that no result uses."""
    if len(rates) == 1:
        return rates[0]
    held, errors = torch.arange(len(seen)) % 5 == 2, {}
    for rate in rates:
        torch.manual_seed(10_000)
        errors[rate] = train(make(), function, rate, steps, seen[~held], seen[held]).unseen
    return min(errors, key=lambda rate: errors[rate] if math.isfinite(errors[rate]) else math.inf)


def relu_models(setting: Setting) -> dict[tuple[int, str], dict[str, list[Trained]]]:
    """What became of every seed, by number of features, function and model, each model at its own best rate."""
    seeds, steps, rates = (1, 40, RATES[1:2]) if setting.quick else (5, 600, RATES)
    found: dict[tuple[int, str], dict[str, list[Trained]]] = {}
    rows = []
    for features, (name, function) in itertools.product(FEATURES, FUNCTIONS.items()):
        seen, unseen = halves(features, 128 if setting.quick else 1024)
        found[features, name] = {}
        for label, make in RELU.items():
            one = functools.partial(make, features, 20)
            rate = best_rate(one, function, steps, rates, seen)
            runs = []
            for seed in range(seeds):
                torch.manual_seed(setting.seed + seed)
                runs.append(train(one(), function, rate, steps, seen, unseen))
            found[features, name][label] = runs
            shown = ", ".join(f"{r.unseen:.2f}" for r in runs)
            solved = f"{min(r.solved for r in runs):.4f}" if label == "equilibrium" else "-"
            rows.append((features, name, label, f"{rate:g}", max(r.seen for r in runs), shown, solved))
    title = f"GOTU of ReLU models, width 20, {steps} steps of Adam, seeds: {seeds}"
    print(table(title, ("features", "function", "model", "rate", "worst seen mse", "unseen mse", "solved"), rows))
    for (features, name), models in found.items():
        print(f"  {features} features, {name}: {_compared(models)}")
    return found


def _compared(models: dict[str, list[Trained]]) -> str:
    """Which is better on the unseen half, as far as the seeds tell."""
    pairs = zip(models["equilibrium"], models["network"], strict=True)
    lead = torch.tensor([b.unseen - a.unseen for a, b in pairs], dtype=torch.float64)
    if len(lead) < 2:
        return "one seed says nothing"
    mean, error = float(lead.mean()), float(lead.std() / len(lead) ** 0.5)
    word = (
        "no difference beyond twice its error"
        if abs(mean) <= 2 * error
        else f"the {'equilibrium' if mean > 0 else 'network'} is better"
    )
    return f"{word}, network - equilibrium = {mean:+.2f} +- {error:.2f}"


def run(setting: Setting) -> dict[str, Any]:
    """Linear models against the formulas; ReLU models as they come out."""
    errors = linear_models(setting.quick)
    worst = max(abs(e - predicted(m, *case)) for case, found in errors.items() for m, e in found.items())
    claim(worst < 1e-2, f"measured errors are the formulas' (worst difference {worst:.1e})")
    wins = {case: {m: found[m] < found["linear net"] for m in MODELS[:2]} for case, found in errors.items()}
    claim(
        all(any(w.values()) for c, w in wins.items() if c in ((1.0, 1.0), (0.5, 1.5), (0.0, 1.0))),
        "the equilibrium wins where f^_k is large",
    )
    losers = [c for c, w in wins.items() if not any(w.values())]
    claim(losers == [(1.0, 0.3), (1.5, -0.5)], f"and loses where f^_k is small or negative: {losers}")
    claim(
        errors[2.0, 1.0]["plain bias"] > errors[2.0, 1.0]["linear net"],
        "with a plain bias also at (2, 1), where beta_k > 2 f^_k",
    )
    relu = relu_models(setting)

    with figure(setting.output / "deq_theory_gotu.png", 2) as (left, right):
        places = range(len(CASES))
        for i, model in enumerate(MODELS):
            left.bar([k + 0.27 * (i - 1) for k in places], [errors[c][model] for c in CASES], 0.25, label=model)
            marks = [predicted(model, *c) for c in CASES]
            left.plot(
                [k + 0.27 * (i - 1) for k in places], marks, "k_", markersize=6, label="formula" if i == 2 else None
            )
        left.set_xticks(places, [f"{a:g}, {b:g}" for a, b in CASES])
        left.set(
            xlabel="$\\hat f_0, \\hat f_k$",
            ylabel="error on the unseen half",
            title="Linear models: no one wins always",
        )
        left.legend()
        for i, label in enumerate(RELU):
            for k, found in enumerate(relu.values()):
                heights = [r.unseen for r in found[label]]
                right.plot([k + 0.2 * (i - 0.5)] * len(heights), heights, "os"[i], color=f"C{i}",
                           label=label if k == 0 else None)  # fmt: skip
        right.set_xticks(range(len(relu)), [f"{SHORT[name]}\n{features} features" for features, name in relu])
        right.set(
            xlim=(-0.5, len(relu) - 0.5),
            ylim=(0, None),
            ylabel="error on the unseen half",
            title="ReLU models, one mark a seed",
        )
        right.legend()
    return {"errors": errors, "worst": worst, "losers": losers, "relu": relu}
