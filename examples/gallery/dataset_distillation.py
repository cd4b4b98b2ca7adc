"""
Ten images instead of 1,400: dataset distillation
=================================================

A classifier trained on ten synthetic images, one for each digit, that should do as well as one trained on all of them
(Wang et al. 2018). Training is a layer: the weights are the argmin of the loss on the ten images,

.. math:: w(X) = \\arg\\min_w \\; \\ell(w; X) + \\tfrac{\\lambda}{2} |w|^2,

and the images go downhill on the loss of :math:`w(X)` on the real ones. No step of the training is recorded.

*Checked:* the derivative with respect to a pixel against differences, the trained weights against scikit-learn; the
distilled images teach more than ten real ones, and more than the ten mean images.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import implicitkit as ik

torch.set_default_dtype(torch.float64)

data = load_digits()
order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
X, y = torch.tensor(data.data / 16)[order], torch.tensor(data.target)[order]
X, Xt, y, yt = X[:1400], X[1400:], y[:1400], y[1400:]
digits = torch.arange(10)
penalty = 1e-2


def loss(w, X, y):
    return torch.nn.functional.cross_entropy(X @ w, y)


def teach(images):
    """The weights (64, 10) that ten images teach."""
    objective = lambda w, images: loss(w, images, digits) + penalty * w.square().sum() / 2  # noqa: E731
    return ik.argmin(objective, torch.zeros(64, 10), (images,)).value


def accuracy(images):
    return float(((Xt @ teach(images)).argmax(1) == yt).double().mean())


means = torch.stack([X[y == k].mean(0) for k in digits])
first = torch.stack([X[y == k][0] for k in digits])

theirs = LogisticRegression(C=1 / (10 * penalty), fit_intercept=False, tol=1e-10, max_iter=5000)
theirs.fit(first.numpy(), digits.numpy())
assert torch.allclose(teach(first), torch.tensor(theirs.coef_.T), atol=1e-5)

outer = lambda images: loss(teach(images), X, y)  # noqa: E731
gradient = torch.func.grad(outer)(first)
h = torch.zeros(10, 64)
h[3, 27] = 1e-4
difference = float(outer(first + h) - outer(first - h)) / 2e-4
print(f"one pixel of the three: {float(gradient[3, 27]):.4e}, by differences {difference:.4e}")
assert abs(float(gradient[3, 27]) - difference) < 1e-5 * float(gradient.abs().max()) + 1e-7

# %%
# The images learn.

images = first.clone().requires_grad_()
optimiser = torch.optim.Adam([images], lr=0.1)
history = []
for _ in range(60):
    value = outer(images)
    optimiser.zero_grad()
    value.backward()
    optimiser.step()
    history.append(float(value.detach()))
distilled = images.detach()
everything = LogisticRegression(C=1.0, max_iter=5000).fit(X.numpy(), y.numpy()).score(Xt.numpy(), yt.numpy())
scores = {name: accuracy(which) for name, which in (("real", first), ("means", means), ("distilled", distilled))}
print(f"loss on the real images {history[0]:.3f} -> {history[-1]:.3f}")
print("test accuracy:", ", ".join(f"ten {name} {score:.1%}" for name, score in scores.items()), f"all {everything:.1%}")
assert scores["distilled"] > scores["means"] > scores["real"] and scores["distilled"] > 0.93

figure, axes = plt.subplots(3, 10, figsize=(9, 3.2), layout="constrained")
for row, (name, which) in zip(axes, (("real", first), ("means", means), ("distilled", distilled)), strict=True):
    for ax, image in zip(row, which, strict=True):
        ax.imshow(image.reshape(8, 8), cmap="gray")
        ax.set(xticks=[], yticks=[])
    row[0].set_ylabel(f"{name}\n{scores[name]:.0%}")
plt.show()
