"""Moré, Garbow & Hillstrom, *Testing unconstrained optimization software*, ACM TOMS 7(1), 1981: the square systems.

Wood, Watson and the variably dimensioned function are sums of more squares than unknowns there; as systems they have the
form of MINPACK's test drivers (``vecfcn``): half the gradient, up to a factor.  ``theta`` is a constant of each problem.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.systems.base import TestSystem, count, system, vector

TOMS = "Moré, Garbow & Hillstrom (1981), problem "


@system("mgh")
def rosenbrock() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.stack([10 * (z[1] - z[0] ** 2), c - z[0]])

    return TestSystem("", f, vector(-1.2, 1.0), vector(1.0), source=TOMS + "1")


@system("mgh")
def freudenstein_roth() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        x, y = z
        return torch.stack([-c + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y])

    return TestSystem("", f, vector(0.5, -2.0), vector(13.0), source=TOMS + "2")


@system("mgh")
def powell_badly_scaled() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.stack([1e4 * z[0] * z[1] - 1, torch.exp(-z[0]) + torch.exp(-z[1]) - c])

    return TestSystem("", f, vector(0.0, 1.0), vector(1.0001), source=TOMS + "3")


@system("mgh")
def helical_valley() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        x, y, w = z
        turns = torch.atan2(y, x) / (2 * math.pi)  # of (-1/2, 1/2]; the problem's branch is (-1/4, 3/4]
        turns = torch.where((x < 0) & (y < 0), turns + 1, turns)
        return torch.stack([10 * (w - 10 * turns), 10 * (torch.hypot(x, y) - c), w])

    return TestSystem("", f, vector(-1.0, 0.0, 0.0), vector(1.0), source=TOMS + "7")


@system("mgh")
def powell_singular() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        a, b, d, e = z
        return torch.stack([a + c * b, 5**0.5 * (d - e), (b - 2 * d) ** 2, 10**0.5 * (a - e) ** 2])

    return TestSystem("", f, vector(3.0, -1.0, 0.0, 1.0), vector(10.0), regular=False, source=TOMS + "13")


@system("mgh")
def wood() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        a, b, d, e = z
        s, t = b - a**2, e - d**2
        return torch.stack(
            [
                -200 * a * s - (c - a),
                200 * s + 20.2 * (b - 1) + 19.8 * (e - 1),
                -180 * d * t - (1 - d),
                180 * t + 20.2 * (e - 1) + 19.8 * (b - 1),
            ]
        )

    return TestSystem("", f, vector(-3.0, -1.0, -3.0, -1.0), vector(1.0), source=TOMS + "14")


@system("mgh", 20)
def extended_rosenbrock(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        odd, even = z[::2], z[1::2]
        return torch.stack([10 * (even - odd**2), c - odd], 1).flatten()

    return TestSystem("", f, vector(-1.2, 1.0).repeat(n // 2), vector(1.0), source=TOMS + "21")


@system("mgh", 20)
def extended_powell_singular(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        a, b, d, e = z.view(-1, 4).unbind(1)
        return torch.stack([a + c * b, 5**0.5 * (d - e), (b - 2 * d) ** 2, 10**0.5 * (a - e) ** 2], 1).flatten()

    start = vector(3.0, -1.0, 0.0, 1.0).repeat(n // 4)
    return TestSystem("", f, start, vector(10.0), regular=False, source=TOMS + "22")


@system("mgh", 6, 9)
def watson(n: int) -> TestSystem:
    t = (torch.arange(1, 30, dtype=torch.float64) / 29).unsqueeze(1)
    powers = t ** torch.arange(n, dtype=torch.float64)
    slopes = torch.arange(n, dtype=torch.float64) * t ** (torch.arange(n, dtype=torch.float64) - 1).clamp_min(0)

    def f(z: Tensor, c: Tensor) -> Tensor:
        value = powers @ z
        r = slopes @ z - value**2 - c
        a, b = z[0], z[1] - z[0] ** 2 - 1
        rest = torch.zeros(n - 2, dtype=z.dtype)
        return (slopes - 2 * value.unsqueeze(1) * powers).mT @ r + torch.cat([torch.stack([a - 2 * z[0] * b, b]), rest])

    return TestSystem("", f, torch.zeros(n, dtype=torch.float64), vector(1.0), source=TOMS + "20")


@system("mgh", 10)
def variably_dimensioned(n: int) -> TestSystem:
    j = count(n)

    def f(z: Tensor, c: Tensor) -> Tensor:
        s = (j * (z - c)).sum()
        return z - c + j * s * (1 + 2 * s**2)

    return TestSystem("", f, 1 - j / n, vector(1.0), source=TOMS + "25")


@system("mgh", 10)
def trigonometric(n: int) -> TestSystem:
    i = count(n)

    def f(z: Tensor, c: Tensor) -> Tensor:
        return n - torch.cos(z).sum() + i * (1 - torch.cos(z)) - c * torch.sin(z)

    return TestSystem("", f, torch.full((n,), 1 / n, dtype=torch.float64), vector(1.0), source=TOMS + "26")


@system("mgh", 10, 30, 40)
def brown_almost_linear(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.cat([z[:-1] + z.sum() - (n + 1), (z.prod() - c).view(1)])

    return TestSystem("", f, torch.full((n,), 0.5, dtype=torch.float64), vector(1.0), source=TOMS + "27")


@system("mgh", 10)
def discrete_bvp(n: int) -> TestSystem:
    h = 1 / (n + 1)
    t = h * count(n)

    def f(z: Tensor, c: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(z, (1, 1))
        return 2 * z - padded[:-2] - padded[2:] + h**2 * (z + t + c) ** 3 / 2

    return TestSystem("", f, t * (t - 1), vector(1.0), source=TOMS + "28")


@system("mgh", 1, 10)
def discrete_integral(n: int) -> TestSystem:
    h = 1 / (n + 1)
    t = h * count(n)
    kernel = torch.minimum(t.unsqueeze(1), t) * (1 - torch.maximum(t.unsqueeze(1), t))

    def f(z: Tensor, c: Tensor) -> Tensor:
        return z + 0.5 * h * kernel @ (z + t + c) ** 3

    return TestSystem("", f, t * (t - 1), vector(1.0), source=TOMS + "29")


@system("mgh", 10)
def broyden_tridiagonal(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(z, (1, 1))
        return (3 - c * z) * z - padded[:-2] - 2 * padded[2:] + 1

    return TestSystem("", f, -torch.ones(n, dtype=torch.float64), vector(2.0), source=TOMS + "30")


@system("mgh", 10)
def broyden_banded(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        terms = torch.nn.functional.pad(z * (1 + z), (5, 1))
        neighbours = sum(terms[k : k + n] for k in (0, 1, 2, 3, 4, 6))
        return z * (2 + c * z**2) + 1 - neighbours

    return TestSystem("", f, -torch.ones(n, dtype=torch.float64), vector(5.0), source=TOMS + "31")


@system("mgh", 5, 6, 7, 9)
def chebyquad(n: int) -> TestSystem:
    i = count(n)
    moments = torch.where(i % 2 == 0, -1 / (i**2 - 1), 0)

    def f(z: Tensor, c: Tensor) -> Tensor:
        x = 2 * z - 1
        previous, current, rows = torch.ones_like(x), x, []
        for _ in range(n):
            rows.append(current.mean())
            previous, current = current, 2 * x * current - previous
        return torch.stack(rows) - c * moments

    return TestSystem("", f, i / (n + 1), vector(1.0), source=TOMS + "35")
