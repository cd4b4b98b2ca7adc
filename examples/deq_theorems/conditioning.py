r"""Well-posedness and conditioning: which cells have one equilibrium, and what its gradient costs near the edge.

The equilibrium is unique and Picard's iteration finds it where ``|J|_2 < 1``; a monotone cell has one whatever its weights;
a free cell may have several, or a cycle of contractions none at all that is isolated (``I - J`` singular).  The gradient
passes through ``(I - J)^{-1}``: implicit differentiation does not keep it from exploding as ``rho(J) -> 1``, it only makes
it computable, and Krylov methods make it cheap where the Neumann series does not.

Source: Winston & Kolter (2020), "Monotone operator equilibrium networks", theorem 1; the numbers are derived here.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from common import figure, table
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ, cells, condition_number, spectral_radius, tie_weights

from .claims import Setting, claim

LINEAR = ("neumann", "gmres", "bicgstab", "broyden", "lu")


def affine(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    """``W z + x``."""
    return W @ z + x


def adjoint(setting: Setting) -> dict[float, dict[str, Any]]:
    """Norm of the inverse, steps of each linear solver, and the gradient's error, as ``rho(J)`` approaches one."""
    n = 30
    generator = torch.Generator().manual_seed(setting.seed)
    W = torch.randn(n, n, dtype=torch.float64, generator=generator)
    W = W @ W.T  # eigenvalues real and positive, the largest at the edge; a skew part makes it non-normal
    skew = torch.randn(n, n, dtype=torch.float64, generator=generator)
    W = W / torch.linalg.eigvals(W).abs().max() + 0.1 * (skew - skew.T) / n**0.5
    W = W / torch.linalg.eigvals(W).abs().max()
    c, x0 = (torch.randn(n, dtype=torch.float64, generator=generator) for _ in range(2))
    eye = torch.eye(n, dtype=torch.float64)
    found: dict[float, dict[str, Any]] = {}
    rows = []
    for rho in (0.5, 0.9, 0.99) if setting.quick else (0.5, 0.9, 0.99, 0.999):
        inverse = torch.linalg.inv(eye - rho * W)
        found[rho] = {"norm": float(torch.linalg.matrix_norm(inverse, 2))}
        x = x0.clone().requires_grad_()
        for linear in LINEAR:
            rule = ik.Implicit(linear, rtol=1e-10, max_steps=50_000)
            solution = ik.fixed_point(affine, torch.zeros_like(x), (rho * W, x), solver="newton", rule=rule)
            (gradient,) = torch.autograd.grad(c @ solution.value, x)
            error = float((gradient - inverse.T @ c).norm() / (inverse.T @ c).norm())
            report = solution.backward
            found[rho][linear] = 0 if report is None else int(report.steps), error
        steps = [found[rho][linear][0] for linear in LINEAR[:-1]]
        error = max(found[rho][linear][1] for linear in LINEAR)
        rows.append((rho, found[rho]["norm"], *steps, error, 1 / (1 - rho)))
    headings = ("rho(J)", "|(I-J)^-1|", *LINEAR[:-1], "worst error", "dz/dx, z = rho z + x")
    print(table(f"The adjoint system near the edge, n = {n}: products to 1e-10", headings, rows))
    largest = max(found)
    claim(
        found[largest]["norm"] >= 1 / (1 - largest),
        "the gradient grows at least like 1 / (1 - rho): no rule keeps it small",
    )
    series = [found[rho]["neumann"][0] for rho in sorted(found)]
    claim(all(b > 3 * a for a, b in itertools.pairwise(series[1:])), f"the Neumann series needs {series} products")
    claim(all(found[rho]["gmres"][0] <= n + 1 for rho in found), f"GMRES at most n + 1 = {n + 1}")
    claim(max(found[r][s][1] for r in found for s in LINEAR) < 1e-6, "and all give the same gradient")
    return found


