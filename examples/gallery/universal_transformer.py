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
the same data, applied six times. Neither adds numbers that are much longer than those it was trained on, as in the paper,
and of these the equilibrium gets fewer bits right, with all three seeds. It stops sooner by itself where a sum has no carry.

*Checked:* the equilibrium against 1000 plain steps, its gradient against theirs, unrolled; on sums of the lengths trained on
nine bits of ten are right, and sums without a carry come to rest sooner than others.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from implicitkit_deq import DEQ, Cell, Pretraining, jacobian_penalty

width, heads, longest, depth, training = 32, 4, 10, 6, 700
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
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(z + x).chunk(3, -1))
        looked = torch.softmax(q @ k.mT / math.sqrt(width // heads), -1) @ v
        h = self.norms[0](z + x + self.out(looked.transpose(1, 2).flatten(2)))
        return self.norms[1](h + self.down(torch.relu(self.up(h))))

    def state_shape(self, tokens, first):
        return (tokens.shape[1], width)


def applied(cell, times, tokens, first):
    z = torch.zeros_like(x := cell.inject(tokens, first)[0])
    for _ in range(times):
        z = cell.update(z, x)
    return z


# %%
# Training: the equilibrium is approached by six steps for four fifths of it, which is cheap, and then solved. In the last
# fifth the learning rate falls to zero: were it constant, rounding would decide how much is forgotten there.


def train(cell, find):
    optimiser = torch.optim.Adam(cell.parameters(), lr=3e-3)
    for step in range(training):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1.0, 5 * (1 - step / training))
        tokens, bits, _ = sums(64, int(torch.randint(2, longest + 1, ())))
        z = find(tokens, first := torch.randint(0, 40, (64,)))
        loss = cross_entropy(cell.head(z).mT, bits) + 0.1 * jacobian_penalty(cell, z.detach(), (tokens, first))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimiser.step()


right = {name: [] for name in ("equilibrium", "six times")}
for seed in seeds:
    for name in right:
        torch.manual_seed(seed)
        cell = Block()
        find = lambda tokens, first, cell=cell: applied(cell, depth, tokens, first)  # noqa: E731
        if name == "equilibrium":
            find = layer = DEQ(cell, solver="anderson", max_steps=30, rtol=1e-3, on_failure="ignore", dtype=torch.float32,
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

cell, (tokens, bits, far), first = layer.cell, sums(400, longest), torch.zeros(400)
with torch.no_grad(), layer.using(rtol=1e-4):
    layer(tokens, first)
taken, solved = layer.solution.steps.double(), layer.solution.converged
print(f"{float(solved.double().mean()):.1%} of 400 sums of ten bits come to rest within 200 steps")
by_carry = {int(c): taken[solved & (far == c)] for c in far.unique() if (solved & (far == c)).sum() > 4}
easy, hard = (float(taken[solved & which].median()) for which in (far == 0, far > 0))
print(f"steps, median: {easy:.0f} of sums without a carry, {hard:.0f} of others")
tokens, bits, first = (t[solved][:8] for t in (tokens, bits, first))
weights = list(cell.double().parameters())
with layer.using(rtol=1e-10, max_steps=1000, on_failure="raise"):
    layer.dtype = torch.float64
    both = layer(tokens, first), applied(cell, 1000, tokens, first)
losses = [cross_entropy(cell.head(z).mT, bits) for z in both]
gradients = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]) for loss in losses]
apart = [float(((a - b).norm() / b.norm()).detach()) for a, b in (both, gradients)]
print(f"the equilibrium and 1000 steps differ by {apart[0]:.0e}, their gradients by {apart[1]:.0e}")
assert max(apart) < 1e-5
assert np.array(list(right.values()))[:, :, :3].min() > 0.9
assert easy < hard and solved.double().mean() > 0.95

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for (name, values), colour in zip(right.items(), ("#0072B2", "#D55E00"), strict=True):
    axes[0].plot(lengths, np.median(values, 0), "o-", color=colour, label=name)
    axes[0].fill_between(lengths, np.min(values, 0), np.max(values, 0), color=colour, alpha=0.2, lw=0)
axes[0].axvline(longest, color="grey", ls=":", label="longest in training")
axes[0].set(xlabel="bits of the numbers", ylabel="share of bits right", title="three seeds")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
low, middle, high = np.array([np.quantile(t, (0.25, 0.5, 0.75)) for t in by_carry.values()]).T
axes[1].plot(by_carry.keys(), middle, "o-", color="#0072B2")
axes[1].fill_between(by_carry.keys(), low, high, color="#0072B2", alpha=0.2, lw=0)
axes[1].set(xlabel="bits that the longest carry goes on", ylabel="steps (quartiles)", title="sums of ten bits")
plt.show()
