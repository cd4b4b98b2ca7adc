"""
A penalty for every pixel: hyperparameter optimisation
======================================================

Logistic regression on images of two digits has 64 weights, and here 64 penalties, learnt by the loss on a validation
set. The inner problem is solved by a loop of Newton steps that knows nothing of derivatives; its stationarity gives
the derivative of the trained weights with respect to all penalties at the price of one linear solve.

*Checked:* the hypergradient against differences; the validation loss falls, and the test loss does not grow.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import implicitkit as ik

torch.set_default_dtype(torch.float64)

data = load_digits()
chosen = (data.target == 3) | (data.target == 8)
X, y = torch.tensor(data.data[chosen] / 16), torch.tensor(data.target[chosen] == 3).double() * 2 - 1
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
(X, Xv, Xt), (y, yv, yt) = (torch.tensor_split(t[order], (60, 200)) for t in (X, y))


def logistic(w, X, y):
    return torch.nn.functional.softplus(-y * (X @ w)).mean()


def inner(w, log_penalty):
    return logistic(w, X, y) + (log_penalty.exp() * w.square()).sum() / 2


@ik.implicit(ik.Argmin(inner), rtol=1e-8)
def train(w, log_penalty):
    """Iteratively reweighted least squares, as one finds it in old code: nothing here is differentiated."""
    for _ in range(15):
        p = torch.sigmoid(-y * (X @ w))
        slope = -(X.T @ (y * p)) / len(y) + log_penalty.exp() * w
        hessian = X.T @ ((p * (1 - p))[:, None] * X) / len(y) + torch.diag(log_penalty.exp())
        w = w - torch.linalg.solve(hessian, slope)
    return w


def validation(log_penalty):
    return logistic(train(torch.zeros(64), log_penalty), Xv, yv)


log_penalty = torch.full((64,), -3.0)
gradient = torch.func.grad(validation)(log_penalty)
for pixel in (20, 36):
    h = 1e-3 * torch.nn.functional.one_hot(torch.tensor(pixel), 64)
    difference = (validation(log_penalty + h) - validation(log_penalty - h)) / 2e-3
    print(f"pixel {pixel}: hypergradient {float(gradient[pixel]):.3e}, by differences {float(difference):.3e}")
    assert abs(float(gradient[pixel] - difference)) < 1e-2 * float(gradient.abs().max())

# %%
# Training the penalties: the outer loop is an ordinary optimiser.

log_penalty.requires_grad_()
optimiser = torch.optim.Adam([log_penalty], lr=0.25)
history = []
for _ in range(40):
    w = train(torch.zeros(64), log_penalty)
    loss = logistic(w, Xv, yv) + 1e-4 * (log_penalty + 3).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    history.append((float(logistic(w, Xv, yv).detach()), float(logistic(w.detach(), Xt, yt))))
print(f"validation {history[0][0]:.3f} -> {history[-1][0]:.3f}, test {history[0][1]:.3f} -> {history[-1][1]:.3f}")
assert history[-1][0] < 0.8 * history[0][0] and history[-1][1] < history[0][1]

figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
axes[0].plot([v for v, _ in history], label="validation")
axes[0].plot([t for _, t in history], label="test")
axes[0].set(xlabel="outer step", ylabel="loss", title="one hypergradient a step")
axes[0].legend()
largest = float(w.detach().abs().max())
for ax, image, name, shades in (
    (axes[1], log_penalty.detach(), "log penalty", {"cmap": "viridis"}),
    (axes[2], w.detach(), "weights", {"cmap": "coolwarm", "vmin": -largest, "vmax": largest}),
):
    figure.colorbar(ax.imshow(image.reshape(8, 8), **shades), ax=ax)
    ax.set(title=name, xticks=[], yticks=[])
plt.show()
