"""
Inverse kinematics of a robot arm
=================================

Which joint angles put the hand of a planar arm with five joints at a given point? There are many; the layer takes
those that bend least, within limits:

.. math:: \\min_\\theta \\tfrac12 |\\theta|^2 \\quad\\text{subject to}\\quad \\text{hand}(\\theta) = p .

The angles are a differentiable function of the point *and of the lengths of the links*: the second half calibrates
the lengths from angles that were measured.

*Checked:* the hand is at the point; the sensitivity against differences; the lengths are found.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
joints = 5


def positions(theta, lengths):
    """Of all joints, shape (*batch, joints, 2)."""
    angle = theta.cumsum(-1)
    return torch.stack([(lengths * angle.cos()).cumsum(-1), (lengths * angle.sin()).cumsum(-1)], -1)


def angles(point, lengths):
    reach = ik.Equality(lambda theta, point, lengths: positions(theta, lengths)[..., -1, :] - point)
    start = torch.full((*point.shape[:-1], joints), 0.3)
    effort = lambda theta, point, lengths: theta.square().sum(-1) / 2  # noqa: E731
    return ik.argmin(effort, start, (point, lengths), constraints=[reach], batch_dims=point.ndim - 1, rtol=1e-10).value


lengths = torch.tensor([1.0, 0.9, 0.8, 0.6, 0.4])
turn = torch.linspace(0, 2 * torch.pi, 25)
points = torch.stack([1.6 + 0.7 * turn.cos(), 1.2 + 0.7 * turn.sin()], 1)
theta = angles(points, lengths)
print("the hand is off by less than 1e-9:", bool((positions(theta, lengths)[:, -1] - points).abs().max() < 1e-9))
assert torch.allclose(positions(theta, lengths)[:, -1], points, atol=1e-9)

J = torch.func.jacrev(lambda p: angles(p, lengths))(points[0])
for k in range(2):
    h = 1e-5 * torch.eye(2)[k]
    assert torch.allclose(J[:, k], (angles(points[0] + h, lengths) - angles(points[0] - h, lengths)) / 2e-5, atol=1e-6)

# Moving the point by J^-1: the hand follows to first order
moved = positions(theta[0] + J @ torch.tensor([1e-4, 2e-4]), lengths)[-1]
assert torch.allclose(moved, points[0] + torch.tensor([1e-4, 2e-4]), atol=1e-6)

# %%
# Calibration: somebody else's arm moves to known points and its angles are read off, with noise.  How long are its links?

true_lengths = torch.tensor([1.05, 0.85, 0.82, 0.57, 0.43])
read = (angles(points, true_lengths) + 1e-3 * torch.randn(25, joints)).detach()
guess = lengths.clone().requires_grad_()
optimiser = torch.optim.LBFGS([guess], max_iter=25, line_search_fn="strong_wolfe")
history = []


def loss():
    optimiser.zero_grad()
    value = (angles(points, guess) - read).square().mean()
    value.backward()
    history.append(float(value.detach()))
    return value


optimiser.step(loss)
print("lengths:", guess.detach().numpy().round(3), "true:", true_lengths.numpy())
assert float((guess.detach() - true_lengths).abs().max()) < 0.01

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for i in range(0, 25, 4):
    arm = torch.cat([torch.zeros(1, 2), positions(theta[i], lengths)])
    axes[0].plot(*arm.T, "o-", ms=3, color=plt.cm.viridis(i / 25))
axes[0].plot(*points.T, "k:", lw=1)
axes[0].set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$", title="least bent arm that reaches the circle")
axes[1].semilogy(history)
axes[1].set(xlabel="evaluation", ylabel="mean square error of the angles", title="the lengths are learnt")
plt.show()
