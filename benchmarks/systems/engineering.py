"""Equations that engineers solve: boundary-value problems, integral equations, networks, batches of scalar equations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.systems.base import TestSystem, count, system, vector


@system("engineering", 100)
def chandrasekhar_conservative(n: int) -> TestSystem:
    """``H(mu) = 1 / (1 - (c/2) int mu H / (mu + nu) dnu)`` at ``c = 1 - 1e-4``: close to a fold."""
    return _chandrasekhar(n, 0.9999)


@system("engineering", 10, 100)
def chandrasekhar(n: int) -> TestSystem:
    return _chandrasekhar(n, 0.9)


def _chandrasekhar(n: int, c: float) -> TestSystem:
    mu = (count(n) - 0.5) / n
    weights = mu.unsqueeze(1) / (mu.unsqueeze(1) + mu) / (2 * n)

    def f(z: Tensor, c: Tensor) -> Tensor:
        return z - 1 / (1 - c * weights @ z)

    return TestSystem("", f, torch.ones(n, dtype=torch.float64), vector(c), source="Kelley (1995), section 5.6")


@system("engineering", 50)
def troesch(n: int) -> TestSystem:
    """``u'' = c sinh(c u)``, ``u(0) = 0``, ``u(1) = 1``: a boundary layer at 1."""
    h = 1 / (n + 1)

    def f(z: Tensor, c: Tensor) -> Tensor:
        padded = torch.cat([z.new_zeros(1), z, z.new_ones(1)])
        return 2 * z - padded[:-2] - padded[2:] + c * h**2 * torch.sinh(c * z)

    return TestSystem("", f, torch.ones(n, dtype=torch.float64), vector(10.0), source="Roberts & Shipman (1976)")


@system("engineering", 40)
def channel_flow(n: int) -> TestSystem:
    """Fluid injected through one side of a channel, ``u'''' = R (u' u'' - u u''')`` by central differences, ``R = 100``."""
    h = 1 / (n + 1)

    def f(z: Tensor, R: Tensor) -> Tensor:
        one, zero = z.new_ones(1), z.new_zeros(1)
        u = torch.cat([z[:1], zero, z, one, z[-1:]])  # u(0) = u'(0) = 0, u(1) = 1, u'(1) = 0, with ghost points
        fourth = (u[4:] - 4 * u[3:-1] + 6 * u[2:-2] - 4 * u[1:-3] + u[:-4]) / h**4
        first = (u[3:-1] - u[1:-3]) / (2 * h)
        second = (u[3:-1] - 2 * u[2:-2] + u[1:-3]) / h**2
        third = (u[4:] - 2 * u[3:-1] + 2 * u[1:-3] - u[:-4]) / (2 * h**3)
        return (fourth - R * (first * second - u[2:-2] * third)) * h**4

    x = h * count(n)
    return TestSystem("", f, x**2 * (3 - 2 * x), vector(100.0), source="MINPACK-2 (Averick et al. 1992), section 3.1")


@system("engineering")
def power_flow5() -> TestSystem:
    """Newton's AC power flow of a network of 5 buses and 7 lines: angles of buses 2-5, voltages of buses 3-5 (per unit).

    ``P_i + j Q_i = V_i conj(sum_k Y_ik V_k)``; bus 1 is the slack, bus 2 holds its voltage.
    """
    lines = [(0, 1, 0.02, 0.06, 0.030), (0, 2, 0.08, 0.24, 0.025), (1, 2, 0.06, 0.18, 0.020), (1, 3, 0.06, 0.18, 0.020),
             (1, 4, 0.04, 0.12, 0.015), (2, 3, 0.01, 0.03, 0.010), (3, 4, 0.08, 0.24, 0.025)]  # fmt: skip
    Y = torch.zeros(5, 5, dtype=torch.complex128)
    for i, k, r, x, b in lines:
        y = 1 / complex(r, x)
        Y[i, k] -= y
        Y[k, i] -= y
        Y[i, i] += y + 1j * b
        Y[k, k] += y + 1j * b
    G, B = Y.real.contiguous(), Y.imag.contiguous()
    P = torch.tensor([0.2, -0.45, -0.40, -0.60], dtype=torch.float64)
    Q = torch.tensor([-0.15, -0.05, -0.10], dtype=torch.float64)

    def f(z: Tensor, load: Tensor) -> Tensor:
        angle = torch.cat([z.new_zeros(1), z[:4]])
        V = torch.cat([z.new_tensor([1.06, 1.0]), z[4:]])
        difference = angle.unsqueeze(1) - angle
        cos, sin = torch.cos(difference), torch.sin(difference)
        active = V * ((G * cos + B * sin) @ V)
        reactive = V * ((G * sin - B * cos) @ V)
        return torch.cat([active[1:] - load * P, reactive[2:] - load * Q])

    start = torch.cat([torch.zeros(4, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    return TestSystem("", f, start, vector(1.0), source="Stagg & El-Abiad (1968), the 5-bus network")


@system("engineering", 100_000)
def kepler(batch: int) -> TestSystem:
    """``E - e sin E = M``: eccentric anomalies of a batch of orbits, ``e`` up to 0.999."""
    g = torch.Generator().manual_seed(0)
    e = 0.999 * torch.rand(batch, generator=g, dtype=torch.float64)
    M = 2 * math.pi * torch.rand(batch, generator=g, dtype=torch.float64) - math.pi

    def f(z: Tensor, orbit: Tensor) -> Tensor:
        e, M = orbit[..., :1], orbit[..., 1:]
        return z - e * torch.sin(z) - M

    return TestSystem("", f, M.unsqueeze(1).clone(), torch.stack([e, M], 1), batch_dims=1, source="Kepler's equation")


@system("engineering", 10_000)
def colebrook(batch: int) -> TestSystem:
    """Darcy friction factor ``f``: ``1/sqrt(f) = -2 log10(eps/3.7 + 2.51/(Re sqrt f))``, unknown ``1/sqrt(f)``."""
    g = torch.Generator().manual_seed(1)
    reynolds = 10 ** (3.6 + 4.4 * torch.rand(batch, generator=g, dtype=torch.float64))
    roughness = 10 ** (-6 + 4.7 * torch.rand(batch, generator=g, dtype=torch.float64))

    def f(z: Tensor, pipe: Tensor) -> Tensor:
        reynolds, roughness = pipe[..., :1], pipe[..., 1:]
        return z + 2 * torch.log10(roughness / 3.7 + 2.51 * z / reynolds)

    theta = torch.stack([reynolds, roughness], 1)
    return TestSystem(
        "", f, torch.full((batch, 1), 5.0, dtype=torch.float64), theta, batch_dims=1, source="Colebrook (1939)"
    )


@system("engineering", 10_000)
def implied_volatility(batch: int) -> TestSystem:
    """Black-Scholes calls: the volatility that gives the price, spot 1, no rate; strikes 0.6-1.6, 0.1-2 years."""
    g = torch.Generator().manual_seed(2)
    strike = 0.6 + torch.rand(batch, generator=g, dtype=torch.float64)
    years = 0.1 + 1.9 * torch.rand(batch, generator=g, dtype=torch.float64)
    sigma = 0.15 + 0.6 * torch.rand(batch, generator=g, dtype=torch.float64)

    def price(sigma: Tensor, strike: Tensor, years: Tensor) -> Tensor:
        width = sigma * years.sqrt()
        d = -torch.log(strike) / width + width / 2
        return torch.special.ndtr(d) - strike * torch.special.ndtr(d - width)

    def f(z: Tensor, quote: Tensor) -> Tensor:
        paid, strike, years = quote.unbind(-1)
        return (price(z.squeeze(-1), strike, years) - paid).unsqueeze(-1)

    theta = torch.stack([price(sigma, strike, years), strike, years], 1)
    return TestSystem(
        "", f, torch.full((batch, 1), 0.5, dtype=torch.float64), theta, batch_dims=1, source="Black & Scholes (1973)"
    )


@system("engineering")
def pipe_network() -> TestSystem:
    """Heads and flows of a looped water network, ``h_i - h_j = k q |q|``: the derivative vanishes with the flow."""
    pipes = [(0, 1, 1.0), (0, 2, 2.0), (1, 2, 4.0), (1, 3, 3.0), (2, 3, 1.5), (2, 4, 2.0), (3, 4, 5.0)]
    nodes, m = 4, len(pipes)  # node 0 is the reservoir
    incidence = torch.zeros(5, m, dtype=torch.float64)
    for p, (i, j, _) in enumerate(pipes):
        incidence[i, p], incidence[j, p] = 1, -1
    k = torch.tensor([p[2] for p in pipes], dtype=torch.float64)
    demand = torch.tensor([0.5, 0.8, 0.3, 1.0], dtype=torch.float64)

    def f(z: Tensor, head: Tensor) -> Tensor:
        heads, q = torch.cat([head.view(1), z[:nodes]]), z[nodes:]
        return torch.cat([incidence.mT @ heads - k * q * q.abs(), -(incidence @ q)[1:] - demand])

    start = torch.cat([torch.full((nodes,), 5.0), torch.full((m,), 0.5)]).double()
    return TestSystem("", f, start, vector(10.0), source="Todini & Pilati (1988), gradient method; data made up")


@system("engineering")
def two_link_arm() -> TestSystem:
    """Inverse kinematics of a planar arm with links 1 and 0.8."""

    def f(z: Tensor, target: Tensor) -> Tensor:
        a, b = z
        return torch.stack(
            [torch.cos(a) + 0.8 * torch.cos(a + b), torch.sin(a) + 0.8 * torch.sin(a + b)]
        ) - target  # fmt: skip

    return TestSystem("", f, vector(0.1, 0.1), vector(0.9, 1.1), source="planar two-link arm")


@system("engineering")
def diode_circuit() -> TestSystem:
    """Two diodes and resistors, node voltages: exponentials of 40 V^-1 make full Newton steps overflow."""

    def f(z: Tensor, supply: Tensor) -> Tensor:
        u, v = z
        diode = lambda x: 1e-12 * torch.expm1(x / 0.02585)  # noqa: E731
        return torch.stack([(supply - u) / 1e3 - diode(u) - (u - v) / 500, (u - v) / 500 - diode(v)]) * 1e3

    return TestSystem("", f, vector(1.0, 1.0), vector(5.0), source="SPICE-like nodal analysis")
