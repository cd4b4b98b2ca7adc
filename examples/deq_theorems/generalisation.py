r"""Which interpolant the linear equilibrium takes, and how it generalises.

The diagonal linear equilibrium ``f(x) = beta . x`` (``bias``) ends, from ``beta(0) = s`` in all entries, at the minimiser of

    Q(beta) = sum_i [ 1 / (2 beta_i^2) + beta_i / s^3 ]      over   X beta = y,  beta > 0.

*Which.*  On the positive interpolants ``Q`` is strictly convex, ``Q'' = 3 / beta^4``, so that there is one minimiser:
Newton's method ends there from every start.  Beyond them it is unbounded below: along a direction ``n`` of the null
space of ``X`` with ``sum n < 0`` it falls like ``t sum n / s^3``.  It is positivity, which the flow keeps, that makes
the bias.

*How well.*  Where the truth is positive it is an interpolant itself, so that ``Q(beta) <= Q(truth)``, and with it

    |beta|_1 <= s^3 Q(truth),     beta_i >= (2 Q(truth))^{-1/2}.

A bound on the l1 norm bounds the gap between the error on ``N`` points and on new ones by ``max |x_ij| |beta|_1 sqrt(2
log(2 d) / N)`` (its Rademacher complexity, for a loss of Lipschitz constant one): the equilibrium's width does not enter
but by a logarithm.  What that is worth is measured: ``|beta - truth|^2 / |truth|^2``, the error on new inputs, for
truths of equal entries but for some spread, of log-normal entries, and of four entries, against what else fits the same
points.

What comes out (20 draws, medians, 20 points for 40 coefficients): each start suits a truth.  From 1 the equilibrium is best
on log-normal coefficients (0.09; the least norm 0.47, the interpolant nearest to the start, which lazy training would take,
0.30), as good as that nearest one where the truth is near 1 (0.04 and 0.03), and far worse than nothing where it has four
entries (2.8; the least norm 0.53), until there are 25 points.  From 0.1 it finds the four entries (0.005), as
``u^2 - v^2`` does (0.012), and is no better than the least norm near 1.  All of it is bias, not a merit of equilibria.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), theorem 3
and the questions to it; the bounds are derived here, the complexity is that of Kakade, Sridharan & Tewari (2008), "On the
complexity of linear prediction".
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from common import band, figure, table
from torch import Tensor

from .bias import Q, instance, least, quadratic
from .claims import Setting, claim

D = 40
WAYS = ("equilibrium from 1", "equilibrium from 0.1", "least distance to 1", "least norm", "u^2 - v^2 from 0.001")


def truths(generator: torch.Generator) -> dict[str, Tensor]:
    """Positive coefficients, ``(D,)``, by name."""
    uniform, normal = (f(D, dtype=torch.float64, generator=generator) for f in (torch.rand, torch.randn))
    sparse = torch.full((D,), 0.05, dtype=torch.float64)
    sparse[:4] = 1 + 2 * uniform[:4]
    return {"near 1": 0.5 + uniform, "log-normal": normal.exp(), "four entries": sparse}


def unique(setting: Setting) -> dict[str, float]:
    """Newton's method on ``Q`` over the positive interpolants from many of them, and ``Q`` far outside."""
    starts = 50 if setting.quick else 200
    generator = torch.Generator().manual_seed(setting.seed)
    X, y, start = instance(5, 20, generator, True)
    goal, null = least(X, y, start), torch.linalg.svd(X).Vh[5:]
    steps = torch.randn(starts, len(null), dtype=X.dtype, generator=generator) @ null
    longest = torch.where(steps < 0, -goal / steps, torch.inf).amin(1, keepdim=True)
    begin = goal + 0.999 * torch.rand(starts, 1, dtype=X.dtype, generator=generator) * longest * steps

    beta = begin
    for _ in range(60):  # Newton's method in the null space, steps halved until Q is finite and falls
        gradient, curvature = start**-3 - beta**-3, 3 * beta**-4
        step = -torch.linalg.solve((null * curvature.unsqueeze(1)) @ null.T, gradient @ null.T) @ null
        size, value = torch.ones(starts, 1, dtype=X.dtype), Q(beta, start)
        for _ in range(40):
            tried = beta + size * step
            size = torch.where(((tried > 0).all(1) & (Q(tried, start) <= value)).unsqueeze(1), size, size / 2)
        beta = torch.where(size > 1e-9, beta + size * step, beta)
    apart = float((beta - goal).abs().max())
    far = float((begin - goal).norm(dim=1).median() / goal.norm())
    down = null.T @ (null @ -(start**-3))  # the steepest way down of the linear part
    lengths = torch.logspace(1, 6, 6, dtype=X.dtype)
    values = torch.stack([Q(goal + t * down, start) for t in lengths])
    slopes = values / lengths
    claim(
        apart < 1e-6, f"from {starts} positive interpolants, {far:.2f} away in the median, one minimiser ({apart:.1e})"
    )
    claim(
        bool((values.diff() < 0).all()) and float(slopes[-1]) < -1e-3,
        f"beyond them Q falls without end: {float(values[-1]):.1e} at a distance of {float(lengths[-1] * down.norm()):.1e}",
    )
    return {"apart": apart, "below": float(values[-1])}


