"""
The endemic state of an epidemic
================================

An infection among four age groups: the share ``I`` infected at rest solves

.. math:: (1 - I_a) \\sum_b \\beta_{ab} I_b = \\gamma_a I_a .

There are two states at rest, the healthy one and, above the threshold, the endemic one. Following the flow in time
from a few cases leads to the one that is stable. Contact rates are then identified from observed prevalence.

*Checked:* against integration over a long time; the threshold against the spectral radius of the next-generation
matrix; sensitivities against differences.
"""

import matplotlib.pyplot as plt
import torch
from scipy.integrate import solve_ivp

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

contacts = torch.tensor([[6.0, 2.0, 1.5, 0.5], [2.0, 4.0, 2.0, 0.5], [1.5, 2.0, 3.0, 1.0], [0.5, 0.5, 1.0, 1.5]])
recovery = torch.tensor([1.2, 1.0, 0.8, 0.6])


def rate(I, transmission, contacts):  # noqa: E741
    return (1 - I) * (transmission * contacts @ I) - recovery * I


def prevalence(transmission, contacts):
    start = torch.full((4,), 0.3)
    return ik.steady_state(
        rate, start, (transmission, contacts), solver="pseudo_transient", rtol=1e-12, atol=1e-12
    ).value


transmission = torch.tensor(0.25)
state = prevalence(transmission, contacts)
flow = solve_ivp(
    lambda t, share: rate(torch.from_numpy(share), transmission, contacts).numpy(),
    (0, 400),
    [1e-3] * 4,
    rtol=1e-10,
    atol=1e-12,
)
print("prevalence:", state.numpy().round(4))
assert torch.allclose(state, torch.from_numpy(flow.y[:, -1]), atol=1e-7)

sensitivity = torch.func.jacrev(prevalence, argnums=1)(transmission, contacts)
h = torch.zeros(4, 4)
h[0, 0] = 1e-5
difference = (prevalence(transmission, contacts + h) - prevalence(transmission, contacts - h)) / 2e-5
assert torch.allclose(sensitivity[:, 0, 0], difference, atol=1e-8)
total = sensitivity.sum(0)
print("the contact that matters most, (who, by whom):", tuple(int(i) + 1 for i in divmod(int(total.argmax()), 4)))

# %%
# The threshold: the endemic state appears where the next-generation matrix has spectral radius one.

radius = torch.linalg.eigvals(contacts / recovery[:, None]).abs().max()
levels = torch.linspace(0.3, 3.0, 28) / radius
curves = torch.stack([prevalence(level, contacts) for level in levels])
endemic = curves.sum(1) > 1e-3
assert bool((endemic == (levels * radius > 1)).all())

# %%
# Identification: how many contacts have the first two groups?  From noisy prevalence in six places whose transmission
# differs by known factors.

factors = torch.linspace(0.8, 2.0, 6)
observed = torch.stack([prevalence(f * transmission, contacts) for f in factors]) + 0.003 * torch.randn(6, 4)
log_scale = torch.full((2,), -0.4, requires_grad=True)


def model(log_scale):
    scale = torch.cat([log_scale, torch.zeros(2)]).exp()
    guess = contacts * scale[:, None] * scale[None, :]
    return torch.stack([prevalence(f * transmission, guess) for f in factors])


optimiser = torch.optim.LBFGS([log_scale], max_iter=15, line_search_fn="strong_wolfe")


def loss():
    optimiser.zero_grad()
    value = (model(log_scale) - observed).square().mean()
    value.backward()
    return value


before = loss().item()
optimiser.step(loss)
after = loss().item()
print(f"mean square error {before:.1e} -> {after:.1e}, noise {0.003**2:.1e}")
print("factors found:", log_scale.detach().exp().numpy().round(3), "true: 1")
assert after < 2 * 0.003**2 and float(log_scale.detach().abs().max()) < 0.05

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for a in range(4):
    axes[0].plot(levels * radius, curves[:, a], label=f"group {a + 1}")
axes[0].axvline(1, ls=":", color="grey")
axes[0].set(xlabel="reproduction number", ylabel="share infected", title="endemic state")
axes[0].legend()
image = axes[1].imshow(total, cmap="viridis")
figure.colorbar(image, label="all prevalence per contact")
axes[1].set(title="which contacts matter", xlabel="by whom", ylabel="who")
axes[1].set_xticks(range(4), ["1", "2", "3", "4"])
axes[1].set_yticks(range(4), ["1", "2", "3", "4"])
plt.show()
