"""Steady states of rate equations, chemical equilibria, and fixed points."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.systems.base import TestSystem, system, vector


@system("equilibrium")
def robertson_closed() -> TestSystem:
    """Robertson's reaction in a closed vessel: a line of singular steady states ``(0, 0, y)``."""

    def f(z: Tensor, k: Tensor) -> Tensor:
        x, y, w = z
        slow, fast, back = k * x, 3e7 * y**2, 1e4 * y * w
        return torch.stack([-slow + back, slow - back - fast, fast])

    return TestSystem(
        "", f, vector(1.0, 0.0, 0.0), vector(0.04), kind="steady_state", regular=False, source="Robertson (1966)"
    )


@system("equilibrium")
def robertson_flow() -> TestSystem:
    """Robertson's reaction with feed and outflow at rate 0.01."""

    def f(z: Tensor, k: Tensor) -> Tensor:
        x, y, w = z
        slow, fast, back = k * x, 3e7 * y**2, 1e4 * y * w
        return torch.stack([-slow + back + 0.01 * (1 - x), slow - back - fast - 0.01 * y, fast - 0.01 * w])

    return TestSystem("", f, vector(1.0, 0.0, 0.0), vector(0.04), kind="steady_state", source="Robertson (1966), open")


@system("equilibrium")
def robertson_conserved() -> TestSystem:
    """Robertson's steady state with its conservation law in place of the third equation."""

    def f(z: Tensor, k: Tensor) -> Tensor:
        x, y, w = z
        slow, fast, back = k * x, 3e7 * y**2, 1e4 * y * w
        return torch.stack([-slow + back + 1e-3 * (1 - x), slow - back - fast - 1e-3 * y, x + y + w - 1])

    return TestSystem("", f, vector(1.0, 0.0, 0.0), vector(0.04), source="Robertson (1966)")


@system("equilibrium")
def brusselator() -> TestSystem:
    def f(z: Tensor, b: Tensor) -> Tensor:
        x, y = z
        return torch.stack([1 + x**2 * y - (b + 1) * x, b * x - x**2 * y])

    return TestSystem("", f, vector(1.0, 1.0), vector(1.7), kind="steady_state", source="Prigogine & Lefever (1968)")


@system("equilibrium")
def brusselator_oscillating() -> TestSystem:
    """Beyond the Hopf bifurcation: the steady state is unstable."""

    def f(z: Tensor, b: Tensor) -> Tensor:
        x, y = z
        return torch.stack([1 + x**2 * y - (b + 1) * x, b * x - x**2 * y])

    return TestSystem("", f, vector(0.1, 0.1), vector(3.0), kind="steady_state", source="Prigogine & Lefever (1968)")


@system("equilibrium")
def cstr() -> TestSystem:
    """A stirred tank reactor with an exothermic reaction: conversion and temperature (dimensionless)."""

    def f(z: Tensor, da: Tensor) -> Tensor:
        x, t = z
        rate = da * (1 - x) * torch.exp(t / (1 + t / 20))
        return torch.stack([-x + rate, -t + 8 * rate - 1.5 * t])

    return TestSystem("", f, vector(0.1, 0.5), vector(0.11), kind="steady_state", source="Uppal, Ray & Poore (1974)")


@system("equilibrium")
def toggle_switch() -> TestSystem:
    def f(z: Tensor, a: Tensor) -> Tensor:
        u, v = z
        return torch.stack([a / (1 + v**2.5) - u, 15.6 / (1 + torch.abs(u)) - v])

    return TestSystem("", f, vector(1.0, 1.0), vector(156.25), kind="steady_state", source="Gardner et al. (2000)")


@system("equilibrium")
def hodgkin_huxley() -> TestSystem:
    """The resting state: membrane voltage (mV, relative) and three gates, without current."""

    def ratio(x: Tensor) -> Tensor:  # x / (e^x - 1)
        safe = torch.where(x.abs() < 1e-6, 1e-6, x)
        return safe / torch.expm1(safe)

    def f(z: Tensor, current: Tensor) -> Tensor:
        V, m, h, n = z
        rates = [
            (ratio((25 - V) / 10), 4 * torch.exp(-V / 18), m),
            (0.07 * torch.exp(-V / 20), 1 / (1 + torch.exp((30 - V) / 10)), h),
            (0.1 * ratio((10 - V) / 10), 0.125 * torch.exp(-V / 80), n),
        ]
        ionic = 120 * m**3 * h * (V - 115) + 36 * n**4 * (V + 12) + 0.3 * (V - 10.6)
        return torch.stack([current - ionic, *(a * (1 - x) - b * x for a, b, x in rates)])

    return TestSystem(
        "", f, vector(10.0, 0.1, 0.5, 0.4), vector(2.0), kind="steady_state", source="Hodgkin & Huxley (1952)"
    )


@system("equilibrium")
def lotka_volterra() -> TestSystem:
    def f(z: Tensor, a: Tensor) -> Tensor:
        x, y = z
        return torch.stack([x * (a - y), y * (x - 1)])

    return TestSystem("", f, vector(2.0, 2.0), vector(1.5), kind="steady_state", source="Lotka (1925)")


