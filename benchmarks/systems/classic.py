"""Further systems of the testing literature: singular, badly scaled, with folds, stationary points or many roots."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.systems.base import TestSystem, count, system, vector

NONLIN = "Burkardt, test_nonlin, problem "
LUKSAN = "Lukšan & Vlček, Sparse and partially separable test problems (2003), problem "


def _neighbours(z: Tensor) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(z, (1, 1))
    return padded[:-2], padded[2:]


@system("classic", 10)
def generalised_rosenbrock(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.cat([(c - z[0]).view(1), 10 * (z[1:] - z[:-1] ** 2)])

    return TestSystem("", f, vector(-1.2, *([1.0] * (n - 1))), vector(1.0), source=NONLIN + "1")


@system("classic")
def hammarling2() -> TestSystem:
    A = torch.tensor([[1e-4, 1.0], [0.0, 1e-4]], dtype=torch.float64)

    def f(z: Tensor, c: Tensor) -> Tensor:
        X = z.view(2, 2)
        return (X @ X - c * A).flatten()

    return TestSystem("", f, torch.eye(2, dtype=torch.float64).flatten(), vector(1.0), source=NONLIN + "15")


@system("classic")
def hammarling3() -> TestSystem:
    A = torch.tensor([[1e-4, 1.0, 0.0], [0.0, 1e-4, 0.0], [0.0, 0.0, 1e-4]], dtype=torch.float64)

    def f(z: Tensor, c: Tensor) -> Tensor:
        X = z.view(3, 3)
        return (X @ X - c * A).flatten()

    return TestSystem("", f, torch.eye(3, dtype=torch.float64).flatten(), vector(1.0), source=NONLIN + "16")


@system("classic")
def dennis_schnabel() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.stack([z[0] + z[1] - c, z[0] ** 2 + z[1] ** 2 - 9])

    return TestSystem("", f, vector(1.0, 5.0), vector(3.0), source=NONLIN + "17")


@system("classic")
def sample18() -> TestSystem:
    def g(x: Tensor) -> Tensor:  # (1 - exp(-x^2)) / x
        return -torch.expm1(-(x**2)) / torch.where(x == 0, 1, x)

    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.stack([z[1] ** 2 * g(z[0]), z[0] * g(z[1]) * c])

    return TestSystem("", f, vector(2.0, 2.0), vector(1.0), regular=False, source=NONLIN + "18")


@system("classic")
def sample19() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return c * z * (z**2).sum()

    return TestSystem("", f, vector(3.0, 3.0), vector(1.0), regular=False, source=NONLIN + "19")


@system("classic")
def double_root() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return z * (z - c) ** 2

    return TestSystem("", f, torch.ones(1, dtype=torch.float64), vector(5.0), regular=False, source=NONLIN + "20")


@system("classic")
def boggs() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.stack([z[0] ** 2 - z[1] + c, z[0] - torch.cos(math.pi / 2 * z[1])])

    return TestSystem("", f, vector(1.0, 0.0), vector(1.0), source=NONLIN + "22")


@system("classic")
def powell_stationary() -> TestSystem:
    """Powell's example of line searches that stop at a singular point which is no root."""

    def f(z: Tensor, c: Tensor) -> Tensor:
        return torch.stack([z[0], 10 * z[0] / (z[0] + 0.1) + 2 * z[1] ** 2 * c])

    return TestSystem("", f, vector(3.0, 1.0), vector(1.0), regular=False, source="Powell (1970)")


@system("classic")
def scipy_manual() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        x, y = z
        return torch.stack([x + 0.5 * (x - y) ** 3 - c, 0.5 * (y - x) ** 3 + y])

    return TestSystem("", f, torch.zeros(2, dtype=torch.float64), vector(1.0), source="manual of scipy.optimize.root")


@system("classic")
def himmelblau() -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        x, y = z
        return torch.stack([x**2 + y - c, x + y**2 - 7])

    return TestSystem("", f, vector(0.0, 0.0), vector(11.0), source="Himmelblau (1972)")


