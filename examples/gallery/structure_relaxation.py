"""
Structure relaxation of a cluster
=================================

Seven atoms with Lennard-Jones forces relax to the positions ``r`` of least energy; :func:`scipy.optimize.minimize`
does it, as any molecular code could. The equation ``∇E = 0`` then says how the structure changes with the parameters
of the force.

Translations and rotations cost no energy, so that the Hessian has six zero eigenvalues. The linear solver ``"lsmr"``
takes the derivative of least norm: no drift, no spin.

*Checked:* the known energy of the cluster (-16.505384); every length grows like the radius parameter ``σ`` exactly;
response of bond lengths to an external force against relaxation with that force.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
n = 7
pairs = torch.combinations(torch.arange(n))


def distances(r):
    return (r[pairs[:, 0]] - r[pairs[:, 1]]).norm(dim=1)


def energy(r, sigma, force):
    q = (sigma / distances(r)) ** 6
    return 4 * (q**2 - q).sum() - (force * r).sum()


@ik.implicit(ik.Argmin(energy), rule=ik.Implicit(linear_solver="lsmr", rtol=1e-6), rtol=1e-5)
def relax(r0, sigma, force):
    def value(v):
        r = torch.tensor(v.reshape(n, 3), requires_grad=True)
        with torch.enable_grad():
            e = energy(r, sigma, force)
            (g,) = torch.autograd.grad(e, r)
        return float(e.detach()), g.numpy().ravel()

    found = scipy.optimize.minimize(
        value, r0.numpy().ravel(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}
    )
    return torch.from_numpy(found.x.reshape(n, 3))


ring = 2 * np.pi * np.arange(5) / 5
start = torch.tensor(np.concatenate([np.stack([np.cos(ring), np.sin(ring), 0 * ring], 1), [[0, 0, 0.6], [0, 0, -0.6]]]))
sigma, rest = torch.tensor(1.0), torch.zeros(n, 3)
r = relax(start, sigma, rest)
print(f"energy {float(energy(r, sigma, rest)):.6f}")
assert abs(float(energy(r, sigma, rest)) + 16.505384) < 1e-5

growth = torch.func.jacrev(lambda s: distances(relax(start, s, rest)))(sigma)
print("lengths are proportional to sigma:", torch.allclose(growth, distances(r), atol=1e-6))
assert torch.allclose(growth, distances(r), atol=1e-6)

# %%
# Pull at the two ends: the compliance of every bond, in one product, against relaxing again.  (Only pulls: pushed, the
# cluster would rather turn round, and a solve from here is refused as a saddle.)

pull = torch.zeros(n, 3)
pull[5, 2], pull[6, 2] = 1.0, -1.0
bonds = lambda f: distances(relax(start, sigma, f))  # noqa: E731
_, compliance = torch.func.jvp(bonds, (rest,), (pull,))
by_relaxing = (4 * bonds(1e-3 * pull) - bonds(2e-3 * pull) - 3 * bonds(rest)) / 2e-3
print("compliance of the axis:", f"{float(compliance[-1]):.4f}", "by relaxing again:", f"{float(by_relaxing[-1]):.4f}")
assert torch.allclose(compliance, by_relaxing, atol=1e-4)

figure = plt.figure(figsize=(8.5, 3.8), layout="constrained")
shades = plt.cm.ScalarMappable(plt.Normalize(-0.02, 0.02), "RdBu_r")
left = figure.add_subplot(1, 2, 1, projection="3d")
for (i, j), length, change in zip(pairs, distances(r), compliance, strict=True):
    if length < 1.3:
        left.plot(*r[[int(i), int(j)]].T.tolist(), color=shades.to_rgba(float(change)), lw=3.5)
left.scatter(*r.T.tolist(), s=120, color="k")
left.set_axis_off()
left.set_title("the poles are pulled apart")
figure.colorbar(shades, ax=left, label="change per unit force", shrink=0.7)
right = figure.add_subplot(1, 2, 2)
right.plot(distances(r), compliance, "o")
right.axhline(0, color="black", lw=0.8)
right.set(xlabel="distance of the pair", ylabel="change of distance per unit force", title="compliance")
plt.show()
