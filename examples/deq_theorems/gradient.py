r"""Theorem 1: the gradient does not depend on what found the equilibrium, and is as accurate as the equilibrium.

    z* = f(z*; x, \theta),   dl/d(.) = dl/dz* (I - J_f)^{-1} df/d(.)

For ``z = tanh(W z + U x + b)`` with 24 unknowns, ``W`` of spectral radius 0.9: the gradient of ``c . z*`` with respect to
``W, U, b, x`` by each solver and tolerance, against a dense solve at the equilibrium in closed form, against central
differences, and against 800 unrolled steps.

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", theorem 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from common import figure, table
from torch import Tensor

import implicitkit as ik

from .claims import Setting, claim

SOLVERS = ("picard", "anderson", "broyden", "newton", "newton_krylov", "scipy.fsolve", "scipy.root.krylov")


def cell(z: Tensor, W: Tensor, U: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """``tanh(W z + U x + b)``, ``z (n,)``."""
    return torch.tanh(W @ z + U @ x + b)


def system(n: int, inputs: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """``(W, U, b, x)`` that require grad, and the cotangent ``c``; ``W`` has spectral radius 0.9."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    W = draw(n, n)
    W *= 0.9 / torch.linalg.eigvals(W).abs().max()
    theta = (W, draw(n, inputs) / inputs**0.5, 0.1 * draw(n), draw(inputs))
    return tuple(t.requires_grad_() for t in theta), draw(n)


def closed_form(theta: tuple[Tensor, ...], c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``z*`` by Newton's method to rounding, the gradient written out by hand, and ``J``.

    With ``D = diag(1 - z*^2)`` and ``u = D (I - D W)^{-T} c``: ``u z*^T``, ``u x^T``, ``u``, ``U^T u``.
    """
    W, U, b, x = (t.detach() for t in theta)
    z, eye = torch.zeros_like(b), torch.eye(len(b), dtype=b.dtype)
    for _ in range(50):
        value = cell(z, W, U, b, x)
        z = z + torch.linalg.solve(eye - (1 - value.square()).unsqueeze(1) * W, value - z)
    D = 1 - z.square()
    J = D.unsqueeze(1) * W
    u = D * torch.linalg.solve((eye - J).T, c)
    return z, _flat(torch.outer(u, z), torch.outer(u, x), u, U.T @ u), J


def _flat(*parts: Tensor) -> Tensor:
    return torch.cat([p.flatten() for p in parts])


def run(setting: Setting) -> dict[str, Any]:
    """Gradient error, state error and residual by solver and tolerance."""
    n = 24
    theta, c = system(n, 10, setting.seed)
    z_true, truth, J = closed_form(theta, c)
    z0 = torch.zeros(n, dtype=torch.float64)
    size = truth.norm()

    z = z0
    for _ in range(800):
        z = cell(z, *theta)
    unrolled = float((_flat(*torch.autograd.grad(c @ z, theta)) - truth).norm() / size)
    differences = _central_differences(theta, c, z0, truth)

    tolerances = (1e-3, 1e-6, 1e-12)
    found: dict[tuple[str, float], tuple[int, float, float, float]] = {}
    rows = []
    for solver in SOLVERS:
        for rtol in tolerances:
            solution = ik.fixed_point(cell, z0, theta, solver=solver, rule=ik.Implicit("lu"), rtol=rtol, atol=0.0)
            gradient = _flat(*torch.autograd.grad(c @ solution.value, theta))
            residual = float(solution.residual_norm / z_true.norm())
            errors = (
                float((solution.value.detach() - z_true).norm() / z_true.norm()),
                float((gradient - truth).norm() / size),
            )
            found[solver, rtol] = solution.evaluations, residual, *errors
            rows.append((solver, f"{rtol:.0e}", *found[solver, rtol]))
    radius = float(torch.linalg.eigvals(J).abs().max())
    title = f"Theorem 1: n = {n}, rho(J) = {radius:.3f}, |J|_2 = {float(torch.linalg.matrix_norm(J, 2)):.3f}"
    headings = ("solver", "rtol", "evaluations", "residual", "state error", "gradient error")
    print(table(title, headings, rows))

    # error ~ residual^p: the exponent, by least squares over all runs whose error is above rounding
    used = [(math.log(r), math.log(e)) for _, r, _, e in found.values() if e > 1e-13 and r > 0]
    mean_r, mean_e = (sum(column) / len(used) for column in zip(*used, strict=True))
    exponent = sum((r - mean_r) * (e - mean_e) for r, e in used) / sum((r - mean_r) ** 2 for r, e in used)
    factor = max(e / r for _, r, _, e in found.values() if e > 1e-13 and r > 0)
    at_tightest = max(found[solver, tolerances[-1]][3] for solver in SOLVERS)
    claim(differences < 1e-8, f"closed form = central differences ({differences:.1e})")
    claim(unrolled < 1e-13, f"closed form = backpropagation through 800 steps ({unrolled:.1e})")
    claim(
        at_tightest < 1e-11, f"one gradient from {len(SOLVERS)} solvers at rtol 1e-12 (worst error {at_tightest:.1e})"
    )
    claim(0.9 < exponent < 1.1, f"gradient error proportional to the residual (exponent {exponent:.3f})")
    claim(factor < 20, f"with a moderate constant (worst ratio {factor:.2f})")

    with figure(setting.output / "deq_theory_gradient.png") as axes:
        for solver, marker in zip(SOLVERS, "osD^vPX", strict=True):
            points = [found[solver, rtol] for rtol in tolerances]
            axes.loglog([p[1] for p in points], [max(p[3], 1e-16) for p in points], marker, label=solver, alpha=0.8)
        ends = [1e-14, 1e-2]
        axes.loglog(ends, ends, color="0.6", linewidth=1, zorder=0, label="error = residual")
        axes.set(
            xlabel="relative residual",
            ylabel="relative error of the gradient",
            title="Theorem 1: error follows residual",
        )
        axes.legend(loc="upper left")
    return {
        "unrolled": unrolled,
        "differences": differences,
        "exponent": exponent,
        "factor": factor,
        "tightest": at_tightest,
        "found": found,
    }


def _central_differences(theta: tuple[Tensor, ...], c: Tensor, z0: Tensor, truth: Tensor, count: int = 24) -> float:
    """Worst absolute difference to the closed form over ``count`` entries, each from two solves."""
    entries = torch.linspace(0, len(truth) - 1, count).long()
    flat, worst, h = _flat(*theta).detach(), 0.0, 1e-6
    for i in entries:
        values = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[i] += sign * h
            parts = [p.view_as(t) for p, t in zip(moved.split([t.numel() for t in theta]), theta, strict=True)]
            z = z0
            for _ in range(200):
                z = cell(z, *parts)
            values.append(float(c @ z))
        worst = max(worst, abs((values[0] - values[1]) / (2 * h) - float(truth[i])))
    return worst
