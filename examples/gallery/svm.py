"""
A support vector machine as a layer
===================================

The dual of the SVM is a quadratic program with box constraints and one equality. As a layer it is differentiable in
the data and in the width of its kernel, which is then learnt on points left out, with no grid search.

*Checked:* the decision function against scikit-learn's ``SVC``; the derivative of the validation loss against
differences.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from sklearn.svm import SVC

import implicitkit as ik

torch.set_default_dtype(torch.float64)
X, y = (torch.tensor(t) for t in make_moons(120, noise=0.25, random_state=0))
y = 2.0 * y - 1
X, Xv, y, yv = X[:60], X[60:], y[:60], y[60:]
C = 2.0


def kernel(a, b, log_gamma):
    return torch.exp(-log_gamma.exp() * (a[:, None] - b[None]).square().sum(-1))


def fit(X, log_gamma):
    """The dual: min a'Qa/2 - sum a, 0 <= a <= C, y'a = 0; the price of the equality is the intercept."""
    Q = y[:, None] * y[None] * kernel(X, X, log_gamma) + 1e-9 * torch.eye(len(X))
    n = len(X)
    program = ik.QuadraticProgram(
        Q, -torch.ones(n), y[None], torch.zeros(1), torch.eye(n), torch.full((n,), C), lower=torch.zeros(n)
    )
    solution = ik.solve(program, rtol=1e-10)
    return solution.value, solution.multipliers[0]


def decision(points, X, log_gamma):
    a, intercept = fit(X, log_gamma)
    return kernel(points, X, log_gamma) @ (a * y) + intercept


log_gamma = torch.tensor(1.0)
ours = decision(Xv, X, log_gamma)
reference = SVC(C=C, gamma=float(log_gamma.exp()), tol=1e-8).fit(X, y).decision_function(Xv)
print("largest difference to SVC is below 1e-4:", bool((ours - torch.tensor(reference)).abs().max() < 1e-4))
assert torch.allclose(ours, torch.tensor(reference), atol=1e-4)


def validation(log_gamma, X=X):
    return torch.nn.functional.softplus(-yv * decision(Xv, X, log_gamma)).mean()


slope = torch.func.grad(validation)(log_gamma)
difference = (validation(log_gamma + 1e-5) - validation(log_gamma - 1e-5)) / 2e-5
print(f"derivative {float(slope):.5f}, by differences {float(difference):.5f}")
assert abs(float(slope - difference)) < 1e-4

# %%
# Learn the width, and ask which training points the loss depends on: zero for all but the support vectors.

log_gamma = torch.tensor(2.5, requires_grad=True)
optimiser = torch.optim.Adam([log_gamma], lr=0.2)
schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05, 60)  # the path ends where it is lowest
path = []
for _ in range(60):
    loss = validation(log_gamma)
    optimiser.zero_grad()
    loss.backward()
    path.append((float(log_gamma.detach()), float(loss.detach())))
    optimiser.step()
    schedule.step()
print(f"validation loss {path[0][1]:.3f} -> {path[-1][1]:.3f}")
assert path[-1][1] < min(loss for _, loss in path) + 1e-3
influence = torch.func.grad(lambda X: validation(log_gamma.detach(), X))(X).norm(dim=1)
held = fit(X, log_gamma.detach())[0] > 1e-6
assert float(influence[~held].max()) < 1e-6 < float(influence.max())

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
grid = torch.stack(torch.meshgrid(torch.linspace(-1.6, 2.6, 80), torch.linspace(-1.2, 1.8, 60), indexing="xy"), -1)
field = decision(grid.reshape(-1, 2), X, log_gamma.detach()).reshape(60, 80)
axes[0].contourf(grid[..., 0], grid[..., 1], field, levels=[-9, -1, 0, 1, 9], cmap="coolwarm", alpha=0.4)
axes[0].scatter(*X.T, c=y, cmap="coolwarm", s=15 + 150 * influence / influence.max(), edgecolor="k", lw=0.4)
axes[0].set(title="size: influence on the validation loss", xlabel="$x_1$", ylabel="$x_2$")
axes[1].plot(*zip(*path, strict=True), "o-", ms=3)
axes[1].set(xlabel="log gamma", ylabel="validation loss", title="the width is learnt")
plt.show()
