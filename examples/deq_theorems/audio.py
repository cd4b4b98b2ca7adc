r"""An audio-like signal as the function ``t -> s(t)``: equilibria against feed-forward networks of equal size.

Half a second of three chirps with envelopes, sampled at 2 kHz, is fitted by models with the same random Fourier features of
``t``, the same number of parameters and the same number of steps, each with the learning rate that is best for it on a
fifth of the samples held out.  Activation and learning rate decide more than the equilibrium does: with the sine of its
best rate the equilibrium is far below the ReLU network, and at parity with a sine network.  (At one rate for all, 4e-3,
which suits none of them, the ReLU equilibrium seems to lose by a factor of six.)

All equilibria are trained with the layer's own defaults; the share of samples that had one is printed beside each error.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), appendix B.2,
where the equilibrium is the better one on recorded audio.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import figure, table
from torch import Tensor, nn

from implicitkit_deq import DEQ, ForgivenWarning, bound_weights, cells

from .claims import Setting, claim

RATE, SECONDS = 2000, 0.5
Activation = Callable[[Tensor], Tensor]


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
    """``phi(W z + U features(t) + b)``, read out linearly; ``|W|_2 <= bound``."""

    def __init__(
        self, features: int, width: int, activation: Activation = torch.sin, bound: float | None = 0.95
    ) -> None:
        super().__init__()
        self.phi = Fourier(features)
        self.layer = DEQ(
            cells.MLP(features, width, activation=activation, scale=0.7), rtol=1e-3, evaluation={"rtol": 1e-5}
        )
        if bound is not None:
            bound_weights(self.layer.cell, bound, weights=self.layer.cell.recurrent_weights())
        self.read = nn.Linear(width, 1)

    def forward(self, t: Tensor) -> Tensor:
        return self.read(self.layer(self.phi(t)))[:, 0]


class Network(nn.Module):
    """Two hidden layers of the same widths, which has the same parameters (and one bias vector more)."""

    def __init__(self, features: int, width: int, activation: Activation = torch.relu) -> None:
        super().__init__()
        self.phi, self.activation = Fourier(features), activation
        self.first, self.second, self.read = nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, t: Tensor) -> Tensor:
        return self.read(self.activation(self.second(self.activation(self.first(self.phi(t))))))[:, 0]


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "equilibrium, sine": Equilibrium,
    "equilibrium, sine, W free": functools.partial(Equilibrium, bound=None),
    "equilibrium, ReLU": functools.partial(Equilibrium, activation=torch.relu),
    "network, sine": functools.partial(Network, activation=torch.sin),
    "network, ReLU": Network,
}
RATES = (4e-3, 1.5e-2, 3e-2, 6e-2)


def train(model: nn.Module, steps: int, rate: float, held_out: slice = slice(0, 0)) -> tuple[float, float, float]:
    """Mean squared error on the samples held out (all if none is), the share of solved samples in training, seconds."""
    t, s = signal()
    seen = torch.ones(len(t), dtype=torch.bool)
    seen[held_out] = False
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start, solved = time.perf_counter(), 0.0
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)  # counted here
        for _ in range(steps):
            loss = (model(t[seen]) - s[seen]).square().mean()
            solved += float(model.layer.solution.converged.float().mean()) if isinstance(model, Equilibrium) else 1.0
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - start
    model.eval()
    judged = ~seen if bool((~seen).any()) else seen
    with torch.no_grad():
        return float((model(t[judged]) - s[judged]).square().mean()), solved / steps, seconds


def best_rate(
    make: Callable[[int, int], nn.Module], sizes: tuple[int, int], steps: int, rates: tuple[float, ...]
) -> float:
    """The learning rate with the smallest error on every fifth sample, held out; one seed that no result uses."""
    if len(rates) == 1:
        return rates[0]
    found = {}
    for rate in rates:
        torch.manual_seed(10_000)
        found[rate] = train(make(*sizes), steps, rate, slice(2, None, 5))[0]
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


def by_frequency(error: Tensor, edges: tuple[int, ...] = (0, 50, 100, 200, 1001)) -> list[float]:
    """Energy of the error in bands of Hz, over the signal's whole energy."""
    spectrum, whole = (torch.fft.rfft(s).abs().square() for s in (error, signal()[1]))
    hertz = torch.fft.rfftfreq(len(error), 1 / RATE)
    bands = [(hertz >= low) & (hertz < high) for low, high in itertools.pairwise(edges)]
    return [float(spectrum[band].sum() / whole.sum()) for band in bands]


