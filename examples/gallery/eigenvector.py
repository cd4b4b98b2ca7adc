"""
An eigenvector as a bordered root
=================================

The lowest eigenpair of a symmetric matrix is the root of

.. math:: A v = \\lambda v, \\qquad v^\\top v = 1,

``n + 1`` equations for ``n + 1`` unknowns. The Jacobian ``[[A - λ, -v], [2 vᵀ, 0]]`` is regular where the eigenvalue
is simple, so that the pair has a derivative although ``A - λ`` has none to invert. Here :func:`scipy.linalg.eigh`
finds the pair, and the equation differentiates it: a chain of masses, whose lowest mode is to be flat in the middle,
learns its stiffnesses.

*Checked:* eigenvalue and eigenvector derivatives against the formulas of perturbation theory.
"""

import matplotlib.pyplot as plt
import scipy.linalg
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
n = 24


def chain(k):
    """The stiffness matrix of n masses between two walls, spring constants ``k`` of shape (n + 1,)."""
    return torch.diag(k[:-1] + k[1:]) - torch.diag(k[1:-1], 1) - torch.diag(k[1:-1], -1)


def bordered(z, A):
    return {"vector": A @ z["vector"] - z["value"] * z["vector"], "value": z["vector"] @ z["vector"] - 1}


@ik.implicit(ik.Root(bordered), rtol=1e-9)
def lowest(z0, A):
    values, vectors = scipy.linalg.eigh(A.numpy(), subset_by_index=[0, 0])
    sign = 1.0 if vectors.sum() >= 0 else -1.0  # of the two solutions, the one that points upwards
    return {"vector": sign * vectors[:, 0], "value": values[0]}


def pair(k):
    return lowest({"vector": torch.ones(n), "value": torch.zeros(())}, chain(k))


# %%
# The check: ``dλ = vᵀ dA v`` and ``dv = (λ - A)⁺ dA v``.

k = torch.rand(n + 1, generator=torch.Generator().manual_seed(0)) + 0.5
dk = torch.randn(n + 1, generator=torch.Generator().manual_seed(1))
found, moved = torch.func.jvp(pair, (k,), (dk,))
v, value, dA = found["vector"], found["value"], chain(dk)
by_theory = torch.linalg.pinv(value * torch.eye(n) - chain(k), rtol=1e-10) @ dA @ v
print("derivative of the value as in theory:", bool((moved["value"] - v @ dA @ v).abs() < 1e-12))
assert torch.allclose(moved["value"], v @ dA @ v, atol=1e-12)
assert torch.allclose(moved["vector"], by_theory, atol=1e-9)

# %%
# Learning: stiffnesses such that the lowest mode follows a plateau.

wanted = torch.tanh(torch.linspace(0, 5, n)) * torch.tanh(torch.linspace(5, 0, n)) + 0.05
wanted = wanted / wanted.norm()
log_k = torch.zeros(n + 1, requires_grad=True)
optimiser = torch.optim.LBFGS([log_k], max_iter=100, line_search_fn="strong_wolfe")


def loss():
    optimiser.zero_grad()
    value = (pair(log_k.exp())["vector"] - wanted).square().sum() + 1e-6 * log_k.square().sum()
    value.backward()
    return value


before = pair(log_k.detach().exp())["vector"]
optimiser.step(loss)
after = pair(log_k.detach().exp())["vector"]
print(f"distance to the wanted mode: {(before - wanted).norm():.3f} -> {(after - wanted).norm():.4f}")
assert (after - wanted).norm() < 0.05 * (before - wanted).norm()

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for mode, name, style in ((before, "equal springs", "--"), (after, "learnt", "-"), (wanted, "wanted", "k.")):
    left.plot(mode, style, label=name)
left.set(xlabel="mass", ylabel="displacement", title="lowest mode")
left.legend()
right.plot(log_k.detach().exp())
right.set(xlabel="spring", ylabel="stiffness", ylim=0, title="learnt stiffnesses")
plt.show()
