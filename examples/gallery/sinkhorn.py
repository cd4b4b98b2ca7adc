"""
Sinkhorn: entropic optimal transport
====================================

The plan ``P = diag(u) exp(-C/ε) diag(v)`` with given marginals: Sinkhorn's iteration in logarithms is a fixed point
for the potential ``g``,

.. math:: f = -\\varepsilon \\log \\sum_j e^{(g_j - C_{ij})/\\varepsilon} + \\varepsilon\\log a, \\qquad g = \\dots

Potentials are known up to a constant, so that ``I - J`` is singular by construction. The gauge is fixed in the map:
the mean of ``g`` is taken away after each step. Then points move down the gradient of their transport cost to a
target.

*Checked:* the marginals; the derivative of the cost with respect to ``C`` (the plan, by the envelope theorem); the
limit of small ε against linear programming.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def potentials(g, C, log_a, log_b, eps):
    f = eps * (log_a - torch.logsumexp((g[None, :] - C) / eps, 1))
    return f, eps * (log_b - torch.logsumexp((f[:, None] - C) / eps, 0))


def plan(C, a, b, eps):
    def step(g, C, log_a, log_b):
        new = potentials(g, C, log_a, log_b, eps)[1]
        return new - new.mean()

    arguments = (C, a.log(), b.log())
    g = ik.fixed_point(step, torch.zeros(len(b)), arguments, solver="anderson", rtol=1e-10, atol=1e-12).value
    f, g = potentials(g, *arguments, eps)
    return ((f[:, None] + g[None, :] - C) / eps).exp()


def cost(C, a, b, eps):
    """Transport plus entropy: what the plan minimises."""
    P = plan(C, a, b, eps)
    return (P * C).sum() + eps * (P * (P.log() - 1)).sum()


n, m = 12, 15
x, y = torch.rand(n, 2), torch.rand(m, 2) * torch.tensor([1.0, 0.5])
a, b = torch.full((n,), 1 / n), torch.full((m,), 1 / m)
C = (x[:, None] - y[None]).square().sum(-1)
P = plan(C, a, b, 0.05)
print("marginals are right:", bool((P.sum(0) - b).abs().max() < 1e-9 and (P.sum(1) - a).abs().max() < 1e-9))
assert torch.allclose(P.sum(0), b, atol=1e-9) and torch.allclose(P.sum(1), a, atol=1e-9)

slope = torch.func.grad(lambda C: cost(C, a, b, 0.05))(C)
print("the derivative of the cost is the plan:", torch.allclose(slope, P, atol=1e-8))
assert torch.allclose(slope, P, atol=1e-8)

# %%
# The derivative of the plan itself, which no envelope theorem gives, against differences.

direction = torch.randn(n, m)
forward = torch.func.jvp(lambda C: plan(C, a, b, 0.05), (C,), (direction,))[1]
difference = (plan(C + 1e-5 * direction, a, b, 0.05) - plan(C - 1e-5 * direction, a, b, 0.05)) / 2e-5
assert torch.allclose(forward, difference, atol=1e-6 * float(difference.abs().max()))

rows = np.concatenate([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
exact = scipy.optimize.linprog(C.numpy().ravel(), A_eq=rows, b_eq=np.concatenate([a, b])).fun
gaps = [float((plan(C, a, b, eps) * C).sum()) - exact for eps in (0.1, 0.03, 0.01)]
print("above the linear program by:", [f"{gap:.4f}" for gap in gaps])
assert gaps[0] > gaps[1] > gaps[2] > -1e-9 and gaps[2] < 0.05 * exact + 1e-3

# %%
# A cloud flows to a ring.

ring = torch.linspace(0, 2 * torch.pi, 41)[:-1]
target = 0.5 + 0.4 * torch.stack([ring.cos(), ring.sin()], 1)
cloud = (0.5 + 0.05 * torch.randn(30, 2)).requires_grad_()
weights, wanted = torch.full((30,), 1 / 30), torch.full((40,), 1 / 40)
paths = [cloud.detach().clone()]
for _ in range(25):
    loss = cost((cloud[:, None] - target[None]).square().sum(-1), weights, wanted, 0.01)
    (g,) = torch.autograd.grad(loss, cloud)
    cloud = (cloud - 0.25 * 30 * g / 2).detach().requires_grad_()
    paths.append(cloud.detach().clone())
radius = (cloud.detach() - 0.5).norm(dim=1)
assert float((radius - 0.4).abs().mean()) < 0.05

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
plan = axes[0].imshow(P, cmap="magma", aspect="auto")
figure.colorbar(plan, label="mass")
axes[0].set(title="plan between two clouds", xlabel="to", ylabel="from", xticks=range(0, P.shape[1], 2))
track = torch.stack(paths)
axes[1].plot(track[..., 0], track[..., 1], color="grey", lw=0.5)
axes[1].plot(*target.T, ".", label="target")
axes[1].plot(*cloud.detach().T, "o", ms=4, label="after 25 steps")
axes[1].set(title="down the gradient of the transport cost", aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right center")
plt.show()
