r"""The implicit bias of the diagonal linear equilibrium: gradient flow ends where ``Q`` is least.

    z = w * z + x,   f(x) = 1^T z = beta . x,   beta_i = 1 / (1 - w_i),   loss = |X beta - y|^2 / (2 N)

Gradient flow in ``w`` is ``d beta_i / dt = -beta_i^4 g_i`` with ``g = d loss / d beta``, so ``beta_i^{-3}`` moves in the row
space of ``X`` and stays positive.  Among the interpolants with ``beta > 0`` the flow ends at the minimiser of

    Q(beta) = sum_i [ 1 / (2 beta_i^2) + beta_i / beta_i(0)^3 ],

which is convex there and penalises small entries as much as large ones: from a small start ``Q`` is nearly the l1 norm
and its minimiser sparse, from a large one mostly dense.  Weights go as far as they must: nothing is linearised about the
start, as it is in lazy training (a neural tangent kernel), where the interpolant nearest to the start would be taken
(``generalisation`` has that one beside it).

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


def flow(X: Tensor, y: Tensor, start: Tensor, end: float = 1e5, times: Any = None) -> np.ndarray:
    """``beta`` of gradient flow up to the time ``end``, at ``times`` or where the integrator has stepped (in coordinates
    ``beta^{-3} / 3``, whose rate is the gradient)."""
    A, b = X.numpy(), y.numpy()

    def rate(_: float, s: np.ndarray) -> np.ndarray:
        return A.T @ (A @ (3 * s) ** (-1 / 3) - b) / len(b)

    def jacobian(_: float, s: np.ndarray) -> np.ndarray:
        return -(A.T @ A) * (3 * s) ** (-4 / 3) / len(b)

    begin = start.numpy() ** -3 / 3
    found = scipy.integrate.solve_ivp(rate, (0, end), begin, "Radau", times, jac=jacobian, rtol=1e-10, atol=1e-13)
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
        rows.append((f"{N}, {d}", "mixed" if mixed else "1", distances[-1], outside, float(path.min()), margin))
        claim(margin > 0, f"(N, d) = ({N}, {d}): 2000 other positive interpolants have a larger Q")
        claim(float(path.min()) > 0, "beta stays positive on all of the path")
    headings = ("N, d", "start", "flow - argmin Q", "outside row space", "min beta", "least margin of Q")
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
    print(f"  X = (1 1 0; 0 1 1), y = (.05, 2): ends at {[round(v, 4) for v in ends.tolist()]}")
    claim(float(ends.min()) > 0.02, "with all entries positive")
    claim(float(shortest.min()) < -0.6, f"where the shortest interpolant has an entry of {float(shortest.min()):.2f}")
    signed = signs(setting)

    X, y, start = instance(3, 8, torch.Generator().manual_seed(setting.seed + 1), False)
    goal = least(X, y, start)
    rates = (0.03, 0.01) if setting.quick else (0.03, 0.01, 0.001)
    descents = {lr: float((descend(X, y, start, lr) - goal).abs().max()) for lr in rates}
    rows = [(lr, error, error / lr) for lr, error in descents.items()]
    print(table("Gradient descent instead of flow", ("learning rate", "to argmin Q", "ratio"), rows))
    ratios = [error / lr for lr, error in descents.items()]
    claim(max(ratios) < 1.5 * min(ratios), "descent ends off by the order of its learning rate")

    ends_of = optimisers(setting)
    density = densities(setting)
    with figure(setting.output / "deq_theory_bias.png", 2) as (left, right):
        X, y, start = instance(3, 8, torch.Generator().manual_seed(setting.seed), False)
        goal, times = least(X, y, start), np.logspace(-3, 2, 200)
        path = flow(X, y, start, times[-1], times)
        for i in range(8):
            (line,) = left.semilogx(times, path[i], linewidth=1.2)
            left.plot(times[-1], float(goal[i]), "o", color=line.get_color(), clip_on=False)
        left.set(xlabel="time", ylabel="$\\beta_i$", title="Gradient flow (lines) and argmin Q (dots)")
        for begin, beta in density["profiles"].items():
            label = (
                f"${begin.split(',')[0]}$ from{begin.split(',')[1]}"
                if isinstance(begin, str)
                else f"equilibrium from {begin:g}"
            )
            style = "--" if isinstance(begin, str) else "-"
            right.plot((beta.sort(descending=True).values / beta.max()).numpy(), style, label=label)
        right.set(
            xlabel="entry, by size", ylabel="share of the largest", title="A small start is sparse, a large one dense"
        )
        right.legend()
    del density["profiles"]
    found = {"distance": max(distances), "gradient": agreement, "descents": descents, "signs": signed}
    return {**found, "optimisers": ends_of, **density}


def quadratic(X: Tensor, y: Tensor, start: float) -> Tensor:
    """Where gradient flow of ``beta = u^2 - v^2`` ends, from ``u = v = start``.

    ``u = start e^s``, ``v = start e^-s`` and ``ds/dt = -X^T (X beta - y) / N``, ``beta = 2 start^2 sinh 2 s``: the flow of
    Woodworth et al. (2020), "Kernel and rich regimes in overparametrized models", in its own coordinates.
    """
    A, b = X.numpy(), y.numpy()

    def rate(_: float, s: np.ndarray) -> np.ndarray:
        return -A.T @ (A @ (2 * start**2 * np.sinh(2 * s)) - b) / len(b)

    def jacobian(_: float, s: np.ndarray) -> np.ndarray:
        return -(A.T @ A) * (4 * start**2 * np.cosh(2 * s)) / len(b)

    begin = np.zeros(A.shape[1])
    found = scipy.integrate.solve_ivp(rate, (0, 1e5), begin, "Radau", jac=jacobian, rtol=1e-8, atol=1e-10)
    return torch.from_numpy(2 * start**2 * np.sinh(2 * found.y[:, -1]))


def signs(setting: Setting) -> dict[str, float]:
    """A truth with a negative entry, as many equations as unknowns: the loss at the end with the readout ``1^T z``, and with
    ``s^T z``, ``s`` the signs of the truth.  ``beta_i = s_i / (1 - w_i)`` has the sign of ``s_i`` for ever."""
    generator = torch.Generator().manual_seed(setting.seed)
    X, _, start = instance(8, 8, generator, False)
    truth = 0.5 + torch.rand(8, dtype=torch.float64, generator=generator)
    truth[0] = -1
    y, found = X @ truth, {}
    for name, readout in (("ones", torch.ones_like(truth)), ("signs of the truth", truth.sign())):
        beta = readout * torch.from_numpy(flow(X * readout, y, start)[:, -1].copy())
        found[name] = float((X @ beta - y).square().mean() / 2)
    claim(found["ones"] > 1e-2, f"no positive beta fits an entry of -1: the loss stays at {found['ones']:.3f}")
    claim(found["signs of the truth"] < 1e-8, f"with signs in the readout it goes to {found['signs of the truth']:.0e}")
    return found


def optimisers(setting: Setting) -> dict[str, list[float]]:
    """Distance from argmin Q, relative, of where descent, descent on single samples, momentum and Adam end; ten draws.

    All are at zero loss then; the bias is that of the flow, which Adam does not follow.
    """
    draws = [instance(3, 8, torch.Generator().manual_seed(setting.seed + k), False) for k in range(10)]
    X, y, start = (torch.stack(t) for t in zip(*draws, strict=True))
    goal = torch.stack([least(*draw) for draw in draws])
    generator = torch.Generator().manual_seed(setting.seed)
    ends, steps = {}, 2_000 if setting.quick else 60_000
    w = (1 - 1 / start).requires_grad_()
    for name, used in (
        ("descent", torch.optim.SGD([w], 1e-2)),
        ("single samples", torch.optim.SGD([w], 1e-2)),
        ("momentum", torch.optim.SGD([w], 1e-3, momentum=0.9)),
        ("Adam", torch.optim.Adam([w], 1e-3)),
    ):
        w.data.copy_(1 - 1 / start)
        for _ in range(steps):
            beta = 1 / (1 - w.detach())
            if name == "single samples":
                k = torch.randint(0, 3, (10,), generator=generator)
                A, b = X[torch.arange(10), k].unsqueeze(1), y[torch.arange(10), k].unsqueeze(1)
            else:
                A, b = X, y
            error = (A @ beta.unsqueeze(2)).squeeze(2) - b
            w.grad = beta.square() * (A.mT @ error.unsqueeze(2)).squeeze(2) / A.shape[1]
            used.step()
        beta = 1 / (1 - w.detach())
        loss = ((X @ beta.unsqueeze(2)).squeeze(2) - y).square().mean(1)
        claim(float(loss.max()) < 1e-8, f"{name}: all ten at zero loss ({float(loss.max()):.0e})")
        ends[name] = ((beta - goal).norm(dim=1) / goal.norm(dim=1)).sort().values.tolist()
    rows = [(name, d[len(d) // 2], d[0], d[-1]) for name, d in ends.items()]
    print(table("Distance from argmin Q, relative, ten draws", ("optimiser", "median", "least", "largest"), rows))
    claim(ends["Adam"][5] > 5 * ends["descent"][5], "Adam ends elsewhere: the bias is that of the optimiser, too")
    return ends


def densities(setting: Setting) -> dict[str, Any]:
    """Entries of the minimiser above five per cent of the largest, by start; a truth of 4 among 40."""
    generator = torch.Generator().manual_seed(setting.seed)
    N, d = 12, 40
    X = torch.randn(N, d, dtype=torch.float64, generator=generator)
    truth = torch.zeros(d, dtype=torch.float64)
    truth[:4] = torch.tensor([2.0, 1.5, 3.0, 1.0])
    y = X @ truth
    rows, counts, norms, profiles = [], {}, list[float](), {}
    for begin in (0.05, 0.1, 0.3, 1.0):
        beta = least(X, y, torch.full_like(truth, begin))
        norms.append(float(beta.sum()))
        counts[begin], profiles[begin] = int((beta > 0.05 * beta.max()).sum()), beta
        rows.append((begin, f"{counts[begin]} of {d}", float((beta - truth).norm()), norms[-1]))
    plain = {begin: quadratic(X, y, begin) for begin in (1e-3, 1.0)}
    for begin, beta in plain.items():
        many = int((beta.abs() > 0.05 * beta.abs().max()).sum())
        counts[f"u^2 - v^2, {begin:g}"] = many
        size = float(beta.abs().sum())
        rows.append((f"u^2 - v^2 from {begin:g}", f"{many} of {d}", float((beta - truth).norm()), size))
        profiles[f"u^2 - v^2, {begin:g}"] = beta.abs()
    rows = [(str(name), *rest) for name, *rest in rows]
    headings = ("beta(0)", "entries > 5 %", "|beta - truth|", "l1 norm")
    print(
        table(f"Density by start: {N} equations, a truth of 4 entries, l1 norm {float(truth.sum()):g}", headings, rows)
    )
    claim(norms == sorted(norms), f"the larger the start, the larger the l1 norm: {[round(v, 1) for v in norms]}")
    claim(
        counts["u^2 - v^2, 0.001"] <= 12 < 30 <= counts[1.0],
        "a network u^2 - v^2 from a small start is sparse where the equilibrium from its own start, w = 0, is dense",
    )
    claim(
        counts["u^2 - v^2, 1"] > counts["u^2 - v^2, 0.001"],
        "from a large one it is dense, too: density is a matter of the start as well as of the architecture",
    )
    return {"counts": counts, "norms": norms, "profiles": profiles}
