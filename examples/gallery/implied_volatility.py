"""
Implied volatilities of 100,000 quotes
======================================

The implied volatility of an option is the root ``σ`` of

.. math:: \\text{price}(\\sigma, K, T) = \\text{quote},

one scalar equation per quote. All of them are one batch: each sample has its own bracket, converges by itself and
leaves. The derivative is one division a sample, ``dσ/dquote = 1 / vega``. The surface is then fitted: five parameters
of a smile, through the volatilities, to the quotes.

*Checked:* the volatilities against those that the quotes were made from, the derivative against the formula for vega.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def price(sigma, K, T):
    """Black's formula for a call on a forward of 1."""
    d1 = (-torch.log(K) + sigma**2 * T / 2) / (sigma * T.sqrt())
    return torch.special.ndtr(d1) - K * torch.special.ndtr(d1 - sigma * T.sqrt())


def smile(K, T, p):
    """Five parameters: level, skew, curvature, and how the last two fade."""
    x = torch.log(K) / T.sqrt().clamp_min(0.2)
    return p[0] + p[1] * x * torch.exp(-p[3] * T) + p[2] * x**2 * torch.exp(-p[4] * T)


quotes = 100_000
T = 0.1 + 1.9 * torch.rand(quotes)
K = torch.exp(0.35 * T.sqrt() * torch.randn(quotes).clamp(-1.5, 1.5))
truth = torch.tensor([0.2, -0.08, 0.10, 0.2, 0.3])
sigma_true = smile(K, T, truth)
quote = price(sigma_true, K, T).requires_grad_()


def implied(quote):
    """Solved in log σ, where every number is a volatility."""
    equation = lambda s, quote, K, T: price(s.exp(), K, T) - quote  # noqa: E731
    start = torch.full_like(K, -1.5)
    solution = ik.root(
        equation, start, (quote, K, T), solver=ik.Chandrupatla(width=1.0), batch_dims=1, in_dims=(0, 0, 0), rtol=1e-14
    )
    return solution.value.exp(), solution


sigma, solution = implied(quote)
print(f"{int(solution.converged.sum())} of {quotes} converged in {solution.evaluations} evaluations of the batch")
print(f"samples evaluated: {solution.sample_evaluations / quotes:.1f} a quote")
assert bool(solution.converged.all()) and bool((sigma - sigma_true).abs().max() < 1e-7)

# %%
# The derivative is 1 / vega.

(slope,) = torch.autograd.grad(sigma.sum(), quote)
d1 = (-torch.log(K) + sigma_true**2 * T / 2) / (sigma_true * T.sqrt())
vega = T.sqrt() * torch.exp(-(d1**2) / 2) / (2 * torch.pi) ** 0.5
print("largest relative difference to 1 / vega is below 1e-6:", bool((slope * vega - 1).abs().max() < 1e-6))
assert torch.allclose(slope, 1 / vega, rtol=1e-6)

# %%
# A smile through noisy quotes, by the volatilities: least squares in five unknowns, weighted by vega.

noisy = (quote + 2e-4 * torch.randn(quotes)).detach().clamp_min((1 - K).clamp_min(0) + 1e-6)
bad = price(torch.tensor(3.0), K, T) < noisy
observed = implied(torch.where(bad, quote.detach(), noisy))[0].detach()
fit = ik.least_squares(lambda p: vega * (smile(K, T, p) - observed), torch.tensor([0.3, 0.0, 0.0, 0.0, 0.0]))
print("fitted parameters:", fit.value.numpy().round(3))
assert torch.allclose(fit.value, truth, atol=0.01)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
some = torch.nonzero(vega > 0.03)[::20, 0]  # where a quote says something about volatility
dots = axes[0].scatter(K[some].log(), observed[some], c=T[some], s=2, cmap="viridis")
figure.colorbar(dots, label="maturity, years")
axes[0].set(xlabel="log strike", ylabel="implied volatility", title="from noisy quotes", ylim=(0.1, 0.35))
grid = torch.linspace(-0.5, 0.5, 100).exp()
for maturity in (0.1, 0.5, 1.0, 2.0):
    axes[1].plot(grid.log(), smile(grid, torch.tensor(maturity), fit.value), label=f"{maturity} years")
axes[1].set(xlabel="log strike", ylabel="implied volatility", title="fitted smiles")
axes[1].legend()
plt.show()
