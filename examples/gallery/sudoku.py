"""
Sudoku by OptNet: constraints that are learnt
=============================================

Amos & Kolter (2017) teach a quadratic program the rules of 4 x 4 sudoku from solved examples alone:

.. math:: \\min_z \\; \\tfrac{1}{20} |z|^2 - p^\\top z \\quad\\text{subject to}\\quad A z = b(A), \\; z \\ge 0,

``p`` the given digits one-hot (64 numbers), ``z`` the answer, and the matrix ``A`` all that is learnt; ``b = A z_0``
for a positive ``z_0`` so that the program is never infeasible.

*Checked:* with the true rules in ``A`` the program's relaxation solves puzzles that simple propagation solves; the
derivative with respect to ``A`` against differences; after training the loss on new puzzles is far below that of no
rules.
"""

import matplotlib.pyplot as plt
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def rules():
    """Each cell one digit; each row, column and box each digit once: 64 equations in 64 unknowns."""
    z = torch.eye(64).reshape(64, 4, 4, 4)
    boxes = z.reshape(64, 2, 2, 2, 2, 4).sum((2, 4)).reshape(64, 4, 4)
    return torch.cat([part.reshape(64, -1) for part in (z.sum(3), z.sum(2), z.sum(1), boxes)], 1).T


def boards(count):
    """Solved boards: one, with digits, rows and columns in a band, and bands permuted."""
    board = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 0]])
    made = []
    for _ in range(count):
        order = [torch.cat([2 * band + torch.randperm(2) for band in torch.randperm(2)]) for _ in range(2)]
        made.append(torch.randperm(4)[board][order[0]][:, order[1]])
    return torch.nn.functional.one_hot(torch.stack(made), 4).double()


def puzzles(count, given):
    solved = boards(count)
    mask = torch.rand(count, 16).argsort(1).argsort(1) < given
    return (solved * mask.reshape(count, 4, 4, 1)).reshape(count, 64), solved.reshape(count, 64)


def layer(p, A):
    start = torch.full((64,), 0.25)
    program = ik.QuadraticProgram(0.1 * torch.eye(64), -p, A, A @ start, -torch.eye(64), torch.zeros(64))
    return ik.solve(program, rtol=1e-6).value


true = rules()
basis = torch.linalg.svd(true)[2][: int(torch.linalg.matrix_rank(true))]  # 64 equations, but not all independent
p, solved = puzzles(30, given=9)
right = (layer(p, basis).reshape(-1, 16, 4).argmax(2) == solved.reshape(-1, 16, 4).argmax(2)).double().mean()
print(f"independent rules: {len(basis)}, cells right with the true rules: {float(right):.2f}")
assert right > 0.95

small = 0.3 * torch.randn(10, 64)
direction = torch.randn(10, 64)
value = lambda A: (layer(p[:3], A) - solved[:3]).square().mean()  # noqa: E731
slope = (torch.func.grad(value)(small) * direction).sum()
difference = (value(small + 1e-5 * direction) - value(small - 1e-5 * direction)) / 2e-5
print(f"derivative {float(slope):.5f}, by differences {float(difference):.5f}")
assert abs(float(slope - difference)) < 1e-3 * abs(float(difference)) + 1e-6

# %%
# Training from solved examples: forty equations, drawn at random.

A = (torch.randn(40, 64) / 8).requires_grad_()
optimiser = torch.optim.Adam([A], lr=0.02)
new, new_solved = puzzles(60, given=9)
history = []
for _ in range(250):
    p, solved = puzzles(24, given=9)
    loss = (layer(p, A) - solved).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    history.append(float(loss.detach()))
with torch.no_grad():
    z = layer(new, A)
    none = layer(new, torch.zeros(1, 64) + 1.0)
score = lambda z: float((z.reshape(-1, 16, 4).argmax(2) == new_solved.reshape(-1, 16, 4).argmax(2)).double().mean())  # noqa: E731
print(f"new puzzles: loss {float((z - new_solved).square().mean()):.3f}, cells right {score(z):.2f}")
assert history[-1] < 0.6 * history[0] and score(z) > score(none)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
axes[0].plot(history)
axes[0].set(xlabel="training step", ylabel="mean square error", title="learning the rules")
spans = [torch.linalg.svd(M)[2][:40] for M in (basis, A.detach())]
axes[1].plot(torch.linalg.svdvals(spans[0] @ spans[1].T), "o-")
axes[1].set(xlabel="rule", ylabel="cosine", title="angles between learnt and true rules", ylim=(0, 1.05))
plt.show()
