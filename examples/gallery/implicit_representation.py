"""
An image as an equilibrium: implicit neural representation
==========================================================

A photograph as a function from the plane to brightness, with no pixels: the features of a point are an equilibrium,

.. math:: z = \\sin(W z + U \\gamma(p) + b), \\qquad \\text{brightness}(p) = v \\cdot z + c,

of one layer that is as deep as it has to be (Huang, Bai & Kolter 2021, "(Implicit)²"). The brightness can be asked for
between the pixels, and has a gradient in ``p``, which passes through the equilibrium as everything does.

*Checked:* the gradient of the image against differences, and edges where the photograph has them; the Hessian is symmetric;
the network of 30 equal layers gives the same image; pixels that were not trained on are told.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_sample_image

import implicitkit as ik

torch.manual_seed(0)
photo = torch.tensor(load_sample_image("flower.jpg")).double().mean(2) / 255
n = 40
picture = torch.nn.functional.adaptive_avg_pool2d(photo[None, :420, 130:550], n)[0].float()
axis = (torch.arange(n) + 0.5) / n * 2 - 1
places = torch.cartesian_prod(axis, axis)
brightness = picture.flatten()
checker = (torch.arange(n)[:, None] + torch.arange(n) * 2) % 5 == 0
kept = checker.flatten()  # a fifth of the pixels is never trained on

width = 64
frequencies = 3.0 * torch.randn(2, 48)
inject = torch.nn.Linear(96, width)
raw = torch.nn.Parameter(0.5 * torch.randn(width, width) / width**0.5)
head = torch.nn.Linear(width, 1)


def features(p):
    phase = p @ frequencies
    return torch.cat([phase.sin(), phase.cos()], -1)


def cell(z, x):
    W = 0.8 * raw / torch.linalg.matrix_norm(raw, 2).clamp(min=0.8)  # |W| < 1: one equilibrium for every point
    return torch.sin(z @ W.T + x)


def image(p):
    """Brightness at points (k, 2)."""
    x = inject(features(p))
    z = ik.fixed_point(cell, torch.zeros_like(x), (x,), batch_dims=1).value
    return head(z)[..., 0]


optimiser = torch.optim.Adam([raw, *inject.parameters(), *head.parameters()], lr=5e-3)
for _ in range(100):
    error = (image(places[~kept]) - brightness[~kept]).square().mean()
    optimiser.zero_grad()
    error.backward()
    optimiser.step()

with torch.no_grad():
    shown = image(places)
    deep = torch.zeros(n * n, width)
    for _ in range(30):
        deep = cell(deep, inject(features(places)))
    assert torch.allclose(head(deep)[:, 0], shown, atol=1e-3)
quality = lambda mask: float(-10 * (shown - brightness)[mask].square().mean().log10())  # noqa: E731
flat = float(-10 * brightness.var().log10())
print(f"trained pixels {quality(~kept):.0f} dB, pixels kept apart {quality(kept):.0f} dB, one grey {flat:.0f} dB")
assert quality(~kept) > 22 and quality(kept) > flat + 6

# %%
# The gradient and the curvature of the image, in double precision.

for module in (inject, head):
    module.double()
raw.data, frequencies = raw.data.double(), frequencies.double()
p = torch.tensor([[0.1, -0.3], [-0.4, 0.25]], dtype=torch.float64)
slope = torch.func.grad(lambda p: image(p).sum())
for k, h in enumerate(1e-5 * torch.eye(2, dtype=torch.float64)):
    assert torch.allclose(slope(p)[:, k], (image(p + h) - image(p - h)).detach() / 2e-5, rtol=1e-4, atol=1e-6)
curvature = torch.func.hessian(lambda q: image(q[None])[0])(p[0])
by_slopes = torch.stack([(slope(p + h) - slope(p - h))[0] / 2e-5 for h in 1e-5 * torch.eye(2, dtype=torch.float64)])
print("Hessian of the image at a point:", [[round(v, 1) for v in row] for row in curvature.tolist()])
assert torch.allclose(curvature, curvature.T, rtol=1e-6) and torch.allclose(curvature, by_slopes, rtol=1e-3)

gradient = slope(places.double()).detach().reshape(n, n, 2).norm(dim=2)
by_pixels = torch.stack(torch.gradient(picture.double(), spacing=2 / n)).norm(dim=0)
agreement = float(np.corrcoef(gradient.flatten(), by_pixels.flatten())[0, 1])
print(f"edges: correlation with differences of pixels {agreement:.2f}")
assert agreement > 0.6

fine = (torch.arange(160) + 0.5) / 160 * 2 - 1
with torch.no_grad():
    zoomed = image(torch.cartesian_prod(fine, fine).double()).reshape(160, 160)
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
for ax, what, name in (
    (axes[0], picture, f"{n} x {n} pixels"),
    (axes[1], zoomed, "the equilibrium, 160 x 160"),
    (axes[2], gradient, "its gradient"),
):
    ax.imshow(what, cmap="gray")
    ax.set(title=name, xticks=[], yticks=[])
plt.show()
