r"""How error grows with frequency: single tones learned by equilibria and networks of equal size.

Half a second of ``sin(2 pi f t)`` for ``f = 12.5 .. 200`` Hz is fitted by the models of ``audio``, whose random Fourier
features of ``t`` have a standard deviation of 48 Hz: below it a tone is nearly one of the features, above it must be
composed of several. Each model has the rate which is best for it over all tones, on a fifth of the samples held out.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), appendix B.2,
where equilibria are conjectured to be good at high frequencies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from common import band, figure, table
from torch import Tensor, nn

from .audio import MODELS, RATES, SECONDS, train
from .claims import Setting

SHOWN = ("equilibrium, sine", "network, sine", "equilibrium, ReLU", "network, ReLU")
TONES = (12.5, 25.0, 50.0, 100.0, 200.0)  # Hz


def tone(hertz: float, samples: int) -> tuple[Tensor, Tensor]:
    """Times ``(samples, 1)`` in [-1, 1], and a tone of variance one."""
    t = torch.arange(samples, dtype=torch.float64) / samples
    s = math.sqrt(2) * torch.sin(2 * math.pi * hertz * SECONDS * t)
    return (2 * t - 1).unsqueeze(1).float(), s.float()


def errors(make: Callable[[], nn.Module], rate: float, samples: int, steps: int, seed: int, hold: bool) -> list[float]:
    """Mean squared error of a model for each tone, on every fifth sample held out, or on all."""
    found = []
    for hertz in TONES:
        torch.manual_seed(seed)
        out = slice(2, None, 5) if hold else slice(0, 0)
        found.append(train(make(), *tone(hertz, samples), steps, rate, out)[0])
    return found


def run(setting: Setting) -> dict[str, Any]:
    """Errors by model, seed and tone."""
    width, samples, steps, seeds, rates = (
        (16, 300, 30, 1, RATES[1:2]) if setting.quick else (24, 500, 300, 3, RATES[1:])
    )
    found, chosen, rows = dict[str, list[list[float]]](), dict[str, float](), []
    for name in SHOWN:
        make = functools.partial(MODELS[name], width, width)
        held = (
            {r: sum(map(math.log, errors(make, r, samples, steps, 10_000, True))) for r in rates} if rates[1:] else {}
        )
        rate = chosen[name] = min(held, key=held.__getitem__) if held else rates[0]
        found[name] = [errors(make, rate, samples, steps, setting.seed + k, False) for k in range(seeds)]
        middle = torch.tensor(found[name]).median(0).values.tolist()
        rows.append((name, f"{rate:g}", *middle))
    headings = ("model", "rate", *(f"{hertz:g} Hz" for hertz in TONES))
    print(table(f"Tones: mean squared error over variance, {steps} steps, median of {seeds} seeds", headings, rows))
    with figure(setting.output / "deq_theory_frequency.png") as axes:
        for name, marker in zip(SHOWN, "osD^", strict=True):
            band(axes, TONES, found[name], name, marker=marker, linestyle="--" if "ReLU" in name else "-")
        axes.set(
            xscale="log", yscale="log", xlabel="frequency of the tone, Hz", ylabel="mean squared error over variance"
        )
        axes.set_xticks(TONES, [f"{hertz:g}" for hertz in TONES])
        axes.minorticks_off()
        axes.legend()
    return {"errors": found, "rates": chosen}
