r"""The implicit bias of the diagonal linear equilibrium: gradient flow ends where ``Q`` is least.

    z = w * z + x,   f(x) = 1^T z = beta . x,   beta_i = 1 / (1 - w_i),   loss = |X beta - y|^2 / (2 N)

Gradient flow in ``w`` is ``d beta_i / dt = -beta_i^4 g_i`` with ``g = d loss / d beta``, so ``beta_i^{-3}`` moves in the row
space of ``X`` and stays positive.  Among the interpolants with ``beta > 0`` the flow ends at the minimiser of

    Q(beta) = sum_i [ 1 / (2 beta_i^2) + beta_i / beta_i(0)^3 ],

which is convex there and penalises small entries as much as large ones: from a small start ``Q`` is nearly
the l1 norm and its minimiser sparse, from a large one mostly dense.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics"
(NeurIPS 2024), theorem 3; ``Q`` is derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.integrate
import torch
from common import figure, table
from torch import Tensor

import implicitkit as ik

from .claims import Setting, claim


def cell(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """``w * z + x``."""
    return w * z + x


def loss_of(w: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """The loss through the equilibrium, differentiable in ``w``."""
    z = ik.fixed_point(cell, torch.zeros_like(X), (w, X), solver="newton", batch_dims=1, rtol=1e-14, atol=1e-14).value
    return (z.sum(1) - y).square().mean() / 2


def flow(X: Tensor, y: Tensor, start: Tensor, end: float = 1e5) -> np.ndarray:
    """``beta`` of gradient flow at the time ``end`` (in coordinates ``beta^{-3} / 3``, whose rate is the gradient)."""
    A, b = X.numpy(), y.numpy()

    def rate(_: float, s: np.ndarray) -> np.ndarray:
        return A.T @ (A @ (3 * s) ** (-1 / 3) - b) / len(b)

    def jacobian(_: float, s: np.ndarray) -> np.ndarray:
        return -(A.T @ A) * (3 * s) ** (-4 / 3) / len(b)

    found = scipy.integrate.solve_ivp(
        rate, (0, end), start.numpy() ** -3 / 3, "Radau", jac=jacobian, rtol=1e-10, atol=1e-13
    )
    return (3 * found.y) ** (-1 / 3)


def least(X: Tensor, y: Tensor, start: Tensor) -> Tensor:
    """``argmin {Q : X beta = y, beta > 0}`` by its dual: ``beta(lam) = (beta(0)^{-3} + X^T lam)^{-1/3}``, ``X beta = y``."""

    def violation(lam: Tensor) -> Tensor:
        return X @ (start**-3 + X.T @ lam) ** (-1 / 3) - y

    lam = ik.root(violation, torch.zeros_like(y), solver="newton", rtol=1e-10, atol=0.0, max_steps=200).value
    return (start**-3 + X.T @ lam) ** (-1 / 3)


def Q(beta: Tensor, start: Tensor) -> Tensor:
    """As at the top of this file; sums the last dimension."""
    return (0.5 / beta.square() + beta / start**3).sum(-1)


def instance(N: int, d: int, generator: torch.Generator, mixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``X``, ``y`` of a positive truth, and the start."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    X = torch.randn(N, d, dtype=torch.float64, generator=generator)
    return X, X @ (0.3 + 2 * uniform(d)), 0.5 + uniform(d) if mixed else torch.ones(d, dtype=torch.float64)


def descend(X: Tensor, y: Tensor, start: Tensor, lr: float) -> Tensor:
    """``beta`` after gradient descent in ``w`` to (nearly) zero loss."""
    w = 1 - 1 / start
    for _ in range(round(400 / lr)):
        beta = 1 / (1 - w)
        w = w - lr * beta.square() * (X.T @ (X @ beta - y)) / len(y)
    return 1 / (1 - w)


def run(setting: Setting) -> dict[str, Any]:
    """Flow against the minimiser, interpolants, discrete descent, density by start."""
    generator = torch.Generator().manual_seed(setting.seed)
    cases = (
        [(3, 8, False), (5, 20, False)]
        if setting.quick
        else [(3, 8, False), (5, 20, False), (10, 40, False), (5, 20, True), (5, 20, True)]
    )
    rows, distances = [], []
    for N, d, mixed in cases:
        X, y, start = instance(N, d, generator, mixed)
        path, goal = flow(X, y, start), least(X, y, start)
        end = torch.from_numpy(path[:, -1].copy())
        distances.append(float((end - goal).abs().max()))
        drift = end**-3 - start**-3
        outside = float((drift - X.T @ torch.linalg.lstsq(X.T, drift.unsqueeze(1)).solution[:, 0]).abs().max())
        # other positive interpolants: the minimiser and a step in the null space of X, as long as positivity allows
        null = torch.linalg.svd(X).Vh[N:]
        steps = torch.randn(2000, len(null), dtype=X.dtype, generator=generator) @ null
        longest = torch.where(steps < 0, -goal / steps, torch.inf).amin(1, keepdim=True).clamp_max(1e3)
        others = goal + 0.99 * longest * torch.rand(2000, 1, dtype=X.dtype, generator=generator) * steps
        margin = float((Q(others, start) - Q(goal, start)).min())
        rows.append(
            (
                f"{N}, {d}",
                "mixed" if mixed else "1",
                distances[-1],
                outside,
                float(path.min()),
                margin,
                "1.5e-10, 1.1e-11",
            )
        )
        claim(margin > 0, f"(N, d) = ({N}, {d}): 2000 other positive interpolants have a larger Q")
        claim(float(path.min()) > 0, "beta stays positive on all of the path")
    headings = (
        "N, d",
        "start",
        "flow - argmin Q",
        "outside row space",
        "min beta",
        "least margin of Q",
        "reference (worst)",
    )
    print(table("Gradient flow of the diagonal linear equilibrium", headings, rows))
    claim(max(distances) < 1e-6, f"the flow ends at the minimiser of Q (worst {max(distances):.1e})")

    # what the flow is made of is the equilibrium's own gradient: d loss / d w = beta^2 g
    X, y, start = instance(3, 8, generator, True)
    w = (1 - 1 / start).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(w, X, y), w)
    by_hand = start.square() * (X.T @ (X @ start - y)) / len(y)
    agreement = float((gradient - by_hand).abs().max() / by_hand.abs().max())
    claim(agreement < 1e-12, f"the implicit gradient is beta^2 g ({agreement:.1e})")

    corner = torch.tensor([[1.0, 1, 0], [0, 1, 1]], dtype=torch.float64), torch.tensor([0.05, 2.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    ends = least(*corner, ones)
    shortest = torch.linalg.pinv(corner[0]) @ corner[1]
    print(
        f"  X = (1 1 0; 0 1 1), y = (.05, 2): ends at {[round(v, 4) for v in ends.tolist()]}; reference (.025, .025, 1.975)"
    )
    claim(bool((ends - torch.tensor([0.025, 0.025, 1.975])).abs().max() < 1e-3), "positive, as published")
    claim(float(shortest.min()) < -0.6, f"where the shortest interpolant has an entry of {float(shortest.min()):.2f}")

    X, y, start = instance(3, 8, torch.Generator().manual_seed(setting.seed + 1), False)
    goal = least(X, y, start)
    rates = (0.03, 0.01) if setting.quick else (0.03, 0.01, 0.001)
    descents = {lr: float((descend(X, y, start, lr) - goal).abs().max()) for lr in rates}
    reference = {0.03: "1.1e-2", 0.01: "3.7e-3", 0.001: "3.6e-4"}
    rows = [(lr, error, error / lr, reference.get(lr, "-")) for lr, error in descents.items()]
    print(table("Gradient descent instead of flow", ("learning rate", "to argmin Q", "ratio", "reference"), rows))
    ratios = [error / lr for lr, error in descents.items()]
    claim(max(ratios) < 1.5 * min(ratios), "descent ends off by the order of its learning rate")

    density = densities(setting)
    with figure(setting.output / "deq_theory_bias.png", 2) as (left, right):
        X, y, start = instance(3, 8, torch.Generator().manual_seed(setting.seed), False)
        path, goal = flow(X, y, start), least(X, y, start)
        for i in range(8):
            (line,) = left.plot(path[i], linewidth=1.2)
            left.plot(path.shape[1] - 1, float(goal[i]), "o", color=line.get_color())
        left.set(xlabel="step of the integrator", ylabel="beta", title="Gradient flow (lines) and argmin Q (dots)")
        for begin, beta in density["profiles"].items():
            right.plot((beta.sort(descending=True).values / beta.max()).numpy(), label=f"start {begin:g}")
        right.set(
            xlabel="entry, by size", ylabel="share of the largest", title="A small start is sparse, a large one dense"
        )
        right.legend()
    del density["profiles"]
    return {"distance": max(distances), "gradient": agreement, "descents": descents, **density}


def densities(setting: Setting) -> dict[str, Any]:
    """Entries of the minimiser above five per cent of the largest, by start; a truth of 4 among 40."""
    generator = torch.Generator().manual_seed(setting.seed)
    N, d = 12, 40
    X = torch.randn(N, d, dtype=torch.float64, generator=generator)
    truth = torch.zeros(d, dtype=torch.float64)
    truth[:4] = torch.tensor([2.0, 1.5, 3.0, 1.0])
    y = X @ truth
    reference = {0.05: "4, 0.25, 9.6", 0.1: "12, 0.52, 11.5", 0.3: "40, 2.4, 19", 1.0: "40, 7.8, 47"}
    rows, counts, norms, profiles = [], {}, list[float](), {}
    for begin in reference:
        beta = least(X, y, torch.full_like(truth, begin))
        norms.append(float(beta.sum()))
        counts[begin], profiles[begin] = int((beta > 0.05 * beta.max()).sum()), beta
        rows.append((begin, f"{counts[begin]} of {d}", float((beta - truth).norm()), norms[-1], reference[begin]))
    headings = ("beta(0)", "entries > 5 %", "|beta - truth|", "l1 norm", "reference (entries, distance, l1)")
    print(
        table(f"Density by start: {N} equations, a truth of 4 entries, l1 norm {float(truth.sum()):g}", headings, rows)
    )
    claim(norms == sorted(norms), f"the larger the start, the larger the l1 norm: {[round(v, 1) for v in norms]}")
    return {"counts": counts, "norms": norms, "profiles": profiles}