def run(setting: Setting) -> dict[str, Any]:
    """Errors by model and seed, each model at its own best rate."""
    features, width, steps, seeds = (16, 16, 60, 1) if setting.quick else (24, 24, 500, 3)
    rates = RATES[2:3] if setting.quick else RATES
    errors: dict[str, list[float]] = {name: [] for name in MODELS}
    sizes, fits, rows, converged, chosen = {}, {}, [], dict[str, float](), {}
    for name, make in MODELS.items():
        chosen[name] = rate = best_rate(make, (features, width), steps, rates)
        for seed in range(setting.seed, setting.seed + seeds):
            torch.manual_seed(seed)
            model = make(features, width)
            sizes[name] = sum(p.numel() for p in model.parameters())
            error, solved, seconds = train(model, steps, rate)
            with torch.no_grad():
                fits[name] = model(signal()[0])
            errors[name].append(error)
            bands = by_frequency(fits[name] - signal()[1])
            converged[name] = min(converged.get(name, 1.0), solved)
            share = f"{solved:.4f}" if isinstance(model, Equilibrium) else "-"
            rows.append((name, sizes[name], f"{rate:g}", seed, error, *bands, share, seconds))
    bands_shown = ("0-50 Hz", "50-100 Hz", "100-200 Hz", "above")
    headings = ("model", "parameters", "rate", "seed", "mse (variance 1)", *bands_shown, "solved", "seconds")
    print(table(f"A signal of three chirps, {steps} steps of Adam; error over energy, by band", headings, rows))
    means = {name: sum(e) / len(e) for name, e in errors.items()}
    ratios = {name: means["equilibrium, sine"] / means[name] for name in MODELS}
    for name in ("network, ReLU", "network, sine"):
        print(f"  equilibrium, sine / {name} = {ratios[name]:.2f}")
    claim(
        max(sizes.values()) - min(sizes.values()) <= width,
        f"equal sizes: {min(sizes.values())} to {max(sizes.values())} parameters",
    )
    claim(max(means.values()) < 1, f"all learn (mean errors {', '.join(f'{m:.3g}' for m in means.values())})")
    claim(converged["equilibrium, sine"] == 1, "with |W|_2 held at 0.95 every sample has its equilibrium")
    if not setting.quick:
        claim(ratios["network, ReLU"] < 0.5, "the sine equilibrium is below half the error of the ReLU network")
        claim(
            0.5 < ratios["network, sine"] < 2, "and at parity with the sine network: no win against the same activation"
        )

    with figure(setting.output / "deq_theory_audio.png", size=(9, 4)) as axes:
        t, s = signal()
        seconds_axis = ((t[:, 0] + 1) * SECONDS / 2).numpy()
        axes.plot(seconds_axis, s.numpy(), color="0.7", linewidth=3, label="signal")
        for name, fitted in fits.items():
            axes.plot(seconds_axis, fitted.numpy(), linewidth=0.9, label=f"{name}, mse {errors[name][-1]:.2g}")
        axes.set(xlabel="seconds", ylabel="amplitude", ylim=(-3.4, 2.3), title="An audio-like signal")
        axes.legend(loc="lower left", fontsize=8, ncols=2)
    return {"errors": errors, "ratios": ratios, "sizes": sizes, "converged": converged, "rates": chosen}
