r"""How error grows with frequency: single tones learned by equilibria and networks of equal size.

Half a second of ``sin(2 pi f t)`` for ``f = 12.5 .. 200`` Hz is fitted by the models of ``audio``, whose random Fourier
features of ``t`` have a standard deviation of 48 Hz: below it a tone is nearly one of the features, above it must be
composed of several. Each model has the rate which is best for it over all tones, on a fifth of the samples held out.

What comes out (300 steps, 3 seeds, medians): the error of all grows with the frequency, and it is the activation that
decides how fast.  From 12.5 to 200 Hz that of the sine models grows six- and sevenfold, to 7e-4 of the equilibrium and 6e-4
of the network; that of the ReLU models thirtyfold, to 1.1e-2 and 3.6e-3.  The conjecture that equilibria are good at high
frequencies is not borne out: at 200 Hz neither has an advantage over the network of its activation, whose seeds overlap with
its own.

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
from .claims import Setting, claim

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
        rows.append((name, f"{rate:g}", *torch.tensor(found[name]).median(0).values.tolist()))
    headings = ("model", "rate", *(f"{hertz:g} Hz" for hertz in TONES))
    print(table(f"Tones: mean squared error over variance, {steps} steps, median of {seeds} seeds", headings, rows))
    middle = {name: torch.tensor(runs).median(0).values.tolist() for name, runs in found.items()}
    if not setting.quick:
        growth = {name: one[-1] / one[0] for name, one in middle.items()}
        told = ", ".join(f"{name} {by:.0f}" for name, by in growth.items())
        claim(min(growth.values()) > 2, f"from {TONES[0]:g} to {TONES[-1]:g} Hz the error grows by a factor of {told}")
        claim(
            min(growth[n] for n in SHOWN if "ReLU" in n) > 2 * max(growth[n] for n in SHOWN if "sine" in n),
            "of ReLU models far more than of sine models",
        )
        for kind in ("sine", "ReLU"):
            ratio = middle[f"equilibrium, {kind}"][-1] / middle[f"network, {kind}"][-1]
            claim(
                ratio > 0.8,
                f"{kind}: the equilibrium has no advantage at {TONES[-1]:g} Hz, its error over the network's {ratio:.2f}",
            )
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
