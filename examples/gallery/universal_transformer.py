"""
Adding as deep as it takes: a Universal Transformer at its equilibrium
======================================================================

A Universal Transformer (Dehghani et al. 2019) applies one block again and again, each time adding a signal of the position
and of the step, and learns when to stop. At an equilibrium there is no step to be told of, and nothing to learn about
stopping: the block goes on until nothing changes,

.. math:: z = \\mathrm{LN}(h + W_2\\, \\mathrm{relu}(W_1 h)), \\qquad
          h = \\mathrm{LN}(s + \\mathrm{attention}(s)), \\quad s = z + \\mathrm{token} + \\mathrm{position}.

One of the paper's tasks is addition: here of binary numbers, lowest bits first, with long carries. Positions begin at a
random number, so that all of them are seen in training. Beside it is the same block, with the same weights at the start and
the same data, applied six times. Neither adds numbers that are much longer than those it was trained on, as in the paper;
the equilibrium is no worse, and no better. What it knows by itself is how hard a sum is.

*Checked:* the equilibrium against 300 plain steps, its gradient against theirs, unrolled; on sums of the lengths trained on
nine bits of ten are right, and the longest carry tells the steps that a sum takes.
"""

import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from implicitkit_deq import DEQ, Cell, ForgivenWarning, Pretraining

width, heads, longest, depth, training = 32, 4, 10, 6, 500
lengths, seeds = (4, 7, 10, 14, 20, 30), range(3)


def sums(count, length):
    """Pairs of bits as tokens 0 to 3, the bits of the sum, and for how many bits the longest carry goes on."""
    a, random = torch.rand(count, length) < 0.5, torch.rand(2, count, length)
    b = torch.where(random[0] < 0.7, ~a, random[1] < 0.5)  # unlike bits hand a carry on
    carry, run, bits, far = torch.zeros(count, dtype=torch.bool), torch.zeros(count), [], torch.zeros(count)
    for x, y in zip(a.T, b.T, strict=True):
        bits.append(x ^ y ^ carry)
        carry = (x & y) | (carry & (x ^ y))
        run = torch.where(carry, torch.where(x & y, 1.0, run + 1), 0.0)
        far = torch.maximum(far, run)
    return 2 * a.long() + b.long(), torch.stack(bits, 1).long(), far


class Block(Cell):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, width), nn.Linear(width, 2)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def inject(self, tokens, first):
        place = (first.unsqueeze(1) + torch.arange(tokens.shape[1])).unsqueeze(-1)
        angle = place * 10000 ** -(torch.arange(0, width, 2) / width)
        return (self.embedding(tokens) + torch.cat([angle.sin(), angle.cos()], -1).to(self.head.weight.dtype),)

    def update(self, z, x):
        s = z + x
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(s).chunk(3, -1))
        looked = torch.softmax(q @ k.mT / math.sqrt(width // heads), -1) @ v
        h = self.norms[0](s + self.out(looked.transpose(1, 2).flatten(2)))
        return self.norms[1](h + self.down(torch.relu(self.up(h))))

    def state_shape(self, tokens, first):
        return (tokens.shape[1], width)


def applied(cell, times, tokens, first):
    (x,) = cell.inject(tokens, first)
    z = torch.zeros_like(x)
    for _ in range(times):
        z = cell.update(z, x)
    return z


# %%
# Training: the equilibrium is approached by six steps for four fifths of it, which is cheap, and then solved.


def train(cell, find):
    optimiser = torch.optim.Adam(cell.parameters(), lr=3e-3)
    for _ in range(training):
        tokens, bits, _ = sums(64, int(torch.randint(2, longest + 1, ())))
        loss = cross_entropy(cell.head(find(tokens, torch.randint(0, 40, (64,)))).flatten(0, 1), bits.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimiser.step()


warnings.simplefilter("ignore", ForgivenWarning)
right = {name: [] for name in ("equilibrium", "six times")}
for seed in seeds:
    for name in right:
        torch.manual_seed(seed)
        cell = Block()
        find = lambda tokens, first, cell=cell: applied(cell, depth, tokens, first)  # noqa: E731
        if name == "equilibrium":
            find = layer = DEQ(cell, solver="anderson", max_steps=30, rtol=1e-2, on_failure="ignore", dtype=torch.float32,
                               pretraining=Pretraining(training * 4 // 5, depth), evaluation={"max_steps": 200})  # fmt: skip
        train(cell, find)
        layer.eval()
        torch.manual_seed(100)
        with torch.no_grad():
            tests = [sums(300, n) for n in lengths]
            found = [cell.head(find(tokens, torch.zeros(300))).argmax(-1) for tokens, *_ in tests]
        right[name].append([float((f == bits).float().mean()) for f, (_, bits, _) in zip(found, tests, strict=True)])
        print(f"seed {seed}, {name}: bits right of lengths {lengths}: {[round(r, 2) for r in right[name][-1]]}")

# %%
# The equilibrium and its gradient in double precision, and how many steps each sum takes.

cell, (tokens, bits, _), first = layer.cell, sums(8, longest), torch.zeros(8)
weights = list(cell.double().parameters())
with layer.using(rtol=1e-10, max_steps=300, on_failure="raise"):
    layer.dtype = torch.float64
    both = layer(tokens, first), applied(cell, 300, tokens, first)
gradients = [
    torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(cell.head(z).mT, bits), weights)]) for z in both
]
apart = [float(((a - b).norm() / b.norm()).detach()) for a, b in (both, gradients)]
print(f"the equilibrium and 300 steps differ by {apart[0]:.0e}, their gradients by {apart[1]:.0e}")
assert max(apart) < 1e-5
assert min(np.array(right["equilibrium"])[:, :3].min(), np.array(right["six times"])[:, :3].min()) > 0.9

with torch.no_grad(), layer.using(rtol=1e-4, on_failure="warn"):
    tokens, _, far = sums(400, longest)
    layer(tokens, torch.zeros(400))
taken = layer.solution.steps.double()
by_carry = {int(c): taken[far == c] for c in far.unique() if (far == c).sum() > 4}
trend = float(torch.corrcoef(torch.stack([far.double(), taken]))[0, 1])
print(f"steps of a sum and its longest carry: correlation {trend:.2f}")
assert trend > 0.2

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for (name, values), colour in zip(right.items(), ("#0072B2", "#D55E00"), strict=True):
    axes[0].plot(lengths, np.median(values, 0), "o-", color=colour, label=name)
    axes[0].fill_between(lengths, np.min(values, 0), np.max(values, 0), color=colour, alpha=0.2, lw=0)
axes[0].axvline(longest, color="grey", ls=":", label="longest in training")
axes[0].set(xlabel="bits of the numbers", ylabel="share of bits right", title="three seeds")
axes[0].legend()
axes[1].errorbar(by_carry.keys(), [t.mean() for t in by_carry.values()], [t.std() for t in by_carry.values()], fmt="o-")
axes[1].set(xlabel="bits that the longest carry goes on", ylabel="steps to the equilibrium", title="ten bits each")
plt.show()
