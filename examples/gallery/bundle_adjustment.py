"""
Bundle adjustment: cameras, points, and the lens between
========================================================

Seven photographs of the same forty points: where did the cameras stand, and where are the points? The least squared error
of reprojection is a layer with 153 unknowns (Triggs, McLauchlan, Hartley & Fitzgibbon 2000). Its derivative says how the
reconstruction depends on what was held fixed, here on the lens: the radial distortion is learnt from surveyed distances,
which bundle adjustment alone would not use.

*Checked:* without noise the true scene is found; with noise the same cost as SciPy's; the derivative of a point with respect
to the lens against differences; the lens is found.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
cameras, points = 7, 40
focal = 800.0  # pixels


def rotate(turns, p):
    """Points ``p`` (n, 3) turned by each rotation vector (cameras, 3): Rodrigues' formula."""
    angle = (turns.square().sum(-1, keepdim=True) + 1e-30).sqrt()[:, None]
    axis = turns[:, None] / angle
    cross = torch.linalg.cross(axis.expand(-1, len(p), -1), p.expand(len(turns), -1, -1))
    along = (axis * p).sum(-1, keepdim=True) * axis
    return p * angle.cos() + cross * angle.sin() + along * (1 - angle.cos())


def project(turns, places, p, lens):
    """Pixels (cameras, points, 2)."""
    seen = rotate(turns, p) + places[:, None]
    flat = seen[..., :2] / seen[..., 2:]
    return focal * flat * (1 + lens * flat.square().sum(-1, keepdim=True))


def scene():
    """Cameras on an arc around a wavy wall."""
    around = torch.linspace(-0.5, 0.5, cameras)
    turns = torch.stack([0.1 * torch.sin(5 * around), around, 0.05 * around], 1)
    places = torch.tensor([0.0, 0.0, 6.0]) + 0.3 * torch.randn(cameras, 3)
    p = 2 * torch.rand(points, 3) - 1
    return turns, places, torch.cat([p[:, :2] * 1.8, 0.6 * torch.sin(3 * p[:, :1]) + 0.2 * p[:, 2:]], 1)


turns, places, wall = scene()
true = {"turns": turns[1:], "places": places[1:], "points": wall}
lens = torch.tensor(-0.25)
distance = (wall[0] - wall[1:6]).norm(dim=1)  # five distances that somebody has measured with a tape


def errors(z, pixels, lens):
    """Reprojection errors in pixels; the first camera and the length of one base line fix the gauge."""
    all_turns, all_places = torch.cat([turns[:1], z["turns"]]), torch.cat([places[:1], z["places"]])
    base = (z["places"][-1] - places[0]).norm() - (places[-1] - places[0]).norm()
    return {"pixels": project(all_turns, all_places, z["points"], lens) - pixels, "base": 1e3 * base}


def near(true):
    return {name: part + 0.05 * torch.randn_like(part) for name, part in true.items()}


start = near(true)


def reconstruct(pixels, lens):
    return ik.least_squares(errors, start, (pixels, lens)).value


sharp = project(turns, places, wall, lens)
found = reconstruct(sharp, lens)
print("largest error without noise is below a micrometre:", bool((found["points"] - wall).abs().max() < 1e-6))
assert torch.allclose(found["points"], wall, atol=1e-6)

pixels = sharp + 0.5 * torch.randn_like(sharp)
found = reconstruct(pixels, lens)
flat = lambda z: torch.cat([part.flatten() for part in z.values()])  # noqa: E731


def unflat(v):
    parts = torch.as_tensor(v).split([part.numel() for part in true.values()])
    return {name: part.reshape(true[name].shape) for name, part in zip(true, parts, strict=True)}


def residuals(v):
    return flat(errors(unflat(v), pixels, lens)) if torch.is_tensor(v) else residuals(torch.as_tensor(v)).numpy()


jacobian = torch.func.jacfwd(residuals)
theirs = scipy.optimize.least_squares(
    residuals, flat(start).numpy(), jac=lambda v: jacobian(torch.as_tensor(v)).numpy(), method="lm", xtol=1e-12
)
ours = float(residuals(flat(found)).square().sum() / 2)
print(f"cost {ours:.4f} square pixels, SciPy's {theirs.cost:.4f}")
assert np.isclose(ours, theirs.cost, rtol=1e-8)

# %%
# How the scene moves with the lens: one linear solve, for all points.

J = torch.func.jacfwd(lambda k: reconstruct(pixels, k)["points"])(lens)
difference = (reconstruct(pixels, lens + 1e-4)["points"] - reconstruct(pixels, lens - 1e-4)["points"]) / 2e-4
print(f"a lens wrong by 0.01 moves points by up to {float(0.01 * J.norm(dim=1).max()):.4f}")
assert torch.allclose(J, difference, atol=1e-3 * float(J.abs().max()))


def taped(k):
    """Surveyed distances against those of the reconstruction."""
    p = reconstruct(pixels, k)["points"]
    return ((p[0] - p[1:6]).norm(dim=1) - distance) / 1e-3


wrong = torch.tensor(0.0)
learnt = ik.least_squares(taped, wrong).value
print(f"lens: found {float(learnt):.3f}, true {float(lens):.3f}")
assert abs(float(learnt - lens)) < 0.02

without, better = reconstruct(pixels, wrong)["points"], reconstruct(pixels, learnt)["points"]
error = lambda p: float((p - wall).norm(dim=1).mean())  # noqa: E731
print(f"mean error of a point: no lens {error(without):.4f}, lens from distances {error(better):.4f}")
assert error(better) < 0.5 * error(without)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for ax, p, name in ((axes[0], without, "a perfect lens assumed"), (axes[1], better, "lens from five distances")):
    ax.plot(wall[:, 0], wall[:, 2], "ko", ms=4, mfc="none", label="true")
    ax.plot(p[:, 0], p[:, 2], "x", ms=5, color="C1", label=f"found, {1e3 * error(p):.0f} mm off")
    ax.set(xlabel="along the wall, m", ylabel="depth, m", title=name)
    ax.legend()
plt.show()