def well_posed(setting: Setting) -> dict[str, dict[str, Any]]:
    """For cells with weights of increasing freedom: how many equilibria there are, and what finds them."""
    n, starts = 6, 24 if setting.quick else 64
    generator = torch.Generator().manual_seed(setting.seed)
    torch.manual_seed(setting.seed)
    double: dict[str, Any] = {"dtype": torch.float64}

    def scaled(scale: float) -> cells.MLP:
        return cells.MLP(4, n, scale=scale, **double)

    steep = scaled(3.0)
    with torch.no_grad():  # symmetric: several equilibria, as in a Hopfield network
        steep.recurrent.weight.copy_(
            3.0 * torch.eye(n, **double) + 0.1 * torch.randn(n, n, generator=generator, **double)
        )
        steep.injection.weight.mul_(0.2)
        steep.injection.bias.mul_(0.2)
    monotone = cells.Monotone(4, n, **double)
    with torch.no_grad():
        monotone.Q.mul_(2)
    net = torch.nn.Sequential(torch.nn.Linear(4, n, **double), torch.nn.ReLU(), torch.nn.Linear(n, n, **double))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(10)
    tried = {
        "MLP, |W| = 0.5": scaled(0.5),
        "MLP, |W| = 0.95": scaled(0.95),
        "MLP, |W| = 3, free": steep,
        "Monotone, any weights": monotone,
        "Tied, weights x 10": tie_weights(net).cell,
    }
    x = torch.randn(1, 4, generator=generator, **double)
    found: dict[str, dict[str, Any]] = {}
    rows = []
    for name, cell in tried.items():
        with torch.no_grad():
            inputs = x.expand(starts, -1)
            layer = DEQ(cell, on_failure="ignore", max_steps=1)
            layer(inputs)
            assert layer.solution is not None
            z0 = ik.extend.trees.tree_map(
                lambda t: 3 * torch.randn(t.shape, generator=generator, **double), layer.solution.value
            )
            options: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-9, "atol": 1e-10, "on_failure": "ignore"}
            solution = ik.fixed_point(cell, z0, (inputs,), solver="newton", max_steps=200, **options)
            picard = ik.fixed_point(cell, z0, (inputs,), solver="picard", max_steps=5000, **options)
            where = picard if bool(picard.converged.all()) else solution
            point = ik.extend.trees.tree_map(lambda t: t[:1], where.value)
            ends = torch.cat([t.flatten(1) for t in ik.extend.trees.tree_flatten(solution.value)[0]], 1)[
                solution.converged
            ]
            radius, condition = (float(f(cell, point, (x,), steps=60)) for f in (spectral_radius, condition_number))
        found[name] = {
            "equilibria": len({tuple(round(v, 4) + 0.0 for v in row) for row in ends.tolist()}),
            "newton": int(solution.converged.sum()),
            "picard": int(picard.converged.sum()),
            "radius": radius,
            "condition": condition,
        }
        one = found[name]
        rows.append(
            (name, one["equilibria"], f"{one['picard']}/{starts}", f"{one['newton']}/{starts}", radius, condition)
        )
    print(
        table(
            f"Well-posedness: {starts} random starts",
            ("cell", "equilibria", "Picard", "Newton", "rho(J)", "cond(I - J)"),
            rows,
        )
    )
    for name in ("MLP, |W| = 0.5", "MLP, |W| = 0.95", "Monotone, any weights", "Tied, weights x 10"):
        claim(
            found[name]["equilibria"] == 1 and found[name]["picard"] == starts,
            f"{name}: one equilibrium, found from everywhere",
        )
    claim(
        found["MLP, |W| = 3, free"]["equilibria"] > 1,
        f"free weights: {found['MLP, |W| = 3, free']['equilibria']} equilibria",
    )
    claim(found["Tied, weights x 10"]["radius"] < 1e-2, "a tied network is nilpotent, however large its weights are")
    return found


def cycle() -> dict[str, float]:
    """Two contractions that feed each other: neither block says that the whole is singular."""

    def block(z: Tensor, other: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + 0.5 * other + x

    joint = ik.compose({"a": (block, "b", "x"), "b": (block, "a", "x")}, output="b")
    one = torch.ones(1, dtype=torch.float64)
    J = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    determinant = float(torch.linalg.det(torch.eye(2, dtype=torch.float64) - J))
    solution = ik.solve(
        joint, {"a": 0 * one, "b": 0 * one}, (one,), solver="anderson", max_steps=100, on_failure="ignore"
    )
    refused = not bool(solution.converged)
    claim(
        determinant == 0 and refused,
        "two contractions in a cycle: det(I - J) = 0, no equilibrium, and the solve says so",
    )
    return {"determinant": determinant}


def run(setting: Setting) -> dict[str, Any]:
    """The two tables."""
    posed = well_posed(setting)
    edges = adjoint(setting)
    singular = cycle()
    with figure(setting.output / "deq_theory_conditioning.png", 2) as (left, right):
        radii = sorted(edges)
        gaps = [1 - rho for rho in radii]
        for linear, marker in zip(LINEAR[:-1], "osD^", strict=True):
            left.loglog(gaps, [edges[rho][linear][0] for rho in radii], marker + "-", label=linear)
        left.set(ylabel="products with $J^T$", title="The adjoint system near the edge: what it costs")
        right.loglog(gaps, [edges[rho]["norm"] for rho in radii], "ko-", label="$|(I - J)^{-1}|_2$")
        right.loglog(gaps, [1 / gap for gap in gaps], ":", color="0.5", label="$1 / (1 - \\rho(J))$")
        right.set(ylabel="spectral norm", title="and how much it amplifies")
        for axes in (left, right):
            axes.invert_xaxis()
            axes.set(xlabel="$1 - \\rho(J)$")
            axes.legend()
    return {"well_posed": posed, "adjoint": edges, **singular}
