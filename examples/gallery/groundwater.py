"""
Conductivity of the ground from wells: an inverse problem
=========================================================

The height ``u`` of the groundwater solves ``-div(k grad u) = rain`` on a grid of 40 x 40 cells, 1,600 unknowns with a
sparse Jacobian that is found, coloured and factored without a word. From the heights in 80 wells the conductivity
``k`` of every cell is to be found: 1,600 parameters, one adjoint solve for the gradient in all of them.

*Checked:* the heights against SciPy's sparse solver with a matrix assembled by hand; the gradient against
differences; the fit reaches the noise.
"""

import matplotlib.pyplot as plt
import scipy.sparse
import scipy.sparse.linalg
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
n, rain = 40, 1.0
h = 1 / n


def faces(k):
    """Harmonic means between neighbours, and to the border, where the height is zero."""
    k = torch.nn.functional.pad(k[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    between = lambda a, b: 2 * a * b / (a + b)  # noqa: E731
    return between(k[1:-1, 1:], k[1:-1, :-1]), between(k[1:, 1:-1], k[:-1, 1:-1])


def balance(u, log_k):
    across, down = faces(log_k.exp())
    u = torch.nn.functional.pad(u.reshape(n, n), (1, 1, 1, 1))
    flow_x = across * (u[1:-1, 1:] - u[1:-1, :-1])
    flow_y = down * (u[1:, 1:-1] - u[:-1, 1:-1])
    inflow = flow_x[:, 1:] - flow_x[:, :-1] + flow_y[1:] - flow_y[:-1]
    return (inflow / h**2 + rain).reshape(-1)


def heights(log_k):
    return ik.root(balance, torch.zeros(n * n), (log_k,), solver="newton").value


x = (torch.arange(n) + 0.5) * h
X, Y = torch.meshgrid(x, x, indexing="xy")
true = 1.2 * torch.exp(-40 * ((X - 0.3) ** 2 + (Y - 0.6) ** 2)) - 1.2 * torch.exp(
    -40 * ((X - 0.7) ** 2 + (Y - 0.4) ** 2)
)
u = heights(true)

across, down = (t.numpy() for t in faces(true.exp()))
cells = torch.arange(n * n).reshape(n, n).numpy()
rows = [cells[:, :-1], cells[:, 1:], cells[:-1], cells[1:], cells]
columns = [cells[:, 1:], cells[:, :-1], cells[1:], cells[:-1], cells]
centre = across[:, 1:] + across[:, :-1] + down[1:] + down[:-1]
values = [-across[:, 1:-1], -across[:, 1:-1], -down[1:-1], -down[1:-1], centre]
index = [[entry for part in parts for entry in part.ravel().tolist()] for parts in (rows, columns, values)]
matrix = scipy.sparse.csc_matrix((index[2], (index[0], index[1]))) / h**2
by_scipy = torch.tensor(scipy.sparse.linalg.spsolve(matrix, [rain] * (n * n)))
print("the heights are SciPy's:", torch.allclose(u, by_scipy, rtol=1e-8))
assert torch.allclose(u, by_scipy, rtol=1e-8)

# %%
# Eighty wells, a little noise, and a penalty on roughness.

wells = torch.randperm(n * n)[:80]
noise = 2e-4
observed = u[wells] + noise * torch.randn(80)


def misfit(log_k):
    rough = (log_k[1:] - log_k[:-1]).square().sum() + (log_k[:, 1:] - log_k[:, :-1]).square().sum()
    return ((heights(log_k)[wells] - observed) / noise).square().mean() + 0.3 * rough


gradient = torch.func.grad(misfit)(torch.zeros(n, n))
step = torch.zeros(n, n)
step[20, 12] = 1e-4
difference = (misfit(step) - misfit(-step)) / 2e-4
print(f"gradient {float(gradient[20, 12]):.4f}, by differences {float(difference):.4f}")
assert abs(float(gradient[20, 12] / difference) - 1) < 1e-4

log_k = torch.zeros(n, n, requires_grad=True)
optimiser = torch.optim.LBFGS([log_k], max_iter=60, history_size=20, line_search_fn="strong_wolfe")


def closure():
    optimiser.zero_grad()
    loss = misfit(log_k)
    loss.backward()
    return loss


optimiser.step(closure)
found = log_k.detach()
rms = float(((heights(found)[wells] - observed) / noise).square().mean().sqrt())
correlation = float(torch.corrcoef(torch.stack([found.flatten(), true.flatten()]))[0, 1])
print(f"misfit {rms:.1f} times the noise, correlation with the truth {correlation:.2f}")
assert rms < 1.5 and correlation > 0.9

figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
heights = axes[0].imshow(u.reshape(n, n), extent=(0, 1, 1, 0), cmap="Blues")
axes[0].plot((wells % n + 0.5) * h, (torch.div(wells, n, rounding_mode="floor") + 0.5) * h, "k.", ms=3)
axes[0].set(title="heights, and wells (dots)", xticks=[], yticks=[])
figure.colorbar(heights, ax=axes[0], label="height")
for ax, field, name in ((axes[1], true, "true"), (axes[2], found, "found")):
    image = ax.imshow(field, cmap="coolwarm", vmin=-1.2, vmax=1.2)
    ax.set(title=name, xticks=[], yticks=[])
figure.colorbar(image, ax=axes[1:], label="log conductivity")
plt.show()
