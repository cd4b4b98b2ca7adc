"""
Learning to forecast for a decision: a portfolio layer
======================================================

A linear model forecasts returns; a quadratic program turns forecasts into a portfolio. Trained by mean square error
the model spends its few parameters where returns are large; trained *through the program* it spends them where
decisions are.

*Checked:* the layer against SciPy's SLSQP; derivatives against differences; on unseen data the decision-focused model
earns more.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
assets, features = 6, 4
A = torch.randn(assets, assets) / assets**0.5
covariance = 0.5 * (A @ A.T) + 0.2 * torch.eye(assets)
truth = torch.randn(features, assets)


def world(days):
    x = torch.randn(days, features)
    nonlinear = 1.5 * torch.tanh(2 * x[:, :1]) * torch.tensor([0, 0, 0, 4.0, -4.0, 0])  # what a linear model cannot say
    return x, 0.3 * (x @ truth) + nonlinear + torch.tensor([0.0, 0, 0, -6.0, -6.0, 0]) + 0.3 * torch.randn(days, assets)


def portfolio(mu):
    """Long only, fully invested: min w'Sw/2 - mu'w."""
    n = mu.shape[-1]
    program = ik.QuadraticProgram(covariance, -mu, torch.ones(1, n), torch.ones(1), -torch.eye(n), torch.zeros(n))
    return ik.solve(program, rtol=1e-9).value


mu = torch.randn(assets)
reference = scipy.optimize.minimize(
    lambda w: w @ covariance.numpy() @ w / 2 - mu.numpy() @ w,
    np.full(assets, 1 / assets),
    bounds=[(0, None)] * assets,
    constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    options={"ftol": 1e-14},
)
print("the layer agrees with SLSQP:", bool((portfolio(mu) - torch.tensor(reference.x)).abs().max() < 1e-5))
assert torch.allclose(portfolio(mu), torch.tensor(reference.x), atol=1e-5)
J = torch.func.jacrev(portfolio)(mu)
h = 1e-5 * torch.eye(assets)
assert torch.allclose(J, torch.stack([(portfolio(mu + e) - portfolio(mu - e)) / 2e-5 for e in h], 1), atol=1e-5)


# %%
# Two models of the same size, the same data, the same optimiser; only the loss differs.


def utility(w, returns):
    return ((w * returns).sum(-1) - (w @ covariance * w).sum(-1) / 2).mean()


def train(loss):
    torch.manual_seed(1)
    model = torch.nn.Linear(features, assets, bias=False)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    history = []
    for _ in range(80):
        optimiser.zero_grad()
        loss(model(x), returns).backward()
        optimiser.step()
        with torch.no_grad():
            history.append(float(utility(portfolio(model(x_new)), returns_new)))
    return history


(x, returns), (x_new, returns_new) = world(150), world(300)
by_error = train(lambda mu, returns: (mu - returns).square().mean())
by_decision = train(lambda mu, returns: -utility(portfolio(mu), returns))
best = float(utility(portfolio(returns_new), returns_new))
print(
    f"utility: least squares {by_error[-1]:.3f}, through the program {by_decision[-1]:.3f}, with hindsight {best:.3f}"
)
assert by_decision[-1] > by_error[-1]

plt.figure(figsize=(6, 3.5), layout="constrained")
plt.plot(by_error, label="trained by mean square error")
plt.plot(by_decision, label="trained through the program")
plt.axhline(best, ls=":", color="grey", label="with hindsight")
plt.xlabel("training step")
plt.ylabel("utility on unseen days")
plt.legend()
plt.show()
