"""
Pose graph and calibration: robot localisation as least squares
===============================================================

A robot drives in a loop and measures its steps (odometry, with a sensor that reads a few per cent too much) and, now
and then, that it has been here before. The poses (position, heading) of least squared error are a layer; its
derivative calibrates the sensor.

*Checked:* without noise the true path is found; the derivative against differences; the calibration is found.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
n = 20


def relative(a, b):
    """Pose ``b`` as seen from ``a``; the angle enters by sine and cosine, so that it may wrap."""
    c, s, d = torch.cos(a[:, 2]), torch.sin(a[:, 2]), b - a
    return torch.stack(
        [c * d[:, 0] + s * d[:, 1], -s * d[:, 0] + c * d[:, 1], torch.cos(d[:, 2]), torch.sin(d[:, 2])], 1
    )


def measured(pose):
    """(x, y, angle) as relative() has it."""
    return torch.stack([pose[:, 0], pose[:, 1], pose[:, 2].cos(), pose[:, 2].sin()], 1)


turn = 2 * torch.pi * torch.arange(n) / n
true = torch.stack([2 * torch.sin(turn), 2 - 2 * torch.cos(turn), turn], 1)
first, second = torch.arange(n - 1), torch.arange(1, n)
seen_from, seen = torch.tensor([0, 0, 5, 4, 1]), torch.tensor([n - 1, n - 2, n - 1, 14, 10])


def odometry(poses):
    r = relative(poses[first], poses[second])
    return torch.stack([r[:, 0], r[:, 1], torch.atan2(r[:, 3], r[:, 2])], 1)


def residuals(poses, steps, closures, scale):
    poses = torch.cat([torch.zeros(1, 3), poses])  # the first pose fixes the gauge
    calibrated = measured(torch.cat([steps[:, :2] * scale, steps[:, 2:]], 1))
    return {
        "odometry": 10 * (relative(poses[first], poses[second]) - calibrated),
        "closures": 30 * (relative(poses[seen_from], poses[seen]) - closures),
    }


def locate(steps, closures, scale):
    solution = ik.least_squares(
        residuals, dead_reckoning(steps), (steps, closures, scale), solver="levenberg_marquardt", rtol=1e-11
    )
    return solution.value


def dead_reckoning(steps):
    pose, path = torch.zeros(3), []
    for step in steps.detach():
        c, s = pose[2].cos(), pose[2].sin()
        pose = pose + torch.stack([c * step[0] - s * step[1], s * step[0] + c * step[1], step[2]])
        path.append(pose)
    return torch.stack(path)


one = torch.tensor(1.0)
exact_closures = relative(true[seen_from], true[seen])
assert torch.allclose(locate(odometry(true), exact_closures, one), true[1:], atol=1e-7)

steps = odometry(true)
steps = torch.cat([steps[:, :2] * 1.06, steps[:, 2:]], 1) + 0.02 * torch.randn(n - 1, 3)  # reads 6 % too much
closures = exact_closures + 0.005 * torch.randn(5, 4)
found = locate(steps, closures, one)


def cost(scale):
    """What the odometry and the closures still disagree about."""
    r = residuals(locate(steps, closures, scale), steps, closures, scale)
    return sum(v.square().sum() for v in r.values()) / 2


slope = torch.func.grad(cost)(one)
difference = (cost(one + 1e-5) - cost(one - 1e-5)) / 2e-5
J = torch.func.jacfwd(lambda s: locate(steps, closures, s))(one)
by_differences = (locate(steps, closures, one + 1e-5) - locate(steps, closures, one - 1e-5)) / 2e-5
print(f"derivative of the cost {float(slope):.3f}, by differences {float(difference):.3f}")
assert torch.allclose(J, by_differences, atol=1e-5) and abs(float(slope - difference)) < 1e-3 * abs(float(slope))

scale = torch.tensor(1.0, requires_grad=True)
optimiser = torch.optim.LBFGS([scale], max_iter=20, line_search_fn="strong_wolfe")


def closure():
    optimiser.zero_grad()
    value = cost(scale)
    value.backward()
    return value


optimiser.step(closure)
print(f"scale of the sensor: found {float(1 / scale.detach()):.3f}, true 1.060")
assert abs(float(1 / scale.detach()) - 1.06) < 0.015
better = locate(steps, closures, scale.detach())
error = lambda poses: float((poses[:, :2] - true[1:, :2]).norm(dim=1).mean())  # noqa: E731
reckoned = error(dead_reckoning(steps))
print(f"mean error: dead reckoning {reckoned:.2f}, graph {error(found):.3f}, calibrated {error(better):.3f}")

plt.figure(figsize=(5.2, 4.5), layout="constrained")
for path, name, style in (
    (dead_reckoning(steps), "dead reckoning", ":"),
    (found, "pose graph", "--"),
    (better, "calibrated", "-"),
    (true[1:], "true", "k."),
):
    plt.plot(path[:, 0], path[:, 1], style, label=name)
plt.axis("equal")
plt.xlabel("$x_1$")
plt.ylabel("$x_2$")
plt.legend()
plt.show()
