r"""An audio-like signal as the function ``t -> s(t)``: an equilibrium against a feed-forward network of equal size.

Half a second of three chirps with envelopes, sampled at 2 kHz, is fitted by models with the same random Fourier features of
``t``, the same number of parameters and the same training.  The comparison is reported as it comes out; nothing is promised,
and what is asserted is that sizes are equal, that all learn, and that holding ``|W|_2`` at 0.95 keeps the equilibrium: with
free weights training drives some samples out of convergence, and their gradients are worth nothing.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), appendix B.2,
where the equilibrium is the better one on recorded audio.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import figure, table
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, bound_weights, cells

from .claims import Setting, claim

RATE, SECONDS = 2000, 0.5


def signal() -> tuple[Tensor, Tensor]:
    """Times ``(N, 1)`` in [-1, 1] and amplitudes ``(N,)`` of variance one."""
    t = torch.arange(round(RATE * SECONDS), dtype=torch.float64) / RATE
    total = torch.zeros_like(t)
    for low, high, centre, width in ((20, 60, 0.1, 0.08), (60, 140, 0.25, 0.1), (30, 200, 0.4, 0.08)):
        phase = 2 * math.pi * (low * t + (high - low) * t.square() / (2 * SECONDS))
        total += torch.exp(-(((t - centre) / width) ** 2)) * torch.sin(phase)
    return (2 * t / SECONDS - 1).unsqueeze(1).float(), (total / total.std()).float()


class Fourier(nn.Module):
    """``t -> [sin(B t), cos(B t)]``, frequencies drawn once and not trained."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.B: Tensor
        self.register_buffer("B", 2 * math.pi * 12 * torch.randn(1, features // 2))

    def forward(self, t: Tensor) -> Tensor:
        return torch.cat([torch.sin(t @ self.B), torch.cos(t @ self.B)], 1)


class Equilibrium(nn.Module):
    """``relu(W z + U phi(t) + b)``, read out linearly; ``|W|_2 <= bound``."""

    def __init__(self, features: int, width: int, bound: float | None = 0.95) -> None:
        super().__init__()
        self.phi = Fourier(features)
        self.layer = DEQ(
            cells.MLP(features, width, activation=torch.relu, scale=0.7), rtol=1e-3, rule=ik.Implicit("gmres", rtol=1e-2),
            max_steps=30, on_failure="ignore", evaluation={"rtol": 1e-5, "max_steps": 200},
        )  # fmt: skip
        if bound is not None:
            bound_weights(self.layer.cell, bound, weights=self.layer.cell.recurrent_weights())
        self.read = nn.Linear(width, 1)

    def forward(self, t: Tensor) -> Tensor:
        return self.read(self.layer(self.phi(t)))[:, 0]


class Network(nn.Module):
    """Two hidden layers of the same widths, which has the same parameters (and one bias vector more)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Fourier(features),
            nn.Linear(features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, t: Tensor) -> Tensor:
        return self.layers(t)[:, 0]


def train(model: nn.Module, steps: int) -> tuple[float, Tensor, float]:
    """Mean squared error, the fitted signal, seconds."""
    t, s = signal()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = time.perf_counter()
    for _ in range(steps):
        loss = (model(t) - s).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        fitted = model(t)
    return float((fitted - s).square().mean()), fitted, seconds


def by_frequency(error: Tensor, edges: tuple[int, ...] = (0, 50, 100, 200, 1001)) -> list[float]:
    """Energy of the error in bands of Hz, over the signal's whole energy."""
    spectrum, whole = (torch.fft.rfft(s).abs().square() for s in (error, signal()[1]))
    hertz = torch.fft.rfftfreq(len(error), 1 / RATE)
    bands = [(hertz >= low) & (hertz < high) for low, high in itertools.pairwise(edges)]
    return [float(spectrum[band].sum() / whole.sum()) for band in bands]


def run(setting: Setting) -> dict[str, Any]:
    """Errors by model and seed."""
    features, width, steps, seeds = (16, 16, 60, 1) if setting.quick else (24, 24, 500, 3)
    makers: dict[str, Callable[[int, int], nn.Module]] = {
        "equilibrium": Equilibrium,
        "equilibrium, W free": functools.partial(Equilibrium, bound=None),
        "network": Network,
    }
    errors: dict[str, list[float]] = {name: [] for name in makers}
    sizes, fits, rows, converged = {}, {}, [], dict[str, float]()
    for name, make in makers.items():
        for seed in range(setting.seed, setting.seed + seeds):
            torch.manual_seed(seed)
            model = make(features, width)
            sizes[name] = sum(p.numel() for p in model.parameters())
            error, fits[name], seconds = train(model, steps)
            errors[name].append(error)
            bands = by_frequency(fits[name] - signal()[1])
            share = float(model.layer.solution.converged.float().mean()) if isinstance(model, Equilibrium) else None
            converged[name] = min(converged.get(name, 1.0), 1.0 if share is None else share)
            rows.append((name, sizes[name], seed, error, *bands, "-" if share is None else f"{share:.3f}", seconds))
    headings = (
        "model",
        "parameters",
        "seed",
        "mse (variance 1)",
        "0-50 Hz",
        "50-100 Hz",
        "100-200 Hz",
        "above",
        "converged",
        "seconds",
    )
    print(table(f"A signal of three chirps, {steps} steps of Adam; error over energy, by band", headings, rows))
    means = {name: sum(e) / len(e) for name, e in errors.items()}
    ratio = means["equilibrium"] / means["network"]
    verdict = "reaches" if ratio <= 0.9 else "does not reach"
    print(f"  equilibrium / network = {ratio:.2f}; this {verdict} 0.9 (published: the equilibrium is better)")
    claim(
        abs(sizes["equilibrium"] - sizes["network"]) <= width,
        f"equal sizes: {sizes['equilibrium']}, {sizes['network']} parameters",
    )
    claim(max(means.values()) < 1, f"all learn (mean errors {', '.join(f'{m:.3g}' for m in means.values())})")
    claim(converged["equilibrium"] == 1, "with |W|_2 held at 0.95 every sample has its equilibrium")

    with figure(setting.output / "deq_theory_audio.png", size=(9, 4)) as axes:
        t, s = signal()
        seconds_axis = ((t[:, 0] + 1) * SECONDS / 2).numpy()
        axes.plot(seconds_axis, s.numpy(), color="0.7", linewidth=3, label="signal")
        for name, fitted in fits.items():
            axes.plot(seconds_axis, fitted.numpy(), linewidth=0.9, label=f"{name}, mse {errors[name][-1]:.2g}")
        axes.set(xlabel="seconds", ylabel="amplitude", ylim=(-3.4, 2.3), title="An audio-like signal")
        axes.legend(loc="lower left", fontsize=8, ncols=2)
    return {"errors": errors, "ratio": ratio, "sizes": sizes, "converged": converged}
