"""
Planning as a layer: costs learnt from journeys
===============================================

A traveller crosses maps to a goal. Some ground is dear, and he slips now and then; neither is known. What is seen are
journeys. The plan is an equilibrium, Bellman's, softened so that he errs a little (Ziebart et al. 2008):

.. math:: Q(s, a) = -c(s) + \\gamma \\sum_{s'} P_a(s, s')\\, V(s'), \\qquad V(s) = \\tau \\log \\sum_a e^{Q(s, a) / \\tau}.

A value iteration network (Tamar et al. 2016) stops after :math:`K` steps, and sees :math:`K` cells far. The equilibrium sees
all of the map, and its derivative takes one linear solve with :math:`I - \\gamma P_\\pi` (Nikishin et al. 2022). Both learn
what four grounds cost and how often he slips on maps of 10 x 10, and then plan on 24 x 24.

*Checked:* the equilibrium against 2000 steps of value iteration, its gradient against the linear solve and against the same
steps unrolled; what the learnt policies pay on new maps, exactly.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
gamma, tau = 0.98, 0.2
true = torch.tensor([0.2, 0.5, 1.0, 3.0]).log(), torch.tensor(-1.5)  # of costs; of the share of slips
unknown = torch.zeros(4), torch.tensor(0.0)
ASIDE = torch.kron(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.full((2, 2), 0.5))  # of up, down, left, right


def maps(count, n):  # ground (count, n, n) in patches, and where the goal is, near a corner
    rough = torch.nn.functional.interpolate(torch.randn(count, 1, n // 2, n // 2), (n, n), mode="bicubic")[:, 0]
    goal = torch.zeros(count, n, n)
    goal[torch.arange(count), torch.randint(1, 3, (count,)), torch.randint(1, 3, (count,))] = 1.0
    return torch.bucketize(rough, torch.tensor([-0.6, 0.1, 0.7])), goal


def around(V):  # the values of the four neighbours (..., n, n, 4); at the border one stays
    up, left = torch.cat([V[:, :1], V[:, :-1]], 1), torch.cat([V[:, :, :1], V[:, :, :-1]], 2)
    down, right = torch.cat([V[:, 1:], V[:, -1:]], 1), torch.cat([V[:, :, 1:], V[:, :, -1:]], 2)
    return torch.stack([up, down, left, right], -1)


def quality(V, cost, slips):
    return -cost.unsqueeze(-1) + gamma * around(V) @ ((1 - slips) * torch.eye(4) + slips * ASIDE)


def bellman(V, cost, slips, goal):
    return tau * torch.logsumexp(quality(V, cost, slips) / tau, -1) * (1 - goal)


def equilibrium(cost, *rest):
    return ik.fixed_point(bellman, 0 * cost, (cost, *rest), batch_dims=1, in_dims=(0, None, 0), rtol=1e-8).value


def steps(K, cost, *rest):
    V = 0 * cost
    for _ in range(K):
        V = bellman(V, cost, *rest)
    return V


def policy(plan, theta, ground, goal):  # log-probabilities of the four moves
    cost, slips = theta[0].exp()[ground], theta[1].sigmoid()
    return torch.log_softmax(quality(plan(cost, slips, goal), cost, slips) / tau, -1)


def transitions(logits, slips, goal):  # P_pi (maps, states, states); nobody leaves the goal
    count, n = goal.shape[:2]
    there = around(torch.arange(n * n).view(1, n, n)).view(1, -1, 4).expand(count, -1, -1)
    chance = logits.exp() @ ((1 - slips) * torch.eye(4) + slips * ASIDE) * (1 - goal).unsqueeze(-1)
    return torch.zeros(count, n * n, n * n).scatter_add(2, there, chance.view(count, -1, 4))


def journeys(logits, goal, length=30):  # how often which move was chosen where, by one traveller a map
    aim, rows, seen = goal.flatten(1), torch.arange(len(goal)), torch.zeros_like(logits).flatten(1, 2)
    P = transitions(logits, true[1].sigmoid(), goal) + torch.diag_embed(aim)  # who has arrived stays
    here = torch.randint(aim.shape[1], rows.shape)
    for _ in range(length):
        move = torch.distributions.Categorical(logits=logits.flatten(1, 2)[rows, here]).sample()
        seen[rows, here, move] += 1 - aim[rows, here]
        here = torch.multinomial(P[rows, here], 1)[:, 0]
    return seen.view_as(logits)


# %%
# The gradient of a likelihood, in three ways.

torch.manual_seed(0)
ground, goal = maps(40, 10)
expert = policy(equilibrium, true, ground, goal)
seen, cost, slips = journeys(expert, goal), true[0].exp()[ground].requires_grad_(), true[1].sigmoid()
likelihood = lambda V: (torch.log_softmax(quality(V, cost.detach(), slips) / tau, -1) * seen).sum()  # noqa: E731
V, long = equilibrium(cost, slips, goal), steps(2000, cost, slips, goal)
implicit, unrolled = (torch.autograd.grad(likelihood(v), cost)[0] for v in (V, long))
(g,) = torch.autograd.grad(likelihood(point := V.detach().requires_grad_()), point)
P = transitions(expert, slips, goal)
closed = -torch.linalg.solve(torch.eye(100) - gamma * P.mT, g.flatten(1)).view_as(cost) * (1 - goal)
assert torch.allclose(V, long, atol=1e-5)
for name, other in (("a linear solve", closed), ("2000 unrolled steps", unrolled)):
    print(f"implicit gradient and {name} differ by {float((implicit - other).norm() / other.norm()):.0e}")
    assert (implicit - other).norm() < 1e-5 * other.norm()

# %%
# Learning: the likelihood of the moves seen, by the equilibrium and by 10 and 30 steps of value iteration.


def learn(plan, ground, goal, seen):
    theta = [t.clone().requires_grad_() for t in unknown]
    optimiser = torch.optim.LBFGS(theta, max_iter=25, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        (value := -(policy(plan, theta, ground, goal) * seen).sum() / seen.sum()).backward()
        return value

    optimiser.step(loss)
    return [t.detach() for t in theta]


def spent(logits, ground, goal):  # what a policy pays, discounted, on the mean over all starts
    P, cost = transitions(logits, true[1].sigmoid(), goal), (true[0].exp()[ground] * (1 - goal)).flatten(1)
    return torch.linalg.solve(torch.eye(cost.shape[1]) - gamma * P, cost).mean()


plans = {"equilibrium": equilibrium, "30 steps": lambda *a: steps(30, *a), "10 steps": lambda *a: steps(10, *a)}
vain = {name: [] for name in (*plans, "all alike")}
for seed in range(3):
    torch.manual_seed(seed)
    known, new = maps(40, 10), maps(6, 24)
    seen = sum(journeys(policy(equilibrium, true, *known), known[1]) for _ in range(3))
    learnt = {name: learn(plan, *known, seen) for name, plan in plans.items()} | {"all alike": unknown}
    best = spent(policy(equilibrium, true, *new), *new)
    for name, theta in learnt.items():
        vain[name].append(float(spent(policy(plans.get(name, equilibrium), theta, *new), *new) / best - 1))
        print(f"{name}: costs {theta[0].exp().numpy().round(2)}, slips {theta[1].sigmoid():.2f}", end=", ")
        print(f"pays {vain[name][-1]:.1%} more than who knows {true[0].exp().numpy().round(2)}, {slips:.2f}")
assert max(vain["equilibrium"]) < 0.03 and max(vain["equilibrium"]) < min(vain["10 steps"])

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
shown = axes[0].imshow(true[0].exp()[new[0][0]], cmap="YlOrBr", norm="log")
figure.colorbar(shown, label="true cost of a step", ticks=true[0].exp(), format="%g").minorticks_off()
move = policy(equilibrium, learnt["equilibrium"], *new)[0].exp() * (1 - new[1][0]).unsqueeze(-1)
axes[0].quiver(move[..., 3] - move[..., 2], move[..., 0] - move[..., 1], scale=30, width=0.004)
axes[0].plot(*reversed(new[1][0].nonzero()[0].tolist()), "*", color="#0072B2", ms=14)
axes[0].set(title="the learnt policy on a new map, to the star", xticks=[], yticks=[])
for i, values in enumerate(vain.values()):
    axes[1].plot([i] * 3, [100 * v for v in values], "o", color="#0072B2", mfc="none")
axes[1].set(title="24 x 24, 3 seeds", ylabel="extra cost, %", yscale="symlog", xticks=range(4), xticklabels=vain)
plt.show()
