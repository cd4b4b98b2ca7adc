r"""A steep rational target by one flat equilibrium model, solved by whatever solves it.

The target ``g(x) = x / (x + delta)``, ``delta = 2^-d``, on [0, 1] has slope ``2^d`` at zero.  Its inverse
``G(z) = delta z / (1 - z)`` is flat where ``g`` is steep.  Let ``G^`` interpolate ``G`` linearly on the nodes
``0, eps, .., 1 - eps`` and end at (1, 1), with slopes ``s_0 < s_1 < ..``, and ``c = 1 / max s``:

    z = u(z, x) = z - c (G^(z) - x) = v^T relu(a z + w x + b)
    v = (1 - c s_0, -c (s_1 - s_0), .., c),  a = (1, .., 1, 0),  w = (0, .., 0, 1),  b = (0, -eps, -2 eps, .., 0)

Both increase and agree at the nodes, so ``|z*(x) - g(x)| <= eps`` for every ``d``, with ``1/eps + 1`` neurons and weights
of at most one.  A feed-forward network needs weights ``((1/2 - 2 eps) 2^d / w^{L-1})^{1/L}``.  The scalar equilibrium and
the equilibrium ``h = relu((a v^T) h + w x + b)``, ``z = v^T h``, are one (lemma 1).

The model does not say how it is solved: Picard's contraction factor is ``1 - c s_0 -> 1``, bisection takes the same number
of steps for every ``d``, and the gradient is the same.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), theorem 2 and
lemma 1; the construction is derived here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from common import COLOURS, figure, table
from torch import Tensor

import implicitkit as ik

from .claims import Setting, claim

BISECTION = ik.extend.get_solver("bisection", width=0.5)  # [0, 1] around the start 0.5
ACCURACIES = (1e-3, 1e-6, 1e-12)  # of bisection


@dataclass(frozen=True)
class Steep:
    """The model for one ``d``: ``v``, ``a``, ``w``, ``b`` of shape ``(1/eps + 1,)``."""

    delta: float
    c: float
    slopes: Tensor
    nodes: Tensor
    v: Tensor
    a: Tensor
    w: Tensor
    b: Tensor

    @classmethod
    def build(cls, d: int, eps: float, dtype: torch.dtype = torch.float64) -> Steep:
        delta, cells = 2.0**-d, round(1 / eps)
        nodes = torch.arange(cells + 1, dtype=torch.float64) * eps
        heights = delta * nodes[:-1] / (1 - nodes[:-1])
        heights = torch.cat([heights, heights.new_ones(1)])
        slopes = heights.diff() / nodes.diff()
        c = 1 / float(slopes.max())
        v = torch.cat([1 - c * slopes[:1], -c * slopes.diff(), torch.tensor([c], dtype=torch.float64)])
        a = torch.ones(cells + 1, dtype=torch.float64)
        w = torch.zeros_like(a)
        a[-1], w[-1] = 0, 1
        b = torch.cat([-nodes[:-1], nodes.new_zeros(1)])
        return cls(delta, c, slopes, nodes, *(t.to(dtype) for t in (v, a, w, b)))

    def scalar(self, z: Tensor, x: Tensor) -> Tensor:
        """``v^T relu(a z + w x + b)``, ``z`` and ``x`` of shape ``(batch, 1)``."""
        return torch.relu(z * self.a + x * self.w + self.b) @ self.v.unsqueeze(1)

    def equation(self, z: Tensor, x: Tensor) -> Tensor:
        """``(G^(z) - x) / (x + delta)``: zero where ``z = u(z, x)``, without the subtraction of nearly equal numbers."""
        steps = torch.cat([self.slopes[:1], self.slopes.diff()]).to(z.dtype)
        return (torch.relu(z - self.nodes[:-1].to(z.dtype)) @ steps.unsqueeze(1) - x) / (x + self.delta)

    def wide(self, h: Tensor, x: Tensor) -> Tensor:
        """``relu((a v^T) h + w x + b)``, ``h (batch, 1/eps + 1)``."""
        return torch.relu((h @ self.v.unsqueeze(1)) * self.a + x * self.w + self.b)

    def target(self, x: Tensor) -> Tensor:
        """``g(x)``."""
        return x / (x + self.delta)

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``z*`` by inverting the interpolant, and ``dz*/dx = 1 / s`` on its cell."""
        heights = torch.cat([self.slopes.new_zeros(1), (self.slopes * self.nodes.diff()).cumsum(0)])
        i = (torch.searchsorted(heights, x, right=True) - 1).clamp(0, len(self.slopes) - 1)
        return self.nodes[i] + (x - heights[i]) / self.slopes[i], 1 / self.slopes[i]


