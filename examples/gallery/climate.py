"""
Steady climate: an energy balance with ice
==========================================

The temperature ``T`` on a sphere by latitude, at rest between sunshine, radiation and transport (Budyko 1969, Sellers
1969, North 1975):

.. math:: S(x)\\,a(T) - (A + B T) + \\frac{d}{dx}\\Big(D (1 - x^2) \\frac{dT}{dx}\\Big) = 0,

``x`` the sine of the latitude, with an albedo that grows where there is ice. Today's climate and a frozen earth are
both solutions; the start chooses. Sensitivities are one linear solve, and the transport is identified from
temperatures observed.

*Checked:* without ice feedback against the series of Legendre polynomials; sensitivities against differences; the
parameter is found.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
n = 60
edges = torch.linspace(-1, 1, n + 1)
x = (edges[1:] + edges[:-1]) / 2
h = 2 / n
shine = 1 - 0.48 * (3 * x**2 - 1) / 2  # annual mean by latitude


def balance(T, sun, outgoing, slope, transport, feedback):
    absorbed = 0.68 - feedback * torch.sigmoid((-10 - T) / 3)
    flux = transport * (1 - edges[1:-1] ** 2) * (T[1:] - T[:-1]) / h
    zero = torch.zeros(1)
    divergence = (torch.cat([flux, zero]) - torch.cat([zero, flux])) / h
    return sun / 4 * shine * absorbed - (outgoing + slope * T) + divergence


def climate(sun, transport, feedback=0.3, start=20.0, outgoing=203.3, slope=2.09):
    arguments = (torch.as_tensor(sun), outgoing, slope, torch.as_tensor(transport), feedback)
    return ik.steady_state(balance, start - 30 * x**2, arguments, solver="pseudo_transient", rtol=1e-12).value


# Without ice the equation is linear and the Legendre polynomials are its eigenfunctions.
plain = climate(1361.0, 0.6, feedback=0.0)
q = 1361 / 4 * 0.68
legendre = (q - 203.3) / 2.09 - 0.48 * q / (2.09 + 6 * 0.6) * (3 * x**2 - 1) / 2
print("without ice off by less than 0.05 K:", bool((plain - legendre).abs().max() < 0.05))
assert torch.allclose(plain, legendre, atol=0.05)

today = climate(1361.0, 0.6)
print(f"global mean {float(today.mean()):.1f} C, pole {float(today[-1]):.1f} C, equator {float(today[n // 2]):.1f} C")

# %%
# Sensitivity to the sun, with and without ice, against differences.

per_percent = lambda **k: 13.61 * torch.func.jacfwd(lambda s: climate(s, 0.6, **k).mean())(torch.tensor(1361.0))  # noqa: E731
difference = climate(1361.0 + 6.8, 0.6).mean() - climate(1361.0 - 6.81, 0.6).mean()
print(f"one per cent more sun: {float(per_percent()):.2f} K with ice, {float(per_percent(feedback=0.0)):.2f} K without")
assert abs(float(per_percent() - difference)) < 0.05 * float(difference)

# %%
# Transport from observed temperatures.

torch.manual_seed(0)
observed = climate(1361.0, 0.6) + 0.5 * torch.randn(n)
log_transport = torch.tensor(0.3).log().requires_grad_()
optimiser = torch.optim.LBFGS([log_transport], max_iter=20, line_search_fn="strong_wolfe")


def loss():
    optimiser.zero_grad()
    value = (climate(1361.0, log_transport.exp()) - observed).square().mean()
    value.backward()
    return value


optimiser.step(loss)
print(f"transport: found {float(log_transport.detach().exp()):.3f}, true 0.600")
assert abs(float(log_transport.detach().exp()) - 0.6) < 0.02

suns = torch.linspace(1180.0, 1500.0, 23)
warm = torch.stack([climate(s, 0.6).mean() for s in suns])
cold = torch.stack([climate(s, 0.6, start=-60.0).mean() for s in suns])
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
latitude = torch.rad2deg(torch.asin(x))
axes[0].plot(latitude, observed, ".", color="grey", label="observed")
axes[0].plot(latitude, climate(1361.0, log_transport.detach().exp()), label="fitted")
axes[0].plot(latitude, plain, ":", label="without ice")
axes[0].set(xlabel="latitude, degrees", ylabel="temperature, °C", title="today")
axes[0].legend()
axes[1].plot(suns, warm, "o-", ms=3, label="from a warm start")
axes[1].plot(suns, cold, "s-", ms=3, label="from a frozen start")
axes[1].axvline(1361, ls=":", color="grey")
axes[1].set(xlabel="sunshine, W/m²", ylabel="global mean, °C", title="two climates for one sun (dotted: today's)")
axes[1].legend(loc="upper left")
plt.show()
