"""
Opinions on a graph: equilibria of networks of people
=====================================================

In 1972 a karate club of 34 members split (Zachary 1977). Every member holds an opinion between -1 and 1 that agrees with
those of the people he meets; the instructor and the president alone know what they want:

.. math:: z = \\tanh(a\\,S z + y), \\qquad S = D^{-1/2} A D^{-1/2}.

A network of :math:`k` layers sees :math:`k` edges far, the equilibrium all of them (Gu et al. 2020, "Implicit graph
neural networks"). Its derivative says which friendships decide. The same layer tells the
communities of "Les Misérables" from a quarter of the characters, with an :math:`a` that is learnt.

*Checked:* the equilibrium against SciPy; the derivative against differences; the sides that the members took, and the
communities of the characters that were not told.
"""

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def normalised(A):
    d = A.sum(1).rsqrt()
    return d[:, None] * A * d


club = nx.karate_club_graph()
edges = torch.tensor(list(club.edges))
strength = torch.tensor([float(club.edges[e]["weight"]) for e in club.edges])
told = torch.zeros(34)
told[0], told[33] = 0.5, -0.5
sides = torch.tensor([1.0 if club.nodes[i]["club"] == "Mr. Hi" else -1.0 for i in club])


def opinions(strength, a=0.98):
    A = torch.zeros(34, 34).index_put((edges[:, 0], edges[:, 1]), strength)
    S = normalised(A + A.T)
    return ik.fixed_point(lambda z, S: torch.tanh(a * (S @ z) + told), torch.zeros(34), (S,)).value


z = opinions(strength)
W = torch.zeros(34, 34).index_put((edges[:, 0], edges[:, 1]), strength)
S = normalised(W + W.T).numpy()
found = scipy.optimize.root(lambda z: np.tanh(0.98 * S @ z + told.numpy()) - z, np.zeros(34))
assert found.success and np.allclose(found.x, z, atol=1e-7)
right = int((z.sign() == sides).sum())
print(f"{right} of 34 members on the side that they took")
assert right >= 32

# %%
# Which friendships decide what member 8, between the two, thinks: one linear solve for all 78 edges.

pull = torch.func.grad(lambda s: opinions(s)[8])(strength)
for k in pull.abs().topk(3).indices.tolist():
    h = 1e-4 * torch.nn.functional.one_hot(torch.tensor(k), len(strength))
    difference = (opinions(strength + h)[8] - opinions(strength - h)[8]) / 2e-4
    print(f"members {edges[k].tolist()}: {float(pull[k]):+.4f}, by differences {float(difference):+.4f}")
    assert abs(float(pull[k] - difference)) < 1e-6

# %%
# Les Misérables: the communities (greedy modularity) of all, from a quarter of the characters.

book = nx.les_miserables_graph()
names = list(book)
groups = nx.community.greedy_modularity_communities(book, weight="weight")
label = torch.tensor([next(k for k, group in enumerate(groups) if name in group) for name in names])
given = torch.zeros(len(names), dtype=torch.bool)
for k in range(len(groups)):
    members = (label == k).nonzero().flatten()
    given[members[torch.randperm(len(members))[: max(1, len(members) // 4)]]] = True
A = normalised(torch.tensor(nx.to_numpy_array(book)))
known = torch.nn.functional.one_hot(label).double() * given[:, None]


def spread(reach, labels):
    """One equilibrium for each community: labels (people, communities) spread, and fade by ``reach`` in each step."""
    return ik.fixed_point(lambda z: torch.tanh(torch.sigmoid(reach) * (A @ z) + labels), torch.zeros_like(labels)).value


# How far labels should reach is learnt from the labels themselves: half of them tell the other half.
reach, sharpness = torch.tensor(-2.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
optimiser = torch.optim.Adam([reach, sharpness], lr=0.2)
for _ in range(25):
    shown = given & (torch.rand(len(names)) < 0.5)
    hidden = given & ~shown
    scores = sharpness.exp() * spread(reach, known * shown[:, None])
    loss = torch.nn.functional.cross_entropy(scores[hidden], label[hidden])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
print(f"reach of a label: 0.12 -> {float(torch.sigmoid(reach.detach())):.2f}")
guess = spread(reach.detach(), known).argmax(1)
unseen = float((guess == label)[~given].double().mean())
most = float((label[~given] == label[given].mode().values).double().mean())
near = float(((A @ known).argmax(1) == label)[~given].double().mean())
print(f"unseen characters: {unseen:.0%} right, by their neighbours' labels {near:.0%}, by the largest group {most:.0%}")
assert unseen > 0.85 and unseen >= near

figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
place = nx.spring_layout(club, seed=3)
options = {"node_size": 110, "edgecolors": "grey", "linewidths": 0.5}
dots = nx.draw_networkx_nodes(club, place, node_color=z, cmap="coolwarm", vmin=-1, vmax=1, ax=axes[0], **options)
width = (0.3 + 6 * pull.abs() / pull.abs().max()).tolist()
nx.draw_networkx_edges(club, place, ax=axes[0], width=width, edge_color="grey")
nx.draw_networkx_labels(club, place, {8: "8"}, font_size=9, ax=axes[0])
axes[0].set_title("width: how much a friendship makes\nof the opinion of member 8")
figure.colorbar(dots, ax=axes[0], label="opinion", shrink=0.7)
place = nx.spring_layout(book, seed=1, k=0.35)
shades = [("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000")[g] for g in guess]
nx.draw_networkx_edges(book, place, ax=axes[1], width=0.3, edge_color="grey")
nx.draw_networkx_nodes(book, place, node_color=shades, ax=axes[1], **options | {"node_size": 60})
axes[1].set_title(f"communities (colours), a quarter told:\n{unseen:.0%} of the others right")
for ax in axes:
    ax.axis("off")
plt.show()
