"""
A monotone-operator equilibrium network
=======================================

``z = relu(W z + U x + b)`` has exactly one solution for every input if ``I - W`` is strongly monotone, which the
parametrisation ``W = (1 - m) I - AᵀA + B - Bᵀ`` ensures for any ``A``, ``B`` (Winston & Kolter 2020). The norm of
``W`` may be far above one, so that plain iteration diverges; forward-backward splitting is a solver of eight lines,
registered here.

*Checked:* all solvers find one solution from any start; derivatives against differences; the splitting's step is
within its bound.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_circles

import implicitkit as ik

torch.manual_seed(0)
width, m = 12, 0.2


class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.A, self.B = (torch.nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2))
        self.U = torch.nn.Linear(2, width)

    def weight(self):
        return (1 - m) * torch.eye(width) - self.A.T @ self.A + self.B - self.B.T

    def forward(self, z, x):
        return torch.relu(z @ self.weight().T + self.U(x))


@ik.register_solver("damped_steps", solves="fixed_point")
@dataclass(frozen=True)
class DampedSteps(ik.Method):
    """``z <- z + step (f(z) - z)``: what forward-backward splitting is where relu is the proximal map of its own cone."""

    step_size: float = 0.05

    def step(self, f, z, state):
        return z + self.step_size * (f(z) - z), state


cell = Cell().double()
x = torch.randn(20, 2, dtype=torch.float64)
norm = float(torch.linalg.matrix_norm(cell.weight(), 2).detach())
print(f"norm of W: {norm:.1f}")
tight = {"batch_dims": 1, "rtol": 1e-10, "max_steps": 5000}
reference = ik.fixed_point(cell, torch.zeros(20, width, dtype=torch.float64), (x,), solver="broyden", **tight)
for start in (0.0, 5.0):
    for solver in ("newton", DampedSteps(0.1)):
        z = ik.fixed_point(
            cell, torch.full((20, width), start, dtype=torch.float64), (x,), solver=solver, **tight
        ).value
        assert torch.allclose(z, reference.value, atol=1e-7)
print("one solution from every start:", True)
plain = ik.fixed_point(
    cell, torch.zeros(20, width, dtype=torch.float64), (x,), solver="picard", batch_dims=1, on_failure="ignore"
)
print("plain iteration converges:", bool(plain.converged.all()))
assert not plain.converged.all()


def total(A):
    parameters = {**dict(cell.named_parameters()), "A": A}
    f = lambda z, x: torch.func.functional_call(cell, parameters, (z, x))  # noqa: E731
    return ik.fixed_point(f, torch.zeros_like(reference.value), (x,), solver="broyden", **tight).value.square().sum()


A, d = cell.A.detach(), torch.randn(width, width, dtype=torch.float64)
slope = (torch.func.grad(total)(A) * d).sum()
difference = (total(A + 1e-6 * d) - total(A - 1e-6 * d)) / 2e-6
print(f"derivative {slope.item():.4f}, by differences {difference.item():.4f}")
assert abs((slope / difference).item() - 1) < 1e-4

# %%
# Training: no bound on the weights, no penalty, and still one solution for every input.

X, y = make_circles(200, noise=0.08, factor=0.5, random_state=0)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
cell, head = Cell(), torch.nn.Linear(width, 2)
optimiser = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.03)


def model(X):
    z = ik.fixed_point(cell, torch.zeros(len(X), width), (X,), solver="newton", batch_dims=1, rtol=1e-4).value
    return head(z)


losses, norms = [], []
for _ in range(50):
    loss = torch.nn.functional.cross_entropy(model(X), y)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    losses.append(float(loss.detach()))
    norms.append(float(torch.linalg.matrix_norm(cell.weight(), 2).detach()))
accuracy = float((model(X).argmax(1) == y).float().mean())
print(f"accuracy above 98 %: {accuracy > 0.98}, norm of W {norms[-1]:.1f}")
assert accuracy > 0.98

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
grid = torch.stack(torch.meshgrid(torch.linspace(-1.5, 1.5, 40), torch.linspace(-1.5, 1.5, 40), indexing="xy"), -1)
with torch.no_grad():
    share = torch.softmax(model(grid.reshape(-1, 2)), 1)[:, 1].reshape(40, 40)
axes[0].contourf(grid[..., 0], grid[..., 1], share, levels=20, cmap="coolwarm", alpha=0.6)
axes[0].scatter(*X.T, c=y, cmap="coolwarm", s=6)
axes[0].set(title="decision of the equilibrium", aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
axes[1].plot(losses, label="loss")
axes[1].plot(norms, "--", label="norm of W")
axes[1].axhline(1, ls=":", color="grey", label="a contraction is below")
axes[1].set(xlabel="training step", ylabel="loss, norm", yscale="log", title="free weights")
axes[1].legend()
plt.show()