@system("equilibrium")
def heart_dipole() -> TestSystem:
    """Moments of two dipoles from measurements of the heart: eight equations, strongly nonlinear."""
    sums = vector(0.485, -0.0019, -0.0581, 0.015, 0.105, 0.0406, 0.167, -0.399)

    def f(x: Tensor, c: Tensor) -> Tensor:
        a, b, d, e, t, u, v, w = x
        left = [
            a + b,
            d + e,
            t * a + u * b - v * d - w * e,
            v * a + w * b + t * d + u * e,
            a * (t**2 - v**2) - 2 * d * t * v + b * (u**2 - w**2) - 2 * e * u * w,
            d * (t**2 - v**2) + 2 * a * t * v + e * (u**2 - w**2) + 2 * b * u * w,
            a * t * (t**2 - 3 * v**2) + d * v * (v**2 - 3 * t**2)
            + b * u * (u**2 - 3 * w**2) + e * w * (w**2 - 3 * u**2),
            d * t * (t**2 - 3 * v**2) - a * v * (v**2 - 3 * t**2)
            + e * u * (u**2 - 3 * w**2) - b * w * (w**2 - 3 * u**2),
        ]  # fmt: skip
        return torch.stack(left) - c * sums

    start = vector(0.299, 0.186, -0.0273, 0.0254, -0.474, 0.474, -0.0892, 0.0892)
    return TestSystem("", f, start, vector(1.0), source="Nelson & Hodgkin (1981), MINPACK-2 section 2.2")


@system("equilibrium")
def propane_combustion() -> TestSystem:
    """Equilibrium of propane burning in air, reduced to five equations in element variables."""
    R, R5, R6, R7, R8, R9, R10 = 10.0, 0.193, 4.10622e-4, 5.45177e-4, 4.4975e-7, 3.40735e-5, 9.615e-7

    def f(z: Tensor, p: Tensor) -> Tensor:
        a, b, c, d, e = z
        return torch.stack(
            [
                a * b + a - 3 * e,
                2 * a * b + a + 3 * R10 * b**2 + b * c**2 + R7 * b * c + R9 * b * d + R8 * b - R * e,
                2 * b * c**2 + R7 * b * c + 2 * R5 * c**2 + R6 * c - 8 * e,
                R9 * b * d + 2 * d**2 - 4 * R * e,
                a * b + a + R10 * b**2 + b * c**2 + R7 * b * c + R9 * b * d + R8 * b + R5 * c**2 + R6 * c + d**2 - p,
            ]
        )

    start = vector(10.0, 10.0, 0.05, 50.5, 0.05)
    return TestSystem("", f, start, vector(1.0), source="Meintjes & Morgan (1990), MINPACK-2 section 2.4")


@system("equilibrium")
def riccati4() -> TestSystem:
    """Discrete algebraic Riccati equation of a system with four states, as a fixed point from zero."""
    g = torch.Generator().manual_seed(7)
    A = torch.randn(4, 4, generator=g, dtype=torch.float64) * 0.5
    B = torch.randn(4, 2, generator=g, dtype=torch.float64)
    I4, I2 = torch.eye(4, dtype=torch.float64), torch.eye(2, dtype=torch.float64)

    def f(z: Tensor, q: Tensor) -> Tensor:
        X = z.view(4, 4)
        gain = torch.linalg.solve(I2 + B.mT @ X @ B, B.mT @ X @ A)
        return (A.mT @ X @ A - A.mT @ X @ B @ gain + q * I4).flatten()

    return TestSystem(
        "", f, torch.zeros(16, dtype=torch.float64), vector(1.0), kind="fixed_point", source="discrete Riccati equation"
    )


@system("equilibrium", 50)
def tanh_contractive(n: int) -> TestSystem:
    return _tanh(n, 0.9)


@system("equilibrium", 50)
def tanh_expansive(n: int) -> TestSystem:
    return _tanh(n, 2.5)


def _tanh(n: int, norm: float) -> TestSystem:
    g = torch.Generator().manual_seed(3)
    W = torch.randn(n, n, generator=g, dtype=torch.float64)
    W = norm * W / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(n, generator=g, dtype=torch.float64)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(W @ z + x)

    return TestSystem(
        "", f, torch.zeros(n, dtype=torch.float64), x, kind="fixed_point", source="deep equilibrium layer"
    )


@system("equilibrium", 10)
def mean_field_ising(n: int) -> TestSystem:
    """``m = tanh(beta (J m + h))`` near the critical temperature."""
    g = torch.Generator().manual_seed(5)
    J = torch.rand(n, n, generator=g, dtype=torch.float64)
    J = (J + J.mT) / torch.linalg.matrix_norm(J + J.mT, 2)

    def f(z: Tensor, beta: Tensor) -> Tensor:
        return torch.tanh(beta * (J @ z + 1e-3))

    start = torch.full((n,), 0.5, dtype=torch.float64)
    return TestSystem("", f, start, vector(1.0), kind="fixed_point", source="mean-field Ising model")


@system("equilibrium", 12)
def entropic_transport(n: int) -> TestSystem:
    """Log-scalings of an entropic optimal transport plan: Sinkhorn's map on the first of the two."""
    g = torch.Generator().manual_seed(6)
    C = torch.rand(n, n, generator=g, dtype=torch.float64)
    a, b = (torch.softmax(torch.randn(n, generator=g, dtype=torch.float64), 0) for _ in range(2))

    def f(z: Tensor, eps: Tensor) -> Tensor:
        v = b.log() - torch.logsumexp(z.unsqueeze(1) - C / eps, 0)
        u = a.log() - torch.logsumexp(v - C / eps, 1)
        return u - u.mean()

    return TestSystem(
        "", f, torch.zeros(n, dtype=torch.float64), vector(0.1), kind="fixed_point", source="Cuturi (2013)"
    )
