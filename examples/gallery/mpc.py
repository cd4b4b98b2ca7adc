"""
Differentiable model-predictive control
=======================================

At every moment a controller plans ten steps ahead, a quadratic program in the forces, and applies the first. The plan
is a function of the state *and of the model and the costs in it*; watching an expert, we learn the expert's costs by
differentiating the plan.

*Checked:* without limits the plan is the linear-quadratic regulator's, by Riccati's recursion; derivatives against
differences; the learned costs control like the expert's.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
N, dt = 10, 0.2
A = torch.tensor([[1.0, dt], [0.0, 1.0]])  # a cart: position, velocity
B = torch.tensor([[dt**2 / 2], [dt]])

free = torch.cat([torch.linalg.matrix_power(A, k + 1) for k in range(N)])  # states without forces, stacked
forced = torch.zeros(2 * N, N)
for k in range(N):
    for j in range(k + 1):
        forced[2 * k : 2 * k + 2, j] = (torch.linalg.matrix_power(A, k - j) @ B)[:, 0]


def plan(x, costs, limit=1.0):
    """Forces of the next N steps: min sum costs_0 position^2 + costs_1 velocity^2 + costs_2 force^2, |force| <= limit."""
    Q = torch.diag(costs[:2].repeat(N))
    P = 2 * (forced.T @ Q @ forced + costs[2] * torch.eye(N))
    q = 2 * x @ (forced.T @ Q @ free).T
    bound = torch.full((N,), limit)
    return ik.solve(ik.QuadraticProgram(P, q, None, None, torch.eye(N), bound, lower=-bound), rtol=1e-10).value


def riccati(x, costs):
    Q, S = torch.diag(costs[:2]), torch.diag(costs[:2])
    for _ in range(N - 1):
        K = torch.linalg.solve(costs[2] + B.T @ S @ B, B.T @ S @ A)
        S = Q + A.T @ S @ (A - B @ K)
    return -torch.linalg.solve(costs[2] + B.T @ S @ B, B.T @ S @ A) @ x


expert = torch.tensor([1.0, 0.3, 0.1])
x = torch.tensor([1.5, -0.2])
print(
    "first force without limits:",
    f"{float(plan(x, expert, 1e3)[0]):.6f}",
    "Riccati:",
    f"{float(riccati(x, expert)):.6f}",
)
assert torch.allclose(plan(x, expert, 1e3)[:1], riccati(x, expert), atol=1e-6)
J = torch.func.jacrev(lambda c: plan(x, c))(expert)
h = 1e-5 * torch.eye(3)
assert torch.allclose(J, torch.stack([(plan(x, expert + e) - plan(x, expert - e)) / 2e-5 for e in h], 1), atol=1e-5)


# %%
# Imitation: 60 states, the expert's first force in each.  Only ratios of costs matter, so that the last is held.

states = torch.randn(60, 2)
shown = plan(states, expert)[:, 0]
log_costs = torch.zeros(2, requires_grad=True)
optimiser = torch.optim.LBFGS([log_costs], max_iter=30, line_search_fn="strong_wolfe")
history = []


def costs():
    return torch.cat([log_costs.exp(), expert[2:]])


def loss():
    optimiser.zero_grad()
    value = (plan(states, costs())[:, 0] - shown).square().mean()
    value.backward()
    history.append(float(value.detach()))
    return value


optimiser.step(loss)
learned = costs().detach()
print("costs learned:", learned.numpy().round(3), "expert:", expert.numpy())
assert torch.allclose(learned, expert, rtol=0.02)


def drive(costs):
    state, path = torch.tensor([2.0, 0.0]), []
    for _ in range(40):
        force = plan(state, costs)[0]
        path.append([*state.tolist(), float(force)])
        state = A @ state + B[:, 0] * force
    return torch.tensor(path)


assert torch.allclose(drive(learned), drive(expert), atol=0.05)
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
time = dt * torch.arange(40)
for name, c, style in (
    ("expert", expert, {"lw": 4, "alpha": 0.35}),
    ("before", torch.tensor([1.0, 1.0, 0.1]), {"ls": ":"}),
    ("learned", learned, {"ls": "--"}),
):
    path = drive(c)
    axes[0].plot(time, path[:, 0], color="C0", label=f"position, {name}", **style)
    axes[0].plot(time, path[:, 2], color="C1", label=f"force, {name}", **style)
axes[0].set(xlabel="time", ylabel="position, force", title="the cart goes to rest at zero")
axes[1].semilogy(history)
axes[1].set(xlabel="evaluation", ylabel="imitation loss", title="the costs are learnt")
figure.legend(loc="outside lower center", ncols=3)
plt.show()
