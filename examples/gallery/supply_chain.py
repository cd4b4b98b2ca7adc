"""
A supply chain run by a quadratic program: learning a policy
============================================================

Four warehouses, two suppliers with prices that move, two groups of customers whose demand does, and trucks between. Every
day the policy decides what to buy, ship and sell by a quadratic program: today's money, and a guess of what tomorrow's
stock :math:`h` is worth (Agrawal, Barratt, Boyd & Stellato 2020, "Learning convex optimization control policies"):

.. math:: \\min_u \\; c_t^\\top u + \\frac{1}{2} |S h_{t+1}|^2 + q^\\top h_{t+1},

as far as the trucks, the shelves and the customers allow.
:math:`S` and :math:`q` are learnt by the money lost in ten simulated days, differentiated through every day's program.

*Checked:* a day's decision against SciPy's SLSQP; the gradient of the cost of all days against differences; no stock is
negative; the policy saves money on weeks that it has not seen.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
n, days, batch = 4, 10, 16
shelf, truck, sale_price = 3.0, 2.0, 1.4

# Links (from, to): two suppliers, four roads, two groups of customers; -1 is the outside world.
links = [(-1, 0), (-1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, -1), (3, -1)]
into, out = torch.zeros(n, 8), torch.zeros(n, 8)
for k, (a, b) in enumerate(links):
    if b >= 0:
        into[b, k] = 1
    if a >= 0:
        out[a, k] = 1
road = torch.tensor([0, 0, 0.05, 0.07, 0.06, 0.04, 0, 0])
eye = torch.eye(8)
G = torch.cat([out, into - out, eye, -eye])  # ships no more than there is; shelves; trucks; nothing backwards


def weather(batch, seed):
    """Prices of the suppliers (days, batch, 2) and demands of the customers, log-normal."""
    g = torch.Generator().manual_seed(seed)
    price = torch.exp(torch.tensor([-0.1, 0.1]) + 0.4 * torch.randn(days, batch, 2, generator=g))
    demand = torch.exp(torch.tensor([0.0, 0.3]) + 0.4 * torch.randn(days, batch, 2, generator=g))
    return price, demand.clamp(max=truck)


def program(h, price, demand, S, q):
    """Data of a day's quadratic program in the flows ``u`` (8), for a batch of stocks ``h`` (batch, 4)."""
    move = into - out
    cost = torch.cat([price, road[2:6].expand(len(h), 4), torch.full((len(h), 2), -sale_price)], 1)
    P = move.T @ (S.T @ S) @ move + 1e-3 * eye
    linear = cost + (h @ (S.T @ S) + q) @ move
    limit = torch.full((len(h), 6), truck)
    upper = torch.cat([h, shelf - h, limit, demand, torch.zeros(len(h), 8)], 1)
    return P, linear, upper, cost


def simulate(S, q, price, demand):
    """Mean cost of a day, (batch,), and the stocks (days + 1, batch, 4)."""
    h, total = torch.ones(price.shape[1], n), 0.0
    stocks = [h]
    for p, d in zip(price, demand, strict=True):
        P, linear, upper, cost = program(h, p, d, S, q)
        u = ik.solve(ik.QuadraticProgram(P, linear, G=G, h=upper)).value
        h = h + u @ (into - out).T
        total = total + (cost * u).sum(1) + 0.01 * h.sum(1) + 0.01 * h.square().sum(1)
        stocks.append(h)
    return total / days, torch.stack(stocks)


S0, q0 = 0.1 * torch.eye(n), torch.zeros(n)
price, demand = weather(3, seed=1)
h = torch.rand(3, n)
P, linear, upper, cost = program(h, price[0], demand[0], S0 + 0.3, q0 - 0.5)
ours = ik.solve(ik.QuadraticProgram(P, linear, G=G, h=upper)).value
for k in range(3):
    worth = lambda u, k=k: u @ P.numpy() @ u / 2 + linear[k].numpy() @ u  # noqa: E731
    room = {"type": "ineq", "fun": lambda u, k=k: upper[k].numpy() - G.numpy() @ u}
    theirs = scipy.optimize.minimize(worth, np.zeros(8), constraints=[room], options={"ftol": 1e-12, "maxiter": 500})
    assert theirs.success and abs(theirs.fun - worth(ours[k].numpy())) < 1e-6

policy = [(0.3 * torch.eye(n) + 0.05 * torch.randn(n, n)), -0.5 * torch.ones(n)]
score = lambda q: simulate(policy[0], q, price, demand)[0].mean()  # noqa: E731
slope = torch.func.grad(score)(policy[1])
h = 1e-5 * torch.eye(n)[2]
difference = float(score(policy[1] + h) - score(policy[1] - h)) / 2e-5
print(f"worth of stock in the third house: gradient {float(slope[2]):.5f}, by differences {difference:.5f}")
assert abs(float(slope[2]) - difference) < 1e-4

# %%
# Learning on new weeks, judged on weeks kept apart.

kept = weather(100, seed=99)
greedy, _ = simulate(1e-2 * torch.eye(n), q0, *kept)  # tomorrow is worth nothing
S, q = (t.clone().requires_grad_() for t in policy)
optimiser = torch.optim.Adam([S, q], lr=0.05)
history = []
for step in range(40):
    value = simulate(S, q, *weather(batch, seed=1000 + step))[0].mean()
    optimiser.zero_grad()
    value.backward()
    optimiser.step()
    history.append(float(value.detach()))
with torch.no_grad():
    learnt, stocks = simulate(S, q, *kept)
    before, _ = simulate(*policy, *kept)
print(f"cost of a day: greedy {greedy.mean():.3f}, first guess {before.mean():.3f}, learnt {learnt.mean():.3f}")
assert stocks.min() > -1e-6 and stocks.max() < shelf + 1e-6
assert learnt.mean() < before.mean() - 0.02 and learnt.mean() < greedy.mean() - 0.02

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
axes[0].plot(history, ".-", color="grey", label="weeks learnt from")
for value, name, style in ((greedy, "greedy", ":"), (before, "first guess", "--"), (learnt, "learnt", "-")):
    axes[0].axhline(float(value.mean()), ls=style, label=name)
axes[0].set(xlabel="step", ylabel="cost of a day (negative: profit)", title="100 weeks kept apart")
axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
axes[1].plot(stocks.mean(1), label=["west", "east", "north", "south"])
axes[1].set(xlabel="day", ylabel="mean stock", title="stocks under the learnt policy")
axes[1].legend()
plt.show()
