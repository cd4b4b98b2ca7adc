"""
Nash and Walras: equilibria of games and markets
================================================

Two equations of economics as layers.

**Nash.** In a Cournot market firms choose quantities within their capacities; at equilibrium each is the best answer
to all others: a fixed point of a projected map (``q = clip(q + t (marginal profit), 0, capacity)``).

**Walras.** In an exchange economy prices are such that every market clears. Prices are determined up to a factor: the
last good is the numéraire, and its market clears by Walras' law.

*Checked:* the Nash equilibrium by enumeration of who is at capacity; Walras' prices against the eigenvector that they
are for Cobb-Douglas tastes; derivatives against differences.
"""

import itertools

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

# ------------------------------------------------------------------------------------------------------------- Nash
cost = torch.tensor([1.0, 2.0, 3.0, 8.5])
capacity = torch.tensor([1.5, 5.0, 5.0, 5.0])


def quantities(cost, demand):
    """Inverse demand ``demand - sum q``; profit ``q (demand - sum q - cost)``."""

    def answer(q, cost, demand):
        return torch.minimum((q + 0.3 * (demand - q.sum() - q - cost)).clamp_min(0), capacity)

    return ik.fixed_point(answer, torch.ones(4), (cost, demand), rtol=1e-12).value


def by_enumeration(cost, demand):
    """Each firm idle, inside or at capacity: solve, and see whether nobody wants to move."""
    for kinds in itertools.product(["idle", "inside", "full"], repeat=4):
        A, b = torch.eye(4), torch.zeros(4)
        for i, kind in enumerate(kinds):
            if kind == "inside":
                A[i], b[i] = torch.ones(4) + torch.eye(4)[i], demand - cost[i]
            elif kind == "full":
                b[i] = capacity[i]
        q = torch.linalg.solve(A, b)
        gain = demand - q.sum() - q - cost
        fits = [
            gain[i] <= 1e-12
            if kind == "idle"
            else (gain[i] >= -1e-12 if kind == "full" else -1e-12 <= q[i] <= capacity[i] + 1e-12)
            for i, kind in enumerate(kinds)
        ]
        if all(fits):
            return q
    raise AssertionError("no equilibrium")


demand = torch.tensor(10.0)
q = quantities(cost, demand)
print("quantities:", q.numpy().round(4) + 0.0)
assert torch.allclose(q, by_enumeration(cost, demand), atol=1e-9)
J = torch.func.jacrev(quantities)(cost, demand)
print("a dearer second firm:", J[:, 1].numpy().round(4) + 0.0)
h = torch.tensor([0.0, 1e-5, 0.0, 0.0])
assert torch.allclose(J[:, 1], (by_enumeration(cost + h, demand) - by_enumeration(cost - h, demand)) / 2e-5, atol=1e-6)

# ----------------------------------------------------------------------------------------------------------- Walras
people, goods = 6, 4
taste = torch.distributions.Dirichlet(torch.ones(goods)).sample((people,))
endowment = torch.rand(people, goods) + 0.1


def excess(log_p, taste, endowment):
    p = torch.cat([log_p, torch.zeros(1)]).exp()
    wanted = taste * (endowment @ p)[:, None] / p
    return (wanted - endowment).sum(0)[:-1]


def prices(taste, endowment):
    log_p = ik.root(excess, torch.zeros(goods - 1), (taste, endowment), solver="trust_region", rtol=1e-13).value
    return torch.cat([log_p, torch.zeros(1)]).exp()


p = prices(taste, endowment)
M = (taste.T @ endowment) / endowment.sum(0)[:, None]  # p = M p, the Perron vector
values, vectors = torch.linalg.eig(M)
perron = vectors[:, values.real.argmax()].real
assert torch.allclose(p, perron / perron[-1], atol=1e-9)
print("prices:", p.numpy().round(4))

# %%
# Who gains if the first person is given more of the first good?  Utility is ``sum taste log(consumption)``.


def utility(endowment):
    p = prices(taste, endowment)
    consumption = taste * (endowment @ p)[:, None] / p
    return (taste * consumption.log()).sum(1)


gain = torch.func.jacrev(utility)(endowment)[:, 0, 0]
step = torch.zeros(people, goods)
step[0, 0] = 1e-5
assert torch.allclose(gain, (utility(endowment + step) - utility(endowment - step)) / 2e-5, atol=1e-7)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
costs = torch.linspace(1, 9, 60)
paths = torch.stack([quantities(torch.cat([cost[:1], c[None], cost[2:]]), demand) for c in costs])
for i in range(4):
    axes[0].plot(costs, paths[:, i], label=f"firm {i + 1}")
axes[0].set(xlabel="cost of firm 2", ylabel="quantity", title="Cournot with capacities", ylim=(-0.15, 4.2))
axes[0].legend(loc="upper right", ncols=2)
axes[1].bar([str(i + 1) for i in range(people)], gain)
axes[1].axhline(0, color="black", lw=0.8)
axes[1].set(xlabel="person", ylabel="change of utility", title="a gift of good 1 to person 1")
plt.show()
