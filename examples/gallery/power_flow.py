"""
AC power flow with sensitivities
================================

The state of a grid: complex voltages at which the power injected at every bus equals what is generated less what is
used,

.. math:: V_i \\, (Y V)_i^* = S_i .

Three kinds of buses: the slack (voltage known), generators (power and magnitude known), loads (power known); the
unknowns are the angles of all but the slack and the magnitudes at loads. The grid is the Western System of nine buses
(Anderson & Fouad 1977; data as in MATPOWER's case9).

*Checked:* against the published solution, and sensitivities of the losses against differences.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)

# from, to, resistance, reactance, charging
LINES = [
    (1, 4, 0, 0.0576, 0), (4, 5, 0.017, 0.092, 0.158), (5, 6, 0.039, 0.17, 0.358), (3, 6, 0, 0.0586, 0),
    (6, 7, 0.0119, 0.1008, 0.209),
    (7, 8, 0.0085, 0.072, 0.149), (8, 2, 0, 0.0625, 0), (8, 9, 0.032, 0.161, 0.306), (9, 4, 0.01, 0.085, 0.176),
]  # fmt: skip
n = 9
Y = torch.zeros(n, n, dtype=torch.complex128)
for a, b, r, x, charging in LINES:
    y = 1 / complex(r, x)
    Y[a - 1, a - 1] += y + 0.5j * charging
    Y[b - 1, b - 1] += y + 0.5j * charging
    Y[a - 1, b - 1] -= y
    Y[b - 1, a - 1] -= y

generation = torch.tensor([0, 1.63, 0.85, 0, 0, 0, 0, 0, 0])
load = torch.zeros(n, dtype=torch.complex128)
load[[4, 6, 8]] = torch.tensor([0.9 + 0.3j, 1.0 + 0.35j, 1.25 + 0.5j])
loads = torch.arange(3, 9)  # where the magnitude is unknown


def voltages(u):
    angle = torch.cat([torch.zeros(1), u["angle"]])
    magnitude = torch.cat([torch.ones(3), u["magnitude"]])
    return torch.polar(magnitude, angle)


def injected(V):
    return V * (Y @ V).conj()


def mismatch(u, load, generation):
    S = injected(voltages(u)) - generation + load
    return {"angle": S.real[1:], "magnitude": S.imag[loads]}


def state(load, generation):
    start = {"angle": torch.zeros(n - 1), "magnitude": torch.ones(len(loads))}
    return voltages(ik.root(mismatch, start, (load, generation), solver="newton", rtol=1e-13).value)


def losses(load, generation):
    return injected(state(load, generation)).real.sum()


V = state(load, generation)
published = {
    4: (0.987, -2.407),
    5: (0.975, -4.017),
    6: (1.003, 1.926),
    7: (0.986, 0.622),
    8: (0.996, 3.799),
    9: (0.958, -4.350),
}
for bus, (magnitude, angle) in published.items():
    assert abs(float(V[bus - 1].abs()) - magnitude) < 6e-4 and abs(float(V[bus - 1].angle().rad2deg()) - angle) < 6e-4
lost = 100 * losses(load, generation)
print(f"power of the slack {100 * injected(V)[0].real:.2f} MW (published 71.95), losses {lost:.2f} MW")
assert abs(float(injected(V)[0].real) - 0.7195) < 1e-4

# %%
# What does another megawatt of load cost in losses, bus by bus?  One backward.

grad = torch.func.grad(losses)(load, generation).real
marginal = grad.clone()
step = torch.zeros(n, dtype=torch.complex128)
for bus in (4, 6, 8):
    step.zero_()[bus] = 1e-5
    difference = (losses(load + step, generation) - losses(load - step, generation)) / 2e-5
    assert abs(float(difference - marginal[bus])) < 1e-6
    print(f"bus {bus + 1}: {float(marginal[bus]):+.4f} MW lost per MW of load")

# %%
# The load that the grid can carry: all loads and generators grow until the equations have no solution.

factors = torch.linspace(0.5, 2.4, 20)
lowest = [float(state(f * load, f * generation).abs().min()) for f in factors]
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
axes[0].bar([str(b + 1) for b in range(n)], V.abs(), color="C0")
axes[0].set(ylim=(0.9, 1.05), xlabel="bus", ylabel="voltage, per unit", title="magnitudes")
axes[1].plot(factors, lowest, "o-")
axes[1].set(xlabel="load, times today's", ylabel="lowest voltage, per unit", title="towards the nose of the curve")
plt.show()