@system("classic", 50)
def countercurrent(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        pad = torch.nn.functional.pad(z, (2, 2))
        before, after = pad[:-4], pad[4:]
        left, right = pad[1:-3], pad[3:-1]
        k = torch.arange(n)
        forward = c * before - (1 - c) * after - z * (1 + 4 * right)
        backward = -(2 - c) * after + (1 - c) * before - z * (1 + 4 * left) + 2 * c * z
        out = torch.where(k % 2 == 0, forward, backward)
        return out + (k < 2).to(z) * 0.5

    start = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2], dtype=torch.float64).repeat(n // 8 + 1)[:n]
    return TestSystem("", f, start, vector(0.414214), source="after Bogle & Perkins (1990), counter-current reactors")


@system("classic", 50)
def extended_powell_badly_scaled(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        a, b = z[::2], z[1::2]
        return torch.stack([1e4 * a * b - 1, torch.exp(-a) + torch.exp(-b) - c], 1).flatten()

    return TestSystem("", f, vector(0.0, 1.0).repeat(n // 2), vector(1.0001), source=LUKSAN + "extended Powell")


@system("classic", 50)
def extended_freudenstein_roth(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        x, y = z[::2], z[1::2]
        return torch.stack(
            [-c + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y], 1
        ).flatten()  # fmt: skip

    return TestSystem(
        "", f, vector(6.0, 3.0).repeat(n // 2), vector(13.0), source=LUKSAN + "extended Freudenstein-Roth"
    )


@system("classic", 48)
def extended_cragg_levy(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        a, b, d, e = z.view(-1, 4).unbind(1)
        return torch.stack(
            [(torch.exp(a) - b) ** 2, 10 * (b - d) ** 3, torch.tan(d - e) ** 2, e - c], 1
        ).flatten()  # fmt: skip

    start = vector(1.0, 2.0, 2.0, 2.0).repeat(n // 4)
    return TestSystem("", f, start, vector(1.0), regular=False, source=LUKSAN + "extended Cragg-Levy")


@system("classic", 50)
def singular_broyden(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        left, right = _neighbours(z)
        return ((3 - c * z) * z - left - 2 * right + 1) ** 2

    return TestSystem(
        "", f, -torch.ones(n, dtype=torch.float64), vector(2.0), regular=False, source=LUKSAN + "singular"
    )


@system("classic", 50)
def tridiagonal(n: int) -> TestSystem:
    """Li's tridiagonal system: ``8 z_i (z_i^2 - z_{i-1}) - 2 (1 - z_i) + 4 (z_i - z_{i+1}^2)``, without what has no
    neighbour."""

    def f(z: Tensor, c: Tensor) -> Tensor:
        out = 4 * (z[:-1] - z[1:] ** 2)
        back = 8 * z[1:] * (z[1:] ** 2 - z[:-1]) - 2 * (c - z[1:])
        zero = z.new_zeros(1)
        return torch.cat([out, zero]) + torch.cat([zero, back])

    return TestSystem(
        "", f, 12 * torch.ones(n, dtype=torch.float64), vector(1.0), source="Li (1989), tridiagonal system"
    )


@system("classic", 20)
def exponential(n: int) -> TestSystem:
    i = count(n)

    def f(z: Tensor, c: Tensor) -> Tensor:
        head = torch.exp(z[:1]) - c
        return torch.cat([head, i[1:] / 10 * (torch.exp(z[1:]) + z[:-1] - 1)])

    start = torch.full((n,), 0.5, dtype=torch.float64)
    return TestSystem("", f, start, vector(1.0), source="La Cruz, Martínez & Raydan (2006), exponential function 1")


@system("classic", 50)
def trigexp(n: int) -> TestSystem:
    def f(z: Tensor, c: Tensor) -> Tensor:
        left, right = _neighbours(z)
        first = 3 * z[0] ** 3 + 2 * z[1] - 5 + torch.sin(z[0] - z[1]) * torch.sin(z[0] + z[1])
        inner = (
            3 * z**3
            + 2 * right
            - 5
            + torch.sin(z - right) * torch.sin(z + right)
            + 4 * z
            - left * torch.exp(left - z)
            - 3
        )
        last = 4 * z[-1] - z[-2] * torch.exp(z[-2] - z[-1]) - c
        return torch.cat([first.view(1), inner[1:-1], last.view(1)])

    return TestSystem("", f, torch.zeros(n, dtype=torch.float64), vector(3.0), source="Toint (1983), trigexp 1")


@system("classic", 20)
def cosh_nonlocal(n: int) -> TestSystem:
    h = 1 / (n + 1)

    def f(z: Tensor, c: Tensor) -> Tensor:
        left, right = _neighbours(z)
        return (2 * z - left - right) / h**2 + c * torch.cosh(z).mean() ** 2

    return TestSystem("", f, torch.zeros(n, dtype=torch.float64), vector(1.0), source="after the manual of SciPy")