def accuracy(eps: float, sizes: tuple[int, ...]) -> tuple[list[tuple[Any, ...]], dict[int, float]]:
    """Largest error over [0, 1], by bisection, and what a feed-forward network's weights would have to be."""
    rows, errors = [], {}
    for d in sizes:
        model = Steep.build(d, eps)
        x = torch.cat([torch.logspace(-d - 4, 0, 400, base=2.0), torch.linspace(0, 1, 100)]).double().unsqueeze(1)
        solution = ik.root(model.equation, torch.full_like(x, 0.5), (x,), solver=BISECTION, batch_dims=1, rtol=0.0,
                           atol=1e-300, max_steps=45, on_failure="ignore")  # fmt: skip  # to an interval of 2^-45
        errors[d] = float((solution.value - model.target(x)).abs().max())
        needed = ((0.5 - 2 * eps) * 2.0**d / 10) ** 0.5
        rows.append((d, errors[d], eps, float(torch.outer(model.a, model.v).abs().max()), max(1.0, needed)))
    return rows, errors


def rank_one(setting: Setting, models: int = 200, width: int = 12) -> float:
    """Lemma 1 on random models ``v, a, w, b``, ``sum |v_i a_i| = 0.9``, one input each: the largest relative distance of the
    scalar equilibrium ``z = v^T relu(a z + w x + b)`` from ``v^T h`` of the wide one, found apart."""
    generator = torch.Generator().manual_seed(setting.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(models, *shape, dtype=torch.float64, generator=generator)

    v, a, w, b, x = draw(width), draw(width), draw(width), draw(width), draw(1)
    v = 0.9 * v / (v * a).abs().sum(1, keepdim=True)
    neurons = w * x + b
    options: dict[str, Any] = {"solver": "newton", "batch_dims": 1, "rtol": 1e-14, "atol": 1e-14}

    def scalar(z: Tensor, v: Tensor, a: Tensor, neurons: Tensor) -> Tensor:
        return (v * torch.relu(a * z + neurons)).sum(1, keepdim=True)

    def wide(h: Tensor, v: Tensor, a: Tensor, neurons: Tensor) -> Tensor:
        return torch.relu(a * (v * h).sum(1, keepdim=True) + neurons)

    z = ik.fixed_point(scalar, torch.zeros_like(x), (v, a, neurons), **options).value
    h = ik.fixed_point(wide, torch.zeros_like(v), (v, a, neurons), **options).value
    return float(((v * h).sum(1, keepdim=True) - z).abs().max() / z.abs().max())


def many_inputs(d: int, eps: float, seed: int, points: int = 200) -> tuple[float, float]:
    """The wide equilibrium on ``[0, 1]^d``, its input matrix ``w e_1^T``, and the target ``x_1 / (x_1 + 2^-d)``: the largest
    error at random points, half of them near ``x_1 = 0``, and the largest derivative by any other input."""
    model = Steep.build(d, eps)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(points, d, dtype=torch.float64, generator=generator)
    x[::2, 0] = torch.exp2(-(d + 4) * x[::2, 0])
    x.requires_grad_()
    U = torch.zeros(len(model.w), d, dtype=torch.float64)
    U[:, 0] = model.w

    def wide(h: Tensor, x: Tensor) -> Tensor:
        return torch.relu((h @ model.v.unsqueeze(1)) * model.a + x @ U.T + model.b)

    start = torch.relu(0.999 * model.a + x.detach() @ U.T + model.b)
    h = ik.fixed_point(wide, start, (x,), solver="newton", batch_dims=1, rule=ik.Implicit("lu")).value
    z = h @ model.v
    (slopes,) = torch.autograd.grad(z.sum(), x)
    return float((z - model.target(x[:, 0])).abs().max().detach()), float(slopes[:, 1:].abs().max())


def bisections(sizes: tuple[int, ...] = (6, 10, 14)) -> dict[float, list[int | None]]:
    """Steps of bisection from an interval of length one to each accuracy, for every ``d``."""
    return {goal: [steps_to(Steep.build(d, 0.1), BISECTION, 0.5, 60, goal)[0] for d in sizes] for goal in ACCURACIES}


def steps_to(model: Steep, solver: Any, start: float, limit: int, goal: float = 1e-3) -> tuple[int | None, float]:
    """Steps until ``|z - z*| <= goal`` at ``x = 2 delta`` (``None``: not within the limit), and the error then."""
    x = torch.full((1, 1), 2 * model.delta, dtype=torch.float64)
    truth, _ = model.exact(x)

    def close(step: int, z: Tensor, norm: Tensor) -> bool:
        return bool((z - truth).abs().max() <= goal)

    z0 = torch.full_like(x, start)
    tolerances: dict[str, Any] = {"rtol": 0.0, "atol": 1e-300, "max_steps": limit, "on_failure": "ignore"}
    solution = ik.fixed_point(model.scalar, z0, (x,), solver=solver, batch_dims=1, callback=close, **tolerances)
    error = float((solution.value - truth).abs())
    return (int(solution.steps) if error <= goal else None), error


def gradients(model: Steep, solvers: dict[str, tuple[Any, float]]) -> dict[str, float]:
    """Relative error of ``dz*/dx`` where each solver, given time, has found the equilibrium."""
    errors = {}
    for name, (solver, start) in solvers.items():
        x = torch.full((1, 1), 2 * model.delta, dtype=torch.float64, requires_grad=True)
        z0 = torch.full_like(x, start, requires_grad=False)
        solution = ik.fixed_point(
            model.scalar, z0, (x,), solver=solver, batch_dims=1, rtol=0.0, atol=1e-14, max_steps=200_000
        )
        (slope,) = torch.autograd.grad(solution.value.sum(), x)
        truth = float(model.exact(x.detach())[1])
        errors[name] = abs(float(slope) - truth) / truth
    return errors


def run(setting: Setting) -> dict[str, Any]:
    """Accuracy for every d, lemma 1, solvers, gradients, precision."""
    sizes = (6, 10, 14, 20, 40) if setting.quick else (*range(6, 21), 40)
    errors = {}
    for eps in (0.1, 0.02):
        rows, errors[eps] = accuracy(eps, sizes)
        headings = ("d", "sup error", "bound", "largest weight", "FNN's, L = 2, w = 10")
        print(table(f"Steep target, eps = {eps:g}: {round(1 / eps) + 1} neurons", headings, rows))
        claim(max(errors[eps].values()) <= eps * (1 + 1e-6), f"error at most {eps:g} for every d, weights at most 1")
        claim(all(row[3] <= 1 for row in rows), "and no weight exceeds one")

    # lemma 1: scalar and wide equilibrium
    model = Steep.build(6, 0.1)
    x = torch.rand(200, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(setting.seed))
    h = ik.fixed_point(model.wide, x.new_zeros(200, len(model.a)), (x,), solver="newton", batch_dims=1).value
    lemma = float((h @ model.v.unsqueeze(1) - model.exact(x)[0]).abs().max())
    claim(lemma < 1e-9, f"lemma 1: the wide equilibrium reads out the scalar one, at 200 inputs ({lemma:.1e})")
    random = rank_one(setting)
    claim(random < 1e-12, f"and so it does for 200 random models ({random:.1e})")

    many = {d: many_inputs(d, 0.1, setting.seed) for d in (6, 10, 14, 20)}
    print(f"  d inputs: sup error {', '.join(f'{error:.3f} (d = {d})' for d, (error, _) in many.items())}")
    claim(
        all(error <= 0.1 * (1 + 1e-6) and other == 0 for error, other in many.values()),
        "on [0, 1]^d the bound is the same, and the other inputs have no influence",
    )

    solvers: dict[str, tuple[Any, float]] = {
        "bisection": (BISECTION, 0.5),
        "newton": ("newton", 0.999),
        "picard": ("picard", 0.0),
        "anderson": ("anderson", 0.0),
        "broyden": ("broyden", 0.0),
    }
    limits = {"picard": 2_000 if setting.quick else 20_000}
    found: dict[tuple[str, int], int | None] = {}
    rows = []
    for name, (solver, start) in solvers.items():
        for d in (6, 10, 14):
            limit = limits.get(name, 500)
            found[name, d], error = steps_to(Steep.build(d, 0.1), solver, start, limit)
            steps = found[name, d]
            rows.append((name, d, f"> {limit}" if steps is None else str(steps), error))
    print(table("Steps to |z - z*| <= 1e-3 at x = 2 delta", ("solver", "d", "steps", "error"), rows))
    halvings = bisections()
    for goal, counts in halvings.items():
        most = math.ceil(-math.log2(goal)) + 1
        claim(
            all(k is not None and k <= most for k in counts),
            f"bisection to {goal:g}: {counts} steps for d = 6, 10, 14, at most log2(1/{goal:g}) + 1 = {most}",
        )
    claim(
        all((found["newton", d] or 99) <= 8 for d in (6, 10, 14)), "Newton's method from the right: a handful of steps"
    )
    slow = found["picard", 10]
    claim(slow is None or slow > 5_000, "Picard: thousands of steps at d = 10, since its factor is 1 - c s_0")

    slopes = gradients(Steep.build(6, 0.1), solvers)
    claim(
        max(slopes.values()) < 1e-9, f"one gradient from all of them (worst relative error {max(slopes.values()):.1e})"
    )
    rows = []
    for d in (6, 10, 14):
        one = Steep.build(d, 0.1)
        _, slope = one.exact(torch.full((1, 1), 2 * one.delta, dtype=torch.float64))
        rows.append((d, float(one.c / slope), float(slope), float(one.delta / (3 * one.delta) ** 2)))
    print(table("Conditioning at x = 2 delta", ("d", "1 - du/dz", "dz/dx", "dg/dx"), rows))

    # float32: the weights c delta come below its resolution near 1 at d = 20, where the processor's rounding decides
    single: dict[int, float] = {}
    for d in (6, 14, 20, 24):
        low = Steep.build(d, 0.1, torch.float32)
        x32 = torch.logspace(-d - 4, 0, 400, base=2.0).unsqueeze(1)
        half = torch.full_like(x32, 0.5)
        z32 = ik.fixed_point(
            low.scalar, half, (x32,), solver="bisection", batch_dims=1, rtol=0.0, atol=1e-30, on_failure="ignore"
        ).value
        single[d] = float((z32 - low.target(x32)).abs().max())
    print(f"  float32: sup error {', '.join(f'{e:.3f} (d = {d})' for d, e in single.items())}")

    claim(single[6] < 0.1 < single[24], "float32 keeps the bound at d = 6 and cannot at d = 24")

    with figure(setting.output / "deq_theory_steep.png", 2) as (left, right):
        for d, colour in zip((6, 10, 14), COLOURS, strict=False):
            one = Steep.build(d, 0.1)
            grid = torch.logspace(-d - 4, 0, 300, base=2.0, dtype=torch.float64)
            left.semilogx(grid.numpy(), one.target(grid).numpy(), color=colour, alpha=0.4, linewidth=3)
            left.semilogx(grid.numpy(), one.exact(grid)[0].numpy(), color=colour, linewidth=1, label=f"d = {d}")
        left.set(xlabel="x", ylabel="z*(x); pale: the target", title="11 neurons, weights at most 1, error at most 0.1")
        left.legend()
        for i, name in enumerate(solvers):
            heights = [found[name, d] for d in (6, 10, 14)]
            where = [k + 0.16 * (i - 2) for k in range(3)]
            limit = limits.get(name, 500)
            bars = right.bar(where, [h or limit for h in heights], 0.15, label=name)
            for bar, height in zip(bars, heights, strict=True):
                if height is None:  # as high as the steps it was given
                    bar.set(fill=False, edgecolor=bar.get_facecolor(), linestyle=":")
        right.set(yscale="log", ylim=(1, 1e5), ylabel="steps to |z - z*| = 1e-3", title="One model (dotted: not found)")
        right.set_xticks(range(3), ["d = 6", "d = 10", "d = 14"])
        right.legend(ncols=2)
    return {
        "errors": errors,
        "lemma": lemma,
        "random": random,
        "many": many,
        "steps": found,
        "bisections": halvings,
        "slopes": slopes,
        "single": single,
    }