def fitted(X: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Five interpolants, ``(D,)`` each, in the order of ``WAYS``."""
    ones, pseudo = torch.ones(D, dtype=X.dtype), torch.linalg.pinv(X)
    found = [
        least(X, y, ones),
        least(X, y, 0.1 * ones),
        ones + pseudo @ (y - X @ ones),
        pseudo @ y,
        quadratic(X, y, 1e-3),
    ]
    return dict(zip(WAYS, found, strict=True))


def errors(setting: Setting, counts: tuple[int, ...], draws: int) -> dict[tuple[str, str], list[list[float]]]:
    """By truth and way: errors on new inputs relative to the truth's, a list by number of points for every draw."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    worst = 0.0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(setting.seed + draw)
        X = torch.randn(max(counts), D, dtype=torch.float64, generator=generator)
        for name, truth in truths(generator).items():
            for way in WAYS:
                found.setdefault((name, way), []).append([])
            for N in counts:
                for way, beta in fitted(X[:N], X[:N] @ truth).items():
                    found[name, way][-1].append(float((beta - truth).square().sum() / truth.square().sum()))
                    if way == WAYS[0]:
                        bound = Q(truth, torch.ones_like(truth))
                        worst = max(worst, float(beta.sum() / bound), float((2 * bound) ** -0.5 / beta.min()))
    claim(
        worst <= 1,
        f"|beta|_1 and the least entry keep the bounds of Q(truth) in all {draws} draws ({worst:.2f} of them)",
    )
    return found


def run(setting: Setting) -> dict[str, Any]:
    """One minimiser, and how it does on new inputs."""
    one = unique(setting)
    counts, draws = ((5, 20), 3) if setting.quick else ((5, 10, 15, 20, 25, 30, 35), 20)
    found = errors(setting, counts, draws)
    names = list(dict.fromkeys(name for name, _ in found))
    middle = {key: torch.tensor(runs).median(0).values for key, runs in found.items()}
    rows = [(name, way, *middle[name, way].tolist()) for name, way in itertools.product(names, WAYS)]
    title = f"Error on new inputs over |truth|^2, {D} coefficients, {draws} draws: medians by number of points"
    print(table(title, ("truth", "interpolant", *map(str, counts)), rows))
    at = {key: float(medians[counts.index(20)]) for key, medians in middle.items()}
    for name, better, worse, factor in (
        ("near 1", "equilibrium from 1", "least norm", 5),
        ("log-normal", "equilibrium from 1", "least distance to 1", 1.5),
        ("four entries", "equilibrium from 0.1", "least norm", 10),
        ("four entries", "least norm", "equilibrium from 1", 2),
    ):
        ratio = at[name, worse] / at[name, better]
        claim(ratio > factor, f"truth {name}, 20 points: {better} is {ratio:.1f} times nearer than {worse}")
    with figure(setting.output / "deq_theory_generalisation.png", 3) as axes:
        for axis, name in zip(axes, names, strict=True):
            for way, marker in zip(WAYS, "osD^v", strict=True):
                band(axis, counts, found[name, way], way, (0.25, 0.75), marker=marker, markersize=3)
            axis.set(title=f"truth: {name}", xlabel="points", yscale="log")
        axes[0].set_ylabel("error on new inputs / $|\\beta^*|^2$")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return {**one, "errors": found}
