"""
Chemical equilibrium with conservation laws
===========================================

Carbonic acid in water. Five species obey three laws of mass action and two conservation laws (carbon, charge):

.. math:: \\frac{[H][HCO_3]}{[H_2CO_3]} = K_1, \\quad \\frac{[H][CO_3]}{[HCO_3]} = K_2, \\quad [H][OH] = K_w

The rates of the reactions alone would have a singular Jacobian: what is conserved is not determined by them. With the
conservation laws as equations it is regular, and the unknowns in logarithms keep concentrations positive over ten
orders.

*Checked:* pH against the roots of the quartic that the system reduces to; the buffer capacity against differences of
that.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
LN10 = float(np.log(10.0))
pK1, pK2, pKw = 6.35, 10.33, 14.0


def laws(u, carbon, sodium):
    """``u``: decimal logarithms of H, OH, H2CO3, HCO3, CO3, shape (batch, 5)."""
    h, oh, acid, bi, carb = u.unbind(-1)
    c = 10.0**u
    total = (c[..., 2] + c[..., 3] + c[..., 4]) / carbon - 1
    scale = carbon + sodium + 1e-7
    charge = (sodium + c[..., 0] - c[..., 1] - c[..., 3] - 2 * c[..., 4]) / scale
    return torch.stack([h + bi - acid + pK1, h + carb - bi + pK2, h + oh + pKw, total, charge], -1)


def pH(carbon, sodium):
    start = torch.tensor([-7.0, -7.0, -4.0, -4.0, -6.0]).expand(*sodium.shape, 5)
    return -ik.root(laws, start, (carbon, sodium), solver="trust_region", batch_dims=1, rtol=1e-13).value[..., 0]


# %%
# A titration: carbonic acid, ever more sodium hydroxide.  All points at once.

carbon = torch.tensor(0.01)
sodium = torch.linspace(0, 0.025, 301).requires_grad_()
curve = pH(carbon, sodium)
(slope,) = torch.autograd.grad(curve.sum(), sodium)
curve, sodium = curve.detach(), sodium.detach()


def by_quartic(c, s):
    """Charge balance times what makes it a polynomial in h."""
    k1, k2, kw = 10**-pK1, 10**-pK2, 10**-pKw
    p = np.polymul([1, s, -kw], [1, k1, k1 * k2])
    q = np.polymul([c * k1, 2 * c * k1 * k2], [1, 0])
    roots = np.roots(np.polysub(p, q))
    return -np.log10(max(r.real for r in roots if abs(r.imag) < 1e-9 * abs(r) + 1e-30 and r.real > 0))


points = range(0, 301, 25)
error = max(abs(float(curve[i]) - by_quartic(0.01, float(sodium[i]))) for i in points)
print("largest difference to the quartic is below 1e-5:", error < 1e-5)
assert error < 1e-5

# %%
# The buffer capacity is ``dsodium / dpH``, one backward for the whole curve.

buffer = 1 / slope
i = 75
h = 1e-6
difference = 2 * h / (by_quartic(0.01, float(sodium[i]) + h) - by_quartic(0.01, float(sodium[i]) - h))
print(f"buffer capacity at {float(sodium[i]):.4f} mol/l: {float(buffer[i]):.5f}, by differences {difference:.5f}")
assert abs(float(buffer[i]) / difference - 1) < 1e-3

# %%
# Sensitivity in another direction: how does pH move with the carbon content?

by_carbon = torch.func.jacrev(lambda c: pH(c, sodium[i : i + 1])[0])(carbon)
assert abs(
    float(by_carbon) - (by_quartic(0.01 + h, float(sodium[i])) - by_quartic(0.01 - h, float(sodium[i]))) / 2 / h
) < 1e-2 * abs(by_carbon)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
axes[0].plot(1e3 * sodium, curve)
axes[0].plot(
    [1e3 * float(sodium[j]) for j in points],
    [by_quartic(0.01, float(sodium[j])) for j in points],
    "o",
    ms=4,
    label="quartic",
)
axes[0].set(xlabel="sodium hydroxide, mmol/l", ylabel="pH", title="titration of 10 mmol/l carbonic acid")
axes[0].legend()
axes[1].plot(curve, 1e3 * buffer.detach())
axes[1].set(xlabel="pH", ylabel="buffer capacity, mmol/l", title="largest where pH = pK")
for pk in (pK1, pK2):
    axes[1].axvline(pk, ls=":", color="grey")
plt.show()
