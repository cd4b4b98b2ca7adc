r"""A ReLU equilibrium of width ``m`` with exactly ``2^m`` linear regions, and its finite termination.

The tent map ``T(y) = 2 y - 4 relu(y - 1/2)`` folds [0, 1]; ``y_k = T(y_{k-1})``, ``y_0 = x``.  With the neurons
``z_k = relu(y_{k-1} - 1/2)`` the m-fold composition, a sawtooth of ``2^m`` pieces of slope ``+-2^m``, is the readout of

    z = relu(W z + U x + b),   W_kj = -2^{k+1-j} (j < k, else 0),   U_k = 2^{k-1},   b_k = -1/2
    T^m(x) = 2^m x - sum_j 2^{m+2-j} z_j

``W`` is strictly lower triangular: the equilibrium is unique and Picard's iteration is there after ``m`` steps at most.  A
feed-forward ReLU network of one input, ``L`` layers and width ``w`` has at most ``(w + 1)^L`` pieces, so it needs a width of
``2^{m/L} - 1``.

What a training run makes of the construction is shown besides: ``W`` perturbed by one per cent learns its way back if it is
held strictly lower triangular, and not if it is free to lose its equilibrium.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), proposition 1
and theorem 1 state the counts; the construction is derived here.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from common import band, figure, table
from torch import Tensor

import implicitkit as ik

from .claims import Setting, claim

SOLVERS = ("picard", "newton", "broyden", "anderson")


def cell(z: Tensor, x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Tensor:
    """``relu(W z + U x + b)``; ``z (batch, m)``, ``x (batch, 1)``."""
    return torch.relu(z @ W.T + x * U + b)


def weights(m: int) -> tuple[Tensor, Tensor, Tensor]:
    """``W (m, m)``, ``U (m,)``, ``b (m,)``: powers of two, exact in float64."""
    k = torch.arange(1, m + 1, dtype=torch.float64)
    W = -torch.exp2(k[:, None] + 1 - k[None]) * (k[None] < k[:, None])
    return W, torch.exp2(k - 1), torch.full((m,), -0.5, dtype=torch.float64)


def readout(z: Tensor, x: Tensor) -> Tensor:
    """``T^m(x)``, ``(batch,)``."""
    m = z.shape[1]
    j = torch.arange(1, m + 1, dtype=z.dtype)
    return 2**m * x[:, 0] - (z * torch.exp2(m + 2 - j)).sum(1)


def sawtooth(x: Fraction, m: int) -> tuple[Fraction, tuple[bool, ...]]:
    """``T^m(x)`` and which neurons are at work, in rational arithmetic."""
    pattern, half = [], Fraction(1, 2)
    for _ in range(m):
        pattern.append(x > half)
        x = 2 * x - 4 * max(x - half, Fraction(0))
    return x, tuple(pattern)


def count(m: int) -> dict[str, float]:
    """Regions of the equilibrium, by its patterns and by its slopes; steps from zero; errors."""
    cells = 2**m
    x = ((torch.arange(cells, dtype=torch.float64) + 0.375) / cells).unsqueeze(1).requires_grad_()
    z0 = torch.zeros(cells, m, dtype=torch.float64)
    solution = ik.fixed_point(
        cell,
        z0,
        (x, *weights(m)),
        solver="picard",
        batch_dims=1,
        rtol=0.0,
        atol=1e-300,
        max_steps=m,
        rule=ik.Implicit("lu"),
    )
    y = readout(solution.value, x)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    expected = [sawtooth(Fraction(value), m) for value in x[:, 0].tolist()]
    patterns = [tuple(row) for row in (solution.value > 0).tolist()]
    return {
        "patterns": len(set(patterns)),
        "pieces": 1 + int((slopes[1:, 0] != slopes[:-1, 0]).sum()),
        "slope": float(slopes.abs().max()),
        "flattest": float(slopes.abs().min()),
        "error": max(abs(Fraction(a) - e) for a, (e, _) in zip(y.tolist(), expected, strict=True)),
        "same": patterns == [p for _, p in expected],
        "steps": int(solution.steps.max()),
        "residual": float(solution.residual_norm.max()),
        "norm": float(torch.linalg.matrix_norm(weights(m)[0], 2)),
    }


def accelerated(m: int) -> dict[str, tuple[int, int]]:
    """Evaluations (least, most) over five inputs: plain iteration beats acceleration on a nilpotent map."""
    found = {}
    for solver in SOLVERS:
        used = []
        for x in (0.1, 0.3, 0.55, 0.7, 0.9):
            args = (torch.tensor([[x]], dtype=torch.float64), *weights(m))
            z0 = torch.zeros(1, m, dtype=torch.float64)
            solution = ik.fixed_point(cell, z0, args, solver=solver, batch_dims=1, rtol=1e-9, atol=1e-12)
            used.append(solution.evaluations)
        found[solver] = min(used), max(used)
    return found


def train(m: int, masked: bool, steps: int, seed: int) -> tuple[list[float], float]:
    """Losses of gradient descent (Adam) from weights off by one per cent, and ``rho(W)`` at the end."""
    generator = torch.Generator().manual_seed(seed)
    W, U, b = weights(m)
    off = 0.01 * torch.randn(m, m, dtype=W.dtype, generator=generator)
    W = (W * (1 + off)).requires_grad_()
    U, b = ((t * (1 + 0.01 * torch.randn(m, dtype=t.dtype, generator=generator))).requires_grad_() for t in (U, b))
    optimizer = torch.optim.Adam([W, U, b], lr=2e-3)
    x = ((torch.arange(4 * 2**m, dtype=torch.float64) + 0.5) / (4 * 2**m)).unsqueeze(1)
    z0 = x.new_zeros(len(x), m)
    target = readout(ik.fixed_point(cell, z0, (x, *weights(m)), solver="picard", batch_dims=1).value, x)
    losses = []
    for _ in range(steps):
        used = W.tril(-1) if masked else W
        z = ik.fixed_point(
            cell, z0, (x, used, U, b), solver="picard", batch_dims=1, rtol=1e-8, max_steps=60, on_failure="ignore"
        ).value
        loss = (readout(z, x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, float(torch.linalg.eigvals((W.tril(-1) if masked else W).detach()).abs().max())


def run(setting: Setting) -> dict[str, Any]:
    """Counts for m = 3..10, solvers at the largest m, and training at m = 5."""
    sizes = range(3, 9) if setting.quick else range(3, 11)
    counts = {m: count(m) for m in sizes}
    rows = [
        (m, n["patterns"], n["pieces"], 2**m, n["slope"], float(n["error"]), n["steps"], m, n["norm"])
        for m, n in counts.items()
    ]
    headings = ("m", "patterns", "pieces", "2^m (paper)", "|slope|", "error", "steps", "at most (paper)", "|W|_2")
    print(table("ReLU equilibrium of width m: linear regions", headings, rows))
    for m, n in counts.items():
        exact = n["patterns"] == n["pieces"] == 2**m and n["same"] and n["error"] == 0
        claim(
            bool(exact and n["slope"] == n["flattest"] == 2**m),
            f"m = {m}: exactly {2**m} regions of slope +-{2**m}, no error",
        )
        claim(
            n["steps"] == m and n["residual"] == 0,
            f"m = {m}: Picard from zero ends after exactly {m} steps, residual 0.0",
        )

    largest = max(sizes)
    used = accelerated(largest)
    rows = [(name, f"{low}-{high}") for name, (low, high) in used.items()]
    print(table(f"Evaluations at m = {largest}, rho(W) = 0", ("solver", "evaluations"), rows))
    claim(used["picard"][1] <= largest + 2, "Picard: m steps and the last look")
    claim(min(used["anderson"][0], used["broyden"][0]) > used["picard"][1], "acceleration loses on a nilpotent map")

    rows = [(m, *(f"{2 ** (m / L) - 1:.0f}" for L in (1, 2, 4))) for m in (10, 20, 40)]
    print(table("Width that a feed-forward ReLU network needs", ("m", "1 layer", "2 layers", "4 layers"), rows))

    rows = []
    for layers, width in ((1, 4), (2, 5), (4, 5), (4, 10)):
        neurons = layers * width
        rows.append((neurons, f"{layers} x {width}", (width + 1) ** layers, f"2^{neurons} = {2**neurons}"))
    headings = ("neurons", "network", "its regions, at most", "regions of an equilibrium of as many")
    print(table("By number of neurons, one input", headings, rows))
    claim(all(int(row[3].split()[-1]) > row[2] for row in rows), "per neuron an equilibrium has more regions")

    steps, seeds = (20, 2) if setting.quick else (400, 5)
    trained = {m: [train(5, m, steps, setting.seed + k) for k in range(seeds)] for m in (True, False)}
    (held, held_radius), (free, free_radius) = trained[True][0], trained[False][0]
    rows = [
        ("held strictly lower triangular", held[0], held[-1], held_radius),
        ("free", free[0], free[-1], free_radius),
    ]
    print(table(f"{steps} steps of Adam from weights 1 % off, m = 5", ("W", "first mse", "last mse", "rho(W)"), rows))
    claim(held_radius == 0 and held[-1] < held[0], "held, W keeps its equilibrium and the loss falls")
    claim(free_radius > 0.01, "free, W does not stay nilpotent")

    with figure(setting.output / "deq_theory_regions.png", 3) as (left, middle, right):
        x = torch.linspace(0, 1, 2049, dtype=torch.float64).unsqueeze(1)
        for m in (3, 5):
            z = ik.fixed_point(cell, x.new_zeros(len(x), m), (x, *weights(m)), solver="picard", batch_dims=1).value
            y = readout(z, x) + (0 if m == 3 else 1.2)
            left.plot(x[:, 0].numpy(), y.numpy(), label=f"m = {m}", linewidth=1)
        left.set(xlabel="x", ylabel="readout (m = 5: raised)", title="The equilibria of 3 and 5 neurons")
        left.set_ylim(-0.1, 2.8)
        left.legend(loc="upper right", ncols=2)
        middle.semilogy(list(sizes), [counts[m]["pieces"] for m in sizes], "o", label="counted")
        middle.semilogy(list(sizes), [2**m for m in sizes], color="0.5", label="$2^m$")
        for L in (1, 2):
            middle.semilogy(
                list(sizes), [(m / L + 1) ** L for m in sizes], "--", label=f"network, {L} layer{'s' * (L > 1)}"
            )
        middle.set(xlabel="neurons m", ylabel="linear regions", title="Regions")
        middle.legend()
        for masked, label in ((True, "W held lower triangular"), (False, "W free")):
            band(right, range(steps), [losses for losses, _ in trained[masked]], label)
        right.set(
            yscale="log",
            xlabel="step of Adam",
            ylabel="mean squared error",
            title=f"Training from 1 % off, {seeds} seeds",
        )
        right.legend(loc="lower left")
        right.set_ylim(1e-3 if setting.quick else None, None)
    return {
        "counts": {m: {k: float(v) for k, v in n.items()} for m, n in counts.items()},
        "evaluations": used,
        "held": (held[0], held[-1]),
        "free": (free[0], free[-1], free_radius),
    }
